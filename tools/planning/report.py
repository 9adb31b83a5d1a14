# SPDX-License-Identifier: Apache-2.0
"""A plan as data, as a table, and as a plot of memory by phase."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from megatron_rl.config.batch_plan import BatchPlan
from megatron_rl.planning.admission import (
    Candidate,
    Problem,
    check_job,
    describe_choice,
    find_nearest,
    find_problem,
    list_candidates,
)
from megatron_rl.planning.cluster import GIB, Job
from megatron_rl.planning.memory import RankMemory, compute_memory, find_smallest_cache
from megatron_rl.planning.parameters import count_engine_bytes
from megatron_rl.samples.microbatches import packing_metrics, plan_microbatches
from tools.planning.communication import (
    ACROSS,
    WITHIN,
    Assumptions,
    StepTime,
    Traffic,
    Workload,
    build_workload,
    list_traffic,
    place_engines,
    predict_outside,
    predict_seconds,
    predict_step,
)
from tools.planning.switch import SwitchPlan, plan_switch

_MAX_PACKED = 20_000  # limit of packed rollouts


@dataclass(frozen=True)
class Plan:
    """Everything predicted about a run.

    Attributes:
        memory: one rank per pipeline stage, or per combination of roles.
        problem: why it does not fit, or `None`.
        packing: of the first minibatch under assumed lengths.
        candidates: layouts that fit, fastest first.
        nearest: the candidate that changes least, or `None`.
    """

    job: Job
    batch: BatchPlan
    memory: list[RankMemory]
    problem: Problem | None
    work: Workload
    traffic: list[Traffic]
    switch: SwitchPlan
    step: StepTime
    packing: dict[str, float]
    assumed: Assumptions
    candidates: list[Candidate]
    nearest: Candidate | None


def make_plan(job: Job, assumed: Assumptions) -> Plan:
    """Plan a job and its alternatives.

    Raises:
        UserError: the run's checks refuse the job.
    """
    batch = check_job(job)
    work, memory = build_workload(job, assumed), compute_memory(job)
    traffic, switch = list_traffic(job, work), plan_switch(job)
    step = predict_step(job, work, traffic, memory, switch.prediction.seconds, assumed)
    candidates = list_candidates(job, partial(predict_seconds, assumed))
    return Plan(
        job,
        batch,
        memory,
        find_problem(job, memory),
        work,
        traffic,
        switch,
        step,
        _pack(job, batch, assumed),
        assumed,
        candidates,
        find_nearest(job, candidates),
    )


def _pack(job: Job, batch: BatchPlan, assumed: Assumptions) -> dict[str, float]:
    """Pack a minibatch with lengths spread evenly around the assumed mean."""
    count = min(batch.rollouts_per_minibatch, _MAX_PACKED // batch.dp_size * batch.dp_size or batch.dp_size)
    prompt = batch.max_prompt_length * assumed.mean_prompt
    longest = min(2 * assumed.mean_response, 1.0) * batch.max_response_length
    shortest = 2 * assumed.mean_response * batch.max_response_length - longest
    lengths = [max(1, int(prompt + shortest + (longest - shortest) * (i + 0.5) / count)) for i in range(count)]
    multiple = job.layout.pp_size if job.layout.vpp_size > 1 else 1
    plan = plan_microbatches(
        lengths, dp_size=batch.dp_size, max_tokens=batch.max_tokens_per_microbatch, count_multiple=multiple
    )
    return {"microbatches": len(plan[0])} | packing_metrics(plan, lengths, batch.max_tokens_per_microbatch)


def to_dict(plan: Plan) -> dict[str, Any]:
    """Convert for JSON."""
    links = {link: max(_sent(plan, rank.rank, link) for rank in plan.memory) for link in (WITHIN, ACROSS)}
    return {
        "cluster": asdict(plan.job.cluster) | {"world_size": plan.job.cluster.world_size},
        "layout": asdict(describe_choice(plan.job)),
        "fits": plan.problem is None,
        "problem": None if plan.problem is None else asdict(plan.problem),
        "nearest": None if plan.nearest is None else plan.nearest.choice.overrides(plan.job),
        "batch_plan": asdict(plan.batch),
        "packing": plan.packing,
        "memory": [
            {
                "rank": rank.rank,
                "roles": _list_roles(plan.job, rank.rank),
                "pipeline_stage": _find_stage(plan.job, rank.rank),
                "kv_cache_bytes": rank.kv_cache_bytes,
                "kv_bytes_per_token": rank.kv_bytes_per_token,
                "host_bytes": rank.host_bytes,
                "phases": {phase.name: phase.parts | {"total": phase.total} for phase in rank.phases},
            }
            for rank in plan.memory
        ],
        "traffic": [asdict(traffic) for traffic in plan.traffic],
        "bytes_per_rank_and_step": links,
        "switch": asdict(plan.switch.summary) | asdict(plan.switch.prediction),
        "seconds": plan.step.phases | {"step": plan.step.total},
        "overlap": plan.step.overlap,
        "loss_of_an_engine": describe_loss(plan),
        "pipeline_bubble": plan.step.bubble,
        "assumptions": asdict(plan.assumed),
        "candidates": [
            asdict(c.choice)
            | {
                "seconds": c.seconds,
                "peak_bytes": c.worst_phase.total,
                "peak_phase": c.worst_phase.name,
                "overrides": c.choice.overrides(plan.job),
            }
            for c in plan.candidates
        ],
    }


def _sent(plan: Plan, rank: int, link: str) -> int:
    """Sum a rank's bytes over a class of links."""
    return sum(t.bytes_per_rank for t in plan.traffic if t.link == link and rank in plan.job.ranks_of(t.role))


