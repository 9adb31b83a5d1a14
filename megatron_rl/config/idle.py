# SPDX-License-Identifier: Apache-2.0
"""Settings without effect in combination with others: each is reported once, and reset if it would be in the way.

A user who changes one thing (one GPU instead of four, no validation, another step mode) need not change three.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from megatron_rl.config.schema import RunConfig
from megatron_rl.config.sections import ServerConfig

_Idle = tuple[str, str, Any]
_PASS_RATES = [0.1, 0.9]
_SHAPE_SETTINGS = {"bucket_tokens": [], "graph_memory_gib": None}


def put_aside(config: RunConfig, sources: Mapping[str, str]) -> tuple[RunConfig, list[str]]:
    """Return the config with settings that have no effect reset, and a note for each.

    Args:
        sources: full name -> place of each setting.
    """
    notes = []
    for name, why, value in list(_find_idle(config)):
        section, _, leaf = name.partition(".")
        role = getattr(config, section)
        place = f" ({sources[name]})" if name in sources else ""
        notes.append(f"ignored: {name}={getattr(role, leaf)!r}{place}, {why}")
        config = replace(config, **{section: replace(role, **{leaf: value})})
    return config, notes


def _find_idle(config: RunConfig) -> Iterator[_Idle]:
    """Yield the full name of each idle setting, the reason, and the value that the run takes instead."""
    for section in ("actor", "critic", "reward_model"):
        yield from _find_in_layout(config, section)
    for section in ("actor", "critic"):
        yield from _find_in_step(config, section)
    if config.reference.offload and config.actor.lora.rank and config.reference.path is None:
        yield ("reference.offload", "the reference is the actor without its adapters (actor.lora.rank)", False)
    if config.reference.reset_every is not None and config.algorithm.kl_coef == 0:
        yield ("reference.reset_every", "algorithm.kl_coef is 0: there is no reference", None)
    if config.rollout.supports("is_actor") and not config.hybrid.alias_weights:
        yield ("hybrid.alias_weights", f"rollout.engine {config.rollout.engine!r} has no weights of its own", True)
    if not config.rollout.supports("is_server") and config.rollout.server != ServerConfig():
        yield ("rollout.server", f"rollout.engine {config.rollout.engine!r} is no server", ServerConfig())
    if config.layout.lengths is not None and config.layout.mode == "given":
        yield ("layout.lengths", "layout.mode is 'given'", None)
    if config.trainer.test_freq and not config.data.validation_files:
        yield ("trainer.test_freq", "data.validation_files is empty", 0)
    if config.data.pass_rate_range != _PASS_RATES and config.data.pass_rates is None:
        yield ("data.pass_rate_range", "data.pass_rates is null", _PASS_RATES)
    for leaf, default in (("kl_controller", "fixed"), ("kl_in", "loss")):
        if getattr(config.algorithm, leaf) != default and config.algorithm.kl_coef == 0:
            yield (f"algorithm.{leaf}", "algorithm.kl_coef is 0", default)
    for leaf, default, switch, off in (
        ("importance_normalize", False, "importance_sampling", ("none", "bypass")),
        ("dynamic_sampling_metric", None, "dynamic_sampling", (False,)),
    ):
        value = getattr(config.algorithm, switch)
        if getattr(config.algorithm, leaf) != default and value in off:
            yield (f"algorithm.{leaf}", f"algorithm.{switch} is {value!r}", default)
    components = config.reward.components
    if config.reward_model.path is not None and components and not any(c.split()[1:] == ["model"] for c in components):
        yield ("reward_model.path", "reward.components does not use 'model'", None)


def _find_in_layout(config: RunConfig, section: str) -> Iterator[_Idle]:
    role = getattr(config, section)
    if role.sequence_parallel and role.tensor_model_parallel_size == 1:
        yield (f"{section}.sequence_parallel", f"{section}.tensor_model_parallel_size is 1", False)
    if role.virtual_pipeline_model_parallel_size is not None and role.pipeline_model_parallel_size == 1:
        yield (f"{section}.virtual_pipeline_model_parallel_size", f"{section}.pipeline_model_parallel_size is 1", None)
    if role.share_prompts and getattr(role, "mtp_lr", 0):
        yield (f"{section}.share_prompts", f"{section}.mtp_lr: a shared row has no single token behind it", False)
    elif role.share_prompts == "tree" and (why := _find_what_hinders_trees(role, section)):
        yield (f"{section}.share_prompts", why, True)


def _find_what_hinders_trees(role: Any, section: str) -> str | None:
    if section == "actor" and role.router_replay != "off":
        return f"actor.router_replay is {role.router_replay!r}: each branch has routes of its own"
    if role.step_mode != "eager":
        return f"{section}.step_mode is {role.step_mode!r}: prefix trees have no fixed shape"
    return None


def _find_in_step(config: RunConfig, section: str) -> Iterator[_Idle]:
    role = getattr(config, section)
    mode = f"{section}.step_mode is {role.step_mode!r}"
    if role.min_lr > role.lr and role.lr_decay_style == "constant":
        yield (f"{section}.min_lr", f"{section}.lr_decay_style is 'constant'", 0.0)
    modes = {config.actor.step_mode, config.critic.step_mode}
    for leaf, default in _SHAPE_SETTINGS.items() if section == "actor" else ():
        is_used = "graph" in modes or ("static" in modes and leaf != "graph_memory_gib")
        if not is_used and getattr(role, leaf) != default:
            yield (f"{section}.{leaf}", mode, default)
    if role.step_mode == "eager":
        return
    if role.share_prompts and role.context_parallel_size > 1:
        yield (
            f"{section}.share_prompts",
            f"{mode}: shared prompts have no fixed shape with "
            f"{section}.context_parallel_size = {role.context_parallel_size}",
            False,
        )
