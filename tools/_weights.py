# SPDX-License-Identifier: Apache-2.0
"""Weights of a policy or role below the paths that tools accept."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megatron_rl.checkpoint.directory import MANIFEST_FILE, UNFINISHED, read_manifest
from megatron_rl.checkpoint.files import find_model_files
from megatron_rl.types import UserError


@dataclass(frozen=True)
class FoundWeights:
    """Weights of a policy in HF or Megatron format; step and version of the run that wrote them, or 0."""

    path: Path
    step: int = 0
    policy_version: int = 0


def resolve_weights(path: Path, role: str = "actor") -> Path:
    """Return the distributed checkpoint for a path: itself, or that role in a step or run.

    Raises:
        UserError: the path contains no distributed checkpoint.
    """
    for candidate in (path, path / role, path / "latest" / role, path / "checkpoints" / "latest" / role):
        if (candidate / "metadata.json").is_file() and (candidate / ".metadata").is_file():
            return candidate
    raise UserError(
        f"{path} holds no Megatron distributed checkpoint",
        source=str(path),
        expected="the output of tools/convert_hf_to_megatron.py, a directory step_<N>, or a run directory",
        hint="an unfinished one ends in .partial" if path.name.endswith(UNFINISHED) else "check for a typo",
    )


def find_weights(path: str | Path) -> FoundWeights:
    """Find the policy for a path: a model in HF format, a converted checkpoint, step_<N>, or a run (its latest).

    Raises:
        UserError: the directory contains no weights in these formats.
    """
    path = Path(path)
    if path.is_dir() and not (find_model_files(path) / "config.json").is_file():
        path = resolve_weights(path)
    step = path.resolve().parent
    if not (step.name.startswith("step_") and (step / MANIFEST_FILE).is_file()):
        return FoundWeights(path)
    manifest = read_manifest(step)
    return FoundWeights(path, manifest["step"], manifest["policy_version"])
