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

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import all_to_all, reduce_from_tensor_model_parallel_region


def shard_rows(num_tokens: int, cp_size: int, cp_rank: int) -> slice:
    """The rows of a packed row of `num_tokens` that a rank holds; `num_tokens` is a multiple of `cp_size`."""
    assert num_tokens % cp_size == 0, f"{num_tokens} tokens over {cp_size} ranks"
    length = num_tokens // cp_size
    return slice(cp_rank * length, (cp_rank + 1) * length)


def exchange_to_heads(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token shards to head shards; one all-to-all over `group`, differentiable.

    Args:
        query: [t/cp, np, d]; key and value [t/cp, ng, d].
        group: the cp ranks; rank r holds rows `shard_rows(t, cp, r)`.

    Returns:
        query [t, np/cp, d], key and value [t, max(ng/cp, 1), d], of this rank's heads.
    """
    cp_size, (rows, _, d) = group.size(), query.shape
    copies = max(cp_size // key.shape[1], 1)  # ranks that have the same KV head
    parts = [query, *(x.repeat_interleave(copies, 1) if copies > 1 else x for x in (key, value))]
    pieces = torch.cat([x.unflatten(1, (cp_size, -1)).transpose(0, 1) for x in parts], 2)  # [cp, t/cp, heads, d]
    sizes = [x.shape[1] // cp_size for x in parts]
    whole = all_to_all(group, pieces).view(cp_size * rows, -1, d)  # rank order is token order
    return whole.split(sizes, 1)


def exchange_heads(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The same of one tensor: [t/cp, n, d] -> [t, n/cp, d]; cp divides n."""
    pieces = x.unflatten(1, (group.size(), -1)).transpose(0, 1)  # [cp, t/cp, n/cp, d]
    return all_to_all(group, pieces.contiguous()).flatten(0, 1)  # rank order is token order


def exchange_to_tokens(output: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Head shards back to token shards: [t, np/cp, d] -> [t/cp, np, d]; one all-to-all, differentiable."""
    pieces = output.unflatten(0, (group.size(), -1))  # [cp, t/cp, np/cp, d]
    return all_to_all(group, pieces).transpose(0, 1).flatten(1, 2)


def combine_shards(values: torch.Tensor, index: torch.Tensor, length: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Give every rank the values [t, ...] of the whole row; differentiable, collective.

    All ranks are to take the same loss of the result: each sends back the gradient of its own values only, so the
    sum of parameter gradients over the group is that of the loss (which then is not to be summed over the group).

    Args:
        values: [k, ...] what this rank computed.
        index: [k] int64, their places; disjoint between ranks.
        length: t; places that no rank fills are 0.
        group: the cp ranks.
    """
    combined = values.new_zeros(length, *values.shape[1:]).index_copy(0, index, values)
    return reduce_from_tensor_model_parallel_region(combined, group=group)  # any group: sums, and passes gradients on
