# SPDX-License-Identifier: Apache-2.0
"""Exact bytes of a rollout engine's weights."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from megatron_rl.config.schema import FULLY_SHARDED
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.planning.cluster import Job
from megatron_rl.planning.role_layouts import DTYPE_BYTES
from megatron_rl.weights.adapters import AdapterShape, adapted_parameters
from megatron_rl.weights.families import ModelShape
from megatron_rl.weights.megatron_layout import PADDED_PARAMETERS, megatron_placements, padded_vocab_size, stage_layers
from megatron_rl.weights.quantization import list_matrices, list_quantized
from megatron_rl.weights.rollout_layout import huggingface_placements, vllm_placements
from megatron_rl.weights.shard_box import ShardBox, box_shape, box_volume, find_aliases

_LAYER = re.compile(r"\.layers\.(\d+)\.")
CODE_BYTES, SCALE_BYTES = 1, 4  # per element and per row of 8-bit matrices


def is_coded(job: Job) -> bool:
    """Return whether the engines keep their matrices in eight bits."""
    return job.config.rollout.quantization != "none"


def count_engine_bytes(job: Job) -> int:
    """Return the weight bytes of any engine rank."""
    return compute_engine_bytes(job.shape, job.engine_tp, DTYPE_BYTES[job.config.model.dtype], is_coded(job))


def count_own_bytes(job: Job, rank: int) -> int:
    """Return the bytes of an engine rank's weights that do not share the actor's storage, and of separate adapters."""
    config, shape, itemsize = job.config, job.shape, DTYPE_BYTES[job.config.model.dtype]
    is_whole = config.actor.zero_stage != FULLY_SHARDED or job.layout.shard_sizes[0] == 1
    is_served = config.rollout.supports("is_server")
    adapters, is_merged = job.adapters_of(job.spec.roles["actor"]), config.hybrid.lora == "merge"
    own = count_engine_bytes(job)
    if config.hybrid.alias_weights and rank in job.layout.ranks and is_whole and not is_served:
        unshared = adapters if adapters is not None and (is_merged or adapters.is_quantized) else None
        place = _find_place(job, rank)
        own -= itemsize * count_aliased_elements(shape, job.layout, rank, job.engine_tp, place, unshared, is_coded(job))
    if adapters is not None and not is_merged:
        own += sum(map(math.prod, adapters.logical_tensors().values())) * itemsize
    return own


def _find_place(job: Job, rank: int) -> int:
    return (rank - job.rollout_ranks.start) % job.engine_tp


def count_staged_bytes(job: Job, rank: int) -> int:
    """Return bytes of tensors that a server's rank stages on its device for writing files; 0 for other engines."""
    if not job.config.rollout.supports("is_server"):
        return 0
    mine = huggingface_placements(job.shape)[_find_place(job, rank) :: job.engine_tp]
    return sum(box_volume(p.local_box) for p in mine) * DTYPE_BYTES[job.config.model.dtype]


@lru_cache(maxsize=256)
def compute_engine_bytes(shape: ModelShape, tp_size: int, itemsize: int, coded: bool = False) -> int:
    """Compute the parameter bytes of an engine on one rank; TP ranks have equal shards.

    Args:
        itemsize: bytes per element.
        coded: whether matrices are 8-bit codes with a scale per row.
    """
    likes = _find_likes(shape)
    small = replace(shape, num_layers=max(likes) + 1)
    matrices, sizes = list_matrices(small) if coded else frozenset(), defaultdict(int)
    for p in vllm_placements(small, tp_size=tp_size, tp_rank=0):
        if p.hf_name in matrices:
            size = box_volume(p.local_box) * CODE_BYTES + box_shape(p.local_box)[0] * SCALE_BYTES
        else:
            size = box_volume(p.local_box) * itemsize
        sizes[_find_layer(p.param)] += size
    return sizes[None] + sum(sizes[like] for like in likes)


