# SPDX-License-Identifier: Apache-2.0
"""Metrics of a step, the rollouts that are written, and those that the metrics count.

Contents of their rows: `tests/run/test_trainer.py`.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from sample_rollouts import make_prompt, make_rollout

from distributed import run_ranks
from megatron_rl.parallel.collectives import world
from megatron_rl.samples.experience import (
    choose_logged,
    describe_rollouts,
    describe_sources,
    describe_staleness,
    describe_tokens,
)
from megatron_rl.samples.table import Headers, build_headers

GROUPS, GROUP_SIZE = 6, 4
BEST, WORST, LONGEST = 13, 2, 22
NEXT = (0, 4)  # the first of the equally good ones, of different groups


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
    extremes = {**dict.fromkeys((BEST, *NEXT), "best"), WORST: "worst", LONGEST: "longest"} if num_groups else {}
    marked = {number: {"logged_as": name} for number, name in extremes.items() if number not in members}
    assert {number: why for number, why in found.items() if why} == marked


def test_staleness_is_that_of_the_weights_that_began_a_rollout() -> None:
    """Two optimizer steps are a step; the second rollout was interrupted after its first token, the third twice."""
    rollouts = []
    for sample, versions in enumerate([[8, 8, 8], [4, 8, 8], [2, 6, 8]]):
        whole = make_rollout(make_prompt(0), sample, 3, 0.0)
        branch = replace(whole.branches[0], versions=np.array([0, 0, *versions], np.int32))  # a prompt has none
        rollouts.append((0, replace(whole, branches=[branch])))
    found = describe_staleness(build_headers(rollouts, holder=0), version=8, optimizer_steps=2)
    assert found == {"schedule/staleness_mean": 5 / 3, "schedule/staleness_max": 3.0}


def test_a_failed_episode_is_neither_the_best_nor_the_worst() -> None:
    """Its reward of 0 stands for none; the longest one may have failed."""
    rewards, prompt = [0.0, -1.0, -2.0, 0.0], make_prompt(0)
    rollouts = [make_rollout(prompt, i, 9 if i == 3 else 5, reward) for i, reward in enumerate(rewards)]
    rollouts[0] = replace(rollouts[0], finish_reason="timeout")
    rollouts[3] = replace(rollouts[3], finish_reason="error")
    groups = [(0, rollout) for rollout in rollouts] + [(1, make_rollout(make_prompt(1), 0, 5, -1.5))]
    found = choose_logged(build_headers(groups, holder=0), 1, 1)
    assert found == {1: {"logged_as": "best"}, 2: {"logged_as": "worst"}, 3: {"logged_as": "longest"}, 4: {}}
    failed = build_headers([(0, replace(rollout, finish_reason="error")) for rollout in rollouts], holder=0)
    assert choose_logged(failed, 1, 1) == dict.fromkeys(range(4), {})


def test_sources_and_components_are_means_of_what_has_a_reward() -> None:
    rollouts = [(0, make_rollout(make_prompt(0), i, 4, reward, digits=3.0)) for i, reward in enumerate([1.0, 0.5])]
    rollouts += [(1, make_rollout(make_prompt(1), 0, 4, 0.25, service_failures=0.0))]
    rollouts += [(1, make_rollout(make_prompt(1), 1, 4, 7.0, digits=8.0, service_failures=1.0))]
    rollouts[1] = 0, replace(rollouts[1][1], finish_reason="timeout", reward=0.0)
    headers = build_headers(rollouts, holder=0)
    assert describe_sources(headers, ["a", "b"]) == {"reward/a/mean": 1.0, "reward/b/mean": 0.25}
    found = describe_rollouts(headers)
    assert found["reward/mean"] == 0.625 and found["reward/digits"] == 1.5
    assert found["reward/service_failures"] == 0.25, "a share of all responses"
    assert found["reward/uninformative_groups"] == 1.0
    none = build_headers([(0, replace(rollout, finish_reason="error")) for _, rollout in rollouts[:2]], holder=0)
    assert np.isnan(describe_rollouts(none)["reward/mean"])


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
        "reward/std": pytest.approx(np.std([0.5, 0.5, 0.0, 2.0, 1.0, 0.0])),
        "reward/min": 0.0,
        "reward/max": 2.0,
        "response/length_mean": pytest.approx(17 / 6),
        "response/length_min": 1.0,
        "response/length_max": 5.0,
        "prompt/length_mean": 3.0,
        "prompt/length_min": 2.0,
        "prompt/length_max": 4.0,
        "reward/restates_prompt": 0.0,
        "reward/uninformative_groups": pytest.approx(1 / 3),
        "response/truncated": pytest.approx(1 / 6),
        "tokens/prompt": 18.0,
        "tokens/response": 17.0,
    }
    staleness = describe_staleness(headers, version=9, optimizer_steps=2)
    assert staleness == {"schedule/staleness_mean": pytest.approx((3 + 5) / 6), "schedule/staleness_max": 3.0}


def _describe_share(rank: int, world_size: int) -> dict[str, float]:
    """Three tokens in the loss, one of rank 0 and two of rank 1; one that is not."""
    values = [torch.tensor([2.0, 9.0]), torch.tensor([-1.0, 5.0])][rank]
    mask = [torch.tensor([True, False]), torch.tensor([True, True])][rank]
    return describe_tokens({"advantages": values, "returns": None}, mask, world())


def test_columns_are_described_over_the_tokens_in_the_loss_of_all_ranks() -> None:
    numbers = [2.0, -1.0, 5.0]
    expected = {
        "advantages/mean": 2.0,
        "advantages/std": np.std(numbers),
        "advantages/min": -1.0,
        "advantages/max": 5.0,
    }
    assert run_ranks(_describe_share, 2) == [pytest.approx(expected)] * 2
