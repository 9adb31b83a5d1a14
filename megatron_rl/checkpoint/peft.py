# SPDX-License-Identifier: Apache-2.0
"""Adapters in PEFT's format: `adapter_config.json` and `adapter_model.safetensors`.

PEFT prefixes the name of a logical tensor with `base_model.model.`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from reprlib import repr as show
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from megatron_rl.checkpoint.files import copy_side_files, list_side_files, publish, write_file
from megatron_rl.checkpoint.huggingface import (
    ShardedModel,
    do_on_first,
    gather_on_first,
    make_empty,
    read_headers,
    read_names,
)
from megatron_rl.config.sections import LoraConfig
from megatron_rl.types import UserError
from megatron_rl.weights.adapters import AdapterShape
from megatron_rl.weights.model_config import COUNT, FLAG, POSITIVE, check_kinds, read_json
from megatron_rl.weights.shard_box import ShardBox, box_slices

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
_SCALE = {"r": COUNT, "lora_alpha": POSITIVE}
# PEFT settings that are compared with the run's, follow from the tensors, or have no effect after loading.
_FREE = (
    *("r", "lora_alpha", "use_rslora", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
    *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode"),
    *("megatron_config", "megatron_core", "lora_dropout", "loftq_config", "eva_config", "corda_config"),
    *("lora_ga_config", "velora_config", "qalora_group_size"),
)
# Further settings with their supported values. A setting in neither table must be off (null, false, empty).
_SERVED: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "init_lora_weights": (True, False, None, "gaussian", "orthogonal", "eva"),  # other values also change the model
}


def check_adapters(directory: str | Path, shape: AdapterShape, source: str) -> None:
    """Check that adapters on disk match the adapters of a run and are finite; `source` names the setting in errors.

    Raises:
        UserError: missing or damaged files, unsupported PEFT settings, another rank or scale, other matrices,
            non-finite values.
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
    config = _read_config(directory / CONFIG_FILE, shape)
    rank = config["r"]
    scale = config["lora_alpha"] / (math.sqrt(rank) if config.get("use_rslora") else rank)
    if rank != shape.rank or not math.isclose(scale, shape.scale):
        raise UserError(
            f"the adapters have rank {rank} and scale {scale:g}, the run has {shape.rank} and {shape.scale:g}",
            source=source,
            expected="the rank and alpha that the adapters were trained with",
            hint=f"set lora.rank={rank} and lora.alpha={scale * rank}",
        )
    headers = read_headers(dict.fromkeys(read_names(weights), weights))
    found = {name.removeprefix(PREFIX): size for name, (size, _) in headers.items()}
    wanted = shape.logical_tensors()
    wrong = [f"{name} is missing" for name in wanted if name not in found]
    wrong += [f"{name} is in no adapter of the run" for name in found if name not in wanted]
    wrong += [f"{n} is {list(found[n])}, not {list(wanted[n])}" for n in wanted if n in found and found[n] != wanted[n]]
    if wrong:
        raise UserError(
            f"{len(wrong)} tensor(s) of the adapters do not match: {'; '.join(wrong[:3])}",
            source=source,
            expected=f"adapters of {', '.join(shape.modules)} in every layer",
            hint=f"set lora.target_modules={show(config.get('target_modules'))}, or use adapters of this model",
        )
    wrong = [f"{name} is {dtype}" for name, (_, dtype) in headers.items() if dtype not in ("F32", "F16", "BF16")]
    if not wrong:
        with safe_open(weights, framework="pt") as handle:
            wrong = [f"{name} is not finite" for name in headers if not handle.get_tensor(name).isfinite().all()]
    if wrong:
        raise UserError(
            f"{len(wrong)} tensor(s) of the adapters cannot be trained: {'; '.join(wrong[:3])}",
            source=str(weights),
            expected="finite numbers in float32, float16 or bfloat16",
            hint="save the adapters again, from a training that has not diverged",
        )


def _read_config(file: Path, shape: AdapterShape) -> dict[str, Any]:
    config = read_json(file, "save the adapters again with save_pretrained")
    check_kinds({"r": None, "lora_alpha": None} | config, _SCALE, str(file), may_be_null=False)
    check_kinds(config, {"use_rslora": FLAG}, str(file))
    heads = ("score", "classifier") if shape.base.has_score_head else ()  # PEFT lists both names
    saved = config.get("modules_to_save")
    is_head = isinstance(saved, list) and all(name in heads for name in saved)
    wrong = {
        name: value
        for name, value in ({"peft_type": None} | config).items()
        if name not in _FREE
        and not (name == "modules_to_save" and is_head)
        and (value not in _SERVED[name] if name in _SERVED else bool(value))
    }
    if wrong:
        raise UserError(
            f"adapters with {', '.join(f'{name} = {show(value)}' for name, value in wrong.items())}",
            source=str(file),
            expected="LoRA as PEFT makes it by default: one rank and one alpha for all, beside an unchanged model",
            hint="merge such adapters into the model with PEFT's merge_and_unload, or, if they begin from a changed "
            "model (PiSSA and its relatives), save them with path_initial_model_for_weight_conversion",
        )
    return config


@torch.no_grad()
def load_adapters(directory: str | Path, placements: Iterable[ShardBox], params: Mapping[str, torch.Tensor]) -> None:
    """Fill this rank's adapter parameters in place from adapters that passed `check_adapters`."""
    with safe_open(Path(directory) / WEIGHTS_FILE, framework="pt") as handle:
        for p in placements:
            piece = handle.get_slice(PREFIX + p.hf_name)[box_slices(p.hf_box)]
            params[p.param][box_slices(p.local_box)].copy_(piece)


def save_adapters(
    directory: Path, model: ShardedModel, shape: AdapterShape, config: LoraConfig, base: str | Path
) -> None:
    """Write adapters in PEFT's format, with the model's tokenizer; collective, rank 0 writes.

    Args:
        directory: written as `<directory>.partial`, then renamed; an existing one is replaced.
        config: if its rank is below that of `shape`, the rest of the adapters is zero and is left out.

    Raises:
        Exception: rank 0 could not write; raised on every rank. An existing directory stays.
    """
    partial = directory.with_name(directory.name + ".partial")
    do_on_first(model.group, make_empty, partial)
    tensors = gather_on_first(shape.logical_tensors(), model)
    cuts = {"lora_A": (slice(config.rank),), "lora_B": (slice(None), slice(config.rank))}
    tensors = {name: tensor[cuts.get(name.split(".")[-2], ())] for name, tensor in tensors.items()}
    do_on_first(model.group, _write, partial, directory, tensors, describe_adapters(shape, config, base), Path(base))


def describe_adapters(shape: AdapterShape, config: LoraConfig, base: str | Path) -> dict[str, Any]:
    """Return the content of adapter_config.json."""
    alpha = config.scale * config.rank
    return {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if shape.base.has_score_head else "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": config.rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "use_rslora": False,
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
    named = {PREFIX + name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    save_file(named, partial / WEIGHTS_FILE, metadata={"format": "pt"})
    files = list_side_files(base)
    files.pop("config.json", None)  # next to adapters it would mark a whole model
    copy_side_files(files, partial)
    write_file(partial / CONFIG_FILE, (json.dumps(described, indent=2) + "\n").encode())
    publish(partial, directory)
