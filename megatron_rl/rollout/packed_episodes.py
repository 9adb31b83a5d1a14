# SPDX-License-Identifier: Apache-2.0
"""Episodes in checkpoints: those that are over, as a few tensors, and the keys of those that begin again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import islice
from typing import Any

import numpy as np
import torch

from megatron_rl.rollout.carried import Response, pack_responses, unpack_responses
from megatron_rl.rollout.order import Samples
from megatron_rl.types import Branch, Rollout, Turn


def pack_rollouts(rollouts: Mapping[int, Rollout | None]) -> dict[str, torch.Tensor]:
    """Rollouts by key, not scored by reward sources, for `unpack_rollouts`; None: the episode is not over."""
    branches = [branch for rollout in rollouts.values() if rollout is not None for branch in rollout.branches]
    whole = {i: Response(b.tokens, b.logprobs, b.versions, "stop", b.kept, b.routes) for i, b in enumerate(branches)}
    rewards = [np.full(len(b.tokens), np.nan, np.float32) if b.rewards is None else b.rewards for b in branches]
    table = json.dumps([{"key": key} | ({} if one is None else _describe(one)) for key, one in rollouts.items()])
    return pack_responses(whole) | {
        "sampled": torch.from_numpy(np.concatenate([np.empty(0, bool), *(b.sampled for b in branches)])),
        "rewards": torch.from_numpy(np.concatenate([np.empty(0, np.float32), *rewards])),
        "prompt_lengths": torch.tensor([b.num_prompt_tokens for b in branches], dtype=torch.int64),
        "episodes": torch.frombuffer(bytearray(table.encode()), dtype=torch.uint8),
    }


def _describe(rollout: Rollout) -> dict[str, Any]:
    return {
        "num_branches": len(rollout.branches),
        "turns": [[turn.branch, turn.start, turn.stop] for turn in rollout.turns],
        "finish_reason": rollout.finish_reason,
        "reward": rollout.reward,
        "components": rollout.reward_components,
        "failure": rollout.failure,
    }


def unpack_rollouts(tensors: Mapping[str, torch.Tensor], samples: Samples) -> dict[int, Rollout | None]:
    """The rollouts by key, and None for each that was not over."""
    bounds = np.cumsum(tensors["lengths"].numpy())[:-1]
    sampled, rewards = (np.split(tensors[name].numpy(), bounds) for name in ("sampled", "rewards"))
    whole, lengths = unpack_responses(tensors).values(), tensors["prompt_lengths"].tolist()
    branches = (
        Branch(
            one.tokens,
            mask,
            one.logprobs,
            one.versions,
            length,
            one.kept,
            None if np.isnan(worth).any() else worth,
            one.routes,
        )
        for one, mask, worth, length in zip(whole, sampled, rewards, lengths, strict=False)  # no branch: one empty part
    )
    found: dict[int, Rollout | None] = {}
    for row in json.loads(bytes(tensors["episodes"].numpy())):
        found[row["key"]] = None
        if "turns" in row:
            found[row["key"]] = Rollout(
                *samples.sample_of(row["key"]),
                list(islice(branches, row["num_branches"])),
                [Turn(*turn) for turn in row["turns"]],
                row["finish_reason"],
                reward=row["reward"],
                reward_components=row["components"],
                failure=row.get("failure", ""),
            )
    return found
