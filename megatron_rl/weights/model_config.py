# SPDX-License-Identifier: Apache-2.0
"""Parsing of config.json into a `ModelShape`, and the adapters that a run gives it.

Files of a model are untrusted: types and sizes of their values are checked first.

Image-text models (published Qwen3.5) have a text part: a section of config.json, and tensors `model.language_model.*`;
others are `model.visual.*`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from reprlib import repr as show
from typing import TYPE_CHECKING, Any

from megatron_rl.types import UserError
from megatron_rl.weights.families import Head, ModelShape
from megatron_rl.weights.family import ALIASES, FAMILIES, Family, rope_type_of

if TYPE_CHECKING:
    from megatron_rl.config.sections import LoraConfig
    from megatron_rl.weights.adapters import AdapterShape


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


MOST_MATRICES = 100_000  # layers times experts; the largest published models have 25,000
_SIZES = {
    **dict.fromkeys(("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size"), COUNT),
    "max_position_embeddings": TWO,
    "rms_norm_eps": POSITIVE,
}
_OPTIONS = {
    "architectures": TEXTS,
    **dict.fromkeys(("num_key_value_heads", "head_dim", "rotary_dim"), COUNT),
    **dict.fromkeys(("hidden_act", "hidden_activation"), TEXT),
    **dict.fromkeys(("tie_word_embeddings", "attention_bias", "use_qk_norm", "norm_topk_prob"), FLAG),
    **dict.fromkeys(("rope_parameters", "rope_scaling", "quantization_config", "per_layer_config"), OBJECT),
    **dict.fromkeys(("rope_theta", "rope_local_base_freq", "final_logit_softcapping"), POSITIVE),
    "initializer_range": NOT_NEGATIVE,
    "partial_rotary_factor": SHARE,
    "original_max_position_embeddings": TWO,
    **dict.fromkeys(("layer_types", "mlp_layer_types"), TEXTS),
    "no_rope_layers": COUNTS,
    **dict.fromkeys(("no_rope_layer_interval", "sliding_window_pattern", "full_attention_interval"), COUNT),
    **dict.fromkeys(("num_nextn_predict_layers", "num_mtp_layers", "n_shared_experts", "q_lora_rank"), COUNT_OR_ZERO),
    **dict.fromkeys(("n_group", "topk_group", "hidden_size_per_layer_input"), COUNT_OR_ZERO),
}
_ROPE = {
    **dict.fromkeys(("rope_type", "type"), TEXT),
    **dict.fromkeys(("rope_theta", "factor", "low_freq_factor", "high_freq_factor", "attention_factor"), POSITIVE),
    **dict.fromkeys(("beta_fast", "beta_slow", "mscale", "mscale_all_dim"), NOT_NEGATIVE),
    **dict.fromkeys(("short_factor", "long_factor"), NUMBERS),
    "partial_rotary_factor": SHARE,
    "original_max_position_embeddings": TWO,
}
_PER_LAYER = ("layer_types", "mlp_layer_types", "no_rope_layers")
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
    if family.alternates_windows and not family.has_full_heads:
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
    per_layer = {name: config[name] for name in _PER_LAYER if config.get(name)}
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


# `model_type` of an image-text model -> family of its text part.
TEXT_PARTS = {family.image_text: name for name, family in FAMILIES.items() if family.image_text is not None}
_OUTER = ("tie_word_embeddings", "quantization_config")  # keys that config.json has outside the text section


def take_text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the text section of config.json, or the whole config of a text-only model."""
    name, text = TEXT_PARTS.get(str(config.get("model_type"))), config.get("text_config")
    if name is None or not isinstance(text, dict):
        return dict(config)
    classes = [
        FAMILIES[name].architecture if architecture.endswith("ForConditionalGeneration") else architecture
        for architecture in config.get("architectures") or ()
    ]
    outer = {key: config[key] for key in _OUTER if key in config}
    return {"model_type": name} | text | outer | {"architectures": classes}


