# SPDX-License-Identifier: Apache-2.0
"""Untrusted JSON files of a model: reading, type checks, and consistency of the `ModelShape` from config.json."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron_rl.types import UserError
from megatron_rl.weights.family import Family

_LARGEST = 1 << 31  # far above any size of a model
_SMALLEST = 1e-12  # products of numbers outside [this, its inverse] may overflow float32


def _is_count(value: Any, least: int = 1) -> bool:
    return type(value) is int and least <= value < _LARGEST


def _is_positive(value: Any) -> bool:
    return type(value) in (int, float) and _SMALLEST <= value <= 1 / _SMALLEST


def _is_list_of(value: Any, holds: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and all(map(holds, value))


# Kind, as in error messages -> predicate.
KINDS: dict[str, Callable[[Any], bool]] = {
    "a whole number above 0": _is_count,
    "a whole number above 1": lambda value: _is_count(value, 2),
    "a whole number, 0 or more": lambda value: _is_count(value, 0),
    "a number from 1e-12 to 1e12": _is_positive,
    "0, or a number from 1e-12 to 1e12": lambda value: value == 0 or _is_positive(value),
    "a share of 1, above 0": lambda value: _is_positive(value) and value <= 1,
    "true or false": lambda value: isinstance(value, bool),
    "a text": lambda value: isinstance(value, str),
    "a list of texts": lambda value: _is_list_of(value, lambda item: isinstance(item, str)),
    "a list of whole numbers": lambda value: _is_list_of(value, lambda item: _is_count(item, 0)),
    "a list of numbers above 0": lambda value: bool(value) and _is_list_of(value, _is_positive),
    "an object": lambda value: isinstance(value, dict),
}
COUNT, TWO, COUNT_OR_ZERO, POSITIVE, NOT_NEGATIVE, SHARE, FLAG, TEXT, TEXTS, COUNTS, NUMBERS, OBJECT = KINDS


def read_json(file: Path, hint: str) -> dict[str, Any]:
    """Return the JSON object in a file; UserError if there is none."""
    try:
        content = json.loads(file.read_bytes())
        if not isinstance(content, dict):
            raise ValueError(f"a {type(content).__name__}")
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            f"{file} holds no JSON object: {error}", source=str(file), expected=f"the {file.name} of a model", hint=hint
        ) from None
    return content


def check_kinds(values: Mapping[str, Any], kinds: Mapping[str, str], source: str, *, may_be_null: bool = True) -> None:
    """Refuse the first value that is not of its kind (UserError); missing keys pass.

    Args:
        kinds: key -> name of a value type, one of `KINDS`.
    """
    for name, kind in kinds.items():
        value = values.get(name)
        if name in values and not (value is None and may_be_null) and not KINDS[kind](value):
            raise UserError(
                f"{name} = {show(value)}",
                source=source,
                expected=kind + (f", below {_LARGEST:,}" if type(value) is int and value >= _LARGEST else ""),
                hint=f"correct {name}, or take the file from the model again",
            )


def show(value: Any) -> str:
    """Format a value of any size as a short line."""
    return reprlib.repr(value)


MOST_MATRICES = 100_000  # layers times experts; the largest published models have 25,000
_SIZES = {
    **dict.fromkeys(("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size"), COUNT),
    "max_position_embeddings": TWO,
    "rms_norm_eps": POSITIVE,
}
_OPTIONS = {
    "architectures": TEXTS,
    **dict.fromkeys(("num_key_value_heads", "head_dim"), COUNT),
    **dict.fromkeys(("hidden_act", "hidden_activation"), TEXT),
    **dict.fromkeys(("tie_word_embeddings", "attention_bias", "use_qk_norm", "norm_topk_prob"), FLAG),
    **dict.fromkeys(("rope_parameters", "rope_scaling", "quantization_config"), OBJECT),
    **dict.fromkeys(("rope_theta", "rope_local_base_freq"), POSITIVE),
    "initializer_range": NOT_NEGATIVE,
    "partial_rotary_factor": SHARE,
    "original_max_position_embeddings": TWO,
    "layer_types": TEXTS,
    "no_rope_layers": COUNTS,
    **dict.fromkeys(("no_rope_layer_interval", "sliding_window_pattern", "full_attention_interval"), COUNT),
    **dict.fromkeys(("num_nextn_predict_layers", "num_mtp_layers", "n_shared_experts", "q_lora_rank"), COUNT_OR_ZERO),
    **dict.fromkeys(("n_group", "topk_group"), COUNT_OR_ZERO),
}
_ROPE = {
    **dict.fromkeys(("rope_type", "type"), TEXT),
    **dict.fromkeys(("rope_theta", "factor", "low_freq_factor", "high_freq_factor", "attention_factor"), POSITIVE),
    **dict.fromkeys(("beta_fast", "beta_slow", "mscale", "mscale_all_dim"), NOT_NEGATIVE),
    **dict.fromkeys(("short_factor", "long_factor"), NUMBERS),
    "partial_rotary_factor": SHARE,
    "original_max_position_embeddings": TWO,
}
_LATENTS = dict.fromkeys(("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), COUNT)
_DELTA_NETS = dict.fromkeys(
    (
        *("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim"),
        *("linear_value_head_dim", "linear_conv_kernel_dim"),
    ),
    COUNT,
)


def check_config(config: Mapping[str, Any], family: Family, source: str) -> None:
    """Refuse values of the wrong type, and models with more than `MOST_MATRICES` experts in all layers (UserError)."""
    sizes, experts = dict(_SIZES), family.experts
    if experts is None:
        sizes["intermediate_size"] = COUNT
    else:
        sizes |= {experts.size_key: COUNT, "num_experts_per_tok": COUNT}
        if experts.has_sigmoid_router:
            sizes |= {"n_routed_experts": COUNT, "intermediate_size": COUNT}
            sizes |= {"first_k_dense_replace": COUNT_OR_ZERO, "routed_scaling_factor": POSITIVE}
        elif experts.shared is not None:
            sizes["shared_expert_intermediate_size"] = COUNT
    if family.alternates_windows or family.has_sinks:
        sizes["sliding_window"] = COUNT
    if family.alternates_windows:
        sizes["query_pre_attn_scalar"] = POSITIVE
    sizes |= (_LATENTS if family.has_latent_attention else {}) | (_DELTA_NETS if family.has_delta_nets else {})
    check_kinds(config, sizes, source, may_be_null=False)
    further = ("sliding_window",) if family.honors_sliding_window else ()
    further += ("num_experts", "num_local_experts") if experts is not None else ()
    check_kinds(config, _OPTIONS | dict.fromkeys(further, COUNT), source)
    for name in ("rope_parameters", "rope_scaling"):
        rope = config.get(name) or {}
        check_kinds(rope, dict.fromkeys(("full_attention", "sliding_attention"), OBJECT), f"{source}, {name}")
        for part in (rope, rope.get("full_attention") or {}, rope.get("sliding_attention") or {}):
            check_kinds(part, _ROPE, f"{source}, {name}")
            check_kinds(part, {"truncate": FLAG}, f"{source}, {name}", may_be_null=False)
    if (layers := config.get("num_hidden_layers")) is None:
        return
    names = ("num_experts", "num_local_experts", "n_routed_experts") if experts is not None else ()
    num_experts = max([config.get(name) or 1 for name in names], default=1)
    per_layer = {name: config[name] for name in ("layer_types", "no_rope_layers") if config.get(name)}
    has_windows = family.alternates_windows or family.has_sinks or family.honors_sliding_window
    types = {"full_attention"} | ({"sliding_attention"} if has_windows else set())
    types |= {"linear_attention"} if family.has_delta_nets else set()
    kinds = set(config.get("layer_types") or ())
    require(
        {
            f"{layers:,} layers with {num_experts:,} experts": layers * num_experts <= MOST_MATRICES,
            **{f"{len(x):,} {name} for {layers:,} layers": len(x) == layers for name, x in per_layer.items()},
            f"layer_types {show(sorted(kinds))}": kinds <= types,
        },
        source,
        f"at most {MOST_MATRICES:,} layers times experts; for each layer one of {', '.join(sorted(types))}",
    )


def require(right: Mapping[str, bool], source: str, expected: str) -> None:
    """Refuse conditions that do not hold (UserError with all of them)."""
    if wrong := [what for what, is_right in right.items() if not is_right]:
        raise UserError(
            "; ".join(wrong),
            source=source,
            expected=expected,
            hint="no model has such a config.json: correct it, or take it from the model again",
        )
