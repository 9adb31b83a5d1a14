# SPDX-License-Identifier: Apache-2.0
"""What can be said of an optimizer step whose loss or gradient is not finite, or whose gradient is lost.

Looks at the inputs of the step, which nobody does while all is well: no device is waited for in a sound step.
"""

from __future__ import annotations

import torch

from megatron_rl.packing.batch import TrainBatch
from megatron_rl.parallel.collectives import gather_objects
from megatron_rl.parallel.groups import ParallelGroups
from megatron_rl.types import UserError

_GROWTH = (
    "lower {role}.lr or {role}.clip_grad, and look at the last lines of metrics.jsonl for a growing loss, "
    "gradient norm, KL or mismatch; model.dtype=float32 tells an overflow from a wrong number"
)
# What enters a loss, in the order in which it is made -> what to do where it is not finite.
_INPUTS = {
    "rollout_logprobs": "the engine's log-probs: set hybrid.verify=full to rule out its weights",
    "old_logprobs": _GROWTH,
    "ref_logprobs": "the reference's log-probs: check reference.path",
    "values": "the critic's values: lower critic.lr or critic.clip_grad",
    "importance_weights": "the gap between engine and trainer: look at mismatch/max in metrics.jsonl",
    "returns": "look at the rewards, and at the critic's values",
    "advantages": "look at the rewards in rollouts/, and at algorithm.adv_estimator where it is your own",
    "update_logprobs": _GROWTH,  # of this very step, where they are recorded
}
_MOST_NAMED = 8


def explain_unsound(
    quantity: str,
    value: float,
    optimizer_step: int,
    *,
    role: str,
    minibatch: TrainBatch,
    losses: list[float],
    groups: ParallelGroups,
) -> UserError:
    """The error that names role, microbatch and sequences; collective over the role, the same on every rank.

    Args:
        quantity, value: what is not finite: "loss" or "gradient norm".
        optimizer_step: counted from 1.
        role: section of the config.
        minibatch: of the step.
        losses: of this rank's microbatches; empty where it has none.
        groups: of the role.
    """
    found = _find_bad_inputs(minibatch) if groups.is_last_stage_leader else {}
    bad = [index for index, loss in enumerate(losses) if not abs(loss) < float("inf")]
    shares = gather_objects((found, bad if groups.is_last_stage_leader else [], groups.at.dp), groups.world)
    name = next((name for name in _INPUTS if any(name in inputs for inputs, _, _ in shares)), None)
    where = [f"microbatches {', '.join(map(str, indices))} of DP rank {dp}" for _, indices, dp in shares if indices]
    if name is not None:
        ids = sorted({index for inputs, _, _ in shares for index in inputs.get(name, [])})
        said = "; ".join(minibatch.name_sequence(index) for index in ids[:_MOST_NAMED])
        where.append(f"{name} of {len(ids)} responses are not finite: {said}{' ...' if len(ids) > _MOST_NAMED else ''}")
    advice = _INPUTS.get(name or "") or _GROWTH
    return UserError(
        f"the {quantity} of optimizer step {optimizer_step} is {value} (the weights are as before)",
        source=", ".join([role, *where]),
        expected="a finite loss and a finite gradient norm",
        hint=advice.format(role=role),
    )


def explain_lost_gradient(optimizer_step: int, role: str) -> UserError:
    """The error of a norm of exactly 0 although the loss changes with the log-probs (or values) of the model."""
    return UserError(
        f"the gradient norm of optimizer step {optimizer_step} is exactly 0, and the gradient of the loss is not",
        source=f"{role}, the backward pass",
        expected="a gradient in the parameters that are trained",
        hint=f"a frozen embedding under {role}.recompute_granularity=full cuts the backward pass off (set none); "
        "parameters without their tensor_model_parallel mark are left out of the norm; a policy that gives every "
        "token of the minibatch a probability of 1 has nothing left to learn",
    )


def _find_bad_inputs(minibatch: TrainBatch) -> dict[str, list[int]]:
    """Inputs that are not finite inside of the loss -> the sequences to which they belong."""
    found = {}
    for name in _INPUTS:
        values: torch.Tensor | None = getattr(minibatch, name)
        if values is not None:
            bad = minibatch.loss_mask & ~values.isfinite()
            if bad.any():
                found[name] = minibatch.sequence_ids[bad].unique().tolist()
    return found
