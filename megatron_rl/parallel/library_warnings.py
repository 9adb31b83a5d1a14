# SPDX-License-Identifier: Apache-2.0
"""Filters for library warnings that a user cannot act on; all others are shown.

Missing libraries and their replacements are reported once at the start (`training/fast_path.py`).
"""

from __future__ import annotations

import logging
import warnings

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


def silence_logs() -> None:
    """Hide `KNOWN_LOGS` from now on, in this process."""
    for name, beginning in KNOWN_LOGS:
        logging.getLogger(name).addFilter(lambda record, start=beginning: not str(record.msg).startswith(start))


def silence(filters: Filters) -> None:
    """Hide these warnings from now on, in this process."""
    for message, category, module in filters:
        warnings.filterwarnings("ignore", message=message, category=category, module=module)
