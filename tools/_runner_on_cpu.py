# SPDX-License-Identifier: Apache-2.0
"""vLLM's model runners with async scheduling on a CPU, as a GPU runs them by default.

Scheduler, runner and sampler are vLLM's own. Triton's interpreter computes the second runner's kernels; streams and
events do nothing, since everything runs in order; the CPU platform, which turns async scheduling off, is overruled.
"""

from __future__ import annotations

import os
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch

from megatron_rl.engines.vllm import vllm_settings
from megatron_rl.engines.vllm.vllm_library import prepare_vllm


class _InOrder:
    """A stream or event of a device that computes at once."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        pass

    def do_nothing(self, *arguments: Any) -> None:
        """Return: all work is done."""

    record = synchronize = wait = wait_stream = do_nothing


def use_gpu_modes(model_runner: str = "v2", async_scheduling: bool = True) -> None:
    """Make vLLM engines of this process run as on a GPU, although on a CPU; call before vLLM is imported."""
    if model_runner == "v2":
        assert os.environ.get("TRITON_INTERPRET") == "1", "Triton reads it at its import: start the process with it"
        backends: Any = import_module("triton.backends").backends
        backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True))  # else vLLM has no Triton
    modes = {"enforce_eager": True, "model_runner": model_runner, "async_scheduling": async_scheduling}
    vllm_settings._MODES_ON_CPU.update(modes)
    stream, nothing = _InOrder(), _InOrder().do_nothing
    cuda: Any = torch.cuda
    cuda.Stream = cuda.Event = _InOrder
    cuda.current_stream, cuda.set_stream = lambda *device: stream, nothing
    torch.accelerator.synchronize = torch.accelerator.empty_cache = nothing
    prepare_vllm(torch.device("cpu"))
    platform: Any = import_module("vllm.platforms.cpu").CpuPlatform
    check = platform.check_and_update_config.__func__

    def keep_scheduling(cls: Any, config: Any) -> None:
        check(cls, config)
        config.scheduler_config.async_scheduling = async_scheduling

    platform.check_and_update_config = classmethod(keep_scheduling)
