# SPDX-License-Identifier: Apache-2.0
"""Resuming from a training checkpoint, in any layout.

Everything is checked before any state changes: file digests, model, vocabulary, dtype.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file

from megatron_rl.checkpoint.directory import (
    RECIPE_FILE,
    check_model,
    describe_role,
    find_problems_together,
    read_manifest,
)
from megatron_rl.checkpoint.files import CONFIG_DIR, check_vocabulary
from megatron_rl.checkpoint.pieces import MOMENTS, SavedRole, list_state_shards, make_state_pieces, make_weight_pieces
from megatron_rl.checkpoint.torch_dist import ChunkReader
from megatron_rl.parallel.collectives import failing_together, gather_objects, restore_rng
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.types import UserError
from megatron_rl.weights.megatron_layout import megatron_global_placements


@dataclass(frozen=True)
class ResumedRun:
    """State from which a run continues."""

    directory: Path
    step: int  # completed step of the main loop
    policy_version: int
    recipe: str  # config of the earlier run, as YAML
    state: dict[str, Any]
    same_layout: bool  # every role has its old layout, so RNG states were restored and the run continues bit by bit


def load_training_state(
    directory: Path,
    roles: Mapping[str, SavedRole],
    *,
    side_files: Mapping[str, Mapping[str, Path]],
    group: dist.ProcessGroup,
    is_verified: bool = False,
) -> ResumedRun:
    """Restore all roles of this rank from a checkpoint `step_<N>`; collective.

    Args:
        side_files: role -> `list_side_files` of its model.
        is_verified: skip the digests, which were just checked.

    Raises:
        UserError: on every rank; a damaged or missing file, another model or vocabulary, no optimizer states.
    """
    problems = [] if is_verified else find_problems_together(directory, group)
    if problems:
        raise UserError(
            "; ".join(problems[:3]),
            source=str(directory),
            expected="a whole checkpoint",
            hint="check for a typo, take an older one, or copy this one again",
        )
    random_numbers = directory / "rng" / f"rank_{group.rank()}.safetensors"
    with failing_together(group):
        manifest = read_manifest(directory)
        recipe = (directory / RECIPE_FILE).read_text(encoding="utf-8")
        _check_roles(directory, manifest, roles, side_files)
        is_same = random_numbers.is_file() and all(
            ParallelLayout(**manifest["roles"][name]["layout"]) == role.model.groups.layout
            for name, role in roles.items()
        )
    same_layout = all(gather_objects(is_same, group))
    with failing_together(group):
        for name, role in roles.items():
            _load_role(directory / name, manifest["roles"][name], role, group.rank())
        if same_layout:
            restore_rng(_read_tensors(random_numbers))
    return ResumedRun(directory, manifest["step"], manifest["policy_version"], recipe, manifest["state"], same_layout)


def _check_roles(
    directory: Path,
    manifest: Mapping[str, Any],
    roles: Mapping[str, SavedRole],
    side_files: Mapping[str, Mapping[str, Path]],
) -> None:
    if not manifest.get("has_optimizer"):
        raise UserError(
            "the checkpoint has weights only",
            source=str(directory),
            expected="one with optimizer states",
            hint="export it with tools/convert_megatron_to_hf.py and start a new run from that model",
        )
    for name, role in roles.items():
        saved = manifest["roles"].get(name)
        if saved is None:
            raise UserError(
                f"the checkpoint has no {name}",
                source=str(directory),
                expected=f"one of {sorted(roles)}",
                hint="the run that wrote it trained other roles; compare its config.yaml",
            )
        check_model(saved["model"], role.model.shape, directory / name)
        dtype = describe_role(role)["dtype"]
        if saved["dtype"] != dtype:
            raise UserError(
                f"the {name} was trained in {saved['dtype']}, this run has model.dtype={dtype}",
                source=str(directory / name),
                expected=f"model.dtype={saved['dtype']}",
                hint="a change of type would change the numbers silently; set the old one",
            )
        if (kind := saved.get("optimizer", "adam")) != role.optimizer.kind:
            raise UserError(
                f"the {name} was trained with {kind}, this run has {name}.optimizer={role.optimizer.kind}",
                source=str(directory / name),
                expected=f"{name}.optimizer={kind}",
                hint="neither can use the other's states; set the old one, or start a new run from these weights",
            )
        check_vocabulary(directory / name / CONFIG_DIR, side_files.get(name, {}))


@torch.no_grad()
def _load_role(directory: Path, saved: Mapping[str, Any], role: SavedRole, rank: int) -> None:
    reader = ChunkReader(directory)
    table = megatron_global_placements(role.model.shape)
    for piece in make_weight_pieces(table, role.model.placements(rank), role.model.params):
        reader.read(piece.key, piece.box, piece.data)
    create_states(role, saved["optimizer_steps"])
    for piece in make_state_pieces(role, rank, None):
        reader.read(piece.key, piece.box, piece.data)
    role.optimizer.resume(saved["optimizer_steps"], saved["schedule"])


def read_rank_states(directory: Path, folder: str) -> list[dict[str, torch.Tensor]]:
    """Read a folder of per-rank states, ordered by the rank that wrote them (UserError: a file is unreadable)."""
    paths = (directory / folder).glob("rank_*.safetensors")
    return [_read_tensors(path) for path in sorted(paths, key=lambda path: int(path.stem.removeprefix("rank_")))]


def _read_tensors(path: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"{path} cannot be read: {error}",
            source=str(path),
            expected="the file as it was written",
            hint="take an older checkpoint, or copy this one again",
        ) from None


def create_states(role: SavedRole, steps: int) -> None:
    """Allocate the optimizer states that exist after `steps` steps."""
    # torch's Adam counts steps in every state, apex's and Transformer Engine's in the group, and Muon not at all.
    for shard in list_state_shards(role.model.stages, role.optimizer.megatron):
        optimizer, main = shard.optimizer, shard.main
        names = role.optimizer.moments(main)
        optimizer.state.pop(main, None)
        counts_in_state = isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW))
        if not counts_in_state:
            for group in optimizer.param_groups:
                group["step"] = steps
        if steps:
            device = "cpu" if getattr(optimizer, "keeps_moments_on_host", False) else main.device
            optimizer.state[main] = {name: torch.zeros_like(main, dtype=torch.float32, device=device) for name in names}
            if counts_in_state and names == MOMENTS:
                on_device = any(optimizer.defaults.get(name) for name in ("capturable", "fused"))
                optimizer.state[main]["step"] = torch.tensor(
                    float(steps), dtype=torch.float32, device=main.device if on_device else None
                )
