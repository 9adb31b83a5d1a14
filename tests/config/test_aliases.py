# SPDX-License-Identifier: Apache-2.0
"""verl names: their meaning here, the reported ones, the refused ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_rl.compat import aliases
from megatron_rl.compat.kinds import Renamed, SameAs
from megatron_rl.compat.name_groups import GROUPS
from megatron_rl.compat.name_tables import ALIASES, PATTERNS
from megatron_rl.compat.verl_defaults import DEFAULTS
from megatron_rl.config.algorithm import DroOptions, GdpoOptions
from megatron_rl.config.checked import CheckedConfig, Mistakes
from megatron_rl.config.fields import list_fields, list_options
from megatron_rl.config.sources import Setting, read_recipe
from megatron_rl.run.inputs import plan_rl
from megatron_rl.run.loading import LoadedConfig, _is_ours, load_config
from megatron_rl.types import UserError
from tools._verl_page import format_page

MINIMAL = ["model.path=policy", "data.train_files=train.jsonl", "data.train_batch_size=8"]
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
ROOT = Path(__file__).resolve().parents[2]
TUTORIAL = Path(__file__).parent / "verl/tutorial.yaml"
MEGATRON_DEFAULTS = Path(__file__).parent / "verl/megatron_defaults.yaml"

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


VERL = ["actor_rollout_ref.model.path=policy", f"{ROLLOUT}.name=vllm"]


def load(*overrides: str) -> LoadedConfig:
    return load_config(None, [*MINIMAL, *overrides])


def value_of(loaded: LoadedConfig, name: str) -> Any:
    return CheckedConfig(loaded.config).get(name)


def test_a_verl_recipe_reads(tmp_path: Path) -> None:
    """One recipe in the form of verl's GRPO examples; not every name that verl has."""
    path = tmp_path / "verl.yaml"
    path.write_text(VERL_RECIPE)
    loaded = load_config(path)
    expected = {
        "model.path": "Qwen/Qwen3-8B",
        "data.validation_files": ["test.parquet"],
        "data.overlong_prompts": "drop",
        "actor.lr": 1e-6,
        "actor.ppo_mini_batch_size": 256,
        "actor.recompute_granularity": "full",
        "actor.tensor_model_parallel_size": 2,
        "actor.pipeline_model_parallel_size": 2,
        "rollout.n": 5,
        "rollout.tensor_model_parallel_size": 2,
        "algorithm.kl_coef": 0.001,
        "algorithm.kl_type": "k3",
        "algorithm.clip_eps_low": 0.2,
        "algorithm.clip_eps_high": 0.28,
        "trainer.save_freq": None,
        "trainer.test_freq": 5,
        "trainer.total_epochs": 15,
        "actor.max_tokens_per_microbatch": 4 * (512 + 1024),
        "algorithm.kl_in": "loss",
        "observability.wandb_project": "p",
        "observability.wandb_name": "e",
        "observability.trackers": ["wandb"],
    }
    assert {name: value_of(loaded, name) for name in expected} == expected
    kinds = [note.split("=")[0] for note in loaded.notes]
    assert kinds[-3:-1] == ["ignored: algorithm.kl_ctrl.kl_coef", "ignored: data.truncation"]
    count, _, names = loaded.notes[-1].partition(" settings without effect on the results ")
    assert count == "ignored: 6" and set(names.partition(": docs/verl_keys.md): ")[2].split(", ")) == {
        "actor_rollout_ref.model.use_remove_padding",
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu",
        "actor_rollout_ref.ref.megatron.tensor_model_parallel_size",
        "trainer.n_gpus_per_node",
        "trainer.nnodes",
    }


def test_the_tutorial_recipe_reads_as_it_is() -> None:
    """Six GPUs, 60 prompts x 12 responses, two ranks per engine, and an estimator that contradicts the rest.

    Without a file: tests/launch/test_entry_points.py tests the output of the dry run.
    """
    loaded = load_config(TUTORIAL)
    plan = plan_rl(loaded.config, loaded.num_ranks)
    assert (plan.world_size, plan.rollouts_per_step) == (6, 720)
    assert (plan.num_engines, plan.rollouts_per_engine_min, plan.rollouts_per_engine_max) == (3, 240, 240)
    assert plan.max_tokens_per_microbatch == 8 * (512 + 1024)
    assert loaded.config.reference.offload and loaded.config.algorithm.kl_coef == 0.001
    assert loaded.config.data.train_files == [str(Path.home() / "data/gsm8k/train.parquet")]
    assert loaded.config.trainer.run_dir == "checkpoints/verl_examples/gsm8k"
    assert loaded.notes[0].startswith("contradiction: algorithm.adv_estimator='gae' ")
    assert "rollout.n=12" in loaded.notes[0] and "adv_estimator=grpo" in loaded.notes[0]


def test_every_default_of_verl_reads() -> None:
    """All keys that verl's Megatron trainer has, with references between them."""
    loaded = load_config(MEGATRON_DEFAULTS)
    config = loaded.config
    assert (config.actor.adam_beta2, config.critic.lr, config.critic.value_clip) == (0.999, 1e-5, 0.5)
    assert (config.actor.max_tokens_per_microbatch, config.critic.max_tokens_per_microbatch) == (16384, 32768)
    assert config.critic.path == str(Path.home() / "models/deepseek-llm-7b-chat") and config.reward_model.path is None
    assert (config.algorithm.kl_coef, config.algorithm.dual_clip) == (0.0, 3.0)
    assert not config.actor.sequence_parallel, "it has no meaning without tensor parallelism"
    assert not [note for note in loaded.notes if note.startswith("contradiction")], "gae with n = 1 is PPO"
    assert loaded.num_ranks == 8


@pytest.mark.parametrize(
    ("overrides", "is_contradiction"),
    [
        (["algorithm.adv_estimator=gae", f"{ROLLOUT}.n=4"], True),
        (["algorithm.adv_estimator=gae", "rollout.n=4"], True),
        (["algorithm.adv_estimator=gae", f"{ROLLOUT}.n=4", "critic.lr=1e-6"], False),
        (["algorithm.adv_estimator=gae", f"{ROLLOUT}.n=1"], False),
        (["algorithm.adv_estimator=grpo", f"{ROLLOUT}.n=4"], False),
    ],
)
def test_an_estimator_that_needs_a_critic_in_a_run_without_one(overrides: list[str], is_contradiction: bool) -> None:
    assert any(note.startswith("contradiction") for note in load(*overrides).notes) == is_contradiction


def test_a_command_in_verls_names_has_verls_defaults() -> None:
    """PPO with a critic, one response, four optimizer steps a step; nothing else is written."""
    loaded = load_config(None, VERL)
    config, plan = loaded.config, plan_rl(loaded.config, 8)
    assert loaded.num_ranks == 8 and config.data.train_files == [str(Path.home() / "data/rlhf/gsm8k/train.parquet")]
    assert (config.algorithm.adv_estimator, config.rollout.n, config.algorithm.kl_coef) == ("gae", 1, 0.0)
    assert (plan.rollouts_per_step, plan.optimizer_steps_per_step, plan.num_engines) == (1024, 4, 4)
    assert (config.actor.adam_beta2, config.critic.adam_beta2, config.algorithm.dual_clip) == (0.999, 0.999, 3.0)
    assert (config.data.max_prompt_length, config.data.max_response_length) == (512, 512)
    assert (config.reward.function, config.actor.recompute_granularity) == ("by_data_source", "full")
    (note,) = loaded.notes
    assert (
        note.startswith("assumed: ")
        and "algorithm.adv_estimator=gae" in note
        and "rollout.n=1" in note
        and "kl_coef" not in note
    )
    assert "reward.function=by_data_source" in note
    (note,) = load_config(None, [*VERL, "reward.custom_reward_function.path=mine.py"]).notes
    assert "reward.function" not in note, "the function takes precedence"
    megatron = load_config(None, [*VERL, "model_engine=megatron"]).config
    assert megatron.actor.recompute_granularity == "none", "verl's switch belongs to FSDP"


