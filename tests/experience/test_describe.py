# SPDX-License-Identifier: Apache-2.0
"""Metrics of a step, and which rollouts are written. What stands in their rows: `tests/trainer/test_trainer.py`."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from sample_rollouts import make_prompt, make_rollout

from megatron_rl.experience.describe import choose_logged, describe_rollouts, describe_staleness
from megatron_rl.experience.table import Headers, build_headers

GROUPS, GROUP_SIZE = 6, 4
BEST, WORST, LONGEST = 13, 2, 22


@pytest.fixture(scope="module")
def headers() -> Headers:
    """Six groups of four; three rollouts stand out."""
    rollouts = []
    for number in range(GROUPS * GROUP_SIZE):
        group, sample = divmod(number, GROUP_SIZE)
        length, reward = 40 if number == LONGEST else 5, {BEST: 2.0, WORST: -1.0}.get(number, 0.5)
        rollouts.append((group, make_rollout(make_prompt(group), sample, length, reward)))
    return build_headers(rollouts, holder=0)


@pytest.mark.parametrize(
    ("num_groups", "step", "groups"),
    [(0, 1, []), (1, 1, [1]), (1, 8, [2]), (2, 1, [1, 4]), (3, 4, [0, 2, 4]), (9, 1, range(6)), (-1, 5, range(6))],
)
def test_whole_groups_and_what_stands_out(headers: Headers, num_groups: int, step: int, groups: list[int]) -> None:
    """Groups are spread over the batch and change with the step; nothing is marked that is written anyway."""
    found = choose_logged(headers, num_groups, step)
    members = {group * GROUP_SIZE + sample for group in groups for sample in range(GROUP_SIZE)}
    assert {number for number, why in found.items() if not why} == members and list(found) == sorted(found)
    extremes = {BEST: "best", WORST: "worst", LONGEST: "longest"} if num_groups else {}
    marked = {number: {"logged_as": name} for number, name in extremes.items() if number not in members}
    assert {number: why for number, why in found.items() if why} == marked


def test_metrics_by_hand() -> None:
    """Prompts of 2, 3 and 4 tokens with two responses each; one was begun under version 3 and continued under 7."""
    prompts = [make_prompt(0), make_prompt(1), make_prompt(2)]
    given = (0, 4, 0.5), (0, 5, 0.5), (1, 3, 0.0), (1, 3, 2.0), (2, 1, 1.0), (2, 1, 0.0)
    rollouts = [
        (group, make_rollout(prompts[group], number % 2, length, reward))
        for number, (group, length, reward) in enumerate(given)
    ]
    branch = rollouts[2][1].branches[0]
    carried = replace(branch, versions=np.array([0, 0, 0, 3, 7, 7], np.int32))
    rollouts[2] = (1, replace(rollouts[2][1], branches=[carried]))
    headers = build_headers(rollouts, holder=0)
    assert describe_rollouts(headers) == {
        "reward/mean": pytest.approx(4 / 6),
        "reward/uninformative_groups": pytest.approx(1 / 3),
        "response/truncated": pytest.approx(1 / 6),
        "tokens/prompt": 18.0,
        "tokens/response": 17.0,
    }
    staleness = describe_staleness(headers, version=9, optimizer_steps=2)
    assert staleness == {"schedule/staleness_mean": pytest.approx((3 + 5) / 6), "schedule/staleness_max": 3.0}
