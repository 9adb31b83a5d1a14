# SPDX-License-Identifier: Apache-2.0
"""Weights that the ranks of DP share: stages that do not exist, and settings that do not work with stage 3."""

from __future__ import annotations

import pytest

from megatron_rl.config.schema import ActorConfig
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.planning.role_layouts import build_layout
from megatron_rl.run.loading import load_config
from megatron_rl.types import UserError
from megatron_rl.weights.row_shards import check_shards, find_shard_places
from planning_jobs import small_shape

GIVEN = ["model.path=m", "data.train_files=[t.jsonl]", "data.train_batch_size=8"]


@pytest.mark.parametrize(
    ("overrides", "source"),
    [
        (["actor.zero_stage=2"], "actor.zero_stage"),
        (["reward_model.zero_stage=2"], "reward_model.zero_stage"),
        (["actor.zero_stage=3", "actor.step_mode=static"], "actor.step_mode"),
        (["critic.zero_stage=3", "critic.step_mode=graph"], "critic.step_mode"),
        (["critic.zero_stage=3", "actor.overlap_grad_reduce=true"], "actor.overlap_grad_reduce"),
        (["actor.zero_stage=3", "actor.lora.rank=8"], "actor.lora.rank"),
        (["critic.zero_stage=3", "critic.optimizer=muon"], "critic.optimizer"),
        (["actor.zero_stage=3", "reference.offload=true"], "reference.offload"),
        (["reward_model.zero_stage=3", "reward_model.offload=true"], "reward_model.offload"),
        (["actor.zero_stage=3", "rollout.engine=megatron"], "rollout.engine"),
        (["critic.zero_stage=3", "actor.zero_shard_size=0"], "actor.zero_shard_size"),
        (["teachers.big.path=b", "teachers.big.zero_stage=2"], "teachers.big.zero_stage"),
        (["teachers.big.path=b", "teachers.big.zero_stage=3", "teachers.big.offload=true"], "teachers.big.offload"),
        (["actor.zero_stage=3", "actor.overlap_shared_experts=true"], "actor.overlap_shared_experts"),
    ],
)
def test_what_cannot_be_done_is_refused(overrides: list[str], source: str) -> None:
    with pytest.raises(UserError) as caught:
        load_config(None, [*GIVEN, *overrides])
    assert caught.value.found.startswith(f"{source} = ")


def test_the_roles_choose_for_themselves() -> None:
    config = load_config(None, [*GIVEN, "critic.zero_stage=3", "critic.offload_optimizer=true"]).config
    assert (config.actor.zero_stage, config.critic.zero_stage, config.reward_model.zero_stage) == (1, 3, 1)


def test_the_size_of_groups_of_shards_is_the_actors_for_every_role() -> None:
    settings = ["teachers.t.path=b", "teachers.t.zero_stage=3", "actor.zero_shard_size=2"]
    loaded = load_config(None, [*GIVEN, *settings])
    roles = ("actor", "critic", "reward_model", "teachers.t")
    assert [loaded.config.section(role).zero_shard_size for role in roles] == [2] * 4 and loaded.notes == []
    loaded = load_config(None, [*GIVEN, "actor.zero_shard_size=2"])
    assert loaded.config.actor.zero_shard_size is None
    assert [note.partition(" (")[0] for note in loaded.notes] == ["ignored: actor.zero_shard_size=2"]


@pytest.mark.parametrize(("size", "stage"), [(8, 3), (16, 3), (None, 3), (2, 1)])
def test_one_group_of_all_ranks_is_no_group(size: int | None, stage: int) -> None:
    config = ActorConfig(zero_stage=stage, zero_shard_size=size, tensor_model_parallel_size=2)
    assert build_layout(config, 16) == ParallelLayout(16, tp_size=2)


def test_shards_of_a_group_stay_in_a_node() -> None:
    """Two nodes of 8 ranks with TP 2 and EP 2: groups of 4 ranks for dense parameters, and of 2 for experts."""
    config = dict(tensor_model_parallel_size=2, expert_model_parallel_size=2, zero_stage=3)
    layout = build_layout(ActorConfig(**config, zero_shard_size=4), 16)
    places = [find_shard_places(layout, rank) for rank in range(16)]
    assert places[:8] == places[8:] and len({dense for dense, _ in places}) == 4
    assert [(dense.index, experts.index) for dense, experts in places[:8:2]] == [(0, 0), (1, 0), (2, 1), (3, 1)]
    assert {(dense.count, experts.count) for dense, experts in places} == {(4, 2)}


@pytest.mark.parametrize(
    ("num_ranks", "sizes", "size", "found"),
    [
        (8, {}, 3, "the 8 DP and CP ranks of critic are no groups of 3"),
        (18, {"ep_size": 2}, 9, "the 9 expert replicas of critic are no groups of 4"),
    ],
)
def test_groups_of_shards_are_equal(num_ranks: int, sizes: dict[str, int], size: int, found: str) -> None:
    with pytest.raises(UserError) as caught:
        check_shards(ParallelLayout(num_ranks, **sizes, shard_size=size), small_shape(), "critic")
    assert caught.value.found == f"actor.zero_shard_size = {size}: {found}"
