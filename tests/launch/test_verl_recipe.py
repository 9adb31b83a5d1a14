# SPDX-License-Identifier: Apache-2.0
"""The commands that a verl user types first: their recipe and their overrides, read by --dry-run as they are."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tiny_models import ENGINE_SIZES, save_tiny_model

ROOT = Path(__file__).resolve().parents[2]
TUTORIAL = ROOT / "tests/config/verl/tutorial.yaml"


@pytest.fixture(scope="module")
def files(task: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A model for prompts and responses as long as the recipe's, and 64 prompts of a set that verl has a reward for."""
    directory = tmp_path_factory.mktemp("verl")
    save_tiny_model(
        directory, "qwen2", **ENGINE_SIZES, vocab_size=16, num_hidden_layers=2, max_position_embeddings=2048
    )
    (directory / "tokenizer.model").write_bytes((task / "tokenizer.model").read_bytes())
    rows = [{"prompt": f"{a}+{a}=", "answer": str(2 * a), "data_source": "openai/gsm8k"} for a in range(64)]
    (directory / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [f"actor_rollout_ref.model.path={directory}", f"data.train_files={directory}/train.jsonl"]


def dry_run(*arguments: object) -> subprocess.CompletedProcess[str]:
    """--dry-run of the GRPO entry point, with torch made impossible to import."""
    command = [str(TUTORIAL), "--dry-run", *map(str, arguments)]
    code = (
        f"import sys, runpy; sys.modules['torch'] = None; sys.argv = ['x', *{command!r}]; "
        f"runpy.run_path({str(ROOT / 'launch/pretrain_grpo.py')!r}, run_name='__main__')"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT)


def test_the_tutorial_recipe(files: list[str]) -> None:
    """As it is printed, but for the paths. No --world-size: the recipe's GPUs are planned for."""
    result = dry_run(*files)
    assert result.returncode == 0, result.stderr
    for line in (
        "num_engines = world_size / engine_ranks = 6 / 2 = 3",
        "rollouts_per_step = train_batch_size * n = 60 * 12 = 720",
        "rollouts_per_engine = train_batch_size / num_engines * n = 60 / 3 * 12 = 240",
    ):
        assert line in result.stdout
    assert result.stderr.startswith("note: contradiction: algorithm.adv_estimator='gae' ")
    assert "ppo_micro_batch_size_per_gpu=8" in result.stderr
    assert "note: ignored: trainer.test_freq=100" in result.stderr


def test_overrides_in_the_form_of_verl_scripts(files: list[str]) -> None:
    """The contradiction goes with the estimator; the world size of the command line wins over the recipe's GPUs."""
    result = dry_run(*files, "algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=8", "--world-size", 12)
    assert result.returncode == 0, result.stderr
    assert "rollouts_per_step = train_batch_size * n = 60 * 8 = 480" in result.stdout
    assert "num_engines = world_size / engine_ranks = 12 / 2 = 6" in result.stdout
    assert "contradiction" not in result.stderr


def test_what_does_not_divide_is_refused_with_numbers() -> None:
    result = dry_run("trainer.n_gpus_per_node=7")
    assert result.returncode == 2
    assert "world_size 7" in result.stderr and "a world size of 6 or 8" in result.stderr
