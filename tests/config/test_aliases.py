# SPDX-License-Identifier: Apache-2.0
"""verl names: what they mean here, what is reported, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_rl.config.aliases import ALIASES, Renamed
from megatron_rl.config.fields import list_fields
from megatron_rl.config.loading import LoadedConfig, load_config
from megatron_rl.types import UserError

MINIMAL = ["model.path=policy", "data.train_files=train.jsonl", "data.train_batch_size=8"]
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"

VERL_RECIPE = """\
algorithm: {adv_estimator: grpo, use_kl_in_reward: false, kl_ctrl: {kl_coef: 0.001}}
data:
  train_files: train.parquet
  val_files: test.parquet
  train_batch_size: 1024
  max_prompt_length: 512
  max_response_length: 1024
  filter_overlong_prompts: true
  truncation: error
actor_rollout_ref:
  model: {path: Qwen/Qwen3-8B, use_remove_padding: true, enable_gradient_checkpointing: true}
  actor:
    optim: {lr: 1e-6}
    ppo_mini_batch_size: 256
    ppo_micro_batch_size_per_gpu: 4
    use_kl_loss: true
    kl_loss_coef: 0.001
    kl_loss_type: low_var_kl
    entropy_coeff: 0
    clip_ratio: 0.2
    clip_ratio_high: 0.28
    megatron: {tensor_model_parallel_size: 2, pipeline_model_parallel_size: 2}
  rollout:
    name: vllm
    n: 5
    tensor_model_parallel_size: 2
    gpu_memory_utilization: 0.6
    log_prob_micro_batch_size_per_gpu: 4
  ref: {log_prob_micro_batch_size_per_gpu: 4, megatron: {tensor_model_parallel_size: 2}}
trainer:
  critic_warmup: 0
  logger: [console, wandb]
  project_name: p
  experiment_name: e
  n_gpus_per_node: 8
  nnodes: 1
  save_freq: -1
  test_freq: 5
  total_epochs: 15
"""


def load(*overrides: str) -> LoadedConfig:
    return load_config(None, [*MINIMAL, *overrides])


def value_of(loaded: LoadedConfig, name: str) -> Any:
    section, _, leaf = name.partition(".")
    return getattr(getattr(loaded.config, section), leaf)


def test_a_verl_recipe_reads(tmp_path: Path) -> None:
    """One recipe in the form of verl's GRPO examples; not every name that verl has."""
    path = tmp_path / "verl.yaml"
    path.write_text(VERL_RECIPE)
    loaded = load_config(path)
    expected = {
        "model.path": "Qwen/Qwen3-8B", "data.validation_files": ["test.parquet"], "data.overlong_prompts": "drop",
        "actor.lr": 1e-6, "actor.ppo_mini_batch_size": 256, "actor.recompute_granularity": "full",
        "actor.tensor_model_parallel_size": 2, "actor.pipeline_model_parallel_size": 2, "rollout.n": 5,
        "rollout.tensor_model_parallel_size": 2, "algorithm.kl_coef": 0.001, "algorithm.kl_type": "k3",
        "algorithm.clip_eps_low": 0.2, "algorithm.clip_eps_high": 0.28, "trainer.save_freq": 0,
        "trainer.test_freq": 5, "trainer.total_epochs": 15,
    }
    assert {name: value_of(loaded, name) for name in expected} == expected
    ignored = sorted(note.split("=")[0].removeprefix("ignored: ") for note in loaded.notes)
    assert ignored == sorted([
        "actor_rollout_ref.model.use_remove_padding", f"{ACTOR}.ppo_micro_batch_size_per_gpu",
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu", "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu",
        "actor_rollout_ref.ref.megatron.tensor_model_parallel_size", "trainer.critic_warmup", "trainer.logger",
        "trainer.project_name", "trainer.experiment_name", "trainer.n_gpus_per_node", "trainer.nnodes",
        "algorithm.use_kl_in_reward", "algorithm.kl_ctrl.kl_coef", "data.truncation",
    ])


def test_every_renamed_name_has_a_target() -> None:
    fields = list_fields()
    targets = {alias.target for alias in ALIASES.values() if isinstance(alias, Renamed)}
    assert targets <= set(fields)


def test_no_name_of_ours_is_hidden_by_an_alias() -> None:
    """A verl name that is also ours may only translate values, never point elsewhere."""
    shared = {name: ALIASES[name] for name in ALIASES if name in list_fields()}
    assert all(isinstance(alias, Renamed) and alias.target == name for name, alias in shared.items())


