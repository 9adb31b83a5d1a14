# SPDX-License-Identifier: Apache-2.0
"""What is made of the final hidden states: log-probs of tokens, or one score per position.

The model hands over `[t, 1, h]`, equal on all TP ranks, or `[t/tp, 1, h]` under sequence parallelism. Which function
brings them to the head decides what its backward adds up:

* the output layer is split over TP, so each rank's gradient of the hidden states is a part of a sum over the
  vocabulary: `gather_for_vocab_shards` adds them up (all-reduce, or reduce-scatter under sequence parallelism);
* the score head is replicated. Without sequence parallelism every rank computes the same and nothing is to be added;
  with it a rank scores its own positions, the scores (not the hidden states) are gathered, and the head's weight
  has a partial gradient, which Megatron sums over TP because of the weight's `sequence_parallel` mark.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer import TransformerConfig

from megatron_rl.parallel.collectives import current_device


def gather_for_vocab_shards(
    hidden: torch.Tensor, *, sequence_parallel: bool, tp_group: dist.ProcessGroup
) -> torch.Tensor:
    """[t, 1, h] (or [t/tp, 1, h] with `sequence_parallel`) -> [t, h] for heads that are split over TP."""
    if sequence_parallel:
        return gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True, group=tp_group)[:, 0]
    return copy_to_tensor_model_parallel_region(hidden, group=tp_group)[:, 0]


class ScoreHead(torch.nn.Module):
    """A linear layer from a hidden state to one number, without bias, the same on every TP rank."""

    def __init__(self, config: TransformerConfig, tp_group: dist.ProcessGroup) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(
            torch.zeros(1, config.hidden_size, dtype=config.params_dtype, device=current_device())
        )
        # A replica, of which TP rank 0's counts in the global gradient norm; its gradient is partial under TP-SP.
        set_tensor_model_parallel_attributes(self.weight, is_parallel=False, dim=-1, stride=1)
        vars(self.weight)["sequence_parallel"] = config.sequence_parallel
        self._sequence_parallel, self._tp_group = config.sequence_parallel, tp_group

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[t, 1, h] (or [t/tp, 1, h] under sequence parallelism) -> [t] scores, computed in float32."""
        scores = (hidden[:, 0].float() @ self.weight[0].float())[:, None]  # [t, 1]
        if self._sequence_parallel:
            # All ranks take the same loss of all scores: no gradients to add up, each keeps its own positions' part.
            scores = gather_from_sequence_parallel_region(
                scores, tensor_parallel_output_grad=False, group=self._tp_group
            )
        return scores[:, 0]
