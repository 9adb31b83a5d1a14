# SPDX-License-Identifier: Apache-2.0
"""Conversion between HF models and Megatron distributed checkpoints, which are independent of layouts.

A process holds at most `MAX_CHUNK_BYTES` of a tensor, briefly twice. Output goes to a temporary name and can be
resumed; see `units.py`. Values are copied bitwise unless another dtype is requested.
"""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial as bind
from pathlib import Path
from typing import Any

import torch

from megatron_rl.checkpoint.directory import MANIFEST_FILE, begin_manifest, find_problems, seal
from megatron_rl.checkpoint.files import (
    CONFIG_DIR,
    DIGESTS_FILE,
    Unit,
    copy_side_files,
    explain_write_error,
    find_mtp_weights,
    list_side_files,
    split_units,
)
from megatron_rl.checkpoint.huggingface import ModelFiles, check_checkpoint, finish_model, list_copies, name_safetensors
from megatron_rl.checkpoint.pieces import check_global_shapes, locate
from megatron_rl.checkpoint.torch_dist import MAX_CHUNK_BYTES, METADATA_FILE, ChunkReader, ChunkWriter, write_index
from megatron_rl.types import UserError
from megatron_rl.weights.families import SCORE_HEAD, ModelShape
from megatron_rl.weights.megatron_layout import GlobalPlacement, Table, megatron_global_placements
from megatron_rl.weights.model_config import load_model_shape
from megatron_rl.weights.packed_experts import FileTensor, join_turns, list_file_tensors
from megatron_rl.weights.shard_box import Box, box_shape, box_slices, box_volume, full_box
from tools._weights import resolve_weights
from tools.conversion.conversion_checks import (
    check_one_type_per_key,
    check_surplus,
    choose_dtypes,
    read_dtypes,
)
from tools.conversion.safetensors_stream import SafetensorsWriter
from tools.conversion.units import Finished, Progress, Workers, forget_notes, run_units

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def convert_to_megatron(
    source: Path,
    out: Path,
    *,
    dtype: torch.dtype | None,
    file_bytes: int,
    force: bool,
    workers: Workers,
    progress: Progress | None = None,
) -> Path:
    """Write an HF model as a distributed checkpoint; collective.

    Args:
        dtype: unchanged if `None`; router biases become float32.
        file_bytes: size at which a new file begins.
        force: replace an existing `out` once the new one is finished.

    Raises:
        UserError: unknown architecture, weights that do not match config.json, a failed write, ...
    """
    shape = load_model_shape(source, head="score" if SCORE_HEAD in ModelFiles(source) else "lm")
    check_checkpoint(source, shape)
    files = ModelFiles(source)
    check_surplus(files, shape, source)
    drafts, shapes = _place_drafts(shape, files.read_headers())
    dtypes = read_dtypes(files, shapes) if dtype is None else choose_dtypes(shape, dict.fromkeys(shapes, dtype), dtype)
    table, partial = megatron_global_placements(shape) | drafts, _claim(out, force)
    check_one_type_per_key(table, dtypes, source)
    sizes = {name: torch.Size(size).numel() * dtypes[name].itemsize for name, size in shapes.items()}
    units = split_units(sizes, file_bytes, lambda index, _: f"__{index}_0.distcp")
    stats = {str(file): file.stat() for file in sorted(set(files.values()))}
    fingerprint = {
        "to": "megatron",
        "source": {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()},
        "dtypes": sorted(set(map(str, dtypes.values()))),
        "file_bytes": file_bytes,
        "shape": dataclasses.asdict(shape),
    }
    finished = run_units(
        units, bind(_write_distcp, files=files, dtypes=dtypes, table=table), partial, fingerprint, workers, progress
    )
    manifest = begin_manifest("weights", step=0) | {
        "policy_version": 0,
        "has_optimizer": False,
        "source": source.resolve().name,
        "model": dataclasses.asdict(shape),
    }

    def finish() -> None:
        chunks = [chunk for unit in finished for chunk in unit.chunks]
        shutil.rmtree(partial / CONFIG_DIR, ignore_errors=True)
        records = write_index(partial, chunks, {"iteration": 0})
        records += copy_side_files(list_side_files(source), partial / CONFIG_DIR)
        seal(partial, manifest, [*(unit.record for unit in finished), *records])
        forget_notes(out)

    return _finish(out, finish, workers)


