# SPDX-License-Identifier: Apache-2.0
"""Names of verl's SFT trainer: the resolved config of typical commands, its defaults and refusals.

Not covered: YAML recipes with these names in Hydra's groups; they are read as RL's are (`test_aliases.py`).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_rl.compat import sft_names
from megatron_rl.compat.kinds import Renamed
from megatron_rl.config.fields import list_fields
from megatron_rl.config.schema import RunConfig
from megatron_rl.run.loading import load_config
from megatron_rl.types import UserError

FSDP = [
    "data.train_files=train.parquet",
    "data.val_files=test.parquet",
    "data.messages_key=messages",
    "data.micro_batch_size_per_gpu=4",
    "model.path=policy",
    "optim.lr=1e-4",
    "engine=fsdp",
    "engine.ulysses_sequence_parallel_size=2",
    "trainer.default_local_dir=out",
    "trainer.logger=['console','wandb']",
]
MEGATRON = [
    "data.train_files=train.parquet",
    "data.train_batch_size=96",
    "data.max_length=2048",
    "data.pad_mode=no_padding",
    "data.truncation=error",
    "data.use_dynamic_bsz=True",
    "data.max_token_len_per_gpu=2048",
    "data.messages_key=messages",
    "model=hf_model",
    "model.path=policy",
    "engine=megatron",
    "optim=megatron",
    "optim.lr=2e-5",
    "optim.lr_warmup_steps_ratio=0.2",
    "optim.lr_warmup_init=0",
    "optim.betas=[0.9,0.95]",
    "optim.lr_decay_style=cosine",
    "optim.min_lr=2e-6",
    "engine.tensor_model_parallel_size=4",
    "engine.virtual_pipeline_model_parallel_size=null",
    "engine.sequence_parallel=true",
    "+engine.override_transformer_config.recompute_granularity=full",
    "trainer.max_ckpt_to_keep=10",
    "trainer.save_freq=500",
    "checkpoint.save_contents=[model,optimizer,extra]",
]
# Names of the trainer before, for conversations.
MULTI_TURN = [
    "data.train_files=train.parquet",
    "data.max_length=16384",
    "data.train_batch_size=32",
    "data.multiturn.enable=true",
    "data.multiturn.messages_key=prompt_messages",
    "data.multiturn.tools_key=tools",
    "data.micro_batch_size_per_gpu=4",
    "model.partial_pretrain=policy",
    "model.strategy=fsdp",
    "ulysses_sequence_parallel_size=4",
    "use_remove_padding=true",
]


def changed(config: RunConfig, *sections: str) -> dict[str, object]:
    """The settings of some sections that differ from their defaults."""
    fields = list_fields()
    found = {}
    for name, info in fields.items():
        section, _, leaf = name.partition(".")
        if section in sections and "." not in leaf:
            value = getattr(config.section(section), leaf)
            if info.required or value != info.default:
                found[name] = value
    return found


def test_a_command_for_fsdp_has_verls_defaults() -> None:
    loaded = load_config(None, FSDP)
    assert changed(loaded.config, "model", "data", "actor", "trainer", "checkpoint", "algorithm") == {
        "model.path": "policy",
        "data.train_files": ["train.parquet"],
        "data.train_batch_size": 256,
        "data.max_prompt_length": 512,
        "data.max_response_length": 512,
        "data.prompt_key": "messages",
        "actor.context_parallel_size": 2,
        "actor.max_tokens_per_microbatch": 2 * 8192,
        "actor.recompute_granularity": "full",
        "actor.lr": 1e-4,
        "actor.adam_beta2": 0.999,
        "trainer.total_epochs": 4,
        "trainer.run_dir": "out",
    }
    assert loaded.notes[0].startswith("assumed: ") and "data.train_batch_size=256" in loaded.notes[0]
    assert "read as names of verl's SFT trainer: launch/pretrain_sft.py trains with them" in loaded.notes
    (ignored,) = [note for note in loaded.notes if note.startswith("ignored: 2 settings")]
    assert ignored.endswith("data.val_files, engine") and loaded.config.observability.trackers == ["wandb"]


def test_a_command_for_megatron() -> None:
    config = load_config(None, MEGATRON).config
    assert changed(config, "data", "actor", "trainer", "checkpoint") == {
        "data.train_files": ["train.parquet"],
        "data.train_batch_size": 96,
        "data.prompt_key": "messages",
        "actor.tensor_model_parallel_size": 4,
        "actor.sequence_parallel": True,
        "actor.max_tokens_per_microbatch": 2048,
        "actor.recompute_granularity": "full",
        "actor.lr": 2e-5,
        "actor.min_lr": 2e-6,
        "actor.lr_decay_style": "cosine",
        "actor.lr_warmup_steps": 0.2,
        "trainer.total_epochs": 4,
        "trainer.save_freq": 500,
        "checkpoint.keep_last": 10,
    }
    assert (config.data.max_prompt_length, config.data.max_response_length) == (1024, 1024)


def test_a_command_of_the_trainer_before_for_conversations() -> None:
    config = load_config(None, MULTI_TURN).config
    assert changed(config, "data", "actor", "trainer") == {
        "data.train_files": ["train.parquet"],
        "data.train_batch_size": 32,
        "data.max_prompt_length": 8192,
        "data.max_response_length": 8192,
        "data.prompt_key": "prompt_messages",
        "actor.context_parallel_size": 4,
        "actor.max_tokens_per_microbatch": 4 * 16384,
        "actor.recompute_granularity": "full",
        "actor.lr": 1e-5,
        "actor.lr_decay_style": "cosine",
        "actor.lr_warmup_steps": 0.1,
        "trainer.total_epochs": 4,
    }
    assert config.model.path == "policy"
    config = load_config(None, [*MULTI_TURN, "trainer.save_freq=-1"]).config
    assert config.trainer.save_freq == 0, "that trainer saves its last step"


@pytest.mark.parametrize(
    ("override", "name", "expected"),
    [
        ("optim.min_lr_ratio=0.1", "actor.min_lr", 1e-5),
        ("optim.lr_warmup_steps=7", "actor.lr_warmup_steps", 7),
        ("optim.lr_warmup_steps=-1", "actor.lr_warmup_steps", 0),
        ("engine.tp_size=2", "actor.tensor_model_parallel_size", 2),
        ("engine.reshard_after_forward=false", "actor.zero_stage", 1),
        ("data.use_dynamic_bsz=false", "actor.max_tokens_per_microbatch", 4 * 1024),
        ("model.lora_rank=32", "actor.lora", (32, 16.0)),
        ("trainer.resume_mode=disable", "checkpoint.resume", "never"),
        ("data.truncation=right", "data.overlong_prompts", "truncate_right"),
    ],
)
def test_values(override: str, name: str, expected: object) -> None:
    section, leaf = name.split(".")
    found = getattr(
        load_config(None, [*FSDP, "optim.lr_scheduler_type=cosine", override]).config.section(section), leaf
    )
    assert ((found.rank, found.alpha) if leaf == "lora" else found) == expected


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("optim.init_lr_ratio=0.1", "0: there is no warm-up that starts above 0"),
        ("optim=automodel", "0: there is no warm-up that starts above 0"),  # its default is 0.1
        ("optim.lr_warmup_steps_ratio=1.5", "a share of the steps, below 1"),
        ("model.mtp.enable_train=true", "False: there is no training of the MTP layer in fine-tuning"),
        ("engine.qat.enable=true", "False: there is no quantization-aware training"),
        ("data.custom_cls.path=x.py", "None: there is no loader for verl's data set classes"),
        ("data.multiturn.enable=false", "True: give prompts and responses by data.prompt_key"),
        ("data.max_length=1", "2 tokens or more"),
        ("engine.override_transformer_config.num_layers=4", "None: shapes come from config.json"),
    ],
)
def test_another_meaning_is_refused(override: str, expected: str) -> None:
    with pytest.raises(UserError) as caught:
        load_config(None, [*FSDP, override])
    assert expected in caught.value.expected


def test_a_template_that_depends_on_the_end_is_said() -> None:
    notes = load_config(None, [*FSDP, "data.ignore_input_ids_mismatch=true"]).notes
    assert any("at the end of its conversation" in note for note in notes)


def test_hydras_file_of_the_trainer_is_its_defaults(tmp_path: Path) -> None:
    recipe = tmp_path / "sft.yaml"
    recipe.write_text("defaults: [sft_trainer_engine, _self_]\nmodel: {path: policy}\noptim: {lr: 1e-4}\n")
    config = load_config(recipe).config
    assert (config.data.train_batch_size, config.actor.lr, config.actor.adam_beta2) == (256, 1e-4, 0.999)


def test_every_target_is_a_setting_and_rl_keeps_its_meanings() -> None:
    targets = {alias.target for alias in sft_names.ALIASES.values() if isinstance(alias, Renamed)}
    assert targets <= list_fields().keys()
    rl = load_config(
        None, ["model.path=p", "data.train_files=t.jsonl", "data.train_batch_size=8", "data.val_files=v.jsonl"]
    )
    assert rl.config.data.validation_files == ["v.jsonl"] and not rl.notes
