# SPDX-License-Identifier: Apache-2.0
"""The tokens among which a token is drawn: one definition of top-p, top-k, min-p and min_tokens for every engine.

The order is vLLM's: without stop tokens at first, then min-p, top-k, and top-p of the probability that is left. Each of
the last three keeps the most likely tokens, and so does the bound on the size of a set. Training could not find the
sets again: at a boundary, logits that differ in their last bit decide. So they are recorded where the token is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from megatron_rl.engines.sampling import SamplingConfig
from megatron_rl.parallel.kept_sets import OUTSIDE
from megatron_rl.types import KeptSets


def truncate(
    scaled: torch.Tensor, sampling: SamplingConfig, places: Sequence[int] = ()
) -> tuple[torch.Tensor, KeptSets]:
    """Leave the tokens among which to draw.

    Args:
        scaled: [b, v] logits over the temperature, float32.
        sampling: truncated.
        places: [b] tokens that the response of each row has; looked at if there is a `min_tokens`.

    Returns:
        [b, v] the same, without probability outside of the sets; and the sets of the rows, each with its most likely
        token first, or the whole vocabulary.
    """
    vocab_size, is_early = scaled.shape[1], torch.ones(len(scaled), dtype=torch.bool, device=scaled.device)
    if sampling.min_tokens:
        is_early = torch.tensor(places, device=scaled.device) < sampling.min_tokens
        stops = torch.zeros(vocab_size, dtype=torch.bool, device=scaled.device)
        stops[list(sampling.stop_token_ids)] = True
        scaled = scaled.masked_fill(is_early[:, None] & stops, OUTSIDE)
    size = min(vocab_size, sampling.top_k if sampling.top_k > 0 else sampling.max_kept_tokens)
    values, ids = scaled.topk(size)  # [b, size], the most likely first
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


def add_gumbel_noise(scaled: torch.Tensor, generators: Sequence[torch.Generator]) -> torch.Tensor:
    """Noise on top of logits: their largest is then a sample of `softmax(scaled)` (the Gumbel-max trick).

    Args:
        scaled: [b, v] logits over the temperature, float32.
        generators: of each row, on the CPU; each is advanced by v numbers.

    Returns:
        [b, v].
    """
    noise = torch.stack([torch.rand(scaled.shape[1], generator=g) for g in generators])
    return scaled - (-noise.clamp_min(1e-20).log()).log().to(scaled.device)
