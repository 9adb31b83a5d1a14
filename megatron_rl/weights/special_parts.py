# SPDX-License-Identifier: Apache-2.0
"""Parts that a dense model with plain attention lacks: experts, windows, sinks, latent attention, delta nets.

Their options in config.json and their sizes; of delta nets also their tensors, and the parts of them on a TP rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_rl.types import UserError
from megatron_rl.weights.family import CONV_PARTS, DELTA_APART, DELTA_TOGETHER, Family, rope_type_of
from megatron_rl.weights.head_sizes import LatentSizes, read_full_heads, refuse_gemma_options
from megatron_rl.weights.rope import compute_yarn_mscale
from megatron_rl.weights.shard_box import Box, columns, full_box, rows

# Supported values of gpt-oss options.
_OF_SINKS: dict[str, tuple[Any, ...]] = {
    "attention_bias": (None, True),
    "swiglu_alpha": (None, 1.702),
    "swiglu_limit": (None, 7.0),
    "quantization_config": (None,),
}
_OF_LATENTS: dict[str, tuple[Any, ...]] = {
    "rms_norm_eps": (1e-6,),
    "rope_interleave": (None, True),
    "scoring_func": (None, "sigmoid"),
    "topk_method": (None, "noaux_tc"),
    "moe_layer_freq": (None, 1),
}
# MiniMax-M2 options, likewise; its config.json has no other numbers of a sigmoid router.
_OF_MINIMAX: dict[str, tuple[Any, ...]] = {
    "scoring_func": (None, "sigmoid"),
    "use_routing_bias": (None, True),
    "qk_norm_type": (None, "per_layer"),
    "use_qk_norm": (None, True),
    "shared_intermediate_size": (None, 0),
}
_MINIMAX_ROUTER: dict[str, Any] = dict(n_group=1, topk_group=1, first_k_dense_replace=0, routed_scaling_factor=1.0)
# Qwen3.5 options and the values for which transformers and vLLM agree.
_OF_SPLIT_NETS: dict[str, tuple[Any, ...]] = {
    "attn_output_gate": (None, True),
    "output_gate_type": (None, "silu", "swish"),
    "norm_topk_prob": (None, True),
    "layer_scale": (None, False),
}
_PROJECTIONS = {"in_proj_qkvz.weight": "delta_qkvz", "in_proj_ba.weight": "delta_ba"}
_SEPARATE_PROJECTIONS = {
    "in_proj_qkv.weight": "delta_qkv",
    "in_proj_z.weight": "delta_z",
    "in_proj_b.weight": "delta_b",
    "in_proj_a.weight": "delta_a",
}


@dataclass(frozen=True)
class SigmoidRouter:
    """Choice of experts by sigmoids (DeepSeek-V3, arXiv 2412.19437, equations 13 to 16)."""

    num_groups: int = 1  # groups of experts, of equal size
    groups_per_token: int = 1  # groups to choose from, by the sum of their two best experts
    scale: float = 1.0  # factor of expert weights, after normalization to 1


@dataclass(frozen=True)
class DeltaNetSizes:
    """Head sizes of a gated delta net (Qwen3-Next, Qwen3.5)."""

    # key_heads, value_heads: heads of the whole model, equally many value heads per key head.
    key_heads: int
    value_heads: int
    key_dim: int  # channels per head
    value_dim: int  # channels per head
    kernel: int  # width of the convolution in tokens
    # Separate projections of [q; k; v], gates, and each logit (Qwen3.5), instead of two that are interleaved per key
    # head (Qwen3-Next).
    is_split: bool = False

    @property
    def tensor_kinds(self) -> dict[str, str]:
        """Kind of each tensor of the net by name, in checkpoint order."""
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
        return DELTA_APART if self.is_split else DELTA_TOGETHER

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
        """Logits per key head: write strength and decay of each value head."""
        return 2 * self.value_heads // self.key_heads

    @property
    def convolved(self) -> tuple[int, int, int]:
        """Channels of all queries, keys and values."""
        keys = self.key_heads * self.key_dim
        return keys, keys, self.value_heads * self.value_dim

    def kind_sizes(self, hidden_size: int) -> dict[str, tuple[int, ...]]:
        """Return the full shape of each kind of tensor; see `ModelShape.kind_sizes`."""
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


def _find_unserved(config: Mapping[str, Any], served: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
    return {name: config.get(name) for name, values in served.items() if config.get(name) not in values}


def _refuse_unserved(wrong: Mapping[str, Any], source: str, expected: str) -> None:
    if wrong:
        raise UserError(
            f"option(s) {', '.join(f'{name}={value!r}' for name, value in wrong.items())} are not served",
            source=source,
            expected=expected,
            hint="use a checkpoint without these options",
        )


def refuse_special(
    config: dict[str, Any], family: Family, rope: dict[str, Any], source: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Refuse unsupported options of special parts (UserError); return the other ones, and the options of `rope`."""
    if family.has_sinks:
        wrong = _find_unserved(config, _OF_SINKS)
        encoding = wrong.pop("quantization_config", None)
        if encoding is not None and encoding.get("quant_method") != "mxfp4":
            wrong["quantization_config"] = encoding
        if not (config.get("rope_parameters") or config.get("rope_scaling")):  # transformers would default to yarn
            wrong["rope_scaling"] = None
        _refuse_unserved(
            wrong,
            source,
            "gpt-oss as published: biases, gates of 1.702 within 7, the scaling of positions written out, and "
            "weights as they are or in MXFP4",
        )
        config = {name: value for name, value in config.items() if name not in _OF_SINKS}
    if family.has_latent_attention:
        wrong = _find_unserved(config, _OF_LATENTS)
        if config["model_type"] == "glm4_moe_lite":  # published with 1e-5, as training and vLLM take it
            wrong.pop("rms_norm_eps", None)
        if rope_type_of(rope) not in ("default", "yarn") or rope.get("attention_factor") is not None:
            wrong["rope_scaling"] = rope
        _refuse_unserved(
            wrong,
            source,
            "DeepSeek-V3 or GLM-4.7-Flash as published: in DeepSeek-V3 norms with an epsilon of 1e-6 (which "
            "transformers takes for latents whatever config.json says, and vLLM does not), rotated neighbors, a "
            "sigmoid router, positions unscaled or with yarn without an attention_factor",
        )
    if config["model_type"] == "minimax_m2":
        wrong = _find_unserved(config, _OF_MINIMAX)
        if set(config.get("attn_type_list") or [1]) != {1}:
            wrong["attn_type_list"] = config["attn_type_list"]
        _refuse_unserved(wrong, source, "MiniMax-M2 as published: a sigmoid router with biases, full attention")
    if family.has_full_heads:
        return refuse_gemma_options(config, rope, source)
    return config, rope


