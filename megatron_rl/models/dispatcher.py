# SPDX-License-Identifier: Apache-2.0
"""Tokens of a rank sorted by expert and back, in shapes that follow from the number of tokens alone.

A token has as many choices as every other, so a rank has tokens x choices rows, whatever the routers choose; which they
are, and where each expert's end, stays on the device. The host reads nothing, and a CUDA graph can hold all of it.
Where ranks share each expert (expert tensor parallelism) they gather the rows of all, compute their columns, and each
gets the sums of its own: sizes that are fixed as well. Rows and additions come in the order of megatron-core's
dispatchers, so the bits are theirs.

Where experts are dealt to ranks, how many rows go to each depends on the routes: there megatron-core's stays.
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
    """The choices of a layer's tokens while they are under way.

    Attributes:
        size: of the hidden states, [t, 1, h].
        tokens: [t k] whose choice each row is; rows are sorted by expert, and by token within one.
        experts: [t k] where each row goes.
        counts: [E] rows of each expert, of all ranks that share it.
        order: [ranks t k] the rows of all ranks sorted by expert, as indices of rows sorted by rank; `inverse` undoes
            it. None: a rank has its experts for itself.
        dtype: of the shares.
    """

    size: torch.Size
    tokens: torch.Tensor
    experts: torch.Tensor
    counts: torch.Tensor
    dtype: torch.dtype
    order: torch.Tensor | None = None
    inverse: torch.Tensor | None = None


class LocalDispatcher(MoETokenDispatcher):
    """For ranks that have all experts, whole or some columns of each; called as megatron-core calls its own."""

    _choices: _Choices | None = None

    def dispatch_preprocess(
        self, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states [t, 1, h], [t, E] bool with so many choices in every row, shares [t, E] -> rows and shares."""
        num_tokens, size = len(routing_map), hidden_states.shape
        chosen = routing_map.T.flatten().nonzero_static(size=num_tokens * self.config.moe_router_topk).squeeze(1)
        tokens = chosen % num_tokens
        self._choices = _Choices(size, tokens, chosen // num_tokens, routing_map.sum(0), probs.dtype)
        rows = hidden_states.view(-1, size[-1]).index_select(0, tokens)
        return rows, probs.T.flatten().index_select(0, chosen)

    def token_dispatch(self, hidden_states: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Nothing: no row leaves for another expert's rank."""
        return hidden_states, probs

    def dispatch_postprocess(
        self, hidden_states: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What the experts take, of all ranks that share them: rows, how many each has [E], and shares."""
        choices, group = self._under_way, self.tp_group
        if self.tp_size > 1:
            with torch.no_grad():
                experts = gather_from_sequence_parallel_region(choices.experts, group=group)
                order = experts.argsort(stable=True)
                counts = torch.zeros_like(choices.counts).index_add_(0, experts, torch.ones_like(experts))
            self._choices = choices = replace(choices, counts=counts, order=order, inverse=order.argsort())
            # Under one name: what is gathered does not outlive its copy in another order.
            sizes = [len(choices.tokens)] * self.tp_size
            hidden_states = gather_from_sequence_parallel_region(hidden_states, group=group, output_split_sizes=sizes)
            hidden_states = _Reordered.apply(hidden_states, choices.order, choices.inverse)
            probs = gather_from_sequence_parallel_region(probs, group=group, output_split_sizes=sizes)
            probs = _Reordered.apply(probs, choices.order, choices.inverse)
        return hidden_states, choices.counts, probs

    def combine_preprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Rows of this rank, summed over the ranks that share the experts."""
        choices = self._under_way
        if choices.order is None:
            return hidden_states
        rows = _Reordered.apply(hidden_states, choices.inverse, choices.order)
        # In the type of the shares, and by the collective that megatron-core calls: gloo's others add in another order.
        sizes = [len(choices.tokens)] * self.tp_size
        summed = reduce_scatter_to_sequence_parallel_region(
            rows.to(choices.dtype), group=self.tp_group, input_split_sizes=sizes
        )
        return summed.to(hidden_states.dtype)

    def token_combine(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Nothing: every row is back."""
        return hidden_states

    def combine_postprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The sum of each token's rows, [t, 1, h]."""
        choices, self._choices = self._under_way, None
        num_tokens = choices.size[:-1].numel()
        sums = unpermute(hidden_states, choices.tokens, torch.Size([num_tokens, choices.size[-1]]))
        return sums.view(choices.size)

    @property
    def _under_way(self) -> _Choices:
        assert self._choices is not None, "megatron-core sorts before it computes"
        return self._choices


class _Reordered(torch.autograd.Function):
    """Rows in another order; `index_select` does not know that its gradient is an order as well."""

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
    """Give a layer the dispatcher of its layout.

    Args:
        layer: with one of megatron-core's.
        groups: megatron-core's collection, with the groups of expert and expert tensor parallelism.
    """
    if groups.ep.size() == 1:
        layer.token_dispatcher = LocalDispatcher(layer.config, groups)
    else:
        layer.register_forward_hook(_forget_shares)


def _forget_shares(layer: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """megatron-core's dispatchers keep the shares, and with them a layer's input and its gradient."""
    vars(layer.token_dispatcher).update(probs=None)
