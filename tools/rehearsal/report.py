# SPDX-License-Identifier: Apache-2.0
"""Comparison of a rehearsal with the planner, and its problems.

A rank's report is plain numbers for JSON, since it comes from another process.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_rl.config.run_spec import RoleSpec
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.planning.cluster import GIB, Job
from megatron_rl.planning.memory import RankMemory, compute_memory
from tools.planning.communication import Workload, count_scoring_passes, list_traffic

TOLERANCE = 0.05
SMALL = 1 << 20  # bytes per step that are not planned: metric sums, norms
# Phases with intended host collectives: digests and names, over gloo.
_OF_HOSTS = ("engine", "switch", "first switch")
# Phases without a plan, whose peak must stay below the highest planned one.
_UNPLANNED = ("engine", "release", "restore", "save")
_AXES = {"tp": "TP", "cp": "CP", "pp": "PP", "dp": "DP", "dp_cp": "DP", "ep": "EP", "tp_ep": "EP", "expt_dp": "DP"}
_AXES |= {"embd": "embedding", "intra_dp_cp": "DP", "intra_expt_dp": "DP", "replicas": "replicas"}
# Allowed waits: one per update, one for its routers; per microbatch in an eager step, the second list.
_ONE_WAIT = ("megatron_rl/training/optimizer.py", "megatron_rl/training/router_replay.py")
_WAITS_OF_EAGER = (
    "megatron_rl/training/packed_model.py",
    "megatron/core/transformer/moe/",
    "megatron_rl/models/experts.py",  # experts multiplied one by one
    "megatron/core/pipeline_parallel/p2p_communication.py",  # shapes before messages, in an interleaved pipeline
)


def name_scoring(role: RoleSpec) -> str:
    """Return the phase in which a role scores."""
    return {"actor": "log-probs", "critic": "values", "reward_model": "rewards"}.get(role.name, role.title)


def list_rank_classes(job: Job) -> list[int]:
    """List ranks that differ: one per combination of the roles' stages, and the last, with other shards."""
    return sorted({rank.rank for rank in compute_memory(job)} | {job.cluster.world_size - 1})


@dataclass(frozen=True)
class Found:
    """Results of a rank's rehearsal.

    Attributes:
        phases: `Phase`s as dictionaries.
        rows: tokens per step, by role.
        host: page-locked bytes.
    """

    phases: Mapping[str, Any]
    rows: Mapping[str, float]
    host: int


def compare_rank(job: Job, rank: int, found: Found) -> dict[str, Any]:
    """Compare planned and rehearsed numbers of a rank.

    Args:
        job: without a memory reserve, which is not rehearsed.
    """
    plan, phases = _plan_of(job, rank), found.phases
    memory = []
    for phase in plan.phases:
        name = phase.name
        names = ("log-probs", "reference") if name == "log-probs" else (name,)
        members = [member for member in names if member in phases]
        if members:
            highest = max(members, key=lambda member: phases[member]["peak"])
            rehearsed = {"rehearsed": phases[highest]["peak"], "at_peak": phases[highest]["at_peak"]}
            memory.append({"phase": name, "planned": phase.total, "parts": phase.parts} | rehearsed)
    return {
        "rank": rank,
        "memory": memory,
        "most_planned": max(phase.total for phase in plan.phases),
        "host": {"planned": plan.host_bytes, "rehearsed": found.host},
        "traffic": [*_compare_traffic(job, rank, found)],
        "phases": dict(phases),
        "rows": dict(found.rows),
    }


def _plan_of(job: Job, rank: int) -> RankMemory:
    """Return the plan of the rank's class."""
    return [memory for memory in compute_memory(job) if memory.rank <= rank][-1]


def _compare_traffic(job: Job, rank: int, found: Found) -> Iterator[dict[str, Any]]:
    phases, rows = found.phases, found.rows
    for role in job.spec.laid_out:
        if role.name not in rows:
            continue
        layout, passes = job.layout_of(role), count_scoring_passes(job).get(role.name, 1)
        work = Workload(layout.dp_size, 0.0, rows[role.name], 1, 1)
        planned: dict[str, float] = defaultdict(float)
        stage = layout.coordinates(rank).pp
        for traffic in list_traffic(job, work, stage):
            if traffic.role == role.name:
                planned[traffic.kind.rpartition(" ")[2]] += traffic.bytes_per_rank
        planned["PP"] *= _find_share_of_ends(layout, stage, passes, role.trainable)
        if 0 < stage < layout.pp_size - 1:
            planned["embedding"] = 0.0
        sent: dict[str, float] = defaultdict(float)
        for name, times in ((name_scoring(role), passes), (f"{role.name} update", 1)):
            for call in phases.get(name, {}).get("traffic", ()):
                axis = _AXES.get(call["group"], "other")
                if call["operation"] in ("send", "recv"):  # one direction uses the group of all ranks
                    axis = "PP"
                if axis == "DP" and call["operation"].startswith("alltoall"):
                    axis = "EP"  # the same ranks
                if axis == "CP" and layout.dp_size == 1 and not call["operation"].startswith("alltoall"):
                    axis = "DP"  # the same ranks
                if axis == "PP" and call["operation"] == "allreduce":
                    axis = "embedding"  # the same ranks
                sent[axis] += times * call["sent"]
        for axis in sorted({*planned, *sent}):
            yield {"role": role.name, "axis": axis, "planned": planned[axis], "rehearsed": sent[axis]}


def _find_share_of_ends(layout: ParallelLayout, stage: int, passes: int, trainings: int) -> float:
    """Return a stage's traffic relative to an inner stage's: the ends send a chunk less in one direction."""
    forward, back, chunks = passes + trainings, trainings, layout.vpp_size
    if layout.pp_size == 1:
        return 1.0
    sent = forward * (chunks - (stage == layout.pp_size - 1)) + back * (chunks - (stage == 0))
    return sent / (chunks * (forward + back))


