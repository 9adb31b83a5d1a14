# SPDX-License-Identifier: Apache-2.0
"""Alarms about the curves of a run, as sentences with the numbers behind them.

Every check compares the last `window` steps with the first window, with the window that ended four windows ago, or with
a limit. docs/health.md has a section for each check.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import gt, lt
from statistics import fmean, median, pvariance

from megatron_rl.config.sections import HealthConfig
from megatron_rl.observability.metrics import Record, find_metric

_EARLIER = 4  # windows between the steps that are compared
_SMALLEST_MISMATCH = 1e-3  # nats: below it a growing gap is rounding
# Smallest change in standard errors: of the reward to count as a rise, of its components to raise an alarm.
_RISES, _PARTS = 2.0, 6.0


@dataclass(frozen=True)
class Alarm:
    """Message about a health check that failed in a step and had passed before, with a sentence of evidence."""

    name: str
    step: int
    evidence: str

    def __str__(self) -> str:
        return f"health: {self.evidence} (docs/health.md#{self.name})"


class _Courses:
    """History of every metric, and the windows of `window` steps that the checks compare."""

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
        """Return the metric's last `window` values; empty if it has fewer."""
        return self.series.get(key, [])[-self.window :] if len(self.series.get(key, ())) >= self.window else []

    def mean(self, key: str) -> float:
        """Return the mean of the last window, or if there is none NaN, with which every comparison is false."""
        return fmean(self.now(key) or [math.nan])

    def first(self, key: str) -> list[float]:
        """Return the metric's first `window` values; empty if they overlap the last window."""
        values = self.series.get(key, [])
        return values[: self.window] if len(values) >= 2 * self.window else []

    def earlier(self, key: str) -> list[float]:
        """Return the values of the window that ended `_EARLIER` windows ago; of a shorter series the `first` window."""
        values, end = self.series.get(key, []), -_EARLIER * self.window
        return values[end - self.window : end] if len(values) >= self.window - end else self.first(key)

    def trend(self, key: str, errors: float) -> int:
        """Return 1 or -1 if the metric rose or fell since `earlier` by more than `errors` standard errors, else 0."""
        then, now = self.earlier(key), self.now(key)
        if not then:
            return 0
        noise = errors * math.sqrt((pvariance(then) + pvariance(now)) / self.window)
        change = fmean(now) - fmean(then)
        return (change > noise) - (change < -noise)


def _entropy(courses: _Courses, floor: float, key: str) -> str | None:
    first, now = courses.first(key), courses.mean(key)
    if not first or now >= floor * fmean(first):
        return None
    return f"the policy's entropy is {now:.2g} nats; it was {fmean(first):.2g} in the first {courses.window} steps."


def _length(courses: _Courses, growth: float, key: str) -> str | None:
    then, now, reward = courses.earlier(key), courses.mean(key), courses.earlier("reward/mean")
    if not then or not reward or now <= growth * fmean(then) or courses.trend("reward/mean", _RISES) > 0:
        return None
    return (
        f"the responses of a step grew from {fmean(then):,.0f} to {now:,.0f} tokens, and the reward did not rise "
        f"({fmean(reward):.3g}, now {courses.mean('reward/mean'):.3g})."
    )


def _mismatch(courses: _Courses, growth: float, *keys: str) -> str | None:
    key = "mismatch/lag0" if "mismatch/lag0" in keys else "mismatch/mean"
    now, least = courses.mean(key), min(courses.first(key), default=math.nan)  # the gap may grow from the first step on
    if math.isnan(least) or now <= max(growth * least, _SMALLEST_MISMATCH):
        return None
    return (
        f"engine and trainer differ by {now:.2g} nats per token on the same weights; it was {least:.2g} in one of the "
        f"first {courses.window} steps."
    )


def _gradient(courses: _Courses, growth: float, key: str) -> str | None:
    then, now = courses.earlier(key), courses.mean(key)
    if not then or now <= growth * median(then):
        return None
    return f"the gradient norm is {now:.3g}; it was {median(then):.3g}."


def _components(courses: _Courses, is_wanted: bool, *keys: str) -> str | None:
    """Return the alarm's sentence if one component of the reward rises while another falls, else `None`.

    Args:
        is_wanted: `components` of the health settings; `False` disables the alarm.
        keys: metrics, of which `reward/<component>` are compared.
    """
    trends = {name: courses.trend(key, _PARTS) for key in keys if "/" not in (name := key.removeprefix("reward/"))}
    rising, falling = ([name for name in trends if trends[name] == way] for way in (1, -1))
    if not is_wanted or not rising or not falling:
        return None
    return f"components of the reward part: {', '.join(rising)} rises while {', '.join(falling)} falls."


def _critic(courses: _Courses, floor: float, key: str) -> str | None:
    value = courses.mean(key)
    if not courses.first(key) or value >= floor:  # a critic begins at zero or at random
        return None
    return f"the critic explains {value:.2g} of the returns' variance: less than their mean would."


def _failures(courses: _Courses, limit: float, *keys: str) -> str | None:
    key = next((key for key in sorted(keys) if courses.mean(key) >= limit), None)
    if key is None:
        return None
    value = courses.mean(key)
    if key == "agents/failed":
        return f"{value:.0%} of the episodes fail: their environment raises, ends or does not answer in time."
    return f"the reward service fails on {value:.0%} of the responses."


def _beyond(is_beyond: Callable[[float, float], bool], sentence: str) -> Callable[..., str | None]:
    def check(courses: _Courses, limit: float, key: str) -> str | None:
        return sentence.format(courses.mean(key)) if is_beyond(courses.mean(key), limit) else None

    return check


# Alarm -> its limit in the settings, and its check; arguments after the limit: the metrics that declare the alarm.
CHECKS: dict[str, tuple[str, Callable[..., str | None]]] = {
    "entropy": ("entropy_floor", _entropy),
    "length": ("length_growth", _length),
    "mismatch": ("mismatch_growth", _mismatch),
    "sample-size": (
        "sample_size_floor",
        _beyond(lt, "the importance weights leave {:.0%} of the samples' worth: few tokens carry the gradient."),
    ),
    "gradient": ("gradient_growth", _gradient),
    "clipping": ("clip_limit", _beyond(gt, "{:.0%} of the tokens are clipped.")),
    "truncated": ("truncated_limit", _beyond(gt, "{:.0%} of the responses reach the length limit.")),
    "no-signal": ("uninformative_limit", _beyond(gt, "{:.0%} of the groups have equal rewards and teach nothing.")),
    "restating": (
        "restating_limit",
        _beyond(gt, "{:.0%} of the responses are rewarded for an answer that repeats a part of the prompt."),
    ),
    "components": ("components", _components),
    "dead-experts": ("dead_experts_limit", _beyond(gt, "{:.3g} experts get no token of an update.")),
    "critic": ("explained_variance_floor", _critic),
    "failures": ("failed_limit", _failures),
}


class HealthMonitor:
    """Checks of every step's record; a failing check raises an alarm if it passed in the `window` records before."""

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
        for name, (setting, check) in CHECKS.items():
            keys, limit = self._courses.watched.get(name, ()), getattr(self._settings, setting)
            evidence = check(self._courses, limit, *keys) if keys and limit is not None else None
            if evidence is not None:
                if name not in self._seen or self._count - self._seen[name] > self._settings.window:
                    new.append(Alarm(name, step, evidence))
                self._seen[name] = self._count
        self.alarms += new
        return new
