# SPDX-License-Identifier: Apache-2.0
"""Actors and critics in any step mode on the same ragged batches, and everything about them that must agree."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from role_setups import make_setup, take_step

from megatron_rl.algorithms.importance import Responses, compute_importance_weights
from megatron_rl.algorithms.losses import aggregate, build_ledger
from megatron_rl.config.schema import ActorConfig, AlgorithmConfig, CriticConfig
from megatron_rl.parallel.groups import ParallelGroups, build_groups
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.samples.batch import Padding, TrainBatch, build_train_batch, expand_to_tokens
from megatron_rl.samples.fixed_shapes import Buckets
from megatron_rl.samples.microbatches import plan_microbatches, share_prompts
from megatron_rl.training.packed_model import PackedModel
from megatron_rl.training.roles.actor import Actor
from megatron_rl.training.roles.critic import Critic
from megatron_rl.types import Branch
from tiny_models import VOCAB_SIZE

Trained = Actor | Critic
BUDGET = 64
GROUP_SIZE = 4
PROMPT, LONGEST = 5, 24  # tokens of a prompt, and of the longest sequence
SETTINGS: dict[str, Any] = dict(
    lr=1e-3, lr_warmup_steps=2, weight_decay=0.1, clip_grad=0.5, max_tokens_per_microbatch=BUDGET
)


@dataclass(frozen=True)
class Setup:
    """A role in a layout.

    Attributes:
        role: "actor" or "critic".
        sizes: of the layout.
        config: further settings of the role.
        dtype: of the model.
        replays: experts that the routers would not have chosen, in every batch.
    """

    role: str = "actor"
    sizes: dict[str, int] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    dtype: str = "float32"
    replays: bool = False

    @property
    def shares_prompts(self) -> bool:
        """Whether a group's prompt is packed once."""
        return self.config.get("share_prompts", False)


def build_role(setup: Setup, path: Path, groups: ParallelGroups, step_mode: str) -> Trained:
    """The role of this rank; collective."""
    settings = SETTINGS | dict(share_prompts=False) | setup.config | dict(step_mode=step_mode)
    config = CriticConfig(**settings, value_clip=0.02) if setup.role == "critic" else ActorConfig(**settings)
    made = make_setup(setup.role, path, config, groups, dtype=setup.dtype, total_optimizer_steps=100)
    return Critic(made) if setup.role == "critic" else Actor(made)


