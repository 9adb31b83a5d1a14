# SPDX-License-Identifier: Apache-2.0
"""The actor as the judge of what servers say after an update of their weights."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_rl.config.schema import RunConfig
from megatron_rl.config.server import SERVER_ENGINES
from megatron_rl.engines.protocol import EngineWeights, ProbedEngine
from megatron_rl.parallel.collectives import share_object, world
from megatron_rl.roles.actor import Actor
from megatron_rl.training.packed_model import PackedModel
from megatron_rl.training.scoring import score_sequences
from megatron_rl.weight_sync.probe import ProbedWeights


def probe_weights(weights: EngineWeights, actor: Actor, config: RunConfig) -> EngineWeights:
    """Weights of servers, or of what stands for them on this rank, with the probe; other engines' weights stay."""
    if config.rollout.engine not in SERVER_ENGINES:
        return weights
    layout = actor.model.layout

    def score(sequences: Sequence[np.ndarray], skip: Sequence[int], temperature: float) -> list[np.ndarray]:
        found = None
        if isinstance(actor.model, PackedModel):
            found = [scores.numpy() for scores in score_sequences(actor.model, sequences, skip, temperature)]
        return share_object(found, world(), layout.first_rank) if layout.world_size < world().size() else found or []

    ask = weights.probe if isinstance(weights, ProbedEngine) else lambda: None
    return ProbedWeights(weights, ask, score, config.model.dtype, world())
