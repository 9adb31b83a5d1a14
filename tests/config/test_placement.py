# SPDX-License-Identifier: Apache-2.0
"""`placement`: the ranks of each role, and refused placements."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megatron_rl.config.batch_plan import BatchPlan
from megatron_rl.config.schema import (
    ActorConfig,
    AlgorithmConfig,
    DataConfig,
    ModelConfig,
    RolloutConfig,
    RunConfig,
    TrainerConfig,
)
from megatron_rl.config.sections import PlacementConfig, ServerConfig
from megatron_rl.config.sft_plan import SftPlan
from megatron_rl.run.models import resolve
from megatron_rl.types import UserError

PPO = RunConfig(
    model=ModelConfig(path="policy"),
    data=DataConfig(train_files=["a"], train_batch_size=8),
    actor=ActorConfig(tensor_model_parallel_size=2),
    rollout=RolloutConfig(engine="hf"),
    algorithm=AlgorithmConfig(adv_estimator="gae", kl_coef=0.1),
    trainer=TrainerConfig(total_steps=1),
)


def build(world_size: int, config: RunConfig = PPO, **placement: str) -> BatchPlan:
    config = replace(config, placement=PlacementConfig(**placement))
    return BatchPlan.build(config, world_size, resolve(config))


def test_ranks_of_roles() -> None:
    placement = PlacementConfig(actor="0-1", critic="5", reward_model=" 2-3 ")
    assert placement.ranks_of("actor", 6) == range(2)
    assert placement.ranks_of("critic", 6) == range(5, 6)
    assert placement.ranks_of("reward_model", 6) == range(2, 4)
    assert placement.ranks_of("reference", 6) == range(6), "roles that are not named are on all ranks"
    assert placement.placed == ["actor", "critic", "reward_model"]
    assert replace(placement, reward_model=None).describe(6) == "actor on 0-1, critic on 5, others on all ranks"
    assert PlacementConfig().describe(6) == ""


def test_teachers_have_ranks_by_their_names() -> None:
    placement = PlacementConfig(actor="0-1", teachers={"math": "1/4", "code": 5}, rollout="1/4")
    assert placement.placed == ["actor", "teachers.math", "teachers.code", "rollout"]
    assert placement.ranks_of("teachers.math", 8) == range(2, 4)
    assert placement.ranks_of("teachers.code", 8) == range(5, 6)
    assert placement.ranks_of("rollout", 8) == range(6, 8), "behind the teacher that is named before"


@pytest.mark.parametrize(
    ("placement", "world_size", "expected"),
    [
        (dict(actor="1/4", rollout="3/4"), 8, "actor on 0-1, rollout on 2-7"),
        (dict(actor="1/4", rollout="3/4"), 4, "actor on 0, rollout on 1-3"),
        (dict(actor="1/2", critic="1/4", rollout="2/8"), 8, "actor on 0-3, critic on 4-5, rollout on 6-7"),
        # Too many for the ranks after the actor: again from rank 0.
        (dict(actor="3/4", reference="3/4", rollout="1/4"), 8, "actor on 0-5, reference on 0-5, rollout on 6-7"),
        (dict(actor="1/1", rollout="1/2"), 2, "actor on 0-1, rollout on 0"),
        (dict(actor="0-2", rollout="1/2"), 6, "actor on 0-2, rollout on 3-5"),
    ],
)
def test_shares_of_the_ranks(placement: dict[str, str], world_size: int, expected: str) -> None:
    """They scale with the job; each begins at the end of the previous role."""
    assert PlacementConfig(**placement).describe(world_size) == f"{expected}, others on all ranks"


def test_the_plan_counts_shares() -> None:
    plan = build(8, actor="1/4", rollout="3/4")
    assert (plan.actor_ranks, plan.num_engines) == (2, 6)


def test_the_plan_counts_the_ranks_of_the_actor() -> None:
    plan = build(6, actor="0-3", critic="4-5")
    assert (plan.world_size, plan.actor_ranks, plan.dp_size, plan.num_engines) == (6, 4, 2, 6)
    assert "dp_size = ranks of the actor / (tp * pp * cp) = 4 / (2 * 1 * 1) = 2" in plan.formulas()
    plan = build(6, actor="0-1", rollout="2-5")
    assert (plan.num_engines, plan.rollouts_per_engine_max) == (4, 8 * PPO.rollout.n // 4)
    assert "num_engines = ranks of the engines / engine_ranks = 4 / 1 = 4" in plan.formulas()
    assert "dp_size = world_size / (tp * pp * cp) = 4 / (2 * 1 * 1) = 2" in build(4).formulas()


@pytest.mark.parametrize(
    ("placement", "found"),
    [
        (dict(critic="2-6"), "placement.critic = '2-6' in a job of 6 rank(s)"),
        (dict(critic="3-2"), "placement.critic = '3-2' in a job of 6 rank(s)"),
        (dict(critic="1,3"), "placement.critic = '1,3' in a job of 6 rank(s)"),
        (dict(actor="2-5"), "placement.actor = '2-5' leaves out rank 0"),
        (dict(actor="0-2"), "world_size 3 is no multiple of tp * pp * cp = 2 * 1 * 1 = 2"),
        (dict(reference="3-5"), "world_size 3 is no multiple of tp * pp * cp = 2 * 1 * 1 = 2"),
        (dict(actor="0-1", critic="2-3", reference="0-1", rollout="0-1"), "ranks 4, 5 have no role"),
        (dict(actor="1/4"), "placement.actor = '1/4' of 6 rank(s) is no whole number of ranks"),
        (dict(actor="4/3"), "placement.actor = '4/3' is no share of the ranks"),
        (dict(actor="0/3"), "placement.actor = '0/3' is no share of the ranks"),
        (dict(actor="1/0"), "placement.actor = '1/0' is no share of the ranks"),
        (dict(actor="1/two"), "placement.actor = '1/two' is no share of the ranks"),
        (dict(actor="1/6"), "world_size 1 is no multiple of tp * pp * cp = 2 * 1 * 1 = 2"),
    ],
)
def test_what_does_not_fit_the_job_is_refused(placement: dict[str, str], found: str) -> None:
    with pytest.raises(UserError) as caught:
        build(6, **placement)
    assert caught.value.found == found


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        (dict(rollout=RolloutConfig(engine="megatron")), "rollout.engine = 'megatron' on other ranks than the actor"),
    ],
)
def test_what_does_not_work_with_it_is_refused(settings: dict[str, Any], found: str) -> None:
    config = replace(PPO, **settings)
    build(4, config)
    with pytest.raises(UserError, match=found):
        build(4, config, actor="0-1", critic="2-3")


def test_servers_are_as_many_as_engines() -> None:
    """TP ranks of the job that share a server are one engine."""
    two = ServerConfig(endpoints=["http://a", "http://b"])
    for ranks, width in ((2, 1), (4, 2)):
        rollout = RolloutConfig(engine="vllm_server", server=two, tensor_model_parallel_size=width)
        config = replace(PPO, rollout=rollout)
        assert build(ranks, config).num_engines == 2
        assert build(ranks + 2, config, rollout=f"2-{ranks + 1}").num_engines == 2
        with pytest.raises(UserError, match=f"2 server.s. for {2 * ranks} rank.s., {width} per engine"):
            build(2 * ranks, config)


def test_fine_tuning_has_one_role() -> None:
    with pytest.raises(UserError, match="placement.actor = '0' in supervised fine-tuning, which has one role"):
        SftPlan.build(replace(PPO, placement=PlacementConfig(actor="0")), 2)
