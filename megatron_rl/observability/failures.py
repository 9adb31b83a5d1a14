# SPDX-License-Identifier: Apache-2.0
"""Conversion of exceptions to a `UserError`: out of memory, a full disk, a lost peer, and everything else."""

from __future__ import annotations

import errno
import re
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from megatron_rl.observability.positions import Position, name_ranks
from megatron_rl.types import UserError, text_of

_PACKAGE = str(Path(__file__).resolve().parents[1])
_LONGEST_MESSAGE = 600
_NO_MEMORY = re.compile(
    r"DefaultCPUAllocator: can't allocate memory|CUDA out of memory|CUDA error: out of memory|Unable to allocate"
    r"|No available memory for the cache blocks|Free memory on device|KV cache is needed, which is larger",
    re.I,
)
_NO_PEER = re.compile(
    r"Connection (closed|reset) by peer|Connection refused|Broken pipe|Socket closed|remote process exited"
    r"|ncclRemoteError|Gloo (connect|AllReduce) failed|Timed out waiting \d+ms for|Application timeout",
    re.I,
)
# Sub-package or phase -> settings that free memory there.
_MEMORY_HINTS = {
    "engines": "lower rollout.gpu_memory_utilization, rollout.max_num_seqs or rollout.kv_cache_gib, or raise "
    "rollout.tensor_model_parallel_size",
    "resharding": "lower hybrid.bucket_bytes, or set actor.offload_optimizer=true and actor.offload_gradients=true",
    "save": "set checkpoint.async_save=false: a background save keeps a copy in host memory",
    "": "lower {role}.max_tokens_per_microbatch or actor.logprob_chunk_tokens, or set "
    "{role}.recompute_granularity=full, {role}.offload_optimizer=true or {role}.offload_gradients=true; "
    "python tools/plan.py shows what fits",
}
_ROOM_OF_PHASE = {"rollout": "engines", "reshard": "resharding", "verify": "resharding"}
_CRITIC_PHASES = ("values", "update_critic")


@dataclass(frozen=True)
class Scene:
    """Place of a failure in the program.

    Attributes:
        rank: rank that raised; `None` if every rank may have.
        step: 0 before the first step.
        phase: innermost phase that the exception left, if any.
    """

    rank: int | None
    step: int
    phase: str | None
    log_file: Path

    @classmethod
    def of(cls, error: BaseException, rank: int, step: int, log_file: Path) -> Scene:
        """Read the scene from the marks that `PhaseTimers` and `raise_together` leave on an exception."""
        origin = getattr(error, "raised_on", None if isinstance(error, UserError) else rank)
        log_file = log_file if origin is None else log_file.with_name(f"rank{origin}.log")
        return cls(origin, step, getattr(error, "left_phase", None), log_file)

    def __str__(self) -> str:
        when = f"step {self.step}" if self.step else "before the first step"
        who = "" if self.rank is None else f"rank {self.rank}, "
        return f"{who}{when}{f', phase {self.phase}' if self.phase else ''}"


FindSilent = Callable[[], Sequence[Position]]


