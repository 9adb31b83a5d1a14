# SPDX-License-Identifier: Apache-2.0
"""Divergences between two models' distributions, log-probs of k tokens each, and sums of squared probabilities.

All are computed from hidden states; chunks and partial gradients are as in `vocab_parallel.py`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from megatron_rl.parallel.vocab_parallel import (
    OutputSoftmax,
    PackedKeptSets,
    VocabShard,
    compute_linear_gradients,
    gather_summaries,
    merge_totals,
)

_LEAST = 1e-30  # minimum probability of "any other token", relative to the likeliest token


@torch.no_grad()
def compute_linear_sum_pi_squared(
    hidden: torch.Tensor, weight: torch.Tensor, softmax: OutputSoftmax, kept: PackedKeptSets | None = None
) -> torch.Tensor:
    """Compute the sum of squared probabilities of each distribution, [t], bitwise equal on all TP ranks; collective."""
    summaries = [
        _summarize_squares(softmax.make_logits(hidden[part], weight, kept and kept[part]))
        for part in softmax.cut(len(hidden))
    ]
    found = gather_summaries(torch.cat(summaries, dim=1), softmax.tp_group)
    _, scale, total = merge_totals(found[:, 0], found[:, 1])
    return (found[:, 2] * scale.square()).sum(0) / total.square()


def _summarize_squares(z: torch.Tensor) -> torch.Tensor:
    """Return [3, t] of a shard's logits: m = max_v z_v; sum_v exp(z_v - m); sum_v exp(z_v - m)^2. Overwrites `z`."""
    if z.shape[1] == 0:
        return torch.stack([z.new_full((len(z),), torch.finfo(z.dtype).min), z.new_zeros(len(z)), z.new_zeros(len(z))])
    high = z.amax(-1)
    exp_z = z.sub_(high[:, None]).exp_()
    return torch.stack([high, exp_z.sum(-1), exp_z.square_().sum(-1)])


@torch.no_grad()
def compute_linear_top_k(hidden: torch.Tensor, weight: torch.Tensor, k: int, softmax: OutputSoftmax) -> torch.Tensor:
    """Find the k likeliest tokens of each distribution, in descending order; collective over `softmax.tp_group`.

    Args:
        hidden: [t, h], the same on every rank of the group.
        weight: [v/tp, h] this rank's rows of the (padded) output layer.
        k: at most the vocabulary size, which must be below 2^24: ids are exact in float32.

    Returns:
        [t, 2, k + 1]: ids and log-probs, bitwise equal on all ranks; the last entry stands for all other tokens, with
        id 0.
    """
    shard = softmax.find_shard(weight)
    chunks = hidden.split(softmax.chunk_tokens)
    summaries = [_summarize_top_k(softmax.make_logits(x, weight), k, shard) for x in chunks]
    found = gather_summaries(torch.cat(summaries, 1), softmax.tp_group)
    high, _, rest = merge_totals(found[:, 0], found[:, 1])
    ids, logits = (part.flatten(0, 1) for part in found[:, 2:].split(k, 1))  # [tp * k, t]
    best, places = logits.topk(k, 0)
    rest = rest + (logits - high).exp().scatter(0, places, 0.0).sum(0)
    log_total = (rest + (best - high).exp().sum(0)).log()
    logprobs = torch.cat([best - high - log_total, (rest.clamp(min=_LEAST).log() - log_total)[None]])
    return torch.stack([F.pad(ids.gather(0, places), (0, 0, 0, 1)), logprobs]).permute(2, 0, 1).contiguous()


def _summarize_top_k(z: torch.Tensor, k: int, shard: VocabShard) -> torch.Tensor:
    """Return [2 + 2 k, t]: maximum m, sum of exp(z - m) without the k largest logits; their k ids, their k logits.

    Overwrites `z`.
    """
    summary = z.new_zeros(2 + 2 * k, len(z))
    summary[0] = summary[2 + k :] = torch.finfo(z.dtype).min
    if shard.width:
        width = min(k, shard.width)
        best, columns = z.topk(width, -1)
        summary[0] = best[:, 0]
        summary[1] = z.sub_(best[:, :1]).exp_().scatter_(1, columns, 0.0).sum(-1)
        summary[2 : 2 + width], summary[2 + k : 2 + k + width] = (columns + shard.start).t(), best.t()
    return summary


