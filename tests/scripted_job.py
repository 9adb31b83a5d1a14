# SPDX-License-Identifier: Apache-2.0
"""The ranks of a job with scripted engines, killed at random and resumed on others.

Lengths follow from prompts and samples, pauses are random, every token is the version of the weights that sampled it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch.distributed as dist

from megatron_rl.agents.episode import Answer
from megatron_rl.agents.transcript import Tail
from megatron_rl.config.schema import RewardConfig, RolloutConfig
from megatron_rl.config.sections import AgentsConfig, CurriculumConfig, ScheduleConfig
from megatron_rl.data.curriculum import DrawnPrompts
from megatron_rl.data.prompts import PromptBatches
from megatron_rl.engines.build import BuiltEngine
from megatron_rl.engines.protocol import Request, Sampled, SamplingConfig
from megatron_rl.observability.progress import PhaseTimers, RolloutProgress
from megatron_rl.parallel.collectives import open_store, world
from megatron_rl.parallel.layout import EngineRanks
from megatron_rl.rollout.collector import Clock, Collector, RewardSources, RolloutStream, Taken
from megatron_rl.rollout.episodes import SampleOrder
from megatron_rl.rollout.generation import RolloutGenerator, open_channel
from megatron_rl.rollout.phase_ends import ScheduleTrace, TrainingEnd, open_phase_end, read_trace
from megatron_rl.types import Prompt, Rollout

SAMPLING = SamplingConfig(temperature=1.0, max_tokens=40, stop_token_ids=())
BATCH, GROUP, PROMPTS = 3, 2, 7  # a batch runs across the end of an epoch now and then
OPTIMIZER_STEPS = 2  # of a step of the main loop
NO_CURRICULUM = CurriculumConfig()
INFORMATIVE = {0, 2, 3, 6}  # prompts whose responses have different rewards


def length_of(prompt_id: int, sample: int, turn: int = 0) -> int:
    """Tokens of a reply: most are short, one in eight is at the limit."""
    rng = np.random.default_rng([prompt_id, sample] + [turn] * (turn > 0))
    return 40 if rng.random() < 1 / 8 else int(rng.integers(1, 12))


class VersionEngine:
    """Samples the version of its weights; a prompt begins with its prompt_id and its length."""

    def __init__(self, weights: Any, slots: int, pause: random.Random) -> None:
        self._weights, self._slots, self._pause = weights, slots, pause
        self._waiting: list[Request] = []
        self._running: dict[int, tuple[Request, list[int]]] = {}

    def add(self, requests: Sequence[Request]) -> None:
        self._waiting += requests

    def step(self) -> list[Sampled]:
        while self._waiting and len(self._running) < self._slots:
            request = self._waiting.pop(0)
            self._running[request.key] = request, []
        time.sleep(self._pause.random() * 4e-4)
        finished = []
        for key, (request, tokens) in list(self._running.items()):
            tokens.append(self._weights.policy_version)
            prompt_id, prompt_length = request.tokens[:2].tolist()
            assert len(request.tokens) - prompt_length + request.sampling.max_tokens == SAMPLING.max_tokens
            if len(tokens) == request.sampling.max_tokens:
                finished.append(self._end(key, "length"))
            elif request.num_sampled + len(tokens) == length_of(prompt_id, key % GROUP, request.turn):
                finished.append(self._end(key, "stop"))
        return finished

    def interrupt(self, keys: Sequence[int]) -> list[Sampled]:
        for request in [request for request in self._waiting if request.key in set(keys)]:
            self._waiting.remove(request)
            self._running[request.key] = request, []
        return [self._end(key, "interrupted") for key in keys if key in self._running]

    def _end(self, key: int, reason: str) -> Sampled:
        request, tokens = self._running.pop(key)
        logprobs = -np.full(len(tokens), 1 + request.seed % 997, np.float32)  # so that rows show the seeds of segments
        return Sampled(key, np.array(tokens, np.int32), logprobs, reason)

    def has_requests(self) -> bool:
        return bool(self._waiting or self._running)

    def tokens_in_flight(self) -> int:
        return 0

    def close(self) -> None:
        pass


class ScriptedProcesses:
    """Environments that answer [7, 8] to each reply but the last, some of them slowly; each turn is worth a half."""

    def __init__(self, pause: random.Random, turns: int) -> None:
        self._pause, self._turns = pause, turns
        self._played: dict[Any, int] = {}
        self._answers: dict[Any, Answer] = {}

    def open(self, key: Any, prompt: Prompt) -> None:
        assert key not in self._played
        self._played[key] = 0
        self._answers[key] = Answer(Tail([]))

    def send_reply(self, key: Any, tokens: list[int], logprobs: list[float], finish_reason: str) -> None:
        assert len(tokens) == len(logprobs) > 0
        self._played[key] += 1
        is_last = self._played[key] == 1 + key[1] % self._turns
        self._answers[key] = Answer(None if is_last else Tail([7, 8]), reward=0.5)

    def wait(self) -> dict[Any, Answer]:
        if self._answers and self._pause.random() < 0.2:
            time.sleep(0.005)
        answers, self._answers = self._answers, {}
        return answers

    def close(self, key: Any) -> None:
        del self._played[key]


class StepScorer:
    """Rewards in the rank; informative prompts get different ones. The component "step" is the function's step."""

    is_concurrent = takes_groups = False

    def finish(self, rollouts: Sequence[Rollout], steps: Sequence[int], count: Callable[[], None]) -> list[Rollout]:
        return [
            replace(
                one,
                reward=one.sample_index * float(one.prompt.prompt_id in INFORMATIVE),
                reward_components={"step": step},
            )
            for one, step in zip(rollouts, steps, strict=True)
        ]


