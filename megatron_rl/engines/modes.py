# SPDX-License-Identifier: Apache-2.0
"""Execution modes of vLLM: CUDA graphs, async scheduling, model runner."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megatron_rl.config.schema import RolloutConfig

if TYPE_CHECKING:  # a dry run imports no torch
    import torch

_ON_CPU: dict[str, Any] = {"enforce_eager": True, "async_scheduling": False, "model_runner": "v1"}


def fit_to_device(config: RolloutConfig, device: torch.device) -> RolloutConfig:
    """Replace vLLM's execution modes that a CPU does not support."""
    return replace(config, **_ON_CPU) if device.type == "cpu" else config


def describe_modes(config: RolloutConfig, device: torch.device) -> str:
    """Describe active and ignored modes of vLLM and SGLang for the log."""
    if config.engine == "sglang" and device.type == "cpu":
        return "seeds of responses have no effect on CPU: the same run again samples something else"
    if not config.supports("vllm_modes"):
        return ""
    fitted = fit_to_device(config, device)
    eager = "eager" if fitted.enforce_eager else "compiled with CUDA graphs"
    runner = fitted.model_runner + (" with its Triton sampler" if fitted.model_runner == "v2" else "")
    text = f"{eager}, async scheduling {'on' if fitted.async_scheduling else 'off'}, model runner {runner}"
    ignored = [
        f"rollout.{name}={str(getattr(config, name)).lower()}"
        for name in _ON_CPU
        if getattr(config, name) != getattr(fitted, name)
    ]
    return f"{text}; no effect on CPU: {', '.join(ignored)}" if ignored else text
