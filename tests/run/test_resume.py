# SPDX-License-Identifier: Apache-2.0
"""A run that is killed or stopped continues with bitwise equal metrics and rollouts.

One kill and one signal here, four more in the slow tier; test_kill_soak.py has dozens, tests/launch/test_restarts.py
the same under torchrun. Ranks are forked. Not covered: GPUs, several nodes, a machine that loses power.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch.distributed as dist
from sabotage import Blow, kill, read_rollouts, same_files, train_under
from safetensors.torch import load_file, save_file

from distributed import run_ranks
from megatron_rl.checkpoint.directory import find_problems, list_steps, point_at, read_pointer, seal
from megatron_rl.checkpoint.files import FileRecord, write_file
from megatron_rl.checkpoint.torch_dist import ChunkWriter
from megatron_rl.config.schema import ObservabilityConfig
from megatron_rl.observability.run import Run
from megatron_rl.run import checkpoints
from megatron_rl.run.loading import load_config
from megatron_rl.run.opening import RunLock, check_dependencies, choose_checkpoint, describe_changes, find_dependencies
from megatron_rl.types import UserError
from rl_runs import fine_tune, layout_overrides, overrides_for, read_records, sft_overrides, train
from tiny_models import ENGINE_SIZES, save_tiny_model

# Parts with a state: dynamic sampling, adaptive KL coefficient, schedule, best metric, certificate.
SETTINGS = [
    "trainer.total_steps=4",
    "trainer.save_freq=1",
    "trainer.test_freq=2",
    "algorithm.dynamic_sampling=true",
    "algorithm.max_sampling_rounds=2",
    "algorithm.kl_target=0.001",
    "algorithm.kl_horizon=64",
    "trainer.best_metric=validation/validation/accuracy",
    "checkpoint.keep_last=2",
    "actor.lr_warmup_steps=3",
    "rollout.validation_temperature=1.0",
    "rollout.n=2",
    *layout_overrides(2, 1, 1),
]


@pytest.fixture(scope="module")
def whole(task: Path, tmp_path_factory: pytest.TempPathFactory, vllm_imported: None) -> Path:
    """The run that nobody disturbs."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    assert run_ranks(train, 2, overrides_for(task, run_dir, *SETTINGS), timeout=150) == [None] * 2
    return run_dir


def assert_same(run_dir: Path, whole: Path) -> None:
    assert read_records(run_dir) == read_records(whole)
    assert read_rollouts(run_dir) == read_rollouts(whole)


@dataclass(frozen=True)
class Killed:
    """A run that is killed: its last recorded step then, the checkpoint that it resumes from, steps that are redone."""

    blow: Blow
    recorded: int
    resumed: int | None
    set_aside: tuple[int, ...] = ()
    settings: tuple[str, ...] = ("checkpoint.async_save=false",)


KILLED = {
    "update": Killed(Blow("update", entry=9), 2, 2),
    # Between the checkpoint of the second step and its record in metrics.jsonl (entry 1: step 0).
    "record": Killed(Blow("record", entry=3, rank=0), 1, 2),
    # The thread that writes the second checkpoint raises on one rank; nothing is left but the first.
    "write": Killed(Blow("write", entry=2), 2, 1, (2,), ("checkpoint.keep_last=1",)),
    # The first checkpoint is not there yet.
    "no-checkpoint": Killed(
        Blow("update", entry=9),
        2,
        None,
        (0, 1, 2),
        ("trainer.save_freq=0", "trainer.best_metric=null", "checkpoint.save_every_minutes=null"),
    ),
}


SLOW = {"record", "write", "no-checkpoint"}


