# SPDX-License-Identifier: Apache-2.0
"""One log file per rank; rank 0 also logs to the console.

The logger is the package's own ("megatron_rl"), so every module's `logging.getLogger(__name__)` writes to the file.
"""

from __future__ import annotations

import contextlib
import logging
import re
import sys
from pathlib import Path

LOGGER_NAME = "megatron_rl"
_TAIL_BYTES = 1 << 16
# Time, level and text of a log line, or level and text of the report that ends a job.
_WARNING = re.compile(r"(?:([\d-]+ [\d:]+),\d+ rank\d+ (WARNING|ERROR|CRITICAL) \S+|(error)): (.*)")


class _ConsoleHandler(logging.Handler):
    """Handler that prints to the current stdout, which a progress bar replaces (`progress.py`)."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            print(self.format(record), flush=True)
        except Exception:
            self.handleError(record)


class _FileHandler(logging.FileHandler):
    """Handler that drops lines the disk does not accept, with one warning, instead of ending the run."""

    is_failing = False

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self.is_failing:
            self.is_failing = True
            print(f"warning: lines are missing in {self.baseFilename}: {error}", file=sys.stderr, flush=True)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            super().close()


def log_path(run_dir: Path, rank: int) -> Path:
    """Return the path of a rank's log."""
    return Path(run_dir) / "logs" / f"rank{rank}.log"


def read_warnings(path: Path, most: int) -> list[dict[str, str | None]]:
    """Return time, level and text of the last warnings and errors of a log, the newest first, without alarms."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").split("\n")
    except OSError:
        return []
    found: list[dict[str, str | None]] = []
    is_open = False
    for line in lines:
        if match := _WARNING.match(line):
            time, level, report, text = match.groups()
            is_open = not text.startswith("health: ")
            if is_open:
                found.append({"time": time, "level": (level or report).lower(), "text": text})
        elif is_open and line.startswith("  "):
            found[-1]["text"] = f"{found[-1]['text']}\n{line}"
        else:
            is_open = False
    return found[-most:][::-1]


def open_rank_log(run_dir: Path, rank: int) -> logging.Logger:
    """Open `logs/rank<N>.log` of a run for appending and return the logger of the package.

    Files of a previous run in the same process are closed. Rank 0 also prints INFO and above to stdout.
    """
    logger = logging.getLogger(LOGGER_NAME)
    close_rank_log(logger)
    path = log_path(run_dir, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    to_file = _FileHandler(path, encoding="utf-8", errors="backslashreplace")
    to_file.setFormatter(logging.Formatter(f"%(asctime)s rank{rank} %(levelname)s %(name)s: %(message)s"))
    logger.addHandler(to_file)
    if rank == 0:
        console = _ConsoleHandler(logging.INFO)
        console.setFormatter(logging.Formatter("%(message)s"))
        logger.addHandler(console)
    logger.setLevel(logging.DEBUG)
    logger.propagate = False  # else a library's handler on the root logger prints every line twice
    return logger


def close_rank_log(logger: logging.Logger) -> None:
    """Close the files of `open_rank_log` and restore the logger."""
    for handler in list(logger.handlers):
        if isinstance(handler, _FileHandler | _ConsoleHandler):
            logger.removeHandler(handler)
            handler.close()
    logger.setLevel(logging.NOTSET)
    logger.propagate = True
