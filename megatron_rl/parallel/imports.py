# SPDX-License-Identifier: Apache-2.0
"""Faster imports of libraries (half of the time to the first step), and filters of warnings that no user can act on.

Measured on the toy task, CPU-seconds per rank to the first step: 10.6 by default; 7.2 with `kept_imports`; 5.9 also
without unused imports (`NotForMegatron`, `prepare_vllm`).
"""

from __future__ import annotations

import atexit
import gc
import logging
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

# Optional dependencies that megatron.core imports eagerly, for its own training loops only.
UNUSED_BY_MEGATRON = ("wandb",)
# Regular expression for the start of the message, category, and module ("" matches any).
Filters = tuple[tuple[str, type[Warning], str], ...]
KNOWN: Filters = (
    ("Transformer Engine and Apex are not installed", UserWarning, "megatron"),
    ("Apex is not installed", UserWarning, "megatron"),
    ("full scope is deprecated. Use empty cuda_graph_", UserWarning, "megatron"),  # megatron's own default
    ("MimoModelConfig is experimental", UserWarning, "megatron"),  # megatron-core 0.19 imports it with the optimizers
    ("The .grad attribute of a Tensor that is not a leaf Tensor is being accessed", UserWarning, "megatron"),
    ("TypedStorage is deprecated", UserWarning, "megatron"),  # with actor.offload_gradients
    ("The 'megatron.core.transformer.custom_layers.transformer_engine'", DeprecationWarning, ""),
    # torch 2.13 renamed functions that megatron-core and vLLM call.
    ("`torch.distributed.(reduce_scatter_tensor|all_gather_into_tensor|reduce_op)` is deprecated", FutureWarning, ""),
)
# About GPU streams.
KNOWN_ON_CPU: Filters = (
    ("When using sequence parallelism it is recommended to set the environment variable", UserWarning, "megatron"),
)
# Logger, and start of the message.
KNOWN_LOGS = (
    ("megatron.core.models.gpt.gpt_model", "GPTModel IS DEPRECATED"),
    ("megatron.core.distributed.distributed_data_parallel", "DistributedDataParallel: full_param_layout not provided"),
)


@contextmanager
def kept_imports() -> Iterator[None]:
    """Exempt all objects that exist at the end of this block from garbage collection; use it before large ones."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        atexit.register(gc.unfreeze)  # libraries complain about surviving objects
        if was_enabled:
            gc.enable()


class NotForMegatron:
    """Meta path finder that hides the libraries `UNUSED_BY_MEGATRON` from megatron.core only."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: Any = None) -> None:
        """Raise ModuleNotFoundError if megatron.core imports a library that it does not use."""
        if name not in UNUSED_BY_MEGATRON:
            return
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("importlib."):
            frame = frame.f_back
        if frame.f_globals.get("__name__", "").startswith("megatron.core"):
            raise ModuleNotFoundError(f"{name} is not for megatron.core", name=name)


def silence_logs() -> None:
    """Hide megatron-core's log messages `KNOWN_LOGS` from now on, in this process."""
    for name, beginning in KNOWN_LOGS:
        logging.getLogger(name).addFilter(lambda record, start=beginning: not str(record.msg).startswith(start))


def silence(filters: Filters) -> None:
    """Hide warnings that match `filters` from now on, in this process."""
    for message, category, module in filters:
        warnings.filterwarnings("ignore", message=message, category=category, module=module)