def read_special(config: dict[str, Any], family: Family, rope: dict[str, Any], source: str) -> dict[str, Any]:
    """Parse the special parts of a model: the fields of `ModelShape` for them.

    Raises:
        UserError: an unsupported option.
        KeyError: a number is missing.
    """
    found: dict[str, Any] = {}
    if family.experts is not None and family.experts.has_sigmoid_router:
        found |= _read_sigmoid_experts(config, source)
    elif family.experts is not None:
        found |= _read_experts(config, family, source)
    if family.has_delta_nets:
        found |= _read_delta_nets(config, source, is_split=family.splits_projections)
    if family.alternates_windows or family.has_sinks:
        found |= _read_windows(config, family)
    if family.has_full_heads:
        found |= read_full_heads(config, found["sliding_layers"], source)
    if family.has_latent_attention:
        found |= _read_latent(config, rope)
    return found


def _read_windows(config: dict[str, Any], family: Family) -> dict[str, Any]:
    layers = range(config["num_hidden_layers"])
    pattern = config.get("sliding_window_pattern", 6) if family.alternates_windows else 2
    kinds = config.get("layer_types") or ["sliding_attention" if (i + 1) % pattern else "" for i in layers]
    found: dict[str, Any] = dict(
        sliding_layers=tuple(layer for layer in layers if kinds[layer] == "sliding_attention"),
        sliding_window=config["sliding_window"],
    )
    if family.alternates_windows:
        rope = (config.get("rope_parameters") or {}).get("sliding_attention", {})
        theta = float(rope.get("rope_theta") or config.get("rope_local_base_freq", 1e4))
        found |= dict(sliding_rope_theta=theta, attention_scale=config.get("query_pre_attn_scalar", 1) ** -0.5)
    return found


def _read_latent(config: dict[str, Any], rope: dict[str, Any]) -> dict[str, Any]:
    heads, rotary = config["num_attention_heads"], config["qk_rope_head_dim"]
    head_dim = config["qk_nope_head_dim"] + rotary
    growth = (
        compute_yarn_mscale(rope["factor"], rope.get("mscale_all_dim") or 0.0) if rope_type_of(rope) == "yarn" else 1.0
    )
    return dict(
        latent=LatentSizes(config.get("q_lora_rank") or 0, config["kv_lora_rank"], rotary, config["v_head_dim"]),
        head_dim=head_dim,
        num_kv_heads=heads,
        rotary_dim=rotary,
        attention_scale=head_dim**-0.5 * growth**2,
    )


