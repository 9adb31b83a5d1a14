# SPDX-License-Identifier: Apache-2.0
"""Samples of older weights in a run: responses that a real engine interrupts and continues, and resumed runs.

Two ranks, vLLM and the policy's own engine; many engines, kills and speeds are in tests/rollout/test_stream.py. The
golden runs (tests/golden_runs.py) show that max_staleness = 0 changes nothing. Not covered: GPUs.
"""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from sabotage import Blow, kill, read_rollouts, train_under

from distributed import run_ranks
from megatron_rl.engines.protocol import Sampled
from megatron_rl.engines.vllm.vllm_engine import VllmEngine
from megatron_rl.rollout.phase_ends import read_trace
from megatron_rl.run.loading import load_config
from megatron_rl.types import UserError
from rl_runs import overrides_for, read_records, train

CORRECTED = "algorithm.importance_sampling=token-truncate"
SETTINGS = [
    "trainer.total_steps=4",
    "trainer.save_freq=1",
    "trainer.test_freq=2",
    "trainer.log_rollouts=-1",
    "schedule.max_staleness=1",
    "schedule.steps_per_update=2",
    CORRECTED,
    "rollout.bitwise=true",  # of the current weights' tokens, not one bit may differ, or the run ends
    "rollout.top_p=0.9",  # the kept set of a token is carried, saved and fetched with it
    "rollout.max_num_seqs=3",
    "rollout.dispatch=samples",
]


