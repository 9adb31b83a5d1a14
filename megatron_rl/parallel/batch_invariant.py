# SPDX-License-Identifier: Apache-2.0
"""Matrix products and log-probs whose rows have the same bits among any number of rows (rollout.bitwise, on CPU).

Matrix libraries sum in another order for few rows; from 16 rows on bits are constant, as `find_variance` checks.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F

from megatron_rl.parallel.vocab_parallel import compute_summary, find_vocab_shard, merge_totals

MIN_ROWS = 16
_TRIAL_ROWS = 256


def pad_rows(x: torch.Tensor) -> torch.Tensor:
    """Append zero rows to [t, ...] up to `MIN_ROWS`."""
    missing = MIN_ROWS - len(x)
    return x if missing <= 0 else F.pad(x, (0, 0) * (x.ndim - 1) + (0, missing))


def multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Compute `x @ weight.T + bias` for [..., h] and [n, h] in megatron-core's order of operations."""
    rows = x.flatten(0, -2)
    product = (pad_rows(rows) @ weight.t())[: len(rows)].unflatten(0, x.shape[:-1])
    return product if bias is None else product + bias


@torch.no_grad()
def find_variance(shapes: Iterable[tuple[int, ...]]) -> str | None:
    """Return a sentence on the first weight for which a row's bits depend on the number of rows or on a split, if any.

    Args:
        shapes: input width of a weight, then widths of parts that the engine multiplies separately (query, key, ...).
    """
    generator = torch.Generator().manual_seed(1)
    for hidden, *widths in dict.fromkeys(shapes):
        weight = torch.randn(sum(widths), hidden, generator=generator)
        x = torch.randn(_TRIAL_ROWS, hidden, generator=generator)
        whole = x @ weight.t()
        for count in (MIN_ROWS, MIN_ROWS + 1, 37, 64, 129):
            if not torch.equal(multiply(x[-count:].contiguous(), weight), whole[-count:]):
                return f"{count} of {_TRIAL_ROWS} rows times [{sum(widths)}, {hidden}] have other bits"
        if not torch.equal(torch.cat([multiply(x, part) for part in weight.split(widths)], -1), whole):
            return f"{_TRIAL_ROWS} rows times parts {widths} of [{sum(widths)}, {hidden}] have other bits"
    return None


def compute_all_logprobs(z: torch.Tensor, num_columns: int) -> torch.Tensor:
    """Compute log-probs [t, v] of the whole vocabulary in one process, with the bits of a TP group.

    Args:
        z: [t, v] temperature-scaled logits, without vocabulary padding.
        num_columns: per TP rank, with padding.
    """
    rows, vocab_size = pad_rows(z), z.shape[1]
    summaries = []
    for rank in range(-(-vocab_size // num_columns)):
        shard = find_vocab_shard(vocab_size, num_columns, rank)
        part = rows[:, shard.start : shard.start + shard.width].clone(memory_format=torch.contiguous_format)
        summaries.append(compute_summary(part, torch.zeros(len(rows), dtype=torch.int64, device=z.device), shard))
    highs, totals, *_ = torch.stack(summaries, 1)
    high, _, total = merge_totals(highs, totals)
    return (rows - high[:, None] - total.log()[:, None])[: len(z)]
