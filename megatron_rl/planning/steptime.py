# SPDX-License-Identifier: Apache-2.0
"""Step time predicted from operation counts and stated efficiencies.

Operations: 2 per weight and token forward, 4 backward, 2 more with full recomputation, and causal attention, 2 s d n
per token and direction. Decoding passes read weights and KV cache. Lengths and efficiencies are assumed, not measured:
results rank layouts, within a factor, not a percent.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.config.run_spec import RoleSpec
from megatron_rl.config.schema import LayoutConfig
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.planning.cluster import Job
from megatron_rl.planning.communication import ACROSS, WITHIN, Traffic, Workload
from megatron_rl.planning.engine_weights import count_engine_bytes
from megatron_rl.planning.memory import RankMemory, find_smallest_cache
from megatron_rl.weights.families import ModelShape


@dataclass(frozen=True)
class Assumptions:
    """Assumptions of a prediction.

    Attributes:
        mfu: share of peak operations in training and scoring.
        bandwidth_efficiency: share of memory bandwidth in decoding.
        link_efficiency: share of link bandwidth in collectives.
        mean_response, mean_prompt: mean length over the maximum length.
        decode_overhead: seconds per decoding pass besides memory and operations.
    """

    mfu: float = 0.4
    bandwidth_efficiency: float = 0.7
    link_efficiency: float = 0.8
    mean_response: float = 0.5
    mean_prompt: float = 0.5
    decode_overhead: float = 0.004

    def describe(self) -> str:
        """Return the assumptions as a sentence for the report."""
        return (
            f"{self.mfu:.0%} of peak operations, {self.bandwidth_efficiency:.0%} of memory bandwidth and "
            f"{self.decode_overhead * 1e3:g} ms per decoding pass, {self.link_efficiency:.0%} of link bandwidth; "
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
        traffic: from `list_traffic`.
        memory: from `compute_memory`; the smallest KV cache limits concurrent responses.
        switch_seconds: from the reshard plan.
    """

    def wait(role: str) -> float:
        bandwidths = {WITHIN: job.cluster.within_node, ACROSS: job.cluster.across_nodes}
        return sum(t.bytes_per_rank / bandwidths[t.link] / assumed.link_efficiency for t in traffic if t.role == role)

    def compute(role: RoleSpec, rounds: float) -> float:
        """Return seconds of `rounds` forward passes over all tokens (a backward pass counts as two)."""
        length, layout = work.prompt_tokens + work.response_tokens, job.layout_of(role)
        operations = rounds * work.tokens * count_operations(job.shape_of(role), length) / layout.world_size
        return operations / (job.cluster.flops * assumed.mfu) * (1 + compute_bubble(work, layout, role.settings))

    def train(role: RoleSpec) -> float:
        """Return seconds of a role's updates; a frozen model skips weight gradients, half of a backward pass."""
        passes = (2 if role.training.lora.rank else 3) + (role.training.recompute_granularity == "full")
        return compute(role, work.passes * passes)

    roles, actor = job.spec.roles, job.config.actor
    mtp = 0.0  # the MTP layer, which the last stage trains while all other stages wait
    if actor.mtp_lr:
        length, layout = work.prompt_tokens + work.response_tokens, job.layout.last_stage
        operations = 3 * work.passes * work.tokens * count_operations(job.shape.mtp, length) / layout.world_size
        mtp = operations / (job.cluster.flops * assumed.mfu)
    scoring = {name: compute(roles[name], passes) for name, passes in job.scoring_passes.items()}
    phases = {
        "switch": switch_seconds,
        "rollout": _rollout_seconds(job, work, memory, assumed) + wait("rollout"),
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
        optimizer = max(phase.parts.get("optimizer", 0) for rank in memory for phase in rank.phases)
        phases["offload"] = 2 * optimizer / job.cluster.host_bandwidth
    overlap = sum(_find_overlap(job, seconds) for seconds in (scoring, updates))
    return StepTime(phases, compute_bubble(work, job.layout, actor), overlap)


def _find_overlap(job: Job, seconds: dict[str, float]) -> float:
    """Return the seconds that roles on different ranks save by running concurrently; `seconds`: role -> its time."""
    ranks = {name: job.ranks_of(name) for name in seconds}
    busiest = max(sum(seconds[name] for name in seconds if first.start in ranks[name]) for first in ranks.values())
    return sum(seconds.values()) - busiest


def compute_bubble(work: Workload, layout: ParallelLayout, section: LayoutConfig) -> float:
    """Return a pipeline's idle time over its working time, (pp - 1) / (vpp m) with m microbatches."""
    per_step = work.tokens * work.passes / work.optimizer_steps / layout.dp_size
    microbatches = max(1, -(-per_step // section.max_tokens_per_microbatch))
    return (layout.pp_size - 1) / (layout.vpp_size * microbatches)


def count_operations(shape: ModelShape, length: float) -> float:
    """Return operations per token of a forward pass through a sequence of `length` tokens."""
    h, scored = shape.hidden_size, shape.num_heads * (shape.head_dim + shape.value_dim)
    layer = shape.attention_elements + 3 * h * shape.active_columns + h * shape.num_experts
    head = 0 if shape.has_score_head else h * shape.vocab_size
    attending = shape.num_layers - len(shape.delta_layers)
    return 2 * (shape.num_layers * layer + head) + attending * scored * length


def _rollout_seconds(job: Job, work: Workload, memory: list[RankMemory], assumed: Assumptions) -> float:
    rollout, shape, cluster = job.config.rollout, job.shape, job.cluster
    tp, layout = job.engine_tp, job.layout
    engines = len(job.rollout_ranks) // (tp * (layout.pp_size * layout.ep_size if job.engine_is_actor else 1))
    per_engine = -(-work.num_rollouts // engines)
    mean = work.prompt_tokens + work.response_tokens / 2  # mean cached tokens per response
    smallest = find_smallest_cache(job, memory)
    per_token, cache = smallest.kv_bytes_per_token, max(smallest.kv_cache_bytes, 0)
    running = max(1, min(rollout.max_num_seqs, per_engine, cache // max(1, int(per_token * mean))))
    passes = work.response_tokens * per_engine / running
    weights = count_engine_bytes(job)
    if shape.num_experts:  # few responses activate only some experts
        weights *= min(1.0, (running * shape.experts_per_token + 1) / shape.num_experts)
    bandwidth = cluster.memory_bandwidth * assumed.bandwidth_efficiency
    operations = running * count_operations(shape, mean) / tp / (cluster.flops * assumed.mfu)
    decode = passes * (max((weights + running * mean * per_token) / bandwidth, operations) + assumed.decode_overhead)
    prefill = per_engine * work.prompt_tokens * count_operations(shape, work.prompt_tokens) / tp
    return decode + prefill / (cluster.flops * assumed.mfu)
