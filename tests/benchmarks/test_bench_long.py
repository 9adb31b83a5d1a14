# SPDX-License-Identifier: Apache-2.0
"""The benchmark of long responses on tiny lengths: consistent rows and a picture; no claim about its seconds."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from distributed import run_ranks
from tools.benchmarks import bench_long
from tools.benchmarks._bench_actor import measure_peak

ARGUMENTS = [
    "--rounds",
    "1",
    "--lengths",
    "64",
    "--cp",
    "1",
    "2",
    "--vocab",
    "300",
    "--large-vocab",
    "3000",
    "--logits-lengths",
    "512",
    "1024",
    "--context-length",
    "1024",
    "--packing-prompts",
    "2",
]
SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 8}


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Every part but `linear`, whose sizes are fixed, on two ranks."""
    directory = tmp_path_factory.mktemp("bench")
    (directory / "config.json").write_text(json.dumps(bench_long.MODEL | SMALL))
    parts = ["--parts", "lengths", "logits", "context", "packing"]
    names = {"--hf-config": "config.json", "--json": "rows.json", "--plot": "rows.png"}
    files = [word for option, name in names.items() for word in (option, str(directory / name))]

    def work(rank: int, world_size: int) -> int:
        return bench_long.main([*ARGUMENTS, *parts, *files])

    assert run_ranks(work, 2, timeout=120) == [0, 0]
    assert (directory / "rows.png").stat().st_size > 10_000
    return json.loads((directory / "rows.json").read_text())["rows"]


def find(rows: list[dict[str, Any]], part: str, **wanted: Any) -> dict[str, Any]:
    """The one row of a part with these values."""
    (row,) = [r for r in rows if r["part"] == part and all(r[key] == value for key, value in wanted.items())]
    return row


@pytest.mark.slow
def test_every_case_has_a_row(rows: list[dict[str, Any]]) -> None:
    counts = {part: sum(row["part"] == part for row in rows) for part in ("lengths", "logits", "context", "packing")}
    assert counts == {"lengths": 6, "logits": 8, "context": 6, "packing": 3}
    assert all(row["tokens_per_second"] > 0 for row in rows if row["part"] in ("lengths", "packing"))
    assert all(row["peak_bytes"] > 0 and row["imbalance"] >= 1.0 for row in rows)


@pytest.mark.slow
def test_arms_compute_what_they_say(rows: list[dict[str, Any]]) -> None:
    """Padded: every sequence as long as the longest. Packed: each token once; prompts once with shared ones."""
    packed = find(rows, "lengths", arm="packed, chunked", length=64, cp=1)
    padded = find(rows, "lengths", arm="padded, chunked", length=64, cp=1)
    assert padded["tokens_computed"] == 8 * (64 + 64) and packed["tokens_computed"] == packed["tokens"]
    shared = find(rows, "packing", arm="packed, shared prompts")
    assert shared["tokens"] - 14 * 64 <= shared["tokens_computed"] < shared["tokens"]


@pytest.mark.slow
def test_memory_follows_chunks_and_context_parallelism(rows: list[dict[str, Any]]) -> None:
    """Full logits hold [t, v]; a chunk does not grow. Twice the ranks hold about half the activations each."""
    full = [find(rows, "logits", arm="full logits", length=n)["peak_bytes"] for n in (512, 1024)]
    chunked = [find(rows, "logits", arm="256 tokens", length=n)["peak_bytes"] for n in (512, 1024)]
    assert full[1] - full[0] > 512 * 3000 * 4 > 0
    assert full[1] - full[0] > chunked[1] - chunked[0] + 512 * 3000 * 4
    halves = [find(rows, "context", arm="none", cp=cp)["peak_bytes"] for cp in (1, 2)]
    assert 0.4 < halves[1] / halves[0] < 0.7


def test_peak_counts_what_lives_at_once() -> None:
    """Two megabytes live together, a third comes after the second is gone."""

    def allocate() -> None:
        first = torch.zeros(2**20, dtype=torch.uint8)
        for _ in range(2):
            second = torch.zeros(2**20, dtype=torch.uint8)
            del second
        del first

    assert measure_peak(torch.device("cpu"), allocate) == pytest.approx(2 * 2**20, rel=0.01)
