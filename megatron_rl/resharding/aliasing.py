# SPDX-License-Identifier: Apache-2.0
"""Which destination parameters are a source parameter of the same rank, byte for byte (pure).

Such a pair can share one storage: the switch moves nothing for it, and there is no second copy.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from megatron_rl.weights.shard_box import Box, ShardBox


def find_aliases(source: Iterable[ShardBox], destination: Iterable[ShardBox]) -> dict[str, str]:
    """Destination parameter -> source parameter that holds the same pieces at the same places.

    Only layouts are compared; that shapes (vocabulary padding) and dtypes agree as well is for the one who
    binds the storages to check.

    Args:
        source: placements of one rank.
        destination: placements of the same rank.
    """
    by_content = {content: name for name, content in _contents(source).items()}
    matches = {name: by_content.get(content) for name, content in _contents(destination).items()}
    return {name: match for name, match in matches.items() if match is not None}


def _contents(placements: Iterable[ShardBox]) -> dict[str, frozenset[tuple[Box, str, Box]]]:
    contents: dict[str, set[tuple[Box, str, Box]]] = defaultdict(set)
    for p in placements:
        contents[p.param].add((p.local_box, p.hf_name, p.hf_box))
    return {name: frozenset(content) for name, content in contents.items()}
