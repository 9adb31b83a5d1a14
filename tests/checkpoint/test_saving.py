# SPDX-License-Identifier: Apache-2.0
"""Saving: only whole checkpoints get a name, then `latest` moves, then old ones go; a failed write harms nothing.

Failures are the kernel's own (a limit on file sizes, a directory of another user, a killed process) or planted in the
writer. Not covered: a disk that accepts a write and loses it later.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import re
import resource
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from actor_runs import Case, build_actor
from checkpoint_runs import join_pieces, make_content, make_saver, resume, snapshot
from distributed import run_ranks
from megatron_rl.checkpoint import directory, saving
from megatron_rl.checkpoint.directory import find_newest_valid, find_problems, list_steps, read_pointer
from megatron_rl.checkpoint.resuming import create_states
from megatron_rl.checkpoint.saving import SaveOutcome
from megatron_rl.checkpoint.torch_dist import ChunkWriter
from megatron_rl.config.schema import ActorConfig, DataConfig, ModelConfig, RunConfig
from megatron_rl.observability.progress import open_rank_log
from megatron_rl.run.checkpoints import actor_export
from megatron_rl.training.roles.actor import Actor
from megatron_rl.types import UserError
from shards import find_differences
from tiny_models import save_tiny_model


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    save_tiny_model(directory, "llama", num_hidden_layers=2)
    (directory / "tokenizer.model").write_bytes(b"pieces")
    return directory


def step(actor: Actor) -> None:
    """Imitate an optimizer step: other weights, one more step."""
    create_states(actor, actor.optimizer.steps + 1)
    for param in actor.model.params.values():
        param.add_(1.0)
    actor.optimizer.count_step()


def _save_four(rank: int, world_size: int, path: Path, root: Path, is_async: bool) -> list[SaveOutcome]:
    actor, outcomes = build_actor(Case(world_size), path), []
    saver = make_saver(root, outcomes, async_save=is_async, keep_last=2)
    for number in (1, 2, 3, 4):
        with torch.no_grad():
            step(actor)
        saver.save(make_content(path, number, number), {"actor": actor}, is_best=number == 1)
        if saver.pending is not None:
            saver.poll()
    saver.wait()
    assert len(outcomes) == 4  # nothing is pending
    return outcomes


@pytest.mark.parametrize("is_async", [False, True])
def test_old_ones_go_the_best_and_the_newest_stay(is_async: bool, path: Path, tmp_path: Path):
    (tmp_path / "step_7.partial").mkdir()  # left by a run that was killed
    outcomes = run_ranks(_save_four, 2, path, tmp_path, is_async)
    assert [o.error for o in outcomes[0]] == [None] * 4 and [o.step for o in outcomes[1]] == [1, 2, 3, 4]
    assert [o.deleted_steps for o in outcomes[1]] == [(), (), (), (2,)]  # 1 is the best
    assert [number for number, _ in list_steps(tmp_path)] == [4, 3, 1]
    assert read_pointer(tmp_path, "latest") == 4 and read_pointer(tmp_path, "best") == 1
    assert {entry.name for entry in tmp_path.iterdir()} == {"step_1", "step_3", "step_4", "latest", "best"}
    assert all(find_problems(directory) == [] for _, directory in list_steps(tmp_path))
    manifest = json.loads((tmp_path / "latest/manifest.json").read_text())
    assert manifest["num_bytes"] == outcomes[0][3].num_bytes == sum(manifest["files"].values())
    assert manifest["packages"]["megatron-core"] and manifest["roles"]["actor"]["layout"]["world_size"] == 2
    assert manifest["policy_version"] == 4 and manifest["roles"]["actor"]["optimizer_steps"] == 4
    check = subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=tmp_path / "latest")
    assert check.returncode == 0
    # Each rank wrote about as much as the other.
    sizes = [(tmp_path / f"latest/actor/__{rank}_0.distcp").stat().st_size for rank in (0, 1)]
    assert max(sizes) < 1.1 * min(sizes)


def test_what_is_saved_is_the_state_of_that_moment(path: Path, tmp_path: Path):
    """The weights change while the checkpoint is being written; an export lies in the same directory."""

    def on_rank(rank: int, world_size: int) -> Any:
        actor, outcomes, exported = build_actor(Case(2), path), [], []
        saver = make_saver(tmp_path, outcomes, async_save=True)
        with torch.no_grad():
            step(actor)
            taken = snapshot(actor)
            saver.save(make_content(path), {"actor": actor}, export=exported.append)
            step(actor)
        saver.wait()
        resume(actor, path, tmp_path / "step_1")
        return taken, snapshot(actor), actor.optimizer.steps, exported

    ranks = run_ranks(on_rank, 2)
    assert find_differences(join_pieces([r[1] for r in ranks]), join_pieces([r[0] for r in ranks])) == []
    assert [r[2] for r in ranks] == [1, 1] and ranks[1][3] == [tmp_path / "step_1.partial/huggingface"]


def _limit_files(num_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


@pytest.mark.parametrize("where,is_async", [("rank 1", False), ("rank 1", True), ("index", True)])
def test_a_full_disk_is_reported_and_the_old_checkpoint_stays(where: str, is_async: bool, path: Path, tmp_path: Path):
    """A file may not become larger, on one rank only; the run continues and the next save works."""

    def on_rank(rank: int, world_size: int) -> list[SaveOutcome]:
        actor, outcomes = build_actor(Case(2), path), []
        saver = make_saver(tmp_path, outcomes, async_save=is_async, keep_last=1)
        saver.save(make_content(path, 1, 0), {"actor": actor})
        saver.wait()
        files = sorted(entry.name for entry in (tmp_path / "step_1").rglob("*"))
        if where == "rank 1" and rank == 1:
            _limit_files(50_000)
        saver.save(make_content(path, 2, 0), {"actor": actor})
        if where == "index" and rank == 0:
            saver.pending[1].join()  # its own files are there
            _limit_files(1000)
        saver.wait()
        _limit_files(resource.RLIM_INFINITY)
        assert read_pointer(tmp_path, "latest") == 1
        assert files == sorted(entry.name for entry in (tmp_path / "latest").rglob("*"))
        dist.barrier()
        saver.save(make_content(path, 3, 0), {"actor": actor})
        saver.wait()
        return outcomes

    for outcomes in run_ranks(on_rank, 2):
        assert [o.error is None for o in outcomes] == [True, False, True]
        error = outcomes[1].error
        assert "the disk is full or a file would be too large" in str(error) and "nothing old was touched" in str(error)
        assert outcomes[2].deleted_steps == (1,)
    assert [number for number, _ in list_steps(tmp_path)] == [3]
    assert not list(tmp_path.glob("*.partial"))


def _fail(error: BaseException) -> Any:
    def raise_it(*_: Any, **__: Any) -> None:
        raise error

    return raise_it


FAULTS = {
    "thread": (True, ChunkWriter, "add", RuntimeError("planted"), "RuntimeError: planted"),
    "pickling": (False, torch, "save", pickle.PicklingError("planted"), "PicklingError: planted"),
    "copy": (True, saving, "copy_to_host", MemoryError("planted"), "out of memory"),
    "silent": (True, ChunkWriter, "add", SystemExit(), "parts are missing: actor: "),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_whatever_a_rank_raises_is_the_error_of_the_save(fault: str, path: Path, tmp_path: Path):
    """On one rank, in its thread or before it; nothing gets a name, nothing is deleted, the next save works."""
    is_async, owner, name, error, found = FAULTS[fault]

    def on_rank(rank: int, world_size: int) -> list[SaveOutcome]:
        actor, outcomes, real = build_actor(Case(2), path), [], getattr(owner, name)
        open_rank_log(tmp_path, rank)
        saver = make_saver(tmp_path / "checkpoints", outcomes, async_save=is_async, keep_last=1)
        for number in (1, 2, 3):
            if rank == 1:
                setattr(owner, name, _fail(error) if number == 2 else real)
            saver.save(make_content(path, number, 0), {"actor": actor})
            saver.wait()
            assert read_pointer(tmp_path / "checkpoints", "latest") == (1, 1, 3)[number - 1]
            dist.barrier()
        return outcomes

    for outcomes in run_ranks(on_rank, 2):
        assert [o.error is None for o in outcomes] == [True, False, True] and outcomes[2].deleted_steps == (1,)
        assert found in str(outcomes[1].error)
    assert [number for number, _ in list_steps(tmp_path / "checkpoints")] == [3]
    assert not list((tmp_path / "checkpoints").glob("*.partial"))
    if fault != "silent":
        assert "planted" in str(outcomes[1].error) or fault == "copy"
        assert "Traceback" in (tmp_path / "logs/rank1.log").read_text()


def _drop_last_chunk(parts: Any) -> None:
    parts[1][0]["actor"].pop()


def _drop_random_numbers(parts: Any) -> None:
    parts[1][1].pop()


def _repeat_a_chunk(parts: Any) -> None:
    """As many elements as there should be, one box twice and another not at all."""
    chunks = parts[0][0]["actor"]
    by_size: dict[Any, list[Any]] = {}
    for chunk in chunks:
        by_size.setdefault((chunk.key, tuple(stop - start for start, stop in chunk.box)), []).append(chunk)
    first, second = next(found for found in by_size.values() if len(found) > 1)[:2]
    chunks[chunks.index(second)] = dataclasses.replace(first, box=(first.box[0], *first.box[1:]), start=second.start)


HOLES = {
    "chunk": (_drop_last_chunk, r"actor: \S+ (was never written|has [\d,]+ of [\d,]+ elements)"),
    "random-numbers": (_drop_random_numbers, r"rng/rank_1.safetensors was never written"),
    "all": (lambda parts: [part[0].clear() for part in parts], r"actor: embedding.word_embeddings.weight was never"),
    "twice": (_repeat_a_chunk, r"actor: \S+ has (some elements twice|[\d,]+ of [\d,]+ elements)"),
}


@pytest.mark.parametrize("hole", HOLES)
def test_what_does_not_cover_its_tensors_gets_no_name_and_is_not_resumed_from(hole: str, path: Path, tmp_path: Path):
    """All digests are right; the second checkpoint is written once with the check and once as if without it."""
    change, found = HOLES[hole]

    def on_rank(rank: int, world_size: int) -> Any:
        actor, outcomes, real = build_actor(Case(2), path), [], saving.finish_directory
        with torch.no_grad():
            step(actor)
        saver = make_saver(tmp_path, outcomes, keep_last=1)

        def finish(partial: Path, manifest: Any, content: Any, parts: Any) -> int:
            change(parts)
            return real(partial, manifest, content, parts)

        saver.save(make_content(path, 1), {"actor": actor})
        saving.finish_directory = finish
        saver.save(make_content(path, 2), {"actor": actor})
        saving.prune, directory.find_problems = lambda *_: [], lambda *_, **__: []
        saver.save(make_content(path, 2), {"actor": actor})
        directory.find_problems = find_problems  # what reads it has the check
        return outcomes, find_newest_valid(tmp_path, dist.group.WORLD)

    (outcomes, newest), (others, same) = run_ranks(on_rank, 2)
    assert [o.error is None for o in outcomes] == [o.error is None for o in others] == [True, False, True]
    assert re.search(found, str(outcomes[1].error)) and outcomes[1].deleted_steps == ()
    assert newest == same and newest[0] == tmp_path / "step_1"
    assert len(newest[1]) == 1 and re.search(found, newest[1][0])


def test_an_export_that_does_not_fit_is_reported(path: Path, tmp_path: Path):
    """safetensors wraps the system's error in one of its own."""

    def on_rank(rank: int, world_size: int) -> SaveOutcome:
        actor, outcomes = build_actor(Case(), path), []
        _limit_files(50_000)
        make_saver(tmp_path, outcomes).save(
            make_content(path, 2, 0),
            {"actor": actor},
            export=actor_export(
                RunConfig(
                    model=ModelConfig(path=str(path)),
                    data=DataConfig(train_files=[], train_batch_size=1),
                    actor=ActorConfig(),
                ),
                actor.model,
            ),
        )
        _limit_files(resource.RLIM_INFINITY)
        return outcomes[0]

    (outcome,) = run_ranks(on_rank, 1)
    assert "the disk is full or a file would be too large: File too large" in str(outcome.error)
    assert "nothing old was touched" in str(outcome.error) and list(tmp_path.iterdir()) == []


