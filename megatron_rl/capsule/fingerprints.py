# SPDX-License-Identifier: Apache-2.0
"""Fingerprints of parameters: compact, independent of layout, sufficient to compare tensors and locate differences.

Of each logical tensor (HF names and shapes; optimizer states as `optimizer.exp_avg.<name>`):

    digest   sum of bits(x_i) * (2 i + 1) modulo 2^64, as in `transfer.certificate`
    total    sum of bits(x_i)             modulo 2^64
    norm, highest |x_i|, and the values of 64 elements at positions derived from the name

If one element changed, totals differ by d and digests by d * (2 i + 1), which gives i and the previous value.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

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
)
from megatron_rl.transfer.certificate import CHUNK_ELEMENTS, compute_digest, view_bits
from megatron_rl.weights.megatron_layout import ROUTER_BIAS
from megatron_rl.weights.shard_box import ShardBox, box_slices, box_volume

NUM_SAMPLES = 64
_STATES = (*MOMENTS, MAIN_PARAM)


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
    """Fingerprint a role's weights; collective over `group` (which may exceed the role's ranks), equal on all ranks."""
    shapes, rank = role.model.shape.logical_tensors(), group.rank()
    saved = choose_saved(role, find_holders(role), rank) if rank in role.model.layout.ranks else []

    def read(p: ShardBox) -> Piece:
        data = role.model.params[p.param][box_slices(p.local_box)]
        data = data if p.param.endswith(ROUTER_BIAS) else data.to(role.model.dtype)
        return Piece(p.hf_name, shapes[p.hf_name], tuple(start for start, _ in p.hf_box), data)

    return fingerprint_pieces(shapes, map(read, saved), group)


def fingerprint_optimizer(role: SavedRole, group: dist.ProcessGroup) -> Fingerprints:
    """Fingerprint a role's optimizer states (none before its first step); collective over `group`."""
    shapes = {
        f"{STATE_PREFIX}{state}.{name}": shape
        for name, shape in role.model.shape.logical_tensors().items()
        for state in _STATES
    }
    rank, is_here = group.rank(), group.rank() in role.model.layout.ranks
    return fingerprint_pieces(shapes, make_state_pieces(role, rank, find_holders(role)) if is_here else (), group)


def fingerprint_pieces(
    shapes: Mapping[str, tuple[int, ...]], pieces: Iterable[Piece], group: dist.ProcessGroup | None
) -> Fingerprints:
    """Compute fingerprints from pieces that cover each element once over `group`, or on this rank if it is `None`."""
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
        integers = view_bits(data)
        total = torch.zeros((), dtype=torch.int64, device=data.device)
        for part in integers.split(max(1, CHUNK_ELEMENTS // max(1, integers[0].numel()))):
            total += part.sum(dtype=torch.int64)
        bits[row] += torch.tensor([int(compute_digest(data, piece.box, piece.shape)), int(total), data.numel()])
        numbers[row, 0] += torch.linalg.vector_norm(data, dtype=torch.float64).cpu() ** 2
        inner = places[row] - np.array(piece.offset)[:, None]
        is_here = ((inner >= 0) & (inner < np.array(data.shape)[:, None])).all(0)
        if is_here.any():
            found = data[tuple(torch.from_numpy(i[is_here]) for i in inner)].double().cpu()
            numbers[row, 1:][torch.from_numpy(is_here)] += found
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
