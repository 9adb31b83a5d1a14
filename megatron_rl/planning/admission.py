# SPDX-License-Identifier: Apache-2.0
"""Admission check that refuses a job that cannot fit, and finds the nearest layout that fits."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from megatron_rl.config.run_spec import RunSpec
from megatron_rl.config.schema import RunConfig
from megatron_rl.planning.cluster import GIB, Cluster, Job, build_job
from megatron_rl.planning.layouts import Candidate, Problem, check_job, find_nearest, find_problem, list_candidates
from megatron_rl.planning.memory import compute_memory
from megatron_rl.planning.steptime import Assumptions, build_workload
from megatron_rl.types import UserError
from megatron_rl.weights.config_values import read_json
from megatron_rl.weights.families import Head, ModelShape
from megatron_rl.weights.model_config import model_shape_from_config


def read_shape(path: Path, head: Head = "lm") -> ModelShape:
    """Read the model shape from a model directory or a config.json.

    Raises:
        UserError: the file is missing, or the model is not supported.
    """
    file = path / "config.json" if path.is_dir() else path
    config = read_json(file, "put it into shapes/ beside the recipe, or give tools/plan.py --hf-config DIR_OR_JSON")
    return model_shape_from_config(config, source=str(file), head=head)


def find_shape(model_path: str, recipe: Path | None) -> Path:
    """Find a model's config.json: in its directory, else as `<name>.json` in `shapes/` of the recipe or of our recipes.

    The name is the last part of the model's path. The first place is the fallback.
    """
    own = Path(model_path) / "config.json"
    shelves = [recipe.parent / "shapes"] if recipe is not None else []
    shelves.append(Path(__file__).resolve().parents[2] / "launch" / "recipes" / "shapes")
    places = [own, *(shelf / f"{Path(model_path).name}.json" for shelf in shelves)]
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
    """Return the error for a job that does not fit."""
    if nearest is None:
        what = "the placement leaves too little" if job.config.placement.placed else "no layout of this model fits here"
        hint = (
            f"{what}; use more or larger accelerators, shorter sequences, or lower "
            "actor.max_tokens_per_microbatch and rollout.gpu_memory_utilization"
        )
    else:
        hint = (
            f"the nearest layout that fits: {' '.join(nearest.choice.overrides(job))} "
            f"(predicted {nearest.seconds:.1f} s per step)"
        )
    return UserError(
        problem.found,
        source="the recipe and the cluster",
        expected="every phase within an accelerator's memory, and what is offloaded within the host's",
        hint=hint,
    )


def check_fits(config: RunConfig, spec: RunSpec, cluster: Cluster, recipe: Path | None = None) -> str:
    """Refuse a job that cannot fit; else return a one-line summary of the fullest phase.

    Raises:
        UserError: a phase exceeds the memory, or the run's own checks refuse the config.
    """
    job = read_job(config, spec, cluster, recipe)
    check_job(job)
    memory = compute_memory(job)
    problem = find_problem(job, memory)
    if problem is not None:
        assumed = Assumptions()
        candidates = list_candidates(job, build_workload(job, assumed), assumed)
        raise explain_problem(job, problem, find_nearest(job, candidates))
    fullest, host = max(memory, key=lambda rank: rank.peak.total), max(rank.host_bytes for rank in memory)
    offloaded = f"; {host * cluster.gpus_per_node / GIB:.1f} GiB of a node's host memory" if host else ""
    return (
        f"planned memory: at most {fullest.peak.total / GIB:.1f} of {cluster.memory_bytes / GIB:.1f} GiB per GPU, "
        f'in phase "{fullest.peak.name}" on rank {fullest.rank}{offloaded}'
    )
