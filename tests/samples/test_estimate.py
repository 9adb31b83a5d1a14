# SPDX-License-Identifier: Apache-2.0
"""Baselines, KL, weights per response and metrics count rollouts: cutting some into branches changes none of them.

The ratios of `gspo` and `geo_mean` are per branch.

The formulas are tested in tests/algorithms; sequence weights in test_pack.py.
"""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from sample_rollouts import make_prompt, make_rollout, split

from distributed import run_ranks
from megatron_rl.algorithms.advantages import AdvantageInputs, register_advantage_estimator
from megatron_rl.algorithms.catalog import ADVANTAGE_ESTIMATORS, POLICY_LOSSES
from megatron_rl.config.algorithm import GdpoOptions
from megatron_rl.config.schema import ActorConfig, AlgorithmConfig
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.samples.batch import Packer, Packing, TrainBatch, number_prompts
from megatron_rl.samples.branches import check_whole
from megatron_rl.samples.experience import (
    Column,
    Experience,
    choose_tokens,
    compute_advantages,
    correct_mismatch,
    describe_rollouts,
    describe_sources,
    find_rollouts,
    loss_inputs,
    measure_kl,
    replicate,
)
from megatron_rl.samples.microbatches import share_prompts
from megatron_rl.types import FAILED, Branch, Rollout, UserError

PROMPTS = [make_prompt(5), make_prompt(3)]
WHOLE = [(0, make_rollout(PROMPTS[0], i, 4, reward, digits=1.0)) for i, reward in enumerate([1.0, 1.0, 1.0, 0.0])]
WHOLE += [(1, make_rollout(PROMPTS[1], i, 3 + i, reward, digits=2.0)) for i, reward in enumerate([0.0, 2.0])]
CUT = [
    (0, split(WHOLE[0][1], (1, 1, 2))),
    WHOLE[1],
    (0, split(WHOLE[2][1], (1, 3))),
    WHOLE[3],
    (1, split(WHOLE[4][1], (2, 1))),
    WHOLE[5],
]
ESTIMATORS = ["grpo", "rloo", "dr_grpo", "opo", "gpg", "grpo_passk", "remax", "reinforce_plus_plus_baseline"]
ESTIMATORS += ["reinforce_plus_plus", "gae"]  # of which the latter's values are 0 here, and its lambda is 1


def _pack(
    samples: Experience, rank: int = 0, world_size: int = 1, *, by: str = "branch", share: str = "prompts"
) -> tuple[TrainBatch, Packing]:
    """Pack the samples, with log-probs and values of 0; by rollouts or trees, into microbatches of 40 tokens."""
    model = SimpleNamespace(
        layout=ParallelLayout(world_size),
        dp_rank=rank,
        pad_multiple=4,
        microbatch_count_multiple=1,
        attention_ratio=0.0,
        buckets=None,
    )
    plan = SimpleNamespace(rollouts_per_minibatch=6, max_response_length=8, longest_sequence=20)
    actor = ActorConfig(share_prompts=world_size == 1 and {"prompts": True, "tree": "tree"}[share])
    if by == "rollout" or share == "tree":
        actor = replace(actor, max_tokens_per_microbatch=40)
    packing = samples.pack(Packer(model, actor, plan, AlgorithmConfig(ratio_by=by), torch.device("cpu")))
    zeros = torch.zeros_like(packing.batch.rollout_logprobs)
    return replace(packing.batch, old_logprobs=zeros, ref_logprobs=zeros, values=zeros), packing


