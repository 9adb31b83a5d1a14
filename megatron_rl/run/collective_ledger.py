# SPDX-License-Identifier: Apache-2.0
"""The last collectives of this process, as torch's flight recorder knows them.

The recorder keeps the last 2000 collectives of every process group, gloo's and NCCL's, in a ring buffer of its own and
is on by default: nothing is recorded here. Reading it takes some tenths of a second, so it is read when a job ends.
"""

from __future__ import annotations

import json
import time
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d
from torch.distributed.distributed_c10d import GroupName

# gloo's recorder, and NCCL's in builds that have it; names of torch 2.13, absent in builds without them.
_DUMPS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
_SHOWN = 16


def describe_collectives() -> list[str]:
    """The last ones in words, the oldest first, one line each; empty where torch does not record."""
    entries: list[dict[str, Any]] = []
    try:
        for name in _DUMPS:
            dump = getattr(_distributed_c10d, name, None)
            if dump is not None:
                entries += json.loads(dump()).get("entries", [])
        entries.sort(key=lambda entry: entry["time_created_ns"])
        return [_describe(entry) for entry in entries[-_SHOWN:]]
    except Exception as error:  # not an interface that torch promises to keep; a report must not fail for it
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
