# SPDX-License-Identifier: Apache-2.0
"""The part of the checks of a config that is about teachers and the reference."""

from __future__ import annotations

import re

from megatron_rl.config.checked import CheckedConfig
from megatron_rl.config.fields import read_fields
from megatron_rl.config.schema import TeacherConfig

_KIND = "algorithm.distillation.kind"


def check_teachers(config: CheckedConfig) -> None:
    """Teachers that can be built, and a way to learn from them."""
    teachers, distillation = config.config.teachers, config.config.algorithm.distillation
    config.require(
        bool(teachers) or config.get("algorithm.adv_estimator") != "distill",
        "algorithm.adv_estimator",
        "without a teacher: nothing would be learned",
        expected="a teacher in the section teachers",
        hint="set teachers.NAME.path, or choose an estimator that works on rewards",
    )
    for name in teachers:
        _check_teacher(config, name)
    for name in config.config.placement.teachers:
        config.require(
            name in teachers,
            "placement.teachers",
            f"names {name!r}",
            expected=f"of the section teachers: {', '.join(teachers) or 'there is none'}",
            hint="a teacher without a place is on all ranks",
        )
    for leaf, least in (("coef", 0), ("k", 1)):
        full_name = f"algorithm.distillation.{leaf}"
        value = config.get(full_name)
        config.require(value >= least, full_name, "is too small", expected=f">= {least}", hint="see --help")
    is_mixed = len(teachers) > 1 and distillation.choose_by is None
    config.require(
        distillation.kind == "sampled" or not is_mixed,
        _KIND,
        f"with {len(teachers)} teachers at once",
        expected="sampled, whose log-probs are averaged",
        hint="set algorithm.distillation.choose_by=data_source, so that each prompt has one teacher",
    )
    config.require(
        distillation.kind != "full" or len(teachers) < 2,
        _KIND,
        f"with {len(teachers)} teachers: each would need its output weights beside the policy's",
        expected="one teacher, or top_k",
        hint="set algorithm.distillation.kind=top_k",
    )
    config.require(
        distillation.kind != "sampled" or distillation.direction == "reverse",
        "algorithm.distillation.direction",
        "with algorithm.distillation.kind = 'sampled': tokens of the policy give the reverse divergence",
        expected="reverse",
        hint="set algorithm.distillation.kind=top_k",
    )
    values = [value for name in teachers for value in teachers[name].values or [name]]
    repeated = sorted({value for value in values if values.count(value) > 1})
    config.require(
        distillation.choose_by is None or not repeated,
        "algorithm.distillation.choose_by",
        f"finds two teachers for {', '.join(repeated)}",
        expected="one teacher for each value",
        hint="change teachers.NAME.values",
    )


def _check_teacher(config: CheckedConfig, name: str) -> None:
    prefix = f"teachers.{name}"
    config.require(
        re.fullmatch(r"[\w-]+", name) is not None,
        f"{prefix}.path",
        f"belongs to a teacher with the name {name!r}",
        expected="letters, digits, _ and -",
        hint="the name becomes part of the names of settings and metrics",
    )
    for full_name, info in read_fields(TeacherConfig, prefix).items():
        value = config.get(full_name)
        if info.kind is int:
            config.require(value is None or value >= 1, full_name, "is too small", expected=">= 1", hint="1 or more")
    config.require(
        config.get(f"{prefix}.weight") > 0, f"{prefix}.weight", "is not positive", expected="> 0", hint="leave it out"
    )


def check_reset(config: CheckedConfig) -> None:
    """A reference that can take over the actor's weights where they are."""
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
