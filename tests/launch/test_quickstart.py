# SPDX-License-Identifier: Apache-2.0
"""launch/quickstart.sh, typed as the documentation has it, in a directory that looks like a fresh clone.

Set-up is left out: the environment of the tests is that of launch/setup.sh.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from launch_runs import ROOT, environment
from megatron_rl.run.inputs import plan_rl
from megatron_rl.run.loading import load_config

# Instead of starting ranks it appends how it was called.
RECORDER = '#!/bin/sh\nprintf "%s\\n" "$*" >> torchrun_calls\n'


def make_clone(directory: Path, warm_start_steps: int | None = None) -> Path:
    """Launchers, recipes and tools, without results.

    Args:
        directory: to make.
        warm_start_steps: shorten the supervised run.
    """
    (directory / "launch/recipes").mkdir(parents=True)
    for name in (
        "tools",
        "megatron_rl",
        "launch/quickstart.sh",
        "launch/supervise.sh",
        "launch/last_error.sh",
        "launch/pretrain_grpo.py",
        "launch/pretrain_sft.py",
        "launch/recipes/toy_arithmetic.yaml",
        "launch/recipes/toy_arithmetic_sft.yaml",
    ):
        (directory / name).symlink_to(ROOT / name)
    (directory / "launch/setup.sh").write_text("")
    if warm_start_steps:
        recipe = directory / "launch/recipes/toy_arithmetic_sft.yaml"
        text = recipe.read_text()
        recipe.unlink()
        recipe.write_text(text.replace("total_steps: 600", f"total_steps: {warm_start_steps}"))
    return directory


def type_command(
    command: str, directory: Path, *, timeout: float = 240, **more: str
) -> subprocess.CompletedProcess[str]:
    """Run it in bash as a user would."""
    variables = environment(**{"MEGATRON_RL_VENV": sys.prefix} | more)
    done = subprocess.run(
        ["bash", "-c", command], cwd=directory, env=variables, capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done


@pytest.mark.parametrize("nproc", [1, 2, 4, 6, 8])
def test_the_layout_fits_the_number_of_ranks(nproc: int, tmp_path: Path) -> None:
    """The script passes the entry point a config with a plan for this number of ranks."""
    clone = make_clone(tmp_path / "clone")
    (tmp_path / "bin").mkdir()
    for name, text in (("torchrun", RECORDER), ("python", "#!/bin/sh\n")):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    type_command("bash launch/quickstart.sh", clone, MEGATRON_RL_VENV=str(tmp_path), NPROC=str(nproc))
    words = shlex.split((clone / "torchrun_calls").read_text().splitlines()[-1])
    assert words[:4] == ["--standalone", "--nproc-per-node", str(nproc), "launch/pretrain_grpo.py"]
    config = load_config(ROOT / words[4], words[5:]).config
    actor, plan = config.actor, plan_rl(config, nproc)
    assert plan.dp_size * actor.tensor_model_parallel_size * actor.pipeline_model_parallel_size == nproc


def start_warm_and_train(command: str, directory: Path, steps: int) -> None:
    """Task, warm start (three steps of it) and GRPO; the learning is checked below."""
    clone = make_clone(directory / "clone", warm_start_steps=3)
    done = type_command(command, clone)
    records = (clone / "checkpoints/toy_arithmetic/warm_start/metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["sft/loss"] for line in records]
    assert len(losses) == 3 and losses[2] < losses[0]
    [run] = (clone / "checkpoints/runs").iterdir()
    assert f"step {steps}/{steps} | reward" in done.stdout
    assert f"quickstart: done; a look at checkpoints/runs/{run.name}/curves.png" in done.stdout
    assert "Warning" not in done.stdout + done.stderr, "libraries speak between our lines"
    assert json.loads((run / "summary.json").read_text())["steps"] == steps and (run / "curves.png").is_file()


def test_a_rank_and_two_steps(tmp_path: Path) -> None:
    """Of two ranks each would import everything."""
    start_warm_and_train("NPROC=1 bash launch/quickstart.sh trainer.total_steps=2", tmp_path, 2)


@pytest.mark.slow
def test_two_ranks_and_five_steps(tmp_path: Path) -> None:
    start_warm_and_train("NPROC=2 bash launch/quickstart.sh trainer.total_steps=5", tmp_path, 5)


@pytest.mark.slow
def test_the_whole_of_it(tmp_path: Path) -> None:
    """Minutes: sixty steps on four ranks raise the accuracy on sums that were never trained on."""
    clone = make_clone(tmp_path / "clone")
    type_command("bash launch/quickstart.sh", clone, timeout=1500)
    [run] = (clone / "checkpoints/runs").iterdir()
    [course] = json.loads((run / "summary.json").read_text())["validation"].values()
    assert course["last_step"] == 60 and course["last"] > course["first"] + 0.2
