# SPDX-License-Identifier: Apache-2.0
"""Self-attention for megatron-core layer specs: blocked fused QKV rows and packed, causal core attention.

megatron-core's `DotProductAttention` refuses packed sequences and context parallelism, and its rotary embedding
supports neither contiguous shards nor shared prompts (hence `position_embedding_type="none"`).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.module import MegatronModule
from megatron.core.typed_torch import apply_module

from megatron_rl.models.attention_backends import attend
from megatron_rl.models.packed_sequences import PackedSequences
from megatron_rl.models.rotary import rotate
from megatron_rl.models.stages import make_parameter


class BlockedSelfAttention(SelfAttention):
    """Self-attention whose fused projection has rows `[q; k; v]` on each TP rank, not interleaved per KV group.

    This is the rollout engine's order, so both can share storage at equal TP.
    """

    def get_query_key_value_tensors(
        self,
        hidden_states: torch.Tensor,
        key_value_states: torch.Tensor | None = None,
        output_gate: bool = False,
        split_qkv: bool = True,
    ) -> tuple[torch.Tensor, ...]:
        """Project [t, 1, h] to query [t, 1, np, d], key and value [t, 1, ng/tp, d], optionally gates [t, 1, np, d]."""
        assert key_value_states is None and split_qkv, "plain self-attention only"
        d, np_ = self.hidden_size_per_attention_head, self.num_attention_heads_per_partition
        of_key = self.num_query_groups_per_partition * d
        mixed, _ = apply_module(self.linear_qkv)(hidden_states)  # [t, 1, (np + 2 ng/tp) * d]
        of_query = np_ * d * (2 if output_gate else 1)
        query, key, value = (part.unflatten(-1, (-1, d)) for part in mixed.split((of_query, of_key, of_key), dim=-1))
        gates = []
        if output_gate:
            query, gate = query.unflatten(-2, (-1, 2)).unbind(-2)
            gates = [gate]
        norms: tuple[Any, Any] = (self.q_layernorm, self.k_layernorm)  # the layer spec has both or neither
        if norms[0] is not None:
            query, key = norms[0](query), norms[1](key)
        return query, key, value, *gates


class PackedAttention(MegatronModule):
    """Causal core attention over packed sequences: rotation, context parallel exchange or KV cache, and attention.

    Attributes:
        softmax_offset: [np] attention sinks (megatron-core's name), or `None`.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        layer_number: int = 1,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self.layer_number = layer_number
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        assert dropout == 0.0, "RL scores what it sampled: attention dropout must be 0"
        assert config.kv_channels is not None, "megatron-core computes it where it is not set"
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        cp_group = pg_collection.cp if pg_collection is not None else None
        self._cp_group = cp_group if cp_group is not None and cp_group.size() > 1 else None
        if config.softmax_type == "learnable":
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            self.softmax_offset = make_parameter(config, torch.zeros, heads, split_dim=0)
        else:
            self.softmax_offset = None

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSequences | None = None,
    ) -> torch.Tensor:
        """Compute attention: [t/cp, np * d_v].

        Args:
            query: [t/cp, np, d], not rotated; key and value have ng/tp heads, value d_v <= d channels.
        """
        assert attention_mask is None and attention_bias is None, "causal attention only"
        assert isinstance(packed_seq_params, PackedSequences), "packed sequences with positions only"
        segments, table = packed_seq_params.of_layer(self.layer_number)
        if table is not None:
            query, key = (rotate(x, *table) for x in (query, key))
        width, cp_group = value.shape[-1], self._cp_group
        if width < key.shape[-1]:  # kernels take heads of one width
            value = F.pad(value, (0, key.shape[-1] - width))
        if packed_seq_params.cache is not None:
            cp_group, (key, value) = None, packed_seq_params.cache.store(self.layer_number, key, value)
        sinks = self.softmax_offset
        if cp_group is None:
            return attend(query, key, value, segments, self.scale, sinks)[..., :width].flatten(1)
        from megatron_rl.parallel.ulysses import exchange_to_heads, exchange_to_tokens

        query, key, value = exchange_to_heads(query, key, value, cp_group)
        sinks = sinks if sinks is None else sinks.chunk(cp_group.size())[cp_group.rank()]
        output = exchange_to_tokens(attend(query, key, value, segments, self.scale, sinks), cp_group)
        return output[..., :width].flatten(1)
