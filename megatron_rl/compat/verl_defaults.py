# SPDX-License-Identifier: Apache-2.0
"""Defaults of a verl recipe or command, and the Hydra files that it is composed of.

Source: verl/trainer/config at commit 1dda039 (2026-08-22). verl's own files are not read: `DEFAULTS` has their values
that mean something else than this program's defaults; files beside a recipe are merged as Hydra does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_rl.compat.kinds import assume, same
from megatron_rl.compat.name_groups import ESTIMATORS
from megatron_rl.config.checked import Mistakes
from megatron_rl.config.fields import FieldInfo, render
from megatron_rl.config.sources import ASSUMED, RECIPE, Setting, describe, read_recipe
from megatron_rl.types import UserError

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
# verl's name -> its default, of all that this program has another default for.
DEFAULTS: Mapping[str, Any] = {
    "algorithm.adv_estimator": "gae",
    f"{_ROLLOUT}.n": 1,
    "data.train_files": "~/data/rlhf/gsm8k/train.parquet",
    "data.train_batch_size": 1024,
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    "data.reward_fn_key": "data_source",
    f"{_ACTOR}.ppo_mini_batch_size": 256,
    f"{_ACTOR}.use_kl_loss": False,
    f"{_ACTOR}.policy_loss.loss_mode": "vanilla",
    f"{_ACTOR}.optim.betas": [0.9, 0.999],
    "critic.optim.betas": [0.9, 0.999],
    f"{_ACTOR}.ppo_max_token_len_per_gpu": 16384,
    "critic.ppo_max_token_len_per_gpu": 32768,
    f"{_ROLLOUT}.tensor_model_parallel_size": 2,
    "trainer.total_epochs": 30,
}
# Of FSDP engines alone, and of names with an effect beside another one: (verl's name, default, the other name).
OF_FSDP = {f"{name}.enable_gradient_checkpointing": True for name in ("actor_rollout_ref.model", "critic.model")}
DEPENDENT = (
    ("actor_rollout_ref.model.lora_alpha", 16, "actor_rollout_ref.model.lora_rank"),
    ("actor_rollout_ref.model.lora.alpha", 32, "actor_rollout_ref.model.lora.rank"),
    ("critic.model.lora_alpha", 16, "critic.model.lora_rank"),
    ("algorithm.filter_groups.max_num_gen_batches", 0, "algorithm.filter_groups.enable"),
)
# verl's own files, whose content DEFAULTS has, and the program that each belongs to.
_OWN_FILES = ("ppo_trainer", "ppo_megatron_trainer", "legacy_reward_impl", "sft_trainer_engine")
_WITHOUT_CRITIC = {name for pair in ESTIMATORS for name in pair} - {"gae"}
_OUR_SECTIONS = ("actor.", "agents.", "schedule.", "hybrid.", "layout.", "placement.", "reference.", "teachers.")
_FLAGS = {"--config-path": "path", "-cp": "path", "--config-dir": "path", "--config-name": "name", "-cn": "name"}


def is_verl(settings: Sequence[Setting]) -> bool:
    """Whether a recipe, or a command without one, is verl's rather than ours with some of verl's names.

    It has names of verl's and no section of ours; if the policy has our name, the GPUs must have verl's.
    """
    lowest = min((setting.layer for setting in settings), default=ASSUMED)
    names = [setting.name for setting in settings if setting.layer == lowest]
    theirs = any(name.startswith(("actor_rollout_ref.", "model_engine")) for name in names)
    ours = "model.path" in names and "trainer.n_gpus_per_node" not in names
    return theirs and not ours and not any(name.startswith(_OUR_SECTIONS) for name in names)


def add_defaults(settings: dict[str, Setting]) -> None:
    """Add verl's defaults to the latest settings of a recipe of verl's."""
    on_megatron = any(".megatron." in name or setting.value == "megatron" for name, setting in settings.items())
    defaults = {**DEFAULTS, **({} if on_megatron else OF_FSDP)}
    defaults |= {name: value for name, value, other in DEPENDENT if other in settings}
    if any(one.name == f"{_ROLLOUT}.name" and one.value == "sglang" for one in settings.values()):
        defaults["rollout.server.python"] = ".venv-sglang/bin/python"  # that launch/setup_sglang.sh makes
    estimator = settings.get("algorithm.adv_estimator")
    has_critic = estimator is None or estimator.value not in _WITHOUT_CRITIC
    for name, value in defaults.items():
        if has_critic or not name.startswith("critic."):
            assume(settings, name, value)


def describe_assumed(translated: Sequence[Setting], fields: Mapping[str, FieldInfo]) -> list[str]:
    """Return one line with the defaults of verl's that take effect and differ from this program's."""
    given = {one.name for one in translated if one.layer != ASSUMED}
    taken = {
        one.name: render(one.value)
        for one in translated
        if one.layer == ASSUMED and one.name not in given and not same(one.value, fields[one.name].default)
    }
    pairs = ", ".join(f"{name}={value}" for name, value in taken.items())
    return [f"assumed: {pairs} (defaults of the project whose names the recipe has)"] if taken else []


def has_no_critic(translated: Sequence[Setting], fields: Mapping[str, FieldInfo]) -> bool:
    """Return whether the estimator of translated settings is one of this program's that need no critic."""
    name = "algorithm.adv_estimator"
    chosen = {one.name: one.value for one in sorted(translated, key=lambda one: (one.layer, not one.weak))}
    return chosen.get(name, fields[name].default) in _WITHOUT_CRITIC


