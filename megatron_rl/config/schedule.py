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
        "How many steps older than those that learn from it the weights may be that a response begins with. 0: a "
        "step generates its samples first. k: prompt i begins once i < (steps done + 1 + k) * "
        "data.train_batch_size; unfinished responses are carried over.",
        "steps",
        ge=0,
    )
    order: Literal["stream", "whole"] = option(
        "stream",
        "max_staleness > 0: a step learns from the next prompts of the data order (stream), or from the first "
        "whose responses are complete (whole).",
    )
    updates: Literal["drain", "in_flight"] = option(
        "in_flight",
        "max_staleness > 0: responses unfinished at the end of a step's generation continue with the next weights "
        "(in_flight), or are finished first (drain).",
    )
    steps_per_update: int | None = option(
        None,
        "updates in_flight: engines interrupt together after a multiple of so many decode steps, reproducible bit "
        "by bit; null: as soon as the step has its samples.",
        "steps",
        ge=1,
    )
    replay: str | None = option(
        None,
        "Run directory with these settings and no steps_per_update, whose interruptions "
        "(schedule/engine_<i>.jsonl) are repeated.",
    )
