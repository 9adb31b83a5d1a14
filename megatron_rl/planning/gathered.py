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
from megatron_rl.planning.parameters import DTYPE_BYTES, Parameter, list_chunks
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
    """Elements of the units of a rank: all ends, the largest layer but for its experts, and these experts."""

    ends: int
    dense: int
    experts: int
    output: int
    num_layers: int

    @property
    def total(self) -> int:
        """What one pass gathers."""
        return self.ends + self.num_layers * (self.dense + self.experts)


@lru_cache(maxsize=4096)
def count_gathered(shape: ModelShape, layout: ParallelLayout, rank: int) -> GatheredElements:
    """Elements that a rank gathers, with the padding of their shards."""
    ends = dense = experts = output = num_layers = 0
    places = find_shard_places(layout, rank)

    def pad(p: Parameter) -> int:
        count = places[p.is_expert].count
        return -(-p.rows // count) * count * (p.numel // p.rows)

    for chunk in list_chunks(shape, layout, rank):
        first = [p for p in chunk if p.name.startswith("decoder.layers.0.")]
        num_layers += len({p.name.split(".")[2] for p in chunk if p.name.startswith("decoder.layers.")})
        dense = sum(pad(p) for p in first if not p.is_expert)
        experts = sum(pad(p) for p in first if p.is_expert)
        ends += sum(pad(p) for p in chunk if not p.name.startswith("decoder.layers."))
        output += sum(pad(p) for p in chunk if p.name.startswith(("output_layer.", "score.")))
    is_tied = not output and layout.coordinates(rank).pp == layout.pp_size - 1
    return GatheredElements(ends, dense, experts, ends if is_tied else output, num_layers)


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
    ends, dense, experts = found.ends * size, found.dense * size, found.experts * size
    forward, start = max(ends + 2 * dense, ends + dense + 2 * experts), 2 * ends + dense
    if not is_update:
        return GatheredBytes(forward, ends, start)
    reduced, reduced_experts = found.dense * _FLOAT, found.experts * _FLOAT
    if experts:
        layer = 2 * dense + max(2 * experts + reduced, experts + reduced_experts)
    else:
        layer = 3 * dense + reduced
    return GatheredBytes(max(forward, ends + found.output * size + layer), ends, start)
