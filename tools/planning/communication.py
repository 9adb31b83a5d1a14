# SPDX-License-Identifier: Apache-2.0
"""Bytes that one rank sends per step, by purpose and link class, and the predicted step time.

A collective over p ranks and n bytes costs a rank (p - 1) / p * n for a reduce-scatter, all-gather or all-to-all, and
twice that for an all-reduce (ring). All bytes of a group that spans nodes count as crossing nodes.

Step time is predicted from operation counts and stated efficiencies. Operations: 2 per weight and token forward, 4
backward, 2 more with full recomputation, and causal attention, 2 s d n per token and direction. Decoding passes read
weights and KV cache. Lengths and efficiencies are assumed, so results only rank layouts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from megatron_rl.config.run_spec import RoleSpec
from megatron_rl.config.schema import FULLY_SHARDED, LayoutConfig
from megatron_rl.config.sections import format_ranks
from megatron_rl.engines.vllm.vllm_settings import fit_to_device
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.planning.cluster import Cluster, Job
from megatron_rl.planning.memory import (
    RankMemory,
    compute_memory,
    count_gathered,
    count_role_bytes,
    find_smallest_cache,
)
from megatron_rl.planning.parameters import count_engine_bytes, list_chunks
from megatron_rl.planning.role_layouts import DTYPE_BYTES
from megatron_rl.planning.throughput import count_operations
from megatron_rl.weights.families import ModelShape
from megatron_rl.weights.megatron_layout import count_stage_layers, padded_vocab_size, stage_layers

WITHIN, ACROSS = "within node", "across nodes"
_WHOLE_LAYERS = ("full", "offload")  # recomputed ones
_FLOAT = 4


@dataclass(frozen=True)
class Traffic:
    """Bytes that a rank sends per step for one purpose over one link class.

    Attributes:
        kind: "actor TP", "actor DP", "critic PP", ...
        link: `WITHIN` or `ACROSS`.
        bytes_per_rank: sent by one rank in one step.
        role: sending role; "rollout" for engines.
    """

    kind: str
    link: str
    bytes_per_rank: int
    role: str


@dataclass(frozen=True)
class Workload:
    """Assumed tokens of one step.

    Attributes:
        prompt_tokens, response_tokens: mean lengths.
        passes: epochs over each token (`ppo_epochs`).
        optimizer_steps: per step.
    """

    num_rollouts: int
    prompt_tokens: float
    response_tokens: float
    passes: int
    optimizer_steps: int

    @property
    def tokens(self) -> float:
        """Prompt and response tokens of all rollouts."""
        return self.num_rollouts * (self.prompt_tokens + self.response_tokens)


def count_scoring_passes(job: Job) -> dict[str, int]:
    """Return role -> forward passes over a step's samples for log-probs; "actor" includes a reference on its ranks."""
    if "reference" not in job.spec.roles or job.ranks_of("reference") == job.ranks_of("actor"):
        return {"actor": job.spec.num_scoring_passes}
    return {"actor": job.spec.num_scoring_passes - 1, "reference": 1}


def list_traffic(job: Job, work: Workload, stage: int = 0) -> list[Traffic]:
    """List a pipeline stage's traffic, without the weight transfer to the engine."""
    passes = count_scoring_passes(job) | {role.name: 1 for role in job.others}
    found = [
        traffic
        for name, forwards in passes.items()
        for traffic in _role_traffic(job, work, job.spec.roles[name], forwards, stage)
    ]
    # The engines: two all-reduces per layer and token; or, between DP ranks, one, with experts' exchanges.
    tp, ranks = job.engine_tp, job.rollout_ranks
    tokens, node = work.tokens * tp / len(ranks), job.cluster.gpus_per_node
    for kind, size, sent in (("TP", tp, count_reduced(job)), ("EP", job.engine_width, count_exchanged(job))):
        link = WITHIN if size <= node and node % size == 0 and ranks.start % size == 0 else ACROSS
        found.append(Traffic(f"engine {kind}", link, int(tokens * sent), "rollout"))
    return [traffic for traffic in found if traffic.bytes_per_rank]


def count_reduced(job: Job) -> float:
    """Count the bytes per token that a rank of an engine sends to its TP ranks."""
    tp, shape = job.engine_tp, job.shape
    sums = 4 * shape.num_layers - (2 * _count_mixtures(shape) if job.engine_dp > 1 else 0)
    return sums * shape.hidden_size * DTYPE_BYTES[job.config.model.dtype] * (tp - 1) / tp


