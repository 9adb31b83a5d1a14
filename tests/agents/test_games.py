# SPDX-License-Identifier: Apache-2.0
"""Games of textarena and GEM, and tasks of reasoning-gym, as environments; names of verifiers that are refused.

The default tier has small modules in the packages' places; `pip install textarena gem-llm` and `-m slow` play theirs.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
from types import SimpleNamespace

import pytest

from megatron_rl.agents.environment import Done, Observation, Reply, Task, find_environment
from megatron_rl.agents.program import find_program, list_tools
from megatron_rl.config.sections import AgentsConfig
from megatron_rl.types import UserError

TASK = Task("", "", "", {}, {}, seed=3)


class Arena:
    """A game of textarena: its observation is the whole conversation."""

    def reset(self, num_players, seed):
        assert num_players == 1
        self.shown, self.wanted = f"Say {seed}.", str(seed)

    def get_observation(self):
        return 0, self.shown

    def step(self, text):
        self.shown += f"\n[Player] {text}\nNo."
        self.won = text == self.wanted
        return self.won or text == "stop", {}

    def close(self):
        return {0: 1 if self.won else -1}, {}


class Gem:
    """A game of GEM."""

    def reset(self, seed):
        return f"Say {seed}.\n", {"suffix": "Enter."}

    def step(self, text):
        return "No.", 0.5, text == "3", text == "stop", {"suffix": "Again."}


def make(game):
    def found(name):
        if name != "Say-v0":
            raise ValueError(f"{name} not found")
        return game()

    return SimpleNamespace(make=found)


def say(environment, text):
    return environment.step(Reply(text, [], "stop"))


def test_textarena_shows_what_is_new_and_rewards_the_end(monkeypatch):
    monkeypatch.setitem(sys.modules, "textarena", make(Arena))
    environment = find_environment("textarena:Say-v0")()
    assert environment.reset(TASK) == Observation([{"role": "user", "content": "Say 3."}], 0.0)
    assert say(environment, "5") == Observation([{"role": "user", "content": "\n[Player] 5\nNo."}], 0.0)
    assert say(environment, "3") == Done(1.0)
    with pytest.raises(UserError, match="Chess-v0 not found"):
        find_environment("textarena:Chess-v0")


def test_gem_rewards_each_turn(monkeypatch):
    monkeypatch.setitem(sys.modules, "gem", make(Gem))
    environment = find_environment("gem:Say-v0")()
    assert environment.reset(TASK) == Observation([{"role": "user", "content": "Say 3.\nEnter."}])
    assert say(environment, "5") == Observation([{"role": "user", "content": "No.\nAgain."}], 0.5)
    assert say(environment, "stop") == Done(0.5)


def test_a_package_that_configures_the_log_leaves_the_run_s_alone(monkeypatch):
    """As gem does when it is imported; megatron-core's messages of level INFO would be printed."""
    handlers, level = [*logging.root.handlers], logging.root.level

    def play():
        logging.basicConfig(level=logging.INFO, force=True)
        return Gem()

    monkeypatch.setitem(sys.modules, "gem", make(play))
    find_environment("gem:Say-v0")
    assert (logging.root.handlers, logging.root.level) == (handlers, level)


def test_a_task_of_reasoning_gym_is_made_from_the_seed(monkeypatch):
    class Sums(list):
        def score_answer(self, answer, entry):
            return 1.0 if answer == entry["answer"] else 0.25

    def create(name, size, seed=None, most=9):
        if name != "sums":
            raise ValueError(f"{name} not registered")
        return Sums([{"question": f" {seed} + {most}? ", "answer": str((seed or 0) + most)}] * size)

    monkeypatch.setitem(sys.modules, "reasoning_gym", SimpleNamespace(create_dataset=create))
    environment = find_environment("reasoning-gym:sums?most=5")()
    (message,) = environment.reset(TASK).messages
    assert message["content"].startswith("3 + 5?\n") and "<answer>" in message["content"]
    assert say(environment, "7 <answer> 8 </answer>") == Done(1.0)
    assert say(environment, "7") == Done(0.25)
    with pytest.raises(UserError, match="words not registered"):
        find_environment("reasoning-gym:words")


@pytest.mark.parametrize(("kind", "module"), [("gem", "gem"), ("verifiers", "verifiers"), ("textarena", "textarena")])
def test_a_package_that_is_not_there_is_asked_for(kind, module, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=f"pip install {kind}"):
        find_environment(f"{kind}:Say-v0")


def test_a_taskset_of_verifiers_is_a_program(monkeypatch):
    """As a program it is checked and played; the chat template shows no tools of its own."""
    agents = AgentsConfig(environment="verifiers:gsm8k")
    assert agents.program_or_taskset == "verifiers:gsm8k" and list_tools(agents) == []
    assert AgentsConfig(environment="gem:Say-v0", program=None).program_or_taskset is None
    assert AgentsConfig(program="mine.py:agent").program_or_taskset == "mine.py:agent"
    monkeypatch.setitem(sys.modules, "verifiers", None)
    with pytest.raises(UserError, match="pip install verifiers"):
        find_program(agents.program_or_taskset)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "name", "moves"),
    [
        ("textarena", "textarena:FrozenLake-v0", ["[right]", "[left]", "[down]", "[left]", "[down]"]),
        ("gem", "gem:game:GuessTheNumber-v0-easy", [f"\\boxed{{{i}}}" for i in range(1, 11)]),
    ],
)
def test_a_game_of_the_package_goes_from_its_rules_to_its_end(package, name, moves):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    make_environment = find_environment(name)
    environment, twin = make_environment(), make_environment()
    first = environment.reset(TASK)
    assert first == twin.reset(TASK) and len(first.messages[0]["content"]) > 100
    answers = []
    while not answers or (isinstance(answers[-1], Observation) and len(answers) < len(moves)):
        answers.append(say(environment, moves[len(answers)]))
    assert all(answer.messages[0]["content"] for answer in answers[:-1])
    assert isinstance(answers[-1], Done) and -1.0 <= answers[-1].reward <= 1.0
