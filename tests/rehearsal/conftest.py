# SPDX-License-Identifier: Apache-2.0
"""A rehearsal takes a build of torch for CPUs; where there is none for a Python, its environment has the CUDA build."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

REHEARSED = {"arguments", "problems", "found"}  # fixtures of what is rehearsed


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what would be refused; see `cuda_guard.py`."""
    for item in items:
        is_here = item.path.parent == Path(__file__).parent
        if torch.version.cuda is not None and is_here and REHEARSED & {*getattr(item, "fixturenames", ())}:
            item.add_marker(pytest.mark.skip(reason="torch is a CUDA build, and a rehearsal takes one for CPUs"))
