# SPDX-License-Identifier: Apache-2.0
"""Checkpoint directories: their location, validity and deletion; docs/checkpoints.md lists their files.

A checkpoint is renamed to its final name once it is durable, and `latest` moves after that. It is valid if its files
match their digests and cover all tensors (`find_gaps`); a run resumes from the newest valid one.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_rl.checkpoint.files import DIGESTS_FILE, find_damage, read_digests, sync
from megatron_rl.checkpoint.pieces import MAIN_PARAM, MOMENTS, STATE_PREFIX
from megatron_rl.checkpoint.torch_dist import ChunkReader
from megatron_rl.parallel.collectives import gather_objects, share_object
from megatron_rl.types import UserError
from megatron_rl.weights.families import ModelShape, is_layer_matrix
from megatron_rl.weights.megatron_global import megatron_global_placements
from megatron_rl.weights.shard_box import box_volume, full_box

MANIFEST_FILE = "manifest.json"
FORMAT_VERSION = 1
UNFINISHED = (".partial", ".replaced", ".deleting")


def list_steps(root: Path) -> list[tuple[int, Path]]:
    """List step and directory of every renamed checkpoint, newest first, except steps with only an HF export."""
    found = []
    for path in root.glob("step_*") if root.is_dir() else ():
        number = path.name.removeprefix("step_")
        if number.isdecimal() and any((path / name).exists() for name in (MANIFEST_FILE, DIGESTS_FILE)):
            found.append((int(number), path))
    return sorted(found, reverse=True)


def read_manifest(directory: Path, setting: str | None = None) -> dict[str, Any]:
    """Return the content of manifest.json; `setting` names the directory.

    Raises:
        UserError: it is missing, unreadable, or from a newer version of this package.
    """
    path = directory / MANIFEST_FILE
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        version = manifest["format"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        what = "there is none" if isinstance(error, FileNotFoundError) else f"{type(error).__name__}: {error}"
        raise UserError(
            f"{path} cannot be read: {what}",
            source=setting or str(directory),
            expected=f"{'auto, must, never or ' if setting else ''}a checkpoint of this package",
            hint="name a directory step_<N> or the output of tools/convert_hf_to_megatron.py",
        ) from None
    if version > FORMAT_VERSION:
        raise UserError(
            f"{path} has format {version}",
            source=str(directory),
            expected=f"at most {FORMAT_VERSION}",
            hint="a newer version of this package wrote it",
        )
    return manifest


def find_problems(directory: Path, part: int = 0, num_parts: int = 1, *, reads_all: bool = True) -> list[str]:
    """Describe the problems of a checkpoint, one line each; empty if it is valid.

    Args:
        part, num_parts: share of its bytes to check.
        reads_all: compare digests, not only sizes and coverage.
    """
    try:
        manifest, digests = read_manifest(directory), read_digests(directory)
    except UserError as error:
        return [error.found]
    sizes: dict[str, int] = manifest.get("files", {})
    problems = [f"{path} is not in {DIGESTS_FILE}" for path in sizes if path not in digests]
    loads, mine = [0] * num_parts, {}
    for path in sorted(digests, key=lambda path: -sizes.get(path, 0)):
        owner = loads.index(min(loads))
        loads[owner] += sizes.get(path, 1)
        if owner == part:
            mine[path] = digests[path]
    problems += find_damage(directory, mine, sizes, reads_all=reads_all)
    return problems + find_gaps(directory, manifest, part, num_parts)


def find_problems_together(directory: Path, group: dist.ProcessGroup) -> list[str]:
    """Run `find_problems` with the work shared by all ranks of `group`; collective."""
    problems = gather_objects(find_problems(directory, group.rank(), group.size()), group)
    return list(dict.fromkeys(line for lines in problems for line in lines))


def find_newest_valid(root: Path, group: dist.ProcessGroup) -> tuple[Path | None, list[str]]:
    """Return the newest valid checkpoint of a run, and the reason against each newer one; collective."""
    for path in root.glob("step_*.replaced") if group.rank() == 0 else ():
        if not path.with_suffix("").exists():  # `publish` was killed between its two renames
            with suppress(OSError):
                path.rename(path.with_suffix(""))
    found = share_object([path for _, path in list_steps(root)], group, dist.get_global_rank(group, 0))
    skipped: list[str] = []
    for directory in found:
        problems = find_problems_together(directory, group)
        if not problems:
            return directory, skipped
        further = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        skipped.append(f"{directory}: {problems[0]}{further}")
    return None, skipped


def point_at(root: Path, name: str, step: int) -> None:
    """Point the link `<root>/<name>` to the checkpoint of a step, atomically."""
    temporary = root / f".{name}"
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(f"step_{step}")
    temporary.replace(root / name)
    sync(root)


def read_pointer(root: Path, name: str) -> int | None:
    """Return the step that a link points to; `None` without a link."""
    try:
        number = (root / name).readlink().name.removeprefix("step_")
    except OSError:
        return None
    return int(number) if number.isdecimal() else None


def prune(root: Path, keep_last: int | None, keep_best: bool) -> list[int]:
    """Delete old checkpoints and remains of unfinished ones, and return the deleted steps.

    Checkpoints that a timer wrote are deleted despite `keep_last`. The target of `latest` stays. Checkpoints newer than
    `latest` are damaged: they stay, do not count towards `keep_last`, and the run replaces them at their step.
    """
    for path in root.glob("step_*"):
        if path.suffix in UNFINISHED:
            shutil.rmtree(path, ignore_errors=True)
    latest = read_pointer(root, "latest")
    kept = {latest, read_pointer(root, "best") if keep_best else None}
    gone = []
    steps = [(step, path) for step, path in list_steps(root) if latest is None or step <= latest]
    passing = []
    for step, path in steps:
        with suppress(UserError):
            if step != latest and read_manifest(path).get("is_passing"):
                passing.append((step, path))
    steps = [item for item in steps if item not in passing]
    for step, path in passing + (steps[max(keep_last, 1) :] if keep_last is not None else []):
        if step not in kept:
            doomed = path.with_name(path.name + ".deleting")  # a partly deleted checkpoint must not look complete
            path.rename(doomed)
            shutil.rmtree(doomed)
            gone.append(step)
    return gone


def find_step(path: Path) -> Path:
    """Return the step directory for a path: itself, or the latest of a run."""
    for candidate in (path / "latest", path / "checkpoints" / "latest"):
        if candidate.exists():
            return candidate.resolve()
    return path.resolve()


def find_gaps(directory: Path, manifest: Mapping[str, Any], part: int = 0, num_parts: int = 1) -> list[str]:
    """List tensors, elements and random states that a training checkpoint lacks or has twice, a line each.

    Only every `num_parts`-th role from role `part` on is checked; manifests without roles have no gaps.
    """
    has_optimizer, gaps = bool(manifest.get("has_optimizer")), []
    for name, role in list(manifest.get("roles", {}).items())[part::num_parts]:
        try:
            gaps += [f"{name}: {gap}" for gap in _find_role_gaps(directory / name, role, has_optimizer)]
        except (UserError, KeyError, TypeError) as error:  # unreadable index, or no model in the manifest
            gaps.append(f"{name}: {error.found if isinstance(error, UserError) else repr(error)}")
        if has_optimizer:
            files = (f"rng/rank_{rank}.safetensors" for rank in range(role["layout"]["world_size"]))
            gaps += [f"{file} was never written" for file in files if file not in manifest["files"]]
    return list(dict.fromkeys(gaps))


def _find_role_gaps(directory: Path, role: Mapping[str, Any], has_optimizer: bool) -> Iterator[str]:
    reader = ChunkReader(directory)
    for key, shape in _list_tensors(role, has_optimizer).items():
        found = reader.tensors.get(key, (None,))[0]
        if found != shape:
            yield f"{key} {'was never written' if found is None else f'is {list(found)} instead of {list(shape)}'}"
            continue
        whole = full_box(shape)
        boxes = [chunk.box for chunk in reader.chunks(key, whole)]
        # Corners shared by an even number of boxes cancel out. If only the corners of the whole remain, every element
        # is covered an odd number of times, hence once. (Comparing all pairs takes minutes.)
        corners: set[tuple[int, ...]] = set()
        for box in boxes:
            corners ^= set(product(*box))
        if (covered := sum(map(box_volume, boxes))) != box_volume(whole):
            yield f"{key} has {covered:,} of {box_volume(whole):,} elements"
        elif corners != set(product(*whole)):
            yield f"{key} has some elements twice, and others not at all"


def _list_tensors(role: Mapping[str, Any], has_optimizer: bool) -> dict[str, tuple[int, ...]]:
    from megatron_rl.weights.adapters import read_shape

    shape = read_shape(role["model"])
    tensors = {place.key: place.shape for places in megatron_global_placements(shape).values() for place in places}
    if has_optimizer:
        is_muon, main = role.get("optimizer") == "muon", () if role["dtype"] == "float32" else (MAIN_PARAM,)
        for name, size in shape.logical_tensors().items():
            if isinstance(shape, ModelShape) and shape.is_router_bias(name):
                continue
            moments = MOMENTS[:1] if is_muon and is_layer_matrix(name, size) else MOMENTS
            moments = moments if role["optimizer_steps"] else ()
            tensors |= {f"{STATE_PREFIX}{state}.{name}": size for state in (*moments, *main)}
    return tensors
