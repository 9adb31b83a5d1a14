# SPDX-License-Identifier: Apache-2.0
"""Pipeline stages of a model: a subclass of megatron-core's GPTModel that ends in hidden states.

Hidden states are `[t, 1, h]`, equal on all TP ranks, or `[t/tp, 1, h]` under sequence parallelism. The output layer is
split over TP: `gather_for_shards` sums the ranks' partial gradients of hidden states.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import ModelParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    set_tensor_model_parallel_attributes,
)
from torch.distributed.tensor import DTensor

from megatron_rl.parallel.collectives import current_device


def gather_for_shards(x: torch.Tensor, *, sequence_parallel: bool, tp_group: dist.ProcessGroup) -> torch.Tensor:
    """Map [t, 1, h], or [t/tp, 1, h] with `sequence_parallel`, to [t, 1, h] for matrices that are split over TP.

    The backward sums the gradients of the TP ranks.
    """
    if sequence_parallel:
        return gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=True, group=tp_group)
    return copy_to_tensor_model_parallel_region(x, group=tp_group)


def combine_shards(values: torch.Tensor, index: torch.Tensor, length: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Combine the values of all ranks into the whole row, [t, ...]; differentiable, collective.

    All ranks must compute the same loss from the result: each receives only its own values' gradient, so the group's
    sum of parameter gradients is the loss's gradient.

    Args:
        values: [k, ...] of this rank.
        index: [k] int64, their positions; disjoint between ranks.
        length: t; positions that no rank fills are 0.
    """
    combined = values.new_zeros(length, *values.shape[1:]).index_copy(0, index, values)
    # Works for any group: sums forward, identity backward.
    return reduce_from_tensor_model_parallel_region(combined, group=group)


def make_parameter(
    config: ModelParallelConfig, fill: Callable[..., torch.Tensor], *size: int, split_dim: int | None = None
) -> torch.nn.Parameter:
    """Make a parameter with the attributes that megatron-core's optimizer and TP read.

    Args:
        split_dim: dimension split over TP; replicated if `None`: only TP rank 0's gradient counts in the global norm,
            and under sequence parallelism megatron-core sums the ranks' partial gradients. -1: not split, but another
            parameter on each TP rank.
    """
    parameter = torch.nn.Parameter(fill(size, dtype=config.params_dtype, device=current_device()))
    is_split = split_dim is not None
    set_tensor_model_parallel_attributes(parameter, is_parallel=is_split, dim=split_dim if is_split else -1, stride=1)
    vars(parameter)["sequence_parallel"] = config.sequence_parallel and not is_split
    return parameter


def local_values(tensor: torch.Tensor) -> torch.Tensor:
    """Return a parameter's or gradient's values on this rank: the tensor, or the local shard of a DTensor."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class HiddenStatesModel(GPTModel):
    """GPTModel whose last stage returns final hidden states: [t, 1, h], or [t/tp, 1, h] under sequence parallelism."""

    def _is_in_embd_group(self) -> bool:
        """Return False to skip the initial all-reduce of tied embeddings: both stages load equal weights."""
        return False

    def _postprocess(self, hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
        return hidden_states

    @property
    def output_weight(self) -> torch.Tensor:
        """Rows [v/tp, h] of the output layer (the embedding if tied) on this rank; last stage only."""
        is_tied = self.share_embeddings_and_output_weights
        weight = self.shared_embedding_or_output_weight() if is_tied else self.output_layer.weight
        assert isinstance(weight, torch.nn.Parameter), "the last stage has an output layer"
        return weight
