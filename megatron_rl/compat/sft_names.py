# SPDX-License-Identifier: Apache-2.0
"""Names of verl's SFT trainer and their defaults, for `launch/pretrain_sft.py`.

Source: verl/trainer/config/sft_trainer_engine.yaml at commit 1dda039 (2026-08-22), and sft_trainer.yaml of the trainer
before it (names `model.partial_pretrain` and `data.multiturn.*`). Names that RL has, too, have the meanings of
`name_tables.py`; the engine's, the optimizer's and the model's have no section in front of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_rl.compat.kinds import Alias, AliasGroup, Combined, Ignored, Only, Parts, Renamed, assume, each, put
from megatron_rl.compat.name_groups import betas_group, budget_group, lora_group, rate_group, sequence_parallel_group
from megatron_rl.compat.name_tables import FSDP, MODEL, OFF, PACKED, PATTERNS, SHARD_SIZE, trainable_names
from megatron_rl.config.sources import Setting
from megatron_rl.types import UserError

_FIRST = ("optim.", "engine.", "data.multiturn.")
_ALONE = ("engine", "data.messages_key", "data.micro_batch_size_per_gpu", "model.partial_pretrain")
DEFAULTS: Mapping[str, Any] = {
    "data.train_files": "~/data/gsm8k/train.parquet",
    "data.train_batch_size": 256,
    "data.messages_key": "messages",
    "data.max_length": 1024,
    "data.micro_batch_size_per_gpu": 4,
    "data.max_token_len_per_gpu": 8192,
    "data.use_dynamic_bsz": True,
    "optim.lr": 1e-3,
    "optim.betas": [0.9, 0.999],
    "trainer.total_epochs": 4,
}
# Of a value of `optim`, and of the trainer before (its name: ""), those that differ.
OF_OPTIMIZER: Mapping[str, Mapping[str, Any]] = {
    "automodel": {"optim.lr": 1e-5, "optim.lr_scheduler_type": "cosine"}
    | {"optim.init_lr_ratio": 0.1, "optim.min_lr_ratio": 0.01},
    "veomni": {"optim.lr_scheduler_type": "cosine"},
    "torchtitan": {"optim.decay_type": "linear"},
    "": {"optim.lr": 1e-5, "optim.betas": [0.9, 0.95], "optim.lr_warmup_steps_ratio": 0.1}
    | {"optim.lr_scheduler": "cosine", "data.use_dynamic_bsz": False},
}
_LENGTH, _NO_VALIDATION = "data.max_length", Ignored("fine-tuning has no validation")
_ENGINES = ("megatron.", "fsdp_config.", "veomni.", "engine.")
_SHARING = ("context_parallel_size", "ulysses_sequence_parallel_size", "ulysses_parallel_size", "cp_size", "cp")
_ACTOR = trainable_names("actor")
ALIASES: Mapping[str, Alias] = {
    **{name: alias for name, alias in _ACTOR.items() if name.startswith("optim.")},
    **{f"engine.{name.partition('.')[2]}": alias for name, alias in _ACTOR.items() if name.startswith(_ENGINES)},
    **{f"model.{name}": alias for name, alias in MODEL.items() if name != "path"},
    "engine.fsdp_size": SHARD_SIZE,
    **each("engine.param_offload engine.grad_offload", Ignored("weights and gradients stay on the device")),
    "engine.optimizer_offload": Ignored("optimizer states stay on the device"),
    **each("engine optim model.strategy", Ignored(FSDP)),
    "model.mtp.enable_train": Only((False,), "there is no training of the MTP layer in fine-tuning"),
    "model.partial_pretrain": Renamed("model.path"),
    "ulysses_sequence_parallel_size": Renamed("actor.context_parallel_size"),
    **each("use_remove_padding data.pad_mode data.balance_dp_token", Ignored(PACKED)),
    **each("data.messages_key data.multiturn.messages_key", Renamed("data.prompt_key")),
    **each("data.tools_key data.multiturn.tools_key", Only(("tools",), "the column with the tools is called tools")),
    **each(
        "data.enable_thinking_key data.multiturn.enable_thinking_key",
        Only(("enable_thinking",), "the column with that option of the template is called enable_thinking"),
    ),
    "data.enable_thinking_default": Only(("none",), "set data.apply_chat_template_kwargs.enable_thinking"),
    "data.multiturn.enable": Only((True,), "give prompts and responses by data.prompt_key and data.answer_key"),
    "data.num_workers": Ignored("examples are read once, at the start"),
    **each("data.val_files data.val_max_samples trainer.test_freq", _NO_VALIDATION),
    "trainer.save_freq": Renamed("trainer.save_freq", OFF),
    "trainer.profile_interval": Ignored("there is nothing to configure about profiling"),
    **each(
        "checkpoint.save_contents checkpoint.load_contents trainer.checkpoint.save_contents "
        "trainer.checkpoint.load_contents",
        Ignored("checkpoint.contents decides"),
    ),
}
_RL = "actor_rollout_ref."
OWN_PATTERNS: Mapping[str, Ignored | Only] = {
    **{name.removeprefix("*."): alias for name, alias in PATTERNS.items() if name.startswith("*.optim.")},
    **{name.removeprefix(_RL): alias for name, alias in PATTERNS.items() if name.startswith(f"{_RL}model.")},
    **each("engine.* model.fsdp_config.*", Ignored(FSDP)),
    "profiler.*": Ignored("there is nothing to configure about profiling"),
}


def is_sft(settings: Sequence[Setting]) -> bool:
    """Whether a recipe, or a command without one, has names of verl's SFT trainer."""
    return any(one.name.startswith(_FIRST) or one.name in _ALONE for one in settings)


