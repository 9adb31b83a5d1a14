# SPDX-License-Identifier: Apache-2.0
"""A critic on one rank equals transformers with autograd and AdamW; a critic on any layout equals one rank.

Compared: values of all tokens before and after two updates, every metric of both (so the global gradient norm, in
which the replicated head must count once), and all weights after the first. Not covered: CUDA, Transformer Engine.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from role_setups import make_setup, take_step
from transformers import AutoModelForSequenceClassification

from actor_runs import (
    ACTOR,
    LENGTHS,
    NUM_PROMPT_TOKENS,
    RESPONSE_LENGTHS,
    Case,
    build_batch,
    cut_responses,
    list_pieces,
    merge_rollouts,
    merge_weights,
    split_by_rollout,
)
from distributed import run_ranks
from megatron_rl.checkpoint.huggingface import ShardedModel, check_checkpoint, save_huggingface
from megatron_rl.config.schema import CriticConfig
from megatron_rl.parallel.groups import build_groups
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.samples.batch import TrainBatch
from megatron_rl.training.roles.critic import Critic
from megatron_rl.transfer.planner import group_shards
from megatron_rl.weights.model_config import load_model_shape
from tiny_models import draw_tokens, save_tiny_model

VALUE_CLIP = 0.02
SP = dict(sequence_parallel=True)
LAYOUTS = {
    "tp2": Case(2, dict(tp_size=2)),
    "tp2-sp": Case(2, dict(tp_size=2), SP),
    "pp2": Case(2, dict(pp_size=2)),
    "tp2-pp2-sp": Case(4, dict(tp_size=2, pp_size=2), SP | dict(recompute_granularity="full")),
    "dp2": Case(2),
    "dp2-replicated": Case(2, actor=dict(zero_stage=0)),
    "pp2-vpp2": Case(2, dict(pp_size=2, vpp_size=2, chunk_layers=(1, 1, 1, 1))),
    "tp2-dp2": Case(4, dict(tp_size=2)),
    "cp2-tp2-sp": Case(4, dict(tp_size=2, cp_size=2), SP),
    "cp2-pp2": Case(4, dict(cp_size=2, pp_size=2)),
    "cp2-tp2-sp-zero3": Case(4, dict(tp_size=2, cp_size=2), SP | dict(zero_stage=3)),
}
TOLERANCE = 1e-5
# Adam's first step divides a gradient by itself: see WEIGHT_TOLERANCE in actor_runs.py.
WEIGHT_TOLERANCE = 5e-5


@dataclass
class Measured:
    """One run of two updates on one minibatch: values of the responses, metrics, HF tensors after the first."""

    before: list[torch.Tensor]
    after: list[torch.Tensor]
    metrics: list[dict[str, float]]
    weights: dict[str, torch.Tensor]


def draw_returns() -> list[torch.Tensor]:
    """[s] per rollout, apart from each other and along the sequence."""
    generator = torch.Generator().manual_seed(11)
    return [torch.randn(1, generator=generator) + 0.5 * torch.randn(n, generator=generator) for n in LENGTHS]


def build_critic(case: Case, path: Path) -> Critic:
    groups = build_groups(ParallelLayout(case.world_size, **case.sizes))
    config = CriticConfig(**(ACTOR | case.actor), value_clip=VALUE_CLIP)
    return Critic(make_setup("critic", path, config, groups, dtype=case.dtype, total_optimizer_steps=10))


def build_value_batch(critic: Critic, case: Case) -> TrainBatch:
    """The batch of this rank with returns and the values before the update."""
    batch = build_batch(critic.model, case)
    returns = torch.nn.utils.rnn.pad_sequence([*draw_returns(), torch.zeros(1)], batch_first=True)
    return replace(batch, returns=returns[batch.sequence_ids, batch.position_ids], values=critic.compute_values(batch))


def _train_on_rank(rank: int, world_size: int, case: Case, path: Path) -> dict[str, Any]:
    critic = build_critic(case, path)
    batch = build_value_batch(critic, case)
    assert batch.values.dtype == torch.float32 and not batch.values.requires_grad
    metrics = [take_step(critic, batch)]
    pieces = list_pieces(critic.model)
    metrics.append(take_step(critic, batch))
    before = split_by_rollout(batch.values, batch)
    return dict(
        at=critic.model.groups.at,
        before=before,
        metrics=metrics,
        pieces=pieces,
        after=split_by_rollout(critic.compute_values(batch), batch),
        steps=critic.optimizer.steps,
    )


def train(case: Case, path: Path) -> Measured:
    """Two updates on a layout; values that several ranks hold must be bitwise equal."""
    ranks = run_ranks(_train_on_rank, case.world_size, case, path, timeout=100)
    assert all(found["metrics"] == ranks[0]["metrics"] and found["steps"] == 2 for found in ranks)
    before, after = (merge_rollouts([(r["at"], r[name]) for r in ranks]) for name in ("before", "after"))
    return Measured(before, after, ranks[0]["metrics"], merge_weights([r["pieces"] for r in ranks], path, "score"))


def compute_transformers_values(model: torch.nn.Module) -> list[torch.Tensor]:
    """[s - 1] per rollout: the score of each position but the last is the value for the token that follows."""
    ids = [torch.from_numpy(tokens)[None] for tokens in draw_tokens(LENGTHS)]
    return [model.score(model.model(x).last_hidden_state)[0, :-1, 0] for x in ids]


def train_with_transformers(model: torch.nn.Module) -> Measured:
    """The same two updates by transformers, autograd and torch.optim, one sequence at a time."""
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": ACTOR["weight_decay"]},
            {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
        ],
        betas=(0.9, 0.95),
        eps=1e-8,
    )
    with torch.no_grad():
        before = compute_transformers_values(model)
    metrics, weights = [], {}
    for step in (1, 2):
        for group in optimizer.param_groups:
            group["lr"] = ACTOR["lr"] * step / ACTOR["lr_warmup_steps"]
        metrics.append(_step_with_transformers(model, optimizer, before))
        weights = weights or {name: p.detach().clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        after = compute_transformers_values(model)
    return Measured(cut_responses(before), cut_responses(after), metrics, weights)


def _step_with_transformers(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, old: list[torch.Tensor]
) -> dict[str, float]:
    optimizer.zero_grad()
    skip = NUM_PROMPT_TOKENS - 1
    losses, num_clipped = [], 0
    for values, old_values, target in zip(compute_transformers_values(model), old, draw_returns(), strict=True):
        values, old_values, target = values[skip:], old_values[skip:], target[skip + 1 :]
        bounded = values.clamp(old_values - VALUE_CLIP, old_values + VALUE_CLIP)
        plain, clipped = (values - target) ** 2, (bounded - target) ** 2
        losses.append(0.5 * torch.maximum(plain, clipped).mean() / len(LENGTHS))
        num_clipped += (clipped > plain).sum().item()
    loss = sum(losses)
    loss.backward()
    targets, errors = (
        torch.cat(x).double()
        for x in zip(
            *((r[skip + 1 :], r[skip + 1 :] - v[skip:]) for r, v in zip(draw_returns(), old, strict=True)), strict=True
        )
    )
    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), ACTOR["clip_grad"]).item()
    optimizer.step()
    return {
        "value/loss": loss.item(),
        "value/grad_norm": grad_norm,
        "value/lr": optimizer.param_groups[0]["lr"],
        "value/clip_fraction": num_clipped / sum(RESPONSE_LENGTHS),
        "value/explained_variance": (1 - errors.var(correction=0) / targets.var(correction=0)).item(),
    }


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("qwen2")


@pytest.fixture(scope="module", autouse=True)
def model(path: Path) -> torch.nn.Module:
    """A saved Qwen2ForSequenceClassification whose config declares tied embeddings (there is nothing to tie)."""
    return save_tiny_model(path, "qwen2", num_labels=1)


@pytest.fixture(scope="module")
def single(path: Path) -> Measured:
    """The run on one rank, with which the others are compared."""
    return train(Case(), path)


def assert_same(found: Measured, expected: Measured) -> None:
    for name in ("before", "after"):
        for got, want in zip(getattr(found, name), getattr(expected, name), strict=True):
            torch.testing.assert_close(got, want, rtol=TOLERANCE, atol=TOLERANCE, msg=name)
    for step, (got, want) in enumerate(zip(found.metrics, expected.metrics, strict=True)):
        assert got == pytest.approx(want, rel=TOLERANCE, abs=TOLERANCE), f"update {step + 1}"
    assert found.weights.keys() == expected.weights.keys()
    gaps = {name: (found.weights[name] - x).abs().max().item() for name, x in expected.weights.items()}
    assert max(gaps.values()) <= WEIGHT_TOLERANCE, {k: v for k, v in gaps.items() if v > WEIGHT_TOLERANCE}


def test_one_rank_equals_transformers_and_adamw(single: Measured, model: torch.nn.Module) -> None:
    """Clipped value loss, gradient clipping, warm-up and weight decay, written out independently."""
    first, second = single.metrics
    assert first["value/grad_norm"] > 0.5 and first["value/clip_fraction"] == 0.0 < second["value/clip_fraction"]
    assert torch.cat(single.before).std() > 0.1, "values near 0 would agree with anything"
    assert_same(single, train_with_transformers(copy.deepcopy(model)))


COVERED = {"tp2", "tp2-sp", "cp2-tp2-sp"}  # by the layouts that combine them with another


@pytest.mark.parametrize(
    "layout", [pytest.param(layout, marks=[pytest.mark.slow] * (layout in COVERED)) for layout in LAYOUTS]
)
def test_layout_does_not_change_the_numbers(layout: str, single: Measured, path: Path) -> None:
    assert_same(train(LAYOUTS[layout], path), single)


def test_experts_and_their_parallelism_do_not_change_the_numbers(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "qwen3_moe", num_labels=1, num_hidden_layers=2)
    assert_same(train(Case(2, dict(ep_size=2)), tmp_path), train(Case(), tmp_path))


def test_bfloat16_trains_like_float32(single: Measured, path: Path) -> None:
    """Sanity: bfloat16 keeps 8 bits of the weights and activations; the head itself is computed in float32."""
    found = train(replace(LAYOUTS["tp2-sp"], dtype="bfloat16"), path)
    assert max((a - b).abs().max() for a, b in zip(found.before, single.before, strict=True)) < 0.05
    assert found.metrics[0]["value/loss"] == pytest.approx(single.metrics[0]["value/loss"], rel=0.02)
    assert found.metrics[0]["value/grad_norm"] == pytest.approx(single.metrics[0]["value/grad_norm"], rel=0.02)


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_a_language_model_gets_a_head_of_zeros(family: str, tmp_path: Path) -> None:
    """Its values start at 0 (so they explain nothing), and two updates bring them nearer to the returns.

    The first update moves the head only: through a head of zeros no gradient reaches the rest.
    """
    save_tiny_model(tmp_path, family)
    case = Case(2, dict(pp_size=2), dict(lr=1e-3, weight_decay=0.0))
    found = train(case, tmp_path)
    assert not torch.cat(found.before).any() and torch.cat(found.after).any()
    first, second = found.metrics
    assert first["value/explained_variance"] == 0.0 and second["value/loss"] < first["value/loss"]
    saved = save_tiny_model(tmp_path / "again", family).state_dict()
    changed = {name for name, x in found.weights.items() if name not in saved or not torch.equal(x, saved[name])}
    assert changed == {"score.weight"}


def _save_on_rank(rank: int, world_size: int, case: Case, path: Path, target: Path) -> Any:
    critic = build_critic(case, path)
    batch, model = build_value_batch(critic, case), critic.model
    take_step(critic, batch)
    shards = group_shards(model.placements, model.shard_key, range(world_size))
    save_huggingface(
        target,
        ShardedModel(model.shape, shards, model.params, model.groups.world, model.dtype),
        side_files_from=path,
        bucket_bytes=4096,
    )
    values = critic.compute_values(batch)
    again = build_critic(case, target)
    return critic.model.groups.at, split_by_rollout(values, batch), torch.equal(again.compute_values(batch), values)


def test_a_saved_critic_loads_again_and_in_transformers(tmp_path: Path) -> None:
    """Made from a language model: the saved config.json has the new architecture."""
    path, target = tmp_path / "model", tmp_path / "critic"
    save_tiny_model(path, "qwen2")
    ranks = run_ranks(_save_on_rank, 4, LAYOUTS["tp2-pp2-sp"], path, target, timeout=100)
    assert all(is_same for *_, is_same in ranks)
    check_checkpoint(target, load_model_shape(target, head="score"))
    loaded, info = AutoModelForSequenceClassification.from_pretrained(target, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert type(loaded).__name__ == "Qwen2ForSequenceClassification" and loaded.config.num_labels == 1
    with torch.no_grad():
        expected = cut_responses(compute_transformers_values(loaded.eval()))
    for got, want in zip(merge_rollouts([(at, values) for at, values, _ in ranks]), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=TOLERANCE, atol=TOLERANCE)
