# SPDX-License-Identifier: Apache-2.0
"""What weights that the data parallel ranks share (ZeRO-3) cannot be combined with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron_rl.config.checked import CheckedConfig

FULLY_SHARDED = 3
_TRAINED = ("actor", "critic")


def check_zero_stages(config: CheckedConfig) -> None:
    """Refuse settings that stage 3 does not work with."""
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
    """Settings, the value that each must have, and why."""
    if section in _TRAINED:
        yield f"{section}.step_mode", "eager", "weights are gathered for every layer, at other addresses"
        yield f"{section}.optimizer", "adam", "Muon's momentum is exchanged through the gradient buffers of ZeRO-1"
        yield f"{section}.overlap_grad_reduce", False, "gradients are always reduced during the backward"
        yield f"{section}.lora.rank", 0, "adapters are trained on weights that every rank has"
    if section != "critic":
        name = "reference" if section == "actor" else section  # the reference has the actor's layout
        yield f"{name}.offload", False, "the ranks share these weights already"
