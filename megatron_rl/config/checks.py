# SPDX-License-Identifier: Apache-2.0
"""Sanity of a config that needs no world size, no model and no data.

What cannot be done, or would make the numbers mean something else than the user expects, is refused here, before any
process group exists; what has no effect is said in `idle.py`. What needs the world size is in `batch_plan.py`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from megatron_rl.config.adapter_checks import check_quantization
from megatron_rl.config.checked import CheckedConfig
from megatron_rl.config.data import LONGEST_PERIOD, reduce_weights
from megatron_rl.config.fields import read_fields
from megatron_rl.config.observability_checks import check_debugging, check_observability
from megatron_rl.config.rollout_checks import check_agents, check_rollout, check_schedule
from megatron_rl.config.routing_checks import check_mtp, check_routers
from megatron_rl.config.schema import LayoutConfig, RunConfig
from megatron_rl.config.teacher_checks import check_reset, check_teachers
from megatron_rl.config.zero_checks import check_zero_stages

_LAYOUT_SECTIONS = ("actor", "critic", "reward_model")
_OPTIMIZER_NOT_NEGATIVE = (
    "lr",
    "min_lr",
    "lr_warmup_steps",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "clip_grad",
    "lora.rank",
)
_TRAINED = ("actor", "critic")

_AT_LEAST_ONE = (
    "data.train_batch_size",
    "data.validation_batch_size",
    "data.validation_limit",
    "data.max_prompt_length",
    "data.max_response_length",
    "actor.ppo_mini_batch_size",
    "actor.ppo_epochs",
    "rollout.tensor_model_parallel_size",
    "reference.reset_every",
    "rollout.n",
    "rollout.max_num_seqs",
    "rollout.max_kept_tokens",
    "rollout.validation_n",
    "reward.service_batch_size",
    "reward.service_concurrency",
    "reward.service_max_answer_bytes",
    "algorithm.max_sampling_rounds",
    "agents.max_turns",
    "agents.workers",
    "agents.episodes_in_flight",
    "schedule.steps_per_update",
    "trainer.total_steps",
    "trainer.total_epochs",
    "trainer.capture_step",
    "checkpoint.keep_last",
    "checkpoint.max_failed_saves",
    "observability.console_every",
    *(
        name
        for section in _LAYOUT_SECTIONS
        for name, info in read_fields(LayoutConfig, section).items()
        if info.kind is int
    ),
    "actor.max_num_seqs",
    "critic.max_num_seqs",
)
_POSITIVE = (
    "rollout.temperature",
    "rollout.kv_cache_gib",
    "rollout.gpu_memory_utilization",
    "rollout.server.start_seconds",
    "rollout.server.silent_seconds",
    "agents.episode_timeout_seconds",
    "agents.turn_timeout_seconds",
    "reward.timeout_seconds",
    "reward.service_timeout_seconds",
    "hybrid.bucket_bytes",
    "algorithm.clip_eps_low",
    "algorithm.clip_eps_high",
    "algorithm.kl_target",
    "algorithm.kl_horizon",
    "algorithm.importance_high",
    "algorithm.reject_sequence_above",
    "algorithm.sapo_tau_pos",
    "algorithm.sapo_tau_neg",
    "algorithm.cov_ratio",
    "algorithm.clip_cov_high",
    "algorithm.loss_scale_factor",
    "critic.value_clip",
    "actor.graph_memory_gib",
    "critic.graph_memory_gib",
    "trainer.collective_timeout",
    "checkpoint.save_every_minutes",
    *(f"{section}.{leaf}" for section in _TRAINED for leaf in ("adam_eps", "lora.alpha")),
)
_NOT_NEGATIVE = (
    "actor.mtp_lr",
    "schedule.max_staleness",
    "rollout.validation_temperature",
    "rollout.server.restarts",
    "algorithm.gamma",
    "algorithm.gae_lambda",
    "algorithm.kl_coef",
    "algorithm.entropy_coef",
    "algorithm.kl_cov_coef",
    "algorithm.importance_low",
    "agents.max_failed_share",
    "reward.max_failed_share",
    "reward.workers",
    "reward.service_retries",
    "reward.service_backoff_seconds",
    "reward.overlong_buffer_length",
    "reward.overlong_penalty",
    "trainer.test_freq",
    "trainer.save_freq",
    "trainer.seed",
    "trainer.critic_warmup",
    "observability.histograms_every",
    *(f"{section}.{leaf}" for section in _TRAINED for leaf in _OPTIMIZER_NOT_NEGATIVE),
)
_MAY_CHANGE = (
    "model",
    "critic",
    "reference",
    "reward_model",
    "teachers",
    "train_files",
    "reward",
    "plugins",
)  # see run/changes.py
_AT_MOST_ONE = (
    "algorithm.gamma",
    "algorithm.gae_lambda",
    "algorithm.cov_ratio",
    "agents.max_failed_share",
    "reward.max_failed_share",
)
_BELOW_ONE = ("algorithm.clip_eps_low", *(f"{section}.adam_beta{n}" for section in _TRAINED for n in (1, 2)))
_HINTS = {
    "rollout.temperature": "greedy sampling gives every response of a group the same reward; use 1.0",
    "trainer.test_freq": "0 switches it off",
    "trainer.save_freq": "0 switches it off",
    "algorithm.kl_coef": "0 switches the KL term off",
}


def check_config(cfg: RunConfig, sources: Mapping[str, str] | None = None) -> None:
    """Refuse a config whose sections cannot work, whatever the world size.

    Args:
        cfg: the resolved config.
        sources: where each setting comes from (full name -> place), for the errors.

    Raises:
        UserError: the first thing found.
    """
    config = CheckedConfig(cfg, sources or {})
    _check_bounds(config)
    _check_data(config)
    for section in _TRAINED:
        _check_step_mode(config, section)
        check_quantization(config, section)
    check_zero_stages(config)
    check_rollout(config)
    check_routers(config)
    check_mtp(config)
    check_schedule(config)
    check_agents(config)
    _check_reward(config)
    _check_algorithm(config)
    check_teachers(config)
    check_reset(config)
    check_observability(config)
    check_debugging(config)
    unknown = sorted(set(config.get("checkpoint.allow_changes")) - set(_MAY_CHANGE))
    config.require(
        not unknown,
        "checkpoint.allow_changes",
        f"names {', '.join(unknown)}",
        expected=f"of {', '.join(_MAY_CHANGE)}",
        hint="an error on resuming says which name it takes",
    )
    config.require(
        bool(config.get("data.validation_files")) or not config.get("trainer.val_only"),
        "trainer.val_only",
        "without a file to validate on",
        expected="data.validation_files",
        hint="name a file there",
    )
    config.require(
        config.get("checkpoint.resume") != "must" or config.get("trainer.run_dir") is not None,
        "checkpoint.resume",
        "needs to know the run",
        expected="trainer.run_dir",
        hint="set trainer.run_dir to that of the run",
    )


def _check_bounds(config: CheckedConfig) -> None:
    for name in _AT_LEAST_ONE:
        value, hint = config.get(name), _hint(name, "1 or more")
        config.require(value is None or value >= 1, name, "is too small", expected=">= 1", hint=hint)
    for name in _POSITIVE:
        value = config.get(name)
        config.require(value is None or value > 0, name, "is not positive", expected="> 0", hint=_hint(name, "> 0"))
    for name in _NOT_NEGATIVE:
        config.require(config.get(name) >= 0, name, "is negative", expected=">= 0", hint=_hint(name, "0 or more"))
    for name in _BELOW_ONE:
        config.require(config.get(name) < 1, name, "is too large", expected="< 1", hint=_hint(name, "< 1"))
    for name in _AT_MOST_ONE:
        config.require(config.get(name) <= 1, name, "is too large", expected="<= 1", hint=f"set {name}=1")
    for section in _TRAINED:
        lr, name = config.get(f"{section}.lr"), f"{section}.min_lr"
        config.require(
            config.get(name) <= lr,
            name,
            f"is above the peak {section}.lr = {lr!r}",
            expected="min_lr <= lr",
            hint=f"lower {name}",
        )
    name = "rollout.gpu_memory_utilization"
    config.require(config.get(name) <= 1, name, "is more than all of it", expected="0 < share <= 1", hint="use 0.5")
    name = "trainer.log_rollouts"
    config.require(config.get(name) >= -1, name, "is negative", expected=">= -1", hint="-1 writes all of them")


def _hint(name: str, wanted: str) -> str:
    return _HINTS.get(name, f"set {name} to {wanted}")


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
    _check_weights(config)
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
    config.require(
        len(weights) == len(files),
        name,
        f"has {len(weights)} numbers for {len(files)} files",
        expected="a number per file of data.train_files, in their order",
        hint="a file without prompts in the mixture is left out of both",
    )
    config.require(
        min(weights) > 0, name, "has a number that is not positive", expected="> 0", hint="leave the file out"
    )
    period = sum(reduce_weights(weights))
    config.require(
        period <= LONGEST_PERIOD,
        name,
        f"repeats after {period} prompts",
        expected=f"numbers whose proportions repeat within {LONGEST_PERIOD} prompts",
        hint="write fewer digits; they need not add up to 1: [2, 1] for thirds",
    )


def _check_step_mode(config: CheckedConfig, section: str) -> None:
    """What fixed shapes and graphs cannot do; whether there is a GPU is asked in `training/step.py`."""
    name = f"{section}.step_mode"
    mode, budget = config.get(name), config.get(f"{section}.max_tokens_per_microbatch")
    if mode == "eager":
        return
    sizes = config.get(f"{section}.bucket_tokens")
    config.require(
        not sizes or (min(sizes) > 0 and max(sizes) >= budget),
        f"{section}.bucket_tokens",
        f"has no bucket for a microbatch of {section}.max_tokens_per_microbatch = {budget} tokens",
        expected=f"sizes above 0, the largest at least {budget}",
        hint=f"add {budget} to the list",
    )
    if mode == "graph":
        _check_graph(config, section)


def _check_graph(config: CheckedConfig, section: str) -> None:
    """What the graphs of a step do not hold yet."""
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


def _check_reward(config: CheckedConfig) -> None:
    function = config.get("reward.function")
    path, _, name = (function or "").rpartition(":")
    config.require(
        function is None or bool(path and name.isidentifier()),
        "reward.function",
        "does not name a function in a file",
        expected="path.py:name",
        hint="write e.g. reward.function=my_reward.py:compute_score",
    )
    limit = config.get("data.max_response_length")
    config.require(
        config.get("reward.overlong_buffer_length") <= limit,
        "reward.overlong_buffer_length",
        f"is more than data.max_response_length = {limit}",
        expected=f"at most {limit}",
        hint="give a shorter buffer",
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


def _check_algorithm(config: CheckedConfig) -> None:
    dual = config.get("algorithm.dual_clip")
    config.require(
        dual is None or dual > 1,
        "algorithm.dual_clip",
        "would clip every negative advantage",
        expected="> 1, or null",
        hint="3.0 is the value of the paper",
    )
    low, high = config.get("algorithm.importance_low"), config.get("algorithm.importance_high")
    config.require(
        low < high,
        "algorithm.importance_low",
        f"is not below algorithm.importance_high = {high!r}",
        expected="importance_low < importance_high",
        hint="the defaults are 0.5 and 2.0",
    )
