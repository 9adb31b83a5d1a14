# SPDX-License-Identifier: Apache-2.0
"""Combinations of settings that models do not support: quantization, ZeRO-3, routers, MTP layers, teachers."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from typing import Any

from megatron_rl.config.checked import CheckedConfig
from megatron_rl.config.schema import FULLY_SHARDED
from megatron_rl.extension.engines import name_engines


def check_quantization(config: CheckedConfig, section: str) -> None:
    """Refuse gradients for four-bit matrices, and different quantization of two models with one path."""
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
    config.require(
        importlib.util.find_spec("bitsandbytes") is not None,
        name,
        "without the package bitsandbytes",
        expected="the version in requirements.txt",
        hint="pip install -r requirements.txt",
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


_TRAINED = ("actor", "critic")


def check_zero_stages(config: CheckedConfig) -> None:
    """Refuse settings that stage 3 does not support."""
    for section in (*_TRAINED, "reward_model", *(f"teachers.{teacher}" for teacher in config.config.teachers)):
        name = f"{section}.zero_stage"
        if config.get(name) != FULLY_SHARDED:
            continue
        for other, wanted, why in _list_wanted(section):
            config.require(
                config.get(other) == wanted,
                other,
                f"does not work with {name} = 3 ({why})",
                expected=str(wanted).lower(),
                hint=f"set {other}={str(wanted).lower()}, or {name}=1",
            )
    config.require(
        config.get("actor.zero_stage") != FULLY_SHARDED or not config.supports("is_actor"),
        "rollout.engine",
        "runs the actor's modules, whose weights are in parts with actor.zero_stage = 3",
        expected="an engine with weights of its own",
        hint="choose another rollout.engine, or set actor.zero_stage=1",
    )


def _list_wanted(section: str) -> Iterator[tuple[str, Any, str]]:
    """Yield settings, the value that each must have, and the reason."""
    if section in _TRAINED:
        yield f"{section}.step_mode", "eager", "weights are gathered for every layer, at other addresses"
        yield f"{section}.optimizer", "adam", "Muon's momentum is exchanged through the gradient buffers of ZeRO-1"
        yield f"{section}.overlap_grad_reduce", False, "gradients are always reduced during the backward"
        yield f"{section}.lora.rank", 0, "adapters are trained on weights that every rank has"
    if section != "critic":
        name = "reference" if section == "actor" else section  # the reference has the actor's layout
        yield f"{name}.offload", False, "the ranks share these weights already"


_HINT = "set actor.router_replay=trainer, which asks nothing of the engine, or {}"


def check_routers(config: CheckedConfig) -> None:
    """Refuse replayed routes unless the engine's forward is observable, one step at a time."""
    config.require(
        not config.get("actor.router_bias_rate") or config.get("actor.lora.rank") == 0,
        "actor.router_bias_rate",
        "with actor.lora, which leaves the weights of the model as they are",
        expected="0",
        hint="leave it out",
    )
    engine, supports = config.get("rollout.engine"), config.supports
    split = config.get("actor.expert_tensor_parallel_size")
    config.require(
        split in (None, config.get("actor.tensor_model_parallel_size")) or not supports("is_actor"),
        "actor.expert_tensor_parallel_size",
        f"with rollout.engine = {engine!r}, whose engines are made of whole tensor parallel groups",
        expected="actor.tensor_model_parallel_size",
        hint="leave it out, or choose another rollout.engine",
    )
    if config.get("actor.router_replay") != "engine":
        return
    config.require(
        supports("routes"),
        "actor.router_replay",
        f"with rollout.engine = {engine!r}, which does not tell which experts it chooses",
        expected="off or trainer",
        hint=_HINT.format(f"rollout.engine={name_engines('routes')}"),
    )
    for leaf, needed in (("enforce_eager", True), ("async_scheduling", False), ("model_runner", "v1")):
        config.require(
            not supports("vllm_modes") or config.get(f"rollout.{leaf}") == needed,
            f"rollout.{leaf}",
            "with actor.router_replay = 'engine': routers are listened to in each forward",
            expected=str(needed).lower(),
            hint=_HINT.format(f"rollout.{leaf}={str(needed).lower()}"),
        )


def check_mtp(config: CheckedConfig) -> None:
    """Refuse to train the MTP layer without the policy's whole weights, microbatch by microbatch."""
    rate = config.get("actor.mtp_lr")
    for name, needed in (("step_mode", "eager"), ("lora.rank", 0), ("zero_stage", 1)):
        config.require(
            not rate or config.get(f"actor.{name}") == needed,
            f"actor.{name}",
            f"with actor.mtp_lr = {rate}",
            expected=str(needed),
            hint=f"set actor.{name}={needed}, or leave actor.mtp_lr out",
        )


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
        config.apply(_check_name, name)
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
    config.require(
        kind != "sampled" or config.get("algorithm.distillation.direction") == "reverse",
        "algorithm.distillation.direction",
        "with algorithm.distillation.kind = 'sampled': tokens of the policy give the reverse divergence",
        expected="reverse",
        hint="set algorithm.distillation.kind=top_k",
    )


def _check_choice(config: CheckedConfig) -> None:
    values = [value for name in config.config.teachers for value in config.get(f"teachers.{name}.values") or [name]]
    repeated = sorted({value for value in values if values.count(value) > 1})
    config.require(
        config.get(_CHOICE) is None or not repeated,
        _CHOICE,
        f"finds two teachers for {', '.join(repeated)}",
        expected="one teacher for each value",
        hint="change teachers.NAME.values",
    )


def _check_name(config: CheckedConfig, name: str) -> None:
    config.require(
        re.fullmatch(r"[\w-]+", name) is not None,
        f"teachers.{name}.path",
        f"belongs to a teacher with the name {name!r}",
        expected="letters, digits, _ and -",
        hint="the name becomes part of the names of settings and metrics",
    )


def _check_reset(config: CheckedConfig) -> None:
    """Refuse `reset_every` for a reference that cannot copy the actor's weights in place."""
    if config.get("reference.reset_every") is None:
        return
    for name, default, why in (
        ("reference.offload", False, "moves the weights that reference.reset_every writes"),
        ("actor.lora.rank", 0, "makes the reference the actor without adapters: reference.reset_every cannot write it"),
        (
            "placement.reference",
            config.get("placement.actor"),
            "is apart from the actor that it becomes every so often",
        ),
    ):
        value = repr(default).lower() if isinstance(default, bool) else repr(default)
        config.require(
            config.get(name) == default, name, why, expected=value, hint="remove it, or reference.reset_every"
        )


TEACHER_RULES = (_check_teachers, _check_kind, _check_choice, _check_reset)
