# SPDX-License-Identifier: Apache-2.0
"""Cost of a plan: bytes per link class, balance, staging memory, and seconds at given bandwidths.

Counts are sums of the flows from `list_flows`: exact, not sampled, for thousands of ranks. Predictions are lower
bounds from bandwidth alone: no latency, no packing, no contention, every rank with a link of its own per class.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

import numpy as np

from megatron_rl.transfer.planner import BoxPiece, Planner, TensorClass
from megatron_rl.types import UserError
from megatron_rl.weights.shard_box import box_volume

Flow = tuple[np.ndarray, np.ndarray, np.ndarray]  # source ranks, destination ranks, elements; [n] int64 each


def list_flows(planner: Planner) -> Iterator[Flow]:
    """Yield source ranks, destination ranks and elements for all ranks, without building operations.

    Pairs may repeat; equal ranks are copies inside the rank. Coverage is not checked.
    """
    for route in dict.fromkeys(planner._routes.values()):
        choice, leftover = planner._make_choice(route)
        total: dict[int, int] = defaultdict(int)
        for tensors, piece in route.pieces:
            for index, elements in _count_demand(planner, tensors, piece).items():
                total[index] += elements * len(tensors.names)
        spread = ((s, _count_demand(planner, planner._classes[name], piece)) for (name, piece), s in leftover.items())
        for sources, demand in chain([(choice.fixed, total)], spread):
            elements = [demand[planner._destination_of[rank]] for rank in sources]
            yield (
                np.array(list(sources.values()), np.int64),
                np.array(list(sources), np.int64),
                np.array(elements, np.int64),
            )


def _count_demand(planner: Planner, tensors: TensorClass, piece: BoxPiece) -> dict[int, int]:
    """Return destination shard -> elements that it needs of a piece."""
    demand: dict[int, int] = defaultdict(int)
    for box, indices in tensors.targets.items():
        part = planner._intersect(piece.box, box)
        if part is not None:
            for index in indices:
                demand[index] += box_volume(part)
    return demand


@dataclass(frozen=True)
class ReshardSummary:
    """Bytes of one reshard, summed over all ranks unless noted.

    Attributes:
        bytes_kept: copied inside their rank, or aliased.
        max_egress_within: bytes that a rank sends inside its node, maximum over ranks; the next three are alike, across
            nodes and received.
        egress_balance: maximum over mean of the bytes sent per rank (1 if nothing moves).
        transient_bytes: staging memory of one rank: two buckets if anything crosses nodes, else 0.
    """

    num_ranks: int
    bytes_kept: int
    bytes_within_node: int
    bytes_across_nodes: int
    max_egress_within: int
    max_egress_across: int
    max_ingress_within: int
    max_ingress_across: int
    egress_balance: float
    transient_bytes: int

    @property
    def bytes_moved(self) -> int:
        """Bytes that cross between ranks."""
        return self.bytes_within_node + self.bytes_across_nodes


@dataclass(frozen=True)
class Bandwidths:
    """Bytes per second and direction of one rank's links, inside a node and between nodes."""

    within_node: float
    across_nodes: float

    def __post_init__(self) -> None:
        if min(self.within_node, self.across_nodes) <= 0:
            raise UserError(
                f"bandwidths {self.within_node} and {self.across_nodes} bytes/s",
                source="link bandwidths",
                expected="numbers greater than 0",
                hint="NVLink has about 400e9, a 400 Gb/s NIC 50e9",
            )


@dataclass(frozen=True)
class Prediction:
    """Predicted seconds of a reshard, and its critical link class and direction, e.g. "egress across nodes"."""

    seconds: float
    critical: str


def summarize(
    flows: Iterable[Flow], *, num_ranks: int, itemsize: int, ranks_per_node: int, bucket_bytes: int
) -> ReshardSummary:
    """Sum up the flows of all ranks.

    Args:
        flows: from `list_flows`; pairs may repeat.
        itemsize: bytes per transferred element.
    """
    kept = 0
    egress, ingress = (np.zeros((2, num_ranks), np.int64) for _ in range(2))  # [across][rank]
    for origins, ranks, elements in flows:
        leaves = origins != ranks
        kept += int(elements[~leaves].sum())
        origins, ranks, elements = origins[leaves], ranks[leaves], elements[leaves]
        across = (origins // ranks_per_node != ranks // ranks_per_node).astype(np.int64)
        np.add.at(egress, (across, origins), elements)
        np.add.at(ingress, (across, ranks), elements)
    sent = egress.sum(0)
    (within, across), (egress_within, egress_across), (ingress_within, ingress_across) = (
        (elements * itemsize).tolist() for elements in (egress.sum(1), egress.max(1), ingress.max(1))
    )
    return ReshardSummary(
        num_ranks,
        kept * itemsize,
        bytes_within_node=within,
        bytes_across_nodes=across,
        max_egress_within=egress_within,
        max_egress_across=egress_across,
        max_ingress_within=ingress_within,
        max_ingress_across=ingress_across,
        egress_balance=int(sent.max()) * num_ranks / int(sent.sum()) if sent.any() else 1.0,
        transient_bytes=2 * bucket_bytes if across else 0,
    )


def predict_seconds(summary: ReshardSummary, bandwidths: Bandwidths) -> Prediction:
    """Predict the time of the busiest rank's busiest link; links of different class and direction overlap."""
    paths = {
        "egress within node": summary.max_egress_within / bandwidths.within_node,
        "ingress within node": summary.max_ingress_within / bandwidths.within_node,
        "egress across nodes": summary.max_egress_across / bandwidths.across_nodes,
        "ingress across nodes": summary.max_ingress_across / bandwidths.across_nodes,
    }
    critical = max(paths, key=lambda name: paths[name])
    return Prediction(paths[critical], critical if paths[critical] else "nothing moves")
