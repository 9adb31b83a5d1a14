# SPDX-License-Identifier: Apache-2.0
"""Mistakes in recipes, programs, rewards and commands: one message each, with four parts (`mistakes.json`).

`test_dry_run.py` makes those in settings. Not covered: arguments that argparse refuses, and mistakes of a machine.
"""

from __future__ import annotations

import importlib
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
from mistakes import Mistake, read_mistakes

import megatron_rl
from megatron_rl.config.schema import RewardConfig
from megatron_rl.rewards.calls import is_batched, score_batch
from megatron_rl.rewards.functions import compute_score
from megatron_rl.rewards.plan import build_reward_plan
from megatron_rl.run.command_line import run_command
from megatron_rl.run.inputs import plan_rl, read_rl_inputs
from megatron_rl.types import EXIT_USER_ERROR, UserError
from reward_samples import make_rollout
from rl_runs import load_nested, overrides_for

ROWS = read_mistakes()
train = partial(run_command, name="", description="", build_plan=plan_rl, read_inputs=read_rl_inputs, run=print)


def choose(kind: str) -> pytest.MarkDecorator:
    """Parametrize a test with the mistakes of a kind."""
    rows = [mistake for mistake in ROWS if mistake.kind == kind]
    return pytest.mark.parametrize("mistake", rows, ids=[mistake.name for mistake in rows])


def test_the_table_has_sixty_mistakes_of_each_kind_some() -> None:
    assert len({(mistake.kind, mistake.name) for mistake in ROWS}) == len(ROWS) > 60
    assert min(Counter(mistake.kind for mistake in ROWS).values()) > 5


@choose("recipe")
def test_a_recipe(mistake: Mistake, task: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    Path("recipe.yaml").write_text(mistake.given[0])
    sizes = ["model.dtype=float32", "data.max_prompt_length=8", "data.max_response_length=8"]
    given = [text.replace("{files}", str(task)) for text in mistake.given[1:]]
    assert train(["recipe.yaml", *sizes, *given, "--dry-run"]) == EXIT_USER_ERROR
    mistake.assert_answered_by(capsys.readouterr().err.partition("error: ")[2], task)


@choose("program")
@pytest.mark.filterwarnings("ignore")
def test_a_program(mistake: Mistake, task: Path, tmp_path: Path) -> None:
    config = load_nested(overrides_for(task, tmp_path / "run"))
    del config["model"]["path"], config["reward"]
    names = {"megatron_rl": megatron_rl, "model": str(task / "model"), "config": config}
    with pytest.raises(UserError) as caught:
        exec(mistake.given[0], names)
    mistake.assert_answered_by(str(caught.value), task)


@choose("reward")
def test_a_reward(mistake: Mistake, tmp_path: Path) -> None:
    (tmp_path / "user_reward.py").write_text(mistake.given[0])
    plan = build_reward_plan(RewardConfig(function=f"{tmp_path}/user_reward.py:score"), 16, {})
    function, rollouts = plan.sources[0].function, [make_rollout("5", "5"), make_rollout("6", "6")]
    with pytest.raises(UserError) as caught:
        score_batch(function, rollouts, [1, 1]) if is_batched(function) else compute_score(function, rollouts[0])
    mistake.assert_answered_by(str(caught.value), tmp_path)


@choose("command")
def test_a_command(mistake: Mistake, task: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    name, *arguments = (text.replace("{files}", str(task)) for text in mistake.given)
    command = train if name == "train" else importlib.import_module(f"tools.{name}").main
    try:
        code = command(arguments)
    except SystemExit as end:  # of the parser
        code = end.code
    assert code == EXIT_USER_ERROR
    mistake.assert_answered_by(capsys.readouterr().err.partition("error: ")[2], task)
