# SPDX-License-Identifier: Apache-2.0
"""Reports of failures: exceptions as a `UserError`, and the positions of ranks that wait for each other.

A position is the step, phase and current operation of a rank's main thread, read by another thread. The thread's frames
show the collective in which it waits, its ranks, and the caller. All ranks enter the same phases in the same order, so
a rank that entered fewer is behind.
"""

from __future__ import annotations

import errno
import json
import linecache
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import torch
import torch.distributed as dist

from megatron_rl.observability.progress import PhaseTimers
from megatron_rl.types import UserError, text_of

_PACKAGE = "megatron_rl"
_DISTRIBUTED = "torch.distributed"
_WAITING = (_DISTRIBUTED, "megatron_rl.parallel.pairs")  # modules in which a rank waits for other ranks
_COLLECTIVES = "megatron_rl.parallel.collectives"  # its callers are reported instead
_SHOWN = 3  # of the last collectives of a late rank, in a report
_FOLDER = str(Path(__file__).resolve().parents[1])
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
    "{role}.recompute_granularity=full, {role}.offload_optimizer=true or actor.offload_gradients=true; "
    "python tools/plan.py shows what fits",
}
_ROOM_OF_PHASE = {"rollout": "engines", "reshard": "resharding", "verify": "resharding"}
_CRITIC_PHASES = ("values", "update_critic")


