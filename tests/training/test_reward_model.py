# SPDX-License-Identifier: Apache-2.0
"""The reward model gives the scores of transformers' `*ForSequenceClassification`, on every layout and every rank."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from role_setups import make_setup
from transformers import AutoModelForSequenceClassification

from actor_runs import LENGTHS, Case, build_batch
from distributed import run_ranks
from megatron_rl.config.schema import RewardModelConfig
from megatron_rl.parallel.groups import build_groups
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.rewards.scoring import SourceSpec
from megatron_rl.training.roles.frozen import RewardModel, add_model_scores
from tiny_models import draw_tokens, save_tiny_model

FAMILIES = ["qwen2", "llama"]
LAYOUTS = {
    "single": Case(),
    "tp2": Case(2, dict(tp_size=2)),
    "pp2": Case(2, dict(pp_size=2)),
    "dp2": Case(2),
    "pp2-vpp2": Case(2, dict(pp_size=2, vpp_size=2, chunk_layers=(0, 1, 2, 1))),
    "tp2-pp2": Case(4, dict(tp_size=2, pp_size=2)),
    "tp2-dp2": Case(4, dict(tp_size=2)),
    "pp2-dp2": Case(4, dict(pp_size=2)),
    "cp2-tp2": Case(4, dict(tp_size=2, cp_size=2)),
    "pp2-dp2-zero3": Case(4, dict(pp_size=2), dict(zero_stage=3)),
}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {family: tmp_path_factory.mktemp(family) for family in FAMILIES}


@pytest.fixture(scope="module", autouse=True)
@torch.no_grad()
def expected(paths: dict[str, Path]) -> dict[str, torch.Tensor]:
    """Scores [num_rollouts] of transformers, one sequence at a time."""
    result = {}
    for family, path in paths.items():
        model = save_tiny_model(path, family, num_labels=1)
        ids = [torch.from_numpy(tokens)[None] for tokens in draw_tokens(LENGTHS)]
        result[family] = torch.stack([model(x).logits[0, 0] for x in ids])
    return result


def build_reward_model(case: Case, path: Path) -> RewardModel:
    groups = build_groups(ParallelLayout(case.world_size, **case.sizes))
    settings = dict(case.actor)
    spec = dict(offload=settings.pop("offload", False))
    return RewardModel(
        make_setup("reward_model", path, RewardModelConfig(**settings), groups, dtype=case.dtype, spec=spec)
    )


def _score_on_rank(rank: int, world_size: int, case: Case, path: Path) -> torch.Tensor:
    model = build_reward_model(case, path)
    return model.compute_scores(build_batch(model.model, case))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_scores_equal_transformers(
    layout: str, family: str, paths: dict[str, Path], expected: dict[str, torch.Tensor]
) -> None:
    case = LAYOUTS[layout]
    ranks = run_ranks(_score_on_rank, case.world_size, case, paths[family], timeout=60)
    assert expected[family].std() > 0.1, "scores near 0 would agree with anything"
    for found in ranks:
        assert torch.equal(found, ranks[0])
        torch.testing.assert_close(found, expected[family], rtol=0, atol=1e-5)


MODELS = [SourceSpec("model", 0.7, "model", "", None), SourceSpec("safety", -1.3, "model:safety", "", None)]
PAIRS = {layout: (layout, layout) for layout in ("single", "tp2", "pp2", "dp2")} | {"tp2 and pp2": ("tp2", "pp2")}


def _add_on_rank(rank: int, world_size: int, cases: list[Case], paths: list[Path]) -> np.ndarray:
    models = [build_reward_model(case, path) for case, path in zip(cases, paths, strict=True)]
    rewards = np.zeros(len(LENGTHS))
    for case, model, source in zip(cases, models, MODELS, strict=True):
        scores = model.compute_scores(build_batch(model.model, case)).double().numpy()
        rewards = add_model_scores(source, rewards, scores, [])
        assert not any(p.numel() for one in models for p in one.model.stages.parameters()), "one resident at a time"
    return rewards


@pytest.mark.parametrize("pair", PAIRS)
@torch.no_grad()
def test_two_models_add_up_to_those_of_transformers_in_float64(pair: str, paths: dict[str, Path]) -> None:
    """Also in layouts of their own; both are offloaded, so each is resident only while it scores."""
    wanted = 0
    for family, source in zip(FAMILIES, MODELS, strict=True):
        model = AutoModelForSequenceClassification.from_pretrained(paths[family], dtype=torch.float64)
        ids = [torch.from_numpy(tokens)[None] for tokens in draw_tokens(LENGTHS)]
        wanted += source.weight * np.array([float(model(x).logits[0, 0]) for x in ids])
    cases = [replace(LAYOUTS[name], actor=LAYOUTS[name].actor | dict(offload=True)) for name in PAIRS[pair]]
    for found in run_ranks(_add_on_rank, cases[0].world_size, cases, [*paths.values()], timeout=60):
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5)


def test_a_rank_without_rollouts_takes_part(paths: dict[str, Path], expected: dict[str, torch.Tensor]) -> None:
    """One rollout on two DP ranks: the other one has padding only."""
    case = replace(LAYOUTS["dp2"], minibatches=((0,),))
    for found in run_ranks(_score_on_rank, 2, case, paths["llama"], timeout=60):
        torch.testing.assert_close(found, expected["llama"][:1], rtol=0, atol=1e-5)


def test_bfloat16_scores_are_near(paths: dict[str, Path], expected: dict[str, torch.Tensor]) -> None:
    case = replace(LAYOUTS["single"], dtype="bfloat16")
    (found,) = run_ranks(_score_on_rank, 1, case, paths["qwen2"], timeout=60)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected["qwen2"], rtol=0, atol=0.05)


def _score_offloaded(rank: int, world_size: int, case: Case, path: Path) -> Any:
    results, sizes = [], []
    for offload in (False, True):
        model = build_reward_model(replace(case, actor=case.actor | dict(offload=offload)), path)
        batch = build_batch(model.model, case)
        results += [model.compute_scores(batch) for _ in range(2)]
        sizes.append(sum(p.numel() for p in model.model.stages.parameters()))
        assert not any(p.requires_grad for p in model.model.stages.parameters())
    return results, sizes


def test_offloaded_weights_score_the_same(paths: dict[str, Path]) -> None:
    """They are empty before and after; that a device's memory shrinks is for a GPU to show."""
    for results, (kept, offloaded) in run_ranks(_score_offloaded, 2, LAYOUTS["tp2"], paths["qwen2"], timeout=60):
        assert kept > 0 and offloaded == 0
        assert all(torch.equal(result, results[0]) for result in results)
