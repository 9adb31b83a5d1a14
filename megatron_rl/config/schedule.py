# SPDX-License-Identifier: Apache-2.0
"""Settings of when samples begin, and which weights may make them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_rl.config.declaring import option


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Which weights make which sample (docs/schedules.md)."""

    max_staleness: int = option(
        0,
        "Steps by which the weights that a response begins with may be older than those that learn from it. 0: a step "
        "generates its samples first. k: prompt i of the data order begins once i < (steps done + 1 + k) * "
        "data.train_batch_size, and what is unfinished when a step has its samples is carried into the next one.",
        "steps",
    )
    order: Literal["stream", "whole"] = option(
        "stream",
        "max_staleness > 0: a step learns from the next prompts of the data order (stream), or from the first ones "
        "whose responses are all there (whole): half as many begin ahead, and the bound holds too.",
    )
    updates: Literal["drain", "in_flight"] = option(
        "in_flight",
        "max_staleness > 0: responses that are unfinished when a step has its samples are interrupted and continued "
        "with the next weights (in_flight), or finished first (drain).",
    )
    steps_per_update: int | None = option(
        None,
        "updates in_flight: the engines interrupt together, after a multiple of so many decode steps, which makes a "
        "run reproducible bit by bit; null: as soon as the last of them has what the step needs.",
        "steps",
    )
    replay: str | None = option(
        None,
        "Run directory of a run with these settings and no steps_per_update: every engine is interrupted, and takes "
        "new weights, after as many decode steps as there (its schedule/engine_<i>.jsonl).",
    )
