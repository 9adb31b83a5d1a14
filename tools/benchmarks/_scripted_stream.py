# SPDX-License-Identifier: Apache-2.0
"""A run's stream of samples, with scripted engines on all ranks or some."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import torch.distributed as dist

from megatron_rl.data.prompts import PromptBatches
from megatron_rl.engines.build import BuiltEngine
from megatron_rl.engines.protocol import SamplingConfig
from megatron_rl.observability.progress import RolloutProgress
from megatron_rl.parallel.collectives import open_store, world
from megatron_rl.parallel.layout import EngineRanks
from megatron_rl.rollout.collector import Clock, RolloutStream
from megatron_rl.rollout.episodes import SampleOrder
from megatron_rl.rollout.generation import Channel, RolloutGenerator
from megatron_rl.rollout.phase_ends import TrainingEnd, open_phase_end
from megatron_rl.run.loading import load_config
from megatron_rl.types import Prompt
from tools.benchmarks._scripted_engine import VOCAB_SIZE, ScriptedEngine
from tools.planning.lengths import LengthModel
from tools.planning.schedules import Costs, Schedule

_LENGTH_SEED = 1  # equals the simulator's


class ScriptedStream:
    """The samples of `steps` steps from scripted engines, one per rank; construction is collective.

    Args:
        schedule: with `max_staleness` above 0; engines on own ranks follow the training ranks.
        costs: with at most as many engines as ranks.
        lengths: drawn as in the simulator.
        spend: see `ScriptedEngine`.
        steps_per_update: see `schedule.steps_per_update`.
    """

    def __init__(
        self,
        schedule: Schedule,
        costs: Costs,
        lengths: LengthModel,
        steps: int,
        spend: Callable[[float], None] | None = None,
        steps_per_update: int | None = None,
    ) -> None:
        size, group_size, world_size = costs.batch_size, costs.group_size, dist.get_world_size()
        batches = steps + schedule.max_staleness + 1
        drawn = [lengths.draw(_LENGTH_SEED, n * size, size, group_size, costs.longest).ravel() for n in range(batches)]
        self.engine = ScriptedEngine(
            dict(enumerate(np.concatenate(drawn).tolist())),
            costs.engine.max_num_seqs,
            costs.engine.cost,
            spend,
            costs.prompt_tokens,
        )
        rng = np.random.default_rng(0)
        prompts = [
            Prompt(i, rng.integers(0, VOCAB_SIZE, costs.prompt_tokens, dtype=np.int32), "", None)
            for i in range(batches * size)
        ]
        config = load_config(
            None,
            [
                "model.path=none",
                "data.train_files=[none]",
                f"data.train_batch_size={size}",
                f"rollout.n={group_size}",
                f"rollout.dispatch={schedule.dispatch}",
                *(f"schedule.{name}={getattr(schedule, name)}" for name in ("max_staleness", "updates", "order")),
                f"schedule.steps_per_update={steps_per_update or 'null'}",
                "trainer.seed=0",
                "algorithm.importance_sampling=token-truncate",
            ],
        ).config
        self._weights = SimpleNamespace(policy_version=0, shape=SimpleNamespace(vocab_size=VOCAB_SIZE))
        self._num_trainers = world_size - costs.num_engines
        engines = EngineRanks.consecutive(range(self._num_trainers, world_size), 1)
        training = TrainingEnd(open_store("training", world())) if self._num_trainers else None
        generator = RolloutGenerator(
            BuiltEngine(self.engine, None, "ScriptedEngine", engines),
            self._weights,
            Channel(),
            config=config,
            group=dist.group.WORLD,
            progress=RolloutProgress(),
        )
        order = SampleOrder(PromptBatches(prompts, size, False, 0), config)
        clock = Clock(open_phase_end(steps_per_update, engines.of, None), training)
        self._stream = RolloutStream(generator, order, config, clock, dist.group.WORLD)
        self._sampling = SamplingConfig(temperature=1.0, max_tokens=costs.longest, stop_token_ids=())

    def take(self) -> int:
        """Take the next step's samples; return the response tokens of all ranks; collective."""
        taken = self._stream.take(self._sampling, None)
        of_ranks = [0] * dist.get_world_size()
        dist.all_gather_object(of_ranks, sum(len(rollout.response_tokens) for _, rollout in taken.rollouts))
        return sum(of_ranks)

    def train(self, train: Callable[[], None]) -> None:
        """Train on every rank, or beside the engines, and update the weights; collective."""
        if dist.get_rank() < self._num_trainers or not self._num_trainers:
            train()
        if self._num_trainers:
            self._stream.run_ahead(self._sampling, None)
        self._weights.policy_version += 1
        self.engine.drop_cache()
