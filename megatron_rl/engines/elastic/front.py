# SPDX-License-Identifier: Apache-2.0
"""The front of elastic engines: an engine of the job that hands its requests to engines outside it, its members.

No collective connects a member with the job, so a member may be lost at any moment: its requests are repeated by the
others with equal seeds, and no answer of a lost member is taken. Members fetch weights from the front, which keeps the
tensors of its last update; a member that joins later gets those.

Threads receive; all decisions are made by the thread of the program, in `step`, `interrupt` and `end_weight_update`.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import pickle
import queue
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_rl.config.schema import TrainerConfig
from megatron_rl.engines.elastic.link import ADDRESS, FAILURES, Address, Link, as_bytes, describe_failure
from megatron_rl.engines.protocol import EngineSpec, EngineWeights, Request, Sampled
from megatron_rl.types import UserError
from megatron_rl.weights.rollout_layout import huggingface_placements
from megatron_rl.weights.shard_box import ShardBox, box_shape, box_slices

_STEP_SECONDS = 0.05  # longest wait of a step for answers
_REMINDER_SECONDS = 60.0  # between log lines about the absence of members
_SILENT_SECONDS = 15.0  # unless rollout.silent_seconds says so
_LIST_SECONDS = 2.0  # for an answer of the front to the status page
_log = logging.getLogger(__name__)


def share_nothing(placements: Sequence[ShardBox]) -> Mapping[str, torch.Tensor]:
    """Return no tensors: a member has no memory in common with the actor."""
    return {}


class Member:
    """An engine outside of the job, as the front sees it."""

    def __init__(self, title: str, host: str, link: Link) -> None:
        self.title, self.host, self.link = f"engine {title} on {host}", host, link
        self.running: dict[int, Request] = {}
        self.is_built = self.is_ready = False  # has its engine; has had weights
        self.version: int | None = None  # of its weights
        self.num_tokens = self._progress = 0  # in flight, and the work done so far, by its last heartbeat
        self.heard = self.moved = time.monotonic()  # times of its last message, and of its last progress

    def hear(self) -> None:
        """Record that a message came."""
        self.heard = time.monotonic()

    def beat(self, num_tokens: int, progress: int) -> None:
        """Record a heartbeat."""
        if (num_tokens, progress) != (self.num_tokens, self._progress):
            self.moved = time.monotonic()
        self.num_tokens, self._progress = num_tokens, progress

    def give(self, request: Request) -> None:
        """Record that a request goes to this member."""
        if not self.running:
            self.moved = time.monotonic()
        self.running[request.key] = request

    def finish_build(self) -> None:
        """Record that the engine is built."""
        self.is_built = True

    def finish_load(self, version: int) -> None:
        """Record that the engine has a version of the weights."""
        self.version = version

    def begin_serving(self) -> None:
        """Record that the engine has the present weights for the first time."""
        self.is_ready = True


class Front(EngineWeights):
    """The engine of one rank, whose requests are answered by members; `params` are all HF tensors.

    Args:
        directory: run directory, in which members find the front.
        silent_seconds: time without a sign of life after which a member is lost.
        patience_seconds: how long unfinished requests wait for the first member.
        stuck_seconds: time without progress after which a member that has requests is lost.
    """

    def __init__(
        self,
        spec: EngineSpec,
        directory: Path,
        silent_seconds: float,
        patience_seconds: float,
        stuck_seconds: float,
    ) -> None:
        self._room, self._directory = spec.config.max_num_seqs, directory
        self._silent_seconds, self._patience, self._stuck_seconds = silent_seconds, patience_seconds, stuck_seconds
        self._placements, dtype = huggingface_placements(spec.shape), getattr(torch, spec.dtype)
        self.params: Mapping[str, torch.Tensor] = {
            box.param: torch.zeros(box_shape(box.local_box), dtype=dtype, device=spec.process.device)
            for box in self._placements
        }
        self._spec = _pack_spec(spec)
        self._version: int | None = None  # of `params`; `None` while they are written
        self._updates, self._weights_lock = 0, threading.Lock()
        self._members: list[Member] = []  # in order of joining
        self._waiting: deque[Request] = deque()
        self._finished: list[Sampled] = []
        self._homes: dict[int, Member] = {}  # key -> member that answered its last request with these weights
        self._news: queue.SimpleQueue[tuple[Member, tuple[Any, ...]]] = queue.SimpleQueue()
        self._num_lost, self._rejoin_seconds = 0, 0.0
        self._losses = list[tuple[float, Member]]()  # that were not made good, with their times
        self._alone_since: float | None = None
        self._reminded = 0.0
        self._listener = socket.create_server(("", 0), backlog=128)
        address = Address.here(self._listener.getsockname()[1])
        self._key = bytes.fromhex(address.key)
        address.write(directory)
        threading.Thread(target=self._accept, name="members", daemon=True).start()
        _log.info("waiting for engines: bash launch/engine.sh %s", directory)

    # Threads of the connections.

    def _accept(self) -> None:
        while True:
            try:
                endpoint, (host, *_) = self._listener.accept()
            except OSError:
                if self._listener.fileno() < 0:  # closed
                    return
                time.sleep(_STEP_SECONDS)  # too many open files, or a connection that was gone at once
                continue
            threading.Thread(target=self._follow, args=(endpoint, host), name="member", daemon=True).start()

    def _follow(self, endpoint: socket.socket, host: str) -> None:
        """Serve a connection: a rank that fetches weights, or a member's messages until its end."""
        try:
            link = Link(endpoint, self._key, self._silent_seconds, b"front", b"engine")
        except FAILURES:
            return
        member = None
        try:
            kind, *what = link.receive()
            if kind == "fetch":
                self._send_weights(link, *what)
                return
            if kind == "list":
                link.send(self._list_members())
                return
            member = Member(what[0], host, link)
            link.send("spec", self._silent_seconds, hashlib.sha256(self._spec).hexdigest(), self._spec)
            self._news.put((member, ("joined",)))
            while True:
                message = link.receive()
                member.hear()
                if message[0] == "beat":
                    member.beat(*message[1:])
                else:
                    self._news.put((member, message))
        except Exception as failure:
            if not isinstance(failure, FAILURES):
                _log.exception("the connection of an engine on %s failed", host)
            if member is not None:
                self._news.put((member, ("lost", describe_failure(failure))))
        finally:
            link.close()

    def _list_members(self) -> list[dict[str, Any]]:
        """Describe members, and losses that were not made good, for `status.json`."""
        now, updates = time.monotonic(), self._updates
        found = [
            {
                "name": member.title,
                "state": "serves" if member.is_ready else "joins",
                "version": member.version,
                "newest_version": updates,
                "requests": len(member.running),
                "silent_seconds": round(now - member.heard, 1),
            }
            for member in list(self._members)
        ]
        lost = [(member.title, round(now - when, 1)) for when, member in list(self._losses)]
        return found + [{"name": title, "state": "lost", "silent_seconds": seconds} for title, seconds in lost]

    def _send_weights(self, link: Link, version: int, boxes: Sequence[tuple[str, Any]]) -> None:
        """Send the pieces (HF tensor, box) of a version, each announced, then their digest; stop if it is outdated."""
        digest = hashlib.blake2b()
        for name, box in boxes:
            with self._weights_lock:
                piece = self.params[name][box_slices(box)].to("cpu", copy=True) if self._version == version else None
            link.send(piece is not None)
            if piece is None:
                return
            piece = piece.contiguous()
            link.send_tensor(piece)
            digest.update(as_bytes(piece))
        link.send(digest.digest())

    # Weights.

    def shard_key(self, rank: int) -> int:
        """Return 0: there is one front."""
        return 0

    def placements(self, rank: int) -> Sequence[ShardBox]:
        """Return the placement table: all HF tensors."""
        return self._placements

    def begin_weight_update(self) -> None:
        """Stop members from fetching the present weights."""
        with self._weights_lock:
            self._version = None

    def end_weight_update(self) -> None:
        """Let members fetch the new weights; they may still do so when their first requests arrive."""
        assert not self._waiting and not any(member.running for member in self._members), "responses are unfinished"
        self._updates += 1
        with self._weights_lock:
            self._version = self._updates
        self._homes.clear()
        self._hear(0.0)
        for member in [member for member in self._members if member.is_built]:
            self._tell(member, "weights", self._updates)

    def sleep(self) -> None:
        """Do nothing: members keep their memory."""

    # Requests.

    def add(self, requests: Sequence[Request]) -> None:
        """Queue requests."""
        self._waiting += requests

    def step(self) -> list[Sampled]:
        """Hand out requests and return responses that finish within a short wait.

        Raises:
            UserError: no member for too long.
        """
        self._hand_out()
        if not self._finished:
            self._hear(_STEP_SECONDS)
            self._hand_out()
        self._check_members()
        finished, self._finished = self._finished, []
        return finished

    def interrupt(self, keys: Sequence[int]) -> list[Sampled]:
        """Remove requests; return partial responses, empty ones for requests that wait or whose member is lost."""
        asked = {*keys}
        for member in list(self._members):
            if theirs := asked & member.running.keys():
                self._tell(member, "interrupt", sorted(theirs))
        nothing, ended = (np.empty(0, np.int32), np.empty(0, np.float32)), list[Sampled]()
        while True:
            idle = [request.key for request in self._waiting if request.key in asked]
            ended += [Sampled(key, *nothing, "interrupted") for key in idle]
            self._waiting = deque(request for request in self._waiting if request.key not in asked)
            if not any(asked & member.running.keys() for member in self._members):
                break
            self._hear(_STEP_SECONDS)
        ended += [one for one in self._finished if one.key in asked]
        self._finished = [one for one in self._finished if one.key not in asked]
        return ended

    def has_requests(self) -> bool:
        """Return whether any request is unfinished or any response was not returned."""
        return bool(self._waiting or self._finished or any(member.running for member in self._members))

    def tokens_in_flight(self) -> int:
        """Count the tokens of unfinished responses by the members' last heartbeats."""
        return sum(member.num_tokens for member in list(self._members))

    def close(self) -> None:
        """Let the members end if the run did not fail, else wait for its restart."""
        if sys.exc_info()[0] is None:
            for member in list(self._members):
                self._tell(member, "end")
        (self._directory / ADDRESS).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()
        for member in self._members:
            member.link.end()

    def describe(self) -> dict[str, float]:
        """Return the metrics `engines/*`."""
        return {
            "engines/members": float(sum(member.is_ready for member in self._members)),
            "engines/lost": float(self._num_lost),
            "engines/seconds_to_rejoin": self._rejoin_seconds,
        }

    # Members.

    def _hand_out(self) -> None:
        """Send waiting requests, in order, to the members with the fewest, at most `max_num_seqs` each.

        A request goes to the member that answered the turn before it, if that has room.
        """
        ready, shares = [member for member in self._members if member.is_ready], dict[Member, list[Request]]()
        while self._waiting and ready:
            member = self._homes.get(self._waiting[0].key)
            if member not in ready or len(member.running) >= self._room:
                member = min(ready, key=lambda one: len(one.running))
            if len(member.running) >= self._room:
                break
            request = self._waiting.popleft()
            member.give(request)
            shares.setdefault(member, []).append(request)
        for member, requests in shares.items():
            self._tell(member, "add", requests)

    def _hear(self, seconds: float) -> None:
        """Take messages that have arrived, or the first that arrives within a time; then lose members that hang."""
        with contextlib.suppress(queue.Empty):
            news = self._news.get(timeout=seconds) if seconds else self._news.get_nowait()
            while True:
                self._take(news[0], *news[1])
                news = self._news.get_nowait()
        latest = time.monotonic() - self._stuck_seconds
        for member in [member for member in self._members if member.running and member.moved < latest]:
            self._lose(member, f"no progress in {self._stuck_seconds:.0f} s")

    def _take(self, member: Member, kind: str, *what: Any) -> None:
        if kind == "joined":
            self._members.append(member)
            _log.info("%s has joined, and builds its model", member.title)
        elif member not in self._members:
            return  # lost: it must join again
        elif kind == "sampled":
            for one in what[0]:
                if member.running.pop(one.key, None) is not None:
                    self._finished.append(one)
                    self._homes[one.key] = member
        elif kind == "built":
            member.finish_build()
            if self._version is not None:
                self._tell(member, "weights", self._version)
        elif kind == "loaded":
            member.finish_load(what[0])
            if not member.is_ready and what[0] == self._version:
                self._welcome(member)
        elif kind == "leaves":
            _log.info("%s leaves and gives back %d requests", member.title, len(member.running))
            self._tell(member, "end")
            self._remove(member)
        else:  # "lost" or "failed"
            self._lose(member, what[0])

    def _welcome(self, member: Member) -> None:
        member.begin_serving()
        self._alone_since, after = None, ""
        if self._losses:  # of its own host, if there is one
            loss = next((loss for loss in self._losses if loss[1].host == member.host), self._losses[0])
            self._losses.remove(loss)
            self._rejoin_seconds = time.monotonic() - loss[0]
            after = f", {self._rejoin_seconds:.1f} s after a loss"
        _log.info("%s serves version %s of the weights%s", member.title, self._version, after)

    def _tell(self, member: Member, *message: Any) -> None:
        try:
            member.link.send(*message)
        except FAILURES as failure:
            self._lose(member, describe_failure(failure))

    def _lose(self, member: Member, reason: str) -> None:
        if member not in self._members:
            return
        if member.is_ready:
            self._num_lost += 1
            self._losses.append((time.monotonic(), member))
        text = "%s is lost (%s): its %d requests are repeated with equal seeds; it may join again"
        _log.warning(text, member.title, reason, len(member.running))
        self._remove(member)

    def _remove(self, member: Member) -> None:
        """Drop a member and put its requests back, first in the queue."""
        self._members.remove(member)
        self._waiting.extendleft(reversed(member.running.values()))
        member.running.clear()
        member.link.end()

    def _check_members(self) -> None:
        """Remind of missing members while requests wait for the first one (UserError after too long)."""
        now = time.monotonic()
        if not self._waiting or any(member.is_ready for member in self._members):
            self._alone_since = None
            return
        if self._alone_since is None:
            self._alone_since, self._reminded = now, now - _REMINDER_SECONDS
        if now - self._reminded >= _REMINDER_SECONDS:
            self._reminded = now
            left, command = self._patience - (now - self._alone_since), f"bash launch/engine.sh {self._directory}"
            _log.warning("no engine: %d requests wait up to %.0f s more for %s", len(self._waiting), left, command)
        if now - self._alone_since > self._patience:
            raise UserError(
                f"{len(self._waiting)} requests, and no engine for {self._patience:.0f} seconds",
                source="schedule.elastic",
                expected="at least one engine that has joined the run",
                hint=f"start engines by launch/engine.sh {self._directory}, and read why the last ones ended; "
                "the run continues from its newest checkpoint",
            )


