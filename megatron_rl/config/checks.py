# SPDX-License-Identifier: Apache-2.0
"""Checks of a config that need no world size, no model and no data.

Settings that cannot work, or would change the meaning of the numbers, are refused here, before any process group
exists; `rollout_checks.py` checks generation, `idle.py` reports settings without effect, `batch_plan.py` checks against
the world size.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from megatron_rl.config.checked import CheckedConfig, Mistakes
from megatron_rl.config.fields import FieldInfo, list_fields, list_options
from megatron_rl.config.rendering import render
from megatron_rl.config.rollout_checks import ROLLOUT_RULES, check_validation_sets
from megatron_rl.config.schema import FULLY_SHARDED, TRAINED, RunConfig
from megatron_rl.config.sections import LONGEST_PERIOD, reduce_weights


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
    for info in (*_list_bounded(tuple(cfg.teachers)), *list_options().values()):
        name = info.name
        if name not in config.mistakes.refused and (violation := info.find_violation(config.get(name))):
            config.require(False, name, **violation)
            config.mistakes.refused.add(name)
    config.apply(check_validation_sets)
    for rule in (_check_step_mode, _check_quantization, _check_rates):
        for section in TRAINED:
            config.apply(rule, section)
    for rule in _RULES:
        config.apply(rule)
    config.mistakes.raise_all()


@lru_cache(maxsize=16)  # a planner checks thousands of configs
def _list_bounded(teachers: tuple[str, ...]) -> tuple[FieldInfo, ...]:
    """Return the settings of the sections that have bounds."""
    return tuple(info for info in list_fields(teachers).values() if info.bounds)


def _check_rates(config: CheckedConfig, section: str) -> None:
    lr, name = config.get(f"{section}.lr"), f"{section}.min_lr"
    config.require(
        config.get(name) <= lr,
        name,
        f"is above the peak {section}.lr = {lr!r}",
        expected="min_lr <= lr",
        hint=f"lower {name}",
    )


def _check_run(config: CheckedConfig) -> None:
    config.require(
        config.get("checkpoint.resume") != "must" or config.get("trainer.run_dir") is not None,
        "checkpoint.resume",
        "needs to know the run",
        expected="trainer.run_dir",
        hint="set trainer.run_dir to that of the run",
    )
    config.require(
        bool(config.get("data.validation_files")) or not config.get("trainer.val_only"),
        "trainer.val_only",
        "without a file to validate on",
        expected="data.validation_files",
        hint="name a file there",
    )
    config.require(
        config.get("trainer.breakpoint_step") is None or config.get("trainer.debug_rank") is not None,
        "trainer.breakpoint_step",
        "without a rank that stops there",
        expected="trainer.debug_rank",
        hint="add --debug-rank R, or leave this out",
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
            not repeated,
            name,
            f"names {', '.join(repeated)} twice",
            expected="each file once",
            hint="raise trainer.total_epochs to repeat prompts",
        )
    shared = sorted({os.path.normpath(p) for p in train} & {os.path.normpath(p) for p in validation})
    config.require(
        not shared,
        "data.validation_files",
        f"shares {', '.join(shared)} with data.train_files",
        expected="files that are not trained on",
        hint="split the file",
    )


def _check_pass_rates(config: CheckedConfig) -> None:
    bounds = config.get("data.pass_rate_range")
    config.require(
        len(bounds) == 2 and 0 <= bounds[0] <= bounds[1] <= 1,
        "data.pass_rate_range",
        "is no range",
        expected="two numbers from 0 to 1, the smaller one first",
        hint="[0.1, 0.9] leaves out what is hardly ever or nearly always right",
    )


def _check_weights(config: CheckedConfig) -> None:
    name, weights, files = "data.weights", config.get("data.weights"), config.get("data.train_files")
    if weights is None:
        return
    is_right = config.require(
        len(weights) == len(files),
        name,
        f"has {len(weights)} numbers for {len(files)} files",
        expected="a number per file of data.train_files, in their order",
        hint="a file without prompts in the mixture is left out of both",
    )
    is_right &= config.require(
        min(weights, default=1) > 0,
        name,
        "has a number that is not positive",
        expected="> 0",
        hint="leave the file out",
    )
    period = sum(reduce_weights(weights)) if is_right else 0
    config.require(
        period <= LONGEST_PERIOD,
        name,
        f"repeats after {period} prompts",
        expected=f"numbers whose proportions repeat within {LONGEST_PERIOD} prompts",
        hint="write fewer digits; they need not add up to 1: [2, 1] for thirds",
    )


def _check_step_mode(config: CheckedConfig, section: str) -> None:
    """Check the settings that fixed shapes and CUDA graphs restrict; `training/step.py` checks for a GPU."""
    mode, budget = config.get(f"{section}.step_mode"), config.get(f"{section}.max_tokens_per_microbatch")
    if mode == "eager":
        return
    sizes = config.get("actor.bucket_tokens")
    config.require(
        not sizes or (min(sizes) > 0 and max(sizes) >= budget),
        "actor.bucket_tokens",
        f"has no bucket for a microbatch of {section}.max_tokens_per_microbatch = {budget} tokens",
        expected=f"sizes above 0, the largest at least {budget}",
        hint=f"add {budget} to the list",
    )
    if mode != "graph":
        return
    routes = "how many tokens experts of other ranks get depends on the routes, and the host reads it"
    uncaptured: dict[str, tuple[Any, str]] = {"expert_model_parallel_size": (1, routes)}
    if config.get(f"{section}.pipeline_model_parallel_size") > 1:
        uncaptured["overlap_grad_reduce"] = False, "the reduction during the backward of a pipeline stage"
        if config.get(f"{section}.virtual_pipeline_model_parallel_size") != 1:
            uncaptured["virtual_pipeline_model_parallel_size"] = None, "microbatches of an interleaved schedule"
    graph, static = f"{section}.step_mode = 'graph'", f"{section}.step_mode=static: the same step without capture"
    for leaf, (value, what) in uncaptured.items():
        config.allow(f"{section}.{leaf}", value, f"is not captured yet ({what}): {graph} cannot take it", static)
    for leaf in ("offload_gradients", "offload_optimizer"):
        config.allow(f"{section}.{leaf}", False, f"moves memory that the graphs of {graph} have captured", static)


def _check_quantization(config: CheckedConfig, section: str) -> None:
    """Refuse four-bit weights without adapters, or with a separate (unquantized) reference of the same model."""
    name = f"{section}.quantization"
    if config.get(name) == "none":
        return
    config.require(
        config.get(f"{section}.lora.rank") > 0,
        name,
        "without adapters: there would be nothing to train",
        expected=f"{section}.lora.rank above 0",
        hint=f"set {section}.lora.rank=16",
    )
    is_shared = config.get("placement.reference") == config.get("placement.actor")
    is_own = config.get("reference.path") not in (None, config.get("model.path"))
    config.require(
        section != "actor" or is_shared or is_own or config.get("algorithm.kl_coef") == 0,
        "placement.reference",
        "differs from placement.actor, with actor.quantization: a reference of its own is not quantized, and so "
        "another model than the actor starts from",
        expected="the ranks of the actor",
        hint="leave placement.reference out, or give both the same ranks",
    )


def _check_zero_stages(config: CheckedConfig) -> None:
    """Refuse settings that do not work with weights sharded over DP (`zero_stage` 3)."""
    for section in (*TRAINED, "reward_model", *(f"teachers.{teacher}" for teacher in config.config.teachers)):
        cause = f"{section}.zero_stage={FULLY_SHARDED}"
        if section in TRAINED:
            config.exclude(
                cause,
                (f"{section}.step_mode", "eager", "weights are gathered for every layer, at other addresses"),
                (f"{section}.optimizer", "adam", "Muon's momentum is exchanged through the gradient buffers of ZeRO-1"),
                (f"{section}.overlap_grad_reduce", False, "gradients are always reduced during the backward"),
                (f"{section}.lora.rank", 0, "adapters are trained on weights that every rank has"),
            )
        if section != "critic":
            frozen = "reference" if section == "actor" else section  # the reference has the actor's layout
            config.exclude(cause, (f"{frozen}.offload", False, "the ranks share these weights already"))
    config.require(
        config.get("actor.zero_stage") != FULLY_SHARDED or not config.supports("is_actor"),
        "rollout.engine",
        "runs the actor's modules, whose weights are in parts with actor.zero_stage = 3",
        expected="an engine with weights of its own",
        hint="choose another rollout.engine, or set actor.zero_stage=1",
    )


def _check_layers(config: CheckedConfig) -> None:
    """Refuse updates of router biases with adapters, and settings that do not work with training of the MTP layer."""
    config.exclude("actor.lora.rank", ("actor.router_bias_rate", 0, "the weights of the model stay as they are"))
    why = "its layer is trained beside the policy's whole weights, microbatch by microbatch"
    needed = (("actor.step_mode", "eager"), ("actor.lora.rank", 0), ("actor.zero_stage", 1))
    config.exclude("actor.mtp_lr", *((name, value, why) for name, value in needed))


_KIND, _CHOICE = "algorithm.distillation.kind", "algorithm.distillation.choose_by"


def _check_teachers(config: CheckedConfig) -> None:
    teachers = config.config.teachers
    config.require(
        bool(teachers) or config.get("algorithm.adv_estimator") != "distill",
        "algorithm.adv_estimator",
        "without a teacher: nothing would be learned",
        expected="a teacher in the section teachers",
        hint="set teachers.NAME.path, or choose an estimator that works on rewards",
    )
    for name in teachers:
        config.require(
            re.fullmatch(r"[\w-]+", name) is not None,
            f"teachers.{name}.path",
            f"belongs to a teacher with the name {name!r}",
            expected="letters, digits, _ and -",
            hint="the name becomes part of the names of settings and metrics",
        )
    for name in config.get("placement.teachers"):
        config.require(
            name in teachers,
            "placement.teachers",
            f"names {name!r}",
            expected=f"of the section teachers: {', '.join(teachers) or 'there is none'}",
            hint="a teacher without a place is on all ranks",
        )


def _check_kind(config: CheckedConfig) -> None:
    teachers, kind, chosen_by = config.config.teachers, config.get(_KIND), config.get(_CHOICE)
    config.require(
        kind == "sampled" or len(teachers) < 2 or chosen_by is not None,
        _KIND,
        f"with {len(teachers)} teachers at once",
        expected="sampled, whose log-probs are averaged",
        hint="set algorithm.distillation.choose_by=data_source, so that each prompt has one teacher",
    )
    config.require(
        kind != "full" or len(teachers) < 2,
        _KIND,
        f"with {len(teachers)} teachers: each would need its output weights beside the policy's",
        expected="one teacher, or top_k",
        hint="set algorithm.distillation.kind=top_k",
    )
    why = "tokens of the policy give the reverse divergence"
    config.exclude(f"{_KIND}=sampled", ("algorithm.distillation.direction", "reverse", why))

    values = [value for name in teachers for value in config.get(f"teachers.{name}.values") or [name]]
    repeated = sorted({value for value in values if values.count(value) > 1})
    config.require(
        chosen_by is None or not repeated,
        _CHOICE,
        f"finds two teachers for {', '.join(repeated)}",
        expected="one teacher for each value",
        hint="change teachers.NAME.values",
    )


def _check_reset(config: CheckedConfig) -> None:
    """Refuse `reset_every` for a reference that cannot copy the actor's weights in place."""
    config.exclude(
        "reference.reset_every",
        ("reference.offload", False, "it moves the weights that are written"),
        ("actor.lora.rank", 0, "the reference is the actor without adapters, and cannot be written"),
        ("placement.reference", config.get("placement.actor"), "it is apart from the actor that it becomes"),
    )


