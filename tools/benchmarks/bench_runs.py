# SPDX-License-Identifier: Apache-2.0
"""Seconds until tools/runs.py shows many runs: its table, its process, and its page in a browser.

    python tools/benchmarks/bench_runs.py checkpoints/runs/RUN --num 500 --json FILE

The runs are copies of one real run with other settings, values and states; `--steps` repeats its records. `first` reads
all files, `again` only looks at their times. `process` and `page` start from nothing: a Python process to its last
line, and a tab of a running Chromium to the last row; `page` is null without playwright and a Chromium on the PATH.
CPU seconds are independent of other load on the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # runs from a checkout without installation

from megatron_rl.observability.metrics import CONFIG_FILE, METRICS_FILE, SUMMARY_FILE, summarize
from tools.runs_page.table import RunTable

_BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")


def make_runs(source: Path, target: Path, num: int, num_steps: int | None) -> None:
    """Write `num` copies of a run, each with its own settings and rewards; every third one has no summary."""
    chance = random.Random(0)
    config = (source / CONFIG_FILE).read_text(encoding="utf-8")
    records = [json.loads(line) for line in (source / METRICS_FILE).read_text(encoding="utf-8").splitlines()]
    num_steps = num_steps or len(records)
    for number in range(num):
        run, rate, shift = target / f"run-{number:03d}", chance.choice([1e-4, 3e-4, 1e-3]), chance.uniform(-0.1, 0.1)
        shutil.copytree(source / "logs", run / "logs")
        lines = [
            f"  lr: {rate}"
            if line.startswith("  lr: ")
            else f"  seed: {number}"
            if line.startswith("  seed: ")
            else f"  run_dir: {run}"
            if line.startswith("  run_dir: ")
            else line
            for line in config.splitlines()
        ]
        (run / CONFIG_FILE).write_text("\n".join(lines) + "\n", encoding="utf-8")
        changed = [
            {
                key: value + shift if key.startswith(("reward/", "validation/")) and value is not None else value
                for key, value in records[step % len(records)].items()
            }
            | {"step": step}
            for step in range(num_steps)
        ]
        text = "".join(json.dumps(record) + "\n" for record in changed)
        (run / METRICS_FILE).write_text(text, encoding="utf-8")
        if number % 3:
            (run / SUMMARY_FILE).write_text(json.dumps(summarize(changed)), encoding="utf-8")


def measure(action: Callable[[], Any], times: int = 3) -> dict[str, float]:
    """Return the smallest wall and CPU seconds of several calls, child processes included."""
    found = []
    for _ in range(times):
        before, start = os.times(), time.perf_counter()
        action()
        wall, after = time.perf_counter() - start, os.times()
        found.append((wall, sum(after[:4]) - sum(before[:4])))
    return {"wall": min(wall for wall, _ in found), "cpu": min(cpu for _, cpu in found)}


def measure_page(folder: Path, num: int) -> float | None:
    """Return the wall seconds from a tab's start to the last row, with nothing read before; `None` if impossible."""
    executable = next(filter(None, map(shutil.which, _BROWSERS)), None)
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        return None
    if executable is None:
        return None
    from tools.runs_page.server import make_server

    seconds = []
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        for _ in range(3):
            start = time.perf_counter()
            server = make_server(RunTable(folder))
            server.serve()
            page = browser.new_page()
            page.goto(server.url)
            page.locator(f"#rows tr:nth-child({num})").wait_for(state="attached", timeout=60_000)
            seconds.append(time.perf_counter() - start)
            page.close()
            server.stop()
        browser.close()
    return min(seconds)


def main(arguments: list[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN_DIR", help="the run that is copied")
    parser.add_argument("--num", type=int, default=500, help="runs (500)")
    parser.add_argument("--steps", type=int, help="records of each run (as many as RUN_DIR has)")
    parser.add_argument("--json", type=Path, help="write the result here as well", metavar="FILE")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        make_runs(options.run, folder, options.num, options.steps)
        table = RunTable(folder)
        first = measure(table.read, times=1)
        command = [sys.executable, str(ROOT / "tools" / "runs.py"), directory]
        environment = os.environ | {"COLUMNS": "160"}
        result = {
            "runs": options.num,
            "megabytes": sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / 1e6,
            "seconds": {
                "first": first,
                "again": measure(table.read),
                "process": measure(lambda: subprocess.run(command, check=True, capture_output=True, env=environment)),
                "page": measure_page(folder, options.num),
            },
        }
    text = json.dumps(result, indent=2)
    print(text)
    if options.json:
        options.json.write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
