# SPDX-License-Identifier: Apache-2.0
"""Routers that replay given routes and record the routes they use.

When two gates are nearly equal, bitwise differences between engine and trainer flip an expert, and the token's log-prob
moves by orders of magnitude more than otherwise. Replaying the routes of the engine (R3, arXiv 2510.11370) or of the
`old_logprobs` pass (R2, arXiv 2507.18071) prevents this. Only the choice is replayed; routing weights and gradients
come from the current gates.

The token dispatcher never syncs with the host, for CUDA graphs: shapes depend only on the number of tokens. Ranks that
share experts (expert tensor parallelism) gather all rows and reduce-scatter the sums, in megatron-core's order, for
equal bits. Expert parallelism uses megatron-core's dispatcher, since sizes depend on the routes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe import shared_experts
from megatron.core.transformer.moe.moe_utils import unpermute
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch.autograd.function import once_differentiable

from megatron_rl.parallel.collectives import current_device
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.weights.families import FAMILIES, ModelShape


def list_settings(shape: ModelShape, layout: ParallelLayout, *, overlap_shared_experts: bool) -> dict[str, Any]:
    """Return the options of megatron-core's `TransformerConfig` for a mixture of experts."""
    names = FAMILIES[shape.family].experts
    assert names is not None, f"{shape.family} is dense"
    settings: dict[str, Any] = dict(
        num_moe_experts=shape.num_experts,
        moe_router_topk=shape.experts_per_token,
        moe_ffn_hidden_size=shape.ffn_hidden_size,
        moe_shared_expert_intermediate_size=shape.shared_ffn_size or None,
        moe_shared_expert_gate=names.shared_gate is not None,
        moe_shared_expert_overlap=overlap_shared_experts and layout.ep_size > 1 and shape.shared_ffn_size > 0,
        # Softmax over the selected experts' logits = shares that are normalized after the selection.
        moe_router_pre_softmax=not shape.normalizes_shares,
        moe_router_load_balancing_type="none",
        moe_aux_loss_coeff=0.0,
        moe_grouped_gemm=False,
        expert_model_parallel_size=layout.ep_size,
        expert_tensor_parallel_size=layout.expert_tp_size,
    )
    if (router := shape.router) is not None:  # its bias is our own parameter, see `BiasedRouter`
        has_groups = router.num_groups > 1
        settings |= dict(
            moe_router_score_function="sigmoid",
            moe_router_dtype="fp32",
            moe_router_topk_scaling_factor=router.scale,
            moe_router_num_groups=router.num_groups if has_groups else None,
            moe_router_group_topk=router.groups_per_token if has_groups else None,
        )
    return settings


@dataclass(frozen=True)
class RoutingCounts:
    """Router statistics of a rank over the tokens in the loss, summed over microbatches."""

    loads: torch.Tensor  # [layers, experts], tokens per expert
    entropy: torch.Tensor  # [layers], sum over tokens of the gate's entropy, in nats
    # replayed, agreeing: [layers], tokens with a route to replay, and those that the router alone would have routed
    # equally.
    replayed: torch.Tensor
    agreeing: torch.Tensor
    strayed: torch.Tensor  # [], tokens that did not follow their route; nonzero means a bug

    @classmethod
    def of(cls, flat: torch.Tensor, layers: int, experts: int) -> RoutingCounts:
        """View a tensor [layers * (experts + 3) + 1] as counts."""
        loads, entropy, replayed, agreeing, strayed = flat.split([layers * experts, layers, layers, layers, 1])
        return cls(loads.view(layers, experts), entropy, replayed, agreeing, strayed[0])