def _find_likes(shape: ModelShape) -> list[int]:
    """Return for each layer the first layer with parameters of the same names and sizes."""
    firsts: dict[tuple[bool, bool], int] = {}
    return [firsts.setdefault(shape.sort_of(layer), layer) for layer in range(shape.num_layers)]


def _find_layer(param: str) -> int | None:
    match = _LAYER.search(param)
    return int(match[1]) if match else None


def count_aliased_elements(
    shape: ModelShape,
    layout: ParallelLayout,
    rank: int,
    rollout_tp: int,
    rollout_rank: int,
    adapters: AdapterShape | None = None,
    coded: bool = False,
) -> int:
    """Count the elements of an engine rank's weights that share the actor's storage.

    Args:
        rollout_rank: index of the rank in its engine.
        adapters: excludes the matrices with adapters (quantized models: all in NF4).
        coded: excludes the matrices that the engine holds in eight bits.
    """
    pp, pp_size, likes = layout.coordinates(rank).pp, layout.pp_size, _find_likes(shape)
    stages, tp, ep = min(pp_size, 2), layout.tp_size, layout.ep_size
    small = ParallelLayout(tp * ep * stages, tp_size=tp, pp_size=stages, ep_size=ep, etp_size=layout.etp_size)
    place = (rank - layout.first_rank) % (tp * ep)  # position in the stage
    num_layers = math.ceil((max(likes) + 1) / stages) * stages
    shared, first, last = _count_aliased_blocks(
        replace(shape, num_layers=num_layers), small, place, rollout_tp, rollout_rank, adapters, coded
    )
    own = (n for c in range(layout.vpp_size) for n in stage_layers(shape.num_layers, pp_size, layout.vpp_size, pp, c))
    return sum(shared[likes[n]] for n in own) + (first if pp == 0 else last if pp == pp_size - 1 else 0)


@lru_cache(maxsize=4096)
def _count_aliased_blocks(
    shape: ModelShape,
    layout: ParallelLayout,
    rank: int,
    rollout_tp: int,
    rollout_rank: int,
    adapters: AdapterShape | None,
    coded: bool,
) -> tuple[Counter[int | None], int, int]:
    """Count the elements of an engine rank's weights that share the actor's storage, by layer.

    Returns:
        Layer -> elements; elements outside layers (embedding, head) on the first and on the last pipeline stage.
    """
    theirs, sizes = _list_engine_parameters(shape, rollout_tp, rollout_rank, coded)
    # Both sides pad the vocabulary; storage can be shared only with equal padding.
    has_same_vocabulary = padded_vocab_size(shape.vocab_size, layout.tp_size) == padded_vocab_size(shape.vocab_size, 1)
    layers: Counter[int | None] = Counter()
    ends = []
    for peer in layout.group_of(rank, "pp"):
        ours = megatron_placements(shape, layout, peer)
        merged = frozenset()
        if adapters is not None:
            merged = list_quantized(ours) if adapters.is_quantized else adapted_parameters(adapters, ours)
        pairs = {name: owned for name, owned in find_aliases(ours, theirs).items() if owned not in merged}
        end = 0
        for name, source in pairs.items():
            if (layer := _find_layer(name)) is not None:
                layers[layer] += sizes[name]
            elif has_same_vocabulary or not source.endswith(PADDED_PARAMETERS):
                end += sizes[name]
        ends.append(end)
    return layers, ends[0], ends[-1]


@lru_cache(maxsize=64)
def _list_engine_parameters(
    shape: ModelShape, tp_size: int, tp_rank: int, coded: bool
) -> tuple[Sequence[ShardBox], dict[str, int]]:
    """List the shards of HF tensors on an engine rank, without 8-bit matrices; also return parameter -> elements."""
    matrices, sizes = list_matrices(shape) if coded else frozenset(), defaultdict(int)
    table = [p for p in vllm_placements(shape, tp_size=tp_size, tp_rank=tp_rank) if p.hf_name not in matrices]
    for placement in table:
        sizes[placement.param] += box_volume(placement.local_box)
    return table, dict(sizes)
