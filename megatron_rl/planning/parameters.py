# SPDX-License-Identifier: Apache-2.0
"""Exact sizes of a rank's parameters, gradients and optimizer states, and of its engine's weights.

Shapes and ZeRO-3 shards come from `weights/megatron_layout.py`, as in training. Buffers follow megatron-core
(`param_and_grad_buffer.py`, `distrib_optimizer.py`): one per kind (dense, expert) in reverse model order; with the
distributed optimizer each parameter starts at a multiple of 64 elements, a bucket (part of a buffer, reduced at once)
ends at a multiple of lcm(DP, 128), and DP rank r owns the r-th part of every bucket.

Invariant (tests/planning/test_parameters.py, against real actors): the sizes equal the run's on each rank, except for
Adam's step counters.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache

from megatron_rl.config.schema import FULLY_SHARDED, LayoutConfig, TrainedConfig
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.planning.cluster import Job
from megatron_rl.planning.role_layouts import DTYPE_BYTES
from megatron_rl.weights.adapters import AdapterShape, adapted_parameters, adapter_placements
from megatron_rl.weights.families import SCORE_HEAD, ModelShape, is_layer_matrix
from megatron_rl.weights.megatron_layout import (
    PADDED_PARAMETERS,
    ROUTER_BIAS,
    megatron_placements,
    padded_vocab_size,
    stage_layers,
)
from megatron_rl.weights.packed_experts import find_fused
from megatron_rl.weights.quantization import count_bytes, is_quantized, list_matrices, list_quantized
from megatron_rl.weights.rollout_layout import huggingface_placements, vllm_placements
from megatron_rl.weights.row_shards import find_shard_places
from megatron_rl.weights.shard_box import ShardBox, box_shape, box_volume, find_aliases

_GRADIENT_BYTES = _MOMENT_BYTES = _MAIN_BYTES = 4
_PARAMETER_ALIGNMENT, _BUCKET_ALIGNMENT = 64, 128
# The order in which megatron-core's modules register their parameters.
_ORDER = (
    "embedding.",
    "layer_scalar",
    "input_layernorm.",
    "self_attention.conv_weight",
    "self_attention.A_log",
    "self_attention.dt_bias",
    "self_attention.in_proj.",
    "self_attention.linear_proj.",
    "self_attention.norm.",
    "self_attention.linear_qkv.",
    "self_attention.linear_q_down_proj.",
    "self_attention.q_layernorm.",
    "self_attention.k_layernorm.",
    "self_attention.q_norm.",
    "self_attention.k_norm.",
    "self_attention.linear_q_up_proj.",
    "self_attention.linear_kv_down_proj.",
    "self_attention.kv_layernorm.",
    "self_attention.linear_kv_up_proj.",
    "pre_mlp_layernorm.",
    "mlp.router.",
    "mlp.experts.",
    "mlp.linear_",
    "mlp.shared_experts.gate_weight",
    "mlp.shared_experts.",
    "post_self_attn_layernorm.",
    "post_mlp_layernorm.",
    "final_layernorm.",
    "output_layer.",
    "score.",
    "enorm.",
    "hnorm.",
    "eh_proj.",
)


@dataclass(frozen=True)
class Parameter:
    """One parameter of a model chunk."""

    name: str
    numel: int  # elements on this rank
    rows: int  # matrix rows, which ZeRO-3 splits
    is_matrix: bool  # whether Muon updates it, if configured
    is_expert: bool  # whether its gradient is reduced over expert replicas only
    is_shared: bool  # whether it is the embedding tied between first and last stage

    @property
    def is_frozen(self) -> bool:
        """Whether the parameter has no gradient: a router bias, in float32, or the scalar of a layer."""
        return self.name.endswith((ROUTER_BIAS, "layer_scalar"))


@dataclass(frozen=True)
class RoleBytes:
    """Persistent bytes of a role on one rank."""

    parameters: int  # in the training dtype (float32 under ZeRO-3), with buffer padding
    gradients: int  # float32 buffers; 0 without an optimizer
    optimizer: int  # moments, and float32 main weights for bfloat16 training (not under ZeRO-3)
    main_weights: int = field(default=0, compare=False)  # part of `optimizer` that exists before the first step

    @property
    def total(self) -> int:
        """Sum of parameters, gradients and optimizer."""
        return self.parameters + self.gradients + self.optimizer

    def __add__(self, other: RoleBytes) -> RoleBytes:
        return RoleBytes(*(getattr(self, item.name) + getattr(other, item.name) for item in fields(self)))


def list_chunks(shape: ModelShape | AdapterShape, layout: ParallelLayout, rank: int) -> list[list[Parameter]]:
    """List the parameters, or adapters, of each model chunk of a rank, in order of `named_parameters()`."""
    pp_rank, model = layout.coordinates(rank).pp, shape.base if isinstance(shape, AdapterShape) else shape
    if model.mtp_layer:
        table = megatron_placements(model, layout, rank)
        return [_read_parameters(model, layout, table)]
    embedding, first, layer, output = _building_blocks(shape, layout.tp_size, layout.ep_size, layout.etp_size)
    is_tied = shape is model and model.tied_embeddings and not model.has_score_head
    if is_tied and layout.pp_size > 1:  # the last stage holds a copy
        embedding, output = (
            [replace(p, is_shared=p.name.endswith(PADDED_PARAMETERS)) for p in block] for block in (embedding, output)
        )
    elif is_tied:
        output = [p for p in output if not p.name.endswith(PADDED_PARAMETERS)]
    chunks, special = [], {*model.delta_layers, *model.sliding_layers}
    for chunk in range(layout.vpp_size):
        is_first = pp_rank == 0 and chunk == 0
        is_last = pp_rank == layout.pp_size - 1 and chunk == layout.vpp_size - 1
        numbers = stage_layers(model.num_layers, layout, pp_rank, chunk)
        layers = [
            replace(p, name=f"decoder.layers.{local}.{p.name}")
            for local, number in enumerate(numbers)
            for p in (first if number < model.dense_layers or number in special else layer)
        ]
        chunks.append([*(embedding if is_first else ()), *layers, *(output if is_last else ())])
    return chunks


@lru_cache(maxsize=256)
def _building_blocks(
    shape: ModelShape | AdapterShape, tp_size: int, ep_size: int, etp_size: int | None
) -> tuple[tuple[Parameter, ...], ...]:
    """Return the blocks of parameters from which any pipeline stage is assembled, read from a two-layer model.

    The blocks are the embedding, a layer of `dense_layers`, `delta_layers` or `sliding_layers`, any other layer, and
    the modules behind the last layer.
    """
    model = shape.base if isinstance(shape, AdapterShape) else shape
    assert not (model.dense_layers and model.delta_layers), "two sorts of layers"
    layers = {name: getattr(model, name)[:1] and (0,) for name in ("delta_layers", "sliding_layers")}
    small = replace(model, num_layers=2, dense_layers=min(model.dense_layers, 1), **layers)
    adapters = replace(shape, base=small) if isinstance(shape, AdapterShape) else None
    layout = ParallelLayout(2 * tp_size * ep_size, tp_size=tp_size, pp_size=2, ep_size=ep_size, etp_size=etp_size)
    tables = [megatron_placements(small, layout, layout.rank(pp=pp_rank)) for pp_rank in range(2)]
    if adapters:
        tables = [adapter_placements(adapters, table) for table in tables]
    stages = [_read_parameters(small, layout, table) for table in tables]
    prefix = "decoder.layers.0."
    first, layer = (
        tuple(replace(p, name=p.name.removeprefix(prefix)) for p in stage if p.name.startswith(prefix))
        for stage in stages
    )
    ends = (tuple(p for p in stage if not p.name.startswith(prefix)) for stage in stages)
    return next(ends), first, layer, next(ends)


def _read_parameters(shape: ModelShape, layout: ParallelLayout, placements: Iterable[ShardBox]) -> list[Parameter]:
    """Derive the parameters of a model chunk, in megatron-core's order, from placements that cover them."""
    sizes: dict[str, list[int]] = {}
    for placement in placements:
        name, stops = placement.param.partition(".")[2], [stop for _, stop in placement.local_box]
        sizes[name] = [max(pair) for pair in zip(sizes.get(name, stops), stops, strict=True)]
    counts = Counter(find_fused(name)[0] for name in sizes)  # matrices of each parameter
    sizes = {find_fused(name)[0]: size for name, size in sizes.items()}
    for name, size in sizes.items():
        if name.endswith(PADDED_PARAMETERS):
            size[0] = padded_vocab_size(shape.vocab_size, layout.tp_size) // layout.tp_size
    return [
        Parameter(
            name,
            counts[name] * math.prod(sizes[name]),
            sizes[name][0],
            is_matrix=is_layer_matrix(name, tuple(sizes[name])),
            is_expert=layout.has_expert_replicas and ".experts." in name,
            is_shared=False,
        )
        for name in sorted(sizes, key=_position)
    ]