@dataclass(frozen=True)
class RowRoutes:
    """Routes (experts chosen in each MoE layer) of a rank's packed rows, to replay and to record."""

    # [rows, layers, choices] routes to replay, or `None`; the dtype's maximum marks rows without a route.
    given: torch.Tensor | None = None
    used: torch.Tensor | None = None  # output, shape of `given`: the chosen experts, or `None`
    counted: torch.Tensor | None = None  # [rows] bool, tokens in the loss, or `None`
    # Output, [rows] bool: in some layer the router alone would have chosen other experts.
    flipped: torch.Tensor | None = None
    # Incremented in forwards with gradients only, so recomputation does not count twice.
    counts: RoutingCounts | None = None

    def choose(self, layer: int, own: torch.Tensor) -> torch.Tensor:
        """Return and record the experts of each row, [rows, choices]: a given route, else the router's `own` choice."""
        chosen = own
        if self.given is not None:
            given = self.given[:, layer]
            chosen = torch.where(_is_known(given), given.long(), own)
            if self.flipped is not None:
                differs = (own.sort(-1).values != chosen.sort(-1).values).any(-1)
                self.flipped.logical_or_(_is_known(given)[:, 0] & differs)
        if self.used is not None:
            self.used[:, layer] = chosen.to(self.used.dtype)
        return chosen

    def count(self, layer: int, own: torch.Tensor, logits: torch.Tensor, routing_map: torch.Tensor) -> None:
        """Add a layer's routing to `counts`, if there are any and gradients are enabled.

        Args:
            own: [rows, choices] the router's own choice.
            logits: [rows, experts] of the gate.
            routing_map: [rows, experts] bool, the final choice.
        """
        if self.counts is None or self.counted is None or not torch.is_grad_enabled():
            return
        counts, mask = self.counts, self.counted
        counts.loads[layer] += (routing_map & mask[:, None]).sum(0)
        logprobs = logits.detach().double().log_softmax(-1)
        counts.entropy[layer] -= torch.where(mask[:, None], logprobs.exp() * logprobs, 0.0).sum()
        if self.given is not None:
            given = self.given[:, layer]
            known = _is_known(given)[:, 0] & mask
            agrees = routing_map.gather(1, own).all(-1)
            follows = routing_map.gather(1, torch.where(known[:, None], given.long(), 0)).all(-1)
            counts.replayed[layer] += known.sum()
            counts.agreeing[layer] += (known & agrees).sum()
            counts.strayed.add_((known & ~follows).sum())


def _is_known(routes: torch.Tensor) -> torch.Tensor:
    return routes[:, :1] != torch.iinfo(routes.dtype).max


