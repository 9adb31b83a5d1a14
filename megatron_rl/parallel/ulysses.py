# SPDX-License-Identifier: Apache-2.0
"""Context parallelism by all-to-all: token shards <-> head shards (DeepSpeed-Ulysses, arXiv 2309.14509, section 3.1).

The packed row of t tokens is cut into cp contiguous shards, wherever sequences begin or end. All layers work on
their shard; only attention needs whole sequences, so around it the shards change places with the heads:

    token shards   [t/cp, np, d]  --all-to-all-->  [t, np/cp, d]   attention over the whole row, a part of the heads
                   [t/cp, np, d]  <--all-to-all--  [t, np/cp, d]

Rank r owns query heads [r np/cp, (r+1) np/cp) and the KV heads that they need. With fewer KV heads than ranks a KV
head goes to cp/ng ranks; its gradient is the sum over them. Query, key and value travel in one collective.
Each rank sends t/cp * (2 np + 2 max(ng, cp)) * d numbers forward, its own share included: constant when t and cp grow
together and ng >= cp.

`np` and `ng` are heads of one TP rank here: tensor parallelism has divided them already.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from megatron_rl.types import UserError


@dataclass(frozen=True)
class HeadPlan:
    """Which heads a rank has while it attends.

    Attributes:
        query_heads: per rank, the query heads of the TP rank that it takes.
        kv_heads: per rank, the KV heads that those read; a head may be on several ranks.
    """

    query_heads: tuple[range, ...]
    kv_heads: tuple[range, ...]

    @property
    def kv_copies(self) -> int:
        """Ranks that have the same KV head."""
        return self.kv_heads.count(self.kv_heads[0])


@cache
def plan_heads(num_heads: int, num_kv_heads: int, cp_size: int) -> HeadPlan:
    """Divide the heads of one TP rank over `cp_size` ranks, evenly and in order.

    Raises:
        ValueError: they cannot be divided; `check_context_parallel` says so with the names of settings.
    """
    if not _divides(num_heads, num_kv_heads, cp_size):
        raise ValueError(f"{num_heads} heads with {num_kv_heads} KV heads cannot be divided over {cp_size} ranks")
    per_rank, per_kv_head = num_heads // cp_size, num_heads // num_kv_heads
    queries = tuple(range(r * per_rank, (r + 1) * per_rank) for r in range(cp_size))
    keys = tuple(range(q[0] // per_kv_head, q[-1] // per_kv_head + 1) for q in queries)
    return HeadPlan(queries, keys)


def _divides(num_heads: int, num_kv_heads: int, cp_size: int) -> bool:
    return num_heads % cp_size == 0 and (num_kv_heads % cp_size == 0 or cp_size % num_kv_heads == 0)


def check_context_parallel(
    num_heads: int, num_kv_heads: int, tp_size: int, cp_size: int, *, section: str = "actor"
) -> None:
    """Refuse a context parallel size that the heads of the model do not allow.

    Args:
        num_heads, num_kv_heads: of the whole model, divisible by `tp_size`.
        section: of the configuration, for the error.

    Raises:
        UserError: naming the sizes that work.
    """
    heads, kv_heads = num_heads // tp_size, num_kv_heads // tp_size
    if not _divides(heads, kv_heads, cp_size):
        allowed = [size for size in range(1, heads + 1) if _divides(heads, kv_heads, size)]
        raise UserError(
            f"context_parallel_size {cp_size} cannot divide the {heads} query heads and {kv_heads} KV heads of a "
            f"tensor parallel rank ({num_heads} and {num_kv_heads} of the model over tp = {tp_size})",
            source=f"{section}.context_parallel_size, {section}.tensor_model_parallel_size and the model's config.json",
            expected=f"one of {allowed}: it divides the query heads, and divides the KV heads or is a multiple of them",
            hint=f"set {section}.context_parallel_size to one of these, or change the tensor parallel size",
        )


def shard_rows(num_tokens: int, cp_size: int, cp_rank: int) -> slice:
    """The rows of a packed row of `num_tokens` that a rank holds; `num_tokens` is a multiple of `cp_size`."""
    assert num_tokens % cp_size == 0, f"{num_tokens} tokens over {cp_size} ranks"
    length = num_tokens // cp_size
    return slice(cp_rank * length, (cp_rank + 1) * length)


class _AllToAll(torch.autograd.Function):
    """Piece j of rank i becomes piece i of rank j; its own inverse, and so its own gradient."""

    @staticmethod
    def forward(ctx: Any, pieces: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        received = torch.empty_like(pieces)
        dist.all_to_all_single(received, pieces, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _AllToAll.apply(grad.contiguous(), ctx.group), None


def exchange_to_heads(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token shards to head shards; one all-to-all over `group`, differentiable.

    Args:
        query: [t/cp, np, d]; key and value [t/cp, ng, d].
        group: the cp ranks; rank r holds rows `shard_rows(t, cp, r)`.

    Returns:
        query [t, np/cp, d], key and value [t, max(ng/cp, 1), d], of this rank's heads (`plan_heads`).
    """
    cp_size, (rows, _, d) = group.size(), query.shape
    copies = plan_heads(query.shape[1], key.shape[1], cp_size).kv_copies
    parts = [query, *(x.repeat_interleave(copies, 1) if copies > 1 else x for x in (key, value))]
    pieces = torch.cat([x.unflatten(1, (cp_size, -1)).transpose(0, 1) for x in parts], 2)  # [cp, t/cp, heads, d]
    sizes = [x.shape[1] // cp_size for x in parts]
    whole = _AllToAll.apply(pieces, group).view(cp_size * rows, -1, d)  # rank order is token order
    return whole.split(sizes, 1)


def exchange_to_tokens(output: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Head shards back to token shards: [t, np/cp, d] -> [t/cp, np, d]; one all-to-all, differentiable."""
    pieces = output.unflatten(0, (group.size(), -1)).contiguous()  # [cp, t/cp, np/cp, d]
    return _AllToAll.apply(pieces, group).transpose(0, 1).flatten(1, 2)


class _Combine(torch.autograd.Function):
    """Sum over ranks of values that each is put where it belongs; a rank's gradient is that of its own values."""

    @staticmethod
    def forward(
        ctx: Any, values: torch.Tensor, index: torch.Tensor, length: int, group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.save_for_backward(index)
        combined = values.new_zeros(length).index_copy_(0, index, values)
        if group.size() > 1:
            dist.all_reduce(combined, group=group)
        return combined

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (index,) = ctx.saved_tensors
        return grad[index], None, None, None


def combine_shards(
    values: torch.Tensor, index: torch.Tensor, length: int, group: dist.ProcessGroup
) -> torch.Tensor:
    """Give every rank the values [t] of the whole row; differentiable, collective.

    All ranks are to take the same loss of the result: each sends back the gradient of its own values only, so the
    sum of parameter gradients over the group is that of the loss (which then is not to be summed over the group).

    Args:
        values: [k] what this rank computed.
        index: [k] int64, their places; disjoint between ranks.
        length: t; places that no rank fills are 0.
        group: the cp ranks.
    """
    return _Combine.apply(values, index, length, group)
