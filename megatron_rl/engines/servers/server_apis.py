# SPDX-License-Identifier: Apache-2.0
"""What the kinds of servers understand: how a request is written, an answer read, new weights loaded."""

from __future__ import annotations

import base64
import json
import os
import shlex
import subprocess
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from megatron_rl.engines.protocol import EngineSpec, Request, Sampled
from megatron_rl.engines.servers.server_client import ServerAnswer, ServerFailure
from megatron_rl.types import KeptSets, UserError

Ask = Callable[..., Any]  # (path, body=None, method="POST") -> JSON; ServerFailure, UserError
_NAME = "policy"
_ROOT = str(Path(__file__).resolve().parents[3])


class ServerApi(Protocol):
    """One kind of server.

    Attributes:
        path: where requests are posted.
        health: where it says that it is well.
    """

    path: str
    health: str

    def make_command(self, directory: Path, port: int) -> list[str]:
        """What starts a server with the model in a directory; UserError where only users start one."""
        ...

    def list_environment(self) -> dict[str, str]:
        """Variables of the server beside the rank's."""
        ...

    def make_body(self, request: Request) -> dict[str, Any]:
        """A request as it is posted; the answer comes as a stream of events."""
        ...

    def read(self, event: Any, answer: ServerAnswer) -> None:
        """Add an event to the answer.

        Raises:
            UserError: it lacks what training needs.
        """

    def load(self, ask: Ask, directory: Path, version: str) -> None:
        """Let the server load the weights of a directory, and forget what it computed with others.

        Raises:
            ServerFailure: it did not.
        """

    def complete(self, ask: Ask, sampled: list[Sampled]) -> list[Sampled]:
        """Add what the streams of finished or interrupted requests do not bring; ServerFailure if it is lost."""
        ...


