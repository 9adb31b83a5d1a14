# SPDX-License-Identifier: Apache-2.0
"""Replaces the linear layers in a layer spec with ones that have adapters or NF4 weights."""

from __future__ import annotations

from functools import cache
from typing import Any

from megatron.core.transformer import ModuleSpec, TransformerConfig

from megatron_rl.models.lora_linears import adapt_linear
from megatron_rl.models.quantized import QuantizedLinear
from megatron_rl.weights.adapters import AdapterShape


def _put_in_front(part: type, spec: Any) -> Any:
    """Mix `part` into the class of a linear spec."""
    if isinstance(spec, ModuleSpec):
        return ModuleSpec(module=_combine(part, spec.module), params=spec.params)
    return _combine(part, spec)


@cache
def _combine(part: type, linear: Any) -> type:
    return type(part.__name__ + linear.__name__, (part, linear), {})


def adapt_layer(config: TransformerConfig, adapters: AdapterShape, attention: Any, mlp: Any) -> None:
    """Replace the linears of a layer with adapted or NF4 ones, in place.

    Args:
        attention: submodules spec.
        mlp: submodules spec, or `None` in a layer of experts.
    """
    shape, tp_size = adapters.base, config.tensor_model_parallel_size
    q, kv, ffn = (
        size // tp_size
        for size in (shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim, shape.ffn_hidden_size)
    )
    attention.linear_qkv = adapt_linear(attention.linear_qkv, adapters, {"q.weight": q, "k.weight": kv, "v.weight": kv})
    attention.linear_proj = adapt_linear(attention.linear_proj, adapters, {"o": shape.hidden_size})
    if mlp is not None:
        mlp.linear_fc1 = adapt_linear(mlp.linear_fc1, adapters, {"gate": ffn, "up": ffn})
        mlp.linear_fc2 = adapt_linear(mlp.linear_fc2, adapters, {"down": shape.hidden_size})
    if adapters.is_quantized:
        attention.linear_qkv = _put_in_front(QuantizedLinear, attention.linear_qkv)
        attention.linear_proj = _put_in_front(QuantizedLinear, attention.linear_proj)
        if mlp is not None:
            mlp.linear_fc1 = _put_in_front(QuantizedLinear, mlp.linear_fc1)
            mlp.linear_fc2 = _put_in_front(QuantizedLinear, mlp.linear_fc2)