class _Selection:
    """Stand-in for megatron-core's RouterReplay, called inside the router's forward to choose the experts."""

    def __init__(self, layer: int, routes: RowRoutes) -> None:
        self.layer, self.routes = layer, routes
        self.own = torch.empty(0)  # the router's own choice

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        compute_topk: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scores and indices of the chosen experts, [rows, choices] each."""
        values, self.own = compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        chosen = self.routes.choose(self.layer, self.own)
        return (values, chosen) if chosen is self.own else (scores.gather(1, chosen), chosen)


class RoutedRouter(TopKRouter):
    """megatron-core's router with optional route replay."""

    router_replay: Any

    def take(self, layer: int, routes: RowRoutes | None) -> None:
        """Set the routes that the next forward replays and records; `layer`: negative index into the routes' layers."""
        self.router_replay = None if routes is None else _Selection(layer, routes)

    def routing(
        self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return routing weights [rows, experts] and the routing map [rows, experts] bool."""
        shares, routing_map = super().routing(logits, padding_mask)
        if (replay := self.router_replay) is not None:
            replay.routes.count(replay.layer, replay.own, logits.flatten(0, -2), routing_map)
        return shares, routing_map


class BiasedRouter(RoutedRouter):
    """Router that selects experts by biased scores and weighs them by unbiased ones (arXiv 2408.15664).

    The bias [E] is a float32 weight without gradient. megatron-core's own counts tokens in every forward pass, and
    uses global process groups.
    """

    def __init__(self, config: TransformerConfig, *arguments: Any, **options: Any) -> None:
        super().__init__(config, *arguments, **options)
        assert self.num_experts is not None, "a router has experts to choose from"
        self.expert_bias = torch.nn.Parameter(
            torch.zeros(self.num_experts, dtype=torch.float32, device=current_device()), requires_grad=False
        )

    @torch.no_grad()
    def shift_bias(self, loads: torch.Tensor, rate: float) -> None:
        """Shift each bias by +-`rate` to balance `loads`, the tokens per expert [E] (2408.15664, algorithm 1)."""
        self.expert_bias += rate * (loads.double().mean() - loads).sign().to(self.expert_bias)


class RoutedLayer(TransformerLayer):
    """MoE layer that gives its rows' expert routes to its router; uses `LocalDispatcher` without expert parallelism."""

    mlp: Any

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        mlp, groups = self.mlp, options["pg_collection"]
        if groups.ep.size() == 1:
            mlp.token_dispatcher = LocalDispatcher(mlp.config, groups)
        else:  # megatron-core's dispatcher would keep a layer's input and its gradient alive by the shares
            mlp.register_forward_hook(lambda layer, *_: vars(layer.token_dispatcher).update(probs=None))

    def forward(self, *arguments: Any, **options: Any) -> Any:
        """Run megatron-core's forward; `packed_seq_params` is passed by name."""
        self.mlp.router.take(self.layer_number - 1 - self.config.num_layers, options["packed_seq_params"].routes)
        return super().forward(*arguments, **options)


_STREAMS: dict[str, Any] = {}  # of this process


class OverlappedSharedExperts(SharedExpertMLP):
    """megatron-core's shared experts, computed on another stream while tokens go to expert parallel ranks and return.

    All layers share the stream, and so its memory; megatron-core has a stream per layer, and uses the global TP group.
    """

    tp_group: Any

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.stream = _STREAMS.setdefault("shared experts", self.stream)

    def pre_forward_comm(self, input: torch.Tensor) -> None:
        """Gather the hidden states [t, 1, h], or [t/tp, 1, h], of the TP ranks."""
        with _communicate_over(self.tp_group):
            super().pre_forward_comm(input)

    def post_forward_comm(self) -> None:
        """Sum the outputs of the TP ranks."""
        with _communicate_over(self.tp_group):
            super().post_forward_comm()


@contextmanager
def _communicate_over(group: dist.ProcessGroup) -> Iterator[None]:
    """Give `group` to the collectives of megatron-core's module, which uses its global one."""
    module: Any = shared_experts
    names = module.__dict__
    real = {name: call for name, call in names.items() if name.endswith("_region")}
    names.update({name: partial(call, group=group) for name, call in real.items()})
    try:
        yield
    finally:
        names.update(real)


@dataclass(frozen=True)
class _Choices:
    """Routing of a layer's t tokens, k experts each, between dispatch and combine."""

    size: torch.Size  # [t, 1, h], shape of the hidden states
    tokens: torch.Tensor  # [t k] token of each row; rows are sorted by expert, then by token
    experts: torch.Tensor  # [t k] expert of each row
    counts: torch.Tensor  # [E] rows per expert, over all ranks that share it
    dtype: torch.dtype
    # [ranks t k] permutation from rank order to expert order; `None` without expert TP.
    order: torch.Tensor | None = None
    inverse: torch.Tensor | None = None


class LocalDispatcher(MoETokenDispatcher):
    """megatron-core token dispatcher for ranks that hold all experts, whole or as column shards."""

    _choices: _Choices  # between dispatch and combine

    def dispatch_preprocess(
        self, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a row per token and chosen expert, sorted by expert, and the rows' routing weights.

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
        """Return rows, row counts [E] and routing weights of all ranks that share the experts."""
        choices, group = self._choices, self.tp_group
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
        choices = self._choices
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
        choices = self._choices
        del self._choices
        num_tokens = choices.size[:-1].numel()
        sums = unpermute(hidden_states, choices.tokens, torch.Size([num_tokens, choices.size[-1]]))
        return sums.view(choices.size)


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
