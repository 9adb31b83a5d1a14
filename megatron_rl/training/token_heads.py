# SPDX-License-Identifier: Apache-2.0
"""Heads that compute log-probs, values or scores of tokens from the last stage's hidden states.

A head maps hidden states [t/cp, 1, h] (with sequence parallelism [t/cp/tp, 1, h]) of a microbatch to tensors [t], equal
on every context parallel rank, so that losses are independent of sharding.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from megatron_rl.models.stages import HiddenStatesModel, combine_shards, gather_for_shards
from megatron_rl.parallel.vocab_parallel import OutputSoftmax, compute_linear_logprobs_and_entropy
from megatron_rl.samples.batch import TrainBatch
from megatron_rl.training.packed_model import PackedModel

if TYPE_CHECKING:
    from megatron_rl.training.teacher_divergence import TeacherDivergence


class LogprobHead:
    """Head for token log-probs, with logits for `chunk_tokens` tokens at a time.

    Args:
        temperature: divisor of the logits.
    """

    def __init__(
        self,
        model: PackedModel,
        temperature: float = 1.0,
        chunk_tokens: int = 512,
        divergence: TeacherDivergence | None = None,
    ) -> None:
        self._model, self._divergence = model, divergence
        self._multiple = 1  # rows are padded to it
        if model.batch_invariant:
            from megatron_rl.parallel.batch_invariant import MIN_ROWS

            self._multiple = MIN_ROWS
        self._softmax = OutputSoftmax(
            vocab_size=model.shape.vocab_size,
            temperature=temperature,
            tp_group=model.groups.tp,
            chunk_tokens=-(-chunk_tokens // self._multiple) * self._multiple,
        )

    def __call__(self, hidden: torch.Tensor, microbatch: TrainBatch) -> tuple[torch.Tensor, ...]:
        """Return log-probs [t] or [t, k], entropies [t] and, with a teacher, divergences [t]; 0 outside of the loss."""
        places, rows, targets = _find_predicted(self._model, microbatch)
        states, count, kept = self._gather(hidden)[rows], len(targets), microbatch.find_kept(places)
        if padding := -count % self._multiple:
            states, targets = (
                F.pad(states, (0, 0, 0, padding)),
                torch.cat([targets, targets.new_zeros(padding, *targets.shape[1:])]),
            )
            kept = kept and kept.pad(padding)
        found = compute_linear_logprobs_and_entropy(states, self._output_weight, targets, self._softmax, kept)
        if self._divergence is not None:
            divergence = self._divergence(states, self._output_weight, self._softmax, microbatch, places)
            found = found if divergence is None else (*found, divergence)
        return tuple(_combine(self._model, values[:count], places, microbatch) for values in found)

    def compute_sum_pi_squared(self, hidden: torch.Tensor, microbatch: TrainBatch) -> tuple[torch.Tensor]:
        """Return the sum over the vocabulary of squared probabilities, [t]."""
        from megatron_rl.parallel.chunked_divergence import compute_linear_sum_pi_squared

        places, rows, _ = _find_predicted(self._model, microbatch)
        kept = microbatch.find_kept(places)
        squares = compute_linear_sum_pi_squared(self._gather(hidden)[rows], self._output_weight, self._softmax, kept)
        return (_combine(self._model, squares, places, microbatch),)

    def compute_top_k(
        self, k: int, vocab_size: int, hidden: torch.Tensor, microbatch: TrainBatch
    ) -> tuple[torch.Tensor]:
        """Return ids and log-probs [t, 2, k + 1]: k likeliest of the first `vocab_size` tokens, then all others."""
        from megatron_rl.parallel.chunked_divergence import compute_linear_top_k

        places, rows, _ = _find_predicted(self._model, microbatch)
        softmax = replace(self._softmax, vocab_size=vocab_size)
        found = compute_linear_top_k(self._gather(hidden)[rows], self._output_weight, k, softmax)
        return (_combine(self._model, found, places, microbatch),)

    def select_hidden(self, hidden: torch.Tensor, microbatch: TrainBatch) -> tuple[torch.Tensor]:
        """Return the hidden states [t, h] float32 that predict the tokens in the loss; 0 elsewhere."""
        places, rows, _ = _find_predicted(self._model, microbatch)
        return (_combine(self._model, self._gather(hidden)[rows].float(), places, microbatch),)

    @property
    def _output_weight(self) -> torch.Tensor:
        stage = self._model.stages[-1]
        assert isinstance(stage, HiddenStatesModel)
        return stage.output_weight

    def _gather(self, hidden: torch.Tensor) -> torch.Tensor:
        """Gather hidden states [t/cp, 1, h] or [t/cp/tp, 1, h] over TP to [t/cp, h]."""
        return gather_for_shards(
            hidden, sequence_parallel=self._model.config.sequence_parallel, tp_group=self._model.groups.tp
        )[:, 0]


def compute_values(model: PackedModel, hidden: torch.Tensor, microbatch: TrainBatch) -> tuple[torch.Tensor]:
    """Return values [t], the scores of the positions that predict the tokens in the loss; 0 elsewhere."""
    places, rows, _ = _find_predicted(model, microbatch)
    return (_combine(model, _score(model, hidden)[rows], places, microbatch),)


def compute_scores(model: PackedModel, hidden: torch.Tensor, microbatch: TrainBatch) -> tuple[torch.Tensor]:
    """Return the scores of all positions, [t]."""
    mine = model.own_rows(microbatch)
    places = torch.arange(mine.start, mine.stop, device=hidden.device)
    return (_combine(model, _score(model, hidden), places, microbatch),)


def _score(model: PackedModel, hidden: torch.Tensor) -> torch.Tensor:
    from megatron_rl.models.other_stages import ScoreModel

    stage = model.stages[-1]
    assert isinstance(stage, ScoreModel)
    return stage.score(hidden)


def _find_predicted(
    model: PackedModel, microbatch: TrainBatch
) -> tuple[torch.Tensor, torch.Tensor | slice, torch.Tensor]:
    """Find the tokens that this context parallel rank predicts: those in the loss, or all if shapes are fixed.

    Returns:
        Indices [k] of the tokens in the microbatch, where t is a dummy; rows [k] of this rank's hidden states that
        predict them; their targets, [k, ...] token ids.
    """
    mine, predecessors = model.own_rows(microbatch), microbatch.predecessors
    tokens, piece = microbatch.tokens if microbatch.targets is None else microbatch.targets, microbatch.slices[0]
    if not piece.is_bucketed:
        is_mine = microbatch.loss_mask & (predecessors >= mine.start) & (predecessors < mine.stop)
        places = is_mine.nonzero()[:, 0]
        return places, predecessors[places] - mine.start, tokens[places]
    if piece.keys is not None:
        assert model.groups.layout.cp_size == 1, "shared prompts have no fixed shape under context parallelism"
        return torch.arange(len(predecessors), device=tokens.device), predecessors, tokens
    places = torch.arange(mine.start + 1, mine.stop + 1, device=tokens.device)
    return places, slice(None), tokens.roll(-1, 0)[mine]


def _combine(model: PackedModel, values: torch.Tensor, places: torch.Tensor, microbatch: TrainBatch) -> torch.Tensor:
    """Combine each context parallel rank's values [k, ...] of the tokens `places` [k] into [t, ...]; collective."""
    length = len(microbatch.tokens)
    if not microbatch.slices[0].is_bucketed:
        return combine_shards(values, places, length, model.groups.cp)
    combined = combine_shards(values, places, length + 1, model.groups.cp)[:length]
    mask = microbatch.loss_mask.view(-1, *(1 for _ in combined.shape[1:]))
    return torch.where(mask, combined, 0.0)
