# SPDX-License-Identifier: Apache-2.0
"""The tokens among which a token is drawn: one definition of top-p, top-k and min-p for every engine.

The order is vLLM's: min-p, then top-k, then top-p of the probability that these two leave. Each of them keeps the
most likely tokens, and so does the bound on the size of a set. Training could not find the sets again: at a boundary,
logits that differ in their last bit decide. So they are recorded where the token is drawn.
"""

from __future__ import annotations

import math

import torch

from megatron_rl.engines.sampling import SamplingConfig
from megatron_rl.parallel.kept_sets import OUTSIDE
from megatron_rl.types import KeptSets


def truncate(scaled: torch.Tensor, sampling: SamplingConfig) -> tuple[torch.Tensor, KeptSets]:
    """Leave the tokens among which to draw.

    Args:
        scaled: [b, v] logits over the temperature, float32.
        sampling: truncated.

    Returns:
        [b, v] the same, without probability outside of the sets; and the sets of the rows, each with its most likely
        token first.
    """
    vocab_size = scaled.shape[1]
    size = min(vocab_size, sampling.top_k if sampling.top_k > 0 else sampling.max_kept_tokens)
    values, ids = scaled.topk(size)  # [b, size], the most likely first
    keep = torch.ones_like(values, dtype=torch.bool)
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
    counts = keep.sum(-1, dtype=torch.int32)
    return left, KeptSets(ids[keep].int().cpu().numpy(), counts.cpu().numpy())