def _estimate(rank: int, world_size: int, rollouts: list[tuple[int, Rollout]]) -> dict[str, object]:
    samples = replicate(rollouts, PROMPTS, dist.group.WORLD, baselines=np.array([0.25, 0.5]))
    batch, packing = _pack(samples)
    samples.old_logprobs = Column(torch.where(batch.loss_mask, -0.5, 0.0), packing)
    batch = replace(batch, old_logprobs=samples.old_logprobs.values)
    rollout_of = torch.from_numpy(samples.headers["rollout"])[batch.sequence_ids]
    found: dict[str, object] = {}
    for name in ESTIMATORS:
        advantages = compute_advantages(
            samples, batch, AlgorithmConfig(adv_estimator=name, gae_lambda=1.0), dist.group.WORLD
        ).advantages
        found[name] = [advantages[batch.loss_mask & (rollout_of == i)].tolist() for i in range(len(rollouts))]
    found["kl"] = measure_kl(samples.headers, batch, "k1", dist.group.WORLD).tolist()
    assert describe_sources(samples.headers, ["a", "a"]) == {}, "one source is the mean of all"
    return found | describe_rollouts(samples.headers) | describe_sources(samples.headers, ["b", "a"])


def test_branches_change_no_baseline_and_no_metric() -> None:
    """Rewards 1, 1, 1, 0 have the mean 0.75, whether there are four sequences or seven."""
    (whole,), (cut,) = run_ranks(_estimate, 1, WHOLE), run_ranks(_estimate, 1, CUT)
    assert whole["dr_grpo"][0] == [0.25] * 4 and whole["dr_grpo"][3] == [-0.75] * 4
    assert whole["kl"] == pytest.approx([-0.5 * n for n in (4, 4, 4, 4, 3, 4)])
    assert whole["reward/b/mean"] == 0.75 and whole["reward/a/mean"] == 1.0
    assert whole.keys() == cut.keys()
    whitened = {"reinforce_plus_plus_baseline", "reinforce_plus_plus", "gae"}
    for name in whole.keys() - whitened - {"kl"}:
        assert cut[name] == whole[name], name
    assert cut["kl"] == pytest.approx(whole["kl"])
    for name in whitened:
        np.testing.assert_allclose(np.concatenate(cut[name]), np.concatenate(whole[name]), rtol=1e-6)


def _measure_kl(rank: int, world_size: int) -> dict[str, list[float]]:
    samples = replicate(WHOLE, PROMPTS, dist.group.WORLD)
    batch, _ = _pack(samples, rank, world_size)
    old_logprobs = torch.where(batch.loss_mask, -0.25 * (batch.tokens + 1), torch.nan)
    batch = replace(batch, old_logprobs=old_logprobs)
    return {
        kl_type: measure_kl(samples.headers, batch, kl_type, dist.group.WORLD).tolist()
        for kl_type in ("k1", "k2", "k3")
    }


def test_kl_is_summed_over_ranks() -> None:
    """Of tokens 0, 1, 2 (and 3), every rank has that of all rollouts; NaN outside of the loss does not count."""
    log_ratios = [[0.25 * (token + 1) for token in range(n)] for n in (4, 4, 4, 4, 3, 4)]
    expected = {
        "k1": [-sum(mine) for mine in log_ratios],
        "k2": [sum(x**2 / 2 for x in mine) for mine in log_ratios],
        "k3": [sum(math.exp(x) - 1 - x for x in mine) for mine in log_ratios],
    }
    for found in (*run_ranks(_measure_kl, 1), *run_ranks(_measure_kl, 2)):
        assert found == {name: pytest.approx(values) for name, values in expected.items()}


def _penalize(rank: int, world_size: int, name: str) -> list[float]:
    """One advantage per rollout, with a KL of 0 to 5 nats in the rewards, of coefficient 0.5."""
    samples = replicate(WHOLE, PROMPTS, dist.group.WORLD, baselines=np.zeros(2))
    batch, packing = _pack(samples)
    samples.kl_per_rollout = np.arange(6.0)
    algorithm = AlgorithmConfig(adv_estimator=name, kl_coef=0.5, kl_in="reward")
    advantages = compute_advantages(samples, batch, algorithm, dist.group.WORLD).advantages
    of_token = find_rollouts(samples.headers, batch)
    return [advantages[batch.loss_mask & (of_token == i)].unique().item() for i in range(6)]


