# SPDX-License-Identifier: Apache-2.0
"""Each alarm is raised in time in a real run with a planted fault; ten healthy runs raise none.

The faults are in `tests/planted_runs.py` and a table of docs/health.md. Not covered: models worth training.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron_rl.observability.run import CHECKS
from planted_runs import HEALTHY, PLANTED, check, make_policies

PAGE = Path(__file__).resolve().parents[2] / "docs/health.md"


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory, vllm_imported: None) -> Path:
    directory = tmp_path_factory.mktemp("policies")
    make_policies(directory)
    return directory


@pytest.mark.slow
@pytest.mark.parametrize("name", [*PLANTED, *HEALTHY])
def test_the_alarms_of_a_run(name: str, policies: Path, tmp_path: Path) -> None:
    ((is_right, row),) = check(policies, tmp_path, [name])
    assert is_right, row


def test_every_alarm_is_planted_and_the_page_says_how() -> None:
    """The page has the latest allowed steps; the exact step of an alarm depends on the machine's rounding."""
    assert set(PLANTED) == set(CHECKS) and len(HEALTHY) == 10
    rows = re.findall(r"^\| \[(.*?)\]\(#\1\) \| (.*?) \| (\d+) \| (\d+) \|", PAGE.read_text(), re.MULTILINE)
    assert {name: (how, int(within)) for name, how, _, within in rows} == {
        name: (plant.how, plant.within) for name, plant in PLANTED.items()
    }
    assert all(PLANTED[name].since <= int(came) <= int(within) for name, _, came, within in rows)