def choose_front(trainer: TrainerConfig) -> Callable[[EngineSpec], Front]:
    """Return the constructor of a run's front."""
    # Ranks that wait for the front's samples would otherwise report a stall before it reports the reason. An engine
    # that hangs must be lost early enough for the others to repeat its requests.
    limit, run_dir = trainer.collective_timeout, Path(str(trainer.run_dir))
    return lambda spec: Front(spec, run_dir, spec.config.silent_seconds or _SILENT_SECONDS, 0.8 * limit, 0.4 * limit)


def list_members(directory: Path) -> list[dict[str, Any]]:
    """Return the engines of the run in `directory` for its status page; none while its front does not answer."""
    try:
        link = Address.read(directory).connect(_LIST_SECONDS)
        try:
            link.send("list")
            return link.receive()[0]
        finally:
            link.close()
    except (ValueError, TypeError, *FAILURES):
        return []


def _pack_spec(spec: EngineSpec) -> bytes:
    """Pickle what a member needs to build its engine (UserError: its tokenizer cannot be pickled)."""
    sent = replace(spec, shareable=share_nothing, model=None, ranks=None, thoughts=None)  # thoughts are cut by the job
    try:
        return pickle.dumps(sent, pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        raise UserError(
            f"the engine's inputs cannot be sent to another process: {type(error).__name__} {error}",
            source="schedule.elastic and rollout.stop",
            expected="a tokenizer that can be pickled",
            hint="leave rollout.stop empty, or set schedule.elastic=false",
        ) from error
