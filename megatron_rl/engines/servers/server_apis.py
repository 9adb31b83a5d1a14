# SPDX-License-Identifier: Apache-2.0
"""Protocols of servers: requests, response streams, weight updates."""

from __future__ import annotations

import base64
import json
import os
import shlex
import subprocess
import sys
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from megatron_rl.engines.protocol import EngineSpec, Request, Sampled
from megatron_rl.engines.servers.server_client import ServerAnswer, ServerFailure
from megatron_rl.engines.servers.server_key import KEY_VARIABLE
from megatron_rl.engines.vllm.vllm_engine import list_sampling_arguments
from megatron_rl.engines.vllm.vllm_settings import list_engine_arguments, list_engine_environment, records_kept_sets
from megatron_rl.types import KeptSets, UserError

Ask = Callable[..., Any]  # (path, body=None, method="POST") -> JSON; ServerFailure, UserError
_NAME = "policy"
_ROOT = str(Path(__file__).resolve().parents[3])

# Same as `-m sglang.launch_server`, which accepts its key only as an argument: it is added inside the process.
_START_SGLANG = (
    "import os, runpy, sys; "
    f"sys.argv += ['--api-key', os.environ['{KEY_VARIABLE}']]; "
    "runpy.run_module('sglang.launch_server', run_name='__main__', alter_sys=True)"
)
_SGLANG_ON_CPU = {
    "--device": "cpu",
    "--attention-backend": "torch_native",
    "--sampling-backend": "pytorch",
    "--grammar-backend": "none",
    "--mem-fraction-static": "0.1",
}
_IDLE_SECONDS = 60
_ROOM_FOR_TIES = 2  # kernels keep all tokens tied at the boundary; a larger set aborts the request


class ServerApi:
    """The HTTP protocol of one kind of server: requests go to `path`, health checks to `health`."""

    path: str
    health: str

    def __init__(self, spec: EngineSpec) -> None:
        self._spec, self._version = spec, ""

    def make_command(self, directory: Path, port: int) -> list[str]:
        """Return the command that starts a server of the model in `directory`."""
        raise AssertionError("servers of other kinds are started by the user")

    def list_environment(self) -> dict[str, str]:
        """Return the server's environment variables in addition to the rank's."""
        return {}

    def make_body(self, request: Request) -> dict[str, Any]:
        """Build the JSON body of a request whose answer is a stream of events."""
        raise NotImplementedError

    def read(self, event: Any, answer: ServerAnswer) -> None:
        """Append an event to the answer (ServerFailure: a failure or other weights; UserError: data is missing)."""
        raise NotImplementedError

    def load(self, ask: Ask, directory: Path, version: str) -> None:
        """Make the server load the files of policy version `version` and drop older caches (else ServerFailure)."""
        raise NotImplementedError

    def complete(self, ask: Ask, sampled: list[Sampled]) -> list[Sampled]:
        """Add data that needs another call to the server, such as vLLM's kept sets; ServerFailure if the call fails."""
        return sampled


class VllmServer(ServerApi):
    """The protocol of vLLM's server (0.32): its endpoints for token ids and for RL."""

    path, health = "/inference/v1/generate", "/health"

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(spec)
        self._truncated: dict[int, tuple[str, Request]] = {}  # key -> (name of its kept sets in the server, request)

    def make_command(self, directory: Path, port: int) -> list[str]:
        """Build the command that starts vLLM with the in-process engine's arguments, for equal samples."""
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
        """Return vLLM's variables; development mode enables the routes that load weights."""
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
        """Build the JSON body of a request; its sets get a new name, as an earlier attempt may still run."""
        name = uuid.uuid4().hex
        if request.sampling.is_truncated:
            self._truncated[request.key] = name, request
        return {
            "model": _NAME,
            "token_ids": request.tokens.tolist(),
            "stream": True,
            "stream_options": {"include_usage": True},
            "sampling_params": list_sampling_arguments(name, request),
        }

    def read(self, event: Any, answer: ServerAnswer) -> None:
        """Append an event's tokens and log-probs to `answer`; ServerFailure if from another policy version."""
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
        """Reload weights, and reset the prefix cache, which vLLM would keep."""
        ask("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(directory)}})
        if not ask("/reset_prefix_cache")["success"]:
            raise ServerFailure("the server did not reset its prefix cache: somebody else's requests are running")
        ask("/update_weight_version", {"new_version": version})
        if records_kept_sets(self._spec):
            ask("/collective_rpc", {"method": "record_kept_sets"})
        self._version = version

    def complete(self, ask: Ask, sampled: list[Sampled]) -> list[Sampled]:
        """Fetch the token sets that truncated sampling drew from (kept sets), and add them to the responses."""
        known = [(one, *self._truncated.pop(one.key)) for one in sampled if one.key in self._truncated]
        if not known:
            return sampled
        wanted = [(name, len(request.tokens), len(one.tokens)) for one, name, request in known]
        answer = ask("/collective_rpc", {"method": "take_kept_sets", "args": [wanted]})["results"][0]
        arrays = [[np.frombuffer(base64.b64decode(text), "<i4").astype(np.int32) for text in texts] for texts in answer]
        kept = {one.key: KeptSets(*ids_and_counts) for (one, *_), ids_and_counts in zip(known, arrays, strict=True)}
        return [replace(one, kept=kept.get(one.key)) for one in sampled]


class OpenAiServer(ServerApi):
    """The protocol of a server whose `/v1/completions` returns token ids and log-probs; a user's hook loads weights."""

    path, health = "/v1/completions", "/v1/models"

    _model = ""

    def make_body(self, request: Request) -> dict[str, Any]:
        """Build a request with the extensions by which vLLM and SGLang return token ids."""
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
            "return_tokens_as_token_ids": True,  # instead of text, for which a server needs a tokenizer
        }

    def read(self, event: Any, answer: ServerAnswer) -> None:
        """Append an event's token ids and log-probs; UserError if it has text only."""
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
        """Run the user's hook `rollout.server.on_update`, a URL or a command, by which the server loads the weights."""
        self._model = ask("/v1/models", method="GET")["data"][0]["id"]
        hook = (self._spec.config.server.on_update or "").format(directory=directory)
        if hook.startswith(("http://", "https://")):
            ask(hook, {"model_path": str(directory)})
            return
        done = subprocess.run(shlex.split(hook), capture_output=True, text=True, check=False)
        if done.returncode:
            raise ServerFailure(f"{hook} ends with {done.returncode}: {(done.stderr or done.stdout)[-500:]}")


