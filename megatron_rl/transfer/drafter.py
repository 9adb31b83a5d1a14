# SPDX-License-Identifier: Apache-2.0
"""Weights of the layer for multi-token prediction in vLLM, which drafts with it (`rollout.draft_tokens`)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron_rl.transfer.executor import TensorSet, Transfer, TransferContext, split_types
from megatron_rl.transfer.hybrid_engine import HybridEngine
from megatron_rl.weights.placement_tables import PlacementTable
from megatron_rl.weights.rollout_layout import vllm_placements


def add_drafter(hybrid: HybridEngine, layer: Any, tp_size: int) -> None:
    """Write a layer into engines of `tp_size` ranks at each reshard, under the certificate; collective.

    Args:
        layer: its `training.setup.LaidOutModel`.
    """
    shape = layer.shape

    def place(rank: int) -> PlacementTable:
        found: Any = hybrid.engine.shard_key(rank)  # of vLLM: the rank's place in its engine
        return vllm_placements(shape, tp_size=tp_size, place=found)

    def build(context: TransferContext, wide: frozenset[str]) -> list[Transfer]:
        tensors = TensorSet(shape.logical_tensors(), layer.params, layer.placements, place)
        # The layer has float32 tensors where the one before it has them.
        last, own = (f"model.layers.{number}." for number in (shape.mtp_layer - 1, shape.mtp_layer))
        wide = frozenset(name.replace(last, own) for name in wide)
        context = replace(context, actor_ranks=layer.layout.ranks, actor_key=layer.shard_key)
        return [Transfer(part, context) for part in split_types(tensors, context, wide)]

    hybrid.add_transfers(build)
