# SPDX-License-Identifier: Apache-2.0
"""Losses over data with targets of the caller (`training.datums`): sums over tokens and sequences, never means.

    r = exp(logprobs - q), with the columns q = "logprobs" and A = "advantages" of a datum, per token

    cross_entropy          -w logprobs                                  w = "weights", any real numbers
    importance_sampling    -r A
    ppo                    -min(r A, clip(r, low, high) A)              bounds of the ratio itself
    cispo                  -sg[clip(r, low, high)] A logprobs
    dro                    -A logprobs + beta / 2 (logprobs - q)^2
    gspo                   -min(s A, clip(s, low, high) A)              s = exp(mean of logprobs - q), in value

A scale, such as 1 / tokens, is part of the advantages or weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from megatron_rl.algorithms.losses import bounded_ratio, number_segments, sum_per_segment
from megatron_rl.types import UserError

Columns = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class SummedLoss:
    """A loss by the columns that it reads."""

    # (logprobs [t] or [t, k], columns, sequence_ids [t]) -> loss of each token, like `logprobs`.
    compute: Callable[[torch.Tensor, Columns, torch.Tensor], torch.Tensor]
    needed: tuple[str, ...] = ("logprobs", "advantages")  # columns without a default
    # Values of other columns, which `config` may set as well.
    defaults: Mapping[str, float] = field(default_factory=dict)


def _ratio(logprobs: torch.Tensor, columns: Columns) -> torch.Tensor:
    return bounded_ratio(logprobs - columns["logprobs"])


def _clip(ratio: torch.Tensor, columns: Columns) -> torch.Tensor:
    return ratio.clamp(columns["clip_low_threshold"], columns["clip_high_threshold"])


def _bound(ratio: torch.Tensor, columns: Columns) -> torch.Tensor:
    advantages = columns["advantages"]
    return -torch.minimum(ratio * advantages, _clip(ratio, columns) * advantages)


def _compute_cispo(logprobs: torch.Tensor, columns: Columns, sequence_ids: torch.Tensor) -> torch.Tensor:
    return -_clip(_ratio(logprobs.detach(), columns), columns) * columns["advantages"] * logprobs


def _compute_dro(logprobs: torch.Tensor, columns: Columns, sequence_ids: torch.Tensor) -> torch.Tensor:
    penalty = 0.5 * columns["beta"] * (logprobs - columns["logprobs"]).square()
    return penalty - columns["advantages"] * logprobs


def _compute_gspo(logprobs: torch.Tensor, columns: Columns, sequence_ids: torch.Tensor) -> torch.Tensor:
    """Compute the clipped surrogate with the ratio of each sequence, over tokens with a `sequence_ratio_mask`."""
    is_counted, segments = columns["sequence_ratio_mask"] != 0, number_segments(sequence_ids)
    log_ratio = torch.where(is_counted, logprobs.detach() - columns["logprobs"], 0.0)
    mean = sum_per_segment(log_ratio, segments) / sum_per_segment(is_counted, segments).clamp(min=1.0)
    return _bound(bounded_ratio(mean.to(logprobs.dtype) + (logprobs - logprobs.detach())), columns)


_BOUNDS = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
_LOSSES = {
    "cross_entropy": SummedLoss(lambda logprobs, columns, _: -columns["weights"] * logprobs, (), {"weights": 1.0}),
    "importance_sampling": SummedLoss(lambda logprobs, columns, _: -_ratio(logprobs, columns) * columns["advantages"]),
    "ppo": SummedLoss(lambda logprobs, columns, _: _bound(_ratio(logprobs, columns), columns), defaults=_BOUNDS),
    "cispo": SummedLoss(_compute_cispo, defaults=_BOUNDS),
    "dro": SummedLoss(_compute_dro, defaults={"beta": 0.05}),
    "gspo": SummedLoss(_compute_gspo, ("logprobs", "advantages", "sequence_ratio_mask"), _BOUNDS),
}


def find_summed_loss(name: str) -> SummedLoss:
    """Return a loss by its name (UserError if there is none)."""
    if name not in _LOSSES:
        raise UserError(
            f"the loss {name!r}",
            source="loss",
            expected=f"{', '.join(_LOSSES)}, or a function",
            hint="importance_sampling is the policy gradient with the ratio to the sampler",
        )
    return _LOSSES[name]
