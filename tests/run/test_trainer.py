# SPDX-License-Identifier: Apache-2.0
"""The whole GRPO program on small real parts: layouts, repeatability, files on disk, failing rewards.

Ranks are forked (tests/launch runs the same program under torchrun). Not covered: learning, which takes minutes
(launch/quickstart.sh shows it), and GPUs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from distributed import run_ranks
from megatron_rl.data.prompts import PromptBatches
from rl_runs import layout_overrides, overrides_for, read_records, train
from tools.conversion.conversion import convert_to_megatron
from tools.conversion.units import Workers

LAYOUTS = [  # world, actor tp, pp, dp, rollout tp
    (1, 1, 1, 1, 1),
    (2, 2, 1, 1, 1),
    (2, 1, 2, 1, 2),
    (4, 2, 2, 1, 1),
    (4, 2, 1, 2, 2),
    (4, 1, 2, 2, 1),
    (4, 2, 1, 1, 1),  # the remaining factor of the world size is context parallel
]


@pytest.fixture(scope="module")
def one_rank(task: Path, tmp_path_factory: pytest.TempPathFactory, vllm_imported: None) -> Path:
    """The run that all layouts are compared with."""
    run_dir = tmp_path_factory.mktemp("one") / "run"
    assert run_ranks(train, 1, overrides_for(task, run_dir), True, timeout=150) == [None]
    return run_dir


def test_run_directory_and_metrics(task: Path, one_rank: Path) -> None:
    """Every file and key that users and tools rely on is there, and the numbers make sense."""
    records = [json.loads(line) for line in (one_rank / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in records] == [0, 1, 2]
    assert "validation/validation/accuracy" in records[0] and "validation/validation/accuracy" in records[2]
    for record in records[1:]:
        for key in (
            "reward/mean",
            "reward/digits",
            "tokens/prompt",
            "tokens/response",
            "tokens/per_second",
            "policy/loss",
            "policy/grad_norm",
            "policy/entropy",
            "policy/clip_fraction",
            "kl/mean",
            "kl/coef",
            "mismatch/max",
            "mismatch/mean",
            "mismatch/k3",
            "mismatch/effective_sample_size",
            "packing/efficiency",
            "packing/imbalance",
            "samples/bytes_per_rank",
            "reshard/bytes_moved",
            "reshard/bytes_aliased",
            "reshard/verified_tensors",
            "memory/rollout",
            "memory/update",
            "time/step",
            "time/reshard",
            "time/rollout",
            "time/reward",
            "time/old_logprobs",
            "time/ref_logprobs",
            "time/update",
        ):
            assert isinstance(record[key], int | float), key
        assert record["policy/ratio_max_deviation"] == 0.0
        assert 0 <= record["mismatch/max"] < 1e-3
        assert record["mismatch/effective_sample_size"] == pytest.approx(1.0, abs=1e-4)
        assert record["policy/grad_norm"] > 0
    assert 0 < records[1]["kl/mean"] < records[2]["kl/mean"], "the policy leaves the reference, its initial self"
    assert records[1]["tokens/prompt"] == 4 * sum(len(f"{a}+{a + 3}=") for a in _first_batch())
    for name in (
        "config.yaml",
        "summary.json",
        "curves.png",
        "logs/rank0.log",
        "rollouts/step_1.jsonl",
        "validation/validation/rollouts/step_0.jsonl",
        "checkpoints/latest/huggingface/model.safetensors",
    ):
        assert (one_rank / name).is_file(), name
    assert list((one_rank / "tensorboard").glob("events.out.tfevents.*"))


def test_a_megatron_checkpoint_as_the_model(task: Path, one_rank: Path, tmp_path: Path, vllm_imported: None) -> None:
    """The converted model trains like the one in HF format, in another layout."""
    model = convert_to_megatron(
        task / "model", tmp_path / "megatron", dtype=None, file_bytes=1 << 20, force=False, workers=Workers()
    )
    extra = [f"model.path={model}", "trainer.total_steps=1", "trainer.test_freq=0"]
    overrides = overrides_for(task, tmp_path / "run", *layout_overrides(2, 1, 1), *extra)
    assert run_ranks(train, 2, overrides, timeout=150) == [None, None]
    expected, found = read_records(one_rank)[1], read_records(tmp_path / "run")[1]
    for key in ("policy/loss", "policy/grad_norm", "reward/mean"):
        assert found[key] == pytest.approx(expected[key], rel=1e-4, abs=1e-6), key


def test_rows_of_the_rollout_log(one_rank: Path) -> None:
    """Every token has its values of the step; the first minibatch of a run is updated at a ratio of exactly 1."""
    rows = _read_rows(one_rank, 1)
    group = [row for row in rows if "logged_as" not in row]
    assert len(group) == 4 and len({row["prompt_id"] for row in group}) == 1
    assert {row["logged_as"] for row in rows if "logged_as" in row} <= {"best", "worst", "longest"}
    for row in group:
        length = len(row["tokens"])
        for name in ("token_texts", "rollout_logprobs", "old_logprobs", "advantages", "ratio", "clipped", "entropy"):
            assert len(row[name]) == length, name
        assert "".join(row["token_texts"]) == row["response"] and "values" not in row
        assert row["old_logprobs"] == pytest.approx(row["rollout_logprobs"], abs=1e-3)
        assert row["ratio"] == [1.0] * length and row["clipped"] == [0.0] * length
        assert len(set(row["advantages"])) == 1 and min(row["entropy"]) > 0
    assert sum(row["advantages"][0] for row in group) == pytest.approx(0, abs=1e-4)


def _read_rows(run_dir: Path, step: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / f"rollouts/step_{step}.jsonl").read_text().splitlines()]


def _first_batch() -> list[int]:
    """Left operands of the first step's prompts."""
    return next(PromptBatches(list(range(16)), 8, shuffle=True, seed=1))


