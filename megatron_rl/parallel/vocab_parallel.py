# SPDX-License-Identifier: Apache-2.0
"""Log-probs and entropy of a softmax whose vocabulary is split over the TP group.

Each rank summarizes its columns in four numbers per token; all ranks merge them in the same order, for equal bits. With
z the temperature-scaled logits:

    lse = log sum_v exp(z_v)        logprob = z_target - lse        H = lse - sum_v p_v z_v
    d logprob / d z_v = 1[v = target] - p_v                         d H / d z_v = -p_v (log p_v + H)

From hidden states, the logits of one chunk of tokens are in memory at a time: `chunk_tokens * v/tp` instead of
`t * v/tp`, at the cost of one more product with the output weight. TP ranks exchange four numbers per token in forward,
nothing in backward. The weight's gradient is complete; that of the hidden states is a partial sum over the vocabulary,
reduced in `gather_for_shards` (`models/stages.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from megatron_rl.parallel.collectives import choose_triton_kernels, gather_rows, has_gpu_memory
from megatron_rl.types import KeptSets

OUTSIDE = -1e30  # logit of probability 0; finite, so that differences and products with 0 are finite


@dataclass(frozen=True)
class VocabShard:
    """Token ids `[start, start + width)`: one rank's columns without padding."""

    start: int
    width: int

    def locate(self, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each token id's column in this shard (0 if it is in another), and whether it is in this shard."""
        local = targets - self.start
        is_mine = (local >= 0) & (local < self.width)
        return torch.where(is_mine, local, 0), is_mine


def find_vocab_shard(vocab_size: int, num_columns: int, tp_rank: int) -> VocabShard:
    """Return the token ids of a TP rank, without padding; `num_columns`: columns per rank, padding included."""
    start = tp_rank * num_columns
    return VocabShard(start, max(0, min(vocab_size - start, num_columns)))


def compute_summary(z: torch.Tensor, targets: torch.Tensor, shard: VocabShard) -> torch.Tensor:
    """Summarize one shard; overwrites `z`.

    Args:
        z: [t, width] temperature-scaled logits of the shard, float32 or float64.
        targets: [t] or [t, k] token ids of the whole vocabulary.

    Returns:
        [3 + k, t]: m = max_v z_v; sum_v exp(z_v - m); sum_v exp(z_v - m) (z_v - m); z_target, or 0 if elsewhere.
    """
    targets = targets.reshape(len(z), *(targets.shape[1:] or (1,)))
    if shard.width == 0:  # finite, because maxima are subtracted
        summary = z.new_zeros(3 + targets.shape[1], len(z))
        summary[0] = torch.finfo(z.dtype).min
        return summary
    high = z.amax(-1)
    columns, is_mine = shard.locate(targets)
    target_z = torch.where(is_mine, z.gather(1, columns), 0.0)
    z.sub_(high[:, None])
    exp_z = z.exp()
    return torch.stack([high, exp_z.sum(-1), exp_z.mul_(z).sum(-1), *target_z.unbind(1)])


def gather_summaries(summary: torch.Tensor, tp_group: dist.ProcessGroup) -> torch.Tensor:
    """All-gather a shard's summary [k, t] over TP to [tp, k, t]."""
    return summary[None] if tp_group.size() == 1 else gather_rows(summary[None], tp_group)


def merge_totals(highs: torch.Tensor, totals: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Merge the shards' maxima and sums of exponentials, [tp, t] each.

    Returns:
        Global maximum [t]; factors [tp, t] that rescale each shard's sums to it; sum of exponentials [t].
    """
    high = highs.amax(0)
    scale = (highs - high).exp()
    return high, scale, (totals * scale).sum(0)


def merge_summaries(summaries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Merge all shards' `compute_summary` into logprobs ([k, t] if k > 1), entropy and log-sum-exp, [t] each."""
    highs, totals, weighted = summaries[:, :3].unbind(1)  # [tp, t] each
    target_z = summaries[:, 3:].squeeze(1)
    high, scale, total = merge_totals(highs, totals)
    # sum exp(z - high) (z - high), from sums relative to each shard's own maximum.
    weighted = ((weighted + totals * (highs - high)) * scale).sum(0)
    log_total = total.log()
    return target_z.sum(0) - high - log_total, log_total - weighted / total, high + log_total


def compute_logits_gradient(
    z: torch.Tensor,
    targets: torch.Tensor,
    shard: VocabShard,
    *,
    lse: torch.Tensor,
    entropy: torch.Tensor,
    grad_logprobs: torch.Tensor,
    grad_entropy: torch.Tensor | None,
) -> torch.Tensor:
    """Compute the gradient with respect to `z`, [t, width]; overwrites `z`.

    Args:
        lse, entropy, grad_logprobs: [t], over the whole vocabulary; the last is shaped like `targets`.
        grad_entropy: [t], or `None` if zero (saves a pass and a copy of the logits).
    """
    if shard.width == 0:
        return z
    size = (len(z), *(targets.shape[1:] or (1,)))
    targets, grad_logprobs = targets.reshape(size), grad_logprobs.reshape(size)
    total = grad_logprobs.sum(1, keepdim=True) if size[1] > 1 else grad_logprobs
    log_probs = z.sub_(lse[:, None])
    if grad_entropy is None:
        gradient = log_probs.exp_().mul_(-total)
    else:
        probs = log_probs.exp()
        slope = log_probs.add_(entropy[:, None]).mul_(grad_entropy[:, None]).add_(total)
        gradient = slope.mul_(probs).neg_()
    columns, is_mine = shard.locate(targets)
    return gradient.scatter_add_(1, columns, grad_logprobs * is_mine)


@dataclass(frozen=True)
class PackedKeptSets:
    """A set of token ids per row: the part of the vocabulary kept by truncated sampling (top-p etc.)."""

    ids: torch.Tensor  # [k] int32, possibly also of other rows
    firsts: torch.Tensor  # [t] int64, start of each row's set in `ids`
    counts: torch.Tensor  # [t] int64, set sizes; 0 means the whole vocabulary

    @classmethod
    def pack(cls, parts: Sequence[KeptSets], device: torch.device) -> PackedKeptSets:
        """Concatenate the rows of several `KeptSets`."""
        ids = np.concatenate([np.empty(0, np.int32), *(part.ids for part in parts)])
        counts = np.concatenate([np.empty(0, np.int32), *(part.counts for part in parts)]).astype(np.int64)
        firsts = np.cumsum(counts) - counts
        return cls(*(torch.from_numpy(array).to(device) for array in (ids, firsts, counts)))

    def __getitem__(self, rows: slice | torch.Tensor) -> PackedKeptSets:
        """Return the token sets of `rows`."""
        return PackedKeptSets(self.ids, self.firsts[rows], self.counts[rows])

    def pad(self, count: int) -> PackedKeptSets:
        """Append `count` rows with the whole vocabulary."""
        return PackedKeptSets(self.ids, F.pad(self.firsts, (0, count)), F.pad(self.counts, (0, count)))

    def mask(self, z: torch.Tensor, shard: VocabShard) -> torch.Tensor:
        """Return a copy of a shard's logits [t, width], with the value `OUTSIDE` for tokens outside the sets."""
        rows = torch.repeat_interleave(self.counts)  # [k] row of each id
        begins = self.counts.cumsum(0) - self.counts
        places = torch.arange(len(rows), device=rows.device) + (self.firsts - begins)[rows]
        columns = self.ids[places].long() - shard.start
        is_mine = (columns >= 0) & (columns < shard.width)
        rows, columns = rows[is_mine], columns[is_mine]
        masked = torch.where((self.counts == 0)[:, None], z, OUTSIDE)
        masked[rows, columns] = z[rows, columns]
        return masked


@dataclass(frozen=True, kw_only=True)
class OutputSoftmax:
    """Settings of the model's output distribution `softmax(hidden @ weight.T / temperature)`."""

    vocab_size: int  # without padding; padding rows get no probability and no gradient
    temperature: float
    tp_group: dist.ProcessGroup  # group over which the vocabulary is split evenly, in rank order
    chunk_tokens: int  # tokens whose logits exist at once
    softcap: float | None = None  # c: logits z become c tanh(z / c), before the temperature

    def find_shard(self, weight: torch.Tensor) -> VocabShard:
        """Return the range of token ids whose output rows `weight` [v/tp, h] contains."""
        return find_vocab_shard(self.vocab_size, len(weight), self.tp_group.rank())

    def make_logits(
        self, hidden: torch.Tensor, weight: torch.Tensor, kept: PackedKeptSets | None = None
    ) -> torch.Tensor:
        """Map [c, h] to this rank's [c, width] logits over the temperature, in a new tensor."""
        shard = self.find_shard(weight)
        z = hidden @ weight[: shard.width].t()
        z = z.to(torch.promote_types(z.dtype, torch.float32))
        z = z if self.softcap is None else z.div_(self.softcap).tanh_().mul_(self.softcap)
        z = z if self.temperature == 1.0 else z.div_(self.temperature)
        return z if kept is None else kept.mask(z, shard)

    def find_slope(self, z: torch.Tensor) -> torch.Tensor | None:
        """Return the derivative of the cap at scaled logits `z`, 0 for tokens outside of sets; `None` without a cap."""
        if self.softcap is None:
            return None
        return (z * (self.temperature / self.softcap)).square_().neg_().add_(1.0).clamp_(min=0.0)

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
        targets: [t] or [t, k] int64 token ids, 0 <= id < vocab_size.
        kept: [t] token sets to which the distributions are limited, each with the target, or `None`.

    Returns:
        logprobs like `targets`, entropy [t]: bitwise equal on all ranks, differentiable in `hidden` (partial) and
        `weight`.
    """
    if not torch.is_grad_enabled():  # inputs that require gradients would keep a single chunk's logits
        hidden, weight = hidden.detach(), weight.detach()
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
        is_plain = kept is None and softmax.softcap is None and targets.ndim == 1
        kernels = choose_triton_kernels(hidden) if is_plain and shard.width else None
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
        logprobs = logprobs.t().reshape(targets.shape)
        ctx.save_for_backward(hidden, weight, targets, lse, entropy)
        ctx.softmax, ctx.kept, ctx.kernels = softmax, kept, kernels
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: torch.Tensor | None, grad_entropy: torch.Tensor | None) -> tuple[Any, ...]:
        hidden, weight, targets, lse, entropy = ctx.saved_tensors
        softmax, kept, kernels, shard = ctx.softmax, ctx.kept, ctx.kernels, ctx.softmax.find_shard(weight)
        grad_logprobs = torch.zeros_like(targets, dtype=lse.dtype) if grad_logprobs is None else grad_logprobs
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
            slope = softmax.find_slope(z)
            gradient = compute_logits_gradient(z, targets[part], shard, **factors)
            return gradient if slope is None else gradient.mul_(slope)

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
    for part in ctx.softmax.cut(len(hidden)) if width and len(hidden) else ():
        gradient = find_gradient(part).to(hidden.dtype)
        if of_hidden is not None:
            torch.mm(gradient, weight[:width], out=of_hidden[part])
        if of_weight is not None and of_weight.dtype == hidden.dtype:
            of_weight[:width].addmm_(gradient.t(), hidden[part])
        elif of_weight is not None and has_gpu_memory(hidden):  # only a GPU adds 16-bit products in float32
            rows = of_weight[:width]
            torch.addmm(rows, gradient.t(), hidden[part], out_dtype=of_weight.dtype, out=rows)
        elif of_weight is not None:
            of_weight[:width].add_(gradient.t() @ hidden[part])
        del gradient  # before the next chunk's logits are made
    return of_hidden, None if of_weight is None else of_weight.to(weight.dtype)