@dataclass(frozen=True)
class CheckpointWeights:
    """Weights of a distributed checkpoint.

    Attributes:
        path: a converted or training checkpoint, a run, or a checkpoint of megatron-core.
        role: of a training checkpoint: "actor" or "critic".
        config: directory with config.json and tokenizer, if the checkpoint has none.
        verify: compare digests first.
    """

    path: Path
    role: str = "actor"
    config: Path | None = None
    verify: bool = True


def convert_to_huggingface(
    source: CheckpointWeights,
    out: Path,
    *,
    dtype: torch.dtype | None,
    file_bytes: int,
    force: bool,
    workers: Workers,
    progress: Progress | None = None,
) -> Path:
    """Write a distributed checkpoint as an HF model; collective. Arguments as in `convert_to_megatron`.

    Raises:
        UserError: a damaged checkpoint, another model's config, a failed write, ...
    """
    weights = resolve_weights(source.path, source.role)
    if source.verify:
        workers.agree(_find_damage(weights, workers))
    reader, config = _RoleReader(weights), source.config or weights / CONFIG_DIR
    shape = load_model_shape(config, head="score" if SCORE_HEAD in reader.tensors else "lm")
    drafts, sizes = _place_drafts(shape, reader.tensors)
    table, partial = megatron_global_placements(shape) | drafts, _claim(out, force)
    for copy, original in list_copies(shape).items() if reader.mtp is not None else ():
        drafts[copy] = table[copy] = table[original]
        sizes[copy] = sizes[original]
    check_global_shapes(reader, table, weights)
    dtypes = choose_dtypes(shape, {name: reader.tensors[p[0].key][1] for name, p in table.items()}, dtype)
    written = {
        name: (tensor, dtypes[tensor.experts[0][0] if tensor.experts else name])
        for name, tensor in (list_file_tensors(shape) | {name: FileTensor(sizes[name]) for name in drafts}).items()
    }
    num_bytes = {name: torch.Size(one.size).numel() * dtype.itemsize for name, (one, dtype) in written.items()}
    units = split_units(num_bytes, file_bytes, name_safetensors)
    digest = hashlib.sha256((weights / METADATA_FILE).read_bytes()).hexdigest()
    fingerprint = {
        "to": "huggingface",
        "source": [str(weights.resolve()), digest],
        "file_bytes": file_bytes,
        "dtypes": sorted(set(map(str, dtypes.values()))),
        "shape": dataclasses.asdict(shape),
    }
    run_units(
        units,
        bind(_write_safetensors, reader=reader, table=table, written=written),
        partial,
        fingerprint,
        workers,
        progress,
    )

    def finish() -> None:
        main = max(set(dtypes.values()), key=list(dtypes.values()).count)
        finish_model(partial, out, units, config, shape, main)
        forget_notes(out)

    return _finish(out, finish, workers)


def _place_drafts(
    shape: ModelShape, tensors: Mapping[str, tuple[tuple[int, ...], Any]]
) -> tuple[Table, dict[str, tuple[int, ...]]]:
    """Place layers for multi-token prediction, unstacked under their own names, and list shapes of all tensors.

    Args:
        tensors: name -> (shape, type), of these and other tensors.
    """
    sizes = {name: size for name, (size, _) in tensors.items() if shape.is_draft(name)}
    table = {name: (GlobalPlacement(name, size, (), full_box(size), full_box(size)),) for name, size in sizes.items()}
    return table, shape.logical_tensors() | sizes


