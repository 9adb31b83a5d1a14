# SPDX-License-Identifier: Apache-2.0
"""The contents of a capsule: sections, rollouts and parameters; and the stand-in for engine and rewards in a replay."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_rl.capsule.recorder import Fingerprints, Section, Values, fingerprint_pieces
from megatron_rl.checkpoint.pieces import STATE_PREFIX, Piece, make_weight_pieces
from megatron_rl.checkpoint.torch_dist import ChunkReader
from megatron_rl.parallel.collectives import world
from megatron_rl.samples.experience import Experience, replicate
from megatron_rl.transfer.executor import ReshardStats
from megatron_rl.types import KeptSets, Prompt, Rollout, UserError
from megatron_rl.weights.families import ModelShape
from megatron_rl.weights.megatron_layout import megatron_global_placements
from megatron_rl.weights.shard_box import ShardBox, box_shape, full_box


def decode_sections(entries: Sequence[Mapping[str, Any]], arrays: Mapping[str, np.ndarray]) -> list[Section]:
    """Invert `capsule.recorder.encode_sections`."""
    sections = []
    for number, entry in enumerate(entries):
        if "shapes" in entry:
            content: Fingerprints | list[Values] = Fingerprints(
                {name: tuple(shape) for name, shape in entry["shapes"].items()},
                *(arrays[f"{number}.{kind}"] for kind in ("bits", "sizes", "samples")),
            )
        else:
            content = [
                Values(item["name"], item["index"], arrays[key], arrays.get(f"{key}.lengths"))
                for item, key in ((item, f"{number}.{place}") for place, item in enumerate(entry["values"]))
            ]
        sections.append(Section(entry["name"], entry["is_input"], content))
    return sections


class StoredRole:
    """The logical tensors of a role in a checkpoint; every method raises UserError if the files cannot be read.

    Args:
        directory: of the role.
    """

    def __init__(self, directory: Path, shape: ModelShape) -> None:
        self._reader, self._shapes = ChunkReader(directory), shape.logical_tensors()
        self._table = megatron_global_placements(shape)

    def read(self, name: str) -> torch.Tensor:
        """Read a weight or optimizer state."""
        is_state = name.startswith(STATE_PREFIX)
        key = name if is_state else self._table[name][0].key
        if key not in self._reader.tensors:
            raise UserError(
                f"{key} is not there",
                source=str(self._reader.directory),
                expected="the files as they were written",
                hint="copy them again",
            )
        size, dtype = self._reader.tensors[key]
        box = full_box(size if is_state else self._shapes[name])
        tensor = torch.empty(box_shape(box), dtype=dtype)
        pieces = (
            [Piece(key, size, (0,) * len(size), tensor)]
            if is_state
            else make_weight_pieces(self._table, [ShardBox(name, box, name, box)], {name: tensor})
        )
        for piece in pieces:
            self._reader.read(piece.key, piece.box, piece.data)
        return tensor

    def fingerprint(self, shapes: Mapping[str, tuple[int, ...]]) -> Fingerprints:
        """Fingerprint the named tensors, reading one at a time."""
        return fingerprint_pieces(
            shapes, (Piece(name, size, (0,) * len(size), self.read(name)) for name, size in shapes.items()), None
        )


@dataclass(frozen=True)
class CapturedRollouts:
    """The rollouts of a capsule.

    Attributes:
        rollouts: (group index, rollout).
        baselines: [num_groups] rewards of greedy responses (ReMax).
    """

    rollouts: list[tuple[int, Rollout]]
    baselines: np.ndarray | None


def read_rollouts(path: Path) -> CapturedRollouts:
    """Read the file of `capsule.recorder.write_rollouts` (UserError if that fails)."""
    try:
        rows = [json.loads(line) for line in path.read_bytes().split(b"\n") if line]
        prompts = {
            row["group"]: Prompt(
                row["prompt_id"],
                np.array(row["prompt_tokens"], np.int32),
                row["prompt"],
                row["answer"],
                row["data_source"],
            )
            for row in rows
        }
        baselines = {row["group"]: row["greedy_baseline"] for row in rows}.values()
        rollouts = [(row["group"], _read_rollout(row, prompts[row["group"]])) for row in rows]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"it cannot be read: {type(error).__name__}: {error}",
            source=str(path),
            expected="the file as it was written",
            hint="capture the step again",
        ) from None
    return CapturedRollouts(rollouts, None if None in baselines else np.array([*baselines]))


def _read_rollout(row: dict[str, Any], prompt: Prompt) -> Rollout:
    kept, routes = None, None
    if "kept_ids" in row:
        kept = KeptSets(np.array(row["kept_ids"], np.int32), np.array(row["kept_counts"], np.int32))
    if "routes" in row:
        found = row["routes"]
        routes = np.frombuffer(base64.b64decode(found["data"]), found["dtype"]).reshape(found["shape"])
    rollout = Rollout.from_response(
        prompt,
        row["sample_index"],
        np.array(row["response_tokens"], np.int32),
        np.array(row["rollout_logprobs"], np.float32),
        row["finish_reason"],
        np.array(row["versions"], np.int32),
        kept,
    )
    branches = [replace(rollout.branches[0], routes=routes)]
    rollout = replace(rollout, branches=branches)
    return replace(rollout, response=row["response"], reward=row["reward"], reward_components=row["reward_components"])


class RecordedRollouts:
    """A stand-in for hybrid engine and collector that replays a capsule: no engine, no rewards.

    Args:
        recording: returned by `collect` for any step.
        mask_truncated: exclude truncated responses from the loss.
    """

    transport, reshard_stats, verified_tensors, runs_ahead = "none", ReshardStats(), 0, False

    def __init__(self, recording: CapturedRollouts, *, mask_truncated: bool) -> None:
        self._recording, self._mask_truncated = recording, mask_truncated

    @contextmanager
    def rollout_mode(self) -> Iterator[RecordedRollouts]:
        """Do nothing; weights are not moved."""
        yield self

    def collect(self, step: int) -> Experience:
        """Return the recorded rollouts; every rank has read them."""
        prompts = {group: rollout.prompt for group, rollout in self._recording.rollouts}
        return replicate(
            self._recording.rollouts,
            list(prompts.values()),
            world(),
            mask_truncated=self._mask_truncated,
            baselines=self._recording.baselines,
        )

    def state_dict(self) -> dict[str, int]:
        """Return an empty state."""
        return {}

    def close(self) -> None:
        """Do nothing."""
