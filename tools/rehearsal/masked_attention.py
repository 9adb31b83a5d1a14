# SPDX-License-Identifier: Apache-2.0
"""A CPU implementation of torch's memory-efficient attention by its formula, for small shapes.

The backend "efficient" (`models/attention.py`) then runs without a GPU. It reads no lengths on the host, so a
step has the same shapes for every batch.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch


@cache
def install() -> None:
    """Register the kernels."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_efficient_attention_forward", _attend, "CPU")
    library.impl("_efficient_attention_backward", _attend_backward, "CPU")
    _KEPT.append(library)  # destroying the library unregisters the kernels


_KEPT: list[torch.library.Library] = []


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any, scale: float) -> tuple[Any, ...]:
    """Return output [1, t, n, d], empty saved tensors, longest segments."""
    _bias, cu_seqlens_q, cu_seqlens_k, longest_q, longest_k, *_ = rest
    weights = _compute_weights(query, key, cu_seqlens_q, cu_seqlens_k, scale)
    output = torch.einsum("hqk,khd->qhd", weights, value[0])[None]
    kept = torch.empty(0), torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64)
    return output, *kept, longest_q, longest_k


def _attend_backward(
    gradient: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any, scale: float
) -> tuple[torch.Tensor, ...]:
    _bias, _output, cu_seqlens_q, cu_seqlens_k, *_ = rest
    weights = _compute_weights(query, key, cu_seqlens_q, cu_seqlens_k, scale)
    gradient_of_weights = torch.einsum("qhd,khd->hqk", gradient[0], value[0])
    slope = weights * (gradient_of_weights - (weights * gradient_of_weights).sum(-1, keepdim=True)) * scale
    return (
        torch.einsum("hqk,khd->qhd", slope, key[0])[None],
        torch.einsum("hqk,qhd->khd", slope, query[0])[None],
        torch.einsum("hqk,qhd->khd", weights, gradient[0])[None],
        torch.empty(0),
    )


def _compute_weights(
    query: torch.Tensor, key: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, scale: float
) -> torch.Tensor:
    """Return attention weights [n, queries, keys]."""
    rows, columns = torch.arange(query.shape[1]), torch.arange(key.shape[1])
    segment, other = (
        torch.searchsorted(ends, places, right=True) - 1
        for ends, places in ((cu_seqlens_q, rows), (cu_seqlens_k, columns))
    )
    # Query i of n attends to keys 0 .. k - n + i of its segment; both are counted from the ends.
    limit = rows - cu_seqlens_q[segment + 1] + cu_seqlens_k[segment + 1]
    is_seen = (segment[:, None] == other) & (columns <= limit[:, None])
    scores = torch.einsum("qhd,khd->hqk", query[0], key[0]) * scale
    return scores.masked_fill(~is_seen, float("-inf")).softmax(-1)