def explain(error: BaseException, scene: Scene, find_silent: FindSilent = tuple) -> UserError:
    """Return the error as a `UserError`; `find_silent` searches, for seconds, the last positions of lost ranks."""
    if isinstance(error, UserError):
        return error
    if is_out_of_memory(error):
        return _explain_memory(error, scene)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return UserError(
            f"the disk is full: {error}",
            source=f"{scene}, {_locate(error)}",
            expected="room for what a run writes",
            hint="free some space; start the same command again to resume from the newest checkpoint",
        )
    if is_lost_peer(error) and (lost := find_silent()):
        # gloo's message: [file and line] event and peer. "This is typically caused by ..."
        what = re.sub(r"^\[[^ ]*\] ", "", _first_lines(error)).partition(" This is typically")[0]
        return explain_lost(lost, scene, what)
    return UserError(
        f"{type(error).__name__}: {_first_lines(error)}",
        source=f"{scene}, {_locate(error)}",
        expected="a program that raises nothing here",
        hint=f"the traceback is in {scene.log_file}; if the cause is not in a file of your own, please report it",
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if the device, the host or the engine ran out of memory."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or _NO_MEMORY.search(text_of(error)) is not None


def is_lost_peer(error: BaseException) -> bool:
    """Return True if an absent rank may be the cause."""
    if isinstance(error, dist.DistBackendError | dist.DistNetworkError):
        return True
    return isinstance(error, RuntimeError) and _NO_PEER.search(text_of(error)) is not None  # gloo's


def explain_lost(lost: Sequence[Position], scene: Scene, what: str) -> UserError:
    """Return the error about ranks that left without an exception, noticed by the error `what`."""
    who = name_ranks([p.rank for p in lost])
    seen = "; ".join(f"rank {p.rank} in step {p.step}, phase {p.phase} ({p.caller})" for p in lost)
    logs = ", ".join(str(scene.log_file.with_name(f"rank{p.rank}.log")) for p in lost[:4])
    return UserError(
        f"{who} left the job, or is stopped, and gives no sign of life; last seen: {seen}",
        source=f"{scene}: {what}",
        expected="ranks that stay until the end",
        hint=f"look at the end of {logs}, and for the OOM killer in dmesg; start the same command again to resume from "
        "the newest checkpoint (trainer.save_freq, trainer.run_dir), or let MAX_RESTARTS or torchrun's "
        "--max-restarts do it",
    )


def _explain_memory(error: BaseException, scene: Scene) -> UserError:
    asked, in_use = _read_sizes(text_of(error))
    rooms = [_ROOM_OF_PHASE.get(scene.phase or "", scene.phase), *reversed(_rooms(error))]
    room = next((part for part in rooms if part in _MEMORY_HINTS), "")
    role = "critic" if scene.phase in _CRITIC_PHASES else "actor"
    return UserError(
        f"out of memory{f': {asked} asked for' if asked else ''} ({in_use})",
        source=f"{scene}, {_locate(error)}",
        expected="that this fits beside what is in use",
        hint=_MEMORY_HINTS[room].format(role=role),
    )


def _read_sizes(message: str) -> tuple[str, str]:
    """Parse the requested size and the memory in use from a message of torch or numpy."""
    asked = re.search(
        r"Tried to allocate ([\d.]+ \w+)|tried to allocate (\d+) bytes|Unable to allocate ([\d.]+ \w+)", message
    )
    size = "" if asked is None else next(part for part in asked.groups() if part)
    device = re.search(r"GPU \d+ has a total capacity of .*?is free", message)
    if device is not None:
        used = re.search(r"this process has ([\d.]+ \w+) memory in use", message)
        return size, device[0] + (f", {used[1]} in use by this rank" if used else "")
    gib = 1 << 30
    if size.isdigit():
        size = f"{int(size) / gib:.2f} GiB"
    return size, (
        f"{psutil.Process().memory_info().rss / gib:.2f} GiB in use by this rank, "
        f"{psutil.virtual_memory().available / gib:.2f} GiB left on the host"
    )


def _first_lines(error: BaseException) -> str:
    lines = text_of(error).strip().splitlines()[:3] or [""]
    text = " ".join(line.strip() for line in lines)
    return text if len(text) <= _LONGEST_MESSAGE else f"{text[:_LONGEST_MESSAGE]} ..."


def _rooms(error: BaseException) -> list[str]:
    """Return the sub-package of each frame of this package, the innermost last."""
    return [
        Path(frame.filename).relative_to(_PACKAGE).parts[0]
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename.startswith(_PACKAGE)
    ]


def _locate(error: BaseException) -> str:
    """Return the innermost frame, and that of this package if it differs; timers and registries only forward calls."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return "an unknown place"
    ours = [frame for frame in frames if frame.filename.startswith(_PACKAGE)]
    ours = [frame for frame in ours if frame.name != "counted" and not frame.filename.endswith("/registry.py")]
    where = _place(frames[-1])
    return where if not ours or ours[-1] is frames[-1] else f"{where}, called from {_place(ours[-1])}"


def _place(frame: Any) -> str:
    path = Path(frame.filename)
    short = path.relative_to(Path(_PACKAGE).parent) if frame.filename.startswith(_PACKAGE) else path
    return f"{short}:{frame.lineno} in {frame.name}"
