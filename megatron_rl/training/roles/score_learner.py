# SPDX-License-Identifier: Apache-2.0
"""Preference losses on microbatches, and the reward model in training.

The sequences of a step are its examples' responses in order; of a pair, the chosen one is even and the rejected
one odd, and both are in one microbatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.algorithms.catalog import PREFERENCE_LOSSES
from megatron_rl.algorithms.preference_losses import Pairwise, ScoredResponses
from megatron_rl.config.algorithm import PreferenceConfig
from megatron_rl.config.schema import TrainedConfig
from megatron_rl.data.preference_rows import Preference
from megatron_rl.samples.batch import TrainBatch
from megatron_rl.training.given_losses import compute_given_loss, describe_given_loss
from megatron_rl.training.optimizer import Optimizer, OptimizerStep, StepLoss
from megatron_rl.training.roles.actor import build_step
from megatron_rl.training.roles.frozen import RewardModel
from megatron_rl.training.setup import RoleSetup


def sum_by_sequence(values: torch.Tensor, batch: TrainBatch, count: int) -> torch.Tensor:
    """Sum values [t] of the tokens in the loss by sequence, [count] float64."""
    sums = torch.zeros(count, dtype=torch.float64, device=values.device)
    mask = batch.loss_mask
    return sums.index_add(0, batch.sequence_ids[mask], values[mask].double())


def find_last_tokens(batch: TrainBatch, count: int) -> torch.Tensor:
    """Return the row of the last token of each sequence, [count] int64; -1 if the sequence is not in the batch."""
    rows = torch.arange(len(batch.tokens), device=batch.tokens.device)
    last = torch.full((count,), -1, device=rows.device)
    mask = batch.loss_mask
    return last.scatter_reduce(0, batch.sequence_ids[mask], rows[mask], "amax")


@dataclass(frozen=True, eq=False)
class PreferenceLoss:
    """Loss of one step's examples; a `LossFunction` of the actor."""

    config: PreferenceConfig
    is_chosen: np.ndarray  # [num_examples] labels of single responses
    margins: np.ndarray  # [num_examples]
    weights: np.ndarray  # [num_examples]
    num_chosen_tokens: int  # in the loss, over all examples
    # [num_sequences] sums of the reference's log-probs; `None` if the loss has no reference.
    references: np.ndarray | None = None
    baseline: float = 0.0  # z of kto
    scores: bool = False  # whether values are scores of positions (bradley_terry), else log-probs
    __name__ = "preference"

    def __call__(
        self, microbatch: TrainBatch, values: torch.Tensor, entropy: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the sum of the examples' losses over their number in the step, and metrics, sums over examples."""
        config, device = self.config, values.device
        count = len(self.weights) * (2 if config.is_paired else 1)
        lengths = sum_by_sequence(torch.ones_like(values), microbatch, count)
        if self.scores:
            sums = torch.where(lengths > 0, values[find_last_tokens(microbatch, count)].double(), 0.0)
        else:
            sums = sum_by_sequence(values, microbatch, count)
        references = np.zeros(count) if self.references is None else self.references
        weights, margins, labels, references = (
            torch.from_numpy(table).to(device) for table in (self.weights, self.margins, self.is_chosen, references)
        )
        responses = ScoredResponses(sums, lengths, references)
        if config.is_paired:
            is_here = lengths[0::2] > 0
            assert torch.equal(is_here, lengths[1::2] > 0), "a pair is in two microbatches"
            sides = (
                responses.select(slice(0, None, 2)).select(is_here),
                responses.select(slice(1, None, 2)).select(is_here),
            )
            losses, better, worse = PREFERENCE_LOSSES[config.loss](*sides, margins[is_here], config)
            chosen = sides[0]
            metrics = _describe_pairs((losses, better, worse))
        else:
            is_here = lengths > 0
            here, labels = responses.select(is_here), labels[is_here]
            losses, rewards = PREFERENCE_LOSSES["kto"](here, labels, self.baseline, config)
            chosen = here.select(labels)
            shares = (
                max(self.is_chosen.mean(), 1e-9),
                max(1 - self.is_chosen.mean(), 1e-9),
            )  # rewards are means per kind
            metrics = {
                "chosen_reward": rewards[labels].sum() / shares[0],
                "rejected_reward": rewards[~labels].sum() / shares[1],
            }
        loss = (weights[is_here] * losses).sum() / len(self.weights)
        coef = config.nll_coef if config.nll_coef is not None else float(config.loss == "orpo")
        nll = -chosen.scores.sum() / max(self.num_chosen_tokens, 1)
        if not self.scores:
            loss = loss + coef * nll if coef else loss
            metrics["nll"] = nll.detach() * len(self.weights)
        return loss.float() + 0.0 * values.sum(), metrics  # an empty microbatch has a gradient of zeros, too


def _describe_pairs(found: Pairwise) -> dict[str, torch.Tensor]:
    _, better, worse = found
    is_right = (better > worse).double() + 0.5 * (better == worse).double()
    return {
        "accuracy": is_right.sum(),
        "margin": (better - worse).sum(),
        "chosen_reward": better.sum(),
        "rejected_reward": worse.sum(),
    }


_MOST_TOKENS = 1 << 32  # of a sequence


class ProcessLoss:
    """Loss of one step's examples in steps; a `LossFunction` of the actor."""

    __name__ = "preference"

    def __init__(self, config: PreferenceConfig, examples: Sequence[Preference]) -> None:
        self._config, sizes = config, [len(example.step_ends) for example in examples]
        ends = [number * _MOST_TOKENS + example.step_ends for number, example in enumerate(examples)]
        self._ends = torch.from_numpy(np.concatenate(ends))
        # [num_steps] bool, over all examples in order.
        self.labels = np.concatenate([example.step_labels for example in examples])
        self._weights = torch.from_numpy(np.repeat([example.weight for example in examples], sizes))

    def find(self, batch: TrainBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rows of the last tokens of the batch's steps, and the numbers of these steps, [k] each."""
        places, ends = batch.sequence_ids * _MOST_TOKENS + batch.position_ids, self._ends.to(batch.tokens.device)
        rows = torch.isin(places, ends).nonzero()[:, 0]
        return rows, torch.searchsorted(ends, places[rows])

    def __call__(
        self, microbatch: TrainBatch, values: torch.Tensor, entropy: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the sum of the steps' losses over their number in all examples, and metrics, sums over steps."""
        rows, steps = self.find(microbatch)
        labels, weights = (table.to(values.device)[steps] for table in (torch.from_numpy(self.labels), self._weights))
        scores = values[rows].double()
        losses = PREFERENCE_LOSSES["process"](scores, labels, self._config)
        margins = torch.where(labels, scores, -scores).detach()
        metrics = {"accuracy": ((margins > 0) + 0.5 * (margins == 0)).sum(), "margin": margins.sum()}
        return ((weights * losses).sum() / len(self.labels)).float() + 0.0 * values.sum(), metrics


class ScoreLearner(RewardModel):
    """Reward model in training; construction is collective.

    Args:
        setup: `spec.path` contains a language model (the head starts at zero) or a `*ForSequenceClassification` with
            one label.
    """

    def __init__(self, setup: RoleSetup) -> None:
        super().__init__(setup)
        config = setup.spec.settings
        assert isinstance(config, TrainedConfig)
        self.optimizer = Optimizer(self.model, config, setup.total_optimizer_steps)
        self._update = OptimizerStep(build_step(self.model, self.head, self.optimizer, config), "actor")
        self._loss = StepLoss("given", compute_given_loss, self.model.device)

    def forward_backward(self, minibatch: TrainBatch, loss: PreferenceLoss | ProcessLoss) -> None:
        """Compute the gradients of a preference loss over a minibatch."""
        self._loss.set_settings(loss)
        self._update.forward_backward(minibatch, self._loss)

    def optim_step(self) -> dict[str, float]:
        """Update the weights and return metrics; loss metrics are means per token."""
        result = self._update.optim_step()
        return describe_given_loss(result) if result else {}


def score_responses(role: Any, batch: TrainBatch, count: int, steps: ProcessLoss | None = None) -> np.ndarray:
    """Return the sum of log-probs, or a reward model's score, of every sequence, [count] float64; collective.

    Args:
        role: policy, reference or reward model.
        batch: this DP rank's share of the sequences.
        steps: return the score of every step instead, [num_steps].
    """
    if steps is not None:
        rows, numbers = steps.find(batch)
        table = torch.zeros(len(steps.labels), dtype=torch.float64, device=batch.tokens.device)
        table[numbers] = role.model.compute_forward(batch, role.head)[rows].double()
    elif role.model.shape.has_score_head:
        values, last = role.model.compute_forward(batch, role.head), find_last_tokens(batch, count)
        table = torch.where(last >= 0, values[last].double(), 0.0)
    else:
        table = sum_by_sequence(role.compute_logprobs(batch), batch, count)
    dist.all_reduce(table, group=role.model.groups.dp)
    return table.cpu().numpy()
