# SPDX-License-Identifier: Apache-2.0
"""The comparison with TRL without TRL: our side's answer against transformers, the arithmetic, and a side that ends.

Not covered: TRL's own side, which needs an environment of its own; the log-probs compared in every run show that both
sides compute the same.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from distributed import run_ranks
from megatron_rl.data.tokenizer import load_tokenizer
from megatron_rl.parallel.groups import build_groups
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.types import UserError
from tools.benchmarks._bench_actor import write_random_model
from tools.benchmarks._our_side import build_actor, take_step
from tools.benchmarks._step_contest import MODEL, draw_prompts, draw_workload, score_text
from tools.benchmarks.bench_step_vs_trl import Side, _write_ending_model, summarize

OPTIONS = argparse.Namespace(workload="ragged", prompts=2, samples=3, max_tokens=512)


def _take_two_steps(rank: int, world_size: int, path: Path) -> list[dict[str, Any]]:
    options, groups = argparse.Namespace(**vars(OPTIONS), model=path), build_groups(ParallelLayout(1))
    actor, reference = build_actor(options, groups), build_actor(options, groups)
    return [take_step(actor, OPTIONS, 0, torch.device("cpu"), model) for model in (None, reference)]


def test_our_side_scores_like_transformers(tmp_path: Path) -> None:
    """Sums of the log-probs of each response; a second step finds other weights, and has a reference."""
    path = write_random_model(tmp_path / "model", MODEL)
    ((first, second),) = run_ranks(_take_two_steps, 1, path, timeout=60)
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    work = draw_workload(OPTIONS, 0)
    for (prompt, response), found, later in zip(
        work.draw_tokens(MODEL["vocab_size"]), first["logprob_sums"], second["logprob_sums"], strict=True
    ):
        ids = torch.from_numpy(np.concatenate([prompt, response]))
        with torch.no_grad():
            logprobs = model(ids[None]).logits[0, :-1].log_softmax(-1)
        expected = logprobs.gather(1, ids[1:, None])[len(prompt) - 1 :].double().sum().item()
        assert found == pytest.approx(expected, rel=1e-5) and later != found
    assert first["tokens_computed"] == sum(work.lengths) - 4 * 32, "two prompts, once each"
    assert min(first[part] for part in ("packing", "update")) > 0
    assert second["reference"] > 10 * first["reference"]


def test_model_of_whole_steps_ends_its_responses(tmp_path: Path) -> None:
    """With a probability of about 1/49 at each token; its tokenizer gives the prompts the tokens that were drawn."""
    _write_ending_model(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        logits = model(torch.randint(2, 1024, (8, 64), generator=torch.Generator().manual_seed(0))).logits
    assert 1 / 60 < logits.softmax(-1)[..., 1].mean().item() < 1 / 40
    tokenizer, options = load_tokenizer(tmp_path), argparse.Namespace(workload="rollouts", prompts=2, num_steps=2)
    prompts = [tokenizer.encode(text) for text in draw_prompts(options)]
    assert [len(prompt) for prompt in prompts] == [32] * 4 and len(set(map(tuple, prompts))) == 4
    assert score_text(tokenizer.decode([2, 3, 4, 1])) == pytest.approx(2 / 3)


def test_ratio_is_of_all_that_a_side_is_charged_with() -> None:
    step = {
        "ours": {"packing": 0.5, "reference": 0.5, "update": 1.0, "tokens_computed": 10},
        "trl": {"packing": 0.0, "logprobs": 2.0, "update": 3.0, "tokens_computed": 30},
        "logprob_gap": 1e-6,
    }
    slow = step | {"ours": step["ours"] | {"update": 1.5}}
    result = summarize("ragged", [[step], [slow]], [4], [12])
    assert [row["ratio"] for row in result["rounds"]] == [2.5, 2.0] and result["ratio"] == 2.0
    assert [row["two_epochs_ratio"] for row in result["rounds"]] == [8 / 3, 2.0]
    assert [row["update_ratio"] for row in result["rounds"]] == [1.5, 1.2]
    assert (result["response_tokens"], result["tokens"], result["max_logprob_gap"]) == (8, 12, 1e-6)


def test_side_that_ends_is_one_error(tmp_path: Path) -> None:
    """As one whose Python lacks TRL."""
    side = Side("trl", "false", [], tmp_path)
    with pytest.raises(UserError, match="(?s)the process of trl ended.*it said nothing"):
        side.receive()
    side.end()
