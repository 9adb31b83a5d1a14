# SPDX-License-Identifier: Apache-2.0
"""Gated delta nets (arXiv 2412.06464) of Qwen3-Next and Qwen3.5: linear attention in place of self-attention.

TP ranks hold whole key heads with their value heads; under context parallelism heads are exchanged for tokens, as in
attention. megatron-core's own module refuses packed sequences.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.module import MegatronModule
from torch.utils.checkpoint import checkpoint

from megatron_rl.models.delta_rule import SequenceRows, choose_delta_rule, convolve
from megatron_rl.models.layer_variants import build_projection
from megatron_rl.models.packed_sequences import PackedSequences
from megatron_rl.models.stages import make_parameter
from megatron_rl.parallel.ulysses import exchange_heads, exchange_to_tokens
from megatron_rl.weights.special_parts import DeltaNetSizes


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
