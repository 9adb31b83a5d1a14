# SPDX-License-Identifier: Apache-2.0
"""Memory of a rank in every phase of a step.

Weights, gradients and optimizer states are exact (`parameters.py`); activations and logits are counted for a full token
budget; engine activations and the reserve are allowances.

Activations are counted from the tensors that autograd saves, per token of a packed microbatch (elements; `h` hidden,
`f` feed-forward columns, `q`, `kv` columns of all heads, `s` = TP with sequence parallelism, else 1):

    norms        4 h / s                             input and output of both
    attention    ((q + 2 kv) + (q + kv) + q) / tp    projected, rotated, attended
                 ((q + 2 kv) + q + q) / tp           with Ulysses: exchanged, attended, exchanged back
    MLP          3 f / tp                            [gate; up], silu(gate) * up
    experts      k (h + 4 f / tp)                    k experts per token; temporarily up to 5 k h more
    head         h / s + h                           final norm, and the output layer's gathered input

Full recomputation keeps each layer's input, h / s, on the GPU or (offload) on the host. On CPU, attention keeps a copy
of its result. In float32 on a GPU, KV heads are repeated to the query heads: another 2 q / tp.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain

from megatron_rl.config.run_spec import RoleSpec
from megatron_rl.config.schema import FULLY_SHARDED, STREAMED_BYTES, LayoutConfig, TrainedConfig
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.planning.cluster import GIB, Job
from megatron_rl.planning.parameters import (
    RoleBytes,
    Upkeep,
    caches_latents,
    compute_role_bytes,
    count_own_bytes,
    count_staged_bytes,
    list_chunks,
)
from megatron_rl.planning.role_layouts import DTYPE_BYTES, build_layout
from megatron_rl.weights.families import ModelShape
from megatron_rl.weights.megatron_layout import choose_chunk_tokens, count_stage_layers, padded_vocab_size, stage_layers
from megatron_rl.weights.quantization import is_quantized
from megatron_rl.weights.row_shards import find_shard_places
from megatron_rl.weights.support import count_cached

# vLLM's default token budget of one engine step.
ENGINE_BATCH_TOKENS = 8192
ENGINE_PHASES = ("engine start", "switch", "rollout")  # absent on ranks without an engine
_FLOAT = 4


@dataclass(frozen=True)
class MemoryPhase:
    """Predicted bytes that one rank holds in one phase of a step, by kind ("engine weights", "optimizer", ...)."""

    name: str
    parts: dict[str, int]

    @property
    def total(self) -> int:
        """Sum over all kinds."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class RankMemory:
    """Memory of one rank in all phases, and its KV cache."""

    rank: int
    phases: list[MemoryPhase]
    kv_cache_bytes: int  # negative if the engine's share is too small for its weights
    kv_bytes_per_token: int  # on one engine rank
    host_bytes: int  # pinned host memory for offloaded state and inputs of layers, held for the whole run

    @property
    def peak(self) -> MemoryPhase:
        """The phase with the most bytes."""
        return max(self.phases, key=lambda phase: phase.total)