MTP_KEYS = ("num_nextn_predict_layers", "num_mtp_layers")  # layers for multi-token prediction
_MUST_BE_OFF = (
    "use_bidirectional_attention",
    "use_sliding_window",
    "mlp_bias",
    "mlp_only_layers",
    "router_jitter_noise",
)
_SCORING_SUFFIXES = ("ForSequenceClassification", "ForTokenClassification")


def load_model_shape(directory: str | Path, head: Head = "lm", setting: str = "model.path") -> ModelShape:
    """Parse `config.json` of an HF model directory.

    Args:
        head: head of the role; a language model can be given a score head, not vice versa.
        setting: that names the directory.

    Raises:
        UserError: missing file, unknown architecture, wrong head, unsupported option.
    """
    file = Path(directory) / "config.json"
    if not file.is_file():
        raise UserError(
            f"there is no {file if file.parent.is_dir() else f'directory {directory}'}",
            source=setting,
            expected="a model directory in Hugging Face format",
            hint=_hint_at_model(file.parent),
        )
    return model_shape_from_config(_read_config(file.parent), source=str(file), head=head)


def find_adapters(
    shape: ModelShape, config: LoraConfig | None, section: str, *, is_quantized: bool = False
) -> AdapterShape | None:
    """Return the adapters that `<section>.lora` gives a model, or `None`; UserError if the model cannot have them."""
    if config is None or not config.rank:
        return None
    from megatron_rl.weights.adapters import make_adapter_shape

    return make_adapter_shape(shape, config, section, is_quantized=is_quantized)


def _hint_at_model(path: Path) -> str:
    """Return the next command for a path that holds no model in HF format."""
    file = path if path.suffix == ".gguf" else next(iter(sorted(path.glob("*.gguf"))), None)
    if file is not None:
        return f"unpack the GGUF file: python tools/unpack_gguf.py {file} --out DIR, and set model.path=DIR"
    if path.is_file():
        return f"name its directory, {path.parent}"
    if (adapters := path / "adapter_config.json").is_file():
        base = read_json(adapters, "save the adapters again").get("base_model_name_or_path")
        return (
            f"these are adapters: set model.path={base or 'BASE'}, actor.lora.path={path}, and actor.lora.rank as there"
        )
    tracker, inner = path / "latest_checkpointed_iteration.txt", path
    if tracker.is_file():
        number = tracker.read_text(encoding="utf-8").strip()
        inner = path / (f"iter_{int(number):07d}" if number.isdecimal() else number)
    if tracker.is_file() or path.name.startswith("iter_"):
        return (
            f"convert the checkpoint of Megatron-LM: python tools/convert_megatron_to_hf.py --checkpoint {inner} "
            "--config DIR_OF_CONFIG_JSON_AND_TOKENIZER --out DIR, and set model.path=DIR"
        )
    return (
        f"check for a typo; hf download OWNER/NAME --local-dir {path} fetches a model of the hub, and "
        "tools/make_toy_task.py makes a small one"
    )


def check_mtp(directory: Path, setting: str) -> None:
    """Refuse multi-token prediction, for `setting`, with a model that has not exactly one such layer (UserError)."""
    config = _read_config(directory)
    if (found := next((config[key] for key in MTP_KEYS if config.get(key)), 0)) != 1:
        raise UserError(
            f"{setting} with a model that has {found} layers for multi-token prediction",
            source=f"{MTP_KEYS[0]} in {directory / 'config.json'}",
            expected="1 (DeepSeek-V3, GLM-4.5)",
            hint=f"leave {setting} out",
        )


def is_image_text(directory: str | Path) -> bool:
    """Return whether a directory contains an image-text model."""
    return _read_config(Path(directory)).get("model_type") in TEXT_PARTS


def _read_config(directory: Path) -> dict[str, Any]:
    return read_json(directory / "config.json", "the file may be half downloaded: download config.json again")