def _list_roles(job: Job, rank: int) -> list[str]:
    return [name for name in (*job.spec.roles, "rollout") if rank in job.ranks_of(name)]


def _find_stage(job: Job, rank: int) -> int | None:
    """Return the actor's pipeline stage on a rank, or `None`."""
    return job.layout.coordinates(rank).pp if rank in job.layout.ranks else None


def format_plan(plan: Plan, top: int) -> str:
    """Format the plan, with the `top` fastest layouts."""
    cluster, job = plan.job.cluster, plan.job
    lines = [
        f"{cluster.nodes} nodes x {cluster.gpus_per_node} GPUs of {cluster.memory_bytes / GIB:g} GiB; actor "
        f"{job.layout.describe()}, {job.describe_engine()}",
        *([f"placement: {placed}"] if (placed := job.config.placement.describe(cluster.world_size)) else []),
        "",
        "batch plan",
        *(f"  {line}" for line in plan.batch.formulas()),
        f"  packing (assumed lengths): {plan.packing['microbatches']} microbatches per rank and optimizer step, "
        f"{plan.packing['packing/efficiency']:.0%} full, heaviest rank {plan.packing['packing/imbalance']:.2f} x the "
        "mean",
        "",
        *_memory_table(plan),
        "",
        *_traffic_table(plan),
        "",
        *_time_table(plan),
        "",
        *_candidate_table(plan, top),
        "",
        "the plan fits" if plan.problem is None else f"the plan does not fit: {plan.problem.found}",
    ]
    return "\n".join(lines)


