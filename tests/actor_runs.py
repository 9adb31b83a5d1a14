# SPDX-License-Identifier: Apache-2.0
"""One fixed batch of eight rollouts, an Actor that trains on it in any layout, and the same in plain transformers.

`merge` combines the measurements of `train` from all ranks, and checks that ranks agree wherever they must.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from role_setups import make_setup, take_step

from distributed import run_ranks
from megatron_rl.algorithms.losses import aggregate
from megatron_rl.config.schema import ActorConfig, AlgorithmConfig
from megatron_rl.parallel.groups import build_groups
from megatron_rl.parallel.layout import Coordinates, ParallelLayout
from megatron_rl.samples.batch import Padding, TrainBatch, build_train_batch, expand_to_tokens
from megatron_rl.samples.microbatches import plan_microbatches
from megatron_rl.training.packed_model import PackedModel
from megatron_rl.training.roles.actor import Actor
from megatron_rl.types import Branch
from megatron_rl.weights.families import Head
from megatron_rl.weights.model_config import load_model_shape, model_shape_from_config
from megatron_rl.weights.packed_experts import name_expert, split_experts, split_huggingface_experts
from megatron_rl.weights.shard_box import box_slices
from tiny_models import VOCAB_SIZE, draw_tokens

LENGTHS = [10, 7, 23, 5, 16, 9, 12, 30]
NUM_PROMPT_TOKENS = 3
RESPONSE_LENGTHS = [n - NUM_PROMPT_TOKENS for n in LENGTHS]
ADVANTAGES = [1.5, -1.0, 0.5, -0.25, 0.0, 2.0, -2.0, -0.75]
WEIGHTS = aggregate("seq-mean-token-mean", RESPONSE_LENGTHS, max(LENGTHS)).weights
ALGORITHM = AlgorithmConfig(kl_coef=0.1, entropy_coef=0.01)
ACTOR: dict[str, Any] = dict(lr=1e-3, lr_warmup_steps=2, weight_decay=0.1, clip_grad=0.5)
LOGPROB_TOLERANCE = 2e-5
METRIC_TOLERANCE = 1e-5
# Adam's first step is lr * g / (|g| + eps): the rounding of a small gradient is divided by itself. At worst a
# sign flips (2 * lr = 1e-3 here); with this batch no gradient is that small, and 1e-5 was seen.
WEIGHT_TOLERANCE = 5e-5
CPU = torch.device("cpu")
Piece = tuple[str, tuple[slice, ...], torch.Tensor]  # name of an HF tensor, position, values


@dataclass(frozen=True)
class Case:
    """A layout and its deviations from the usual run."""

    world_size: int = 1
    sizes: dict[str, int] = field(default_factory=dict)
    actor: dict[str, Any] = field(default_factory=dict)
    max_tokens: int = 40
    minibatches: tuple[tuple[int, ...], ...] = (tuple(range(len(LENGTHS))),)
    temperature: float = 1.0
    dtype: str = "float32"
    routes: np.ndarray | None = None  # [rollouts, longest, layers, choices] that the actor replays


@dataclass
class Measured:
    """One run: two or more updates, on one minibatch again and again or on two of them.

    Attributes:
        before, after: logprobs of the response tokens of each rollout, before and after.
        metrics: of each update.
        weights: HF tensors after the first update.
        num_microbatches: on each DP rank.
    """

    before: list[torch.Tensor]
    after: list[torch.Tensor]
    metrics: list[dict[str, float]]
    weights: dict[str, torch.Tensor]
    num_microbatches: int


def draw_ref_logprobs() -> list[torch.Tensor]:
    """Draw log-probs [s] of each rollout under a reference policy near the uniform one."""
    rng = np.random.default_rng(7)
    return [torch.from_numpy(0.3 * rng.normal(size=n) - np.log(VOCAB_SIZE)).float() for n in LENGTHS]


def build_actor(case: Case, path: Path, total_optimizer_steps: int = 10, weights: Path | None = None) -> Actor:
    """The actor of this rank, with the weights of `path` or of a checkpoint; collective."""
    groups = build_groups(ParallelLayout(case.world_size, **case.sizes))
    return Actor(
        make_setup(
            "actor",
            path,
            ActorConfig(**(ACTOR | case.actor)),
            groups,
            dtype=case.dtype,
            spec=dict(path=str(weights or path)),
            temperature=case.temperature,
            total_optimizer_steps=total_optimizer_steps,
        )
    )


def build_batch(model: PackedModel, case: Case, advantages: list[float] | None = None) -> TrainBatch:
    """The batch of this rank for any role, complete but for the old logprobs, values and returns."""
    sequences = [Branch.of_response(tokens, NUM_PROMPT_TOKENS) for tokens in draw_tokens(LENGTHS)]
    groups = model.groups
    plans = [
        (
            rollouts,
            plan_microbatches(
                [LENGTHS[i] for i in rollouts],
                dp_size=groups.layout.dp_size,
                max_tokens=case.max_tokens,
                count_multiple=model.microbatch_count_multiple,
            ),
        )
        for rollouts in case.minibatches
    ]
    batch = build_train_batch(
        sequences, WEIGHTS, plans, dp_rank=groups.at.dp, padding=Padding(model.pad_multiple), device=CPU
    )
    reference = torch.nn.utils.rnn.pad_sequence([*draw_ref_logprobs(), torch.zeros(1)], batch_first=True)
    routes = None if case.routes is None else torch.from_numpy(case.routes[batch.sequence_ids, batch.position_ids])
    return replace(
        batch,
        replayed_routes=routes,
        advantages=expand_to_tokens(ADVANTAGES if advantages is None else advantages, batch),
        ref_logprobs=reference[batch.sequence_ids, batch.position_ids],
    )


def split_by_rollout(values: torch.Tensor, batch: TrainBatch) -> dict[int, torch.Tensor]:
    """Split values [t] into the values of each rollout's response tokens."""
    ids = sorted(set(batch.sequence_ids.tolist()) - {-1})
    return {i: values[(batch.sequence_ids == i) & batch.loss_mask].clone() for i in ids}


