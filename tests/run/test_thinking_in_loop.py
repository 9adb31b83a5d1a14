# SPDX-License-Identifier: Apache-2.0
"""Runs whose thoughts a budget ends: scored exactly, carried from phase to phase, saved, resumed, validated.

Two ranks, vLLM; other engines are in tests/engines/test_thinking.py. The golden runs (tests/golden_runs.py) show that
runs without a budget are unchanged. Not covered: GPUs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from sabotage import Blow, kill, read_rollouts

from distributed import run_ranks
from megatron_rl.run.loading import load_config
from megatron_rl.types import UserError
from rl_runs import make_task, overrides_for, read_records, train

TAGS = ("<think>", "</think>")
BUDGET = 3
SETTINGS = [
    f"rollout.thinking_budget={BUDGET}",
    "rollout.thinking_end=0</think>1",
    "rollout.top_p=0.9",
    "rollout.bitwise=true",  # of the current weights' tokens, not one bit may differ, or the run ends
    "rollout.max_num_seqs=3",
    "data.max_response_length=12",
    "trainer.log_rollouts=-1",
    "trainer.test_freq=2",
]
CARRIED = [
    *SETTINGS,
    "trainer.total_steps=3",
    "trainer.save_freq=1",
    "schedule.max_staleness=1",
    "schedule.steps_per_update=2",
    "algorithm.importance_sampling=token-truncate",
    "rollout.dispatch=samples",
]


@pytest.fixture(scope="module")
def thinking_task(tmp_path_factory: pytest.TempPathFactory, vllm_imported: None) -> Path:
    directory = tmp_path_factory.mktemp("task")
    make_task(directory, TAGS)
    return directory


@pytest.fixture(scope="module")
def whole(thinking_task: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nothing disturbs."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    assert run_ranks(train, 2, overrides_for(thinking_task, run_dir, *CARRIED), timeout=150) == [None] * 2
    return run_dir


def rows_of(run_dir: Path) -> list[dict[str, Any]]:
    """All rollouts that the steps learned from."""
    files = sorted(run_dir.glob("rollouts/step_*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def test_ended_thoughts_are_learned_from_exactly(whole: Path) -> None:
    """All sampled tokens are in the loss with the engine's bits, and none that was put in; rewards read the text."""
    records = [record for record in read_records(whole) if record["step"] > 0]
    assert len(records) == 3
    for record in records:
        assert record["mismatch/lag0"] == 0.0 and record["policy/ratio_max_deviation"] == 0.0
        assert 0 < record["sampling/thoughts_ended"] < 1 and record["schedule/carried"] > 0
    rows = rows_of(whole)
    ended = [row for row in rows if "turns" in row]
    assert len(ended) / len(rows) == pytest.approx(
        sum(record["sampling/thoughts_ended"] for record in records) / len(records)
    )
    for row in ended:
        first, second = row["turns"]
        assert (first["start"], first["observed"]) == (0, "")
        assert (second["start"], second["observed"]) == (BUDGET, "0</think>1")
        tags = [text for text in row["token_texts"][:BUDGET] if text in TAGS]
        assert not tags or tags[-1] == TAGS[0], "the thought was over"
        thought, answer = row["response"][: row["response"].index("0</think>1")], row["token_texts"][BUDGET:]
        assert thought == "".join(row["token_texts"][:BUDGET]) and len(answer) > 0
        assert row["reward"] == sum(c.isdigit() for c in row["response"]) / 8
        assert len(row["tokens"]) == row["num_tokens"] <= 12 - 3
        assert len(row["old_logprobs"]) == len(row["rollout_logprobs"]) == len(row["tokens"])
    assert any(len(set(row["versions"])) > 1 for row in ended), "none was interrupted"


@pytest.mark.slow
def test_a_killed_run_resumes_bit_by_bit(thinking_task: Path, whole: Path, tmp_path: Path) -> None:
    """The checkpoint marks the inserted tokens of unfinished responses."""
    overrides = overrides_for(thinking_task, tmp_path / "run", *CARRIED)
    assert kill(2, overrides, Blow("update", entry=5))
    assert run_ranks(train, 2, overrides, timeout=150) == [None] * 2
    assert read_records(tmp_path / "run") == read_records(whole)
    assert read_rollouts(tmp_path / "run") == read_rollouts(whole)


@pytest.mark.slow
def test_validation_sets_have_budgets_of_their_own(thinking_task: Path, tmp_path: Path) -> None:
    """Greedy responses to the same prompts, without a budget and with that of the run; engine and actor at TP 2."""
    (thinking_task / "other.jsonl").write_bytes((thinking_task / "validation.jsonl").read_bytes())
    settings = [
        *SETTINGS,
        "trainer.total_steps=1",
        f"data.validation_files=[{thinking_task}/validation.jsonl,{thinking_task}/other.jsonl]",
        "rollout.validation_sets={other: {thinking_budget: null}}",
        "rollout.tensor_model_parallel_size=2",
        "actor.tensor_model_parallel_size=2",
    ]
    assert run_ranks(train, 2, overrides_for(thinking_task, tmp_path / "run", *settings), timeout=150) == [None] * 2
    files = {name: tmp_path / f"run/validation/{name}/rollouts/step_0.jsonl" for name in ("validation", "other")}
    found = {name: [json.loads(line) for line in file.read_text().splitlines()] for name, file in files.items()}
    pairs = [(row["response"], other["response"]) for row, other in zip(*found.values(), strict=True)]
    differ = [(ended, whole) for ended, whole in pairs if ended != whole]
    assert len(pairs) == 16 and differ, "no thought was ended"
    assert all("0</think>1" in ended for ended, _ in differ)
    assert 0 < read_records(tmp_path / "run")[-1]["sampling/thoughts_ended"] < 1


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("rollout.thinking_budget=0", "is no number of tokens"),
        ("agents.environment=calculator", "the transcript of an episode"),
        ("trainer.capture_step=1", "a capsule holds the tokens that were sampled"),
        ("rollout.validation_sets={validation: {thinking_budget: 0}}", "thinking_budget > 0 or null"),
    ],
)
def test_what_does_not_know_budgets_refuses_them(change: str, why: str) -> None:
    overrides = [*overrides_for(Path("task"), Path("run"), *SETTINGS), change]
    with pytest.raises(UserError, match=why):
        load_config(None, overrides)


def test_a_budget_leaves_room_for_an_answer(thinking_task: Path, tmp_path: Path) -> None:
    settings = [*SETTINGS, "rollout.thinking_budget=9"]
    error = run_ranks(train, 1, overrides_for(thinking_task, tmp_path / "run", *settings), timeout=60)[0]
    assert error is not None and "leaves no room for an answer" in error and "below 9" in error