def _memory_table(plan: Plan) -> list[str]:
    rank = max(plan.memory, key=lambda rank: rank.peak.total)
    kinds = list(dict.fromkeys(kind for phase in rank.phases for kind in phase.parts))
    limit, widths = plan.job.cluster.memory_bytes, [max(14, len(phase.name) + 2) for phase in rank.phases]

    def line(kind: str, texts: Iterable[str]) -> str:
        return f"  {kind:18}" + "".join(f"{text:>{width}}" for text, width in zip(texts, widths, strict=True))

    lines = [
        f"memory of rank {rank.rank}, the fullest, in GiB (limit {limit / GIB:g})",
        line("", (phase.name for phase in rank.phases)),
    ]
    for kind in kinds:
        sizes = (phase.parts.get(kind, 0) / GIB for phase in rank.phases)
        lines.append(line(kind, (f"{size:.2f}" if size else "-" for size in sizes)))
    lines.append(line("total", (f"{phase.total / GIB:.2f}" for phase in rank.phases)))
    lines += _peak_lines(plan)
    host = max(r.host_bytes for r in plan.memory) * plan.job.cluster.gpus_per_node
    if host:
        lines.append(f"  offloaded to a node's host: {host / GIB:.1f} GiB, page-locked")
    if plan.job.config.schedule.elastic:
        return lines
    batch, rank = plan.batch, find_smallest_cache(plan.job, plan.memory)
    parts = plan.job.engine_dp
    running = parts * (rank.kv_cache_bytes // max(1, rank.kv_bytes_per_token * batch.longest_sequence))
    lines.append(
        f"  the KV cache holds {max(running, 0)} of the longest responses at once (an engine has "
        f"{batch.rollouts_per_engine_max} in a step, and runs up to {parts * plan.job.config.rollout.max_num_seqs})"
    )
    return lines


def _peak_lines(plan: Plan) -> list[str]:
    if plan.job.config.placement.placed:
        return [
            f"  peak of ranks like {rank.rank}, with {', '.join(_list_roles(plan.job, rank.rank))}: "
            f"{rank.peak.total / GIB:.1f} ({rank.peak.name})"
            for rank in plan.memory
        ]
    peaks = [f"stage {_find_stage(plan.job, r.rank)}: {r.peak.total / GIB:.1f} ({r.peak.name})" for r in plan.memory]
    shown = peaks if len(peaks) <= 8 else [*peaks[:4], "...", *peaks[-2:]]
    return [f"  peak by pipeline stage: {', '.join(shown)}"] if len(peaks) > 1 else []


def _traffic_table(plan: Plan) -> list[str]:
    lines = ["bytes that one rank sends per step, in GB", f"  {'':18}{WITHIN:>14}{ACROSS:>14}"]
    for traffic in plan.traffic:
        cells = [traffic.bytes_per_rank / 1e9 if traffic.link == link else None for link in (WITHIN, ACROSS)]
        lines.append(f"  {traffic.kind:18}" + "".join(f"{c:14.3f}" if c is not None else f"{'-':>14}" for c in cells))
    within, across = plan.switch.summary.max_egress_within, plan.switch.summary.max_egress_across
    lines.append(f"  {'switch (busiest)':18}{within / 1e9:14.3f}{across / 1e9:14.3f}")
    return lines


def _time_table(plan: Plan) -> list[str]:
    lines = ["predicted seconds per step, not measured", f"  assumed: {plan.assumed.describe()}"]
    for name, seconds in plan.step.phases.items():
        lines.append(f"  {name:18}{seconds:14.2f}{seconds / plan.step.total:10.0%}")
    if plan.step.overlap:
        lines.append(f"  {'at the same time':18}{-plan.step.overlap:14.2f}")
    lines.append(f"  {'step':18}{plan.step.total:14.2f}")
    lines.append(
        f"  pipeline bubble {plan.step.bubble:.1%} of the working time; switch: {plan.switch.prediction.critical}"
    )
    return lines + _loss_lines(plan)


def describe_loss(plan: Plan) -> dict[str, float] | None:
    """Return what the loss of an engine outside the job costs; `None` with engines in the job."""
    job, assumed = plan.job, plan.assumed
    if not job.config.schedule.elastic:
        return None
    placed = place_engines(job, assumed.engine_gpus)
    tp = placed.engine_tp
    count = len(placed.rollout_ranks) // tp
    responses = min(job.config.rollout.max_num_seqs, -(-plan.work.num_rollouts // count))
    found = {
        "engines": count,
        "step": plan.step.total,
        "lost_responses": responses,
        "lost_tokens": responses * job.config.data.max_response_length,
        "bytes_to_join": tp * count_engine_bytes(placed),
    }
    if count > 1:
        fewer = predict_outside(job, plan.work, replace(assumed, engine_gpus=(count - 1) * tp))
        found["step_with_one_fewer"] = plan.step.total - plan.step.phases["rollout"] + fewer
    return found


def _loss_lines(plan: Plan) -> list[str]:
    loss = describe_loss(plan)
    if loss is None:
        return []
    fewer = f"{loss['step_with_one_fewer']:.2f} s with one fewer" if loss["engines"] > 1 else "none without it"
    return [
        f"  engines outside the job: {loss['engines']}, a step of {loss['step']:.2f} s, {fewer}; a loss repeats at "
        f"most {loss['lost_responses']} responses ({loss['lost_tokens']:,} tokens), and an engine that joins fetches "
        f"{loss['bytes_to_join'] / 1e9:.2f} GB"
    ]


def _candidate_table(plan: Plan, top: int) -> list[str]:
    if not plan.candidates:
        return ["no layout of this model fits this cluster"]
    lines = [f"layouts that fit: {len(plan.candidates)}; the fastest by this prediction"]
    lines.append(
        f"  {'tp':>3}{'pp':>4}{'vpp':>4}{'cp':>4}{'ep':>4}{'engine tp':>10}{'recompute':>11}{'offload':>9}"
        f"{'s/step':>9}{'peak GiB':>10}  fullest phase"
    )
    here = describe_choice(plan.job)
    shown = [(place, c) for place, c in enumerate(plan.candidates, start=1) if place <= top or c.choice == here]
    for place, candidate in shown:
        mark = f"  <- this recipe, number {place}" if candidate.choice == here else ""
        lines.append(_candidate_row(candidate) + mark)
    return lines


def _candidate_row(candidate: Candidate) -> str:
    x = candidate.choice
    return (
        f"  {x.tensor_model_parallel_size:>3}{x.pipeline_model_parallel_size:>4}"
        f"{candidate.job.layout.vpp_size:>4}{x.context_parallel_size:>4}"
        f"{x.expert_model_parallel_size:>4}{x.rollout_tensor_model_parallel_size:>10}"
        f"{x.recompute_granularity:>11}{'yes' if x.offload else 'no':>9}{candidate.seconds:>9.1f}"
        f"{candidate.worst_phase.total / GIB:>10.1f}  {candidate.worst_phase.name}"
    )


def save_plot(plan: Plan, path: Path) -> None:
    """Plot the fullest rank's memory by phase as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rank = max(plan.memory, key=lambda rank: rank.peak.total)
    kinds = list(dict.fromkeys(kind for phase in rank.phases for kind in phase.parts))
    figure, axes = pyplot.subplots(figsize=(9, 5))
    names: Sequence[str] = [phase.name for phase in rank.phases]
    bottoms = [0.0] * len(names)
    for index, kind in enumerate(kinds):
        heights = [phase.parts.get(kind, 0) / GIB for phase in rank.phases]
        axes.bar(names, heights, bottom=bottoms, label=kind, color=pyplot.cm.tab20(index % 20))
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    axes.axhline(plan.job.cluster.memory_bytes / GIB, color="black", linestyle="--", label="limit")
    axes.set_ylabel("GiB")
    axes.set_title(f"Memory of rank {rank.rank}: actor {plan.job.layout.describe()}, {plan.job.describe_engine()}")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.autofmt_xdate(rotation=20)
    figure.savefig(path, dpi=120, bbox_inches="tight")
    pyplot.close(figure)
