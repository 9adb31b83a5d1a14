# SPDX-License-Identifier: Apache-2.0
"""Self-attention for megatron-core layer specs: blocked fused QKV rows and packed, causal core attention.

megatron-core's `DotProductAttention` refuses packed sequences and context parallelism, and its rotary embedding
supports neither contiguous shards nor shared prompts (hence `position_embedding_type="none"`).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from megatron.core.typed_torch import apply_module

from megatron_rl.models.attention_backends import attend
from megatron_rl.models.packed_sequences import PackedSequences
from megatron_rl.models.rms_norm import SplitRMSNorm
from megatron_rl.models.rotary import rotate
from megatron_rl.models.stages import make_parameter
from megatron_rl.parallel.ulysses import exchange_to_heads, exchange_to_tokens


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
        if cp_group is not None:
            query, key, value = exchange_to_heads(query, key, value, cp_group)
            sinks = sinks if sinks is None else sinks.chunk(cp_group.size())[cp_group.rank()]
        output = attend(query, key, value, segments, self.scale, sinks)
        if cp_group is not None:
            output = exchange_to_tokens(output, cp_group)
        return output[..., :width].flatten(1)
