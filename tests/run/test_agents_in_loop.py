# SPDX-License-Identifier: Apache-2.0
"""Episodes in the whole program: one turn is the plain run, several are learned exactly, and none that fails stops it.

Not covered: GPUs, and templates of chats beyond one (tests/agents/test_transcript.py has others).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_templates import write_chat_tokenizer
from sabotage import Blow, kill

from distributed import run_ranks
from megatron_rl.checkpoint.directory import list_steps
from megatron_rl.rollout.episodes import Recording
from rl_runs import layout_overrides, overrides_for, read_records, train
from tiny_models import ENGINE_SIZES, save_tiny_model

ENVIRONMENTS = """
import os, time
from megatron_rl.agents.environment import Done, Observation

class OneTurn:
    def reset(self, task):
        return Observation([])

    def step(self, reply):
        return Done()

class Echo(OneTurn):
    def step(self, reply):
        return Observation([{"role": "tool", "content": "12="}], reward=0.25 * ("1" in reply.text))

class Slow(Echo):
    def step(self, reply):
        time.sleep(0.02 * (len(reply.text) % 3))
        return super().step(reply)

class Faulty(Echo):
    def reset(self, task):
        self.number = int(task.ground_truth)
        if self.number % 8 == 3:
            raise RuntimeError("no game today")
        return Observation([])

    def step(self, reply):
        if self.number % 8 == 5:
            time.sleep(1000)
        if self.number % 8 == 7:
            os._exit(1)
        return super().step(reply)

class Broken(Echo):
    def step(self, reply):
        ranks, _, since = os.environ["BROKEN"].partition(":")
        if os.environ["RANK"] in ranks and os.path.exists(since):
            raise RuntimeError("no game on rank " + os.environ["RANK"])
        return super().step(reply)
"""


PROGRAM = """
import openai

def agent(task, base_url):
    openai.OpenAI().completions.create(model="policy", prompt=task.prompt)
