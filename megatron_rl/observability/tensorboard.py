# SPDX-License-Identifier: Apache-2.0
"""TensorBoard event files: scalars, distributions and sample texts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_rl.observability.metrics import NumberRecord, Sink

MOST_CHARACTERS = 4000  # of a shown text; rollouts/ has all of it


class TensorBoard(Sink):
    """Sink that writes <run_dir>/tensorboard.

    Args:
        after_step: TensorBoard hides existing events after this step; `None` for a new run.
        samples_every: steps between two sets of sample texts; 0 for none.
    """

    def __init__(self, run_dir: Path, after_step: int | None = None, samples_every: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter  # a slow import

        first = None if after_step is None else after_step + 1
        self._writer: Any = SummaryWriter(str(run_dir / "tensorboard"), purge_step=first)
        self._samples_every = samples_every

    def log(self, step: int, record: NumberRecord) -> None:
        """Write the scalars."""
        for key, value in record.items():
            self._writer.add_scalar(key, value, step)
        self._writer.flush()

    def histograms(self, step: int, values: Mapping[str, np.ndarray]) -> None:
        """Write the distributions of finite values."""
        for name, found in values.items():
            finite = found[np.isfinite(found)]
            if len(finite):
                self._writer.add_histogram(name, finite, step)

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write the texts if they are due."""
        if is_due(step, self._samples_every):
            for number, row in enumerate(rows, 1):
                self._writer.add_text(f"samples/{number}", format_sample(row), step)

    def alarm(self, step: int, name: str, text: str) -> None:
        """Write the alarm as a text of the step."""
        self._writer.add_text(f"health/{name}", text, step)

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


def is_due(step: int, every: int) -> bool:
    """Return True for step 1 and every n-th step, never if `every` is 0."""
    return every > 0 and (step == 1 or step % every == 0)


def format_sample(row: Mapping[str, Any]) -> str:
    """Return a rollout in Markdown, with texts indented so that Markdown and HTML in them have no effect."""
    parts = ("prompt", "response", "ground_truth", "reward", "finish_reason")
    text = "\n\n".join(f"{name.replace('_', ' ')}\n\n{_quote(str(row.get(name, '')))}" for name in parts)
    return text.encode("utf-8", "backslashreplace").decode()  # event files accept no lone surrogates


def _quote(text: str) -> str:
    return "\n".join("    " + line for line in re.split(r"\r\n|\r|\n", shorten(text)))


def shorten(text: str) -> str:
    """Return the first MOST_CHARACTERS of a text, and the number of omitted ones."""
    left_out = len(text) - MOST_CHARACTERS
    return text if left_out <= 0 else f"{text[:MOST_CHARACTERS]} [{left_out:,} more characters]"
