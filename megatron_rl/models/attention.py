# SPDX-License-Identifier: Apache-2.0
"""Core attention for megatron-core layer specs without Transformer Engine: packed, causal, GQA.

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
from megatron.core.transformer.module import MegatronModule


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
