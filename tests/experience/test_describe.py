# SPDX-License-Identifier: Apache-2.0
"""Which rollouts of a step are written. What stands in their rows: `tests/trainer/test_trainer.py`."""

from __future__ import annotations

import pytest
from sample_rollouts import make_prompt, make_rollout

from megatron_rl.experience.describe import choose_logged
from megatron_rl.experience.table import Headers, build_headers

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
