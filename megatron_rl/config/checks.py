# SPDX-License-Identifier: Apache-2.0
"""Checks of a config that need no world size, no model and no data, and settings that others leave without effect.

Settings that cannot work, or would change the meaning of the numbers, are refused here, before any process group
exists; `feature_checks.py` checks features that are off by default, `batch_plan.py` checks against the world size.
Settings without effect are reset before, so that no check refuses them, and reported once.
"""

from __future__ import annotations

import difflib
import importlib.util
import operator
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, fields
from functools import lru_cache
from itertools import accumulate
from operator import attrgetter
from typing import Any

from megatron_rl.config.checked import CheckedConfig, Mistakes
from megatron_rl.config.fields import FieldInfo, list_fields, list_options, render
from megatron_rl.config.schema import (
    FULLY_SHARDED,
    REWARD_RULES,
    STAGE_SETTINGS,
    TRAINED,
    ActorConfig,
    DataConfig,
    ModelConfig,
    RunConfig,
)
from megatron_rl.extension.registry import name_engines

# Settings and sections of the features that `feature_checks.py` checks, and their values if no feature is in use.
_FEATURES = attrgetter(
    *(f"{section}.{leaf}" for section in TRAINED for leaf in ("lora", "step_mode", "zero_stage")),
    "actor.quantization",
    *("actor.expert_tensor_parallel_size", "actor.mtp_lr", "actor.router_replay", "reward_model.zero_stage"),
    "reward_model.further",
    *("actor.optimizer", "critic.optimizer"),
    *("data.curriculum", "data.sources", "data.weights", "hybrid.lora", "rollout.engine_options"),
    *("rollout.quantization", "rollout.expert_parallel_size", "rollout.data_parallel_size", "rollout.draft_tokens"),
    *("rollout.bitwise", "rollout.thinking_budget", "rollout.validation_sets", "rollout.top_p", "rollout.top_k"),
    *("rollout.min_p", "rollout.min_tokens", "agents"),
    *("schedule", "teachers", "placement.teachers", "algorithm.distillation", "reference.reset_every"),
    *("observability.trackers", "observability.status_port"),
)
_DATA = DataConfig(train_files=[], train_batch_size=1)
_UNUSED = _FEATURES(RunConfig(model=ModelConfig(path=""), data=_DATA, actor=ActorConfig()))


def check_config(cfg: RunConfig, sources: Mapping[str, str] | None = None, mistakes: Mistakes | None = None) -> None:
    """Refuse a config whose sections cannot work with any world size.

    Args:
        sources: full name -> place of each setting, for the errors.
        mistakes: earlier mistakes in the settings.

    Raises:
        UserError: all mistakes.
    """
    config = CheckedConfig(cfg, sources or {}, mistakes or Mistakes())
    # Rules that read a value outside of its bounds are skipped.
    for info in (*_list_bounded(tuple(cfg.teachers), tuple(cfg.data.sources)), *list_options().values()):
        name = info.name
        if name not in config.mistakes.refused and (violation := info.find_violation(config.get(name))):
            config.require(False, name, **violation)
            config.mistakes.refused.add(name)
    for row in _ORDERED:
        config.apply(_check_order, *row)
    for rule in _RULES:
        config.apply(rule)
    config.mistakes.raise_all()


@lru_cache(maxsize=16)  # a planner checks thousands of configs
def _list_bounded(teachers: tuple[str, ...], sources: tuple[str, ...]) -> tuple[FieldInfo, ...]:
    """Return the settings of the sections that have bounds."""
    return tuple(info for info in list_fields(teachers, sources).values() if info.bounds)


_HIGH = "algorithm.importance_high"
OVERLONG_BUFFER = (
    "reward.overlong_buffer_length",
    operator.le,
    "data.max_response_length",
    "is more than",
    "give a shorter buffer",
)
# Setting, how it compares with another one, the fault if it does not, and the remedy.
_ORDERED = (
    *((f"{role}.min_lr", operator.le, f"{role}.lr", "is above the peak", f"lower {role}.min_lr") for role in TRAINED),
    ("algorithm.importance_low", operator.lt, _HIGH, "is not below", "the defaults are 0.5 and 2.0"),
    ("reward.overlong_buffer_length", operator.le, "data.max_response_length", "is more than", "give a shorter buffer"),
)


def _check_order(
    config: CheckedConfig, name: str, holds: Callable[[Any, Any], bool], other: str, fault: str, hint: str
) -> None:
    limit = config.get(other)
    expected = f"{'at most' if holds is operator.le else 'below'} {limit!r}"
    config.require(holds(config.get(name), limit), name, f"{fault} {other} = {limit!r}", expected=expected, hint=hint)


