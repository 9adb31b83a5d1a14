# SPDX-License-Identifier: Apache-2.0
"""Read what a program passes: `Trainer(model, config, overrides, data=..., reward=..., ...)`, also by TRL's names.

    trainer = Trainer(model="models/Qwen2.5-0.5B-Instruct", reward_funcs=f, train_dataset=dataset)     # as GRPOTrainer

TRL's objects become ours, and TRL's settings, single or as `args=GRPOConfig(...)`, become overrides that
`compat/trl.py` translates. Everything else is refused with the line to write instead.
"""

from __future__ import annotations

import difflib
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass, replace
from enum import Enum
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch

from megatron_rl.algorithms.catalog import ADVANTAGE_ESTIMATORS, POLICY_LOSSES, RegisteredEstimator
from megatron_rl.compat.trl import ALIASES, GROUPS
from megatron_rl.config.checks import check_config
from megatron_rl.config.schema import RunConfig
from megatron_rl.extension.registry import ENGINES, OBJECT, RegisteredEngine
from megatron_rl.run.building import launched_sizes
from megatron_rl.run.command_line import end_program_on_errors
from megatron_rl.run.inputs import Parts
from megatron_rl.run.loading import load_config
from megatron_rl.types import UserError

_OBJECTS = {
    "reward_funcs": "reward",
    "reward_weights": "weights",
    "train_dataset": "data",
    "eval_dataset": "validation",
}
_LINES = {  # arguments of GRPOTrainer without a counterpart -> what to write
    **dict.fromkeys(
        ("processing_class", "tokenizer", "reward_processing_classes"),
        "leave it out: the tokenizer in the model's directory is read",
    ),
    "callbacks": "leave it out: write the loop yourself (docs/primitives.md) to act between steps",
    "optimizers": 'config={"actor": {"optimizer": "adam", "lr": 1e-6}}',
    "optimizer_cls_and_kwargs": 'config={"actor": {"optimizer": "adam", "lr": 1e-6}}',
    "peft_config": 'config={"actor": {"lora": {"rank": 16, "alpha": 32}}}',
    "quantization_config": 'config={"rollout": {"quantization": ...}} (docs/config.md)',
    **dict.fromkeys(
        ("tools", "environment_factory", "rollout_func"), 'config={"agents": {"environment": ...}} (docs/agents.md)'
    ),
}
# GRPOConfig's defaults that differ from ours (TRL 1.16.0), for a program that gives no config of its own.
_DEFAULTS = {
    "max_completion_length": 512,
    "num_train_epochs": 3,
    "lr_scheduler_type": "linear",
    "weight_decay": 0.0,
    "adam_beta2": 0.999,
}
_SETTINGS = {*ALIASES, *(name for group in GROUPS for name in group.names)}
_NUM_GENERATIONS, _PER_DEVICE, _PER_RANK = 8, 8, 64  # completions: TRL's defaults; ours without a batch size
_PROMPTS = "data.train_batch_size"


@dataclass
class _Program:
    """Config, overrides and objects of a program, under our names."""

    config: Path | Mapping[str, Any]
    overrides: list[str]
    parts: dict[str, Any]
    notes: list[str] = field(default_factory=list)

    def override(self, name: str, value: Any) -> None:
        self.overrides.insert(0, f"{name}={json.dumps(value, default=str)}")  # later ones, the program's, are used

    def gives(self, name: str) -> bool:
        """Whether the config or an override has a setting; a file is not opened and has it."""
        section, _, leaf = name.partition(".")
        held = {} if isinstance(self.config, Path) else self.config.get(section)
        given = isinstance(self.config, Path) or name in self.config or (isinstance(held, Mapping) and leaf in held)
        return given or any(text.lstrip("-").startswith((f"{name}=", f"{name} ")) for text in self.overrides)


