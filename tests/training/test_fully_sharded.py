# SPDX-License-Identifier: Apache-2.0
"""ZeRO-3 trains as ZeRO-1 does, and a rank holds its share of the weights, their gradients and their states only.

Compared over three updates: log-probs, every metric, all weights in HF coordinates. Not covered: CUDA, Transformer
Engine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from role_setups import make_setup, take_step
from storage_watch import measure_peak

import actor_runs
from actor_runs import (
    ALGORITHM,
    Case,
    build_actor,
    build_batch,
    list_pieces,
    merge_rollouts,
    merge_weights,
    split_by_rollout,
)
from distributed import run_ranks
from megatron_rl.config.schema import ActorConfig
from megatron_rl.parallel.groups import build_groups
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.training.roles.frozen import Reference
from megatron_rl.weights.megatron_layout import ROUTER_BIAS
from tiny_models import save_tiny_model

SP, FULL, SELECTIVE = dict(sequence_parallel=True), "full", "selective"


def case(world_size: int, recompute: str = "none", actor: dict[str, Any] | None = None, **sizes: int) -> Case:
    settings = dict(lr=1e-4, recompute_granularity=recompute) | (actor or {})
    return Case(world_size, {f"{axis}_size": size for axis, size in sizes.items()}, settings)


LAYOUTS = {
    "dp2-selective": case(2, SELECTIVE),
    "dp3-full": case(3, FULL),
    "tp2-dp2-sp": case(4, actor=SP, tp=2),
    "pp2-dp2-full": case(4, FULL, pp=2),
    "pp2-vpp2-dp2": case(4, pp=2, vpp=2),
    "cp2-dp2": case(4, cp=2),
}
EXPERT_LAYOUTS = {
    "dp2": case(2),
    "ep2": case(2, ep=2),
    "ep2-dp4-full": case(4, FULL, ep=2),
    "ep2-tp2-sp": case(4, actor=SP, tp=2, ep=2),
}
# Layouts with replicas of shards, and the family that they train; the layout without is compared.
HYBRID_LAYOUTS = {
    "2-of-4": ("qwen2", case(4, shard=2)),
    "2-of-cp2-dp2-selective": ("qwen3", case(4, SELECTIVE, cp=2, shard=2)),
    "1-of-dp2-tp2-sp": ("qwen2", case(4, actor=SP, tp=2, shard=1)),
    "1-of-dp2-pp2": ("qwen2", case(4, pp=2, shard=1)),
    "experts-2-of-4": ("qwen3_moe", case(4, shard=2)),
    "experts-whole-of-ep2-dp4-full": ("qwen3_moe", case(4, FULL, ep=2, shard=2)),
}
OFFLOADED = (dict(offload_optimizer=True), dict(offload_optimizer="stream"))
TOLERANCE = 1e-6


@dataclass
class Found:
    """Results of three updates."""

    logprobs: list[torch.Tensor]
    metrics: list[dict[str, float]]
    weights: dict[str, torch.Tensor]
    held: list[int]


def _train_on_rank(rank: int, world_size: int, case: Case, path: Path) -> dict[str, Any]:
    actor = build_actor(case, path)
    model = actor.model
    batch = build_batch(model, case)
    batch = replace(batch, old_logprobs=actor.compute_logprobs(batch))
    minibatch = next(batch.minibatches())
    metrics = [take_step(actor, minibatch, ALGORITHM) for _ in range(3)]
    logprobs = split_by_rollout(actor.compute_logprobs(batch), batch)
    held = sum(p.numel() for name, p in model.params.items() if not name.endswith(ROUTER_BIAS))
    if model.is_fully_sharded:
        groups = [group for adam in actor.optimizer.adams for group in adam.param_groups]
        shards = [p for group in groups for p in group["params"]]
        states = [x for adam in actor.optimizer.adams for state in adam.state.values() for x in state.values()]
        assert sum(p.numel() for p in shards) == sum(p.grad.numel() for p in shards) == held
        assert sum(x.numel() for x in states if x.dim()) == 2 * held
        own = {p.untyped_storage().data_ptr() for name, p in model.params.items() if not name.endswith(ROUTER_BIAS)}
        assert {p.untyped_storage().data_ptr() for p in shards} == own, "what is updated is what is gathered"
    return dict(at=model.groups.at, logprobs=logprobs, metrics=metrics, pieces=list_pieces(model), held=held)


def train(case: Case, path: Path, stage: int) -> Found:
    case = replace(case, actor=case.actor | dict(zero_stage=stage))
    ranks = run_ranks(_train_on_rank, case.world_size, case, path, timeout=100)
    assert all(found["metrics"] == ranks[0]["metrics"] for found in ranks)
    return Found(
        merge_rollouts([(found["at"], found["logprobs"]) for found in ranks]),
        ranks[0]["metrics"],
        merge_weights([found["pieces"] for found in ranks], path),
        [found["held"] for found in ranks],
    )


def assert_same(found: Found, expected: Found) -> None:
    gaps = [(a - b).abs().max().item() for a, b in zip(found.logprobs, expected.logprobs, strict=True)]
    assert max(gaps) <= TOLERANCE, f"log-probs: {max(gaps)}"
    gaps = [(found.weights[name] - x).abs().max().item() for name, x in expected.weights.items()]
    assert max(gaps) <= TOLERANCE, f"weights: {max(gaps)}"
    for step, (got, want) in enumerate(zip(found.metrics, expected.metrics, strict=True)):
        assert got == pytest.approx(want, rel=2e-6, abs=1e-6), f"update {step + 1}"


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """qwen2 has tied embeddings and QKV biases, qwen3 neither but QK norms; the last two have sigmoid routers."""
    families = ("qwen2", "qwen3", "qwen3_moe", "glm4_moe", "deepseek_v3")
    found = {family: tmp_path_factory.mktemp(family) for family in families}
    for family, path in found.items():
        save_tiny_model(path, family)
    return found


@pytest.mark.parametrize(
    ("layout", "family"),
    [
        pytest.param(layout, family, marks=[pytest.mark.slow] * ((i + j) % 2 or layout == "pp2-dp2-full"))
        for i, layout in enumerate(LAYOUTS)
        for j, family in enumerate(("qwen2", "qwen3"))
    ],
)
def test_three_updates_equal_zero_1(layout: str, family: str, paths: dict[str, Path]) -> None:
    expected, found = (train(LAYOUTS[layout], paths[family], stage) for stage in (1, 3))
    assert_same(found, expected)
    assert_shared(LAYOUTS[layout], found, expected)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(layout, marks=[pytest.mark.slow] * (layout == "ep2"))
        for layout in EXPERT_LAYOUTS
        if layout != "ep2-tp2-sp"
    ],
)
def test_experts_are_shared_by_their_replicas(layout: str, paths: dict[str, Path]) -> None:
    """Experts spread over ranks have fewer replicas than other parameters; with one replica, they are whole.

    The combination with tensor parallelism is below, with router biases.
    """
    case = EXPERT_LAYOUTS[layout]
    expected, found = (train(case, paths["qwen3_moe"], stage) for stage in (1, 3))
    assert_same(found, expected)
    if "ep_size" not in case.sizes:
        assert_shared(case, found, expected)


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("glm4_moe", "ep2-tp2-sp"),
        *(pytest.param("glm4_moe", layout, marks=pytest.mark.slow) for layout in ("ep2-dp4-full", "pp2-dp2-full")),
        *(
            pytest.param("deepseek_v3", layout, marks=pytest.mark.slow)
            for layout in ("ep2-dp4-full", "ep2-tp2-sp", "pp2-dp2-full")
        ),
    ],
)
def test_biases_of_routers_move_alike(family: str, layout: str, paths: dict[str, Path]) -> None:
    """Every rank has them whole (see `merge_weights`), beside a dense layer, shared experts and latent attention."""
    case = (EXPERT_LAYOUTS | LAYOUTS)[layout]
    case = replace(case, actor=case.actor | dict(router_bias_rate=0.01))
    expected, found = (train(case, paths[family], stage) for stage in (1, 3))
    assert_same(found, expected)
    biases = [name for name in expected.weights if name.endswith("e_score_correction_bias")]
    assert biases and all(torch.equal(found.weights[name], expected.weights[name]) for name in biases)
    assert found.metrics[0]["moe/bias_norm"] != found.metrics[2]["moe/bias_norm"]
    if "ep_size" not in case.sizes:
        assert_shared(case, found, expected)


def assert_shared(case: Case, found: Found, expected: Found) -> None:
    """Together the replicas hold the model once, and each about as much as the others."""
    replicas = case.world_size // (case.sizes.get("tp_size", 1) * case.sizes.get("pp_size", 1))
    assert sum(found.held) * replicas == sum(expected.held)
    for mine, whole in zip(found.held, expected.held, strict=True):
        assert mine == pytest.approx(whole / replicas, rel=0.05)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name not in ("2-of-4", "experts-whole-of-ep2-dp4-full")))
        for name in HYBRID_LAYOUTS
    ],
)
def test_replicas_of_shards_train_as_one_group_of_shards(name: str, paths: dict[str, Path]) -> None:
    """All replicas have the same bits (see `merge_weights`), and the norm counts one of them."""
    family, hybrid = HYBRID_LAYOUTS[name]
    whole = replace(hybrid, sizes={axis: size for axis, size in hybrid.sizes.items() if axis != "shard_size"})
    found, expected = (train(case, paths[family], 3) for case in (hybrid, whole))
    assert_same(found, expected)
    if "ep_size" not in hybrid.sizes:
        ranks = hybrid.world_size // (hybrid.sizes.get("tp_size", 1) * hybrid.sizes.get("pp_size", 1))
        assert sum(found.held) == sum(expected.held) * ranks // hybrid.sizes["shard_size"]


def test_replicas_of_shards_train_as_one_rank(paths: dict[str, Path]) -> None:
    hybrid = case(4, actor=dict(lr=1e-3, zero_stage=3), shard=2)
    actor_runs.assert_same(*(actor_runs.train(case, paths["qwen2"]) for case in (hybrid, Case())))


def test_one_group_of_all_ranks_has_the_bits_of_no_groups(paths: dict[str, Path]) -> None:
    found, expected = (train(case(4, **sizes), paths["qwen2"], 3) for sizes in (dict(shard=4), {}))
    assert (found.metrics, found.held) == (expected.metrics, expected.held)
    assert all(torch.equal(found.weights[name], x) for name, x in expected.weights.items())


def test_bfloat16_trains_as_zero_1_does(paths: dict[str, Path]) -> None:
    """Gathered weights equal those of ZeRO-1, up to a weight that is rounded to its other side."""
    expected, found = (train(replace(LAYOUTS["dp2-selective"], dtype="bfloat16"), paths["qwen3"], n) for n in (1, 3))
    assert found.metrics[0] == pytest.approx(expected.metrics[0], rel=1e-5)
    for name in ("policy/loss", "policy/grad_norm"):
        assert found.metrics[2][name] == pytest.approx(expected.metrics[2][name], rel=0.01)
    for name, weights in expected.weights.items():
        assert ((found.weights[name] - weights).abs() <= weights.abs() / 64 + 1e-3).all(), name


def _build_on_rank(rank: int, world_size: int, case: Case, path: Path) -> tuple[int, int, int]:
    """Bytes at the peak of building an actor, of its shards, and of the model."""
    held: list[Any] = []
    peak = measure_peak(lambda: held.append(build_actor(case, path)))
    model = held[0].model
    whole = sum(math.prod(size) for size in model.shape.logical_tensors().values())
    return peak, sum(p.nbytes for p in model.params.values()), 4 * whole


def test_no_rank_ever_has_the_whole_model(tmp_path: Path) -> None:
    """During construction: one layer's piece beside the shards, of a model of sixteen layers."""
    save_tiny_model(tmp_path, "llama", num_hidden_layers=16)
    for peak, held, whole in run_ranks(_build_on_rank, 4, case(4, actor=dict(zero_stage=3)), tmp_path, timeout=100):
        assert held <= peak <= 1.25 * held < 0.4 * whole


