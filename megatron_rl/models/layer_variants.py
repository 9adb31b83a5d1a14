# SPDX-License-Identifier: Apache-2.0
"""Layers that differ from Llama's: other places of norms, and multi-head latent attention.

* Outputs of attention and MLP are normalized, besides inputs (Gemma 3, GLM-4) or instead of them (OLMo 2, which also
  normalizes all heads of q, and of k, together).
* Latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): down-projections are replicated over TP, up-projections
  are split by heads; sequence parallelism gathers only latents. megatron-core's own module uses global process groups
  and rotates by row, not by position.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import Attention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_rl.models.attention import BlockedSelfAttention
from megatron_rl.models.other_stages import ReplicatedLinear
from megatron_rl.models.stages import gather_for_shards, make_parameter
from megatron_rl.weights.special_parts import LatentSizes


class SplitRMSNorm(torch.nn.Module):
    """RMS norm over `size` channels that are split over TP, like its weight; the weight's gradient is complete."""

    def __init__(
        self, config: TransformerConfig, size: int, eps: float, tp_group: torch.distributed.ProcessGroup
    ) -> None:
        super().__init__()
        self.eps, self._size, self._tp_group = eps, size, tp_group
        self.weight = make_parameter(config, torch.ones, size // tp_group.size(), split_dim=0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize [..., size/tp] in float32; all ranks must pass the same rows."""
        wide = x.float()
        squares = reduce_from_tensor_model_parallel_region(wide.square().sum(-1, keepdim=True), self._tp_group)
        squares = copy_to_tensor_model_parallel_region(squares, self._tp_group)  # sums the gradient over TP
        return (wide * (squares / self._size + self.eps).rsqrt() * self.weight.float()).type_as(x)


class NormedSelfAttention(BlockedSelfAttention):
    """`BlockedSelfAttention` that normalizes q over [np * d] of all TP ranks, and k likewise (OLMo 2)."""

    def __init__(self, config: TransformerConfig, *arguments: Any, **options: Any) -> None:
        super().__init__(config, *arguments, **options)
        q, k = self.query_projection_size, self.kv_projection_size
        self.q_norm, self.k_norm = (SplitRMSNorm(config, n, config.layernorm_epsilon, self.tp_group) for n in (q, k))

    def get_query_key_value_tensors(self, *arguments: Any, **options: Any) -> tuple[torch.Tensor, ...]:
        """Project, split and normalize."""
        query, key, value = super().get_query_key_value_tensors(*arguments, **options)
        normed = (norm(x.flatten(-2)).view_as(x) for norm, x in ((self.q_norm, query), (self.k_norm, key)))
        return (*normed, value)


class SandwichLayer(TransformerLayer):
    """megatron-core layer that also normalizes the outputs of attention and MLP."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        config = self.config
        norm: Any = self.submodules_config.input_layernorm
        self.post_self_attn_layernorm, self.post_mlp_layernorm = (
            build_module(norm, config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon)
            for _ in range(2)
        )
        self.self_attn_bda = _add_normalized(self.post_self_attn_layernorm)
        self.mlp_bda = _add_normalized(self.post_mlp_layernorm)


class OutputNormLayer(SandwichLayer):
    """megatron-core layer that normalizes the outputs of attention and MLP, not their inputs."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        for name in ("input_layernorm", "pre_mlp_layernorm"):
            self.add_module(name, IdentityOp())


def _add_normalized(norm: Any) -> Callable[..., Callable[..., torch.Tensor]]:
    """Return a replacement for megatron-core's bias-dropout-add that normalizes the output before the sum."""

    def add(result: tuple[torch.Tensor, torch.Tensor | None], residual: torch.Tensor, dropout: float) -> torch.Tensor:
        output, bias = result
        assert bias is None and dropout == 0.0, "matrices without a bias, and no dropout"
        return residual + norm(output)

    return lambda is_training, fused: add


def build_projection(
    linear: Any, config: TransformerConfig, inputs: int, outputs: int, name: str, tp_group: dist.ProcessGroup
) -> Any:
    """Build a bias-free linear of class `linear`, split over TP.

    Args:
        name: megatron-core's buffer name; "proj" makes the linear row-parallel, others column-parallel.
    """
    options: dict[str, Any] = dict(init_method=config.init_method, gather_output=False, skip_bias_add=False)
    if name == "proj":
        options = dict(init_method=config.output_layer_init_method, input_is_parallel=True, skip_bias_add=True)
    options |= dict(config=config, bias=False, is_expert=False, tp_comm_buffer_name=name, tp_group=tp_group)
    return build_module(linear, inputs, outputs, **options)


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