def read_program(
    model: Any, config: Any, overrides: Sequence[str], passed: Mapping[str, Any]
) -> tuple[RunConfig, Path | None, Parts]:
    """Return the loaded config, the recipe's path, and the objects of a program; settings without effect are warnings.

    Raises:
        UserError: an argument is unknown, has no counterpart, or is wrong.
    """
    end_program_on_errors()
    passed = dict(passed)
    if not isinstance(model, str | os.PathLike):
        model = _save_model(model, passed)
    config = {} if config is None else config
    if not isinstance(config, Mapping | str | os.PathLike):
        hint = 'write config={"actor": {"lr": 1e-6}}; TRL\'s GRPOConfig goes to args='
        raise _refuse(f"a config that is a {type(config).__name__}", "config", hint, "a recipe's path, or a mapping")
    overrides = overrides.split() if isinstance(overrides, str) else overrides
    if not isinstance(overrides, list | tuple) or not all(isinstance(text, str) for text in overrides):
        hint = 'write overrides=["actor.lr=1e-6"]'
        raise _refuse(f"the overrides {overrides!r:.80}", "overrides", hint, "a list of texts section.key=value")
    is_trl = bool(passed.keys() & {*_OBJECTS, *_SETTINGS, "args"})
    source = (config or _DEFAULTS if is_trl else config) if isinstance(config, Mapping) else Path(config)
    program = _Program(source, [*overrides], dict(passed))
    settings = _take_settings(program)
    for theirs, ours in _OBJECTS.items():
        if theirs in program.parts:
            if program.parts.get(ours) is not None:
                raise _refuse(f"{theirs} beside {ours}", theirs, f"leave out {theirs}", "one of the two")
            program.parts[ours] = program.parts.pop(theirs)
    if is_trl and not config:
        assumed = [f"{name}={value}" for name, value in _DEFAULTS.items() if name not in settings]
        program.notes.append(f"assumed, as TRL: {', '.join(assumed)}")
    if not program.gives(_PROMPTS):
        _choose_batches(program, settings, is_trl)
    for name, value in settings.items():
        program.override(name, value)
    _take_data(program)
    loaded = load_config(program.config, [*program.overrides, f"model.path={os.fspath(model)}"])
    for note in [*program.notes, *loaded.notes] if os.environ.get("RANK", "0") == "0" else ():
        warnings.warn(note, stacklevel=4)  # the program's line
    return loaded.config, program.config if isinstance(program.config, Path) else None, Parts(**program.parts)


