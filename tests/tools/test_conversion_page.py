# SPDX-License-Identifier: Apache-2.0
"""Every command of docs/conversion.md works unchanged, on a small model; its results are tested elsewhere."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from actor_runs import Case, build_actor
from checkpoint_runs import make_content, make_saver
from distributed import run_ranks
from tiny_models import ENGINE_SIZES, save_tiny_model

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/conversion.md"


def list_commands(page: Path) -> list[list[str]]:
    """The commands of all bash blocks, in words."""
    blocks = re.findall(r"```bash\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    return [shlex.split(line) for block in blocks for line in block.splitlines() if line]


def launch(words: list[str], directory: Path) -> subprocess.CompletedProcess[str]:
    """Run one of them as if `directory` were the checkout; an output of an earlier one goes away first."""
    if "--out" in words:
        shutil.rmtree(directory / words[words.index("--out") + 1], ignore_errors=True)
    launcher = {"python": [], "torchrun": ["-m", "torch.distributed.run", "--standalone"]}[words[0]]
    words = [str(ROOT / word) if word.startswith("tools/") else word for word in words[1:]]
    return subprocess.run(
        [sys.executable, *launcher, *words],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.slow
def test_commands(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model", "qwen2", num_hidden_layers=2, **ENGINE_SIZES)

    def save(rank: int, world_size: int) -> None:
        make_saver(tmp_path / "run/checkpoints", []).save(
            make_content(tmp_path / "model"), {"actor": build_actor(Case(), tmp_path / "model")}
        )

    run_ranks(save, 1)
    # The published file of this command is downloaded by launch/quickstart_real.sh; test_unpack_gguf.py makes its own.
    commands = [words for words in list_commands(PAGE) if "tools/unpack_gguf.py" not in words]
    assert len(commands) == 7
    for words in commands:
        done = launch(words, tmp_path)
        assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout}\n{done.stderr[-4000:]}"
