# SPDX-License-Identifier: Apache-2.0
"""Calls into the libraries of GPUs fit what is installed here (torch.cuda, and vLLM for CPUs); misfits are seen."""

from __future__ import annotations

import pytest

from tools import check_signatures as tool

SOURCE = """
import torch
from torch.multiprocessing.reductions import reduce_tensor

def work(x):
    from flash_attn import flash_attn_varlen_func
    torch.cuda.synchronize(x)
    torch.cuda.synchronize(x, x)
    torch.cuda.mem_get_info(devise=x)
    torch.cuda.no_such_function()
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
        ("11", None),
        ("12", ""),
    ]


@pytest.mark.slow
def test_program_fits_what_is_installed(capsys: pytest.CaptureFixture[str]) -> None:
    assert tool.main([]) == 0, capsys.readouterr().out
    assert int(capsys.readouterr().out.splitlines()[-1].split()[0]) > 50
