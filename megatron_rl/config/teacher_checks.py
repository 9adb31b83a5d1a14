# SPDX-License-Identifier: Apache-2.0
"""The part of the checks of a config that is about teachers and the reference."""

from __future__ import annotations

import re

from megatron_rl.config.checked import CheckedConfig

_KIND, _CHOICE = "algorithm.distillation.kind", "algorithm.distillation.choose_by"


def _check_teachers(config: CheckedConfig) -> None:
    """Teachers that can be built."""
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


TEACHER_RULES = (_check_teachers, _check_kind, _check_choice, _check_reset)
