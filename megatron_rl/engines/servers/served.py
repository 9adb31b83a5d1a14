# SPDX-License-Identifier: Apache-2.0
"""Engines that are HTTP servers, updated from weight files.

A failed server is restarted (or awaited, if the user started it), loads the current weights, and gets unfinished
requests again: equal seeds, equal samples. Repeated failures without a response end the run. An engine's first rank
calls the server and broadcasts results.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import shutil
import socket
import tempfile
import time
import uuid
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import torch
from safetensors.torch import save_file

from megatron_rl.engines.protocol import EngineSpec, EngineWeights, Probed, Request, Sampled, SamplingConfig
from megatron_rl.engines.servers.server_apis import OpenAiServer, ServerApi, SglangServer, VllmServer
from megatron_rl.engines.servers.server_client import ServerClient, ServerFailure, ServerProcess
from megatron_rl.engines.servers.server_key import KEY_VARIABLE
from megatron_rl.parallel.collectives import align_group_names, make_group, share_object
from megatron_rl.types import UserError
from megatron_rl.weights.rollout_layout import huggingface_placements
from megatron_rl.weights.shard_box import ShardBox, box_shape

T = TypeVar("T")
_STEP_SECONDS = 0.05  # longest wait of a step for finished responses
_POLL_SECONDS = 0.2
_MOST_FAILURES = 3  # in a row
_SILENT_SECONDS = 600.0  # unless rollout.silent_seconds says so
_PROBE_PROMPT, _PROBE_RESPONSE = 64, 8  # tokens; the prompt fills whole blocks of the prefix cache
_IS_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".gguf")
_OWN = "megatron_rl_servers_"  # prefix of temporary directories
_APIS: dict[str, type[ServerApi]] = {"vllm_server": VllmServer, "openai": OpenAiServer, "sglang": SglangServer}
_log = logging.getLogger(__name__)


class ServedEngine(EngineWeights):
    """One rank of an engine that is a server; `params` are its share of the HF tensors, written to files."""

    def __init__(self, spec: EngineSpec) -> None:
        self._spec, self._width, rank = spec, spec.config.tensor_model_parallel_size, spec.process.rank
        self._place, dtype = spec.find_place(rank), getattr(torch, spec.dtype)
        self.params = {
            box.param: torch.zeros(box_shape(box.local_box), dtype=dtype, device=spec.process.device)
            for box in self.placements(rank)
        }
        if not spec.config.server.endpoints:
            _check_nodes(spec)
            _check_device(spec)
        self._first, index = rank - self._place, (rank - (spec.ranks or range(rank + 1)).start) // self._width
        if len(spec.ranks or range(spec.process.world_size)) == spec.process.world_size:
            align_group_names()  # otherwise done by all ranks before engines are built
        self._group = make_group(range(self._first, self._first + self._width), None) if self._width > 1 else None
        self._running: set[int] = set()  # keys of requests
        self._directory = self._share(partial(_find_directory, spec, index))
        self._server = Server(spec, self._directory, index) if rank == self._first else None
        self._close = weakref.finalize(self, _close, self._server, self._directory)

    def _share(self, action: Callable[[], T]) -> T:
        """Run an action on the engine's first rank; return its result, or raise its error, on all its ranks."""
        outcome: Any = None
        if self._spec.process.rank == self._first:
            try:
                outcome = action(), None
            except Exception as error:
                outcome = None, error
        if self._group is not None:
            outcome = share_object(outcome, self._group, self._first)
        result, error = outcome
        if error is not None:
            raise error
        return result

    def _tell(self, do: Callable[[Server], T]) -> T:
        return self._share(lambda: do(cast(Server, self._server)))

    def shard_key(self, rank: int) -> int:
        """Return an identifier of a rank's placement table, equal for ranks with equal tables."""
        return self._spec.find_place(rank)

    def placements(self, rank: int) -> Sequence[ShardBox]:
        """Return the placement table (the boxes of HF tensors) of any rank of the job."""
        return huggingface_placements(self._spec.shape)[self._spec.find_place(rank) :: self._width]

    def end_weight_update(self) -> None:
        """Write the tensors to files and make the server load them; UserError after too many failures."""
        assert not self._running, "weights change between responses only"
        self.write(self._directory)
        if self._group is not None:
            self._group.barrier().wait()
        self._tell(Server.load)

    def write(self, directory: Path) -> None:
        """Write this rank's file in HF format; the first rank adds index, config and tokenizer."""
        directory.mkdir(parents=True, exist_ok=True)
        name = _name_file(self._place, self._width)
        partial = directory / f"{name}.partial"
        save_file({name: tensor.cpu() for name, tensor in self.params.items()}, partial, metadata={"format": "pt"})
        os.replace(partial, directory / name)
        if self._place == 0:
            for path in sorted(Path(self._spec.model_path).iterdir()):
                if path.is_file() and not path.name.endswith(_IS_WEIGHTS):
                    shutil.copyfile(path, directory / path.name)
            config = directory / "config.json"
            described = json.loads(config.read_bytes()) if config.is_file() else {}
            if described.pop("quantization_config", None):  # weights were decoded when they were read
                config.write_text(json.dumps(described, indent=2))
            boxes = enumerate(huggingface_placements(self._spec.shape))  # distributed as in `placements`
            files = {box.param: _name_file(number % self._width, self._width) for number, box in boxes}
            index = {"metadata": {}, "weight_map": files}
            (directory / "model.safetensors.index.json").write_text(json.dumps(index))

    def probe(self) -> Probed | None:
        """Continue a fixed prompt, so that the trainer can verify the weights; `None` on all but the first rank."""
        probed = self._tell(Server.probe)
        return probed if self._server is not None else None

    def add(self, requests: Sequence[Request]) -> None:
        """Send requests."""
        self._running |= {request.key for request in requests}
        self._tell(lambda server: server.add(requests))

    def step(self) -> list[Sampled]:
        """Return responses that finish within a short wait."""
        finished = self._tell(Server.step)
        self._running -= {one.key for one in finished}
        return finished

    def interrupt(self, keys: Sequence[int]) -> list[Sampled]:
        """Close the connections of requests, which ends their generation; return partial responses."""
        known = [key for key in keys if key in self._running]
        self._running -= {*known}
        return self._tell(lambda server: server.interrupt(known)) if known else []

    def has_requests(self) -> bool:
        """Return whether any request is unfinished."""
        return bool(self._running)

    def tokens_in_flight(self) -> int:
        """Count received tokens of unfinished responses on the first rank; return 0 on others."""
        return 0 if self._server is None else self._server.client.count_tokens()

    def close(self) -> None:
        """Stop the server if started here."""
        self._close()