def test_kl_in_the_reward_lowers_it() -> None:
    """Rewards 1, 1, 1, 0 and 0, 2 less half of the KL are 1, 0.5, 0, -1.5 and -2, -0.5."""
    scores = [1.0, 0.5, 0.0, -1.5, -2.0, -0.5]
    assert run_ranks(_penalize, 1, "remax") == [scores]
    assert run_ranks(_penalize, 1, "dr_grpo") == [[1.0, 0.5, 0.0, -1.5, -0.75, 0.75]]


def test_episodes_of_one_to_five_branches_with_equal_rewards_have_equal_advantages() -> None:
    """As with one branch each; a baseline over sequences would rate rollouts with more branches lower."""
    rewards = [1.0, 1.0, 1.0, 0.0, 1.0, 0.0]
    whole = [(0, make_rollout(PROMPTS[0], i, 5, reward)) for i, reward in enumerate(rewards)]
    sizes = [(5,), (4, 1), (1, 3, 1), (1, 2, 1, 1), (1, 1, 1, 1, 1), (5,)]
    cut = [(0, split(rollout, parts)) for (_, rollout), parts in zip(whole, sizes, strict=True)]
    (expected,), (found,) = run_ranks(_estimate, 1, [*whole, *WHOLE[4:]]), run_ranks(_estimate, 1, [*cut, *WHOLE[4:]])
    for name in ("grpo", "rloo", "dr_grpo", "remax"):
        assert found[name] == expected[name]
        assert [len(set(values)) for values in found[name][:6]] == [1] * 6
        assert found[name][0] == found[name][1] == found[name][2] == found[name][4] > found[name][3]


def _returns(rank: int, world_size: int, rollouts: list[tuple[int, Rollout]], gamma: float) -> list[float]:
    """Return GAE's returns of each sampled token, with lambda 1 and values 0."""
    samples = replicate(rollouts, PROMPTS[:1], dist.group.WORLD)
    batch, packing = _pack(samples)
    algorithm = AlgorithmConfig(adv_estimator="gae", gamma=gamma, gae_lambda=1.0)
    found = compute_advantages(samples, batch, algorithm, dist.group.WORLD, packing.turn_rewards)
    assert found.returns is not None
    return found.returns[batch.loss_mask].tolist()


def make_episode(rewards: list[float | None], reward: float, branches: int = 1) -> tuple[int, Rollout]:
    """Return turns of two tokens, with an observation of three in between, in the given branches of turns."""
    found, per_branch = [], len(rewards) // branches
    for first in range(0, len(rewards), per_branch):
        sampled, placed = [False] * 7, [0.0] * 7
        for worth in rewards[first : first + per_branch]:
            sampled += [True, True, False, False, False]
            placed += [0.0, worth or 0.0, 0.0, 0.0, 0.0]
        has_any = any(worth is not None for worth in rewards[first : first + per_branch])
        length = len(sampled) - 3
        whole = Branch.of_response(np.arange(length, dtype=np.int32), 7)
        placed_here = np.array(placed[:length], np.float32) if has_any else None
        found.append(replace(whole, sampled=np.array(sampled[:length]), rewards=placed_here))
    return 0, replace(make_rollout(PROMPTS[0], 0, 4, reward), branches=found)


def test_a_turn_has_its_reward_at_its_end_and_learns_of_later_ones() -> None:
    """Time counts sampled tokens; the part of the reward beyond the turns' own, such as a penalty, comes at the end."""
    episode = make_episode([1.0, None, 2.0], 2.5)
    assert run_ranks(_returns, 1, [episode], 1.0) == [[2.5, 2.5, 1.5, 1.5, 1.5, 1.5]]
    (discounted,) = run_ranks(_returns, 1, [episode], 0.5)
    ends = np.array([0.0, 1.0, 0.0, 0.0, 0.0, 1.5])  # the rewards without the observations in between
    compact = [sum(0.5**k * reward for k, reward in enumerate(ends[i:])) for i in range(6)]
    assert discounted == pytest.approx(compact)