def add_defaults(settings: dict[str, Setting]) -> None:
    """Add the defaults of verl's SFT trainer to the latest settings."""
    is_earlier = "model.partial_pretrain" in settings
    chosen = "" if is_earlier else str(settings["optim"].value) if "optim" in settings else "fsdp"
    on_megatron = any(settings[name].value == "megatron" for name in ("engine", "optim") if name in settings)
    defaults = {**DEFAULTS, **OF_OPTIMIZER.get(chosen, {})}
    defaults |= {} if on_megatron else {"model.enable_gradient_checkpointing": True}
    defaults |= {"model.lora_alpha": 16} if "model.lora_rank" in settings else {}
    given = {"data.messages_key": "data.multiturn.messages_key", "optim.lr_warmup_steps_ratio": "optim.lr_warmup_steps"}
    for name, value in defaults.items():
        if given.get(name) not in settings:
            assume(settings, name, value)


def _combine_length(parts: Parts) -> Combined:
    """Translate the longest sequence: a conversation may have the tokens of a prompt and a response together."""
    given = parts[_LENGTH]
    if not isinstance(given.value, int) or given.value < 2:
        found = f"{_LENGTH} = {given.value!r}"
        raise UserError(found, source=given.source, expected="2 tokens or more", hint=f"raise {_LENGTH}")
    yield put(given, "data.max_prompt_length", given.value // 2)
    yield put(given, "data.max_response_length", given.value - given.value // 2)


_MISMATCH = "data.ignore_input_ids_mismatch"
_WHOLE = (
    f"read as {_MISMATCH}=false: a reply is learned as the chat template writes it at the end of its conversation, and "
    "in verl as it writes the message alone, without what it may add at the end (<think></think>)"
)
GROUPS: tuple[AliasGroup, ...] = (
    budget_group(
        ("data.max_token_len_per_gpu", "data.use_dynamic_bsz", "data.micro_batch_size_per_gpu"),
        "actor",
        (*(f"engine.{leaf}" for leaf in _SHARING), "ulysses_sequence_parallel_size"),
        (_LENGTH,),
    ),
    AliasGroup((_LENGTH,), "data.max_prompt_length and data.max_response_length, a half each", _combine_length),
    AliasGroup((_MISMATCH,), "a note", lambda parts: iter([_WHOLE] if parts[_MISMATCH].value else [])),
    betas_group("optim", "actor"),
    rate_group("optim", "actor"),
    lora_group("model", "actor"),
    sequence_parallel_group("engine", "actor"),
)
