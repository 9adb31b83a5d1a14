# SPDX-License-Identifier: Apache-2.0
"""Whole and damaged checkpoints of a run, the damage, and the choice of checkpoints to delete; without a model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch.distributed as dist

from distributed import run_ranks
from megatron_rl.checkpoint.directory import (
    find_newest_valid,
    find_problems,
    list_steps,
    point_at,
    prune,
    read_manifest,
    read_pointer,
    seal,
)
from megatron_rl.checkpoint.files import read_digests, write_file
from megatron_rl.types import UserError
from tools._weights import resolve_weights


def write_step(root: Path, step: int) -> Path:
    """A checkpoint of three files."""
    partial = root / f"step_{step}.partial"
    (partial / "actor").mkdir(parents=True)
    files = [
        write_file(partial / name, bytes([step]) * size)
        for name, size in (("actor/a", 100), ("actor/b", 200), ("c", 5))
    ]
    seal(partial, {"format": 1, "step": step}, files)
    return root / f"step_{step}"


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[50] ^= 8
    path.write_bytes(content)


DAMAGES = {
    "missing": (lambda d: (d / "actor/a").unlink(), "actor/a is missing"),
    "truncated": (lambda d: (d / "actor/b").write_bytes(b"x" * 20), "actor/b has 20 bytes, 200 were written"),
    "flipped": (lambda d: _flip(d / "actor/b"), "actor/b has another content than was written (SHA-256 "),
    "manifest": (lambda d: (d / "manifest.json").write_text("{"), "manifest.json cannot be read: JSONDecodeError"),
    "other-manifest": (
        lambda d: (d / "manifest.json").write_text('{"format": 1}'),
        "manifest.json has another content",
    ),
    "no-manifest": (lambda d: (d / "manifest.json").unlink(), "manifest.json cannot be read: there is none"),
    "digests": (lambda d: (d / "SHA256SUMS").unlink(), "SHA256SUMS is missing"),
    "digest": (lambda d: (d / "SHA256SUMS").write_text("what?"), "SHA256SUMS cannot be read"),
    "short": (
        lambda d: (d / "SHA256SUMS").write_text(
            "".join(line for line in (d / "SHA256SUMS").open() if "actor/a" not in line)
        ),
        "actor/a is not in SHA256SUMS",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_the_newest_whole_checkpoint_is_found_and_damage_is_named(damage: str, tmp_path: Path):
    """Three ranks look at different files and agree."""
    for step in (9, 10, 11):
        write_step(tmp_path, step)
    (tmp_path / "step_12.partial").mkdir()
    (tmp_path / "step_8/huggingface").mkdir(parents=True)  # an export alone is no checkpoint
    change, found = DAMAGES[damage]
    change(tmp_path / "step_11")
    for newest, skipped in run_ranks(lambda rank, size: find_newest_valid(tmp_path, dist.group.WORLD), 3):
        assert newest == tmp_path / "step_10"
        assert len(skipped) == 1 and skipped[0].startswith(f"{tmp_path / 'step_11'}: ")
        assert found in skipped[0]


def test_nothing_valid(tmp_path: Path):
    write_step(tmp_path, 1)
    (tmp_path / "step_1/c").unlink()
    ((newest, skipped),) = run_ranks(lambda rank, size: find_newest_valid(tmp_path, dist.group.WORLD), 1)
    assert newest is None and len(skipped) == 1
    (result,) = run_ranks(lambda rank, size: find_newest_valid(tmp_path / "absent", dist.group.WORLD), 1)
    assert result == (None, [])


def test_what_a_kill_leaves_between_two_renames_is_found(tmp_path: Path):
    """`publish` sets the old directory of a step aside before it names the new one."""
    write_step(tmp_path, 1)
    write_step(tmp_path, 3).rename(tmp_path / "step_3.replaced")
    for newest, skipped in run_ranks(lambda rank, size: find_newest_valid(tmp_path, dist.group.WORLD), 2):
        assert newest == tmp_path / "step_3" and not skipped


def test_shares_of_the_work_cover_all_files(tmp_path: Path):
    directory = write_step(tmp_path, 1)
    for name in read_digests(directory):
        if name != "manifest.json":
            (directory / name).unlink()
    parts = [find_problems(directory, part, 3) for part in range(3)]
    assert sorted(line for lines in parts for line in lines) == sorted(find_problems(directory))
    assert len(find_problems(directory)) == 3 and max(map(len, parts)) == 1


def test_a_newer_format_is_refused(tmp_path: Path):
    directory = write_step(tmp_path, 1)
    (directory / "manifest.json").write_text(json.dumps({"format": 99}))
    with pytest.raises(UserError, match="has format 99"):
        read_manifest(directory)


@pytest.mark.parametrize(
    "keep_last,keep_best,left",
    [
        (None, True, [5, 4, 3, 2, 1]),
        (2, True, [5, 4, 2]),
        (2, False, [5, 4]),
        (0, False, [5]),
        (9, True, [5, 4, 3, 2, 1]),
    ],
)
def test_pruning(keep_last: int | None, keep_best: bool, left: list[int], tmp_path: Path):
    for step in (1, 2, 3, 4, 5):
        write_step(tmp_path, step)
    point_at(tmp_path, "latest", 5)
    point_at(tmp_path, "best", 2)
    (tmp_path / "step_0.deleting").mkdir()
    gone = prune(tmp_path, keep_last, keep_best)
    assert [step for step, _ in list_steps(tmp_path)] == left and sorted(gone + left) == [1, 2, 3, 4, 5]
    assert not (tmp_path / "step_0.deleting").exists()


def test_damaged_checkpoints_do_not_count(tmp_path: Path):
    """The run continued from 5 because 8 is damaged: 8 must not make it lose 5 or 6."""
    for step in (4, 5, 6, 8):
        write_step(tmp_path, step)
    point_at(tmp_path, "latest", 6)
    assert prune(tmp_path, 2, True) == [4] and [step for step, _ in list_steps(tmp_path)] == [8, 6, 5]


def test_pointers(tmp_path: Path):
    assert read_pointer(tmp_path, "latest") is None
    point_at(tmp_path, "latest", 1)
    point_at(tmp_path, "latest", 22)
    assert read_pointer(tmp_path, "latest") == 22 and (tmp_path / "latest").readlink() == Path("step_22")


def test_weights_are_found_in_what_a_user_names(tmp_path: Path):
    weights = tmp_path / "run/checkpoints/step_3/actor"
    weights.mkdir(parents=True)
    (weights / ".metadata").touch()
    (weights / "metadata.json").touch()
    point_at(tmp_path / "run/checkpoints", "latest", 3)
    for path in (weights, weights.parent, tmp_path / "run/checkpoints", tmp_path / "run"):
        assert resolve_weights(path).resolve() == weights
    with pytest.raises(UserError, match="holds no Megatron distributed checkpoint"):
        resolve_weights(tmp_path / "run", "critic")
