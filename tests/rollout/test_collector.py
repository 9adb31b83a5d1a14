# SPDX-License-Identifier: Apache-2.0
"""Selection of groups by dynamic sampling; the rounds themselves are in test_algorithms_in_loop.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from megatron_rl.rollout.collector import find_informative, is_bad_step
from megatron_rl.samples.table import Headers, build_headers, join_headers
from megatron_rl.types import Prompt, Rollout, UserError


def make_group(rewards: list[float], failed: tuple[int, ...] = (), **components: list[float]) -> Headers:
    """Responses with these rewards and components; episodes that failed report none."""
    prompt = Prompt(0, np.zeros(1, np.int32), "", "")
    rollouts = [
        replace(
            Rollout.from_response(prompt, i, np.zeros(1, np.int32), None, "timeout" if i in failed else "stop"),
            reward=reward,
            reward_components={} if i in failed else {name: values[i] for name, values in components.items()},
        )
        for i, reward in enumerate(rewards)
    ]
    return build_headers(((0, rollout) for rollout in rollouts), holder=0)


@pytest.mark.parametrize(
    ("group", "metric", "expected"),
    [
        (make_group([0.0, 1.0]), True, True),
        (make_group([1.0, 1.0]), True, False),
        (make_group([-0.5, -1.0], overlong=[-0.5, -1.0]), True, False),  # both wrong, one longer than the other
        (make_group([-0.5, -1.0], overlong=[-0.5, -1.0]), "reward", True),
        (make_group([0.5, 0.5], overlong=[-0.5, 0.0]), True, True),  # right and too long, against half right
        (make_group([0.1, 0.9], acc=[1.0, 1.0]), "acc", False),
        (make_group([0.5, 0.5], acc=[1.0, 0.0]), "acc", True),
        (make_group([0.0, 1.0]), "acc", True),  # a reward without one is its own accuracy
        (make_group([-0.5, -1.0], overlong=[-0.5, -1.0]), "acc", False),
        (make_group([1.0, 1.0, 1.0, 0.0], failed=(3,)), True, False),  # 0 is not the last one's reward
        (make_group([1.0, 1.0, 1.0, 0.0], failed=(3,)), "reward", False),
        (make_group([1.0, 0.5, 1.0, 0.0], failed=(3,)), True, True),
        (make_group([1.0, 0.0], failed=(1,)), True, False),
        (make_group([0.0, 0.0], failed=(0, 1)), True, False),
        (make_group([0.5, 0.5, 0.0], failed=(2,), accuracy=[1.0, 0.0, 0.0]), "accuracy", True),
        (make_group([0.5, 0.2, 0.0], failed=(2,), accuracy=[1.0, 1.0, 0.0]), "accuracy", False),
        (make_group([0.0, 0.25], service_failures=[1.0, 0.0]), True, False),
    ],
)
def test_groups_that_teach_something(group: Headers, metric: Any, expected: bool) -> None:
    assert find_informative(group, metric) == [expected]


@pytest.mark.parametrize(
    ("episodes", "services", "most", "expected"),
    [
        ([1, 1, 0, 0], [0, 0, 0, 1], 0.5, False),
        ([1, 1, 1, 0], [0, 0, 0, 0], 0.5, True),
        ([0, 0, 0, 0], [0, 1, 1, 1], 0.5, True),
        ([1, 1, 0, 0], [0, 0, 1, 1], 0.5, True),  # no response has a reward, though neither share is above half
        ([1, 1, 1, 1], [0, 0, 0, 0], 0.99, True),
        ([1, 1, 0, 0], [0, 0, 1, 1], 1.0, False),
    ],
)
def test_steps_of_which_too_much_has_failed(
    episodes: list[int], services: list[int], most: float, expected: bool
) -> None:
    assert is_bad_step(np.array(episodes, bool), np.array(services, bool), most) is expected


def test_a_metric_that_the_reward_does_not_report_is_refused() -> None:
    with pytest.raises(UserError, match=r'"accuracy" is not reported(.|\n)*true, or one of acc, reward'):
        find_informative(make_group([0.0, 1.0], acc=[0.0, 1.0], overlong=[0.0, 0.0]), "accuracy")


def test_every_group_is_judged_by_itself() -> None:
    groups = [make_group([0.0, 1.0]), make_group([1.0, 1.0]), make_group([0.5, 0.25])]
    assert find_informative(join_headers(groups), True) == [True, False, True]
