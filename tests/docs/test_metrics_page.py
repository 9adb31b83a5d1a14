# SPDX-License-Identifier: Apache-2.0
"""The table of metrics against the metrics of real runs: those written down in tests/golden.

Every run that a test reads with `read_records` is held against the table as well. Not covered: whether a meaning is
true.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from megatron_rl.observability.metrics import ROWS, find_metric
from megatron_rl.observability.run import CHECKS
from megatron_rl.observability.status import CHARTS
from tools._metrics_page import PEERS, format_page

ROOT = Path(__file__).resolve().parents[2]
NAMES = {metric.name for metric in ROWS}
# Recordings leave out what depends on the clock and the allocator; plugins and schedules are in tests/run, data
# sources, bytes and trees, which are younger than the recordings, in tests/samples; episodes in tests/run.
NOT_RECORDED = (
    "preference/",  # tests/run/test_preference.py
    "engines/",  # tests/run/test_elastic_in_loop.py
    "rollout/draft_acceptance",  # tests/run/test_drafts_in_loop.py
    "validation/<set>/margin",
    "validation/<set>/calibration_error",
    "time/",
    "memory/",
    "tokens/per_second",
    "throughput/",
    "mfu/",
    "advantages/",  # these and the next are younger than the recordings: tests/samples, tests/training
    "returns/",
    "values/",
    "response/length_",
    "prompt/length_",
    "reward/std",
    "reward/min",
    "reward/max",
    "policy/clip_fraction_",
    "rollout/prefix_cache_hits",
    "rollout/cache_max",
    "rollout/waiting_max",
    "samples/bytes_per_rank",
    "loss/",
    "estimator/",
    "aggregation/",
    "schedule/",
    "sources/",  # tests/config/test_mixture.py
    "lora/",
    "moe/",
    "mtp/",
    "agents/",
    "validation/<set>/failed",
    "mismatch/lag",
    "packing/prefix_repeats",
    "curriculum/",  # tests/run/test_curriculum_in_loop.py
    "sampling/kept",
    "sampling/thoughts_ended",
    "reward/<data_source>",
    "reward/restates_prompt",
    "reward/weight/",
    "reward/service_failures",
    "reward/unmarked_answers",
    "reward/math_",
    "distill/",
)


def read_keys() -> set[str]:
    """Return the metric names of all golden recordings."""
    files = sorted((ROOT / "tests/golden").glob("*.json"))
    assert len(files) > 10
    return {key for file in files for key in json.loads(file.read_text())["metrics"]} - {"step"}


def test_every_metric_of_the_recorded_runs_is_in_the_table() -> None:
    assert {key for key in read_keys() if find_metric(key) is None} == set()


def test_every_metric_of_the_recorded_runs_is_declared_once() -> None:
    """Names are unique, and no metric has two declarations that are equally specific."""
    assert len(NAMES) == len(ROWS)
    for key in read_keys():
        placeholders = [metric.name.count("<") for metric in ROWS if metric.match(key) is not None]
        assert placeholders.count(min(placeholders)) == 1, key


def test_charts_and_alarms_have_metrics() -> None:
    """An alarm without a metric would never be raised, and a metric with an unknown alarm would not be watched."""
    assert {metric.chart for metric in ROWS} - {""} == set(CHARTS)
    assert {metric.alarm for metric in ROWS} - {""} == set(CHECKS)


def test_every_row_is_written_by_a_recorded_run() -> None:
    written = {find_metric(key).name for key in read_keys()}
    assert {name for name in NAMES if not name.startswith(NOT_RECORDED)} - written == set()


def test_every_phase_is_entered_somewhere() -> None:
    """A phase is a text in the sources, `phase("rollout")` or `update="update"`, and each such phase has a row."""
    text = "\n".join(path.read_text() for path in (ROOT / "megatron_rl").rglob("*.py"))
    phases = {name.removeprefix("time/") for name in NAMES if name.startswith("time/")}
    assert {phase for phase in phases if f'"{phase}"' not in text} == set()
    assert set(re.findall(r'\.phase\("(\w+)"', text)) <= phases


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("reward/openai/gsm8k/mean", "reward/<data_source>/mean"),
        ("reward/mean", "reward/mean"),
        ("reward/has_number", "reward/<component>"),
        ("reward/a/b", "reward/<component>"),
        ("loss/soft_clip/ratio", "loss/<name>/<metric>"),
        ("validation/gsm8k-test/pass@16", "validation/<set>/pass@<k>"),
        ("packing/padding_share_4096", "packing/padding_share_<bucket>"),
        ("loss/soft_clip", None),
        ("policy/los", None),
        ("new/metric", None),
        ("validation/set/accuracy/more", None),
    ],
)
def test_a_key_finds_its_row(key: str, name: str | None) -> None:
    found = find_metric(key)
    assert (found and found.name) == name


def test_the_page_has_each_row_once() -> None:
    text = format_page().partition("## Names in other libraries")[0]
    cells = re.findall(r"^\| `(.+?)` \| (.*?) \| .+ \|$", text, re.M)
    assert [name for name, _ in cells] == [metric.name for metric in ROWS]
    assert dict(cells)["tokens/per_second"] == "tokens/s"


def test_names_of_other_libraries_stand_beside_declared_metrics() -> None:
    assert {ours for ours, *_ in PEERS} - NAMES == set()
    assert all(len(row) == 4 for row in PEERS) and len(PEERS) == len({row[0] for row in PEERS})
