# SPDX-License-Identifier: Apache-2.0
"""The learning rate of every step, the gradient norm with and without clipping, and overlapped gradient reduction.

test_actor.py compares weight updates with torch's AdamW.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from role_setups import take_step

from actor_runs import ALGORITHM, Case, build_actor, build_batch, list_pieces
from distributed import run_ranks
from megatron_rl.training import packed_model
from megatron_rl.training.optimizer import sum_squares
from tiny_models import save_tiny_model

HALVES, FULL = ((0, 1, 2, 3), (4, 5, 6, 7)), dict(recompute_granularity="full")
MAX_LR, MIN_LR, WARMUP, TOTAL = 1e-3, 1e-4, 2, 6


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    save_tiny_model(directory, "llama", num_hidden_layers=2)
    return directory


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("qwen3_moe")
    save_tiny_model(directory, "qwen3_moe")
    return directory


def _step_without_gradients(rank: int, world_size: int, path: Path, actor: dict[str, Any], steps: int) -> list[float]:
    settings = dict(lr=MAX_LR, min_lr=MIN_LR, lr_warmup_steps=WARMUP) | actor
    optimizer = build_actor(Case(actor=settings), path, total_optimizer_steps=TOTAL).optimizer
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        found.append(optimizer.advance_schedule())
        optimizer.finish()
        assert {group["lr"] for group in optimizer.megatron.param_groups} == {found[-1]}
    return found


def learning_rates(path: Path, steps: int = TOTAL + 2, **actor: Any) -> list[float]:
    return run_ranks(_step_without_gradients, 1, path, actor, steps, timeout=60)[0]


def test_constant(path: Path) -> None:
    """Step k of a warm-up of W uses lr * k / W: the first is not wasted with lr 0."""
    assert learning_rates(path) == pytest.approx([5e-4] + [1e-3] * 7)


def test_linear_decay_reaches_the_minimum_at_the_last_step(path: Path) -> None:
    expected = [5e-4, 1e-3, 7.75e-4, 5.5e-4, 3.25e-4, 1e-4, 1e-4, 1e-4]
    assert learning_rates(path, lr_decay_style="linear") == pytest.approx(expected)


def test_cosine_decay(path: Path) -> None:
    middle = [MIN_LR + (MAX_LR - MIN_LR) * 0.5 * (1 + math.cos(math.pi * k / 4)) for k in (1, 2, 3)]
    assert learning_rates(path, lr_decay_style="cosine") == pytest.approx([5e-4, 1e-3, *middle, 1e-4, 1e-4, 1e-4])


@pytest.mark.parametrize("style", ["constant", "linear", "cosine"])
def test_warm_up_longer_than_the_run(style: str, path: Path) -> None:
    found = learning_rates(path, steps=TOTAL, lr_warmup_steps=8, lr_decay_style=style)
    assert found == pytest.approx([MAX_LR * k / 8 for k in range(1, TOTAL + 1)])


def test_no_warm_up(path: Path) -> None:
    assert learning_rates(path, steps=2, lr_warmup_steps=0) == pytest.approx([1e-3, 1e-3])
    share = learning_rates(path, steps=TOTAL, lr_warmup_steps=0.5)
    assert share == learning_rates(path, steps=TOTAL, lr_warmup_steps=3)


def _gradient_norm(rank: int, world_size: int, path: Path, case: Case) -> float:
    actor = build_actor(case, path)
    batch = build_batch(actor.model, case)
    batch = replace(batch, old_logprobs=actor.compute_logprobs(batch))
    return take_step(actor, batch, ALGORITHM)["policy/grad_norm"]


@pytest.mark.parametrize("use_distributed_optimizer", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradient_norm_is_reported_before_clipping_and_without_it(
    dtype: str, use_distributed_optimizer: bool, path: Path
) -> None:
    found = []
    for clip_grad in (0.0, 0.1, 1e6):
        settings = dict(clip_grad=clip_grad, zero_stage=int(use_distributed_optimizer))
        (norm,) = run_ranks(_gradient_norm, 1, path, Case(actor=settings, dtype=dtype), timeout=60)
        found.append(norm)
    assert found[0] > 0.5 and found == pytest.approx([found[0]] * 3, rel=1e-5)


def _scale_gradients(rank: int, world_size: int, path: Path, clip_grad: float) -> tuple[float, torch.Tensor]:
    """The norm before clipping, and the gradients that the optimizer used."""
    actor = build_actor(Case(actor=dict(clip_grad=clip_grad)), path)
    batch = build_batch(actor.model, Case())
    norm = take_step(actor, replace(batch, old_logprobs=actor.compute_logprobs(batch)), ALGORITHM)["policy/grad_norm"]
    (adam,) = actor.optimizer.adams
    return norm, torch.cat([p.grad.flatten() for group in adam.param_groups for p in group["params"]])


def test_norms_of_large_gradients_have_the_precision_of_float32() -> None:
    """The embedding of a published model on a CPU, where torch is 1e-3 off; its parts have the same sum."""
    large = torch.randn(28_311_552, generator=torch.Generator().manual_seed(0)) * 1e-4
    exact = large.double().square().sum().item()
    found = [sum_squares([large]).item(), sum(sum_squares([part]).item() for part in large.view(3, -1))]
    assert found == pytest.approx([exact, exact], rel=1e-6)


def test_clipping_makes_gradients_smaller_and_never_larger(path: Path) -> None:
    (norm, whole), *clipped = (run_ranks(_scale_gradients, 1, path, limit, timeout=60)[0] for limit in (0, 0.1, 1e6))
    assert norm > 0.5 and whole.norm() == pytest.approx(norm, rel=1e-5)
    torch.testing.assert_close(clipped[0][1], whole * 0.1 / norm, rtol=1e-4, atol=0)
    assert torch.equal(clipped[1][1], whole), "a limit that is not reached changes no bit"


def _follow_coefficients(rank: int, world_size: int, path: Path, coefficients: list[float]) -> list[float]:
    """Losses of weights that stay."""
    actor = build_actor(Case(actor=dict(lr=0.0)), path)
    batch = build_batch(actor.model, Case())
    batch = replace(batch, old_logprobs=actor.compute_logprobs(batch))
    return [take_step(actor, batch, replace(ALGORITHM, kl_coef=kl_coef))["policy/loss"] for kl_coef in coefficients]


def test_every_step_has_its_own_kl_coefficient(path: Path) -> None:
    """As a controller moves it: the loss is linear in it."""
    (losses,) = run_ranks(_follow_coefficients, 1, path, [0.1, 0.2, 0.4, 0.1], timeout=60)
    first, second, third, again = losses
    assert second - first > 1e-3 and third - first == pytest.approx(3 * (second - first), rel=1e-4) and again == first


def _update_thrice(rank: int, world_size: int, path: Path, case: Case) -> Any:
    actor = build_actor(case, path)
    batch = build_batch(actor.model, case)
    batch = replace(batch, old_logprobs=actor.compute_logprobs(batch))
    assert len(batch.slices) > 1
    return [take_step(actor, batch, ALGORITHM) for _ in range(3)], list_pieces(actor.model)


@pytest.mark.parametrize("sizes", [{}, dict(pp_size=2)])
@pytest.mark.parametrize("use_distributed_optimizer", [True, False])
def test_overlapped_gradient_reduction_changes_no_bit(
    use_distributed_optimizer: bool, sizes: dict[str, int], path: Path
) -> None:
    """Over two DP ranks, with several microbatches: only the last one's gradients are reduced on the way."""
    settings = dict(zero_stage=int(use_distributed_optimizer))
    results = []
    for overlaps in (False, True):
        case = Case(2 * len(sizes) + 2, sizes, settings | dict(overlap_grad_reduce=overlaps), max_tokens=30)
        results.append(run_ranks(_update_thrice, case.world_size, path, case, timeout=100))
    for (metrics, pieces), (expected, expected_pieces) in zip(*results, strict=True):
        assert metrics == expected
        assert all(torch.equal(a, b) for (_, _, a), (_, _, b) in zip(pieces, expected_pieces, strict=True))


