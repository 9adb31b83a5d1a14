# SPDX-License-Identifier: Apache-2.0
"""Self-attention for megatron-core layer specs: fused QKV in rollout order; packed, causal core attention.

megatron-core's local `DotProductAttention` refuses packed sequences. This one takes them
(`qkv_format="thd"`): one causal `scaled_dot_product_attention` per sequence, which equals a
block-diagonal causal mask without ever making a mask. Plain `[s, b, np, d]` input is the same with
every batch column as one sequence.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.module import MegatronModule


class BlockedSelfAttention(SelfAttention):
    """Self-attention whose fused projection has the rows `[q; k; v]` of its TP rank.

    megatron-core interleaves them per KV group. In this order they are the rollout engine's own, so at
    equal TP both can share one storage. The mathematics is the same: heads keep their order.
    """

    def get_query_key_value_tensors(
        self,
        hidden_states: torch.Tensor,
        key_value_states: torch.Tensor | None = None,
        output_gate: bool = False,
        split_qkv: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Project and split: [t, 1, h] -> query [t, 1, np, d], key and value [t, 1, ng/tp, d]."""
        assert key_value_states is None and not output_gate and split_qkv, "plain self-attention only"
        d, np_, ng = (self.hidden_size_per_attention_head, self.num_attention_heads_per_partition,
                      self.num_query_groups_per_partition)
        mixed, _ = self.linear_qkv(hidden_states)  # [t, 1, (np + 2 ng/tp) * d]
        query, key, value = (
            part.unflatten(-1, (-1, d)) for part in mixed.split((np_ * d, ng * d, ng * d), dim=-1))
        if self.q_layernorm is not None:
            query, key = self.q_layernorm(query), self.k_layernorm(key)
        return query, key, value


class PackedAttention(MegatronModule):
    """Causal self-attention over packed sequences; the constructor signature is megatron-core's."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config=config)
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        assert dropout == 0.0, "RL scores what it sampled: attention dropout must be 0"
        assert config.context_parallel_size == 1, "context parallelism is refused when the config is checked"
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        """Attend.

        Args:
            query: [t, np, d] packed, or [s, b, np, d]; key and value likewise with ng/tp heads.
            packed_seq_params: boundaries of the packed sequences; None for the plain format.

        Returns:
            [t, np * d], or [s, b, np * d].
        """
        assert attention_mask is None and attention_bias is None, "causal attention only"
        if packed_seq_params is not None:
            return self._attend(query, key, value, packed_seq_params.cu_seqlens_q.tolist())
        s, b, np_, d = query.shape
        flat = [x.transpose(0, 1).reshape(b * s, x.shape[2], d) for x in (query, key, value)]  # [b*s, heads, d]
        out = self._attend(*flat, cu_seqlens=list(range(0, b * s + 1, s)))  # [b*s, np*d]
        return out.view(b, s, np_ * d).transpose(0, 1).contiguous()

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_seqlens: list[int]
    ) -> torch.Tensor:
        outputs = []
        for start, stop in zip(cu_seqlens[:-1], cu_seqlens[1:], strict=True):
            if start == stop:
                continue
            q, k, v = (x[start:stop].transpose(0, 1)[None] for x in (query, key, value))  # [1, heads, s, d]
            out = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=self.scale, enable_gqa=q.shape[1] != k.shape[1]
            )
            outputs.append(out[0].transpose(0, 1))  # [s, np, d]
        return torch.cat(outputs).flatten(1)  # [t, np*d]
