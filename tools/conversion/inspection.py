# SPDX-License-Identifier: Apache-2.0
"""Contents of a checkpoint directory of any kind, from headers and manifests."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Any

from megatron_rl.checkpoint.directory import MANIFEST_FILE, RECIPE_FILE, find_problems, find_step, read_manifest
from megatron_rl.checkpoint.files import DIGESTS_FILE
from megatron_rl.checkpoint.huggingface import index_safetensors, read_headers
from megatron_rl.checkpoint.torch_dist import METADATA_FILE, ChunkReader, dtype_name
from megatron_rl.types import UserError
from tools._weights import resolve_weights

_ITEM_BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I64": 8, "I32": 4, "U8": 1}


def describe_checkpoint(path: Path) -> dict[str, Any]:
    """Describe a checkpoint for JSON: kind, manifest, tensors.

    Args:
        path: a training checkpoint or run directory, a converted checkpoint, one of megatron-core, or an HF model.

    Returns:
        `kind` ("training", "weights", "torch_dist", "huggingface"), `directory`, `digest` (of all digests), `manifest`,
        `recipe` (YAML), each `None` if absent, and `parts`: name -> tensors with name, shape, dtype, bytes and number
        of chunks.

    Raises:
        UserError: none of these kinds, or unreadable headers.
    """
    if any(path.glob("*.safetensors")):
        return {
            "kind": "huggingface",
            "directory": str(path),
            "digest": None,
            "manifest": None,
            "recipe": None,
            "parts": {"model": _list_safetensors(path)},
        }
    directory = _find_directory(path)
    has_manifest = (directory / MANIFEST_FILE).is_file()
    manifest = read_manifest(directory) if has_manifest else None
    roles = list((manifest or {}).get("roles", {}))
    parts = {role: _list_chunks(directory / role) for role in roles} or {"model": _list_chunks(directory)}
    recipe = directory / RECIPE_FILE
    digests = directory / DIGESTS_FILE
    return {
        "kind": manifest["kind"] if manifest else "torch_dist",
        "directory": str(directory),
        "digest": hashlib.sha256(digests.read_bytes()).hexdigest() if digests.is_file() else None,
        "manifest": manifest,
        "recipe": recipe.read_text(encoding="utf-8") if recipe.is_file() else None,
        "parts": parts,
    }


def verify_checkpoint(path: Path) -> list[str]:
    """Return one line per damaged file.

    Raises:
        UserError: it has no digests.
    """
    directory = _find_directory(path)
    if not (directory / DIGESTS_FILE).is_file() and not (directory / MANIFEST_FILE).is_file():
        raise UserError(
            f"{directory} has no digests",
            source=str(path),
            expected="a checkpoint of this package",
            hint="megatron-core and transformers write none",
        )
    return find_problems(directory)


def _find_directory(path: Path) -> Path:
    """Find the checkpoint directory for a user's path, preferably one with a manifest."""
    step = find_step(path)
    is_one = (step / MANIFEST_FILE).is_file() or (step / METADATA_FILE).is_file()
    return step if is_one else resolve_weights(path)


def _list_chunks(directory: Path) -> list[dict[str, Any]]:
    reader = ChunkReader(directory)
    return [
        {
            "name": key,
            "shape": list(shape),
            "dtype": dtype_name(dtype),
            "bytes": math.prod(shape) * dtype.itemsize,
            "chunks": len(reader.chunks(key, tuple((0, size) for size in shape))),
        }
        for key, (shape, dtype) in sorted(reader.tensors.items())
    ]


def _list_safetensors(path: Path) -> list[dict[str, Any]]:
    files = index_safetensors(path)
    return [
        {
            "name": name,
            "shape": list(shape),
            "dtype": dtype,
            "bytes": math.prod(shape) * _ITEM_BYTES.get(dtype, 0),
            "chunks": 1,
            "file": files[name].name,
        }
        for name, (shape, dtype) in read_headers(files).items()
    ]
