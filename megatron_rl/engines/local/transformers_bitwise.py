# SPDX-License-Identifier: Apache-2.0
"""Batch-invariant transformers models (rollout.bitwise), with the trainer's matrix products and attention.

Norms, activations and rotary embeddings are bitwise equal already.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from megatron_rl.models.attention_backends import Segments, attend, build_segments
from megatron_rl.parallel.batch_invariant import multiply
from megatron_rl.samples.prefix import SegmentKeys

ATTENTION = "megatron_rl_tiled"


class _PaddedAttention:
    """An attention function for transformers that computes left-padded rows by the trainer's `attend`."""

    def __init__(self) -> None:
        self._mask: torch.Tensor | None = None
        self._packed: tuple[torch.Tensor, torch.Tensor, Segments] | None = None

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor,
        scaling: float,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        """Attend: query [b, n, s, d], key and value [b, ng, k, d], attention_mask [b, k] -> [b, s, n, d]."""
        if self._packed is None or self._mask is not attention_mask:
            self._mask, self._packed = attention_mask, _pack(attention_mask, query.shape[2], query.dtype)
        rows, keys, segments = self._packed
        query, key, value = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
        output = torch.zeros_like(query)
        output[rows] = attend(query[rows], key[keys], value[keys], segments, scaling)
        return output.unflatten(0, (len(attention_mask), -1)), None


def _pack(mask: torch.Tensor, num_queries: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, Segments]:
    """Return flat indices of the queries [t] and keys [k] that are no padding, and their segments for `attend`."""
    is_key, is_query = mask.bool(), mask[:, -num_queries:].bool()
    cu_q, cu_k = (torch.nn.functional.pad(real.sum(1).cumsum(0), (1, 0)).int() for real in (is_query, is_key))
    index = is_key.flatten().nonzero()[:, 0]
    keys = SegmentKeys(torch.arange(len(index)), cu_k, mask.shape[1])
    return is_query.flatten().nonzero()[:, 0], index, build_segments(cu_q, num_queries, keys, dtype, "tiled")


def _keep_padding(
    batch_size: int, q_length: int, kv_length: int, *_: Any, attention_mask: torch.Tensor | None = None, **__: Any
) -> torch.Tensor:
    """Return the padding mask [b, k] in place of transformers' causal mask."""
    if attention_mask is None:
        return torch.ones(batch_size, kv_length, dtype=torch.bool)
    return attention_mask[:, -kv_length:]


AttentionInterface.register(ATTENTION, _PaddedAttention())
AttentionMaskInterface.register(ATTENTION, _keep_padding)


def make_batch_invariant(model: Any) -> None:
    """Replace attention and linear layers by the trainer's kernels."""
    model.set_attn_implementation(ATTENTION)
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            linear: Any = module
            linear.forward = partial(multiply, weight=linear.weight, bias=linear.bias)
