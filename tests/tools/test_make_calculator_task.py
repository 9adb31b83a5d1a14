# SPDX-License-Identifier: Apache-2.0
"""The task that needs a calculator: deterministic bytes, right answers, and a policy that learns to call it.

The learning test is a short version of launch/recipes/toy_calculator.yaml, in the slow tier.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from launch_runs import ROOT, environment
from tools import make_calculator_task as tool

SMALL = ["--train", "80", "--validation", "12", "--layers", "1"]


def read(task: Path, name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (task / f"{name}.jsonl").read_text().splitlines()]


def test_the_same_arguments_write_the_same_bytes_and_others_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = [tmp_path / name for name in ("first", "second")]
    for task in tasks:
        assert tool.main(["--out", str(task), *SMALL]) == 0
    files = [{file.name: file.read_bytes() for file in task.rglob("*") if file.is_file()} for task in tasks]
    assert files[0] == files[1] and {*tool.PROMPT_FILES, "task.json", "model.safetensors"} <= files[0].keys()
    assert tool.main(["--out", str(tasks[0]), *SMALL]) == 0 and "nothing to do" in capsys.readouterr().out
    assert tool.main(["--out", str(tasks[0]), *SMALL, "--seed", "2"]) == 2
    assert "seed 1 (now 2)" in capsys.readouterr().err
    assert tool.main(["--out", str(tmp_path / "third"), "--estimate-rate", "2"]) == 2
    assert "--estimate-rate 2.0" in capsys.readouterr().err and not (tmp_path / "third").exists()


def test_answers_are_products_and_demonstrations_estimate_or_ask(tmp_path: Path) -> None:
    assert tool.main(["--out", str(tmp_path), *SMALL, "--estimate-rate", "0.5"]) == 0
    train, validation, shown = (read(tmp_path, name) for name in ("train", "validation", "demonstrations"))
    assert (len(train), len(validation), len(shown)) == (80, 12, 160)
    for row in train + validation:
        left, right = map(int, row["prompt"].rstrip("=").split("*"))
        assert int(row["answer"]) == left * right and len(row["prompt"]) == 8
    pairs = [{frozenset(row["prompt"].rstrip("=").split("*")) for row in rows} for rows in (train, validation)]
    assert not pairs[0] & pairs[1] and len(pairs[0] | pairs[1]) == 92
    asked = 0
    for task, first, second in zip(train, shown[::2], shown[1::2], strict=True):
        call = f"[{task['prompt'].rstrip('=')}]"
        assert first["prompt"] == task["prompt"] and second["response"] == task["answer"]
        assert second["prompt"] == f"{task['prompt']}{call}[{task['answer']}]"
        asked += first["response"] == call
        assert first["response"] == call or first["response"].endswith("0000")
    assert 20 < asked < 60
    assert tool.estimate(373, 452) == 200_000


@pytest.mark.slow
def test_the_policy_learns_to_ask(tmp_path: Path) -> None:
    """Warm start and twelve steps: from less than 10 % of sampled answers to more than 40 %, greedily to 90 %."""
    task, runs = tmp_path / "task", tmp_path / "runs"
    assert tool.main(["--out", str(task)]) == 0

    def launch(script: str, recipe: str, *overrides: str) -> None:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command += [f"launch/{script}.py", f"launch/recipes/{recipe}.yaml", *overrides]
        subprocess.run(command, cwd=ROOT, env=environment(), check=True, capture_output=True, timeout=1500)

    launch(
        "pretrain_sft",
        "toy_calculator_sft",
        f"model.path={task}/model",
        f"data.train_files=[{task}/demonstrations.jsonl]",
        f"trainer.run_dir={runs}/sft",
    )
    launch(
        "pretrain_grpo",
        "toy_calculator",
        f"model.path={runs}/sft/checkpoints/latest/huggingface",
        f"data.train_files=[{task}/train.jsonl]",
        f"data.validation_files=[{task}/validation.jsonl]",
        "trainer.total_steps=12",
        "trainer.test_freq=12",
        "trainer.save_freq=null",
        f"trainer.run_dir={runs}/grpo",
    )
    records = [json.loads(line) for line in (runs / "grpo/metrics.jsonl").read_text().splitlines()]
    accuracies = [x for record in records if (x := record.get("validation/validation/accuracy")) is not None]
    rewards = [record["reward/mean"] for record in records if "reward/mean" in record]
    assert accuracies[0] < 0.1 and rewards[0] < 0.1
    # The last reward was 0.62 and 0.54 with the kernels of two CPUs. Its standard error over 128 samples is 0.04.
    assert accuracies[-1] > 0.9 and rewards[-1] > 0.4
