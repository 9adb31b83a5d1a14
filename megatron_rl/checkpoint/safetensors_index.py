# SPDX-License-Identifier: Apache-2.0
"""Index of a model in HF format: the file of each tensor.

Reading every header detects truncated files; altered elements are not detected, since the format has no checksums.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from safetensors import SafetensorError, safe_open

from megatron_rl.types import UserError

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
    files = _list_parts(directory) if named is None else sorted({directory / file for file in named.values()})
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise UserError(
            f"{len(missing)} file(s) of the model are missing: {', '.join(missing[:3])}",
            source=str(directory),
            expected=f"every file that {index.name} names" if named else "all numbered parts",
            hint=f"download {', '.join(missing[:3])} again",
        )
    held = {file: read_names(file) for file in files}
    if named is not None:
        _check_index(index, named, held)
        return {name: directory / file for name, file in named.items()}
    if not files:
        raise UserError(
            f"{directory} has no weights",
            source=str(directory),
            expected="*.safetensors (with their index when sharded)",
            hint="download the checkpoint again, or convert .bin files with transformers' save_pretrained",
        )
    return {name: file for file, names in held.items() for name in names}


def read_headers(files: Mapping[str, Path]) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return shape and safetensors dtype of every tensor by name, reading each file once."""
    headers = {}
    for file in sorted(set(files.values())):
        with safe_open(file, framework="pt") as handle:
            for name in sorted(name for name, where in files.items() if where == file):
                tensor = handle.get_slice(name)
                headers[name] = tuple(tensor.get_shape()), tensor.get_dtype()
    return headers


def _list_parts(directory: Path) -> list[Path]:
    files = set(directory.glob("*.safetensors"))
    for match in filter(None, (_NUMBERED.fullmatch(file.name) for file in tuple(files))):
        count = int(match[2])
        files |= {directory / f"{match[1]}{number:05d}-of-{match[2]}.safetensors" for number in range(1, count + 1)}
    return sorted(files)


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


def _check_index(index: Path, named: Mapping[str, str], held: Mapping[Path, set[str]]) -> None:
    for name, file in named.items():
        if name not in held[index.parent / file]:
            others = [other.name for other, names in held.items() if name in names]
            raise UserError(
                f"{name} is not in {file}, as {index.name} says" + (f", but in {others[0]}" if others else ""),
                source=str(index),
                expected="an index that fits the files",
                hint=f"download {index.name} and {file} again, from one version of the model",
            )