def cut_responses(values: list[torch.Tensor]) -> list[torch.Tensor]:
    """Cut values [s - 1] of each rollout, from its second token on, to its response tokens."""
    return [x[NUM_PROMPT_TOKENS - 1 :] for x in values]


def list_pieces(model: PackedModel) -> list[Piece]:
    """This rank's weights in HF coordinates."""
    at = model.groups.at
    rank = model.groups.layout.rank(tp=at.tp, cp=at.cp, dp=at.dp, pp=at.pp)
    return [
        (p.hf_name, box_slices(p.hf_box), model.params[p.param][box_slices(p.local_box)].to(model.dtype, copy=True))
        for p in model.placements(rank)
    ]


def list_gradients(model: PackedModel) -> list[Piece]:
    """This rank's gradients in HF coordinates, clipped after a step; whole ones with zero_stage=0 or one data rank."""
    at = model.groups.at
    rank = model.groups.layout.rank(tp=at.tp, cp=at.cp, dp=at.dp, pp=at.pp)
    trained: dict[str, Any] = {name: p for name, p in model.stages.named_parameters() if p.requires_grad}
    grads = split_experts({name: p.main_grad for name, p in trained.items()}, name_expert)
    return [
        (p.hf_name, box_slices(p.hf_box), grads[p.param][box_slices(p.local_box)].clone())
        for p in model.placements(rank)
        if p.param in grads
    ]


