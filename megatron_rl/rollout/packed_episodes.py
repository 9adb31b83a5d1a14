# SPDX-License-Identifier: Apache-2.0
"""Serialization of samples for checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch

from megatron_rl.types import Branch, KeptSets, Prompt, Rollout, Turn, UserError


def pack_rollouts(rollouts: Mapping[int, Rollout | None]) -> dict[str, torch.Tensor]:
    """Pack rollouts without scores for `unpack_rollouts`; a `None` value keeps only the key."""
    branches = [branch for rollout in rollouts.values() if rollout is not None for branch in rollout.branches]
    table = json.dumps([{"key": key} | ({} if one is None else _describe(one)) for key, one in rollouts.items()])
    packed = {
        "tokens": _join([b.tokens for b in branches], np.int32),
        "sampled": _join([b.sampled for b in branches], bool),
        "logprobs": _join([b.logprobs for b in branches], np.float32),
        "versions": _join([b.versions for b in branches], np.int32),
        "rewards": _join(
            [np.full(len(b.tokens), np.nan) if b.rewards is None else b.rewards for b in branches], np.float32
        ),
        "states": _join(
            [np.zeros(len(b.tokens), np.int64) if b.states is None else b.states for b in branches], np.int64
        ),
        "lengths": torch.tensor([len(b.tokens) for b in branches], dtype=torch.int64),
        "prompt_lengths": torch.tensor([b.num_prompt_tokens for b in branches], dtype=torch.int64),
        "episodes": torch.frombuffer(bytearray(table.encode()), dtype=torch.uint8),
    }
    kept = KeptSets.join_known([(b.kept, len(b.tokens)) for b in branches])
    if kept is not None:
        packed |= {"kept_ids": torch.from_numpy(kept.ids), "kept_counts": torch.from_numpy(kept.counts)}
    routes = [branch.routes for branch in branches if branch.routes is not None]
    if routes:
        lengths = [0 if branch.routes is None else len(branch.routes) for branch in branches]
        packed |= {"routes": torch.from_numpy(np.concatenate(routes)), "route_lengths": torch.tensor(lengths)}
    return packed


def _join(parts: Sequence[np.ndarray], dtype: Any) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([np.empty(0, dtype), *parts]).astype(dtype, copy=False))


def _describe(rollout: Rollout) -> dict[str, Any]:
    return {
        "num_branches": len(rollout.branches),
        "turns": [[turn.branch, turn.start, turn.stop] for turn in rollout.turns],
        "finish_reason": rollout.finish_reason,
        "reward": rollout.reward,
        "components": rollout.reward_components,
        "failure": rollout.failure,
    }


def unpack_rollouts(
    tensors: Mapping[str, torch.Tensor], sample_of: Callable[[int], tuple[Prompt, int]]
) -> dict[int, Rollout | None]:
    """Return rollouts by key, `None` for samples of which only the key was kept.

    Args:
        sample_of: key -> prompt and index in the group.
    """
    arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
    if "episodes" not in arrays:  # an older checkpoint, in another form: its samples begin again
        return dict.fromkeys(arrays["keys"].tolist())
    bounds = np.cumsum(arrays["lengths"])[:-1]
    count = len(bounds) + 1

    def split(name: str) -> Sequence[Any]:
        return np.split(arrays[name], bounds) if name in arrays else [None] * count

    kept, routes = split("kept_counts"), [None] * count
    if "kept_ids" in arrays:
        stops = np.cumsum([counts.sum() for counts in kept])[:-1]
        kept = [*map(KeptSets, np.split(arrays["kept_ids"], stops), kept)]
    if "routes" in arrays:
        stops = np.cumsum(arrays["route_lengths"])[:-1]
        routes = [part if len(part) else None for part in np.split(arrays["routes"], stops)]
    rewards = [None if worth is None or np.isnan(worth).any() else worth for worth in split("rewards")]
    states = [one if one is not None and one.any() else None for one in split("states")]
    found: dict[int, Rollout | None] = {}
    columns = [*map(split, ("tokens", "sampled", "logprobs", "versions")), arrays["prompt_lengths"].tolist()]
    branches = map(Branch, *columns, kept, rewards, routes, states)
    for row in json.loads(bytes(arrays["episodes"])):
        found[row["key"]] = None
        if "turns" in row:
            found[row["key"]] = Rollout(
                *sample_of(row["key"]),
                list(islice(branches, row["num_branches"])),
                [Turn(*turn) for turn in row["turns"]],
                row["finish_reason"],
                reward=row["reward"],
                reward_components=row["components"],
                failure=row.get("failure", ""),
            )
    return found


def check_begun(saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Check that the settings can continue the prompts that had begun; both are states of `RolloutStream`.

    Raises:
        UserError: the group size has changed, `order` has become `whole`, truncated sampling was switched off, or
            episodes and plain responses were exchanged.
    """
    count, kinds = saved["open"], ("responses", "episodes")
    if not count:
        return
    was, is_now = (kinds[state.get("episodes", False)] for state in (saved, now))
    if saved["group_size"] != now["group_size"]:
        raise UserError(
            f"rollout.n = {now['group_size']}, and {count} prompts have begun with {saved['group_size']} responses "
            "each",
            source="rollout.n",
            expected=str(saved["group_size"]),
            hint="keep it, or start a new run from the checkpoint's weights",
        )
    if (now["order"], saved.get("order", "stream")) == ("whole", "stream"):
        raise UserError(
            f"schedule.order = whole, and {count} prompts have begun that can no longer be passed over",
            source="schedule.order",
            expected="stream",
            hint="keep it, or start a new run from the checkpoint's weights",
        )
    if saved.get("truncated", False) and not now["truncated"]:
        raise UserError(
            f"sampling is not truncated, and {count} prompts have begun with truncated sampling",
            source="rollout.top_p, rollout.top_k and rollout.min_p",
            expected="one of them, as before",
            hint="keep it, or start a new run from the checkpoint's weights",
        )
    if was != is_now:
        raise UserError(
            f"the section agents now selects {is_now}, and {count} prompts have begun as {was}",
            source="agents.environment, agents.tools and agents.program",
            expected="one of them, or none, as before",
            hint="keep them, or start a new run from the checkpoint's weights",
        )
