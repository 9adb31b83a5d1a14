# SPDX-License-Identifier: Apache-2.0
"""Supervised fine-tuning in small: its batches are packed and counted like RL's.

Its learning is tested in tests/training/test_actor.py and tests/launch, its resuming in tests/run/test_resume.py.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

import megatron_rl.training.roles.actor as roles_module
from distributed import run_ranks
from megatron_rl.algorithms.aggregation import LedgerError
from megatron_rl.run.loading import load_config
from megatron_rl.run.sft import train_sft
from rl_runs import leave_out_curves, read_records


def _train(rank: int, world_size: int, overrides: Sequence[str], lose: str) -> str | None:
    """One run whose loss loses a token, or a part of a weight, of each microbatch; returns the error's text."""
    leave_out_curves()
    os.environ["WORLD_SIZE"] = str(world_size)
    compute = roles_module.compute_sft_loss

    def compute_wrongly(
        logprobs: torch.Tensor, mask: torch.Tensor, weights: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        first = torch.zeros_like(mask).index_fill(0, mask.nonzero()[0], True)
        if lose == "token":
            mask = mask & ~first
        return compute(logprobs, mask, torch.where(first, 0.9 * weights, weights) if lose == "weight" else weights)

    roles_module.compute_sft_loss = compute_wrongly
    try:
        train_sft(load_config(None, overrides).config, None)
    except LedgerError as error:
        return str(error)
    return None


@pytest.mark.parametrize("lose", ["token", "weight", "nothing"])
def test_what_the_loss_loses_is_found(lose: str, task: Path, tmp_path: Path) -> None:
    overrides = [
        f"model.path={task}/model",
        "model.dtype=float32",
        f"data.train_files=[{task}/train.jsonl]",
        "data.train_batch_size=6",
        "data.max_prompt_length=8",
        "data.max_response_length=8",
        "trainer.total_steps=1",
        "trainer.save_final=false",
        f"trainer.run_dir={tmp_path}/run",
    ]
    (found,) = run_ranks(_train, 1, overrides, lose, timeout=100)
    if lose == "nothing":
        (record,) = read_records(tmp_path / "run")
        assert found is None and record["packing/efficiency"] == 1.0
    else:
        assert "the minibatch has" in found and "tokens in the loss in 6 sequences" in found
