# SPDX-License-Identifier: Apache-2.0
"""Episodes that begin ahead of their step: replies are interrupted, nothing is lost, nothing comes twice.

Engines and environments are scripted (scripted_job.py); real ones are in tests/run/test_agents_in_loop.py.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from scripted_job import (
    BATCH,
    GROUP,
    OPTIMIZER_STEPS,
    SAMPLING,
    Job,
    describe_rollout,
    disturb,
    length_of,
    make_prompts,
)

from distributed import run_ranks
from megatron_rl.config.sections import ScheduleConfig
from megatron_rl.rollout.episodes import SampleGroups
from megatron_rl.rollout.packed_episodes import pack_rollouts, unpack_rollouts
from megatron_rl.types import Branch, KeptSets, Prompt, Rollout, Turn, UserError

TURNS = 4


def run_job(
    rank: int,
    world_size: int,
    schedule: ScheduleConfig,
    steps: int,
    seed: int,
    kills: bool,
    first: int,
    turns: int | None,
) -> Any:
    """Return the rows of each step held by this rank, the metrics, and the number of kills."""
    choice, killed = random.Random(seed), 0  # the same on every rank
    job, found = Job(schedule, 1, random.Random(seed + rank), first=first, turns=turns), []
    for step in range(steps):
        if kills:
            job, kills_now = disturb(job, choice, Job.take)
            killed += kills_now
        taken = job.take()
        rows = [(i, *describe_rollout(one), one.reward) for i, one in taken.rollouts] if job.generator.is_first else []
        found.append((rows, taken.metrics))
        job.train(OPTIMIZER_STEPS * (step + 1))
    return found, killed


def rows_of_steps(results: list[Any]) -> list[list[Any]]:
    """The rollouts of every step, whichever rank spoke for them."""
    return [sorted(row for rows, _ in steps for row in rows) for steps in zip(*(found for found, _ in results))]


def expect(prompt_id: int, key: int) -> tuple[int, str, float]:
    """Return an episode's samples, its end, and its reward."""
    behind, sampled, worth, reason = 0, 0, 0.0, ""
    for turn in range(1 + key % TURNS):
        behind += 2 * (turn > 0)
        room = SAMPLING.max_tokens - behind
        if room < 1:
            return sampled, "length", worth
        length = length_of(prompt_id, key % GROUP, turn)
        reason, length, worth = "stop" if length < room else "length", min(length, room), worth + 0.5
        behind, sampled = behind + length, sampled + length
    return sampled, reason, worth


def check(results: list[Any], max_staleness: int) -> None:
    """Every episode of the data order once and whole, within the staleness limit, each token with its true version."""
    order, ages = make_prompts(), []
    for step, rows in enumerate(rows_of_steps(results)):
        prompts = [prompt.prompt_id for prompt in next(order)]
        assert [row[:3] for row in rows] == [(i, prompts[i], s) for i in range(BATCH) for s in range(GROUP)]
        for place, (_, prompt_id, _, tokens, versions, reason, _, reward) in enumerate(rows):
            key = step * BATCH * GROUP + place
            assert (len(tokens), reason, reward) == expect(prompt_id, key)
            assert tokens == versions == sorted(versions)
            ages.append(step - versions[0] / OPTIMIZER_STEPS)
    assert min(ages) >= 0 and max(ages) <= max_staleness


@pytest.mark.parametrize("max_staleness, every, first", [pytest.param(1, 3, 0, marks=pytest.mark.slow), (2, None, 2)])
def test_no_episode_is_lost_when_a_job_is_killed(max_staleness: int, every: int | None, first: int) -> None:
    """Some kills come within a phase; the job continues with other engines on four ranks, or on two."""
    schedule = ScheduleConfig(max_staleness=max_staleness, steps_per_update=every)
    results = run_ranks(run_job, 4, schedule, 30, 7 * max_staleness, True, first, TURNS)
    assert results[0][1] > 10
    check(results, max_staleness)
    versions = [len({*row[4]}) for rows in rows_of_steps(results) for row in rows]
    assert max(versions) > 1, "no episode saw two versions"


class Slow(random.Random):
    """Every environment is slow, and every engine fast."""

    def random(self) -> float:
        return 0.0


def _run_slow_environments(rank: int, world_size: int, schedule: ScheduleConfig) -> list[Any]:
    job, rows = Job(schedule, 1, Slow(), turns=TURNS), []
    for step in range(4):
        rows += [describe_rollout(one) for _, one in job.take().rollouts]
        job.train(OPTIMIZER_STEPS * (step + 1))
    return rows


