# SPDX-License-Identifier: Apache-2.0
"""What generates, and the stream of a run: when its phases end, and where that is written or read."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

from megatron_rl.config.schedule import ScheduleConfig
from megatron_rl.config.schema import RunConfig
from megatron_rl.data.stream import PromptBatches
from megatron_rl.parallel.collectives import open_store, world
from megatron_rl.rollout.generation import Generator, RolloutGenerator
from megatron_rl.rollout.order import SampleOrder
from megatron_rl.rollout.phase import TrainingEnd, open_phase_end
from megatron_rl.rollout.stream import Clock, RolloutStream
from megatron_rl.rollout.trace import ScheduleTrace, read_trace
from megatron_rl.types import Prompt


def open_stream(
    generator: RolloutGenerator,
    players: Generator,
    prompts: PromptBatches[Prompt],
    config: RunConfig,
    *,
    is_apart: bool,
    timeout: timedelta | None,
    trace: Path | None,
) -> RolloutStream:
    """Build the stream; collective.

    Args:
        generator, prompts, config: of the run.
        players: the generator, or that of episodes.
        is_apart: the engines have ranks of their own.
        timeout: of groups.
        trace: directory of the schedule's trace; None: none is written.

    Raises:
        UserError: the run whose trace is to be replayed has none, or had other engines; on every rank.
    """
    every = config.schedule.steps_per_update
    end = open_phase_end(every, generator.engines.of, timeout)
    runs_ahead = is_apart and config.schedule.max_staleness > 0
    training = TrainingEnd(every, open_store("training", world())) if runs_ahead else None
    clock, order = Clock(end, training, _open_trace(config.schedule, generator, trace)), SampleOrder(prompts, config)
    return RolloutStream(generator, order, players.carry(order), config, clock, world())


def _open_trace(schedule: ScheduleConfig, generator: RolloutGenerator, directory: Path | None) -> ScheduleTrace:
    """It is written where the engines look at the clock."""
    num_engines, replayed = len(generator.engines.of), None
    if schedule.replay is not None:
        replayed = read_trace(Path(schedule.replay), num_engines)
    is_timed = schedule.max_staleness > 0 and schedule.updates == "in_flight" and schedule.steps_per_update is None
    engine = generator.engine_index if generator.is_first else None
    return ScheduleTrace(num_engines, engine, directory if is_timed else None, replayed)
