# SPDX-License-Identifier: Apache-2.0
"""Assignment of samples to engines, and its gain; tests with engines show that nothing else changes.

Time is the clock of scripted engines (tools/benchmarks/bench_dispatch.py), except for one run on ranks that sleep.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distributed import run_ranks
from megatron_rl.rollout.generation import assign_engines
from tools.benchmarks import bench_dispatch


@given(
    prompt_tokens=st.lists(st.integers(1, 5000), min_size=1, max_size=40),
    group_size=st.integers(1, 20),
    num_engines=st.integers(1, 24),
)
def test_samples_are_spread_and_balanced(prompt_tokens: list[int], group_size: int, num_engines: int) -> None:
    """Counts differ by one at most, in all and per prompt; prompt tokens differ by at most one prompt."""
    engines = assign_engines("samples", prompt_tokens, group_size, num_engines, 100)
    assert engines.shape == (len(prompt_tokens) * group_size,)
    assert np.ptp(np.bincount(engines, minlength=num_engines)) <= 1
    for group in engines.reshape(-1, group_size):
        assert np.ptp(np.bincount(group, minlength=num_engines)) <= 1
    tokens = np.bincount(engines, np.repeat(prompt_tokens, group_size), minlength=num_engines)
    assert np.ptp(tokens) <= 2 * max(prompt_tokens)
    assert (engines == assign_engines("samples", prompt_tokens, group_size, num_engines, 1)).all()


def test_long_prompts_are_dealt_evenly() -> None:
    """Eight long prompts of two samples among 24 short ones, on eight engines: two long samples each.

    Dealt in the order of the prompts, two engines would get all of them.
    """
    prompt_tokens = [1000 if i % 4 == 0 else 10 for i in range(32)]
    each = np.repeat(prompt_tokens, 2)
    assert np.bincount(assign_engines("samples", prompt_tokens, 2, 8, 100), each).tolist() == [2060] * 8
    assert np.bincount(np.arange(64) % 8, each).tolist() == [8000] * 2 + [80] * 6


def test_groups_stay_together() -> None:
    """Round-robin by prompt."""
    assert assign_engines("groups", [5, 6, 7, 8, 9], 2, 3, 100).tolist() == [0, 0, 1, 1, 2, 2, 0, 0, 1, 1]


@pytest.mark.parametrize(
    ("prompt", "group_size", "engines", "limit", "expected"),
    [
        (1024, 16, 64, 8192, "samples"),
        (1024, 16, 1, 8192, "groups"),
        (457, 8, 8, 100, "samples"),  # 4.571 times the limit
        (458, 8, 8, 100, "groups"),
        (10_000, 1, 8, 100, "samples"),  # a single response is computed once wherever it is
        (800, 8, 2, 100, "samples"),  # two engines: one copy
        (3300, 8, 2, 100, "groups"),
    ],
)
def test_auto_weighs_copies_of_prompts(prompt: int, group_size: int, engines: int, limit: int, expected: str) -> None:
    auto, chosen, other = (
        assign_engines(dispatch, [prompt] * 10, group_size, engines, limit).tolist()
        for dispatch in ("auto", expected, "groups" if expected == "samples" else "samples")
    )
    assert auto == chosen
    assert auto != other or 1 in (group_size, engines)


def bench(tmp_path: Path, *arguments: str) -> dict:
    assert bench_dispatch.main([*arguments, "--json", str(tmp_path / "found.json")]) == 0
    return json.loads((tmp_path / "found.json").read_text())


def test_spread_samples_are_faster(tmp_path: Path) -> None:
    """At least 1.3 times if lengths correlate by 0.5, nothing if they do not; the same samples bit for bit."""
    correlated = bench(tmp_path, "--seeds", "7")["simulated"]
    independent = bench(tmp_path, "--seeds", "7", "--correlation", "0")["simulated"]
    assert correlated["same_samples"] and independent["same_samples"]
    assert correlated["ratio"] >= 1.3 and 0.9 < independent["ratio"] < 1.1


def test_ranks_generate_the_same_either_way(tmp_path: Path) -> None:
    """Eight engines that sleep through their steps, and gloo: the same rollouts; no claim about wall time."""

    def work(rank: int, world_size: int) -> int:
        return bench_dispatch.main(
            ["--engines", "8", "--prompts", "16", "--seeds", "1", "--json", str(tmp_path / "found.json")]
        )

    assert run_ranks(work, 8) == [0] * 8
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["measured"]["ranks"] == 8 and found["measured"]["same_samples"]
    assert found["measured"]["runs"][0]["seconds_samples"] > 0.5 and found["simulated"]["ratio"] > 1.25