@dataclass(frozen=True)
class Position:
    """Heartbeat of a rank: step, phase and collective in which its main thread was last observed."""

    rank: int
    step: int
    phase: str
    num_entered: int
    operation: str | None  # current collective ("all_reduce", "wait"), if any
    ranks: tuple[int, ...] | None  # members of its group; `None` if unknown
    caller: str  # file, line and function in this package, else the innermost frame
    seconds: float  # since this place was first observed
    looks: int  # observations so far; constant when the process is gone or stopped
    is_closed: bool = False  # the rank has left in good order
    recent: tuple[str, ...] = ()  # last collectives, the newest last; set when a job ends
    memory: int = 0  # bytes at the end of its last phase; 0 if not measured

    def encode(self) -> str:
        """Return the position as JSON."""
        return json.dumps(asdict(self))

    @staticmethod
    def decode(text: bytes | str) -> Position:
        """Parse JSON of `encode`."""
        fields = json.loads(text)
        lists = {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
        return Position(**fields | lists)

    def describe(self) -> str:
        """Return the position as one line of a report."""
        group = "" if self.ranks is None else f" of ranks {_short(self.ranks)}"
        doing = f"waits in {self.operation}{group}" if self.operation else "is in no collective"
        where = f"step {self.step}, phase {self.phase}"
        return f"rank {self.rank}: {where}: {doing} for {self.seconds:.0f} s ({self.caller})"


def find_place(frame: FrameType) -> tuple[str | None, tuple[int, ...] | None, str]:
    """Walk outward from a thread's innermost frame; return the thread's `Position.operation`, `ranks` and `caller`."""
    operation, ranks = None, None
    outer: FrameType | None = frame
    while outer is not None and _module(outer).startswith(_WAITING):
        name = outer.f_code.co_name
        operation = operation if name in ("wrapper", "func_wrapper") else name
        ranks = ranks or _ranks_of(outer)
        outer = outer.f_back
    if operation is None and ".wait(" in linecache.getline(frame.f_code.co_filename, frame.f_lineno or 0):
        operation = "wait"
    caller = outer
    while caller is not None and (not _module(caller).startswith(_PACKAGE) or _module(caller) == _COLLECTIVES):
        caller = caller.f_back
    caller = caller or outer or frame
    where = f"{Path(caller.f_code.co_filename).name}:{caller.f_lineno} in {caller.f_code.co_name}"
    return operation, ranks, where


def find_position(rank: int, timers: PhaseTimers, thread: int) -> Position | None:
    """Return this rank's current position, with `seconds` and `looks` 0; `None` if its main thread `thread` is gone."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return None
    phase = next((name for name in reversed(tuple(timers.phases)) if name != "step"), "between phases")
    return Position(rank, timers.step, phase, timers.num_entered, *find_place(frame), seconds=0.0, looks=0)


def explain_wait(positions: Sequence[Position | None], silent: Sequence[int]) -> str:
    """Return a report of the ranks that wait and the late ranks that they wait for.

    Args:
        positions: position of each rank, `None` if it did not answer.
        silent: ranks whose process is gone or stopped.
    """
    known = [p for p in positions if p is not None]
    first = min((p.num_entered for p in known), default=0)
    late = {p.rank for p in known if p.num_entered == first and p.operation is None} | set(silent)
    if not late and len({p.num_entered for p in known}) > 1:
        late = {p.rank for p in known if p.num_entered == first}
    waiting = [p for p in known if p.rank not in late]
    if late and waiting:
        at = max(waiting, key=lambda p: p.seconds)
        those = name_ranks(sorted(p.rank for p in waiting))
        verdict = (
            f"{those} waited for {name_ranks(sorted(late))} in step {at.step}, "
            f"phase {at.phase}, {at.operation or at.caller}"
        )
    else:
        verdict = "all ranks wait, in different collectives or for a message that was never sent"
    lines = {p.rank: [p.describe(), *(f"  {line}" for line in p.recent[-_SHOWN:] if p.rank in late)] for p in known}
    lines |= {rank: [f"rank {rank}: no answer; its process is gone or stopped"] for rank in silent}
    return "\n  ".join([verdict, *(line for rank in sorted(lines) for line in lines[rank])])


def _module(frame: FrameType) -> str:
    return frame.f_globals.get("__name__", "")


def _ranks_of(frame: FrameType) -> tuple[int, ...] | None:
    """Return the global ranks of the group that a frame of a collective received; `None` if it has none."""
    distributed = sys.modules[_DISTRIBUTED]
    values = frame.f_locals
    if "group" not in values and "pg" not in values:
        return None
    try:
        group = values.get("group") or values.get("pg") or distributed.group.WORLD
        return tuple(distributed.get_process_group_ranks(group))
    except (KeyError, RuntimeError, TypeError, ValueError):  # not a group, or one that is being destroyed
        return None


def name_ranks(ranks: Sequence[int]) -> str:
    """Return "rank 3" or "ranks 0-3,6"."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {_short(ranks)}"


def _short(ranks: Sequence[int]) -> str:
    """Format ranks as runs: "0-3,6"."""
    pairs = groupby(enumerate(sorted(ranks)), key=lambda pair: pair[1] - pair[0])  # constant along a run
    runs = [[rank for _, rank in run] for _, run in pairs]
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


@dataclass(frozen=True)
class Scene:
    """Circumstances of a failure, for its report: rank, step, phase, and log with the traceback."""

    rank: int | None  # `None` if every rank may have raised
    step: int  # 0 before the first step
    phase: str | None  # innermost one that the exception left, if any
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
    """Convert any exception to the `UserError` that is reported.

    Args:
        scene: rank, step, phase and log of the failure.
        find_silent: returns step and phase of each lost rank; called if a peer was lost, takes seconds.
    """
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
    """Return True for an error of NCCL, gloo or the network that an ended process on another rank may have caused."""
    if isinstance(error, dist.DistBackendError | dist.DistNetworkError):
        return True
    return isinstance(error, RuntimeError) and _NO_PEER.search(text_of(error)) is not None  # gloo's


def explain_lost(lost: Sequence[Position], scene: Scene, what: str) -> UserError:
    """Build the error about ranks whose processes ended without an exception; `what`: this rank's own error."""
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
    message, gib = text_of(error), 1 << 30
    found = re.search(
        r"Tried to allocate ([\d.]+ \w+)|tried to allocate (\d+) bytes|Unable to allocate ([\d.]+ \w+)", message
    )
    asked = "" if found is None else next(part for part in found.groups() if part)
    asked = f"{int(asked) / gib:.2f} GiB" if asked.isdigit() else asked
    if (device := re.search(r"GPU \d+ has a total capacity of .*?is free", message)) is not None:
        used = re.search(r"this process has ([\d.]+ \w+) memory in use", message)
        in_use = device[0] + (f", {used[1]} in use by this rank" if used else "")
    else:
        in_use = f"{psutil.Process().memory_info().rss / gib:.2f} GiB in use by this rank, "
        in_use += f"{psutil.virtual_memory().available / gib:.2f} GiB left on the host"
    frames = [Path(frame.filename) for frame in reversed(traceback.extract_tb(error.__traceback__))]
    rooms = [_ROOM_OF_PHASE.get(scene.phase or "", scene.phase)]
    rooms += [file.relative_to(_FOLDER).parts[0] for file in frames if file.is_relative_to(_FOLDER)]
    room = next((part for part in rooms if part in _MEMORY_HINTS), "")
    role = "critic" if scene.phase in _CRITIC_PHASES else "actor"
    return UserError(
        f"out of memory{f': {asked} asked for' if asked else ''} ({in_use})",
        source=f"{scene}, {_locate(error)}",
        expected="that this fits beside what is in use",
        hint=_MEMORY_HINTS[room].format(role=role),
    )


def _first_lines(error: BaseException) -> str:
    lines = text_of(error).strip().splitlines()[:3] or [""]
    text = " ".join(line.strip() for line in lines)
    return text if len(text) <= _LONGEST_MESSAGE else f"{text[:_LONGEST_MESSAGE]} ..."


def _locate(error: BaseException) -> str:
    """Name the frame that raised an error, and this package's innermost frame around it (no timer or registry)."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return "an unknown place"
    ours = [frame for frame in frames if frame.filename.startswith(_FOLDER)]
    ours = [frame for frame in ours if frame.name != "counted" and not frame.filename.endswith("/registry.py")]
    where = _place(frames[-1])
    return where if not ours or ours[-1] is frames[-1] else f"{where}, called from {_place(ours[-1])}"


def _place(frame: Any) -> str:
    path = Path(frame.filename)
    short = path.relative_to(Path(_FOLDER).parent) if frame.filename.startswith(_FOLDER) else path
    return f"{short}:{frame.lineno} in {frame.name}"
