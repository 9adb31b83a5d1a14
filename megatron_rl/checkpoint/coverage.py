# SPDX-License-Identifier: Apache-2.0
"""Whether a training checkpoint holds all that a run can resume from: every element of every tensor, once.

Digests say that files are as they were written. They do not say that everything was written; that is asked here, of
the index on the disk and of the model that the manifest describes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

from megatron_rl.checkpoint.pieces import MAIN_PARAM, STATE_PREFIX, list_moments
from megatron_rl.checkpoint.torch_dist import ChunkReader
from megatron_rl.types import UserError
from megatron_rl.weights.adapters import read_shape
from megatron_rl.weights.families import ModelShape
from megatron_rl.weights.megatron_global import megatron_global_placements
from megatron_rl.weights.shard_box import Box, box_volume, full_box


def find_gaps(directory: Path, manifest: Mapping[str, Any], part: int = 0, num_parts: int = 1) -> list[str]:
    """What is missing from a training checkpoint, one line each; other kinds have nothing that could be.

    Args:
        directory: of the checkpoint.
        manifest: its own.
        part, num_parts: look at this share of its roles only.
    """
    has_optimizer, gaps = bool(manifest.get("has_optimizer")), []
    for name, role in list(manifest.get("roles", {}).items())[part::num_parts]:
        try:
            gaps += [f"{name}: {gap}" for gap in _find_role_gaps(directory / name, role, has_optimizer)]
        except (UserError, KeyError, TypeError) as error:  # no index that reads, or no model in the manifest
            gaps.append(f"{name}: {error.found if isinstance(error, UserError) else repr(error)}")
        if has_optimizer:
            files = (f"rng/rank_{rank}.safetensors" for rank in range(role["layout"]["world_size"]))
            gaps += [f"{file} was never written" for file in files if file not in manifest["files"]]
    return list(dict.fromkeys(gaps))


def _find_role_gaps(directory: Path, role: Mapping[str, Any], has_optimizer: bool) -> Iterator[str]:
    reader = ChunkReader(directory)
    for key, shape in _list_tensors(role, has_optimizer).items():
        found = reader.tensors.get(key, (None,))[0]
        if found != shape:
            yield f"{key} {'was never written' if found is None else f'is {list(found)} instead of {list(shape)}'}"
            continue
        whole = full_box(shape)
        boxes = [chunk.box for chunk in reader.chunks(key, whole)]
        if (covered := sum(map(box_volume, boxes))) != box_volume(whole):
            yield f"{key} has {covered:,} of {box_volume(whole):,} elements"
        elif not _are_disjoint(boxes, whole):
            yield f"{key} has some elements twice, and others not at all"


def _are_disjoint(boxes: Iterable[Box], whole: Box) -> bool:
    """Whether boxes with as many elements as `whole` cover it.

    Corners that an even number of boxes share cancel out. If the corners of the whole are left, every element of it is
    covered an odd number of times, hence once. (Comparing all pairs takes minutes for the experts of a large model.)
    """
    corners: set[tuple[int, ...]] = set()
    for box in boxes:
        corners ^= set(product(*box))
    return corners == set(product(*whole))


def _list_tensors(role: Mapping[str, Any], has_optimizer: bool) -> dict[str, tuple[int, ...]]:
    """Global tensor -> shape, of a role as the manifest describes it."""
    shape = read_shape(role["model"])
    tensors = {place.key: place.shape for places in megatron_global_placements(shape).values() for place in places}
    if has_optimizer:
        kind, main = role.get("optimizer", "adam"), () if role["dtype"] == "float32" else (MAIN_PARAM,)
        for name, size in shape.logical_tensors().items():
            if isinstance(shape, ModelShape) and shape.is_router_bias(name):
                continue
            moments = list_moments(kind, name, size) if role["optimizer_steps"] else ()
            tensors |= {f"{STATE_PREFIX}{state}.{name}": size for state in (*moments, *main)}
    return tensors
