# SPDX-License-Identifier: Apache-2.0
"""What a rank holds for a moment of weights and gradients that data parallel ranks share (ZeRO-3).

Counted from torch's FSDP2: what an all-gather gives is copied into the parameters of a *unit*, a layer or the ends of
the stage (embedding, last norm, output layer). In a forward pass the buffer of a unit stays until the next one is
gathered. In a backward pass the unit before is gathered while one computes, its gradients are complete at its end, and
the float32 copy of them that is reduced stays until the next unit ends. Experts that are spread over ranks are a unit
inside of their layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.planning.cluster import DTYPE_BYTES
from megatron_rl.planning.parameters import list_chunks
from megatron_rl.weights.families import ModelShape
from megatron_rl.weights.row_shards import find_shard_places

_FLOAT = 4


@dataclass(frozen=True)
class GatheredBytes:
    """Bytes of one rank.

    Attributes:
        layers: at the most while a layer works.
        head: while the head works, without the gradient of the output layer.
        start: before the first layer works, and there are activations: the ends, their buffer, and the next one.
    """

    layers: int
    head: int
    start: int


@dataclass(frozen=True)
class GatheredElements:
    """Elements of the units of a rank, with the padding of their shards.

    Attributes:
        ends: embedding, last norm and output layer.
        output: of them, what the head reads.
        layers: of each layer, first without its experts where they are a unit of their own, then these.
    """

    ends: int
    output: int
    layers: tuple[tuple[int, int], ...]


@lru_cache(maxsize=4096)
def count_gathered(shape: ModelShape, layout: ParallelLayout, rank: int) -> GatheredElements:
    """Elements that a rank gathers."""
    ends, output, layers = 0, 0, list[tuple[int, int]]()
    places = find_shard_places(layout, rank)
    for chunk in list_chunks(shape, layout, rank):
        found: dict[str, list[int]] = {}
        for p in (p for p in chunk if not p.is_frozen):
            count = places[p.is_expert].count
            size = -(-p.rows // count) * count * (p.numel // p.rows)
            if p.name.startswith("decoder.layers."):
                found.setdefault(p.name.split(".")[2], [0, 0])[p.is_expert] += size
            else:
                ends += size
                output += size if p.name.startswith(("output_layer.", "score.")) else 0
        layers += [(dense, experts) for dense, experts in found.values()]
    is_tied = not output and layout.coordinates(rank).pp == layout.pp_size - 1
    return GatheredElements(ends, ends if is_tied else output, tuple(layers))


def compute_gathered_bytes(
    shape: ModelShape, layout: ParallelLayout, rank: int, *, dtype: str, is_update: bool
) -> GatheredBytes:
    """What a pass of a role holds for a moment.

    Args:
        shape: the model, with its head.
        layout: of the role.
        rank: of the role.
        dtype: that it computes in.
        is_update: forward and backward; else forward only.
    """
    size, found = DTYPE_BYTES[dtype], count_gathered(shape, layout, rank)
    ends, kinds = found.ends * size, {*found.layers}
    forward = max(ends + max(2 * dense, dense + 2 * experts) * size for dense, experts in kinds)
    start = 2 * ends + found.layers[0][0] * size
    if not is_update:
        return GatheredBytes(forward, ends, start)
    backward = max(_hold_backward(dense, experts, size) for dense, experts in kinds)
    return GatheredBytes(max(forward, ends + found.output * size + backward), ends, start)


def _hold_backward(dense: int, experts: int, size: int) -> int:
    """Bytes of layers while one of them goes backward, and the ones before and after it are like it."""
    reduced, reduced_experts = dense * _FLOAT, experts * _FLOAT
    dense, experts = dense * size, experts * size
    if experts:
        return 2 * dense + max(2 * experts + reduced, experts + reduced_experts)
    return 3 * dense + reduced