@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.slow] * (case in SLOW)) for case in KILLED])
def test_a_killed_run_goes_on(case: str, task: Path, whole: Path, tmp_path: Path) -> None:
    """Always with the metrics and rollouts of the whole run; records of repeated steps are kept."""
    killed, run_dir = KILLED[case], tmp_path / "run"
    overrides = overrides_for(task, run_dir, *SETTINGS, *killed.settings)
    assert kill(2, overrides, killed.blow)
    before, rollouts = read_records(run_dir), read_rollouts(run_dir)
    assert [record["step"] for record in before] == list(range(killed.recorded + 1))
    assert run_ranks(train, 2, overrides, timeout=150) == [None] * 2
    assert_same(run_dir, whole)
    log, root = (run_dir / "logs/rank0.log").read_text(), run_dir / "checkpoints"
    assert ("resumed: " in log) == (killed.resumed is not None)
    assert killed.resumed is None or f"resumed: {root}/step_{killed.resumed}, " in log
    assert log.count("its lock was taken over") == 1 and not (run_dir / "run.lock").exists()
    attempt = run_dir / "attempt-1"
    assert attempt.exists() == bool(killed.set_aside)
    if killed.set_aside:
        assert read_records(attempt) == [before[step] for step in killed.set_aside]
        redone = {f"step_{step}.jsonl" for step in range(killed.set_aside[0], killed.recorded + 1) if step}
        assert read_rollouts(attempt) == {name: rollouts[name] for name in redone}
        assert (attempt / "config.yaml").exists()
    assert read_pointer(root, "latest") == 4
    if killed.resumed is not None:
        assert read_pointer(root, "best") == read_pointer(whole / "checkpoints", "best")
    assert ("a crash loses the whole run" in log) == (case == "no-checkpoint")


@pytest.mark.parametrize(
    "blow,saved",
    [
        pytest.param(Blow("rollout", entry=4, number=signal.SIGTERM), 1, marks=pytest.mark.slow),
        (Blow("update", entry=7, number=signal.SIGUSR1), 2),
    ],
    ids=["rollout", "update"],
)
def test_a_signal_to_one_rank_stops_all_with_a_checkpoint(
    blow: Blow, saved: int, task: Path, whole: Path, tmp_path: Path
) -> None:
    """Before an update the step is done again, after one it is finished; nothing is written but for the signal."""
    run_dir = tmp_path / "run"
    overrides = overrides_for(task, run_dir, *SETTINGS, "trainer.save_freq=0", "trainer.best_metric=null")
    reasons = run_ranks(train_under, 2, overrides, blow, timeout=150)
    directory = run_dir / f"checkpoints/step_{saved}"
    name = signal.Signals(blow.number).name
    assert (
        reasons
        == [f"preempted: {name} after step {saved}; start the same command again to resume from {directory}"] * 2
    )
    assert find_problems(directory) == [] and [step for step, _ in list_steps(directory.parent)] == [saved]
    assert '"exit_code": 75' in (run_dir / "stopped.json").read_text()
    assert run_ranks(train, 2, overrides, timeout=150) == [None] * 2
    assert_same(run_dir, whole)
    assert not (run_dir / "stopped.json").exists()