def _list_moved_params(rank: int, world_size: int, path: Path, case: Case) -> list[str]:
    model = build_actor(case, path).model
    return [name for name, p in model.stages.named_parameters() if p.data_ptr() != model.params[name].data_ptr()]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("is_sharded", [True, False])
def test_the_parameters_of_a_model_are_where_the_optimizer_updates_them(
    path: Path, is_sharded: bool, dtype: str
) -> None:
    """DDP moves them into buffers; engines and checkpoints take them from `PackedModel.params`."""
    case = Case(2, actor=dict(zero_stage=int(is_sharded)), dtype=dtype)
    assert run_ranks(_list_moved_params, 2, path, case, timeout=60) == [[], []]


_IN_PARTS = partial(packed_model.DistributedDataParallelConfig, bucket_size=5000)
TP2_SP = dict(ep_size=2, etp_size=1, tp_size=2), dict(sequence_parallel=True)


def _update_experts(rank: int, world_size: int, path: Path, case: Case) -> Any:
    """Three steps; in the second, all tokens and the padding go to the first two of four experts."""
    with pytest.MonkeyPatch.context() as patch:
        if case.actor.get("zero_stage") == 0:  # ZeRO sums the squares of a gradient norm by message
            patch.setattr(packed_model, "DistributedDataParallelConfig", _IN_PARTS)
        actor = build_actor(case, path)
    batch = build_batch(actor.model, case)
    batch = replace(batch, old_logprobs=actor.compute_logprobs(batch))
    assert len(batch.slices) > 1
    routes = torch.arange(2, dtype=torch.uint8).expand(len(batch.tokens), actor.model.shape.num_layers, 2)
    metrics = [take_step(actor, replace(batch, replayed_routes=given), ALGORITHM) for given in (None, routes, None)]
    wrapped = actor.model.ddp[0]
    return metrics, list_pieces(actor.model), len(wrapped.bucket_groups), len(wrapped.expert_parallel_bucket_groups)