def test_a_branch_learns_of_the_turns_in_later_branches() -> None:
    forked = make_episode([1.0, 0.5, 2.0, -1.0], 2.25, branches=2)
    assert run_ranks(_returns, 1, [forked], 1.0) == [[2.25, 2.25, 1.25, 1.25, 0.75, 0.75, -1.25, -1.25]]
    assert run_ranks(_returns, 1, [make_episode([None] * 4, 2.0, branches=4)], 1.0) == [[2.0] * 8]


GAPS = [[0.4, -0.1, 0.3, 0.9], [0.1] * 4, [-0.6, 0.2, -0.1, 0.0], [0.0] * 4, [0.3, -0.2, 0.1], [-0.4, 0.1, -0.3, -0.7]]
WEIGHINGS = [
    dict(importance_sampling=f"{level}-{action}", importance_normalize=normalizes, reject_sequence_above=threshold)
    for level in ("sequence", "product")
    for action in ("truncate", "mask")
    for normalizes, threshold in ((False, None), (True, 0.8))
]
WEIGHINGS.append(dict(importance_sampling="none", reject_sequence_above=0.5))


def _weigh(
    rank: int, world_size: int, rollouts: list[tuple[int, Rollout]], by: str = "rollout"
) -> list[tuple[dict[int, set[float]], dict]]:
    """Weights of the tokens here, by rollout (or branch), and metrics, for each weighing."""
    samples = replicate(rollouts, PROMPTS, dist.group.WORLD)
    batch, _ = _pack(samples, rank, world_size)
    rollout_of, ids = find_rollouts(samples.headers, batch).tolist(), batch.sequence_ids.tolist()
    of_token = rollout_of if by == "rollout" else ids
    gaps = [
        GAPS[rollout][token] if in_loss else 0.0  # the tokens of each response are 0, 1, 2, ...
        for rollout, token, in_loss in zip(rollout_of, batch.tokens.tolist(), batch.loss_mask.tolist(), strict=True)
    ]
    batch = replace(batch, old_logprobs=batch.rollout_logprobs + torch.tensor(gaps))
    found = []
    for settings in WEIGHINGS:
        algorithm = AlgorithmConfig(importance_low=0.9, importance_high=1.2, importance_by=by, **settings)
        weights, metrics = correct_mismatch(samples.headers, batch, algorithm, dist.group.WORLD)
        assert weights is not None
        by_rollout: dict[int, set[float]] = {}
        for rollout, weight, in_loss in zip(of_token, weights.tolist(), batch.loss_mask.tolist(), strict=True):
            if in_loss:
                by_rollout.setdefault(rollout, set()).add(weight)
        found.append((by_rollout, metrics))
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_rollout_has_one_weight_and_is_rejected_whole(world_size: int) -> None:
    """Its branches have the weight of all of its tokens, also on different ranks."""
    (whole,) = run_ranks(_weigh, 1, WHOLE)
    ranks = run_ranks(_weigh, world_size, CUT)
    here = [{*found[0][0]} for found in ranks]
    assert world_size == 1 or here[0] & here[1], "a rollout lies on both"
    for (weights, metrics), *cut in zip(whole, *ranks, strict=True):
        assert all(len(weight) == 1 for weight in weights.values()) and len({*map(str, weights.values())}) > 1
        for mine, mine_metrics in cut:
            assert mine == {rollout: weights[rollout] for rollout in mine}
            assert mine_metrics == pytest.approx(metrics, rel=1e-12)
    assert whole[0][0][1] == {np.float32(np.exp(np.float32(0.1)))} and whole[4][0][3] == {1.0}
    assert whole[-1][0] == {0: {0.0}, 1: {1.0}, 2: {0.0}, 3: {1.0}, 4: {1.0}, 5: {0.0}}