def find_problems(rank: Mapping[str, Any], step_modes: Mapping[str, str]) -> Iterator[str]:
    """Yield a sentence per problem of a rank.

    Args:
        rank: its report.
        step_modes: by trained role.
    """
    where = f"rank {rank['rank']}"
    for row in rank["memory"]:
        if _differs(row["planned"], row["rehearsed"]):
            found, planned = row["rehearsed"] / GIB, row["planned"] / GIB
            yield f"{where}, {row['phase']}: {found:.2f} GiB rehearsed, {planned:.2f} planned"
    host = rank["host"]
    if max(host.values()) > SMALL and _differs(host["planned"], host["rehearsed"]):
        found, planned = host["rehearsed"] / GIB, host["planned"] / GIB
        yield f"{where}: {found:.2f} GiB of page-locked memory rehearsed, {planned:.2f} planned"
    for row in rank["traffic"]:
        if max(row["planned"], row["rehearsed"]) > SMALL and _differs(row["planned"], row["rehearsed"]):
            yield (
                f"{where}, {row['role']} {row['axis']}: {row['rehearsed'] / GIB:.3f} GiB sent, "
                f"{row['planned'] / GIB:.3f} planned"
            )
    for name, phase in rank["phases"].items():
        for line in phase["host_collectives"] if name not in _OF_HOSTS else ():
            yield f"{where}, {name}: a collective of a tensor on the host at {line}"
        for line in phase["mixes"]:
            yield f"{where}, {name}: an operation on tensors of the host and of the device at {line}"
        if name.endswith(" update"):
            yield from _find_waits(f"{where}, {name}", phase["syncs"], step_modes[name.split()[-2]])
    most = rank["most_planned"]
    for name in _UNPLANNED:
        if name in rank["phases"] and rank["phases"][name]["peak"] > (1 + TOLERANCE) * most:
            found = rank["phases"][name]["peak"] / GIB
            yield f"{where}, {name}: {found:.2f} GiB rehearsed, more than the {most / GIB:.2f} of any planned phase"
    yield from _find_leak(rank)


def _find_waits(where: str, syncs: Mapping[str, int], step_mode: str) -> Iterator[str]:
    for file in _ONE_WAIT:
        lines = {line: count for line, count in syncs.items() if line.startswith(file)}
        if sum(lines.values()) > 1:
            yield f"{where}: the host waits {sum(lines.values())} times for the device at {', '.join(lines)}"
    for line in syncs:
        is_one = line.startswith(_ONE_WAIT)
        if not is_one and (step_mode != "eager" or not line.startswith(_WAITS_OF_EAGER)):
            yield f"{where}: the host waits for the device at {line}"


def _find_leak(rank: Mapping[str, Any]) -> Iterator[str]:
    """Check that both steps end with the same memory."""
    last = [name for name in rank["phases"] if name.endswith(" update")][-1]
    phases = rank["phases"]
    now, before = phases[last], phases.get(f"first {last}", phases[last])
    grown = now["live"] - before["live"]
    if grown > 0:
        size = f"{grown / (1 << 20):.1f} MiB ({grown / now['live']:.1%})"
        more = {line: held - before["held"].get(line, 0) for line, held in now["held"].items()}
        lines = ", ".join(sorted((line for line in more if more[line] > 0), key=lambda line: -more[line])[:3])
        yield f"rank {rank['rank']}: {size} more are held after the second {last} than after the first, made at {lines}"


def _differs(planned: float, found: float) -> bool:
    return abs(planned - found) > TOLERANCE * max(planned, found)


def format_ranks(ranks: Sequence[Mapping[str, Any]]) -> str:
    """Format memory by phase with the lines of the peak, and bytes by axis."""
    lines = []
    for rank in ranks:
        lines.append(f"rank {rank['rank']} ({rank['seconds']:.0f} s)")
        lines.append(f"  {'phase':<16}{'planned GiB':>12}{'rehearsed':>12}{'off':>8}  the peak")
        for row in rank["memory"]:
            makers = ", ".join(f"{line} {size / GIB:.2f}" for line, size in row["at_peak"][:3])
            lines.append(
                f"  {row['phase']:<16}{row['planned'] / GIB:>12.2f}{row['rehearsed'] / GIB:>12.2f}"
                f"{row['rehearsed'] / row['planned'] - 1:>8.1%}  {makers}"
            )
        host = rank["host"]
        if max(host.values()) > SMALL:
            lines.append(f"  {'on the host':<16}{host['planned'] / GIB:>12.2f}{host['rehearsed'] / GIB:>12.2f}")
        lines.append(f"  {'sent by a rank':<16}{'planned GiB':>12}{'rehearsed':>12}")
        for row in rank["traffic"]:
            if max(row["planned"], row["rehearsed"]) > SMALL:
                label = f"{row['role']} {row['axis']}"
                lines.append(f"  {label:<16}{row['planned'] / GIB:>12.3f}{row['rehearsed'] / GIB:>12.3f}")
        for name, phase in rank["phases"].items():
            waits = ", ".join(f"{line} x{count}" for line, count in phase["syncs"].items()) or "none"
            copied = ", ".join(f"{size / GIB:.2f} GiB {way}" for way, size in phase["copied"].items()) or "none"
            lines.append(
                f"  {name}: peak {phase['peak'] / GIB:.2f} GiB, {phase['operations']} operations, "
                f"{phase['seconds']:.1f} s; copies: {copied}; waits: {waits}"
            )
    return "\n".join(lines)
