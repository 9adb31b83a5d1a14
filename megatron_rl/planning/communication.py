# SPDX-License-Identifier: Apache-2.0
"""Bytes that one rank sends per step, by purpose and link class.

A collective over p ranks and n bytes costs a rank (p - 1) / p * n for a reduce-scatter, all-gather or all-to-all, and
twice that for an all-reduce (ring). All bytes of a group that spans nodes count as crossing nodes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_rl.config.run_spec import RoleSpec
from megatron_rl.config.schema import FULLY_SHARDED, TrainedConfig
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.planning.cluster import DTYPE_BYTES, Cluster, Job
from megatron_rl.planning.gathered import count_gathered
from megatron_rl.planning.parameters import Upkeep, compute_role_bytes, list_chunks
from megatron_rl.weights.families import ModelShape
from megatron_rl.weights.megatron_layout import padded_vocab_size, stage_layers

WITHIN, ACROSS = "within node", "across nodes"
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


def list_traffic(job: Job, work: Workload, stage: int = 0) -> list[Traffic]:
    """List a pipeline stage's traffic, without the weight transfer (see the reshard planner)."""
    passes = job.scoring_passes | {role.name: 1 for role in job.others}
    found = [
        traffic
        for name, forwards in passes.items()
        for traffic in _role_traffic(job, work, job.spec.roles[name], forwards, stage)
    ]
    found.append(_engine_traffic(job, work))
    return [traffic for traffic in found if traffic.bytes_per_rank]