@pytest.mark.parametrize("world_size", [1, 2])
def test_weights_by_branch_are_those_of_branches_that_are_rollouts(world_size: int) -> None:
    """One of three tokens with gaps 0.3, 0.9 has exp(0.6), whatever the other branches of its rollout have."""
    ranks = run_ranks(_weigh, world_size, CUT, "branch")
    gaps = [[0.4], [-0.1], [0.3, 0.9], [0.1] * 4, [-0.6], [0.2, -0.1, 0.0], [0.0] * 4, [0.3, -0.2], [0.1]]
    gaps.append([-0.4, 0.1, -0.3, -0.7])
    weights = [x for found in ranks for x in found[0][0].items()]  # sequence-truncate, not normalized
    assert {*dict(weights)} == {*range(10)}
    for branch, values in weights:
        assert [*values] == pytest.approx([min(math.exp(np.mean(gaps[branch])), 1.2)], rel=1e-6)
    rejected = {branch for found in ranks for branch, values in found[-1][0].items() if values == {0.0}}
    assert rejected == {2, 4, 9}, "a gap above 0.5"


def test_weights_of_single_turns_are_the_same_by_rollout_and_by_branch() -> None:
    (by_rollout,), (by_branch,) = run_ranks(_weigh, 1, WHOLE), run_ranks(_weigh, 1, WHOLE, "branch")
    assert str(by_rollout) == str(by_branch)  # to the last digit; some metrics are NaN


def _ratios(
    rank: int,
    world_size: int,
    rollouts: list[tuple[int, Rollout]],
    name: str,
    by: str = "branch",
    share: str = "prompts",
) -> list[list[float]]:
    """Of each rollout, the losses of its tokens with an advantage of -1: the ratios."""
    samples = replicate(rollouts, PROMPTS, dist.group.WORLD)
    batch, _ = _pack(samples, by=by, share=share)
    if by == "rollout" and rollouts is CUT:
        owners = find_rollouts(samples.headers, batch).tolist()
        for part in batch.slices:
            others = [{*owners[other.start : other.stop]} for other in batch.slices if other is not part]
            assert not {*owners[part.start : part.stop]} & set().union(*others) - {len(rollouts)}
    of_token = find_rollouts(samples.headers, batch)
    gaps = torch.tensor([[*row, 0.0][:4] for row in GAPS] + [[0.0] * 4])[of_token, batch.tokens.clamp(max=3)]
    advantages = torch.where(batch.loss_mask, -1.0, 0.0)
    inputs = replace(loss_inputs(replace(batch, advantages=advantages)), logprobs=torch.where(batch.loss_mask, gaps, 0))
    config = AlgorithmConfig(policy_loss=name, clip_eps_low=5.0, clip_eps_high=5.0)
    losses, _ = POLICY_LOSSES[name](inputs, config)
    return [losses[batch.loss_mask & (of_token == i)].tolist() for i in range(len(rollouts))]


@pytest.mark.parametrize("name", ["gspo", "geo_mean"])
def test_ratios_per_sequence_are_of_a_branch(name: str) -> None:
    """The policy's log-probs are per microbatch, and branches of a rollout may lie in different ones."""
    (whole,), (cut,) = run_ranks(_ratios, 1, WHOLE, name), run_ranks(_ratios, 1, CUT, name)
    for i in (1, 3, 5):
        assert cut[i] == whole[i]
    means = [0.4, -0.1, 0.6, 0.6], [0.4 / 4 + 1.1 / 4] * 4
    np.testing.assert_allclose(cut[0], np.exp(means[0]), rtol=1e-6)
    np.testing.assert_allclose(whole[0], np.exp(means[1]), rtol=1e-6)


