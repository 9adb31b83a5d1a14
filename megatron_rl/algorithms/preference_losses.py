# SPDX-License-Identifier: Apache-2.0
"""Losses of preferences: pairs of a chosen and a rejected response, or single responses or steps with a label.

A loss returns one number per pair (kto: per response, process: per step), whose mean over the minibatch is minimized.
In the formulas, w and l are the chosen and the rejected response of a prompt, |w| is the number of tokens of w, and

    r(y) = log pi(y) - log pi_ref(y)        summed over the tokens of y
    m(y) = log pi(y) / |y|                  the mean log-prob of a token
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import logsigmoid

from megatron_rl.config.algorithm import PreferenceConfig

_CALIBRATION_BINS = 10


@dataclass(frozen=True)
class ScoredResponses:
    """Responses of a microbatch, [n] float64 each."""

    # Sums of the policy's log-probs, differentiable; of a reward model, the score of the last token.
    scores: torch.Tensor
    lengths: torch.Tensor  # number of tokens in the loss
    references: torch.Tensor  # sums of the reference's log-probs; 0 if the loss has no reference

    def select(self, index: torch.Tensor | slice) -> ScoredResponses:
        """Return some of the responses."""
        return ScoredResponses(self.scores[index], self.lengths[index], self.references[index])

    @property
    def log_ratios(self) -> torch.Tensor:
        """r(y), [n]."""
        return self.scores - self.references

    @property
    def means(self) -> torch.Tensor:
        """m(y), [n]."""
        return self.scores / self.lengths


Pairwise = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # [n] loss, implicit rewards of chosen and of rejected ones


def _smooth(logits: torch.Tensor, smoothing: float) -> torch.Tensor:
    """Return the cross entropy of "the first is better", which is wrong with the probability `smoothing`."""
    return -(1 - smoothing) * logsigmoid(logits) - smoothing * logsigmoid(-logits)


def compute_dpo_loss(
    chosen: ScoredResponses, rejected: ScoredResponses, margins: torch.Tensor, config: PreferenceConfig
) -> Pairwise:
    """Compute DPO (arXiv 2305.18290, eq. 7), with label smoothing as conservative DPO.

    loss = -log sigmoid(beta (r(w) - r(l)) - margin)
    """
    better, worse = config.beta * chosen.log_ratios, config.beta * rejected.log_ratios
    return _smooth(better - worse - margins, config.label_smoothing), better.detach(), worse.detach()


def compute_robust_loss(
    chosen: ScoredResponses, rejected: ScoredResponses, margins: torch.Tensor, config: PreferenceConfig
) -> Pairwise:
    """Compute robust DPO (arXiv 2403.00409, eq. 12): unbiased if a share `label_smoothing` of the labels is flipped."""
    better, worse = config.beta * chosen.log_ratios, config.beta * rejected.log_ratios
    logits, flipped = better - worse - margins, config.label_smoothing
    loss = (flipped * logsigmoid(-logits) - (1 - flipped) * logsigmoid(logits)) / (1 - 2 * flipped)
    return loss, better.detach(), worse.detach()


def compute_ipo_loss(
    chosen: ScoredResponses, rejected: ScoredResponses, margins: torch.Tensor, config: PreferenceConfig
) -> Pairwise:
    """Compute IPO (arXiv 2310.12036, eq. 17), with log-ratios per token as its authors use it.

    loss = (r(w) / |w| - r(l) / |l| - 1 / (2 beta))^2
    """
    better, worse = (side.log_ratios / side.lengths for side in (chosen, rejected))
    loss = (better - worse - margins - 1 / (2 * config.beta)).square()
    return loss, (config.beta * better).detach(), (config.beta * worse).detach()


def compute_simpo_loss(
    chosen: ScoredResponses, rejected: ScoredResponses, margins: torch.Tensor, config: PreferenceConfig
) -> Pairwise:
    """Compute SimPO (arXiv 2405.14734, eq. 6), without a reference: -log sigmoid(beta (m(w) - m(l)) - gamma)."""
    better, worse = config.beta * chosen.means, config.beta * rejected.means
    loss = _smooth(better - worse - config.simpo_gamma - margins, config.label_smoothing)
    return loss, better.detach(), worse.detach()


def compute_orpo_loss(
    chosen: ScoredResponses, rejected: ScoredResponses, margins: torch.Tensor, config: PreferenceConfig
) -> Pairwise:
    """Compute the odds ratio term of ORPO (arXiv 2403.07691, eq. 7); `nll_coef` adds the likelihood of chosen ones.

    loss = -beta log sigmoid(log odds(w) - log odds(l)),  odds(y) = p / (1 - p),  p = exp m(y)
    """
    better, worse = (side.means - torch.log(-torch.expm1(side.means)) for side in (chosen, rejected))
    loss = -config.beta * logsigmoid(better - worse - margins)
    return loss, (config.beta * chosen.means).detach(), (config.beta * rejected.means).detach()


def compute_bradley_terry_loss(
    chosen: ScoredResponses, rejected: ScoredResponses, margins: torch.Tensor, config: PreferenceConfig
) -> Pairwise:
    """Compute the loss of a reward model: -log sigmoid(s(w) - s(l) - margin) + center_coef (s(w) + s(l))^2.

    Bradley and Terry (1952); margins as in Llama 2 (arXiv 2307.09288, eq. 2), centering as in arXiv 2312.09244.
    """
    better, worse = chosen.scores, rejected.scores
    loss = _smooth(better - worse - margins, config.label_smoothing)
    return loss + config.center_coef * (better + worse).square(), better.detach(), worse.detach()


def compute_kto_loss(
    responses: ScoredResponses, is_chosen: torch.Tensor, baseline: float, config: PreferenceConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute KTO (arXiv 2402.01306, eq. 8) of single responses: loss [n] and implicit rewards [n].

    loss = w (1 - sigmoid(beta s (r(y) - z)));  s is 1 for desirable responses, else -1; w is of `kto_weights`.

    Args:
        is_chosen: [n] bool, whether a response is desirable.
        baseline: z, the mean r of responses to other prompts, at least 0.
    """
    sign = torch.where(is_chosen, 1.0, -1.0)
    weight = torch.where(is_chosen, *config.kto_weights)
    ratios = responses.log_ratios
    loss = weight * (1 - torch.sigmoid(config.beta * sign * (ratios - baseline)))
    return loss, (config.beta * ratios).detach()


