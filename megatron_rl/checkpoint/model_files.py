# SPDX-License-Identifier: Apache-2.0
"""Logical tensors of a model in HF format, including experts that are packed into one tensor per layer.

Only the text part of an image-text model has logical tensors. Experts in MXFP4 (4-bit numbers in blocks of 32 with one
exponent; OCP microscaling formats, 1.0) are decoded to bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from megatron_rl.checkpoint.safetensors_index import index_safetensors, read_headers
from megatron_rl.checkpoint.side_files import read_config
from megatron_rl.types import UserError
from megatron_rl.weights.families import FAMILIES, ModelShape
from megatron_rl.weights.family import Family
from megatron_rl.weights.packed_experts import (
    BLOCKS,
    SCALES,
    FileTensor,
    PackedPart,
    find_parts,
    join_turns,
    list_file_tensors,
)
from megatron_rl.weights.text_part import name_text_tensor

_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # codes 8 to 15 are the negatives
_BIAS = 127  # exponent bias
_Headers = dict[str, tuple[tuple[int, ...], str]]


class ModelFiles(Mapping[str, Path]):
    """Mapping from logical tensor to file.

    Raises:
        UserError: see `index_safetensors`; or MXFP4 blocks without scales.
    """

    def __init__(self, directory: Path) -> None:
        family, stored = _read_family(directory), index_safetensors(directory)
        self._names = {name: name for name in stored}  # logical name -> name in the files
        if family is not None and family.image_text is not None:
            self._names = {text: name for name in stored if (text := name_text_tensor(name)) is not None}
        self._stored = {text: stored[name] for text, name in self._names.items()}
        self._files, self._parts = dict(self._stored), dict[str, PackedPart]()
        packing = family.experts.packing if family is not None and family.experts is not None else None
        for name in self._stored if packing is not None else ():
            if not find_parts(name, 1) or not name.startswith("model."):  # all others belong to draft layers
                continue
            (num_experts, *_), _ = self._read_stored([name])[name]
            parts = find_parts(name, num_experts, in_halves=packing == "halves")
            self._files |= dict.fromkeys(parts, self._files.pop(name))
            self._parts |= parts
            if name.endswith(BLOCKS):
                self._forget_scales(name, directory)

    def _read_stored(self, names: Iterable[str]) -> _Headers:
        headers = read_headers({self._names[name]: self._stored[name] for name in names})
        return {name: headers[self._names[name]] for name in names}

    def _forget_scales(self, name: str, directory: Path) -> None:
        scales = name.removesuffix(BLOCKS) + SCALES
        if self._files.pop(scales, None) is None:
            raise UserError(
                f"there is {name}, but no {scales}",
                source=str(directory),
                expected="blocks and scales of MXFP4",
                hint="download the checkpoint again",
            )

    def __getitem__(self, name: str) -> Path:
        return self._files[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def read_headers(self) -> _Headers:
        """Return shape and safetensors dtype of every logical tensor."""
        headers = self._read_stored(self._stored)
        found = {name: header for name, header in headers.items() if name in self._files}
        for name, part in self._parts.items():
            (_, *size), dtype = headers[part.packed]
            if part.in_halves:
                found[name] = (size[0] // part.turns, size[1]), dtype
            elif part.packed.endswith(BLOCKS):
                found[name] = (size[0] // part.turns, size[1] * size[2] * 2), "BF16"
            else:
                found[name] = (size[-1] // part.turns, *size[:-1]), dtype
        return found

    @contextmanager
    def open(self, file: Path) -> Iterator[OpenFile]:
        """Open a file for reading logical tensors."""
        with ExitStack() as stack:
            yield OpenFile(file, self._stored, self._parts, self._names, stack)


def list_copies(shape: ModelShape) -> dict[str, str]:
    """Map tensors that published checkpoints repeat in the MTP layer to the model's own."""
    prefix = f"model.layers.{shape.num_layers}."
    head = "model.embed_tokens.weight" if shape.tied_embeddings else "lm_head.weight"
    return {f"{prefix}embed_tokens.weight": "model.embed_tokens.weight", f"{prefix}shared_head.head.weight": head}


@dataclass(frozen=True)
class WrittenTensor:
    """A tensor in an output file; `experts` are the logical tensors that `join` packs into it, if any."""

    size: tuple[int, ...]
    dtype: torch.dtype
    experts: tuple[tuple[str, ...], ...]
    join = staticmethod(join_turns)

    @property
    def num_bytes(self) -> int:
        """Bytes of its elements."""
        return torch.Size(self.size).numel() * self.dtype.itemsize


def list_written(
    shape: ModelShape, drafts: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, torch.dtype]
) -> dict[str, WrittenTensor]:
    """List the output tensors of a model by name.

    Args:
        drafts: sizes of further, non-logical tensors.
        dtypes: of drafts and logical tensors.
    """
    tensors = list_file_tensors(shape) | {name: FileTensor(size) for name, size in drafts.items()}
    return {
        name: WrittenTensor(one.size, dtypes[one.experts[0][0] if one.experts else name], one.experts)
        for name, one in tensors.items()
    }


class OpenFile:
    """An open file of logical tensors, with the interface of `safe_open`."""

    def __init__(
        self,
        file: Path,
        stored: Mapping[str, Path],
        parts: Mapping[str, PackedPart],
        names: Mapping[str, str],
        stack: ExitStack,
    ) -> None:
        self._file, self._stored, self._parts, self._names, self._stack = file, stored, parts, names, stack
        self._handles: dict[Path, Any] = {}
        self._last: tuple[str, int] | None = None  # expert that was read last: gate and up are read in turns
        self._matrix = torch.empty(0)

    def get_slice(self, name: str) -> Any:
        """Return an indexable view of a tensor."""
        part = self._parts.get(name)
        return self._get(self._file, name) if part is None else part.cut(self._read(part))

    def _get(self, file: Path, name: str) -> Any:
        """Open a stored tensor; scales may be in another file than their blocks."""
        if file not in self._handles:
            self._handles[file] = self._stack.enter_context(safe_open(file, framework="pt"))
        return self._handles[file].get_slice(self._names[name])

    def _read(self, part: PackedPart) -> torch.Tensor:
        if self._last != (part.packed, part.expert):
            self._last, self._matrix = (part.packed, part.expert), self._read_expert(part.packed, part.expert)
        return self._matrix

    def _read_expert(self, packed: str, expert: int) -> torch.Tensor:
        blocks = self._get(self._stored[packed], packed)[expert]
        if not packed.endswith(BLOCKS):
            return blocks
        scales = packed.removesuffix(BLOCKS) + SCALES
        return decode_mxfp4(blocks, self._get(self._stored[scales], scales)[expert]).t()


def decode_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Decode MXFP4 to bfloat16, [..., 32 g].

    Args:
        blocks: [..., g, 16] uint8, two 4-bit numbers per byte, lower bits first.
        scales: [..., g] uint8, exponents of 2 with a bias of 127.
    """
    numbers = torch.tensor([*_FP4, *(-x for x in _FP4)], device=blocks.device)
    values = torch.stack([numbers[(blocks & 15).int()], numbers[(blocks >> 4).int()]], -1).flatten(-2)
    return torch.ldexp(values, scales[..., None].int() - _BIAS).to(torch.bfloat16).flatten(-2)


def _read_family(directory: Path) -> Family | None:
    """Return the family of a model, if known; tensor names do not determine how experts are packed."""
    config = directory / "config.json"
    described = read_config(config) if config.is_file() else {}
    return FAMILIES.get(str(described.get("model_type")))
