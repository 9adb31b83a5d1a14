# SPDX-License-Identifier: Apache-2.0
"""Settings that others leave without effect: each is reported once, and reset so that no check refuses it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, replace
from typing import Any

from megatron_rl.config.schema import TRAINED, RunConfig


def put_aside(config: RunConfig, sources: Mapping[str, str]) -> tuple[RunConfig, list[str]]:
    """Reset settings without effect; return the config, and a note with the place of each reset setting."""
    notes = []
    for is_idle, name, why, *instead in list(_find_idle(config)):
        section, _, leaf = name.partition(".")
        role = getattr(config, section)
        item = next(item for item in fields(role) if item.name == leaf)
        default = item.default if item.default_factory is MISSING else item.default_factory()
        value, taken = getattr(role, leaf), instead[0] if instead else default
        if is_idle and value != taken:
            place = f" ({sources[name]})" if name in sources else ""
            notes.append(f"ignored: {name}={value!r}{place}, {why}")
            config = replace(config, **{section: replace(role, **{leaf: taken})})
    return config, notes


def _find_idle(config: RunConfig) -> Iterator[tuple[Any, ...]]:
    """Find settings that another setting leaves without effect.

    Yields:
        (is idle, full name, reason, optional replacement) of every candidate. An idle setting is reset to the
        replacement, or to its default if there is none.
    """
    for section in (*TRAINED, "reward_model"):
        yield from _find_in_role(config, section)
    algorithm, components = config.algorithm, config.reward.components
    engine, no_kl = f"rollout.engine {config.rollout.engine!r}", algorithm.kl_coef == 0
    is_alone = bool(config.actor.lora.rank) and config.reference.path is None
    yield is_alone, "reference.offload", "the reference is the actor without its adapters (actor.lora.rank)"
    yield no_kl, "reference.reset_every", "algorithm.kl_coef is 0: there is no reference"
    yield config.rollout.supports("is_actor"), "hybrid.alias_weights", f"{engine} has no weights of its own"
    yield not config.rollout.supports("is_server"), "rollout.server", f"{engine} is no server"
    yield config.layout.mode == "given", "layout.lengths", "layout.mode is 'given'"
    yield not config.data.validation_files, "trainer.test_freq", "data.validation_files is empty"
    yield config.data.pass_rates is None, "data.pass_rate_range", "data.pass_rates is null"
    yield no_kl, "algorithm.kl_controller", "algorithm.kl_coef is 0"
    yield no_kl, "algorithm.kl_in", "algorithm.kl_coef is 0"
    mode = algorithm.importance_sampling
    why = f"algorithm.importance_sampling is {mode!r}"
    yield mode in ("none", "bypass"), "algorithm.importance_normalize", why
    why = "algorithm.dynamic_sampling is False"
    yield not algorithm.dynamic_sampling, "algorithm.dynamic_sampling_metric", why
    has_model = any(component.split()[1:] == ["model"] for component in components)
    yield components and not has_model, "reward_model.path", "reward.components does not use 'model'"


def _find_in_role(config: RunConfig, section: str) -> Iterator[tuple[Any, ...]]:
    role, prompts = getattr(config, section), f"{section}.share_prompts"
    name = f"{section}.tensor_model_parallel_size"
    yield role.tensor_model_parallel_size == 1, f"{section}.sequence_parallel", f"{name} is 1"
    name = f"{section}.pipeline_model_parallel_size"
    yield role.pipeline_model_parallel_size == 1, f"{section}.virtual_pipeline_model_parallel_size", f"{name} is 1"
    if getattr(role, "mtp_lr", 0):
        yield True, prompts, f"{section}.mtp_lr: a shared row has no single token behind it", False
    elif role.share_prompts == "tree":
        if section == "actor" and role.router_replay != "off":
            why = f"actor.router_replay is {role.router_replay!r}: each branch has routes of its own"
            yield True, prompts, why
        elif role.step_mode != "eager":
            yield True, prompts, f"{section}.step_mode is {role.step_mode!r}: prefix trees have no fixed shape"
    if section not in TRAINED:
        return
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