def _role_traffic(job: Job, work: Workload, role: RoleSpec, forwards: int, stage: int) -> Iterator[Traffic]:
    """Yield the traffic of a role's updates and of `forwards` scoring passes over all tokens."""
    shape, section, layout, cluster = job.shape_of(role), role.settings, job.layout_of(role), job.cluster
    rank = layout.rank(pp=min(stage, layout.pp_size - 1))

    def count(axis: str, link: str, size: float) -> Traffic:
        return Traffic(f"{role.title} {axis}", link, int(size), role.name)

    itemsize = DTYPE_BYTES[job.config.model.dtype]
    tp, pp, cp, ep = layout.tp_size, layout.pp_size, layout.cp_size, layout.ep_size
    tokens = work.tokens / layout.dp_size / cp
    trainings = work.passes if role.trainable else 0
    # Full recomputation adds a forward. Sequence parallelism gathers inputs again for the gradients of weights,
    # unless adapters freeze the model.
    rounds = forwards + trainings * (2 + (role.trainable and role.training.recompute_granularity == "full"))
    layers, mixtures = shape.num_layers / pp, _count_mixtures(shape, layout, rank)
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
    attention = (2 * shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim / tp * tokens * itemsize
    yield count("CP", link_of(layout, cluster, "cp"), layers * rounds * attention * (cp - 1) / cp)
    exchanged /= tp if section.sequence_parallel else 1
    yield count("EP", _expert_link(layout, cluster), exchanged * (ep - 1) / ep)
    stages = layout.vpp_size * (pp > 1)
    boundary = hidden / (tp if section.sequence_parallel else 1)
    yield count("PP", link_of(layout, cluster, "pp"), stages * (forwards + 2 * trainings) * boundary)
    if pp > 1 and trainings and shape.tied_embeddings and not shape.has_score_head and job.adapters_of(role) is None:
        # The first and last stage sum the gradients of tied embeddings.
        rows = padded_vocab_size(shape.vocab_size, tp) // tp
        replicas = layout.dp_size * cp if section.zero_stage == FULLY_SHARDED else 1
        size = work.optimizer_steps * rows * shape.hidden_size * _FLOAT / replicas
        yield count("embedding", link_of(layout, cluster, "pp"), size)
    if section.zero_stage == FULLY_SHARDED:
        size = _shared_bytes(job, work, role, forwards, rank)
        yield count("DP", link_of(layout, cluster, "cp", "dp"), size)
    elif role.trainable and isinstance(section, TrainedConfig):
        held = compute_role_bytes(
            shape,
            layout,
            rank,
            dtype=job.config.model.dtype,
            upkeep=Upkeep.of(section),
            adapters=job.adapters_of(role),
        )
        adapters, replicas = job.adapters_of(role), layout.dp_size * cp
        members = [p for chunk in list_chunks(adapters or shape, layout, rank) for p in chunk]
        experts = sum(p.numel for p in members if p.is_expert) / sum(p.numel for p in members)
        share = (1 - experts) * (1 - 1 / replicas) + experts * (1 - 1 / layout.expert_replicas)
        trained = held.gradients * itemsize // 4  # bytes of trained parameters; gradients are float32
        optimizers = 2 if experts else 1  # each gathers all weights
        moved = held.gradients + optimizers * trained if section.use_distributed_optimizer else 2 * held.gradients
        yield count("DP", link_of(layout, cluster, "cp", "dp"), work.optimizer_steps * moved * share)


def _count_exchanges(shape: ModelShape, layers: float, mixtures: int, rounds: float, extra: float) -> float:
    """Count the gathers and reductions over TP in a step, each of the hidden states of all tokens.

    Attention and MLP gather and reduce once each per pass, and gather once more for gradients.

    Args:
        layers, mixtures: layers of the stage, and layers with experts.
        rounds: passes over all tokens.
        extra: gathers for weight gradients, in passes.
    """
    times = (4 * layers - (0 if shape.shared_ffn_size else 2) * mixtures) * (rounds + extra)
    if (sizes := shape.latent) is None:
        return times
    projected = (sizes.query or shape.hidden_size) + sizes.key_value
    gathered, again = (projected + sizes.rotary) / shape.hidden_size, projected / shape.hidden_size
    return times - layers * (rounds * (1 - gathered) + 2 * extra * (1 - again))


def _count_whole_elements(shape: ModelShape, layers: float, mixtures: int) -> float:
    """Count elements of matrices replicated over TP (routers, latents), whose gradients are summed under TP-SP."""
    sizes, found = shape.latent, mixtures * shape.num_experts
    if sizes is not None:
        found += layers * (sizes.query + sizes.key_value + sizes.rotary)
    return found * shape.hidden_size


def _count_mixtures(shape: ModelShape, layout: ParallelLayout, rank: int) -> int:
    """Count the layers with experts on a rank."""
    pp, vpp_size = layout.coordinates(rank).pp, layout.vpp_size
    chunks = (stage_layers(shape.num_layers, layout.pp_size, vpp_size, pp, chunk) for chunk in range(vpp_size))
    return sum(shape.has_experts(number) for chunk in chunks for number in chunk)


def _shared_bytes(job: Job, work: Workload, role: RoleSpec, forwards: int, rank: int) -> float:
    """Compute the bytes of ZeRO-3's traffic: gathered weights and reduced float32 gradients.

    Microbatches are assumed full, with at least one per optimizer step. Forward-only passes keep embedding, last norm
    and output layer gathered.
    """
    layout, section, trainings = job.layout_of(role), role.settings, work.passes if role.trainable else 0
    found = count_gathered(job.shape_of(role), layout, rank)
    layers = [sum(sizes) for sizes in zip(*found.layers, strict=True)]
    replicas = layout.dp_size * layout.cp_size
    budget = section.max_tokens_per_microbatch
    scored = math.ceil(work.tokens / layout.dp_size / budget)
    trained = max(scored, work.optimizer_steps // max(work.passes, 1))
    itemsize, total = DTYPE_BYTES[job.config.model.dtype], 0.0
    for inside, ends, count in ((layers[0], found.ends, replicas), (layers[1], 0, layout.expert_replicas)):
        gathered = forwards * (scored * inside + ends) + trainings * trained * (2 * inside + ends)
        reduced = trainings * trained * (inside + ends)
        total += (gathered * itemsize + reduced * _FLOAT) * (count - 1) / count
    return total


def _engine_traffic(job: Job, work: Workload) -> Traffic:
    """Return the engines' traffic: two all-reduces per layer and token."""
    tp, shape, ranks = job.engine_tp, job.shape, job.rollout_ranks
    tokens = work.tokens * tp / len(ranks)
    hidden = tokens * shape.hidden_size * DTYPE_BYTES[job.config.model.dtype]
    node = job.cluster.gpus_per_node
    link = WITHIN if tp <= node and node % tp == 0 and ranks.start % tp == 0 else ACROSS
    return Traffic("engine TP", link, int(4 * shape.num_layers * hidden * (tp - 1) / tp), "rollout")


def link_of(layout: ParallelLayout, cluster: Cluster, *axes: str) -> str:
    """Return the slowest link class of the groups over `axes`, judged by the first rank's group."""
    sizes = {"tp": layout.tp_size, "cp": layout.cp_size, "dp": layout.dp_size, "pp": layout.pp_size}
    last = layout.rank(**{axis: sizes[axis] - 1 for axis in axes})
    return WITHIN if cluster.is_within_node([layout.first_rank, last]) else ACROSS


def _expert_link(layout: ParallelLayout, cluster: Cluster) -> str:
    first = layout.first_rank
    return WITHIN if cluster.is_within_node([first, first + layout.expert_tp_size * layout.ep_size - 1]) else ACROSS
