# SPDX-License-Identifier: Apache-2.0
"""On-policy distillation: the policy learns from teachers' log-probs on its own responses.

sampled    the advantage of a token gets coef (teacher_logprobs - old_logprobs), whose mean over the policy's tokens
           is -KL(policy || teacher) (Agarwal et al., "On-policy distillation of language models", arXiv 2306.13649;
           the estimate per token as in Thinking Machines, "On-policy distillation", 2025)
full       the loss of a token gets coef KL(policy || teacher), or KL(teacher || policy), over the vocabulary
top_k      the same over k + 1 outcomes: the teacher's k likeliest tokens, and any other token; a lower bound of full
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch


@torch.no_grad()
def mix_logprobs(logprobs: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """Return the weighted mean of several teachers' log-probs [t], bitwise equal to the first if all are equal.

    The reverse divergence to it is, up to a constant, the weighted mean of the divergences to the teachers.
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
    """Return the additional advantages of `sampled`, [t], 0 outside the loss."""
    return torch.where(loss_mask, coef * (teacher_logprobs - old_logprobs), 0.0)


@torch.no_grad()
def sum_divergences(
    teacher_logprobs: Mapping[str, torch.Tensor], old_logprobs: torch.Tensor, loss_mask: torch.Tensor
) -> dict[str, float]:
    """Sum divergences over this rank's tokens for `finish_divergences`.

    Args:
        teacher_logprobs: teacher name -> [t]; NaN for tokens that the teacher does not score.
    """
    sums = {}
    for name, logprobs in teacher_logprobs.items():
        counted = loss_mask & ~logprobs.isnan()
        sums[f"{name}/sum"] = float((old_logprobs - logprobs)[counted].double().sum())
        sums[f"{name}/count"] = float(counted.sum())
    return sums


def finish_divergences(sums: Mapping[str, float]) -> dict[str, float]:
    """Return means `distill/<name>` from the global sums, for teachers with at least one token."""
    names = [key.removesuffix("/count") for key, count in sums.items() if key.endswith("/count") and count]
    return {f"distill/{name}": sums[f"{name}/sum"] / sums[f"{name}/count"] for name in names}


def compute_top_k_divergence(logprobs: torch.Tensor, teacher_logprobs: torch.Tensor, direction: str) -> torch.Tensor:
    """Compute KL over the teacher's k likeliest tokens and "any other token", [n].

        reverse: sum_i p_i log(p_i / q_i)        forward: sum_i q_i log(q_i / p_i)        i = 1 .. k + 1

    Args:
        logprobs: [n, k + 1] of the policy, differentiable; the last column is any other token.
        teacher_logprobs: [n, k + 1].
        direction: "reverse" (p is the policy) or "forward".
    """
    p, q = (teacher_logprobs, logprobs) if direction == "forward" else (logprobs, teacher_logprobs)
    return (p.exp() * (p - q)).sum(-1)
