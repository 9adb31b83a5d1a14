# SPDX-License-Identifier: Apache-2.0
"""Runs with engines outside the job, which are forks of the test's process, so that they start at once."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from megatron_rl.engines.elastic.member import EngineProcess
from megatron_rl.parallel.collectives import init_distributed
from rl_runs import overrides_for

ELASTIC = ("schedule.elastic=true", "rollout.silent_seconds=5", "trainer.collective_timeout=100")
# Log-probs of a response do not depend on its batch, so neither on its engine.
HF = (
    *("rollout.engine=hf", "rollout.bitwise=true", "data.validation_files=[]", "trainer.val_before_train=false"),
    *("hybrid.verify=full", "trainer.log_rollouts=-1"),
)


def elastic_overrides(task: Path, run_dir: Path, *extra: str) -> list[str]:
    """Command line of a run on one rank with the hf engine outside it."""
    return overrides_for(task, run_dir, *HF, *ELASTIC, *extra)


def _serve(run_dir: Path, prepare: Callable[[], None], rank: int = 0, size: int = 1, port: int = 0) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    if size > 1:
        os.environ |= dict(RANK=f"{rank}", LOCAL_RANK=f"{rank}", WORLD_SIZE=f"{size}", LOCAL_WORLD_SIZE=f"{size}")
        os.environ |= dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=f"{port}")
    torch.set_num_threads(1)
    log = os.open(run_dir.with_name(f"{run_dir.name}-engine-{os.getpid()}.log"), os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    code = 1
    with suppress(BaseException):
        import logging
        import traceback

        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
        try:
            prepare()
            EngineProcess(run_dir, init_distributed(100.0), patience_seconds=60.0).run()
            code = 0
        except BaseException:
            traceback.print_exc()
    os._exit(code)


def start_engine(run_dir: Path, prepare: Callable[[], None] = lambda: None) -> BaseProcess:
    """Start an engine; `prepare` is called in it first."""
    process = get_context("fork").Process(target=_serve, args=(run_dir, prepare))
    process.start()
    return process


def start_ranks(run_dir: Path, size: int, prepare: Callable[[], None], port: int) -> list[BaseProcess]:
    """Start the ranks of an engine, which meet on a free port."""
    context = get_context("fork")
    ranks: list[BaseProcess] = [
        context.Process(target=_serve, args=(run_dir, prepare, rank, size, port)) for rank in range(size)
    ]
    for process in ranks:
        process.start()
    return ranks


@contextmanager
def engines(
    run_dir: Path, count: int, prepare: Callable[[], None] = lambda: None, again: bool = False
) -> Iterator[list[BaseProcess]]:
    """Start engines, which are gone afterwards; `again`: in place of the first that ends, another one is started."""
    processes = [start_engine(run_dir, prepare) for _ in range(count)]
    sentinels, is_over = [process.sentinel for process in processes], threading.Event()

    def replace() -> None:  # not in a rank, whose sockets a fork would keep open
        while not is_over.is_set():
            if wait(sentinels, timeout=0.1):
                processes.append(start_engine(run_dir, prepare))
                return

    thread = threading.Thread(target=replace) if again else None
    if thread is not None:
        thread.start()
    try:
        yield processes
    finally:
        is_over.set()
        if thread is not None:
            thread.join()
        for process in processes:
            with suppress(ProcessLookupError):
                os.kill(process.pid or 0, signal.SIGKILL)
            process.join()


def read_samples(run_dir: Path) -> dict[tuple[int, int, int], dict[str, Any]]:
    """Return the logged rollouts by (step, prompt, sample)."""
    found: dict[tuple[int, int, int], dict[str, Any]] = {}
    for file in sorted((run_dir / "rollouts").glob("step_*.jsonl")):
        for row in map(json.loads, file.read_text().splitlines()):
            key = (int(file.stem.removeprefix("step_")), row["prompt_id"], row["sample_index"])
            assert key not in found, f"{key} was learned twice"
            found[key] = row
    return found
