# SPDX-License-Identifier: Apache-2.0
"""Heads on the final hidden states `[t, 1, h]`, equal on all TP ranks, or `[t/tp, 1, h]` under sequence parallelism.

* output layer, split over TP: `gather_for_vocab_shards` sums the ranks' gradients of hidden states, partial sums over
  the vocabulary;
* score head, replicated: nothing to sum. Under sequence parallelism ranks score their own positions and gather the
  scores; Megatron sums the weight's partial gradient because of its `sequence_parallel` mark.
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
    """Map [t, 1, h] ([t/tp, 1, h] with `sequence_parallel`) to [t, h] for a head that is split over TP."""
    if sequence_parallel:
        return gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True, group=tp_group)[:, 0]
    return copy_to_tensor_model_parallel_region(hidden, group=tp_group)[:, 0]


class ScoreHead(torch.nn.Module):
    """Bias-free linear from a hidden state to one score, replicated over TP."""

    def __init__(self, config: TransformerConfig, tp_group: dist.ProcessGroup) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(
            torch.zeros(1, config.hidden_size, dtype=config.params_dtype, device=current_device())
        )
        # A replica: only TP rank 0's gradient counts in the global norm. The gradient is partial under TP-SP.
        set_tensor_model_parallel_attributes(self.weight, is_parallel=False, dim=-1, stride=1)
        vars(self.weight)["sequence_parallel"] = config.sequence_parallel
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