def compute_process_loss(scores: torch.Tensor, labels: torch.Tensor, config: PreferenceConfig) -> torch.Tensor:
    """Compute the loss of a process reward model (arXiv 2211.14275), [n] per step: -log sigmoid(+-s).

    It is the cross entropy of two labels whose logits differ by s.

    Args:
        scores: [n] s of the last token of each step.
        labels: [n] bool, whether the step is right.
    """
    return _smooth(torch.where(labels, scores, -scores), config.label_smoothing)


def describe_margins(margins: np.ndarray) -> dict[str, float]:
    """Return accuracy, mean margin and calibration of pairs with the given reward margins, [n].

    A margin d predicts that the chosen response is better with the probability sigmoid(d). `calibration_error` is the
    expected difference between that probability, of whichever response is predicted, and the share of right
    predictions, over ten bins of equal width (arXiv 1706.04599, eq. 3). Equal rewards count half.
    """
    is_right = np.where(margins == 0, 0.5, margins > 0)
    confidence = 1 / (1 + np.exp(-np.abs(margins)))
    bins = np.minimum(((confidence - 0.5) * 2 * _CALIBRATION_BINS).astype(int), _CALIBRATION_BINS - 1)
    gaps = np.bincount(bins, confidence - is_right, _CALIBRATION_BINS)
    return {
        "accuracy": float(is_right.mean()),
        "margin": float(margins.mean()),
        "calibration_error": float(np.abs(gaps).sum() / len(margins)),
    }