def test_the_defaults_are_those_of_verls_files() -> None:
    """DEFAULTS against a file of verl's with all keys, which leaves nothing to assume that changes a result."""
    recipe = [setting for setting in read_recipe(MEGATRON_DEFAULTS, Mistakes()) if setting.name in DEFAULTS]
    stored = {setting.name: setting.value for setting in recipe}
    # In this older series: another number of epochs is written there, and lengths that it leaves to the user.
    assert {name: DEFAULTS[name] for name in stored} == stored and len(stored) >= 15


def test_stages_of_unequal_length_keep_their_numbers() -> None:
    """Of the actor and the critic; a recipe's Megatron options lie in a section of overrides."""
    overrides = f"{ACTOR}.megatron.override_transformer_config"
    settings = [f"{overrides}.num_layers_in_first_pipeline_stage=6", f"{overrides}.num_layers_in_last_pipeline_stage=7"]
    critics = "critic.megatron.override_transformer_config.pipeline_model_parallel_layout=Ettt|tL"
    sizes = [f"{ACTOR}.megatron.pipeline_model_parallel_size=8", "critic.megatron.pipeline_model_parallel_size=2"]
    loaded = load(*sizes, *settings, critics, "algorithm.adv_estimator=gae")
    assert value_of(loaded, "actor.num_layers_in_first_pipeline_stage") == 6
    assert value_of(loaded, "actor.num_layers_in_last_pipeline_stage") == 7
    assert value_of(loaded, "critic.pipeline_model_parallel_layout") == "Ettt|tL"


def test_whoever_writes_a_name_beats_the_default() -> None:
    """Under either name."""
    loaded = load_config(None, [*VERL, "rollout.n=5", f"{ACTOR}.optim.betas=[0.8, 0.999]", "data.train_batch_size=512"])
    config = loaded.config
    assert (config.rollout.n, config.actor.adam_beta1, config.critic.adam_beta1) == (5, 0.8, 0.8)
    assert "ignored: critic.adam_beta1=0.9 (verl's default), actor.adam_beta1 decides" in loaded.notes
    assert (config.data.train_batch_size, config.algorithm.adv_estimator) == (512, "gae")


@pytest.mark.parametrize(
    ("recipe", "overrides", "is_verls"),
    [
        ("actor_rollout_ref: {rollout: {n: 8}}\n", [], True),
        ("model: {path: p}\ntrainer: {n_gpus_per_node: 6}\nactor_rollout_ref: {rollout: {n: 8}}\n", [], True),
        ("model: {path: p}\nactor_rollout_ref: {rollout: {n: 8}}\n", [], False),
        ("actor: {lr: 1.0e-6}\nactor_rollout_ref: {rollout: {n: 8}}\n", [], False),
        ("model: {path: p}\n", [f"{ROLLOUT}.n=8", "trainer.n_gpus_per_node=8"], False),
        ("", ["model.path=p", f"{ROLLOUT}.n=8"], False),
    ],
)
def test_what_makes_a_recipe_verls(tmp_path: Path, recipe: str, overrides: list[str], is_verls: bool) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(recipe)
    loaded = load_config(path if recipe else None, [*MINIMAL, *overrides] if recipe else [*MINIMAL[1:], *overrides])
    assert (loaded.config.algorithm.adv_estimator == "gae") == is_verls


def test_sections_of_models_that_the_run_does_not_have_are_said() -> None:
    overrides = ["algorithm.adv_estimator=grpo", "critic.optim.lr=1e-5", "critic.model.path=v"]
    overrides.append("actor_rollout_ref.ref.model.path=r")
    notes = load_config(None, [*VERL, *overrides]).notes
    assert any("2 settings of critic" in note and "adv_estimator=grpo" in note for note in notes)
    assert any("reference.path='r'" in note and "without a KL term" in note for note in notes)
    with_both = [*VERL, "critic.optim.lr=1e-5", overrides[-1], f"{ACTOR}.use_kl_loss=true"]
    assert not any("there is no" in note for note in load_config(None, with_both).notes)


