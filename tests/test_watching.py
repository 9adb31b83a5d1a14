# SPDX-License-Identifier: Apache-2.0
"""A run of two engines, watched from outside while it continues: status page, rollout lines, TensorBoard.

Not covered: bars of a whole run (tests/observability/test_progress.py draws them on a pseudo-terminal), and W&B in it.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import megatron_rl.run.grpo as trainer_module
from distributed import run_ranks
from megatron_rl.engines.vllm.vllm_engine import VllmEngine
from megatron_rl.observability import console, progress, status
from megatron_rl.observability.progress import PhaseTimers, RolloutProgress
from rl_runs import overrides_for, train


def _watched_train(rank: int, world_size: int, overrides: list[str], run_dir: Path) -> tuple[str, list[dict[str, Any]]]:
    """Return a rank's output, and the contents of rank 0's status page in each phase of the run."""
    progress._INTERVAL, console.LINE_SECONDS = 0.002, 0.0  # the rollouts of the task take milliseconds
    status._LOOK_SECONDS = 0.0
    seen: list[dict[str, Any]] = []
    _wait_for_counts(rank)
    if rank == 0:
        _look_in_each_phase(run_dir / "logs" / "rank0.log", seen)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert train(rank, world_size, overrides) is None
    return printed.getvalue(), seen


def _look_in_each_phase(log: Path, seen: list[dict[str, Any]]) -> None:
    phase, begin_step = PhaseTimers.phase, PhaseTimers.begin_step

    def look() -> None:
        url = re.search(r"status page: (\S+)", log.read_text()) if log.exists() else None
        if url:
            seen.append(json.loads(urllib.request.urlopen(f"{url[1]}status.json", timeout=60).read()))

    @contextlib.contextmanager
    def enter(timers: PhaseTimers, name: str, **options: bool) -> Iterator[None]:
        with phase(timers, name, **options):
            look()
            yield

    def begin(timers: PhaseTimers, step: int, *idle: str) -> None:
        begin_step(timers, step, *idle)
        look()
        deadline = time.monotonic() + 60
        while step == 3 and not all("phase" in rank for rank in seen[-1]["ranks"]) and time.monotonic() < deadline:
            look()  # until there is a heartbeat of each rank

    PhaseTimers.phase, PhaseTimers.begin_step = enter, begin


def _wait_for_counts(rank: int) -> None:
    """Let progress be counted after the first step of each generation, and at its end, by rank 0 last."""
    follow, step, is_counted, is_first = RolloutProgress.follow, VllmEngine.step, threading.Event(), threading.Event()

    @contextlib.contextmanager
    def follow_all(self: RolloutProgress, total: int, tokens_in_flight: Callable[[], int]) -> Iterator[None]:
        def count() -> int:
            if found := tokens_in_flight():
                is_counted.set()
            return found

        is_counted.clear()
        is_first.set()
        with follow(self, total, count):
            yield
            if rank == 0:
                dist.barrier()
        if rank == 1:
            dist.barrier()

    def wait(self: VllmEngine) -> Any:
        found = step(self)
        if self.tokens_in_flight() and is_first.is_set():
            is_first.clear()
            assert is_counted.wait(60)
            dist.barrier()
        return found

    RolloutProgress.follow, VllmEngine.step = follow_all, wait


def test_a_run_that_is_watched(task: Path, tmp_path: Path, vllm_imported: None) -> None:
    run_dir = tmp_path / "run"
    overrides = overrides_for(
        task,
        run_dir,
        "observability.status_port=0",
        "observability.histograms_every=1",
        "checkpoint.contents=[optimizer]",
        "trainer.total_steps=3",
    )
    (printed, seen), (silent, _) = run_ranks(_watched_train, 2, overrides, run_dir, timeout=150)
    assert silent == ""
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]

    lines = re.findall(r"^rollout: (\d+)/32 responses, ([\d,]+) tokens", printed, re.M)
    counts = [(int(finished), int(tokens.replace(",", ""))) for finished, tokens in lines]
    assert max(finished for finished, _ in counts) == 32, "by both engines"
    assert max(tokens for _, tokens in counts) <= max(r.get("tokens/response", 0) for r in records)
    assert any(tokens > 8 * finished for finished, tokens in counts), "tokens of unfinished responses count"
    assert re.search(r"^validation: \d+/16 responses", printed, re.M)

    assert {answer["total_steps"] for answer in seen} == {3} and {answer["step"] for answer in seen} == {0, 1, 2}
    phases = {answer["phase"] for answer in seen}
    assert phases >= {"update", "rollout", "old_logprobs", "validation, rollout"}, phases
    assert {len(answer["ranks"]) for answer in seen} == {0, 2}, "none while models are loaded"
    assert "loading weights: actor" in {answer["phase"] for answer in seen if not answer["ranks"]}
    assert [place["rank"] for place in seen[-1]["places"]] == [0, 1]
    assert {answer["state"]["name"] for answer in seen} == {"running"}
    assert all("phase" in rank for rank in seen[-1]["ranks"]), "both have been heard of"
    rewards = next(chart for chart in seen[-1]["charts"] if chart["title"] == "reward")["lines"][0]["points"]
    shown_means = [point[1] for point in rewards]
    assert shown_means == [r["reward/mean"] for r in records[1 : len(rewards) + 1]]
    assert [point[3] - point[1] for point in rewards] == pytest.approx(
        [r["reward/std"] for r in records[1:][: len(rewards)]]
    )
    logged = [json.loads(line) for line in (run_dir / "rollouts" / "step_2.jsonl").read_text().splitlines()]
    shown = next(answer["samples"] for answer in seen if answer["samples"]["step"] == 2)
    assert [row["response"] for row in shown["rows"]] == [row["response"] for row in logged[:4]]

    events = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"histograms": 0})
    events.Reload()
    lengths = events.Histograms("distribution/response_length")
    assert [event.step for event in lengths] == [1, 2, 3]
    assert [event.histogram_value.sum for event in lengths] == [r["tokens/response"] for r in records[1:]]
    assert all(event.histogram_value.num == 32 for event in events.Histograms("distribution/reward"))
    tokens = [event.histogram_value.num for event in events.Histograms("distribution/advantage")]
    assert all(0 < num < r["tokens/response"] for num, r in zip(tokens, records[1:])), "rank 0 has its share of them"
    gaps = events.Histograms("distribution/logprob_gap")
    assert all(
        max(abs(gap.histogram_value.min), gap.histogram_value.max) <= r["mismatch/max"] * 1.001
        for gap, r in zip(gaps, records[1:])
    )
    assert "samples/4/text_summary" in events.Tags()["tensors"]


def _start_without_models(rank: int, world_size: int, overrides: list[str]) -> str | None:
    trainer_module.Trainer._build = None  # building anything would fail otherwise
    return train(rank, world_size, overrides)


def test_a_taken_port_ends_the_run_on_every_rank_before_models_are_built(task: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        overrides = overrides_for(task, tmp_path / "run", f"observability.status_port={port}", "rollout.engine=hf")
        errors = run_ranks(_start_without_models, 2, overrides, timeout=150)
    assert errors[0] == errors[1] and "source:   observability.status_port" in errors[0]
    assert f"127.0.0.1:{port} cannot be served" in errors[0]
    assert not (tmp_path / "run/metrics.jsonl").exists() and not (tmp_path / "run/status.html").exists()
