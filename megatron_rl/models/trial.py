# SPDX-License-Identifier: Apache-2.0
"""Does an optional kernel library work here? A wheel of another ABI is installed and fails at its first call."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch


def find_failure(module: str, call: Callable[[], object]) -> str | None:
    """Try a library once.

    Args:
        module: that must be installed.
        call: imports it and does with it what a step will do, on tensors of a few elements.

    Returns:
        None if it works, "" if it is not installed, else what it raised.
    """
    try:
        if importlib.util.find_spec(module) is None:
            return ""
    except ModuleNotFoundError:  # of a parent
        return ""
    try:
        with torch.inference_mode(False), torch.enable_grad():  # whatever the first caller is in the middle of
            call()
    except Exception as error:  # a broken wheel raises anything: ImportError, OSError, RuntimeError, TypeError
        return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]}"
    return None
