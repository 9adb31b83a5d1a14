# SPDX-License-Identifier: Apache-2.0
"""Adapters in PEFT's format in and out: `adapter_config.json` and `adapter_model.safetensors`.

PEFT calls a logical tensor by its name behind `base_model.model.`. Each rank reads the boxes that it holds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from megatron_rl.checkpoint.files import publish, write_file
from megatron_rl.checkpoint.huggingface import ShardedModel, do_on_first, gather_on_first, make_empty
from megatron_rl.checkpoint.safetensors_index import read_headers
from megatron_rl.checkpoint.side_files import copy_side_files, list_side_files
from megatron_rl.config.lora import LoraConfig
from megatron_rl.types import UserError
from megatron_rl.weights.adapters import AdapterShape
from megatron_rl.weights.shard_box import ShardBox, box_slices

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."


def check_adapters(directory: str | Path, shape: AdapterShape, source: str) -> None:
    """Compare adapters on disk with what a run trains; reads headers only.

    Args:
        directory: as PEFT saves them.
        shape: of the run.
        source: the setting that names the directory.

    Raises:
        UserError: files that are missing, another rank or scale, or other matrices.
    """
    directory = Path(directory)
    weights = directory / WEIGHTS_FILE
    missing = [name for name in (CONFIG_FILE, WEIGHTS_FILE) if not (directory / name).is_file()]
    if missing:
        raise UserError(
            f"{directory} has no {' and no '.join(missing)}",
            source=source,
            expected="a directory that PEFT has saved, with its weights in safetensors",
            hint="model.save_pretrained(directory) of a PeftModel writes one",
        )
    config = json.loads((directory / CONFIG_FILE).read_text(encoding="utf-8"))
    scale = config["lora_alpha"] / (math.sqrt(config["r"]) if config.get("use_rslora") else config["r"])
    if config["r"] != shape.rank or not math.isclose(scale, shape.scale):
        raise UserError(
            f"the adapters have rank {config['r']} and scale {scale:g}, the run has {shape.rank} and {shape.scale:g}",
            source=source,
            expected="the rank, alpha and rslora that the adapters were trained with",
            hint=f"set lora.rank={config['r']}, lora.alpha={config['lora_alpha']:g} and "
            f"lora.rslora={str(bool(config.get('use_rslora'))).lower()}",
        )
    with safe_open(weights, framework="pt") as handle:
        names = list(handle.keys())
    found = {
        name.removeprefix(_PREFIX): size for name, (size, _) in read_headers(dict.fromkeys(names, weights)).items()
    }
    wanted = shape.logical_tensors()
    wrong = [f"{name} is missing" for name in wanted if name not in found]
    wrong += [f"{name} is in no adapter of the run" for name in found if name not in wanted]
    wrong += [f"{n} is {list(found[n])}, not {list(wanted[n])}" for n in wanted if n in found and found[n] != wanted[n]]
    if wrong:
        raise UserError(
            f"{len(wrong)} tensor(s) of the adapters do not match: {'; '.join(wrong[:3])}",
            source=source,
            expected=f"adapters of {', '.join(shape.modules)} in every layer",
            hint=f"set lora.target_modules={config.get('target_modules')}, or use adapters of this model",
        )


@torch.no_grad()
def load_adapters(directory: str | Path, placements: Iterable[ShardBox], params: Mapping[str, torch.Tensor]) -> None:
    """Fill `params` in place from adapters that `check_adapters` has let pass.

    Args:
        directory: as PEFT saves them.
        placements: of this rank's adapters.
        params: its parameters by name.
    """
    with safe_open(Path(directory) / WEIGHTS_FILE, framework="pt") as handle:
        for p in placements:
            piece = handle.get_slice(_PREFIX + p.hf_name)[box_slices(p.hf_box)]
            params[p.param][box_slices(p.local_box)].copy_(piece)


def save_adapters(
    directory: Path, model: ShardedModel, shape: AdapterShape, config: LoraConfig, base: str | Path
) -> None:
    """Write adapters as PEFT does, with the tokenizer of the model; collective over its group, rank 0 writes.

    Args:
        directory: written as `<directory>.partial`, then renamed; an existing one is replaced.
        model: the adapters on their ranks.
        shape: of the adapters.
        config: `lora` of the role.
        base: directory of the model that they belong to.

    Raises:
        Exception: rank 0 could not write; on every rank, and an existing directory stays.
    """
    partial = directory.with_name(directory.name + ".partial")
    do_on_first(model.group, make_empty, partial)
    tensors = gather_on_first(shape.logical_tensors(), model)
    do_on_first(model.group, _write, partial, directory, tensors, describe_adapters(shape, config, base), Path(base))


def describe_adapters(shape: AdapterShape, config: LoraConfig, base: str | Path) -> dict[str, Any]:
    """What adapter_config.json says."""
    alpha = config.scale * (math.sqrt(config.rank) if config.rslora else config.rank)
    return {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if shape.base.has_score_head else "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": config.rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "use_rslora": config.rslora,
        "target_modules": shape.modules,
        "modules_to_save": ["score"] if shape.base.has_score_head else None,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


def _write(
    partial: Path, directory: Path, tensors: Mapping[str, torch.Tensor], described: Mapping[str, Any], base: Path
) -> None:
    named = {_PREFIX + name: tensor.cpu() for name, tensor in tensors.items()}
    save_file(named, partial / WEIGHTS_FILE, metadata={"format": "pt"})
    files = list_side_files(base)
    files.pop("config.json", None)  # beside adapters it would say that this is a whole model
    copy_side_files(files, partial)
    write_file(partial / CONFIG_FILE, (json.dumps(described, indent=2) + "\n").encode())
    publish(partial, directory)
