# SPDX-License-Identifier: Apache-2.0
"""The page `docs/metrics.md`, made from the table of metrics in megatron_rl/observability/metrics.py."""

from __future__ import annotations

from megatron_rl.observability.metrics import ROWS, Metric

# First metric of a section -> its title.
_TITLES = {
    "reward/mean": "Reward and responses",
    "validation/<set>/accuracy": "Validation",
    "sft/loss": "Supervised fine-tuning",
    "kl/mean": "KL",
    "policy/loss": "Policy",
    "value/loss": "Critic",
    "mismatch/mean": "Engine against trainer",
    "loss/<name>/<metric>": "Plugins",
    "schedule/staleness_mean": "Schedule (schedule.max_staleness > 0)",
    "agents/turns": "Agents",
    "moe/max_load": "Mixtures of experts (docs/mixtures.md)",
    "mtp/loss": "Multi-token prediction",
    "ledger/<term>/numerator": "Loss ledger",
    "packing/efficiency": "Packing",
    "reshard/bytes_moved": "Weights",
    "time/step": "Time on rank 0",
    "memory/<phase>": "Memory of rank 0",
}


def format_page() -> str:
    """Return the text of docs/metrics.md."""
    parts = [_INTRODUCTION]
    for metric in ROWS:
        if metric.name in _TITLES:
            parts.append(f"\n## {_TITLES[metric.name]}\n\n| metric | unit | what it is |\n|---|---|---|\n")
        parts.append(f"| `{metric.name}` | {metric.unit} | {_describe(metric)} |\n")
    return "".join(parts)


_INTRODUCTION = """\
# Metrics

Every key of a record in `metrics.jsonl` besides `step`; `python tools/make_docs.py` makes this page from
`megatron_rl/observability/metrics.py`. TensorBoard and Weights & Biases show the same numbers under the same
names.

A number that is measured several times in a step, usually once per optimizer step, is averaged. A record leaves out
what its run does not measure. Seconds and memory are rank 0's; all other numbers cover all ranks. A name in angle
brackets stands for any text. [Performance](performance.md) says what to tune when one looks wrong, [Health](health.md)
which curves are unhealthy, and [Extending](extending.md#metrics) how to report your own.
"""


def _describe(metric: Metric) -> str:
    text = metric.meaning.replace("|", "\\|").replace("<", "&lt;").replace("_", "\\_")
    return f"{text} (alarm: [{metric.alarm}](health.md#{metric.alarm}))" if metric.alarm else text
