# SPDX-License-Identifier: Apache-2.0
"""Gradients of several minibatches add up until the optimizer step, in every layout and step mode.

Minibatches in the order of one call's microbatches give its bits; another order is the same sum up to float32 rounding.
 Not covered: CUDA graphs.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from role_setups import take_step

from actor_runs import ALGORITHM, Case, build_actor, build_batch, list_pieces
from distributed import run_ranks
from megatron_rl.parallel.groups import build_groups
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.samples.batch import TrainBatch
from megatron_rl.training.given_losses import sft
from megatron_rl.training.roles.actor import Actor
from megatron_rl.types import UserError
from step_runs import Setup, build_ragged_batch, build_role
from tiny_models import save_tiny_model

HALVES = ((0, 1, 2, 3), (4, 5, 6, 7))
CASES = {
    "single": Case(minibatches=HALVES),
    "tp2-sp": Case(2, dict(tp_size=2), dict(sequence_parallel=True), minibatches=HALVES),
    "pp2": Case(2, dict(pp_size=2), minibatches=HALVES),
    "dp2": Case(2, minibatches=HALVES),
    "dp2-zero3": Case(2, actor=dict(zero_stage=3), minibatches=HALVES),
    "experts": Case(2, dict(ep_size=2), minibatches=HALVES),
    "offloaded": Case(2, actor=dict(offload_gradients=True, offload_optimizer=True), minibatches=HALVES),
}
ROUNDING = 1e-6  # relative to the largest gradient


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    paths = {family: tmp_path_factory.mktemp(family) for family in ("qwen2", "qwen3_moe")}
    for family, path in paths.items():
        save_tiny_model(path, family)
    return paths


@pytest.fixture(scope="module")
def model(models: dict[str, Path]) -> Path:
    return models["qwen2"]


def join(batch: TrainBatch) -> TrainBatch:
    """All minibatches as one."""
    return replace(batch, minibatch_sizes=[len(batch.slices)])


def used_gradients(actor: Actor) -> torch.Tensor:
    """What this rank's optimizer has used."""
    groups = [group for adam in actor.optimizer.adams for group in adam.param_groups]
    return torch.cat([p.grad.flatten() for group in groups for p in group["params"]])


def learn(actor: Actor, parts: list[TrainBatch], release: bool) -> dict[str, float]:
    for part in parts:
        actor.forward_backward(part, ALGORITHM)
        if release:  # what a rollout between two calls does
            actor.optimizer.release()
    return actor.optim_step()


def accumulate(rank: int, world_size: int, case: Case, path: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for order in ("one", "parts", "reversed"):
        actor = build_actor(case, path)
        batch = build_batch(actor.model, case)
        batch = replace(batch, old_logprobs=actor.compute_logprobs(batch) - 0.1)
        first, second = batch.minibatches()
        parts = {"one": [join(batch)], "parts": [first, second], "reversed": [second, first]}[order]
        metrics = learn(actor, parts, "offload_gradients" in case.actor)
        found[order] = metrics, used_gradients(actor), [piece[2] for piece in list_pieces(actor.model)]
        assert actor.policy_version == 1
    before = [piece[2] for piece in list_pieces(actor.model)]
    assert actor.optim_step() == {} and actor.policy_version == 1  # no gradients: no step
    assert all(map(torch.equal, before, [piece[2] for piece in list_pieces(actor.model)]))
    return found


@pytest.mark.parametrize("layout", CASES)
def test_minibatches_add_up(layout: str, models: dict[str, Path]) -> None:
    case, path = CASES[layout], models["qwen3_moe" if layout == "experts" else "qwen2"]
    for found in run_ranks(accumulate, case.world_size, case, path, timeout=100):
        (metrics, gradients, weights), high = found["one"], found["one"][1].abs().max()
        for order in ("parts", "reversed"):
            got, other, others = found[order]
            assert got == pytest.approx(metrics, rel=1e-6, abs=1e-9)
            assert (other - gradients).abs().max() <= ROUNDING * high
            if order == "parts" and layout != "dp2-zero3":
                assert torch.equal(other, gradients) and all(map(torch.equal, weights, others))
        assert metrics["policy/grad_norm"] > 0.1


def fail_between(rank: int, world_size: int, path: Path) -> None:
    """A pass that fails drops all gradients, a load as well; other losses add up; reduced gradients refuse more."""
    case = CASES["single"]
    actor = build_actor(case, path)
    first, second = build_batch(actor.model, case).minibatches()

    def broken(batch: TrainBatch, logprobs: torch.Tensor, entropy: torch.Tensor) -> Any:
        raise ValueError("no loss")

    actor.forward_backward(first, sft)
    with pytest.raises(ValueError, match="no loss"):
        actor.forward_backward(second, broken)
    assert actor.optim_step() == {}
    actor.forward_backward(first, sft)
    actor.optimizer.resume(0, {"num_steps": 0})
    assert actor.optim_step() == {} and actor.policy_version == 0
    alone = take_step(build_actor(case, path), first, sft)["sft/loss"]
    actor.forward_backward(replace(first, old_logprobs=first.rollout_logprobs), ALGORITHM)
    policy = replace(first, old_logprobs=first.rollout_logprobs)
    expected = take_step(build_actor(case, path), policy, ALGORITHM)["policy/loss"] + alone
    actor.forward_backward(first, sft)
    assert actor.optim_step()["sft/loss"] == pytest.approx(expected, rel=1e-6)
    early = build_actor(replace(case, actor=dict(overlap_grad_reduce=True)), path)
    early.forward_backward(first, sft)
    with pytest.raises(UserError, match="overlap_grad_reduce = True has reduced"):
        early.forward_backward(second, sft)


def test_a_failed_pass_leaves_no_gradients(model: Path) -> None:
    run_ranks(fail_between, 1, model, timeout=60)


def run_static(rank: int, world_size: int, path: Path) -> list[torch.Tensor]:
    found = []
    for mode in ("eager", "static"):
        groups = build_groups(ParallelLayout(world_size))
        role: Any = build_role(Setup(), path, groups, mode)
        batch = build_ragged_batch(role.model, role.model.buckets, 0, shares_prompts=False)
        for part in batch.minibatches():
            role.forward_backward(replace(part, old_logprobs=part.rollout_logprobs), ALGORITHM)
        role.optim_step()
        found.append(used_gradients(role))
    return found


def test_static_steps_add_up(model: Path) -> None:
    eager, static = run_ranks(run_static, 1, model, timeout=60)[0]
    assert eager.abs().max() > 1e-3 and (eager - static).abs().max() <= ROUNDING * eager.abs().max()
