# SPDX-License-Identifier: Apache-2.0
"""TensorBoard files, read back with TensorBoard's reader; hostile texts in its Markdown.

Not covered: TensorBoard's drawing.
"""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugin_util import markdown_to_safe_html

from megatron_rl.observability.metrics import MOST_CHARACTERS, TensorBoard, format_sample, is_due

HOSTILE = (
    "<script>alert(1)</script>\n# title\r\n<img src=x onerror=alert(2)>\r* list\n\n<!-- [a](javascript:x) `code`"
    "\n</code></pre><b>bold</b> &lt; \u2028```\n<div markdown='1'>"
)


def read(run_dir: Path) -> EventAccumulator:
    events = EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    return events


def scalars(run_dir: Path) -> list[tuple[int, float]]:
    return [(event.step, round(event.value, 6)) for event in read(run_dir).Scalars("reward/mean")]


def test_scalars_and_what_a_resumed_run_hides(tmp_path: Path) -> None:
    board = TensorBoard(tmp_path)
    for step in range(4):
        board.log(step, {"reward/mean": 0.1 * step})
    assert scalars(tmp_path) == [(0, 0.0), (1, 0.1), (2, 0.2), (3, 0.3)], "before close: every step is flushed"
    board.close()
    board = TensorBoard(tmp_path, after_step=1)
    board.log(2, {"reward/mean": 0.5})
    board.close()
    assert scalars(tmp_path) == [(0, 0.0), (1, 0.1), (2, 0.5)]


def test_histograms_hold_every_finite_value(tmp_path: Path) -> None:
    board = TensorBoard(tmp_path)
    board.histograms(3, {"distribution/reward": np.array([0.0, 1.0, 1.0, np.nan, np.inf]), "empty": np.array([])})
    board.close()
    events = read(tmp_path)
    assert events.Tags()["histograms"] == ["distribution/reward"]
    (event,) = events.Histograms("distribution/reward")
    found = event.histogram_value
    assert (event.step, found.num, found.min, found.max, found.sum) == (3, 3, 0.0, 1.0, 2.0)


def test_samples_come_when_they_are_due(tmp_path: Path) -> None:
    rows = [{"prompt": f"1+{n}=", "response": str(n + 1), "reward": 0.5, "ground_truth": "x"} for n in range(2)]
    board = TensorBoard(tmp_path, samples_every=3)
    for step in range(1, 7):
        board.samples(step, rows)
    board.close()
    events = read(tmp_path)
    texts = events.Tensors("samples/2/text_summary")
    assert [event.step for event in texts] == [1, 3, 6]
    text = texts[0].tensor_proto.string_val[0].decode()
    assert "prompt\n\n    1+1=\n\nresponse\n\n    2\n\n" in text and "reward\n\n    0.5" in text


def test_a_pair_is_labelled() -> None:
    row = {"label": "chosen", "prompt": "1+1=", "response": "2", "ground_truth": None, "reward": 0.5}
    assert format_sample(row) == "label\n\n    chosen\n\nprompt\n\n    1+1=\n\nresponse\n\n    2\n\nreward\n\n    0.5"


@pytest.mark.parametrize(("step", "every", "due"), [(1, 10, True), (2, 10, False), (20, 10, True), (1, 0, False)])
def test_due(step: int, every: int, due: bool) -> None:
    assert is_due(step, every) is due


class _Page(HTMLParser):
    """Parser that collects tags and texts of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.blocks: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag == "code":
            self.blocks.append("")

    def handle_data(self, data: str) -> None:
        if self.blocks:
            self.blocks[-1] += data


def test_hostile_texts_are_shown_letter_by_letter() -> None:
    """TensorBoard renders a sample as paragraphs and code blocks only."""
    page = _Page()
    page.feed(markdown_to_safe_html(format_sample({"prompt": HOSTILE, "response": HOSTILE, "reward": 1.0})))
    assert page.tags == {"p", "pre", "code"}
    shown = HOSTILE.replace("\r\n", "\n").replace("\r", "\n").splitlines()
    for block in page.blocks[:2]:
        assert [line.strip() for line in block.splitlines()[: len(shown)]] == [line.strip() for line in shown]


def test_long_texts_are_cut_and_say_so() -> None:
    text = format_sample({"response": "x" * (MOST_CHARACTERS + 1234)})
    assert "x [1,234 more characters]" in text and len(text) < MOST_CHARACTERS + 200
