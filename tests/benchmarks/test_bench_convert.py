# SPDX-License-Identifier: Apache-2.0
"""bench_convert.py on a small model: figures of both directions, and nothing is left behind."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools/benchmarks/bench_convert.py"


@pytest.mark.slow
def test_figures(tmp_path: Path) -> None:
    config = dict(
        model_type="qwen2",
        num_hidden_layers=2,
        hidden_size=64,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=517,
        tie_word_embeddings=False,
        rms_norm_eps=1e-6,
        rope_theta=1e4,
        max_position_embeddings=64,
    )
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "work").mkdir()
    subprocess.run(
        [
            sys.executable,
            str(TOOL),
            "--hf-config",
            str(tmp_path / "config.json"),
            "--work",
            str(tmp_path / "work"),
            "--file-gib",
            "0.0001",
            "--json",
            str(tmp_path / "found.json"),
        ],
        check=True,
        capture_output=True,
        timeout=200,
    )
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["bit_identical"] is True
    parameters = 2 * 517 * 64 + 2 * (64 * (64 + 32 + 32 + 64) + 128 + 3 * 96 * 64 + 2 * 64) + 64
    assert 2 * parameters < found["model_bytes"] < 2 * parameters + 20_000  # headers
    for direction in ("to_megatron", "to_huggingface"):
        assert found[direction]["seconds"] > 0 and found[direction]["peak_rss_bytes"] > 100 << 20
    assert not list((tmp_path / "work").iterdir())
