# SPDX-License-Identifier: Apache-2.0
"""Weights that the ranks of DP share: stages that do not exist, and settings that do not work with stage 3."""

from __future__ import annotations

import pytest

from megatron_rl.run.loading import load_config
from megatron_rl.types import UserError

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
        (["teachers.big.path=b", "teachers.big.zero_stage=2"], "teachers.big.zero_stage"),
        (["teachers.big.path=b", "teachers.big.zero_stage=3", "teachers.big.offload=true"], "teachers.big.offload"),
    ],
)
def test_what_cannot_be_done_is_refused(overrides: list[str], source: str) -> None:
    with pytest.raises(UserError) as caught:
        load_config(None, [*GIVEN, *overrides])
    assert caught.value.found.startswith(f"{source} = ")


def test_the_roles_choose_for_themselves() -> None:
    config = load_config(None, [*GIVEN, "critic.zero_stage=3", "critic.offload_optimizer=true"]).config
    assert (config.actor.zero_stage, config.critic.zero_stage, config.reward_model.zero_stage) == (1, 3, 1)