def make_prompts(curriculum: CurriculumConfig = NO_CURRICULUM) -> PromptBatches[Prompt]:
    prompts = [Prompt(i, np.array([i, 3 + i, *range(1 + i)], np.int32), "", None) for i in range(PROMPTS)]
    if curriculum == NO_CURRICULUM:
        return PromptBatches(prompts, BATCH, True, 5)
    return DrawnPrompts(prompts, BATCH, True, 5, curriculum=curriculum)


@dataclass
class Job:
    """The ranks of a job: everything that `take` needs, built as a run builds it.

    Attributes:
        first: first rank with an engine; ranks before it train.
        rounds: of dynamic sampling; None without it.
        trace: directory of the trace; None without one.
        turns: of the longest episodes; None for plain responses.
        curriculum: that draws the prompts.
    """

    schedule: ScheduleConfig
    width: int
    pause: random.Random
    version: int = 0
    first: int = 0
    rounds: int | None = None
    trace: Path | None = None
    turns: int | None = None
    curriculum: CurriculumConfig = NO_CURRICULUM

    def __post_init__(self) -> None:
        rank, engines = dist.get_rank(), EngineRanks.consecutive(range(self.first, dist.get_world_size()), self.width)
        self.weights = SimpleNamespace(policy_version=self.version, shape=SimpleNamespace(vocab_size=10**6))
        self.prompts = make_prompts(self.curriculum)
        engine: Any = VersionEngine(self.weights, 4, self.pause)
        config: Any = SimpleNamespace(
            schedule=self.schedule,
            rollout=RolloutConfig(n=GROUP, dispatch="samples"),
            reward=RewardConfig(),
            agents=AgentsConfig(environment=None if self.turns is None else "scripted", episodes_in_flight=5),
            trainer=SimpleNamespace(seed=1, max_failed_share=0.5),
            data=SimpleNamespace(
                sources={},
                train_batch_size=BATCH,
                max_response_length=SAMPLING.max_tokens,
                curriculum=self.curriculum,
            ),
            algorithm=SimpleNamespace(
                dynamic_sampling=self.rounds is not None,
                max_sampling_rounds=self.rounds,
                mask_truncated=False,
            ),
        )
        config.by_source, config.is_truncated = {"": config}, False
        config.has_episodes = config.agents.has_episodes
        processes: Any = None if self.turns is None else ScriptedProcesses(self.pause, self.turns)
        self.generator = RolloutGenerator(
            BuiltEngine(engine, engine, "scripted", engines),
            self.weights,
            open_channel(engines, rank),
            config=config,
            group=dist.group.WORLD,
            progress=RolloutProgress(),
            processes=processes,
        )
        end = open_phase_end(self.schedule.steps_per_update, engines.of, None)
        training = TrainingEnd(open_store("training", world())) if self.first else None
        replay, number = self.schedule.replay, len(engines.of)
        replayed = None if replay is None else read_trace(Path(replay), number)
        speaks_for = self.generator.engine_index if self.generator.is_first else None
        trace = ScheduleTrace(number, speaks_for, self.trace, replayed)
        order = SampleOrder(self.prompts, config)
        clock = Clock(end, training, trace)
        self.stream = RolloutStream(self.generator, order, config, clock, dist.group.WORLD)
        scorer: Any = StepScorer()
        rewards = RewardSources(scorer, None, False)
        self.collector = Collector(
            generator=self.generator,
            stream=self.stream,
            rewards=rewards,
            config=config,
            stop_token_ids=(),
            timers=PhaseTimers(),
            group=dist.group.WORLD,
        )

    def take(self, told: list[Rollout] | None = None) -> Taken:
        """Take the samples of one step."""
        return self.stream.take(SAMPLING, None if told is None else lambda rollout, step: told.append(rollout))

    def collect(self, step: int) -> tuple[dict[str, float], list[tuple[Any, ...]]]:
        """Collect one step of scored groups; return metrics and rows as `describe` does, equal on every rank."""
        samples = self.collector.collect(step)
        found = samples.fetch_rollouts(range(BATCH * GROUP), lambda tokens: "", on_all=True)
        rows = [(number // GROUP, *describe_rollout(rollout)) for number, (rollout, _) in enumerate(found)]
        return samples.metrics, rows

    def train(self, version: int) -> None:
        """Make the weights of a version, while engines on ranks of their own generate."""
        if self.stream.runs_ahead:
            if dist.get_rank() < self.first:
                time.sleep(self.pause.random() * 0.02)
            self.stream.run_ahead(SAMPLING, None)
        self.weights.policy_version = version

    def save(self) -> tuple[Any, ...]:
        """Return the contents of a checkpoint."""
        states: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(states, self.stream.rank_state())
        return self.prompts.state_dict(), self.stream.state_dict(), [state for state in states if state]

    def load(self, saved: tuple[Any, ...]) -> None:
        """Restore the contents of a checkpoint."""
        self.prompts.load_state_dict(saved[0])
        self.stream.load_state_dict(saved[1])
        self.stream.load_rank_states(saved[2])


def describe_rollout(one: Rollout) -> tuple[Any, ...]:
    """Its prompt, sample, tokens, versions, how it ended, and its log-probs."""
    tokens, logprobs = one.response_tokens.tolist(), one.rollout_logprobs.tolist()
    return one.prompt.prompt_id, one.sample_index, tokens, one.versions.tolist(), one.finish_reason, logprobs


def disturb(job: Job, choice: random.Random, run: Callable[[Job], Any]) -> tuple[Job, int]:
    """Kill a job some times, before a step or when it has run; return it resumed, and how often."""
    saved, killed, engine_ranks = job.save(), 0, dist.get_world_size() - job.first
    while choice.random() < 0.4:
        if choice.random() < 0.5:
            run(job)  # its generated tokens are lost with it
        pause = random.Random(choice.random() + dist.get_rank())
        width = choice.choice([1, 2, engine_ranks] if job.trace is None else [1])  # a trace is that of its engines
        job = replace(job, width=width, pause=pause, version=job.weights.policy_version)
        job.load(saved)
        killed += 1
    return job, killed


def find_age(step: int, row: Sequence[Any]) -> float:
    """Steps from the weights that began a response to those that learn from it; it must be whole."""
    prompt_id, sample, tokens, versions, reason, _ = row
    assert len(tokens) == length_of(prompt_id, sample)
    assert reason == ("length" if len(tokens) == SAMPLING.max_tokens else "stop")
    assert tokens == versions == sorted(versions)
    return step - versions[0] / OPTIMIZER_STEPS
