# SPDX-License-Identifier: Apache-2.0
"""Layout arithmetic (pure), process groups, collectives and the CPU runtime.

The first import of `megatron.core` after this package installs the CPU runtime (no-op with CUDA). This package alone
does not import torch: dry runs need only the arithmetic.
"""

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from typing import Any

from megatron_rl.parallel import imports


class _BeforeMegatron:
    """Meta path finder that installs the CPU runtime at the first import of `megatron.core`."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        if name != "megatron.core":
            return None
        from megatron_rl.parallel import cpu_runtime

        return cpu_runtime.install_and_find(name, path)


imports.silence(imports.KNOWN)
imports.silence_logs()
if "megatron.core" in sys.modules:
    from megatron_rl.parallel import cpu_runtime

    cpu_runtime.install()
else:
    sys.meta_path[:0] = _BeforeMegatron, imports.NotForMegatron
