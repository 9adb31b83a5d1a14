# SPDX-License-Identifier: Apache-2.0
"""Truncated sampling: one definition of min_tokens, min-p, top-k and top-p for every engine, in vLLM's order.

The set that a token is drawn from is recorded: training cannot reconstruct it from logits that differ in the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.config.sections import SamplingSettings
from megatron_rl.engines.protocol import Sampled, SamplingConfig
from megatron_rl.parallel.collectives import reduce_scalars
from megatron_rl.parallel.vocab_parallel import OUTSIDE
from megatron_rl.types import KeptSets, Rollout, UserError


def truncate(
    scaled: torch.Tensor, sampling: SamplingConfig, places: Sequence[int] = ()
) -> tuple[torch.Tensor, KeptSets]:
    """Restrict each row to the tokens to draw from.

    Args:
        scaled: [b, v] float32 logits over the temperature.
        places: [b] numbers of response tokens of each row so far, for `min_tokens`.

    Returns:
        [b, v] logits, `OUTSIDE` for other tokens; and each row's set, most likely first, or empty for the whole
        vocabulary.
    """
    vocab_size, is_early = scaled.shape[1], torch.ones(len(scaled), dtype=torch.bool, device=scaled.device)
    if sampling.min_tokens:
        is_early = torch.tensor(places, device=scaled.device) < sampling.min_tokens
        stops = torch.zeros(vocab_size, dtype=torch.bool, device=scaled.device)
        stops[list(sampling.stop_token_ids)] = True
        scaled = scaled.masked_fill(is_early[:, None] & stops, OUTSIDE)
    size = min(vocab_size, sampling.top_k if sampling.top_k > 0 else sampling.max_kept_tokens)
    values, ids = scaled.topk(size)  # [b, size], most likely first
    keep = values > OUTSIDE
    lowest = values[:, :1] + (math.log(sampling.min_p) if sampling.min_p > 0 else -math.inf)
    if sampling.min_p > 0:
        keep &= values >= lowest
    if sampling.top_p < 1.0:
        candidates = values if sampling.top_k > 0 else scaled
        total = candidates.masked_fill(candidates < lowest, -math.inf).logsumexp(-1, keepdim=True)
        probs = (values - total).exp()
        keep &= probs.cumsum(-1) - probs < sampling.top_p
    keep[:, sampling.max_kept_tokens :] = False
    keep[:, 0] = True
    left = torch.full_like(scaled, OUTSIDE).scatter_(1, ids, values.masked_fill(~keep, OUTSIDE))
    if not sampling.keeps_likely:
        keep &= is_early[:, None]
        left = torch.where(is_early[:, None], left, scaled)
    counts = keep.sum(-1, dtype=torch.int32)
    return left, KeptSets(ids[keep].int().cpu().numpy(), counts.cpu().numpy())


def check_kept_sets(response: Sampled, has_whole: bool, source: str) -> None:
    """Refuse tokens outside of the sets drawn from (UserError); `has_whole`: an empty set is the whole vocabulary."""
    kept = response.kept
    if kept is not None and len(kept.counts) == len(response.tokens) and kept.counts.sum() == len(kept.ids):
        rows = np.repeat(np.arange(len(kept.counts)), kept.counts)
        has_token = np.bincount(rows[kept.ids == response.tokens[rows]], minlength=len(kept.counts)) > 0
        is_free = has_whole if response.inserted is None else has_whole | response.inserted
        if (has_token | (is_free & (kept.counts == 0))).all():
            return
    raise UserError(
        "a response whose tokens are not in the sets that they were drawn from",
        source=source,
        expected="Sampled.kept with a set for each token, which has the token",
        hint="an engine of your own must return these sets (engines/truncation.py makes them); otherwise set "
        "rollout.top_p=1.0, top_k=-1, min_p=0 and min_tokens=0",
    )


def add_gumbel_noise(scaled: torch.Tensor, generators: Sequence[torch.Generator]) -> torch.Tensor:
    """Add noise to logits whose argmax then samples `softmax(scaled)` (the Gumbel-max trick).

    Args:
        scaled: [b, v] float32 logits over the temperature.
        generators: on the CPU, each advanced by v numbers.
    """
    noise = torch.stack([torch.rand(scaled.shape[1], generator=g) for g in generators])
    return scaled - (-noise.clamp_min(1e-20).log()).log().to(scaled.device)


def describe_kept(
    rollouts: Iterable[Rollout], settings: SamplingSettings, group: dist.ProcessGroup
) -> dict[str, float]:
    """Compute metrics of the token sets that truncated sampling kept, over all engines; collective.

    Args:
        rollouts: empty except on the first rank of an engine.

    Returns:
        sampling/kept_mean, kept_max: tokens per set; kept_at_limit: share of sets that `rollout.max_kept_tokens` may
            have truncated.
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