def compute_memory(job: Job, *, ends_only: bool = False) -> list[RankMemory]:
    """Compute the memory of one rank per combination of pipeline stages; other ranks are equal up to buffer padding.

    Args:
        ends_only: skip middle stages, which hold no more than the second one where layers are divided evenly.
    """
    world_size = job.cluster.world_size
    if job.config.placement.placed:
        alike = {_list_stages(job, rank): rank for rank in reversed(range(world_size))}
        return [_compute_rank(job, rank) for rank in sorted(alike.values())]
    stages = [job.layout.pp_size, *(build_layout(role.settings, world_size).pp_size for role in job.others)]
    parts = min(math.lcm(*stages), world_size)
    ranks = [i * world_size // parts for i in range(parts)]
    if ends_only and len(ranks) > 3 and not job.layout.chunk_layers:
        ranks = [ranks[0], ranks[1], ranks[-1]]
    return [_compute_rank(job, rank) for rank in ranks]


def find_smallest_cache(job: Job, memory: Sequence[RankMemory]) -> RankMemory:
    """Return the engine rank with the smallest KV cache."""
    return min((rank for rank in memory if rank.rank in job.rollout_ranks), key=lambda rank: rank.kv_cache_bytes)


def _list_stages(job: Job, rank: int) -> tuple[int | None, ...]:
    """Return a rank's pipeline stage in each role, and its index in an engine; `None` for each without this rank."""
    layouts = [job.layout_of(role) for role in job.spec.roles.values()]
    place = (rank - job.rollout_ranks.start) % job.engine_width if rank in job.rollout_ranks else None
    return (*(layout.coordinates(rank).pp if rank in layout.ranks else None for layout in layouts), place)


def _compute_rank(job: Job, rank: int) -> RankMemory:
    config, roles = job.config, job.spec.roles
    actor = count_role_bytes(job, rank, roles["actor"])
    trains_mtp = config.actor.mtp_lr > 0 and rank in job.layout.last_stage.ranks
    if trains_mtp or config.rollout.draft_tokens and rank in job.layout.last_stage.ranks:
        dtype, upkeep, last = config.model.dtype, Upkeep.of(config.actor), job.layout.last_stage
        actor += compute_role_bytes(job.shape.mtp, last, rank, dtype=dtype, is_trained=trains_mtp, upkeep=upkeep)
    # The actor's offloaded state is on the device in training, and on the host in all other phases.
    optimizer = _count_optimizer(config.actor, actor)
    training = {"weights": actor.parameters, "gradients": actor.gradients, "optimizer": optimizer}
    waiting = dict(training)
    if config.actor.offload_gradients:
        waiting["gradients"] = 0
    if config.actor.offload_optimizer:
        waiting["optimizer"] = 0
    reference = count_role_bytes(job, rank, roles["reference"]).parameters if "reference" in roles else 0
    resting = {"reference": 0 if config.reference.offload else reference}
    host = bool(config.actor.offload_optimizer) * actor.optimizer + config.reference.offload * reference
    others = [(role, count_role_bytes(job, rank, role)) for role in job.others]
    for role, held in others:
        if role.trainable:
            gradients = 0 if role.training.offload_gradients else held.gradients
            optimizer = 0 if role.training.offload_optimizer else held.optimizer
            resting[role.title] = held.parameters + gradients + optimizer
            host += bool(role.training.offload_optimizer) * held.optimizer
        else:
            resting[role.title] = 0 if role.offload else held.total
            host += role.offload * held.total
    pools = {role.name: _count_pool(job, rank, role) for role in job.spec.trained}
    host += sum(_count_host_inputs(job, rank, role) for role in job.spec.trained)
    base = {"reserve": job.cluster.reserve_bytes, "graphs": sum(pools.values())}
    resident = base | waiting | resting
    phases, cache, per_token = _engine_phases(job, rank, actor, resident)
    # From a step's second minibatch on, all trained roles have their offloaded state on the device.
    updating = base | training | resting
    for role, held in others:
        if role.trainable:
            updating[role.title] = held.parameters + held.gradients + _count_optimizer(role.training, held)
    for role, held in others:
        name = {"critic": "values", "reward_model": "rewards"}.get(role.name, role.title)
        at_work = resident if role.trainable else resident | {role.title: held.total}
        phases.append(MemoryPhase(name, at_work | _activations(job, rank, role)))
        if role.trainable:
            update = _activations(job, rank, role, is_update=True)
            update["graphs"] = base["graphs"] - pools[role.name]
            phases.append(MemoryPhase(f"{role.title} update", updating | update))
    if job.spec.num_scoring_passes or config.trainer.critic_warmup:
        scorers = [role for role in (roles["actor"], roles.get("reference")) if role is not None]
        scoring = max((_activations(job, rank, role) for role in scorers), key=lambda parts: sum(parts.values()))
        phases.append(MemoryPhase("log-probs", resident | {"reference": reference} | scoring))
    update = _activations(job, rank, roles["actor"], is_update=True) | _lesson_bytes(job, rank)
    update |= {"kept hidden states": _count_kept(job) if trains_mtp else 0, "graphs": base["graphs"] - pools["actor"]}
    phases.append(MemoryPhase("actor update", updating | update))
    phases = [MemoryPhase(phase.name, {kind: size for kind, size in phase.parts.items() if size}) for phase in phases]
    return RankMemory(rank, phases, cache, per_token, host)


def _count_pool(job: Job, rank: int, role: RoleSpec) -> int:
    """Return bytes that a role's CUDA graphs hold in all phases: the activations of a full microbatch."""
    if role.training.step_mode != "graph":
        return 0
    size, limit = sum(_activations(job, rank, role, is_update=True).values()), role.training.graph_memory_gib
    return size if limit is None else min(size, int(limit * GIB))


def _count_host_inputs(job: Job, rank: int, role: RoleSpec) -> int:
    """Return bytes of recomputed layers' inputs on the host, of full microbatches in flight."""
    shape, layout, section = job.shape_of(role), job.layout_of(role), role.training
    if section.recompute_granularity != "offload" or rank not in layout.ranks:
        return 0
    passes = count_passes_in_flight(layout, layout.coordinates(rank).pp, count_microbatches(job, layout, section))
    kept = passes * count_stage_layers(shape.num_layers, layout, layout.coordinates(rank).pp) // layout.vpp_size
    rows = section.max_tokens_per_microbatch // layout.cp_size // (layout.tp_size if section.sequence_parallel else 1)
    return kept * rows * shape.hidden_size * DTYPE_BYTES[job.config.model.dtype]


def _count_optimizer(section: TrainedConfig, held: RoleBytes) -> int:
    """Return the bytes of optimizer states on the GPU during an update."""
    if section.offload_optimizer != "stream":
        return held.optimizer
    return held.main_weights + min(STREAMED_BYTES, held.optimizer - held.main_weights)


def _count_kept(job: Job) -> int:
    """Return bytes of a minibatch's hidden states and embeddings that train the MTP layer."""
    section, layout = job.config.actor, job.layout
    split = layout.cp_size * (layout.tp_size if section.sequence_parallel else 1)
    rows = count_microbatches(job, layout, section) * section.max_tokens_per_microbatch // split
    return 2 * rows * job.shape.hidden_size * DTYPE_BYTES[job.config.model.dtype]


def _lesson_bytes(job: Job, rank: int) -> dict[str, int]:
    """Return the bytes of teacher outputs that an actor rank stores for a step of maximum-length responses, by kind."""
    distillation = job.config.algorithm.distillation
    if not job.spec.teachers or rank not in job.layout.ranks:
        return {}
    widths = {job.shape_of(role).hidden_size for role in job.spec.teachers.values()}
    numbers = {"sampled": 1, "top_k": 2 * (distillation.k + 1), "full": max(widths)}[distillation.kind]
    return {"teachers' columns": count_step_tokens(job) * numbers * _FLOAT}


def count_step_tokens(job: Job) -> int:
    """Return the response tokens of a step per actor rank for maximum-length responses."""
    data, config = job.config.data, job.config
    return data.train_batch_size * config.rollout.n * data.max_response_length // job.layout.dp_size


def count_role_bytes(job: Job, rank: int, role: RoleSpec) -> RoleBytes:
    """Return the persistent bytes of a role on a rank of the job, 0 on other ranks than the role's."""
    shape, layout, dtype = job.shape_of(role), job.layout_of(role), job.config.model.dtype
    if rank not in layout.ranks or role.shares:
        return RoleBytes(0, 0, 0)
    upkeep, adapters = Upkeep.of(role.settings), job.adapters_of(role)
    return compute_role_bytes(
        shape, layout, rank, dtype=dtype, is_trained=role.trainable, upkeep=upkeep, adapters=adapters
    )


def _activations(job: Job, rank: int, role: RoleSpec, *, is_update: bool = False) -> dict[str, int]:
    shape, layout = job.shape_of(role), job.layout_of(role)
    if rank not in layout.ranks:
        return {}
    stored, transient, logits = compute_activation_bytes(job, rank, role, is_update)
    layers = head = start = 0  # gathered weights
    if role.settings.zero_stage == FULLY_SHARDED:
        dtype = job.config.model.dtype
        layers, head, start = compute_gathered_bytes(shape, layout, rank, dtype=dtype, is_update=is_update)
    is_logits = logits + head > transient + layers
    if start > stored + max(logits + head, transient + layers):
        return {"gathered weights": start}
    return {
        "activations": stored + (0 if is_logits else transient),
        "logits": logits * is_logits,
        "gathered weights": head if is_logits else layers,
        "dequantized": _find_largest_matrix(job, rank, role),
    }


def _find_largest_matrix(job: Job, rank: int, role: RoleSpec) -> int:
    """Return bytes of the largest NF4 matrix of a rank's part of a role, dequantized while it is used or moved."""
    if not role.is_quantized or rank not in job.layout_of(role).ranks:
        return 0
    return _count_largest(job.shape_of(role), job.layout_of(role), rank) * DTYPE_BYTES[job.config.model.dtype]


@lru_cache(maxsize=1024)  # candidates differ in other settings too
def _count_largest(shape: ModelShape, layout: ParallelLayout, rank: int) -> int:
    """Return the elements of a rank's largest NF4 matrix."""
    parameters = chain.from_iterable(list_chunks(shape, layout, rank))
    return max((p.numel for p in parameters if is_quantized(p.name)), default=0)


def count_microbatches(job: Job, layout: ParallelLayout, section: LayoutConfig) -> int:
    """Return the microbatches per optimizer step and rank for maximum-length responses."""
    data, config = job.config.data, job.config
    longest = data.max_prompt_length + data.max_response_length
    prompts = config.actor.ppo_mini_batch_size or data.train_batch_size
    per_rank = -(-prompts * config.rollout.n // layout.dp_size)
    per_microbatch = max(1, section.max_tokens_per_microbatch // longest)
    number = -(-per_rank // per_microbatch)
    return -(-number // layout.pp_size) * layout.pp_size if layout.vpp_size > 1 else number


def _engine_phases(
    job: Job, rank: int, actor: RoleBytes, resident: dict[str, int]
) -> tuple[list[MemoryPhase], int, int]:
    """Return the phases of a rank's engine, the bytes of its KV cache, and those per token."""
    config, rollout, shape = job.config, job.config.rollout, job.shape
    if rank not in job.rollout_ranks:
        return [MemoryPhase(ENGINE_PHASES[1], resident)], 0, 0
    itemsize, tp, staged = DTYPE_BYTES[config.model.dtype], job.engine_tp, 0
    # Delta nets have a state of constant size.
    layers = {*range(shape.num_layers + (rollout.draft_tokens > 0))} - {*shape.delta_layers}
    if job.engine_is_actor:
        stage, chunks = job.layout.coordinates(rank).pp, range(job.layout.vpp_size)
        layers &= {n for chunk in chunks for n in stage_layers(shape.num_layers, job.layout, stage, chunk)}
    per_token = count_cached(shape, layers, tp) * itemsize
    if shape.latent is not None and caches_latents(job):
        per_token = len(layers) * shape.latent.cached * itemsize
    if job.engine_is_actor:
        own = 0
    else:
        own, staged = count_own_bytes(job, rank), count_staged_bytes(job, rank)
    # vLLM's activations: hidden states of its largest batch, and logits of all sequences with float32 copies.
    h, f = shape.hidden_size, shape.ffn_hidden_size
    columns = 4 * h + 3 * f * (shape.experts_per_token or 1) / tp
    logits = rollout.max_num_seqs * shape.vocab_size * (itemsize + 2 * _FLOAT)
    batch = rollout.engine_options.get("max_num_batched_tokens", ENGINE_BATCH_TOKENS)
    if job.engine_dp > 1:  # rows of all DP ranks and their choices: input, two workspaces, output
        wide = shape.experts_per_token * (max(f, h) + max(2 * f, h)) + 2 * h
        columns = 4 * h + job.engine_dp * wide
    working = int(batch * columns * itemsize + logits)
    if rollout.kv_cache_gib is not None:
        cache = int(rollout.kv_cache_gib * (1 << 30))
    elif job.engine_is_actor:
        longest = config.data.max_prompt_length + config.data.max_response_length
        room = int(rollout.gpu_memory_utilization * job.cluster.memory_bytes)
        cache = min(room, per_token * longest * rollout.max_num_seqs)
    else:
        # vLLM's share is of the whole device, other tensors included, without weights aliased with the actor.
        cache = int(rollout.gpu_memory_utilization * job.cluster.memory_bytes) - own - working
    if config.schedule.elastic:  # models and caches are in other processes
        own = working = cache = 0
    own += staged
    engine = {"engine weights": own, "engine activations": working, "KV cache": max(cache, 0)}
    # At the start nothing is offloaded yet, and Adam's moments do not exist before the first update.
    fresh = {"gradients": actor.gradients, "optimizer": actor.main_weights, "graphs": 0}
    if config.actor.zero_stage == FULLY_SHARDED:  # parameters are the float32 weights; no gradient buffers
        fresh |= {"gradients": 0, "optimizer": 0}
    moves, largest = own > 0, _find_largest_matrix(job, rank, job.spec.roles["actor"])
    in_buckets = job.cluster.nodes > 1 or config.actor.lora.rank
    staging = 2 * config.hybrid.bucket_bytes if moves and in_buckets else 0
    start = resident | fresh | ({} if job.engine_is_actor else engine)
    switch = resident | {"engine weights": own, "staging": staging, "dequantized": largest}
    phases = map(MemoryPhase, ENGINE_PHASES, (start, switch, resident | engine))
    return list(phases), cache, per_token


def count_layer_elements(
    shape: ModelShape, layout: ParallelLayout, sequence_parallel: bool, fused: bool, repeats_heads: bool = False
) -> float:
    """Count the elements per token that autograd saves in one layer (formulas: the module's docstring).

    Args:
        fused: whether attention keeps no intermediate results.
        repeats_heads: whether KV heads are repeated to the query heads.
    """
    tp = layout.tp_size
    s = tp if sequence_parallel else 1
    h, f = shape.hidden_size, shape.ffn_hidden_size
    shapes = [shape.at(layer) for layer in range(shape.num_layers)]
    q = shape.num_heads * sum(x.head_dim for x in shapes) / len(shapes)
    kv = sum(x.num_kv_heads * x.head_dim for x in shapes) / len(shapes)
    if layout.cp_size == 1:
        attention = 3 * q + 3 * kv + (0 if fused else q)
    else:
        attention = 3 * q + 2 * kv + (q + 2 * kv) * shape.qk_norm
    if shape.latent is not None:
        attention += 2 * tp * (shape.latent.query + shape.latent.key_value) / s
    attention += 2 * q if repeats_heads and kv < q else 0
    elements = 4 * h / s + attention / tp
    if shape.num_experts:
        taken = h * layout.expert_tp_size / tp
        return elements + shape.experts_per_token * (taken + 4 * f / tp) + 3 * shape.shared_ffn_size / tp
    return elements + 3 * f / tp


def count_passes_in_flight(layout: ParallelLayout, pp_rank: int, num_microbatches: int) -> int:
    """Count the forward passes whose activations a stage holds at its peak.

    1F1B: `pp - pp_rank`. Interleaved: `2 (pp - pp_rank - 1) + (vpp - 1) pp + 1`.
    """
    if layout.vpp_size == 1:
        return min(num_microbatches, layout.pp_size - pp_rank)
    passes = 2 * (layout.pp_size - pp_rank - 1) + (layout.vpp_size - 1) * layout.pp_size + 1
    return min(num_microbatches * layout.vpp_size, passes)


def compute_activation_bytes(job: Job, rank: int, role: RoleSpec, is_update: bool) -> tuple[int, int, int]:
    """Compute a role's activations on one rank, with a full token budget, in an update or in a scoring pass.

    Returns:
        Bytes stored from forward to backward, over all microbatches in flight; of one layer while it runs; of the
        logits of a chunk of tokens, in an update with gradients at the output layer.
    """
    shape, layout, config = job.shape_of(role), job.layout_of(role), role.settings
    itemsize, fused = DTYPE_BYTES[job.config.model.dtype], job.cluster.has_fused_attention
    tokens, pp_rank = config.max_tokens_per_microbatch / layout.cp_size, layout.coordinates(rank).pp
    s = layout.tp_size if config.sequence_parallel else 1
    h, is_last = shape.hidden_size, pp_rank == layout.pp_size - 1
    granularity = role.training.recompute_granularity if is_update and role.trainable else "none"
    is_full, is_offloaded = granularity in ("full", "offload"), granularity == "offload"
    layer = count_layer_elements(shape, layout, config.sequence_parallel, fused, fused and itemsize == _FLOAT)
    head = (h / s + h) * tokens * itemsize if is_last else 0
    logits = 0
    if is_last and not shape.has_score_head:
        columns = padded_vocab_size(shape.vocab_size, layout.tp_size) // layout.tp_size
        rows = config.max_tokens_per_microbatch // layout.cp_size
        gpu = job.cluster.memory_bytes if fused else None
        chunk = config.logprob_chunk_tokens or choose_chunk_tokens(shape.vocab_size, layout.tp_size, gpu)
        chunk, hidden = min(chunk, rows), rows * h * itemsize
        is_whole, algorithm = chunk == rows, job.config.algorithm
        is_top_k = role in job.spec.teachers.values() and algorithm.distillation.kind == "top_k"
        # Forward holds float32 logits and their exponentials, or the logits that they are made from; an update keeps a
        # single chunk's logits besides.
        logits = chunk * columns * (_FLOAT * (1 + (is_update and is_whole)) + (itemsize if is_top_k else _FLOAT))
        if is_update:  # backward: two float32 copies, or one and its 16-bit gradient
            is_plain = not (algorithm.entropy_coef or job.spec.teachers)
            gradients = chunk * columns * (_FLOAT + (itemsize if is_plain else _FLOAT)) + hidden
            gradients += chunk * columns * _FLOAT * (shape.logit_softcap is not None)  # the cap's derivative
            if job.adapters_of(role) is None:  # the output layer's gradient: chunks are summed in float32
                gradients += columns * h * (itemsize if is_whole else _FLOAT)
            logits = max(logits, gradients)
        logits += hidden
    if not is_update:
        transient = count_forward_elements(shape, layout, config.sequence_parallel) * tokens * itemsize
        return 0, int(transient), int(head) + logits
    passes = count_passes_in_flight(layout, pp_rank, count_microbatches(job, layout, config))
    layers = passes * count_stage_layers(shape.num_layers, layout, pp_rank) / layout.vpp_size
    # megatron-core also keeps a pass's output for the next stage; the last chunk has none.
    sent = passes * (1 - is_last / layout.vpp_size) * h / s
    stored = layers * (h / s * (not is_offloaded) if is_full else layer) + sent
    # Gradients of one layer's results in its backward; with recomputation also its activations.
    transient = 2 * shape.ffn_hidden_size / layout.tp_size + 2 * h + (layer if is_full else 0)
    transient += 2 * h / s * is_offloaded  # the input and the output of the layer that runs
    if shape.num_experts:  # peak just after the layer's forward
        transient += shape.experts_per_token * _count_exchanged(layout, 2) * h
    return int(stored * tokens * itemsize + head), int(transient * tokens * itemsize), logits


def count_forward_elements(shape: ModelShape, layout: ParallelLayout, sequence_parallel: bool) -> float:
    """Count the peak elements per token of a forward-only pass."""
    tp = layout.tp_size
    s = tp if sequence_parallel else 1
    h, f, k = shape.hidden_size, shape.ffn_hidden_size / tp, shape.experts_per_token
    if shape.num_experts:
        return k * _count_exchanged(layout, 3) * h + 6 * h / s
    return 3 * f + 4 * h / s + h


def _count_exchanged(layout: ParallelLayout, own: int) -> float:
    """Count a token's hidden states on a rank in an MoE layer, per chosen expert; `own`: those in the experts."""
    split = layout.expert_tp_size
    return (own * split + 1 + (layout.ep_size > 1) + (split > 1)) / layout.tp_size


# Under ZeRO-3, counted from torch's FSDP2: a unit is a layer, the ends of the stage (embedding, last norm, output
# layer), or expert-parallel experts. In forward a unit's buffer lives until the next one is gathered. In backward the
# next unit is prefetched, and the float32 copy of a unit's gradients lives until the next unit ends.


@dataclass(frozen=True)
class GatheredElements:
    """Weight elements that a rank gathers under ZeRO-3, with the padding of shards."""

    ends: int  # embedding, last norm and output layer, gathered together
    output: int  # the output layer's part of `ends`
    layers: tuple[tuple[int, int], ...]  # per layer: gathered with it, and of experts gathered separately (else 0)
    copies: int  # of a layer's experts; 1 if no other rank has them, since FSDP then casts them without a buffer


@lru_cache(maxsize=4096)
def count_gathered(shape: ModelShape, layout: ParallelLayout, rank: int) -> GatheredElements:
    """Count the weight elements that a rank gathers under ZeRO-3, by layer and outside of layers."""
    ends, output, layers = 0, 0, list[tuple[int, int]]()
    places = find_shard_places(layout, rank)
    for chunk in list_chunks(shape, layout, rank):
        found: dict[str, list[int]] = {}
        for p in (p for p in chunk if not p.is_frozen):
            count = places[p.is_expert].count
            size = -(-p.rows // count) * count * (p.numel // p.rows)
            if p.name.startswith("decoder.layers."):
                found.setdefault(p.name.split(".")[2], [0, 0])[p.is_expert] += size
            else:
                ends += size
                output += size if p.name.startswith(("output_layer.", "score.")) else 0
        layers += [(dense, experts) for dense, experts in found.values()]
    is_tied = not output and layout.coordinates(rank).pp == layout.pp_size - 1
    copies = min(2, places[True].count)
    return GatheredElements(ends, ends if is_tied else output, tuple(layers), copies)


def compute_gathered_bytes(
    shape: ModelShape, layout: ParallelLayout, rank: int, *, dtype: str, is_update: bool
) -> tuple[int, int, int]:
    """Compute the peak bytes of weights and gradients that a rank holds temporarily in one pass of a role.

    Args:
        is_update: forward and backward, not forward only.

    Returns:
        Bytes while a layer runs; while the output layer runs, without its gradient; before the first layer.
    """
    size, found = DTYPE_BYTES[dtype], count_gathered(shape, layout, rank)
    ends, kinds = found.ends * size, {*found.layers}
    forward = max(ends + max(2 * dense, dense + found.copies * experts) * size for dense, experts in kinds)
    start = 2 * ends + found.layers[0][0] * size
    if not is_update:
        return forward, ends, start
    backward = max(_hold_backward(dense, experts, size, found.copies) for dense, experts in kinds)
    return max(forward, ends + found.output * size + backward), ends, start


def _hold_backward(dense: int, experts: int, size: int, copies: int) -> int:
    """Return the peak bytes of gathered weights and float32 gradients in a layer's backward, between equal layers.

    Args:
        dense, experts: elements gathered with the layer, and of experts gathered separately.
        size: bytes per gathered element.
        copies: of the experts.
    """
    reduced, reduced_experts = dense * _FLOAT, experts * _FLOAT
    dense, experts = dense * size, experts * size
    if experts:
        return 2 * dense + max(copies * experts + reduced, experts + reduced_experts)
    return 3 * dense + reduced
