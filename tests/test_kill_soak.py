# SPDX-License-Identifier: Apache-2.0
"""Forty times kill -9 of one rank, in every phase, and the metrics are those of an undisturbed run.

In the phase "write" the thread that writes a checkpoint has raised an exception before. Two ranks at once, all ranks of
a dedicated engine, and ranks that are stopped for a while follow. Servers: run/test_served_in_loop.py.
"""

from __future__ import annotations

import json
import random
import signal
from pathlib import Path

import pytest
from sabotage import Blow, kill, read_rollouts, train_under

from distributed import run_ranks
from megatron_rl.checkpoint.directory import find_problems, list_steps
from rl_runs import layout_overrides, overrides_for, read_records, train

PHASES = (
    "rollout",
    "reward",
    "old_logprobs",
    "ref_logprobs",
    "update",
    "reshard",
    "save",
    "record",
    "validation",
    "write",
)
KILLS_PER_PHASE = 4
VARIANTS = {
    "grpo-async": ["algorithm.dynamic_sampling=true", "algorithm.max_sampling_rounds=2", *layout_overrides(2, 1, 1)],
    "ppo-sync": [
        "algorithm.adv_estimator=gae",
        "algorithm.kl_target=0.001",
        "algorithm.kl_horizon=64",
        "checkpoint.async_save=false",
        *layout_overrides(1, 2, 1),
    ],
}
SETTINGS = [
    "trainer.total_steps=6",
    "trainer.save_freq=1",
    "trainer.test_freq=3",
    "checkpoint.keep_last=2",
    "trainer.log_rollouts=-1",
]


def plan_blows(seed: str) -> list[Blow]:
    """Every phase, both ranks, at the entry of a phase or some time into it."""
    rng = random.Random(seed)
    return [
        Blow(phase, entry=rng.choice((1, 2, 3)), rank=number % 2, delay=rng.choice((0.0, 0.003, 0.01, 0.03, 0.1)))
        for number in range(KILLS_PER_PHASE)
        for phase in rng.sample(PHASES, len(PHASES))
    ]


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_nothing_is_lost(variant: str, task: Path, tmp_path: Path, vllm_imported: None) -> None:
    """One run is killed until it is done, then another, until all blows have fallen."""
    settings = [*SETTINGS, *VARIANTS[variant]]
    whole = tmp_path / "whole"
    assert run_ranks(train, 2, overrides_for(task, whole, *settings), timeout=170) == [None] * 2
    blows, kills, runs = plan_blows(variant), [], 0
    while blows:
        runs += 1
        run_dir = tmp_path / f"run{runs}"
        overrides = overrides_for(task, run_dir, *settings)
        while True:
            is_done = not blows
            if blows:
                is_done = not kill(2, overrides, blows[0])
                if not is_done:
                    kills.append((runs, blows.pop(0), [step for step, _ in list_steps(run_dir / "checkpoints")]))
            else:
                assert run_ranks(train, 2, overrides, timeout=170) == [None] * 2
            if is_done:
                break
        assert read_records(run_dir) == read_records(whole), f"run {runs}"
        assert read_rollouts(run_dir) == read_rollouts(whole)
        assert all(find_problems(directory) == [] for _, directory in list_steps(run_dir / "checkpoints"))
        if kills and kills[-1][0] != runs:
            blows.pop(0)  # it comes too late in every run
    print(json.dumps([[run, blow.phase, blow.entry, blow.rank, blow.delay, steps] for run, blow, steps in kills]))
    assert len(kills) >= 30 and {blow.phase for _, blow, _ in kills} == set(PHASES)


GROUPS = {
    "two ranks": (layout_overrides(2, 2, 1), ((0, 3), (1, 2), (2, 3)), PHASES[:-1]),
    "an engine's ranks": (
        [*layout_overrides(2, 1, 2), "placement.actor=0-1", "placement.reference=0-1", "placement.rollout=2-3"],
        ((2, 3),),
        ("rollout", "reward", "reshard", "validation"),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
def test_ranks_that_are_killed_together_lose_nothing(
    group: str, task: Path, tmp_path: Path, vllm_imported: None
) -> None:
    """Each run is killed once, and resumed to its end."""
    layout, pairs, phases = GROUPS[group]
    settings, rng, kills = [*SETTINGS, *layout], random.Random(group), 0
    whole = tmp_path / "whole"
    assert run_ranks(train, 4, overrides_for(task, whole, *settings), timeout=170) == [None] * 4
    for number in range(12):
        rank, *others = rng.choice(pairs)
        phase, entry = phases[number % len(phases)], rng.choice((1, 2, 3))
        blow = Blow(phase, entry, rank, rng.choice((0.0, 0.01, 0.1)), others=tuple(others))
        run_dir = tmp_path / f"run{number}"
        overrides = overrides_for(task, run_dir, *settings)
        if kill(4, overrides, blow):
            kills += 1
            assert run_ranks(train, 4, overrides, timeout=170) == [None] * 4
        assert read_records(run_dir) == read_records(whole), blow
        assert read_rollouts(run_dir) == read_rollouts(whole), blow
    assert kills >= 10


@pytest.mark.slow
def test_a_rank_that_is_stopped_for_a_while_is_waited_for(task: Path, tmp_path: Path, vllm_imported: None) -> None:
    """For two seconds in each phase, and for a minute in the update: no limit of a setting is that short."""
    settings = [*SETTINGS, *layout_overrides(2, 1, 1)]
    whole = tmp_path / "whole"
    assert run_ranks(train, 2, overrides_for(task, whole, *settings), timeout=170) == [None] * 2
    for phase, pause in [*((phase, 2.0) for phase in PHASES[:-1]), ("update", 60.0)]:
        blow = Blow(phase, entry=2, rank=len(phase) % 2, number=signal.SIGSTOP, pause=pause)
        run_dir = tmp_path / f"{phase}-{pause:.0f}"
        assert run_ranks(train_under, 2, overrides_for(task, run_dir, *settings), blow, timeout=170) == [None] * 2
        assert read_records(run_dir) == read_records(whole), phase
        assert read_rollouts(run_dir) == read_rollouts(whole)
