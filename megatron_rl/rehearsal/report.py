# SPDX-License-Identifier: Apache-2.0
"""What a rehearsal has found, beside what the planner says, and what is wrong with it.

The report of a rank is plain numbers, as JSON holds them: it comes from a process of its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.planning.cluster import GIB, Job
from megatron_rl.planning.communication import Workload, list_traffic
from megatron_rl.planning.memory import compute_memory

TOLERANCE = 0.05
SMALL = 1 << 20  # bytes of a step that nobody plans: sums of metrics, norms
# Phases of a rehearsal by the planner's name of them; the reference scores in the same phase as the actor.
PHASES = {
    "log-probs": ("log-probs", "reference"),
    "values": ("values",),
    "rewards": ("rewards",),
    "actor update": ("actor update",),
    "critic update": ("critic update",),
}
_AXES = {"tp": "TP", "cp": "CP", "pp": "PP", "dp": "DP", "dp_cp": "DP", "ep": "EP", "tp_ep": "EP", "expt_dp": "DP"}
# The one wait of an update, and what an eager step waits for besides, per microbatch.
_ONE_WAIT = "megatron_rl/training/update.py"
_WAITS_OF_EAGER = ("megatron_rl/training/heads.py", "megatron/core/transformer/moe/")


def list_rank_classes(job: Job) -> list[int]:
    """Ranks that differ: one per combination of the roles' stages, and the last, which has other shards."""
    return sorted({rank.rank for rank in compute_memory(job)} | {job.cluster.world_size - 1})


def compare_rank(job: Job, rank: int, phases: Mapping[str, Any], rows: Mapping[str, float]) -> dict[str, Any]:
    """Planned and rehearsed numbers of one rank.

    Args:
        job: without a reserve, which nobody rehearses.
        rank: of it.
        phases: `Phase`s by name, as dictionaries.
        rows: tokens that one rank of a role has computed in a step, by role.
    """
    planned = {phase.name: phase for phase in _plan_of(job, rank)}
    memory = []
    for name, members in PHASES.items():
        found = [phases[member]["peak"] for member in members if member in phases]
        if found and name in planned:
            memory.append(
                {"phase": name, "planned": planned[name].total, "rehearsed": max(found), "parts": planned[name].parts}
            )
    traffic = [*_compare_traffic(job, rank, phases, rows)]
    return {"rank": rank, "memory": memory, "traffic": traffic, "phases": dict(phases), "rows": dict(rows)}


def _plan_of(job: Job, rank: int) -> Any:
    """The phases of the rank that stands for this one: the one before it with a plan of its own."""
    known = [memory for memory in compute_memory(job) if memory.rank <= rank]
    return known[-1].phases


def _compare_traffic(
    job: Job, rank: int, phases: Mapping[str, Any], rows: Mapping[str, float]
) -> Iterator[dict[str, Any]]:
    scoring = {"actor": "log-probs", "critic": "values", "reward_model": "rewards", "reference": "reference"}
    for role in job.spec.laid_out:
        if role.name not in rows or role.name not in scoring:  # teachers are built, and not asked
            continue
        layout, passes = job.layout_of(role), job.scoring_passes.get(role.name, 1)
        work = Workload(layout.dp_size, 0.0, rows[role.name], 1, 1)
        planned: dict[str, float] = defaultdict(float)
        for traffic in list_traffic(job, work):
            if traffic.role == role.name:
                planned[traffic.kind.rpartition(" ")[2]] += traffic.bytes_per_rank
        planned["PP"] *= _find_share_of_ends(layout, layout.coordinates(rank).pp, passes, role.trainable)
        sent: dict[str, float] = defaultdict(float)
        for name, times in ((scoring[role.name], passes), (f"{role.name} update", 1)):
            for call in phases.get(name, {}).get("traffic", ()):
                axis = _AXES.get(call["group"], "other")
                if axis == "DP" and call["operation"].startswith("alltoall"):
                    axis = "EP"  # the same ranks
                sent[axis] += times * call["sent"]
        for axis in sorted({*planned, *sent}):
            yield {"role": role.name, "axis": axis, "planned": planned[axis], "rehearsed": sent[axis]}


def _find_share_of_ends(layout: ParallelLayout, stage: int, passes: int, trainings: int) -> float:
    """Of what a stage between two others sends: the first sends nothing back, the last nothing forward."""
    forward, back = passes + trainings, trainings
    if layout.pp_size == 1 or layout.vpp_size > 1:
        return 1.0
    return (forward * (stage < layout.pp_size - 1) + back * (stage > 0)) / (forward + back)


