# SPDX-License-Identifier: Apache-2.0
"""Losses that are functions, and the one of fine-tuning."""

from __future__ import annotations

from collections.abc import Callable

import torch

from megatron_rl.samples.batch import TrainBatch
from megatron_rl.training.optimizer import StepResult
from megatron_rl.types import UserError

# User-defined loss: (microbatch, logprobs [t], entropy [t]) -> scalar loss, whose sum over microbatches is minimized,
# and metrics by name: sums over the tokens in the loss, or maxima if the name begins with "max/". The sum of
# token losses times `microbatch.loss_weights` [t] is their mean over the minibatch by `algorithm.loss_agg_mode`.
LossFunction = Callable[[TrainBatch, torch.Tensor, torch.Tensor], tuple[torch.Tensor, dict[str, torch.Tensor]]]

_COUNTED = ("loss", "tokens", "weights")


def compute_given_loss(
    function: LossFunction,
    microbatch: TrainBatch,
    *found_by_head: torch.Tensor,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Call a function on a microbatch, check its results, and add the counts of an optimizer step to its metrics."""
    found = function(microbatch, *found_by_head[:2])
    loss, metrics = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
    if not (isinstance(loss, torch.Tensor) and loss.ndim == 0 and isinstance(metrics, dict)):
        hint = "sum the losses of the tokens, times microbatch.loss_weights (docs/primitives.md)"
        expected = "a tuple of a tensor without dimensions and a dict of such tensors"
        raise UserError(f"the loss function returned {found!r:.80}", source="loss", expected=expected, hint=hint)
    mask = microbatch.loss_mask
    counted = {
        "loss": loss.detach(),
        "tokens": mask.sum().float(),
        "weights": torch.where(mask, microbatch.loss_weights, 0.0).sum(),
    }
    return loss, counted | metrics


def describe_given_loss(result: StepResult) -> dict[str, float]:
    """Return the metrics of an optimizer step whose loss is not the policy loss; sums become means per token."""
    totals, name = result.totals, getattr(result.loss.settings, "__name__", result.loss.name)
    tokens = max(totals["tokens"], 1.0)
    reported = {
        f"{name}/{key}": total if key.startswith("max/") else total / tokens
        for key, total in totals.items()
        if key not in _COUNTED
    }
    return {f"{name}/loss": totals["loss"], "policy/grad_norm": result.grad_norm, "policy/lr": result.lr, **reported}


def compute_sft_loss(
    logprobs: torch.Tensor, loss_mask: torch.Tensor, loss_weights: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Compute the negative log-likelihood of the response tokens: `sum_t w_t (-logprobs_t)`."""
    loss = -(loss_weights * torch.where(loss_mask, logprobs, 0.0)).sum()
    return loss, {
        "loss": loss.detach(),
        "tokens": loss_mask.sum().float(),
        "weights": torch.where(loss_mask, loss_weights, 0.0).sum(),
    }


def sft(
    microbatch: TrainBatch, logprobs: torch.Tensor, entropy: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Compute the negative log-likelihood of the tokens in the loss."""
    return compute_sft_loss(logprobs, microbatch.loss_mask, microbatch.loss_weights)
