# SPDX-License-Identifier: Apache-2.0
"""Log-probs and entropy of a softmax whose vocabulary is split over the TP group.

Each rank summarizes its columns in four numbers per token; all ranks merge them in the same order, for equal bits. With
z the temperature-scaled logits:

    lse = log sum_v exp(z_v)        logprob = z_target - lse        H = lse - sum_v p_v z_v
    d logprob / d z_v = 1[v = target] - p_v                         d H / d z_v = -p_v (log p_v + H)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron_rl.parallel.collectives import gather_rows
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
        targets: [t] token ids of the whole vocabulary.

    Returns:
        [4, t]: m = max_v z_v; sum_v exp(z_v - m); sum_v exp(z_v - m) (z_v - m); z_target, or 0 if elsewhere.
    """
    if shard.width == 0:  # finite, because maxima are subtracted
        summary = z.new_zeros(4, len(z))
        summary[0] = torch.finfo(z.dtype).min
        return summary
    high = z.amax(-1)
    columns, is_mine = shard.locate(targets)
    target_z = torch.where(is_mine, z.gather(1, columns[:, None])[:, 0], 0.0)
    z.sub_(high[:, None])
    exp_z = z.exp()
    return torch.stack([high, exp_z.sum(-1), exp_z.mul_(z).sum(-1), target_z])


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
    """Merge all shards' `compute_summary` [tp, 4, t] into logprobs, entropy and log-sum-exp, [t] each."""
    highs, totals, weighted, target_z = summaries.unbind(1)  # [tp, t] each
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
        lse, entropy, grad_logprobs: [t], over the whole vocabulary.
        grad_entropy: [t], or `None` if zero (saves a pass and a copy of the logits).
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
    return gradient.scatter_add_(1, columns[:, None], (grad_logprobs * is_mine)[:, None])


@dataclass(frozen=True)
class PackedKeptSets:
    """A set of token ids per row: the part of the vocabulary kept by truncated sampling (top-p etc.).

    Attributes:
        ids: [k] int32, possibly also of other rows.
        firsts: [t] int64, start of each row's set in `ids`.
        counts: [t] int64, set sizes; 0 means the whole vocabulary.
    """

    ids: torch.Tensor
    firsts: torch.Tensor
    counts: torch.Tensor

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
