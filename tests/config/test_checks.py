# SPDX-License-Identifier: Apache-2.0
"""Configs that work, settings without effect, and places; refused configs: `test_bad_configs.py`."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_rl.config.checks import check_config
from megatron_rl.config.schema import ActorConfig, DataConfig, ModelConfig, RunConfig
from megatron_rl.config.sft_plan import SftPlan
from megatron_rl.run.loading import load_config
from megatron_rl.types import UserError

MINIMAL = ["model.path=policy", "data.train_files=train.jsonl", "data.train_batch_size=8"]
PP = "actor.pipeline_model_parallel_size"
STATIC = "actor.step_mode=static"
TEACHER = ["algorithm.distillation.coef=1", "teachers.t.path=judge"]
VPP = "actor.virtual_pipeline_model_parallel_size"


def test_defaults_pass() -> None:
    data = DataConfig(train_files=["train.jsonl"], train_batch_size=8)
    check_config(RunConfig(model=ModelConfig(path="policy"), data=data, actor=ActorConfig()))


@pytest.mark.parametrize(
    ("overrides", "name", "taken"),
    [
        (["trainer.test_freq=100"], "trainer.test_freq", 0),
        (["actor.sequence_parallel=true"], "actor.sequence_parallel", False),
        (["reward_model.sequence_parallel=true"], "reward_model.sequence_parallel", False),
        ([f"{VPP}=2"], VPP, None),
        (["algorithm.kl_target=0.1"], "algorithm.kl_target", None),
        (["algorithm.kl_in=reward"], "algorithm.kl_in", "loss"),
        (["reward_model.path=judge", "reward.components=[1.0 math]"], "reward_model.path", None),
        (["reward_model.further.a.path=judge", "reward.components=[1.0 math]"], "reward_model.further", {}),
        (["actor.min_lr=1e-3"], "actor.min_lr", 0.0),
        (["actor.bucket_tokens=[4096]"], "actor.bucket_tokens", []),
        ([STATIC, "actor.graph_memory_gib=4"], "actor.graph_memory_gib", None),
        ([STATIC, "actor.context_parallel_size=2"], "actor.share_prompts", False),
        (["actor.share_prompts=tree", "actor.router_replay=trainer"], "actor.share_prompts", True),
        (["actor.share_prompts=tree", "critic.step_mode=static"], "critic.share_prompts", True),
        ([*TEACHER, "teachers.t.sequence_parallel=true"], "teachers.t.sequence_parallel", False),
        ([*TEACHER, "actor.share_prompts=tree", "critic.step_mode=static"], "critic.share_prompts", True),
    ],
)
def test_what_has_no_effect_is_put_aside_with_a_note(overrides: list[str], name: str, taken: object) -> None:
    """And nothing else: the one note names the setting, its value and its place, if given."""
    loaded = load_config(None, [*MINIMAL, *overrides])
    section, _, leaf = name.rpartition(".")
    assert getattr(loaded.config.section(section), leaf) == taken
    assert len(loaded.notes) == 1 and loaded.notes[0].startswith(f"ignored: {name}=")
    assert (f"({loaded.sources[name]})" in loaded.notes[0]) if name in loaded.sources else name.endswith("prompts")
    assert not load_config(None, MINIMAL).notes


@pytest.mark.parametrize(
    "overrides",
    [
        ["actor.sequence_parallel=true", "actor.tensor_model_parallel_size=2"],
        ["actor.share_prompts=tree"],
        [f"{PP}=2", f"{VPP}=2"],
        [f"{PP}=2", f"{VPP}=1"],
        ["actor.expert_model_parallel_size=2"],  # whether the model has experts is its shape's matter
        ["rollout.validation_temperature=0", "algorithm.clip_eps_high=3.0"],
        ["reward.function=dir/my_reward.py:score"],
    ],
)
def test_what_works_passes(overrides: list[str]) -> None:
    assert not load_config(None, [*MINIMAL, *overrides]).notes


def test_a_refused_recipe_value_names_its_line(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("rollout:\n  top_p: 1.9\n")
    with pytest.raises(UserError) as caught:
        load_config(path, MINIMAL)
    assert caught.value.source == f"rollout.top_p ({path}:2)"


def test_validation_alone_is_no_fine_tuning() -> None:
    """A validation-only run that would train is refused."""
    config = load_config(None, [*MINIMAL, "data.validation_files=v.jsonl", "trainer.total_steps=0"]).config
    with pytest.raises(UserError, match="supervised fine-tuning has no validation"):
        SftPlan.build(config, 1)
