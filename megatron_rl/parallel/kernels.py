# SPDX-License-Identifier: Apache-2.0
"""Choice of kernels: an optional library is tried on this machine before it is used."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache
from importlib import import_module
from types import ModuleType

import torch


def find_failure(module: str, call: Callable[[], object]) -> str | None:
    """Try an optional library on this machine, and return the reason why it cannot be used.

    Args:
        call: imports the library and uses it on tensors of a few elements.

    Returns:
        `None` if it works, "" if it is not installed, else the error.
    """
    try:
        if importlib.util.find_spec(module) is None:
            return ""
    except ModuleNotFoundError:  # the parent package is missing
        return ""
    try:
        with torch.inference_mode(False), torch.enable_grad():  # whichever mode the first caller is in
            call()
    except Exception as error:  # a broken wheel raises anything: ImportError, OSError, RuntimeError, TypeError
        return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]}"
    return None


@cache
def find_triton_failure() -> str | None:
    """Return why `triton_kernels` cannot run on the current GPU; see `find_failure`."""

    def call() -> None:
        logits, targets = torch.zeros(1, 16, device="cuda"), torch.zeros(1, dtype=torch.int64, device="cuda")
        if has_gpu_memory(logits):
            import_module("megatron_rl.parallel.triton_kernels").summarize_logits(logits, targets, 0, 1.0)

    return find_failure("triton", call)


def choose_triton_kernels(tensor: torch.Tensor) -> ModuleType | None:
    """Return `triton_kernels` if they work and suit a tensor: on a GPU, of at most 32 bits; else `None`."""
    if not has_gpu_memory(tensor) or tensor.dtype == torch.float64 or find_triton_failure() is not None:
        return None
    return import_module("megatron_rl.parallel.triton_kernels")


def has_gpu_memory(tensor: torch.Tensor) -> bool:
    """Return whether a tensor lies in a GPU's memory; a rehearsal's fake tensors only claim to."""
    return tensor.is_cuda and type(tensor) is torch.Tensor
