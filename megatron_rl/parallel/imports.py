# SPDX-License-Identifier: Apache-2.0
"""What the imports of a run cost, and what they need not cost: half of the time to the first step is imports.

Measured on the toy task, CPU-seconds per rank to the first step: 10.6 as the libraries come; 7.2 without collections of
garbage while a million objects that stay are made, and with those exempt from the eight collections that vLLM asks for;
5.9 without what is imported and never used here (this file's `NotForMegatron`, and `prepare_vllm`).
"""

from __future__ import annotations

import atexit
import gc
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

# Optional dependencies of megatron.core that it imports at once and that only its own loops would use.
UNUSED_BY_MEGATRON = ("wandb",)


@contextmanager
def kept_imports() -> Iterator[None]:
    """Import in this block what stays until the process ends: it is not searched for garbage, now or later.

    All objects that exist at its end are exempt from later collections (`gc.freeze`): use it before anything of size
    is built. The interpreter's last collection finds them again: libraries complain of what outlives it.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        atexit.register(gc.unfreeze)
        if was_enabled:
            gc.enable()


class NotForMegatron:
    """Meta path finder that hides `UNUSED_BY_MEGATRON` from megatron.core, and from nobody else."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: Any = None) -> None:
        """Raise ModuleNotFoundError where megatron.core is what imports; else leave it to the others."""
        if name not in UNUSED_BY_MEGATRON:
            return
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("importlib."):
            frame = frame.f_back
        if frame.f_globals.get("__name__", "").startswith("megatron.core"):
            raise ModuleNotFoundError(f"{name} is not for megatron.core", name=name)
