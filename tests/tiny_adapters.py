# SPDX-License-Identifier: Apache-2.0
"""Adapters as PEFT makes and saves them, on tiny models."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import bitsandbytes
import torch
from peft import LoraConfig as PeftConfig
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

from megatron_rl.config.sections import LoraConfig
from tiny_models import save_tiny_model


def save_adapted(directory: Path, family: str, adapters: dict[str, Any] | None = None, **sizes: Any) -> PeftModel:
    """Save a tiny model in `model` and adapters that change it in `adapter` beside it; return PEFT's combined model.

    Args:
        directory: of both.
        family, sizes: of `save_tiny_model`.
        adapters: PEFT settings that differ from rank 4 and alpha 8 on all matrices.
    """
    model = get_peft_model(
        save_tiny_model(directory / "model", family, **sizes),
        PeftConfig(**dict(r=4, lora_alpha=8, target_modules="all-linear") | (adapters or {})),
    )
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(directory / "adapter")
    return model


def adapted(directory: Path, **options: Any) -> LoraConfig:
    """The settings that start from these adapters."""
    return LoraConfig(**dict(rank=4, alpha=8.0, path=str(directory / "adapter")) | options)


def save_dequantized(model: Path, directory: Path) -> Path:
    """Save a model whose matrices went through bitsandbytes' NF4; return its directory."""
    shutil.copytree(model, directory)
    tensors = load_file(directory / "model.safetensors")
    for name in (name for name in tensors if name.endswith("_proj.weight")):
        codes, state = bitsandbytes.functional.quantize_4bit(tensors[name].flatten(), blocksize=64, quant_type="nf4")
        back = bitsandbytes.functional.dequantize_4bit(codes, state).view(tensors[name].shape)
        assert not torch.equal(back, tensors[name])
        tensors[name] = back
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory
