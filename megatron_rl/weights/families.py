# SPDX-License-Identifier: Apache-2.0
"""The shape of a model, from which logical tensors, placement tables and conversions are derived.

Logical tensors are as in published checkpoints, experts as one set of matrices each. A model ends in `lm_head` (or the
tied embedding), or in `score` with a single row, the head of `*ForSequenceClassification` and of our critics.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from megatron_rl.types import RouteShape
from megatron_rl.weights.family import CONV_PARTS, FAMILIES, FULL, PROJECTION_KINDS, QKV_PARTS

if TYPE_CHECKING:
    from megatron_rl.weights.head_sizes import FullHeads, LatentSizes
    from megatron_rl.weights.rope import RopeScaling
    from megatron_rl.weights.special_parts import DeltaNetSizes, SigmoidRouter

_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_ATTENTION_KINDS = {
    *("qkv", "q.weight", "k.weight", "v.weight", "o", "q_down", "q_up", "kv_down", "kv_up"),
    *(*PROJECTION_KINDS, "delta_qkv", "delta_o"),
}
Head = Literal["lm", "score"]
SCORE_HEAD = "score.weight"
NORM_KINDS = ("input_norm", "attention_output_norm", "mlp_norm", "mlp_output_norm")
DENSE, SHARED = "dense_", "shared_"  # prefixes of the kinds of dense and shared MLPs in a mixture of experts
# Tensors that only a layer for multi-token prediction has -> kinds.
MTP_KINDS = {
    "eh_proj.weight": "mtp_proj",
    "enorm.weight": "hidden",
    "hnorm.weight": "hidden",
    "shared_head.norm.weight": "hidden",
}
# Kinds of fused checkpoint tensors -> kinds of their parts, stacked by rows.
FUSED_KINDS = {
    "qkv": ("q.weight", "k.weight", "v.weight"),
    "gate_up": ("gate", "up"),
    "delta_conv": CONV_PARTS,
    "delta_qkv": QKV_PARTS,
}


@dataclass(frozen=True)
class ModelShape:
    """A decoder-only transformer: RMSNorm, rotary positions, grouped-query attention, a gated MLP.

    Attributes:
        ffn_hidden_size: MLP columns, per expert in a mixture.
        head_dim: channels per head; of queries and keys with `latent`.
        vocab_size: rows without padding.
        num_experts: experts per layer; 0 if dense.
        normalizes_shares: a token's expert weights add up to 1.
        has_score_head: the model ends in `score.weight` [1, h], without an output layer.
        rotary_dim: rotated channels per head; all if `None`.
        dense_layers: leading layers with a dense MLP of `dense_ffn_size` columns.
        shared_ffn_size: columns of the shared expert; 0 if none.
        sliding_layers: layers in which a token sees itself and `sliding_window` - 1 tokens before it.
        sliding_rope_theta: rotary base of these layers, without scaling; 0 if as in other layers.
        attention_scale: factor of attention scores; 1/sqrt(head_dim) if `None`.
        delta_layers: gated delta nets, of sizes `delta_net`.
        full_heads: sizes of heads in layers without a window, if of their own; scores are then unscaled.
        logit_softcap: c of the capped logits c tanh(z / c); not capped if `None`.
        mtp_layer: if not 0, the shape is only that layer, which follows a model's last one (multi-token prediction,
            arXiv 2412.19437).
    """

    family: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tied_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    num_experts: int = 0
    experts_per_token: int = 0
    normalizes_shares: bool = False
    has_score_head: bool = False
    rope_scaling: RopeScaling | None = None
    rotary_dim: int | None = None
    unrotated_layers: tuple[int, ...] = ()
    dense_layers: int = 0
    dense_ffn_size: int = 0
    shared_ffn_size: int = 0
    router: SigmoidRouter | None = None
    sliding_layers: tuple[int, ...] = ()
    sliding_window: int = 0
    sliding_rope_theta: float = 0.0
    attention_scale: float | None = None
    latent: LatentSizes | None = None
    delta_net: DeltaNetSizes | None = None
    delta_layers: tuple[int, ...] = ()
    full_heads: FullHeads | None = None
    logit_softcap: float | None = None
    mtp_layer: int = 0

    @property
    def route_shape(self) -> RouteShape:
        """Number of layers with a router, experts per token, and experts per layer."""
        return RouteShape(self.num_layers - self.dense_layers, self.experts_per_token, self.num_experts)

    def kind_sizes(self) -> dict[str, tuple[int, ...]]:
        """Return the full shape of each kind of tensor.

        Tensors of one kind, such as "q.weight" or "down", have equal shapes in all layers and experts, and are sharded
        alike.
        """
        h, q, kv = self.hidden_size, self.num_heads * self.query_dim, self.num_kv_heads * self.head_dim
        sizes: dict[str, tuple[int, ...]] = {
            "vocab": (self.vocab_size, h),
            **dict.fromkeys(("hidden", *NORM_KINDS), (h,)),
            "head": (self.head_dim,),
            "score": (1, h),
            "o": (h, self.num_heads * self.value_dim),
            "router": (self.num_experts, h),
            "router_bias": (self.num_experts,),
            "logit_bias": (self.num_experts,),
            "sinks": (self.num_heads,),
            "o.bias": (h,),
            "shared_router": (1, h),
            "mtp_proj": (h, 2 * h),
            "layer_scalar": (1,),
        }
        for prefix, size in self.ffn_sizes().items():
            sizes |= {f"{prefix}gate": (size, h), f"{prefix}up": (size, h), f"{prefix}down": (h, size)}
            sizes |= {f"{prefix}gate.bias": (size,), f"{prefix}up.bias": (size,), f"{prefix}down.bias": (h,)}
        for name, size in (("q", q), ("k", kv), ("v", kv)):
            sizes |= {f"{name}.weight": (size, h), f"{name}.bias": (size,), f"{name}.norm": (size,)}
        sizes |= self.latent.kind_sizes(h, self.num_heads, self.head_dim) if self.latent else {}
        sizes |= self.delta_net.kind_sizes(h) if self.delta_net else {}
        sizes |= self.full_heads.name(self.full.kind_sizes()) if self.full_heads else {}
        fused = {kind: [sizes[part] for part in parts] for kind, parts in FUSED_KINDS.items() if parts[0] in sizes}
        return sizes | {kind: (sum(n for n, *_ in parts), *parts[0][1:]) for kind, parts in fused.items()}

    @property
    def query_dim(self) -> int:
        """Rows of a head's query projection, gate included."""
        return self.head_dim * (2 if FAMILIES[self.family].has_delta_nets else 1)

    @property
    def value_dim(self) -> int:
        """Value channels per head."""
        return self.latent.value if self.latent else self.head_dim

    def ffn_sizes(self) -> dict[str, int]:
        """Return MLP columns by kind prefix: "" (MLPs or experts), `DENSE` (first dense layers), `SHARED` (experts)."""
        sizes = {"": self.ffn_hidden_size, DENSE: self.dense_ffn_size, SHARED: self.shared_ffn_size}
        return {prefix: size for prefix, size in sizes.items() if size}

    @cached_property
    def attention_elements(self) -> int:
        """Average elements of attention matrices per layer."""
        sizes, layers = self.kind_sizes(), map(self.sort_of, range(self.num_layers))
        kinds = (kind for _, *sort in layers for kind in self._attention_kinds(*sort).values())
        matrices = (sizes[kind] for kind in kinds if kind.removeprefix(FULL) in _ATTENTION_KINDS)
        return sum(size[0] * size[1] for size in matrices) // self.num_layers

    @cached_property
    def full(self) -> ModelShape:
        """The model with the heads of its full layers in all layers."""
        heads = self.full_heads
        return replace(self, num_kv_heads=heads.kv_heads, head_dim=heads.head_dim, full_heads=None) if heads else self

    def at(self, layer: int) -> ModelShape:
        """Return the model with the heads of one layer in all layers."""
        return self if layer in self.sliding_layers else self.full

    @property
    def active_columns(self) -> float:
        """Average MLP columns per layer that serve a token."""
        of_experts = self.ffn_hidden_size * (self.experts_per_token or 1) + self.shared_ffn_size
        if not self.dense_layers:
            return of_experts
        dense = self.dense_layers * self.dense_ffn_size
        return (dense + (self.num_layers - self.dense_layers) * of_experts) / self.num_layers

    def has_experts(self, layer: int) -> bool:
        """Return whether a layer is a mixture of experts."""
        return self.num_experts > 0 and layer >= self.dense_layers

    def sort_of(self, layer: int) -> tuple[bool, bool, bool]:
        """Return (has experts, is a gated delta net, has `full_heads`), equal for layers with equal tensors."""
        return self.has_experts(layer), layer in self.delta_layers, self.at(layer) is not self

    @property
    def mtp(self) -> ModelShape:
        """The layer for multi-token prediction, as a model of its own."""
        return replace(self, num_layers=1, dense_layers=0, tied_embeddings=False, mtp_layer=self.num_layers)

    def is_draft(self, name: str) -> bool:
        """Return whether a tensor belongs to multi-token prediction."""
        match = _LAYER.match(name)
        return name.startswith("mtp.") if match is None else int(match[1]) >= self.num_layers

    def is_router_bias(self, name: str) -> bool:
        """Return whether a tensor is a router bias, which is float32 and has no gradient."""
        experts = FAMILIES[self.family].experts
        return experts is not None and experts.bias is not None and name.endswith(experts.bias)

    def layer_kinds(self, layer: int) -> dict[str, str]:
        """Return the kind of each tensor of a layer but experts, by HF name in the layer, in checkpoint order."""
        family = FAMILIES[self.family]
        (first, first_kind), *norms = family.norms
        kinds = {"layer_scalar": "layer_scalar"} if family.has_full_heads else {}
        kinds |= {f"{first}.weight": first_kind} | self._attention_kinds(*self.sort_of(layer)[1:])
        kinds |= {f"{norm}.weight": kind for norm, kind in norms}
        names = family.experts
        if names is None or not self.has_experts(layer):
            prefix = "" if names is None else DENSE
            matrices = ("gate_up", "down") if "gate_up" in family.fuses else ("gate", "up", "down")
            return kinds | {f"mlp.{kind}_proj.weight": f"{prefix}{kind}" for kind in matrices}
        kinds[f"{names.block}.{names.router}.weight"] = "router"
        if names.has_biases:
            kinds[f"{names.block}.{names.router}.bias"] = "logit_bias"
        if names.bias is not None:
            kinds[f"{names.block}.{names.bias}"] = "router_bias"
        if self.shared_ffn_size:
            shared = f"{names.block}.{names.shared}"
            kinds |= {f"{shared}.{kind}_proj.weight": f"{SHARED}{kind}" for kind in ("gate", "up", "down")}
            if names.shared_gate is not None:
                kinds[f"{names.block}.{names.shared_gate}.weight"] = "shared_router"
        return kinds

    def _attention_kinds(self, is_delta_net: bool, is_full: bool) -> dict[str, str]:
        if is_delta_net and self.delta_net is not None:
            return {f"linear_attn.{name}": kind for name, kind in self.delta_net.tensor_kinds.items()}
        family, kinds = FAMILIES[self.family], dict[str, str]()
        if self.latent is not None:
            kinds |= {f"self_attn.{name}.weight": kind for name, kind in self.latent.tensor_kinds.items()}
        elif "qkv" in family.fuses:
            kinds["self_attn.qkv_proj.weight"] = "qkv"
        else:
            for name in "qkv":
                for what in ("weight", "bias") if self.qkv_bias else ("weight",):
                    kinds[f"self_attn.{name}_proj.{what}"] = f"{name}.{what}"
        if self.qk_norm:
            kinds |= {f"self_attn.{x}_norm.weight": f"{x}.norm" if family.norms_all_heads else "head" for x in "qk"}
        kinds["self_attn.o_proj.weight"] = "o"
        if is_full and self.full_heads is not None:
            kinds = self.full_heads.rename(kinds)
        return kinds | ({"self_attn.o_proj.bias": "o.bias", "self_attn.sinks": "sinks"} if family.has_sinks else {})

    def expert_kinds(self, expert: int) -> dict[str, str]:
        """Return the kind of each tensor of one expert, by HF name in the layer."""
        names = FAMILIES[self.family].experts
        assert names is not None, f"{self.family} is dense"
        matrices = f"{names.block}.experts.{expert}."
        kinds = {f"{matrices}{getattr(names, kind)}.weight": kind for kind in ("gate", "up", "down")}
        if names.has_biases:
            kinds |= {f"{matrices}{getattr(names, kind)}.bias": f"{kind}.bias" for kind in ("gate", "up", "down")}
        return kinds

    def tensor_kinds(self) -> dict[str, str]:
        """Return the kind of each tensor by HF name, in checkpoint order."""
        experts: dict[str, str] = {}
        for expert in range(self.num_experts):
            experts |= self.expert_kinds(expert)
        if self.mtp_layer:
            return {
                f"model.layers.{self.mtp_layer}.{x}": k for x, k in (MTP_KINDS | self.layer_kinds(0) | experts).items()
            }
        kinds = {"model.embed_tokens.weight": "vocab"}
        for number in range(self.num_layers):
            layer = self.layer_kinds(number) | (experts if self.has_experts(number) else {})
            kinds |= {f"model.layers.{number}.{name}": kind for name, kind in layer.items()}
        kinds["model.norm.weight"] = "hidden"
        if self.has_score_head:
            kinds[SCORE_HEAD] = "score"
        elif not self.tied_embeddings:
            kinds["lm_head.weight"] = "vocab"
        return kinds

    def logical_tensors(self) -> dict[str, tuple[int, ...]]:
        """Return the full shape of each tensor by HF name, in checkpoint order."""
        sizes = self.kind_sizes()
        return {name: sizes[kind] for name, kind in self.tensor_kinds().items()}


def is_layer_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Return whether a tensor of the HF naming is two-dimensional and belongs to a layer (no embedding or head)."""
    return len(shape) == 2 and ".layers." in name
