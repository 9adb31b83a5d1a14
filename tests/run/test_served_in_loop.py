# SPDX-License-Identifier: Apache-2.0
"""Whole runs whose engine is a server: vLLM's against the engine in the process, killed on the way, and given nothing.

SGLang's is there after `bash launch/setup_sglang.sh`. Each run starts a server or two, which takes most of a minute.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from distributed import run_ranks
from megatron_rl.engines.servers.served import Server
from megatron_rl.engines.servers.server_apis import Ask, VllmServer
from rl_runs import make_task, overrides_for, read_records, train

pytestmark = pytest.mark.slow
SGLANG = Path(os.environ.get("MEGATRON_RL_SGLANG_VENV", ".venv-sglang")) / "bin" / "python"
NEEDS_SGLANG = pytest.mark.skipif(not SGLANG.exists(), reason="bash launch/setup_sglang.sh makes its environment")
TP2 = ("rollout.tensor_model_parallel_size=2",)
STALE = (
    "schedule.max_staleness=1",
    "algorithm.importance_sampling=token-truncate",
    "placement.actor=0-0",
    "placement.reference=0-0",
    "placement.rollout=1-1",
)


def run(task: Path, run_dir: Path, *extra: str, world_size: int = 2, prepare: Any = lambda rank: None) -> Any:
    """Errors by rank, and the records."""

    def work(rank: int, size: int) -> str | None:
        prepare(rank)
        return train(rank, size, overrides_for(task, run_dir, "trainer.val_before_train=false", *extra))

    errors = run_ranks(work, world_size, timeout=900.0)
    return errors, read_records(run_dir)


def keep_samples(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return everything that follows from the tokens alone: log-probs differ in their last bits."""
    kept = ("step", "reward", "response", "tokens/prompt", "tokens/response")
    return [{k: v for k, v in record.items() if k.startswith(kept)} for record in records]


def kill_once(rank: int) -> None:
    """The server of this rank, with answers on the way, in the second generation."""
    real, killed = Server.step, []

    def step(server: Server) -> Any:
        if not killed and server._updates == 2 and len(server._running) > 4:
            assert server._process is not None
            (child,) = psutil.Process(server._process._process.pid).children()
            child.send_signal(signal.SIGKILL)
            killed.append(child.pid)
        return real(server)

    Server.step = step


def load_first_weights_only(rank: int) -> None:
    """Replace a server by one that confirms every load but keeps its first weights."""
    real = VllmServer.load

    def load(api: VllmServer, ask: Ask, directory: Path, version: str) -> None:
        if version.endswith("-1"):
            real(api, ask, directory, version)
        else:
            ask("/update_weight_version", {"new_version": version})
            api._version = version

    VllmServer.load = load


def test_server_that_is_killed_changes_nothing(task: Path, tmp_path: Path, vllm_imported: None) -> None:
    """Two TP ranks: the samples of the run are those of the engine in the process, with and without the kill."""
    errors, expected = run(task, tmp_path / "vllm", *TP2)
    assert errors == [None, None] and len(expected) == 2
    errors, found = run(task, tmp_path / "server", "rollout.engine=vllm_server", *TP2, prepare=kill_once)
    assert errors == [None, None]
    assert keep_samples(found) == keep_samples(expected)
    assert found[1]["mismatch/max"] < 1e-4


def test_server_with_older_weights_ends_the_run(task: Path, tmp_path: Path, vllm_imported: None) -> None:
    errors, records = run(task, tmp_path, "rollout.engine=vllm_server", world_size=1, prepare=load_first_weights_only)
    assert "the server of rank 0 has" in errors[0] and "weights" in errors[0]
    assert [record["step"] for record in records] == [1], "it is found before the second step begins"


def test_samples_of_older_weights_are_carried(task: Path, tmp_path: Path, vllm_imported: None) -> None:
    """Engines on ranks of their own; interrupted responses continue with the next weights."""
    errors, records = run(task, tmp_path, "rollout.engine=vllm_server", "trainer.total_steps=3", *STALE)
    assert errors == [None, None] and len(records) == 3
    assert max(record["schedule/staleness_max"] for record in records) == 1


@NEEDS_SGLANG
@pytest.mark.parametrize("sampling", [(), ("rollout.top_k=20", "rollout.top_p=0.9")], ids=["whole", "truncated"])
@pytest.mark.parametrize("tp_size", [1, 2])
def test_sglang(task: Path, tmp_path: Path, tp_size: int, sampling: tuple[str, ...]) -> None:
    """Training scores over the sets that SGLang drew from."""
    errors, records = run(
        task,
        tmp_path,
        "rollout.engine=sglang",
        f"rollout.server.python={SGLANG}",
        f"rollout.tensor_model_parallel_size={tp_size}",
        "trainer.total_steps=3",
        *sampling,
        world_size=tp_size,
    )
    assert errors == [None] * tp_size and len(records) == 3
    assert all(record["mismatch/max"] < 2e-5 for record in records)
    assert all((1 < record["sampling/kept_mean"] <= 20) if sampling else True for record in records)


@pytest.mark.parametrize("engine", ["vllm_server", pytest.param("sglang", marks=NEEDS_SGLANG)])
def test_thoughts_are_ended(tmp_path: Path, vllm_imported: None, engine: str) -> None:
    """A server gets a request in two halves, and training scores its samples in both."""
    make_task(tmp_path, ("<think>", "</think>"))
    settings = ["rollout.thinking_budget=3", "rollout.thinking_end=0</think>1", "data.max_response_length=12"]
    server = [f"rollout.engine={engine}", *([f"rollout.server.python={SGLANG}"] if engine == "sglang" else [])]
    errors, records = run(tmp_path, tmp_path / "server", *settings, *server, world_size=1)
    assert errors == [None] and len(records) == 2
    assert all(record["mismatch/max"] < 2e-5 for record in records)
    assert all(0 < record["sampling/thoughts_ended"] < 1 for record in records)
    if engine == "vllm_server":  # SGLang has no seeds on a CPU
        errors, expected = run(tmp_path, tmp_path / "vllm", *settings, world_size=1)
        assert errors == [None] and keep_samples(records) == keep_samples(expected)
        assert [r["sampling/thoughts_ended"] for r in records] == [r["sampling/thoughts_ended"] for r in expected]