def compute_linear_logprobs_of(
    hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, softmax: OutputSoftmax
) -> torch.Tensor:
    """Compute log-probs [t, k + 1] of k given tokens, and in the last place of all other ones; collective over TP.

    Args:
        hidden, weight: as in `compute_linear_top_k`; differentiable.
        ids: [t, k] int64, distinct in each row.
    """
    return _LinearLogprobsOf.apply(hidden, weight, ids, softmax)


class _LinearLogprobsOf(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, softmax: OutputSoftmax
    ) -> torch.Tensor:
        shard = softmax.find_shard(weight)
        chunks = zip(hidden.split(softmax.chunk_tokens), ids.split(softmax.chunk_tokens), strict=True)
        parts = [_summarize_chosen(softmax.make_logits(x, weight), *shard.locate(y)) for x, y in chunks]
        found = gather_summaries(torch.cat(parts, 1), softmax.tp_group)
        high, _, rest = merge_totals(found[:, 0], found[:, 1])
        chosen = found[:, 2:].sum(0)
        log_total = (rest + (chosen - high).exp().sum(0)).log()
        log_rest = rest.clamp(min=_LEAST).log() - log_total
        ctx.save_for_backward(hidden, weight, ids, high + log_total, log_rest)
        ctx.softmax = softmax
        return torch.cat([chosen - high - log_total, log_rest[None]]).t()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        hidden, weight, ids, lse, log_rest = ctx.saved_tensors
        shard = ctx.softmax.find_shard(weight)

        def find_gradient(part: slice) -> torch.Tensor:
            # d logprob_i / d z_v = 1[v = i] - p_v; for all other tokens together,
            # d log_rest / d z_v = p_v / p_rest - p_v, at `ids` -p_v.
            z = ctx.softmax.make_logits(hidden[part], weight)
            of_cap = ctx.softmax.find_slope(z)
            (columns, is_mine), slope = shard.locate(ids[part]), grad[part]
            probs = z.sub_(lse[part, None]).exp_()
            gradient = probs * -slope.sum(-1, keepdim=True)
            _clear(probs, columns, is_mine).mul_((slope[:, -1] * (-log_rest[part]).exp())[:, None])
            gradient.add_(probs).scatter_add_(1, columns, slope[:, :-1] * is_mine)
            gradient = gradient.div_(ctx.softmax.temperature)
            return gradient if of_cap is None else gradient.mul_(of_cap)

        return *compute_linear_gradients(ctx, hidden, weight, find_gradient), None, None


def compute_linear_divergence(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    teacher_hidden: torch.Tensor,
    teacher_weight: torch.Tensor,
    direction: str,
    softmax: OutputSoftmax,
    teacher_softcap: float | None = None,
) -> torch.Tensor:
    """Compute KL between a model (p) and its teacher (q) over the whole vocabulary, [t]; collective over TP.

        reverse: sum_v p_v log(p_v / q_v)        forward: sum_v q_v log(q_v / p_v)

    Args:
        hidden, weight: as in `compute_linear_top_k`; differentiable.
        teacher_hidden: [t, h of the teacher], the same on every rank of the group.
        teacher_weight: [v/tp, h of the teacher], rows of the same tokens as in `weight`.
        direction: "reverse" or "forward".
        teacher_softcap: of the teacher's logits.
    """
    softmaxes = softmax, replace(softmax, softcap=teacher_softcap)
    return _LinearDivergence.apply(hidden, weight, teacher_hidden, teacher_weight, direction == "forward", softmaxes)


