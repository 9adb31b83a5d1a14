# SPDX-License-Identifier: Apache-2.0
"""Fingerprints of parameters: compact, independent of layout, sufficient to compare tensors and locate differences.

Of each logical tensor (HF names and shapes; optimizer states as `optimizer.exp_avg.<name>`):

    digest   sum of bits(x_i) * (2 i + 1) modulo 2^64, as in the reshard's certificate
    total    sum of bits(x_i)             modulo 2^64
    norm, highest |x_i|, and the values of 64 elements at positions derived from the name

If one element changed, totals differ by d and digests by d * (2 i + 1), which gives i and the previous value.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.checkpoint.optimizer_states import make_state_pieces
from megatron_rl.checkpoint.pieces import (
    MAIN_PARAM,
    MOMENTS,
    STATE_PREFIX,
    Piece,
    SavedRole,
    choose_saved,
    find_holders,
    make_weight_pieces,
)
from megatron_rl.checkpoint.torch_dist import ChunkReader
from megatron_rl.transfer.certificate import compute_digest
from megatron_rl.types import UserError
from megatron_rl.weights.families import ModelShape
from megatron_rl.weights.megatron_global import megatron_global_placements
from megatron_rl.weights.megatron_layout import ROUTER_BIAS
from megatron_rl.weights.shard_box import ShardBox, box_shape, box_slices, box_volume, full_box

NUM_SAMPLES = 64
_STATES = (*MOMENTS, MAIN_PARAM)
_INTEGERS = {4: torch.int32, 2: torch.int16, 1: torch.int8}
_CHUNK_ELEMENTS = 1 << 20
_WRAP = 1 << 64


@dataclass(frozen=True)
class Fingerprints:
    """Fingerprints of n logical tensors.

    Attributes:
        shapes: by name, in checkpoint order.
        bits: [n, 2] int64: digest and total.
        sizes: [n, 2] float64: norm and highest magnitude.
        samples: [n, 64] float64, see `sample_places`.
    """

    shapes: Mapping[str, tuple[int, ...]]
    bits: np.ndarray
    sizes: np.ndarray
    samples: np.ndarray


def sample_places(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return the row-major positions of a tensor's sampled elements, [64] int64."""
    return np.random.default_rng(zlib.crc32(name.encode())).integers(np.prod(shape), size=NUM_SAMPLES)


def fingerprint_weights(role: SavedRole, group: dist.ProcessGroup) -> Fingerprints:
    """Fingerprint a role's weights, equal on every rank; collective over `group`, which may exceed the role's ranks."""
    shapes, rank = role.model.shape.logical_tensors(), group.rank()
    saved = choose_saved(role, find_holders(role), rank) if rank in role.model.layout.ranks else []

    def read(p: ShardBox) -> torch.Tensor:
        piece = role.model.params[p.param][box_slices(p.local_box)]
        return piece if p.param.endswith(ROUTER_BIAS) else piece.to(role.model.dtype)

    return fingerprint_pieces(
        shapes,
        (
            Piece(
                p.hf_name,
                shapes[p.hf_name],
                tuple(start for start, _ in p.hf_box),
                read(p),
            )
            for p in saved
        ),
        group,
    )


def fingerprint_optimizer(role: SavedRole, group: dist.ProcessGroup) -> Fingerprints:
    """Fingerprint a role's optimizer states (empty before its first step); collective as `fingerprint_weights`."""
    shapes = {
        f"{STATE_PREFIX}{state}.{name}": shape
        for name, shape in role.model.shape.logical_tensors().items()
        for state in _STATES
    }
    rank, is_here = group.rank(), group.rank() in role.model.layout.ranks
    return fingerprint_pieces(shapes, make_state_pieces(role, rank, find_holders(role)) if is_here else (), group)


class StoredRole:
    """The logical tensors of a role in a checkpoint; every method raises UserError if the files cannot be read.

    Args:
        directory: of the role.
    """

    def __init__(self, directory: Path, shape: ModelShape) -> None:
        self._reader, self._shapes = ChunkReader(directory), shape.logical_tensors()
        self._table = megatron_global_placements(shape)

    def read(self, name: str) -> torch.Tensor:
        """Read a weight or optimizer state."""
        is_state = name.startswith(STATE_PREFIX)
        key = name if is_state else self._table[name][0].key
        if key not in self._reader.tensors:
            raise UserError(
                f"{key} is not there",
                source=str(self._reader.directory),
                expected="the files as they were written",
                hint="copy them again",
            )
        size, dtype = self._reader.tensors[key]
        box = full_box(size if is_state else self._shapes[name])
        tensor = torch.empty(box_shape(box), dtype=dtype)
        pieces = (
            [Piece(key, size, (0,) * len(size), tensor)]
            if is_state
            else make_weight_pieces(self._table, [ShardBox(name, box, name, box)], {name: tensor})
        )
        for piece in pieces:
            self._reader.read(piece.key, piece.box, piece.data)
        return tensor

    def fingerprint(self, shapes: Mapping[str, tuple[int, ...]]) -> Fingerprints:
        """Fingerprint the named tensors, reading one at a time."""
        return fingerprint_pieces(
            shapes, (Piece(name, size, (0,) * len(size), self.read(name)) for name, size in shapes.items()), None
        )


