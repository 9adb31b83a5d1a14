# SPDX-License-Identifier: Apache-2.0
"""Supervised fine-tuning in small: its batches are packed and counted like RL's.

Its learning is tested in tests/training/test_actor.py and tests/launch, its resuming in tests/run/test_resume.py.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from chat_templates import write_chat_tokenizer

import megatron_rl.training.given_losses as losses_module
from distributed import run_ranks
from megatron_rl.algorithms.losses import LedgerError
from megatron_rl.data.sft_examples import load_sft_examples
from megatron_rl.run.loading import load_config
from megatron_rl.run.sft import train_sft
from rl_runs import leave_out_curves, read_records
from tiny_models import save_tiny_model


def _train(rank: int, world_size: int, overrides: Sequence[str], lose: str) -> str | None:
    """One run whose loss loses a token, or a part of a weight, of each microbatch; returns the error's text."""
    leave_out_curves()
    os.environ["WORLD_SIZE"] = str(world_size)
    compute = losses_module.compute_sft_loss

    def compute_wrongly(
        logprobs: torch.Tensor, mask: torch.Tensor, weights: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        first = torch.zeros_like(mask).index_fill(0, mask.nonzero()[0], True)
        if lose == "token":
            mask = mask & ~first
        return compute(logprobs, mask, torch.where(first, 0.9 * weights, weights) if lose == "weight" else weights)

    losses_module.compute_sft_loss = compute_wrongly
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
        "trainer.save_freq=null",
        f"trainer.run_dir={tmp_path}/run",
    ]
    (found,) = run_ranks(_train, 1, overrides, lose, timeout=100)
    if lose == "nothing":
        (record,) = map(json.loads, (tmp_path / "run/metrics.jsonl").read_text().splitlines())
        assert found is None and record["packing/efficiency"] == 1.0
        tokens = record["tokens/prompt"] + record["tokens/response"]
        for phase in ("update", "step"):
            assert record[f"throughput/{phase}"] == pytest.approx(tokens / record[f"time/{phase}"])
    else:
        assert "the minibatch has" in found and "tokens in the loss in 6 sequences" in found


@pytest.mark.parametrize("template", ["qwen2.5", "qwen3"])  # one branch, and one per reply
def test_the_loss_of_conversations_is_that_of_their_replies(template: str, tmp_path: Path) -> None:
    """verl's names, two steps with rate 0: each loss is transformers' mean over the tokens of replies."""
    model = save_tiny_model(tmp_path / "model", "qwen2", vocab_size=512, num_hidden_layers=2)
    tokenizer = write_chat_tokenizer(tmp_path / "model", template)
    rows = [
        [("user", "hello"), ("assistant", "answer"), ("user", f"again {i}"), ("assistant", f"{i} " * i)] for i in (1, 3)
    ]
    file = tmp_path / "train.jsonl"
    messages = [[{"role": role, "content": text} for role, text in row] for row in rows]
    file.write_text("".join(json.dumps({"messages": row}) + "\n" for row in messages))
    overrides = [
        *(f"model.path={tmp_path}/model", "model.dtype=float32", f"data.train_files=[{file}]", "engine=fsdp"),
        *("data.messages_key=messages", "data.train_batch_size=2", "data.max_length=120", "optim.lr=0.0"),
        *("trainer.total_training_steps=2", "trainer.save_freq=null", f"trainer.default_local_dir={tmp_path}/run"),
    ]
    (found,) = run_ranks(_train, 1, overrides, "nothing", timeout=100)
    assert found is None
    examples = load_sft_examples([str(file)], tokenizer, load_config(None, overrides).config.data).examples
    branches = [branch for example in examples for branch in example.branches]
    assert len(branches) == (2 if template == "qwen2.5" else 4)
    losses = list[torch.Tensor]()
    for branch in branches:
        tokens = torch.from_numpy(branch.tokens).long()
        logprobs = model(tokens[None]).logits[0, :-1].log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
        losses.append(-logprobs[torch.from_numpy(branch.sampled[1:])])
    records = read_records(tmp_path / "run")
    assert [record["sft/loss"] for record in records] == pytest.approx([torch.cat(losses).mean().item()] * 2, rel=1e-5)
    assert records[0]["tokens/response"] >= len(torch.cat(losses))