"""


@pytest.fixture(scope="module")
def environments(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("environments") / "environments.py"
    file.write_text(ENVIRONMENTS)
    (file.parent / "program.py").write_text(PROGRAM)
    return file


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As the task of sums, with chats for prompts, a tokenizer with a template, and a model for it."""
    directory = tmp_path_factory.mktemp("chats")
    tokenizer = write_chat_tokenizer(directory / "model", "qwen2.5")
    rows = [{"prompt": [{"role": "user", "content": f"{n}"}], "answer": f"{n}"} for n in range(16)]
    (directory / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sizes = ENGINE_SIZES | {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": 0}
    save_tiny_model(directory / "model", "qwen2", **sizes, vocab_size=tokenizer.vocab_size, num_hidden_layers=2)
    return directory


def play(task: Path, run: Path, *overrides: str, world_size: int = 2) -> list[dict[str, Any]]:
    """The records of a run."""
    command = overrides_for(task, run, "data.validation_limit=4", "trainer.log_rollouts=-1", *overrides)
    assert run_ranks(train, world_size, command) == [None] * world_size
    return read_records(run)


def without_agents(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    ignored = ("agents/", "samples/bytes_per_rank")
    return [
        {k: v for k, v in record.items() if not (k.startswith(ignored) or (k.endswith("/failed") and v == 0.0))}
        for record in records
    ]


def read_rollouts(run: Path) -> list[dict[str, Any]]:
    files = sorted((run / "rollouts").glob("step_*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


@pytest.mark.parametrize(
    ("engine", "players"),
    [
        pytest.param(["rollout.engine=hf"], ["environment=environments.py:OneTurn"], marks=pytest.mark.slow),
        pytest.param([], ["environment=environments.py:OneTurn"], marks=pytest.mark.slow),
        (layout_overrides(1, 1, 2), ["environment=environments.py:OneTurn", "program=program.py:agent"]),
    ],
    ids=["hf", "vllm_tp1", "vllm_tp2"],
)
def test_episodes_of_one_turn_are_the_plain_run_bit_for_bit(
    task: Path, tmp_path: Path, environments: Path, vllm_imported: None, engine: list[str], players: list[str]
) -> None:
    """Of an environment, and of a program that calls the endpoint once."""
    plain = play(task, tmp_path / "plain", *engine)
    for player in players:
        kind, _, name = player.partition("=")
        turns = play(task, tmp_path / kind, *engine, f"agents.{kind}={environments.parent / name}")
        assert turns[1]["agents/turns"] == 1.0 and turns[1]["agents/tokens_observed"] == 0.0
        assert without_agents(turns) == without_agents(plain)
        assert read_rollouts(tmp_path / kind) == read_rollouts(tmp_path / "plain")
        weights = [
            next((tmp_path / run / "checkpoints/step_2/huggingface").glob("*.safetensors")).read_bytes()
            for run in ("plain", kind)
        ]
        assert weights[0] == weights[1]


MULTI = ["data.max_response_length=24", "actor.max_tokens_per_microbatch=256", "data.validation_files=[]"]
SHORT = "agents.max_turns=3"


def test_episodes_of_several_turns_are_learned_with_the_engines_log_probs(
    task: Path, tmp_path: Path, environments: Path, vllm_imported: None
) -> None:
    """With few episodes open at a time, too: the same run, as seeds do not depend on it."""
    echo = f"agents.environment={environments}:Echo"
    records = play(task, tmp_path / "all", *MULTI, echo, SHORT, "data.max_response_length=64")
    for record in records:
        assert record["mismatch/max"] < 1e-5
        assert record["agents/turns"] > 1 and record["agents/tokens_observed"] > 0
    few = ["data.max_response_length=64", "agents.episodes_in_flight=3", "trainer.total_steps=1"]
    (one,) = play(task, tmp_path / "few", *MULTI, echo, SHORT, *few)
    first, again = read_rollouts(tmp_path / "all"), read_rollouts(tmp_path / "few")
    assert [row["tokens"] for row in first[:32]] == [row["tokens"] for row in again]
    assert one["agents/turns"] == records[0]["agents/turns"]
    rewards = {row["reward"] for row in first}
    assert rewards <= {0.0, 0.25, 0.5, 0.75} and len(rewards) > 1  # summed over turns


def gigpo_by_loop(rows: list[dict[str, Any]], gamma: float) -> list[list[float]]:
    """GiGPO's advantages of a group's turns, with the step weight 1; a turn's state is what it answers."""

    def normalize(value: float, others: list[float]) -> float:
        return 0.0 if len(others) == 1 else (value - np.mean(others)) / (np.std(others, ddof=1) + 1e-6)

    returns = []
    for row in rows:
        rewards = [turn["reward"] for turn in row["turns"]][:-1]
        rewards.append(row["reward"] - sum(rewards))
        returns.append([sum(gamma**i * x for i, x in enumerate(rewards[k:])) for k in range(len(rewards))])
    states = [[turn["observed"] for turn in row["turns"]] for row in rows]
    pairs = [pair for mine in zip(states, returns, strict=True) for pair in zip(*mine, strict=True)]
    scores = [row["reward"] for row in rows]
    return [
        [
            normalize(row["reward"], scores) + normalize(ahead, [x for other, x in pairs if other == state])
            for state, ahead in zip(*mine, strict=True)
        ]
        for row, *mine in zip(rows, states, returns, strict=True)
    ]


GIGPO = ["algorithm.adv_estimator=gigpo", "algorithm.gamma=0.5", "data.max_response_length=64"]


@pytest.mark.parametrize("layout", [[], pytest.param(layout_overrides(1, 1, 2), marks=pytest.mark.slow)])
def test_gigpo_compares_the_turns_that_answer_the_same(
    task: Path, tmp_path: Path, environments: Path, vllm_imported: None, layout: list[str]
) -> None:
    """On two ranks with parts of a group, or one engine of both: logged advantages equal a loop over logged turns."""
    echo = f"agents.environment={environments}:Echo"
    records = play(task, tmp_path / "run", *MULTI, *layout, echo, SHORT, *GIGPO)
    rows, num_turns = read_rollouts(tmp_path / "run"), set()
    for first in range(0, len(rows), 4):
        group = rows[first : first + 4]
        assert len({row["prompt_id"] for row in group}) == 1
        for row, expected in zip(group, gigpo_by_loop(group, 0.5), strict=True):
            starts = [turn["start"] for turn in row["turns"]]
            sizes = np.diff([*starts, len(row["tokens"])])
            np.testing.assert_allclose(row["advantages"], np.repeat(expected, sizes), rtol=1e-5, atol=1e-5)
            num_turns.add(len(starts))
    assert len(num_turns) > 1 and all(record["estimator/gigpo/state_size"] > 2 for record in records)


@pytest.mark.slow
@pytest.mark.parametrize("estimator", ["gigpo", "grpo_turns"])
def test_credit_for_turns_in_layouts_is_that_of_one_rank(
    task: Path, tmp_path: Path, environments: Path, vllm_imported: None, estimator: str
) -> None:
    """Of the same episodes: advantages of all tokens, and the first update, with TP2 and with CP2."""
    settings = [
        *MULTI,
        f"agents.environment={environments}:Echo",
        SHORT,
        *GIGPO,
        f"algorithm.adv_estimator={estimator}",
    ]
    settings += ["trainer.total_steps=1"]
    (one,) = play(task, tmp_path / "one", *settings, world_size=1)
    expected = read_rollouts(tmp_path / "one")
    assert len({*(x for row in expected for x in row["advantages"])}) > 8
    for name, layout in {"tp": layout_overrides(2, 1, 1), "cp": ["actor.context_parallel_size=2"]}.items():
        (record,) = play(task, tmp_path / name, *settings, *layout)
        rows = read_rollouts(tmp_path / name)
        assert [row["tokens"] for row in rows] == [row["tokens"] for row in expected]
        for row, other in zip(rows, expected, strict=True):
            np.testing.assert_allclose(row["advantages"], other["advantages"], rtol=1e-6, atol=1e-6)
        for key in ("policy/grad_norm", "policy/loss", "reward/mean"):
            assert record[key] == pytest.approx(one[key], rel=1e-4, abs=1e-6), key


@pytest.mark.slow
def test_gigpo_of_weight_0_and_of_one_turn_per_episode_are_grpo_bit_for_bit(
    task: Path, tmp_path: Path, environments: Path, vllm_imported: None
) -> None:
    """Weights, records and advantages of the run; by turn, episodes of one turn have those of grpo, too."""
    cases = {
        "grpo": ("Echo", "algorithm.adv_estimator=grpo"),
        "weightless": ("Echo", "algorithm.options.gigpo.step_weight=0", *GIGPO[:2]),
        "one turn": ("OneTurn", "algorithm.adv_estimator=grpo"),
        "by turn": ("OneTurn", "algorithm.adv_estimator=grpo_turns"),
    }
    ignored, found = ("estimator/", "samples/bytes_per_rank"), {}
    for name, (environment, *settings) in cases.items():
        player = f"agents.environment={environments}:{environment}"
        records = play(task, tmp_path / name, *MULTI, player, SHORT, "data.max_response_length=64", *settings)
        plain = [{key: value for key, value in r.items() if not key.startswith(ignored)} for r in records]
        file = next((tmp_path / name / "checkpoints/step_2/huggingface").glob("*.safetensors"))
        found[name] = plain, read_rollouts(tmp_path / name), file.read_bytes()
    assert found["weightless"] == found["grpo"] and found["by turn"] == found["one turn"]


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Faults of a recording: name -> replacement of `Recording.finish`."""
    finish = Recording.finish

    def shift_mask(recording: Recording, reason: str) -> Any:
        rollout = finish(recording, reason)
        for branch in rollout.branches:
            branch.sampled[:] = np.roll(branch.sampled, 1)
        return rollout

    def encode_again(recording: Recording, reason: str) -> Any:
        rollout = finish(recording, reason)
        turn = rollout.turns[0]
        rollout.branches[0].tokens[turn.start : turn.stop] = np.sort(rollout.branches[0].tokens[turn.start : turn.stop])
        return rollout

    def drop_closer(recording: Recording, reason: str) -> Any:
        rollout = finish(recording, reason)
        (branch,), stop = rollout.branches, rollout.turns[0].stop
        names = ("tokens", "sampled", "logprobs", "versions")
        cut = replace(branch, **{name: np.delete(getattr(branch, name), stop) for name in names})
        return replace(rollout, branches=[cut] if stop < len(branch.tokens) else [branch])

    yield {"mask off by one": shift_mask, "a turn encoded again": encode_again, "closer dropped": drop_closer}


@pytest.mark.parametrize("fault", ["mask off by one", "a turn encoded again"])
def test_a_recording_that_is_wrong_shows_in_the_mismatch(
    task: Path,
    tmp_path: Path,
    environments: Path,
    vllm_imported: None,
    faults: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
) -> None:
    monkeypatch.setattr(Recording, "finish", faults[fault])
    echo = f"agents.environment={environments}:Echo"
    (record,) = play(task, tmp_path / "run", *MULTI, echo, SHORT, "trainer.total_steps=1", world_size=1)
    assert record["mismatch/max"] > 1e-3


# Replies end with a letter, which is no closer of the template: that is added without having been sampled.
CHATS = ["data.max_prompt_length=32", "data.max_response_length=96", "actor.max_tokens_per_microbatch=512"]
CHATS += [f"rollout.stop={list('abcdefghijklmnopqrstuvwxyz')}", "data.validation_files=[]"]


def test_chats_are_learned_with_the_engines_log_probs_and_a_dropped_closer_shows(
    chats: Path,
    task: Path,
    tmp_path: Path,
    environments: Path,
    vllm_imported: None,
    faults: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In one run, whose recordings are wrong from the second step on: a process for environments takes seconds."""
    right, wrong, finished = Recording.finish, faults["closer dropped"], 0

    def finish(recording: Recording, reason: str) -> Any:
        nonlocal finished
        finished += 1
        return (right if finished <= 32 else wrong)(recording, reason)

    monkeypatch.setattr(Recording, "finish", finish)
    overrides = [*CHATS, f"agents.environment={environments}:Echo", SHORT, f"reward.function={task}/reward.py:score"]
    first, second = play(chats, tmp_path / "run", *overrides, world_size=1)
    assert first["mismatch/max"] < 1e-5 and first["agents/turns"] > 1.5 and first["agents/forks"] == 0
    rows = [row for row in read_rollouts(tmp_path / "run")[:32] if len(row["turns"]) > 1]
    assert rows and all("\nuser\n<tool_response>\n12=\n</tool_response>" in row["turns"][1]["observed"] for row in rows)
    assert second["mismatch/max"] > 1e-3


def test_replies_of_truncated_sampling_are_scored_over_their_sets(
    task: Path, tmp_path: Path, environments: Path, vllm_imported: None
) -> None:
    echo = f"agents.environment={environments}:Echo"
    (record,) = play(
        task,
        tmp_path / "run",
        *MULTI,
        echo,
        SHORT,
        "trainer.total_steps=1",
        "rollout.top_p=0.8",
        "rollout.top_k=5",
    )
    assert record["mismatch/max"] < 1e-5 and record["agents/turns"] > 1
    assert 1 < record["sampling/kept_mean"] < 5 and record["sampling/kept_max"] <= 5


def test_environments_that_fail_leave_their_groups_whole_and_the_other_episodes_alone(
    task: Path, tmp_path: Path, environments: Path, vllm_imported: None
) -> None:
    """An engine of two ranks: both continue."""
    records = play(
        task,
        tmp_path / "run",
        *MULTI,
        *layout_overrides(1, 1, 2),
        f"agents.environment={environments}:Faulty",
        SHORT,
        "agents.turn_timeout_seconds=2",  # a healthy environment needs milliseconds, and more on a busy machine
        "agents.episodes_in_flight=16",
        "trainer.max_failed_share=1",
        "trainer.total_steps=1",
    )
    rows = read_rollouts(tmp_path / "run")
    assert len(rows) == 32  # eight groups of four
    ends = {3: "error", 5: "timeout", 7: "error"}
    for row in rows:
        expected = ends.get(int(row["ground_truth"]) % 8)
        assert row["finish_reason"] == expected if expected else row["finish_reason"] in ("turns", "length")
        assert row["reward"] == 0.0 or not expected
    assert sum(record["agents/errors"] for record in records) == sum(row["finish_reason"] == "error" for row in rows)
    assert sum(record["agents/timeouts"] for record in records) == sum(
        row["finish_reason"] == "timeout" for row in rows
    )
    assert all(np.isfinite(record["policy/grad_norm"]) for record in records)
    for record in records:
        mine = rows[32 * (record["step"] - 1) : 32 * record["step"]]
        rewards = [row["reward"] for row in mine if int(row["ground_truth"]) % 8 not in ends]
        assert record["agents/failed"] == 1 - len(rewards) / 32 and 0 < len(rewards) < 32
        assert record["reward/mean"] == pytest.approx(np.mean(rewards))


KEEPS_EVERY_STEP = ["trainer.save_freq=1", "checkpoint.async_save=false", "trainer.total_steps=3"]


@pytest.mark.parametrize(
    "ranks", [pytest.param("01", id="every rank", marks=pytest.mark.slow), pytest.param("1", id="one rank")]
)
def test_a_run_ends_with_the_traceback_of_an_environment_that_keeps_failing(
    task: Path,
    tmp_path: Path,
    environments: Path,
    vllm_imported: None,
    monkeypatch: pytest.MonkeyPatch,
    ranks: str,
) -> None:
    """From the second step on, for all episodes or for one engine's: earlier records and checkpoints are whole.

    With one message on every rank. A share of half is below the default limit.
    """
    monkeypatch.setenv("BROKEN", f"{ranks}:{tmp_path}/run/checkpoints/latest")
    settings = [*MULTI, *KEEPS_EVERY_STEP, SHORT, f"agents.environment={environments}:Broken"]
    if ranks == "1":
        settings += [*AHEAD, *KEEPS_EVERY_STEP, "trainer.max_failed_share=0.25"]
    errors = run_ranks(train, 2, overrides_for(task, tmp_path / "run", *settings))
    assert errors[0] is not None and errors[0] == errors[1]
    found = re.match(r"(\d+) of 32 episodes of step (\d) failed; the last one:\nTraceback", errors[0])
    assert found, errors[0]
    assert f"RuntimeError: no game on rank {ranks[0]}\n" in errors[0] and "trainer.max_failed_share" in errors[0]
    count, step = map(int, found.groups())
    assert (count, step) == (32, 2) if ranks == "01" else count > 8 and step in (2, 3)
    records = read_records(tmp_path / "run")
    assert [record["step"] for record in records] == [*range(1, step + 1)] and records[0]["agents/failed"] == 0.0
    assert records[-1]["agents/failed"] == count / 32 and "time/update" not in records[-1]
    assert (records[-1]["reward/mean"] is None) == (count == 32)
    assert max(number for number, _ in list_steps(tmp_path / "run/checkpoints")) == step - 1


def test_a_validation_whose_environment_keeps_failing_ends_the_run(
    task: Path, tmp_path: Path, environments: Path, vllm_imported: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An accuracy of 0 would be misleading; within the limit, failures are counted and worth 0."""
    monkeypatch.setenv("BROKEN", "0:/")
    settings = [*MULTI[:2], SHORT, "data.validation_limit=4", "trainer.total_steps=0"]
    settings += [f"agents.environment={environments}:Broken"]
    (error,) = run_ranks(train, 1, overrides_for(task, tmp_path / "broken", *settings))
    assert error is not None and '4 of 4 episodes of the validation set "validation" failed' in error
    (record,) = play(task, tmp_path / "run", *settings, "trainer.max_failed_share=1", world_size=1)
    assert record["validation/validation/failed"] == 1.0 and record["validation/validation/accuracy"] == 0.0


AHEAD = [
    *MULTI,
    SHORT,
    "schedule.max_staleness=1",
    "algorithm.importance_sampling=token-truncate",
    "rollout.dispatch=samples",
    "trainer.total_steps=4",
    "trainer.save_freq=1",
    "trainer.test_freq=2",
    "checkpoint.async_save=false",
]


@pytest.mark.slow
def test_replies_of_slow_environments_are_interrupted_and_scored_exactly(
    task: Path, tmp_path: Path, environments: Path, vllm_imported: None
) -> None:
    """A token of the current weights has the bits of the trainer; a killed run learns from the same samples."""
    settings = [
        *AHEAD,
        f"agents.environment={environments}:Slow",
        "schedule.steps_per_update=2",
        "rollout.bitwise=true",
        "rollout.max_num_seqs=3",
        f"data.validation_files=[{task}/validation.jsonl]",
        "trainer.total_steps=3",
    ]
    records = {record["step"]: record for record in play(task, tmp_path / "whole", *settings)}
    for step in range(1, 4):
        assert records[step]["mismatch/lag0"] == 0.0 and records[step]["schedule/staleness_max"] <= 1
        assert records[step]["schedule/carried"] > 0 and records[step]["agents/errors"] == 0
    rows = read_rollouts(tmp_path / "whole")
    mixed = [row for row in rows if len({*row["versions"]}) > 1]
    assert mixed and all(row["versions"] == sorted(row["versions"]) for row in mixed)
    killed = overrides_for(task, tmp_path / "killed", "data.validation_limit=4", "trainer.log_rollouts=-1", *settings)
    assert kill(2, killed, Blow("update", entry=5))
    assert run_ranks(train, 2, killed) == [None] * 2
    again = read_rollouts(tmp_path / "killed")
    assert [(row["prompt_id"], row["sample_index"]) for row in again] == [
        (row["prompt_id"], row["sample_index"]) for row in rows
    ]
    staleness = [record["schedule/staleness_max"] for record in read_records(tmp_path / "killed") if record["step"]]
    assert max(staleness) <= 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "apart",
    [[], ["placement.actor=0", "placement.reference=0", "placement.rollout=1"], ["algorithm.adv_estimator=gigpo"]],
)
def test_a_killed_run_that_drains_its_episodes_is_the_same_bit_by_bit(
    task: Path, tmp_path: Path, environments: Path, vllm_imported: None, apart: list[str]
) -> None:
    settings = [*AHEAD, f"agents.environment={environments}:Slow", "schedule.updates=drain", *apart]
    records = play(task, tmp_path / "whole", *settings)
    killed = overrides_for(task, tmp_path / "killed", "data.validation_limit=4", "trainer.log_rollouts=-1", *settings)
    assert kill(2, killed, Blow("update", entry=5, rank=0))
    assert run_ranks(train, 2, killed) == [None] * 2
    assert read_records(tmp_path / "killed") == records
    assert read_rollouts(tmp_path / "killed") == read_rollouts(tmp_path / "whole")
    assert [record["schedule/staleness_max"] for record in records if record["step"]] == [0, 1, 1, 1]


@pytest.mark.slow
@pytest.mark.parametrize("blow", [Blow("rollout", entry=2, delay=0.1), Blow("update", entry=6, rank=0)])
def test_a_killed_run_goes_on_as_if_it_had_not_been(
    task: Path, tmp_path: Path, environments: Path, vllm_imported: None, blow: Blow
) -> None:
    """In the middle of the second step: its episodes begin again, and no task is lost or done twice."""
    settings = [
        *MULTI,
        f"agents.environment={environments}:Echo",
        SHORT,
        "trainer.save_freq=1",
        "trainer.total_steps=3",
        "checkpoint.async_save=false",
    ]
    whole = play(task, tmp_path / "whole", *settings)
    killed = overrides_for(task, tmp_path / "killed", "data.validation_limit=4", "trainer.log_rollouts=-1", *settings)
    assert kill(2, killed, blow)
    assert [step for step, _ in list_steps(tmp_path / "killed/checkpoints")] == [1]
    assert run_ranks(train, 2, killed) == [None] * 2
    assert read_records(tmp_path / "killed") == whole
    assert read_rollouts(tmp_path / "killed") == read_rollouts(tmp_path / "whole")
