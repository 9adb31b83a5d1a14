# SPDX-License-Identifier: Apache-2.0
"""`layout: auto`: replaces the layout in a config by the planner's choice.

The choice is pure arithmetic on config, model shapes and memory per rank, so all ranks of equal nodes agree.
"""

from __future__ import annotations

import shlex
from dataclasses import replace
from functools import partial
from pathlib import Path

import yaml

from megatron_rl.config.fields import coerce, list_fields
from megatron_rl.config.run_spec import RunSpec
from megatron_rl.config.schema import RunConfig
from megatron_rl.config.sections import AutoLayoutConfig
from megatron_rl.planning.admission import Candidate, check_job, find_problem, list_candidates, read_job
from megatron_rl.planning.cluster import GIB, Cluster, Job
from megatron_rl.planning.memory import compute_memory
from megatron_rl.types import UserError
from tools.planning.communication import Assumptions, predict_seconds
from tools.planning.lengths import read_lengths
from tools.planning.schedule_choice import Option, choose_schedule, recommend
from tools.planning.switch import plan_switch

_SOURCE = "layout.mode"


def choose_layout(
    config: RunConfig, spec: RunSpec, cluster: Cluster, recipe: Path | None
) -> tuple[RunConfig, list[str]]:
    """Choose the layout and, given response lengths, the schedule of a run.

    Args:
        config: the resolved config, with `layout.mode` auto.
        recipe: file whose directory may contain model shapes.

    Returns:
        The config with the choice; one line per choice with the reason.

    Raises:
        UserError: no layout fits, or unreadable lengths.
    """
    job, assumed = read_job(replace(config, layout=AutoLayoutConfig()), spec, cluster, recipe), Assumptions()
    lengths = None if config.layout.lengths is None else read_lengths(config.layout.lengths)
    if lengths is not None:
        longest = config.data.max_response_length
        assumed = replace(assumed, mean_response=lengths.mean(longest) / longest)
    predict = partial(predict_seconds, assumed)
    candidates, budgets = list_candidates(job, predict), ""
    if not candidates:
        smallest, budgets = _take_smallest_budgets(job)
        candidates = list_candidates(smallest, predict)
    if not candidates:
        raise _refuse(job)
    best = candidates[0]
    lines = [_describe(job, best, len(candidates)) + budgets]
    if lengths is None:
        return best.job.config, lines
    seconds = plan_switch(best.job).prediction.seconds
    choice = choose_schedule(best.job, seconds, lengths, assumed)
    # Some recipes do not allow every schedule.
    accepted = {id(option): found for option in choice.options if (found := _apply(best.job, option)) is not None}
    option = recommend([option for option in choice.options if id(option) in accepted])
    slowest = choice.options[0].times.seconds
    lines.append(
        f"layout auto: {option.name}: {' '.join(option.overrides)}; {slowest / option.times.seconds:.2f} times as fast "
        f"as {choice.options[0].name} by simulation; responses: {choice.lengths}"
    )
    return accepted[id(option)], lines


def _take_smallest_budgets(job: Job) -> tuple[Job, str]:
    """Reduce token budgets to one longest sequence."""
    longest = job.config.data.max_prompt_length + job.config.data.max_response_length
    sections = [role.section for role in job.spec.laid_out_alike]
    words = " ".join(f"{section}.max_tokens_per_microbatch={longest}" for section in sections)
    changed = {section: {"max_tokens_per_microbatch": longest} for section in sections}
    return job.with_config(**changed), f"; no layout fits with the budgets of the config: {words}"


def _describe(job: Job, best: Candidate, count: int) -> str:
    changed, cluster = shlex.join(best.choice.overrides(job)) or "as the config says", job.cluster
    return (
        f"layout auto: {changed}: the fastest by prediction ({best.seconds:.3g} s per step) of {count} that fit "
        f"{cluster.world_size} rank(s) of {cluster.memory_bytes / GIB:.1f} GiB; the fullest phase takes "
        f"{best.worst_phase.total / GIB:.1f} GiB ({best.worst_phase.name})"
    )


def _apply(job: Job, option: Option) -> RunConfig | None:
    """Return the config with a schedule; `None` if a check refuses it."""
    config, fields = job.config, list_fields()
    for text in option.overrides:
        name, _, value = text.partition("=")
        section, _, leaf = name.partition(".")
        changed = coerce(fields[name], yaml.safe_load(value), _SOURCE, value)
        config = config.with_sections({section: {leaf: changed}})
    try:
        check_job(replace(job, config=config, spec=job.spec.with_config(config)))
    except UserError:
        return None
    return config


def _refuse(job: Job) -> UserError:
    """Build the error, with the reason against the config's own layout."""
    try:
        check_job(job)
        problem = find_problem(job, compute_memory(job))
        why = "" if problem is None else problem.found
    except UserError as error:
        why = error.found
    cluster = job.cluster
    return UserError(
        f"no layout is accepted and fits {cluster.world_size} rank(s) of {cluster.memory_bytes / GIB:.1f} GiB; "
        f"that of the config: {why}",
        source=_SOURCE,
        expected="a model, batches and lengths for which there is a layout",
        hint="use more or larger accelerators, or shorter sequences; tools/plan.py lists the memory by part",
    )
