# SPDX-License-Identifier: Apache-2.0
"""Matrix products in which the bits of a row do not depend on how many others there are (rollout.bitwise, on CPU).

A library of matrix products has kernels of its own for few rows, which add up in another order. From 16 rows on a row
has the same bits whatever the number of rows and wherever it stands; `find_variance` tries it on this machine.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F

MIN_ROWS = 16
_TRIAL_ROWS = 256


def pad_rows(x: torch.Tensor) -> torch.Tensor:
    """[t, ...] with rows of zeros behind, so that there are at least `MIN_ROWS`."""
    missing = MIN_ROWS - len(x)
    return x if missing <= 0 else F.pad(x, (0, 0) * (x.ndim - 1) + (0, missing))


def multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """[..., h] and [n, h] -> [..., n], `x @ weight.T + bias` in megatron-core's order of operations."""
    rows = x.flatten(0, -2)
    product = (pad_rows(rows) @ weight.t())[: len(rows)].unflatten(0, x.shape[:-1])
    return product if bias is None else product + bias


@torch.no_grad()
def find_variance(shapes: Iterable[tuple[int, ...]]) -> str | None:
    """Try products of weights [n, h] on this machine; None, or the first one that does not keep the bits of a row.

    Args:
        shapes: h, n and the widths of the parts that the engine keeps apart (query, key and value), if any.
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
