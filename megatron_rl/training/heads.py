# SPDX-License-Identifier: Apache-2.0
"""What a role makes of the last stage's hidden states: log-probs, values or scores of tokens.

A head gets hidden states [t/cp, 1, h] (or [t/cp/tp, 1, h] under TP-SP) of one microbatch, and gives tensors [t] of the
whole microbatch, the same on every context parallel rank: a loss knows nothing of shards. Several heads may share one
model.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from megatron_rl.models.heads import gather_for_vocab_shards
from megatron_rl.models.stages import HiddenStatesModel, ScoreModel
from megatron_rl.packing.batch import TrainBatch
from megatron_rl.parallel.batch_invariant import MIN_ROWS
from megatron_rl.parallel.chunked_logprobs import (
    OutputSoftmax,
    compute_linear_logprobs_and_entropy,
    compute_linear_sum_pi_squared,
)
from megatron_rl.parallel.ulysses import combine_shards
from megatron_rl.training.packed_model import PackedModel

if TYPE_CHECKING:
    from megatron_rl.training.distillation import TeacherDivergence


class LogprobHead:
    """Log-probs of tokens; logits exist for a chunk of tokens at a time.

    Args:
        model: a language model.
        temperature: that the logits are divided by.
        chunk_tokens: tokens of a chunk.
        divergence: of the distributions from a teacher's; None: there is none to learn from.
    """

    def __init__(
        self,
        model: PackedModel,
        temperature: float = 1.0,
        chunk_tokens: int = 512,
        divergence: TeacherDivergence | None = None,
    ) -> None:
        self._model, self._divergence = model, divergence
        # Rows are padded below, so that in every chunk there are as many as a row needs to keep its bits.
        self._multiple = MIN_ROWS if model.batch_invariant else 1
        self._softmax = OutputSoftmax(
            vocab_size=model.shape.vocab_size,
            temperature=temperature,
            tp_group=model.groups.tp,
            chunk_tokens=-(-chunk_tokens // self._multiple) * self._multiple,
        )

    def __call__(self, hidden: torch.Tensor, microbatch: TrainBatch) -> tuple[torch.Tensor, ...]:
        """Log-probs [t] of the tokens in the loss, and entropy [t] of what they came from; 0 elsewhere.

        Where the microbatch has what a teacher says, the divergence [t] from it as a third.
        """
        places, rows, targets = _find_predicted(self._model, microbatch)
        states, count, kept = self._gather(hidden)[rows], len(targets), microbatch.find_kept(places)
        if padding := -count % self._multiple:
            states, targets = F.pad(states, (0, 0, 0, padding)), F.pad(targets, (0, padding))
            kept = kept and kept.pad(padding)
        found = compute_linear_logprobs_and_entropy(states, self._output_weight, targets, self._softmax, kept)
        if self._divergence is not None:
            divergence = self._divergence(states, self._output_weight, self._softmax, microbatch, places)
            found = found if divergence is None else (*found, divergence)
        return tuple(_combine(self._model, values[:count], places, microbatch) for values in found)

    def compute_sum_pi_squared(self, hidden: torch.Tensor, microbatch: TrainBatch) -> tuple[torch.Tensor]:
        """A head too: sum [t] over the vocabulary of the squared probabilities that the tokens came from."""
        places, rows, _ = _find_predicted(self._model, microbatch)
        kept = microbatch.find_kept(places)
        squares = compute_linear_sum_pi_squared(self._gather(hidden)[rows], self._output_weight, self._softmax, kept)
        return (_combine(self._model, squares, places, microbatch),)

    def compute_top_k(
        self, k: int, vocab_size: int, hidden: torch.Tensor, microbatch: TrainBatch
    ) -> tuple[torch.Tensor]:
        """A head too: the k likeliest of the first `vocab_size` tokens, [t, 2, k + 1]; see `compute_linear_top_k`."""
        from megatron_rl.parallel.chunked_divergence import compute_linear_top_k

        places, rows, _ = _find_predicted(self._model, microbatch)
        softmax = replace(self._softmax, vocab_size=vocab_size)
        found = compute_linear_top_k(self._gather(hidden)[rows], self._output_weight, k, softmax)
        return (_combine(self._model, found, places, microbatch),)

    def select_hidden(self, hidden: torch.Tensor, microbatch: TrainBatch) -> tuple[torch.Tensor]:
        """A head too: the hidden states [t, h] float32 that the tokens in the loss are predicted from; 0 elsewhere."""
        places, rows, _ = _find_predicted(self._model, microbatch)
        return (_combine(self._model, self._gather(hidden)[rows].float(), places, microbatch),)

    @property
    def _output_weight(self) -> torch.Tensor:
        stage = self._model.stages[-1]
        assert isinstance(stage, HiddenStatesModel)
        return stage.output_weight

    def _gather(self, hidden: torch.Tensor) -> torch.Tensor:
        """[t/cp, h]."""
        return gather_for_vocab_shards(
            hidden, sequence_parallel=self._model.config.sequence_parallel, tp_group=self._model.groups.tp
        )


class ValueHead:
    """Values of the states in which tokens were chosen, of a model with a score head."""

    def __init__(self, model: PackedModel) -> None:
        self._model = model

    def __call__(self, hidden: torch.Tensor, microbatch: TrainBatch) -> tuple[torch.Tensor]:
        """Values [t] of the tokens in the loss: the scores of the positions that predict them; 0 elsewhere."""
        places, rows, _ = _find_predicted(self._model, microbatch)
        scores = _score(self._model, hidden)
        return (_combine(self._model, scores[rows], places, microbatch),)


class PositionScoreHead:
    """Scores of all positions, of a model with a score head."""

    def __init__(self, model: PackedModel) -> None:
        self._model = model

    def __call__(self, hidden: torch.Tensor, microbatch: TrainBatch) -> tuple[torch.Tensor]:
        """Scores [t]."""
        mine = self._model.own_rows(microbatch)
        places = torch.arange(mine.start, mine.stop, device=hidden.device)
        scores = _score(self._model, hidden)
        return (_combine(self._model, scores, places, microbatch),)


def _score(model: PackedModel, hidden: torch.Tensor) -> torch.Tensor:
    """Scores of the rows of a rank's shard."""
    stage = model.stages[-1]
    assert isinstance(stage, ScoreModel)
    return stage.score(hidden)


