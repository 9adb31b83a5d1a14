# SPDX-License-Identifier: Apache-2.0
"""Inputs of estimators and the use of their results; the formulas are in test_estimators.py."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from distributed import run_ranks
from megatron_rl.algorithms.advantages import (
    AdvantageInputs,
    Advantages,
    compute_advantages,
    compute_token_rewards,
    register_advantage_estimator,
)
from megatron_rl.algorithms.catalog import ADVANTAGE_ESTIMATORS, POLICY_LOSSES
from megatron_rl.config.schema import AlgorithmConfig
from megatron_rl.types import UserError

# Rollouts 2, 0 and 1 on this rank (3 is elsewhere), then padding; prompts and a truncated response are masked.
SEQUENCE_IDS = torch.tensor([2, 2, 2, 0, 0, 0, 0, 1, 1, -1, -1])
LOSS_MASK = torch.tensor([0, 1, 1, 0, 0, 1, 1, 0, 0, 0, 0], dtype=torch.bool)


def make_inputs(**changes: Any) -> AdvantageInputs:
    """Groups of three and one, on one rank."""
    fields = dict(
        scores=np.array([1.0, 2.0, 3.0, 4.0]),
        group_sizes=np.array([3, 1]),
        baselines=None,
        token_rewards=torch.zeros(11),
        values=None,
        loss_mask=LOSS_MASK,
        sequence_ids=SEQUENCE_IDS,
        group=None,
    )
    return AdvantageInputs(**(fields | changes))


def test_scores_by_group() -> None:
    groups = make_inputs().grouped_scores()
    assert [g.tolist() for g in groups] == [[1.0, 2.0, 3.0], [4.0]]
    assert all(g.dtype == np.float64 for g in groups)


def test_expand_gives_every_token_in_the_loss_its_rollouts_value() -> None:
    found = make_inputs().expand([10.0, 20.0, 30.0, 40.0])
    assert found.tolist() == [0, 30, 30, 0, 0, 10, 10, 0, 0, 0, 0] and found.dtype == torch.float32


def test_built_in_names_and_what_they_need() -> None:
    needs = ("values", "greedy_baseline", "group", "sum_pi_squared")
    found = {name: {need for need in needs if getattr(e, f"needs_{need}")} for name, e in ADVANTAGE_ESTIMATORS.items()}
    grouped = "grpo dr_grpo grpo_passk grpo_turns gigpo rloo opo gpg gdpo reinforce_plus_plus_baseline"
    assert found == dict.fromkeys(grouped.split(), {"group"}) | {
        "optimal_token_baseline": {"group", "sum_pi_squared"},
        "tir_optimal_token_baseline": {"group", "sum_pi_squared"},
        "reinforce_plus_plus": set(),
        "remax": {"greedy_baseline"},
        "gae": {"values"},
        "distill": set(),
    }
    assert AlgorithmConfig().adv_estimator in found


def test_every_built_in_name_is_a_row_of_the_catalog_and_has_its_formula() -> None:
    """A formula of ours that registers itself would be unknown to a dry run, which does not import the formulas."""
    tables = [ADVANTAGE_ESTIMATORS, POLICY_LOSSES]
    known = [dict(table) for table in tables]
    for module in ("advantages", "estimators", "losses", "policy_losses"):
        spec = importlib.util.find_spec(f"megatron_rl.algorithms.{module}")
        spec.loader.exec_module(importlib.util.module_from_spec(spec))  # a reload would replace the classes
    assert [dict(table) for table in tables] == known
    for entry in [*(e.estimate for e in ADVANTAGE_ESTIMATORS.values()), *POLICY_LOSSES.values()]:
        assert callable(getattr(importlib.import_module(entry.module), entry.name))


@pytest.mark.usefixtures("registry")
def test_result_is_zero_outside_the_mask_and_float32() -> None:
    @register_advantage_estimator("careless")
    def estimate(inputs: AdvantageInputs, config: AlgorithmConfig) -> Advantages:
        return Advantages(torch.full((11,), float("nan")).double(), torch.ones(11).double())

    found = compute_advantages(make_inputs(), AlgorithmConfig(adv_estimator="careless"))
    assert not found.advantages[~LOSS_MASK].any() and found.advantages[LOSS_MASK].isnan().all()
    assert torch.equal(found.returns, LOSS_MASK.float())
    assert {found.advantages.dtype, found.returns.dtype} == {torch.float32}


@pytest.mark.usefixtures("registry")
def test_a_bare_tensor_is_advantages_without_returns() -> None:
    @register_advantage_estimator("bare", needs_greedy_baseline=True)
    def estimate(inputs: AdvantageInputs, config: AlgorithmConfig) -> torch.Tensor:
        return inputs.expand(inputs.scores * config.gamma)

    found = compute_advantages(make_inputs(baselines=np.zeros(2)), AlgorithmConfig(adv_estimator="bare", gamma=0.5))
    assert found.advantages.tolist() == [0, 1.5, 1.5, 0, 0, 0.5, 0.5, 0, 0, 0, 0] and found.returns is None
    with pytest.raises(AssertionError, match="bare needs greedy baselines"):
        compute_advantages(make_inputs(), AlgorithmConfig(adv_estimator="bare"))


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize("result, found", [(torch.zeros(4), r"\[4\]"), (np.zeros(11), "ndarray")])
def test_a_wrong_result_is_refused(result: Any, found: str) -> None:
    register_advantage_estimator("wrong")(lambda inputs, config: result)
    with pytest.raises(UserError, match=rf"returned {found}(.|\n)*wrong: advantages(.|\n)*shape \[11\]"):
        compute_advantages(make_inputs(), AlgorithmConfig(adv_estimator="wrong"))


def _metrics_on_rank(rank: int, world_size: int) -> Mapping[str, float]:
    """Ranks hold unequal numbers of tokens: the mean is that of all tokens."""

    @register_advantage_estimator("reporting")
    def estimate(inputs: AdvantageInputs, config: AlgorithmConfig) -> Advantages:
        garbage = torch.where(inputs.loss_mask, float(rank), float("nan"))
        return Advantages(inputs.token_rewards, metrics={"spread": np.ptp(inputs.scores), "rank": garbage})

    mask = torch.arange(11) < (2 if rank else 6)
    inputs = make_inputs(loss_mask=mask, group=dist.group.WORLD)
    return compute_advantages(inputs, AlgorithmConfig(adv_estimator="reporting")).metrics


def test_metrics_of_an_estimator_are_the_same_on_every_rank() -> None:
    found = run_ranks(_metrics_on_rank, 2)
    assert found == [{"estimator/reporting/spread": 3.0, "estimator/reporting/rank": 2 / 8}] * 2


@pytest.mark.usefixtures("registry")
def test_a_metric_of_another_shape_is_refused() -> None:
    register_advantage_estimator("wrong")(
        lambda inputs, config: Advantages(inputs.token_rewards, metrics={"some": torch.zeros(3)})
    )
    with pytest.raises(UserError, match=r"returned \[3\](.|\n)*wrong: metric some(.|\n)*shape \[11\]"):
        compute_advantages(make_inputs(), AlgorithmConfig(adv_estimator="wrong"))


def test_gae_without_a_critic_is_refused() -> None:
    with pytest.raises(UserError, match='"gae" needs values(.|\n)*choose an estimator'):
        compute_advantages(make_inputs(), AlgorithmConfig(adv_estimator="gae"))


def test_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UserError, match='"grop" is not known(.|\n)*gae, gdpo, gigpo, gpg(.|\n)*did you mean "grpo"'):
        compute_advantages(make_inputs(), AlgorithmConfig(adv_estimator="grop"))


@pytest.mark.usefixtures("registry")
def test_a_taken_name_is_refused_with_the_place_of_the_second() -> None:
    with pytest.raises(UserError, match=r'"grpo" is registered already(.|\n)*test_advantages.py:\d+'):

        @register_advantage_estimator("grpo")
        def estimate(inputs: AdvantageInputs, config: AlgorithmConfig) -> torch.Tensor: ...


def test_token_rewards_by_hand() -> None:
    """The reward is on the last token in the loss; KL on all of them; nothing for the truncated response."""
    rewards = [1.0, 2.0, 3.0, 4.0]
    plain = compute_token_rewards(rewards, None, 7.0, LOSS_MASK, SEQUENCE_IDS)
    assert plain.tolist() == [0, 0, 3, 0, 0, 0, 1, 0, 0, 0, 0] and plain.dtype == torch.float32
    kl = torch.where(LOSS_MASK, torch.arange(11.0), float("nan"))
    found = compute_token_rewards(rewards, kl, 0.5, LOSS_MASK, SEQUENCE_IDS)
    assert found.tolist() == [0, -0.5, 2, 0, 0, -2.5, -2, 0, 0, 0, 0]


def test_token_rewards_of_a_rank_without_a_token_in_the_loss() -> None:
    nothing = torch.zeros(11, dtype=torch.bool)
    assert not compute_token_rewards([1.0, 2.0, 3.0, 4.0], None, 0.0, nothing, SEQUENCE_IDS).any()
