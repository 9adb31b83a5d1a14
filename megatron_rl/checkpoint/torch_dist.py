# SPDX-License-Identifier: Apache-2.0
"""Streaming reader and writer of Megatron distributed checkpoints (megatron-core's `torch_dist` format).

A checkpoint holds *global tensors*, each cut into chunks, boxes of any size and place. This writer needs
memory for one chunk only, hashes while writing, and forks no writers.

Reading runs no code from the files: chunks are loaded with `weights_only`, and `.metadata`, a pickle, by an unpickler
that allows only the classes of the format.
"""

from __future__ import annotations

import bisect
import io
import json
import pickle
from collections.abc import Iterable
from dataclasses import dataclass
from enum import EnumMeta
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron_rl.checkpoint.files import FileRecord, HashingFile, write_file
from megatron_rl.types import UserError
from megatron_rl.weights.shard_box import Box, box_shape, box_slices, intersect

METADATA_FILE = ".metadata"
MAX_CHUNK_BYTES = 64 << 20

_DTYPES = {name for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype)}
_ALLOWED: dict[str, set[str]] = {
    "torch": {"Size", *_DTYPES},
    "torch.serialization": {"_get_layout"},
    "torch._utils": {"_rebuild_tensor_v2"},
    "torch.distributed.checkpoint.metadata": {
        "Metadata",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "MetadataIndex",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.distributed.checkpoint.planner": {"SavePlan", "WriteItem", "WriteItemType", "TensorWriteData"},
    "pathlib": {"PosixPath", "PurePosixPath"},
    "pathlib._local": {"PosixPath", "PurePosixPath"},
    "collections": {"OrderedDict"},
}


@dataclass(frozen=True)
class Chunk:
    """A box of the global tensor `key`, stored in bytes [start, start + length) of the `.distcp` file."""

    key: str
    shape: tuple[int, ...]
    box: Box
    dtype: str
    file: str
    start: int
    length: int


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype, e.g. "bfloat16"."""
    return str(dtype).removeprefix("torch.")


class ChunkWriter(HashingFile):
    """Writer of one `.distcp` file; `close` makes it durable. Every method raises OSError if it cannot be written."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.chunks: list[Chunk] = []

    def add(self, key: str, shape: tuple[int, ...], offset: tuple[int, ...], data: torch.Tensor) -> None:
        """Append the box of `key` that begins at `offset`; `data` may omit leading dimensions.

        Chunks have at most `MAX_CHUNK_BYTES`, which bounds the memory of a reader.
        """
        data = data.detach()
        data = data[(None,) * (len(shape) - data.ndim)]
        axis = next((dim for dim, size in enumerate(data.shape) if size > 1), 0)
        step = max(1, MAX_CHUNK_BYTES * data.shape[axis] // max(1, data.numel() * data.element_size()))
        for first in range(0, data.shape[axis], step):
            part = data.narrow(axis, first, min(step, data.shape[axis] - first)).cpu().contiguous()
            if part.untyped_storage().nbytes() != part.numel() * part.element_size():
                part = part.clone()  # torch.save writes whole storages
            start = self.num_bytes
            try:
                torch.save(part, cast(IO[bytes], self))  # torch.save only writes
            except RuntimeError:
                if self.error is not None:
                    raise self.error from None
                raise
            at = (o + first * (dim == axis) for dim, o in enumerate(offset))
            box = tuple((o, o + n) for o, n in zip(at, part.shape, strict=True))
            dtype = dtype_name(part.dtype)
            self.chunks.append(Chunk(key, shape, box, dtype, self.path.name, start, self.num_bytes - start))


def write_index(directory: Path, chunks: Iterable[Chunk], common: dict[str, Any]) -> list[FileRecord]:
    """Write the index of a distributed checkpoint (OSError); `chunks`: of all files, covering their tensors."""
    tensors: dict[str, TensorStorageMetadata] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    for chunk in chunks:
        sizes, offsets = torch.Size(box_shape(chunk.box)), torch.Size(start for start, _ in chunk.box)
        tensor = tensors.setdefault(
            chunk.key,
            TensorStorageMetadata(TensorProperties(dtype=getattr(torch, chunk.dtype)), torch.Size(chunk.shape), []),
        )
        storage[MetadataIndex(chunk.key, offsets, len(tensor.chunks))] = _StorageInfo(
            chunk.file, chunk.start, chunk.length
        )
        tensor.chunks.append(ChunkStorageMetadata(offsets, sizes))
    metadata = Metadata(cast(dict[str, Any], tensors), planner_data={}, storage_data=storage)
    config = dict(
        sharded_backend="torch_dist", sharded_backend_version=1, common_backend="torch", common_backend_version=1
    )
    saved = io.BytesIO()
    torch.save(common, saved)
    files = {
        "common.pt": saved.getvalue(),
        METADATA_FILE: pickle.dumps(metadata),
        "metadata.json": json.dumps(config).encode(),
    }
    return [write_file(directory / name, content) for name, content in files.items()]


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _ALLOWED.get(module, ()):
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):
            return _find_member  # Python 3.11.0 to 3.11.3 pickles the member of an enum as getattr(enum, name)
        if module.startswith("megatron.core.dist_checkpointing."):
            return type(name, (), {})  # metadata for megatron-core only, unused here
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no checkpoint needs")


def _find_member(owner: Any, name: str) -> Any:
    if isinstance(owner, EnumMeta) and name in owner.__members__:
        return owner[name]
    raise pickle.UnpicklingError("it asks for builtins.getattr, which no checkpoint needs")


class ChunkReader:
    """Reader of boxes of the global tensors of a checkpoint (UserError: none, or unreadable `.metadata`)."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        metadata = _read_metadata(directory / METADATA_FILE)
        tensors = {
            key: tensor
            for key, tensor in metadata.state_dict_metadata.items()
            if isinstance(tensor, TensorStorageMetadata)
        }
        # Shape and dtype of each global tensor.
        self.tensors = {key: (tuple(tensor.size), tensor.properties.dtype) for key, tensor in tensors.items()}
        self._chunks: dict[str, list[Chunk]] = {key: [] for key in tensors}
        sizes = {(key, chunk.offsets): chunk.sizes for key, tensor in tensors.items() for chunk in tensor.chunks}
        for index, info in metadata.storage_data.items():
            if index.fqn in self.tensors:
                if Path(info.relative_path).name != info.relative_path:
                    raise _damaged(directory / METADATA_FILE, f"it names {info.relative_path!r}, no file beside it")
                shape, dtype = self.tensors[index.fqn]
                box = tuple((o, o + n) for o, n in zip(index.offset, sizes[index.fqn, index.offset], strict=True))
                self._chunks[index.fqn].append(
                    Chunk(index.fqn, shape, box, dtype_name(dtype), info.relative_path, info.offset, info.length)
                )
        for chunks in self._chunks.values():
            chunks.sort(key=lambda chunk: chunk.box)
        self._longest = {
            key: max((chunk.box[0][1] - chunk.box[0][0] for chunk in chunks), default=0)
            for key, chunks in self._chunks.items()
        }

    def chunks(self, key: str, box: Box) -> list[Chunk]:
        """Return the chunks that intersect `box` of the tensor `key`."""
        chunks = self._chunks.get(key, [])
        first = bisect.bisect_left(chunks, box[0][0] - self._longest.get(key, 0), key=lambda chunk: chunk.box[0][0])
        stop = bisect.bisect_left(chunks, box[0][1], key=lambda chunk: chunk.box[0][0])
        return [chunk for chunk in chunks[first:stop] if intersect(chunk.box, box)]

    @torch.no_grad()
    def read(self, key: str, box: Box, target: torch.Tensor) -> None:
        """Fill `target`, which may omit leading dimensions, from a box (UserError: incomplete, missing or damaged)."""
        target, filled = target[(None,) * (len(box) - target.ndim)], 0
        for chunk in self.chunks(key, box):
            part = intersect(chunk.box, box)
            assert part is not None, "`chunks` leaves out the others"
            data = self._load(chunk)
            if tuple(data.shape) != box_shape(chunk.box):
                raise _damaged(self.directory / chunk.file, f"{key}{list(chunk.box)} has shape {list(data.shape)}")
            inner, outer = _relative(part, chunk.box), _relative(part, box)
            target[box_slices(outer)].copy_(data[box_slices(inner)])
            filled += data[box_slices(inner)].numel()
        if filled != target.numel():
            raise UserError(
                f"{key}: the checkpoint holds {filled} of the {target.numel()} elements of box {list(box)}",
                source=str(self.directory),
                expected="a checkpoint of this model",
                hint="it belongs to another model, or parts of it were never written",
            )

    def _load(self, chunk: Chunk) -> torch.Tensor:
        path = self.directory / chunk.file
        try:
            with open(path, "rb") as file:
                file.seek(chunk.start)
                content = file.read(chunk.length)
            if len(content) != chunk.length:
                raise _damaged(
                    path, f"it ends at byte {path.stat().st_size}, {chunk.key} needs byte {chunk.start + chunk.length}"
                )
            return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        except FileNotFoundError:
            raise _damaged(path, "it is missing") from None
        except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
            if isinstance(error, UserError):
                raise
            raise _damaged(path, f"{chunk.key}{list(chunk.box)}: {str(error).splitlines()[0]}") from None


def _read_metadata(path: Path) -> Metadata:
    if not path.is_file():
        raise UserError(
            f"there is no {path}",
            source=str(path.parent),
            expected="a Megatron distributed checkpoint (torch_dist)",
            hint="tools/convert_hf_to_megatron.py makes one from a model in HF format",
        )
    try:
        metadata = _Unpickler(io.BytesIO(path.read_bytes())).load()
    except (pickle.UnpicklingError, EOFError, AttributeError, ValueError, TypeError, IndexError, KeyError) as error:
        raise _damaged(path, str(error) or type(error).__name__) from None
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise _damaged(path, "it does not hold the metadata of a checkpoint")
    return metadata


def _damaged(path: Path, what: str) -> UserError:
    return UserError(
        f"{path.name} is damaged: {what}",
        source=str(path),
        expected="the file as it was written",
        hint="take an older checkpoint, or copy this one again",
    )


def _relative(part: Box, box: Box) -> Box:
    return tuple((start - first, stop - first) for (start, stop), (first, _) in zip(part, box, strict=True))
