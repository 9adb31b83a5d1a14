# SPDX-License-Identifier: Apache-2.0
"""The certificate of a reshard: source and destination hold the same bits, tensor by tensor.

The digest of a logical tensor does not depend on any layout: over its elements at row-major position i,

    D = sum_i bits(x_i) * (2 i + 1)   modulo 2^64

where bits(x_i) is the element's bit pattern. Each rank sums its own pieces; one all-reduce gives D. Every factor is
odd: one wrong bit always changes D, two exchanged elements change it by 2 (i - j) (bits_j - bits_i), and a missing or
stale piece by its share.

Each piece is counted once: on the source by its first owner, on the destination once per engine. Padding outside
logical tensors must be zero on both sides.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megatron_rl.parallel.collectives import gather_objects
from megatron_rl.transfer.planner import Shard
from megatron_rl.weights.placement_tables import as_table
from megatron_rl.weights.shard_box import Box, ShardBox, box_slices, box_volume, fill_in_order

if TYPE_CHECKING:
    from megatron_rl.transfer.computed import SourceParams

CHUNK_ELEMENTS = 1 << 20
SAMPLE_SHARE = 0.02  # share of the bytes that one turn of `Certificate.verify` compares


class CertificateError(RuntimeError):
    """Mismatch of weights between training and rollout; names tensor, rank, box and both digests."""


def view_bits(tensor: torch.Tensor) -> torch.Tensor:
    """View numbers as signed integers of their size."""
    return tensor.view({4: torch.int32, 2: torch.int16, 1: torch.int8}[tensor.element_size()])


def compute_digest(piece: torch.Tensor, hf_box: Box, hf_shape: tuple[int, ...]) -> torch.Tensor:
    """Compute the share of one piece in its tensor's digest; int64 scalar (arithmetic wraps modulo 2^64).

    Args:
        piece: the elements, any strides; only the first and the last dimension may be cut.
        hf_box: box of the piece in the logical tensor.
        hf_shape: shape of the logical tensor.
    """
    width = hf_shape[-1]
    matrix = view_bits(piece).reshape(-1, piece.shape[-1])
    column_start = hf_box[-1][0]
    row_start = hf_box[0][0] * math.prod(hf_shape[1:-1]) if len(hf_shape) > 1 else 0
    columns = torch.arange(matrix.shape[1], dtype=torch.int64, device=piece.device) + column_start
    total = torch.zeros((), dtype=torch.int64, device=piece.device)
    step = max(1, CHUNK_ELEMENTS // max(1, matrix.shape[1]))
    for first in range(0, matrix.shape[0], step):
        bits = matrix[first : first + step].to(torch.int64)  # at most CHUNK_ELEMENTS at a time
        rows = torch.arange(first, first + bits.shape[0], dtype=torch.int64, device=piece.device) + row_start
        # sum over rows and columns of bits * (2 (row * width + column) + 1)
        total += (bits.sum(1) * (2 * width * rows + 1)).sum() + (bits.sum(0) * (2 * columns)).sum()
    return total


@dataclass(frozen=True)
class CertifiedParams:
    """One side of a reshard on this rank.

    Attributes:
        counted: placements whose digest this rank contributes.
        params_with_padding: parameters with elements that no logical tensor fills.
    """

    params: SourceParams
    counted: Sequence[ShardBox]
    params_with_padding: Sequence[str]


def count_once(shards: Sequence[Shard], rank: int) -> list[ShardBox]:
    """Return the placements of `rank` whose box no earlier rank (or placement) holds."""
    own = next((shard for shard in shards if shard.ranks[0] == rank), None)
    if own is None:  # an earlier rank holds the same
        return []
    counted: dict[tuple[str, Box], ShardBox] = {}
    for p in own.placements:
        if box_volume(p.hf_box):
            counted.setdefault((p.hf_name, p.hf_box), p)
    mine = {name for name, _ in counted}
    for shard in takewhile(lambda shard: shard is not own, shards):
        table = as_table(shard.placements)
        for _, name, kind in table.rows:
            if name in mine:
                counted.pop((name, table.boxes[kind][1]), None)
    return list(counted.values())


class Certificate:
    """Comparison of both sides after a reshard; collective.

    Args:
        source, destination: this rank's sides; the source is converted to the destination's dtype.
        num_engines, engine: engines in the job, and this rank's engine; -1 if it has none.
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        source: CertifiedParams,
        destination: CertifiedParams,
        *,
        dtype: torch.dtype,
        num_engines: int,
        engine: int,
        group: dist.ProcessGroup,
    ) -> None:
        self._shapes, self._source, self._destination = dict(shapes), source, destination
        self._dtype = dtype
        self._num_engines, self._engine, self._group = num_engines, engine, group
        sizes = {name: math.prod(shape) for name, shape in self._shapes.items()}
        self._rotation = fill_in_order(sizes, SAMPLE_SHARE * sum(sizes.values()))

    def verify(self, turn: int | None = None) -> int:
        """Compare all tensors, or part `turn` of a rotation over them in parts of 2 %, and return the number compared.

        Raises:
            CertificateError: on every rank.
        """
        names = list(self._shapes) if turn is None else self._rotation[turn % len(self._rotation)]
        padding = [*self._dirty_padding(self._source, "training"), *self._dirty_padding(self._destination, "rollout")]
        digests = torch.zeros(1 + self._num_engines, len(names) + 1, dtype=torch.int64)
        digests[:, -1] = len(padding)
        column = {name: index for index, name in enumerate(names)}
        for row, side in ((0, self._source), (1 + self._engine, self._destination)):
            wanted = [p for p in side.counted if p.hf_name in column]
            found = [compute_digest(self._piece(side, p), p.hf_box, self._shapes[p.hf_name]) for p in wanted]
            for p, digest in zip(wanted, found, strict=True):
                digests[row, column[p.hf_name]] += digest.cpu()
        dist.all_reduce(digests, group=self._group)
        wrong, is_dirty = (digests[1:] != digests[0]).nonzero().tolist(), bool(digests[0, -1] > 0)
        if wrong or is_dirty:
            self._raise_if_wrong(wrong, digests, names, padding)
        return len(names)

    def _piece(self, side: CertifiedParams, placement: ShardBox) -> torch.Tensor:
        return side.params[placement.param][box_slices(placement.local_box)].to(self._dtype)

    def _dirty_padding(self, side: CertifiedParams, name: str) -> list[str]:
        found = []
        for param in side.params_with_padding:
            tensor = side.params[param]
            assert isinstance(tensor, torch.Tensor), "adapters are added to matrices without padding"
            filled = max((p.local_box[0][1] for p in side.counted if p.param == param), default=None)
            if filled is not None and filled < len(tensor) and tensor[filled:].count_nonzero():
                found.append(f"{param} on rank {self._group.rank()} ({name}): rows {filled}:{len(tensor)} are not zero")
        return found

    def _raise_if_wrong(
        self, wrong: list[list[int]], digests: torch.Tensor, names: list[str], padding: list[str]
    ) -> None:
        lines = [line for rank_lines in gather_objects(padding, self._group) for line in rank_lines]
        for engine, index in wrong[:3]:
            name = names[index]
            lines.append(
                f"{name}: training {_hex(digests[0, index])}, rollout engine {engine} "
                f"{_hex(digests[1 + engine, index])}"
            )
            lines += self._locate(name)
        raise CertificateError("weights differ between training and rollout:\n  " + "\n  ".join(lines))

    def _locate(self, name: str) -> list[str]:
        mine = {
            key: [
                (p.hf_box, self._group.rank(), p.param, self._piece(side, p).cpu())
                for p in side.counted
                if p.hf_name == name
            ]
            for key, side in (("source", self._source), ("destination", self._destination))
        }
        everyone = gather_objects(mine, self._group)  # only on the error path, for one tensor
        truth = torch.empty(self._shapes[name], dtype=self._dtype)
        for rank_pieces in everyone:
            for box, _, _, piece in rank_pieces["source"]:
                truth[box_slices(box)] = piece
        found = []
        for rank_pieces in everyone:
            for box, rank, param, piece in rank_pieces["destination"]:
                right = truth[box_slices(box)]
                if not torch.equal(view_bits(right), view_bits(piece)):
                    differing = int((view_bits(right) != view_bits(piece)).sum())
                    found.append(
                        f"  rank {rank} {param}, box {list(box)}: {differing} of {piece.numel()} elements, "
                        f"digest {_hex(compute_digest(right, box, self._shapes[name]))} expected, "
                        f"{_hex(compute_digest(piece, box, self._shapes[name]))} found"
                    )
        return found[:4]


def _hex(digest: torch.Tensor) -> str:
    return f"{int(digest) & (1 << 64) - 1:016x}"
