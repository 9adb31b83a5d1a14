# SPDX-License-Identifier: Apache-2.0
"""Admission check that refuses a job that cannot fit, and finds the nearest layout that fits."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from itertools import product
from pathlib import Path
from typing import Any

from megatron_rl.config.batch_plan import BatchPlan, divisors
from megatron_rl.config.checks import check_config
from megatron_rl.config.fields import render
from megatron_rl.config.run_spec import RoleSpec, RunSpec
from megatron_rl.config.schema import STAGE_SETTINGS, LayoutConfig, RunConfig
from megatron_rl.planning.cluster import GIB, Cluster, Job, build_job
from megatron_rl.planning.memory import MemoryPhase, RankMemory, compute_memory, find_smallest_cache
from megatron_rl.planning.role_layouts import build_layout, check_layout
from megatron_rl.types import UserError
from megatron_rl.weights.families import Head, ModelShape
from megatron_rl.weights.megatron_layout import divide_layers
from megatron_rl.weights.model_config import model_shape_from_config, read_json
from megatron_rl.weights.support import check_rollout_layout


@dataclass(frozen=True)
class Choice:
    """Settings that the search for a layout varies, by config name; `offload` stands for all offload settings."""

    tensor_model_parallel_size: int
    pipeline_model_parallel_size: int
    context_parallel_size: int
    expert_model_parallel_size: int
    sequence_parallel: bool
    recompute_granularity: str
    offload: bool
    rollout_tensor_model_parallel_size: int
    virtual_pipeline_model_parallel_size: int | None
    num_layers_in_first_pipeline_stage: int | None
    num_layers_in_last_pipeline_stage: int | None
    pipeline_model_parallel_layout: str | None

    def overrides(self, job: Job) -> list[str]:
        """Return the command-line overrides that change the job into this choice."""
        texts = [
            f"{role.section}.{name}={render(value)}"
            for role in job.spec.laid_out_alike
            for name, value in self.settings_of(role, job).items()
            if getattr(role.settings, name) != value
        ]
        if self.offload:
            texts += [f"{setting}=true" for setting in _offload_settings(job) if not _is_set(job, setting)]
        engine_tp = self.rollout_tensor_model_parallel_size
        changed = engine_tp != job.config.rollout.tensor_model_parallel_size
        return texts + [f"rollout.tensor_model_parallel_size={engine_tp}"] * changed

    def settings_of(self, role: RoleSpec, job: Job) -> dict[str, Any]:
        """Return a role's settings by leaf; a string gives roles besides the actor the division that it has."""
        own = {item.name for item in fields(role.settings)}
        found = {name: value for name, value in asdict(self).items() if name in own}
        if role.name == "actor":
            return found
        stages = {name: found.pop(name) for name in STAGE_SETTINGS[:-1]}
        if found[STAGE_SETTINGS[-1]] is None and any(stages.values()):
            from megatron_rl.weights.pipeline_stages import write_stages

            size = self.pipeline_model_parallel_size
            layout = build_layout(LayoutConfig(pipeline_model_parallel_size=size, **stages), size)
            found[STAGE_SETTINGS[-1]] = write_stages(divide_layers(job.shape_of(role).num_layers, layout))
        return found


@dataclass(frozen=True)
class Candidate:
    """A layout with the phase with the most memory and its predicted seconds per step, 0 without a prediction."""

    choice: Choice
    job: Job
    worst_phase: MemoryPhase
    seconds: float

    @property
    def headroom(self) -> int:
        """Bytes left in the fullest phase; negative if it does not fit."""
        return self.job.cluster.memory_bytes - self.worst_phase.total


def describe_choice(job: Job) -> Choice:
    """Return the layout of a job as a choice."""
    actor, rollout = job.config.actor, job.config.rollout
    settings = {item.name: getattr(actor, item.name) for item in fields(Choice) if hasattr(actor, item.name)}
    offload = all(bool(_is_set(job, setting)) for setting in _offload_settings(job))
    return Choice(**settings, offload=offload, rollout_tensor_model_parallel_size=rollout.tensor_model_parallel_size)


def check_job(job: Job) -> BatchPlan:
    """Check the config, batch plan and models of a run; raise UserError for a mistake."""
    check_config(job.config)
    plan = BatchPlan.build(job.config, job.cluster.world_size, job.spec)
    for role in job.spec.laid_out:
        check_layout(role, job.shape_of(role), job.ranks_of(role.name))
    check_rollout_layout(job.shape, job.engine_tp, job.engine_ep)
    return plan


@dataclass(frozen=True)
class Problem:
    """Reason why a job does not fit; `found` is a sentence with the numbers, `excess` the missing bytes."""

    found: str
    rank: int
    phase: str
    excess: int


