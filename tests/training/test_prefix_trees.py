# SPDX-License-Identifier: Apache-2.0
"""Log-probs and gradients of branches packed as prefix trees equal those of branches packed whole, on every layout.

Four ways of three turns, in two rollouts, and a branch sampled at tokens that are only context in another one. Not
covered: CUDA, whose kernels see the same segments (tests/models/test_attention_backends.py).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from role_setups import take_step

from distributed import run_ranks
from megatron_rl.parallel.groups import build_groups
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.samples.batch import TrainBatch
from megatron_rl.types import Branch, Rollout
from tiny_models import VOCAB_SIZE, save_tiny_model
from tools.benchmarks._bench_actor import build_bench_actor
from tools.benchmarks.bench_trees import ForkedEpisodes, pack_rollouts

TOLERANCE = 1e-6
LAYOUTS: dict[str, tuple[int, dict[str, int], dict[str, Any]]] = {
    "one rank": (1, {}, {}),
    "tp2-sp": (2, dict(tp_size=2), dict(sequence_parallel=True)),
    "pp2": (2, dict(pp_size=2), {}),
    "cp2": (2, dict(cp_size=2), {}),
    "full recomputation": (1, {}, dict(recompute_granularity="full")),
}


def draw_rollouts() -> list[tuple[int, Rollout]]:
    episodes = ForkedEpisodes(samples=2, ways=4, turns=3, prompt=9, thoughts=5, answer=3, observation=4)
    rollouts = episodes.draw(VOCAB_SIZE)
    index, rollout = rollouts[0]
    first = rollout.branches[0]
    tokens = np.append(first.tokens[:-1], 7).astype(np.int32)  # shares sampled tokens, and learns them once more
    return [(index, replace(rollout, branches=[*rollout.branches, Branch.of_response(tokens, 9)])), *rollouts[1:]]


def compute_loss(microbatch: TrainBatch, logprobs: torch.Tensor, entropy: torch.Tensor) -> tuple[torch.Tensor, dict]:
    """A weight of its own for each token of each branch."""
    weights = torch.cos(7.0 * microbatch.sequence_ids + microbatch.position_ids) * microbatch.loss_mask
    return (weights * (logprobs + 0.1 * entropy)).sum() / 100, {}


def work(rank: int, world_size: int, path: Path, layout: str) -> list[dict[str, Any]]:
    """By kind of packing: log-probs by branch, gradients of this rank's parameters, rows that were computed."""
    _, sizes, settings = LAYOUTS[layout]
    groups = build_groups(ParallelLayout(world_size, **sizes))
    # Gradients stay as they are summed over all ranks, and weights as they were.
    settings = dict(lr=0.0, clip_grad=0.0, zero_stage=0) | settings
    actor = build_bench_actor(path, groups, **settings)
    rollouts, found = draw_rollouts(), []
    for share in (False, True, "tree"):
        batch = pack_rollouts(actor, rollouts, share, 160).batch
        logprobs = actor.compute_logprobs(batch)
        metrics = take_step(actor, batch, compute_loss)
        gradients = {name: p.main_grad.clone() for name, p in actor.model.stages.named_parameters()}
        computed = sum(part.num_computed for part in batch.microbatches())
        branches = range(sum(len(rollout.branches) for _, rollout in rollouts))
        by_branch = [logprobs[(batch.sequence_ids == i) & batch.loss_mask] for i in branches]
        found.append(
            {
                "logprobs": by_branch,
                "gradients": gradients,
                "metrics": metrics,
                "computed": computed,
                "parts": len(batch.slices),
            }
        )
    return found


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for family in ("qwen3", "qwen3_moe"):
        found[family] = tmp_path_factory.mktemp(family)
        save_tiny_model(found[family], family)
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_trees_equal_whole_branches(layout: str, paths: dict[str, Path]) -> None:
    """Norm of the gap of the gradient of each parameter over its norm; log-probs of about -6 to two roundings."""
    compare(run_ranks(work, LAYOUTS[layout][0], paths["qwen3"], layout))


def test_routers_and_experts_are_given_shared_tokens_once(paths: dict[str, Path]) -> None:
    compare(run_ranks(work, 1, paths["qwen3_moe"], "one rank"))


def compare(ranks: list[list[dict[str, Any]]]) -> None:
    for whole, prompts, trees in ranks:
        assert trees["computed"] < prompts["computed"] < whole["computed"] and whole["parts"] > trees["parts"] > 1
        for found in (prompts, trees):
            gaps = [(a - b).abs().max().item() for a, b in zip(found["logprobs"], whole["logprobs"], strict=True)]
            assert max(gaps) <= 2 * TOLERANCE
            for name in ("compute_loss/loss", "policy/grad_norm"):
                assert found["metrics"][name] == pytest.approx(whole["metrics"][name], rel=TOLERANCE)
            assert found["gradients"].keys() == whole["gradients"].keys()
            gaps = {
                name: ((found["gradients"][name] - want).norm() / want.norm()).item()
                for name, want in whole["gradients"].items()
            }
            assert max(gaps.values()) <= TOLERANCE, {name: gap for name, gap in gaps.items() if gap > TOLERANCE}
