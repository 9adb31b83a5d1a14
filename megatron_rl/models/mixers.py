# SPDX-License-Identifier: Apache-2.0
"""What mixes the tokens of a layer: one of the kinds of self-attention, or a gated delta net."""

from __future__ import annotations

from typing import Any

from megatron_rl.models.attention import BlockedSelfAttention, NormedSelfAttention
from megatron_rl.weights.families import ModelShape


def choose_mixer(shape: ModelShape, layer: int) -> tuple[type, dict[str, Any]]:
    """The module of a layer, and what it is given beside megatron-core's parameters."""
    if layer in shape.delta_layers:
        from megatron_rl.models.delta_net import GatedDeltaNet

        return GatedDeltaNet, {"sizes": shape.delta_net}
    if shape.latent is not None:
        from megatron_rl.models.latent_attention import LatentSelfAttention

        return LatentSelfAttention, {"sizes": shape.latent}
    has_wide_norms = "q.norm" in shape.layer_kinds(layer).values()
    return NormedSelfAttention if has_wide_norms else BlockedSelfAttention, {}