def build_ragged_batch(model: PackedModel, buckets: Buckets | None, step: int, *, shares_prompts: bool) -> TrainBatch:
    """Twelve rollouts of new lengths in two minibatches, complete but for the old log-probs and values."""
    rng = np.random.default_rng(step)
    lengths = rng.integers(PROMPT + 1, LONGEST + 1, 12).tolist()
    prompts = rng.integers(0, VOCAB_SIZE, (len(lengths) // GROUP_SIZE, PROMPT))
    sequences = [
        Branch.of_response(np.concatenate([prompts[i // GROUP_SIZE], rng.integers(0, VOCAB_SIZE, n - PROMPT)]), PROMPT)
        for i, n in enumerate(lengths)
    ]
    group_of = [i // GROUP_SIZE for i in range(len(lengths))] if shares_prompts else None
    plans, ledgers, weights = [], [], []
    for members in (range(8), range(8, 12)):
        part = [lengths[i] for i in members]
        shared = group_of and share_prompts([group_of[i] for i in members], [PROMPT] * len(part))
        plans.append(
            (
                members,
                plan_microbatches(
                    part,
                    dp_size=model.groups.layout.dp_size,
                    max_tokens=BUDGET,
                    count_multiple=model.microbatch_count_multiple,
                    shared=shared,
                ),
            )
        )
        responses = [n - PROMPT for n in part]
        weights.append(aggregate("token-mean", responses, LONGEST).weights)
        ledgers.append(build_ledger("token-mean", responses, LONGEST))
    device = model.device
    batch = build_train_batch(
        sequences,
        np.concatenate(weights),
        plans,
        dp_rank=model.groups.at.dp,
        padding=Padding(model.pad_multiple, buckets, LONGEST),
        device=device,
        shared=group_of and share_prompts(group_of, [PROMPT] * len(lengths)),
    )
    advantages = expand_to_tokens(rng.normal(size=len(lengths)), batch)
    noise = torch.from_numpy(rng.normal(size=(len(lengths) + 1, LONGEST)).astype(np.float32)).to(device)
    returns = noise[batch.sequence_ids, batch.position_ids % LONGEST]
    return replace(
        batch,
        ledgers=ledgers,
        advantages=advantages,
        returns=returns,
        ref_logprobs=0.3 * returns - float(np.log(VOCAB_SIZE)),
    )


def replay_any(batch: TrainBatch, model: PackedModel, step: int) -> TrainBatch:
    """Return the batch with replayed experts, drawn at random; unknown for some rows and for all padding."""
    shape, rng = model.shape.route_shape, np.random.default_rng(1000 + step)
    routes = rng.random((1000, LONGEST, shape.layers, shape.experts)).argsort(-1)[..., : shape.choices]
    found = shape.unknown(len(batch.tokens))
    ids, positions = batch.sequence_ids.numpy(), batch.position_ids.numpy()
    is_known = (ids >= 0) & (rng.random((1000, LONGEST)) < 0.9)[ids, positions]
    found[is_known] = routes[ids, positions][is_known]
    return replace(batch, replayed_routes=torch.from_numpy(found))


def take_steps(role: Trained, batch: TrainBatch, step: int) -> tuple[torch.Tensor, list[dict[str, float]], TrainBatch]:
    """Score the batch, and take one optimizer step on each minibatch with a KL coefficient of its own.

    In every second step the policy loss does not get the scores: it uses its own log-probs and computes weights from
    them.

    Returns:
        The scores, the metrics of each optimizer step, and the batch with the new columns.
    """
    if isinstance(role, Critic):
        batch = replace(batch, values=role.compute_values(batch))
        return batch.column("values"), [take_step(role, minibatch) for minibatch in batch.minibatches()], batch
    room = torch.full_like(batch.rollout_logprobs, torch.nan)
    scores = role.compute_logprobs(batch)
    batch = replace(batch, update_logprobs=room, update_entropy=room.clone())
    algorithm = AlgorithmConfig(
        kl_coef=0.1 / (1 + step),
        entropy_coef=0.01,
        loss_agg_mode="token-mean",
        importance_sampling="sequence-truncate",
        reject_sequence_above=50.0,
    )
    if step % 2 == 0:
        responses = Responses.of_sequences(batch.sequence_ids)
        weights, _ = compute_importance_weights(scores, batch.rollout_logprobs, batch.loss_mask, responses, algorithm)
        batch = replace(batch, old_logprobs=scores, importance_weights=weights)
    metrics = [take_step(role, minibatch, algorithm) for minibatch in batch.minibatches()]
    return scores, metrics, batch


def gradients(model: PackedModel) -> list[torch.Tensor]:
    """The gradient buffers, as the last optimizer step has left them."""
    buffers = [b for m in model.modules for b in (*m.buffers, *m.expert_parallel_buffers)]
    return [buffer.grad_data for buffer in buffers]


def reduced_gradient(role: Trained) -> torch.Tensor:
    """The part of the gradient that this rank's optimizer has used: under ZeRO its shard.

    The rest of a gradient buffer is not reduced, and so depends on which context parallel rank has which rows.
    """
    groups = [group for adam in role.optimizer.adams for group in adam.param_groups]
    return torch.cat([p.grad.flatten() for group in groups for p in group["params"]])


def find_differences(first: Trained, second: Trained) -> list[str]:
    """Return the tensors that are not bitwise equal: gradients, weights, states of the optimizer."""
    pairs = {"gradients": (gradients(first.model), gradients(second.model))}
    pairs["weights"] = ([*first.model.params.values()], [*second.model.params.values()])
    states = [
        [x for state in adam.state.values() for x in state.values()]
        for role in (first, second)
        for adam in role.optimizer.adams
    ]
    pairs["states"] = (sum(states[: len(states) // 2], []), sum(states[len(states) // 2 :], []))
    return [
        name
        for name, (a, b) in pairs.items()
        if len(a) != len(b) or not all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    ]


def have_equal_records(first: TrainBatch, second: TrainBatch) -> bool:
    """Whether the updates have left the same log-probs and entropies in both batches, one for every token."""
    pairs = [(getattr(first, name), getattr(second, name)) for name in ("update_logprobs", "update_entropy")]
    return all(torch.equal(a, b) and bool(a.isfinite().all()) for a, b in pairs)


def compare_modes(setup: Setup, path: Path, world_size: int, num_steps: int, mode: str = "static") -> dict[str, Any]:
    """Run eager and another mode on the same padded microbatches; return one rank's findings.

    Returns:
        differences: step -> tensors that were not bitwise equal.
        shapes: different shapes that the mode has seen; sizes: buckets of the ladder.
        metrics: of the last step.
    """
    groups = build_groups(ParallelLayout(world_size, **setup.sizes))
    eager, other = (build_role(setup, path, groups, name) for name in ("eager", mode))
    differences: dict[int, list[str]] = {}
    for step in range(num_steps):
        batches = [
            build_ragged_batch(eager.model, other.model.buckets, step, shares_prompts=setup.shares_prompts)
            for _ in range(2)
        ]
        for role in (eager, other):
            role.optimizer.release()  # as before a rollout
        if setup.replays:
            batches = [replay_any(batch, eager.model, step) for batch in batches]
        (scores, metrics, batch), (other_scores, other_metrics, other_batch) = (
            take_steps(role, batch, step) for role, batch in zip((eager, other), batches, strict=True)
        )
        found = find_differences(eager, other)
        found += [] if torch.equal(scores, other_scores) else ["scores"]
        if isinstance(eager, Actor) and groups.is_last_stage and not have_equal_records(batch, other_batch):
            found.append("records of the update")
        found += [] if metrics == other_metrics else [f"metrics {metrics} and {other_metrics}"]
        if found:
            differences[step] = found
    shapes = {shape for shape, _ in other.step._inputs._buffers}
    return dict(differences=differences, shapes=len(shapes), sizes=len(other.model.buckets.sizes), metrics=metrics[-1])


def measure_padding(setup: Setup, path: Path, world_size: int) -> dict[str, float]:
    """Largest relative differences between a step on padded microbatches and one on microbatches as they are."""
    groups = build_groups(ParallelLayout(world_size, **setup.sizes))
    plain, padded = (build_role(setup, path, groups, name) for name in ("eager", "static"))
    found: dict[str, float] = {}
    results = []
    for role in (plain, padded):
        batch = build_ragged_batch(role.model, role.model.buckets, 0, shares_prompts=setup.shares_prompts)
        scores, metrics, _ = take_steps(role, next(batch.minibatches()), 0)
        real = batch.sequence_ids[: len(scores)] >= 0
        results.append((scores[real], metrics[0]))
    (scores, metrics), (padded_scores, padded_metrics) = results
    found["scores"] = relative_gap(padded_scores, scores)
    found |= {name: abs(padded_metrics[name] - value) / max(abs(value), 1e-3) for name, value in metrics.items()}
    found["gradients"] = relative_gap(reduced_gradient(padded), reduced_gradient(plain))
    return found


def relative_gap(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm."""
    return float((found - expected).double().norm() / expected.double().norm().clamp(min=1e-30))
