# SPDX-License-Identifier: Apache-2.0
"""Which row of the table of metrics a key of a record belongs to."""

from __future__ import annotations

import re

from megatron_rl.observability.metric_table import METRICS, Metric

_PLACEHOLDER = re.compile(r"<\w+>")


def find_metric(key: str) -> Metric | None:
    """The row of a key of a record, the most literal one; None where there is none."""
    found = [metric for metrics in METRICS.values() for metric in metrics
             if re.fullmatch(_PLACEHOLDER.sub(".+", re.escape(metric.name)), key)]
    return min(found, key=lambda metric: len(_PLACEHOLDER.findall(metric.name)), default=None)
