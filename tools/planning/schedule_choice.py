# SPDX-License-Identifier: Apache-2.0
"""Choice of a schedule and of the ranks for engines: options are simulated, one is recommended.

Costs of training and weight transfer come from `communication.py` and `switch.py`. A decoding pass reads the weights
and the KV cache; operations and messages add without overlap, the host's work overlaps if vLLM plans passes early. On
own ranks, roles keep their layouts with fewer replicas. For a job with a placement, only staleness varies.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from megatron_rl.planning.admission import check_job, find_problem
from megatron_rl.planning.cluster import Job
from megatron_rl.planning.memory import ENGINE_PHASES, RankMemory, compute_memory, find_smallest_cache
from megatron_rl.planning.parameters import count_engine_bytes
from megatron_rl.planning.throughput import count_operations
from megatron_rl.types import UserError
from tools.planning.communication import (
    Assumptions,
    build_workload,
    count_exchanged,
    count_reduced,
    list_traffic,
    place_engines,
    plans_passes_early,
    predict_step,
)
from tools.planning.engine_clock import EngineModel, StepCost
from tools.planning.lengths import LengthModel
from tools.planning.schedules import Costs, Schedule, ScheduleTimes, simulate
from tools.planning.switch import plan_switch

OWN_UTILIZATION = 0.9
_MAX_STALENESS = 2
_WORTH_IT = 1.1  # smaller ratios are within the prediction's error
_SHOWN_SHARES = 3
_SIMULATED_RESPONSES = 60_000
_CORRECTION = "algorithm.importance_sampling=token-truncate"


@dataclass(frozen=True)
class Option:
    """One way to run the job.

    Attributes:
        engine_gpus: GPUs that generate.
        overrides: command-line changes.
        times: simulated.
    """

    name: str
    schedule: Schedule
    engine_gpus: int
    overrides: list[str]
    times: ScheduleTimes


@dataclass(frozen=True)
class ScheduleChoice:
    """All options and the recommended one.

    Attributes:
        options: synchronous ones first.
        lengths: description of the lengths.
        pass_cost: of a colocated engine.
    """

    options: list[Option]
    recommended: Option
    lengths: str
    pass_cost: StepCost


def choose_schedule(job: Job, switch_seconds: float, lengths: LengthModel, assumed: Assumptions) -> ScheduleChoice:
    """Simulate the schedules of a job that fits.

    Args:
        switch_seconds: of the job's reshard plan.
        assumed: its `mean_response` is not used.
    """
    if job.config.schedule.elastic:
        job = place_engines(job, assumed.engine_gpus)
    data, config = job.config.data, job.config
    assumed = replace(assumed, mean_response=lengths.mean(data.max_response_length) / data.max_response_length)
    steps = max(9, min(45, _SIMULATED_RESPONSES // (data.train_batch_size * config.rollout.n)))
    here = _describe_costs(job, compute_memory(job), switch_seconds, assumed)
    own_ranks = not {*job.rollout_ranks} & {*job.ranks_of("actor")}

    def run(name: str, schedule: Schedule, costs: Costs, engine_gpus: int, overrides: list[str]) -> Option:
        times = simulate(schedule, costs, lengths, steps=steps, skip=steps // 3)
        return Option(name, schedule, engine_gpus, overrides, times)

    world, engine_gpus = job.cluster.world_size, len(job.rollout_ranks)
    groups = Schedule(dispatch="groups", own_ranks=own_ranks)
    spread = replace(groups, dispatch="samples")
    options = [
        run("synchronous, whole groups", groups, here, engine_gpus, ["rollout.dispatch=groups"]),
        run("synchronous, samples spread", spread, here, engine_gpus, ["rollout.dispatch=samples"]),
    ]
    ages = range(1, _MAX_STALENESS + 1)
    for k in ages:
        name = f"{'placed as it is' if own_ranks else 'partial rollouts'}, max_staleness {k}"
        options.append(run(name, Schedule(k, own_ranks=own_ranks), here, engine_gpus, _schedule_overrides(job, k)))
    apart = [] if job.config.placement.placed or job.config.teachers else list(_list_shares(job, assumed))
    for k in ages:
        found = [
            run(
                f"own ranks {engines} + {world - engines}, max_staleness {k}",
                Schedule(k, own_ranks=True),
                costs,
                engines,
                _schedule_overrides(job, k) + _placement_overrides(job, engines),
            )
            for engines, costs in apart
        ]
        options += sorted(found, key=lambda option: option.times.seconds)[:_SHOWN_SHARES]
    recommended = recommend(options)
    return ScheduleChoice(options, recommended, lengths.describe(data.max_response_length), here.engine.cost)


def recommend(options: list[Option]) -> Option:
    """Among options within a tenth of the fastest, return the least stale one, preferably colocated."""
    fastest = min(option.times.seconds for option in options)
    near = [option for option in options if option.times.seconds <= _WORTH_IT * fastest]
    return min(near, key=lambda o: (o.schedule.max_staleness, o.schedule.own_ranks, o.times.seconds))


def _describe_costs(job: Job, memory: list[RankMemory], switch_seconds: float, assumed: Assumptions) -> Costs:
    data, group_size, num_engines = job.config.data, job.config.rollout.n, check_job(job).num_engines * job.engine_dp
    smallest = find_smallest_cache(job, memory)
    prompt_tokens, work = int(data.max_prompt_length * assumed.mean_prompt), build_workload(job, assumed)
    step = predict_step(job, work, list_traffic(job, work), memory, 0.0, assumed)
    training = step.total - sum(seconds for name, seconds in step.phases.items() if name in ENGINE_PHASES)
    running = min(-(-work.num_rollouts // num_engines), job.config.rollout.max_num_seqs)
    return Costs(
        EngineModel(
            _describe_pass(job, smallest.kv_bytes_per_token, running, assumed),
            job.config.rollout.max_num_seqs,
            smallest.kv_cache_bytes // max(1, smallest.kv_bytes_per_token),
        ),
        num_engines,
        data.train_batch_size,
        group_size,
        prompt_tokens,
        data.max_response_length,
        lambda tokens: training * (tokens + work.num_rollouts * prompt_tokens) / work.tokens,
        switch_seconds,
    )


def _describe_pass(job: Job, kv_bytes_per_token: int, running: int, assumed: Assumptions) -> StepCost:
    """Return the cost of a decoding pass; `running` determines how many experts are read."""
    shape, cluster, tp, data = job.shape, job.cluster, job.engine_tp, job.config.data
    weights = float(count_engine_bytes(job))
    if shape.num_experts:
        weights *= min(1.0, (running * job.engine_dp * shape.experts_per_token + 1) / shape.num_experts)
    bandwidth = cluster.memory_bandwidth * assumed.bandwidth_efficiency
    sent = 0.0
    for size, sizes in ((tp, count_reduced(job)), (job.engine_width, count_exchanged(job))):
        link = cluster.within_node if size <= cluster.gpus_per_node else cluster.across_nodes
        sent += sizes / (link * assumed.link_efficiency)

    def compute(length: float) -> float:
        return count_operations(shape, length) / tp / (cluster.flops * assumed.mfu) + sent

    cost = StepCost(
        weights / bandwidth,
        compute(0),
        compute(data.max_prompt_length * assumed.mean_prompt),
        kv_bytes_per_token / bandwidth,
        assumed.decode_overhead,
        assumed.request_overhead,
    )
    if plans_passes_early(job):
        return cost
    fixed, per_request = cost.fixed + cost.host_fixed, cost.per_request + cost.host_per_request
    return replace(cost, fixed=fixed, per_request=per_request, host_fixed=0.0, host_per_request=0.0)


def _list_shares(job: Job, assumed: Assumptions) -> Iterator[tuple[int, Costs]]:
    """Yield numbers of GPUs for engines with the resulting costs; whole nodes on several nodes."""
    cluster = job.cluster
    unit = cluster.gpus_per_node if cluster.nodes > 1 else 1
    units = cluster.world_size // unit
    for trainers in sorted({max(1, round(units * eighths / 8)) for eighths in range(1, 8)} - {units}):
        first, last = trainers * unit, cluster.world_size - 1
        ranks = dict.fromkeys(_list_placed(job), f"0-{first - 1}") | {"rollout": f"{first}-{last}"}
        placed = job.with_config(placement=ranks, rollout={"gpu_memory_utilization": OWN_UTILIZATION})
        try:
            check_job(placed)
            memory = compute_memory(placed)
        except UserError:
            continue
        if find_problem(placed, memory) is None:
            seconds = plan_switch(placed).prediction.seconds
            yield cluster.world_size - first, _describe_costs(placed, memory, seconds, assumed)


def _list_placed(job: Job) -> list[str]:
    """Return the settings of `placement` for the roles of a job; reward models share one."""
    return list(dict.fromkeys(name.partition(".")[0] for name in job.spec.roles))


def _schedule_overrides(job: Job, k: int) -> list[str]:
    corrected = [] if job.config.algorithm.importance_sampling != "none" else [_CORRECTION]
    return [f"schedule.max_staleness={k}", "schedule.updates=in_flight", *corrected]


def _placement_overrides(job: Job, engine_gpus: int) -> list[str]:
    world = job.cluster.world_size
    first = world - engine_gpus
    trained = [f"placement.{name}=0-{first - 1}" for name in _list_placed(job)]
    return [*trained, f"placement.rollout={first}-{world - 1}", f"rollout.gpu_memory_utilization={OWN_UTILIZATION}"]


def schedules_to_dict(choice: ScheduleChoice) -> dict[str, Any]:
    """Convert for JSON."""
    return {
        "lengths": choice.lengths,
        "pass_seconds": asdict(choice.pass_cost),
        "options": [
            {"name": option.name, "engine_gpus": option.engine_gpus, "overrides": option.overrides}
            | asdict(option.schedule)
            | asdict(option.times)
            for option in choice.options
        ],
        "recommended": choice.recommended.name,
    }


def format_schedules(choice: ScheduleChoice) -> str:
    """Format a table."""
    cost, best, slowest = choice.pass_cost, choice.recommended, choice.options[0].times.seconds
    lines = [
        f"schedules, simulated; responses: {choice.lengths}",
        f"  a decoding pass takes {cost.fixed * 1e3:.1f} ms, {cost.per_request * 1e6:.0f} us per response and "
        f"{cost.per_context_token * 1e9:.0f} ns per token in the KV cache"
        + (
            f", and the host in it {cost.host_fixed * 1e3:.1f} ms and {cost.host_per_request * 1e6:.0f} us per response"
            if cost.host_fixed
            else ""
        ),
        f"  {'':42}{'s/step':>9}{'faster':>8}{'engines idle':>14}{'training idle':>15}{'staleness':>11}{'at most':>9}",
    ]
    for option in choice.options:
        times = option.times
        waits = "-" if times.trainer_idle is None else f"{times.trainer_idle:.0%}"
        lines.append(
            f"  {option.name:42}{times.seconds:9.1f}{slowest / times.seconds:8.2f}{times.engine_idle:14.0%}{waits:>15}"
            f"{times.staleness_mean:11.2f}{times.staleness_max:9}" + ("  <- recommended" if option is best else "")
        )
    lines.append(f"  to choose it: {' '.join(best.overrides)}")
    return "\n".join(lines)
