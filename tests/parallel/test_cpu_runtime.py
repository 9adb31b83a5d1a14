# SPDX-License-Identifier: Apache-2.0
"""The CPU runtime: megatron.core sees a null CUDA, everybody else the real torch, and the names it needs exist."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import symtable
import sys
import types
from pathlib import Path

import pytest
import torch

from megatron_rl.parallel import cpu_runtime, pairs

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the runtime is for machines without CUDA")

# Names outside of cpu_runtime.FIXES that other files of the package reach into.
REACHED_NAMES = {"megatron.core.parallel_state": ("_GLOBAL_MEMORY_BUFFER", "_set_global_memory_buffer")}


@pytest.fixture
def view() -> types.ModuleType:
    """Return the object that `import torch` gave to a module of megatron.core."""
    return importlib.import_module("megatron.core.tensor_parallel.layers").torch


def test_the_real_torch_is_untouched(view: types.ModuleType) -> None:
    assert view is not torch
    assert not torch.cuda.is_available()
    with pytest.raises((RuntimeError, AssertionError)):
        torch.cuda.current_device()
    with pytest.raises((RuntimeError, AssertionError)):
        torch.zeros(2, device="cuda")
    with pytest.raises((RuntimeError, AssertionError)):
        torch.zeros(2).cuda()
    assert sys.modules["torch"] is torch and sys.modules["torch.cuda"] is torch.cuda


def test_megatron_core_sees_a_device_that_is_the_cpu(view: types.ModuleType) -> None:
    assert view.cuda.current_device() == torch.device("cpu")
    assert view.Tensor is torch.Tensor and view.distributed.isend is torch.distributed.isend
    assert view.distributed.all_reduce is pairs.all_reduce
    assert view.float32 is torch.float32
    view.cuda.synchronize()
    with view.cuda.stream(view.cuda.Stream()):
        view.cuda.current_stream().wait_stream(view.cuda.default_stream())
    assert view.cuda.max_memory_allocated() == 0


@pytest.mark.parametrize("device", ["cuda", "cuda:0", torch.device("cuda", 1), "cpu", None])
def test_factories_read_cuda_as_cpu(view: types.ModuleType, device: str | torch.device | None) -> None:
    made = [
        view.empty(2, device=device),
        view.zeros(2, device=device),
        view.ones(2, device=device, pin_memory=True),
        view.full((2,), 1.0, device=device),
        view.arange(2, device=device),
        view.tensor([1, 2], device=device),
        view.empty_like(torch.ones(2), device=device),
        view.zeros_like(torch.ones(2), device=device),
        view.ones_like(torch.ones(2), device=device),
    ]
    assert {str(tensor.device) for tensor in made} == {"cpu"}
    assert {tuple(tensor.shape) for tensor in made} == {(2,)}


def test_cuda_call_is_a_no_op_for_megatron_core_only() -> None:
    scope = {"__name__": "megatron.core.somewhere"}
    exec("def move(tensor): return tensor.cuda()", scope)
    tensor = torch.zeros(1)
    assert scope["move"](tensor) is tensor


def test_rng_state_is_the_cpu_generators() -> None:
    random = importlib.import_module("megatron.core.tensor_parallel.random")
    before = random._get_cuda_rng_state()
    assert torch.equal(before, torch.get_rng_state())
    first = torch.rand(3)
    random._set_cuda_rng_state(before)
    assert torch.equal(torch.rand(3), first)


def test_cuda_type_names_last_as_long_as_the_call() -> None:
    seen = []

    def fail(tensor: torch.Tensor) -> None:
        seen.append((tensor.type(), tensor.type(torch.float64).dtype))
        raise KeyError("inside")

    with pytest.raises(KeyError, match="inside"):
        cpu_runtime._with_cuda_type_names(fail)(torch.zeros(1))
    assert seen == [("torch.cuda.FloatTensor", torch.float64)]
    assert torch.zeros(1).type() == "torch.FloatTensor"


def test_installing_twice_changes_nothing() -> None:
    cpu_runtime.install()
    finders, cuda, view = list(sys.meta_path), torch.Tensor.cuda, cpu_runtime._Loader.view
    cpu_runtime.install()
    assert sys.meta_path == finders and torch.Tensor.cuda is cuda and cpu_runtime._Loader.view is view
    assert finders.count(cpu_runtime._Finder) == 1


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (module, name)
        for table in ({module: names for module, (_, names) in cpu_runtime.FIXES.items()}, REACHED_NAMES)
        for module in table
        for name in table[module]
    ],
)
def test_private_names_still_exist(module: str, name: str) -> None:
    """Looks in the installed source as well: a patch would create the name that it was meant to replace."""
    assert hasattr(importlib.import_module(module), name)
    file = importlib.util.find_spec(module).origin
    table = symtable.symtable(Path(file).read_text(), file, "exec")
    symbol = table.lookup(name)
    assert symbol.is_assigned() or symbol.is_imported() or symbol.is_namespace()


def test_importing_megatron_core_first_is_refused() -> None:
    """In a separate process; the message names the import that must come first."""
    program = "import megatron.core\nimport megatron_rl.parallel"
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], cwd=root, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1
    assert "RuntimeError: megatron_rl.parallel must be imported before megatron.core" in done.stderr
