# SPDX-License-Identifier: Apache-2.0
"""The scored rollouts of a step in a file, and what stands for engine and rewards when they are learned from again.

One JSON object per rollout, groups one after another; floats are written in full, so reading gives the same bits. With
its columns `prompt` and `answer` the file is a data file, too: a replay needs no other.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from megatron_rl.checkpoint.files import FileRecord, write_file
from megatron_rl.experience.collected import Collected
from megatron_rl.resharding.executor import ReshardStats
from megatron_rl.types import Prompt, Rollout, RolloutGroup, UserError


def write_rollouts(path: Path, collected: Collected) -> FileRecord:
    """Write what learning needs of the rollouts (a prompt's `extra_info`, which rewards are made of, is not)."""
    lines = []
    for number, group in enumerate(collected.groups):
        baseline = None if collected.baselines is None else float(collected.baselines[number])
        for rollout in group.rollouts:
            prompt = rollout.prompt
            lines.append(json.dumps({
                "group": number, "prompt_id": prompt.prompt_id, "sample_index": rollout.sample_index,
                "prompt": prompt.text, "response": rollout.response, "answer": prompt.ground_truth,
                "data_source": prompt.data_source, "reward": float(rollout.reward),
                "reward_components": {name: float(value) for name, value in rollout.reward_components.items()},
                "greedy_baseline": baseline, "finish_reason": rollout.finish_reason,
                "policy_version": rollout.policy_version, "prompt_tokens": prompt.tokens.tolist(),
                "response_tokens": rollout.response_tokens.tolist(),
                "rollout_logprobs": rollout.rollout_logprobs.tolist(),
            }, ensure_ascii=False) + "\n")
    return write_file(path, "".join(lines).encode("utf-8", "backslashreplace"))  # half a character: its escape


def read_rollouts(path: Path) -> Collected:
    """What `write_rollouts` wrote.

    Raises:
        UserError: the file does not read.
    """
    try:
        rows = [json.loads(line) for line in path.read_bytes().split(b"\n") if line]
        groups = [_read_group(list(part)) for _, part in groupby(rows, key=lambda row: row["group"])]
        baselines = [next(part)["greedy_baseline"] for _, part in groupby(rows, key=lambda row: row["group"])]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"it does not read: {type(error).__name__}: {error}", source=str(path),
                        expected="the file as it was written", hint="capture the step again") from None
    return Collected(groups, None if None in baselines else np.array(baselines), {})


def _read_group(rows: list[dict[str, Any]]) -> RolloutGroup:
    first = rows[0]
    prompt = Prompt(
        first["prompt_id"], np.array(first["prompt_tokens"], np.int32), first["prompt"], first["answer"],
        first["data_source"])
    return RolloutGroup(prompt, [
        replace(
            Rollout.from_response(
                prompt, row["sample_index"], np.array(row["response_tokens"], np.int32),
                np.array(row["rollout_logprobs"], np.float32), row["finish_reason"], row["policy_version"]),
            response=row["response"], reward=row["reward"], reward_components=row["reward_components"])
        for row in rows])


class RecordedRollouts:
    """Stands for the hybrid engine and for the collector: no engine, no rewards, the rollouts of a capsule.

    Args:
        collected: what `collect` returns, whatever the step.
    """

    transport, reshard_stats, verified_tensors = "none", ReshardStats(), 0

    def __init__(self, collected: Collected) -> None:
        self._collected = collected

    @contextmanager
    def rollout_mode(self) -> Iterator[RecordedRollouts]:
        """The weights stay where they are."""
        yield self

    def collect(self, step: int) -> Collected:
        """The recorded rollouts."""
        return self._collected

    def state_dict(self) -> dict[str, int]:
        """There is nothing to remember."""
        return {}

    def close(self) -> None:
        """There is nothing to release."""
