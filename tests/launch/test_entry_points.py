# SPDX-License-Identifier: Apache-2.0
"""The commands that users type: torchrun, help, and one error in the job.

Bad input and the dry run are in test_dry_run.py. Not covered: several nodes, and the numbers of a run
(tests/run/test_trainer.py).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from launch.pretrain_grpo import train
from megatron_rl.run.command_line import run_command
from megatron_rl.run.inputs import plan_rl, read_rl_inputs
from tools import make_toy_task

ROOT = Path(__file__).resolve().parents[2]
GRPO, SFT = ROOT / "launch/pretrain_grpo.py", ROOT / "launch/pretrain_sft.py"
RECIPE = ROOT / "launch/recipes/toy_arithmetic.yaml"


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy task, made by its tool, as small as it goes."""
    directory = tmp_path_factory.mktemp("toy")
    sizes = ["--train", "64", "--validation", "8", "--layers", "2"]
    assert make_toy_task.main(["--out", str(directory / "task"), *sizes]) == 0
    return directory / "task"


def task_arguments(toy: Path) -> list[str]:
    """Overrides that point the toy recipe at the task."""
    return [
        f"model.path={toy}/model",
        f"data.train_files=[{toy}/train.jsonl]",
        f"data.validation_files=[{toy}/validation.jsonl]",
    ]


def torchrun(nproc: int, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run an entry point under the real torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*command, *map(str, arguments)], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240
    )


def test_bad_config_fails_on_every_rank_under_torchrun() -> None:
    """Exit status is not 0 and the error is printed once, by one rank."""
    result = torchrun(2, GRPO, RECIPE, "actor.learning_rate=1")
    assert result.returncode != 0
    assert result.stderr.count("unknown") == 1 and "Traceback" not in result.stderr.split("error:")[0]


def test_help_lists_every_setting() -> None:
    """--help of the real script names each field of each section."""
    from megatron_rl.config.fields import list_fields

    result = subprocess.run([sys.executable, str(GRPO), "--help"], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0
    for name in list_fields():
        assert name.split(".")[-1] in result.stdout, name


@pytest.mark.parametrize(("policy", "expected"), [("truncate", (64, "truncated")), ("drop", (None, "dropped"))])
def test_long_prompts_are_truncated_or_dropped_and_counted(toy: Path, policy: str, expected: tuple) -> None:
    """The other two policies keep a count instead of raising."""
    from megatron_rl.data.prompts import load_prompts
    from megatron_rl.data.tokenizer import load_tokenizer
    from megatron_rl.run.loading import load_config

    config = load_config(RECIPE, [*task_arguments(toy), f"data.overlong_prompts={policy}", "data.max_prompt_length=5"])
    found = load_prompts([f"{toy}/train.jsonl"], load_tokenizer(toy / "model"), config.config.data)
    count = found.num_truncated + found.num_dropped
    assert 0 < count < 64 and len(found.prompts) == (64 if policy == "truncate" else 64 - found.num_dropped)
    assert all(len(prompt.tokens) <= 5 for prompt in found.prompts)


def test_a_rank_speaks_for_itself_where_the_first_found_no_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setattr("megatron_rl.run.command_line._PATIENCE_SECONDS", 0.0)
    status = run_command(
        [str(RECIPE), "actor.learning_rate=1"],
        name="pretrain_grpo",
        description="",
        build_plan=plan_rl,
        read_inputs=read_rl_inputs,
        run=train,
    )
    assert status == 2 and "error on rank 3: unknown" in capsys.readouterr().err
