# SPDX-License-Identifier: Apache-2.0
"""Samples that begin ahead of their step: bounded staleness, nothing lost, nothing twice, in the order of the data.

The engines are scripted: lengths follow from keys, pauses are random, every token is the version of the weights that
sampled it. Real engines are in tests/trainer/test_schedule.py.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from distributed import run_ranks
from megatron_rl.config.schedule import ScheduleConfig
from megatron_rl.data.stream import PromptBatches, PromptStream
from megatron_rl.engines.build import BuiltEngine
from megatron_rl.engines.protocol import Request, Sampled
from megatron_rl.engines.sampling import SamplingConfig, derive_seed
from megatron_rl.observability.rollout_progress import RolloutProgress
from megatron_rl.parallel.collectives import open_store, world
from megatron_rl.parallel.layout import EngineRanks
from megatron_rl.rollout.carried import NOTHING, Response, pack_responses, unpack_responses
from megatron_rl.rollout.control import open_channel
from megatron_rl.rollout.generation import RolloutGenerator
from megatron_rl.rollout.phase import TrainingEnd, open_phase_end
from megatron_rl.rollout.stream import RolloutStream, Taken, find_window
from megatron_rl.types import Prompt, Rollout

SAMPLING = SamplingConfig(temperature=1.0, max_tokens=40, stop_token_ids=())
BATCH, GROUP, PROMPTS = 3, 2, 7  # a batch runs across the end of an epoch now and then
OPTIMIZER_STEPS = 2  # of a step of the main loop


def length_of(prompt_id: int, sample: int) -> int:
    """Tokens of a response: most are short, one in eight is at the limit."""
    rng = np.random.default_rng([prompt_id, sample])
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
            whole = length_of(prompt_id, key % GROUP)
            assert len(request.tokens) - prompt_length + request.sampling.max_tokens == SAMPLING.max_tokens
            if len(request.tokens) - prompt_length + len(tokens) == whole:
                finished.append(self._end(key, "length" if whole == SAMPLING.max_tokens else "stop"))
        return finished

    def interrupt(self, keys: Sequence[int]) -> list[Sampled]:
        for request in [request for request in self._waiting if request.key in set(keys)]:
            self._waiting.remove(request)
            self._running[request.key] = request, []
        return [self._end(key, "interrupted") for key in keys if key in self._running]

    def _end(self, key: int, reason: str) -> Sampled:
        tokens = np.array(self._running.pop(key)[1], np.int32)
        return Sampled(key, tokens, -np.ones(len(tokens), np.float32), reason)

    def has_requests(self) -> bool:
        return bool(self._waiting or self._running)

    def tokens_in_flight(self) -> int:
        return 0

    def close(self) -> None:
        pass


def make_prompts() -> PromptBatches[Prompt]:
    prompts = [Prompt(i, np.array([i, 3 + i, *range(1 + i)], np.int32), "", None) for i in range(PROMPTS)]
    return PromptBatches(PromptStream(prompts, True, 5), BATCH)


@dataclass
class Job:
    """The ranks of a job: what `take` needs, built as a run builds it.

    Attributes:
        first: rank with an engine; those before it train.
    """

    schedule: ScheduleConfig
    width: int
    pause: random.Random
    version: int = 0
    first: int = 0

    def __post_init__(self) -> None:
        rank, engines = dist.get_rank(), EngineRanks.consecutive(range(self.first, dist.get_world_size()), self.width)
        self.weights = SimpleNamespace(policy_version=self.version, shape=SimpleNamespace(vocab_size=10**6))
        self.prompts = make_prompts()
        engine: Any = VersionEngine(self.weights, 4, self.pause)
        config: Any = SimpleNamespace(
            schedule=self.schedule,
            rollout=SimpleNamespace(n=GROUP, dispatch="samples"),
            trainer=SimpleNamespace(seed=1),
            data=SimpleNamespace(train_batch_size=BATCH),
        )
        self.generator = RolloutGenerator(
            BuiltEngine(engine, engine, "scripted", engines),
            self.weights,
            open_channel(engines, rank),
            config=config.rollout,
            run_seed=1,
            group=dist.group.WORLD,
            progress=RolloutProgress(),
        )
        end = open_phase_end(self.schedule.steps_per_update, engines.of, None)
        store = open_store("training", world())
        training = TrainingEnd(self.schedule.steps_per_update, store) if self.first else None
        self.stream = RolloutStream(self.generator, self.prompts, config, end, dist.group.WORLD, training)

    def take(self, told: list[Rollout] | None = None) -> Taken:
        """One step."""
        return self.stream.take(SAMPLING, None if told is None else lambda rollout, step: told.append(rollout))

    def train(self, version: int) -> None:
        """Make the weights of a version, while engines on ranks of their own generate."""
        if self.stream.runs_ahead:
            if dist.get_rank() < self.first:
                time.sleep(self.pause.random() * 0.02)
            self.stream.run_ahead(SAMPLING, None)
        self.weights.policy_version = version

    def save(self) -> tuple[Any, ...]:
        """What a checkpoint has."""
        states: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(states, self.stream.rank_state())
        return self.prompts.state_dict(), self.stream.state_dict(), [state for state in states if state]

    def load(self, saved: tuple[Any, ...]) -> None:
        """Continue from it."""
        self.prompts.load_state_dict(saved[0])
        self.stream.load_state_dict(saved[1])
        self.stream.load_rank_states(saved[2])


def describe(job: Job, taken: Taken) -> list[tuple[Any, ...]]:
    """The rollouts that this rank speaks for."""
    if not job.generator.is_first:
        return []
    return [
        (group, r.prompt.prompt_id, r.sample_index, r.response_tokens.tolist(), r.versions.tolist(), r.finish_reason)
        for group, r in taken.rollouts
    ]


def run_job(
    rank: int, world_size: int, schedule: ScheduleConfig, steps: int, seed: int, kills: bool, first: int = 0
) -> Any:
    """Steps of a job that is killed at random, within a phase or between two, and resumed on other engines."""
    choice = random.Random(seed)  # the same on every rank
    job = Job(schedule, 1, random.Random(seed + rank), first=first)
    found, killed, told = [], 0, []
    for step in range(steps):
        saved = job.save()
        while kills and choice.random() < 0.4:
            if choice.random() < 0.5:
                job.take()  # what it has generated is lost with it
            version = job.weights.policy_version
            width = choice.choice([1, 2, world_size - first])
            job = Job(schedule, width, random.Random(choice.random() + rank), version, first)
            job.load(saved)
            killed += 1
        taken = job.take(told)
        found.append(([prompt.prompt_id for prompt in taken.prompts], describe(job, taken), taken.metrics))
        job.train(OPTIMIZER_STEPS * (step + 1))
    return found, killed, len(told)


def check(results: list[Any], max_staleness: int, exact: bool) -> None:
    """Every sample of the data order once and whole, at most so many steps old, each token with its true version."""
    order, ages, carried = make_prompts(), [], []
    for step, per_rank in enumerate(zip(*(found for found, *_ in results), strict=True)):
        prompts = [prompt.prompt_id for prompt in next(order)]
        assert all(found[0] == prompts for found in per_rank)
        rows = sorted(row for found in per_rank for row in found[1])
        assert [row[:3] for row in rows] == [(i, prompts[i], s) for i in range(BATCH) for s in range(GROUP)]
        for _, prompt_id, sample, tokens, versions, reason in rows:
            assert len(tokens) == length_of(prompt_id, sample)
            assert reason == ("length" if len(tokens) == SAMPLING.max_tokens else "stop")
            assert tokens == versions == sorted(versions)
            ages.append(step - versions[0] / OPTIMIZER_STEPS)
        assert len({tuple(found[2].items()) for found in per_rank}) == 1
        carried.append(per_rank[0][2]["schedule/carried"])
    assert min(ages) >= 0 and max(ages) <= max_staleness
    assert set(carried) == {max_staleness * BATCH * GROUP}
    if exact:
        assert max(ages) == max_staleness


@pytest.mark.parametrize("max_staleness, every, first", [(1, None, 0), (2, 3, 0), (2, None, 2), (1, 3, 2)])
def test_nothing_is_lost_when_a_job_is_killed(max_staleness: int, every: int | None, first: int) -> None:
    """About 30 kills each, some within a phase; the job continues with other engines on four ranks, or on two."""
    schedule = ScheduleConfig(max_staleness=max_staleness, steps_per_update=every)
    results = run_ranks(run_job, 4, schedule, 45, 7 * max_staleness, True, first)
    assert results[0][1] > 20
    check(results, max_staleness, exact=False)


def test_phases_by_decode_steps_are_reproducible() -> None:
    """Two runs with other pauses and three interruptions per step on the average; the staleness reaches its bound."""
    schedule = ScheduleConfig(max_staleness=2, steps_per_update=2)
    results = [run_ranks(run_job, 2, schedule, 12, seed, False) for seed in (1, 2)]
    check(results[0], 2, exact=True)
    rows = [[[step[:2] for step in found] for found, *_ in ranks] for ranks in results]
    assert rows[0] == rows[1]
    versions = [len(set(row[4])) for found in rows[0] for _, step in found for row in step]
    assert max(versions) >= 3  # a response of three versions


def test_engines_beside_training_are_reproducible_by_decode_steps() -> None:
    """Two runs whose training takes other times: one rank trains, two generate and make four steps meanwhile."""
    schedule = ScheduleConfig(max_staleness=2, steps_per_update=4)
    results = [run_ranks(run_job, 3, schedule, 12, seed, False, 1) for seed in (1, 2)]
    check(results[0], 2, exact=True)
    rows = [[[step[:2] for step in found] for found, *_ in ranks] for ranks in results]
    assert rows[0] == rows[1]
    assert not [step for step in rows[0][0] if step[1]]  # the rank that trains has generated nothing


def test_drained_phases_have_responses_of_one_version() -> None:
    """One step off: everything that has begun is finished before the weights change."""
    schedule = ScheduleConfig(max_staleness=1, updates="drain")
    results = run_ranks(run_job, 2, schedule, 8, 3, False)
    check(results, 1, exact=True)
    rows = [row for found, *_ in results for _, step, _ in found for row in step]
    assert {len(set(row[4])) for row in rows} == {1}
    told = sum(count for *_, count in results)
    assert told == (8 + 1) * BATCH * GROUP


def fail_in_a_listener(rank: int, world_size: int, every: int | None) -> str:
    job = Job(ScheduleConfig(max_staleness=1, steps_per_update=every), 1, random.Random(rank))

    def listen(rollout: Rollout, step: int) -> None:
        if rank == 1:
            raise ValueError("a service is down")

    try:
        job.stream.take(SAMPLING, listen)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("every", [None, 4])
def test_error_of_one_engine_ends_the_phase_of_all(every: int | None) -> None:
    assert run_ranks(fail_in_a_listener, 3, every, timeout=30) == ["a service is down"] * 3


@given(st.integers(1, 5), st.integers(0, 4), st.integers(1, 30))
def test_window(batch_size: int, max_staleness: int, steps: int) -> None:
    """Batches follow each other, everything begins once, and what a step learns from began at most k steps before."""
    taken = begun = 0
    began_in: dict[int, int] = {}
    for step in range(steps):
        batch, new = find_window(taken, begun, batch_size, max_staleness)
        began_in |= dict.fromkeys(new, step)
        assert list(batch) == list(range(step * batch_size, (step + 1) * batch_size))
        assert all(0 <= step - began_in[i] <= max_staleness for i in batch)
        taken, begun = batch.stop, new.stop
    assert sorted(began_in) == list(range((steps + max_staleness) * batch_size))


def test_a_smaller_bound_takes_what_has_begun_first() -> None:
    assert find_window(taken=6, begun=15, batch_size=3, max_staleness=1) == (range(6, 9), range(15, 15))


def test_responses_survive_the_file() -> None:
    first = NOTHING.extend(Sampled(4, np.array([7, 8]), np.array([-0.5, -0.25]), "interrupted"), 3)
    second = first.extend(Sampled(4, np.array([9]), np.array([-1.0]), "stop"), 5)
    found = unpack_responses(pack_responses({4: second, 9: NOTHING, 2: first}))
    assert list(found) == [4, 9, 2] and not found[9].is_finished
    assert found[4].versions.tolist() == [3, 3, 5] and found[4].is_finished
    for key, response in {4: second, 9: NOTHING, 2: first}.items():
        assert_equal(found[key], response)


def assert_equal(a: Response, b: Response) -> None:
    assert a.finish_reason == b.finish_reason
    for name in ("tokens", "logprobs", "versions"):
        assert getattr(a, name).dtype == getattr(b, name).dtype
        assert np.array_equal(getattr(a, name), getattr(b, name))


def test_seeds_of_segments_differ_from_all_others() -> None:
    seeds = {derive_seed(1, 2, 3, 4, round, position) for round in range(4) for position in range(40)}
    assert len(seeds) == 160
    assert derive_seed(1, 2, 3, 4, 5, 0) == derive_seed(1, 2, 3, 4, 5)