def model_shape_from_config(config: dict[str, Any], source: str, head: Head = "lm") -> ModelShape:
    """Parse the content of a config.json; see `load_model_shape`."""
    check_kinds(config, {"model_type": TEXT, "architectures": TEXTS, "text_config": OBJECT}, source)
    config = take_text_config(config)
    check_kinds(config, {"model_type": TEXT}, source)
    name, family = _find_family(config, head, source)
    check_config(config, family, source)
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope = rope.get("full_attention") or rope  # if windowed layers have positions of their own
    rope = {name: value for name, value in rope.items() if value is not None}
    try:
        _refuse_options(config, family, rope, source)
        num_heads, hidden = config["num_attention_heads"], config["hidden_size"]
        head_dim = (config.get("head_dim") if family.honors_head_dim else None) or hidden // num_heads
        special = dict[str, Any]()
        if not family.is_plain:
            from megatron_rl.weights.special_parts import read_special

            special = read_special(config, family, rope, source)
        scaling, longest = None, config["max_position_embeddings"]
        if rope_type_of(rope) != "default":
            from megatron_rl.weights.rope import read_rope_scaling

            scaling, longest = read_rope_scaling(rope, config)
        size_key = family.experts.size_key if family.experts else "intermediate_size"
        shape = ModelShape(
            family=name,
            num_layers=config["num_hidden_layers"],
            hidden_size=hidden,
            ffn_hidden_size=config[size_key],
            num_heads=num_heads,
            num_kv_heads=config.get("num_key_value_heads") or num_heads,
            head_dim=head_dim,
            vocab_size=config["vocab_size"],
            tied_embeddings=head == "lm" and bool(config.get("tie_word_embeddings", family.ties_by_default)),
            has_score_head=head == "score",
            qkv_bias=bool(config.get("attention_bias")) if family.qkv_bias is None else family.qkv_bias,
            qk_norm=bool(config.get("use_qk_norm")) if family.qk_norm is None else family.qk_norm,
            rms_norm_eps=config["rms_norm_eps"],
            rope_theta=float(rope.get("rope_theta") or config.get("rope_theta") or family.rope_theta),
            max_position_embeddings=longest,
            rope_scaling=scaling,
            **_read_rotation(config, rope, family, head_dim),
        )
        shape = replace(shape, **special)
    except KeyError as error:
        raise UserError(
            f"key {error} is missing",
            source=source,
            expected="a complete HF config.json",
            hint="write it with transformers' save_pretrained",
        ) from None
    _check_shape(shape, config, source)
    return shape


def _find_family(config: dict[str, Any], head: Head, source: str) -> tuple[str, Family]:
    name: str = config.get("model_type") or ""
    name = ALIASES.get(name, name)
    family = FAMILIES.get(name)
    if family is None:
        raise UserError(
            f"unknown architecture {config.get('model_type')!r}",
            source=source,
            expected=f"model_type one of {sorted({*FAMILIES, *ALIASES, *TEXT_PARTS})}",
            hint="docs/add_a_family.md describes how to add one: often a row in weights/family.py",
        )
    scoring = [name for name in config.get("architectures") or () if name.endswith(_SCORING_SUFFIXES)]
    if scoring and head == "lm":
        raise UserError(
            f"{scoring[0]} has no language-model head",
            source=source,
            expected=f"a {family.architecture}",
            hint="a reward model or critic belongs to reward_model.path or critic.path",
        )
    return name, family


def _refuse_options(config: dict[str, Any], family: Family, rope: dict[str, Any], source: str) -> None:
    if not family.is_plain:
        from megatron_rl.weights.special_parts import refuse_special

        config, rope = refuse_special(config, family, rope, source)
    refused = {
        "hidden_act": (config.get("hidden_act") or family.activations[0]) not in family.activations,
        "hidden_activation": config.get("hidden_activation") not in (None, family.activations[0]),
        **{option: bool(config.get(option)) for option in _MUST_BE_OFF},
        "attention_bias": family.qkv_bias is not None and bool(config.get("attention_bias")),
        "quantization_config": bool(config.get("quantization_config")) and not _is_block_scaled(config),
        "decoder_sparse_step": config.get("decoder_sparse_step", 1) != 1,
        "sliding_window": family.honors_sliding_window
        and (config.get("sliding_window") or math.inf) < config.get("max_position_embeddings", 0),
        "attn_logit_softcapping": config.get("attn_logit_softcapping") is not None,
        "final_logit_softcapping": config.get("final_logit_softcapping") is not None,
        "rope_scaling": not _serves_scaling(rope, config),
        "partial_rotary_factor": family.partial_rotary is None and rope.get("partial_rotary_factor", 1.0) != 1.0,
    }
    if any(refused.values()):
        names = [name for name, is_set in refused.items() if is_set]
        raise UserError(
            f"option(s) {', '.join(f'{n}={show(config.get(n, rope))}' for n in names)} are not served",
            source=source,
            expected=f"hidden_act={family.activations[0]}, full causal attention, no bias beyond the family's, "
            "rotary positions unscaled, or with linear, llama3, yarn or longrope scaling (of longrope with the factors "
            "that follow from its lengths), experts in every layer of a mixture of experts, weights as they are "
            "or in FP8 (e4m3) with a weight_block_size",
            hint="training would silently compute another model; use a checkpoint without these options",
        )