def _check_run(config: CheckedConfig) -> None:
    config.require(
        re.fullmatch(r"given|auto( .+)?", config.get("layout.mode")) is not None,
        "layout.mode",
        "is not known",
        expected="given, auto, or auto LENGTHS",
        hint="lengths of responses are written as for tools/plan.py --lengths",
    )
    config.require(
        config.get("checkpoint.resume") != "must" or config.get("trainer.run_dir") is not None,
        "checkpoint.resume",
        "needs to know the run",
        expected="trainer.run_dir",
        hint="set trainer.run_dir to that of the run",
    )
    config.require(
        bool(config.get("data.validation_files")) or config.get("trainer.total_steps") != 0,
        "trainer.total_steps",
        "validates, without a file to validate on",
        expected="data.validation_files",
        hint="name a file there",
    )
    config.require(
        config.get("trainer.max_silent_steps") is None or config.get("rollout.n") > 1,
        "trainer.max_silent_steps",
        "compares the responses to a prompt, and rollout.n = 1",
        expected="null, or two responses or more to a prompt",
        hint="leave trainer.max_silent_steps out, or raise rollout.n",
    )


def _check_data(config: CheckedConfig) -> None:
    train, validation = config.get("data.train_files"), config.get("data.validation_files")
    config.require(
        bool(train), "data.train_files", "names no file", expected="at least one file", hint="give a JSONL file"
    )
    for name, files in (("data.train_files", train), ("data.validation_files", validation)):
        paths = [os.path.normpath(path) for path in files]
        repeated = sorted({path for path in paths if paths.count(path) > 1})
        config.require(
            not repeated or bool(config.config.data.sources),
            name,
            f"names {', '.join(repeated)} twice",
            expected="each file once",
            hint="raise trainer.total_epochs to repeat prompts",
        )


def _check_reward(config: CheckedConfig) -> None:
    function = config.get("reward.function")
    path, _, name = function.rpartition(":")
    close = difflib.get_close_matches(function, REWARD_RULES, n=1)
    config.require(
        function in REWARD_RULES or bool(path and name.isidentifier()) or function.startswith(("http://", "https://")),
        "reward.function",
        "names neither a rule nor a function in a file",
        expected=f"{', '.join(REWARD_RULES)}, path.py:name, or an http(s) URL",
        hint=f"did you mean {close[0]!r}?" if close else "write e.g. reward.function=my_reward.py:compute_score",
    )
    for source in config.get("reward.models"):
        name = source.partition(":")[2]
        config.require(
            source in config.get("reward_model.roles"),
            "reward.components",
            f"uses {source}, which there is not" if name else "uses the reward model, but reward_model.path is null",
            expected="the directory of a reward model",
            hint=f"set reward_model.{name and f'further.{name}.'}path",
        )


_PACKAGES = {"wandb-offline": "wandb", "otlp": "opentelemetry-exporter-otlp"}
_MODULES = {"opentelemetry-exporter-otlp": "opentelemetry.exporter.otlp.proto.http.trace_exporter"}


def _check_packages(config: CheckedConfig) -> None:
    """Check that the optional packages that the settings need are installed, on every rank."""
    trackers: list[str] = config.get("observability.trackers")
    for name, off, package in (
        *(("observability.trackers", [], _PACKAGES.get(tracker, tracker)) for tracker in trackers),
        ("actor.quantization", "none", "bitsandbytes"),
    ):
        modules = accumulate(_MODULES.get(package, package).split("."), "{}.{}".format)
        config.require(
            config.get(name) == off or all(map(importlib.util.find_spec, modules)),
            name,
            f"needs the package {package}",
            expected=f"the package, or {render(off)}",
            hint=f"pip install {package}, at the version of requirements.txt if it is there",
        )


def _check_engine_size(config: CheckedConfig) -> None:
    sizes = {1, config.get("actor.tensor_model_parallel_size") if config.supports("is_actor") else 1}
    config.require(
        config.get("rollout.tensor_model_parallel_size") in sizes or config.supports("tensor_parallel"),
        "rollout.tensor_model_parallel_size",
        f"is not supported by rollout.engine = {config.get('rollout.engine')!r}",
        expected=" or ".join(map(str, sorted(sizes))),
        hint=f"leave it out, or set rollout.engine={name_engines('tensor_parallel')}",
    )


def _check_features(config: CheckedConfig) -> None:
    """Apply the rules of `feature_checks.py` if the config uses a feature."""
    is_special = config.config.algorithm.adv_estimator in ("distill", "gdpo")
    if _FEATURES(config.config) != _UNUSED or is_special or config.supports("is_server"):
        from megatron_rl.config.feature_checks import check_features

        check_features(config)
    if config.config.data.sources:
        from megatron_rl.config.mixture import check_sources

        check_sources(config, _check_reward, lambda one: _check_order(one, *_ORDERED[-1]))


