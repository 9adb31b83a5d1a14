# SPDX-License-Identifier: Apache-2.0
"""Heavy imports happen once, in the parent, so that forked ranks start in milliseconds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import settings

# A busy machine is no reason for an example to fail.
settings.register_profile("no-deadline", deadline=None)
settings.load_profile("no-deadline")


@pytest.fixture(scope="session")
def vllm_imported() -> None:
    """Import vllm and what its engine imports lazily; forked ranks inherit all of it."""
    import importlib

    from megatron_rl.engines.vllm import prepare_vllm

    prepare_vllm(torch.device("cpu"))
    for name in ("entrypoints.llm", "v1.worker.cpu_worker", "v1.engine.core", "model_executor.models.qwen2",
                 "model_executor.models.qwen3", "model_executor.models.llama"):
        importlib.import_module(f"vllm.{name}")


@pytest.fixture(scope="session")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory made by `make_task`."""
    from rl_runs import make_task

    directory = tmp_path_factory.mktemp("task")
    make_task(directory)
    return directory
