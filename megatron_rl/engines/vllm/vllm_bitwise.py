# SPDX-License-Identifier: Apache-2.0
"""Batch-invariant vLLM models on CPU (rollout.bitwise), bitwise equal to the trainer.

Replaces matrix products, paged attention and log-softmax; all else is bitwise equal already, including rotary
embeddings without their C++ kernel (`list_engine_arguments`).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from megatron_rl.models.attention_backends import Segments, attend, build_segments
from megatron_rl.parallel.batch_invariant import multiply
from megatron_rl.parallel.vocab_parallel import compute_all_logprobs
from megatron_rl.samples.prefix import SegmentKeys


class _PagedAttention:
    """A replacement of vLLM's CPU attention by the trainer's `attend` on the paged KV cache.

    The cache is [blocks, heads, block size, 2 d], key beside value; all layers share the indices of a step.
    """

    def __init__(self) -> None:
        self._metadata: Any = None
        self._packed: tuple[torch.Tensor, torch.Tensor, Segments] | None = None

    def write(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slots: torch.Tensor
    ) -> None:
        """Write new keys and values [t, heads, d] to their slots of the cache; negative slots are padding."""
        slots = slots[: len(key)].long()
        is_real = slots >= 0
        block, place = slots[is_real] // kv_cache.shape[2], slots[is_real] % kv_cache.shape[2]
        kv_cache[block, :, place] = torch.cat([key, value], -1)[is_real]

    def attend(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: Any,
        **options: Any,
    ) -> torch.Tensor:
        """Attend from query [t, n, d] to the cached keys and values; write and return options["output"].

        Args:
            metadata: vLLM's lengths and block table of the step; `None` in the warm-up, which computes nothing.
        """
        output: torch.Tensor = options["output"]
        if metadata is None:  # warming up
            return output
        if self._metadata is not metadata:
            self._metadata, self._packed = metadata, _pack(metadata, kv_cache.shape[2], query.dtype)
        assert self._packed is not None
        block, place, segments = self._packed
        keys, values = kv_cache[block, :, place].chunk(2, -1)
        count = metadata.num_actual_tokens
        output[:count].view(query[:count].shape).copy_(attend(query[:count], keys, values, segments, layer.impl.scale))
        return output


def _pack(metadata: Any, block_size: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, Segments]:
    """Return cache block and offset of every key [k], sequence by sequence, and the segments for `attend`."""
    lengths = metadata.seq_lens.tolist()
    positions = [torch.arange(length) for length in lengths]
    blocks = [
        table.long()[where // block_size]
        for table, where in zip(metadata.block_table[: len(lengths)], positions, strict=True)
    ]
    everywhere = torch.cat(positions)
    cu_k = torch.nn.functional.pad(metadata.seq_lens.cumsum(0), (1, 0)).int()
    keys = SegmentKeys(torch.arange(len(everywhere)), cu_k, max(lengths))
    segments = build_segments(metadata.query_start_loc, metadata.max_query_len, keys, dtype, "tiled")
    return torch.cat(blocks), everywhere % block_size, segments


def make_batch_invariant(model: torch.nn.Module, sampler: Any, shard_columns: int) -> None:
    """Replace an engine's attention, linear layers and log-softmax.

    Args:
        shard_columns: vocabulary columns per TP rank of the output layer.
    """
    attention = _PagedAttention()
    for module in model.modules():
        found: Any = module
        if hasattr(found, "cpu_linear"):
            found.cpu_linear = multiply
        implementation: Any = getattr(found, "impl", None)
        if hasattr(implementation, "do_kv_cache_update"):
            implementation.do_kv_cache_update = attention.write
            implementation.forward = attention.attend
    compute_logprobs = partial(compute_all_logprobs, num_columns=shard_columns)
    sampler.compute_logprobs = compute_logprobs
    sample = sampler.topk_topp_sampler.forward

    def sample_and_score(logits: torch.Tensor, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs = compute_logprobs(logits)  # before vLLM's sampler overwrites the logits
        sampled, _ = sample(logits, *arguments)
        return sampled, logprobs

    sampler.topk_topp_sampler.forward = sample_and_score
