# SPDX-License-Identifier: Apache-2.0
"""Estimators by turn against their definitions as loops, on one rank and on several that hold parts of an episode.

Rollouts have one to four turns, in one branch or several; a branch's turns follow each other with and without an
observation between them. One rollout is masked, one has failed. Inputs are float32 numbers, references float64.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from distributed import run_ranks
from megatron_rl.algorithms.advantages import AdvantageInputs, compute_advantages
from megatron_rl.config.algorithm import AlgorithmConfig, GigpoOptions, GrpoTurnsOptions

# Branches of each rollout, and their turns: (state, reward of the environment, sampled tokens, observed tokens before).
Turn = tuple[int, float, int, int]
ROLLOUTS: list[list[list[Turn]]] = [
    [[(1, 0.0, 2, 2), (2, 0.25, 1, 1), (3, 1.0, 3, 2)]],
    [[(1, 0.5, 1, 2), (3, 0.0, 2, 0)], [(2, 0.125, 2, 5)]],
    [[(1, 0.0, 3, 2)]],
    [[(1, -0.5, 1, 2), (1, 0.0, 1, 0), (2, 0.0, 2, 1), (9, 0.0, 1, 1)]],
    [[(1, 1.0, 4, 3)]],  # a group of one
    [[(7, 0.0, 2, 1), (8, 0.5, 2, 1)]],
    [[(7, 0.75, 1, 1)], [(8, 0.0, 1, 4)], [(8, 0.0, 2, 6)]],
    [[(7, 0.0, 2, 1), (8, 0.0, 1, 2)]],
]
GROUP_SIZES = [4, 1, 3]
SCORES = [1.5, 0.625, 0.0, -0.25, 1.0, 0.3, 0.75, 0.1]  # more or less than the sum of the rewards: the rest
MASKED, FAILED = 5, 7
SEQUENCES = [(rollout, branch) for rollout, branches in enumerate(ROLLOUTS) for branch in range(len(branches))]
SHARES = {
    1: [[3, 0, 9, 5, 1, 2, 8, 4, 7, 6, 10]],
    2: [[9, 1, 2, 6], [0, 3, 4, 5, 7, 8, 10]],
    3: [[10, 0], [], [*range(1, 10)]],
}
CONFIGS = {
    "gigpo": AlgorithmConfig(adv_estimator="gigpo", gamma=0.5, options={"gigpo": GigpoOptions(0.75)}),
    "gigpo without std": AlgorithmConfig(adv_estimator="gigpo", norm_adv_by_std=False),
    "grpo_turns": AlgorithmConfig(adv_estimator="grpo_turns", gamma=0.5),
    "grpo_turns without std": AlgorithmConfig(adv_estimator="grpo_turns", norm_adv_by_std=False),
    "grpo_turns by group": AlgorithmConfig(
        adv_estimator="grpo_turns", gamma=0.9, options={"grpo_turns": GrpoTurnsOptions("group")}
    ),
}


def build_inputs(sequences: list[int], rollouts: list[list[list[Turn]]] = ROLLOUTS, **further: Any) -> AdvantageInputs:
    """The packed tensors of a rank: observed and sampled tokens of each branch, and padding behind every third."""
    ids, owners, mask, states, rewards = [], [], [], [], []
    known = [(rollout, branch) for rollout, branches in enumerate(rollouts) for branch in range(len(branches))]
    for place, sequence in enumerate(sequences):
        rollout, branch = known[sequence]
        for state, reward, sampled, observed in rollouts[rollout][branch]:
            ids += [sequence] * (observed + sampled)
            mask += [False] * observed + [rollout != MASKED] * sampled
            states += [0] * observed + [state << 40] + [0] * (sampled - 1)
            rewards += [0.0] * (observed + sampled - 1) + [reward]
        padding = [0] * (3 if place % 3 == 2 else 0)
        ids, mask = ids + [-1] * len(padding), mask + [False] * len(padding)
        states, rewards = states + padding, rewards + padding
    owners = [known[i][0] if i >= 0 else len(rollouts) for i in ids]
    ids, mask, states, rewards, owners = (
        [*ids, -1],
        [*mask, False],
        [*states, 0],
        [*rewards, 0.0],
        [*owners, len(rollouts)],
    )
    given = {
        "scores": np.array(SCORES),
        "group_sizes": np.array(GROUP_SIZES),
        "turn_rewards": torch.tensor(rewards),
        "turn_states": torch.tensor(states),
    }
    return AdvantageInputs(
        **(given | further),
        baselines=None,
        token_rewards=torch.zeros(len(ids)),
        values=None,
        loss_mask=torch.tensor(mask),
        sequence_ids=torch.tensor(ids),
        group=dist.group.WORLD,
        rollout_ids=torch.tensor(owners),
    )


def split_by_sequence(values: torch.Tensor, inputs: AdvantageInputs) -> dict[int, list[float]]:
    ids = sorted(set(inputs.sequence_ids.tolist()) - {-1})
    return {i: values[(inputs.sequence_ids == i) & inputs.loss_mask].tolist() for i in ids}


def _estimate_on_rank(rank: int, world_size: int) -> dict[str, Any]:
    kept = np.arange(len(SCORES)) != FAILED
    inputs, found = build_inputs(SHARES[world_size][rank], has_reward=kept), {}
    for name, config in CONFIGS.items():
        result = compute_advantages(inputs, config)
        assert result.advantages.dtype == torch.float32 and not result.advantages[~inputs.loss_mask].any()
        found[name] = split_by_sequence(result.advantages, inputs), dict(result.metrics)
    return found


@cache
def estimate(world_size: int) -> dict[str, tuple[dict[int, list[float]], dict[str, float]]]:
    """Advantages of every configuration by sequence, put together from all ranks; metrics are equal on all."""
    ranks = run_ranks(_estimate_on_rank, world_size)
    assert all(rank[name][1] == ranks[0][name][1] for rank in ranks for name in CONFIGS)
    return {name: ({i: x for r in ranks for i, x in r[name][0].items()}, ranks[0][name][1]) for name in CONFIGS}


def returns_by_loop(rollout: int, gamma: float) -> list[float]:
    """Discounted return from each turn on; the last turn has the rest of the score."""
    rewards = [turn[1] for branch in ROLLOUTS[rollout] for turn in branch][:-1]
    rewards.append(SCORES[rollout] - sum(rewards))
    return [sum(gamma ** (j - k) * rewards[j] for j in range(k, len(rewards))) for k in range(len(rewards))]


def normalize_by_loop(value: float, others: list[float], by_std: bool) -> float:
    if len(others) == 1:
        return 0.0
    mean = sum(others) / len(others)
    deviation = (sum((x - mean) ** 2 for x in others) / (len(others) - 1)) ** 0.5
    return (value - mean) / (deviation + 1e-6) if by_std else value - mean


def expect(config: AlgorithmConfig) -> list[list[float]]:
    """The advantage of each turn of each rollout, from the definitions."""
    by_std, found = config.norm_adv_by_std, []
    for rollout, branches in enumerate(ROLLOUTS):
        group = next(g for g in range(len(GROUP_SIZES)) if rollout < sum(GROUP_SIZES[: g + 1]))
        members = [i for i in range(sum(GROUP_SIZES[:group]), sum(GROUP_SIZES[: group + 1])) if i != FAILED]
        turns = [
            (k, turn[0], ahead)
            for i in members
            for k, (turn, ahead) in enumerate(
                zip([t for branch in ROLLOUTS[i] for t in branch], returns_by_loop(i, config.gamma), strict=True)
            )
        ]
        own = [turn[0] for branch in branches for turn in branch]
        advantages = []
        for k, (state, ahead) in enumerate(zip(own, returns_by_loop(rollout, config.gamma), strict=True)):
            if config.adv_estimator == "gigpo":
                weight = config.options["gigpo"].step_weight if config.options else 1.0
                episode = normalize_by_loop(SCORES[rollout], [SCORES[i] for i in members], by_std)
                same = [x for _, s, x in turns if s == state]
                advantages.append(episode + weight * normalize_by_loop(ahead, same, by_std))
            else:
                same = [x for number, _, x in turns if config.options or number == k]
                advantages.append(normalize_by_loop(ahead, same, by_std))
        found.append(advantages)
    return found


@pytest.mark.parametrize("world_size", SHARES)
@pytest.mark.parametrize("name", CONFIGS)
def test_advantages_equal_the_loop(name: str, world_size: int) -> None:
    """Wherever the branches of an episode are."""
    found, by_rollout = estimate(world_size)[name][0], expect(CONFIGS[name])
    assert found.keys() == {*range(len(SEQUENCES))}
    for i, (rollout, branch) in enumerate(SEQUENCES):
        first = sum(len(earlier) for earlier in ROLLOUTS[rollout][:branch])
        values = by_rollout[rollout][first : first + len(ROLLOUTS[rollout][branch])]
        repeated = [x for x, turn in zip(values, ROLLOUTS[rollout][branch], strict=True) for _ in range(turn[2])]
        expected = [] if rollout == MASKED else [0.0] * len(repeated) if rollout == FAILED else repeated
        np.testing.assert_allclose(found[i], expected, rtol=1e-6, atol=1e-6, err_msg=f"sequence {i}")


def test_every_layout_gives_the_same_bits() -> None:
    for name in CONFIGS:
        assert estimate(1)[name] == estimate(2)[name] == estimate(3)[name]


def test_a_state_is_compared_within_its_group_only() -> None:
    """State 1 is met by five turns of the first group, and once by the rollout without a group, which is left out."""
    metrics = estimate(1)["gigpo"][1]
    sizes = [5, 3, 2, 5, 2, 3, 5, 5, 5, 3, 1, 2, 3, 2, 3, 3]
    assert metrics["estimator/gigpo/state_size"] == pytest.approx(sum(sizes) / len(sizes))
    assert metrics["estimator/gigpo/lone_turns"] == pytest.approx(1 / len(sizes))


PLAIN = [[[(1, 0.0, 1 + i % 3, 2)]] for i in range(len(SCORES))]


def _compare_neutral(rank: int, world_size: int) -> None:
    grpo = AlgorithmConfig()
    weightless = AlgorithmConfig(adv_estimator="gigpo", gamma=0.5, options={"gigpo": GigpoOptions(0.0)})
    episodes = build_inputs([*range(len(SEQUENCES))])
    assert torch.equal(
        compute_advantages(episodes, weightless).advantages, compute_advantages(episodes, grpo).advantages
    )
    plain = build_inputs([*range(len(SCORES))], PLAIN, turn_rewards=None, turn_states=None)
    for by_std in (True, False):
        expected = compute_advantages(plain, replace(grpo, norm_adv_by_std=by_std)).advantages
        assert expected.any()
        for baseline in ("turn", "group"):
            config = AlgorithmConfig(
                adv_estimator="grpo_turns",
                gamma=0.5,
                norm_adv_by_std=by_std,
                options={"grpo_turns": GrpoTurnsOptions(baseline)},
            )
            assert torch.equal(compute_advantages(plain, config).advantages, expected)
            with_states = build_inputs([*range(len(SCORES))], PLAIN)
            assert torch.equal(compute_advantages(with_states, config).advantages, expected)


def test_neutral_options_and_single_turns_are_grpo_bit_for_bit() -> None:
    """Step weight 0; one turn per rollout, with any discount."""
    run_ranks(_compare_neutral, 1)


def _leave_all_out(rank: int, world_size: int) -> None:
    inputs = build_inputs([*range(len(SEQUENCES))], has_reward=np.zeros(len(SCORES), bool))
    for config in CONFIGS.values():
        assert not compute_advantages(inputs, config).advantages.any()


def test_nothing_is_learned_where_every_rollout_failed() -> None:
    run_ranks(_leave_all_out, 1)
