# SPDX-License-Identifier: Apache-2.0
"""The roles of a config, and their specs.

Whole runs in tests/run and tests/test_golden_runs.py show that roles are built from these specs.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from megatron_rl.config.batch_plan import BatchPlan
from megatron_rl.config.run_spec import RunSpec
from megatron_rl.config.schema import RunConfig
from megatron_rl.run.building import order_kernels
from megatron_rl.run.loading import load_config
from megatron_rl.run.models import resolve, resolve_sft
from megatron_rl.types import UserError
from megatron_rl.weights.families import SCORE_HEAD


def make_config(*overrides: str) -> RunConfig:
    return load_config(
        None, ["model.path=policy", "data.train_files=[x.jsonl]", "data.train_batch_size=8", *overrides]
    ).config


def describe(spec: RunSpec) -> dict[str, tuple[object, ...]]:
    """By role: path, section, head, whether it is trained, and whether it is offloaded."""
    return {
        name: (role.path, role.section, role.head, role.trainable, role.offload) for name, role in spec.roles.items()
    }


def test_grpo_has_an_actor_and_needs_groups() -> None:
    config = make_config()
    spec = resolve(config)
    assert describe(spec) == {"actor": ("policy", "actor", "logprob", True, False)}
    assert spec.roles["actor"].settings is config.actor is spec.roles["actor"].training
    assert spec.needs_group and not spec.needs_greedy_baseline and not spec.needs_sum_pi_squared


def test_every_role_with_a_path_of_its_own() -> None:
    """The reference follows the actor's layout; a critic may lack the head that a reward model must have."""
    spec = resolve(
        make_config(
            "algorithm.adv_estimator=gae",
            "algorithm.kl_coef=0.1",
            "reference.path=old",
            "reference.offload=true",
            "critic.path=judge",
            "reward_model.path=taste",
            "reward_model.offload=true",
            "critic.tensor_model_parallel_size=2",
        )
    )
    assert describe(spec) == {
        "actor": ("policy", "actor", "logprob", True, False),
        "reference": ("old", "actor", "logprob", False, True),
        "critic": ("judge", "critic", "value", True, False),
        "reward_model": ("taste", "reward_model", "score", False, True),
    }
    assert [role.name for role in spec.trained] == ["actor", "critic"]
    assert [role.name for role in spec.laid_out] == ["actor", "critic", "reward_model"]
    assert {name: role.may_lack for name, role in spec.roles.items() if role.may_lack} == {"critic": (SCORE_HEAD,)}
    assert [role.settings.tensor_model_parallel_size for role in spec.roles.values()] == [1, 1, 2, 1]
    assert spec.roles["reward_model"].title == "reward model"


def test_further_reward_models_take_over_what_they_do_not_say() -> None:
    """They share the ranks of the first, follow a layout that the planner gives it, and are idle without a weight."""
    config = make_config(
        "reward_model.path=taste",
        "reward_model.tensor_model_parallel_size=2",
        "reward_model.sequence_parallel=true",
        "reward_model.further.safety={path: safe, tensor_model_parallel_size: 1, offload: true}",
        "reward_model.further.facts.path=facts",
        "reward_model.further.idle.path=idle",
        "reward.components=[0.5 model, 1.0 model:safety, -1.0 model:facts]",
        "placement.reward_model=1/2",
    )
    spec, names = resolve(config), ["reward_model", "reward_model.further.safety", "reward_model.further.facts"]
    assert [role for role in spec.roles if role.startswith("reward")] == names
    assert [spec.roles[name].path for name in names] == ["taste", "safe", "facts"]
    assert [spec.roles[name].settings.tensor_model_parallel_size for name in names] == [2, 1, 2]
    assert [spec.roles[name].settings.sequence_parallel for name in names] == [True, False, True]
    assert [spec.roles[name].offload for name in names] == [False, True, False]
    assert spec.roles[names[1]].title == "reward model safety"
    assert {config.placement.ranks_of(name, 4) for name in names} == {range(2)}
    changed = config.with_sections({"reward_model": {"tensor_model_parallel_size": 4, "offload": True}})
    again = [spec.with_config(changed).roles[name] for name in names]
    assert [(role.settings.tensor_model_parallel_size, role.offload) for role in again] == [
        (4, True),
        (1, True),
        (4, True),
    ]


