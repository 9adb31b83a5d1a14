# SPDX-License-Identifier: Apache-2.0
"""Layers that differ from Llama's: other places of norms, multi-head latent attention, and gated delta nets.

* Outputs of attention and MLP are normalized, besides inputs (Gemma 3, GLM-4) or instead of them (OLMo 2, which also
  normalizes all heads of q, and of k, together).
* Gemma 4 scales the output of a layer, and normalizes values too; layers have heads of two sizes.
* Latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): down-projections are replicated over TP, up-projections
  are split by heads; sequence parallelism gathers only latents. megatron-core's own module uses global process groups
  and rotates by row, not by position.
* Gated delta nets (arXiv 2412.06464) of Qwen3-Next and Qwen3.5 are linear attention. TP ranks hold whole key heads with
  their value heads; under context parallelism heads are exchanged for tokens, as in attention. megatron-core's own
  module refuses packed sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import Attention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch.utils.checkpoint import checkpoint

from megatron_rl.models.attention import BlockedSelfAttention, PackedSequences
from megatron_rl.models.delta_rule import SequenceRows, choose_delta_rule, convolve
from megatron_rl.models.other_stages import ReplicatedLinear
from megatron_rl.models.stages import gather_for_shards, make_parameter
from megatron_rl.parallel.ulysses import exchange_heads, exchange_to_tokens
from megatron_rl.weights.families import ModelShape
from megatron_rl.weights.head_sizes import LatentSizes
from megatron_rl.weights.special_parts import DeltaNetSizes


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


class ScaledLayer(SandwichLayer):
    """`SandwichLayer` whose output is multiplied by a number that is not trained (Gemma 4)."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.layer_scalar = make_parameter(self.config, torch.ones, 1).requires_grad_(False)
        add = self.mlp_bda(is_training=True, fused=False)
        self.mlp_bda = lambda is_training, fused: lambda *terms: add(*terms) * self.layer_scalar


