# SPDX-License-Identifier: Apache-2.0
"""The table of fast paths on a CPU, which lacks only float32's. Not covered: the table on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_rl.config.schema import ActorConfig
from megatron_rl.models import attention_kernels
from megatron_rl.models.attention_kernels import (
    check_transformer_engine,
    describe_library,
    find_transformer_engine_failure,
)
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
    """Every kernel fails without a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    by_part = {path.part: path for path in find_kernels("bfloat16", "local", torch.device("cuda"))}
    assert by_part["attention"].active == "sdpa" and by_part["layers"].active == "megatron-core's own"
    assert by_part["softmax, SwiGLU"].active == "torch's operations"
    for part, failure in (
        ("torch-varlen", ""),
        ("Triton", "RuntimeError: Found no NVIDIA driver" if torch.version.cuda else "AssertionError: "),
    ):
        assert not by_part[part].is_fast and by_part[part].active == "not used"
        assert by_part[part].brings.startswith(f"it is installed and fails: {failure}")


def test_each_library_of_kernels_has_a_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Found ones with their versions; what is not used says why. A Transformer Engine that fails refuses its use."""
    for name, version in (("apex", "0.1"), ("liger_kernel", "0.6.2"), ("transformer_engine", "2.11.0")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise OSError('libcuda.so.1: cannot open shared object file')")
        (tmp_path / f"{name}-{version}.dist-info").mkdir()
        (tmp_path / f"{name}-{version}.dist-info" / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        attention_kernels, "find_transformer_engine_failure", find_transformer_engine_failure.__wrapped__
    )
    lines = {path.part: path for path in find_kernels("bfloat16", "local", torch.device("cuda"))}
    assert lines["apex"].active == "found 0.1, not used" and "torch's fused AdamW" in lines["apex"].brings
    assert lines["liger-kernel"].active == "found 0.6.2, not used" and "SwiGLU" in lines["liger-kernel"].brings
    assert lines["transformer-engine"].active == "found 2.11.0, not used"
    assert lines["flash-attn"].active in ("not installed, not used", f"{describe_library('flash-attn')}, not used")
    used = {path.part: path for path in find_kernels("bfloat16", "transformer_engine", torch.device("cuda"))}
    assert used["transformer-engine"].active == "found 2.11.0" and used["layers"].active == "Transformer Engine"
    with pytest.raises(UserError, match="not usable here: OSError: libcuda"):
        check_transformer_engine()


def test_table_says_what_is_missing_and_how_to_get_it() -> None:
    head, *lines = format_table(
        [
            FastPath("attention", "sdpa", False, "one kernel", "pip install flash-attn"),
            FastPath("optimizer", "fused", True),
        ]
    )
    assert head.split() == ["fast", "path", "active", "missing"]
    assert lines[0].endswith("sdpa    one kernel (pip install flash-attn)") and lines[1].endswith("fused   -")
