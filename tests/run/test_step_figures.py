# SPDX-License-Identifier: Apache-2.0
"""A reader follows one synchronous step through few files: a trace of a real step, with its parts."""

from __future__ import annotations

import pytest
import step_figures


@pytest.mark.slow
def test_step_enters_few_files() -> None:
    """Of one rank with vLLM and a reference; not covered: other schedules, episodes, a critic, parallel layouts."""
    entered = step_figures.trace_step([])
    kept = {name: found for name, found in entered.items() if name not in step_figures.APART}
    assert {"run/grpo.py", "rollout/generation.py", "transfer/executor.py", "algorithms/losses.py"} <= {*kept}
    assert len(kept) <= step_figures.MAX_FILES, sorted(kept)
    assert sum(found.total() for found in kept.values()) <= step_figures.MAX_LINES