class SizedSelfAttention(BlockedSelfAttention):
    """`BlockedSelfAttention` with the head sizes of its layer and normalized values (Gemma 4).

    Args:
        shape: of the model. If full layers share values, `linear_qkv` is `[q; k]` there, and values are keys before
            norm and rotation.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: SelfAttentionSubmodules,
        layer_number: int,
        *,
        shape: ModelShape,
        **options: Any,
    ) -> None:
        linear: Any = submodules.linear_qkv
        config, own = copy(config), shape.at(layer_number - 1)
        config.kv_channels, config.num_query_groups = own.head_dim, own.num_kv_heads
        shares_values = own is not shape and shape.full_heads is not None and shape.full_heads.shares_values
        if shares_values:
            rows = (own.num_heads + own.num_kv_heads) * own.head_dim

            def build(inputs: int, outputs: int, **settings: Any) -> Any:
                return build_module(linear, inputs, rows, **settings)

            submodules = replace(submodules, linear_qkv=build)
        super().__init__(config, submodules, layer_number, **options)
        self._shares_values = shares_values

    def get_query_key_value_tensors(
        self, hidden_states: torch.Tensor, key_value_states: torch.Tensor | None = None, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, ...]:
        """Project [t, 1, h] to query [t, 1, np, d], key and value [t, 1, ng/tp, d], all normalized."""
        assert key_value_states is None, "self-attention only"
        d, heads = self.hidden_size_per_attention_head, self.num_attention_heads_per_partition
        kv = self.num_query_groups_per_partition * d
        mixed = self.get_submodule("linear_qkv")(hidden_states)[0]
        rows = (heads * d, kv) if self._shares_values else (heads * d, kv, kv)
        query, key, *values = (part.unflatten(-1, (-1, d)) for part in mixed.split(rows, dim=-1))
        value = F.rms_norm(values[0] if values else key, (d,), eps=self.config.layernorm_epsilon)
        norm_query: Any = self.q_layernorm
        norm_key: Any = self.k_layernorm
        return norm_query(query), norm_key(key), value


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


class GatedNorm(torch.nn.Module):
    """RMS norm of every head times SiLU of a gate; the weight's gradient is partial under sequence parallelism."""

    def __init__(self, config: TransformerConfig, size: int) -> None:
        super().__init__()
        self.eps = config.layernorm_epsilon
        self.weight = make_parameter(config, torch.ones, size)

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Normalize [..., d] and gate it; the weight applies in the dtype of x, as in the reference code."""
        wide = x.float()
        normed = wide * (wide.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return (self.weight * normed.type_as(x) * F.silu(gate.float())).type_as(x)


class GatedDeltaNet(MegatronModule):
    """Linear attention of a layer, with the signature of megatron-core's self-attention.

    Args:
        submodules: `linear_qkv` and `linear_proj` are the classes of the projections.
        sizes: head counts and widths over all TP ranks.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: SelfAttentionSubmodules,
        layer_number: int,
        *,
        sizes: DeltaNetSizes,
        pg_collection: ProcessGroupCollection,
        **_: Any,
    ) -> None:
        super().__init__(config)
        self.layer_number, self._sizes = layer_number, sizes
        tp_group, cp_group = pg_collection.tp, pg_collection.cp
        self._cp_group = cp_group if cp_group.size() > 1 else None
        self._recomputes = config.recompute_granularity == "selective"
        columns, values = sizes.key_heads * (sizes.width + sizes.num_logits), sizes.value_heads * sizes.value_dim
        first, last = submodules.linear_qkv, submodules.linear_proj
        self.in_proj = build_projection(first, config, config.hidden_size, columns, "qkv", tp_group)
        self.add_module("linear_proj", build_projection(last, config, values, config.hidden_size, "proj", tp_group))
        heads = sizes.value_heads // tp_group.size()
        self._parts = [x // tp_group.size() for x in sizes.convolved]
        self.conv_weight = make_parameter(config, torch.zeros, sum(self._parts), 1, sizes.kernel, split_dim=0)
        self.A_log, self.dt_bias = (make_parameter(config, torch.zeros, heads, split_dim=0) for _ in range(2))
        self.norm = GatedNorm(config, sizes.value_dim)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        packed_seq_params: PackedSequences,
        **_: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Map [t, 1, h], or [t/tp, 1, h] under sequence parallelism, to the same shape and no bias."""
        rows = packed_seq_params.sequence_rows
        assert attention_mask is None and rows is not None, "packed sequences only"
        assert packed_seq_params.cache is None, "there is no cache of states"
        mixed = self.in_proj(hidden_states)[0].squeeze(1)  # [t/cp, columns/tp]
        sizes, num_logits = self._sizes, len(self.A_log)
        # Per key head: query, key, values, and logits of beta and of decay side by side; output gates.
        if sizes.is_split:
            parts = mixed.split([*self._parts, self._parts[-1], num_logits, num_logits], 1)
            num_heads = num_logits * sizes.key_heads // sizes.value_heads
            query, key, value, gates, *logits = (x.unflatten(1, (num_heads, -1)) for x in parts)
            inputs = torch.cat([query, key, value, *logits], -1)
        else:
            heads, logits = mixed.split([mixed.shape[1] - 2 * num_logits, 2 * num_logits], 1)
            heads, logits = heads.unflatten(1, (-1, sizes.width)), logits.unflatten(1, (-1, sizes.num_logits))
            heads, gates = heads.split([sizes.width - sizes.values_of_key, sizes.values_of_key], -1)
            inputs = torch.cat([heads, logits], -1)
        if self._cp_group is not None:
            inputs = exchange_heads(inputs, self._cp_group)
        weights = self.conv_weight, self.A_log, self.dt_bias
        recomputes = self._recomputes and self.training
        attend = partial(checkpoint, self._attend, use_reentrant=False) if recomputes else self._attend
        output: Any = attend(inputs, rows, *weights)
        if self._cp_group is not None:
            output = exchange_to_tokens(output, self._cp_group)
        output = self.norm(output, gates.reshape_as(output))
        return self.get_submodule("linear_proj")(output.flatten(1).unsqueeze(1))

    def _attend(
        self,
        inputs: torch.Tensor,
        rows: SequenceRows,
        conv_weight: torch.Tensor,
        a_log: torch.Tensor,
        dt_bias: torch.Tensor,
    ) -> torch.Tensor:
        """Apply convolution and delta rule to all tokens of this rank's heads: [t, value heads, d_v]."""
        sizes = self._sizes
        query, key, value, strength, speed = inputs.split(
            [sizes.key_dim, sizes.key_dim, sizes.values_of_key, sizes.num_logits // 2, sizes.num_logits // 2], -1
        )
        strength, speed = strength.flatten(1), speed.flatten(1)
        if self._cp_group is not None:
            cp_size, cp_rank = self._cp_group.size(), self._cp_group.rank()
            a_log, dt_bias = (x.chunk(cp_size)[cp_rank] for x in (a_log, dt_bias))
            conv_weight = torch.cat([x.chunk(cp_size)[cp_rank] for x in conv_weight.split(self._parts)])
        parts = [x.flatten(1) for x in (query, key, value)]
        mixed = convolve(torch.cat(parts, 1), conv_weight, rows)
        dims = sizes.key_dim, sizes.key_dim, sizes.value_dim
        pieces = zip(mixed.split([x.shape[1] for x in parts], 1), dims, strict=True)
        query, key, value = (x.unflatten(1, (-1, d)) for x, d in pieces)
        decay = -a_log.float().exp() * F.softplus(speed.float() + dt_bias)
        rule = choose_delta_rule(inputs.device, inputs.dtype)
        return rule(query, key, value, decay, strength.sigmoid(), rows).to(inputs.dtype)
