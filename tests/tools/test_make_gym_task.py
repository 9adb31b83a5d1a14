# SPDX-License-Identifier: Apache-2.0
"""Tasks of other packages: demonstrations, a tokenizer that round trips, and policies that learn.

The slow tier learns with the packages (`pip install reasoning-gym textarena`) and skips those that are absent.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import sentencepiece
import yaml

from launch_runs import ROOT, environment
from megatron_rl.agents.environment import Done, Observation, Reply, Task
from tools import make_gym_task as tool


class Game:
    """GuessTheNumber, as far as its players need it."""

    def __init__(self, number: int) -> None:
        self.number = number

    def reset(self, task: Task) -> Observation:
        return Observation([{"role": "user", "content": "\nGuess."}], 0.0)

    def step(self, reply: Reply) -> Observation | Done:
        guess = int(reply.text.strip("[]"))
        if guess == self.number:
            return Done(1.0)
        hint = "lower" if guess > self.number else "higher"
        return Observation([{"role": "user", "content": f"\nThe target number is {hint}."}], 0.0)


def test_players_see_all_that_was_said_and_one_who_halves_finds_every_number() -> None:
    for number in range(tool.LOWEST, tool.HIGHEST + 1):
        rows = list(tool.play(Game(number), 0, True))
        assert 1 <= len(rows) <= tool.MOST_GUESSES and rows[-1]["response"] == f"[{number}]"
        assert rows[0] == {"prompt": f"{tool.GAME_PROMPT}\nGuess.", "response": "[10]"}
        for row, following in zip(rows, rows[1:], strict=False):
            assert following["prompt"].startswith(f"{row['prompt']}{row['response']}\nThe target number is ")
    counted = [row["response"] for row in tool.play(Game(7), 0, False)]
    assert counted == ["[1]", "[2]", "[3]", "[4]", "[5]"]


def test_a_text_of_the_task_has_few_pieces_and_comes_back() -> None:
    texts = [f"How many legs have {number} dogs?\n[{number}]" for number in range(30)]
    model = sentencepiece.SentencePieceProcessor(model_proto=tool.train_tokenizer(texts))
    for text in [*texts, "[5][5]\n\nHow many legs"]:
        assert model.decode(model.encode(text)) == text
    assert model.encode(texts[27], out_type=str)[-4:] == ["[", "2", "7", "]"] and len(model.encode(texts[27])) < 12


def test_a_package_that_is_not_there_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for task, module, package in (("legs", "reasoning_gym", "reasoning-gym"), ("guesses", "textarena", "textarena")):
        monkeypatch.setitem(sys.modules, module, None)
        assert tool.main([task, "--out", str(tmp_path / task)]) == 2
        assert f"pip install {package}" in capsys.readouterr().err and not (tmp_path / task).exists()


def test_recipes_train_on_what_the_tool_demonstrates() -> None:
    legs, guesses = (yaml.safe_load((ROOT / f"launch/recipes/toy_{name}.yaml").read_text()) for name in tool.TASKS)
    arguments = tool.build_parser().parse_args(["legs", "--out", "x"])
    assert legs["data"]["train_files"] == [tool.LEGS.format(size=arguments.train, seed=arguments.seed)]
    assert guesses["agents"] == {"environment": tool.GAME, "max_turns": tool.MOST_GUESSES}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "module"), [("legs", "reasoning_gym"), ("guesses", "textarena")])
def test_the_policy_learns(name: str, module: str, tmp_path: Path) -> None:
    """Warm start and the recipe: the sampled reward of the last steps is above the first ones' by at least 0.3."""
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed")
    task, runs = tmp_path / "task", tmp_path / "runs"
    assert tool.main([name, "--out", str(task)]) == 0

    def launch(script: str, recipe: str, *overrides: str) -> None:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command += [f"launch/{script}.py", f"launch/recipes/{recipe}.yaml", *overrides]
        subprocess.run(command, cwd=ROOT, env=environment(), check=True, capture_output=True, timeout=1500)

    rows = f"data.train_files=[{task}/demonstrations.jsonl]"
    launch("pretrain_sft", f"toy_{name}_sft", f"model.path={task}/model", rows, f"trainer.run_dir={runs}/sft")
    launch(
        "pretrain_grpo",
        f"toy_{name}",
        f"model.path={runs}/sft/checkpoints/latest/huggingface",
        *([f"data.train_files=[{task}/train.jsonl]"] if name == "guesses" else []),
        f"data.validation_files=[{task}/validation.jsonl]",
        "trainer.test_freq=0",
        "trainer.save_freq=null",
        f"trainer.run_dir={runs}/grpo",
    )
    records = [json.loads(line) for line in (runs / "grpo/metrics.jsonl").read_text().splitlines()]
    rewards = [record["reward/mean"] for record in records if "reward/mean" in record]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.3
