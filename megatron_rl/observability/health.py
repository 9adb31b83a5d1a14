# SPDX-License-Identifier: Apache-2.0
"""Alarms about the curves of a run, as sentences with the numbers behind them.

Every check compares the last `window` steps with the first window, with the window that ended four windows ago, or with
a limit. docs/health.md has a section for each check.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median, pvariance

from megatron_rl.config.sections import HealthConfig
from megatron_rl.observability.metric_table import find_metric
from megatron_rl.observability.metrics import Record

_EARLIER = 4  # windows between the steps that are compared
_SMALLEST_MISMATCH = 1e-3  # nats: below it a growing gap is rounding
# Smallest change in standard errors: of the reward to count as a rise, of its components to raise an alarm.
_RISES, _PARTS = 2.0, 6.0


@dataclass(frozen=True)
class Alarm:
    """A check that has begun to fail in a step of the main loop, with a sentence as evidence."""

    name: str
    step: int
    evidence: str

    def __str__(self) -> str:
        return f"health: {self.evidence} (docs/health.md#{self.name})"


class _Courses:
    """Values of each metric so far, and windows of them."""

    def __init__(self, window: int) -> None:
        self.window, self.series = window, dict[str, list[float]]()
        self.watched: dict[str, list[str]] = {}  # alarm -> the metrics so far that it watches

    def add(self, record: Record) -> None:
        for key, value in record.items():
            if value is not None and math.isfinite(value):
                if key not in self.series and (metric := find_metric(key)) and metric.alarm:
                    self.watched.setdefault(metric.alarm, []).append(key)
                self.series.setdefault(key, []).append(value)

    def now(self, key: str) -> list[float]:
        """Return the last window; empty if the metric has fewer values."""
        return self.series.get(key, [])[-self.window :] if len(self.series.get(key, ())) >= self.window else []

    def mean(self, key: str) -> float | None:
        """Return the mean of the last window."""
        return fmean(self.now(key)) if self.now(key) else None

    def first(self, key: str) -> list[float]:
        """Return the first window; empty if it overlaps the last."""
        values = self.series.get(key, [])
        return values[: self.window] if len(values) >= 2 * self.window else []

    def earlier(self, key: str) -> list[float]:
        """Return the window `_EARLIER` windows ago, or the first of a shorter series; empty if it overlaps the last."""
        values, end = self.series.get(key, []), -_EARLIER * self.window
        return values[end - self.window : end] if len(values) >= self.window - end else self.first(key)

    def trend(self, key: str, errors: float) -> int:
        """Return 1 or -1 if the metric rose or fell since `earlier` by more than this number of standard errors."""
        then, now = self.earlier(key), self.now(key)
        if not then:
            return 0
        noise = errors * math.sqrt((pvariance(then) + pvariance(now)) / self.window)
        change = fmean(now) - fmean(then)
        return (change > noise) - (change < -noise)


def _entropy(courses: _Courses, settings: HealthConfig, key: str) -> str | None:
    first, now = courses.first(key), courses.mean(key)
    if not first or now is None or settings.entropy_floor is None or now >= settings.entropy_floor * fmean(first):
        return None
    return f"the policy's entropy is {now:.2g} nats; it was {fmean(first):.2g} in the first {courses.window} steps."


def _length(courses: _Courses, settings: HealthConfig, key: str) -> str | None:
    then, now = courses.earlier(key), courses.mean(key)
    reward = courses.earlier("reward/mean")
    if not then or not reward or now is None or settings.length_growth is None:
        return None
    if now <= settings.length_growth * fmean(then) or courses.trend("reward/mean", _RISES) > 0:
        return None
    return (
        f"the responses of a step grew from {fmean(then):,.0f} to {now:,.0f} tokens, and the reward did not rise "
        f"({fmean(reward):.3g}, now {courses.mean('reward/mean'):.3g})."
    )


def _mismatch(courses: _Courses, settings: HealthConfig, *keys: str) -> str | None:
    key = "mismatch/lag0" if "mismatch/lag0" in keys else "mismatch/mean"
    first, now = courses.first(key), courses.mean(key)
    if not first or now is None or settings.mismatch_growth is None:
        return None
    least = min(first)  # the gap may be growing from the first step on
    if now <= max(settings.mismatch_growth * least, _SMALLEST_MISMATCH):
        return None
    return (
        f"engine and trainer differ by {now:.2g} nats per token on the same weights; it was {least:.2g} in one of the "
        f"first {courses.window} steps."
    )


def _gradient(courses: _Courses, settings: HealthConfig, key: str) -> str | None:
    then, now = courses.earlier(key), courses.mean(key)
    if not then or now is None or settings.gradient_growth is None or now <= settings.gradient_growth * median(then):
        return None
    return f"the gradient norm is {now:.3g}; it was {median(then):.3g}."


def _components(courses: _Courses, settings: HealthConfig, *keys: str) -> str | None:
    """Check whether one component of the reward rises while another falls."""
    names = [key.removeprefix("reward/") for key in keys]
    trends = {name: courses.trend(f"reward/{name}", _PARTS) for name in names if "/" not in name}
    rising, falling = ([name for name in trends if trends[name] == way] for way in (1, -1))
    if not settings.components or not rising or not falling:
        return None
    return f"components of the reward part: {', '.join(rising)} rises while {', '.join(falling)} falls."


def _critic(courses: _Courses, settings: HealthConfig, key: str) -> str | None:
    value = courses.mean(key)
    is_young = not courses.first(key)  # a critic begins at zero or at random
    if is_young or value is None or settings.explained_variance_floor is None:
        return None
    if value >= settings.explained_variance_floor:
        return None
    return f"the critic explains {value:.2g} of the returns' variance: less than their mean would."


def _failures(courses: _Courses, settings: HealthConfig, *keys: str) -> str | None:
    for key in sorted(keys):
        value, limit = courses.mean(key), settings.failed_limit
        if value is not None and limit is not None and value >= limit:
            if key == "agents/failed":
                return f"{value:.0%} of the episodes fail: their environment raises, ends or does not answer in time."
            return f"the reward service fails on {value:.0%} of the responses."
    return None


def _above(setting: str, sentence: str) -> Callable[..., str | None]:
    def check(courses: _Courses, settings: HealthConfig, key: str) -> str | None:
        value, limit = courses.mean(key), getattr(settings, setting)
        return None if value is None or limit is None or value <= limit else sentence.format(value)

    return check


def _sample_size(courses: _Courses, settings: HealthConfig, key: str) -> str | None:
    value, floor = courses.mean(key), settings.sample_size_floor
    if value is None or floor is None or value >= floor:
        return None
    return f"the importance weights leave {value:.0%} of the samples' worth: few tokens carry the gradient."


# Alarm -> its check; arguments after the settings: the keys of the metrics that declare the alarm.
CHECKS: dict[str, Callable[..., str | None]] = {
    "entropy": _entropy,
    "length": _length,
    "mismatch": _mismatch,
    "sample-size": _sample_size,
    "gradient": _gradient,
    "clipping": _above("clip_limit", "{:.0%} of the tokens are clipped."),
    "truncated": _above("truncated_limit", "{:.0%} of the responses reach the length limit."),
    "no-signal": _above("uninformative_limit", "{:.0%} of the groups have equal rewards and teach nothing."),
    "restating": _above(
        "restating_limit", "{:.0%} of the responses are rewarded for an answer that repeats a part of the prompt."
    ),
    "components": _components,
    "dead-experts": _above("dead_experts_limit", "{:.3g} experts get no token of an update."),
    "critic": _critic,
    "failures": _failures,
}


class HealthMonitor:
    """Checks of every step's record; a failing check raises one alarm, and another after a window without failure."""

    def __init__(self, settings: HealthConfig) -> None:
        self.alarms: list[Alarm] = []
        self._settings, self._courses = settings, _Courses(settings.window)
        self._seen: dict[str, int] = {}  # check -> number of the record in which it failed last
        self._count = 0

    def add(self, step: int, record: Record) -> Sequence[Alarm]:
        """Add a record and return the alarms that begin with it."""
        self._courses.add(record)
        self._count += 1
        new = []
        for name, check in CHECKS.items():
            keys = self._courses.watched.get(name, ())
            evidence = check(self._courses, self._settings, *keys) if keys else None
            if evidence is not None:
                if name not in self._seen or self._count - self._seen[name] > self._settings.window:
                    new.append(Alarm(name, step, evidence))
                self._seen[name] = self._count
        self.alarms += new
        return new
