# SPDX-License-Identifier: Apache-2.0
"""What a rank has of a model: megatron-core's GPTModel as stages that end in hidden states."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig
from torch.distributed.tensor import DTensor

from megatron_rl.models.heads import ScoreHead


def local_values(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values of a parameter or a gradient that this rank has: the tensor, or its shard."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class HiddenStatesModel(GPTModel):
    """GPTModel whose last stage returns the final hidden states: [t, 1, h], or [t/tp, 1, h] under TP-SP.

    The output layer is a parameter as in GPTModel, under the same name and tied in the same way.
    """

    def _is_in_embd_group(self) -> bool:
        """Tied embeddings of two stages are not summed when they are made: both are read from the same files."""
        return False

    def _postprocess(self, hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
        return hidden_states

    @property
    def output_weight(self) -> torch.Tensor:
        """This rank's rows [v/tp, h] of the output layer, which may be the embedding; last stage only."""
        is_tied = self.share_embeddings_and_output_weights
        weight = self.shared_embedding_or_output_weight() if is_tied else self.output_layer.weight
        assert isinstance(weight, torch.nn.Parameter), "the last stage has an output layer"
        return weight


class ScoreModel(HiddenStatesModel):
    """The same with a `ScoreHead` named `score` in place of the output layer."""

    def __init__(self, config: TransformerConfig, *arguments: Any, **options: Any) -> None:
        super().__init__(config, *arguments, **options)
        if self.post_process:
            del self.output_layer
            self.score = ScoreHead(config, self.pg_collection.tp)


class MtpModel(HiddenStatesModel):
    """The layer behind the last one, which predicts the token after the next (arXiv 2412.19437, section 2.2).

    Embedding and output layer are the model's, which lends them.
    """

    def __init__(self, config: TransformerConfig, block: Any, **options: Any) -> None:
        from megatron_rl.models.latent_attention import ReplicatedLinear

        super().__init__(config, block, **options)
        del self.output_layer
        norm = block.layer_norm  # of `TransformerBlockSubmodules`, which megatron-core takes for a layer's spec
        self.enorm, self.hnorm = (norm(config, config.hidden_size, config.layernorm_epsilon) for _ in range(2))
        self.eh_proj = ReplicatedLinear(config, 2 * config.hidden_size, config.hidden_size)
        self._lent: torch.Tensor | None = None

    def lend(self, output_weight: torch.Tensor) -> None:
        """Score tokens by these rows [v/tp, h] of an output layer, which get no gradient."""
        self._lent = output_weight.detach()

    @property
    def output_weight(self) -> torch.Tensor:
        """The rows that were lent."""
        assert self._lent is not None, "`lend` comes first"
        return self._lent

    def forward(self, hidden: torch.Tensor, embedded: torch.Tensor, packed_seq_params: Any) -> torch.Tensor:
        """Hidden states from which the token after the next is predicted.

        Args:
            hidden: [t, 1, h], or [t/tp, 1, h] under TP-SP, of the model's last layer behind its norm.
            embedded: the same shape, of the tokens that follow these.
            packed_seq_params: `PackedSequences` of the rows.
        """
        joined = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden)], -1))
        self.decoder.set_input_tensor(joined)
        return self.decoder(hidden_states=None, attention_mask=None, packed_seq_params=packed_seq_params)
