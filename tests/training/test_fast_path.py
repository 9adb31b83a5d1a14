# SPDX-License-Identifier: Apache-2.0
"""The table of fast paths on a CPU, which lacks only float32's. Not covered: the table on a GPU."""

from __future__ import annotations

import pytest
import torch

from megatron_rl.config.schema import ActorConfig
from megatron_rl.models import attention_kernels, gpt
from megatron_rl.training.fast_path import FastPath, find_fast_paths, find_kernels, format_table
from megatron_rl.types import UserError

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="describes a machine without CUDA")


def test_on_a_cpu_only_bfloat16_is_slow() -> None:
    by_part = {path.part: path for path in find_fast_paths(ActorConfig(), "float32", dp_size=4)}
    assert all(path.is_fast for path in by_part.values()), [p for p in by_part.values() if not p.is_fast]
    assert by_part["attention"].active == "sdpa" and by_part["step"].active == "eager"
    assert by_part["gradient reduction"].active == "after backward"
    (slow,) = [path for path in find_fast_paths(ActorConfig(), "bfloat16") if not path.is_fast]
    assert slow.part == "arithmetic" and "float32" in slow.advice


def test_overlap_is_a_matter_of_data_parallelism() -> None:
    parts = {path.part for path in find_fast_paths(ActorConfig(), "float32", dp_size=1)}
    assert not parts & {"gradient reduction", "weight gathering"}


def test_what_is_installed_and_fails_has_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kernel fails without a GPU: torch's own, and a Transformer Engine that cannot be imported."""

    def fail() -> str:
        return "OSError: libtransformer_engine.so: cannot open shared object file"

    monkeypatch.setattr(attention_kernels, "find_transformer_engine_failure", fail)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    by_part = {path.part: path for path in find_kernels("bfloat16", "auto", torch.device("cuda"))}
    assert by_part["attention"].active == "sdpa" and by_part["layers"].active == "megatron-core's own"
    assert by_part["softmax, SwiGLU"].active == "torch's operations"
    for part, failure in (
        ("torch-varlen", ""),
        ("Triton", "RuntimeError: Found no NVIDIA driver" if torch.version.cuda else "AssertionError: "),
        ("Transformer Engine", "OSError: libtransformer_engine.so"),
    ):
        assert not by_part[part].is_fast and by_part[part].active == "not used"
        assert by_part[part].brings.startswith(f"it is installed and fails: {failure}")
    with pytest.raises(UserError, match="not usable here: OSError: libtransformer_engine.so"):
        gpt.choose_transformer_impl("transformer_engine")


def test_table_says_what_is_missing_and_how_to_get_it() -> None:
    head, *lines = format_table(
        [
            FastPath("attention", "sdpa", False, "one kernel", "pip install flash-attn"),
            FastPath("optimizer", "fused", True),
        ]
    )
    assert head.split() == ["fast", "path", "active", "missing"]
    assert lines[0].endswith("sdpa    one kernel (pip install flash-attn)") and lines[1].endswith("fused   -")
