# SPDX-License-Identifier: Apache-2.0
"""The part of the checks of a config that is about models under adapters."""

from __future__ import annotations

import importlib.util

from megatron_rl.config.checked import CheckedConfig


def check_quantization(config: CheckedConfig, section: str) -> None:
    """A matrix in four bits takes no gradients, and two models of one path are to be one model."""
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
