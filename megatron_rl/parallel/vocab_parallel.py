# SPDX-License-Identifier: Apache-2.0
"""Log-probs and entropy from logits whose vocabulary is split over the TP group.

The vocabulary is never gathered: a maximum, a sum of exponentials, the target's logit and (for the
entropy) a weighted sum cross the group, `[t]` numbers each. With z the temperature-scaled logits:

    lse = log sum_v exp(z_v)        logprob = z_target - lse        H = lse - sum_v p_v z_v
    d logprob / d z_v = 1[v = target] - p_v                         d H / d z_v = -p_v (log p_v + H)

Rows that pad the vocabulary take no part: they get no probability and no gradient.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


class _LogprobsAndEntropy(torch.autograd.Function):
    """Forward keeps the probabilities `[t, v/tp]`; backward is one fused expression."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, start: int, temperature: float, group: dist.ProcessGroup
    ) -> tuple[torch.Tensor, torch.Tensor]:
        z = logits.float() / temperature  # [t, v/tp]
        t, width = z.shape
        high = z.max(-1).values if width else z.new_full((t,), float("-inf"))
        dist.all_reduce(high, op=dist.ReduceOp.MAX, group=group)
        z = z - high[:, None]
        exp_z = z.exp()
        local = targets - start
        is_mine = (local >= 0) & (local < width)
        safe = torch.where(is_mine, local, 0)
        target_z = z.gather(1, safe[:, None])[:, 0] if width else z.new_zeros(t)
        # One reduction for the three sums: [3, t].
        sums = torch.stack([exp_z.sum(-1), torch.where(is_mine, target_z, 0.0), (exp_z * z).sum(-1)])
        dist.all_reduce(sums, group=group)
        total, target_z, weighted = sums
        log_total = total.log()
        logprobs = target_z - log_total
        entropy = log_total - weighted / total
        probs = exp_z.div_(total[:, None])
        ctx.save_for_backward(probs, z, log_total, entropy, is_mine, safe)
        ctx.temperature, ctx.dtype = temperature, logits.dtype
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad_logprobs: torch.Tensor, grad_entropy: torch.Tensor) -> tuple[Any, ...]:
        probs, z, log_total, entropy, is_mine, safe = ctx.saved_tensors
        log_probs_plus_entropy = z - (log_total - entropy)[:, None]
        grad = -(grad_logprobs[:, None] + grad_entropy[:, None] * log_probs_plus_entropy) * probs
        if grad.shape[1]:
            grad.scatter_add_(1, safe[:, None], (grad_logprobs * is_mine)[:, None])
        return (grad / ctx.temperature).to(ctx.dtype), None, None, None, None


def compute_logprobs_and_entropy(
    logits: torch.Tensor, targets: torch.Tensor, *, vocab_size: int, temperature: float, tp_group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob of each target and entropy of each distribution; collective over `tp_group`.

    Args:
        logits: [t, v/tp] this rank's columns of the (padded) vocabulary, any float type.
        targets: [t] int64 token ids, 0 <= id < vocab_size.
        vocab_size: size without padding; columns at or beyond it are ignored.
        temperature: divides the logits (the policy that was sampled from).
        tp_group: the group over which the vocabulary is split evenly, in rank order.

    Returns:
        logprobs [t] float32 and entropy [t] float32, the same on every rank of the group; both are
        differentiable with respect to `logits`.
    """
    start = tp_group.rank() * logits.shape[1]
    width = max(0, min(vocab_size - start, logits.shape[1]))
    return _LogprobsAndEntropy.apply(logits[:, :width], targets, start, temperature, tp_group)
