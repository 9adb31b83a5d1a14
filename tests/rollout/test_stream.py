# SPDX-License-Identifier: Apache-2.0
"""Samples that begin ahead of their step: bounded staleness, nothing lost, nothing twice, in the order of the data.

The engines are scripted (scripted_job.py). Real engines are in tests/run/test_schedule.py.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scripted_job import (
    BATCH,
    GROUP,
    INFORMATIVE,
    OPTIMIZER_STEPS,
    SAMPLING,
    Job,
    describe_rollout,
    disturb,
    find_age,
    make_prompts,
)

from distributed import run_ranks
from megatron_rl.config.sections import ScheduleConfig
from megatron_rl.engines.protocol import Sampled, derive_seed
from megatron_rl.rollout.collector import Taken
from megatron_rl.rollout.episodes import Episodes, SampleGroups
from megatron_rl.rollout.phase_ends import ScheduleTrace, find_window, read_trace
from megatron_rl.run.loading import load_config
from megatron_rl.types import KeptSets, Prompt, Rollout, UserError


def describe(job: Job, taken: Taken) -> list[tuple[Any, ...]]:
    """The rollouts that this rank speaks for."""
    if not job.generator.is_first:
        return []
    return [(group, *describe_rollout(rollout)) for group, rollout in taken.rollouts]


def run_job(
    rank: int,
    world_size: int,
    schedule: ScheduleConfig,
    steps: int,
    seed: int,
    kills: bool,
    first: int = 0,
    trace: Path | None = None,
) -> Any:
    """Steps of a job that is killed at random, within a phase or between two, and resumed on other engines."""
    choice = random.Random(seed)  # the same on every rank
    job = Job(schedule, 1, random.Random(seed + rank), first=first, trace=trace)
    found, killed, told = [], 0, []
    for step in range(steps):
        job, kills_now = disturb(job, choice, Job.take) if kills else (job, 0)
        killed += kills_now
        taken = job.take(told)
        found.append(([prompt.prompt_id for prompt in taken.prompts], describe(job, taken), taken.metrics))
        job.train(OPTIMIZER_STEPS * (step + 1))
    return found, killed, len(told), job.stream.state_dict() | {"begun": job.prompts.position}


def run_dynamic(
    rank: int,
    world_size: int,
    schedule: ScheduleConfig,
    rounds: int,
    steps: int,
    seed: int,
    first: int = 0,
    trace: Path | None = None,
) -> Any:
    """As `run_job`, with groups that teach nothing dropped."""
    choice = random.Random(seed)
    job = Job(schedule, 1, random.Random(seed + rank), first=first, rounds=rounds, trace=trace)
    found, killed = [], 0
    for step in range(steps):
        job, kills = disturb(job, choice, lambda job, step=step: job.collect(step + 1))
        killed += kills
        found.append(job.collect(step + 1))
        job.train(OPTIMIZER_STEPS * (step + 1))
    return found, killed


def check(results: list[Any], max_staleness: int, exact: bool) -> None:
    """Every sample of the data order once and whole, within the staleness limit, each token with its true version."""
    order, ages, carried = make_prompts(), [], []
    for step, per_rank in enumerate(zip(*(found for found, *_ in results), strict=True)):
        prompts = [prompt.prompt_id for prompt in next(order)]
        assert all(found[0] == prompts for found in per_rank)
        rows = sorted(row for found in per_rank for row in found[1])
        assert [row[:3] for row in rows] == [(i, prompts[i], s) for i in range(BATCH) for s in range(GROUP)]
        ages += [find_age(step, row[1:]) for row in rows]
        assert len({tuple(found[2].items()) for found in per_rank}) == 1
        carried.append(per_rank[0][2]["schedule/carried"])
    assert min(ages) >= 0 and max(ages) <= max_staleness
    assert set(carried) == {max_staleness * BATCH * GROUP}
    if exact:
        assert max(ages) == max_staleness


@pytest.mark.parametrize(
    "max_staleness, every, first",
    [
        (2, 3, 2),
        *(pytest.param(*row, marks=pytest.mark.slow) for row in ((1, None, 0), (2, 3, 0), (2, None, 2), (1, 3, 2))),
    ],
)
def test_nothing_is_lost_when_a_job_is_killed(max_staleness: int, every: int | None, first: int) -> None:
    """About 30 kills each, some within a phase; the job continues with other engines on four ranks, or on two."""
    schedule = ScheduleConfig(max_staleness=max_staleness, steps_per_update=every)
    results = run_ranks(run_job, 4, schedule, 45, 7 * max_staleness, True, first)
    assert results[0][1] > 20
    check(results, max_staleness, exact=False)


@pytest.mark.parametrize("order", ["stream", "whole"])
def test_phases_by_decode_steps_are_reproducible(order: Any) -> None:
    """Two runs with other pauses and three interruptions per step on the average; the staleness reaches its bound."""
    schedule = ScheduleConfig(max_staleness=2, steps_per_update=2, order=order)
    results = [run_ranks(run_job, 2, schedule, 12, seed, False) for seed in (1, 2)]
    if order == "stream":
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
    told = sum(count for _, _, count, _ in results)
    assert told == (8 + 1) * BATCH * GROUP


def rows_of_steps(results: list[Any]) -> list[list[Any]]:
    """The rollouts of every step, whichever rank spoke for them."""
    return [sorted(row for step in steps for row in step[1]) for steps in zip(*(found for found, *_ in results))]


def test_drained_engines_beside_training_are_reproducible() -> None:
    """Two runs with other pauses, and one that is killed again and again: nothing is ever interrupted."""
    schedule = ScheduleConfig(max_staleness=1, updates="drain")
    results = [run_ranks(run_job, 3, schedule, 12, seed, seed == 3, 1) for seed in (1, 2, 3)]
    assert results[2][0][1] > 3
    for result in results:
        check(result, 1, exact=True)
    assert rows_of_steps(results[0]) == rows_of_steps(results[1]) == rows_of_steps(results[2])


@pytest.mark.parametrize("order, first", [("stream", 0), ("stream", 1), ("whole", 0), ("whole", 1)])
def test_a_trace_repeats_what_the_clock_decided(order: Any, first: int, tmp_path: Path) -> None:
    """A run that is killed now and then, another one with other pauses, and the first one again by its trace."""
    timed = ScheduleConfig(max_staleness=2, order=order)
    recorded = run_ranks(run_job, 3, timed, 12, 1, True, first, tmp_path / "recorded/schedule")
    other = run_ranks(run_job, 3, timed, 12, 2, False, first)
    schedule = replace(timed, replay=str(tmp_path / "recorded"))
    replayed = run_ranks(run_job, 3, schedule, 12, 2, False, first, tmp_path / "replayed/schedule")
    assert recorded[0][1] > 2
    assert rows_of_steps(replayed) == rows_of_steps(recorded) != rows_of_steps(other)
    assert read_trace(tmp_path / "replayed", 3 - first) == read_trace(tmp_path / "recorded", 3 - first)


def test_a_trace_repeats_dynamic_sampling(tmp_path: Path) -> None:
    timed = ScheduleConfig(max_staleness=1)
    recorded = run_ranks(run_dynamic, 3, timed, 9, 12, 1, 1, tmp_path / "recorded/schedule")
    schedule = replace(timed, replay=str(tmp_path / "recorded"))
    replayed = run_ranks(run_dynamic, 3, schedule, 9, 12, 2, 1, tmp_path / "replayed/schedule")
    assert recorded[0][1] > 2
    rows = [[[rows for _, rows in found] for found, _ in results] for results in (recorded, replayed)]
    assert rows[0] == rows[1]
    (steps, *_) = read_trace(tmp_path / "recorded", 2)
    assert {"rollout", "rollout 1", "beside training"} <= {phase for _, phase in steps}


def test_a_trace_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    ScheduleTrace(1, 0, tmp_path / "schedule", None).write(1, "rollout", 7)
    (found,) = read_trace(tmp_path, 1)
    trace = ScheduleTrace(1, 0, None, [found])
    end = trace.find_end(1, "rollout")
    assert end is not None and [end.is_over(np.zeros(1)) for _ in range(8)] == [False] * 7 + [True]
    with pytest.raises(UserError, match=r"engine 0 does not have step 1 \(beside training\)"):
        trace.find_end(1, "beside training")
    with pytest.raises(UserError, match="it had 1 engines, this one has 2"):
        read_trace(tmp_path, 2)
    with pytest.raises(UserError, match=r"elsewhere/schedule/engine_0.jsonl cannot be read: FileNotFoundError"):
        read_trace(tmp_path / "elsewhere", 1)


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


@pytest.mark.parametrize(
    "max_staleness, every, first",
    [*(pytest.param(*row, marks=pytest.mark.slow) for row in ((1, None, 0), (2, 3, 0))), (2, None, 2)],
)
def test_whole_groups_in_any_order(max_staleness: int, every: int | None, first: int) -> None:
    """Under kills: whole prompts, each once, none older than the bound, and half of it on the average."""
    schedule = ScheduleConfig(max_staleness=max_staleness, order="whole", steps_per_update=every)
    results = run_ranks(run_job, 4, schedule, 40, 3 * max_staleness, True, first)
    assert results[0][1] > 15
    ahead = max_staleness * BATCH - max_staleness * BATCH // 2
    order, taken, ages = make_prompts(), list[int](), list[float]()
    in_order = True
    for step, per_rank in enumerate(zip(*(found for found, *_ in results), strict=True)):
        prompts = per_rank[0][0]
        in_order &= prompts == [prompt.prompt_id for prompt in next(order)]
        taken += prompts
        rows = sorted(row for found in per_rank for row in found[1])
        assert [row[:3] for row in rows] == [(i, prompts[i], s) for i in range(BATCH) for s in range(GROUP)]
        ages += [find_age(step, row[1:]) for row in rows]
        assert all(found[::2] == per_rank[0][::2] for found in per_rank)
        assert per_rank[0][2]["schedule/carried"] == ahead * GROUP
    assert not in_order and min(ages) >= 0 and max(ages) <= max_staleness
    state = results[0][3]
    begun = [make_prompts().prompt(i).prompt_id for i in range(state["begun"])]
    span = range(state["begun"] - state["open"] - len(state["taken"]), state["begun"])
    assert sorted(taken + [begun[i] for i in span if i not in state["taken"]]) == sorted(begun)


def test_whole_groups_of_drained_phases_come_in_order() -> None:
    """Everything that has begun is whole; the staleness is half the bound."""
    results = run_ranks(run_job, 2, ScheduleConfig(max_staleness=2, order="whole", updates="drain"), 8, 3, False)
    rows = [(step, *row) for found, *_ in results for step, (_, rows, _) in enumerate(found) for row in rows]
    order = make_prompts()
    assert [found[0] for found in results[0][0]] == [[prompt.prompt_id for prompt in next(order)] for _ in range(8)]
    assert {find_age(step, row) for step, _, *row in rows if step} == {1}


def judge(order: Iterator[int], rounds: int, size: Callable[[int], int]) -> tuple[list[int], dict[str, int]]:
    """Return the prompts that a step draws, in batches of the missing number, and its counts."""
    judged, drawn = list[int](), 0
    while (missing := BATCH - sum(i in INFORMATIVE for i in judged)) > 0 and len(judged) < rounds * BATCH:
        judged += [next(order) for _ in range(min(size(missing), rounds * BATCH - len(judged)))]
        drawn += 1
    found = sum(i in INFORMATIVE for i in judged)
    return judged, {
        "sampling/rounds": drawn,
        "sampling/generated_groups": len(judged),
        "sampling/informative_groups": found,
        "sampling/filled_groups": max(0, BATCH - found),
        "sampling/dropped_groups": max(0, found - BATCH),
    }


@pytest.mark.parametrize("rounds", [1, 9])
def test_dynamic_sampling_in_rounds_counts_what_it_fills_and_drops(rounds: int) -> None:
    """Without staleness: rounds of a whole batch, whose first informative groups are taken."""
    (found, _), *_ = run_ranks(run_dynamic, 2, ScheduleConfig(), rounds, 14, 0)
    order, seen = (prompt.prompt_id for batch in make_prompts() for prompt in batch), set[str]()
    for metrics, rows in found:
        judged, counts = judge(order, rounds, lambda _: BATCH)
        assert {name: value for name, value in metrics.items() if name.startswith("sampling/")} == counts
        expected = sorted(judged, key=lambda i: i not in INFORMATIVE)[:BATCH]
        assert [row[1] for row in rows] == [i for i in expected for _ in range(GROUP)]
        seen |= {name for name, value in counts.items() if value}
    assert seen >= {"sampling/filled_groups" if rounds == 1 else "sampling/dropped_groups"}


@pytest.mark.parametrize(
    "max_staleness, every, first, rounds",
    [(2, 3, 0, 1), *(pytest.param(*row, marks=pytest.mark.slow) for row in ((1, None, 0, 9), (2, None, 2, 9)))],
)
def test_dynamic_sampling_takes_the_next_groups_that_teach(
    max_staleness: int, every: int | None, first: int, rounds: int
) -> None:
    """Under kills: the informative prompts of the data order, each once, or others after the last round."""
    schedule = ScheduleConfig(max_staleness=max_staleness, steps_per_update=every)
    results = run_ranks(run_dynamic, 4, schedule, rounds, 30, 5 * max_staleness, first)
    assert results[0][1] > 10 and all(found == results[0][0] for found, _ in results)
    order = (prompt.prompt_id for batch in make_prompts() for prompt in batch)
    ages = []
    for step, (metrics, rows) in enumerate(results[0][0]):
        judged, counts = judge(order, rounds, lambda missing: missing)
        expected = sorted(judged, key=lambda i: i not in INFORMATIVE)[:BATCH]
        assert [row[:3] for row in rows] == [(i, expected[i], s) for i in range(BATCH) for s in range(GROUP)]
        ages += [find_age(step, row[1:]) for row in rows]
        assert {name: value for name, value in metrics.items() if name.startswith("sampling/")} == counts
        assert counts["sampling/dropped_groups"] == 0
        assert metrics["schedule/carried"] == max_staleness * BATCH * GROUP
    assert min(ages) >= 0 and max(ages) == max_staleness


@pytest.mark.parametrize("every", [None, 4])
def test_error_of_one_engine_ends_the_phase_of_all(every: int | None) -> None:
    assert run_ranks(fail_in_a_listener, 3, every, timeout=30) == ["a service is down"] * 3


@given(
    st.integers(1, 5),
    st.integers(0, 4),
    st.integers(1, 30),
    st.integers(0, 30),
    st.floats(0, 0.9),
    st.integers(1, 3),
    st.randoms(),
)
def test_window(
    batch_size: int,
    max_staleness: int,
    steps: int,
    whole_until: int,
    dropped: float,
    rounds: int,
    choice: random.Random,
) -> None:
    """Every prompt begins once, and a step takes prompts begun at most k steps before, in any allowed order.

    From step `whole_until` on the order is that of the stream. Prompts are dropped at random.
    """
    ahead, begun = max_staleness * batch_size, 0
    open_: list[int] = []
    taken: list[int] = []
    began_in: dict[int, int] = {}
    for step in range(steps):
        found = judged = 0
        while found < batch_size and judged < rounds * batch_size:
            wanted = min(batch_size - found, rounds * batch_size - judged)
            passed = ahead // 2 if step < whole_until else 0
            needed, new = find_window(open_, begun, wanted, ahead, passed)
            began_in |= dict.fromkeys(new, step)
            begun, open_ = new.stop, [*open_, *new]
            assert needed == wanted if passed == 0 else needed <= wanted <= len(open_)
            batch = open_[:needed] + choice.sample(open_[needed:], wanted - needed)
            assert all(0 <= step - began_in[i] <= max_staleness for i in batch)
            taken, open_, judged = taken + batch, [i for i in open_ if i not in batch], judged + wanted
            found += sum(choice.random() >= dropped for _ in batch)
        assert len(open_) == ahead - passed
    assert list(began_in) == list(range(begun)) == sorted(taken + open_)


def test_a_smaller_bound_takes_what_has_begun_first() -> None:
    open_ = list(range(6, 15))
    assert find_window(open_, begun=15, wanted=3, ahead=3, passed=0) == (3, range(15, 15))
    assert find_window(open_, begun=15, wanted=3, ahead=3, passed=1) == (2, range(15, 15))


CONFIG = load_config(None, ["model.path=none", "data.train_files=[none]", "data.train_batch_size=1"]).config
PROMPT = Prompt(3, np.array([1, 2], np.int32), "", None)
KEPT = KeptSets(np.array([9, 2, 7], np.int32), np.array([2, 1], np.int32))


def open_responses() -> Episodes:
    return Episodes(SampleGroups([PROMPT] * 3, 2, SAMPLING, step=1), CONFIG, None)


def receive(responses: Episodes, parts: list[Sampled], version: int) -> list[Any]:
    """A phase that ends with these; the requests that it began with."""
    responses.start(responses.keys, SAMPLING)
    requests = responses.follow().requests
    responses.record_requests(requests)
    for part in parts:
        assert responses.receive(part, version) == (part.finish_reason != "interrupted")
    return [(one.key, one.tokens.tolist(), one.seed, one.sampling, one.num_sampled) for one in requests]


def part(key: int, tokens: list[int], reason: str, kept: KeptSets | None = None, inserted: Any = None) -> Sampled:
    logprobs = -np.arange(1, len(tokens) + 1, dtype=np.float32) / 4
    return Sampled(key, np.array(tokens, np.int32), logprobs, reason, kept, inserted=inserted)


def test_responses_survive_the_file() -> None:
    """Whole responses, parts, and empty ones; kept sets after responses without any, and inserted tokens."""
    responses = open_responses()
    responses.begin([4, 1, 2, 5])
    receive(responses, [part(key, tokens, "interrupted") for key, tokens in ((4, [7, 8]), (1, []), (2, [5]))], 3)
    last_is_put_in = part(2, [6, 7], "interrupted", KEPT, inserted=np.array([False, True]))
    receive(responses, [part(4, [9], "stop"), last_is_put_in, part(5, [4], "length")], 5)
    found = open_responses()
    found.load(responses.pack(), lambda key: key != 5)
    assert found.keys == [4, 1, 2] and found.find_unfinished() == [1, 2] and found.num_tokens == 6
    assert found.rollout(4).versions.tolist() == [3, 3, 5] and found.rollout(4).finish_reason == "stop"
    assert found.rollout(4).rollout_logprobs.tolist() == [-0.25, -0.5, -0.25]
    ends = [part(1, [3, 3], "stop"), part(2, [2], "stop")]
    responses.drop([5])
    assert receive(found, ends, 6) == receive(responses, ends, 6)
    (branch,), (expected,) = (one.rollout(2).branches for one in (found, responses))
    assert branch.sampled.tolist() == expected.sampled.tolist() == [False, False, True, True, False, True]
    assert branch.tokens.tolist() == expected.tokens.tolist() == [1, 2, 5, 6, 7, 2]
    assert branch.versions.tolist()[2:] == expected.versions.tolist()[2:] == [3, 5, 5, 6]
    assert branch.kept is not None and branch.kept.counts.tolist() == [0, 0, 0, 2, 1, 0]


def test_responses_of_older_checkpoints_begin_again() -> None:
    """They have another form, and name samples in a tensor."""
    arrays = {"keys": [4, 1, 2], "lengths": [3, 0, 2], "tokens": np.array([7, 8, 9, 5, 6], np.int32)}
    found = open_responses()
    found.load({name: torch.tensor(values) for name, values in arrays.items()}, lambda key: True)
    assert found.keys == [4, 1, 2] and sorted(found.find_unfinished()) == [1, 2, 4]
    requests = receive(found, [], 6)
    assert [(key, num_sampled) for key, *_, num_sampled in requests] == [(1, 0), (2, 0), (4, 0)]


def _take_from_a_faulty_engine(rank: int, world_size: int, loses_responses: bool) -> tuple[str, str]:
    job = Job(ScheduleConfig(max_staleness=1), 1, random.Random(rank))
    engine: Any = job.generator._engine.requests
    end, step = engine._end, engine.step
    if rank == 1 and loses_responses:
        engine.step = lambda: step()[1:]
    elif rank == 1:
        engine._end = lambda key, reason: replace(end(key, reason), logprobs=np.empty(0, np.float32))
    with pytest.raises(UserError) as caught:
        job.take()
    return caught.value.source, caught.value.found


@pytest.mark.parametrize(
    ("loses_responses", "found"), [(False, "a response of "), (True, r"\d+ responses to \d+ requests")]
)
def test_a_fault_of_an_engine_ends_the_phase_of_all(loses_responses: bool, found: str) -> None:
    """Nobody waits for the samples whose responses are wrong, or lost."""
    first, second = run_ranks(_take_from_a_faulty_engine, 2, loses_responses, timeout=20)
    assert first == second and first[0].startswith("rollout engine 1 (scripted, rank 1)")
    assert re.match(found, first[1])


def test_seeds_of_segments_differ_from_all_others() -> None:
    seeds = {derive_seed(1, 2, 3, 4, round, position) for round in range(4) for position in range(40)}
    assert len(seeds) == 160
    assert derive_seed(1, 2, 3, 4, 5, 0) == derive_seed(1, 2, 3, 4, 5)
