# SPDX-License-Identifier: Apache-2.0
"""Log files of the ranks."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_rl.observability.rank_log import LOGGER_NAME, close_rank_log, open_rank_log


@pytest.fixture(autouse=True)
def restored_logger() -> Iterator[None]:
    yield
    close_rank_log(logging.getLogger(LOGGER_NAME))


@pytest.mark.parametrize(("rank", "console"), [(0, "hello\n"), (3, "")])
def test_rank_zero_also_prints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], rank: int, console: str
) -> None:
    logger = open_rank_log(tmp_path, rank)
    logger.info("hello")
    logger.debug("detail")
    assert capsys.readouterr().out == console
    lines = (tmp_path / "logs" / f"rank{rank}.log").read_text().splitlines()
    assert [line.split(" ", 2)[2] for line in lines] == [
        f"rank{rank} INFO megatron_rl: hello", f"rank{rank} DEBUG megatron_rl: detail",
    ]


def test_loggers_of_modules_reach_the_file(tmp_path: Path) -> None:
    open_rank_log(tmp_path, 1)
    logging.getLogger("megatron_rl.trainer").warning("late")
    assert "WARNING megatron_rl.trainer: late" in (tmp_path / "logs" / "rank1.log").read_text()


def test_opening_again_leaves_the_first_run_alone(tmp_path: Path) -> None:
    open_rank_log(tmp_path / "one", 1).info("first")
    open_rank_log(tmp_path / "two", 1).info("second")
    assert "second" not in (tmp_path / "one" / "logs" / "rank1.log").read_text()
    assert (tmp_path / "two" / "logs" / "rank1.log").read_text().count("second") == 1


def test_closing_gives_the_logger_back(tmp_path: Path) -> None:
    logger = open_rank_log(tmp_path, 0)
    close_rank_log(logger)
    assert not logger.handlers and logger.propagate
