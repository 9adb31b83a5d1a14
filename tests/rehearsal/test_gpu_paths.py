# SPDX-License-Identifier: Apache-2.0
"""GPU code of a run outside its steps, on an imitated GPU; and the page that lists such branches.

Not covered: a real driver.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tools._gpu_branches import _Finder, list_branches
from tools.gpu_status import HARDWARE, PAGE, TARGET, add_hardware, format_page, read_page

GIB = 1 << 30
EXPECTED: dict[str, Any] = {
    "start": ["cpu:gloo,cuda:nccl", "cuda:0", "cuda:0"],
    "memory": 7,
    "random states": True,
    "cluster": [2, 4, 80 * GIB],
    "profile": [
        "CPU",
        "CUDA",
        "history {'max_entries': 100000}",
        "snapshot step_1_rank_0.pickle",
        "history {'enabled': None}",
    ],
    "share": "recipe of all of it on cuda:0",
    "barrier": 1,
    "cache": 5120,
    "kernels": [
        "efficient",
        "torch-varlen",
        "Triton",
        "attention",
        "delta nets",
        "softmax, SwiGLU",
        "flash-attn",
        "transformer-engine",
        "apex",
        "liger-kernel",
        "step",
        "gradient reduction",
        "weight gathering",
        "Transformer Engine is not usable here",
    ],
    "servers": {
        "refused": "servers on the GPUs of the actor",
        "devices": "2,3",
        "eager": False,
        "compiled": "0",
        "sglang": [["--mem-fraction-static", "0.5"], {}],
    },
    "captured experts": [
        "nothing",
        "nothing",
        "torch multiplies experts in float32 one after the other on compute capability 9.0",
        "torch multiplies experts in bfloat16 one after the other on compute capability 8.0",
    ],
    "fixed memory": [
        "cuMemGetAllocationGranularity",
        "cuMemAddressReserve",
        *("cuMemCreate", "cuMemMap", "cuMemSetAccess"),
        *("synchronize", "cuMemUnmap", "cuMemRelease"),
        *("cuMemCreate", "empty_cache", "cuMemCreate", "cuMemMap", "cuMemSetAccess"),
    ],
    "stored input": [128, "cuda:0"],  # eight rows of four float32 numbers
    "bitwise": "rollout.bitwise on a GPU: the kernels of vLLM and of the trainer add up in different orders there",
    "capsule": False,
}
SOURCE = """
is_gpu = device.type == "cuda"

def choose(x):
    if x.device.type == "cpu":
        return 1
    work(x)
    return 2

def both(x):
    if is_gpu and x:
        torch.cuda.empty_cache()
    elif not torch.cuda.is_available():
        pass
    else:
        other()
    y = 1 if x.is_cuda else 2
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    file = tmp_path_factory.mktemp("paths") / "found.json"
    program = [sys.executable, str(Path(__file__).with_name("gpu_paths.py")), str(file)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(file.read_text())


@pytest.mark.parametrize("part", EXPECTED)
def test_part_of_a_run_with_a_gpu(part: str, found: dict[str, Any]) -> None:
    assert found[part] == EXPECTED[part]


def test_branches_are_found() -> None:
    branches = sorted(_Finder("file.py", SOURCE).run(), key=lambda branch: branch.line)
    assert [(branch.function, branch.text, branch.is_expression) for branch in branches] == [
        ("choose", "work(x)", False),
        ("both", "torch.cuda.empty_cache()", False),
        ("both", "torch.cuda.empty_cache()", False),
        ("both", "other()", False),
        ("both", "y = 1 if x.is_cuda else 2", True),
    ]


def test_every_branch_is_on_the_page_and_most_have_run() -> None:
    """A branch without an entry: run `python tools/gpu_status.py`; any other difference: with `--keep`."""
    page, branches = PAGE.read_text(encoding="utf-8"), list_branches()
    hardware, found = json.loads(HARDWARE.read_text(encoding="utf-8")), read_page(page, branches)
    assert len(branches) > 40 and [*found] == branches
    found = add_hardware(found, hardware)
    assert page == format_page(found, hardware), "what is gone has no entry"
    assert sum(map(bool, found.values())) >= TARGET * len(branches)
    row = next(line for line in page.splitlines() if line.startswith("| `"))
    assert [*read_page(page.replace(row, ""), branches)] == branches[1:]
