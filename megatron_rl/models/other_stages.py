# SPDX-License-Identifier: Apache-2.0
"""Pipeline stages of critics, reward models and multi-token prediction, which end in other heads than a language model.

The score head is replicated: under sequence parallelism ranks score their own positions and gather the scores.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig

from megatron_rl.models.stages import HiddenStatesModel, make_parameter


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