@pytest.mark.parametrize(
    ("case", "num_groups"),
    [
        (Case(2, max_tokens=30), (1, 0)),
        (Case(2, {}, dict(zero_stage=0), max_tokens=30), (18, 0)),
        (Case(2, dict(ep_size=2), max_tokens=30), (1, 1)),
        (Case(2, dict(ep_size=2), dict(zero_stage=0), max_tokens=30), (10, 8)),
        (Case(4, dict(ep_size=2), minibatches=HALVES), (1, 1)),
        (Case(4, dict(ep_size=2, pp_size=2, vpp_size=2), FULL, max_tokens=30), (1, 1)),
        (Case(2, *TP2_SP), (1, 1)),
    ],
)
def test_overlapped_reduction_of_experts_changes_no_bit(case: Case, num_groups: tuple[int, int], mixture: Path) -> None:
    """Experts and ranks without a token in all microbatches send gradients of zero in their turn.

    `num_groups`: messages of dense parameters and of experts. With EP 1, experts are reduced with the rest.
    """
    plain, early = (
        run_ranks(_update_experts, case.world_size, mixture, replace(case, actor=case.actor | settings), timeout=100)
        for settings in ({}, dict(overlap_grad_reduce=True))
    )
    for (metrics, pieces, *found), (expected, expected_pieces, *_) in zip(early, plain, strict=True):
        assert metrics == expected and metrics[1]["moe/dead_experts"] == 2 * 4
        assert tuple(found) == num_groups
        assert all(torch.equal(a, b) for (_, _, a), (_, _, b) in zip(pieces, expected_pieces, strict=True))