def fingerprint_pieces(
    shapes: Mapping[str, tuple[int, ...]], pieces: Iterable[Piece], group: dist.ProcessGroup | None
) -> Fingerprints:
    """Compute fingerprints from pieces that cover each element once over `group` (or locally)."""
    rows, names = {name: row for row, name in enumerate(shapes)}, list(shapes)
    places = {}
    bits = torch.zeros(len(names), 3, dtype=torch.int64)  # digest, total, elements
    numbers = torch.zeros(len(names), 1 + NUM_SAMPLES, dtype=torch.float64)  # squared norm, samples
    highest = torch.zeros(len(names), dtype=torch.float64)
    for piece in pieces:
        if not box_volume(piece.box):
            continue
        data = piece.data.detach()
        data, row = data[(None,) * (len(piece.shape) - data.ndim)], rows[piece.key]
        if row not in places:
            places[row] = np.stack(np.unravel_index(sample_places(piece.key, piece.shape), piece.shape))
        bits[row] += torch.tensor([int(compute_digest(data, piece.box, piece.shape)), _sum_bits(data), data.numel()])
        numbers[row, 0] += torch.linalg.vector_norm(data, dtype=torch.float64).cpu() ** 2
        numbers[row, 1:] += _pick(data, piece, places[row])
        highest[row] = torch.maximum(highest[row], data.abs().max().double().cpu())
    if group is not None:
        dist.all_reduce(bits, group=group)
        dist.all_reduce(numbers, group=group)
        dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
    seen = [row for row, count in enumerate(bits[:, 2].tolist()) if count]
    for row in seen:
        assert bits[row, 2] == np.prod(shapes[names[row]]), f"{names[row]}: each element counts once"
    bits, numbers, highest = bits[seen].numpy(), numbers[seen].numpy(), highest[seen].numpy()
    return Fingerprints(
        {names[row]: tuple(shapes[names[row]]) for row in seen},
        bits[:, :2],
        np.stack([np.sqrt(numbers[:, 0]), highest], axis=1),
        numbers[:, 1:],
    )


def _sum_bits(data: torch.Tensor) -> int:
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    integers = data.view(_INTEGERS[data.element_size()])
    for rows in integers.split(max(1, _CHUNK_ELEMENTS // max(1, integers[0].numel()))):
        total += rows.sum(dtype=torch.int64)
    return int(total)


def _pick(data: torch.Tensor, piece: Piece, places: np.ndarray) -> torch.Tensor:
    inner = places - np.array(piece.offset)[:, None]
    is_here = ((inner >= 0) & (inner < np.array(data.shape)[:, None])).all(0)
    found = torch.zeros(NUM_SAMPLES, dtype=torch.float64)
    if is_here.any():
        found[torch.from_numpy(is_here)] = data[tuple(torch.from_numpy(i[is_here]) for i in inner)].double().cpu()
    return found


def locate_change(before: Sequence[int], after: Sequence[int], shape: tuple[int, ...]) -> tuple[int, int] | None:
    """Locate the single element whose change explains the difference of two fingerprints.

    Args:
        before, after: digest and total.

    Returns:
        Its row-major position and the increase of its bits, or `None` if no single element explains it.
    """
    digest, total = (int(b) - int(a) & _WRAP - 1 for a, b in zip(before, after, strict=True))
    if total == 0:
        return None
    twos = (total & -total).bit_length() - 1  # solves digest = total * (2 i + 1) modulo 2^(64 - twos)
    modulus = _WRAP >> twos
    factor = (digest >> twos) * pow(total >> twos, -1, modulus) % modulus
    index, volume = factor // 2, int(np.prod(shape))
    if not factor % 2 or digest % (1 << twos) or not index < volume <= modulus // 2:
        return None
    return index, total - _WRAP if total >> 63 else total


def value_before(value: torch.Tensor, growth: int) -> float | None:
    """Return an element's (0-d) value before its bits grew by `growth`, or `None` if out of range."""
    kind = _INTEGERS[value.element_size()]
    old, limits = int(value.view(kind)) - growth, torch.iinfo(kind)
    return torch.tensor(old, dtype=kind).view(value.dtype).item() if limits.min <= old <= limits.max else None