def test_hydra_files_are_merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of the user's over verl's names, a file beside it, a group in a package; the later value wins."""
    (tmp_path / "config/sampling").mkdir(parents=True)
    (tmp_path / "config/dapo.yaml").write_text(
        "hydra: {searchpath: [file://x]}\ndefaults: [ppo_megatron_trainer, base, sampling@actor_rollout_ref.rollout: "
        "many, actor@actor_rollout_ref.actor: megatron_actor, _self_]\ndata: {train_batch_size: 512}\n"
    )
    (tmp_path / "config/base.yaml").write_text("data: {train_batch_size: 64, max_response_length: 99}\n")
    (tmp_path / "config/sampling/many.yaml").write_text("n: 16\n")
    monkeypatch.chdir(tmp_path)
    for flags in (["--config-path=config", "--config-name=dapo"], ["-cp", "config", "-cn", "dapo.yaml"]):
        config = load_config(None, [*flags, *VERL, "data.max_prompt_length=77"]).config
        assert (config.data.train_batch_size, config.data.max_response_length, config.rollout.n) == (512, 99, 16)
        assert config.data.max_prompt_length == 77 and config.algorithm.adv_estimator == "gae"
        assert config.actor.recompute_granularity == "none", "the engine is Megatron"
    assert load_config(tmp_path / "config/dapo.yaml", VERL).config.rollout.n == 16
    assert load_config(None, ["--config-path=absent", "--config-name", "ppo_trainer", *VERL]).config.rollout.n == 1
    with pytest.raises(UserError, match=r"--config-name mine: there is no config/mine.yaml"):
        load_config(None, ["--config-path=config", "--config-name=mine", *VERL])
    (tmp_path / "config/base.yaml").unlink()
    with pytest.raises(UserError, match=r"defaults: 'base': there is no config/base.yaml"):
        load_config(None, ["--config-path=config", "--config-name=dapo", *VERL])


def test_asynchronous_training_is_a_schedule() -> None:
    """64 prompts * 2 batches * 4 steps between two updates; engines behind the ranks of the trainer."""
    names = ["async_training.staleness_threshold=0.5", "async_training.trigger_parameter_sync_step=4"]
    names += ["async_training.require_batches=2", "rollout.total_rollout_steps=5120", "rollout.n_gpus_per_node=4"]
    names += [
        f"{ACTOR}.ppo_mini_batch_size=64",
        "data.train_batch_size=0",
        "algorithm.rollout_correction.bypass_mode=true",
    ]
    names += ["actor_rollout_ref.hybrid_engine=false", "rollout.nnodes=1", "trainer.n_gpus_per_node=4"]
    loaded = load_config(None, [*VERL, *names])
    schedule, placement = loaded.config.schedule, loaded.config.placement
    assert (schedule.max_staleness, schedule.updates, loaded.num_ranks) == (1, "in_flight", 8)
    assert (placement.actor, placement.reference, placement.rollout) == ("0-3", "0-3", "4-7")
    assert (loaded.config.data.train_batch_size, loaded.config.trainer.total_steps) == (512, 10)
    assert loaded.config.algorithm.importance_sampling == "bypass"
    with pytest.raises(UserError, match="is no number"):
        load_config(None, [*VERL, *names, "async_training.require_batches=many"])


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["bypass_mode=true", "rollout_is=token"], ("bypass", 0.5, 2.0)),
        (["rollout_is=sequence", "rollout_is_threshold=5"], ("product-truncate", 0.5, 5.0)),
        (["rollout_is=token", "rollout_is_threshold=0.4_4.0"], ("token-mask", 0.4, 4.0)),
        (["rollout_is_threshold=3.0"], ("none", 0.5, 3.0)),
    ],
)
def test_the_correction_of_the_engine(names: list[str], expected: tuple[str, float, float]) -> None:
    algorithm = load(*(f"algorithm.rollout_correction.{name}" for name in names)).config.algorithm
    assert (algorithm.importance_sampling, algorithm.importance_low, algorithm.importance_high) == expected


def test_adapters_have_the_scale_of_the_pair_that_is_used() -> None:
    model = "actor_rollout_ref.model"
    both = [f"{model}.lora_rank=8", f"{model}.lora.rank=0", f"{model}.lora.alpha=32", f"{model}.lora.merge=false"]
    config = load_config(None, [*VERL, *both]).config
    assert (config.actor.lora.rank, config.actor.lora.alpha, config.hybrid.lora) == (8, 16, "adapter")
    assert load_config(None, [*VERL, *both, f"{model}.lora_rank=0"]).config.actor.lora.rank == 0


def test_a_budget_per_gpu_counts_the_ranks_that_share_a_sequence() -> None:
    given = [f"{ACTOR}.use_dynamic_bsz=true", f"{ACTOR}.ppo_max_token_len_per_gpu=3000"]
    actor = load(*given, f"{ACTOR}.ulysses_sequence_parallel_size=4").config.actor
    assert (actor.max_tokens_per_microbatch, actor.context_parallel_size) == (12000, 4)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("reference.max_tokens_per_microbatch", "its passes take the actor's budget, with the same log-probs"),
        ("actor_rollout_ref.ref.log_prob_max_token_len_per_gpu", "log-probs are computed in microbatches of tokens"),
    ],
)
def test_a_token_budget_of_the_reference_is_put_aside(name: str, reason: str) -> None:
    plain, given = load(f"{ACTOR}.use_kl_loss=true"), load(f"{ACTOR}.use_kl_loss=true", f"{name}=9000")
    assert given.notes[-1] == f"ignored: {name}=9000 (command line), {reason}" and given.config == plain.config
    assert load(f"{ACTOR}.use_kl_loss=true", f"{name}=null").notes == plain.notes


@pytest.mark.parametrize("name", ["fsdp_config.fsdp_size", "fsdp.fsdp_size", "veomni.fsdp_size"])
def test_shards_within_groups_of_ranks_are_those_of_stage_3(name: str) -> None:
    """Without `reshard_after_forward` nothing but optimizer states is sharded, and a note says so."""
    size, stage = f"{ACTOR}.{name}", f"{ACTOR}.fsdp_config.reshard_after_forward=true"
    found = load(f"{size}=8", stage)
    assert (found.config.actor.zero_stage, found.config.actor.zero_shard_size) == (3, 8)
    assert load(f"{size}=-1", stage).config.actor.zero_shard_size is None
    assert not [note for note in found.notes if "shard" in note]
    found = load(f"{size}=8", f"{ACTOR}.strategy=fsdp", "trainer.nnodes=2")
    assert (found.config.actor.zero_stage, found.config.actor.zero_shard_size) == (1, None)
    (said,) = (one for one in found.notes if "shard_size" in one)
    assert said.startswith("ignored: actor.zero_shard_size=8") and said.endswith("zero_stage is 3 for no role")
    assert load(f"{size}=-1").notes == []


def test_every_target_is_a_setting() -> None:
    targets = {alias.target for alias in ALIASES.values() if isinstance(alias, Renamed | SameAs)}
    targets |= {target for group in GROUPS for target in group.targets.values()}
    assert targets <= set(list_fields() | list_options())


def test_no_name_has_two_meanings() -> None:
    names = [*aliases._OF_SFT[0], *(name for group in aliases._OF_SFT[1] for name in group.names)]
    assert len(names) == len(set(names)) == len(aliases.alias_targets())


def test_the_page_of_names_is_in_step() -> None:
    """`python tools/make_docs.py` fixes it."""
    page = format_page()
    assert (ROOT / "docs/verl_keys.md").read_text() == page
    names = [*ALIASES, *PATTERNS, *(name for group in GROUPS for name in group.names)]
    assert all(f"`{name}`" in page for name in names)


def test_settings_that_are_gone_are_read_where_they_say_what_is_done(tmp_path: Path) -> None:
    """The config.yaml of an earlier run holds every setting, with its default."""
    recipe = tmp_path / "config.yaml"
    recipe.write_text(
        "model: {path: m}\ndata: {train_files: [a], train_batch_size: 2, validation_batch_size: null}\n"
        "trainer: {log_validation: true, debug_rank: null}\ncheckpoint: {keep_best: true, max_failed_saves: 3}\n"
        "observability: {status_token: true, explain: false}\nhybrid: {alias_weights: true}\n"
        "reward: {service_max_answer_bytes: 67108864}\n"
        "reward_model: {recompute_granularity: none}\nrollout: {server: {start_seconds: 600.0, restarts: 3}}\n"
        "teachers: {code: {path: t, recompute_granularity: full, virtual_pipeline_model_parallel_size: null}}\n"
        "critic: {num_layers_in_first_pipeline_stage: null, virtual_pipeline_model_parallel_size: 1}\n"
    )
    loaded = load_config(recipe, ["algorithm.distillation.coef=1"])
    assert [note.partition("=")[0] for note in loaded.notes] == ["ignored: teachers.code.recompute_granularity"]
    for setting, flag in (("observability.explain=true", "--explain"), ("trainer.debug_rank=1", "--debug-rank R")):
        with pytest.raises(UserError) as caught:
            load_config(recipe, ["algorithm.distillation.coef=1", setting])
        assert caught.value.expected.endswith(f": give the flag {flag}")
    recipe.write_text(recipe.read_text().replace("keep_best: true", "keep_best: false"))
    with pytest.raises(UserError, match=r"checkpoint.keep_best = False"):
        load_config(recipe, ["algorithm.distillation.coef=1"])


@pytest.mark.parametrize(
    ("recipe", "overrides", "name", "expected"),
    [
        ("observability: {tensorboard: true, wandb: off, trackers: []}", [], "observability.trackers", ["tensorboard"]),
        ("observability: {tensorboard: false, wandb: off, trackers: []}", [], "observability.trackers", []),
        (
            "observability: {tensorboard: true, wandb: offline, trackers: []}",
            [],
            "observability.trackers",
            ["tensorboard", "wandb-offline"],
        ),
        ("observability: {wandb: online}", [], "observability.trackers", ["tensorboard", "wandb"]),
        ("observability: {wandb: online}", ["observability.trackers=[]"], "observability.trackers", []),
        (
            "observability: {trackers: [wandb, tensorboard]}",
            ["observability.wandb=offline"],
            "observability.trackers",
            ["tensorboard", "wandb-offline"],
        ),
        ("observability: {status_host: 127.0.0.1, status_port: null}", [], "observability.status_port", None),
        (
            "observability: {status_host: 127.0.0.1, status_port: 0}",
            [],
            "observability.status_address",
            ("127.0.0.1", 0),
        ),
        ("observability: {status_host: 0.0.0.0, status_port: 9}", [], "observability.status_port", "0.0.0.0:9"),
        (
            "observability: {status_host: 0.0.0.0, status_port: 9}",
            ["observability.status_port=8"],
            "observability.status_address",
            ("127.0.0.1", 8),
        ),
        (
            "observability: {status_port: 0.0.0.0:9}",
            ["observability.status_host=localhost"],
            "observability.status_address",
            ("localhost", 9),
        ),
        ("rollout: {async_scheduling: null, engine_options: {}}", [], "rollout.engine_options", {}),
        ("rollout: {async_scheduling: false}", [], "rollout.engine_options", {"async_scheduling": False}),
        (
            "rollout: {engine_options: {block_size: 16}}",
            ["rollout.async_scheduling=true"],
            "rollout.engine_options",
            {"block_size": 16, "async_scheduling": True},
        ),
        ("rollout: {stop: [], stop_token_ids: []}", [], "rollout.stop", []),
        ("rollout: {stop: ['7'], stop_token_ids: [7]}", [], "rollout.stop", ["7", 7]),
        ("rollout: {stop_token_ids: [7]}", ['rollout.stop=[8,"8"]'], "rollout.stop", [8, "8"]),
        ("rollout: {stop: x}", ["rollout.stop_token_ids=9"], "rollout.stop", ["x", 9]),
        ("layout: {mode: given, lengths: null}", [], "layout.mode", "given"),
        ("layout: {mode: auto, lengths: a.txt}", ["trainer.seed=2"], "layout.mode", "auto a.txt"),
        ("trainer: {save_freq: 0, save_final: true}", [], "trainer.save_freq", 0),
        ("trainer: {save_freq: 0, save_final: false}", [], "trainer.save_freq", None),
        ("trainer: {save_freq: 0}", ["trainer.save_final=false"], "trainer.save_freq", None),
        ("trainer: {save_final: false}", ["trainer.save_freq=0"], "trainer.save_freq", 0),
        ("observability: {trackers: [], traces: off}", [], "observability.trackers", []),
        ("observability: {traces: otlp}", [], "observability.trackers", ["tensorboard", "otlp"]),
        ("observability: {trackers: [otlp, wandb]}", ["observability.traces=off"], "observability.trackers", ["wandb"]),
    ],
)
def test_settings_of_an_earlier_run_that_are_parts_of_others_now(
    tmp_path: Path, recipe: str, overrides: list[str], name: str, expected: object
) -> None:
    """Its config.yaml has both; on the command line, the new name decides, or an earlier one changes its part."""
    (path := tmp_path / "config.yaml").write_text(recipe)
    loaded = load_config(path, [*MINIMAL, *overrides])
    assert value_of(loaded, name) == expected and loaded.notes == []


def test_the_last_step_is_saved_with_those_before() -> None:
    loaded = load("trainer.save_freq=5", "trainer.save_final=false")
    assert loaded.config.trainer.save_freq == 5 and loaded.notes == [
        "ignored: trainer.save_final=False (command line), with trainer.save_freq=5 the last step is saved, too"
    ]


_OLD = "function: null, components: []"
_SUM = "['1.0 math', '0@1,2@5  math >= 1', '0.5 f.py:math if math >= 1']"
_SUM_OF_ANY = ["1.0 math_any", "0@1,2@5  math_any >= 1", "0.5 f.py:math if math >= 1"]


@pytest.mark.parametrize(
    ("section", "overrides", "leaf", "expected", "noted"),
    [
        (f"rule: math, answer: marked, {_OLD}", [], "function", "math", ""),
        (f"rule: exact, answer: marked, {_OLD}", [], "function", "exact", ""),
        (f"rule: math, answer: any, {_OLD}", [], "function", "math_any", ""),
        ("answer: any", [], "function", "math_any", ""),
        (f"rule: exact, answer: any, {_OLD}", [], "function", "exact", "answer"),
        ("rule: math, answer: marked, function: f.py:g, components: []", [], "function", "f.py:g", ""),
        ("rule: exact, answer: any, function: f.py:g", [], "function", "f.py:g", "rule answer"),
        (f"rule: math, answer: any, function: null, components: {_SUM}", [], "components", _SUM_OF_ANY, ""),
        (f"rule: math, answer: any, function: null, components: {_SUM}", [], "function", "math", ""),
        ("components: [1.0 exact], answer: any", [], "components", ["1.0 exact"], "answer"),
        # A function counts before a rule, in whichever place; null takes it back.
        ("function: f.py:g", ["reward.rule=exact"], "function", "f.py:g", "rule"),
        ("rule: exact", ["reward.function=f.py:g"], "function", "f.py:g", "rule"),
        ("function: f.py:g", ["reward.function=null"], "function", "math", ""),
        ("function: f.py:g, rule: exact", ["reward.function=null"], "function", "exact", ""),
        ("function: f.py:g", ["reward.function=null", "reward.rule=format"], "function", "format", ""),
        # A recipe of today has its rules there.
        ("function: exact", ["reward.rule=math"], "function", "math", ""),
        ("function: exact", ["reward.function=null"], "function", "exact", ""),
        ("rule: exact", ["reward.function=format"], "function", "format", "rule"),
        ("rule: exact, function: format", [], "function", "format", "rule"),
        # An answer belongs to the rule, whichever of them the command line has.
        (f"rule: math, {_OLD}", ["reward.answer=any"], "function", "math_any", ""),
        ("answer: any", ["reward.rule=math"], "function", "math_any", ""),
        ("answer: any", ["reward.answer=marked"], "function", "math", ""),
        ("answer: any", ["reward.components=[2 math]"], "components", ["2 math_any"], ""),
        ("function: math_any", ["reward.answer=marked"], "function", "math", ""),
        ("components: [1 math_any, 1 exact]", ["reward.answer=marked"], "components", ["1 math", "1 exact"], ""),
        ("answer: marked, function: math_any", [], "function", "math_any", ""),
    ],
)
def test_rules_and_answers_of_an_earlier_run_are_functions(
    tmp_path: Path, section: str, overrides: list[str], leaf: str, expected: object, noted: str
) -> None:
    (path := tmp_path / "config.yaml").write_text(f"reward: {{{section}}}")
    loaded = load_config(path, [*MINIMAL, *overrides])
    assert getattr(loaded.config.reward, leaf) == expected
    assert [note.partition("=")[0] for note in loaded.notes] == [f"ignored: reward.{name}" for name in noted.split()]


@pytest.mark.parametrize(
    ("section", "own", "expected", "components"),
    [
        ("rule: math", "rule: exact, answer: any", "exact", []),
        ("function: f.py:g", "rule: math", "math", []),
        ("answer: any, components: [1 exact]", "rule: math", "math_any", []),
        ("rule: math, answer: any", "answer: marked", "math", []),
        ("function: f.py:g", "answer: any", "f.py:g", []),
        ("components: [1 math, 2 exact]", "answer: any", "math", ["1 math_any", "2 exact"]),
        ("answer: any", "components: [1 math], function: null", "math", ["1 math_any"]),
        ("answer: any", "function: null", "math_any", []),
    ],
)
def test_rules_and_answers_of_earlier_sources(
    tmp_path: Path, section: str, own: str, expected: str, components: list[str]
) -> None:
    """Their own, or else the run's: an answer of the run belongs to a rule of the source, too."""
    source = f"{{name: sums, files: [a.jsonl], reward: {{{own}}}}}"
    (path := tmp_path / "config.yaml").write_text(f"reward: {{{section}}}\ndata: {{sources: [{source}]}}\n")
    reward = load_config(path, [one for one in MINIMAL if "train_files" not in one]).config.by_source["sums"].reward
    assert (reward.function, reward.components) == (expected, components)


