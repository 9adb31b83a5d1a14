# SPDX-License-Identifier: Apache-2.0
"""Checks of a config that need no world size, no model and no data.

Settings that cannot work, or would change the meaning of the numbers, are refused here, before any process group
exists; `idle.py` reports settings without effect, `batch_plan.py` checks against the world size.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping

from megatron_rl.config.checked import CheckedConfig, Mistakes
from megatron_rl.config.data import LONGEST_PERIOD, reduce_weights
from megatron_rl.config.fields import list_fields
from megatron_rl.config.model_checks import (
    TEACHER_RULES,
    check_mtp,
    check_quantization,
    check_routers,
    check_zero_stages,
)
from megatron_rl.config.options import list_options
from megatron_rl.config.rollout_checks import ROLLOUT_RULES, check_validation_sets
from megatron_rl.config.schema import RunConfig

_TRAINED = ("actor", "critic")


def check_config(cfg: RunConfig, sources: Mapping[str, str] | None = None, mistakes: Mistakes | None = None) -> None:
    """Refuse a config whose sections cannot work with any world size.

    Args:
        sources: full name -> place of each setting, for the errors.
        mistakes: earlier mistakes in the settings.

    Raises:
        UserError: all mistakes.
    """
    config = CheckedConfig(cfg, sources or {}, mistakes or Mistakes())
    _check_bounds(config)
    config.apply(check_validation_sets)
    for rule in (_check_step_mode, check_quantization, _check_rates):
        for section in _TRAINED:
            config.apply(rule, section)
    for rule in _RULES:
        config.apply(rule)
    config.mistakes.raise_all()


def _check_bounds(config: CheckedConfig) -> None:
    """Collect values outside their declared bounds; rules that depend on them are skipped."""
    for name, info in (list_fields(config.config.teachers) | list_options()).items():
        if name not in config.mistakes.refused and (violation := info.find_violation(config.get(name))):
            config.require(False, name, **violation)
            config.mistakes.refused.add(name)


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


def _check_data(config: CheckedConfig) -> None:
    train, validation = config.get("data.train_files"), config.get("data.validation_files")
    config.require(
        bool(train),
        "data.train_files",
        "names no file",
        expected="at least one file",
        hint="give a JSONL file",
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
    """Check fixed shapes and graphs; `training/step.py` checks for a GPU."""
    name = f"{section}.step_mode"
    mode, budget = config.get(name), config.get(f"{section}.max_tokens_per_microbatch")
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
    if mode == "graph":
        _check_graph(config, section)


def _check_graph(config: CheckedConfig, section: str) -> None:
    """Refuse features that a captured step does not support yet."""
    exchange = "how many tokens experts of other ranks get depends on the routes, and the host reads it"
    refused = [("expert_model_parallel_size", exchange, [1], "1")]
    if config.get(f"{section}.pipeline_model_parallel_size") > 1:
        refused += [
            ("virtual_pipeline_model_parallel_size", "microbatches of an interleaved schedule", [None, 1], "null"),
            ("overlap_grad_reduce", "the reduction during the backward of a pipeline stage", [False], "false"),
        ]
    for leaf, what, allowed, expected in refused:
        config.require(
            config.get(f"{section}.{leaf}") in allowed,
            f"{section}.{leaf}",
            f"is not captured yet ({what}): {section}.step_mode = 'graph' cannot take it",
            expected=expected,
            hint=f"set {section}.step_mode=static: the same step without capture",
        )
    for leaf in ("offload_gradients", "offload_optimizer"):
        config.require(
            not config.get(f"{section}.{leaf}"),
            f"{section}.{leaf}",
            f"moves memory that the graphs of {section}.step_mode = 'graph' have captured",
            expected="false",
            hint=f"remove it, or set {section}.step_mode=static",
        )


def _check_overlong(config: CheckedConfig) -> None:
    limit = config.get("data.max_response_length")
    config.require(
        config.get("reward.overlong_buffer_length") <= limit,
        "reward.overlong_buffer_length",
        f"is more than data.max_response_length = {limit}",
        expected=f"at most {limit}",
        hint="give a shorter buffer",
    )


def _check_reward(config: CheckedConfig) -> None:
    function = config.get("reward.function")
    path, _, name = (function or "").rpartition(":")
    config.require(
        function is None or bool(path and name.isidentifier()) or function.startswith(("http://", "https://")),
        "reward.function",
        "does not name a function in a file",
        expected="path.py:name, or an http(s) URL",
        hint="write e.g. reward.function=my_reward.py:compute_score",
    )
    uses_model = any(entry.split()[1:] == ["model"] for entry in config.get("reward.components"))
    has_model = config.get("reward_model.path") is not None
    config.require(
        has_model or not uses_model,
        "reward.components",
        "uses the reward model, but reward_model.path is null",
        expected="the directory of a reward model",
        hint="set reward_model.path",
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


def _check_observability(config: CheckedConfig) -> None:
    """Check that the package of each enabled metrics service is installed."""
    config.require(
        config.get("observability.wandb") == "off" or importlib.util.find_spec("wandb") is not None,
        "observability.wandb",
        "needs the package wandb",
        expected="the package, or off",
        hint="pip install wandb, at the version of requirements.txt",
    )


def _check_debugging(config: CheckedConfig) -> None:
    """Check that the debugger is installed, on every rank, and that a breakpoint step has a rank."""
    rank, step = config.get("trainer.debug_rank"), config.get("trainer.breakpoint_step")
    config.require(
        rank is None or importlib.util.find_spec("debugpy") is not None,
        "trainer.debug_rank",
        "needs the package debugpy",
        expected="the package, or null",
        hint="pip install debugpy, at the version of requirements.txt",
    )
    config.require(
        step is None or rank is not None,
        "trainer.breakpoint_step",
        "without a rank that stops there",
        expected="trainer.debug_rank",
        hint="add --debug-rank R, or leave this out",
    )


_RULES = (
    _check_data,
    _check_weights,
    _check_pass_rates,
    check_zero_stages,
    *ROLLOUT_RULES,
    check_routers,
    check_mtp,
    _check_overlong,
    _check_reward,
    _check_importance,
    *TEACHER_RULES,
    _check_observability,
    _check_debugging,
    _check_run,
)
