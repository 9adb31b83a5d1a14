# SPDX-License-Identifier: Apache-2.0
"""Configs that cannot work, whatever the world size."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_rl.config.batch_plan import SftPlan
from megatron_rl.config.checks import check_config
from megatron_rl.config.schema import ActorConfig, DataConfig, ModelConfig, RunConfig
from megatron_rl.run.loading import load_config
from megatron_rl.types import UserError

MINIMAL = ["model.path=policy", "data.train_files=train.jsonl", "data.train_batch_size=8"]
PP = "actor.pipeline_model_parallel_size"
STATIC = "actor.step_mode=static"
OPENAI, VLLM = "rollout.engine=openai", "rollout.engine=vllm_server"
HOOKED = ["rollout.server.endpoints=[http://a]", "rollout.server.directory=w", "rollout.server.on_update=ls"]
TRUNCATE = "algorithm.importance_sampling=token-truncate"
VPP = "actor.virtual_pipeline_model_parallel_size"


def test_defaults_pass() -> None:
    data = DataConfig(train_files=["train.jsonl"], train_batch_size=8)
    check_config(RunConfig(model=ModelConfig(path="policy"), data=data, actor=ActorConfig()))


@pytest.mark.parametrize(
    ("overrides", "name", "text"),
    [
        (["data.train_batch_size=0"], "data.train_batch_size", "is too small"),
        (["rollout.n=-1"], "rollout.n", "is too small"),
        (["trainer.val_only=true"], "trainer.val_only", "without a file to validate on"),
        (["trainer.total_steps=0"], "trainer.total_steps", "is too small"),
        (["rollout.temperature=0"], "rollout.temperature", "is not positive"),
        (["rollout.validation_temperature=-0.1"], "rollout.validation_temperature", "is negative"),
        (["algorithm.clip_eps_low=0"], "algorithm.clip_eps_low", "is not positive"),
        (["algorithm.clip_eps_low=1.0"], "algorithm.clip_eps_low", "is too large"),
        (["algorithm.clip_eps_high=-0.1"], "algorithm.clip_eps_high", "is not positive"),
        (["algorithm.kl_coef=-0.1"], "algorithm.kl_coef", "is negative"),
        (["agents.max_failed_share=-0.1"], "agents.max_failed_share", "is negative"),
        (["reward.max_failed_share=1.5"], "reward.max_failed_share", "is too large"),
        (["actor.adam_beta2=1.0"], "actor.adam_beta2", "is too large"),
        (["actor.min_lr=1e-3", "actor.lr_decay_style=linear"], "actor.min_lr", "is above the peak actor.lr"),
        (["rollout.gpu_memory_utilization=1.5"], "rollout.gpu_memory_utilization", "more than all of it"),
        (["trainer.log_rollouts=-2"], "trainer.log_rollouts", "is negative"),
        (["actor.quantization=nf4"], "actor.quantization", "there would be nothing to train"),
        (["actor.lora.rank=8", "critic.quantization=nf4"], "critic.quantization", "without adapters"),
        (
            ["actor.lora.rank=8", "actor.quantization=nf4", "algorithm.kl_coef=0.1", "placement.reference=1/2"],
            "placement.reference",
            "a reference of its own is not quantized",
        ),
        (["actor.expert_model_parallel_size=0"], "actor.expert_model_parallel_size", "is too small"),
        (
            ["rollout.engine_options={speculative_config: {}}"],
            "rollout.engine_options",
            "drafted tokens are not proven",
        ),
        (
            ["rollout.engine_options={dtype: half}"],
            "rollout.engine_options",
            "has dtype, which is not the user's to set: set model.dtype",
        ),
        (["rollout.quantization=int8"], "rollout.quantization", "the engine samples from another policy"),
        ([TRUNCATE, VLLM, "rollout.quantization=int8"], "rollout.quantization", "whose weights are in model.dtype"),
        (
            [TRUNCATE, "rollout.quantization=fp8", "actor.lora.rank=8", "hybrid.lora=adapter"],
            "hybrid.lora",
            "added to the weights before these are rounded",
        ),
        (
            [TRUNCATE, "rollout.quantization=int8", "rollout.bitwise=true", "model.dtype=float32"],
            "rollout.quantization",
            "training computes with the whole weights",
        ),
        (
            ["rollout.engine_options={kv_cache_dtype: fp8_e4m3}"],
            "rollout.engine_options",
            "the engine samples from another policy",
        ),
        (["rollout.engine_options={block_size: 16}", "rollout.engine=hf"], "rollout.engine_options", "takes none"),
        (
            ["rollout.engine_options={block_size: 16}", "rollout.bitwise=true", "model.dtype=float32"],
            "rollout.engine_options",
            "other kernels, with other bits",
        ),
        (["rollout.validation_sets={aime: {n: 0}}"], "rollout.validation_sets", "has {'n': 0} for 'aime'"),
        (["rollout.validation_sets={aime: {min_p: 0.1}}"], "rollout.validation_sets", "for 'aime'"),
        (["rollout.validation_sets={aime: {n: true}}"], "rollout.validation_sets", "for 'aime'"),
        (["rollout.top_p=0"], "rollout.top_p", "is no probability"),
        (["rollout.validation_top_p=1.1"], "rollout.validation_top_p", "is no probability"),
        (["rollout.min_tokens=9999999"], "rollout.min_tokens", "that a response can have"),
        ([OPENAI, *HOOKED, "rollout.min_tokens=4"], "rollout.engine", "does not tell what it draws from"),
        (["rollout.top_k=0"], "rollout.top_k", "is no number of tokens"),
        (["rollout.min_p=1.0"], "rollout.min_p", "is no fraction"),
        (["rollout.max_kept_tokens=0"], "rollout.max_kept_tokens", "is too small"),
        (["rollout.top_p=0.9", "actor.step_mode=graph"], "actor.step_mode", "have no fixed size"),
        (["rollout.min_p=0.1", "rollout.model_runner=v2"], "rollout.model_runner", "does not tell what it draws from"),
        (["rollout.engine=hf", "rollout.tensor_model_parallel_size=2"], "rollout.tensor_model_parallel_size", "'hf'"),
        ([OPENAI], "rollout.server.endpoints", "which starts no server"),
        ([VLLM, "rollout.server.endpoints=[node:8000]"], "rollout.server.endpoints", "has an address that is none"),
        ([VLLM, "rollout.server.endpoints=[http://a]"], "rollout.server.directory", "do not see the memory of this"),
        (
            [OPENAI, "rollout.server.endpoints=[http://a]", "rollout.server.directory=w"],
            "rollout.server.on_update",
            "does not know how its server loads weights",
        ),
        (["rollout.engine=sglang"], "rollout.server.python", "has an environment of its own"),
        (
            ["rollout.engine=sglang", "rollout.server.python=python", "rollout.min_tokens=4"],
            "rollout.min_tokens",
            "which does not hold stop tokens back",
        ),
        (
            [VLLM, "schedule.max_staleness=1", "schedule.steps_per_update=8", TRUNCATE],
            "rollout.engine",
            "has no decode steps that this job could count",
        ),
        ([VLLM, "rollout.server.restarts=-1"], "rollout.server.restarts", "is negative"),
        ([VLLM, "rollout.bitwise=true", "model.dtype=float32"], "rollout.engine", "computes in its own way"),
        ([OPENAI, *HOOKED, "rollout.top_p=0.9"], "rollout.engine", "does not tell what it draws from"),
        ([OPENAI, *HOOKED, "rollout.validation_top_k=20"], "rollout.engine", "does not tell what it draws from"),
        (
            [OPENAI, *HOOKED, "rollout.validation_sets={a: {top_p: 0.9}}"],
            "rollout.engine",
            "does not tell what it draws from",
        ),
        (
            [VLLM, "rollout.validation_top_k=20", "rollout.model_runner=v2"],
            "rollout.model_runner",
            "does not tell what it draws from",
        ),
        ([VLLM, "hybrid.lora=adapter"], "hybrid.lora", "which has no place for adapters"),
        (["rollout.bitwise=true", "model.dtype=bfloat16"], "model.dtype", "only float32 is computed in the same order"),
        (
            ["rollout.bitwise=true", "model.dtype=float32", "actor.tensor_model_parallel_size=2"],
            "rollout.tensor_model_parallel_size",
            "cut in another number of parts",
        ),
        (
            ["rollout.bitwise=true", "model.dtype=float32", "actor.tensor_model_parallel_size=4"],
            "actor.tensor_model_parallel_size",
            "a sum over more than two ranks has an order",
        ),
        (["rollout.bitwise=true", "rollout.engine=mine"], "rollout.engine", '"mine" is not known'),
        (
            ["rollout.engine=megatron", "actor.tensor_model_parallel_size=4", "rollout.tensor_model_parallel_size=2"],
            "rollout.tensor_model_parallel_size",
            "is not supported by rollout.engine = 'megatron'",
        ),
        (["algorithm.dual_clip=0.5"], "algorithm.dual_clip", "every negative advantage"),
        (["algorithm.importance_low=2.5"], "algorithm.importance_low", "is not below"),
        (["algorithm.gae_lambda=1.5"], "algorithm.gae_lambda", "too large"),
        (["critic.lr=-1"], "critic.lr", "negative"),
        (["reward.components=[1.0 model]"], "reward.components", "reward_model.path is null"),
        (["reward.overlong_buffer_length=5000"], "reward.overlong_buffer_length", "more than data.max_response_length"),
        (["reward.function=my_reward.py"], "reward.function", "does not name a function"),
        (["reward.function=:score"], "reward.function", "does not name a function"),
        (["data.train_files=[]"], "data.train_files", "names no file"),
        (["data.train_files=[a, ./a]"], "data.train_files", "names a twice"),
        (["data.pass_rates=x", "data.pass_rate_range=[0.5]"], "data.pass_rate_range", "is no range"),
        (["data.pass_rates=x", "data.pass_rate_range=[0.5, 0.1]"], "data.pass_rate_range", "is no range"),
        (["data.train_files=[a, b]", "data.weights=0.5"], "data.weights", "has 1 numbers for 2 files"),
        (["data.train_files=[a, b]", "data.weights=[1, 0]"], "data.weights", "not positive"),
        (["data.train_files=[a, b]", "data.weights=[0.3333333, 0.7]"], "data.weights", "repeats after 10333333"),
        (["data.validation_files=[./train.jsonl]"], "data.validation_files", "shares train.jsonl"),
    ],
)
def test_refusals_name_the_setting_and_its_place(overrides: list[str], name: str, text: str) -> None:
    with pytest.raises(UserError) as caught:
        load_config(None, [*MINIMAL, *overrides])
    assert caught.value.found.startswith(f"{name} = ")
    assert text in caught.value.found
    assert caught.value.source.startswith(name)


@pytest.mark.parametrize(
    ("overrides", "name", "taken"),
    [
        (["trainer.test_freq=100"], "trainer.test_freq", 0),
        (["actor.sequence_parallel=true"], "actor.sequence_parallel", False),
        (["reward_model.sequence_parallel=true"], "reward_model.sequence_parallel", False),
        ([f"{VPP}=2"], VPP, None),
        (["algorithm.kl_controller=adaptive"], "algorithm.kl_controller", "fixed"),
        (["algorithm.kl_in=reward"], "algorithm.kl_in", "loss"),
        (["data.pass_rate_range=[0, 0.5]"], "data.pass_rate_range", [0.1, 0.9]),
        (["reward_model.path=judge", "reward.components=[1.0 math]"], "reward_model.path", None),
        (["actor.min_lr=1e-3"], "actor.min_lr", 0.0),
        (["actor.bucket_tokens=[4096]"], "actor.bucket_tokens", []),
        (["critic.max_num_seqs=8"], "critic.max_num_seqs", 64),
        ([STATIC, "actor.graph_memory_gib=4"], "actor.graph_memory_gib", None),
        ([STATIC, "actor.context_parallel_size=2"], "actor.share_prompts", False),
        (["rollout.engine=megatron", "hybrid.alias_weights=false"], "hybrid.alias_weights", True),
        (["actor.share_prompts=tree", "actor.router_replay=trainer"], "actor.share_prompts", True),
        (["critic.share_prompts=tree", "critic.step_mode=static"], "critic.share_prompts", True),
        (["reward_model.share_prompts=tree"], "reward_model.share_prompts", True),
    ],
)
def test_what_has_no_effect_is_put_aside_with_a_note(overrides: list[str], name: str, taken: object) -> None:
    """And with nothing else: the one note names the setting, its value and, where it was given, its place."""
    loaded = load_config(None, [*MINIMAL, *overrides])
    section, _, leaf = name.partition(".")
    assert getattr(getattr(loaded.config, section), leaf) == taken
    assert len(loaded.notes) == 1 and loaded.notes[0].startswith(f"ignored: {name}=")
    assert (f"({loaded.sources[name]})" in loaded.notes[0]) if name in loaded.sources else name.endswith("prompts")
    assert not load_config(None, MINIMAL).notes


@pytest.mark.parametrize(
    "overrides",
    [
        ["actor.sequence_parallel=true", "actor.tensor_model_parallel_size=2"],
        ["actor.share_prompts=tree", "critic.share_prompts=tree"],
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
    """A run that would train although it was told not to is refused."""
    config = load_config(None, [*MINIMAL, "data.validation_files=v.jsonl", "trainer.val_only=true"]).config
    with pytest.raises(UserError, match="supervised fine-tuning has no validation"):
        SftPlan.build(config, 1)