def find_problem(job: Job, memory: list[RankMemory]) -> Problem | None:
    """Return the first lack of memory: in a phase, for the KV cache of one response, or on the host; else `None`."""
    rank, limit = max(memory, key=lambda rank: rank.peak.total), job.cluster.memory_bytes
    peak, layout = rank.peak, job.layout
    where = f" (pipeline stage {layout.coordinates(rank.rank).pp})" if rank.rank in layout.ranks else ""
    if peak.total > limit:
        excess = peak.total - limit
        return Problem(
            f'phase "{peak.name}" takes {peak.total / GIB:.1f} GiB of {limit / GIB:.1f} GiB on rank '
            f"{rank.rank}{where}: {excess / GIB:.1f} GiB too many",
            rank.rank,
            peak.name,
            excess,
        )
    longest = job.config.data.max_prompt_length + job.config.data.max_response_length
    rank = find_smallest_cache(job, memory)
    needed = 0 if job.config.schedule.elastic else rank.kv_bytes_per_token * longest  # it is in other processes
    if rank.kv_cache_bytes < needed:
        missing = needed - rank.kv_cache_bytes
        return Problem(
            f'phase "rollout" leaves {rank.kv_cache_bytes / GIB:.2f} GiB for the KV cache on rank {rank.rank}, and one '
            f"response of {longest} tokens takes {needed / GIB:.2f} GiB: {missing / GIB:.2f} GiB too few",
            rank.rank,
            "rollout",
            missing,
        )
    rank, room = max(memory, key=lambda rank: rank.host_bytes), job.cluster.host_memory_bytes
    offloaded = rank.host_bytes * job.cluster.gpus_per_node
    if room is not None and offloaded > room:
        return Problem(
            f"what {job.cluster.gpus_per_node} ranks of a node offload takes {offloaded / GIB:.1f} GiB of the host's "
            f"memory, which is {room / GIB:.1f} GiB: {(offloaded - room) / GIB:.1f} GiB too many",
            rank.rank,
            "offload",
            offloaded - room,
        )
    return None


Predict = Callable[[Job, list[RankMemory]], float]  # seconds of a step; see `tools/planning/communication.py`


def judge(job: Job, predict: Predict | None = None) -> Candidate | None:
    """Predict the peak memory and time of a step; `None` for an invalid config or too little memory."""
    try:
        check_job(job)
        memory = compute_memory(job, ends_only=True)
    except UserError:
        return None
    if find_problem(job, memory):
        return None
    rank = max(memory, key=lambda rank: rank.peak.total)
    return Candidate(describe_choice(job), job, rank.peak, predict(job, memory) if predict else 0.0)


def list_candidates(job: Job, predict: Predict | None = None) -> list[Candidate]:
    """Return all layouts that fit, fastest first; without a prediction, those with the most headroom first."""
    found = (judge(_apply(job, choice), predict) for choice in _list_choices(job))
    return sorted((c for c in found if c is not None), key=lambda c: (c.seconds, -c.headroom))


def find_nearest(job: Job, candidates: list[Candidate]) -> Candidate | None:
    """Return the candidate with the fewest changes; a doubling of a size or a switch counts one."""
    here = describe_choice(job)
    return min(candidates, key=lambda c: _distance(here, c.choice), default=None)


def _distance(a: Choice, b: Choice) -> float:
    sizes = [name for name in asdict(a) if name.endswith("parallel_size") and not name.startswith("virtual")]
    doublings = sum(abs(math.log2(getattr(a, name) / getattr(b, name))) for name in sizes)
    switches = sum(getattr(a, name) != getattr(b, name) for name in ("recompute_granularity", "offload"))
    return doublings + switches


def _list_choices(job: Job) -> Iterator[Choice]:
    shape, world, node = job.shape, len(job.ranks_of("actor")), job.cluster.gpus_per_node
    now = describe_choice(job)
    powers = {1 << i for i in range(node.bit_length()) if node % (1 << i) == 0}
    rollout_sizes = sorted((powers if job.engine_ep == 1 else set()) | {now.rollout_tensor_model_parallel_size})
    now_cp = now.context_parallel_size
    cp_sizes = sorted(powers | {now_cp})
    offloads = sorted({now.offload, True})
    recomputations = sorted({"none", "full", now.recompute_granularity})
    for tp in divisors(math.gcd(shape.num_heads, shape.num_kv_heads, shape.full.num_kv_heads)):
        for pp in sorted({*divisors(shape.num_layers), now.pipeline_model_parallel_size}):
            split = job.config.actor.expert_tensor_parallel_size or tp
            if tp > node or world % (tp * pp) or split not in (1, tp):
                continue
            replicas = world // (pp * split)
            for ep in divisors(shape.num_experts) if shape.num_experts else [1]:
                if replicas % ep:
                    continue
                is_own = pp == now.pipeline_model_parallel_size
                stages = {name: getattr(now, name) if is_own else None for name in STAGE_SETTINGS}
                contexts = [cp for cp in cp_sizes if world % (tp * pp * cp) == 0 and (tp * cp <= node or cp == now_cp)]
                for cp, recompute, offload, engine_tp in product(contexts, recomputations, offloads, rollout_sizes):
                    yield Choice(tp, pp, cp, ep, tp > 1, recompute, offload, engine_tp, **stages)