def _train_on_rank(rank: int, world_size: int, case: Case, path: Path) -> dict[str, Any]:
    actor = build_actor(case, path)
    batch = build_batch(actor.model, case)
    batch = replace(batch, old_logprobs=actor.compute_logprobs(batch))
    before = split_by_rollout(batch.old_logprobs, batch)
    minibatches = list(batch.minibatches())
    metrics = [take_step(actor, minibatches[0], ALGORITHM)]
    pieces = list_pieces(actor.model)
    metrics.append(take_step(actor, minibatches[-1], ALGORITHM))
    after = split_by_rollout(actor.compute_logprobs(batch), batch)
    return dict(
        at=actor.model.groups.at,
        before=before,
        after=after,
        metrics=metrics,
        pieces=pieces,
        num_microbatches=len(batch.slices),
        version=actor.policy_version,
    )


def train(case: Case, path: Path) -> Measured:
    """Two updates on a layout, measured on all of its ranks."""
    return merge(run_ranks(_train_on_rank, case.world_size, case, path, timeout=100), path)


def assert_same(found: Measured, expected: Measured) -> None:
    """Assert that two runs measured the same, up to rounding."""
    for name in ("before", "after"):
        pairs = zip(getattr(found, name), getattr(expected, name), strict=True)
        gap = max((a - b).abs().max().item() for a, b in pairs)
        assert gap <= LOGPROB_TOLERANCE, f"logprobs {name}: {gap}"
    for step, (got, want) in enumerate(zip(found.metrics, expected.metrics, strict=True)):
        assert got == pytest.approx(want, rel=METRIC_TOLERANCE, abs=METRIC_TOLERANCE), f"update {step + 1}"
    assert found.weights.keys() >= expected.weights.keys()
    gaps = {name: (found.weights[name] - x).abs().max().item() for name, x in expected.weights.items()}
    assert max(gaps.values()) <= WEIGHT_TOLERANCE, {k: v for k, v in gaps.items() if v > WEIGHT_TOLERANCE}


def merge(ranks: list[dict[str, Any]], path: Path) -> Measured:
    """Combine the ranks' parts; parts that several ranks hold must be bitwise equal."""
    first = ranks[0]
    for found in ranks:
        assert found["metrics"] == first["metrics"] and found["version"] == 2
        assert found["num_microbatches"] == first["num_microbatches"]
    return Measured(
        before=merge_rollouts([(r["at"], r["before"]) for r in ranks]),
        after=merge_rollouts([(r["at"], r["after"]) for r in ranks]),
        metrics=first["metrics"],
        weights=merge_weights([r["pieces"] for r in ranks], path),
        num_microbatches=first["num_microbatches"],
    )


def merge_rollouts(parts: list[tuple[Coordinates, dict[int, torch.Tensor]]]) -> list[torch.Tensor]:
    """Return the response tokens of every rollout; the ranks of a replica must have the same bits."""
    by_replica: dict[int, dict[int, torch.Tensor]] = {}
    for at, values in parts:
        known = by_replica.setdefault(at.dp, values)
        assert known.keys() == values.keys()
        assert all(torch.equal(known[i], values[i]) for i in known), "ranks of one replica disagree"
    merged = {i: x for values in by_replica.values() for i, x in values.items()}
    assert sorted(merged) == list(range(len(LENGTHS)))
    return [merged[i] for i in range(len(LENGTHS))]


def merge_weights(ranks: list[list[Piece]], path: Path, head: Head = "lm") -> dict[str, torch.Tensor]:
    """Full HF tensors; every element is written, and by all of its owners with the same bits."""
    shapes = load_model_shape(path, head).logical_tensors()
    full = {name: torch.full(size, float("nan")) for name, size in shapes.items()}
    for pieces in ranks:
        for name, index, values in pieces:
            known = full[name][index]
            is_new = known.isnan()
            assert is_new.all() or torch.equal(known, values.float()), f"replicas of {name} have drifted apart"
            full[name][index] = values.float()
    assert not any(x.isnan().any() for x in full.values())
    return full