class Server:
    """A server's process and connections, on the engine's first rank."""

    def __init__(self, spec: EngineSpec, directory: Path, index: int) -> None:
        self._spec, self._directory, self._config = spec, directory, spec.config.server
        self._api = _APIS[spec.config.engine](spec)
        self._silent_seconds = spec.config.silent_seconds or _SILENT_SECONDS
        # The user's key, or a new one for a server started here.
        key = os.environ.get(KEY_VARIABLE) or (None if self._config.endpoints else secrets.token_urlsafe(32))
        self.client = ServerClient(self._silent_seconds, spec.stop, key)
        self._url = self._config.endpoints[index].rstrip("/") if self._config.endpoints else ""
        self._process: ServerProcess | None = None
        self._is_open, self._failures = False, 0
        self._name, self._updates = uuid.uuid4().hex, 0  # unique across runs that share a server
        self._running: dict[int, Request] = {}

    @property
    def title(self) -> str:
        """Name of the server in messages."""
        return self._url or f"the server of {self._directory}"

    def load(self) -> None:
        """Make the server load the weight files; the first call starts the server."""
        self._updates += 1
        self._try(self._load if self._is_open else lambda: None)  # opening the server loads them

    def add(self, requests: Sequence[Request]) -> None:
        """Send requests."""
        for request in requests:
            self._running[request.key] = request
            self.client.submit(self._url + self._api.path, self._api.make_body(request), request, self._api.read)

    def step(self) -> list[Sampled]:
        """Return responses that finish within a short wait."""
        finished = self._try(lambda: self._api.complete(self._ask, self.client.take(_STEP_SECONDS)))
        for one in finished:
            self._running.pop(one.key)
            self._failures = 0
        return finished

    def interrupt(self, keys: Sequence[int]) -> list[Sampled]:
        """Cancel requests; return partial responses."""
        for key in keys:
            self._running.pop(key)
        partial = [answer.to_sampled() for answer in self.client.cancel(keys)]
        try:
            return self._api.complete(self._ask, partial)
        except ServerFailure as failure:
            self._fail(failure)
            return [Sampled(one.key, one.tokens[:0], one.logprobs[:0], "interrupted") for one in partial]

    def probe(self) -> Probed:
        """Continue a fixed prompt greedily and at the rollout temperature.

        The prompt fills prefix-cache blocks: if they survive a weight update, the next probe reveals it.
        """
        assert not self._running, "the answers would mix"
        spec = self._spec
        length = min(_PROBE_PROMPT, spec.max_prompt_length + spec.max_response_length - _PROBE_RESPONSE)
        prompt = np.random.default_rng(0).integers(0, spec.shape.vocab_size, max(length, 1), dtype=np.int32)
        samplings = [SamplingConfig(t, _PROBE_RESPONSE, ()) for t in (0.0, spec.config.temperature)]
        requests = [Request(key, prompt, 1, sampling) for key, sampling in enumerate(samplings)]
        self.add(requests)
        found: dict[int, Sampled] = {}
        while self._running:
            found |= {one.key: one for one in self.step()}
        return [(request, found[request.key]) for request in requests]

    def _try(self, action: Callable[[], T]) -> T:
        """Run an action; after a ServerFailure, reopen the server and repeat (UserError after too many)."""
        while True:
            try:
                if not self._is_open:
                    self._open()
                if self._process is not None and self._process.has_ended:
                    raise ServerFailure("the server has ended")
                return action()
            except ServerFailure as failure:
                self._fail(failure)

    def _fail(self, failure: ServerFailure) -> None:
        self._failures += 1
        said = "" if self._process is None else f"\n{self._process.read_log()}"
        if self._failures > _MOST_FAILURES:
            raise UserError(
                f"a server failed {self._failures} times without a response between: {failure}{said}",
                source=self.title,
                expected=f"at most {_MOST_FAILURES} failures in a row",
                hint="its last words are above; rollout.server.directory keeps all of them"
                if self._process is not None
                else "read the log of the server: this run does not start it",
            )
        _log.warning("%s: %s; attempt %d of %d", self.title, failure, self._failures, _MOST_FAILURES)
        self.client.cancel()
        self._is_open = False

    def _open(self) -> None:
        if not self._config.endpoints:
            self._start()
        deadline = time.monotonic() + self._silent_seconds
        while True:
            with contextlib.suppress(ServerFailure, UserError):
                self._ask(self._api.health, method="GET")
                break
            if self._process is not None and self._process.has_ended:
                raise ServerFailure("the server ended before it was ready")
            if time.monotonic() > deadline:
                raise ServerFailure(f"no answer within {self._silent_seconds} seconds")
            time.sleep(_POLL_SECONDS)
        self._load()
        self._is_open = True
        requests, self._running = list(self._running.values()), {}
        self.add(requests)

    def _start(self) -> None:
        if self._process is not None:
            self._process.end()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._url = f"http://127.0.0.1:{port}"
        self._process = ServerProcess(
            self._api.make_command(self._directory, port),
            self._api.list_environment() | _list_devices(self._spec) | {KEY_VARIABLE: self.client.key or ""},
            self._directory.with_suffix(".log"),
        )

    def _load(self) -> None:
        self._api.load(self._ask, self._directory, f"{self._name}-{self._updates}")

    def _ask(self, path: str, body: Any = None, method: str = "POST") -> Any:
        url = path if path.startswith(("http://", "https://")) else self._url + path
        return self.client.ask(url, body, method=method)

    def end(self) -> None:
        """Close connections; stop the server if started here."""
        self.client.close()
        if self._process is not None:
            self._process.end()