def _save_model(model: Any, passed: dict[str, Any]) -> Path:
    """Save a model of transformers with its tokenizer, which is removed from `passed`, and return the directory.

    The directory is called after a digest of the content, so the processes of a host and later starts share it, and
    `Prepared.join` notices ranks with other weights.

    Raises:
        UserError: it is no such model, it has no tokenizer, or it cannot be written.
    """
    library = sys.modules.get("transformers")
    if library is None or not isinstance(model, library.PreTrainedModel):
        expected = (
            "its directory or name in the hub, or a PreTrainedModel of transformers; an architecture of yours is a "
            "family (docs/add_a_family.md)"
        )
        held = getattr(getattr(model, "config", None), "_name_or_path", None) or "models/Qwen2.5-0.5B-Instruct"
        raise _refuse(f"model = {model!r:.80}", "model", f'write model="{held}"', expected)
    if not model.can_generate():
        hint = "load it by AutoModelForCausalLM"
        raise _refuse(
            f"a {type(model).__name__}, which generates no text", "model", hint, "a language model with its head"
        )
    import filelock

    from megatron_rl.checkpoint.files import copy_side_files, explain_write_error, publish

    home, tokenizer = Path(tempfile.gettempdir(), f"megatron_rl_models_{os.getuid()}"), None
    for name in ("processing_class", "tokenizer"):
        tokenizer = passed.pop(name, None) or tokenizer
    try:
        home.mkdir(mode=0o700, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=home) as scratch:
            small, weights = Path(scratch, "files"), Path(scratch, "model")
            _save_small_files(model, tokenizer, small)
            whole = blake2b(digest_size=12)
            for file in sorted(small.iterdir()):
                whole.update(file.name.encode() + file.read_bytes())
            for name, values in sorted(model.state_dict().items()):
                whole.update(repr((name, values.dtype, values.shape)).encode())
                whole.update(values.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
            directory = home / f"{OBJECT}{whole.hexdigest()}"
            with filelock.FileLock(home / "lock"):
                if not directory.is_dir():
                    model.save_pretrained(weights)
                    if not [*weights.glob("*.safetensors")]:  # transformers 5 saves on rank 0 alone
                        hint = "make the Trainer before the process group, or pass the path"
                        expected = "a rank that may save the model: rank 0, or any without torch.distributed"
                        raise _refuse("a model object beside torch.distributed", "model", hint, expected)
                    copy_side_files({file.name: file for file in small.iterdir()}, weights)
                    publish(weights, directory)
    except Exception as error:  # of the disk, safetensors, or a model without values
        raise explain_write_error(error, home) from error
    return directory


def _save_small_files(model: Any, tokenizer: Any, directory: Path) -> None:
    """Write a model's config, generation settings and tokenizer, by default that of its origin (UserError: none)."""
    from megatron_rl.checkpoint.files import TOKENIZER_FILES, copy_side_files
    from megatron_rl.data.hub import fetch_model

    for part in (model.config, getattr(model, "generation_config", None), tokenizer):
        if part is not None:
            part.save_pretrained(directory)
    if tokenizer is None:
        source = model.name_or_path
        if not source:
            hint = "pass processing_class=tokenizer"
            raise _refuse("a model without a tokenizer", "model", hint, "a model that was loaded, or both objects")
        held = Path(source) if os.path.isdir(source) else fetch_model(source, "model.tokenizer")
        copy_side_files({name: held / name for name in TOKENIZER_FILES if (held / name).is_file()}, directory)


def _take_settings(program: _Program) -> dict[str, Any]:
    """Remove TRL's settings from the arguments and return them (UserError for an unexpected argument)."""
    parts, settings, ours = program.parts, dict[str, Any](), [*Parts.__dataclass_fields__, "data", "validation"]
    given = parts.pop("args", None)
    if given is not None and not isinstance(given, Mapping):
        if not is_dataclass(given):
            raise _refuse(f"args that are a {type(given).__name__}", "args", "write args=GRPOConfig(...) or a dict", "")
        given = {one.name: getattr(given, one.name) for one in fields(given) if _is_changed(given, one)}
        given = {name: value for name, value in given.items() if (name, value) != ("bf16", True)}
        if ignored := sorted(given.keys() - _SETTINGS - {"max_steps", "reward_weights"}):
            program.notes.append(f"ignored of args, without a counterpart: {', '.join(ignored)}")
            given = {name: value for name, value in given.items() if name not in ignored}
    given = dict(given or {})
    if "reward_weights" in given:
        parts.setdefault("reward_weights", given.pop("reward_weights"))
    for name in [name for name in parts if name not in ours and name not in _OBJECTS]:
        value = parts.pop(name)
        if name in _LINES and value not in (None, (None, None)):
            raise _refuse(f"the argument {name}", name, _LINES[name], "an argument with a counterpart")
        if name not in _LINES:
            given[name] = value
    for name, value in given.items():
        if name not in _SETTINGS:
            close = difflib.get_close_matches(name, [*ours, *_OBJECTS, *_SETTINGS], n=1)
            hint = f"did you mean {close[0]}=?" if close else 'settings go to config={"section": {"name": value}}'
            raise _refuse(f"there is no argument {name}", name, hint, f"of {', '.join(['config', 'overrides', *ours])}")
        plain = value.value if isinstance(value, Enum) else value
        settings[name] = int(plain) if isinstance(plain, float) and plain.is_integer() else plain
    return settings


def _is_changed(given: Any, one: Field[Any]) -> bool:
    default = one.default if one.default_factory is MISSING else one.default_factory()
    value = getattr(given, one.name)
    return one.init and value is not None and value != default


def _choose_batches(program: _Program, settings: dict[str, Any], is_trl: bool) -> None:
    """Choose the batch sizes in prompts: TRL's arithmetic in completions, or 64 responses per rank."""
    ranks, n = launched_sizes()[0], settings.get("num_generations", _NUM_GENERATIONS)
    if not is_trl:
        program.override(_PROMPTS, prompts := ranks * _PER_RANK // n)
        program.notes.append(f"assumed: {_PROMPTS}={prompts}, {_PER_RANK} responses per rank")
        return
    step = settings.pop("per_device_train_batch_size", _PER_DEVICE) * ranks
    generations = settings.pop("steps_per_generation", None)
    accumulated = settings.pop("gradient_accumulation_steps", 1)
    made = settings.pop("generation_batch_size", None) or step * (generations or accumulated)
    step *= accumulated
    if step % n or made % n or made % step:
        raise _refuse(
            f"batches of {made} completions, in optimizer steps of {step}, for {n} completions per prompt",
            "per_device_train_batch_size, gradient_accumulation_steps and num_generations",
            f'write config={{"data": {{"train_batch_size": {max(1, made // n)}}}}}, in prompts',
            "multiples of num_generations",
        )
    program.override(_PROMPTS, made // n)
    program.override("actor.ppo_mini_batch_size", step // n)
    if (most := settings.pop("max_steps", -1)) > 0:  # optimizer steps
        program.override("trainer.total_steps", -(-most * step // (made * settings.get("num_iterations", 1))))
    program.notes.append(f"batches of {made // n} prompts x {n} completions, optimizer steps of {step // n} prompts")


def _take_data(program: _Program) -> None:
    """Register rows that were passed, and override the data files by their names."""
    data, validation = program.parts.pop("data", None), program.parts.pop("validation", None)
    if data is None and validation is None:
        return
    from megatron_rl.data.passed_rows import pass_rows

    if data is not None:
        program.overrides.append(f"data.train_files={json.dumps(pass_rows('train', data))}")
    if validation is not None:
        sets = validation if isinstance(validation, Mapping) else {"validation": validation}
        files = [file for name, rows in sets.items() for file in pass_rows(str(name), rows)]
        program.overrides.append(f"data.validation_files={json.dumps(files)}")


def refuse_auto() -> UserError:
    """Return the error of `layout.mode` auto without a planner."""
    hint = "or give the layout: tools/plan.py prints the settings of the fastest that fit"
    expected = "Trainer(..., choose_layout=tools.planning.automatic.choose_layout)"
    return _refuse("layout.mode = 'auto' in a program that passes no planner", "layout.mode", hint, expected)


def enter_parts(parts: Parts, config: RunConfig) -> RunConfig:
    """Register the objects that are looked up by name, and return the config with their names.

    Raises:
        UserError: a name is taken, the engine does not support a setting, the reward has a wrong signature, or the
            config names other rewards.
    """
    algorithm, rollout, reward = config.algorithm, config.rollout, config.reward
    for name in ("adv_estimator", "policy_loss", "engine", "reward_model", "actor", "critic", "reference"):
        value = getattr(parts, name)
        if value is not None and not callable(value) and not isinstance(value, RegisteredEstimator | RegisteredEngine):
            hint = f'settings go to config, such as {{"algorithm": {{"{name}": {value!r}}}}}'
            raise _refuse(f"{name} = {value!r}, which cannot be called", name, hint, "a function or class")
    if parts.adv_estimator is not None:
        entry = parts.adv_estimator
        if not isinstance(entry, RegisteredEstimator):
            entry = RegisteredEstimator(entry)
        algorithm = replace(algorithm, adv_estimator=ADVANTAGE_ESTIMATORS.enter(entry, entry.estimate))
    if parts.policy_loss is not None:
        algorithm = replace(algorithm, policy_loss=POLICY_LOSSES.enter(parts.policy_loss, parts.policy_loss))
    if parts.engine is not None:
        entry = parts.engine if isinstance(parts.engine, RegisteredEngine) else RegisteredEngine(parts.engine)
        rollout = replace(rollout, engine=ENGINES.enter(entry, entry.make))
        check_config(replace(config, rollout=rollout))
    models = config.reward_model.roles
    if (parts.reward_model or (models and not reward.components)) and (parts.reward or (parts.reward_model and models)):
        hint = "name the others with their weights in reward.components"
        raise _refuse("a reward model beside another reward", "the objects that were passed", hint, "one of them")
    if parts.reward is not None or parts.weights is not None:
        from megatron_rl.rewards.functions import enter_rewards, name_models

        reward = enter_rewards(parts.reward, parts.weights, reward)
        passed = {target.partition(":")[2]: {"path": path} for path, target in name_models(parts.reward).items()}
        config = replace(config, reward_model=replace(config.reward_model, further=passed))
    return replace(config, algorithm=algorithm, rollout=rollout, reward=reward)


def _refuse(found: str, source: str, hint: str, expected: str) -> UserError:
    return UserError(found, source=source, expected=expected or "see docs/python_api.md", hint=hint)
