# SPDX-License-Identifier: Apache-2.0
"""Gated delta nets (Qwen3-Next): their sizes, their tensors, and what their recurrence excludes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_rl.types import UserError

# Tensors of a gated delta net -> their kinds, in the order of the checkpoint.
DELTA_KINDS = {
    "dt_bias": "delta_head",
    "A_log": "delta_head",
    "conv1d.weight": "delta_conv",
    "in_proj_qkvz.weight": "delta_qkvz",
    "in_proj_ba.weight": "delta_ba",
    "norm.weight": "delta_norm",
    "out_proj.weight": "delta_o",
}
CONV_PARTS = ("delta_conv.q", "delta_conv.k", "delta_conv.v")  # one below the other


@dataclass(frozen=True)
class DeltaNetSizes:
    """Heads of a gated delta net: each key head has equally many value heads.

    Attributes:
        key_heads, value_heads: of the whole model.
        key_dim, value_dim: channels of a head.
        kernel: tokens that its convolution sees.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int

    @property
    def values_of_key(self) -> int:
        """Channels of the value heads of a key head."""
        return self.value_heads // self.key_heads * self.value_dim

    @property
    def width(self) -> int:
        """Channels of a key head's query, key, values and gates."""
        return 2 * (self.key_dim + self.values_of_key)

    @property
    def num_logits(self) -> int:
        """Of a key head: two for each of its value heads."""
        return 2 * self.value_heads // self.key_heads

    @property
    def convolved(self) -> tuple[int, int, int]:
        """Channels of all queries, keys and values."""
        keys = self.key_heads * self.key_dim
        return keys, keys, self.value_heads * self.value_dim

    def kind_sizes(self, hidden_size: int) -> dict[str, tuple[int, ...]]:
        """Kind of a tensor -> its shape."""
        return {
            "delta_head": (self.value_heads,),
            "delta_qkvz": (self.key_heads * self.width, hidden_size),
            "delta_ba": (self.key_heads * self.num_logits, hidden_size),
            "delta_norm": (self.value_dim,),
            "delta_o": (hidden_size, self.value_heads * self.value_dim),
            **{kind: (n, 1, self.kernel) for kind, n in zip(CONV_PARTS, self.convolved, strict=True)},
        }


def read_delta_nets(config: dict[str, Any], source: str) -> dict[str, Any]:
    """The fields of a ModelShape that gated delta nets have.

    Raises:
        UserError: layers of other types, or heads that cannot be shared out.
    """
    layers, interval = range(config["num_hidden_layers"]), config.get("full_attention_interval", 4)
    types = config.get("layer_types") or [
        "linear_attention" if (i + 1) % interval else "full_attention" for i in layers
    ]
    net = DeltaNetSizes(
        config["linear_num_key_heads"],
        config["linear_num_value_heads"],
        config["linear_key_head_dim"],
        config["linear_value_head_dim"],
        config["linear_conv_kernel_dim"],
    )
    wrong = set(types) - {"linear_attention", "full_attention"}
    if wrong or len(types) != len(layers) or net.value_heads % net.key_heads:
        raise UserError(
            f"layer_types = {types}, with {net.value_heads} value heads for {net.key_heads} key heads",
            source=source,
            expected="linear_attention or full_attention for each layer, and equally many value heads for a key head",
            hint="use a checkpoint without these options",
        )
    linear = tuple(layer for layer in layers if types[layer] == "linear_attention")
    return dict(delta_net=net, delta_layers=linear) if linear else {}