def _name_file(place: int, width: int) -> str:
    return f"model-{place + 1:05d}-of-{width:05d}.safetensors"


def _close(server: Server | None, directory: Path) -> None:
    if server is not None:
        server.end()
        if directory.parent.name.startswith(_OWN):
            shutil.rmtree(directory.parent, ignore_errors=True)


def _check_nodes(spec: EngineSpec) -> None:
    """Refuse engines that span nodes, since a server reads weight files of all ranks of its engine."""
    ranks, width = spec.ranks or range(spec.process.world_size), spec.config.tensor_model_parallel_size
    per_node = spec.process.ranks_per_node
    for first in ranks[::width]:
        if first // per_node != (first + width - 1) // per_node:
            raise UserError(
                f"ranks {first} to {first + width - 1} are one engine on two nodes",
                source="rollout.tensor_model_parallel_size and placement.rollout",
                expected="a server for each engine, on one node",
                hint=f"set rollout.tensor_model_parallel_size to a divisor of {per_node}, or rollout.server.endpoints",
            )


def _check_device(spec: EngineSpec) -> None:
    """Refuse servers on the actor's GPUs, since servers keep their memory during training."""
    ranks = set(spec.ranks or range(spec.process.world_size))
    trains = spec.model is not None and ranks & {*spec.model.layout.ranks}
    if spec.process.device.type == "cuda" and trains:
        raise UserError(
            "servers on the GPUs of the actor",
            source="rollout.engine and placement",
            expected="engines on ranks of their own, or rollout.server.endpoints",
            hint="set placement.actor and placement.rollout, or rollout.engine=vllm, which shares a GPU with the actor",
        )


def _find_directory(spec: EngineSpec, index: int) -> Path:
    given, memory = spec.config.server.directory, Path("/dev/shm")
    if given is None:
        parent = Path(tempfile.mkdtemp(prefix=_OWN, dir=memory if memory.is_dir() else None))
    else:
        parent = Path(given).absolute()
    directory = parent / f"engine_{index}"
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def _list_devices(spec: EngineSpec) -> dict[str, str]:
    if spec.process.device.type != "cuda":
        return {}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = visible.split(",") if visible else [str(i) for i in range(spec.process.ranks_per_node)]
    first = spec.process.local_rank
    return {"CUDA_VISIBLE_DEVICES": ",".join(devices[first : first + spec.config.tensor_model_parallel_size])}
