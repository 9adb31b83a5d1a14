# SPDX-License-Identifier: Apache-2.0
"""Sizes, tensors and TP shares of heads that are not alike: of latent attention, and of two kinds of layers (Gemma 4).

Also the options of Gemma 4 in config.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from reprlib import repr as show
from typing import TYPE_CHECKING, Any, TypeVar

from megatron_rl.types import UserError
from megatron_rl.weights.family import FULL, rope_type_of
from megatron_rl.weights.shard_box import Box, rows

if TYPE_CHECKING:
    import torch

    from megatron_rl.config.schema import RolloutConfig

# Options -> values that are served.
_OPTIONS: dict[str, tuple[Any, ...]] = {
    "hidden_size_per_layer_input": (None, 0),
    "num_kv_shared_layers": (None, 0),
    "enable_moe_block": (None, False),
    "num_experts": (None,),
    "attention_k_eq_v": (None, False, True),
    # With "vision", tokens of an image see each other; training and rollouts are of text.
    "use_bidirectional_attention": (None, "vision"),
}
_SERVED = ("use_bidirectional_attention", "final_logit_softcapping")


_HEAD_KINDS = ("q.weight", "k.weight", "v.weight", "o", "head")
# Tensors of latent attention -> kinds. Without a query latent, `q_proj` replaces the first three.
_LATENT_KINDS = {
    "q_a_proj": "q_down",
    "q_a_layernorm": "q_latent_norm",
    "q_b_proj": "q_up",
    "kv_a_proj_with_mqa": "kv_down",
    "kv_a_layernorm": "kv_latent_norm",
    "kv_b_proj": "kv_up",
}
_LATENT_CHANNELS = (512, 64)  # latent and rotated: vLLM's kernels for a CPU, and most of those for GPUs, have no others
_Value = TypeVar("_Value")


@dataclass(frozen=True)
class FullHeads:
    """Heads of the layers without a window. Their kinds of tensors have the prefix `FULL`."""

    kv_heads: int
    head_dim: int
    shares_values: bool  # values are normalized outputs of the keys' projection

    @property
    def fused(self) -> tuple[str, ...]:
        """Kinds of the parts of `linear_qkv`."""
        return tuple(f"{FULL}{name}.weight" for name in ("qk" if self.shares_values else "qkv"))

    def name(self, by_kind: Mapping[str, _Value]) -> dict[str, _Value]:
        """Return what kinds of heads map to, by their names in full layers."""
        return {FULL + kind: by_kind[kind] for kind in _HEAD_KINDS}

    def rename(self, kinds: Mapping[str, str]) -> dict[str, str]:
        """Return the kinds of a full layer's attention by name, from another layer's kinds."""
        missing = {"v.weight"} if self.shares_values else set()
        return {name: FULL + kind for name, kind in kinds.items() if kind not in missing}

    def name_cuts(self, cuts: Mapping[str, Any]) -> dict[str, Any]:
        """Return `name` of places in Megatron's checkpoints; a group has no values if these are shared."""
        found = self.name(cuts)
        for kind in (f"{FULL}q.weight", f"{FULL}k.weight") if self.shares_values else ():
            found[kind] = found[kind]._replace(group_rows=found[kind].group_rows - self.head_dim)
        return found


@dataclass(frozen=True)
class LatentSizes:
    """Channels of multi-head latent attention."""

    query: int  # latent of queries; 0 if they are projected directly
    key_value: int  # latent of keys and values
    rotary: int  # rotated channels per query head, and of the keys' shared part
    value: int  # channels per value head

    @property
    def cached(self) -> int:
        """Elements per token and layer of a cache of latents."""
        return self.key_value + self.rotary

    @property
    def tensor_kinds(self) -> dict[str, str]:
        """Kind of each matrix and norm by name, in checkpoint order."""
        return _LATENT_KINDS if self.query else {"q_proj": "q_up", **dict([*_LATENT_KINDS.items()][3:])}

    def kind_sizes(self, hidden_size: int, num_heads: int, head_dim: int) -> dict[str, tuple[int, ...]]:
        """Return the full shape of each kind of tensor; see `ModelShape.kind_sizes`."""
        return {
            "q_down": (self.query, hidden_size),
            "q_latent_norm": (self.query,),
            "q_up": (num_heads * head_dim, self.query or hidden_size),
            "kv_down": (self.cached, hidden_size),
            "kv_latent_norm": (self.key_value,),
            "kv_up": (num_heads * (head_dim - self.rotary + self.value), self.key_value),
        }

    def split(self, sizes: Mapping[str, tuple[int, ...]], tp_size: int, tp_rank: int) -> dict[str, tuple[Box, Box]]:
        """Return the boxes of a TP rank by kind: up-projections are cut by heads, others whole."""
        boxes = {}
        for kind in _LATENT_KINDS.values():
            parts = tp_size if kind in ("q_up", "kv_up") else 1
            size, rank = sizes[kind][0] // parts, tp_rank % parts
            boxes[kind] = rows(0, size, sizes[kind]), rows(rank * size, (rank + 1) * size, sizes[kind])
        return boxes


