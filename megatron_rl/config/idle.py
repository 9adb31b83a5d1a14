# SPDX-License-Identifier: Apache-2.0
"""Settings that have no effect beside the others: each is said once and, where it would be in the way, put aside.

Who changes one thing (one GPU instead of four, no validation, another step mode) need not change three.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from megatron_rl.config.schema import LayoutConfig, RunConfig, TrainableConfig

_SHAPE_SETTINGS = {"bucket_tokens": [], "max_num_seqs": 64, "graph_memory_gib": None}


@dataclass(frozen=True)
class _Idle:
    """A leaf without effect: why, and the value that the run takes instead of the one that was given."""

    leaf: str
    why: str
    value: Any


def put_aside(config: RunConfig, sources: Mapping[str, str]) -> tuple[RunConfig, list[str]]:
    """The config without its idle settings, and a note for each.

    Args:
        config: as it was given.
        sources: where each setting comes from (full name -> place).
    """
    found = {section: list(_find_idle_in_role(section, getattr(config, section)))
             for section in ("actor", "critic", "reward_model")}
    for section in ("actor", "critic"):
        found[section] += _find_idle_offload(config, getattr(config, section))
    found |= {"trainer": list(_find_idle_in_trainer(config)), "algorithm": list(_find_idle_in_algorithm(config)),
              "reward_model": [*found["reward_model"], *_find_idle_reward_model(config)]}
    sections, notes = {}, []
    for section, items in found.items():
        given = getattr(config, section)
        sections[section] = replace(given, **{item.leaf: item.value for item in items})
        for item in items:
            name = f"{section}.{item.leaf}"
            place = f" ({sources[name]})" if name in sources else ""
            notes.append(f"ignored: {name}={getattr(given, item.leaf)!r}{place}, {item.why}")
    return replace(config, **sections), notes


def _find_idle_in_role(section: str, role: LayoutConfig) -> Iterator[_Idle]:
    if role.sequence_parallel and role.tensor_model_parallel_size == 1:
        yield _Idle("sequence_parallel", f"{section}.tensor_model_parallel_size is 1", False)
    if role.virtual_pipeline_model_parallel_size is not None and role.pipeline_model_parallel_size == 1:
        yield _Idle("virtual_pipeline_model_parallel_size", f"{section}.pipeline_model_parallel_size is 1", None)
    if isinstance(role, TrainableConfig):
        yield from _find_idle_in_step(section, role)


def _find_idle_in_step(section: str, role: TrainableConfig) -> Iterator[_Idle]:
    mode = f"{section}.step_mode is {role.step_mode}"
    for leaf, default in _SHAPE_SETTINGS.items():
        is_used = role.step_mode == "graph" or (role.step_mode == "static" and leaf != "graph_memory_gib")
        if not is_used and getattr(role, leaf) != default:
            yield _Idle(leaf, mode, default)
    if role.step_mode == "eager":
        return
    if role.overlap_grad_reduce:
        yield _Idle("overlap_grad_reduce", f"{mode}: gradients are reduced when all are there", False)
    if role.share_prompts and role.context_parallel_size > 1:
        yield _Idle("share_prompts", f"{mode}, and shared prompts have no fixed shape with "
                    f"{section}.context_parallel_size = {role.context_parallel_size}", False)


def _find_idle_offload(config: RunConfig, role: TrainableConfig) -> Iterator[_Idle]:
    if role.offload_optimizer and config.model.dtype == "float32":
        yield _Idle("offload_optimizer", "model.dtype is 'float32': the optimizer works on the weights themselves, which "
                    "stay", False)


def _find_idle_in_trainer(config: RunConfig) -> Iterator[_Idle]:
    if config.trainer.test_freq and not config.data.validation_files:
        yield _Idle("test_freq", "data.validation_files is empty", 0)


def _find_idle_in_algorithm(config: RunConfig) -> Iterator[_Idle]:
    for leaf, default in (("kl_controller", "fixed"), ("kl_in", "loss")):
        if getattr(config.algorithm, leaf) != default and config.algorithm.kl_coef == 0:
            yield _Idle(leaf, "algorithm.kl_coef is 0", default)


def _find_idle_reward_model(config: RunConfig) -> Iterator[_Idle]:
    components = config.reward.components
    if config.reward_model.path is not None and components and not any(c.split()[1:] == ["model"] for c in components):
        yield _Idle("path", "no component of reward.components is 'WEIGHT model'", None)
