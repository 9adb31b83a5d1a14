# SPDX-License-Identifier: Apache-2.0
"""Heavy imports happen once, in the parent, so that forked ranks start in milliseconds."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session")
def vllm_imported() -> None:
    """Import vllm and what its engine imports lazily; forked ranks inherit all of it."""
    import importlib

    from megatron_rl.rollout.vllm_engine import prepare_vllm

    prepare_vllm(torch.device("cpu"))
    for name in ("entrypoints.llm", "v1.worker.cpu_worker", "v1.engine.core", "model_executor.models.qwen2",
                 "model_executor.models.qwen3", "model_executor.models.llama"):
        importlib.import_module(f"vllm.{name}")
