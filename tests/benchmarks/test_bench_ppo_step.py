# SPDX-License-Identifier: Apache-2.0
"""The benchmark of the step on a tiny shape on CPU: every row, equal modes, FLOPs by hand; no claim about seconds."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from distributed import run_ranks
from megatron_rl.weights.model_config import model_shape_from_config
from tools.benchmarks import bench_ppo_step
from tools.benchmarks._ppo_contest import SHAPES, Draw, count_flops

TINY = SHAPES["1m"] | {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 97}


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("bench")
    (directory / "tiny.json").write_text(json.dumps(TINY))
    arguments = [
        "--hf-config",
        str(directory / "tiny.json"),
        "--sizes",
        "64",
        "128",
        "--rounds",
        "2",
        "--sequence-length",
        "40",
        "--modes",
        "eager,static",
        "--json",
        str(directory / "rows.json"),
    ]

    def work(rank: int, world_size: int) -> int:
        return bench_ppo_step.main(arguments)

    assert run_ranks(work, 1, timeout=120) == [0]
    return json.loads((directory / "rows.json").read_text())


def test_rows(result: dict[str, Any]) -> None:
    found = {(row["size"], row["mode"]): row for row in result["rows"]}
    assert found.keys() == {(64, "eager"), (64, "static"), (128, "eager"), (128, "static")}
    assert result["matmul_tflops"] > 0 and result["device"] == "cpu"
    for row in found.values():
        assert (
            row["shape"] == "tiny"
            and row["equal_to_eager"] is True
            and row["difference"] == 0
            and len(row["seconds"]) == 2
        )
        assert row["tokens_per_second"] == pytest.approx(1e3 * row["real_tokens"] / row["milliseconds"])
        assert 0.9 * row["size"] <= row["real_tokens"] <= row["size"] and 0 < row["mfu"] < 1


def test_flops_by_hand() -> None:
    """32 x (32 + 2 * 16 + 32) for projections, 3 x 32 x 64 for the MLP, in two layers, 32 x 97 for the output."""
    shape = model_shape_from_config(TINY | {"head_dim": 8}, source="the test")
    weights = 2 * (32 * 96 + 3 * 32 * 64) + 32 * 97
    assert count_flops(shape, [10, 5]) == 6 * weights * 15 + 6 * 2 * 32 * (100 + 25)


@pytest.mark.parametrize("size", [64, 256, 4096])
def test_a_microbatch_is_filled_with_ragged_sequences(size: int) -> None:
    lengths = Draw(size, 4, min(size, 1024)).lengths()
    assert 0.9 * size < sum(lengths) <= size and max(lengths) <= min(size, 1024) and min(lengths) > 8


@pytest.mark.parametrize("mode", ["graph", "transformer_engine"])
def test_modes_that_need_cuda_are_refused(mode: str) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")

    def work(rank: int, world_size: int) -> int:
        return bench_ppo_step.main(["--modes", mode, "--sizes", "64"])

    assert run_ranks(work, 1, timeout=60) == [2]
