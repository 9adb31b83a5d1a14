# SPDX-License-Identifier: Apache-2.0
"""A language model that scores tokens: what actor and reference have in common."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megatron_rl.config.schema import LayoutConfig, ModelConfig
from megatron_rl.models.heads import gather_for_vocab_shards
from megatron_rl.packing.batch import TrainBatch
from megatron_rl.parallel.chunked_logprobs import compute_linear_logprobs_and_entropy, compute_linear_sum_pi_squared
from megatron_rl.parallel.groups import ParallelGroups
from megatron_rl.training.packed_model import PackedModel
from megatron_rl.weights.families import ModelShape


class Policy(PackedModel):
    """This rank's stages of one language model; logits exist for `logprob_chunk_tokens` tokens at a time."""

    def __init__(
        self, model: ModelConfig, layout_config: LayoutConfig, shape: ModelShape, groups: ParallelGroups,
        *, path: str | Path, temperature: float, seed: int,
    ) -> None:
        super().__init__(model, layout_config, shape, groups, path=path, seed=seed)
        self.temperature, self._chunk_tokens = temperature, layout_config.logprob_chunk_tokens
        self._reads_squares = False

    def compute_logprobs(self, batch: TrainBatch) -> torch.Tensor:
        """Log-probs of the tokens in the loss, [t] float32, the same on every rank of the replica; 0 elsewhere."""
        return self.compute_forward(batch)

    def compute_sum_pi_squared(self, batch: TrainBatch) -> torch.Tensor:
        """Sum over the vocabulary of squared probabilities where the tokens in the loss came from; as above."""
        self._reads_squares = True
        try:
            return self.compute_forward(batch)
        finally:
            self._reads_squares = False

    def _read_out(self, hidden: torch.Tensor, microbatch: TrainBatch) -> tuple[torch.Tensor, ...]:
        """Logprobs [t] of the tokens in the loss, and entropy [t] of the distributions they came from; 0 elsewhere."""
        places, rows, targets = self._predicted_rows(microbatch)
        hidden = gather_for_vocab_shards(
            hidden, sequence_parallel=self.config.sequence_parallel, tp_group=self.groups.tp)  # [t/cp, h]
        shared: dict[str, Any] = dict(
            vocab_size=self.shape.vocab_size, temperature=self.temperature, tp_group=self.groups.tp,
            chunk_tokens=self._chunk_tokens)
        output_weight = self.stages[-1].output_weight
        if self._reads_squares:
            squares = compute_linear_sum_pi_squared(hidden[rows], output_weight, **shared)
            return (self._combine(squares, places, microbatch),)
        found = compute_linear_logprobs_and_entropy(hidden[rows], output_weight, targets, **shared)
        logprobs, entropy = (self._combine(values, places, microbatch) for values in found)
        return logprobs, entropy