def test_a_teacher_is_a_role_with_a_section_of_its_own() -> None:
    config = make_config(
        "algorithm.kl_coef=0.1",
        "teachers.math.path=large",
        "teachers.math.tensor_model_parallel_size=4",
        "teachers.code.path=small",
        "teachers.code.offload=true",
    )
    spec = resolve(config)
    assert list(spec.roles) == ["actor", "reference", "teachers.math", "teachers.code"]
    assert describe(spec)["teachers.math"] == ("large", "teachers.math", "logprob", False, False)
    assert describe(spec)["teachers.code"][4] and spec.roles["teachers.math"].settings is config.teachers["math"]
    assert spec.roles["teachers.math"].title == "teacher math" and list(spec.teachers) == ["math", "code"]
    assert [role.name for role in spec.laid_out] == ["actor", "teachers.math", "teachers.code"]
    assert [role.name for role in spec.laid_out_alike] == ["actor"]
    changed = config.with_sections({"teachers.math": {"offload": True}, "actor": {"lr": 1.0}})
    again = spec.with_config(changed)
    assert again.roles["teachers.math"].offload and changed.teachers["code"] is config.teachers["code"]
    assert changed.actor.lr == 1.0 and spec.why_recompute and not resolve(make_config()).why_recompute
    top_k = make_config("teachers.math.path=large", "algorithm.distillation.kind=top_k")
    assert not resolve(top_k).why_recompute, "the loss compares distributions, and advantages are as they are"


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        ((), ["actor"]),
        (("algorithm.adv_estimator=gae",), ["actor", "critic"]),
        (("algorithm.kl_coef=1e-6",), ["actor", "reference"]),
        (("reference.path=old",), ["actor"]),
    ],
)
def test_what_builds_a_role(overrides: tuple[str, ...], names: list[str]) -> None:
    """Weights default to the policy's; a path alone builds no reference."""
    spec = resolve(make_config(*overrides))
    assert list(spec.roles) == names and {role.path for role in spec.roles.values()} == {"policy"}


def test_the_roles_stay_under_other_layouts() -> None:
    """The planner varies layouts and offloading, not the set of roles."""
    config = make_config("algorithm.kl_coef=0.1", "algorithm.adv_estimator=gae")
    other = replace(
        config,
        actor=replace(config.actor, tensor_model_parallel_size=4),
        reference=replace(config.reference, offload=True),
        algorithm=replace(config.algorithm, kl_coef=0.0),
    )
    spec = resolve(config).with_config(other)
    assert list(spec.roles) == ["actor", "reference", "critic"]
    assert [role.settings.tensor_model_parallel_size for role in spec.roles.values()] == [4, 4, 1]
    assert [role.offload for role in spec.roles.values()] == [False, True, False]


def test_a_reference_has_the_actors_layout_and_budget() -> None:
    kl = "algorithm.kl_coef=0.1"
    config = make_config(kl, "actor.lr=1e-3")
    other = make_config(kl, "actor.max_tokens_per_microbatch=9000", "actor.tensor_model_parallel_size=2")
    assert resolve(config).roles["reference"].settings == config.actor
    assert resolve(config).with_config(other).roles["reference"].settings == other.actor
    short = make_config(kl, "actor.max_tokens_per_microbatch=2047")
    with pytest.raises(UserError, match="does not fit into actor.max_tokens_per_microbatch 2047"):
        BatchPlan.build(short, 1, resolve(short))


def test_sft_has_an_actor() -> None:
    assert describe(resolve_sft(make_config("algorithm.kl_coef=0.1"))) == {
        "actor": ("policy", "actor", "logprob", True, False)
    }


@pytest.mark.parametrize(
    ("settings", "queues"),
    [
        ([], None),
        (["actor.tensor_model_parallel_size=2"], "1"),
        (["critic.context_parallel_size=2"], "1"),
        (["actor.tensor_model_parallel_size=2", "critic.zero_stage=3"], None),
        (["layout.mode=auto"], "1"),
    ],
)
def test_tensor_parallel_ranks_have_one_queue_of_kernels(
    settings: list[str], queues: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless the user has chosen. Not covered: that it comes before CUDA starts."""
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    order_kernels(make_config(*settings))
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "8"
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS")
    order_kernels(make_config(*settings))
    assert os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == queues