def describe_unused(translated: Sequence[Setting]) -> list[str]:
    """Return a note for each section of a verl recipe whose model the run does not have: critic, reference."""
    chosen = {one.name: one.value for one in sorted(translated, key=lambda one: (one.layer, not one.weak))}
    estimator = chosen.get("algorithm.adv_estimator")
    absent = {
        "critic": (estimator not in _WITHOUT_CRITIC, f"no critic with algorithm.adv_estimator={estimator}"),
        "reference": (chosen.get("algorithm.kl_coef", 0) != 0, "no reference without a KL term"),
    }
    notes = []
    for section, (is_there, why) in absent.items():
        given = [one for one in translated if one.name.startswith(f"{section}.") and one.layer != ASSUMED]
        if given and not is_there:
            several = f"{len(given)} settings of {section} ({given[0].source} ff.)"
            notes.append(f"ignored: {describe(given[0]) if len(given) == 1 else several}: there is {why}")
    return notes


def take_flags(arguments: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Split Hydra's `--config-path` and `--config-name` off a command line."""
    flags: dict[str, str] = {}
    rest: list[str] = []
    position = iter(arguments)
    for argument in position:
        flag, separator, value = argument.partition("=")
        if flag in _FLAGS:
            flags[_FLAGS[flag]] = value if separator else next(position, "")
        else:
            rest.append(argument)
    return flags, rest


def read_named(flags: Mapping[str, str], mistakes: Mistakes) -> list[Setting]:
    """Read the file of `--config-path` and `--config-name`; verl's own files are not read."""
    name = flags.get("name", "ppo_trainer").removesuffix(".yaml")
    path = Path(flags.get("path", "."), f"{name}.yaml")
    if path.is_file() and name not in _OWN_FILES:
        return compose(path, read_recipe(path, mistakes), mistakes)
    if name in _OWN_FILES:
        return _choose_engine(name, "command line")
    raise UserError(
        f"--config-name {name}: there is no {path}",
        source="command line",
        expected=f"a file, or a name of verl's own: {', '.join(_OWN_FILES)}",
        hint="give --config-path as a path from the working directory",
    )


def compose(path: Path, settings: Sequence[Setting], mistakes: Mistakes, depth: int = 0) -> list[Setting]:
    """Merge the files that a recipe's list `defaults` names, in Hydra's order; the later of two values wins."""
    own = [one for one in settings if one.name != "defaults" and not one.name.startswith("hydra.")]
    entries = next((one for one in settings if one.name == "defaults"), None)
    if entries is None or not isinstance(entries.value, list) or depth > 8:
        return own
    listed = entries.value if "_self_" in entries.value else ["_self_", *entries.value]
    merged: dict[str, Setting] = {}
    for entry in listed:
        found = own if entry == "_self_" else _read_entry(entry, path, entries.source, mistakes, depth)
        merged |= {one.name: one for one in found}
    return list(merged.values())


def _read_entry(entry: Any, path: Path, source: str, mistakes: Mistakes, depth: int) -> list[Setting]:
    group, option = next(iter(entry.items())) if isinstance(entry, dict) and len(entry) == 1 else ("", entry)
    group = group.removeprefix("override ").removeprefix("optional ").lstrip("/")
    name = str(option).removesuffix(".yaml")
    if group == "model_engine" or (not group and name in _OWN_FILES):
        return _choose_engine(name, source)
    folder, _, package = group.partition("@")
    file = path.parent / folder / f"{name}.yaml"
    if file.is_file():
        prefix = f"{package or folder.replace('/', '.')}." if group else ""
        found = compose(file, read_recipe(file, mistakes), mistakes, depth + 1)
        return [replace(one, name=f"{prefix}{one.name}".removeprefix("_global_.")) for one in found]
    if group:
        return []  # a group of verl's own
    raise UserError(
        f"defaults: {entry!r}: there is no {file}",
        source=source,
        expected=f"a file, or a name of verl's own: {', '.join(_OWN_FILES)}",
        hint="put the file beside the recipe",
    )


def _choose_engine(name: str, source: str) -> list[Setting]:
    if "sft" in name:
        return [Setting("engine", "fsdp", source, RECIPE)]
    return [Setting("model_engine", "megatron" if "megatron" in name else "dp", source, RECIPE)]