def count_exchanged(job: Job) -> float:
    """Count the bytes per token of a rank's DP part that it sends to the ranks with other experts, there and back.

    vLLM gathers the tokens of all parts on each rank and adds up its results, unless `all2all_backend` sends each token
    to the ranks of its experts.
    """
    if job.engine_dp == 1:
        return 0.0
    shape, width, backend = job.shape, job.engine_width, job.config.rollout.engine_options.get("all2all_backend", "")
    copies = shape.experts_per_token / job.engine_tp if backend.startswith("deepep") else job.engine_dp
    per_layer = 2 * copies * shape.hidden_size * DTYPE_BYTES[job.config.model.dtype]
    return _count_mixtures(shape) * per_layer * (width - 1) / width


def _count_mixtures(shape: ModelShape) -> int:
    return sum(map(shape.has_experts, range(shape.num_layers)))


def _role_traffic(job: Job, work: Workload, role: RoleSpec, forwards: int, stage: int) -> Iterator[Traffic]:
    """Yield the traffic of a role's updates and of `forwards` scoring passes over all tokens."""
    shape, section, layout, cluster = job.shape_of(role), role.settings, job.layout_of(role), job.cluster
    pp_rank = min(stage, layout.pp_size - 1)
    rank = layout.rank(pp=pp_rank)

    def count(axis: str, link: str, size: float) -> Traffic:
        return Traffic(f"{role.title} {axis}", link, int(size), role.name)

    itemsize = DTYPE_BYTES[job.config.model.dtype]
    tp, pp, cp, ep = layout.tp_size, layout.pp_size, layout.cp_size, layout.ep_size
    tokens = work.tokens / layout.dp_size / cp
    trainings = work.passes if role.trainable else 0
    # Full recomputation adds a forward. Sequence parallelism gathers inputs again for the gradients of weights,
    # unless adapters freeze the model.
    is_recomputed = role.trainable and role.training.recompute_granularity in _WHOLE_LAYERS
    rounds = forwards + trainings * (2 + is_recomputed)
    chunks = [stage_layers(shape.num_layers, layout, pp_rank, chunk) for chunk in range(layout.vpp_size)]
    layers, mixtures = sum(map(len, chunks)), sum(shape.has_experts(number) for chunk in chunks for number in chunk)
    hidden = tokens * shape.hidden_size * itemsize
    extra = 0.5 * trainings if section.sequence_parallel and job.adapters_of(role) is None else 0.0
    # Once forward and once backward for embedding and head, on the first and last stage.
    ends = (forwards + 2 * trainings) * ((stage == 0) + (stage >= pp - 1))
    times = _count_exchanges(shape, layers, mixtures, rounds, extra) + ends
    # Inputs and outputs of experts: hidden states both ways, shares one way.
    exchanged = mixtures * rounds * shape.experts_per_token * tokens * (2 * shape.hidden_size + 1) * itemsize
    summed = _count_whole_elements(shape, layers, mixtures) if extra else 0
    reduced = times * hidden + 2 * _FLOAT * work.optimizer_steps * summed
    sent = reduced * (tp - 1) + exchanged * (layout.expert_tp_size - 1)
    yield count("TP", link_of(layout, cluster, "tp"), sent / tp)
    shapes = [shape.at(number) for chunk in chunks for number in chunk]
    attention = (
        sum((2 * own.num_heads + 2 * own.num_kv_heads) * own.head_dim for own in shapes) / tp * tokens * itemsize
    )
    yield count("CP", link_of(layout, cluster, "cp"), rounds * attention * (cp - 1) / cp)
    exchanged /= tp if section.sequence_parallel else 1
    link = _link_to(layout.first_rank + layout.expert_tp_size * ep - 1, layout, cluster)
    yield count("EP", link, exchanged * (ep - 1) / ep)
    stages = layout.vpp_size * (pp > 1)
    boundary = hidden / (tp if section.sequence_parallel else 1)
    yield count("PP", link_of(layout, cluster, "pp"), stages * (forwards + 2 * trainings) * boundary)
    if pp > 1 and trainings and shape.tied_embeddings and not shape.has_score_head and job.adapters_of(role) is None:
        # The first and last stage sum the gradients of tied embeddings.
        rows = padded_vocab_size(shape.vocab_size, tp) // tp
        replicas = layout.shard_sizes[0] if section.zero_stage == FULLY_SHARDED else 1
        size = work.optimizer_steps * rows * shape.hidden_size * _FLOAT / replicas
        yield count("embedding", link_of(layout, cluster, "pp"), size)
    if section.zero_stage == FULLY_SHARDED:
        size, summed = _shared_bytes(job, work, role, forwards, rank)
        yield count("DP", _link_to(layout.first_rank + tp * (layout.shard_sizes[0] - 1), layout, cluster), size)
        yield count("replicas", link_of(layout, cluster, "cp", "dp"), summed)
    elif role.trainable:
        held, adapters, replicas = count_role_bytes(job, rank, role), job.adapters_of(role), layout.dp_size * cp
        members = [p for chunk in list_chunks(adapters or shape, layout, rank) for p in chunk]
        experts = sum(p.numel for p in members if p.is_expert) / sum(p.numel for p in members)
        share = (1 - experts) * (1 - 1 / replicas) + experts * (1 - 1 / layout.expert_replicas)
        trained = held.gradients * itemsize // 4  # bytes of trained parameters; gradients are float32
        optimizers = 2 if experts else 1  # each gathers all weights
        moved = held.gradients + optimizers * trained if role.training.use_distributed_optimizer else 2 * held.gradients
        yield count("DP", link_of(layout, cluster, "cp", "dp"), work.optimizer_steps * moved * share)


