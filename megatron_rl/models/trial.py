# SPDX-License-Identifier: Apache-2.0
"""A check that an optional kernel library works: a wheel with another ABI installs, then fails at its first call."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch


def find_failure(module: str, call: Callable[[], object]) -> str | None:
    """Try a library once.

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
