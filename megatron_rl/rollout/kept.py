# SPDX-License-Identifier: Apache-2.0
"""What sampling did to a step: how large the sets of tokens are that it draws from, and which thoughts it ended."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.config.sampling import SamplingSettings
from megatron_rl.parallel.collectives import reduce_scalars
from megatron_rl.types import Rollout


def describe_kept(
    rollouts: Iterable[Rollout], settings: SamplingSettings, group: dist.ProcessGroup
) -> dict[str, float]:
    """Metrics of the kept sets of all engines; collective.

    Args:
        rollouts: of this rank's engine on its first rank; none elsewhere.
        settings: of the run.
        group: all ranks.

    Returns:
        sampling/kept_mean, kept_max: their sizes; sampling/kept_at_limit: the share of them that
        `rollout.max_kept_tokens` may have made smaller.
    """
    counts = [branch.kept.counts for rollout in rollouts for branch in rollout.branches if branch.kept is not None]
    sizes = np.concatenate([np.empty(0, np.int32), *counts])
    sizes = sizes[sizes > 0]
    limit, device = settings.max_kept_tokens, torch.device("cpu")
    is_bounded = 0 < settings.top_k <= limit
    sums = {"tokens": len(sizes), "ids": sizes.sum(), "at_limit": 0 if is_bounded else (sizes == limit).sum()}
    sums = reduce_scalars({name: float(value) for name, value in sums.items()}, dist.ReduceOp.SUM, group, device)
    largest = reduce_scalars({"max": float(sizes.max(initial=0))}, dist.ReduceOp.MAX, group, device)
    tokens = max(sums["tokens"], 1.0)
    return {
        "sampling/kept_mean": sums["ids"] / tokens,
        "sampling/kept_max": largest["max"],
        "sampling/kept_at_limit": sums["at_limit"] / tokens,
    }


def describe_thoughts(rollouts: Iterable[Rollout], group: dist.ProcessGroup) -> dict[str, float]:
    """sampling/thoughts_ended, the share of responses whose thought `rollout.thinking_budget` has ended; collective.

    Args:
        rollouts: of this rank's engine on its first rank; none elsewhere.
        group: all ranks.
    """
    ended = [len(rollout.answer_tokens) > len(rollout.response_tokens) for rollout in rollouts]
    sums = {"rollouts": float(len(ended)), "ended": float(sum(ended))}
    sums = reduce_scalars(sums, dist.ReduceOp.SUM, group, torch.device("cpu"))
    return {"sampling/thoughts_ended": sums["ended"] / max(sums["rollouts"], 1.0)}