def _read_experts(config: dict[str, Any], family: Family, source: str) -> dict[str, Any]:
    assert family.experts is not None, "read_special passes mixtures"
    # transformers 5 writes num_local_experts; published Qwen3-MoE configs have num_experts.
    num_experts = config.get("num_experts") or config.get("num_local_experts")
    if num_experts is None:
        raise KeyError("num_local_experts")
    per_token = config["num_experts_per_tok"]
    # Mixtral and gpt-oss always normalize and have no such option; Qwen3-Next normalizes by default.
    normalizes_shares = config["model_type"] in ("mixtral", "gpt_oss") or bool(
        config.get("norm_topk_prob", family.has_delta_nets)
    )
    if per_token == 1 and normalizes_shares:
        raise UserError(
            "num_experts_per_tok = 1 with normalized shares",
            source=source,
            expected="2 experts per token or more",
            hint="the share of a single expert is always 1, so its router would never learn",
        )
    return dict(
        num_experts=num_experts,
        experts_per_token=per_token,
        normalizes_shares=normalizes_shares,
        shared_ffn_size=config["shared_expert_intermediate_size"] if family.experts.shared else 0,
    )


def _read_sigmoid_experts(config: dict[str, Any], source: str) -> dict[str, Any]:
    if config["model_type"] == "minimax_m2":
        config = config | _MINIMAX_ROUTER | dict(n_routed_experts=config["num_local_experts"])
    groups, groups_per_token = config["n_group"] or 1, config["topk_group"] or 1
    per_token = config["num_experts_per_tok"]
    if groups == groups_per_token:  # every group is chosen
        groups = groups_per_token = 1
    if not config.get("norm_topk_prob", True) or per_token == 1 or (groups > 1 and per_token // groups_per_token != 2):
        raise UserError(
            f"norm_topk_prob = {config.get('norm_topk_prob')}, {per_token} experts per token in {groups_per_token} of "
            f"{groups} groups",
            source=source,
            expected="shares that add up to 1, of 2 experts or more; with groups, twice as many experts as groups",
            hint="megatron-core chooses groups by the sum of their best per_token / topk_group experts, others by two",
        )
    kinds, shared = config.get("mlp_layer_types"), config.get("n_shared_experts") or 0
    dense = config["first_k_dense_replace"] if kinds is None else kinds.count("dense")
    if kinds is not None and "dense" in kinds[dense:]:
        raise UserError(
            f"mlp_layer_types with dense layers behind mixtures: {kinds}",
            source=source,
            expected="dense layers first",
            hint="vLLM has no such model either",
        )
    return dict(
        num_experts=config["n_routed_experts"],
        experts_per_token=per_token,
        normalizes_shares=True,
        dense_layers=dense,
        dense_ffn_size=config["intermediate_size"] if dense else 0,
        shared_ffn_size=shared and shared * config["moe_intermediate_size"],
        router=SigmoidRouter(groups, groups_per_token, float(config["routed_scaling_factor"])),
    )


def _read_delta_nets(config: dict[str, Any], source: str, *, is_split: bool) -> dict[str, Any]:
    if is_split:
        _refuse_unserved(
            _find_unserved(config, _OF_SPLIT_NETS),
            source,
            "Qwen3.5 as published: heads of attention with gates, SiLU gates in linear attention, shares of "
            "experts that add up to 1, no scales of layers",
        )
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
        is_split,
    )
    linear = tuple(layer for layer in layers if types[layer] == "linear_attention")
    return dict(delta_net=net, delta_layers=linear) if linear else {}


def split_delta_net(
    sizes: dict[str, tuple[int, ...]], projections: tuple[tuple[str, ...], tuple[str, ...]], tp_size: int, tp_rank: int
) -> dict[str, tuple[Box, Box]]:
    """Return the boxes of a gated delta net: Megatron fuses all projections, vLLM into two parameters."""
    norm = full_box(sizes["delta_norm"])
    boxes: dict[str, tuple[Box, Box]] = {"delta_norm": (norm, norm)}
    for kinds in (("delta_head",), CONV_PARTS, (*projections[0], *projections[1])):
        base = 0
        for kind in kinds:
            size = sizes[kind][0] // tp_size
            mine = tp_rank * size, (tp_rank + 1) * size
            boxes[kind] = rows(base, base + size, sizes[kind]), rows(*mine, sizes[kind])
            base += size
    before = boxes[projections[1][0]][0][0][0]
    for kind in projections[1]:
        (start, stop), *rest = boxes[kind][0]
        boxes[f"{kind}.alone"] = ((start - before, stop - before), *rest), boxes[kind][1]
    size = sizes["delta_o"][1] // tp_size
    mine = tp_rank * size, (tp_rank + 1) * size
    return boxes | {"delta_o": (columns(0, size, sizes["delta_o"]), columns(*mine, sizes["delta_o"]))}
