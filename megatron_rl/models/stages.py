# SPDX-License-Identifier: Apache-2.0
"""Pipeline stages of a model: subclasses of megatron-core's GPTModel that end in hidden states, and heads on them.

Hidden states are `[t, 1, h]`, equal on all TP ranks, or `[t/tp, 1, h]` under sequence parallelism.

* output layer, split over TP: `gather_for_shards` sums the ranks' partial gradients of hidden states;
* score head, replicated: under sequence parallelism ranks score their own positions and gather the scores.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import ModelParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer import TransformerConfig
from torch.distributed.tensor import DTensor

from megatron_rl.parallel.collectives import current_device


def gather_for_shards(x: torch.Tensor, *, sequence_parallel: bool, tp_group: dist.ProcessGroup) -> torch.Tensor:
    """Map [t, 1, h], or [t/tp, 1, h] with `sequence_parallel`, to [t, 1, h] for matrices that are split over TP.

    The backward sums the gradients of the TP ranks.
    """
    if sequence_parallel:
        return gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=True, group=tp_group)
    return copy_to_tensor_model_parallel_region(x, group=tp_group)


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


class ReplicatedLinear(torch.nn.Module):
    """Bias-free linear with a weight [n, h] replicated over TP."""

    def __init__(self, config: TransformerConfig, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = make_parameter(config, torch.empty, out_features, in_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [..., h] to [..., n]."""
        return F.linear(x, self.weight)


class ScoreHead(torch.nn.Module):
    """Bias-free linear from a hidden state to one score, replicated over TP."""

    def __init__(self, config: TransformerConfig, tp_group: dist.ProcessGroup) -> None:
        super().__init__()
        self.weight = make_parameter(config, torch.zeros, 1, config.hidden_size)
        self._sequence_parallel, self._tp_group = config.sequence_parallel, tp_group

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map [t, 1, h] ([t/tp, 1, h] under sequence parallelism) to [t] scores, computed in float32."""
        scores = (hidden[:, 0].float() @ self.weight[0].float())[:, None]  # [t, 1]
        if self._sequence_parallel:
            # All ranks compute the same loss of all scores, so the backward slices instead of summing.
            scores = gather_from_sequence_parallel_region(
                scores, tensor_parallel_output_grad=False, group=self._tp_group
            )
        return scores[:, 0]


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


class ScoreModel(HiddenStatesModel):
    """`HiddenStatesModel` with a `ScoreHead` named `score` in place of the output layer."""

    def __init__(self, config: TransformerConfig, *arguments: Any, **options: Any) -> None:
        super().__init__(config, *arguments, **options)
        if self.post_process:
            del self.output_layer
            self.score = ScoreHead(config, self.pg_collection.tp)


class MtpModel(HiddenStatesModel):
    """Multi-token-prediction layer (arXiv 2412.19437, section 2.2) with the main model's embedding and output layer."""

    def __init__(self, config: TransformerConfig, block: Any, **options: Any) -> None:
        super().__init__(config, block, **options)
        del self.output_layer
        norm = block.layer_norm  # `block` is a `TransformerBlockSubmodules`
        self.enorm, self.hnorm = (norm(config, config.hidden_size, config.layernorm_epsilon) for _ in range(2))
        self.eh_proj = ReplicatedLinear(config, 2 * config.hidden_size, config.hidden_size)
        self._lent: torch.Tensor | None = None

    def lend(self, output_weight: torch.Tensor) -> None:
        """Set this layer's output weight to the main model's [v/tp, h], without gradient."""
        self._lent = output_weight.detach()

    @property
    def output_weight(self) -> torch.Tensor:
        """The main model's output weight [v/tp, h] on this rank, set by `lend`."""
        assert self._lent is not None, "`lend` comes first"
        return self._lent

    def forward(self, hidden: torch.Tensor, embedded: torch.Tensor, packed_seq_params: Any) -> torch.Tensor:
        """Compute the hidden states that predict the token after the next.

        Args:
            hidden: [t, 1, h], or [t/tp, 1, h] under sequence parallelism: the main model's normalized output.
            embedded: next tokens' embeddings, same shape.
        """
        joined = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden)], -1))
        self.decoder.set_input_tensor(joined)
        return self.decoder(hidden_states=None, attention_mask=None, packed_seq_params=packed_seq_params)
