# SPDX-License-Identifier: Apache-2.0
"""Calls into the libraries of GPUs fit the installed ones (torch.cuda, and vLLM for CPUs); misfits are found.

Not covered: the wheels for GPUs, which `launch/check_cuda_wheels.sh` installs.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from tools import check_signatures as tool
from tools._engine_on_gpu import Setting, list_settings

ROOT = Path(__file__).resolve().parents[2]
DRIVER = """
import ctypes
from tools import _absent_driver as tool
tool._list_functions = lambda: ["cuInit", "cuMemMap"]
count = tool.stand_in_for_driver()
driver = ctypes.CDLL("libcuda.so.1")
print(count, driver.cuInit(0), driver.cuMemMap(1, 2), tool.stand_in_for_driver())
"""

SOURCE = """
import torch
from torch.multiprocessing.reductions import reduce_tensor

def work(x):
    from flash_attn import flash_attn_varlen_func
    torch.cuda.synchronize(x)
    torch.cuda.synchronize(x, x)
    torch.cuda.mem_get_info(devise=x)
    torch.cuda.no_such_function()
    torch.cuda.mem_get_info(devise=x, **x)
    reduce_tensor(x)
    flash_attn_varlen_func(x)
"""


def test_misfits_are_named() -> None:
    found = [(use.place, use.name, tool.find_misfit(use)) for use in tool.list_uses(SOURCE, "file.py")]
    assert found[:2] == [
        ("file.py:3", "torch.multiprocessing.reductions.reduce_tensor", None),
        ("file.py:6", "flash_attn.flash_attn_varlen_func", ""),
    ]
    assert [(place.partition(":")[2], misfit) for place, _, misfit in found[2:]] == [
        ("7", None),
        ("8", "torch.cuda.synchronize: too many positional arguments"),
        ("9", "torch.cuda.mem_get_info: got an unexpected keyword argument 'devise'"),
        ("10", "torch.cuda.no_such_function is not there: No module named 'torch.cuda.no_such_function'"),
        ("11", "torch.cuda.mem_get_info: got an unexpected keyword argument 'devise'"),
        ("12", None),
        ("13", ""),
    ]


def test_modules_are_missing_or_broken() -> None:
    absent, problems = tool.import_modules(["json", "no_such_library.part", "torch.cuda.no_such_module"])
    assert absent == ["no_such_library"]
    [problem] = problems
    assert problem.startswith("torch.cuda.no_such_module cannot be imported: ModuleNotFoundError")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the driver is here")
def test_stand_in_for_the_driver_says_that_there_is_no_device() -> None:
    done = subprocess.run([sys.executable, "-c", DRIVER], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["2", "100", "100", "0"]


@pytest.mark.skipif(torch.version.cuda is not None, reason="torch is a CUDA build")
def test_engine_is_not_printed_with_wheels_for_cpus(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        tool.main(["--engine", "recipe.yaml"])
    assert "it needs the wheels for CUDA" in capsys.readouterr().err


@dataclass
class Inner:
    fuse: bool | None = None
    sizes: list[int] = field(default_factory=list)


@dataclass
class Outer:
    inner: Inner
    seed: int = 0
    mode: str = "auto"
    _state: int = 0


def test_settings_that_differ_from_their_defaults() -> None:
    found = list(list_settings(Outer(Inner(True, []), 0, "eager", 3), {"mode": "eager"}))
    assert found == [Setting("inner.fuse", "True", "None", False), Setting("mode", "eager", "auto", True)]


@pytest.mark.slow
def test_program_fits_what_is_installed(capsys: pytest.CaptureFixture[str]) -> None:
    assert tool.main([]) == 0, capsys.readouterr().out
    assert int(capsys.readouterr().out.splitlines()[-1].split()[0]) > 50