def has_latent_cache(sizes: LatentSizes, config: RolloutConfig, dtype: str, *, is_gpu: bool) -> bool:
    """Return whether the engine caches latents (MLA), not the keys and values of all heads."""
    has_kernel = (sizes.key_value, sizes.rotary) == _LATENT_CHANNELS and (dtype == "bfloat16" or not is_gpu)
    return has_kernel and config.latent_cache and config.supports("latent_cache")


def split_latents(params: Mapping[str, torch.Tensor], sizes: LatentSizes) -> dict[str, torch.Tensor]:
    """Replace down-projections that an engine fuses, `[queries; keys and values]`, by a view of each."""
    views: dict[str, torch.Tensor] = {}
    for name, param in params.items():
        block, fused, what = name.partition("fused_qkv_a_proj.")
        if fused:
            views[f"{block}q_a_proj.{what}"] = param[: sizes.query]
            views[f"{block}kv_a_proj_with_mqa.{what}"] = param[sizes.query :]
        else:
            views[name] = param
    return views


def refuse_gemma_options(
    config: dict[str, Any], rope: Mapping[str, Any], source: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Refuse options of Gemma 4 that are not served (UserError); return those that other families share.

    Args:
        rope: rotary parameters of full layers.
    """
    config = {"hidden_size_per_layer_input": 256} | config  # transformers' default
    wrong = {name: config.get(name) for name, values in _OPTIONS.items() if config.get(name) not in values}
    positions = config.get("rope_parameters") or {}
    sliding = positions.get("sliding_attention") or {}
    is_served = rope_type_of(rope) == "proportional" or _is_plain(rope)
    if not (positions.get("full_attention") and sliding and is_served and _is_plain(sliding)):
        wrong["rope_parameters"] = positions
    if wrong:
        raise UserError(
            f"option(s) {', '.join(f'{name}={value!r}' for name, value in wrong.items())} are not served",
            source=source,
            expected="a dense Gemma 4 without embeddings per layer and shared caches, such as the 31B, with the rotary "
            "positions of both kinds of layers written out: proportional in full layers, unscaled in the others",
            hint="use a checkpoint without these options",
        )
    others = {name: value for name, value in config.items() if name not in _SERVED}
    return others, {name: value for name, value in rope.items() if name != "partial_rotary_factor"}


def _is_plain(rope: Mapping[str, Any]) -> bool:
    return rope_type_of(rope) == "default" and rope.get("partial_rotary_factor") in (None, 1.0)


def read_full_heads(config: dict[str, Any], sliding_layers: tuple[int, ...], source: str) -> dict[str, Any]:
    """Parse the fields of `ModelShape` that Gemma 4 has.

    Published files have one size for all full layers; transformers 5 writes a size for each layer
    (`per_layer_config`).

    Raises:
        UserError: sizes other than one for full layers and one for others, or a last layer with a window.
    """
    layers, shares = range(config["num_hidden_layers"]), bool(config.get("attention_k_eq_v"))
    base = {"head_dim": config.get("head_dim") or 256, "num_key_value_heads": config.get("num_key_value_heads") or 4}
    own, is_regular = config.get("per_layer_config"), True
    if own is None:
        kv_heads = (shares and config.get("num_global_key_value_heads")) or base["num_key_value_heads"]
        full = {"head_dim": config.get("global_head_dim") or 512, "num_key_value_heads": kv_heads}
    else:
        are_objects = all(isinstance(sizes, dict) for sizes in own.values())
        found = [base | own.get(str(layer), {}) for layer in layers] if are_objects else []
        full = found[-1] if found else {}
        is_regular = found == [base if layer in sliding_layers else full for layer in layers]
        is_regular = is_regular and set(full) == set(base) and {*own} <= {*map(str, layers)}
    given = [config[key] for key in ("global_head_dim", "num_global_key_value_heads") if config.get(key) is not None]
    are_counts = all(type(size) is int and 0 < size < 1 << 31 for size in (*full.values(), *given))
    if not (is_regular and are_counts) or config["num_attention_heads"] % full["num_key_value_heads"]:
        raise UserError(
            f"full layers with {show(full)}" + (f", by per_layer_config = {show(own)}" if own else ""),
            source=source,
            expected=f"{' and '.join(base)} of full layers, the same in each, with a divisor of the attention heads",
            hint="no Gemma 4 has other sizes: take config.json from the model again",
        )
    if len(layers) - 1 in sliding_layers:
        raise UserError(
            "the last layer has a window",
            source=f"{source}, layer_types",
            expected="full_attention in the last layer, which transformers computes whatever the file has",
            hint="correct layer_types, or take config.json from the model again",
        )
    cap = config.get("final_logit_softcapping")
    return dict(
        num_kv_heads=base["num_key_value_heads"],
        head_dim=base["head_dim"],
        full_heads=FullHeads(full["num_key_value_heads"], full["head_dim"], shares),
        attention_scale=1.0,
        logit_softcap=None if cap is None else float(cap),
    )
