# SPDX-License-Identifier: Apache-2.0
"""Command-line parts shared by both conversion tools."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from tqdm import tqdm

from megatron_rl.types import UserError
from tools.conversion.conversion import DTYPES
from tools.conversion.units import Progress, Workers

_LINE_SECONDS = 10.0


class ProgressBar(Progress):
    """Progress on stderr: a bar on a terminal, otherwise a line every ten seconds and at the end."""

    def __init__(self, label: str) -> None:
        self._label, self._bar = label, tqdm(disable=True)
        self._total, self._done, self._begun, self._told = 0, 0, 0.0, 0.0

    def begin(self, num_bytes: int) -> None:
        """Set the total."""
        self._total, self._begun = num_bytes, time.monotonic()
        self._told = self._begun
        self._bar = tqdm(
            total=num_bytes,
            unit="B",
            unit_scale=True,
            unit_divisor=1024,
            desc=self._label,
            dynamic_ncols=True,
            file=sys.stderr,
            disable=not sys.stderr.isatty(),
        )

    def advance(self, num_bytes: int) -> None:
        """Add `num_bytes`."""
        self._bar.update(num_bytes)
        self._done += num_bytes
        now = time.monotonic()
        if self._bar.disable and num_bytes and (now - self._told > _LINE_SECONDS or self._done == self._total):
            self._told, share = now, 100 * self._done // self._total
            print(
                f"{self._label}: {share}% of {self._total / 2**30:.2f} GiB in {now - self._begun:.0f} s",
                file=sys.stderr,
                flush=True,
            )

    def close(self) -> None:
        """Close the bar."""
        self._bar.close()


def add_output_options(parser: argparse.ArgumentParser) -> None:
    """Add options of both directions."""
    parser.add_argument("--dtype", choices=("same", *DTYPES), default="same", help="type of the output (same)")
    parser.add_argument("--file-gib", type=float, default=4.0, metavar="GIB", help="size of an output file (4)")
    parser.add_argument(
        "--processes", type=int, default=1, metavar="N", help="that share the work (1; or use torchrun)"
    )
    parser.add_argument("--force", action="store_true", help="replace an existing output when the new one is finished")


def run_conversion(convert: Callable[..., Path], options: argparse.Namespace) -> int:
    """Run `convert` in this process, in several, or on all ranks of torchrun; return the exit code."""
    try:
        out = _convert(convert, options)
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if out is not None:
        print(f"wrote {out}")
    return 0


def _convert(convert: Callable[..., Path], options: argparse.Namespace) -> Path | None:
    """Return the written path on the first process, `None` elsewhere.

    Raises:
        UserError: raised by `convert`, or an option is out of range.
    """
    if options.processes < 1 or options.file_gib <= 0:
        raise UserError(
            f"--processes {options.processes} --file-gib {options.file_gib}",
            source="command line",
            expected="numbers greater than 0",
            hint="leave them out for the defaults",
        )
    torch.set_num_threads(1)  # copying is not compute-bound, and the processes share the cores
    is_launched = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if is_launched:
        dist.init_process_group("gloo")
    workers = Workers(dist.group.WORLD if is_launched else None, options.processes)
    progress = ProgressBar(f"rank 0 of {workers.size}" if is_launched else "converting")
    try:
        out = convert(workers=workers, progress=progress if workers.rank == 0 else None)
        return out if workers.rank == 0 else None
    finally:
        progress.close()
        if is_launched:
            dist.destroy_process_group()