def _apply(job: Job, choice: Choice) -> Job:
    sections = {role.section: choice.settings_of(role, job) for role in job.spec.laid_out_alike}
    sections["rollout"] = {"tensor_model_parallel_size": choice.rollout_tensor_model_parallel_size}
    for setting in _offload_settings(job) if choice.offload else ():
        section, _, leaf = setting.rpartition(".")
        sections.setdefault(section, {})[leaf] = _is_set(job, setting) or True  # "stream" stays
    return job.with_config(**sections)


def _offload_settings(job: Job) -> list[str]:
    settings = [f"{role.section}.offload_optimizer" for role in job.spec.trained]
    frozen = (role.name.partition(".further.")[0] for role in job.spec.roles.values() if not role.trainable)
    return ["actor.offload_gradients", *settings, *(f"{name}.offload" for name in dict.fromkeys(frozen))]


def _is_set(job: Job, setting: str) -> bool | str:
    section, _, leaf = setting.rpartition(".")
    return getattr(job.config.section(section), leaf)


def read_shape(path: Path, head: Head = "lm") -> ModelShape:
    """Read the model shape from a model directory or a config.json (UserError: missing or not supported)."""
    file = path / "config.json" if path.is_dir() else path
    config = read_json(file, "put it into shapes/ beside the recipe, or give tools/plan.py --hf-config DIR_OR_JSON")
    return model_shape_from_config(config, source=str(file), head=head)


def find_shape(model_path: str, recipe: Path | None) -> Path:
    """Find a model's config.json: in its directory, else as `<name>.json` in `shapes/` of the recipe or of our recipes.

    `<name>` is the last part of the model's path or name in the hub. Without such a file, return the path in the
    directory.
    """
    own, name = Path(model_path) / "config.json", Path(model_path).name.partition("@")[0]
    shelves = [recipe.parent / "shapes"] if recipe is not None else []
    house = Path(__file__).resolve().parents[1]
    shelves += [root / "launch" / "recipes" / "shapes" for root in (house.parent, house / "scripts")]  # of a wheel
    places = [own, *(shelf / f"{name}.json" for shelf in shelves)]
    return next((place for place in places if place.is_file()), own)


def read_job(
    config: RunConfig,
    spec: RunSpec,
    cluster: Cluster,
    recipe: Path | None = None,
    hf_configs: Mapping[str, Path] | None = None,
) -> Job:
    """Build a job with model shapes read from disk.

    Args:
        recipe: recipe file; shapes may lie beside it.
        hf_configs: role -> model directory or config.json instead of the config's.

    Raises:
        UserError: a config.json is missing or not supported.
    """
    given = dict(hf_configs or {})
    scoring = {
        role.name: read_shape(
            given.get(role.name) or find_shape(role.path, recipe), head="lm" if role.head == "logprob" else "score"
        )
        for role in spec.laid_out
        if role.name != "actor" and (role.name in given or role.path != config.model.path)
    }
    shape = read_shape(given.get("actor") or find_shape(config.model.path, recipe))
    return build_job(config, spec, cluster, shape, scoring)


def explain_problem(job: Job, problem: Problem, nearest: Candidate | None) -> UserError:
    """Return the error for a job beyond a memory limit, with the `nearest` layout that fits, if any, as its hint."""
    if nearest is None:
        what = "the placement leaves too little" if job.config.placement.placed else "no layout of this model fits here"
        hint = (
            f"{what}; use more or larger accelerators, shorter sequences, or lower "
            "actor.max_tokens_per_microbatch and rollout.gpu_memory_utilization"
        )
    else:
        hint = f"the nearest layout that fits: {shlex.join(nearest.choice.overrides(job))}"
        hint += f" (predicted {nearest.seconds:.1f} s per step)" if nearest.seconds else ""
    return UserError(
        problem.found,
        source="the recipe and the cluster",
        expected="every phase within an accelerator's memory, and what is offloaded within the host's",
        hint=hint,
    )


def check_fits(config: RunConfig, spec: RunSpec, cluster: Cluster, recipe: Path | None = None) -> str:
    """Refuse a job that cannot fit or has a mistake (UserError); else return one line about the fullest phase."""
    job = read_job(config, spec, cluster, recipe)
    check_job(job)
    memory = compute_memory(job)
    problem = find_problem(job, memory)
    if problem is not None:
        raise explain_problem(job, problem, find_nearest(job, list_candidates(job)))
    fullest, host = max(memory, key=lambda rank: rank.peak.total), max(rank.host_bytes for rank in memory)
    offloaded = f"; {host * cluster.gpus_per_node / GIB:.1f} GiB of a node's host memory" if host else ""
    return (
        f"planned memory: at most {fullest.peak.total / GIB:.1f} of {cluster.memory_bytes / GIB:.1f} GiB per GPU, "
        f'in phase "{fullest.peak.name}" on rank {fullest.rank}{offloaded}'
    )