def score_with_transformers(
    model: torch.nn.Module, temperature: float = 1.0
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Logprobs and entropies [s - 1] of each rollout's positions 1, 2, ..."""
    for tokens in draw_tokens(LENGTHS):
        ids = torch.from_numpy(tokens)
        logp = (model(ids[None]).logits[0, :-1] / temperature).log_softmax(-1)
        yield logp.gather(1, ids[1:, None])[:, 0], -(logp.exp() * logp).sum(-1)


def train_with_transformers(model: torch.nn.Module, num_updates: int = 2, adam_eps: float = 1e-8) -> Measured:
    """The same updates by transformers, autograd and torch.optim, one sequence at a time."""
    named = dict(model.named_parameters())  # biases of experts are matrices of vectors
    vectors = [p for name, p in named.items() if p.ndim == 1 or name.endswith("bias")]
    matrices = [p for name, p in named.items() if p.ndim > 1 and not name.endswith("bias")]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": ACTOR["weight_decay"]}, {"params": vectors, "weight_decay": 0.0}],
        betas=(0.9, 0.95),
        eps=adam_eps,
    )
    with torch.no_grad():
        before = [logprobs for logprobs, _ in score_with_transformers(model)]
    metrics, weights = [], {}
    for step in range(1, num_updates + 1):
        for group in optimizer.param_groups:
            group["lr"] = ACTOR["lr"] * min(1.0, step / ACTOR["lr_warmup_steps"])
        metrics.append(_step_with_transformers(model, optimizer, before))
        if step == 1:
            shape = model_shape_from_config(model.config.to_dict(), source="the model")
            weights = split_huggingface_experts(
                shape, {name: p.detach().clone() for name, p in model.named_parameters()}
            )
    with torch.no_grad():
        after = [logprobs for logprobs, _ in score_with_transformers(model)]
    return Measured(cut_responses(before), cut_responses(after), metrics, weights, num_microbatches=len(LENGTHS))


def _step_with_transformers(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, old: list[torch.Tensor]
) -> dict[str, float]:
    low, high = 1 - ALGORITHM.clip_eps_low, 1 + ALGORITHM.clip_eps_high
    sums = dict(loss=0.0, entropy=0.0, clipped=0.0, low=0.0, kl=0.0, deviation=0.0)
    optimizer.zero_grad()
    reference, skip = draw_ref_logprobs(), NUM_PROMPT_TOKENS - 1
    for i, (logprobs, entropy) in enumerate(score_with_transformers(model)):
        logprobs, entropy, old_logprobs, ref = logprobs[skip:], entropy[skip:], old[i][skip:], reference[i][skip + 1 :]
        ratio = (logprobs - old_logprobs).exp()
        pushed, bounded = ratio * ADVANTAGES[i], ratio.clamp(low, high) * ADVANTAGES[i]
        kl = (ref - logprobs).exp() - 1 - (ref - logprobs)
        token_loss = -torch.minimum(pushed, bounded) + ALGORITHM.kl_coef * kl - ALGORITHM.entropy_coef * entropy
        loss = token_loss.mean() / len(LENGTHS)
        loss.backward()
        sums["loss"] += loss.item()
        sums["entropy"] += entropy.sum().item()
        sums["clipped"] += (bounded < pushed).sum().item()
        sums["low"] += ((bounded < pushed) & (ratio < 1)).sum().item()
        sums["kl"] += kl.sum().item()
        sums["deviation"] = max(sums["deviation"], (logprobs - old_logprobs).abs().max().item())
    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), ACTOR["clip_grad"]).item()
    optimizer.step()
    tokens = sum(RESPONSE_LENGTHS)
    return {
        "policy/loss": sums["loss"],
        "policy/grad_norm": grad_norm,
        "policy/lr": optimizer.param_groups[0]["lr"],
        "policy/entropy": sums["entropy"] / tokens,
        "policy/clip_fraction": sums["clipped"] / tokens,
        "policy/clip_fraction_low": sums["low"] / tokens,
        "policy/clip_fraction_high": (sums["clipped"] - sums["low"]) / tokens,
        "policy/ratio_max_deviation": sums["deviation"],
        "kl/mean": sums["kl"] / tokens,
    }