class _LinearDivergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        teacher_hidden: torch.Tensor,
        teacher_weight: torch.Tensor,
        is_forward: bool,
        softmaxes: tuple[OutputSoftmax, OutputSoftmax],
    ) -> torch.Tensor:
        parts, (softmax, of_teacher) = [], softmaxes
        for x, y in zip(hidden.split(softmax.chunk_tokens), teacher_hidden.split(softmax.chunk_tokens), strict=True):
            ours, theirs = softmax.make_logits(x, weight), of_teacher.make_logits(y, teacher_weight)
            sums = torch.stack([_sum_up(ours), _sum_up(theirs)])  # [2, 2, c]
            z, other = (theirs, ours) if is_forward else (ours, theirs)
            probs = (z - sums[int(is_forward), 0, :, None]).exp_()
            parts.append(torch.cat([sums.flatten(0, 1), probs.mul_(z.sub_(other)).sum(-1)[None]]))
        found = gather_summaries(torch.cat(parts, 1), softmax.tp_group)
        high, scale, total = merge_totals(found[:, 0], found[:, 1])
        their_high, their_scale, their_total = merge_totals(found[:, 2], found[:, 3])
        lse, their_lse = high + total.log(), their_high + their_total.log()
        if is_forward:
            divergence = (found[:, 4] * their_scale).sum(0) / their_total - their_lse + lse
        else:
            divergence = (found[:, 4] * scale).sum(0) / total - lse + their_lse
        ctx.save_for_backward(hidden, weight, teacher_hidden, teacher_weight, lse, their_lse, divergence)
        ctx.softmax, ctx.of_teacher, ctx.is_forward = softmax, of_teacher, is_forward
        return divergence

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        hidden, weight, teacher_hidden, teacher_weight, lse, their_lse, divergence = ctx.saved_tensors
        softmax = ctx.softmax

        def find_gradient(part: slice) -> torch.Tensor:
            z = softmax.make_logits(hidden[part], weight)
            of_cap, ours = softmax.find_slope(z), z.sub_(lse[part, None])
            theirs = ctx.of_teacher.make_logits(teacher_hidden[part], teacher_weight).sub_(their_lse[part, None])
            if ctx.is_forward:
                gradient = ours.exp_().sub_(theirs.exp_())
            else:
                gap = theirs.neg_().add_(ours).sub_(divergence[part, None])
                gradient = ours.exp_().mul_(gap)
            gradient = gradient.mul_(grad[part, None]).div_(softmax.temperature)
            return gradient if of_cap is None else gradient.mul_(of_cap)

        return *compute_linear_gradients(ctx, hidden, weight, find_gradient), None, None, None, None


def _summarize_chosen(z: torch.Tensor, columns: torch.Tensor, is_mine: torch.Tensor) -> torch.Tensor:
    """Return [2 + k, t]: maximum m, sum of exp(z - m) without `columns`; their logits, 0 for other shards' columns."""
    if z.shape[1] == 0:
        return torch.cat([_sum_up(z), z.new_zeros(columns.t().shape)])
    high = z.amax(-1)
    exp_z = (z - high[:, None]).exp_()
    chosen = torch.where(is_mine, z.gather(1, columns), 0.0)
    return torch.cat([torch.stack([high, _clear(exp_z, columns, is_mine).sum(-1)]), chosen.t()])


def _clear(values: torch.Tensor, columns: torch.Tensor, is_mine: torch.Tensor) -> torch.Tensor:
    return values.scatter_add_(1, columns, torch.where(is_mine, -values.gather(1, columns), 0.0))


def _sum_up(z: torch.Tensor) -> torch.Tensor:
    """Return [2, t] of one shard's logits: maximum, and sum of exponentials relative to it."""
    if z.shape[1] == 0:
        return torch.stack([z.new_full((len(z),), torch.finfo(z.dtype).min), z.new_zeros(len(z))])
    high = z.amax(-1)
    return torch.stack([high, (z - high[:, None]).exp_().sum(-1)])