class VllmServer:
    """vLLM's server with its routes for reinforcement learning, and for tokens in and out (0.32)."""

    path, health = "/inference/v1/generate", "/health"

    def __init__(self, spec: EngineSpec) -> None:
        self._spec, self._version = spec, ""
        self._truncated: dict[int, tuple[str, Request]] = {}  # key -> the server's name for its sets

    def make_command(self, directory: Path, port: int) -> list[str]:
        """The server gets the arguments of the engine in the process, so it samples the same."""
        from megatron_rl.engines.vllm.vllm_arguments import list_engine_arguments

        arguments = list_engine_arguments(self._spec)
        for name in ("load_format", "distributed_executor_backend", "enable_sleep_mode"):
            arguments.pop(name, None)
        arguments |= dict(
            model=str(directory),
            served_model_name=_NAME,
            host="127.0.0.1",
            port=port,
            enable_scale_out=True,
            enable_prompt_tokens_details=True,
            worker_extension_cls="megatron_rl.engines.vllm.vllm_worker.ServedWorker",
            middleware="megatron_rl.engines.servers.server_key.KeyGuard",
        )
        python = self._spec.config.server.python or sys.executable
        return [python, "-m", "vllm.entrypoints.openai.api_server", *_as_flags(arguments)]

    def list_environment(self) -> dict[str, str]:
        """The routes for weights are there in development mode only."""
        from megatron_rl.engines.vllm.vllm_arguments import list_engine_environment

        return list_engine_environment(self._spec) | {
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_PLUGINS": "",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            "VLLM_CONFIGURE_LOGGING": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "TORCHDYNAMO_DISABLE": "1" if self._spec.process.device.type == "cpu" else "0",
            "PYTHONPATH": os.pathsep.join([_ROOT, *filter(None, [os.environ.get("PYTHONPATH")])]),
        }

    def make_body(self, request: Request) -> dict[str, Any]:
        """Nothing of it is text. A request that is sent again has another name: the first one may still run."""
        from megatron_rl.engines.vllm.vllm_truncation import list_extra_args

        sampling, name = request.sampling, uuid.uuid4().hex
        if sampling.is_truncated:
            self._truncated[request.key] = name, request
        return {
            "model": _NAME,
            "token_ids": request.tokens.tolist(),
            "stream": True,
            "stream_options": {"include_usage": True},
            "sampling_params": {
                "temperature": sampling.temperature,
                "max_tokens": sampling.max_tokens,
                "seed": request.seed,
                "stop_token_ids": list(sampling.stop_token_ids),
                "logprobs": 0,
                "ignore_eos": True,
                "detokenize": False,
                "extra_args": list_extra_args(name, request),
            },
        }

    def read(self, event: Any, answer: ServerAnswer) -> None:
        """Tokens, their log-probs, and the version of the weights that made them; last, what was in the cache."""
        check_event(event)
        if not event["choices"]:
            answer.count_cached((event["usage"].get("prompt_tokens_details") or {}).get("cached_tokens"))
            return
        choice = event["choices"][0]
        for span in choice.get("weight_versions") or ():
            if span["version"] != self._version:
                raise ServerFailure(f"a response of weights {span['version']!r} instead of {self._version!r}")
        scored = (choice["logprobs"] or {"content": []})["content"]
        answer.extend(choice["token_ids"], [entry["logprob"] for entry in scored], choice["finish_reason"])

    def load(self, ask: Ask, directory: Path, version: str) -> None:
        """vLLM keeps the prefix cache of older weights unless it is told not to."""
        from megatron_rl.engines.vllm.vllm_arguments import records_kept_sets

        ask("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(directory)}})
        if not ask("/reset_prefix_cache")["success"]:
            raise ServerFailure("the server did not reset its prefix cache: somebody else's requests are running")
        ask("/update_weight_version", {"new_version": version})
        if records_kept_sets(self._spec):
            ask("/collective_rpc", {"method": "record_kept_sets"})
        self._version = version

    def complete(self, ask: Ask, sampled: list[Sampled]) -> list[Sampled]:
        """Ask what the tokens were drawn from."""
        known = [(one, *self._truncated.pop(one.key)) for one in sampled if one.key in self._truncated]
        if not known:
            return sampled
        wanted = [(name, len(request.tokens), len(one.tokens)) for one, name, request in known]
        answer = ask("/collective_rpc", {"method": "take_kept_sets", "args": [wanted]})["results"][0]
        kept = {one.key: read_kept_sets(text) for (one, *_), text in zip(known, answer, strict=True)}
        return [replace(one, kept=kept.get(one.key)) for one in sampled]


def write_kept_sets(kept: KeptSets) -> list[str]:
    """As a server answers: base64 of their ids and counts."""
    return [base64.b64encode(array.astype("<i4").tobytes()).decode() for array in (kept.ids, kept.counts)]


def read_kept_sets(texts: Sequence[str]) -> KeptSets:
    """The inverse of `write_kept_sets`."""
    ids, counts = (np.frombuffer(base64.b64decode(text), "<i4").astype(np.int32) for text in texts)
    return KeptSets(ids, counts)


class OpenAiServer:
    """Any server with `/v1/completions` that returns token ids and log-probs; the user's hook loads the weights."""

    path, health = "/v1/completions", "/v1/models"

    def __init__(self, spec: EngineSpec) -> None:
        self._spec, self._model = spec, ""

    def make_command(self, directory: Path, port: int) -> list[str]:
        """There is none; `config.rollout_checks` asks for endpoints."""
        raise AssertionError("servers of other kinds are started by the user")

    def list_environment(self) -> dict[str, str]:
        """As above."""
        return {}

    def complete(self, ask: Ask, sampled: list[Sampled]) -> list[Sampled]:
        """All has come."""
        return sampled

    def make_body(self, request: Request) -> dict[str, Any]:
        """What is not OpenAI's own is vLLM's and SGLang's."""
        sampling = request.sampling
        return {
            "model": self._model,
            "prompt": request.tokens.tolist(),
            "stream": True,
            "temperature": sampling.temperature,
            "max_tokens": sampling.max_tokens,
            "seed": request.seed,
            "logprobs": 1,
            "stop_token_ids": list(sampling.stop_token_ids),
            "ignore_eos": True,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,  # and no text, for which a server would need a tokenizer
        }

    def read(self, event: Any, answer: ServerAnswer) -> None:
        """The ids are asked for beside the text, which says less."""
        check_event(event)
        if not event["choices"]:  # usage
            return
        choice = event["choices"][0]
        tokens, logprobs = choice.get("token_ids"), (choice.get("logprobs") or {}).get("token_logprobs")
        if choice.get("text") or tokens:
            missing = [name for name, found in (("token_ids", tokens), ("logprobs", logprobs)) if found is None]
            if missing:
                raise UserError(
                    f"the server returns no {' and no '.join(missing)}",
                    source=f"rollout.server.endpoints, {self.path}",
                    expected="token_ids (asked for by return_token_ids) and logprobs.token_logprobs in each choice",
                    hint="vLLM's server has both; text alone cannot be trained on",
                )
        answer.extend(tokens or [], logprobs or [], choice["finish_reason"])

    def load(self, ask: Ask, directory: Path, version: str) -> None:
        """Call the user's hook."""
        self._model = ask("/v1/models", method="GET")["data"][0]["id"]
        hook = (self._spec.config.server.on_update or "").format(directory=directory)
        if hook.startswith(("http://", "https://")):
            ask(hook, {"model_path": str(directory)})
            return
        done = subprocess.run(shlex.split(hook), capture_output=True, text=True, check=False)
        if done.returncode:
            raise ServerFailure(f"{hook} ends with {done.returncode}: {(done.stderr or done.stdout)[-500:]}")


def check_event(event: Any) -> None:
    """An error in the middle of an answer has no other status than its own."""
    if "error" not in event:
        return
    said = json.dumps(event["error"])[:300]
    if not 400 <= int(event["error"].get("code") or 500) < 500:
        raise ServerFailure(f"the server says {said}")
    raise UserError(
        f"the server refuses a request: {said}",
        source="rollout.engine",
        expected="a server that takes it",
        hint="see docs/servers.md: how it must be started",
    )


def _as_flags(arguments: Mapping[str, Any]) -> list[str]:
    """Arguments of a Python call, as on a command line."""
    flags = []
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            flags += [f"--{flag}", str(value)]
    return flags
