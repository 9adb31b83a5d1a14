# SPDX-License-Identifier: Apache-2.0
"""Context parallelism by all-to-all: token shards <-> head shards (DeepSpeed-Ulysses, arXiv 2309.14509, section 3.1).

The packed row of t tokens is cut into cp contiguous shards, regardless of sequence boundaries. Attention needs whole
sequences, so around it tokens are exchanged for heads:

    token shards   [t/cp, np, d]  --all-to-all-->  [t, np/cp, d]   attention over the whole row, a part of the heads
                   [t/cp, np, d]  <--all-to-all--  [t, np/cp, d]

Rank r owns query heads [r np/cp, (r+1) np/cp) and their KV heads. With fewer KV heads than ranks, each is copied to
cp/ng ranks and its gradient is summed. `np` and `ng` are query and KV heads per TP rank.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import all_to_all


def exchange_to_heads(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Exchange token shards for head shards in one all-to-all, differentiable.

    Args:
        query: [t/cp, np, d]; key and value [t/cp, ng, d].
        group: cp group; rank r holds rows `shard_rows(t, cp, r)`.

    Returns:
        query [t, np/cp, d], key and value [t, max(ng/cp, 1), d], of this rank's heads.
    """
    cp_size, (rows, _, d) = group.size(), query.shape
    copies = max(cp_size // key.shape[1], 1)  # ranks that share a KV head
    parts = [query, *(x.repeat_interleave(copies, 1) if copies > 1 else x for x in (key, value))]
    pieces = torch.cat([x.unflatten(1, (cp_size, -1)).transpose(0, 1) for x in parts], 2)  # [cp, t/cp, heads, d]
    sizes = [x.shape[1] // cp_size for x in parts]
    whole = all_to_all(group, pieces).view(cp_size * rows, -1, d)  # rank order is token order
    return whole.split(sizes, 1)


def exchange_heads(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Exchange token shards for head shards of one tensor: [t/cp, n, d] -> [t, n/cp, d]; cp divides n."""
    pieces = x.unflatten(1, (group.size(), -1)).transpose(0, 1)  # [cp, t/cp, n/cp, d]
    return all_to_all(group, pieces.contiguous()).flatten(0, 1)  # rank order is token order


def exchange_to_tokens(output: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Exchange head shards for token shards: [t, np/cp, d] -> [t/cp, np, d]; one all-to-all, differentiable."""
    pieces = output.unflatten(0, (group.size(), -1))  # [cp, t/cp, np/cp, d]
    return all_to_all(group, pieces).transpose(0, 1).flatten(1, 2)
