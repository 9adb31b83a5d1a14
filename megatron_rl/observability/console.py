# SPDX-License-Identifier: Apache-2.0
"""One console line per step."""

from __future__ import annotations

from collections.abc import Callable

from megatron_rl.observability.metrics import NumberRecord, Sink, is_validation_accuracy
from megatron_rl.observability.summary import phase_seconds

# (metric, label, format) in the order of the console line
_CONSOLE = (
    ("reward/mean", "reward", "{:.4f}"),
    ("sft/loss", "loss", "{:.4f}"),
    ("kl/mean", "kl", "{:.2e}"),
    ("policy/clip_fraction", "clip", "{:.4f}"),
    ("policy/grad_norm", "grad", "{:.3g}"),
    ("mismatch/max", "mismatch", "{:.1e}"),
    ("tokens/per_second", "tok/s", "{:,.0f}"),
)


class ConsoleLines(Sink):
    """Sink that prints a line for every n-th step, the last step, and each step with a validation.

    Args:
        every: n, in steps.
        print_line: receives each line.
    """

    def __init__(self, total_steps: int, every: int, print_line: Callable[[str], None]) -> None:
        self._total_steps, self._every, self._print = total_steps, every, print_line

    def log(self, step: int, record: NumberRecord) -> None:
        """Print the line of a step if it is due."""
        is_due = step % self._every == 0 or step == self._total_steps
        if is_due or any(key.startswith("validation/") for key in record):
            self._print(format_console_line(step, self._total_steps, record))


def format_console_line(step: int, total_steps: int, metrics: NumberRecord) -> str:
    """Return the line of a step: its metrics, then the seconds of its phases, the longest first."""
    parts = [f"step {step:>{len(str(total_steps))}}/{total_steps}"]
    for key, label, form in _CONSOLE:
        if key in metrics:
            parts.append(f"{label} {form.format(metrics[key])}")
        if key == "reward/mean":
            parts += validation_parts(metrics)
    seconds = _seconds_part(metrics)
    return " | ".join(parts + ([seconds] if seconds else []))


def validation_parts(metrics: NumberRecord) -> list[str]:
    """Return the text of each validation set's accuracy."""
    scores = {key: value for key, value in metrics.items() if is_validation_accuracy(key)}
    return [f"val {key.split('/', 1)[1].rpartition('/')[0]} {value:.4f}" for key, value in scores.items()]


def _seconds_part(metrics: NumberRecord) -> str:
    longest_first, total = sorted(phase_seconds(metrics).items(), key=lambda item: -item[1]), metrics.get("time/step")
    words = " ".join(f"{name} {value:.2f}" for name, value in longest_first)
    if total is None:
        return f"s: {words}" if words else ""
    return f"{total:.2f} s" + (f": {words}" if words else "")
