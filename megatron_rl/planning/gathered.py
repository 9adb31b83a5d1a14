# SPDX-License-Identifier: Apache-2.0
"""Memory of temporarily gathered weights and gradients under ZeRO-3, counted from torch's FSDP2.

A *unit* is a layer, the ends of the stage (embedding, last norm, output layer), or expert-parallel experts. In forward
a unit's buffer lives until the next one is gathered. In backward the next unit is prefetched, and the float32 copy of a
unit's gradients lives until the next unit ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.planning.cluster import DTYPE_BYTES
from megatron_rl.planning.parameters import list_chunks
from megatron_rl.weights.families import ModelShape
from megatron_rl.weights.megatron_layout import find_shard_places

_FLOAT = 4


@dataclass(frozen=True)
class GatheredElements:
    """Weight elements that a rank gathers under ZeRO-3, with the padding of shards.

    Attributes:
        ends: embedding, last norm and output layer, gathered together.
        output: the output layer's part of `ends`.
        layers: per layer, elements gathered with the layer, and of experts gathered separately (else 0).
    """

    ends: int
    output: int
    layers: tuple[tuple[int, int], ...]


@lru_cache(maxsize=4096)
def count_gathered(shape: ModelShape, layout: ParallelLayout, rank: int) -> GatheredElements:
    """Count the weight elements that a rank gathers under ZeRO-3, by layer and outside of layers."""
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
) -> tuple[int, int, int]:
    """Compute the peak bytes of weights and gradients that a rank holds temporarily in one pass of a role.

    Args:
        is_update: forward and backward, not forward only.

    Returns:
        Bytes while a layer runs; while the output layer runs, without its gradient; before the first layer.
    """
    size, found = DTYPE_BYTES[dtype], count_gathered(shape, layout, rank)
    ends, kinds = found.ends * size, {*found.layers}
    forward = max(ends + max(2 * dense, dense + 2 * experts) * size for dense, experts in kinds)
    start = 2 * ends + found.layers[0][0] * size
    if not is_update:
        return forward, ends, start
    backward = max(_hold_backward(dense, experts, size) for dense, experts in kinds)
    return max(forward, ends + found.output * size + backward), ends, start


def _hold_backward(dense: int, experts: int, size: int) -> int:
    """Return the peak bytes of gathered weights and float32 gradients in a layer's backward, between equal layers.

    Args:
        dense, experts: elements gathered with the layer, and of experts gathered separately.
        size: bytes per gathered element.
    """
    reduced, reduced_experts = dense * _FLOAT, experts * _FLOAT
    dense, experts = dense * size, experts * size
    if experts:
        return 2 * dense + max(2 * experts + reduced, experts + reduced_experts)
    return 3 * dense + reduced
