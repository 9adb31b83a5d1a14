# SPDX-License-Identifier: Apache-2.0
"""Comparison of a rank's weights with an HF model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_rl.checkpoint.huggingface import ModelFiles
from megatron_rl.transfer.computed import SourceParams
from megatron_rl.weights.shard_box import ShardBox, box_slices, box_volume


@dataclass(frozen=True)
class WrongTensor:
    """A logical tensor that "is zero", "is <other tensor>", or "differs" from the files on a rank."""

    name: str
    max_abs_gap: float
    what: str


def compare_weights(directory: Path, placements: Sequence[ShardBox], params: SourceParams) -> list[WrongTensor]:
    """List tensors that differ from the files after conversion to their dtype, in table order."""
    files, wrong = ModelFiles(directory), {}
    for placement in placements:
        if placement.hf_name not in files or not box_volume(placement.hf_box):
            continue
        held = params[placement.param][box_slices(placement.local_box)].cpu()
        gap = (_read(files, placement, placement.hf_name).to(held.dtype) - held).abs().max().item()
        if gap and placement.hf_name not in wrong:
            wrong[placement.hf_name] = WrongTensor(placement.hf_name, gap, _explain(files, placement, held))
    return list(wrong.values())


def _read(files: ModelFiles, placement: ShardBox, name: str) -> torch.Tensor:
    with files.open() as handle:
        return handle.get_slice(name)[box_slices(placement.hf_box)]


def _explain(files: ModelFiles, placement: ShardBox, held: torch.Tensor) -> str:
    """Check for zeros, and for another tensor of the same layer and shape."""
    if not held.any():
        return "is zero"
    headers = files.read_headers()
    prefix = placement.hf_name.split(".self_attn.")[0].split(".mlp.")[0]
    for other in sorted(files):
        if other.startswith(prefix) and other != placement.hf_name:
            shape, _ = headers[other]
            fits = len(shape) == held.ndim and all(
                stop <= size for (_, stop), size in zip(placement.hf_box, shape, strict=True)
            )
            if fits and torch.equal(_read(files, placement, other).to(held.dtype), held):
                return f"is {other}"
    return "differs"
