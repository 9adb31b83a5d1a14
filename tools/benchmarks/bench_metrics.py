# SPDX-License-Identifier: Apache-2.0
"""Cost of all that watches a run as shares of its step: metrics, console, status page, spans, trackers.

    python tools/make_toy_task.py --out TASK
    OMP_NUM_THREADS=1 python tools/benchmarks/bench_metrics.py launch/recipes/toy_arithmetic.yaml \\
        model.path=TASK/model data.train_files=[TASK/train.jsonl] data.validation_files=[] trainer.total_steps=20 \\
        actor.tensor_model_parallel_size=1 actor.pipeline_model_parallel_size=1 actor.sequence_parallel=false \\
        observability.status_port=0 observability.histograms_every=1 observability.trace_steps=[10]

Measured in a process without torchrun, so with a layout of one rank: the seconds inside of functions that compute and
record metrics, over the sum of time/step; of threads, their CPU seconds. The first step is left out. `record` covers
metrics.jsonl, TensorBoard, trackers, alarms, the console and status.html; `page` the answers to a browser that asks
every two seconds, as the page does; `spans` their recording, and with `trace_steps` the writing of a file. The goal is
at most 1 % for all of them.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # runs from a checkout without installation

from megatron_rl.config.schema import RunConfig
from megatron_rl.observability.metrics import log_path, read_metrics
from megatron_rl.observability.progress import PhaseTimers
from megatron_rl.observability.run import Run
from megatron_rl.run import grpo
from megatron_rl.run.loading import load_config

GOAL = 0.01
ASK_SECONDS = 2.0  # as status_page/page.js
OF_RUN = ("record", "write_histograms")
IN_GRPO = ("describe_rollouts", "describe_tokens", "describe_sources", "describe_staleness")
OF_SPANS = ("begin", "end", "begin_requests", "end_request", "begin_episode", "add_answer", "end_episode", "flush")


class Costs:
    """Seconds of calls by name, with the time at which each ended."""

    def __init__(self) -> None:
        self.calls: list[tuple[float, str, float]] = []

    def time(self, owner: Any, function: str, name: str = "", clock: Callable[[], float] = time.perf_counter) -> Any:
        """Return a patch of `owner.function` that counts its calls under `name`."""
        original = getattr(owner, function)

        def call(*args: Any, **kwargs: Any) -> Any:
            start = clock()
            try:
                return original(*args, **kwargs)
            finally:
                self.calls.append((time.monotonic(), name or function, clock() - start))

        return mock.patch.object(owner, function, call)

    def shares(self, since: float, whole: float) -> dict[str, float]:
        """Return the sums of the calls after a time over `whole` seconds, by name."""
        names = dict.fromkeys(name for _, name, _ in self.calls)
        return {name: sum(x for at, kind, x in self.calls if kind == name and at > since) / whole for name in names}


@contextmanager
def browse(log: Path) -> Iterator[None]:
    """Ask the status page of a run for its data every two seconds; its address is in the log."""
    is_over = threading.Event()

    def ask() -> None:
        while not is_over.wait(ASK_SECONDS):
            url = re.search(r"status page: (\S+)", log.read_text()) if log.exists() else None
            if url:
                urllib.request.urlopen(f"{url[1]}status.json", timeout=10).read()

    browser = threading.Thread(target=ask)
    browser.start()
    try:
        yield
    finally:
        is_over.set()
        browser.join()


def list_patches(costs: Costs, config: RunConfig) -> list[Any]:
    """Return the patches that measure everything a config asks for."""
    patches = [costs.time(grpo, name) for name in IN_GRPO] + [costs.time(Run, name) for name in OF_RUN]
    if config.observability.status_port is not None:
        from megatron_rl.observability.status import StatusPage
        from megatron_rl.observability.status_server import PageServer, _Handler

        patches += [costs.time(StatusPage, "samples", "record")]
        patches += [costs.time(_Handler, "do_GET", "page", time.thread_time)]
        patches += [costs.time(PageServer, "service_actions", "page", time.thread_time)]
    if "otlp" in config.observability.trackers or config.observability.trace_steps:
        from megatron_rl.observability.spans import Spans

        patches += [costs.time(Spans, name, "spans") for name in OF_SPANS]
    return patches


def measure(overrides: list[str], recipe: Path) -> dict[str, float]:
    """Train, and return the share of the steps' time in each measured function."""
    costs, begun = Costs(), list[float]()

    def begin_step(timers: PhaseTimers, step: int, idle: str = "") -> None:
        if step == 2:
            begun.append(time.monotonic())
        original(timers, step, *([idle] if idle else []))

    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        run_dir = Path(directory) / "run"
        config = load_config(recipe, [*overrides, f"trainer.run_dir={run_dir}", "trainer.save_freq=null"]).config
        for patch in list_patches(costs, config):
            stack.enter_context(patch)
        original = PhaseTimers.begin_step
        stack.enter_context(mock.patch.object(PhaseTimers, "begin_step", begin_step))
        stack.enter_context(browse(log_path(run_dir, 0)))
        grpo.Trainer.from_config(config, recipe).train()
        steps = [record for record in read_metrics(run_dir) if (record["step"] or 0) > 1]
    whole = sum(record["time/step"] or 0.0 for record in steps)
    shares = costs.shares(begun[0], whole)
    return {"steps": len(steps), "seconds per step": whole / len(steps), **shares, "all": sum(shares.values())}


def main(arguments: list[str] | None = None) -> int:
    """Run the command; status 1 above the goal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("settings", nargs="*", help="key=value")
    args = parser.parse_intermixed_args(arguments)
    found = measure(args.settings, args.recipe)
    print(json.dumps(found, indent=2))
    return int(found["all"] > GOAL)


if __name__ == "__main__":
    sys.exit(main())
