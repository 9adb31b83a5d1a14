# SPDX-License-Identifier: Apache-2.0
"""Pairs of destination and source parameters on one rank that can share storage."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist

from megatron_rl.parallel.collectives import gather_rows, share_object
from megatron_rl.weights.shard_box import Box, ShardBox


def find_aliases(source: Iterable[ShardBox], destination: Iterable[ShardBox]) -> dict[str, str]:
    """Map each destination parameter to the source parameter with the same pieces at the same places (pure).

    Only layouts of one rank are compared; the caller must check shapes (vocabulary padding) and dtypes.
    """
    by_content = {content: name for name, content in _contents(source).items()}
    matches = {name: by_content.get(content) for name, content in _contents(destination).items()}
    return {name: match for name, match in matches.items() if match is not None}


def gather_names(names: frozenset[str], group: dist.ProcessGroup) -> list[frozenset[str]]:
    """Gather the sets of all ranks, by rank, sending each distinct set once; collective."""
    digest = hashlib.sha256("\n".join(sorted(names)).encode()).digest()[:8]
    mine = torch.tensor([[int.from_bytes(digest, "little", signed=True)]])
    digests = gather_rows(mine, group)[:, 0].tolist()
    owners = {found: rank for rank, found in reversed(list(enumerate(digests)))}  # the first rank of each set
    sets = {
        found: share_object(names, group, dist.get_global_rank(group, rank))
        for found, rank in sorted(owners.items(), key=lambda item: item[1])
    }
    return [sets[found] for found in digests]


def _contents(placements: Iterable[ShardBox]) -> dict[str, frozenset[tuple[Box, str, Box]]]:
    contents: dict[str, set[tuple[Box, str, Box]]] = defaultdict(set)
    for p in placements:
        contents[p.param].add((p.local_box, p.hf_name, p.hf_box))
    return {name: frozenset(content) for name, content in contents.items()}
