# SPDX-License-Identifier: Apache-2.0
"""Branches (context windows) and turns of episodes: prefixes that branches share, and turns in the rollout log.

A rollout without an episode has one branch of one turn, and needs nothing of this module.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from megatron_rl.observability.metrics import TokenTexts
from megatron_rl.samples.microbatches import PackingWork, SharedPrefixes, is_repeated
from megatron_rl.types import Branch, Rollout, Turn, UserError


def arrange_branches(branches: Sequence[Branch]) -> tuple[list[int], list[int]]:
    """Order the branches of a rollout as a walk through their prefix tree, most prompt tokens first.

    Returns:
        The place of each branch, and the tokens that it shares with the previous place.
    """
    order = sorted(
        range(len(branches)), key=lambda i: (-branches[i].num_prompt_tokens, branches[i].tokens.astype(">u4").tobytes())
    )
    places, num_shared = [0] * len(branches), [0] * len(branches)
    for place, index in enumerate(order):
        places[index] = place
        if place:
            num_shared[index] = _count_common(branches[order[place - 1]], branches[index])
    return places, num_shared


def _count_common(first: Branch, second: Branch) -> int:
    """Count the common leading tokens with equal expert routes."""
    length = min(len(first.tokens), len(second.tokens))
    is_same = first.tokens[:length] == second.tokens[:length]
    if first.routes is not None and second.routes is not None:
        is_same = is_same & (first.routes[:length] == second.routes[:length]).all((1, 2))
    elif first.routes is not second.routes:
        return 0
    return length if is_same.all() else int(is_same.argmin())


def share_branches(rows: np.ndarray) -> SharedPrefixes:
    """Share prompts between rollouts, and prefixes between the branches of a rollout: one prefix tree per prompt.

    Args:
        rows: [n] of `HEADER`.
    """
    num_tokens = np.ascontiguousarray(rows["num_tokens"])
    runs = np.cumsum(np.diff(rows["prompt_id"], prepend=rows["prompt_id"][:1]) != 0)
    order = np.lexsort((rows["place"], rows["rollout"], -rows["num_prompt_tokens"], runs))
    rows, runs = rows[order], runs[order]
    has_prompt = is_repeated(runs) & is_repeated(rows["prompt_routes"])
    num_shared = np.where(
        is_repeated(rows["rollout"]), rows["num_shared"], np.where(has_prompt, rows["num_prompt_tokens"], 0)
    )
    return SharedPrefixes(np.argsort(order), num_shared.astype(np.int64), num_tokens, "prefix")


def check_whole(rows: np.ndarray, shared: SharedPrefixes | None, max_tokens: int) -> None:
    """Refuse rollouts whose branches do not fit into one microbatch (UserError).

    Args:
        rows: [n] of `HEADER`, equal on every rank.
    """
    places = np.arange(len(rows)) if shared is None else shared.places
    work = PackingWork.measure(rows["num_tokens"].tolist(), 0.0, shared)
    bounds = np.flatnonzero(np.diff(rows["rollout"], prepend=-1, append=-1))
    sizes, _ = work.sum_joined(np.lexsort((places, rows["rollout"])), bounds)
    if sizes.max() > max_tokens:
        largest = rows[bounds[int(sizes.argmax())]]
        raise UserError(
            f"prompt_id {largest['prompt_id']}, sample {largest['sample_index']} has {sizes.max()} tokens in all its "
            f"branches, and a microbatch has {max_tokens}",
            source="algorithm.ratio_by = rollout",
            expected="branches that fit into one microbatch, as the loss takes their mean",
            hint="raise max_tokens_per_microbatch, or set algorithm.ratio_by=branch",
        )


def count_rows(owners: np.ndarray, bounds: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Return for each token the rows since its rollout's first one in the microbatch, [t] int64.

    Args:
        owners: [t], rollout of each token.
        bounds: first row of each microbatch, and the row after its last one.
    """
    rows = np.zeros(len(owners), np.int64)
    for start, stop in bounds:
        _, firsts, places = np.unique(owners[start:stop], return_index=True, return_inverse=True)
        rows[start:stop] = np.arange(stop - start) - firsts[places]
    return torch.from_numpy(rows)


def describe_turns(rollout: Rollout, runs: Sequence[Turn], token_texts: TokenTexts) -> dict[str, Any]:
    """Return a log row's "turns", the `runs` of sampled tokens; empty for a plain response.

    "observed" is the unsampled text before a turn.
    """
    turns, start = [], 0
    known = [branch.num_prompt_tokens for branch in rollout.branches]
    for turn in runs:
        branch = rollout.branches[turn.branch]
        turns.append(
            {
                "branch": turn.branch,
                "start": start,
                "observed": "".join(token_texts(branch.tokens[known[turn.branch] : turn.start])),
                "reward": None if branch.rewards is None else float(branch.rewards[turn.stop - 1]),
            }
        )
        known[turn.branch], start = turn.stop, start + turn.stop - turn.start
    is_plain = all(not turn["observed"] and turn["reward"] is None for turn in turns) and len(rollout.branches) == 1
    return {} if is_plain else {"turns": turns}
