# SPDX-License-Identifier: Apache-2.0
"""Gated delta nets (Qwen3-Next, Qwen3.5): sizes and tensors."""

from __future__ import annotations

from dataclasses import dataclass

CONV_PARTS = ("delta_conv.q", "delta_conv.k", "delta_conv.v")  # stacked by rows
QKV_PARTS = ("delta_q", "delta_k", "delta_v")  # likewise
# Parts of each engine parameter, for fused and for split projections.
_TOGETHER = (("delta_qkvz",), ("delta_ba",))
_APART = ((*QKV_PARTS, "delta_z"), ("delta_b", "delta_a"))
PROJECTION_KINDS = tuple(kind for parts in (*_TOGETHER, *_APART) for kind in parts)
_PROJECTIONS = {"in_proj_qkvz.weight": "delta_qkvz", "in_proj_ba.weight": "delta_ba"}
_SEPARATE_PROJECTIONS = {
    "in_proj_qkv.weight": "delta_qkv",
    "in_proj_z.weight": "delta_z",
    "in_proj_b.weight": "delta_b",
    "in_proj_a.weight": "delta_a",
}


@dataclass(frozen=True)
class DeltaNetSizes:
    """Head sizes of a gated delta net.

    Attributes:
        key_heads, value_heads: heads of the whole model, equally many value heads per key head.
        key_dim, value_dim: channels per head.
        kernel: width of the convolution in tokens.
        is_split: separate projections of [q; k; v], gates, and each logit (Qwen3.5), instead of two that are
            interleaved per key head (Qwen3-Next).
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    is_split: bool = False

    @property
    def tensor_kinds(self) -> dict[str, str]:
        """Tensor -> kind, in checkpoint order."""
        return {
            "dt_bias": "delta_head",
            "A_log": "delta_head",
            "conv1d.weight": "delta_conv",
            **(_SEPARATE_PROJECTIONS if self.is_split else _PROJECTIONS),
            "norm.weight": "delta_norm",
            "out_proj.weight": "delta_o",
        }

    @property
    def projections(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Kinds of the projections in Megatron's order; engines have one parameter per tuple."""
        return _APART if self.is_split else _TOGETHER

    @property
    def values_of_key(self) -> int:
        """Value channels per key head."""
        return self.value_heads // self.key_heads * self.value_dim

    @property
    def width(self) -> int:
        """Channels of query, key, values and gates per key head."""
        return 2 * (self.key_dim + self.values_of_key)

    @property
    def num_logits(self) -> int:
        """Logits per key head, two per value head."""
        return 2 * self.value_heads // self.key_heads

    @property
    def convolved(self) -> tuple[int, int, int]:
        """Channels of all queries, keys and values."""
        keys = self.key_heads * self.key_dim
        return keys, keys, self.value_heads * self.value_dim

    def kind_sizes(self, hidden_size: int) -> dict[str, tuple[int, ...]]:
        """Return kind -> shape."""
        q, k, v = self.convolved
        heads = self.value_heads
        projected = {"delta_q": q, "delta_k": k, "delta_v": v, "delta_z": v, "delta_b": heads, "delta_a": heads}
        if not self.is_split:
            projected = {"delta_qkvz": self.key_heads * self.width, "delta_ba": self.key_heads * self.num_logits}
        return {
            "delta_head": (self.value_heads,),
            **{kind: (n, hidden_size) for kind, n in projected.items()},
            "delta_norm": (self.value_dim,),
            "delta_o": (hidden_size, self.value_heads * self.value_dim),
            **{kind: (n, 1, self.kernel) for kind, n in zip(CONV_PARTS, self.convolved, strict=True)},
        }
