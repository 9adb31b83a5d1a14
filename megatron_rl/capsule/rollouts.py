# SPDX-License-Identifier: Apache-2.0
"""The file of a step's scored rollouts, and the stand-in for engine and rewards in a replay.

One JSON object per rollout, group by group, with lossless floats. Its columns `prompt` and `answer` also make it a data
file.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron_rl.checkpoint.files import FileRecord, write_file
from megatron_rl.parallel.collectives import world
from megatron_rl.samples.experience import Experience, replicate
from megatron_rl.transfer.executor import ReshardStats
from megatron_rl.types import KeptSets, Prompt, Rollout, UserError


def write_rollouts(path: Path, rollouts: Sequence[Rollout], samples: Experience) -> FileRecord:
    """Write the rollout data needed for training; omits `extra_info`, which only rewards use.

    Args:
        samples: supply groups and greedy baselines.
    """
    lines = []
    for number, rollout in zip(samples.headers.rollouts["group"].tolist(), rollouts, strict=True):
        baseline, prompt = None if samples.baselines is None else float(samples.baselines[number]), rollout.prompt
        lines.append(
            json.dumps(
                {
                    "group": number,
                    "prompt_id": prompt.prompt_id,
                    "sample_index": rollout.sample_index,
                    "prompt": prompt.text,
                    "response": rollout.response,
                    "answer": prompt.ground_truth,
                    "data_source": prompt.data_source,
                    "reward": rollout.reward,
                    "reward_components": rollout.reward_components,
                    "greedy_baseline": baseline,
                    "finish_reason": rollout.finish_reason,
                    "versions": rollout.versions.tolist(),
                    "prompt_tokens": prompt.tokens.tolist(),
                    "response_tokens": rollout.response_tokens.tolist(),
                    "rollout_logprobs": rollout.rollout_logprobs.tolist(),
                    **_write_kept(rollout),
                    **_write_routes(rollout),
                },
                ensure_ascii=False,
            )
            + "\n"
        )
    return write_file(path, "".join(lines).encode("utf-8", "backslashreplace"))  # escapes lone surrogates


def _write_kept(rollout: Rollout) -> dict[str, list[int]]:
    parts = [branch.kept for branch in rollout.branches if branch.kept is not None]
    if not parts:
        return {}
    counts = [branch.kept.counts[branch.sampled] for branch in rollout.branches if branch.kept is not None]
    return {"kept_ids": KeptSets.join(parts).ids.tolist(), "kept_counts": np.concatenate(counts).tolist()}


def _write_routes(rollout: Rollout) -> dict[str, Any]:
    routes = rollout.branches[0].routes
    if routes is None:
        return {}
    text = base64.b64encode(routes.tobytes()).decode()
    return {"routes": {"shape": routes.shape, "dtype": str(routes.dtype), "data": text}}


def _read_routes(row: dict[str, Any]) -> np.ndarray | None:
    found = row.get("routes")
    if found is None:
        return None
    return np.frombuffer(base64.b64decode(found["data"]), found["dtype"]).reshape(found["shape"])


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
    """Read a file from `write_rollouts` (UserError if that fails)."""
    try:
        rows = [json.loads(line) for line in path.read_bytes().split(b"\n") if line]
        prompts = {row["group"]: _read_prompt(row) for row in rows}
        baselines = {row["group"]: row["greedy_baseline"] for row in rows}.values()
        rollouts = [(row["group"], _read_rollout(row, prompts[row["group"]])) for row in rows]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"it does not read: {type(error).__name__}: {error}",
            source=str(path),
            expected="the file as it was written",
            hint="capture the step again",
        ) from None
    return CapturedRollouts(rollouts, None if None in baselines else np.array([*baselines]))


def _read_prompt(row: dict[str, Any]) -> Prompt:
    return Prompt(
        row["prompt_id"], np.array(row["prompt_tokens"], np.int32), row["prompt"], row["answer"], row["data_source"]
    )


def _read_rollout(row: dict[str, Any], prompt: Prompt) -> Rollout:
    kept = None
    if "kept_ids" in row:
        kept = KeptSets(np.array(row["kept_ids"], np.int32), np.array(row["kept_counts"], np.int32))
    rollout = Rollout.from_response(
        prompt,
        row["sample_index"],
        np.array(row["response_tokens"], np.int32),
        np.array(row["rollout_logprobs"], np.float32),
        row["finish_reason"],
        np.array(row["versions"], np.int32),
        kept,
    ).with_routes(_read_routes(row))
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
