# SPDX-License-Identifier: Apache-2.0
"""RL post-training of large language models on megatron-core and vLLM, in one torchrun program.

import megatron_rl

trainer = megatron_rl.Trainer("models/Qwen2.5-0.5B-Instruct", "recipe.yaml")
trainer.train()
"""

import sys
from importlib.util import find_spec
from typing import Any

if missing := [name for name in ("numpy", "yaml", "sentencepiece") if find_spec(name) is None]:
    raise ImportError(
        f"{sys.executable} lacks {', '.join(missing)}: activate the environment of launch/setup.sh "
        "(source .venv/bin/activate), or install the extra cpu or gpu of this package"
    )

from megatron_rl.parallel.imports import kept_imports

__all__ = ["Trainer", "UserError", "__version__", "load"]
__version__ = "0.1.0"  # pyproject.toml reads it here


def __getattr__(name: str) -> Any:
    """Import a public name at first use: a dry run imports this package without torch."""
    if name == "Trainer":
        with kept_imports():
            from megatron_rl.run.grpo import Trainer

        return Trainer
    if name == "load":
        with kept_imports():
            from megatron_rl.run.grpo import load

        return load
    if name == "UserError":
        from megatron_rl.types import UserError

        return UserError
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