class SglangServer(ServerApi):
    """The protocol of SGLang; on a CPU, seeds have no effect."""

    path, health = "/generate", "/health"

    def make_command(self, directory: Path, port: int) -> list[str]:
        """Build the command that starts SGLang with the interpreter `rollout.server.python`."""
        spec, config = self._spec, self._spec.config
        assert config.server.python is not None
        seed = str(spec.seed % (1 << 32))  # NumPy's global seed has 32 bits
        longest = spec.max_prompt_length + spec.max_response_length
        command = [config.server.python, "-W", "ignore", "-c", _START_SGLANG, "--model-path", str(directory)]
        command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", spec.dtype, "--skip-tokenizer-init"]
        command += ["--tp-size", str(config.tensor_model_parallel_size), "--context-length", str(longest)]
        command += ["--max-running-requests", str(config.max_num_seqs), "--random-seed", seed]
        command += ["--log-level", "warning", "--skip-server-warmup", "--incremental-streaming-output"]
        command += ["--sampling-mask-max-tokens", str(_ROOM_FOR_TIES * config.max_kept_tokens)]
        if spec.process.device.type == "cpu":
            tokens = str(longest * (config.max_num_seqs + 1))
            command += ["--disable-cuda-graph", "--disable-overlap-schedule", "--max-total-tokens", tokens]
            return [*command, *chain.from_iterable(_SGLANG_ON_CPU.items())]
        return [*command, "--mem-fraction-static", str(config.gpu_memory_utilization)]

    def list_environment(self) -> dict[str, str]:
        """Return variables that, on a CPU, give all cores to each TP rank: else ranks must not outnumber NUMA nodes."""
        if self._spec.process.device.type != "cpu":
            return {}
        cores = "|".join([f"0-{(os.cpu_count() or 1) - 1}"] * self._spec.config.tensor_model_parallel_size)
        return {"SGLANG_USE_CPU_ENGINE": "1", "SGLANG_CPU_OMP_THREADS_BIND": cores}

    def make_body(self, request: Request) -> dict[str, Any]:
        """Build the JSON body of a request.

        `ignore_eos` is set only without stop tokens, as it disables all of them. SGLang returns the sets that tokens
        are drawn from only if `top_k` limits their size.
        """
        sampling = request.sampling
        limits: dict[str, Any] = {}
        if sampling.is_truncated:
            top_k = min(sampling.top_k, sampling.max_kept_tokens) if sampling.top_k > 0 else sampling.max_kept_tokens
            limits = {"top_p": sampling.top_p, "top_k": top_k, "min_p": sampling.min_p}
        return {
            "input_ids": request.tokens.tolist(),
            "stream": True,
            "return_logprob": True,
            "return_sampling_mask": sampling.is_truncated,
            "sampling_params": limits
            | {
                "temperature": sampling.temperature,
                "max_new_tokens": sampling.max_tokens,
                "sampling_seed": request.seed & 0x7FFFFFFF,
                "stop_token_ids": list(sampling.stop_token_ids),
                "ignore_eos": not sampling.stop_token_ids,
            },
        }

    def read(self, event: Any, answer: ServerAnswer) -> None:
        """Append an event's tokens that `answer` lacks; ServerFailure for an abort or another policy version."""
        check_event(event)
        meta, reason = event["meta_info"], event["meta_info"]["finish_reason"]
        if meta["weight_version"] != self._version:
            raise ServerFailure(f"a response of weights {meta['weight_version']!r} instead of {self._version!r}")
        if reason is not None and reason["type"] == "abort":
            raise ServerFailure(f"the server gave a request up: {reason}")
        answer.count_cached(meta.get("cached_tokens"))
        new = meta["completion_tokens"] - len(answer.tokens)
        tokens, logprobs, kept = [], [], []
        if new and answer.request.sampling.is_truncated:  # `output_token_logprobs` ignore truncation
            logprobs, kept = meta["output_token_sampling_logprobs"][-new:], meta["output_token_sampling_mask"][-new:]
        elif new:
            logprobs = [entry[0] for entry in meta["output_token_logprobs"][-new:]]
        if new:
            tokens = event["output_ids"][-new:]
        answer.extend(tokens, logprobs, reason and reason["type"], kept)

    def load(self, ask: Ask, directory: Path, version: str) -> None:
        """Wait for running requests, flush the prefix cache, load weights."""
        ask(f"/flush_cache?timeout={_IDLE_SECONDS}")  # waits for health checks and closed connections
        body = {"model_path": str(directory), "weight_version": version, "flush_cache": True}
        answer = ask("/update_weights_from_disk", body)
        if not answer["success"]:
            raise ServerFailure(f"the server did not load its weights: {answer['message']}")
        self._version = version


def check_event(event: Any) -> None:
    """Raise the error in a streamed event, sent after the HTTP status: ServerFailure (transient) or UserError."""
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
    flags = []
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            flags += [f"--{flag}", str(value)]
    return flags
