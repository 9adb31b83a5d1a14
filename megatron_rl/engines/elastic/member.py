# SPDX-License-Identifier: Apache-2.0
"""An engine outside the job: it finds a run, fetches weights, answers requests, and joins again after a loss.

The ranks of a tensor parallel engine are a job of their own. The first one receives messages and shares them, all make
the same calls of the engine in the same order, and each fetches its own pieces of the weights.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import pickle
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megatron_rl.engines.build import BuiltEngine, build_engine, import_library
from megatron_rl.engines.elastic.link import FAILURES, Address, Link, as_bytes, describe_failure
from megatron_rl.engines.protocol import Sampled
from megatron_rl.parallel.collectives import Process, gather_objects, share_object, world
from megatron_rl.types import UserError
from megatron_rl.weights.shard_box import box_shape, box_slices, box_volume

_POLL_SECONDS = 0.2  # between looks for a signal
_SEARCH_SECONDS = 0.5  # between attempts to join
_CONNECT_SECONDS = 10.0
_BEATS = 4  # heartbeats within the time after which silence is a loss
_log = logging.getLogger(__name__)


class EngineProcess:
    """One rank of an engine outside the job.

    Args:
        directory: run directory, with the address of the front.
        patience_seconds: how long a run is searched, at the start and after the end of a connection.
    """

    def __init__(self, directory: Path, process: Process, patience_seconds: float) -> None:
        self._directory, self._process, self._patience = directory, process, patience_seconds
        self._title = f"{os.getpid()} ({socket.gethostname()})"
        self._link: Link | None = None  # of the first rank
        self._engine: BuiltEngine | None = None
        self._dtype, self._digest = torch.float32, ""  # of the weights, and of the inputs that it was built from
        self._running = set[int]()  # keys of requests
        self._progress = 0  # steps of the engine and tensors fetched
        self._silent_seconds = _CONNECT_SECONDS
        self._leaving = threading.Event()

    @property
    def _is_first(self) -> bool:
        return self._process.rank == 0

    def run(self) -> None:
        """Serve until the run has ended or this process must leave; collective over the engine's ranks.

        Raises:
            UserError: no run was found.
            Exception: the engine failed.
        """
        for number in (signal.SIGUSR1, signal.SIGTERM):
            signal.signal(number, lambda *_: self._leaving.set())
        if self._is_first:
            threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()
        try:
            while self._share(self._next_messages):
                pass
        except Exception as error:
            if self._link is not None:
                with contextlib.suppress(*FAILURES):
                    self._link.send("failed", f"{type(error).__name__}: {error}")
            raise
        finally:
            if self._link is not None:
                self._link.close()

    def _share(self, take: Callable[[], list[tuple[Any, ...]]]) -> bool:
        """Act on the next messages, then step the engine; return False at the end."""
        messages = take() if self._is_first else None
        if self._process.world_size > 1:
            messages = share_object(messages, world())
        for kind, *what in messages or ():
            if kind == "end":
                return False
            self._act(kind, *what)
        if self._engine is not None and self._engine.requests.has_requests():
            sampled = self._engine.requests.step()
            self._progress += 1
            self._deliver(sampled)
        return True

    # The first rank's connection.

    def _next_messages(self) -> list[tuple[Any, ...]]:
        """Return messages of the front: those that have come, or if the engine is idle the next ones."""
        is_idle = self._engine is None or not self._engine.requests.has_requests()
        messages: list[tuple[Any, ...]] = []
        try:
            if self._link is None:
                return self._join()
            if self._leaving.is_set():
                return self._leave(self._link)
            while self._link.has_message(_POLL_SECONDS if is_idle and not messages else 0.0):
                messages.append(self._link.receive())
            return messages
        except FAILURES as failure:
            if messages:
                return messages  # the next read fails again
            _log.warning("the run is lost (%s); joining again", describe_failure(failure))
            self._drop_link()
            return [("forget",)]

    def _join(self) -> list[tuple[Any, ...]]:
        """Connect to the run; return its first message."""
        deadline = time.monotonic() + self._patience
        while not self._leaving.is_set():
            with contextlib.suppress(ValueError, TypeError, *FAILURES):
                link = Address.read(self._directory).connect(_CONNECT_SECONDS)
                link.send("join", self._title)
                message = link.receive()
                link.limit_silence(0)  # the run may be silent while it trains
                self._silent_seconds, self._link = message[1], link
                return [message]
            if time.monotonic() > deadline:
                raise UserError(
                    f"no run answered for {self._patience:.0f} seconds",
                    source=str(self._directory),
                    expected="trainer.run_dir of a run with schedule.elastic=true, on a file system that both see",
                    hint="start the run, or check that this host reaches the one in engines/front.json",
                )
            self._leaving.wait(_SEARCH_SECONDS)
        return [("end",)]

    def _leave(self, link: Link) -> list[tuple[Any, ...]]:
        """Give the requests back, and wait until the front has taken note."""
        link.limit_silence(self._silent_seconds)
        with contextlib.suppress(*FAILURES):
            link.send("leaves")
            while link.receive()[0] != "end":
                pass
        _log.info("left the run")
        return [("end",)]

    def _drop_link(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.close()

    def _answer(self, kind: str, what: Any) -> None:
        if self._link is None or not what:
            return
        with contextlib.suppress(*FAILURES):  # seen by the next read
            self._link.send(kind, what)

    def _beat(self) -> None:
        while True:
            link, engine = self._link, self._engine
            with contextlib.suppress(*FAILURES):
                if link is not None:
                    num_tokens = 0 if engine is None else engine.requests.tokens_in_flight()
                    link.send("beat", num_tokens, self._progress)
            time.sleep(min(self._silent_seconds / _BEATS, 1.0))

    # Messages, on every rank.

    def _act(self, kind: str, *what: Any) -> None:
        if kind == "spec":
            self._build(*what)
        elif kind == "forget":
            self._forget()
        else:
            assert self._engine is not None, "the first message brings the engine's inputs"
            if kind == "add":
                self._engine.requests.add(what[0])
                self._running |= {request.key for request in what[0]}
            elif kind == "interrupt":
                self._deliver(self._engine.requests.interrupt(what[0]))
            else:
                self._load(what[0])

    def _deliver(self, sampled: Sequence[Sampled]) -> None:
        self._running -= {one.key for one in sampled}
        self._answer("sampled", sampled)

    def _build(self, silent_seconds: float, digest: str, packed: bytes) -> None:
        """Build the engine, unless it was built from equal inputs."""
        if digest != self._digest:
            if self._engine is not None:
                raise RuntimeError("the run has come back with other settings: this engine must be started again")
            spec = replace(pickle.loads(packed), process=self._process)
            if (size := spec.config.tensor_model_parallel_size) != self._process.world_size:
                raise UserError(
                    f"an engine of {self._process.world_size} ranks",
                    source="launch/engine.sh",
                    expected=f"{size}, the run's rollout.tensor_model_parallel_size",
                    hint=f"TP={size} bash launch/engine.sh {self._directory}",
                )
            import_library(spec.config.engine, self._process.device)
            self._engine, self._dtype, self._digest = build_engine(spec), getattr(torch, spec.dtype), digest
        self._answer("built", True)

    def _forget(self) -> None:
        """Drop the requests of a run that is lost."""
        if self._engine is not None and self._running:
            self._engine.requests.interrupt(sorted(self._running))
        self._running.clear()

    @torch.no_grad()
    def _load(self, version: int) -> None:
        """Fetch a version of the weights, unless the front has begun to write the next, which it will announce."""
        assert self._engine is not None
        self._engine.weights.begin_weight_update()
        outcome = "failed"
        with contextlib.suppress(ValueError, *FAILURES):
            outcome = "loaded" if self._fetch(self._engine, version) else "outdated"
        outcomes = gather_objects(outcome, world()) if self._process.world_size > 1 else [outcome]
        if "failed" in outcomes:
            self._drop_link()
        elif "outdated" not in outcomes:
            self._engine.weights.end_weight_update()
            self._answer("loaded", version)

    def _fetch(self, engine: BuiltEngine, version: int) -> bool:
        """Write a version into the engine's parameters; return False if it is outdated.

        Raises:
            RuntimeError: the parameters do not hold the bytes that the front has.
        """
        params, dtype, digest = engine.weights.params, self._dtype, hashlib.blake2b()
        boxes = [box for box in engine.weights.placements(self._process.rank) if box_volume(box.hf_box)]
        link = Address.read(self._directory).connect(self._silent_seconds)
        try:
            link.send("fetch", version, [(box.hf_name, box.hf_box) for box in boxes])
            for box in boxes:
                if not link.receive()[0]:
                    return False
                piece, target = torch.empty(box_shape(box.hf_box), dtype=dtype), params[box.param]
                link.receive_into(piece)
                target[box_slices(box.local_box)].copy_(piece)
                digest.update(as_bytes(target[box_slices(box.local_box)].to("cpu", dtype).contiguous()))
                self._progress += 1
            if link.receive()[0] != digest.digest():
                raise RuntimeError(f"version {version} of the weights did not arrive whole")
        finally:
            link.close()
        return True