def find_problems(rank: Mapping[str, Any], step_modes: Mapping[str, str]) -> Iterator[str]:
    """What is wrong with a rank's rehearsal, one sentence each.

    Args:
        rank: its report.
        step_modes: of the roles that are trained.
    """
    where = f"rank {rank['rank']}"
    for row in rank["memory"]:
        if _differs(row["planned"], row["rehearsed"]):
            found, planned = row["rehearsed"] / GIB, row["planned"] / GIB
            yield f"{where}, {row['phase']}: {found:.2f} GiB rehearsed, {planned:.2f} planned"
    for row in rank["traffic"]:
        if max(row["planned"], row["rehearsed"]) > SMALL and _differs(row["planned"], row["rehearsed"]):
            yield (
                f"{where}, {row['role']} {row['axis']}: {row['rehearsed'] / GIB:.3f} GiB sent, "
                f"{row['planned'] / GIB:.3f} planned"
            )
    for name, phase in rank["phases"].items():
        for line in phase["host_collectives"]:
            yield f"{where}, {name}: a collective of a tensor on the host at {line}"
        for line in phase["mixes"]:
            yield f"{where}, {name}: an operation on tensors of the host and of the device at {line}"
        if name.endswith(" update"):
            yield from _find_waits(f"{where}, {name}", phase["syncs"], step_modes[name.split()[-2]])
    yield from _find_leak(rank)


def _find_waits(where: str, syncs: Mapping[str, int], step_mode: str) -> Iterator[str]:
    for line, count in syncs.items():
        if line.startswith(_ONE_WAIT):
            if count > 1:
                yield f"{where}: the host waits {count} times for the device at {line}"
        elif step_mode != "eager" or not line.startswith(_WAITS_OF_EAGER):
            yield f"{where}: the host waits for the device at {line}"
    if sum(line.startswith(_ONE_WAIT) for line in syncs) > 1:
        yield f"{where}: the host waits for the device at several lines of {_ONE_WAIT}"


def _find_leak(rank: Mapping[str, Any]) -> Iterator[str]:
    """Two steps end with the same memory."""
    *_, last = rank["phases"]
    grown = rank["phases"][last]["live"] - rank["phases"].get(f"first {last}", rank["phases"][last])["live"]
    if grown > 0:
        mib = grown / (1 << 20)
        yield f"rank {rank['rank']}: {mib:.1f} MiB more are held after the second {last} than after the first"


def _differs(planned: float, found: float) -> bool:
    return abs(planned - found) > TOLERANCE * max(planned, found)


def format_ranks(ranks: Sequence[Mapping[str, Any]]) -> str:
    """Tables of all ranks: memory by phase with what makes the peak, and bytes by axis."""
    lines = []
    for rank in ranks:
        lines.append(f"rank {rank['rank']} ({rank['seconds']:.0f} s)")
        lines.append(f"  {'phase':<16}{'planned GiB':>12}{'rehearsed':>12}{'off':>8}  the peak")
        for row in rank["memory"]:
            members = [rank["phases"][name] for name in PHASES[row["phase"]] if name in rank["phases"]]
            lines_at_peak = max(members, key=lambda phase: phase["peak"])["at_peak"][:3]
            makers = ", ".join(f"{line} {size / GIB:.2f}" for line, size in lines_at_peak)
            lines.append(
                f"  {row['phase']:<16}{row['planned'] / GIB:>12.2f}{row['rehearsed'] / GIB:>12.2f}"
                f"{row['rehearsed'] / row['planned'] - 1:>8.1%}  {makers}"
            )
        lines.append(f"  {'sent by a rank':<16}{'planned GiB':>12}{'rehearsed':>12}")
        for row in rank["traffic"]:
            if max(row["planned"], row["rehearsed"]) > SMALL:
                label = f"{row['role']} {row['axis']}"
                lines.append(f"  {label:<16}{row['planned'] / GIB:>12.3f}{row['rehearsed'] / GIB:>12.3f}")
        for name, phase in rank["phases"].items():
            waits = ", ".join(f"{line} x{count}" for line, count in phase["syncs"].items()) or "none"
            lines.append(f"  {name}: {phase['operations']} operations, {phase['seconds']:.1f} s; waits: {waits}")
    return "\n".join(lines)
