# SPDX-License-Identifier: Apache-2.0
"""What generates, and the stream of a run: when its phases end, and where that is written or read."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

from megatron_rl.agents.episode import Setup
from megatron_rl.agents.in_rank import choose_episodes
from megatron_rl.checkpoint.side_files import find_model_files
from megatron_rl.config.schedule import ScheduleConfig
from megatron_rl.config.schema import RunConfig
from megatron_rl.data.stream import PromptBatches
from megatron_rl.parallel.collectives import open_store, world
from megatron_rl.rollout.carried import CarriedResponses
from megatron_rl.rollout.episode_generation import EpisodeGenerator
from megatron_rl.rollout.generation import Generator, RolloutGenerator
from megatron_rl.rollout.order import SampleOrder
from megatron_rl.rollout.phase import TrainingEnd, open_phase_end
from megatron_rl.rollout.stream import Clock, RolloutStream
from megatron_rl.rollout.trace import ScheduleTrace, read_trace
from megatron_rl.types import Prompt


def open_episodes(generator: RolloutGenerator, config: RunConfig, stop_token_ids: tuple[int, ...]) -> Generator:
    """What generates: episodes where there is an environment or a program, else responses."""
    agents = config.agents
    if not agents.has_episodes:
        return generator
    setup = Setup(
        environment=agents.environment,
        tokenizer=str(config.model.tokenizer or find_model_files(config.model.path)),
        options=config.data.apply_chat_template_kwargs,
        stop_token_ids=stop_token_ids,
        follows_template=agents.history == "template",
        max_turns=agents.max_turns,
        run_seed=config.trainer.seed,
        program=agents.program,
        tools=tuple(agents.tools),
        temperature=config.rollout.temperature,
        context_length=config.data.max_prompt_length + config.data.max_response_length,
        tool_format=agents.tool_format,
        reads_marks=config.data.special_tokens_in_contents,
    )
    processes = choose_episodes(setup, agents, is_debugged=config.trainer.debug_rank == world().rank())
    return EpisodeGenerator(generator, processes, config, world())


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
        players: what `open_episodes` has returned.
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
    carried = players.carry(order) if isinstance(players, EpisodeGenerator) else CarriedResponses(order)
    return RolloutStream(generator, order, carried, config, clock, world())


def _open_trace(schedule: ScheduleConfig, generator: RolloutGenerator, directory: Path | None) -> ScheduleTrace:
    """It is written where the engines look at the clock."""
    num_engines, replayed = len(generator.engines.of), None
    if schedule.replay is not None:
        replayed = read_trace(Path(schedule.replay), num_engines)
    is_timed = schedule.max_staleness > 0 and schedule.updates == "in_flight" and schedule.steps_per_update is None
    engine = generator.engine_index if generator.is_first else None
    return ScheduleTrace(num_engines, engine, directory if is_timed else None, replayed)
