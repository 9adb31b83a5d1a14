# SPDX-License-Identifier: Apache-2.0
"""Replay of the experts that an earlier forward pass chose, and routing metrics."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron_rl.models.attention import shard_rows
from megatron_rl.models.routing import BiasedRouter, RoutingCounts, RowRoutes
from megatron_rl.parallel.groups import ParallelGroups
from megatron_rl.samples.batch import TrainBatch
from megatron_rl.weights.families import ModelShape

THIRDS = ("first", "middle", "last")  # of the layers with experts


class Routing:
    """Routers of this rank's pipeline stages.

    Each routing decision is made on one rank (experts under TP need sequence parallelism), so counts are summed over
    all ranks.
    """

    def __init__(
        self, shape: ModelShape, groups: ParallelGroups, *, sequence_parallel: bool, device: torch.device
    ) -> None:
        self._shape, self._groups = shape.route_shape, groups
        self._num_layers, self._has_biases = shape.num_layers, shape.router is not None
        self._tp_size = groups.layout.tp_size if sequence_parallel else 1
        layers, experts = self._sizes = self._shape.layers, self._shape.experts
        self._flat = torch.zeros(layers * (experts + 3) + 1, dtype=torch.float64, device=device)
        self._counts = RoutingCounts.of(self._flat, *self._sizes)

    def shard(self, start: int, stop: int) -> slice:
        """Return this rank's part of rows [start, stop), split by TP under sequence parallelism."""
        part = shard_rows(stop - start, self._tp_size, self._groups.at.tp if self._tp_size > 1 else 0)
        return slice(start + part.start, start + part.stop)

    def describe(self, microbatch: TrainBatch) -> RowRoutes:
        """Build the routing inputs of this rank's rows."""
        rows = shard_rows(microbatch.num_computed, self._groups.layout.cp_size, self._groups.at.cp)
        mine, counts = self.shard(rows.start, rows.stop), None if microbatch.flipped is None else self._counts
        counted = None if counts is None else microbatch.computed(microbatch.loss_mask)[mine]
        if microbatch.slices[0].computed is not None:
            assert microbatch.replayed_routes is None and microbatch.routes_used is None, "put_aside resets the setting"
            return RowRoutes(counted=counted, counts=counts)

        columns = microbatch.replayed_routes, microbatch.routes_used, microbatch.flipped
        given, used, flipped = (None if values is None else values[mine] for values in columns)
        return RowRoutes(given, used, counted, flipped, counts)

    def make_room(self, batch: TrainBatch) -> torch.Tensor:
        """Allocate an "unknown"-filled buffer for expert choices, [t, layers, choices]."""
        nothing = torch.from_numpy(self._shape.unknown(1)).to(batch.tokens.device)
        return nothing.repeat(len(batch.tokens), 1, 1)

    def clear(self) -> None:
        """Reset the counts."""
        self._flat.zero_()

    def finish(self, minibatches: Sequence[TrainBatch], stages: torch.nn.Module, bias_rate: float) -> dict[str, float]:
        """Shift router biases and compute the update's `moe/...` metrics, on every rank; collective.

        Args:
            bias_rate: size of the bias update; 0 for none.
        """
        totals = self._reduce(minibatches)
        loads = RoutingCounts.of(totals[:-1], *self._sizes).loads
        squares = totals.new_zeros(len(loads) if self._has_biases else 0)
        for router in (module for module in stages.modules() if isinstance(module, BiasedRouter)):
            assert router.layer_number is not None, "megatron-core numbers the layers"
            layer = router.layer_number - 1 - self._num_layers
            if bias_rate:
                router.shift_bias(loads[layer], bias_rate)
            squares[layer] = router.expert_bias.double().square().sum()
        if self._has_biases:
            dist.all_reduce(squares, group=self._groups.pp)
        found, squares = torch.cat([totals, squares]).cpu().split([len(totals), len(squares)])  # the only host sync
        counts = RoutingCounts.of(found[:-1], *self._sizes)
        return describe_routing(counts, self._shape.choices, squares, float(found[-1]))

    def _reduce(self, minibatches: Sequence[TrainBatch]) -> torch.Tensor:
        """Sum over all ranks the counts and, last, the tokens that a router would have sent elsewhere; flat float64."""
        groups, flips = self._groups, self._flat.new_zeros(1)
        for minibatch in minibatches:
            flipped = minibatch.column("flipped").to(torch.uint8)  # in this rank's layers
            if groups.pp.size() > 1:
                dist.all_reduce(flipped, op=dist.ReduceOp.MAX, group=groups.pp)
            if groups.is_last_stage:
                flips += (flipped.bool() & minibatch.loss_mask).sum()
        totals = torch.cat([self._flat, flips])
        dist.all_reduce(totals, group=groups.world)
        return totals


def describe_routing(
    counts: RoutingCounts, choices: int, squares: torch.Tensor, num_flipped: float
) -> dict[str, float]:
    """Compute router metrics, plus `<metric>/<third>` per third of the layers for all but `moe/flipped_tokens`.

    Args:
        choices: experts per token.
        squares: [layers] float64, sum of squared biases per router; [0] without biases.
        num_flipped: tokens that a router would have sent to other experts in some layer.

    Returns:
        moe/max_load: tokens of the busiest expert of all layers, relative to an even load.
        moe/mean_load: the same per layer, mean over layers.
        moe/dead_experts: experts without a token.
        moe/entropy: gate entropy relative to a uniform gate; mean over tokens and layers.
        moe/bias_norm: L2 norm of all biases.
        moe/agreement: share of replayed choices that equal the router's own.
        moe/flipped_tokens: `num_flipped` relative to replayed tokens.
    """
    assert not float(counts.strayed), f"{int(counts.strayed)} tokens went to other experts than their routes say"
    metrics = _describe_layers(counts, choices, squares)
    if replayed := float(counts.replayed.max()):
        metrics["moe/flipped_tokens"] = num_flipped / replayed
    for third, layers in split_layers(len(counts.loads)).items():
        part = RoutingCounts(*(x[layers] if x.dim() else x for x in vars(counts).values()))
        found = _describe_layers(part, choices, squares[layers])
        metrics |= {f"{name}/{third}": value for name, value in found.items()}
    return metrics


def split_layers(num_layers: int) -> dict[str, slice]:
    """Split the layers with experts into thirds, later ones the larger; empty for fewer than three layers."""
    ends = [num_layers * i // len(THIRDS) for i in range(len(THIRDS) + 1)]
    return {third: slice(*ends[i : i + 2]) for i, third in enumerate(THIRDS) if num_layers >= len(THIRDS)}


def _describe_layers(counts: RoutingCounts, choices: int, squares: torch.Tensor) -> dict[str, float]:
    loads = counts.loads.double()
    busiest = loads.amax(1) * loads.shape[1] / loads.sum(1).clamp(min=1)
    tokens = (loads.sum(1) / choices).clamp(min=1)
    metrics = {
        "moe/max_load": float(busiest.max()),
        "moe/mean_load": float(busiest.mean()),
        "moe/dead_experts": float((loads == 0).sum()),
        "moe/entropy": float((counts.entropy / tokens).mean()) / math.log(loads.shape[1]),
    }
    if len(squares):
        metrics["moe/bias_norm"] = math.sqrt(float(squares.sum()))
    if replayed := float(counts.replayed.sum()):
        metrics["moe/agreement"] = float(counts.agreeing.sum()) / replayed
    return metrics
