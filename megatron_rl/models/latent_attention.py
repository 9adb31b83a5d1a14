# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1) around our packed core attention.

Down-projections are replicated over TP, up-projections are split by heads; sequence parallelism gathers only latents.
megatron-core's own module uses global process groups and rotates by row, not by position.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import Attention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import build_module

from megatron_rl.models.attention import build_projection
from megatron_rl.models.stages import ReplicatedLinear, gather_for_shards
from megatron_rl.weights.family import LatentSizes


class LatentSelfAttention(Attention):
    """Multi-head latent attention: keys and values, and queries in some models, are projected from narrow latents.

    A head's rotated channels come first (last in checkpoints), as `PackedAttention` requires.

    Args:
        submodules: `linear_qkv` is the class of the up-projections, `q_layernorm` the class of the norms.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: SelfAttentionSubmodules,
        layer_number: int,
        *,
        sizes: LatentSizes,
        attn_mask_type: AttnMaskType = AttnMaskType.causal,
        **options: Any,
    ) -> None:
        up: Any = submodules.linear_qkv
        norm: Any = submodules.q_layernorm
        output: Any = submodules.linear_proj
        none: Any = IdentityOp
        rest = SelfAttentionSubmodules(up, submodules.core_attention, linear_proj=none)
        super().__init__(config, rest, layer_number, attn_mask_type, "self", **options)
        heads, channels = config.num_attention_heads, self.hidden_size_per_attention_head
        self._sizes, self._is_split = sizes, config.sequence_parallel
        self._plain = channels - sizes.rotary  # channels of a head that are not rotated

        def make_norm(size: int) -> Any:
            return build_module(norm, config=config, hidden_size=size, eps=config.layernorm_epsilon)

        last = build_projection(output, config, heads * sizes.value, config.hidden_size, "proj", self.tp_group)
        self.add_module("linear_proj", last)
        if sizes.query:
            self.linear_q_down_proj = ReplicatedLinear(config, config.hidden_size, sizes.query)
        self.add_module("q_layernorm", make_norm(sizes.query) if sizes.query else None)
        self.add_module("k_layernorm", None)  # megatron-core reads the attribute
        self.linear_q_up_proj = build_projection(
            up, config, sizes.query or config.hidden_size, heads * channels, "q_up_proj", self.tp_group
        )
        self.linear_kv_down_proj = ReplicatedLinear(config, config.hidden_size, sizes.key_value + sizes.rotary)
        self.kv_layernorm = make_norm(sizes.key_value)
        self.linear_kv_up_proj = build_projection(
            up, config, sizes.key_value, heads * (self._plain + sizes.value), "kv_up_proj", self.tp_group
        )

    def get_query_key_value_tensors(
        self, hidden_states: torch.Tensor, key_value_states: torch.Tensor | None = None, **_: Any
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Project [t, 1, h] or (sequence parallelism) [t/tp, 1, h] to q, k [t, 1, np, d], v [t, 1, np, d_v]."""
        assert key_value_states is None, "self-attention only"
        sizes, plain = self._sizes, self._plain
        latent = hidden_states
        if sizes.query:
            latent = self.get_submodule("q_layernorm")(self.linear_q_down_proj(hidden_states))
        query = self.linear_q_up_proj(latent)[0].unflatten(-1, (-1, plain + sizes.rotary))
        query = torch.cat(query.split([plain, sizes.rotary], -1)[::-1], -1)
        latent, rotary = self.linear_kv_down_proj(hidden_states).split([sizes.key_value, sizes.rotary], -1)
        mixed = self.linear_kv_up_proj(self.kv_layernorm(latent))[0].unflatten(-1, (-1, plain + sizes.value))
        of_key, value = mixed.split([plain, sizes.value], -1)
        rotary = gather_for_shards(rotary, sequence_parallel=self._is_split, tp_group=self.tp_group)  # of all heads
        rotary = rotary.unsqueeze(-2).expand(*of_key.shape[:-1], -1)
        return query, torch.cat([rotary, of_key], -1), value
