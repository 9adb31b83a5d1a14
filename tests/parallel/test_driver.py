# SPDX-License-Identifier: Apache-2.0
"""GPUs that torch cannot use are refused. nvidia-smi is a script here, and the CUDA build of torch is pretended."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from launch_runs import ROOT
from megatron_rl.parallel.collectives import explain_unusable_gpus, init_distributed
from megatron_rl.types import UserError
from tools._doctor_checks import _check_accelerators

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="describes a machine whose GPUs cannot be used")


@pytest.fixture
def gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two GPUs with an old driver, and a torch for CUDA 13; returns the nvidia-smi."""
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho '570.86.15, NVIDIA H100 80GB HBM3'\necho '570.86.15, NVIDIA H100 80GB HBM3'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    return program


def test_an_old_driver_ends_the_run_with_both_versions(gpus: Path) -> None:
    with pytest.raises(UserError) as caught:
        init_distributed(timeout_minutes=1.0)
    found = "nvidia-smi lists 2 GPUs (NVIDIA H100 80GB HBM3, driver 570.86.15), and torch "
    assert caught.value.found.startswith(found)
    assert caught.value.expected == "driver 580 or newer for CUDA 13.0"
    assert caught.value.hint.startswith("update the driver, or install NVIDIA's cuda-compat for this CUDA; to run")
    (finding,) = _check_accelerators()
    assert finding.status == "problem" and "570.86.15" in finding.found and "580 or newer" in finding.advice


@pytest.mark.parametrize("version", ["580.65.06", "[N/A]"])
def test_a_driver_that_is_new_enough_is_not_blamed(version: str, gpus: Path) -> None:
    gpus.write_text(f"#!/bin/sh\necho '{version}, NVIDIA H100 80GB HBM3'\n")
    error = explain_unusable_gpus()
    assert error is not None and error.source == "CUDA on this machine" and "update" not in error.hint


@pytest.mark.parametrize("choice", ["hidden", "minus one", "CPU build", "no GPU", "no driver"])
def test_the_cpu_can_be_chosen(choice: str, gpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if choice in ("hidden", "minus one"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "" if choice == "hidden" else "-1")
    elif choice == "CPU build":
        monkeypatch.setattr(torch.version, "cuda", None)
        (finding,) = _check_accelerators()
        assert finding.status == "warning" and "nvidia-smi lists 2 GPUs" in finding.found
    else:
        gpus.write_text("#!/bin/sh\n" if choice == "no GPU" else "#!/bin/sh\necho 'no driver, really'\nexit 9\n")
    assert explain_unusable_gpus() is None


def test_set_up_says_it_as_well(gpus: Path) -> None:
    program = (
        "import sys, torch; torch.version.cuda = '13.0'; sys.path.insert(0, 'launch'); "
        "import check_environment; check_environment.check_torch('gpu')"
    )
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert "RuntimeError: nvidia-smi lists 2 GPUs" in result.stderr and "driver 580 or newer" in result.stderr
