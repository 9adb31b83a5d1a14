# SPDX-License-Identifier: Apache-2.0
"""The last collectives of this process, as torch's flight recorder knows them.

The recorder keeps the last 2000 collectives of every process group, gloo's and NCCL's, in a ring buffer of its own and
is on by default: nothing is recorded here. Reading it takes some tenths of a second, so it is read when a job ends.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d
from torch.distributed.distributed_c10d import GroupName

# gloo's recorder, and NCCL's in builds that have it; names of torch 2.13, absent in builds without them.
_DUMPS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")


@dataclass(frozen=True)
class Collective:
    """One collective of this process.

    Attributes:
        operation: "all_reduce", ...
        number: of the collective in its group, the same on all of its ranks.
        ranks: of the group; None where that is not known (any more).
        began: seconds since the epoch.
        is_done: False: it is under way.
    """

    operation: str
    number: int
    ranks: tuple[int, ...] | None
    began: float
    is_done: bool


def read_collectives(limit: int = 16) -> list[Collective]:
    """The last ones, the oldest first; empty where torch does not record.

    Args:
        limit: how many.
    """
    entries: list[dict[str, Any]] = []
    for name in _DUMPS:
        dump = getattr(_distributed_c10d, name, None)
        if dump is not None:
            entries += json.loads(dump()).get("entries", [])
    entries.sort(key=lambda entry: entry["time_created_ns"])
    return [
        Collective(
            entry["profiling_name"].partition(":")[2], entry["collective_seq_id"], _ranks_of(entry["process_group"][0]),
            entry["time_created_ns"] / 1e9, entry["retired"] or entry["state"] == "completed")
        for entry in entries[-limit:]
    ]


def describe_collectives(limit: int = 16) -> list[str]:
    """`read_collectives` in words, one line each."""
    now = time.time()
    try:
        collectives = read_collectives(limit)
    except Exception as error:  # not an interface that torch promises to keep; a report must not fail for it
        return [f"torch's flight recorder cannot be read: {type(error).__name__}: {error}"]
    return [
        f"{found.operation} #{found.number}{_describe_ranks(found.ranks)}, begun {now - found.began:.1f} s ago, "
        f"{'done' if found.is_done else 'under way'}" for found in collectives]


def _describe_ranks(ranks: tuple[int, ...] | None) -> str:
    if ranks is None:
        return ""
    return f" of ranks {','.join(map(str, ranks)) if len(ranks) <= 4 else f'{ranks[0]}..{ranks[-1]}'}"


def _ranks_of(name: str) -> tuple[int, ...] | None:
    try:
        return tuple(dist.get_process_group_ranks(_distributed_c10d._resolve_process_group(GroupName(name))))
    except (KeyError, RuntimeError, ValueError):  # a group that is gone
        return None