def test_an_earlier_rule_or_answer_that_there_is_not() -> None:
    for setting, found, hint in (
        ("reward.rule=exat", "reward.function = 'exat' names neither a rule nor a function", "did you mean 'exact'?"),
        ("reward.answer=all", "reward.answer = 'all' is not known", "set reward.function=math or reward.function="),
    ):
        with pytest.raises(UserError, match=found) as caught:
            load_config(None, [*MINIMAL, setting])
        assert "command line" in caught.value.source and hint in caught.value.hint and caught.value.expected


def test_the_critic_has_the_betas_of_the_actor(tmp_path: Path) -> None:
    """Others are refused where there is a critic; the config.yaml of a run without one has the critic's defaults."""
    recipe = tmp_path / "config.yaml"
    recipe.write_text("actor: {adam_beta1: 0.9, adam_beta2: 0.999}\ncritic: {adam_beta1: 0.9, adam_beta2: 0.95}\n")
    loaded = load_config(recipe, MINIMAL)
    assert loaded.notes == [f"ignored: critic.adam_beta2=0.95 ({recipe}:2), there is no critic"]
    assert loaded.config.critic.adam_beta2 == 0.999
    with pytest.raises(UserError) as caught:
        load_config(recipe, [*MINIMAL, "algorithm.adv_estimator=gae"])
    assert caught.value.found == f"critic.adam_beta2 = 0.95, but actor.adam_beta2=0.999 ({recipe}:1)"
    loaded = load_config(recipe, [*MINIMAL, "algorithm.adv_estimator=gae", "actor.adam_beta2=0.95"])
    assert (loaded.notes, loaded.config.critic.adam_beta2) == ([], 0.95)
    with pytest.raises(UserError, match="critic.adam_beta1 = 0.8, but actor.adam_beta1"):
        load_config(recipe, [*MINIMAL, "algorithm.adv_estimator=gae", "critic.adam_beta1=0.8"])