def _position(name: str) -> tuple[int, str, bool]:
    *path, last = name.split(".")
    return next(i for i, part in enumerate(_ORDER) if part in name), path[-1], last != "weight"


@dataclass(frozen=True)
class Upkeep:
    """Settings that determine a role's optimizer states and their sharding over data parallel ranks."""

    optimizer: str = "adam"  # "adam", or "muon" with one moment per matrix element
    use_distributed_optimizer: bool = True  # ZeRO-1, sharded optimizer states
    is_fully_sharded: bool = False  # ZeRO-3

    @classmethod
    def of(cls, section: LayoutConfig) -> Upkeep:
        """Read the settings from a config section."""
        is_fully_sharded = section.zero_stage == FULLY_SHARDED
        if not isinstance(section, TrainedConfig):
            return cls(is_fully_sharded=is_fully_sharded)
        return cls(section.optimizer, section.use_distributed_optimizer, is_fully_sharded)


@lru_cache(maxsize=4096)
def compute_role_bytes(
    shape: ModelShape,
    layout: ParallelLayout,
    rank: int,
    *,
    dtype: str,
    is_trained: bool = True,
    upkeep: Upkeep = Upkeep(),
    adapters: AdapterShape | None = None,
) -> RoleBytes:
    """Compute the persistent bytes of one role on one rank.

    Args:
        rank: rank of the job, in `layout.ranks`.
        is_trained: whether the role has gradients and an optimizer.
        adapters: trained instead of the model, if any.
    """
    size, frozen = DTYPE_BYTES[dtype], 0  # bytes per element; bytes of all frozen weights
    chunks = list_chunks(shape, layout, rank)
    sizes = {ROUTER_BIAS: _MAIN_BYTES, "layer_scalar": size}  # of untrained parameters, which are not sharded
    biases = sum(p.numel * sizes[end] for chunk in chunks for p in chunk for end in sizes if p.name.endswith(end))
    chunks = [[p for p in chunk if not p.is_frozen] for chunk in chunks]
    if upkeep.is_fully_sharded:
        held, owned = _count_shards([p for chunk in chunks for p in chunk], layout, rank)
        if not is_trained:
            return RoleBytes(held * size + biases, 0, 0)
        return RoleBytes(held * _MAIN_BYTES + biases, held * _GRADIENT_BYTES, owned * 2 * _MOMENT_BYTES)
    if not is_trained:
        return RoleBytes(sum(p.numel for chunk in chunks for p in chunk) * size + biases, 0, 0)
    if adapters is not None:
        members = [p for chunk in chunks for p in chunk if p.name != SCORE_HEAD]
        frozen = sum(
            count_bytes(p.numel) if adapters.is_quantized and is_quantized(p.name) else p.numel * size for p in members
        )
        chunks = list_chunks(adapters, layout, rank)
    at, experts_at = layout.coordinates(rank), layout.expert_coordinates(rank)
    replicas = {
        False: (layout.dp_size * layout.cp_size, at.cp + layout.cp_size * at.dp),
        True: (layout.expert_replicas, experts_at.dp),
    }
    in_buffers = owned = moments = 0
    for chunk in chunks:
        for is_expert, (num_replicas, index) in replicas.items():
            members = [p for p in chunk if p.is_expert == is_expert]
            if upkeep.use_distributed_optimizer:
                total, mine = _lay_out(members, num_replicas, index)
            else:
                mine = [p.numel for p in members]
                total = sum(mine)
            in_buffers += total
            owned += sum(mine)
            for p, numel in zip(members, mine, strict=True):
                moments += numel * (1 if upkeep.optimizer == "muon" and p.is_matrix else 2)
    main = owned * _MAIN_BYTES if dtype != "float32" else 0
    of_weights = biases + frozen + in_buffers * size
    return RoleBytes(of_weights, in_buffers * _GRADIENT_BYTES, moments * _MOMENT_BYTES + main, main)


