# SPDX-License-Identifier: Apache-2.0
"""Loading of weights in HF or Megatron format into a model of any layout."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import torch

from megatron_rl.checkpoint.huggingface import check_checkpoint, load_huggingface
from megatron_rl.checkpoint.pieces import make_weight_pieces
from megatron_rl.checkpoint.torch_dist import METADATA_FILE, ChunkReader
from megatron_rl.types import UserError
from megatron_rl.weights.families import ModelShape
from megatron_rl.weights.megatron_global import Table, megatron_global_placements
from megatron_rl.weights.shard_box import ShardBox


def check_weights(directory: str | Path, shape: ModelShape, may_lack: Collection[str] = ()) -> None:
    """Check weights in HF or Megatron format against the model's config; reads headers only.

    Raises:
        UserError: names the first missing (unless in `may_lack`) or mismatched tensors.
    """
    directory = Path(directory)
    if not (directory / METADATA_FILE).is_file():
        check_checkpoint(directory, shape, may_lack=may_lack)
        return
    table = {name: places for name, places in megatron_global_placements(shape).items() if name not in may_lack}
    check_global_shapes(ChunkReader(directory), table, directory)


def check_global_shapes(reader: ChunkReader, table: Table, weights: Path) -> None:
    """Check a distributed checkpoint against the model's config; padded vocabulary rows are allowed."""
    if any(key.endswith(".lora_A.weight") for key in reader.tensors):
        raise UserError(
            "the checkpoint holds adapters, and not the model that they belong to",
            source=str(weights),
            expected="the weights of a whole model",
            hint="the checkpoint's directory huggingface/ is in PEFT's format: start from it by actor.lora.path, or "
            "make one model of both with PEFT's merge_and_unload()",
        )
    wrong = []
    for key, shape in {place.key: place.shape for places in table.values() for place in places}.items():
        found = reader.tensors.get(key, ((), None))[0]
        is_padded = (
            key in ("embedding.word_embeddings.weight", "output_layer.weight")
            and found[1:] == shape[1:]
            and found[:1] >= shape[:1]
        )
        if found != shape and not is_padded:
            wrong.append(f"{key} is {list(found) if found else 'missing'}, config.json says {list(shape)}")
    if wrong:
        raise UserError(
            f"{len(wrong)} tensor(s) do not match: {'; '.join(wrong[:3])}",
            source=str(weights),
            expected="the tensors that config.json describes",
            hint="config.json and checkpoint belong to two models",
        )


@torch.no_grad()
def load_weights(
    directory: Path,
    shape: ModelShape,
    placements: Iterable[ShardBox],
    params: Mapping[str, torch.Tensor],
    *,
    may_lack: Collection[str] = (),
) -> None:
    """Fill `params` in place from a model in HF format or a Megatron distributed checkpoint.

    Values are converted to the dtype of the parameters; padding and missing tensors in `may_lack` become zero.

    Raises:
        UserError: not a checkpoint, another model, or a damaged file.
    """
    if not (directory / METADATA_FILE).is_file():
        load_huggingface(directory, placements, params, may_lack=may_lack)
        return
    reader = ChunkReader(directory)
    for tensor in params.values():
        tensor.zero_()
    table = megatron_global_placements(shape)
    lacking = {place.key for name in may_lack for place in table.get(name, ())} - reader.tensors.keys()
    for piece in make_weight_pieces(table, list(placements), params):
        if piece.key not in lacking:
            reader.read(piece.key, piece.box, piece.data)