@pytest.mark.parametrize("share", ["prompts", "tree"])
@pytest.mark.parametrize("name", ["gspo", "geo_mean"])
def test_ratios_by_rollout_are_those_of_one_branch(name: str, share: str) -> None:
    """All branches of a rollout are in one microbatch; without forks both settings give the same bits."""
    (whole,), (cut,) = run_ranks(_ratios, 1, WHOLE, name), run_ranks(_ratios, 1, CUT, name, "rollout", share)
    for found, expected in zip(cut, whole, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert run_ranks(_ratios, 1, WHOLE, name, "rollout", "prompts") == [whole]


def test_a_rollout_that_fits_into_no_microbatch_is_refused() -> None:
    """Three branches of 8, 8 and 9 tokens, and prompts of 7 that are shared: 7 + 1 + 1 + 2 > 10."""

    def on_rank(rank: int, world_size: int) -> None:
        samples = replicate(CUT, PROMPTS, dist.group.WORLD)
        with pytest.raises(UserError, match="prompt_id 5, sample 0 has 11 tokens in all its branches") as caught:
            check_whole(
                samples.headers.rows,
                share_prompts(number_prompts(samples.headers), samples.headers["num_prompt_tokens"]),
                10,
            )
        assert caught.value.source == "algorithm.ratio_by = rollout"

    run_ranks(on_rank, 1)


GROUPED = ("grpo", "rloo", "dr_grpo", "opo", "gpg", "grpo_passk", "gdpo", "optimal_token_baseline")
GROUPED += ("gigpo", "grpo_turns")
GROUPED += ("tir_optimal_token_baseline", "reinforce_plus_plus_baseline", "plugin")


def make_failed(group: int, sample: int, reason: str) -> tuple[int, Rollout]:
    """An episode that has sampled four tokens; "service": its episode is over, and the reward service failed on it."""
    whole = make_rollout(make_prompt(group), sample, 4, 0.0)
    if reason == "service":
        return group, replace(whole, reward=0.5, reward_components={"service_failures": 1.0})
    return group, replace(whole, finish_reason=reason)


def _estimate_all(rank: int, world_size: int, rollouts: list[tuple[int, Rollout]], baselines: list[float]) -> Any:
    """Advantages of each rollout by every estimator, also of a plug-in; its tokens all have the same log-prob.

    The reward is also a component, of rollouts that have not failed.
    """
    rollouts = [
        (group, rollout if rollout.finish_reason in FAILED else replace(rollout, reward_components=components))
        for group, rollout in rollouts
        for components in [rollout.reward_components | {"part": rollout.reward}]
    ]

    @register_advantage_estimator("plugin", needs_group=True)
    def compare_with_best(inputs: AdvantageInputs, config: AlgorithmConfig) -> torch.Tensor:
        return inputs.expand([score - scores.max() for scores in inputs.grouped_scores() for score in scores])

    prompts = [make_prompt(group) for group in range(len(baselines))]
    samples = replicate(rollouts, prompts, dist.group.WORLD, baselines=np.array(baselines))
    batch, _ = _pack(samples)
    squares = torch.where(batch.loss_mask, 0.5, 0.0)
    batch = replace(batch, sum_pi_squared=squares, old_logprobs=torch.where(batch.loss_mask, -0.5, 0.0))
    rollout_of = torch.from_numpy(samples.headers["rollout"])[batch.sequence_ids]
    found = {}
    for name in ADVANTAGE_ESTIMATORS:
        config = AlgorithmConfig(adv_estimator=name, gae_lambda=1.0, options={"gdpo": GdpoOptions(["part"])})
        result = compute_advantages(samples, batch, config, dist.group.WORLD)
        assert not result.advantages[~batch.loss_mask].any() and result.advantages.isfinite().all()
        assert (result.returns is None) == (name != "gae")
        found[name] = [result.advantages[batch.loss_mask & (rollout_of == i)].tolist() for i in range(len(rollouts))]
    return found, describe_rollouts(samples.headers)


@pytest.mark.parametrize("reason", ["timeout", "error", "service"])
def test_a_failed_episode_does_not_bias_the_others_of_its_group(reason: str) -> None:
    """Rewards 1, 1, 1 and one failure teach nothing; counted as a reward of 0 it gave 0.5, 0.5, 0.5 and 0."""
    rollouts = [(0, make_rollout(make_prompt(0), i, 4, 1.0)) for i in range(3)]
    ((found, metrics),) = run_ranks(_estimate_all, 1, [*rollouts, make_failed(0, 3, reason)], [1.0])
    for name in (*GROUPED, "remax", "reinforce_plus_plus", "gae"):
        assert found[name][3] == [], name
        if name not in ("reinforce_plus_plus", "gae"):  # which compare tokens, of which the last one has the reward
            assert found[name][:3] == [[0.0] * 4] * 3, name
    assert metrics["reward/mean"] == 1.0 and metrics["reward/uninformative_groups"] == 1.0


def test_every_estimator_estimates_as_if_failed_episodes_were_not_there() -> None:
    """Some of a group, all of a group, all but one; one that is alone has nothing to be compared with."""
    kept = [(0, make_rollout(make_prompt(0), i, 3 + i, reward)) for i, reward in ((0, 1.0), (1, 0.5), (3, 0.0))]
    kept += [(1, make_rollout(make_prompt(1), i, 5 - i, reward)) for i, reward in ((0, 2.0), (2, 0.25))]
    lone = (3, make_rollout(make_prompt(3), 0, 4, 1.0))
    failed = [make_failed(0, 2, "timeout"), make_failed(1, 1, "error"), make_failed(3, 1, "error")]
    failed += [make_failed(2, i, "timeout") for i in range(2)]
    mixed = sorted([*kept, lone, *failed], key=lambda found: (found[0], found[1].sample_index))
    ((found, metrics),) = run_ranks(_estimate_all, 1, mixed, [0.25, 0.5, 7.0, 0.125])
    ((grouped, _),) = run_ranks(_estimate_all, 1, kept, [0.25, 0.5])
    ((single, described),) = run_ranks(_estimate_all, 1, [*kept, (2, lone[1])], [0.25, 0.5, 0.125])
    places = [(group, rollout.sample_index) for group, rollout in mixed]
    where = [places.index((group, rollout.sample_index)) for group, rollout in [*kept, lone]]
    for name in ADVANTAGE_ESTIMATORS:
        expected = [*grouped[name], [0.0] * 4] if name in GROUPED else single[name]
        assert [found[name][i] for i in where] == expected, name
        assert all(found[name][i] == [] for i in range(len(mixed)) if i not in where), name
    assert any(any(value) for value in grouped["grpo"]) and any(single["gae"][5])
    assert metrics["reward/mean"] == described["reward/mean"] == 4.75 / 6
    assert metrics["reward/uninformative_groups"] == 0.5


def test_a_step_in_which_every_episode_failed_teaches_nothing() -> None:
    rollouts = [make_failed(0, i, reason) for i, reason in enumerate(("timeout", "error", "service", "error"))]
    ((found, metrics),) = run_ranks(_estimate_all, 1, rollouts, [1.0])
    assert all(found[name] == [[]] * 4 for name in found)
    assert np.isnan(metrics["reward/mean"]) and metrics["reward/uninformative_groups"] == 1.0


def test_a_greedy_episode_that_failed_is_no_baseline() -> None:
    """Its group learns nothing; the other one does."""
    rollouts = [(group, make_rollout(make_prompt(group), i, 4, 1.0)) for group in range(2) for i in range(2)]
    ((found, _),) = run_ranks(_estimate_all, 1, rollouts, [float("nan"), 0.25])
    assert found["remax"] == [[0.0] * 4] * 2 + [[0.75] * 4] * 2


def test_only_losses_of_covariances_choose_tokens() -> None:
    """The choice itself is tested in tests/algorithms/test_covariance.py."""
    unread: Any = None
    assert choose_tokens(unread, AlgorithmConfig(), unread) is None
