# SPDX-License-Identifier: Apache-2.0
"""Routers that choose the experts they are told to, and say what they chose.

A router flips an expert where two gates are nearly equal: bits that differ between engine and trainer are enough, and
the log-probs of a token move by orders of magnitude more than they do otherwise. Replaying the routes of the engine
(R3, arXiv 2510.11370) or of the pass for `old_logprobs` (R2, arXiv 2507.18071) rules that out. Only the choice is
replayed: shares are computed from the current gates, so the router's gradient is that of the current router.

Routes belong to the rows of a microbatch. They travel with it through the layers (`PackedSequences.routes`), also
when a layer is computed again for its gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_rl.models.dispatcher import set_dispatcher
from megatron_rl.parallel.collectives import current_device


@dataclass(frozen=True)
class RoutingCounts:
    """What the routers of a rank did with the tokens in the loss, summed over microbatches; rows are layers.

    Attributes:
        loads: [layers, experts] int64, tokens of each expert.
        entropy: [layers] float64, sum over tokens of the entropy of the gate's distribution, in nats.
        replayed, agreeing: [layers] int64, tokens with a route to replay, and those whose router would have chosen
            the same experts by itself.
        strayed: [] int64, tokens that went to other experts than their route says; 0 unless the program is wrong.
    """

    loads: torch.Tensor
    entropy: torch.Tensor
    replayed: torch.Tensor
    agreeing: torch.Tensor
    strayed: torch.Tensor

    @classmethod
    def zeros(cls, layers: int, experts: int, device: torch.device) -> RoutingCounts:
        """Nothing is counted yet."""

        def make(*size: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        return cls(make(layers, experts), make(layers, dtype=torch.float64), make(layers), make(layers), make())

    def tensors(self) -> list[torch.Tensor]:
        """All of them."""
        return [self.loads, self.entropy, self.replayed, self.agreeing, self.strayed]


@dataclass(frozen=True)
class RowRoutes:
    """The routes of the rows that a rank's layers are given; tensors may be views of a batch's columns.

    Attributes:
        given: [rows, layers, choices] what to replay; its dtype's largest number: unknown, the router decides. None:
            the router decides for all.
        used: the same shape, written: what was chosen. None: nobody asks.
        counted: [rows] bool, tokens in the loss. None: nothing is counted.
        flipped: [rows] bool, written: in some layer the router alone would have chosen other experts.
        counts: added to, once for each gradient: by a forward with gradients, which recomputation repeats without.
    """

    given: torch.Tensor | None = None
    used: torch.Tensor | None = None
    counted: torch.Tensor | None = None
    flipped: torch.Tensor | None = None
    counts: RoutingCounts | None = None

    def choose(self, layer: int, own: torch.Tensor) -> torch.Tensor:
        """The experts of each row: [rows, choices] int64, given what the router chose by itself."""
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
        """Add what a layer did to the counts.

        Args:
            own: [rows, choices] what the router chose by itself.
            logits: [rows, experts] of the gate.
            routing_map: [rows, experts] bool, where the rows go.
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
    """[rows, choices] -> [rows, 1] bool."""
    return routes[:, :1] != torch.iinfo(routes.dtype).max


class _Selection:
    """Stands in the place of megatron-core's RouterReplay: asked for the experts in the midst of a router's forward."""

    def __init__(self, layer: int, routes: RowRoutes) -> None:
        self._layer, self._routes = layer, routes
        self._own = torch.empty(0)  # what the router chose by itself

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        compute_topk: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores [rows, choices] of the chosen experts, and which ones they are; called by megatron-core."""
        values, self._own = compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        chosen = self._routes.choose(self._layer, self._own)
        return (values, chosen) if chosen is self._own else (scores.gather(1, chosen), chosen)

    def count(self, logits: torch.Tensor, routing_map: torch.Tensor) -> None:
        """Add what came of it to the counts; arguments as in `RowRoutes.count`."""
        self._routes.count(self._layer, self._own, logits, routing_map)


class RoutedRouter(TopKRouter):
    """megatron-core's router, for rows with routes."""

    router_replay: Any

    def take(self, layer: int, routes: RowRoutes | None) -> None:
        """The routes of the rows of the next forward; `layer` is this router's index in them, counted from the end."""
        self.router_replay = None if routes is None else _Selection(layer, routes)

    def routing(
        self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Shares [rows, experts] of the experts, and where the rows go, [rows, experts] bool."""
        shares, routing_map = super().routing(logits, padding_mask)
        if self.router_replay is not None:
            self.router_replay.count(logits.flatten(0, -2), routing_map)
        return shares, routing_map


class BiasedRouter(RoutedRouter):
    """Chooses experts by scores with a bias, and weighs them by the scores without (arXiv 2408.15664).

    The bias [E] in float32 is a weight like others, but not trained by gradients.

    megatron-core's own bias is a buffer: it counts the tokens of every forward pass and is updated over process groups
    that it takes for global.
    """

    def __init__(self, config: TransformerConfig, *arguments: Any, **options: Any) -> None:
        super().__init__(config, *arguments, **options)
        assert self.num_experts is not None, "a router has experts to choose from"
        self.expert_bias = torch.nn.Parameter(
            torch.zeros(self.num_experts, dtype=torch.float32, device=current_device()), requires_grad=False
        )

    @torch.no_grad()
    def shift_bias(self, loads: torch.Tensor, rate: float) -> None:
        """Make experts with more tokens than the mean less likely, and the others likelier, each by `rate`.

        The rule of 2408.15664, algorithm 1: b_i += u sign(mean of c - c_i).

        Args:
            loads: [E] tokens of each expert.
            rate: u.
        """
        self.expert_bias += rate * (loads.double().mean() - loads).sign().to(self.expert_bias)


class RoutedLayer(TransformerLayer):
    """A layer with a mixture of experts, which hands the routes of its rows to its router."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        mlp: Any = self.mlp
        set_dispatcher(mlp, options["pg_collection"])

    def forward(self, *arguments: Any, **options: Any) -> Any:
        """megatron-core's, with `packed_seq_params` by name."""
        mlp: Any = self.mlp
        routes = options["packed_seq_params"].routes
        mlp.router.take(self.layer_number - 1 - self.config.num_layers, routes)
        return super().forward(*arguments, **options)
