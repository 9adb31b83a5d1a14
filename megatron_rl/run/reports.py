# SPDX-License-Identifier: Apache-2.0
"""The one report of a failing job: agreed on in the job's store and shown once.

The first rank to `claim` writes the report. Rank 0 shows it and confirms; without a confirmation, the author shows it.
Its collectives come from torch's flight recorder, which keeps the last 2000 of every process group (gloo and NCCL) and
is on by default; reading it takes some tenths of a second.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d
from torch.distributed.distributed_c10d import GroupName, Store

# gloo's recorder, and NCCL's in builds that have it; names of torch 2.13, absent in builds without them.
_DUMPS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
_SHOWN = 16


def describe_collectives() -> list[str]:
    """Return the last recorded collectives of this process, oldest first, one line each."""
    entries: list[dict[str, Any]] = []
    try:
        for name in _DUMPS:
            dump = getattr(_distributed_c10d, name, None)
            if dump is not None:
                entries += json.loads(dump()).get("entries", [])
        entries.sort(key=lambda entry: entry["time_created_ns"])
        return [_describe(entry) for entry in entries[-_SHOWN:]]
    except Exception as error:  # the interface is private to torch; a report must not fail because of it
        return [f"torch's flight recorder cannot be read: {type(error).__name__}: {error}"]


def _describe(entry: dict[str, Any]) -> str:
    name, ranks = entry["profiling_name"].partition(":")[2], _describe_ranks(entry["process_group"][0])
    state = "done" if entry["retired"] or entry["state"] == "completed" else "under way"
    seconds = time.time() - entry["time_created_ns"] / 1e9
    return f"{name} #{entry['collective_seq_id']}{ranks}, begun {seconds:.1f} s ago, {state}"


def _describe_ranks(group_name: str) -> str:
    try:
        ranks = dist.get_process_group_ranks(_distributed_c10d._resolve_process_group(GroupName(group_name)))
    except (KeyError, RuntimeError, ValueError):  # a group that is gone
        return ""
    return f" of ranks {','.join(map(str, ranks)) if len(ranks) <= 4 else f'{ranks[0]}..{ranks[-1]}'}"


_POLL_SECONDS = 0.1
_REPORT_SECONDS = 15.0  # from a claim to its report
_SHOWN_SECONDS = 10.0  # until rank 0 has seen the report, has waited for its own program, and has shown it


@dataclass(frozen=True)
class Report:
    """Final report of a job.

    Attributes:
        code: exit status of all ranks.
        rank: its author.
    """

    text: str
    code: int
    rank: int


class ReportBoard:
    """This rank's view of the report.

    Args:
        store: a connection that two threads may use, under a prefix of this run.
        log_file: receives everything this rank shows.
    """

    def __init__(self, store: Store, rank: int, log_file: Path) -> None:
        self._store, self._rank, self._log_file = store, rank, log_file
        self._lock, self._is_concluded = threading.Lock(), False

    def claim(self) -> bool:
        """Return True for the job's first caller, which must post a report."""
        return self._store.add("claimed", 1) == 1

    def post(self, text: str, code: int) -> None:
        """Publish a report to all ranks."""
        self._store.set("report", json.dumps(asdict(Report(text, code, self._rank))))

    @property
    def is_posted(self) -> bool:
        """Whether a report exists."""
        return self._store.check(["report"])

    def wait_for(self, keys: list[str], seconds: float) -> bool:
        """Return True as soon as all keys are in the store, False after the time limit."""
        deadline = time.monotonic() + seconds
        while not self._store.check(keys):
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_SECONDS)
        return True

    def have_all_come(self, world_size: int, seconds: float) -> bool:
        """Record this rank's failure; return whether all ranks fail within the time limit."""
        self._store.set(f"failed/{self._rank}", "")
        return self.wait_for([f"failed/{rank}" for rank in range(world_size)], seconds)

    def conclude(self) -> Report | None:
        """Wait until the posted report, if any, is shown; show it if this rank must."""
        if not self.wait_for(["report"], _REPORT_SECONDS):
            return None
        report = Report(**json.loads(self._store.get("report")))
        with self._lock:  # the program and the watchdog may both come here
            if self._is_concluded:
                return report
            self._is_concluded = True
            if self._rank == 0:
                show(report.text, self._log_file)
                self._store.set("shown", "")
            elif not self.wait_for(["shown"], _SHOWN_SECONDS) and report.rank == self._rank:
                show(report.text, self._log_file)
            else:
                append(self._log_file, f"the job ends: {report.text}")
        return report


def show(text: str, log_file: Path) -> None:
    """Print a report and append it to this rank's log."""
    append(log_file, f"error: {text}")
    print(f"error: {text}", file=sys.stderr, flush=True)


def append(log_file: Path, text: str) -> None:
    """Append to a rank's log; a full disk is ignored, since it must not hide why the job ended."""
    with contextlib.suppress(OSError), open(log_file, "a", encoding="utf-8", errors="backslashreplace") as file:
        file.write(text.rstrip("\n") + "\n")
