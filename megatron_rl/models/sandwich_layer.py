# SPDX-License-Identifier: Apache-2.0
"""Layers that normalize the outputs of attention and MLP, besides inputs (Gemma 3, GLM-4) or only outputs (OLMo 2)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_layer import TransformerLayer


class SandwichLayer(TransformerLayer):
    """megatron-core layer with extra norms `post_self_attn_layernorm` and `post_mlp_layernorm`."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        config = self.config
        norm: Any = self.submodules_config.input_layernorm
        self.post_self_attn_layernorm, self.post_mlp_layernorm = (
            build_module(norm, config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon)
            for _ in range(2)
        )
        self.self_attn_bda = _add_normalized(self.post_self_attn_layernorm)
        self.mlp_bda = _add_normalized(self.post_mlp_layernorm)


class OutputNormLayer(SandwichLayer):
    """`SandwichLayer` without the norms of the inputs."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        for name in ("input_layernorm", "pre_mlp_layernorm"):
            self.add_module(name, IdentityOp())


def _add_normalized(norm: Any) -> Callable[..., Callable[..., torch.Tensor]]:
    """Return a replacement for megatron-core's bias-dropout-add that normalizes the output before the sum."""

    def add(result: tuple[torch.Tensor, torch.Tensor | None], residual: torch.Tensor, dropout: float) -> torch.Tensor:
        output, bias = result
        assert bias is None and dropout == 0.0, "matrices without a bias, and no dropout"
        return residual + norm(output)

    return lambda is_training, fused: add
