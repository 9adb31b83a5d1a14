# SPDX-License-Identifier: Apache-2.0
"""The main program in processes of its own on the task of sixteen sums: three steps on 2 x 2 ranks, however started."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

from megatron_rl.config.loading import dump_yaml, load_config
from rl_runs import overrides_for

ROOT = Path(__file__).resolve().parents[1]
STEPS = 3


def write_recipe(task: Path, path: Path, *extra: str) -> Path:
    """A recipe of TP inside a node and PP across two, each rank an engine: every weight moves, near and far."""
    overrides = overrides_for(
        task,
        path.parent / "never",
        "actor.tensor_model_parallel_size=2",
        "actor.pipeline_model_parallel_size=2",
        "actor.sequence_parallel=true",
        f"trainer.total_steps={STEPS}",
        "data.validation_files=[]",
        "trainer.save_final=false",
        "trainer.collective_timeout=300",
        *extra,
    )
    path.write_text(dump_yaml(load_config(None, overrides).config))
    return path


def environment(**more: str) -> dict[str, str]:
    """Of a launch script: this interpreter's tools, no leftovers of a launcher that we may run under ourselves."""
    foreign = ("RANK", "LOCAL_", "WORLD_SIZE", "MASTER_", "TORCHELASTIC", "SLURM", "GROUP_", "ROLE_")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    return clean | {"PYTHON_BIN": str(Path(sys.executable).parent), "OMP_NUM_THREADS": "1"} | more


def find_free_port() -> int:
    """A port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run(command: list[str], *, timeout: float = 400, **more: str) -> subprocess.CompletedProcess[str]:
    """Run a launch command from the root of the repository to its end."""
    return subprocess.run(command, cwd=ROOT, env=environment(**more), capture_output=True, text=True, timeout=timeout)


def assert_succeeded(result: subprocess.CompletedProcess[str]) -> None:
    """With the end of its output where it did not."""
    assert result.returncode == 0, f"{result.stdout[-2000:]}\n{result.stderr[-4000:]}"
