# SPDX-License-Identifier: Apache-2.0
"""Skip rehearsals without a CPU build of torch; environments of some Pythons have the CUDA build."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

REHEARSED = {"arguments", "problems", "found"}  # fixtures of rehearsed jobs


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests that `cuda_guard.py` would refuse."""
    for item in items:
        is_here = item.path.parent == Path(__file__).parent
        if torch.version.cuda is not None and is_here and REHEARSED & {*getattr(item, "fixturenames", ())}:
            item.add_marker(pytest.mark.skip(reason="torch is a CUDA build, and a rehearsal takes one for CPUs"))
