# SPDX-License-Identifier: Apache-2.0
"""Shared experts that are computed while tokens are exchanged: log-probs have the same bits, updates are equal up to
rounding, since the gradients of a layer's input are added in another order.

Not covered: CUDA streams. On a CPU the same operations run in the same order, one after the other.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from role_setups import take_step

from actor_runs import ALGORITHM, WEIGHT_TOLERANCE, Case, build_actor, build_batch, list_pieces
from distributed import run_ranks
from megatron_rl.models.routing import OverlappedSharedExperts
from tiny_models import save_tiny_model

FULL, SP = dict(recompute_granularity="full"), dict(sequence_parallel=True)
EP2 = dict(ep_size=2)


def _update(rank: int, world_size: int, path: Path, case: Case) -> dict[str, Any]:
    """Two updates."""
    actor = build_actor(case, path)
    shared = [x for x in actor.model.stages.modules() if isinstance(x, OverlappedSharedExperts)]
    batch = build_batch(actor.model, case)
    batch = replace(batch, old_logprobs=actor.compute_logprobs(batch))
    norms = [take_step(actor, batch, ALGORITHM)["policy/grad_norm"] for _ in range(2)]
    streams = {id(module.stream) for module in shared}
    return dict(
        logprobs=batch.old_logprobs,
        norms=norms,
        weights=list_pieces(actor.model),
        num_shared=len(shared),
        num_streams=len(streams),
    )


@pytest.mark.parametrize(
    ("family", "case"),
    [
        ("deepseek_v3", Case(2, EP2)),
        ("qwen3_next", Case(2, EP2, FULL)),  # with a gate
        ("glm4_moe", Case(4, EP2 | dict(tp_size=2), SP | dict(overlap_grad_reduce=True))),
        ("glm4_moe", Case(4, EP2 | dict(pp_size=2))),
    ],
)
def test_overlap_changes_no_log_prob_and_updates_by_rounding(family: str, case: Case, tmp_path: Path) -> None:
    save_tiny_model(tmp_path, family)
    before, beside = (
        run_ranks(_update, case.world_size, tmp_path, replace(case, actor=case.actor | settings), timeout=100)
        for settings in ({}, dict(overlap_shared_experts=True))
    )
    for expected, found in zip(before, beside, strict=True):
        assert expected["num_shared"] == 0 < found["num_shared"] and found["num_streams"] == 1
        assert torch.equal(found["logprobs"], expected["logprobs"])
        assert found["norms"] == pytest.approx(expected["norms"], rel=1e-6)
        pairs = zip(found["weights"], expected["weights"], strict=True)
        assert max((a - b).abs().max().item() for (_, _, a), (_, _, b) in pairs) <= WEIGHT_TOLERANCE


def _count_overlapped(rank: int, world_size: int, path: Path, case: Case) -> int:
    modules = build_actor(case, path).model.stages.modules()
    return sum(isinstance(module, OverlappedSharedExperts) for module in modules)


def test_overlap_needs_an_exchange(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "glm4_moe")
    case = Case(2, actor=dict(overlap_shared_experts=True))
    assert run_ranks(_count_overlapped, 2, tmp_path, case, timeout=60) == [0, 0]