def _score_on_rank(rank: int, world_size: int, case: Case, path: Path) -> list[torch.Tensor]:
    """Log-probs of a reference whose ranks share its weights, twice, and of one that each rank has."""
    groups = build_groups(ParallelLayout(world_size, **case.sizes))
    found = []
    for stage in (3, 1):
        reference = Reference(make_setup("reference", path, ActorConfig(zero_stage=stage), groups, dtype=case.dtype))
        batch = build_batch(reference.model, case)
        found += [reference.compute_logprobs(batch) for _ in range(2)]
        assert not any(p.requires_grad for p in reference.model.stages.parameters())
        wide = {name for name in reference.model.params if name.endswith(ROUTER_BIAS)}
        for name, p in reference.model.params.items():
            assert p.dtype == (torch.float32 if name in wide else reference.model.dtype)
    return found


@pytest.mark.parametrize(
    ("dtype", "family", "layout"),
    [
        ("float32", "qwen2", LAYOUTS["pp2-dp2-full"]),
        ("bfloat16", "qwen2", HYBRID_LAYOUTS["2-of-4"][1]),
        ("bfloat16", "glm4_moe", LAYOUTS["pp2-dp2-full"]),
    ],
    ids=["float32-qwen2", "bfloat16-qwen2-replicas", "bfloat16-glm4_moe"],
)
def test_a_reference_scores_with_shared_weights(dtype: str, family: str, layout: Case, paths: dict[str, Path]) -> None:
    case = replace(layout, dtype=dtype)
    for found in run_ranks(_score_on_rank, 4, case, paths[family], timeout=60):
        assert all(torch.equal(found[0], other) for other in found[1:])


def _release_on_rank(rank: int, world_size: int, case: Case, path: Path) -> list[Any]:
    """Return the metrics of two updates with a release between them: without offloading, and with both kinds of it."""
    settings = ({}, *(dict(offload_gradients=True, **kind) for kind in OFFLOADED))
    actors = [build_actor(replace(case, actor=case.actor | own), path) for own in settings]
    batch = build_batch(actors[0].model, case)
    batch = replace(batch, old_logprobs=actors[0].compute_logprobs(batch))
    metrics = []
    for actor in actors:
        first = take_step(actor, batch, ALGORITHM)
        actor.optimizer.release()
        metrics.append([first, take_step(actor, batch, ALGORITHM)])
    return metrics


def test_states_and_gradients_come_back(paths: dict[str, Path]) -> None:
    """The float32 weights of a bfloat16 model are its shards, and stay."""
    case = Case(2, actor=dict(zero_stage=3), dtype="bfloat16")
    for plain, released, streamed in run_ranks(_release_on_rank, 2, case, paths["qwen2"], timeout=60):
        assert plain == released == streamed
