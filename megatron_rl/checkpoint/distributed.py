# SPDX-License-Identifier: Apache-2.0
"""Weights out of files of either kind into a model of any layout."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import torch

from megatron_rl.checkpoint.huggingface import load_huggingface
from megatron_rl.checkpoint.pieces import make_weight_pieces
from megatron_rl.checkpoint.torch_dist import METADATA_FILE, ChunkReader
from megatron_rl.weights.families import ModelShape
from megatron_rl.weights.megatron_global import megatron_global_placements
from megatron_rl.weights.placement import Placement


def load_weights(
    directory: Path, shape: ModelShape, placements: Iterable[Placement], params: Mapping[str, torch.Tensor],
    *, may_lack: Collection[str] = (),
) -> None:
    """Fill `params` in place from a model in HF format or a Megatron distributed checkpoint, whichever is there.

    Args:
        may_lack: tensors that become zero when a model in HF format does not have them; for the others see
            `load_distributed`.
    """
    if (directory / METADATA_FILE).is_file():
        load_distributed(directory, shape, placements, params)
    else:
        load_huggingface(directory, placements, params, may_lack=may_lack)


@torch.no_grad()
def load_distributed(
    directory: Path, shape: ModelShape, placements: Iterable[Placement], params: Mapping[str, torch.Tensor]
) -> None:
    """Fill `params` in place, converting to their dtype; padding becomes zero.

    The counterpart of `load_huggingface`: this rank reads just the boxes that its parameters hold.

    Args:
        directory: the distributed checkpoint (see `directory.resolve_weights`).
        shape: the architecture.
        placements: table of this rank.
        params: this rank's parameters by name.

    Raises:
        UserError: it is no such checkpoint, belongs to another model, or a file is damaged.
    """
    reader = ChunkReader(directory)
    for tensor in params.values():
        tensor.zero_()
    for piece in make_weight_pieces(megatron_global_placements(shape), list(placements), params):
        reader.read(piece.key, piece.box, piece.data)
