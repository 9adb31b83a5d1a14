# SPDX-License-Identifier: Apache-2.0
"""Log files of the ranks."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_rl.config.schema import ObservabilityConfig
from megatron_rl.observability.metrics import Sink
from megatron_rl.observability.progress import LOGGER_NAME, close_rank_log, open_rank_log
from megatron_rl.observability.run import Run
from megatron_rl.observability.status import read_warnings


@pytest.fixture(autouse=True)
def restored_logger() -> Iterator[None]:
    yield
    close_rank_log(logging.getLogger(LOGGER_NAME))


@pytest.mark.parametrize(("rank", "console"), [(0, "hello\n"), (3, "")])
def test_rank_zero_also_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str], rank: int, console: str) -> None:
    logger = open_rank_log(tmp_path, rank)
    logger.info("hello")
    logger.debug("detail")
    assert capsys.readouterr().out == console
    lines = (tmp_path / "logs" / f"rank{rank}.log").read_text().splitlines()
    assert [line.split(" ", 2)[2] for line in lines] == [
        f"rank{rank} INFO megatron_rl: hello",
        f"rank{rank} DEBUG megatron_rl: detail",
    ]


def test_loggers_of_modules_reach_the_file(tmp_path: Path) -> None:
    open_rank_log(tmp_path, 1)
    logging.getLogger("megatron_rl.run.grpo").warning("late")
    assert "WARNING megatron_rl.run.grpo: late" in (tmp_path / "logs" / "rank1.log").read_text()


def test_the_last_warnings_and_errors(tmp_path: Path) -> None:
    """The report that ends a job (of `reports.py`) counts with all its lines; alarms and tracebacks do not."""
    logger, path = open_rank_log(tmp_path, 1), tmp_path / "logs" / "rank1.log"
    assert read_warnings(tmp_path / "none.log", 5) == read_warnings(path, 5) == []
    logger.warning("first\n  more of it")
    logger.info("nothing\n  of this")
    logger.error("second")
    logger.warning("health: 97%% of the groups teach nothing.")
    with path.open("a") as file:
        file.write("Traceback (most recent call last):\n  File x\nerror: a\n  source:   b\n")
    found = read_warnings(path, 3)
    assert [(entry["level"], entry["text"]) for entry in found] == [
        ("error", "a\n  source:   b"),
        ("error", "second"),
        ("warning", "first\n  more of it"),
    ]
    assert found[0]["time"] is None and found[1]["time"][:2] == "20"
    assert read_warnings(path, 1) == found[:1]


def test_opening_again_leaves_the_first_run_alone(tmp_path: Path) -> None:
    open_rank_log(tmp_path / "one", 1).info("first")
    open_rank_log(tmp_path / "two", 1).info("second")
    assert "second" not in (tmp_path / "one" / "logs" / "rank1.log").read_text()
    assert (tmp_path / "two" / "logs" / "rank1.log").read_text().count("second") == 1


def test_closing_gives_the_logger_back(tmp_path: Path) -> None:
    logger = open_rank_log(tmp_path, 0)
    close_rank_log(logger)
    assert not logger.handlers and logger.propagate


def test_a_full_disk_is_said_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Lines that a full disk rejects neither end a run nor print a traceback each."""
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/rank0.log").symlink_to("/dev/full")
    logger = open_rank_log(tmp_path, 0)
    for number in range(3):
        logger.info("line %d", number)
    close_rank_log(logger)
    printed = capsys.readouterr()
    assert printed.out == "line 0\nline 1\nline 2\n"
    assert printed.err == (
        f"warning: lines are missing in {tmp_path}/logs/rank0.log: [Errno 28] No space left on device\n"
    )


def test_closing_after_an_error_raises_no_other(tmp_path: Path) -> None:
    """A sink that fails to close, on a full disk for example, hides neither the error nor other sinks."""
    closed: list[int] = []

    class Stubborn(Sink):
        def close(self) -> None:
            closed.append(1)
            raise OSError(28, "No space left on device")

    run = Run(tmp_path, "", 1, ObservabilityConfig(trackers=[]), 0)
    run.start(None)
    run._sinks += [Stubborn(), Stubborn()]
    run.close()
    assert len(closed) == 2 and run.log_file.read_text().count("after the error that ends the run: OSError") == 2