def test_saved_policy_is_a_transformers_model(one_rank: Path, task: Path) -> None:
    """The last checkpoint loads in transformers and differs from the initial model."""
    saved = transformers.AutoModelForCausalLM.from_pretrained(one_rank / "checkpoints/latest/huggingface")
    initial = transformers.AutoModelForCausalLM.from_pretrained(task / "model")
    gaps = [float((a - b).abs().max()) for a, b in zip(saved.parameters(), initial.parameters(), strict=True)]
    assert 1e-4 < max(gaps) < 1e-1


SLOW = [(2, 2, 1, 1, 1), (4, 2, 2, 1, 1), (4, 1, 2, 2, 1)]  # each size is in another layout


@pytest.mark.parametrize(
    ("world", "tp", "pp", "dp", "rollout_tp"),
    [pytest.param(*layout, marks=[pytest.mark.slow] * (layout in SLOW)) for layout in LAYOUTS[1:]],
)
def test_layouts_train_alike(
    task: Path,
    one_rank: Path,
    tmp_path: Path,
    vllm_imported: None,
    world: int,
    tp: int,
    pp: int,
    dp: int,
    rollout_tp: int,
) -> None:
    """Two steps in any layout: the same rollouts, hence the same rewards, and the same numbers as one rank.

    The tolerance is fp32 summation order through two Adam steps per step; a wrong denominator, seed or
    shard is orders of magnitude above it.
    """
    run_dir = tmp_path / "run"
    settings = [*layout_overrides(tp, pp, rollout_tp), f"actor.context_parallel_size={world // (tp * pp * dp)}"]
    assert run_ranks(train, world, overrides_for(task, run_dir, *settings), timeout=150) == [None] * world
    for mine, reference in zip(read_records(run_dir), read_records(one_rank), strict=True):
        for key in ("reward/mean", "tokens/response", "validation/validation/accuracy"):
            assert mine.get(key) == reference.get(key), key
        for key in ("policy/loss", "policy/grad_norm", "policy/entropy", "kl/mean", "policy/clip_fraction"):
            if key in reference:
                assert mine[key] == pytest.approx(reference[key], abs=1e-4, rel=1e-4), key
        assert mine.get("policy/ratio_max_deviation", 0.0) == 0.0
    for mine, reference in zip(_read_rows(run_dir, 1), _read_rows(one_rank, 1), strict=True):
        assert mine["tokens"] == reference["tokens"]
        for key in ("old_logprobs", "advantages", "ratio", "entropy"):
            assert mine[key] == pytest.approx(reference[key], abs=1e-4), key
    mine, reference = (
        transformers.AutoModelForCausalLM.from_pretrained(d / "checkpoints/latest/huggingface")
        for d in (run_dir, one_rank)
    )
    for (name, a), b in zip(mine.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=0, msg=name)
    if (world, tp) == (2, 2):  # the same seed and layout: identical records, timings aside
        assert run_ranks(train, 2, overrides_for(task, tmp_path / "again", *settings), timeout=150) == [None] * 2
        assert read_records(tmp_path / "again") == read_records(run_dir)


def test_failing_reward_function_stops_every_rank(task: Path, tmp_path: Path, vllm_imported: None) -> None:
    """The error names prompt and exception on every rank; earlier records are on disk."""
    overrides = overrides_for(
        task,
        tmp_path / "run",
        f"reward.function={task}/reward.py:broken",
        "data.validation_files=[]",
        "data.shuffle=false",
        "data.train_batch_size=4",
        "trainer.total_steps=4",
    )
    errors = run_ranks(train, 2, overrides, timeout=150)
    assert errors[0] == errors[1]
    assert "ZeroDivisionError" in errors[0] and "prompt" in errors[0] and "7" in errors[0]
    assert [r["step"] for r in read_records(tmp_path / "run")] == [1]
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_existing_run_directory_is_refused_on_every_rank(task: Path, one_rank: Path, vllm_imported: None) -> None:
    """A second run in the directory of a first one ends with an error on all ranks, and changes nothing."""
    before = (one_rank / "metrics.jsonl").read_bytes()
    errors = run_ranks(train, 2, overrides_for(task, one_rank, *layout_overrides(2, 1, 1)), timeout=150)
    assert errors[0] == errors[1] and str(one_rank) in errors[0]
    assert (one_rank / "metrics.jsonl").read_bytes() == before
