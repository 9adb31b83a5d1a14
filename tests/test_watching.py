# SPDX-License-Identifier: Apache-2.0
"""A run of two engines, watched from outside while it continues: status page, rollout lines, TensorBoard.

Not covered: bars of a whole run (tests/observability/test_progress.py draws them on a pseudo-terminal), and W&B in it.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import re
import socket
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import megatron_rl.run.grpo as trainer_module
from distributed import run_ranks
from megatron_rl.observability import console, progress, status
from rl_runs import overrides_for, train


def _watched_train(rank: int, world_size: int, overrides: list[str], run_dir: Path) -> tuple[str, list[dict[str, Any]]]:
    """Return a rank's output, and the contents of rank 0's status page during the run."""
    progress._INTERVAL, console.LINE_SECONDS = 0.002, 0.0  # the rollouts of the task take milliseconds
    status._LOOK_SECONDS = 0.0
    seen: list[dict[str, Any]] = []
    is_over = threading.Event()
    watcher = threading.Thread(target=_watch, args=(run_dir / "logs" / "rank0.log", seen, is_over))
    if rank == 0:
        watcher.start()
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert train(rank, world_size, overrides) is None
    is_over.set()
    if rank == 0:
        watcher.join()
    return printed.getvalue(), seen


def _watch(log: Path, seen: list[dict[str, Any]], is_over: threading.Event) -> None:
    while not is_over.wait(0.02):
        url = re.search(r"status page: (\S+)", log.read_text()) if log.exists() else None
        if url:
            with contextlib.suppress(OSError, http.client.HTTPException):
                seen.append(json.loads(urllib.request.urlopen(f"{url[1]}status.json", timeout=5).read()))


def test_a_run_that_is_watched(task: Path, tmp_path: Path, vllm_imported: None) -> None:
    run_dir = tmp_path / "run"
    overrides = overrides_for(
        task,
        run_dir,
        "observability.status_port=0",
        "observability.histograms_every=1",
        "checkpoint.save_huggingface=false",
        "trainer.total_steps=3",
    )
    start = time.monotonic()
    (printed, seen), (silent, _) = run_ranks(_watched_train, 2, overrides, run_dir, timeout=150)
    assert silent == "" and time.monotonic() - start < 150
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]

    lines = re.findall(r"^rollout: (\d+)/32 responses, ([\d,]+) tokens", printed, re.M)
    counts = [(int(finished), int(tokens.replace(",", ""))) for finished, tokens in lines]
    assert counts and max(finished for finished, _ in counts) > 16, "those of both engines"
    assert max(tokens for _, tokens in counts) <= max(r.get("tokens/response", 0) for r in records)
    assert any(tokens > 8 * finished for finished, tokens in counts), "tokens of unfinished responses count"
    assert re.search(r"^validation: \d+/16 responses", printed, re.M)

    assert {answer["total_steps"] for answer in seen} == {3} and {answer["step"] for answer in seen} >= {0, 1, 2}
    phases = {answer["phase"] for answer in seen}
    assert phases & {"update", "rollout", "old_logprobs", "validation, rollout"}, phases
    assert {len(answer["ranks"]) for answer in seen} == {0, 2}, "none while models are loaded"
    assert "loading weights: actor" in {answer["phase"] for answer in seen if not answer["ranks"]}
    assert [place["rank"] for place in seen[-1]["places"]] == [0, 1]
    assert seen[0]["state"]["name"] == "running" and seen[-1]["state"]["name"] in ("running", "finished"), "a late look"
    assert any(all("phase" in rank for rank in answer["ranks"]) for answer in seen), "both have been heard of"
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
