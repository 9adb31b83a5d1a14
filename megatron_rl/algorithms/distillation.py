# SPDX-License-Identifier: Apache-2.0
"""On-policy distillation: a policy learns, on its own responses, from the log-probs of teachers.

    sampled    the advantage of a token gets coef (teacher_logprobs - old_logprobs), whose mean over the policy's tokens
               is -KL(policy || teacher) (Agarwal et al., "On-policy distillation of language models", arXiv 2306.13649;
               the estimate per token as in Thinking Machines, "On-policy distillation", 2025)
    full       the loss of a token gets coef KL(policy || teacher), or KL(teacher || policy), over the vocabulary
    top_k      the same over k + 1 outcomes: the teacher's k likeliest tokens, and any other token

The divergence over the k + 1 outcomes is a lower bound of the full one, and exact where k is the whole vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch


@torch.no_grad()
def mix_logprobs(logprobs: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """The weighted mean of log-probs [t] of several teachers; of equal ones exactly what one says.

    The sum of the reverse divergences to several teachers, by these weights, is that to their mean but for a constant.
    """
    first, total = logprobs[0], sum(weights)
    mixed = first
    for others, weight in zip(logprobs[1:], weights[1:], strict=True):
        mixed = mixed + weight / total * (others - first)
    return mixed


@torch.no_grad()
def compute_distillation_advantages(
    teacher_logprobs: torch.Tensor, old_logprobs: torch.Tensor, loss_mask: torch.Tensor, coef: float
) -> torch.Tensor:
    """What `sampled` adds to the advantages: [t], 0 outside of the loss."""
    return torch.where(loss_mask, coef * (teacher_logprobs - old_logprobs), 0.0)


@torch.no_grad()
def sum_divergences(
    teacher_logprobs: Mapping[str, torch.Tensor], old_logprobs: torch.Tensor, loss_mask: torch.Tensor
) -> dict[str, float]:
    """Sums over this rank's tokens for `finish_divergences`.

    Args:
        teacher_logprobs: by name, [t] each; NaN where a teacher was not asked.
        old_logprobs: [t].
        loss_mask: [t] bool.
    """
    sums = {}
    for name, logprobs in teacher_logprobs.items():
        counted = loss_mask & ~logprobs.isnan()
        sums[f"{name}/sum"] = float((old_logprobs - logprobs)[counted].double().sum())
        sums[f"{name}/count"] = float(counted.sum())
    return sums


def finish_divergences(sums: Mapping[str, float]) -> dict[str, float]:
    """Means `distill/<name>` from the global sums, for names that have a token."""
    names = [key.removesuffix("/count") for key, count in sums.items() if key.endswith("/count") and count]
    return {f"distill/{name}": sums[f"{name}/sum"] / sums[f"{name}/count"] for name in names}


def compute_top_k_divergence(logprobs: torch.Tensor, teacher_logprobs: torch.Tensor, direction: str) -> torch.Tensor:
    """KL between two distributions over the teacher's k likeliest tokens and "any other token".

        reverse: sum_i p_i log(p_i / q_i)        forward: sum_i q_i log(q_i / p_i)        i = 1 .. k, and the rest

    Args:
        logprobs: [n, k + 1] of the policy, differentiable; the last is that of any other token.
        teacher_logprobs: [n, k + 1].
        direction: "reverse" (p the policy) or "forward".

    Returns:
        [n].
    """
    p, q = (teacher_logprobs, logprobs) if direction == "forward" else (logprobs, teacher_logprobs)
    return (p.exp() * (p - q)).sum(-1)
