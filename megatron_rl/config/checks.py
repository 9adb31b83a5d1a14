# SPDX-License-Identifier: Apache-2.0
"""Sanity of a config that needs no world size, no model and no data.

A setting that would have no effect, or that would make the numbers mean something else than the
user expects, is refused here, before any process group exists. What needs the world size is in
`batch_plan.py`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_rl.config.schema import RunConfig
from megatron_rl.types import UserError

ADV_ESTIMATORS = ("grpo",)
ROLLOUT_ENGINES = ("vllm", "hf")

_AT_LEAST_ONE = (
    "data.train_batch_size", "data.validation_batch_size", "data.validation_limit", "data.max_prompt_length",
    "data.max_response_length", "actor.tensor_model_parallel_size", "actor.pipeline_model_parallel_size",
    "actor.virtual_pipeline_model_parallel_size", "actor.context_parallel_size",
    "actor.expert_model_parallel_size", "actor.ppo_mini_batch_size", "actor.ppo_epochs",
    "actor.max_tokens_per_microbatch", "rollout.tensor_model_parallel_size", "rollout.n", "rollout.max_num_seqs",
    "trainer.total_steps", "trainer.total_epochs", "observability.console_every",
)
_POSITIVE = (
    "actor.adam_eps", "rollout.temperature", "rollout.kv_cache_gib", "rollout.gpu_memory_utilization",
    "hybrid.bucket_bytes", "algorithm.clip_eps_low", "algorithm.clip_eps_high", "trainer.timeout_minutes",
)
_NOT_NEGATIVE = (
    "actor.lr", "actor.min_lr", "actor.lr_warmup_steps", "actor.weight_decay", "actor.adam_beta1",
    "actor.adam_beta2", "actor.clip_grad", "rollout.validation_temperature", "algorithm.kl_coef",
    "algorithm.entropy_coef", "trainer.test_freq", "trainer.save_freq", "trainer.seed",
)
_BELOW_ONE = ("actor.adam_beta1", "actor.adam_beta2", "algorithm.clip_eps_low")
_HINTS = {
    "rollout.temperature": "greedy sampling gives every response of a group the same reward; use 1.0",
    "trainer.test_freq": "0 switches it off",
    "trainer.save_freq": "0 switches it off",
    "algorithm.kl_coef": "0 switches the KL term off",
}


@dataclass(frozen=True)
class _Config:
    """A config whose values are read by full name, with the place each value comes from."""

    config: RunConfig
    sources: Mapping[str, str] = field(default_factory=dict)

    def get(self, name: str) -> Any:
        section, _, leaf = name.partition(".")
        return getattr(getattr(self.config, section), leaf)

    def require(self, holds: bool, name: str, why: str, *, expected: str, hint: str) -> None:
        """Raise for `name` unless `holds`; `why` continues the sentence "name = value"."""
        if holds:
            return
        place = self.sources.get(name)
        raise UserError(
            f"{name} = {self.get(name)!r} {why}", source=f"{name} ({place})" if place else name,
            expected=expected, hint=hint,
        )


def check_config(cfg: RunConfig, sources: Mapping[str, str] | None = None) -> None:
    """Refuse a config whose sections cannot work, whatever the world size.

    Args:
        cfg: the resolved config.
        sources: where each setting comes from (full name -> place), for the errors.

    Raises:
        UserError: the first thing found.
    """
    config = _Config(cfg, sources or {})
    _check_bounds(config)
    _check_data(config)
    _check_layout(config)
    _check_rollout(config)
    _check_algorithm(config)


def _check_bounds(config: _Config) -> None:
    for name in _AT_LEAST_ONE:
        value = config.get(name)
        config.require(value is None or value >= 1, name, "is too small", expected=">= 1", hint=_hint(name, "1"))
    for name in _POSITIVE:
        value = config.get(name)
        config.require(value is None or value > 0, name, "is not positive", expected="> 0", hint=_hint(name, "> 0"))
    for name in _NOT_NEGATIVE:
        config.require(config.get(name) >= 0, name, "is negative", expected=">= 0", hint=_hint(name, "0"))
    for name in _BELOW_ONE:
        config.require(config.get(name) < 1, name, "is too large", expected="< 1", hint=_hint(name, "< 1"))
    config.require(
        not config.get("actor.offload_optimizer") or config.get("model.dtype") == "bfloat16", "actor.offload_optimizer",
        "needs model.dtype=bfloat16", expected="float32 main weights that are not the model's own",
        hint="with model.dtype=float32 the optimizer works on the weights that the engine needs")
    name = "rollout.gpu_memory_utilization"
    config.require(config.get(name) <= 1, name, "is more than all of it", expected="0 < share <= 1", hint="use 0.5")
    name = "trainer.log_rollouts"
    config.require(config.get(name) >= -1, name, "is negative", expected=">= -1", hint="-1 writes all of them")
    config.require(
        config.get("actor.min_lr") <= config.get("actor.lr"), "actor.min_lr",
        f"is above the peak actor.lr = {config.get('actor.lr')!r}", expected="min_lr <= lr", hint="lower actor.min_lr",
    )


def _hint(name: str, value: str) -> str:
    return _HINTS.get(name, f"set {name} to {value if not value[0].isdigit() else value + ' or more'}")


def _check_data(config: _Config) -> None:
    train, validation = config.get("data.train_files"), config.get("data.validation_files")
    config.require(
        bool(train), "data.train_files", "names no file", expected="at least one file", hint="give a JSONL file",
    )
    for name, files in (("data.train_files", train), ("data.validation_files", validation)):
        paths = [os.path.normpath(path) for path in files]
        repeated = sorted({path for path in paths if paths.count(path) > 1})
        config.require(
            not repeated, name, f"names {', '.join(repeated)} twice", expected="each file once",
            hint="raise trainer.total_epochs to repeat prompts",
        )
    shared = sorted({os.path.normpath(p) for p in train} & {os.path.normpath(p) for p in validation})
    config.require(
        not shared, "data.validation_files", f"shares {', '.join(shared)} with data.train_files",
        expected="files that are not trained on", hint="split the file",
    )
    config.require(
        config.get("trainer.test_freq") == 0 or bool(validation), "trainer.test_freq",
        "has no effect: data.validation_files is empty", expected="0 without validation files",
        hint="give data.validation_files or set trainer.test_freq=0",
    )


def _check_layout(config: _Config) -> None:
    tp_size = config.get("actor.tensor_model_parallel_size")
    pp_size = config.get("actor.pipeline_model_parallel_size")
    vpp_size = config.get("actor.virtual_pipeline_model_parallel_size")
    name = "actor.context_parallel_size"
    config.require(
        config.get(name) == 1, name, "is not supported yet (context parallelism)", expected="1",
        hint=f"set {name}=1 and use tensor, pipeline or data parallelism",
    )
    config.require(
        not config.get("actor.sequence_parallel") or tp_size > 1, "actor.sequence_parallel",
        f"has no effect with actor.tensor_model_parallel_size = {tp_size}", expected="tensor parallelism of 2 or more",
        hint="set actor.sequence_parallel=false or raise actor.tensor_model_parallel_size",
    )
    name = "actor.virtual_pipeline_model_parallel_size"
    config.require(
        vpp_size is None or pp_size > 1, name, f"needs a pipeline, but actor.pipeline_model_parallel_size = {pp_size}",
        expected="null, or pipeline_model_parallel_size of 2 or more", hint=f"remove {name} or raise the pipeline size",
    )
    config.require(
        vpp_size is None or vpp_size >= 2, name, "is a plain pipeline", expected="null, or 2 chunks or more",
        hint=f"remove {name}, or set it to 2",
    )


def _check_rollout(config: _Config) -> None:
    engine = config.get("rollout.engine")
    config.require(
        engine in ROLLOUT_ENGINES, "rollout.engine", "is not known", expected=" or ".join(ROLLOUT_ENGINES),
        hint=f"set rollout.engine={ROLLOUT_ENGINES[0]}",
    )
    config.require(
        engine != "hf" or config.get("rollout.tensor_model_parallel_size") == 1, "rollout.tensor_model_parallel_size",
        "is not supported by rollout.engine = 'hf'", expected="1", hint="set it to 1, or rollout.engine=vllm",
    )
    for name, off in (("rollout.top_p", 1.0), ("rollout.top_k", -1)):
        config.require(
            config.get(name) == off, name,
            "would sample from a cut distribution while training scores the full softmax", expected=repr(off),
            hint=f"set {name}={off}; rollout.temperature is applied on both sides",
        )


def _check_algorithm(config: _Config) -> None:
    config.require(
        config.get("algorithm.adv_estimator") in ADV_ESTIMATORS, "algorithm.adv_estimator", "is not known",
        expected=" or ".join(ADV_ESTIMATORS), hint=f"set algorithm.adv_estimator={ADV_ESTIMATORS[0]}",
    )
    function = config.get("reward.function")
    path, _, name = (function or "").rpartition(":")
    config.require(
        function is None or bool(path and name.isidentifier()), "reward.function", "does not name a function in a file",
        expected="path.py:name", hint="write e.g. reward.function=my_reward.py:compute_score",
    )
