# SPDX-License-Identifier: Apache-2.0
"""What a run says of itself at its start."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from megatron_rl.config.placement import format_ranks
from megatron_rl.config.schema import RunConfig
from megatron_rl.engines.modes import describe_modes
from megatron_rl.models.gpt import choose_transformer_impl
from megatron_rl.roles.inputs import RlInputs
from megatron_rl.trainer.primitives import Primitives
from megatron_rl.training.fast_path import find_fast_paths, format_table


def describe_run(config: RunConfig, inputs: RlInputs, primitives: Primitives, device: torch.device) -> Iterator[str]:
    """Lines that say what runs, and what was found in the data."""
    plan, hybrid, train = inputs.plan, primitives.policy.hybrid, inputs.train
    impl = choose_transformer_impl(config.model.transformer_impl)
    yield from (f"note: {note}" for note in inputs.notes)
    why = inputs.spec.why_recompute
    yield (
        f"algorithm: {config.algorithm.adv_estimator}, {config.algorithm.policy_loss} loss; old_logprobs of "
        + (f"a forward pass of their own: {why}" if why else "the update's first pass")
    )
    for role in inputs.roles.values():
        where, is_actor = _describe_ranks(role.layout.ranks, plan.world_size), role.spec.name == "actor"
        what = f", {config.model.dtype}, {impl} layers on {device}" if is_actor else ""
        if where or role.spec.name != "reference":
            yield f"{role.spec.title}: {role.layout.describe()}{where}{what}"
    modes, engines = describe_modes(config.rollout, device), config.placement.ranks_of("rollout", plan.world_size)
    yield (
        f"rollout: {config.rollout.engine}, {plan.num_engines} engine(s) of "
        f"{'the actor, rank(s) ' if plan.engine_is_actor else 'tp='}{plan.engine_ranks}"
        f"{_describe_ranks(engines, plan.world_size)}{modes and '; ' + modes}"
    )
    if k := config.schedule.max_staleness:
        yield (
            f"schedule: responses begin up to {k} step(s) ahead; at most {(1 + k) * plan.rollouts_per_step} have begun "
            f"and were not learned from; updates {config.schedule.updates}, order {config.schedule.order}"
        )
    yield f"stop tokens: {', '.join(map(str, inputs.stop_token_ids))}"
    stats = hybrid.reshard_stats
    yield (
        f"weights: transport {hybrid.transport}; per switch {stats.bytes_moved:,} bytes moved, "
        f"{stats.bytes_copied:,} copied inside a rank, {stats.bytes_aliased:,} aliased; "
        f"verify {config.hybrid.verify}"
    )
    yield f"prompts: {len(train.prompts)} ({train.num_truncated} truncated, {train.num_dropped} dropped)"
    table = format_table(
        find_fast_paths(
            config.actor, config.model.dtype, config.model.transformer_impl, plan.dp_size, config.rollout.bitwise
        )
    )
    yield from (f"  {line}" for line in (*table, *plan.formulas()))


def _describe_ranks(ranks: range, world_size: int) -> str:
    return f" on rank(s) {format_ranks(ranks)}" if len(ranks) < world_size else ""
