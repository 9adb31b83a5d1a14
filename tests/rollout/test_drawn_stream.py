# SPDX-License-Identifier: Apache-2.0
"""Prompts drawn by outcomes in jobs of several ranks, whose samples begin ahead of their step and which are killed.

The engines are scripted (scripted_job.py).
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from scripted_job import BATCH, GROUP, INFORMATIVE, OPTIMIZER_STEPS, Job, disturb, make_prompts

from distributed import run_ranks
from megatron_rl.config.sections import CurriculumConfig, ScheduleConfig

CURRICULUM = CurriculumConfig(kind="window", window=[0.2, 0.8], explore=0.3)
STEPS = 14


def run_job(
    rank: int, world_size: int, schedule: ScheduleConfig, kills: bool, rounds: int | None, seed: int = 1, first: int = 0
) -> Any:
    """Return rows and metrics of each step, and how often the job was killed."""
    choice = random.Random(7)
    job = Job(schedule, 1, random.Random(seed + rank), first=first, rounds=rounds, curriculum=CURRICULUM)
    found, killed = [], 0
    for step in range(STEPS):
        if kills:
            job, times = disturb(job, choice, lambda job, step=step: job.collect(step + 1))
            killed += times
        found.append(job.collect(step + 1))
        job.train(OPTIMIZER_STEPS * (step + 1))
    return found, killed


def play(max_staleness: int) -> list[list[int]]:
    """Return the prompts of each step, as one process draws them, if outcomes are known after their step."""
    order: Any = make_prompts(CURRICULUM)
    steps = []
    for step in range(STEPS):
        for i in range((step + 1 + max_staleness) * BATCH):
            order.prompt(i)  # begins in this step
        batch = [order.prompt(i) for i in range(step * BATCH, (step + 1) * BATCH)]
        passed = [np.arange(GROUP) * (prompt.prompt_id in INFORMATIVE) >= 0.5 for prompt in batch]
        order.observe(batch, passed)
        steps.append([prompt.prompt_id for prompt in batch])
    return steps


def describe(found: Any) -> list[Any]:
    """Return the prompts of each step, and the metrics of their choice."""
    return [
        (
            [row[1] for row in rows[::GROUP]],
            {name: value for name, value in metrics.items() if name.startswith(("curriculum/", "sampling/"))},
        )
        for metrics, rows in found
    ]


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_ranks_draw_what_one_process_draws(max_staleness: int) -> None:
    """One rank, two, and two that are killed and resumed on other engines: batch n by outcomes up to n - 1 - k."""
    schedule = ScheduleConfig(max_staleness=max_staleness, steps_per_update=3 if max_staleness else None)
    one, two, killed = (
        run_ranks(run_job, size, schedule, kills, None) for size, kills in ((1, False), (2, False), (2, True))
    )
    assert killed[0][1] > 3
    found = [describe(steps) for steps, _ in (*one, *two, *killed)]
    assert all(steps == found[0] for steps in found)
    prompts = [found for found, _ in describe(one[0][0])]
    assert prompts == play(max_staleness)
    order = make_prompts()
    assert prompts != [[prompt.prompt_id for prompt in next(order)] for _ in range(STEPS)]
    late = [prompt in INFORMATIVE for found in prompts[5:] for prompt in found]
    assert sum(late) > 0.7 * len(late)  # of seven prompts four are in the window
    if not max_staleness:  # else versions of tokens depend on the engines
        rows = [[[row[:4] for row in rows] for _, rows in found] for found, _ in (one[0], two[0], killed[0])]
        assert rows[0] == rows[1] == rows[2]


def test_outcomes_of_dropped_groups_count() -> None:
    """Prompts that dynamic sampling drops are passed over later, so that fewer groups are generated."""
    schedule = ScheduleConfig(max_staleness=1, steps_per_update=3)
    first, second = (run_ranks(run_job, 2, schedule, kills, 9) for kills in (False, True))
    assert second[0][1] > 3 and describe(first[0][0]) == describe(second[0][0]) == describe(second[1][0])
    generated = [metrics["sampling/generated_groups"] for _, metrics in describe(first[0][0])]
    assert sum(generated) < 0.9 * STEPS * BATCH * 7 / len(INFORMATIVE)


def test_groups_in_any_order() -> None:
    """With `order: whole` beside a rank that trains; phases by decode steps are reproducible."""
    schedule = ScheduleConfig(max_staleness=2, steps_per_update=3, order="whole")
    first, second = (run_ranks(run_job, 3, schedule, False, None, seed, 1) for seed in (1, 2))
    found = [describe(steps) for steps, _ in (*first, *second)]
    assert all(steps == found[0] for steps in found)
    assert [rows for _, rows in first[0][0]] == [rows for _, rows in second[0][0]]
