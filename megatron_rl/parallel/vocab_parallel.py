# SPDX-License-Identifier: Apache-2.0
"""Log-probs and entropy of a softmax whose vocabulary is split over the TP group.

The vocabulary is never gathered. Each rank sums up its own columns of the logits in four numbers per token; these
summaries are gathered once and merged in the same order on every rank, so all ranks get the same bits. With z the
temperature-scaled logits:

    lse = log sum_v exp(z_v)        logprob = z_target - lse        H = lse - sum_v p_v z_v
    d logprob / d z_v = 1[v = target] - p_v                         d H / d z_v = -p_v (log p_v + H)

Columns that pad the vocabulary are no part of a shard: they get no probability and no gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_rl.parallel.batch_invariant import pad_rows
from megatron_rl.parallel.collectives import gather_rows


@dataclass(frozen=True)
class VocabShard:
    """The tokens `[start, start + width)` of the vocabulary: one rank's columns without padding."""

    start: int
    width: int

    def locate(self, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[t] token ids -> [t, 1] columns in this shard (0 where it is elsewhere) and [t] whether it is here."""
        local = targets - self.start
        is_mine = (local >= 0) & (local < self.width)
        return torch.where(is_mine, local, 0)[:, None], is_mine


def find_vocab_shard(vocab_size: int, num_columns: int, tp_rank: int) -> VocabShard:
    """The part of a vocabulary of `vocab_size` that a rank's `num_columns` (padding included) hold."""
    start = tp_rank * num_columns
    return VocabShard(start, max(0, min(vocab_size - start, num_columns)))


def compute_summary(z: torch.Tensor, targets: torch.Tensor, shard: VocabShard) -> torch.Tensor:
    """Sum up one shard; overwrites `z`.

    Args:
        z: [t, width] temperature-scaled logits of the shard, float32 or float64.
        targets: [t] token ids of the whole vocabulary.

    Returns:
        [4, t]: m = max_v z_v; sum_v exp(z_v - m); sum_v exp(z_v - m) (z_v - m); z_target, or 0 where it is elsewhere.
    """
    if shard.width == 0:  # a finite maximum: it is subtracted from others
        summary = z.new_zeros(4, len(z))
        summary[0] = torch.finfo(z.dtype).min
        return summary
    high = z.amax(-1)
    columns, is_mine = shard.locate(targets)
    target_z = torch.where(is_mine, z.gather(1, columns)[:, 0], 0.0)
    z.sub_(high[:, None])
    exp_z = z.exp()
    return torch.stack([high, exp_z.sum(-1), exp_z.mul_(z).sum(-1), target_z])


def summarize_squares(z: torch.Tensor) -> torch.Tensor:
    """[3, t] of one shard's logits [t, width]: m = max_v z_v; sum_v exp(z_v - m); the sum of their squares."""
    if z.shape[1] == 0:
        return torch.stack([z.new_full((len(z),), torch.finfo(z.dtype).min), z.new_zeros(len(z)), z.new_zeros(len(z))])
    high = z.amax(-1)
    exp_z = (z - high[:, None]).exp()
    return torch.stack([high, exp_z.sum(-1), exp_z.square().sum(-1)])


def merge_squares(summaries: torch.Tensor) -> torch.Tensor:
    """[tp, 3, t] -> [t], the sum of the squared probabilities."""
    highs, totals, squares = summaries.unbind(1)
    scale = (highs - highs.amax(0)).exp()
    return (squares * scale.square()).sum(0) / (totals * scale).sum(0).square()


def gather_summaries(summary: torch.Tensor, tp_group: dist.ProcessGroup) -> torch.Tensor:
    """[k, t] of this rank -> [tp, k, t] of all."""
    return summary[None] if tp_group.size() == 1 else gather_rows(summary[None], tp_group)


def merge_totals(highs: torch.Tensor, totals: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[tp, t] each -> the maximum [t], the scale of each shard [tp, t], and the sum of exponentials [t]."""
    high = highs.amax(0)
    scale = (highs - high).exp()
    return high, scale, (totals * scale).sum(0)


def compute_all_logprobs(z: torch.Tensor, num_columns: int) -> torch.Tensor:
    """Log-probs of the whole vocabulary where one process has it, with the bits that TP ranks compute together.

    Args:
        z: [t, v] temperature-scaled logits, without padding of the vocabulary.
        num_columns: of each TP rank, padding included.

    Returns:
        [t, v].
    """
    rows, vocab_size = pad_rows(z), z.shape[1]
    summaries = []
    for rank in range(-(-vocab_size // num_columns)):
        shard = find_vocab_shard(vocab_size, num_columns, rank)
        part = rows[:, shard.start : shard.start + shard.width].clone(memory_format=torch.contiguous_format)
        summaries.append(compute_summary(part, torch.zeros(len(rows), dtype=torch.int64, device=z.device), shard))
    highs, totals, *_ = torch.stack(summaries, 1)
    high, _, total = merge_totals(highs, totals)
    return (rows - high[:, None] - total.log()[:, None])[: len(z)]


def merge_summaries(summaries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[tp, 4, t] -> logprobs, entropy and lse, [t] each."""
    highs, totals, weighted, target_z = summaries.unbind(1)  # [tp, t] each
    high, scale, total = merge_totals(highs, totals)
    # sum exp(z - high) (z - high), from sums that were taken about each shard's own maximum.
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
    """[t, width] gradient with respect to `z`, which is overwritten.

    Args:
        z, targets, shard: as in `compute_summary`.
        lse, entropy: [t] of the whole vocabulary.
        grad_logprobs: [t].
        grad_entropy: [t], or None where the entropy has no gradient (saves a pass and a copy of the logits).
    """
    if shard.width == 0:
        return z
    log_probs = z.sub_(lse[:, None])
    if grad_entropy is None:
        gradient = log_probs.exp_().mul_(-grad_logprobs[:, None])
    else:
        probs = log_probs.exp()
        slope = log_probs.add_(entropy[:, None]).mul_(grad_entropy[:, None]).add_(grad_logprobs[:, None])
        gradient = slope.mul_(probs).neg_()
    columns, is_mine = shard.locate(targets)
    return gradient.scatter_add_(1, columns, (grad_logprobs * is_mine)[:, None])
