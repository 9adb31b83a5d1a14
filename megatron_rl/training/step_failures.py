# SPDX-License-Identifier: Apache-2.0
"""Errors of an optimizer step: a loss or a norm that is not finite, a norm of 0, gradients that cannot be added."""

from __future__ import annotations

import math
from typing import Any

from megatron_rl.parallel.collectives import gather_objects
from megatron_rl.parallel.groups import ParallelGroups
from megatron_rl.types import UserError

_GROWTH = (
    "lower {role}.lr or {role}.clip_grad, and look at the last lines of metrics.jsonl for a growing loss, "
    "gradient norm, KL or mismatch; model.dtype=float32 tells an overflow from a wrong number"
)
# Inputs of a loss in the order of their computation -> advice if one is not finite.
_INPUTS = {
    "rollout_logprobs": "the engine's log-probs: set hybrid.verify=full to rule out its weights",
    "old_logprobs": _GROWTH,
    "ref_logprobs": "the reference's log-probs: check reference.path",
    "values": "the critic's values: lower critic.lr or critic.clip_grad",
    "importance_weights": "the gap between engine and trainer: look at mismatch/max in metrics.jsonl",
    "returns": "look at the rewards, and at the critic's values",
    "advantages": "look at the rewards in rollouts/, and at algorithm.adv_estimator where it is your own",
    "update_logprobs": _GROWTH,  # recorded during this step, if at all
}
_MOST_NAMED = 8


def explain_unsound(failed: Any, norm: float, step: int, role: str, groups: ParallelGroups) -> UserError:
    """Build the error that names role, microbatches and sequences; collective over the role.

    Args:
        failed: a `training.update.Pass`.
    """
    minibatch, loss = failed.minibatch, failed.totals["loss"]
    quantity, value = ("gradient norm", norm) if math.isfinite(loss) else ("loss", loss)
    losses = [float(row[[*failed.totals].index("loss")]) for row in failed.rows]
    found, bad = {}, []
    if groups.is_last_stage and groups.at.tp == groups.at.cp == 0:  # one rank per replica
        mask = minibatch.loss_mask
        inputs = {name: values for name in _INPUTS if (values := getattr(minibatch, name)) is not None}
        bad_ids = {name: minibatch.sequence_ids[mask & ~values.isfinite()] for name, values in inputs.items()}
        found = {name: ids.unique().tolist() for name, ids in bad_ids.items() if len(ids)}
        bad = [index for index, loss in enumerate(losses) if not math.isfinite(loss)]
    shares = gather_objects((found, bad, groups.at.dp), groups.world)
    name = next((name for name in _INPUTS if any(name in inputs for inputs, _, _ in shares)), None)
    where = [f"microbatches {', '.join(map(str, indices))} of DP rank {dp}" for _, indices, dp in shares if indices]
    if name is not None:
        ids = sorted({index for inputs, _, _ in shares for index in inputs.get(name, [])})
        said = "; ".join(minibatch.name_sequence(index) for index in ids[:_MOST_NAMED])
        where.append(f"{name} of {len(ids)} responses are not finite: {said}{' ...' if len(ids) > _MOST_NAMED else ''}")
    advice = _INPUTS.get(name or "") or _GROWTH
    return UserError(
        f"the {quantity} of optimizer step {step} is {value} (the weights are as before)",
        source=", ".join([role, *where]),
        expected="a finite loss and a finite gradient norm",
        hint=advice.format(role=role),
    )


def explain_zero_norm(step: int, role: str) -> UserError:
    """Build the error of a gradient norm of 0 although the loss has a gradient."""
    return UserError(
        f"the gradient norm of optimizer step {step} is exactly 0, and the gradient of the loss is not",
        source=f"{role}, the backward pass",
        expected="a gradient in the parameters that are trained",
        hint=f"a frozen embedding under {role}.recompute_granularity=full cuts the backward pass off (set none); "
        "parameters without their tensor_model_parallel mark are left out of the norm; a policy that gives every token "
        "of the minibatch a probability of 1 has nothing left to learn",
    )


def refuse_second_pass(role: str) -> UserError:
    """Build the error of gradients that cannot be added, because the first ones are reduced already."""
    return UserError(
        f"a second forward_backward before optim_step, and {role}.overlap_grad_reduce = True has reduced the first "
        "gradients",
        source=f"{role}.overlap_grad_reduce",
        expected="false for gradients of several minibatches",
        hint=f"set {role}.overlap_grad_reduce=false",
    )