@pytest.mark.parametrize("updates", ["in_flight", "drain"])
def test_replies_of_slow_environments(updates: Any) -> None:
    """One rank. An interrupted reply continues with a seed of its own, visible in its log-probs; drained, none is."""
    every = 2 if updates == "in_flight" else None
    (rows,) = run_ranks(
        _run_slow_environments, 1, ScheduleConfig(max_staleness=1, steps_per_update=every, updates=updates)
    )
    assert len(rows) == 4 * BATCH * GROUP
    changes = [(row[5][i - 1], row[5][i]) for row in rows for i in np.flatnonzero(np.diff(row[3])) + 1]
    assert (len(changes) > 10) == (updates == "in_flight") and all(before != after for before, after in changes)
    assert updates == "in_flight" or not changes


def test_drained_episodes_have_one_version_and_a_killed_job_is_the_same() -> None:
    """Two jobs with other pauses, one of which is killed again and again; one rank trains beside two engines."""
    schedule = ScheduleConfig(max_staleness=1, updates="drain")
    results = [run_ranks(run_job, 3, schedule, 12, seed, seed == 3, 1, TURNS) for seed in (1, 3)]
    assert results[1][0][1] > 3
    check(results[0], 1)
    assert rows_of_steps(results[0]) == rows_of_steps(results[1])
    assert {len({*row[4]}) for rows in rows_of_steps(results[0]) for row in rows} == {1}


def test_phases_by_decode_steps_are_reproducible_with_episodes() -> None:
    schedule = ScheduleConfig(max_staleness=2, steps_per_update=2, order="whole")
    results = [run_ranks(run_job, 2, schedule, 12, seed, False, 0, TURNS) for seed in (1, 2)]
    assert rows_of_steps(results[0]) == rows_of_steps(results[1])
    metrics = [found["agents/turns"] for _, found in results[0][0][0] if "agents/turns" in found]
    assert metrics and all(1 <= turns <= TURNS for turns in metrics)


def test_episodes_of_one_turn_are_the_plain_stream() -> None:
    """Also with interrupted replies: tokens, versions, and log-probs that show the seeds."""
    schedule = ScheduleConfig(max_staleness=2, steps_per_update=2)
    plain, episodes = (rows_of_steps(run_ranks(run_job, 2, schedule, 10, 1, False, 0, turns)) for turns in (None, 1))
    assert [[row[:-1] for row in rows] for rows in plain] == [[row[:-1] for row in rows] for rows in episodes]
    assert any(len({*row[4]}) > 1 for rows in plain for row in rows)


def _load_as_responses(rank: int, world_size: int) -> str:
    job = Job(ScheduleConfig(max_staleness=1, steps_per_update=2), 1, random.Random(0), turns=2)
    job.take()
    saved = job.save()
    with pytest.raises(UserError) as caught:
        Job(ScheduleConfig(max_staleness=1, steps_per_update=2), 1, random.Random(0)).load(saved)
    return caught.value.found


def test_episodes_that_have_begun_are_not_taken_for_responses() -> None:
    (found,) = run_ranks(_load_as_responses, 1)
    assert found == "the section agents now selects responses, and 3 prompts have begun as episodes"


PROMPT = Prompt(3, np.array([1, 2], np.int32), "", "")
SAMPLES = SampleGroups([PROMPT] * 3, 4, SAMPLING, step=1)


def make_branch(length: int, rewards: bool, kept: bool) -> Branch:
    rng = np.random.default_rng(length)
    sampled = rng.random(length) < 0.5
    counts = rng.integers(0, 3, length).astype(np.int32)
    return Branch(
        rng.integers(0, 99, length).astype(np.int32),
        sampled,
        np.where(sampled, rng.random(length), 0).astype(np.float32),
        rng.integers(0, 5, length).astype(np.int32),
        2,
        KeptSets(rng.integers(0, 99, counts.sum()).astype(np.int32), counts) if kept else None,
        rng.random(length).astype(np.float32) if rewards else None,
        states=rng.integers(1, 1 << 62, length) if rewards else None,
    )


@pytest.mark.parametrize("kept", [False, True])
def test_what_is_packed_is_unpacked_bit_by_bit(kept: bool) -> None:
    """Episodes of several branches, with and without rewards of turns, and one that is not over."""
    forked = [make_branch(9, True, kept), make_branch(5, False, kept)]
    rollouts = {
        4: Rollout(
            PROMPT, 0, forked, [Turn(0, 3, 5), Turn(1, 2, 4)], "turns", reward=0.1, reward_components={"a": 0.3}
        ),
        6: None,
        7: Rollout(PROMPT, 3, [make_branch(7, False, kept)], [], "error", reward=float("nan"), failure="a traceback"),
    }
    found = unpack_rollouts(pack_rollouts(rollouts), SAMPLES.sample_of)
    assert repr(found) == repr(rollouts)
    assert unpack_rollouts(pack_rollouts({2: None}), SAMPLES.sample_of) == {2: None}
