# SPDX-License-Identifier: Apache-2.0
"""Entries of `reward.components` beyond a constant weight: weights that follow a schedule, and thresholds.

    0.5 my_reward.py:brief                    weight 0.5
    0@1,0.5@100 my_reward.py:brief            weight 0 up to step 1, 0.5 from step 100 on, and linear in between
    1.0 model >= 0.8                          1 if the score is at least 0.8, else 0
    0.5 my_reward.py:brief if math >= 1       the score, or 0 unless the source math scores at least 1

Loaded when an entry has one of them. Everything is a pure function of the step and of one response's scores; validation
is step 0, so it keeps the first weight of a schedule.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megatron_rl.types import UserError

_ENTRY = re.compile(
    r"(?P<weight>\S+)\s+(?P<target>.+?)(?:\s+>=\s+(?P<least>\S+))?(?:\s+if\s+(?P<other>.+?)\s+>=\s+(?P<enough>\S+))?\s*"
)


@dataclass(frozen=True)
class Term:
    """One source's part of the sum.

    Attributes:
        steps, weights: points of the schedule, ascending; constant before the first and after the last.
        least: score from which the source counts 1, and below it 0; `None`: the score itself counts.
        other: name of the source that decides whether this one counts; "" if none does.
        enough: score of `other` from which it counts.
    """

    steps: tuple[float, ...]
    weights: tuple[float, ...]
    least: float | None = None
    other: str = ""
    enough: float = 0.0

    @property
    def has_threshold(self) -> bool:
        """Whether something else than the score itself counts."""
        return self.least is not None or bool(self.other)

    def weigh(self, step: Any) -> Any:
        """Return the weight at a step, or at each of several."""
        return np.interp(step, self.steps, self.weights)

    def count(self, score: Any, scores: Mapping[str, Any]) -> Any:
        """Apply the thresholds to a score, given the scores of all sources by name; numbers, or arrays of responses."""
        counted = score if self.least is None else np.where(score >= self.least, 1.0, 0.0)
        return np.where(scores[self.other] >= self.enough, counted, 0.0) if self.other else counted


def parse_term(text: str, target: str, setting: str) -> Term:
    """Read an entry of `reward.components` with the source `target` (UserError if it is malformed)."""
    found = _ENTRY.fullmatch(text.strip())
    try:
        points = [point.partition("@") for point in found["weight"].split(",")] if found else []
        steps, weights = [float(step if at else 0) for _, at, step in points], [float(weight) for weight, *_ in points]
        numbers = [*steps, *weights, *(float(found and found[name] or 0) for name in ("least", "enough"))]
    except ValueError:
        steps, numbers = [], [math.nan]
    is_ascending = all(first < second for first, second in zip(steps, steps[1:], strict=False))
    if not found or found["target"] != target or not is_ascending or not all(map(math.isfinite, numbers)):
        raise UserError(
            f'"{text}" is not a weight, a source and its conditions',
            source=setting,
            expected="WEIGHT SOURCE, with >= SCORE and if SOURCE >= SCORE behind it; a weight is a number or "
            "WEIGHT@STEP,WEIGHT@STEP with ascending steps",
            hint="write e.g. '1@0,0.2@100 format', '1.0 model >= 0.5' or '0.5 my_reward.py:brief if math >= 1'",
        )
    least = None if found["least"] is None else float(found["least"])
    return Term(tuple(steps), tuple(weights), least, found["other"] or "", float(found["enough"] or 0))


def resolve_others(sources: Mapping[str, Any], models: Sequence[str]) -> dict[str, Any]:
    """Return the sources with the others of their conditions by name, as in reward/NAME.

    Args:
        sources: `SourceSpec`s by name.
        models: targets that are reward models, which score after all others.

    Raises:
        UserError: a condition names no source, its own, one with a condition, or a reward model.
    """
    found = dict(sources)
    for name, source in sources.items():
        term: Term | None = source.term
        if term is None or not term.other:
            continue
        match = next((other for other, one in sources.items() if term.other in (other, one.target)), "")
        known = [
            other
            for other, one in sources.items()
            if other != name and one.target not in models and not (one.term and one.term.has_threshold)
        ]
        if match not in known:
            raise UserError(
                f'the condition of "{name}" asks for the score of "{term.other}"',
                source=source.setting,
                expected=f"another source without conditions, no reward model, of {', '.join(known) or 'none'}",
                hint="name a rule, function or service of reward.components",
            )
        found[name] = replace(source, term=replace(term, other=match))
    return found
