# SPDX-License-Identifier: Apache-2.0
"""A router that chooses experts by scores with a bias, and weighs them by the scores without (arXiv 2408.15664)."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer import TransformerConfig

from megatron_rl.models.routing import RoutedRouter
from megatron_rl.parallel.collectives import current_device


class BiasedRouter(RoutedRouter):
    """megatron-core's, with a bias [E] in float32 that is a weight like others, but not trained by gradients.

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
