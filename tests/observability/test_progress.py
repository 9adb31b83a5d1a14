# SPDX-License-Identifier: Apache-2.0
"""Bars on a pseudo-terminal, lines without one, and the counts of several engines added up through a real store.

Not covered: the terminal's picture beyond text and cursor codes.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from distributed import run_ranks
from megatron_rl.observability.console import LINE_SECONDS, ProgressDisplay
from megatron_rl.observability.progress import Pace, RolloutCount, RolloutProgress
from megatron_rl.parallel.collectives import open_store

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import logging, sys, time
from pathlib import Path
from megatron_rl.config.schema import ObservabilityConfig
from megatron_rl.observability.progress import RolloutCount
from megatron_rl.observability.run import Run

run = Run(Path(sys.argv[1]), "", 4, ObservabilityConfig(trackers=[]), 0)
try:
    run.start(None)
    run.log.info("[red]resumed[/red]")
    run._show_rollout(RolloutCount(37, 128, 5000, 1234.5, 3.0))
    time.sleep(1.2)
    run._show_rollout(None)
    run.count({"reward/mean": 0.5, "validation/toy/accuracy": 0.25})
    run.record(1)
    print("a line of somebody else")
    time.sleep(0.6)
    raise RuntimeError("broken")
finally:
    run.close()
    print("afterwards")
"""


def run_on_a_terminal(program: str, *arguments: str) -> str:
    """Return the output of a program to a terminal of 120 columns."""
    master, slave = os.openpty()
    environment = dict(os.environ, PYTHONPATH=str(ROOT), TERM="xterm", COLUMNS="120", OMP_NUM_THREADS="1")
    process = subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=slave,
        stderr=slave,
        env=environment,
    )
    os.close(slave)
    written = b""
    while True:
        try:
            part = os.read(master, 65536)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        written += part
    os.close(master)
    assert process.wait(30) == 1
    return written.decode()


def test_bars_on_a_terminal(tmp_path: Path) -> None:
    """Steps, responses and notes, lines above the bars, and a restored terminal after an error."""
    text = run_on_a_terminal(PROGRAM, str(tmp_path / "run"))
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)
    assert re.search(r"step\s+\S+\s+0/4\s+0:00:0\d\s+eta -", plain)
    assert re.search(r"rollout\s+\S+\s+37/128 responses\s+0:00:0\d\s+1,23[45] tok/s", plain)
    assert re.search(r"1/4\s+0:00:0\d\s+eta 0:00:\d\d reward 0.5000 \| val toy 0.2500", plain)
    for line in ("[red]resumed[/red]", "step 1/4 | reward 0.5000 | val toy 0.2500", "a line of somebody else"):
        assert re.search(rf"(?:^|\r){re.escape(line)}\s*$", plain, re.M), f"{line!r} stands on a line of its own"
    assert "RuntimeError: broken" in plain and plain.index("afterwards") > plain.rindex("1/4")
    codes = re.findall(r"\x1b\[\?25[lh]", text)
    assert codes[-1] == "\x1b[?25h", "the cursor is shown at the end"
    assert codes[:2] == ["\x1b[?25l", "\x1b[?25h"], "and while the bars are there, for a process that is killed"


def test_without_a_terminal_a_long_rollout_says_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, now = io.StringIO(), [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    display = ProgressDisplay(Pace(4), stream=stream)
    for second in range(26):
        now[0] = 1000.0 + second
        display.show_rollout("rollout", RolloutCount(second, 40, 100 * second, 100.0, float(second)))
    display.show_rollout("rollout", None)
    display.show_rollout("rollout", RolloutCount(3, 40, 300, 100.0, 2.0))  # the next one has just begun
    display.log(1, {"reward/mean": 0.5})
    display.close()
    assert stream.getvalue().splitlines() == [
        "rollout: 10/40 responses, 1,000 tokens, 100 tok/s, 10 s",
        "rollout: 20/40 responses, 2,000 tokens, 100 tok/s, 20 s",
        "step 1/4 | reward 0.5000",
    ]
    assert LINE_SECONDS == 10.0


def test_pace() -> None:
    now = [0.0]
    pace = Pace(10, 4, clock=lambda: now[0])
    now[0] = 5.0
    pace.mark(4)  # validation before training
    assert pace.remaining is None and pace.elapsed == 5.0
    now[0] = 25.0
    pace.mark(6)
    assert pace.remaining == 40.0, "10 s per step, 4 left"
    now[0] = 28.0
    assert (pace.remaining, pace.elapsed, pace.done) == (37.0, 28.0, 6)


def _generate(rank: int, world_size: int) -> list[RolloutCount | None]:
    """Count two generations of two engines; rank 1 belongs to the first engine, and rank 2 finishes late."""
    seen: list[RolloutCount | None] = []
    progress = RolloutProgress(open_store("rollouts", dist.group.WORLD), seen.append if rank == 0 else None)
    for generation in range(2):
        in_flight = [7]
        with progress.follow(6, None if rank == 1 else lambda: in_flight[0]):  # noqa: B023
            if rank != 1:
                time.sleep(0.7)
                for _ in range(3):
                    progress.count(100 + generation)
                in_flight[0] = 0
            time.sleep(0.7 * (rank == 2))
            dist.barrier()
            time.sleep(1.2 * (rank != 1))
    dist.barrier()
    return seen


def test_counts_of_all_engines_add_up() -> None:
    seen = run_ranks(_generate, 3)[0]
    ends = [index for index, count in enumerate(seen) if count is None]
    assert len(ends) == 2 and ends[-1] == len(seen) - 1
    for generation, (first, end) in enumerate(zip((0, ends[0] + 1), ends)):
        counts = seen[first:end]
        assert counts[0].finished == 0 and 7 <= counts[0].tokens <= 14, "tokens of unfinished responses count"
        assert (counts[-1].finished, counts[-1].tokens, counts[-1].total) == (6, 600 + 6 * generation, 6)
        assert [count.finished for count in counts] == sorted(count.finished for count in counts)
        assert max(count.tokens_per_second for count in counts) > 50


def test_a_run_goes_on_when_the_store_is_gone(caplog: pytest.LogCaptureFixture) -> None:
    class GoneStore:
        def add(self, key: str, value: int) -> int:
            raise RuntimeError("connection reset")

    seen: list[RolloutCount | None] = []
    progress = RolloutProgress(GoneStore(), seen.append)
    for _ in range(2):
        with progress.follow(1, lambda: 0):
            progress.count(1)
    assert seen == [None] and "no longer shown: connection reset" in caplog.text


def test_nobody_watches_nothing_starts() -> None:
    progress = RolloutProgress()
    with progress.follow(1, lambda: 1 / 0):
        progress.count(1)


def _cost(count: Callable[[int], None]) -> float:
    start = time.perf_counter()
    for _ in range(10_000):
        count(10)
    return (time.perf_counter() - start) / 10_000


def test_an_engine_pays_microseconds_per_response() -> None:
    progress = RolloutProgress(dist.HashStore(), lambda count: None)
    with progress.follow(10_000, lambda: 0):
        assert min(_cost(progress.count) for _ in range(3)) < 20e-6