def _find_predicted(
    model: PackedModel, microbatch: TrainBatch
) -> tuple[torch.Tensor, torch.Tensor | slice, torch.Tensor]:
    """Tokens that this context parallel rank predicts: those in the loss, or where shapes must be fixed all.

    Of a bucketed microbatch all rows predict, each its successor; where prompts are shared (which takes cp = 1)
    all places are predicted, each by its predecessor. What is not in the loss is dropped by `_combine`.

    Returns:
        Their places in the microbatch [k]; the rows of the rank's shard whose hidden states predict them [k]; the
        tokens [k]. Place t, behind the end, stands for nothing.
    """
    mine, predecessors = model.own_rows(microbatch), microbatch.predecessors
    tokens, piece = microbatch.tokens, microbatch.slices[0]
    if not piece.is_bucketed:
        is_mine = microbatch.loss_mask & (predecessors >= mine.start) & (predecessors < mine.stop)
        places = is_mine.nonzero()[:, 0]
        return places, predecessors[places] - mine.start, tokens[places]
    if piece.keys is not None:
        assert model.groups.layout.cp_size == 1, "shared prompts have no fixed shape under context parallelism"
        return torch.arange(len(predecessors), device=tokens.device), predecessors, tokens
    places = torch.arange(mine.start + 1, mine.stop + 1, device=tokens.device)
    return places, slice(None), F.pad(tokens, (0, 1))[mine.start + 1 : mine.stop + 1]


def _combine(model: PackedModel, values: torch.Tensor, places: torch.Tensor, microbatch: TrainBatch) -> torch.Tensor:
    """Values [k, ...] of every context parallel rank at their places: [t, ...], 0 where no rank has one."""
    length = len(microbatch.tokens)
    if not microbatch.slices[0].is_bucketed:
        return combine_shards(values, places, length, model.groups.cp)
    combined = combine_shards(values, places, length + 1, model.groups.cp)[:length]
    mask = microbatch.loss_mask.view(-1, *(1 for _ in combined.shape[1:]))
    return torch.where(mask, combined, 0.0)
