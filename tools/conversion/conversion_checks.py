# SPDX-License-Identifier: Apache-2.0
"""Checks of a conversion, from headers only: tensors without a place, mixed dtypes, another model."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from safetensors import safe_open

from megatron_rl.checkpoint.huggingface import ModelFiles, find_drafts
from megatron_rl.types import UserError
from megatron_rl.weights.families import ModelShape
from megatron_rl.weights.megatron_layout import Table

# Buffers of old versions of transformers, and the bias of a score head, which is always zero.
_NOT_PARAMETERS = ("rotary_emb.inv_freq", "masked_bias", "score.bias")


def check_surplus(files: Mapping[str, Path], shape: ModelShape, source: Path) -> None:
    """Refuse tensors that the conversion would silently drop."""
    known = shape.logical_tensors().keys() | find_drafts(source, shape).keys()
    surplus = [name for name in files if name not in known and not name.endswith(_NOT_PARAMETERS)]
    if surplus == ["lm_head.weight"] and shape.tied_embeddings:
        with (
            safe_open(files["lm_head.weight"], "pt") as head,
            safe_open(files["model.embed_tokens.weight"], "pt") as embedding,
        ):
            is_tied = torch.equal(head.get_tensor("lm_head.weight"), embedding.get_tensor("model.embed_tokens.weight"))
        if is_tied:
            return
        raise UserError(
            "config.json ties the embeddings, but lm_head.weight differs from model.embed_tokens.weight",
            source=str(source),
            expected="equal tensors, or tie_word_embeddings=false",
            hint="set tie_word_embeddings to false in config.json if the head was trained by itself",
        )
    if surplus:
        raise UserError(
            f"{len(surplus)} tensor(s) have no place in a {shape.family} model: {', '.join(sorted(surplus)[:3])}",
            source=str(source),
            expected="the tensors that config.json describes",
            hint="adapters must be merged first; for a new architecture see docs/add_a_family.md",
        )


def read_dtypes(files: ModelFiles, names: Collection[str]) -> dict[str, torch.dtype]:
    """Read the dtypes of these tensors from the headers."""
    types = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
    stored = {name: dtype for name, (_, dtype) in files.read_headers().items() if name in names}
    for name, dtype in stored.items():
        if dtype not in types:
            raise UserError(
                f"{name} is stored as {dtype}",
                source=str(files[name]),
                expected=f"one of {sorted(types)}",
                hint="dequantize the model first",
            )
    return {name: types[dtype] for name, dtype in stored.items()}


def choose_dtypes(
    shape: ModelShape, stored: Mapping[str, torch.dtype], dtype: torch.dtype | None
) -> Mapping[str, torch.dtype]:
    """Return the dtypes after conversion to `dtype`, if given; router biases then become float32."""
    if dtype is None:
        return stored
    return {name: torch.float32 if shape.is_router_bias(name) else dtype for name in stored}


def check_one_type_per_key(table: Table, dtypes: Mapping[str, torch.dtype], source: Path) -> None:
    """Refuse tensors of different dtypes within one global tensor."""
    by_key: dict[str, dict[torch.dtype, str]] = {}
    for name, places in table.items():
        by_key.setdefault(places[0].key, {}).setdefault(dtypes[name], name)
    for found in by_key.values():
        if len(found) > 1:
            listed = ", ".join(f"{name} is {dtype}" for dtype, name in found.items())
            raise UserError(
                f"tensors that become one differ in type: {listed}",
                source=str(source),
                expected="one type",
                hint="pass --dtype to convert all of them",
            )
