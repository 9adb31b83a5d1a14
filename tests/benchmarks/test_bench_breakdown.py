# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of the breakdown of a step. Not covered: the ranks, which need a run of the whole program."""

from __future__ import annotations

from tools.benchmarks.bench_breakdown import format_results, summarize


def test_phases_are_summed_over_ranks_and_what_has_no_name_is_rest() -> None:
    """Nested phases count once; compute comes from the steps with the clock, whose other figures are not used."""
    rank = {"step": 2.0, "rollout": 0.5, "reshard": 0.25, "verify": 0.125, "update": 0.75, "compute": 0.0}
    clocked = rank | {"step": 9.0, "update": 7.0, "compute": 0.5}
    slow = rank | {"update": 1.75, "step": 3.0}
    found = summarize([[rank, rank], [rank, rank], [slow, slow], [clocked, clocked]], 3)
    assert found == {
        "reshard": 0.5,
        "rollout": 1.0,
        "update": 1.5,
        "rest": 1.0,
        "step": 4.0,
        "compute": 1.0,
        "named_share": 0.75,
        "compute_share": 0.25,
    }
    table = format_results({"/a/old": found | {"step": 8.0}, "/a/new": found})
    assert table.splitlines()[-1].split() == ["of", "the", "first", "1.00x", "2.00x"]