def _check_reward(config: CheckedConfig) -> None:
    function, limit = config.get("reward.function"), config.get("data.max_response_length")
    path, _, name = (function or "").rpartition(":")
    config.require(
        function is None or bool(path and name.isidentifier()) or function.startswith(("http://", "https://")),
        "reward.function",
        "does not name a function in a file",
        expected="path.py:name, or an http(s) URL",
        hint="write e.g. reward.function=my_reward.py:compute_score",
    )
    uses_model = any(entry.split()[1:] == ["model"] for entry in config.get("reward.components"))
    config.require(
        config.get("reward_model.path") is not None or not uses_model,
        "reward.components",
        "uses the reward model, but reward_model.path is null",
        expected="the directory of a reward model",
        hint="set reward_model.path",
    )
    config.require(
        config.get("reward.overlong_buffer_length") <= limit,
        "reward.overlong_buffer_length",
        f"is more than data.max_response_length = {limit}",
        expected=f"at most {limit}",
        hint="give a shorter buffer",
    )


def _check_importance(config: CheckedConfig) -> None:
    low, high = config.get("algorithm.importance_low"), config.get("algorithm.importance_high")
    config.require(
        low < high,
        "algorithm.importance_low",
        f"is not below algorithm.importance_high = {high!r}",
        expected="importance_low < importance_high",
        hint="the defaults are 0.5 and 2.0",
    )


def _check_packages(config: CheckedConfig) -> None:
    """Check that the optional packages that the settings need are installed, on every rank."""
    for name, off, package in (
        ("observability.wandb", "off", "wandb"),
        ("trainer.debug_rank", None, "debugpy"),
        *((f"{section}.quantization", "none", "bitsandbytes") for section in TRAINED),
    ):
        config.require(
            config.get(name) == off or importlib.util.find_spec(package) is not None,
            name,
            f"needs the package {package}",
            expected=f"the package, or {render(off)}",
            hint=f"pip install {package}, at the version of requirements.txt",
        )


_RULES = (
    _check_data,
    _check_weights,
    _check_pass_rates,
    _check_zero_stages,
    *ROLLOUT_RULES,
    _check_layers,
    _check_reward,
    _check_importance,
    _check_teachers,
    _check_kind,
    _check_reset,
    _check_packages,
    _check_run,
)