@pytest.mark.parametrize(
    ("override", "name", "expected"),
    [
        ("trainer.test_freq=-1", "trainer.test_freq", 0),
        ("trainer.save_freq=-1", "trainer.save_freq", 0),
        ("trainer.total_training_steps=7", "trainer.total_steps", 7),
        ("trainer.default_local_dir=out", "trainer.run_dir", "out"),
        ("algorithm.norm_adv_by_std_in_grpo=false", "algorithm.norm_adv_by_std", False),
        (f"{ACTOR}.kl_loss_type=mse", "algorithm.kl_type", "k2"),
        (f"{ACTOR}.kl_loss_type=kl", "algorithm.kl_type", "k1"),
        (f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm", "algorithm.loss_agg_mode", "constant"),
        (f"{ACTOR}.optim.lr_warmup_steps=-1", "actor.lr_warmup_steps", 0),
        (f"{ACTOR}.optim.lr_warmup_steps=5", "actor.lr_warmup_steps", 5),
        (f"{ACTOR}.grad_clip=0.5", "actor.clip_grad", 0.5),
        (f"{ACTOR}.clip_ratio=0.1", "algorithm.clip_eps_low", 0.1),
        (f"{ROLLOUT}.name=hf", "rollout.engine", "hf"),
        (f"{ROLLOUT}.val_kwargs.temperature=0.6", "rollout.validation_temperature", 0.6),
        ("data.truncation=left", "data.overlong_prompts", "truncate"),
        ("data.truncation=error", "data.overlong_prompts", "error"),
        ("actor_rollout_ref.model.enable_gradient_checkpointing=false", "actor.recompute_granularity", "none"),
        ("custom_reward_function.path=r.py", "reward.function", "r.py:compute_score"),
        (f"{ACTOR}.kl_loss_coef=0.01", "algorithm.kl_coef", 0.01),
        ("algorithm.kl_ctrl.kl_coef=0.01", "algorithm.kl_coef", 0.01),
    ],
)
def test_values(override: str, name: str, expected: object) -> None:
    assert value_of(load(override), name) == expected


@pytest.mark.parametrize(
    ("overrides", "expected", "num_notes"),
    [
        (["use_kl_loss=true", "kl_loss_coef=0.01"], 0.01, 0),
        (["use_kl_loss=false", "kl_loss_coef=0.01"], 0.0, 1),
        (["use_kl_loss=true"], 0.001, 1),
        (["use_kl_loss=false"], 0.0, 0),
    ],
)
def test_kl_switch_and_coefficient_are_read_together(overrides: list[str], expected: float, num_notes: int) -> None:
    loaded = load(*(f"{ACTOR}.{override}" for override in overrides))
    assert loaded.config.algorithm.kl_coef == expected
    assert len(loaded.notes) == num_notes


def test_own_kl_coefficient_beats_the_assumed_one() -> None:
    assert load("algorithm.kl_coef=0.2", f"{ACTOR}.use_kl_loss=true").config.algorithm.kl_coef == 0.2


@pytest.mark.parametrize("order", [1, -1])
def test_clip_of_one_side_beats_the_common_one_in_any_order(order: int) -> None:
    overrides = [f"{ACTOR}.clip_ratio=0.1", f"{ACTOR}.clip_ratio_high=0.3"][::order]
    algorithm = load(*overrides).config.algorithm
    assert (algorithm.clip_eps_low, algorithm.clip_eps_high) == (0.1, 0.3)


def test_reward_function_of_path_and_name() -> None:
    loaded = load("custom_reward_function.path=r.py", "custom_reward_function.name=score")
    assert loaded.config.reward.function == "r.py:score"
    loaded = load("custom_reward_function.path=null", "custom_reward_function.name=score")
    assert loaded.config.reward.function is None and len(loaded.notes) == 2


def test_greedy_validation_overrules_its_temperature() -> None:
    loaded = load(f"{ROLLOUT}.val_kwargs.do_sample=false", f"{ROLLOUT}.val_kwargs.temperature=1.0")
    assert loaded.config.rollout.validation_temperature == 0.0
    assert "do_sample is false" in loaded.notes[0]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("trainer.critic_warmup=10", "0: there is no critic yet"),
        ("algorithm.use_kl_in_reward=true", "false: the KL term is in the loss"),
        (f"{ACTOR}.kl_loss_type=abs", "one of 'low_var_kl'"),
        (f"{ROLLOUT}.name=sglang", "one of 'vllm', 'hf'"),
        (f"{ROLLOUT}.val_kwargs.top_p=0.7", "1.0: validation samples"),
        (f"{ROLLOUT}.val_kwargs.n=true", "1: one response"),
        ("reward_model.enable=true", "False: rewards come from"),
        ("data.truncation=middle", "error, left or right"),
        (f"{ACTOR}.use_kl_loss=1", "true or false"),
        ("actor_rollout_ref.model.enable_gradient_checkpointing=1", "one of True, False"),
    ],
)
def test_what_would_mean_something_else_is_refused(override: str, expected: str) -> None:
    with pytest.raises(UserError) as caught:
        load(override)
    assert expected in caught.value.expected
    assert override.partition("=")[0] in caught.value.found


def test_ignored_names_say_why_and_where() -> None:
    assert load("trainer.nnodes=2").notes == [
        "ignored: trainer.nnodes=2 (command line), torchrun decides the number of ranks"
    ]


def test_two_names_of_one_setting_must_agree_in_a_recipe(tmp_path: Path) -> None:
    path = tmp_path / "twice.yaml"
    path.write_text("rollout: {n: 4}\nactor_rollout_ref: {rollout: {n: 8}}\n")
    with pytest.raises(UserError, match="rollout.n is given twice, as .* and as ") as caught:
        load_config(path, MINIMAL)
    assert caught.value.source in (f"{path}:1 and {path}:2", f"{path}:2 and {path}:1")
    path.write_text("rollout: {n: 4}\nactor_rollout_ref: {rollout: {n: 4}}\n")
    assert load_config(path, MINIMAL).config.rollout.n == 4


@pytest.mark.parametrize("override", ["rollout.n=2", f"{ROLLOUT}.n=2"])
def test_command_line_replaces_either_name_in_the_recipe(tmp_path: Path, override: str) -> None:
    path = tmp_path / "recipe.yaml"
    for text in ("rollout: {n: 4}\n", "actor_rollout_ref: {rollout: {n: 4}}\n"):
        path.write_text(text)
        assert load_config(path, [*MINIMAL, override]).config.rollout.n == 2