def test_permission_denied_is_reported(path: Path, tmp_path: Path):
    """As a user who may not write there (root may write everywhere)."""

    def on_rank(rank: int, world_size: int) -> list[SaveOutcome]:
        actor, outcomes = build_actor(Case(2), path), []
        root, content, user = tmp_path / "checkpoints", make_content(path), os.geteuid()
        if rank == 0:
            root.mkdir(mode=0o500)
        dist.barrier()
        if user == 0:
            os.seteuid(65534)
        try:
            make_saver(root, outcomes).save(content, {"actor": actor})
        finally:
            os.seteuid(user)
        return outcomes

    for (outcome,) in run_ranks(on_rank, 2):
        assert "it cannot be written: Permission denied" in str(outcome.error)
        assert "step_1.partial" in str(outcome.error)


def test_a_process_killed_while_it_writes_leaves_the_older_one(path: Path, tmp_path: Path):
    """kill -9 in the middle of a file: no name, no pointer; the next run finds the older one and tidies up."""

    def killed(rank: int, world_size: int) -> None:
        actor, outcomes = build_actor(Case(), path), []
        saver = make_saver(tmp_path, outcomes)
        saver.save(make_content(path, 1, 0), {"actor": actor})
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
        signal.signal(signal.SIGXFSZ, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        saver.save(make_content(path, 2, 0), {"actor": actor})

    with pytest.raises(AssertionError, match="SIGKILL"):
        run_ranks(killed, 1)
    assert (tmp_path / "step_2.partial/actor/__0_0.distcp").is_file() and read_pointer(tmp_path, "latest") == 1

    def next_run(rank: int, world_size: int) -> Any:
        found = find_newest_valid(tmp_path, dist.group.WORLD)
        actor = build_actor(Case(), path)
        make_saver(tmp_path, []).save(make_content(path, 2, 0), {"actor": actor})
        return found

    (found,) = run_ranks(next_run, 1)
    assert found == (tmp_path / "step_1", [])
    assert find_problems(tmp_path / "step_2") == [] and not list(tmp_path.glob("*.partial"))


def test_the_same_step_again_replaces_it(path: Path, tmp_path: Path):
    def on_rank(rank: int, world_size: int) -> None:
        actor = build_actor(Case(), path)
        saver = make_saver(tmp_path, [])
        saver.save(make_content(path), {"actor": actor})
        (tmp_path / "step_1/actor/__0_0.distcp").unlink()
        assert find_problems(tmp_path / "step_1") == ["actor/__0_0.distcp is missing"]
        saver.save(make_content(path), {"actor": actor})

    run_ranks(on_rank, 1)
    assert find_problems(tmp_path / "step_1") == []
    assert {entry.name for entry in tmp_path.iterdir()} == {"step_1", "latest"}


def test_a_state_that_is_no_json_is_the_caller_s_mistake(path: Path, tmp_path: Path):
    def on_rank(rank: int, world_size: int) -> None:
        content = make_content(path)
        content.state["tensor"] = torch.zeros(1)
        make_saver(tmp_path, []).save(content, {"actor": build_actor(Case(), path)})

    with pytest.raises(AssertionError, match="not JSON serializable"):
        run_ranks(on_rank, 1)


def test_weights_alone_cannot_be_resumed(path: Path, tmp_path: Path):
    def on_rank(rank: int, world_size: int) -> str:
        actor = build_actor(Case(), path)
        make_saver(tmp_path, []).save(make_content(path), {"actor": actor}, with_optimizer=False)
        with pytest.raises(UserError) as caught:
            resume(actor, path, tmp_path / "step_1")
        return str(caught.value)

    assert "the checkpoint has weights only" in run_ranks(on_rank, 1)[0]
    assert not (tmp_path / "step_1/rng").exists() and find_problems(tmp_path / "step_1") == []
