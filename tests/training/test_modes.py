# SPDX-License-Identifier: Apache-2.0
"""Training memory is released while the engine generates, and restored bit for bit.

On CPU the same calls run as on a GPU; only a GPU can show that a device's memory really shrinks (the storages are
checked here).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from role_setups import make_setup, take_step

from actor_runs import Case, build_actor, build_batch, list_pieces
from distributed import run_ranks
from megatron_rl.config.schema import ActorConfig, AlgorithmConfig
from megatron_rl.parallel.groups import build_groups
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.training.roles.frozen import Reference
from tiny_models import save_tiny_model


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    save_tiny_model(directory, "qwen2")
    return directory


def grad_bytes(actor: Any) -> int:
    """Memory of the gradient buffers."""
    return sum(b.grad_data.untyped_storage().nbytes() for m in actor.model.modules for b in m.buffers)


def train(rank: int, world_size: int, path: Path, case: Case, is_released: bool) -> dict[str, Any]:
    """Three updates, each after a visit to the other mode."""
    actor = build_actor(case, path)
    batch = build_batch(actor.model, case)
    before, released, states = grad_bytes(actor), [], []
    for _ in range(3):
        if is_released:
            actor.optimizer.release()
            released.append(grad_bytes(actor))
            memory = actor.optimizer._host_memory
            states.append(0 if memory is None else len(memory._block))
        batch = replace(batch, old_logprobs=actor.compute_logprobs(batch))
        for minibatch in batch.minibatches():
            metrics = take_step(actor, minibatch, AlgorithmConfig())
    numel = sum(p.numel() for adam in actor.optimizer.adams for group in adam.param_groups for p in group["params"])
    return {
        "before": before,
        "released": released,
        "states": states,
        "numel": numel,
        "metrics": metrics,
        "weights": list_pieces(actor.model),
    }


@pytest.mark.parametrize(
    ("dtype", "options", "floats"),
    [
        ("float32", {"offload_gradients": True}, (0, 0)),
        ("float32", {"offload_gradients": True, "offload_optimizer": True}, (0, 2)),
        ("bfloat16", {"offload_gradients": True, "offload_optimizer": True}, (1, 3)),
        (
            "bfloat16",
            {"offload_gradients": True, "offload_optimizer": True, "zero_stage": 0},
            (1, 3),
        ),
        ("float32", {"offload_gradients": True, "offload_optimizer": "stream"}, (0, 0)),
        ("bfloat16", {"offload_gradients": True, "offload_optimizer": "stream"}, (1, 1)),
        ("bfloat16", {"offload_gradients": True, "offload_optimizer": "stream", "zero_stage": 0}, (1, 1)),
    ],
)
def test_released_training_memory_changes_no_bit(
    path: Path, dtype: str, options: dict[str, Any], floats: tuple[int, int]
) -> None:
    """Gradient buffers are empty in between; three updates end in the same weights as without.

    The host holds `floats` per parameter of the rank, before and after the first update has made Adam's moments: with
    bfloat16 the main weights as well, with float32 not the weights, which are the model's own. Streamed moments have
    memory of their own.
    """
    case = replace(Case(2, {}), dtype=dtype)
    own = {name: value for name, value in options.items() if name == "zero_stage"}
    plain = run_ranks(train, 2, path, replace(case, actor=case.actor | own), False, timeout=60)
    modes = run_ranks(train, 2, path, replace(case, actor=case.actor | options), True, timeout=60)
    for mine, reference in zip(modes, plain, strict=True):
        assert mine["before"] > 0 and mine["released"] == [0, 0, 0]
        before, after = (4 * mine["numel"] * count for count in floats)
        for found, expected in zip(mine["states"], (before, after, after), strict=True):
            assert expected <= found <= expected + 100 * 512, "each tensor is rounded up to 512 bytes"
        assert mine["metrics"] == reference["metrics"]
        for (name, _, a), (_, _, b) in zip(mine["weights"], reference["weights"], strict=True):
            assert torch.equal(a, b), name


def test_offloaded_reference_scores_the_same(path: Path) -> None:
    """Its parameters are empty before and after it scores."""

    def score(rank: int, world_size: int) -> tuple[list[torch.Tensor], list[int]]:
        groups = build_groups(ParallelLayout(world_size, tp_size=2))
        config = ActorConfig(sequence_parallel=True)
        results, sizes = [], []
        for offload in (False, True):
            reference = Reference(make_setup("reference", path, config, groups, spec=dict(offload=offload)))
            batch = build_batch(reference.model, Case(world_size, {"tp_size": 2}))
            results += [reference.compute_logprobs(batch) for _ in range(2)]
            sizes.append(sum(p.numel() for p in reference.model.stages.parameters()))
            assert not any(p.requires_grad for p in reference.model.stages.parameters())
        return results, sizes

    for results, (kept, offloaded) in run_ranks(score, 2, timeout=60):
        assert kept > 0 and offloaded == 0
        assert all(torch.equal(result, results[0]) for result in results)
