# SPDX-License-Identifier: Apache-2.0
"""Cost of trainers that gather full tensors on every rank, as a baseline for reshard plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_rl.transfer.planner import Shard, TensorIndex, find_classes
from megatron_rl.weights.shard_box import box_volume
from tools.planning.reshard_cost import Bandwidths


@dataclass(frozen=True)
class GatherSummary:
    """Cost of gathering: per tensor, broadcast over PP, all-gather over TP (and EP), load.

    Attributes:
        bytes_within_node, bytes_across_nodes: received by the busiest rank.
        transient_bytes: parts of the largest tensor plus the assembled tensor.
    """

    bytes_within_node: int
    bytes_across_nodes: int
    transient_bytes: int

    @property
    def bytes_received(self) -> int:
        """Return the bytes within and across nodes."""
        return self.bytes_within_node + self.bytes_across_nodes


def summarize_gather(
    source: Sequence[Shard], *, num_ranks: int, stage_ranks: int, block_ranks: int, itemsize: int, ranks_per_node: int
) -> GatherSummary:
    """Compute the bytes that a rank receives if the full model passes through it.

    A rank first receives its own part of a tensor from its peer in another stage, then the other parts from the ranks
    of its block. Reported is the first rank of a stage that receives the most from other nodes.

    Args:
        source: shards of the training layout; every rank is in one.
        stage_ranks: consecutive ranks of a pipeline stage.
        block_ranks: consecutive ranks that together hold a stage (tp * ep).
        itemsize: bytes per element on the wire.
    """
    shard_of = {rank: index for index, shard in enumerate(source) for rank in shard.ranks}
    classes = list(dict.fromkeys(find_classes(TensorIndex(source), TensorIndex([])).values()))
    pieces = [
        (list(piece.holders), box_volume(piece.box) * len(tensors.names))
        for tensors in classes
        for piece in tensors.pieces
    ]
    received = []
    for first in range(0, num_ranks, stage_ranks):
        block = range(first, first + block_ranks)
        # Order of arrival: parts that the rank holds, parts from its peers in other stages, parts from its neighbors.
        arrivals = [(at, at) for at in (first, *range(0, num_ranks, stage_ranks))]
        arrivals += [(q, q % stage_ranks + stage) for q in block[1:] for stage in range(0, num_ranks, stage_ranks)]
        order: dict[int, int] = {}  # shard -> its first arrival
        for turn, (_, holder) in enumerate(arrivals):
            order.setdefault(shard_of[holder], turn)
        volumes = [0, 0]
        for holders, volume in pieces:
            turn = min((order[shard] for shard in holders if shard in order), default=None)
            if turn is not None and (sender := arrivals[turn][0]) != first:
                volumes[sender // ranks_per_node != first // ranks_per_node] += volume
        received.append(volumes)
    within, across = max(received, key=lambda volumes: (volumes[1], volumes[0]))
    largest = max((sum(box_volume(piece.box) for piece in tensors.pieces) for tensors in classes), default=0)
    return GatherSummary(within * itemsize, across * itemsize, 2 * largest * itemsize)


def predict_gather_seconds(gather: GatherSummary, bandwidths: Bandwidths) -> float:
    """Return seconds; a tensor crosses nodes before it is gathered, so both times add up."""
    return gather.bytes_within_node / bandwidths.within_node + gather.bytes_across_nodes / bandwidths.across_nodes
