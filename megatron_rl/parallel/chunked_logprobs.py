# SPDX-License-Identifier: Apache-2.0
"""Log-probs and entropy from hidden states, with the logits of one chunk of tokens in memory at a time.

Memory is `chunk_tokens * v/tp` instead of `t * v/tp`, at the cost of one more product with the output weight. TP ranks
exchange four numbers per token in forward, nothing in backward. The weight's gradient is complete; that of the hidden
states is a partial sum over the vocabulary, reduced in `gather_for_shards` (`models/stages.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from megatron_rl.parallel.kernels import choose_triton_kernels, has_gpu_memory
from megatron_rl.parallel.vocab_parallel import (
    PackedKeptSets,
    VocabShard,
    compute_logits_gradient,
    compute_summary,
    find_vocab_shard,
    gather_summaries,
    merge_summaries,
)


@dataclass(frozen=True, kw_only=True)
class OutputSoftmax:
    """Settings of the model's output distribution `softmax(hidden @ weight.T / temperature)`.

    Attributes:
        vocab_size: without padding; padding rows get no probability and no gradient.
        tp_group: group over which the vocabulary is split evenly, in rank order.
        chunk_tokens: tokens whose logits exist at once.
    """

    vocab_size: int
    temperature: float
    tp_group: dist.ProcessGroup
    chunk_tokens: int

    def find_shard(self, weight: torch.Tensor) -> VocabShard:
        """Return the range of token ids whose output rows `weight` [v/tp, h] contains."""
        return find_vocab_shard(self.vocab_size, len(weight), self.tp_group.rank())

    def make_logits(
        self, hidden: torch.Tensor, weight: torch.Tensor, kept: PackedKeptSets | None = None
    ) -> torch.Tensor:
        """Map [c, h] to this rank's [c, width] logits over the temperature, in a new tensor."""
        shard = self.find_shard(weight)
        z = scale_logits(hidden, weight[: shard.width], self.temperature)
        return z if kept is None else kept.mask(z, shard)

    def cut(self, num_tokens: int) -> list[slice]:
        """Cut tokens into chunks of `chunk_tokens`; no tokens are one empty chunk."""
        return [slice(first, first + self.chunk_tokens) for first in range(0, max(num_tokens, 1), self.chunk_tokens)]


def compute_linear_logprobs_and_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    softmax: OutputSoftmax,
    kept: PackedKeptSets | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the log-prob of each target and the entropy of each distribution; collective over `softmax.tp_group`.

    Logits are products in the dtype of `hidden`; all else is float32 (float64 for float64).

    Args:
        hidden: [t, h], the same on every rank of the group.
        weight: [v/tp, h] this rank's rows of the (padded) output layer.
        targets: [t] int64 token ids, 0 <= id < vocab_size.
        kept: [t] token sets to which the distributions are limited, each with the target, or `None`.

    Returns:
        logprobs [t] and entropy [t], bitwise equal on all ranks; differentiable in `hidden` (partial) and `weight`.
    """
    return _LinearLogprobs.apply(hidden, weight, targets, softmax, kept)


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        softmax: OutputSoftmax,
        kept: PackedKeptSets | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        shard, parts, summaries = softmax.find_shard(weight), softmax.cut(len(hidden)), []
        # A single chunk's logits are kept for backward; the bits equal recomputed ones.
        is_reused = len(parts) == 1 and any(ctx.needs_input_grad)
        kernels = choose_triton_kernels(hidden) if kept is None and shard.width else None
        for part in parts:
            if kernels is None:
                logits = softmax.make_logits(hidden[part], weight, kept and kept[part])
                summary = compute_summary(logits.clone() if is_reused else logits, targets[part], shard)
            else:
                logits = hidden[part] @ weight[: shard.width].t()
                summary = kernels.summarize_logits(logits, targets[part], shard.start, softmax.temperature)
            summaries.append(summary)
            ctx.logits = logits if is_reused else None
            del logits  # before the next chunk's are made
        summary = torch.cat(summaries, dim=1)
        logprobs, entropy, lse = merge_summaries(gather_summaries(summary, softmax.tp_group))
        ctx.save_for_backward(hidden, weight, targets, lse, entropy)
        ctx.softmax, ctx.kept, ctx.kernels = softmax, kept, kernels
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: torch.Tensor | None, grad_entropy: torch.Tensor | None) -> tuple[Any, ...]:
        hidden, weight, targets, lse, entropy = ctx.saved_tensors
        softmax, kept, kernels, shard = ctx.softmax, ctx.kept, ctx.kernels, ctx.softmax.find_shard(weight)
        grad_logprobs = torch.zeros_like(lse) if grad_logprobs is None else grad_logprobs
        logits, ctx.logits = ctx.logits, None

        def find_gradient(part: slice) -> torch.Tensor:
            # d/d logits = d/dz / temperature: divide the [t] factors instead.
            factors = dict(
                lse=lse[part],
                entropy=entropy[part],
                grad_logprobs=grad_logprobs[part] / softmax.temperature,
                grad_entropy=None if grad_entropy is None else grad_entropy[part] / softmax.temperature,
            )
            if kernels is not None:
                z = hidden[part] @ weight[: shard.width].t() if logits is None else logits
                return kernels.differentiate_logits(z, targets[part], shard.start, softmax.temperature, **factors)
            z = softmax.make_logits(hidden[part], weight, kept and kept[part]) if logits is None else logits
            return compute_logits_gradient(z, targets[part], shard, **factors)

        return *compute_linear_gradients(ctx, hidden, weight, find_gradient), None, None, None


def compute_linear_gradients(
    ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, find_gradient: Callable[[slice], torch.Tensor]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Compute the gradients of `hidden` and `weight`, each `None` if not needed, one chunk of tokens at a time.

    Args:
        ctx: of the autograd function; its `softmax` is an `OutputSoftmax`.
        find_gradient: maps a chunk's slice of tokens to the gradient [c, width] of the logits `hidden @ weight.T`.
    """
    width, size = ctx.softmax.find_shard(weight).width, ctx.softmax.chunk_tokens
    of_hidden = torch.zeros_like(hidden) if ctx.needs_input_grad[0] else None
    of_weight = None
    if ctx.needs_input_grad[1]:  # a sum over several chunks of a 16-bit type is in float32
        dtype = weight.dtype if len(hidden) <= size else torch.promote_types(weight.dtype, torch.float32)
        of_weight = torch.zeros_like(weight, dtype=dtype)
    for start in range(0, len(hidden) if width else 0, size):
        part = slice(start, start + size)
        gradient = find_gradient(part).to(hidden.dtype)
        if of_hidden is not None:
            torch.mm(gradient, weight[:width], out=of_hidden[part])
        if of_weight is None:
            continue
        if of_weight.dtype == hidden.dtype:
            of_weight[:width].addmm_(gradient.t(), hidden[part])
        elif has_gpu_memory(hidden):  # only a GPU adds 16-bit products in float32
            rows = of_weight[:width]
            torch.addmm(rows, gradient.t(), hidden[part], out_dtype=of_weight.dtype, out=rows)
        else:
            of_weight[:width].add_(gradient.t() @ hidden[part])
    return of_hidden, None if of_weight is None else of_weight.to(weight.dtype)


def scale_logits(hidden: torch.Tensor, rows: torch.Tensor, temperature: float) -> torch.Tensor:
    """Map [c, h] and [width, h] to [c, width] logits over the temperature, in a new tensor."""
    logits = hidden @ rows.t()
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits if temperature == 1.0 else logits.div_(temperature)
