# SPDX-License-Identifier: Apache-2.0
"""Logical tensors of a model in HF format, including experts that are packed into one tensor per layer.

Only the text part of an image-text model has logical tensors. Experts in MXFP4 (4-bit numbers in blocks of 32 with one
exponent; OCP microscaling formats, 1.0) are decoded to bfloat16. Reading every header detects truncated files; altered
elements are not detected, since the format has no checksums.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open

from megatron_rl.checkpoint.files import read_config
from megatron_rl.types import UserError
from megatron_rl.weights.families import FAMILIES, ModelShape

if TYPE_CHECKING:
    from megatron_rl.weights.packed_experts import PackedPart

INDEX_FILE = "model.safetensors.index.json"
_NUMBERED = re.compile(r"(.*-)\d{5}-of-(\d{5})\.safetensors")
_LFS_POINTER = b"version https://git-lfs"


def index_safetensors(directory: Path) -> dict[str, Path]:
    """Map each tensor name to its file, for a sharded or unsharded model.

    Raises:
        UserError: no safetensors; a missing or damaged file; an index that is unreadable, leaves the directory, or does
            not match the files.
    """
    index = directory / INDEX_FILE
    named = _read_index(index) if index.is_file() else None
    found = set(directory.glob("*.safetensors")) if named is None else {directory / file for file in named.values()}
    if named is None:
        for match in filter(None, [_NUMBERED.fullmatch(file.name) for file in found]):
            numbers = range(1, int(match[2]) + 1)
            found |= {directory / f"{match[1]}{number:05d}-of-{match[2]}.safetensors" for number in numbers}
    files = sorted(found)
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise UserError(
            f"{len(missing)} file(s) of the model are missing: {', '.join(missing[:3])}",
            source=str(directory),
            expected=f"every file that {index.name} names" if named else "all numbered parts",
            hint=f"download {', '.join(missing[:3])} again",
        )
    held = {file: read_names(file) for file in files}
    for name, file in (named or {}).items():
        if name not in held[directory / file]:
            others = [other.name for other, names in held.items() if name in names]
            raise UserError(
                f"{name} is not in {file}, as {index.name} says" + (f", but in {others[0]}" if others else ""),
                source=str(index),
                expected="an index that fits the files",
                hint=f"download {index.name} and {file} again, from one version of the model",
            )
    if named is not None:
        return {name: directory / file for name, file in named.items()}
    if not files:
        raise UserError(
            f"{directory} has no weights" if directory.is_dir() else f"there is no directory {directory}",
            source=str(directory),
            expected="*.safetensors (with their index when sharded)",
            hint="download the checkpoint again, or convert .bin files with transformers' save_pretrained",
        )
    return {name: file for file, names in held.items() for name in names}


def read_headers(files: Mapping[str, Path]) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return shape and safetensors dtype of every tensor by name."""
    headers = {}
    for file in sorted(set(files.values())):
        with safe_open(file, framework="pt") as handle:
            for name in sorted(name for name, where in files.items() if where == file):
                tensor = handle.get_slice(name)
                headers[name] = tuple(tensor.get_shape()), tensor.get_dtype()
    return headers


def _read_index(index: Path) -> dict[str, str]:

    def refuse(found: str) -> UserError:
        return UserError(
            found,
            source=str(index),
            expected='{"weight_map": {tensor: name of a file beside the index}}',
            hint=f"download {index.name} again",
        )

    try:
        content = json.loads(index.read_bytes())
    except (ValueError, RecursionError) as error:
        raise refuse(f"{index.name} is not JSON: {error}") from None
    named = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(named, dict) or not named or not all(isinstance(file, str) for file in named.values()):
        raise refuse(f"{index.name} has no weight_map of tensors and file names")
    for file in set(named.values()):
        path = PurePosixPath(file)
        if path.is_absolute() or ".." in path.parts or path.suffix != ".safetensors":
            raise refuse(f"{index.name} names {file!r}, which is no safetensors file of its directory")
    return named


def read_names(file: Path) -> set[str]:
    """Return the names of the tensors in a file.

    Raises:
        UserError: the file is damaged, truncated or unreadable.
    """
    try:
        with safe_open(file, framework="pt") as handle:
            return set(handle.keys())
    except OSError as error:
        what, hint = str(error), "look at the file and its rights"
    except SafetensorError as error:
        what, hint = f"{error} ({file.stat().st_size:,} bytes)", f"download {file.name} again"
        with file.open("rb") as content:
            if content.read(len(_LFS_POINTER)) == _LFS_POINTER:
                what, hint = "it is a pointer of Git LFS", "run git lfs pull"
    raise UserError(f"{file.name} is damaged: {what}", source=str(file), expected="a whole safetensors file", hint=hint)


_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # codes 8 to 15 are the negatives
_BIAS = 127  # exponent bias
_Headers = dict[str, tuple[tuple[int, ...], str]]


