# SPDX-License-Identifier: Apache-2.0
"""Whole runs give the numbers that are written down in tests/golden: on the same kernels to the last bit.

On another machine numbers are compared within the bounds of golden_runs.py, up to the first step whose tokens differ;
a change of a setting by a part in ten thousand is not seen there. Not covered: GPUs, bfloat16, several nodes.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest

from golden_runs import GOLDEN, RUNS, Recording, carry_out, compare, make_golden_task


@pytest.fixture(scope="module")
def golden_task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory made by `make_golden_task`."""
    directory = tmp_path_factory.mktemp("golden")
    make_golden_task(directory)
    return directory


def read(name: str) -> Recording:
    """A recording."""
    return json.loads((GOLDEN / f"{RUNS[name].recording or name}.json").read_text())


# Their modes have tests of their own in the default tier.
SLOW = {
    *("stale", "apart", "turns", "lora_merge", "lora_adapter", "teacher", "zero3", "grpo_vllm_tp2", "hf_engine", "cp2"),
    *("branches", "ppo", "reward_model", "gspo_tis", "otb_kl_cov", "remax"),
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in RUNS])
def test_a_run_gives_its_recording(name: str, golden_task: Path, tmp_path: Path, vllm_imported: None) -> None:
    run = RUNS[name]
    assert compare(read(name), carry_out(run, golden_task, tmp_path / "run")).differences == []
    assert (tmp_path / "run/logs/rank0.log").read_text().count("resumed: ") == len(run.legs) - 1


def test_a_learning_rate_that_is_a_little_larger_is_found(golden_task: Path, tmp_path: Path) -> None:
    """The recording is made here, so that the comparison is one to the last bit on any machine."""
    expected, found = (
        carry_out(RUNS["sft"], golden_task, tmp_path / rate, f"actor.lr={rate}") for rate in ("1e-3", "1.0001e-3")
    )
    result = compare(expected, found)
    assert result.is_exact and 0 < result.gaps["weights"] < 1e-4
    parts = {line.split(":")[0] for line in result.differences}
    assert parts == {"metrics", "weights"}


def test_the_runs_do_what_they_are_for() -> None:
    """Several rounds of sampling, groups over several microbatches, truncated weights, a coefficient that moves."""
    for name, key, least in (
        ("dapo", "sampling/rounds", 2),
        ("shared_prompts", "packing/prompt_repeats", 1.5),
        ("gspo_tis", "mismatch/truncated_fraction", 0.1),
        ("ppo", "value/grad_norm", 1e-3),
        ("stale", "schedule/carried_tokens", 1),
        ("stale_replayed", "schedule/carried_tokens", 1),
        ("apart", "sampling/informative_groups", 8),
        ("branches", "agents/turns", 1.1),
        ("turns", "agents/tokens_observed", 1),
        ("lora_merge", "policy/grad_norm", 1e-3),
        ("lora_adapter", "policy/grad_norm", 1e-3),
        ("teacher", "distill/kl", 1e-3),
        ("moe_replayed", "moe/agreement", 0.5),
        ("mtp", "mtp/grad_norm", 1e-3),
    ):
        assert min(read(name)["metrics"][key].values()) >= least, name
    for name, most in (("stale", 1), ("stale_replayed", 2), ("apart", 1)):
        assert max(read(name)["metrics"]["schedule/staleness_max"].values()) == most, name
    assert len(set(read("ppo")["metrics"]["kl/coef"].values())) == 3
    assert read("ppo")["weights"].keys() == {"actor", "critic", "huggingface"}


def test_what_differs_is_named() -> None:
    """With the same kernels: the last bit of a metric, a digest, a missing metric. New metrics are listed."""
    expected = read("grpo")
    found = copy.deepcopy(expected)
    loss = found["metrics"]["policy/loss"]["2"]
    found["metrics"]["policy/loss"]["2"] = loss * (1 + 2**-52)
    found["rollouts"]["advantages"]["1"]["sha256"] = "0"
    found["rollouts"]["clipped"]["1"]["size"] = [0.1, 0.2]  # from zeros
    found["metrics"]["policy/entropy"]["1"] = float("nan")
    found["metrics"]["samples/bytes_per_rank"] = {"1": 7.0}
    del found["metrics"]["kl/mean"]
    result = compare(expected, found)
    assert result.added == ["metrics: samples/bytes_per_rank"] and 0 < result.gaps["metrics"] < 1e-15
    assert [line.split(" was ")[0] for line in result.differences] == [
        "metrics: kl/mean.1 is gone",
        "metrics: kl/mean.2 is gone",
        "metrics: policy/entropy.1",
        "metrics: policy/loss.2",
        "rollouts: advantages.1.sha256",
        "rollouts: clipped.1.size",
    ]
    assert compare(expected, copy.deepcopy(expected)).differences == []


def test_another_machine_is_compared_within_bounds_up_to_the_first_token_that_differs() -> None:
    expected = read("grpo")
    found = copy.deepcopy(expected)
    found["machine"]["cpu"] = "another"
    found["weights"]["actor"]["sha256"] = found["rollouts"]["entropy"]["1"]["sha256"] = "0"
    found["metrics"]["policy/grad_norm"]["2"] *= 1 + 1e-5
    result = compare(expected, found)
    assert result.differences == [] and result.gaps["metrics"] == pytest.approx(1e-5)
    found["metrics"]["policy/grad_norm"]["2"] *= 1.001
    (line,) = compare(expected, found).differences
    assert line.startswith("metrics: policy/grad_norm.2")
    found["rollouts"]["tokens"]["2"]["sha256"] = "0"
    result = compare(expected, found)
    assert result.differences == [] and result.flip == 2 and "weights" not in result.counts
    found["rollouts"]["tokens"]["1"]["sha256"] = "0"
    assert compare(expected, found).differences == [
        "rollouts: tokens differ in the first step, nothing is left to compare"
    ]