def _count_shards(params: Iterable[Parameter], layout: ParallelLayout, rank: int) -> tuple[int, int]:
    """Count the elements of a rank's ZeRO-3 shards, with and without padding."""
    held = owned = 0
    places = find_shard_places(layout, rank)
    for p in params:
        place, width = places[p.is_expert], p.numel // p.rows
        start, stop = place.cut(p.rows)
        held += -(-p.rows // place.count) * width
        owned += (stop - start) * width
    return held, owned


def _lay_out(members: Sequence[Parameter], num_replicas: int, index: int) -> tuple[int, list[int]]:
    """Return the size of a distributed optimizer's buffer, and the part of each parameter on DP replica `index`."""
    alignment = math.lcm(num_replicas, _BUCKET_ALIGNMENT)
    buckets: list[list[tuple[int, int]]] = [[]]  # [start, stop) of each parameter, relative to its bucket
    for parameter in reversed(members):
        if parameter.is_shared and buckets[-1]:
            buckets.append([])
        start = _round_up(buckets[-1][-1][1], _PARAMETER_ALIGNMENT) if buckets[-1] else 0
        buckets[-1].append((start, start + parameter.numel))
        if parameter.is_shared:
            buckets.append([])
    total, owned = 0, []
    for bucket in filter(None, buckets):
        size = _round_up(bucket[-1][1], alignment)
        low, high = index * (size // num_replicas), (index + 1) * (size // num_replicas)
        owned += [max(0, min(stop, high) - max(start, low)) for start, stop in bucket]
        total += size
    return total, owned[::-1]


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


# Matrices that vLLM fuses into one if it caches latents: no storage of the actor is both.
FUSED_LATENTS = ("q_a_proj.weight", "kv_a_proj_with_mqa.weight")
_LAYER = re.compile(r"\.layers\.(\d+)\.")
CODE_BYTES, SCALE_BYTES = 1, 4  # per element and per row of 8-bit matrices


def is_coded(job: Job) -> bool:
    """Return whether the engines keep their matrices in eight bits."""
    return job.config.rollout.quantization != "none"


def caches_latents(job: Job) -> bool:
    """Return whether the engines cache latents."""
    if job.shape.latent is None:
        return False
    from megatron_rl.weights.head_sizes import has_latent_cache

    is_gpu = job.cluster.has_fused_attention
    return has_latent_cache(job.shape.latent, job.config.rollout, job.config.model.dtype, is_gpu=is_gpu)


def count_engine_bytes(job: Job) -> int:
    """Return the weight bytes of any engine rank."""
    itemsize = DTYPE_BYTES[job.config.model.dtype]
    found = compute_engine_bytes(job.shape, job.engine_tp, itemsize, is_coded(job), job.engine_ep)
    drafts = job.config.rollout.draft_tokens > 0
    if drafts:
        table = vllm_placements(job.shape.mtp, tp_size=job.engine_tp, place=0)
        found += sum(box_volume(p.local_box) for p in table) * itemsize
    if caches_latents(job):  # vLLM keeps the up-projections of keys and values in a second form
        found += (
            (job.shape.num_layers + drafts) * math.prod(job.shape.kind_sizes()["kv_up"]) // job.engine_tp * itemsize
        )
    return found


def count_own_bytes(job: Job, rank: int) -> int:
    """Return the bytes of an engine rank's weights that do not share the actor's storage, and of separate adapters."""
    config, shape, itemsize = job.config, job.shape, DTYPE_BYTES[job.config.model.dtype]
    is_whole = config.actor.zero_stage != FULLY_SHARDED or job.layout.shard_sizes[0] == 1
    is_served = config.rollout.supports("is_server")
    adapters, is_merged = job.adapters_of(job.spec.roles["actor"]), config.hybrid.lora == "merge"
    own = count_engine_bytes(job)
    if rank in job.layout.ranks and is_whole and not is_served:
        unshared = adapters if adapters is not None and (is_merged or adapters.is_quantized) else None
        place = _find_place(job, rank)
        copied = FUSED_LATENTS if caches_latents(job) and shape.latent and shape.latent.query else ()
        own -= itemsize * count_aliased_elements(
            shape, job.layout, rank, job.engine_tp, place, unshared, is_coded(job), copied, job.engine_ep
        )
    if adapters is not None and not is_merged:
        own += sum(map(math.prod, adapters.logical_tensors().values())) * itemsize
    return own


def _find_place(job: Job, rank: int) -> int:
    return (rank - job.rollout_ranks.start) % job.engine_width


def count_staged_bytes(job: Job, rank: int) -> int:
    """Return bytes of tensors that a rank stages for servers or elastic engines; 0 for engines in the job."""
    if not job.config.rollout.supports("is_server") and not job.config.schedule.elastic:
        return 0
    mine = huggingface_placements(job.shape)[_find_place(job, rank) :: job.engine_width]
    return sum(box_volume(p.local_box) for p in mine) * DTYPE_BYTES[job.config.model.dtype]


@lru_cache(maxsize=256)
def compute_engine_bytes(shape: ModelShape, tp_size: int, itemsize: int, coded: bool = False, ep_size: int = 1) -> int:
    """Compute the parameter bytes of any engine rank; `coded`: matrices are 8-bit codes with a scale per row."""
    likes = _find_likes(shape)
    small = replace(shape, num_layers=max(likes) + 1)
    matrices, sizes = list_matrices(small) if coded else frozenset(), defaultdict(int)
    for p in vllm_placements(small, tp_size=tp_size, place=0, ep_size=ep_size):
        if p.hf_name in matrices:
            size = box_volume(p.local_box) * CODE_BYTES + box_shape(p.local_box)[0] * SCALE_BYTES
        else:
            size = box_volume(p.local_box) * itemsize
        sizes[_find_layer(p.param)] += size
    return sizes[None] + sum(sizes[like] for like in likes)


def _find_likes(shape: ModelShape) -> list[int]:
    """Return for each layer the first layer with parameters of the same names and sizes."""
    firsts: dict[tuple[bool, bool, bool], int] = {}
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
    copied: tuple[str, ...] = (),
    rollout_ep: int = 1,
) -> int:
    """Count the elements of an engine rank's weights that share the actor's storage.

    Args:
        rollout_rank: index of the rank in its engine.
        adapters: excludes the matrices with adapters (quantized models: all in NF4).
        coded: excludes the matrices that the engine holds in eight bits.
        copied: ends of the names of further matrices to exclude.
    """
    pp, pp_size, likes = layout.coordinates(rank).pp, layout.pp_size, _find_likes(shape)
    stages, tp, ep = min(pp_size, 2), layout.tp_size, layout.ep_size
    small = ParallelLayout(tp * ep * stages, tp_size=tp, pp_size=stages, ep_size=ep, etp_size=layout.etp_size)
    place = (rank - layout.first_rank) % (tp * ep)  # position in the stage
    num_layers = math.ceil((max(likes) + 1) / stages) * stages
    shared, first, last = _count_aliased_blocks(
        replace(shape, num_layers=num_layers),
        small,
        place,
        rollout_tp,
        rollout_rank,
        adapters,
        coded,
        copied,
        rollout_ep,
    )
    own = (n for c in range(layout.vpp_size) for n in stage_layers(shape.num_layers, layout, pp, c))
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
    copied: tuple[str, ...],
    rollout_ep: int,
) -> tuple[Counter[int | None], int, int]:
    """Count shared elements of an engine rank: by layer; outside of layers on the first, and on the last stage."""
    theirs, sizes = _list_engine_parameters(shape, rollout_tp, rollout_rank, coded, rollout_ep)
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
        pairs = {name: owned for name, owned in pairs.items() if not (copied and name.endswith(copied))}
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
    shape: ModelShape, tp_size: int, place: int, coded: bool, ep_size: int
) -> tuple[Sequence[ShardBox], dict[str, int]]:
    """List the shards of HF tensors on an engine rank, without 8-bit matrices; also return parameter -> elements."""
    matrices, sizes = list_matrices(shape) if coded else frozenset(), defaultdict(int)
    boxes = vllm_placements(shape, tp_size=tp_size, place=place, ep_size=ep_size)
    table = [p for p in boxes if p.hf_name not in matrices]
    for placement in table:
        sizes[placement.param] += box_volume(placement.local_box)
    return table, dict(sizes)