def test_two_settings_of_an_earlier_run_that_are_one_now_must_agree(tmp_path: Path) -> None:
    """Its config.yaml has both, the one that nobody set with its default."""
    recipe, text = tmp_path / "config.yaml", "reward: {timeout_seconds: 60.0, service_timeout_seconds: %s}\n"
    recipe.write_text(text % 60)
    assert load_config(recipe, MINIMAL).config.reward.timeout_seconds == 60.0
    recipe.write_text(text % 5.0)
    with pytest.raises(UserError) as caught:
        load_config(recipe, MINIMAL)
    assert caught.value.found == "reward.service_timeout_seconds = 5.0, and reward.timeout_seconds = 60.0"
    assert caught.value.expected == "one value: both are reward.timeout_seconds now"
    assert load_config(recipe, [*MINIMAL, "reward.timeout_seconds=7"]).config.reward.timeout_seconds == 7.0


def test_no_name_of_ours_is_hidden_by_an_alias() -> None:
    """A verl name that is also ours may only translate values, never point elsewhere."""
    shared = {name: ALIASES[name] for name in ALIASES if name in list_fields()}
    assert all(isinstance(alias, Renamed) and alias.target == name for name, alias in shared.items())


@pytest.mark.parametrize(
    ("override", "name", "expected"),
    [
        ("trainer.test_freq=-1", "trainer.test_freq", 0),
        ("trainer.save_freq=-1", "trainer.save_freq", None),
        ("trainer.total_training_steps=7", "trainer.total_steps", 7),
        ("trainer.default_local_dir=out", "trainer.run_dir", "out"),
        ("algorithm.norm_adv_by_std_in_grpo=false", "algorithm.norm_adv_by_std", False),
        (f"{ACTOR}.kl_loss_type=mse", "algorithm.kl_type", "k2"),
        (f"{ACTOR}.kl_loss_type=kl", "algorithm.kl_type", "k1"),
        (f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm", "algorithm.loss_agg_mode", "constant"),
        (f"{ACTOR}.loss_agg_mode=token-sum", "algorithm.loss_agg_mode", "token-sum"),
        (f"{ACTOR}.policy_loss.loss_mode=dro", "algorithm.policy_loss", "dro"),
        (f"{ACTOR}.optim.lr_warmup_steps=-1", "actor.lr_warmup_steps", 0),
        (f"{ACTOR}.optim.lr_warmup_steps=5", "actor.lr_warmup_steps", 5),
        (f"{ACTOR}.grad_clip=0.5", "actor.clip_grad", 0.5),
        (f"{ACTOR}.clip_ratio=0.1", "algorithm.clip_eps_low", 0.1),
        (f"{ROLLOUT}.name=hf", "rollout.engine", "hf"),
        (f"{ROLLOUT}.val_kwargs.temperature=0.6", "rollout.validation_temperature", 0.6),
        ("data.truncation=left", "data.overlong_prompts", "truncate"),
        ("data.truncation=right", "data.overlong_prompts", "truncate_right"),
        ("data.truncation=middle", "data.overlong_prompts", "truncate_middle"),
        ("data.reward_fn_key=data_source", "reward.function", "by_data_source"),
        (
            "+data.apply_chat_template_kwargs.enable_thinking=false",
            "data.apply_chat_template_kwargs",
            {"enable_thinking": False},
        ),
        (f"{ACTOR}.loss_scale_factor=512", "algorithm.loss_scale_factor", 512.0),
        ("data.truncation=error", "data.overlong_prompts", "error"),
        ("actor_rollout_ref.model.enable_gradient_checkpointing=false", "actor.recompute_granularity", "none"),
        ("custom_reward_function.path=r.py", "reward.function", "r.py:compute_score"),
        (f"{ACTOR}.kl_loss_coef=0.01", "algorithm.kl_coef", 0.01),
        ("algorithm.adv_estimator=rloo", "algorithm.adv_estimator", "rloo"),
        ("algorithm.adv_estimator=grpo_vectorized", "algorithm.adv_estimator", "grpo"),
        ("algorithm.adv_estimator=reinforce_plus_plus", "algorithm.adv_estimator", "reinforce_plus_plus"),
        ("algorithm.adv_estimator=remax", "algorithm.adv_estimator", "remax"),
        ("algorithm.gamma=0.99", "algorithm.gamma", 0.99),
        ("algorithm.lam=0.95", "algorithm.gae_lambda", 0.95),
        (f"{ACTOR}.clip_ratio_c=3.0", "algorithm.dual_clip", 3.0),
        (f"{ACTOR}.policy_loss.loss_mode=vanilla", "algorithm.policy_loss", "ppo"),
        (f"{ACTOR}.policy_loss.loss_mode=gspo", "algorithm.policy_loss", "gspo"),
        (f"{ACTOR}.policy_loss.loss_mode=gpg", "algorithm.policy_loss", "policy_gradient"),
        (f"{ACTOR}.policy_loss.loss_mode=gspo", "algorithm.loss_agg_mode", "seq-mean-token-mean"),
        (f"{ACTOR}.policy_loss.loss_mode=sapo", "algorithm.loss_agg_mode", "seq-mean-token-mean"),
        (f"{ACTOR}.policy_loss.loss_mode=geo_mean", "algorithm.loss_agg_mode", "seq-mean-token-mean"),
        (f"{ACTOR}.policy_loss.loss_mode=clip_cov", "algorithm.loss_agg_mode", "token-mean"),
        (f"{ACTOR}.policy_loss.loss_mode=vanilla", "algorithm.dual_clip", 3.0),
        (f"{ACTOR}.policy_loss.loss_mode=dppo_tv", "algorithm.dual_clip", 3.0),
        (f"{ACTOR}.policy_loss.loss_mode=kl_cov", "algorithm.dual_clip", None),
        (f"{ACTOR}.policy_loss.clip_cov_ub=9", "algorithm.options.clip_cov.high", 9.0),
        (f"{ACTOR}.policy_loss.ppo_kl_coef=1", "algorithm.options.kl_cov.coef", 1.0),
        (f"{ACTOR}.tau_neg=2", "algorithm.options.sapo.tau_neg", 2.0),
        (f"{ACTOR}.kl_loss_type=abs", "algorithm.kl_type", "abs"),
        ("algorithm.adv_estimator=optimal_token_baseline", "algorithm.adv_estimator", "optimal_token_baseline"),
        ("algorithm.rollout_correction.rollout_is=sequence", "algorithm.importance_sampling", "product-truncate"),
        ("algorithm.filter_groups.enable=true", "algorithm.dynamic_sampling", True),
        ("algorithm.filter_groups.max_num_gen_batches=5", "algorithm.max_sampling_rounds", 5),
        ("critic.optim.lr=2e-5", "critic.lr", 2e-5),
        ("critic.model.path=critic", "critic.path", "critic"),
        ("critic.cliprange_value=0.2", "critic.value_clip", 0.2),
        ("critic.megatron.pipeline_model_parallel_size=2", "critic.pipeline_model_parallel_size", 2),
        ("critic.ppo_max_token_len_per_gpu=9000", "critic.max_tokens_per_microbatch", 9000),
        ("critic.ppo_micro_batch_size_per_gpu=3", "critic.max_tokens_per_microbatch", 3 * 2048),
        ("critic.model.enable_gradient_checkpointing=true", "critic.recompute_granularity", "full"),
        ("critic.model.fsdp_config.optimizer_offload=true", "critic.offload_optimizer", True),
        ("actor_rollout_ref.actor.fsdp_config.reshard_after_forward=true", "actor.zero_stage", 3),
        ("critic.model.fsdp_config.reshard_after_forward=false", "critic.zero_stage", 1),
        (f"{ROLLOUT}.val_kwargs.n=4", "rollout.validation_n", 4),
        (f"{ACTOR}.ppo_micro_batch_size_per_gpu=2", "actor.max_tokens_per_microbatch", 2 * 2048),
        (f"{ACTOR}.optim.betas=[0.8, 0.9]", "actor.adam_beta1", 0.8),
        ("actor_rollout_ref.ref.fsdp_config.param_offload=true", "reference.offload", True),
        (f"{ACTOR}.megatron.sequence_parallel=true", "actor.sequence_parallel", False),
        ("algorithm.rollout_correction.rollout_is=token", "algorithm.importance_sampling", "token-truncate"),
        ("trainer.resume_mode=disable", "checkpoint.resume", "never"),
        ("trainer.max_actor_ckpt_to_keep=3", "checkpoint.keep_last", 3),
        ("data.val_max_samples=-1", "data.validation_limit", None),
        ("reward_model.forward_max_token_len_per_gpu=5000", "reward_model.max_tokens_per_microbatch", 5000),
        ("algorithm.kl_ctrl.kl_coef=0.01", "algorithm.kl_coef", 0.01),
        ("trainer.logger=wandb", "observability.trackers", ["wandb"]),
        ("trainer.logger=[console,file]", "observability.trackers", []),
        ("report_to=[wandb,tensorboard]", "observability.trackers", ["wandb", "tensorboard"]),
        ("report_to=all", "observability.trackers", ["tensorboard"]),
        (f"{ACTOR}.optim.eps=1e-5", "actor.adam_eps", 1e-5),
        ("critic.optim.eps=1e-8", "actor.adam_eps", 1e-8),
    ],
)
def test_values(override: str, name: str, expected: object) -> None:
    assert value_of(load(override), name) == expected


def test_own_names_of_trackers_win_and_unknown_ones_get_a_note() -> None:
    loaded = load("observability.trackers=wandb-offline", "trainer.logger=[wandb,clearml]", "report_to=none")
    assert loaded.config.observability.trackers == ["wandb-offline"]
    (note,) = loaded.notes
    assert note.endswith(", there is no tracker clearml (docs/watching.md#trackers)")


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


def test_kl_in_the_reward_takes_the_controller() -> None:
    """verl's estimator there is k1 and its coefficient 0.001, unless they are given."""
    algorithm = load("algorithm.use_kl_in_reward=true").config.algorithm
    assert (algorithm.kl_in, algorithm.kl_coef, algorithm.kl_type) == ("reward", 0.001, "k1")
    loaded = load(
        "algorithm.use_kl_in_reward=true",
        "algorithm.kl_penalty=low_var_kl",
        "algorithm.kl_ctrl.kl_coef=0.2",
        "algorithm.kl_ctrl.type=adaptive",
        "algorithm.kl_ctrl.target_kl=0.3",
        "algorithm.kl_ctrl.horizon=500",
        f"{ACTOR}.use_kl_loss=false",
        f"{ACTOR}.kl_loss_coef=0.5",
    )
    algorithm = loaded.config.algorithm
    assert (algorithm.kl_in, algorithm.kl_coef, algorithm.kl_type) == ("reward", 0.2, "k3")
    assert (algorithm.kl_target, algorithm.kl_horizon) == (0.3, 500.0)
    assert algorithm.kl_target_per == "token"
    assert [note.split("=")[0] for note in loaded.notes] == [f"ignored: {ACTOR}.kl_loss_coef"]


def test_reward_model_becomes_the_reward() -> None:
    config = load("reward_model.enable=true", "reward_model.model.path=rm").config
    assert (config.reward_model.path, config.reward.components) == ("rm", ["1.0 model"])
    loaded = load("reward_model.enable=false", "reward_model.model.path=rm")
    assert loaded.config.reward_model.path is None and "ignored: reward_model.model.path" in loaded.notes[0]


@pytest.mark.parametrize("place", ["overlong_buffer", "reward_kwargs.overlong_buffer_cfg"])
def test_overlong_buffer(place: str) -> None:
    names = [f"reward_model.{place}.{leaf}" for leaf in ("len=128", "penalty_factor=0.5", "log=false")]
    reward = load(f"reward_model.{place}.enable=true", *names).config.reward
    assert (reward.overlong_buffer_length, reward.overlong_penalty) == (128, 0.5)
    loaded = load(f"reward_model.{place}.enable=false", *names)
    assert loaded.config.reward.overlong_buffer_length == 0 and len(loaded.notes) == 3


def test_the_target_of_the_kl_has_the_unit_of_who_names_it() -> None:
    """verl's is per token, also if only its controller is switched on; the native name counts responses."""
    ours = ["algorithm.kl_in=reward", "algorithm.kl_coef=0.1", "algorithm.kl_controller=adaptive"]
    theirs = ["algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.type=adaptive"]
    algorithm = load(*ours, "algorithm.kl_target=0.2").config.algorithm
    assert (algorithm.kl_target_per, algorithm.kl_target) == ("response", 0.2)
    assert load(*ours).config.algorithm.kl_target == 0.1
    fixed = load(*ours[:2], "algorithm.kl_controller=fixed", "algorithm.kl_target=0.1")
    assert fixed.config.algorithm.kl_target is None and fixed.notes == []
    algorithm = load(*theirs).config.algorithm
    assert (algorithm.kl_target_per, algorithm.kl_target) == ("token", 0.1)
    assert load(*theirs, "algorithm.kl_target_per=response").config.algorithm.kl_target_per == "response"


def test_dual_clip_belongs_to_the_clipped_loss() -> None:
    loaded = load(f"{ACTOR}.policy_loss.loss_mode=gspo", f"{ACTOR}.clip_ratio_c=3.0")
    assert loaded.config.algorithm.dual_clip is None and any("'gspo' has no dual clip" in note for note in loaded.notes)


VERL_MODEL = "actor_rollout_ref: {model: {path: policy}}\n"
OWN_MODEL = "model: {path: policy}\n"


@pytest.mark.parametrize(
    ("recipe", "overrides", "expected"),
    [
        (VERL_MODEL, [], 3.0),
        (VERL_MODEL, ["model.path=elsewhere"], 3.0),
        (VERL_MODEL, [f"{ACTOR}.clip_ratio_c=5"], 5.0),
        (VERL_MODEL, ["algorithm.dual_clip=null"], None),
        (VERL_MODEL, ["algorithm.policy_loss=gspo"], None),
        (VERL_MODEL, [f"{ACTOR}.policy_loss.loss_mode=cispo"], None),
        (OWN_MODEL, [], None),
        (OWN_MODEL, ["actor_rollout_ref.model.path=elsewhere", f"{ROLLOUT}.n=4"], None),
        ("", ["actor_rollout_ref.model.path=policy"], 3.0),
        ("", ["model.path=policy", f"{ROLLOUT}.n=4"], None),
    ],
)
def test_dual_clip_of_a_recipe_that_does_not_write_it(
    tmp_path: Path, recipe: str, overrides: list[str], expected: float | None
) -> None:
    """verl's vanilla loss always has one of 3.0; a recipe is verl's if it names the policy by verl's name."""
    path = tmp_path / "recipe.yaml"
    path.write_text(recipe)
    loaded = load_config(path if recipe else None, [*MINIMAL[1:], *overrides])
    assert loaded.config.algorithm.dual_clip == expected
    assert any("algorithm.dual_clip=3.0" in note for note in loaded.notes) == (expected == 3.0)


def test_losses_that_verl_averages_by_sequence(tmp_path: Path) -> None:
    """With any loss_agg_mode, also the critic's copy of it; the native name takes precedence if given."""
    mode = f"{ACTOR}.policy_loss.loss_mode=gspo"
    loaded = load(mode, f"{ACTOR}.loss_agg_mode=token-mean", "critic.loss_agg_mode=token-mean")
    assert loaded.config.algorithm.loss_agg_mode == "seq-mean-token-mean"
    assert loaded.notes[0].startswith("assumed: algorithm.loss_agg_mode=seq-mean-token-mean ")
    assert loaded.notes[1].startswith(f"ignored: {ACTOR}.loss_agg_mode='token-mean'")
    assert "KL and entropy terms" in loaded.notes[1] and "algorithm.loss_agg_mode decides" in loaded.notes[2]
    assert load(mode, f"{ACTOR}.loss_agg_mode=seq-mean-token-mean").notes == []
    assert load(mode, "algorithm.loss_agg_mode=token-mean").config.algorithm.loss_agg_mode == "token-mean"
    assert load("algorithm.policy_loss=gspo").config.algorithm.loss_agg_mode == "token-mean"


def test_the_sum_by_a_constant_names_the_constant() -> None:
    mode = f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm"
    (note,) = load(mode).notes
    assert "divides by data.max_response_length, and verl by the longest response of each micro batch" in note
    assert load(mode, f"{ACTOR}.loss_scale_factor=1000").notes == []


def test_the_optimal_token_baseline_is_verls_in_a_recipe_of_verls() -> None:
    """Our own recipes keep theirs. The forms of other estimators are translated wherever they are written."""
    name = "algorithm.adv_estimator=optimal_token_baseline"
    assert load(name).config.algorithm.adv_estimator == "optimal_token_baseline" and load(name).notes == []
    loaded = load_config(None, ["actor_rollout_ref.model.path=m", *MINIMAL[1:], name])
    assert loaded.config.algorithm.adv_estimator == "tir_optimal_token_baseline"
    assert any(note.startswith("read as algorithm.adv_estimator=tir_optimal_token_baseline") for note in loaded.notes)
    assert load("algorithm.adv_estimator=rloo_vectorized").config.algorithm.adv_estimator == "rloo"


def test_settings_of_dro_and_gdpo() -> None:
    verl = ["algorithm.adv_estimator=gdpo", "algorithm.gdpo_reward_keys=[a,b]", "algorithm.gdpo_reward_weights=[1,0.5]"]
    loaded = load(*verl, f"{ACTOR}.policy_loss.loss_mode=dro", f"{ACTOR}.policy_loss.dro_beta=0.5")
    assert loaded.config.algorithm.options == {"dro": DroOptions(0.5), "gdpo": GdpoOptions(["a", "b"], [1.0, 0.5])}
    assert load("algorithm.policy_loss=dro").config.algorithm.options == {"dro": DroOptions(1.0)}
    assert load().config.algorithm.options == {}


@pytest.mark.parametrize(
    ("switch", "setting", "name", "expected"),
    [
        ("algorithm.filter_groups.enable=true", "algorithm.filter_groups.metric=acc", "dynamic_sampling", "acc"),
        (
            "algorithm.filter_groups.enable=true",
            "algorithm.filter_groups.metric=seq_reward",
            "dynamic_sampling",
            "reward",
        ),
        (
            "algorithm.rollout_correction.rollout_is=token",
            "algorithm.rollout_correction.rollout_is_batch_normalize=true",
            "importance_normalize",
            True,
        ),
    ],
)
def test_settings_that_need_a_switch(switch: str, setting: str, name: str, expected: object) -> None:
    """With it they count; without it they are put aside with a note."""
    loaded = load(switch, setting)
    assert getattr(loaded.config.algorithm, name) == expected and loaded.notes == []
    loaded = load(setting)
    assert not getattr(loaded.config.algorithm, name) and len(loaded.notes) == bool(expected)


def test_the_metric_of_dynamic_sampling_is_its_value() -> None:
    for names in (
        ("algorithm.filter_groups.enable=true", "algorithm.filter_groups.metric=score"),
        ("algorithm.dynamic_sampling=true", "algorithm.dynamic_sampling_metric=null"),
        ("--algorithm.dynamic_sampling", "--trainer.seed=1"),
    ):
        assert load(*names).config.algorithm.dynamic_sampling is True
    earlier = load("algorithm.dynamic_sampling=true", "algorithm.dynamic_sampling_metric=acc")
    assert earlier.config.algorithm.dynamic_sampling == "acc" and earlier.notes == []
    assert load("algorithm.dynamic_sampling=acc").config.algorithm.dynamic_sampling == "acc"
    for idle in (["algorithm.dynamic_sampling=false"], []):
        loaded = load(*idle, "algorithm.dynamic_sampling_metric=acc")
        assert loaded.config.algorithm.dynamic_sampling is False


def test_switches_of_contents_and_sampling_of_all_sets() -> None:
    loaded = load("checkpoint.save_huggingface=false", "rollout.validation_top_p=1", "rollout.validation_top_k=-1")
    assert loaded.config.checkpoint.contents == ["optimizer"] and loaded.config.rollout.validation_sets == {}
    loaded = load("rollout.validation_sets={a: {n: 2}}", "rollout.validation_top_p=0.9", "rollout.validation_top_k=5")
    assert loaded.config.rollout.validation_sets == {"a": {"n": 2}, "all": {"top_p": 0.9, "top_k": 5}}
    drawn = loaded.config.rollout.for_validation("a")
    assert (drawn.n, drawn.top_p, drawn.top_k, loaded.notes) == (2, 0.9, 5, [])


def test_no_steps_validate_only() -> None:
    files = ["data.validation_files=v.jsonl"]
    assert load(*files, "trainer.val_only=true", "trainer.total_steps=7").config.trainer.total_steps == 0
    assert load(*files, "trainer.val_only=false", "trainer.total_steps=7").config.trainer.total_steps == 7
    assert load("trainer.val_only=false").config.trainer.total_steps is None


def test_the_share_of_tokens_belongs_to_its_loss() -> None:
    both = [f"{ACTOR}.policy_loss.clip_cov_ratio=0.1", f"{ACTOR}.policy_loss.kl_cov_ratio=0.2"]
    for mode, expected in (("clip_cov", 0.1), ("kl_cov", 0.2)):
        loaded = load(f"{ACTOR}.policy_loss.loss_mode={mode}", *both)
        assert (loaded.config.algorithm.policy_loss, loaded.config.algorithm.options[mode].ratio) == (mode, expected)
        earlier = load(f"algorithm.policy_loss={mode}", "algorithm.cov_ratio=0.3", "algorithm.sapo_tau_pos=1")
        assert {name: one.ratio for name, one in earlier.config.algorithm.options.items()} == {mode: 0.3}
    assert load("algorithm.cov_ratio=0.0002", "algorithm.clip_cov_low=1").notes == []
    assert load("algorithm.cov_ratio=0.3").notes[0].startswith("ignored: algorithm.cov_ratio=0.3")


def test_budget_in_tokens_counts_with_dynamic_batches_only() -> None:
    names = [f"{ACTOR}.ppo_max_token_len_per_gpu=9000", f"{ACTOR}.ppo_micro_batch_size_per_gpu=2"]
    assert load(*names).config.actor.max_tokens_per_microbatch == 2 * 2048
    assert load(*names, f"{ACTOR}.use_dynamic_bsz=true").config.actor.max_tokens_per_microbatch == 9000


def test_resume_from_a_path() -> None:
    loaded = load("trainer.resume_mode=resume_path", "trainer.resume_from_path=run/step_10")
    assert loaded.config.checkpoint.resume == "run/step_10"
    assert "not 'resume_path'" in load("trainer.resume_from_path=run/step_10").notes[0]


def test_repetitions_must_agree(tmp_path: Path) -> None:
    """In one recipe a contradiction is refused; the command line wins, and the recipe's repetition is reported."""
    path = tmp_path / "recipe.yaml"
    path.write_text("actor_rollout_ref: {actor: {ppo_mini_batch_size: 4}}\ncritic: {ppo_mini_batch_size: 4}\n")
    assert not any("mini_batch" in note for note in load_config(path, MINIMAL).notes)
    notes = load_config(path, [*MINIMAL, "actor.ppo_mini_batch_size=2"]).notes
    assert any("critic.ppo_mini_batch_size=4" in note and "actor.ppo_mini_batch_size decides" in note for note in notes)
    path.write_text("actor_rollout_ref: {actor: {ppo_mini_batch_size: 4}}\ncritic: {ppo_mini_batch_size: 8}\n")
    with pytest.raises(UserError, match=r"critic.ppo_mini_batch_size = 8, but actor.ppo_mini_batch_size=4"):
        load_config(path, MINIMAL)


def test_settings_without_effect_are_one_note() -> None:
    loaded = load(
        "actor_rollout_ref.actor.profiler.enable=false",
        "actor_rollout_ref.actor.profiler.ranks=[]",
        "critic._target_=verl.Critic",
    )
    (note,) = loaded.notes
    assert note.startswith("ignored: 3 settings without effect on the results") and "critic._target_" in note


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
    assert loaded.config.reward.function == "math" and len(loaded.notes) == 1


def test_greedy_validation_overrules_its_temperature() -> None:
    loaded = load(f"{ROLLOUT}.val_kwargs.do_sample=false", f"{ROLLOUT}.val_kwargs.temperature=1.0")
    assert loaded.config.rollout.validation_temperature == 0.0
    assert "do_sample is false" in loaded.notes[0]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (f"{ACTOR}.kl_loss_type=k4", "one of 'low_var_kl'"),
        (f"{ACTOR}.kl_loss_type=full", "an estimate from the sampled tokens"),
        (f"{ACTOR}.policy_loss.loss_mode=clip-cov", "one of 'vanilla', 'gpg'"),
        (f"{ACTOR}.loss_agg_mode=mean", "one of 'token-mean'"),
        (f"{ACTOR}.tis_imp_ratio_cap=2", "-1: set algorithm.importance_sampling"),
        (f"{ACTOR}.optim.betas=0.9", "two numbers"),
        (f"{ACTOR}.shuffle=true", "False: there is no shuffling"),
        (f"{ROLLOUT}.multi_turn.enable=true", "agents.environment, agents.tools or agents.program"),
        (f"{ROLLOUT}.multi_turn.tool_config_path=tools.yaml", "agents.environment, agents.tools or agents.program"),
        (f"{ROLLOUT}.agent.default_agent_loop=tool_agent", "'single_turn_agent'"),
        (f"{ACTOR}.megatron.override_transformer_config.num_layers=4", "shapes come from config.json"),
        ("actor_rollout_ref.model.lora.dropout=0.1", "0: there is no dropout"),
        ("data.custom_cls.path=x.py", "None: there is no loader for verl's data set classes; name a function"),
        ("data.sampler.class_path=x.py", "None: there is no loader for verl's samplers"),
        ("fsdp=hybrid_shard auto_wrap", "set actor.zero_stage=3 and actor.zero_shard_size"),
        ("algorithm.rollout_correction.rollout_is=batch", "one of None, 'token', 'sequence'"),
        ("trainer.resume_mode=resume_path", "the directory of a checkpoint"),
        (f"{ROLLOUT}.name=trtllm", "there is no rollout.engine 'trtllm'"),
        ("reward_model.enable=true", "the directory of a reward model"),
        ("data.truncation=both", "one of 'error', 'left', 'right', 'middle'"),
        ("data.reward_fn_key=ability", "it names the column that chooses the reward"),
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
        "ignored: trainer.nnodes=2 (command line), torchrun decides the number of ranks; a dry run plans for as many "
        "as this says"
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


def test_names_of_other_projects_are_imported_for_them_only() -> None:
    """A value that verl reads in another way than we do, under a name that is ours too, opens the door as well."""
    fields = list_fields()
    for name, alias in ALIASES.items():
        values = getattr(alias, "values", ())
        for theirs, ours in values if name in fields else ():
            assert _is_ours(Setting(name, theirs, "here", 0), fields) == (theirs == ours), (name, theirs)
    own = {"trainer.save_freq": 5, "model.path": "models/x", "data.train_files": ["a.jsonl"]}
    assert all(_is_ours(Setting(name, value, "here", 0), fields) for name, value in own.items())
    foreign = {"trainer.n_gpus_per_node": 8, "model.path": "~/x", "data.train_files": ["~/a"], "trainer.run_dir": "???"}
    assert not any(_is_ours(Setting(name, value, "here", 0), fields) for name, value in foreign.items())


@pytest.mark.parametrize(
    ("given", "expected", "noted"),
    [
        (("megatron.optimizer_offload=true",), True, 0),
        (
            ("optimizer_cpu_offload=true", "optimizer_offload_fraction=1", "megatron.optimizer_offload=true"),
            "stream",
            2,
        ),
        (("optimizer_cpu_offload=true", "optimizer_offload_fraction=0.5"), "stream", 1),
        (("optimizer_cpu_offload=true", "megatron.optimizer_offload=true"), True, 1),  # a share of 0 is the default
        (("optimizer_offload_fraction=1", "use_precision_aware_optimizer=true"), False, 2),
    ],
)
def test_moments_that_are_always_on_the_host(given: tuple[str, ...], expected: Any, noted: int) -> None:
    options = f"{ACTOR}.optim.override_optimizer_config"
    loaded = load_config(None, [*MINIMAL, *(f"{ACTOR if '.' in x.split('=')[0] else options}.{x}" for x in given)])
    assert loaded.config.actor.offload_optimizer == expected
    assert sum("offload" in line or "precision" in line for line in loaded.notes) == noted


@pytest.mark.parametrize(
    ("given", "drafted", "is_noted"),
    [
        ([f"{ROLLOUT}.name=vllm"], 1, False),
        (["actor_rollout_ref.model.mtp.num_speculative_tokens=3"], 3, False),
        ([f"{ROLLOUT}.name=sglang", "rollout.server.python=python"], 0, True),
        (["actor_rollout_ref.model.mtp.enable_rollout=false"], 0, False),
    ],
)
def test_drafts_are_made_where_the_engine_can(given: list[str], drafted: int, is_noted: bool) -> None:
    """verl's vLLM drafts with the MTP layer, too; other engines sample the same distribution without."""
    loaded = load("actor_rollout_ref.model.mtp.enable_rollout=true", *given)
    assert value_of(loaded, "rollout.draft_tokens") == drafted
    assert any("this engine drafts no tokens" in note for note in loaded.notes) == is_noted


def test_one_silence_and_one_pair_of_weights() -> None:
    earlier = ["rollout.server.silent_seconds=600", "schedule.silent_seconds=15.0", "preference.undesirable_weight=0.5"]
    loaded = load(*earlier)
    assert (loaded.config.rollout.silent_seconds, loaded.config.preference.kto_weights) == (None, [1.0, 0.5])
    assert loaded.notes == []
    served = load("rollout.engine=vllm_server", "rollout.server.silent_seconds=20", "schedule.silent_seconds=15")
    assert (served.config.rollout.silent_seconds, served.notes) == (20, [])
    elastic = load("schedule.elastic=true", "trainer.run_dir=r", "placement.rollout=1-1", "schedule.silent_seconds=3")
    assert elastic.config.rollout.silent_seconds == 3
    both = load("preference.desirable_weight=2", "preference.undesirable_weight=0")
    assert both.config.preference.kto_weights == [2.0, 0.0]