class _RoleReader(ChunkReader):
    """A reader of a role's weights.

    Attributes:
        mtp: reads a trained MTP layer, which has its own directory; otherwise `None`.
    """

    def __init__(self, weights: Path) -> None:
        super().__init__(weights)
        self.mtp, directory = None, find_mtp_weights(weights)
        if directory != weights:
            self.mtp = ChunkReader(directory)
            self.tensors = {**self.mtp.tensors, **self.tensors}

    def read(self, key: str, box: Box, target: torch.Tensor) -> None:
        """Fill `target` with a box of a tensor."""
        if self.mtp is not None and key in self.mtp.tensors:
            self.mtp.read(key, box, target)
        else:
            super().read(key, box, target)


def _claim(out: Path, force: bool) -> Path:
    """Return the temporary name for the output `out`.

    Raises:
        UserError: `out` exists, without `force`.
    """
    if out.exists() and not force:
        raise UserError(
            f"{out} exists",
            source="--out",
            expected="a new directory",
            hint="choose another name, or pass --force to replace it when the new one is finished",
        )
    return out.with_name(out.name + ".partial")


def _finish(out: Path, finish: Any, workers: Workers) -> Path:
    error: UserError | None = None
    if workers.rank == 0:
        try:
            finish()
        except (UserError, OSError) as caught:
            error = explain_write_error(caught, out)
    workers.agree(error)
    return out


def _find_damage(weights: Path, workers: Workers) -> UserError | None:
    """Check this worker's share of the files; megatron-core writes no digests."""
    directory = next(
        (d for d in (weights, weights.parent) if (d / DIGESTS_FILE).is_file() and (d / MANIFEST_FILE).is_file()), None
    )
    problems = find_problems(directory, workers.rank, workers.size) if directory else []
    return (
        UserError(
            "; ".join(problems[:3]),
            source=str(directory),
            expected="a whole checkpoint",
            hint="take another one, or copy this one again",
        )
        if problems
        else None
    )


def _split_rows(place: GlobalPlacement, itemsize: int) -> Iterator[Box]:
    """Split `place.hf_box` by rows into boxes of at most MAX_CHUNK_BYTES."""
    (start, stop), *rest = place.hf_box
    step = max(1, MAX_CHUNK_BYTES // (itemsize * max(1, box_volume(tuple(rest)))))
    for first in range(start, stop, step):
        yield ((first, min(first + step, stop)), *rest)


def _write_distcp(
    unit: Unit,
    path: Path,
    progress: Progress,
    *,
    files: ModelFiles,
    dtypes: Mapping[str, torch.dtype],
    table: Table,
) -> Finished:
    writer = ChunkWriter(path)
    try:
        for name in unit.tensors:
            with files.open() as handle:  # reopened to release pages of other tensors
                stored = handle.get_slice(name)
                for place in table[name]:
                    for part in _split_rows(place, dtypes[name].itemsize):
                        piece = locate(place, part, stored[box_slices(part)].to(dtypes[name]))
                        writer.add(piece.key, piece.shape, piece.offset, piece.data)
                        progress.advance(piece.data.numel() * piece.data.element_size())
        return Finished(writer.close(), tuple(writer.chunks))
    finally:
        writer.abandon()


def _read_rows(reader: ChunkReader, places: Sequence[GlobalPlacement], dtype: torch.dtype) -> Iterator[torch.Tensor]:
    for place in places:
        for part in _split_rows(place, dtype.itemsize):
            piece = locate(place, part, torch.empty(box_shape(part), dtype=dtype))
            reader.read(piece.key, piece.box, piece.data)
            yield piece.data


def _write_safetensors(
    unit: Unit,
    path: Path,
    progress: Progress,
    *,
    reader: ChunkReader,
    table: Table,
    written: Mapping[str, tuple[FileTensor, torch.dtype]],
) -> Finished:
    writer = SafetensorsWriter(path, {name: (written[name][0].size, written[name][1]) for name in unit.tensors})
    try:
        for name in unit.tensors:
            tensor, dtype = written[name]
            experts = (
                join_turns([torch.cat([*_read_rows(reader, table[part], dtype)]) for part in turns])
                for turns in tensor.experts
            )
            for data in experts if tensor.experts else _read_rows(reader, table[name], dtype):
                writer.write(data)
                progress.advance(data.numel() * data.element_size())
        return Finished(writer.close())
    finally:
        writer.abandon()