def test_what_does_not_fit_changes_nothing(task: Path, whole: Path, tmp_path: Path) -> None:
    """Another model, fewer steps than were taken: one error on every rank, every file as it was."""
    save_tiny_model(tmp_path / "model", "qwen2", **ENGINE_SIZES, vocab_size=16, num_hidden_layers=4)
    (tmp_path / "model/tokenizer.model").write_bytes((task / "model/tokenizer.model").read_bytes())
    shutil.copytree(task / "model", tmp_path / "tuned")
    weights = load_file(task / "model/model.safetensors")
    save_file({name: tensor * 1.01 for name, tensor in weights.items()}, tmp_path / "tuned/model.safetensors")
    rows = (task / "train.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "train.jsonl").write_text("".join(rows[::-1]))
    (tmp_path / "reward.py").write_text((task / "reward.py").read_text().replace("8.0", "4.0"))
    names = ["metrics.jsonl", "config.yaml", "summary.json", "checkpoints/latest/SHA256SUMS", "rollouts/step_4.jsonl"]
    before, other = same_files(whole, names), f"model.path={tmp_path}/model"
    for extra, found in (
        (
            [f"model.path={tmp_path}/tuned", "trainer.total_steps=6"],
            r"has changed: reference: \S+/tuned \(digest \w{12}\), it was \S+/model \(digest \w{12}\)\n",
        ),
        ([other, "trainer.total_steps=6", "checkpoint.allow_changes=reference"], "belongs to another model: num_l"),
        (
            [
                f"data.train_files={tmp_path}/train.jsonl",
                f"reward.function={tmp_path}/reward.py:score",
                "trainer.total_steps=6",
            ],
            r"train_files: .*; reward: (.|\n)*checkpoint.allow_changes=\[train_files,reward\]",
        ),
        (["trainer.total_steps=2"], "has taken 4 steps, of 2 requested"),
        (["checkpoint.resume=never"], "already holds the metrics of a run"),
    ):
        errors = run_ranks(train, 2, overrides_for(task, whole, *SETTINGS, *extra), timeout=150)
        assert errors[0] == errors[1] and re.search(found, errors[0]), errors[0]
    assert same_files(whole, names) == before


def test_a_second_job_in_the_directory_of_another_is_refused(task: Path, whole: Path, tmp_path: Path) -> None:
    """On every rank, with the owner's process; nothing is written but logs."""
    names = ["metrics.jsonl", "config.yaml", "summary.json", "checkpoints/latest/SHA256SUMS", "rollouts/step_4.jsonl"]
    lock = RunLock(whole)
    lock.acquire()
    before = same_files(whole, [*names, "run.lock"])
    errors = run_ranks(train, 2, overrides_for(task, whole, *SETTINGS, "trainer.total_steps=6"), timeout=150)
    assert errors[0] == errors[1] and f"{whole} is in use: process {os.getpid()} on " in errors[0]
    assert same_files(whole, [*names, "run.lock"]) == before
    lock.release()


def test_digests_tell_contents_apart(tmp_path: Path) -> None:
    """Weights are read in samples, 128 blocks of 64 KiB of a file: a change of a few bytes between them is not seen."""
    content = bytearray(os.urandom(12 << 20))
    (tmp_path / "model.safetensors").write_bytes(content)
    config = load_config(
        None,
        [
            f"model.path={tmp_path}",
            "algorithm.kl_coef=0.1",
            "data.train_batch_size=1",
            f"data.train_files=[{tmp_path}/data.jsonl]",
            "algorithm.plugins=[]",
        ],
    ).config
    (tmp_path / "data.jsonl").write_text("a\n")
    before = find_dependencies(config)
    assert before.keys() == {"reference", "train_files"} and before["reference"]["source"] == str(tmp_path)
    for file, change in (
        ("model.safetensors", bytes(reversed(content))),
        ("model.safetensors", content[:-1]),
        ("data.jsonl", b"b\n"),
    ):
        kept = (tmp_path / file).read_bytes()
        (tmp_path / file).write_bytes(change)
        name = "reference" if file.startswith("model") else "train_files"
        now = find_dependencies(config)
        assert [key for key in now if now[key]["digest"] != before[key]["digest"]] == [name]
        with pytest.raises(UserError, match=rf"{name}: .*, it was (.|\n)*checkpoint.allow_changes=\[{name}\]"):
            check_dependencies(before, now, [], tmp_path)
        assert len(check_dependencies(before, now, [name], tmp_path)) == 1
        (tmp_path / file).write_bytes(kept)
    said = {"validation_files": {"source": "a", "digest": "1"}}
    (line,) = check_dependencies(said, {"validation_files": {"source": "b", "digest": "2"}}, [], tmp_path)
    assert line == "validation_files: b (digest 2), it was a (digest 1)"
    assert check_dependencies({}, before, [], tmp_path) == [], "a checkpoint of an older version"


def test_saves_by_time_and_saves_that_fail(task: Path, tmp_path: Path) -> None:
    """One that was written because time had passed goes when the next is there. Two saves in a row fail, the run goes
    on and its summary names them; with a limit of two it ends there, with the last good checkpoint."""

    def train_with_failures(rank: int, world_size: int, limit: int) -> str | None:
        real, calls = ChunkWriter.close, [0]

        def close(self: ChunkWriter) -> FileRecord:
            calls[0] += 1
            if rank == 1 and calls[0] in (2, 3):
                raise RuntimeError("planted")
            return real(self)

        ChunkWriter.close, checkpoints.MAX_FAILED_SAVES = close, limit
        try:
            fine_tune(
                rank,
                world_size,
                sft_overrides(
                    task,
                    f"trainer.run_dir={tmp_path}/{limit}",
                    "checkpoint.save_every_minutes=1e-9",
                    "trainer.save_freq=4",
                    "trainer.total_steps=6",
                    "checkpoint.async_save=false",
                ),
            )
        except UserError as error:
            return str(error)
        return None

    assert run_ranks(train_with_failures, 2, 3, timeout=100) == [None] * 2
    root = tmp_path / "3/checkpoints"
    assert [step for step, _ in list_steps(root)] == [6, 4] and read_pointer(root, "latest") == 6
    assert not (root / "step_5").exists() and (root / "step_6/huggingface").exists()
    summary = json.loads((tmp_path / "3/summary.json").read_text())
    assert [failed["step"] for failed in summary["failed_saves"]] == [2, 3]
    log = (tmp_path / "3/logs/rank0.log").read_text()
    assert re.search(r"checkpoint: \S+/step_4, .*; step_1 deleted\n", log) and "a crash loses" not in log
    errors = run_ranks(train_with_failures, 2, 2, timeout=100)
    assert errors[0] == errors[1] and "2 saves in a row have failed, the last one: RuntimeError: planted" in errors[0]
    assert [step for step, _ in list_steps(tmp_path / "2/checkpoints")] == [1]
    assert not (tmp_path / "2/checkpoints/step_1/huggingface").exists()


def test_a_reward_function_may_change_the_working_directory(task: Path, tmp_path: Path, vllm_imported: None) -> None:
    """All paths are relative to the initial directory, and every checkpoint contains the tokenizer."""
    (tmp_path / "elsewhere").mkdir()
    shutil.copytree(task, tmp_path / "task")
    (tmp_path / "reward.py").write_text(
        "import os\ndef score(data_source, solution_str, ground_truth, extra_info):\n"
        f"    os.chdir({str(tmp_path / 'elsewhere')!r})\n    return len(solution_str) / 8.0\n"
    )

    def on_rank(rank: int, world_size: int) -> str | None:
        os.chdir(tmp_path)
        return train(
            rank,
            world_size,
            overrides_for(Path("task"), Path("run"), "trainer.save_freq=1", "reward.function=reward.py:score"),
        )

    assert run_ranks(on_rank, 1, timeout=150) == [None]
    assert list((tmp_path / "elsewhere").iterdir()) == [] and (tmp_path / "run/summary.json").exists()
    for step in (1, 2):
        for place in ("actor/config", "huggingface"):
            assert (tmp_path / f"run/checkpoints/step_{step}/{place}/tokenizer.model").exists()


def test_supervised_fine_tuning_goes_on(task: Path, tmp_path: Path) -> None:
    overrides = sft_overrides(task, *layout_overrides(1, 2, 1))
    whole, run_dir = tmp_path / "whole", tmp_path / "run"
    run_ranks(fine_tune, 2, [*overrides, f"trainer.run_dir={whole}"], timeout=100)
    overrides.append(f"trainer.run_dir={run_dir}")
    stop = Blow("update", entry=5, number=signal.SIGTERM)
    reasons = run_ranks(train_under, 2, overrides, stop, fine_tune, timeout=100)
    assert all(reason.startswith("preempted: SIGTERM after step 3") for reason in reasons)
    run_ranks(fine_tune, 2, overrides, timeout=100)
    assert read_records(run_dir) == read_records(whole) and len(read_records(whole)) == 4


@pytest.mark.slow
def test_a_run_goes_on_in_another_layout(task: Path, tmp_path: Path, vllm_imported: None) -> None:
    """From TP2 x PP2 to TP1 x DP4 and to TP4: the next step is the one that the first layout takes, up to rounding.

    That weights and optimizer states are equal bit by bit is in tests/checkpoint/test_resuming.py.
    """
    model = tmp_path / "model"
    save_tiny_model(model, "qwen2", **ENGINE_SIZES | dict(num_key_value_heads=4), vocab_size=16, num_hidden_layers=2)
    (model / "tokenizer.model").write_bytes((task / "model/tokenizer.model").read_bytes())
    common = [f"model.path={model}", "data.validation_files=[]"]
    overrides = overrides_for(task, tmp_path / "run", *common, *layout_overrides(2, 2, 1))
    assert run_ranks(train, 4, overrides, timeout=150) == [None] * 4
    for name, layout in (("same", (2, 2, 1)), ("dp4", (1, 1, 1)), ("tp4", (4, 1, 1))):
        more = [*common, "trainer.total_steps=3", f"checkpoint.resume={tmp_path}/run", *layout_overrides(*layout)]
        assert run_ranks(train, 4, overrides_for(task, tmp_path / name, *more), timeout=150) == [None] * 4
    reference, *others = (read_records(tmp_path / name) for name in ("same", "dp4", "tp4"))
    assert [record["step"] for record in reference] == [3]
    for (record,) in others:
        for key in ("policy/loss", "kl/mean", "policy/entropy", "reward/mean", "tokens/response", "policy/lr"):
            assert record[key] == pytest.approx(reference[0][key], abs=1e-5), key
        assert record["policy/ratio_max_deviation"] == 0.0


def write_step(run_dir: Path, step: int) -> Path:
    """A checkpoint of one file."""
    partial = run_dir / f"checkpoints/step_{step}.partial"
    partial.mkdir(parents=True)
    seal(partial, {"format": 1, "step": step}, [write_file(partial / "a", b"a")])
    point_at(run_dir / "checkpoints", "latest", step)
    return run_dir / f"checkpoints/step_{step}"


def choose(run_dir: Path, resume: str, is_known: bool = True) -> Path | str | None:
    def on_rank(rank: int, world_size: int) -> Path | str | None:
        run = Run(run_dir, "", 9, ObservabilityConfig(), rank)
        try:
            return choose_checkpoint(resume, run, is_known, dist.group.WORLD)
        except UserError as error:
            return str(error)

    first, second = run_ranks(on_rank, 2, timeout=30)
    assert first == second
    return first


def test_what_a_run_goes_on_from(tmp_path: Path) -> None:
    own, other = tmp_path / "own", tmp_path / "other"
    assert choose(own, "auto", False) is None and choose(own, "never", False) is None
    assert "already holds the metrics" in choose(own, "never")
    assert "there is no checkpoint" in choose(own, "must")
    foreign = write_step(other, 7)
    for path in (foreign, other, other / "checkpoints"):
        assert choose(own, str(path)) == foreign, "before its own first checkpoint a run begins where it is told"
    old, new = write_step(own, 1), write_step(own, 2)
    assert choose(own, "auto") == choose(own, "must") == choose(own, str(new)) == new
    assert choose(own, str(foreign)) == new, "a restarted job must not begin again"
    assert "step_1 is not the newest checkpoint of this run, step_2 is" in choose(own, str(old))
    (new / "a").write_bytes(b"b")
    assert choose(own, "auto") == old
    assert f"checkpoint skipped, it is not whole: {new}: a has another content" in (own / "logs/rank0.log").read_text()
    (old / "a").unlink()
    assert "none of the checkpoints is whole" in choose(own, "auto")


def test_changed_settings_are_named() -> None:
    before = "actor:\n  lr: 1.0\n  tp: 2\ndata:\n  files: [a]\n"
    assert describe_changes(before, before.replace("1.0", "2.0")) == ["actor.lr: 1.0 -> 2.0"]
