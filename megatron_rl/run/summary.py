# SPDX-License-Identifier: Apache-2.0
"""Summary of a run in about ten lines before its first step, and the arithmetic of its sizes."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from megatron_rl.config.schema import RunConfig
from megatron_rl.config.sections import format_ranks
from megatron_rl.engines.build import describe_engine
from megatron_rl.run.inputs import RlInputs
from megatron_rl.run.primitives import Primitives
from megatron_rl.training.fast_path import find_fast_paths, format_table


def describe_run(
    config: RunConfig, inputs: RlInputs, primitives: Primitives, device: torch.device
) -> Iterator[tuple[str, str]]:
    """Yield the summary of a run, as labels and texts."""
    plan, hybrid, train = inputs.plan, primitives.policy.hybrid, inputs.train
    yield "model", f"{config.model.path}, {config.model.dtype}, {config.model.transformer_impl} layers on {device}"
    why = inputs.spec.why_recompute
    yield (
        "algorithm",
        f"{config.algorithm.adv_estimator}, {config.algorithm.policy_loss} loss; old_logprobs of "
        + (f"a forward pass of their own: {why}" if why else "the update's first pass"),
    )
    for role in inputs.roles.values():
        where = _describe_ranks(role.layout.ranks, plan.world_size)
        if where or role.spec.name != "reference":
            yield role.spec.title, f"{role.layout.describe()}{where}"
    modes = describe_engine(config.rollout, device, config.actor.router_replay == "engine")
    engines, rollout = config.placement.ranks_of("rollout", plan.world_size), config.rollout
    sizes = f"tp={rollout.tensor_model_parallel_size}"
    if plan.engine_is_actor:
        sizes = f"the actor, rank(s) {plan.engine_ranks}"
    elif rollout.expert_parallel_size > 1:
        sizes += f" dp={rollout.data_parallel_size} ep={rollout.expert_parallel_size}"
    yield (
        "rollout",
        f"{config.rollout.engine}, {plan.num_engines} engine(s) of {sizes}"
        f"{_describe_ranks(engines, plan.world_size)}{modes and '; ' + modes}",
    )
    if k := config.schedule.max_staleness:
        yield (
            "schedule",
            f"responses begin up to {k} step(s) ahead; at most {(1 + k) * plan.rollouts_per_step} have begun "
            f"and were not learned from; updates {config.schedule.updates}, order {config.schedule.order}",
        )
    stats = hybrid.reshard_stats
    yield (
        "weights",
        f"transport {hybrid.transport}; per switch {stats.bytes_moved:,} bytes moved, "
        f"{stats.bytes_copied:,} copied inside a rank, {stats.bytes_aliased:,} aliased; verify {config.hybrid.verify}",
    )
    yield "prompts", f"{len(train.prompts)} ({train.num_truncated} truncated, {train.num_dropped} dropped)"
    yield (
        "step",
        f"{plan.train_batch_size} prompts x {plan.group_size} responses of at most {plan.max_response_length} tokens, "
        f"{plan.optimizer_steps_per_step} optimizer step(s)",
    )
    epochs = (
        f" ({plan.total_steps / plan.steps_per_epoch:.2g} epochs)" if plan.total_steps and plan.steps_per_epoch else ""
    )
    often, saves = config.trainer.test_freq, config.trainer.save_freq
    yield (
        "steps",
        f"{plan.total_steps}{epochs}; validation {f'every {often}' if often else 'before and after'}, "
        f"checkpoint {f'every {saves}' if saves else 'never' if saves is None else 'at the end'}",
    )


def explain_run(config: RunConfig, inputs: RlInputs) -> list[str]:
    """Return the kernels in use and the formulas of the batch plan."""
    implementation, plan = config.model.transformer_impl, inputs.plan
    paths = find_fast_paths(config.actor, config.model.dtype, implementation, plan.dp_size, config.rollout.bitwise)
    return [f"stop tokens: {', '.join(map(str, inputs.stop_token_ids))}", *format_table(paths), *plan.formulas()]


def _describe_ranks(ranks: range, world_size: int) -> str:
    return f" on rank(s) {format_ranks(ranks)}" if len(ranks) < world_size else ""
