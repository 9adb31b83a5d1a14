# SPDX-License-Identifier: Apache-2.0
"""Environments in the process of their rank, for its debugger: they answer like environments in their own processes.

Not covered: state shared between them, such as module variables; and programs, which never run there.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron_rl.agents.episode import Answer, Setup
from megatron_rl.agents.in_rank import AnyEpisodes, EpisodeProcesses, EpisodesInRank
from megatron_rl.types import Prompt, UserError
from tools.make_toy_task import train_tokenizer

ENVIRONMENT = """
import random
import sys

import numpy as np

from megatron_rl.agents.environment import Done, Observation

class Dice:
    def reset(self, task):
        self.rolled = [random.random()]
        if task.row["kind"] == "raises":
            raise RuntimeError("no game today")
        return Observation([])

    def step(self, reply):
        self.rolled += [random.gauss(0, 1), np.random.rand()]
        if len(reply.text) == 2:
            sys.exit("enough")
        if len(self.rolled) > 4:
            return Done(sum(self.rolled), {"length": len(reply.text)})
        return Observation([{"role": "tool", "content": "12"}], reward=self.rolled[-1])
"""


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    directory = tmp_path_factory.mktemp("environment")
    (directory / "dice.py").write_text(ENVIRONMENT)
    (directory / "tokenizer.model").write_bytes(train_tokenizer("0123456789=+"))
    return Setup(
        f"{directory / 'dice.py'}:Dice", str(directory / "tokenizer.model"), {}, (2,), False, max_turns=3, run_seed=1
    )


def play(episodes: AnyEpisodes) -> list[dict[int, Answer]]:
    """The answers of five episodes on three prompts, which take turns, but for the time they took."""
    for key, (number, kind) in enumerate([(0, ""), (0, ""), (1, ""), (1, "raises"), (2, "")]):
        episodes.open(key, Prompt(number, np.array([4, 5], np.int32), "12", "", row={"kind": kind}))
    found = [episodes.wait()]
    episodes.close(1)
    for tokens in ([4], [4, 5, 6]):
        for key in (4, 0, 2):
            if key in found[-1] and found[-1][key].tail is not None:
                episodes.send_reply(key, [4, 5] if (key, tokens) == (2, [4]) else tokens, [0.0] * len(tokens), "stop")
        found.append(episodes.wait())
    episodes.close_all()
    return [{key: replace(answer, seconds=0.0, began=0.0) for key, answer in answers.items()} for answers in found]


def without_trace(answers: list[dict[int, Answer]]) -> list[dict[int, Answer]]:
    """Return answers whose failures are cut to the last line, which both kinds of processes must share."""
    return [
        {key: replace(answer, failure=answer.failure.strip().split("\n")[-1]) for key, answer in sorted(some.items())}
        for some in answers
    ]


def test_answers_are_those_of_processes_and_the_rank_draws_what_it_would_have_drawn(setup: Setup) -> None:
    random.gauss(0, 1), np.random.randn()  # each keeps a second number, which belongs to the rank
    before = random.getstate(), str(np.random.get_state())
    assert before[0][2] is not None
    here = play(EpisodesInRank(setup))
    assert (random.getstate(), str(np.random.get_state())) == before
    assert without_trace(here) == without_trace(play(EpisodeProcesses(setup, 20.0)))
    assert here[0][3].finish_reason == "error" and "no game today" in here[0][3].failure
    assert here[1][2].finish_reason == "error" and here[1][2].failure.strip().endswith("SystemExit: enough")
    assert here[1][0].reward != here[1][4].reward and set(here[2]) == {0, 4}
    assert here[2][0].components == {"length": 3.0}


def test_an_environment_that_is_not_there_is_refused(setup: Setup) -> None:
    episodes = EpisodesInRank(replace(setup, environment=f"{Path(setup.tokenizer).parent / 'dice.py'}:Cards"))
    with pytest.raises(UserError, match='the file defines no "Cards"'):
        episodes.open(0, Prompt(0, np.array([4], np.int32), "12", ""))