class ModelFiles(Mapping[str, Path]):
    """Mapping from logical tensor to file.

    Attributes:
        names: name in the files of every unpacked or packed tensor; `stored` is its file.
        parts: place in a packed tensor of every logical tensor that is packed.

    Raises:
        UserError: see `index_safetensors`; or MXFP4 blocks without scales.
    """

    def __init__(self, directory: Path) -> None:
        stored, config = index_safetensors(directory), directory / "config.json"
        # Tensor names do not determine how experts are packed.
        family = FAMILIES.get(str(read_config(config).get("model_type"))) if config.is_file() else None
        self.names = {name: name for name in stored}  # logical name -> name in the files
        if family is not None and family.image_text is not None:
            self.names = {
                re.sub(r"^model\.language_model\.", "model.", name): name
                for name in stored
                if not name.startswith("model.visual.")
            }
        self.stored = {text: stored[name] for text, name in self.names.items()}
        self._files = dict(self.stored)
        self.parts: dict[str, PackedPart] = {}
        packing = family.experts.packing if family is not None and family.experts is not None else None
        if packing is not None:
            self._unpack(directory, in_halves=packing == "halves")

    def _unpack(self, directory: Path, *, in_halves: bool) -> None:
        """Replace tensors of all experts by the logical tensors that they pack."""
        from megatron_rl.weights.packed_experts import find_parts

        for name in self.stored:
            if not find_parts(name, 1) or not name.startswith("model."):  # all others belong to draft layers
                continue
            (num_experts, *_), _ = self._read_stored([name])[name]
            parts = find_parts(name, num_experts, in_halves=in_halves)
            self._files |= dict.fromkeys(parts, self._files.pop(name))
            self.parts |= parts
            scales = next(iter(parts.values())).scales
            if scales is not None and self._files.pop(scales, None) is None:
                raise UserError(
                    f"there is {name}, but no {scales}",
                    source=str(directory),
                    expected="blocks and scales of MXFP4",
                    hint="download the checkpoint again",
                )

    def _read_stored(self, names: Iterable[str]) -> _Headers:
        headers = read_headers({self.names[name]: self.stored[name] for name in names})
        return {name: headers[self.names[name]] for name in names}

    def __getitem__(self, name: str) -> Path:
        return self._files[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def read_headers(self) -> _Headers:
        """Return shape and safetensors dtype of every logical tensor."""
        headers = self._read_stored(self.stored)
        found = {name: header for name, header in headers.items() if name in self._files}
        for name, part in self.parts.items():
            (_, *size), dtype = headers[part.packed]
            if part.in_halves:
                found[name] = (size[0] // part.turns, size[1]), dtype
            elif part.scales is not None:
                found[name] = (size[0] // part.turns, size[1] * size[2] * 2), "BF16"
            else:
                found[name] = (size[-1] // part.turns, *size[:-1]), dtype
        return found

    def open(self) -> OpenFiles:
        """Open the files, as they are needed, for reading logical tensors in a `with` block."""
        return OpenFiles(self)


def list_copies(shape: ModelShape) -> dict[str, str]:
    """Map tensors of the MTP layer that are copies in published checkpoints to the model's own tensors."""
    prefix = f"model.layers.{shape.num_layers}."
    head = "model.embed_tokens.weight" if shape.tied_embeddings else "lm_head.weight"
    return {f"{prefix}embed_tokens.weight": "model.embed_tokens.weight", f"{prefix}shared_head.head.weight": head}


class OpenFiles(ExitStack):
    """Open files of logical tensors, with the interface of `safe_open`."""

    def __init__(self, files: ModelFiles) -> None:
        super().__init__()
        self._files = files
        self._handles: dict[Path, Any] = {}
        self._last: tuple[str, int] | None = None  # expert that was read last: gate and up are read in turns
        self._matrix = torch.empty(0)

    def get_slice(self, name: str) -> Any:
        """Return an indexable view of a tensor."""
        part = self._files.parts.get(name)
        if part is None:
            return self._get(name)
        if self._last != (part.packed, part.expert):
            matrix = self._get(part.packed)[part.expert]
            if part.scales is not None:
                matrix = decode_mxfp4(matrix, self._get(part.scales)[part.expert]).t()
            self._last, self._matrix = (part.packed, part.expert), matrix
        return part.cut(self._matrix)

    def _get(self, name: str) -> Any:
        """Open a tensor as stored, in its own file: MXFP4 scales may be in another file than their blocks."""
        file, stored = self._files.stored[name], self._files.names[name]
        if file not in self._handles:
            self._handles[file] = self.enter_context(safe_open(file, framework="pt"))
        return self._handles[file].get_slice(stored)


def decode_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Decode MXFP4 to bfloat16, [..., 32 g].

    Args:
        blocks: [..., g, 16] uint8, two 4-bit numbers per byte, lower bits first.
        scales: [..., g] uint8, exponents of 2 with a bias of 127.
    """
    numbers = torch.tensor([*_FP4, *(-x for x in _FP4)], device=blocks.device)
    values = torch.stack([numbers[(blocks & 15).int()], numbers[(blocks >> 4).int()]], -1).flatten(-2)
    return torch.ldexp(values, scales[..., None].int() - _BIAS).to(torch.bfloat16).flatten(-2)