def _is_block_scaled(config: dict[str, Any]) -> bool:
    from megatron_rl.weights.block_scales import find_block

    return find_block(config) is not None


def _serves_scaling(rope: dict[str, Any], config: dict[str, Any]) -> bool:
    if rope_type_of(rope) == "default":
        return True
    from megatron_rl.weights.rope import is_served

    return is_served(rope, config)


def _read_rotation(config: dict[str, Any], rope: dict[str, Any], family: Family, head_dim: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if family.partial_rotary is not None:
        given = config.get("rotary_dim", 0) / head_dim or config.get("partial_rotary_factor")
        share = rope.get("partial_rotary_factor", given) or family.partial_rotary
        found["rotary_dim"] = int(head_dim * share) if share != 1.0 else None
    if family.may_skip_rotary:
        layers, interval = range(config["num_hidden_layers"]), config.get("no_rope_layer_interval", 4)
        rotated = config.get("no_rope_layers") or [(layer + 1) % interval for layer in layers]  # 1 means rotated
        found["unrotated_layers"] = tuple(layer for layer in layers if not rotated[layer])
    return found


def _check_shape(shape: ModelShape, config: Mapping[str, Any], source: str) -> None:
    """Refuse inconsistent sizes of a shape parsed from `config` (UserError with all of them)."""
    family, heads, hidden, rotated = FAMILIES[shape.family], shape.num_heads, shape.hidden_size, shape.rotary_dim
    rotated = shape.head_dim if rotated is None else rotated
    rope, router, given = shape.rope_scaling, shape.router, config.get("head_dim")
    right = {
        f"{heads} attention heads for {shape.num_kv_heads} KV heads": heads % shape.num_kv_heads == 0,
        f"head_dim = {show(given)} in a {shape.family} model of {heads} heads and a hidden size of {hidden}": (
            family.has_latent_attention
            or (given is not None and family.honors_head_dim)
            or (hidden % heads == 0 and given in (None, hidden // heads))
        ),
        f"{rotated} of the {shape.head_dim} channels of a head to be rotated": rotated > 0 and rotated % 2 == 0,
        f"rope_theta = {shape.rope_theta:g}": shape.rope_theta > 1,
    }
    if rope is not None:
        from megatron_rl.weights.rope import list_conditions

        right |= list_conditions(rope, rotated)
    if family.experts is not None:
        experts, chosen = shape.num_experts, shape.experts_per_token
        right[f"{chosen} experts per token of {experts}"] = chosen <= experts
        right[f"{shape.dense_layers} dense layers of {shape.num_layers}"] = shape.dense_layers <= shape.num_layers
    if (net := shape.delta_net) is not None:
        right[f"{net.value_heads} value heads for {net.key_heads} key heads"] = net.value_heads % net.key_heads == 0
    if router is not None:
        groups, most = router.num_groups, router.groups_per_token
        right[f"{most} of {groups} groups of {shape.num_experts} experts"] = (
            shape.num_experts % groups == 0 and most <= groups
        )
    require(
        right,
        source,
        "attention heads that are a multiple of the KV heads, value heads of the key heads; a hidden size that is a "
        "multiple of the heads where it gives head_dim; an even number of rotated channels, with a base above 1 and "
        "scalings that fit them; no more experts per token than experts, in groups of one size",
    )