_RULES = (
    _check_data,
    _check_features,
    _check_engine_size,
    _check_reward,
    _check_packages,
    _check_run,
)


def put_aside(config: RunConfig, sources: Mapping[str, str]) -> tuple[RunConfig, list[str]]:
    """Reset settings without effect; return the config, and a note with the place of each reset setting."""
    notes = []
    for is_idle, name, why, *instead in list(_find_idle(config)):
        section, _, leaf = name.rpartition(".")
        role = config.section(section)
        item = next(item for item in fields(role) if item.name == leaf)
        default = item.default if item.default_factory is MISSING else item.default_factory()
        value, taken = getattr(role, leaf), instead[0] if instead else default
        if is_idle and value != taken:
            place = f" ({sources[name]})" if name in sources else ""
            notes.append(f"ignored: {name}={value!r}{place}, {why}")
            config = config.with_sections({section: {leaf: taken}})
    return config, notes


def _find_idle(config: RunConfig) -> Iterator[tuple[Any, ...]]:
    """Find settings that another setting leaves without effect.

    Yields:
        (is idle, full name, reason, optional replacement) of every candidate. An idle setting is reset to the
        replacement, or to its default if there is none.
    """
    for section in (*TRAINED, "reward_model", *(f"teachers.{name}" for name in config.teachers)):
        yield from _find_in_role(config, section)
    algorithm, components = config.algorithm, config.reward.components
    engine, no_kl = f"rollout.engine {config.rollout.engine!r}", algorithm.kl_coef == 0
    is_alone = bool(config.actor.lora.rank) and config.reference.path is None
    yield is_alone, "reference.offload", "the reference is the actor without its adapters (actor.lora.rank)"
    yield no_kl, "reference.reset_every", "algorithm.kl_coef is 0: there is no reference"
    stages = [role.zero_stage for role in (config.actor, config.critic, config.reward_model, *config.teachers.values())]
    yield FULLY_SHARDED not in stages, "actor.zero_shard_size", "zero_stage is 3 for no role"
    yield not config.rollout.supports("is_server"), "rollout.server", f"{engine} is no server"
    is_outside = config.schedule.elastic or config.rollout.supports("is_server")
    yield not is_outside, "rollout.silent_seconds", f"{engine} is in the ranks"
    yield not config.data.validation_files, "trainer.test_freq", "data.validation_files is empty"
    yield no_kl, "algorithm.kl_target", "algorithm.kl_coef is 0"
    yield no_kl, "algorithm.kl_in", "algorithm.kl_coef is 0"
    mode = algorithm.importance_sampling
    why = f"algorithm.importance_sampling is {mode!r}"
    yield mode in ("none", "bypass"), "algorithm.importance_normalize", why
    used, further, why = config.reward.models, config.reward_model.further, "reward.components does not use"
    yield components and "model" not in used, "reward_model.path", f"{why} 'model'"
    left = {name: given for name, given in further.items() if f"model:{name}" in used}
    yield bool(components), "reward_model.further", f"{why} {', '.join(sorted(further.keys() - left))}", left


def _find_in_role(config: RunConfig, section: str) -> Iterator[tuple[Any, ...]]:
    role, prompts = config.section(section), f"{section}.share_prompts"
    name = f"{section}.tensor_model_parallel_size"
    yield role.tensor_model_parallel_size == 1, f"{section}.sequence_parallel", f"{name} is 1"
    name = f"{section}.pipeline_model_parallel_size"
    for leaf in STAGE_SETTINGS:
        yield role.pipeline_model_parallel_size == 1, f"{section}.{leaf}", f"{name} is 1"
    if section not in TRAINED:
        return
    if getattr(role, "mtp_lr", 0):
        yield True, prompts, f"{section}.mtp_lr: a shared row has no single token behind it", False
    elif role.share_prompts == "tree":
        if section == "actor" and role.router_replay != "off":
            why = f"actor.router_replay is {role.router_replay!r}: each branch has routes of its own"
            yield True, prompts, why
        elif role.step_mode != "eager":
            yield True, prompts, f"{section}.step_mode is {role.step_mode!r}: prefix trees have no fixed shape"
    modes = {config.actor.step_mode, config.critic.step_mode}
    mode = f"{section}.step_mode is {role.step_mode!r}"
    is_constant = role.lr_decay_style == "constant"
    yield role.min_lr > role.lr and is_constant, f"{section}.min_lr", f"{section}.lr_decay_style is 'constant'"
    if section == "actor":
        yield modes == {"eager"}, "actor.bucket_tokens", mode
        yield "graph" not in modes, "actor.graph_memory_gib", mode
    size = f"{section}.context_parallel_size = {role.context_parallel_size}"
    why = f"{mode}: shared prompts have no fixed shape with {size}"
    yield role.step_mode != "eager" and role.context_parallel_size > 1, prompts, why, False
