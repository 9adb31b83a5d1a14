# SPDX-License-Identifier: Apache-2.0
"""Weights & Biases in offline mode with the real package, read back from its upload file.

Not covered: the upload and the web site.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_rl.config.checks import check_config
from megatron_rl.config.schema import (
    ActorConfig,
    DataConfig,
    ModelConfig,
    ObservabilityConfig,
    RunConfig,
)
from megatron_rl.run.loading import load_config
from megatron_rl.types import UserError

ROOT = Path(__file__).resolve().parents[2]
# A separate process, because the package's helpers outlive a run in the process.
PROGRAM = """
import sys
from pathlib import Path

from megatron_rl.config.schema import ObservabilityConfig
from megatron_rl.observability.run import Run

config = ObservabilityConfig(trackers=[sys.argv[4]], wandb_project="arithmetic", wandb_name="sums")
first, last = int(sys.argv[2]), int(sys.argv[3])
run = Run(Path(sys.argv[1]), "actor:\\n  lr: 0.001\\n", 4, config, 0)
run.start(first - 1 if first > 1 else None)
for step in range(first, last + 1):
    run.count({"reward/mean": step / 8, "kl/mean": float("nan")})
    run.record(step)
run.close()
"""


def train(run_dir: Path, first: int, last: int, *before: str, tracker: str = "wandb-offline", **variables: str) -> None:
    """Run steps in a process, started through the command `before` with further environment variables."""
    command = [*before, sys.executable, "-c", PROGRAM, str(run_dir), str(first), str(last), tracker]
    subprocess.run(command, check=True, timeout=120, cwd=ROOT, env=os.environ | variables)


def read_payloads(path: Path) -> Iterator[bytes]:
    """Yield the records of a log in 32 KiB blocks (LevelDB's format after a header of seven bytes)."""
    data, position, parts = path.read_bytes(), 7, []
    while position + 7 <= len(data):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + 7])
        parts.append(data[position + 7 : position + 7 + length])
        position += 7 + length
        if kind in (1, 4):  # a whole record, or its last part
            yield b"".join(parts)
            parts = []


def read_run(directory: Path) -> dict[str, object]:
    """Return identity, config, history and exit code of an offline run."""
    from wandb.proto import wandb_internal_pb2

    (path,) = directory.glob("run-*.wandb")
    found: dict[str, object] = {"history": []}
    for payload in read_payloads(path):
        record = wandb_internal_pb2.Record.FromString(payload)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            config = {item.key: json.loads(item.value_json) for item in record.run.config.update}
            found |= {
                "id": record.run.run_id,
                "project": record.run.project,
                "name": record.run.display_name,
                "actor": config["actor"],
            }
        elif kind == "history":
            row = {(item.key or "/".join(item.nested_key)): json.loads(item.value_json) for item in record.history.item}
            found["history"].append({key: row[key] for key in row if not key.startswith(("_", "time/"))})
        elif kind == "exit":
            found["exit_code"] = record.exit.exit_code
    return found


@pytest.mark.slow
def test_offline_run_and_its_continuation(tmp_path: Path) -> None:
    """The file has config and metrics; a restarted run has the same id, here offline by W&B's own variable."""
    run_dir = tmp_path / "run"
    train(run_dir, 1, 2)
    (directory,) = (run_dir / "wandb").glob("offline-run-*")
    first = read_run(directory)
    assert {key: first[key] for key in ("project", "name", "actor")} == {
        "project": "arithmetic",
        "name": "sums",
        "actor": {"lr": 0.001},
    }
    assert first["id"] == (run_dir / "wandb_id").read_text().strip()
    rows = [(row["step"], row["reward/mean"], row["kl/mean"]) for row in first["history"]]
    assert [row[:2] for row in rows] == [(1, 0.125), (2, 0.25)] and all(row[2] != row[2] for row in rows)
    assert first["exit_code"] == 1, "it ended before its last step"
    train(run_dir, 3, 4, tracker="wandb", WANDB_MODE="offline")
    (other,) = set((run_dir / "wandb").glob("offline-run-*")) - {directory}
    second = read_run(other)
    assert (second["id"], second["exit_code"]) == (first["id"], 0)
    assert [row["step"] for row in second["history"]] == [3, 4]


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace, which sees every process, is not installed")
@pytest.mark.slow
def test_offline_opens_no_connection(tmp_path: Path) -> None:
    """Neither the process nor its helpers try to reach any address, including name servers."""
    trace = tmp_path / "trace"
    train(tmp_path / "run", 1, 1, "strace", "-f", "-e", "trace=connect,sendto,sendmmsg", "-o", str(trace))
    lines = trace.read_text().splitlines()
    assert any("AF_UNIX" in line and "wandb" in line for line in lines), "the trace saw the package at work"
    assert [line for line in lines if "AF_INET" in line] == []


def test_off_is_a_word(tmp_path: Path) -> None:
    """`off` without quotes, false in YAML, is the word in files and on the command line."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "model: {path: m}\ndata: {train_files: [t], train_batch_size: 8}\n"
        "actor: {ppo_mini_batch_size: 8}\nhybrid: {verify: off}\n"
    )
    assert load_config(recipe, []).config.hybrid.verify == "off"
    assert load_config(recipe, ["data.curriculum.kind=off"]).config.data.curriculum.kind == "off"


def test_without_the_package_the_config_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The config is refused before any process group; without W&B the package is not needed."""
    monkeypatch.setitem(sys.modules, "wandb", None)  # Python's own mark of a missing module
    rest = dict(
        model=ModelConfig(path="m"),
        data=DataConfig(train_files=["t"], train_batch_size=8),
        actor=ActorConfig(ppo_mini_batch_size=8),
    )
    check_config(RunConfig(**rest))
    with pytest.raises(UserError, match="needs the package wandb") as caught:
        check_config(RunConfig(**rest, observability=ObservabilityConfig(trackers=["wandb"])))
    assert caught.value.source == "observability.trackers"
