# SPDX-License-Identifier: Apache-2.0
"""Capsules: reading, the config of a replay, and restoring the state."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.numpy import load_file

from megatron_rl.capsule.recorder import CAPSULE_KIND, ROLLOUTS_FILE, VALUES_FILE, Fingerprints, Section
from megatron_rl.checkpoint.directory import find_problems, find_problems_together, read_manifest
from megatron_rl.checkpoint.files import CONFIG_DIR
from megatron_rl.checkpoint.pieces import SavedRole
from megatron_rl.checkpoint.resuming import ResumedRun, load_training_state
from megatron_rl.config.schema import LayoutConfig, RunConfig
from megatron_rl.config.sections import PlacementConfig
from megatron_rl.parallel.collectives import share_object
from megatron_rl.run.loading import load_config
from megatron_rl.types import UserError
from megatron_rl.weights.model_config import load_model_shape
from tools.replay.comparing import compare_sections
from tools.replay.recording import CapturedRollouts, StoredRole, decode_sections, read_rollouts

_UNUSED_SECTIONS = ("reward", "reward_model", "hybrid", "checkpoint", "observability")
_TRAINED = ("actor", "critic")
# Settings besides LayoutConfig that determine the order of a role's sums.
_ORDER = ("overlap_grad_reduce", "step_mode", "bucket_tokens")


@dataclass(frozen=True)
class Capsule:
    """A capsule in memory.

    Attributes:
        directory: `<run_dir>/capsules/step_<N>`.
        sections: recorded numbers.
    """

    directory: Path
    manifest: Mapping[str, Any]
    sections: list[Section]
    recording: CapturedRollouts

    @property
    def step(self) -> int:
        """Return the captured step."""
        return self.manifest["step"]

    @property
    def state(self) -> Path:
        """Return the checkpoint that the step began with."""
        return self.directory / self.manifest["state"]

    def read_parameter(self, section: str, name: str) -> torch.Tensor:
        """Read a logical tensor or optimizer state from the state's files; `section` begins with the role."""
        return self.open_role(section).read(name)

    def open_role(self, section: str) -> StoredRole:
        """Open the state's files of the role that `section` begins with."""
        role = section.split()[0]
        directory = self.state / role
        return StoredRole(
            directory, load_model_shape(directory / CONFIG_DIR, head="score" if role == "critic" else "lm")
        )


def open_capsule(directory: Path, *, allow_changed: bool = False) -> Capsule:
    """Read a capsule; `restore_state` checks its state.

    Args:
        allow_changed: accept files that differ from their digests.

    Raises:
        UserError: an incomplete capsule, or a changed file.
    """
    if not directory.is_dir():
        partial = directory.with_name(directory.name + ".partial")
        raise UserError(
            f"there is no {directory}" + (", only an unfinished one" if partial.is_dir() else ""),
            source=str(directory),
            expected="a directory <run_dir>/capsules/step_<N>",
            hint="trainer.capture_step=N writes one; one that ends in .partial was cut off: capture the step again",
        )
    problems = [] if allow_changed else find_problems(directory)
    if problems:
        raise UserError(
            "; ".join(problems[:3]),
            source=str(directory),
            expected="the capsule as it was written",
            hint="copy it again; --allow-changed replays the step with the present files and reports the differences",
        )
    manifest = read_manifest(directory)
    if manifest.get("kind") != CAPSULE_KIND:
        raise UserError(
            f"{directory} holds something else: {manifest.get('kind')}",
            source=str(directory),
            expected="a capsule",
            hint="trainer.capture_step=N writes one to <run_dir>/capsules/step_<N>",
        )
    try:
        arrays = load_file(directory / VALUES_FILE)
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"{VALUES_FILE} cannot be read: {error}",
            source=str(directory),
            expected="the file as it was written",
            hint="copy the capsule again",
        ) from None
    return Capsule(
        directory, manifest, decode_sections(manifest["sections"], arrays), read_rollouts(directory / ROLLOUTS_FILE)
    )


def make_config(capsule: Capsule, run_dir: Path, overrides: Sequence[str]) -> RunConfig:
    """Build the config of a replay: no engine, rewards, data files or saving.

    Args:
        run_dir: temporary.
        overrides: `section.key=value`, such as another layout.

    Raises:
        UserError: a bad override, or a layout that does not fit.
    """
    recorded = capsule.manifest["config"]
    sections = {name: dict(values) for name, values in recorded.items() if name not in _UNUSED_SECTIONS}
    sections["rollout"] = {
        "engine": "hf",
        "n": recorded["rollout"]["n"],
        "temperature": recorded["rollout"]["temperature"],
    }
    sections["data"] |= {
        "train_files": [str(capsule.directory / ROLLOUTS_FILE)],
        "weights": None,
        "shuffle": True,
        "validation_files": [],
        "prompt_key": "prompt",
        "answer_key": "answer",
        "overlong_prompts": "truncate",
    }
    sections["trainer"] |= {
        "total_steps": capsule.manifest["plan"]["total_steps"],
        "run_dir": str(run_dir),
        "capture_step": None,
        "test_freq": 0,
        "val_before_train": False,
        "best_metric": None,
        "save_freq": None,
        "profile_steps": [],
    }
    sections["observability"] = {"trackers": []}
    return load_config(sections, overrides).config


def is_same_layout(capsule: Capsule, config: RunConfig, world_size: int) -> bool:
    """Whether the replay sums in the recorded order: equal ranks, layout, packing and kind of device."""
    manifest = capsule.manifest
    if (world_size, "cuda" if torch.cuda.is_available() else "cpu") != (manifest["world_size"], manifest["device"]):
        return False
    if dataclasses.asdict(config.placement) != manifest["config"].get(
        "placement", dataclasses.asdict(PlacementConfig())
    ):
        return False
    names = (*(item.name for item in dataclasses.fields(LayoutConfig)), *_ORDER)
    return all(
        getattr(getattr(config, role), name) == manifest["config"][role][name]
        for role in _TRAINED
        for name in names
        if name in manifest["config"][role]  # else the actor's decides
    )


def restore_state(
    capsule: Capsule, roles: Mapping[str, SavedRole], group: dist.ProcessGroup, *, allow_changed: bool
) -> ResumedRun:
    """Restore the state that the step began with; collective.

    Raises:
        UserError: the state was changed (with the changed tensors), or does not fit; on every rank.
    """
    problems = [] if allow_changed else find_problems_together(capsule.state, group)
    if problems:
        named = share_object(_name_changed(capsule) if group.rank() == 0 else None, group)
        raise UserError(
            "; ".join([*problems[:3], *named]),
            source=str(capsule.state),
            expected="the state as it was written",
            hint="copy it again; --allow-changed replays the step with the present files and compares the results",
        )
    return load_training_state(capsule.state, roles, side_files={}, group=group, is_verified=True)


def _name_changed(capsule: Capsule) -> list[str]:
    """Describe the first three parameters whose files differ from the record."""

    def read_again(section: Section) -> Section:
        assert isinstance(section.content, Fingerprints), "the state holds parameters"
        role = capsule.open_role(section.name)
        return dataclasses.replace(section, content=role.fingerprint(section.content.shapes))

    try:
        before = [section for section in capsule.sections if section.name.endswith(" before")]
        found = [read_again(section) for section in before]
    except UserError as error:
        return [error.found]
    rows = compare_sections(before, found, tolerance=None, read=capsule.read_parameter)
    return [str(difference) for row in rows for difference in row.differences][:3]
