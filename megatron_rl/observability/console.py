# SPDX-License-Identifier: Apache-2.0
"""The line on the console that sums up a step."""

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
    """Prints the line of every n-th step, of the last one, and of those with a validation.

    Args:
        total_steps: steps of the run.
        every: n.
        print_line: where it goes.
    """

    def __init__(self, total_steps: int, every: int, print_line: Callable[[str], None]) -> None:
        self._total_steps, self._every, self._print = total_steps, every, print_line

    def log(self, step: int, record: NumberRecord) -> None:
        """Print the line if it is due."""
        is_due = step % self._every == 0 or step == self._total_steps
        if is_due or any(key.startswith("validation/") for key in record):
            self._print(format_console_line(step, self._total_steps, record))


def format_console_line(step: int, total_steps: int, metrics: NumberRecord) -> str:
    """The line that sums up a step: what is learned, whether it is healthy, where the seconds went."""
    parts = [f"step {step:>{len(str(total_steps))}}/{total_steps}"]
    for key, label, form in _CONSOLE:
        if key in metrics:
            parts.append(f"{label} {form.format(metrics[key])}")
        if key == "reward/mean":
            parts += validation_parts(metrics)
    seconds = _seconds_part(metrics)
    return " | ".join(parts + ([seconds] if seconds else []))


def validation_parts(metrics: NumberRecord) -> list[str]:
    """What is said of the accuracy on each validation set."""
    scores = {key: value for key, value in metrics.items() if is_validation_accuracy(key)}
    return [f"val {key.split('/', 1)[1].rpartition('/')[0]} {value:.4f}" for key, value in scores.items()]


def _seconds_part(metrics: NumberRecord) -> str:
    longest_first, total = sorted(phase_seconds(metrics).items(), key=lambda item: -item[1]), metrics.get("time/step")
    words = " ".join(f"{name} {value:.2f}" for name, value in longest_first)
    if total is None:
        return f"s: {words}" if words else ""
    return f"{total:.2f} s" + (f": {words}" if words else "")
