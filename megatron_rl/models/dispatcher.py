# SPDX-License-Identifier: Apache-2.0
"""Token dispatcher for MoE layers without host syncs, for CUDA graphs: shapes depend only on the number of tokens.

Ranks that share experts (expert tensor parallelism) gather all rows and reduce-scatter the sums. Rows and additions
keep megatron-core's order, for bitwise equal results. Under expert parallelism sizes depend on the routes, so
megatron-core's dispatcher stays.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import unpermute
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from torch.autograd.function import once_differentiable


@dataclass(frozen=True)
class _Choices:
    """Routing state of a layer's tokens between dispatch and combine.

    Attributes:
        size: [t, 1, h], shape of the hidden states.
        tokens: [t k] token of each row; rows are sorted by expert, then by token.
        experts: [t k] expert of each row.
        counts: [E] rows per expert, over all ranks that share it.
        order: [ranks t k] permutation from rank order to expert order; `None` without expert TP.
    """

    size: torch.Size
    tokens: torch.Tensor
    experts: torch.Tensor
    counts: torch.Tensor
    dtype: torch.dtype
    order: torch.Tensor | None = None
    inverse: torch.Tensor | None = None


class LocalDispatcher(MoETokenDispatcher):
    """megatron-core token dispatcher for ranks that hold all experts, whole or as column shards."""

    _choices: _Choices | None = None

    def dispatch_preprocess(
        self, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return rows sorted by expert, and their shares.

        Args:
            hidden_states: [t, 1, h].
            routing_map: [t, E] bool, with `moe_router_topk` choices per token.
            probs: [t, E].
        """
        num_tokens, size = len(routing_map), hidden_states.shape
        chosen = routing_map.T.flatten().nonzero_static(size=num_tokens * self.config.moe_router_topk).squeeze(1)
        tokens = chosen % num_tokens
        self._choices = _Choices(size, tokens, chosen // num_tokens, routing_map.sum(0), probs.dtype)
        rows = hidden_states.view(-1, size[-1]).index_select(0, tokens)
        return rows, probs.T.flatten().index_select(0, chosen)

    def token_dispatch(self, hidden_states: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the inputs: no row leaves the rank."""
        return hidden_states, probs

    def dispatch_postprocess(
        self, hidden_states: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return rows, row counts [E] and shares of all ranks that share the experts."""
        choices, group = self._under_way, self.tp_group
        if self.tp_size > 1:
            with torch.no_grad():
                experts = gather_from_sequence_parallel_region(choices.experts, group=group)
                order = experts.argsort(stable=True)
                counts = torch.zeros_like(choices.counts).index_add_(0, experts, torch.ones_like(experts))
            self._choices = choices = replace(choices, counts=counts, order=order, inverse=order.argsort())
            # Rebinding one name frees the gathered rows once they are reordered.
            sizes = [len(choices.tokens)] * self.tp_size
            hidden_states = gather_from_sequence_parallel_region(hidden_states, group=group, output_split_sizes=sizes)
            hidden_states = _Reordered.apply(hidden_states, choices.order, choices.inverse)
            probs = gather_from_sequence_parallel_region(probs, group=group, output_split_sizes=sizes)
            probs = _Reordered.apply(probs, choices.order, choices.inverse)
        return hidden_states, choices.counts, probs

    def combine_preprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows, summed over the ranks that share the experts."""
        choices = self._under_way
        if choices.order is None:
            return hidden_states
        rows = _Reordered.apply(hidden_states, choices.inverse, choices.order)
        # dtype and collective are megatron-core's: gloo's other collectives add in another order.
        sizes = [len(choices.tokens)] * self.tp_size
        summed = reduce_scatter_to_sequence_parallel_region(
            rows.to(choices.dtype), group=self.tp_group, input_split_sizes=sizes
        )
        return summed.to(hidden_states.dtype)

    def token_combine(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the input: no row left the rank."""
        return hidden_states

    def combine_postprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the sum of each token's rows, [t, 1, h]."""
        choices, self._choices = self._under_way, None
        num_tokens = choices.size[:-1].numel()
        sums = unpermute(hidden_states, choices.tokens, torch.Size([num_tokens, choices.size[-1]]))
        return sums.view(choices.size)

    @property
    def _under_way(self) -> _Choices:
        assert self._choices is not None, "megatron-core sorts before it computes"
        return self._choices


class _Reordered(torch.autograd.Function):
    """Permutation of rows whose gradient is a gather instead of `index_select`'s scatter-add."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(inverse)
        return rows.index_select(0, order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return gradient.index_select(0, inverse), None, None


def set_dispatcher(layer: MoELayer, groups: Any) -> None:
    """Use a `LocalDispatcher` in this layer unless the layout has expert parallelism."""
    if groups.ep.size() == 1:
        layer.token_dispatcher = LocalDispatcher(layer.config, groups)
    else:
        layer.register_forward_hook(_forget_shares)


def _forget_shares(layer: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Release the shares in megatron-core's dispatcher: they keep a layer's input and its gradient alive."""
    vars(layer.token_dispatcher).update(probs=None)