def _count_exchanges(shape: ModelShape, layers: float, mixtures: int, rounds: float, extra: float) -> float:
    """Count the TP gathers and reductions of hidden states in a step: four per layer and pass, fewer in experts.

    Args:
        layers, mixtures: layers of the stage, and those with experts.
        rounds: forward and backward passes.
        extra: gathers that the weight gradients repeat, as a number of passes.
    """
    times = (4 * layers - (0 if shape.shared_ffn_size else 2) * mixtures) * (rounds + extra)
    if (sizes := shape.latent) is None:
        return times
    projected = (sizes.query or shape.hidden_size) + sizes.key_value
    gathered, again = (projected + sizes.rotary) / shape.hidden_size, projected / shape.hidden_size
    return times - layers * (rounds * (1 - gathered) + 2 * extra * (1 - again))


def _count_whole_elements(shape: ModelShape, layers: float, mixtures: int) -> float:
    """Count the elements of matrices that TP replicates (routers, MLA's down-projections), with summed gradients."""
    sizes, found = shape.latent, mixtures * shape.num_experts
    if sizes is not None:
        found += layers * (sizes.query + sizes.key_value + sizes.rotary)
    return found * shape.hidden_size


def _shared_bytes(job: Job, work: Workload, role: RoleSpec, forwards: int, rank: int) -> tuple[float, float]:
    """Compute the bytes that a rank sends per step under ZeRO-3, among the ranks of a replica, and to other replicas.

    These are gathered weights and reduced float32 gradients, and the sums of the replicas' gradients.

    Microbatches are assumed full, with at least one per optimizer step. The `forwards` scoring passes keep embedding,
    last norm and output layer gathered.
    """
    layout, section, trainings = job.layout_of(role), role.settings, work.passes if role.trainable else 0
    found = count_gathered(job.shape_of(role), layout, rank)
    layers = [sum(sizes) for sizes in zip(*found.layers, strict=True)]
    replicas = layout.dp_size * layout.cp_size, layout.expert_replicas
    budget = section.max_tokens_per_microbatch
    scored = math.ceil(work.tokens / layout.dp_size / budget)
    trained = max(scored, work.optimizer_steps // max(work.passes, 1))
    itemsize, total, summed = DTYPE_BYTES[job.config.model.dtype], 0.0, 0.0
    for inside, ends, count, ranks in zip(layers, (found.ends, 0), layout.shard_sizes, replicas, strict=True):
        gathered = forwards * (scored * inside + ends) + trainings * trained * (2 * inside + ends)
        reduced = trainings * trained * (inside + ends)
        total += (gathered * itemsize + reduced * _FLOAT) * (count - 1) / count
        summed += role.trainable * work.optimizer_steps * 2 * _FLOAT * (inside + ends) / count * (1 - count / ranks)
    return total, summed


def _link_to(last: int, layout: ParallelLayout, cluster: Cluster) -> str:
    return WITHIN if layout.first_rank // cluster.gpus_per_node == last // cluster.gpus_per_node else ACROSS


def link_of(layout: ParallelLayout, cluster: Cluster, *axes: str) -> str:
    """Return the slowest link class in parallel groups over `axes` ("tp", "dp", ...), judged by the first group."""
    sizes = {"tp": layout.tp_size, "cp": layout.cp_size, "dp": layout.dp_size, "pp": layout.pp_size}
    return _link_to(layout.rank(**{axis: sizes[axis] - 1 for axis in axes}), layout, cluster)


@dataclass(frozen=True)
class Assumptions:
    """Assumptions of a prediction.

    Attributes:
        mfu: share of peak operations in training and scoring.
        bandwidth_efficiency: share of memory bandwidth in decoding.
        link_efficiency: share of link bandwidth in collectives.
        mean_response, mean_prompt: mean length over the maximum length.
        decode_overhead, request_overhead: host seconds per decoding pass, and per running response of a pass.
        layer_overhead: host seconds per layer and microbatch of an update that is not replayed from CUDA graphs.
        engine_gpus: accelerators outside the job, for its engines there (`schedule.elastic`).
    """

    mfu: float = 0.4
    bandwidth_efficiency: float = 0.7
    link_efficiency: float = 0.8
    mean_response: float = 0.5
    mean_prompt: float = 0.5
    decode_overhead: float = 0.004
    request_overhead: float = 40e-6
    layer_overhead: float = 0.004
    engine_gpus: int = 8

    def describe(self) -> str:
        """Return the assumptions as a sentence for the report."""
        return (
            f"{self.mfu:.0%} of peak operations; {self.bandwidth_efficiency:.0%} of memory bandwidth, with "
            f"{self.decode_overhead * 1e3:g} ms per decoding pass and {self.request_overhead * 1e6:g} us per response "
            f"in it, hidden by the pass before if vLLM plans early; updates without CUDA graphs launch a layer of a "
            f"microbatch in {self.layer_overhead * 1e3:g} ms; "
            f"{self.link_efficiency:.0%} of link bandwidth; "
            f"responses of {self.mean_response:.0%} and prompts of {self.mean_prompt:.0%} of the longest"
        )


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step.

    Attributes:
        bubble: idle share of the pipeline in the actor's update.
        overlap: time saved by roles that run concurrently on different ranks.
    """

    phases: dict[str, float]
    bubble: float
    overlap: float = 0.0

    @property
    def total(self) -> float:
        """Sum of the phases minus the overlap."""
        return sum(self.phases.values()) - self.overlap


def build_workload(job: Job, assumed: Assumptions) -> Workload:
    """Compute the tokens of a step under the assumed lengths."""
    config, data = job.config, job.config.data
    minibatches = data.train_batch_size // (config.actor.ppo_mini_batch_size or data.train_batch_size)
    return Workload(
        num_rollouts=data.train_batch_size * config.rollout.n,
        passes=config.actor.ppo_epochs,
        prompt_tokens=data.max_prompt_length * assumed.mean_prompt,
        response_tokens=data.max_response_length * assumed.mean_response,
        optimizer_steps=minibatches * config.actor.ppo_epochs,
    )


def predict_step(
    job: Job,
    work: Workload,
    traffic: list[Traffic],
    memory: list[RankMemory],
    switch_seconds: float,
    assumed: Assumptions,
) -> StepTime:
    """Predict the seconds of a step.

    Args:
        traffic, memory: from `list_traffic` and `compute_memory`.
        switch_seconds: of the weight transfer to the engine.
    """

    def wait(role: str) -> float:
        bandwidths = {WITHIN: job.cluster.within_node, ACROSS: job.cluster.across_nodes}
        return sum(t.bytes_per_rank / bandwidths[t.link] / assumed.link_efficiency for t in traffic if t.role == role)

    def compute(role: RoleSpec, rounds: float) -> float:
        """Return seconds of `rounds` forward passes over all tokens (a backward pass counts as two)."""
        length, layout = work.prompt_tokens + work.response_tokens, job.layout_of(role)
        per_token = _count_slowest(job.shape_of(role), length, layout)
        operations = rounds * work.tokens * per_token / layout.world_size
        return operations / (job.cluster.flops * assumed.mfu) * (1 + compute_bubble(work, layout, role.settings))

    def train(role: RoleSpec) -> float:
        """Return seconds of a role's updates; a frozen model skips weight gradients, half of a backward pass."""
        passes = (2 if role.training.lora.rank else 3) + (role.training.recompute_granularity in _WHOLE_LAYERS)
        least, moved = _find_host_seconds(job, work, role, passes, assumed)
        return max(compute(role, work.passes * passes), least) + moved

    roles, actor = job.spec.roles, job.config.actor
    mtp = 0.0  # the MTP layer, which the last stage trains while all other stages wait
    if actor.mtp_lr:
        length, layout = work.prompt_tokens + work.response_tokens, job.layout.last_stage
        operations = 3 * work.passes * work.tokens * count_operations(job.shape.mtp, length) / layout.world_size
        mtp = operations / (job.cluster.flops * assumed.mfu)
    scoring = {name: compute(roles[name], passes) for name, passes in count_scoring_passes(job).items()}
    phases = {
        "switch": switch_seconds,
        "rollout": predict_outside(job, work, assumed)
        if job.config.schedule.elastic
        else _rollout_seconds(job, work, memory, assumed) + wait("rollout"),
        "log-probs": sum(scoring.values()) + (wait("reference") if "reference" in scoring else 0.0),
        "actor update": train(roles["actor"]) + mtp + wait("actor"),
    }
    updates = {"actor": phases["actor update"]}
    for role in job.others:
        score, update = compute(role, 1), train(role) if role.trainable else 0.0
        phases[role.title] = score + update + wait(role.name)
        if role.trainable:
            scoring[role.name], updates[role.name] = score, update + wait(role.name)
    if actor.offload_optimizer:
        held = [count_role_bytes(job, rank, roles["actor"]) for rank in (job.layout.ranks[0], job.layout.ranks[-1])]
        times = work.optimizer_steps if actor.offload_optimizer == "stream" else 1  # of the moments
        moved = max(one.main_weights + times * (one.optimizer - one.main_weights) for one in held)
        phases["offload"] = 2 * moved / job.cluster.host_bandwidth
    overlap = sum(_find_overlap(job, seconds) for seconds in (scoring, updates))
    return StepTime(phases, compute_bubble(work, job.layout, actor), overlap)


def _count_slowest(shape: ModelShape, length: float, layout: ParallelLayout) -> float:
    """Count the operations per token of the stage with the most, which the others wait for, times the stages."""
    layers = count_operations(replace(shape, has_score_head=True), length)
    head, per_layer = count_operations(shape, length) - layers, layers / shape.num_layers
    counts = [count_stage_layers(shape.num_layers, layout, stage) for stage in range(layout.pp_size)]
    return layout.pp_size * max(max(counts) * per_layer, counts[-1] * per_layer + head)


def _find_host_seconds(
    job: Job, work: Workload, role: RoleSpec, passes: int, assumed: Assumptions
) -> tuple[float, float]:
    """Return the host's seconds to launch a role's updates, and those of copies of layers' inputs."""
    section, layout, shape = role.training, job.layout_of(role), job.shape_of(role)
    counts = [count_stage_layers(shape.num_layers, layout, stage) for stage in range(layout.pp_size)]
    layers, least, moved = max(counts), 0.0, 0.0
    if section.step_mode != "graph":
        microbatches = work.optimizer_steps * count_step_microbatches(work, layout, section)
        least = (
            microbatches * layers * assumed.layer_overhead * passes / 3 * (1 + compute_bubble(work, layout, section))
        )
    if section.recompute_granularity == "offload":  # to the host and back, between kernels
        split = layout.cp_size * (layout.tp_size if section.sequence_parallel else 1)
        rows = work.tokens * work.passes / layout.dp_size / split
        moved = 2 * layers * rows * shape.hidden_size * DTYPE_BYTES[job.config.model.dtype] / job.cluster.host_bandwidth
    return least, moved


def predict_seconds(assumed: Assumptions, job: Job, memory: list[RankMemory]) -> float:
    """Predict the seconds of a step with its switch; see `predict_step`."""
    # The slowest TP or PP link carries the engine weights outside of the actor's storage.
    own = max(phase.parts.get("engine weights", 0) for rank in memory for phase in rank.phases)
    is_far = link_of(job.layout, job.cluster, "tp", "pp") == ACROSS
    switch = own / (job.cluster.across_nodes if is_far else job.cluster.within_node)
    work = build_workload(job, assumed)
    return predict_step(job, work, list_traffic(job, work), memory, switch, assumed).total


def _find_overlap(job: Job, seconds: dict[str, float]) -> float:
    """Return the seconds that roles on different ranks save by running concurrently; `seconds`: role -> its time."""
    ranks = {name: job.ranks_of(name) for name in seconds}
    busiest = max(sum(seconds[name] for name in seconds if first.start in ranks[name]) for first in ranks.values())
    return sum(seconds.values()) - busiest


def compute_bubble(work: Workload, layout: ParallelLayout, section: LayoutConfig) -> float:
    """Return a pipeline's idle time over its working time, (pp - 1) / (vpp m) with m microbatches."""
    return (layout.pp_size - 1) / (layout.vpp_size * count_step_microbatches(work, layout, section))


def count_step_microbatches(work: Workload, layout: ParallelLayout, section: LayoutConfig) -> float:
    """Return the microbatches per optimizer step and rank."""
    per_step = work.tokens * work.passes / work.optimizer_steps / layout.dp_size
    return max(1, -(-per_step // section.max_tokens_per_microbatch))


def predict_outside(job: Job, work: Workload, assumed: Assumptions) -> float:
    """Predict the seconds of a rollout by engines outside the job."""
    placed = place_engines(job, assumed.engine_gpus)
    traffic, memory = list_traffic(placed, work), compute_memory(placed)
    return predict_step(placed, work, traffic, memory, 0.0, assumed).phases["rollout"]


def place_engines(job: Job, gpus: int) -> Job:
    """Return the job with its elastic engines, on `gpus` GPUs, as further ranks behind its own."""
    size, tp = job.cluster.world_size, job.config.rollout.tensor_model_parallel_size
    more = max(1, gpus // tp) * tp
    ranks: dict[str, Any] = {"rollout": f"{size}-{size + more - 1}"}
    for name in job.spec.roles:
        section, _, teacher = name.partition(".further.")[0].partition(".")
        text = format_ranks(job.ranks_of(name))
        if teacher:
            ranks.setdefault(section, {})[teacher] = text
        else:
            ranks[section] = text
    placed = job.with_config(schedule={"elastic": False}, placement=ranks)
    return replace(placed, cluster=replace(job.cluster, nodes=1, gpus_per_node=size + more))


def plans_passes_early(job: Job) -> bool:
    """Return whether the host of an engine prepares a decoding pass during the one before."""
    rollout, records_routes = job.config.rollout, job.config.actor.router_replay == "engine"
    if not rollout.supports("vllm_modes"):
        return False
    return fit_to_device(rollout, torch.device("cuda"), records_routes).engine_options["async_scheduling"]


def _rollout_seconds(job: Job, work: Workload, memory: list[RankMemory], assumed: Assumptions) -> float:
    rollout, shape, cluster = job.config.rollout, job.shape, job.cluster
    tp, layout = job.engine_tp, job.layout
    # DP parts of an engine have requests and caches of their own.
    engines = len(job.rollout_ranks) // (tp * (layout.pp_size * layout.ep_size if job.engine_is_actor else 1))
    per_engine = -(-work.num_rollouts // engines)
    mean = work.prompt_tokens + work.response_tokens / 2  # mean cached tokens per response
    smallest = find_smallest_cache(job, memory)
    per_token, cache = smallest.kv_bytes_per_token, max(smallest.kv_cache_bytes, 0)
    running = max(1, min(rollout.max_num_seqs, per_engine, cache // max(1, int(per_token * mean))))
    passes = work.response_tokens * per_engine / running
    weights = count_engine_bytes(job)
    if shape.num_experts:  # few responses activate only some experts
        weights *= min(1.0, (running * job.engine_dp * shape.experts_per_token + 1) / shape.num_experts)
    bandwidth = cluster.memory_bandwidth * assumed.bandwidth_efficiency
    operations = running * count_operations(shape, mean) / tp / (cluster.flops * assumed.mfu)
    host = assumed.decode_overhead + running * assumed.request_overhead
    device = max((weights + running * mean * per_token) / bandwidth, operations)
    decode = passes * (max(device, host) if plans_passes_early(job) else device + host)
    prefill = per_engine * work.prompt_tokens * count_operations(shape, work.prompt_tokens) / tp
    return decode + prefill / (cluster.flops * assumed.mfu)
