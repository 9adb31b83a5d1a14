# SPDX-License-Identifier: Apache-2.0
"""The reshard benchmark on a small model: right results and consistent byte counts; no claim about its seconds."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from distributed import run_ranks

TOOL = Path(__file__).resolve().parents[2] / "tools" / "benchmarks" / "bench_reshard.py"
CONFIG = {
    "model_type": "qwen2",
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 517,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64,
    "rope_theta": 1e4,
    "hidden_act": "silu",
}


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return importlib.import_module("tools.benchmarks.bench_reshard")


def bench(tool: ModuleType, directory: Path, world_size: int, *arguments: str) -> tuple[list[int], dict[str, Any]]:
    """Exit codes of the ranks, and the JSON that rank 0 wrote."""
    config, result = directory / "config.json", directory / "result.json"
    config.write_text(json.dumps(CONFIG))

    def work(rank: int, world_size: int) -> int:
        return tool.main(["--hf-config", str(config), "--repeats", "1", "--json", str(result), *arguments])

    return run_ranks(work, world_size, timeout=90), json.loads(result.read_text()) if result.exists() else {}


@pytest.mark.parametrize("transport", ["pull", "buckets"])
@pytest.mark.parametrize("destination", ["tp=1", "tp=2", "tp=4"])
def test_results_are_right_and_bytes_add_up(tool: ModuleType, tmp_path: Path, transport: str, destination: str) -> None:
    """The gather path fills the same destination, and both are checked element by element."""
    codes, result = bench(
        tool,
        tmp_path,
        4,
        "--source",
        "tp=2,pp=2",
        "--destination",
        destination,
        "--dtype",
        "float32",
        "--transport",
        transport,
        "--no-alias",
        "--bucket-bytes",
        "65536",
    )
    assert codes == [0] * 4
    assert result["transport"] == transport and result["wrong_elements"] == 0 == result["bytes_aliased"]
    assert result["bytes_total"] == result["bytes_moved"] + result["bytes_copied"] > 0
    assert result["seconds_gather_load"] > 0 and result["seconds_floor"] > 0
    assert result["peak_transient_bytes"] <= (0 if transport == "pull" else 2 * 65536)


def test_coinciding_layouts_share_everything(tool: ModuleType, tmp_path: Path) -> None:
    codes, result = bench(tool, tmp_path, 4, "--source", "tp=2", "--destination", "tp=2")
    assert codes == [0] * 4 and result["aliased_share"] == 1.0 and result["bytes_moved"] == 0


@pytest.mark.parametrize("source", ["tp=2,dp=2", "tp=2, cp=2"])
def test_layouts_read_as_those_of_the_planner(tool: ModuleType, tmp_path: Path, source: str) -> None:
    codes, result = bench(tool, tmp_path, 4, "--source", source, "--destination", "tp=1,dp=4")
    assert codes == [0] * 4 and result["destination_tp"] == 1 and result["wrong_elements"] == 0


@pytest.mark.parametrize(
    ("source", "destination", "found"),
    [
        ("tp:2", "tp=1", "cannot read 'tp:2' in --source tp:2"),
        ("tp=2,pipeline=2", "tp=1", "cannot read 'pipeline=2' in --source"),
        ("tp=1,dp=3", "tp=1", "--source tp=1,dp=3 takes 3 ranks, there are 2"),
        ("tp=2", "tp=1,dp=3", "--destination tp=1,dp=3 does not fill the 2 ranks"),
        ("tp=2", "pp=2", "cannot read 'pp=2' in --destination"),
    ],
)
def test_bad_layout_is_one_error(
    tool: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str], source: str, destination: str, found: str
) -> None:
    codes, result = bench(tool, tmp_path, 2, "--source", source, "--destination", destination)
    error = capfd.readouterr().err
    assert codes == [2, 2] and not result and error.count("error:") == 1
    assert f"error: {found}" in error and "Traceback" not in error