@pytest.fixture(scope="module")
def whole(task: Path, tmp_path_factory: pytest.TempPathFactory, vllm_imported: None) -> Path:
    """The run that nobody disturbs."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    assert run_ranks(train, 2, overrides_for(task, run_dir, *SETTINGS), timeout=150) == [None] * 2
    return run_dir


def rows_of(run_dir: Path, step: int) -> list[dict[str, Any]]:
    """The rollouts that a step learned from."""
    lines = (run_dir / f"rollouts/step_{step}.jsonl").read_bytes().splitlines()
    return [json.loads(line) for line in lines]


def test_interrupted_responses_are_scored_exactly(whole: Path) -> None:
    """A token of the current weights has the bits of the trainer, also behind tokens that older weights sampled."""
    records = {record["step"]: record for record in read_records(whole)}
    for step in range(1, 5):
        record = records[step]
        assert record["mismatch/lag0"] == 0.0 and record["policy/ratio_max_deviation"] == 0.0
        assert record["schedule/staleness_max"] <= 1 and record["schedule/carried"] > 0
    assert any(record.get("mismatch/lag1", 0) > 0 for record in records.values())
    rows = [row["versions"] for step in range(1, 5) for row in rows_of(whole, step)]
    mixed = [versions for versions in rows if len(set(versions)) > 1]
    assert mixed, "no response was interrupted"
    assert all(versions == sorted(versions) for versions in mixed)


def test_a_killed_run_resumes_bit_by_bit(task: Path, whole: Path, tmp_path: Path) -> None:
    """The checkpoint contains the unfinished responses; the run continues with the same tokens, rewards and weights."""
    overrides = overrides_for(task, tmp_path / "run", *SETTINGS)
    assert kill(2, overrides, Blow("update", entry=5))
    assert run_ranks(train, 2, overrides, timeout=150) == [None] * 2
    assert read_records(tmp_path / "run") == read_records(whole)
    assert read_rollouts(tmp_path / "run") == read_rollouts(whole)


@pytest.mark.slow
def test_a_run_that_is_stopped_in_a_rollout_repeats_it(task: Path, whole: Path, tmp_path: Path) -> None:
    """The checkpoint of the signal contains the responses begun before the rollout."""
    overrides = overrides_for(task, tmp_path / "run", *SETTINGS, "trainer.save_freq=0")
    reasons = run_ranks(train_under, 2, overrides, Blow("rollout", entry=4, number=signal.SIGTERM), timeout=150)
    assert [reason.partition(";")[0] for reason in reasons] == ["preempted: SIGTERM after step 2"] * 2
    assert run_ranks(train, 2, overrides, timeout=150) == [None] * 2
    assert read_records(tmp_path / "run") == read_records(whole)


@pytest.mark.slow
def test_more_ranks_and_another_engine_take_up_what_has_begun(task: Path, whole: Path, tmp_path: Path) -> None:
    """Four engines continue the responses of two; a synchronous run takes the rest, in the order of the data."""
    settings = [*SETTINGS, f"checkpoint.resume={whole / 'checkpoints/step_2'}", "rollout.engine=megatron"]
    assert run_ranks(train, 4, overrides_for(task, tmp_path / "run", *settings), timeout=150) == [None] * 4
    assert_same_samples(whole, tmp_path / "run", 3)
    settings = [*SETTINGS, f"checkpoint.resume={whole / 'checkpoints/step_3'}", "schedule.max_staleness=0"]
    assert run_ranks(train, 2, overrides_for(task, tmp_path / "drained", *settings), timeout=150) == [None] * 2
    assert read_records(tmp_path / "drained")[-1]["schedule/carried"] == 0
    assert_same_samples(whole, tmp_path / "drained", 4)


def assert_same_samples(a: Path, b: Path, step: int) -> None:
    """A step learned from the same prompts."""
    found = [[(row["prompt_id"], row["sample_index"]) for row in rows_of(run, step)] for run in (a, b)]
    assert found[0] == found[1] and len(found[0]) == 32


@pytest.fixture(scope="module")
def settings_apart(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """One rank trains, and another generates for later steps meanwhile; half of the prompts teach nothing."""
    reward = tmp_path_factory.mktemp("reward") / "reward.py"
    reward.write_text(
        "def score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return 1.0 if int(ground_truth) % 4 == 1 else sum(map(ord, solution_str)) / 1000\n"
    )
    return [
        *SETTINGS,
        "placement.actor=0",
        "placement.reference=0",
        "placement.rollout=1",
        "trainer.test_freq=0",
        f"reward.function={reward}:score",
        "algorithm.dynamic_sampling=true",
        "rollout.top_p=1.0",
    ]


@pytest.fixture(scope="module")
def apart(task: Path, settings_apart: list[str], tmp_path_factory: pytest.TempPathFactory, vllm_imported: None) -> Path:
    """The run that nobody disturbs."""
    run_dir = tmp_path_factory.mktemp("apart") / "run"
    assert run_ranks(train, 2, overrides_for(task, run_dir, *settings_apart), timeout=150) == [None] * 2
    return run_dir


def test_engines_of_their_own_generate_beside_training(apart: Path) -> None:
    records = read_records(apart)
    assert all(record.get("mismatch/lag0", 0.0) == 0.0 for record in records)  # bitwise, if there are such tokens
    steps = [record for record in records if record["step"]]
    assert max(record["schedule/staleness_max"] for record in steps) == 1
    assert all(record["sampling/informative_groups"] == 8 for record in steps)
    assert sum(record["sampling/generated_groups"] for record in steps) > 32
    assert all(record["reward/uninformative_groups"] == 0 for record in steps)


@pytest.mark.slow
@pytest.mark.parametrize(
    "blow",
    [
        pytest.param(Blow("update", entry=5, rank=0), id="trains"),
        pytest.param(Blow("rollout", entry=3), id="generates"),
    ],
)
def test_a_killed_rank_of_either_kind_loses_nothing(
    blow: Blow, task: Path, settings_apart: list[str], apart: Path, tmp_path: Path
) -> None:
    overrides = overrides_for(task, tmp_path / "run", *settings_apart)
    assert kill(2, overrides, blow)
    assert run_ranks(train, 2, overrides, timeout=150) == [None] * 2
    assert read_records(tmp_path / "run") == read_records(apart)
    assert read_rollouts(tmp_path / "run") == read_rollouts(apart)


APART = [*SETTINGS, "placement.actor=0", "placement.reference=0", "placement.rollout=1", "trainer.test_freq=0"]


@pytest.mark.slow
def test_a_killed_run_that_drains_resumes_bit_by_bit(task: Path, tmp_path: Path, vllm_imported: None) -> None:
    """One step off, by the clock: no response is interrupted, so that nothing depends on when training ends."""
    settings = [*APART, "schedule.updates=drain", "schedule.steps_per_update=null", "rollout.bitwise=false"]
    whole, killed = (overrides_for(task, tmp_path / name, *settings) for name in "ab")
    assert run_ranks(train, 2, whole, timeout=150) == [None] * 2
    assert kill(2, killed, Blow("update", entry=5, rank=0))
    assert run_ranks(train, 2, killed, timeout=150) == [None] * 2
    records = read_records(tmp_path / "a")
    assert records == read_records(tmp_path / "b")
    assert read_rollouts(tmp_path / "a") == read_rollouts(tmp_path / "b")
    a, b = (tmp_path / f"{name}/checkpoints/step_4/huggingface/model.safetensors" for name in "ab")
    assert a.read_bytes() == b.read_bytes()
    assert [record["schedule/staleness_max"] for record in records if record["step"]] == [0, 1, 1, 1]
    rows = [row["versions"] for step in range(1, 5) for row in rows_of(tmp_path / "a", step)]
    assert {len(set(versions)) for versions in rows} == {1}


def train_slowly(rank: int, world_size: int, overrides: list[str]) -> str | None:
    """One rank of the program whose engine takes its time."""
    real_step = VllmEngine.step

    def step(engine: VllmEngine) -> list[Sampled]:
        time.sleep(0.01)
        return real_step(engine)

    VllmEngine.step = step
    return train(rank, world_size, overrides)


@pytest.mark.slow
def test_a_run_by_the_clock_is_replayed_from_its_trace(task: Path, tmp_path: Path, vllm_imported: None) -> None:
    """Killed, resumed and with a slower engine, it is the same bit by bit."""
    settings = [*APART, "schedule.steps_per_update=null", "rollout.bitwise=false"]
    recorded = overrides_for(task, tmp_path / "a", *settings)
    assert run_ranks(train, 2, recorded, timeout=150) == [None] * 2
    replayed = overrides_for(task, tmp_path / "b", *settings, f"schedule.replay={tmp_path / 'a'}")
    assert kill(2, replayed, Blow("rollout", entry=3))
    assert run_ranks(train_slowly, 2, replayed, timeout=150) == [None] * 2
    assert read_records(tmp_path / "a") == read_records(tmp_path / "b")
    assert read_rollouts(tmp_path / "a") == read_rollouts(tmp_path / "b")
    steps = read_trace(tmp_path / "a", 1)
    assert read_trace(tmp_path / "b", 1) == steps
    assert {phase for _, phase in steps[0]} == {"rollout", "beside training"} and len(steps[0]) == 8


@pytest.mark.parametrize(
    "setting, message",
    [
        ("rollout.n=3", "rollout.n = 3, and 8 prompts have begun with 4 responses each"),
        ("rollout.top_p=1.0", "sampling is not truncated, and 8 prompts have begun with truncated sampling"),
        ("schedule.order=whole", "schedule.order = whole, and 8 prompts have begun that can no longer be passed over"),
    ],
)
def test_what_responses_that_have_begun_do_not_fit_is_refused(
    setting: str, message: str, task: Path, whole: Path, tmp_path: Path
) -> None:
    settings = [*SETTINGS, f"checkpoint.resume={whole / 'checkpoints/step_2'}", setting]
    found = run_ranks(train, 2, overrides_for(task, tmp_path / "run", *settings), timeout=60)
    assert all(message in text for text in found)


@pytest.mark.parametrize(
    "settings, found",
    [
        ((), "samples of older weights would be learned from as if the policy had made them"),
        ((CORRECTED, "schedule.max_staleness=-1"), "schedule.max_staleness = -1"),
        ((CORRECTED, "schedule.steps_per_update=0"), "schedule.steps_per_update = 0"),
        ((CORRECTED, "schedule.steps_per_update=2", "schedule.replay=runs/a"), "schedule.replay .* without a clock"),
    ],
)
def test_what_older_samples_cannot_be_used_with_is_refused(
    settings: tuple[str, ...], found: str, task: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=found):
        load_config(None, overrides_for(task, tmp_path, "schedule.max_staleness=1", *settings))
