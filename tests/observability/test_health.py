# SPDX-License-Identifier: Apache-2.0
"""Each alarm fires once, in the expected step; healthy curves raise none.

The curves are synthetic, with noise; `test_planted_runs.py` has real runs. Not covered: good thresholds for a model of
billions of parameters.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron_rl.config.sections import HealthConfig, ObservabilityConfig
from megatron_rl.observability.progress import LOGGER_NAME, close_rank_log
from megatron_rl.observability.run import CHECKS, Alarm, HealthMonitor, Run

SETTINGS = HealthConfig()
STEPS = 200
HEALTHY: dict[str, Callable[[float], float]] = {  # metric -> value by share of the run
    "policy/entropy": lambda t: 0.6 - 0.4 * t,
    "tokens/response": lambda t: 1500 * (1 + 3 * t),
    "reward/mean": lambda t: 0.3 + 0.5 * t,
    "reward/accuracy": lambda t: 0.3 + 0.4 * t,
    "reward/format": lambda t: 0.3 + 0.5 * t,
    "reward/uninformative_groups": lambda t: 0.2 + 0.5 * t,
    "reward/unmarked_answers": lambda t: 0.9 - 0.8 * t,  # a count: it falls while components rise
    "reward/restates_prompt": lambda t: 0.01,
    "mismatch/mean": lambda t: 0.02 + 0.01 * t,
    "mismatch/effective_sample_size": lambda t: 0.95,
    "policy/grad_norm": lambda t: 2 - t,
    "policy/clip_fraction": lambda t: 0.02,
    "response/truncated": lambda t: 0.3 * t,
    "agents/failed": lambda t: 0.05,
    "engines/members": lambda t: 4,
    "engines/lost": lambda t: 0,
    "reward/service_failures": lambda t: 0.05,
    "moe/dead_experts": lambda t: 0.2,
    "value/explained_variance": lambda t: min(0.9, 10 * t - 0.5),
}
# Curves that go wrong from half of the run on.
WRONG: dict[str, dict[str, Callable[[float], float]]] = {
    "entropy": {"policy/entropy": lambda t: 0.6 if t < 0.5 else 0.01},
    "length": {
        "tokens/response": lambda t: 1500 if t < 0.5 else 4000,
        "reward/mean": lambda t: 0.5,
        "reward/accuracy": lambda t: 0.5,
    },
    "mismatch": {"mismatch/mean": lambda t: 0.02 if t < 0.5 else 0.5},
    "sample-size": {"mismatch/effective_sample_size": lambda t: 0.9 if t < 0.5 else 0.3},
    "gradient": {"policy/grad_norm": lambda t: 1.0 if t < 0.5 else 30.0},
    "clipping": {"policy/clip_fraction": lambda t: 0.02 if t < 0.5 else 0.6},
    "truncated": {"response/truncated": lambda t: 0.1 if t < 0.5 else 0.9},
    "no-signal": {"reward/uninformative_groups": lambda t: 0.2 if t < 0.5 else 1.0},
    "restating": {"reward/restates_prompt": lambda t: 0.01 if t < 0.5 else 0.5},
    "components": {
        "reward/accuracy": lambda t: 0.5 if t < 0.5 else 0.1,
        "reward/format": lambda t: 0.5 if t < 0.5 else 0.9,
    },
    "dead-experts": {"moe/dead_experts": lambda t: 0.0 if t < 0.5 else 12.0},
    "critic": {"value/explained_variance": lambda t: 0.8 if t < 0.5 else -0.5},
    "engines": {"engines/members": lambda t: 4 if t < 0.5 else 3, "engines/lost": lambda t: t >= 0.5},
    "failures": {"agents/failed": lambda t: 0.05 if t < 0.5 else 0.2},
}


def make_records(changes: dict[str, Callable[[float], float]], seed: int = 0) -> list[dict[str, float | None]]:
    """Return a record per step, with five percent of noise on each number."""
    noise = np.random.default_rng(seed)
    curves = HEALTHY | changes
    return [
        {name: float(curve(step / STEPS) * (1 + 0.05 * noise.standard_normal())) for name, curve in curves.items()}
        for step in range(1, STEPS + 1)
    ]


def watch(records: list[dict[str, float | None]], settings: HealthConfig = SETTINGS) -> list[Alarm]:
    monitor = HealthMonitor(settings)
    for step, record in enumerate(records, 1):
        monitor.add(step, record)
    return monitor.alarms


@pytest.mark.parametrize("seed", range(10))
def test_healthy_curves_raise_no_alarm(seed: int) -> None:
    assert watch(make_records({}, seed)) == []


def test_every_check_is_planted_and_has_a_section() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs/health.md").read_text()
    sections = set(re.findall(r"^## (.*)$", page, re.MULTILINE)) - {"The end of a bad run"}
    assert set(WRONG) == set(CHECKS) == sections


@pytest.mark.parametrize("name", WRONG)
def test_an_alarm_fires_once_and_soon(name: str) -> None:
    """The alarm comes at most a window after the change and contains numbers."""
    found = [alarm for alarm in watch(make_records(WRONG[name])) if alarm.name == name]
    assert len(found) == 1 and STEPS // 2 <= found[0].step <= STEPS // 2 + SETTINGS.window
    assert str(found[0]).startswith("health: ") and str(found[0]).endswith(f"(docs/health.md#{name})")
    assert any(character.isdigit() for character in found[0].evidence) or name == "components"


@pytest.mark.parametrize("name", WRONG)
def test_an_alarm_can_be_turned_off(name: str) -> None:
    setting = {
        "entropy": "entropy_floor",
        "length": "length_growth",
        "mismatch": "mismatch_growth",
        "sample-size": "sample_size_floor",
        "gradient": "gradient_growth",
        "clipping": "clip_limit",
        "truncated": "truncated_limit",
        "no-signal": "uninformative_limit",
        "restating": "restating_limit",
        "components": "components",
        "critic": "explained_variance_floor",
        "dead-experts": "dead_experts_limit",
        "engines": "engines_floor",
        "failures": "failed_limit",
    }[name]
    off = replace(SETTINGS, **{setting: False if name == "components" else None})
    assert name not in {alarm.name for alarm in watch(make_records(WRONG[name]), off)}


@pytest.mark.parametrize(("share", "told"), [(0.0999, 0), (0.1, 1)])
@pytest.mark.parametrize(
    ("key", "evidence"),
    [("agents/failed", "10% of the episodes fail"), ("reward/service_failures", "fails on 10% of the responses")],
)
def test_failures_are_an_alarm_from_a_tenth_on(key: str, evidence: str, share: float, told: int) -> None:
    alarms = watch([{key: share}] * STEPS)
    assert [alarm.name for alarm in alarms] == ["failures"] * told
    assert all(evidence in alarm.evidence for alarm in alarms)


@pytest.mark.parametrize(
    ("members", "lost", "alarms"),
    [
        ([4, 4, 3, *[4] * 20], [0, 0, 1, *[1] * 20], []),  # it has come back
        ([4, 4, *[3] * 20], [0, 0, *[0] * 20], []),  # it has left
        ([4, 4, *[3] * 20, 4, *[2] * 20], [0, 1, *[1] * 20, 1, *[3] * 20], [33]),
        ([1, *[0] * 20], [0, *[1] * 20], [11]),
        ([2, 4, *[2] * 20, *[1] * 20], [5, 5, *[0] * 20, *[1] * 20], []),  # a restarted job counts from 0
    ],
)
def test_engines_that_do_not_come_back_are_an_alarm(members: list[int], lost: list[int], alarms: list[int]) -> None:
    """Ten steps after the last one with all of them; once."""
    records = [{"engines/members": m, "engines/lost": n} for m, n in zip(members, lost, strict=True)]
    found = watch(records)
    assert [(alarm.name, alarm.step) for alarm in found] == [("engines", step) for step in alarms]
    if alarms == [33]:
        assert found[0].evidence.startswith("2 of 4 engines serve: 2 were lost and not replaced.")


def test_what_comes_back_is_told_again() -> None:
    """An alarm is raised again after more than a window without it, but not if it flickers."""

    def truncated(t: float) -> float:
        step = round(t * STEPS)
        return 1.0 if 40 <= step < 60 or 120 <= step < 140 else 0.0

    steps = [alarm.step for alarm in watch(make_records({"response/truncated": truncated}))]
    assert len(steps) == 2 and 40 <= steps[0] < 60 and 120 <= steps[1] < 140
    flicker = make_records({"response/truncated": lambda t: 1.0 if round(t * STEPS) % 8 < 5 else 0.1})
    assert len(watch(flicker)) == 1


def test_windows_are_as_long_as_the_setting_says() -> None:
    """Means are over exactly 4 steps: the last, the first, and the window that ended four windows before."""
    settings = replace(SETTINGS, window=4, truncated_limit=0.5, entropy_floor=0.5, gradient_growth=10.0)

    def fires(key: str, values: list[float]) -> int | None:
        records = [{key: value} for value in values]
        return next((alarm.step for alarm in watch(records, settings)), None)

    assert fires("response/truncated", [0.0] * 6 + [1.0] * 6) == 9, "3 of 4 are more than half"
    assert fires("response/truncated", [1.0] * 6) == 4, "no window before"
    # Not before step 8: the first and the last four steps overlap.
    assert fires("policy/entropy", [1.0] * 4 + [0.1] * 8) == 8
    assert fires("policy/entropy", [1.0] * 4 + [0.6] * 4 + [0.1] * 8) == 9, "0.475"
    # A single 50 makes the mean of the last four 13.25, more than 10 times the earlier median.
    assert fires("policy/grad_norm", [1.0] * 20 + [50.0] * 4) == 21
    assert fires("policy/grad_norm", [1.0] * 4 + [5.0] * 12 + [21.0] * 4) == 18, "13 is more than 10 times the first 1"
    assert fires("policy/grad_norm", [0.1] * 4 + [1.0] * 12 + [1.2] * 3) == 17, "0.1 before is 1.05 now"


def test_numbers_that_are_missing_are_passed_over() -> None:
    """Missing metrics and null values raise nothing."""
    assert watch([{"reward/mean": None, "policy/entropy": float("nan")}] * STEPS) == []


def test_a_run_tells_its_alarms(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Console, summary and TensorBoard show an alarm; a resumed run does not repeat it."""
    settings = ObservabilityConfig(health=replace(SETTINGS, window=3))
    for first, last in ((1, 6), (7, 8)):
        run = Run(tmp_path, "", 8, settings, 0)
        run.start(first - 1 if first > 1 else None)
        for step in range(first, last + 1):
            run.count({"response/truncated": 0.8 if step > 2 else 0.0})
            run.record(step)
        if last == 8:
            run.finish()
        run.close()
    close_rank_log(logging.getLogger(LOGGER_NAME))
    said = "53% of the responses reach the length limit."
    assert capsys.readouterr().out.count(said) == 1
    assert json.loads((tmp_path / "summary.json").read_text())["alarms"] == [
        {"name": "truncated", "step": 4, "evidence": said}
    ]
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert "health/truncated/text_summary" in events.Tags()["tensors"]
