# SPDX-License-Identifier: Apache-2.0
"""Parsing of config.json into a `ModelShape`.

Image-text models (published Qwen3.5) have a text part: a section of config.json, and tensors `model.language_model.*`;
others are `model.visual.*`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_rl.types import UserError
from megatron_rl.weights.config_checks import (
    OBJECT,
    TEXT,
    TEXTS,
    check_config,
    check_kinds,
    check_shape,
    read_json,
    show,
)
from megatron_rl.weights.families import DeltaNetSizes, Head, ModelShape
from megatron_rl.weights.family import ALIASES, FAMILIES, Family, LatentSizes, SigmoidRouter
from megatron_rl.weights.rope import compute_yarn_mscale, is_served, read_rope_scaling, rope_type_of

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
# Qwen3.5 options and the values for which transformers and vLLM agree.
_OF_SPLIT_NETS: dict[str, tuple[Any, ...]] = {
    "attn_output_gate": (None, True),
    "output_gate_type": (None, "silu", "swish"),
    "norm_topk_prob": (None, True),
    "layer_scale": (None, False),
}
_SCORING_SUFFIXES = ("ForSequenceClassification", "ForTokenClassification")


def load_model_shape(directory: str | Path, head: Head = "lm") -> ModelShape:
    """Parse `config.json` of an HF model directory.

    Args:
        head: head of the role; a language model can be given a score head, not vice versa.

    Raises:
        UserError: missing file, unknown architecture, wrong head, unsupported option.
    """
    file = Path(directory) / "config.json"
    if not file.is_file():
        raise UserError(
            f"there is no {file}",
            source="model.path",
            expected="a model directory in Hugging Face format",
            hint=_hint_at_model(file.parent),
        )
    return model_shape_from_config(_read_config(file.parent), source=str(file), head=head)


def _hint_at_model(path: Path) -> str:
    """Return the next command for a path that holds no model in HF format."""
    file = path if path.suffix == ".gguf" else next(iter(sorted(path.glob("*.gguf"))), None)
    if file is not None:
        return f"unpack the GGUF file: python tools/unpack_gguf.py {file} --out DIR, and set model.path=DIR"
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
        "check for a typo; hf download OWNER/NAME --local-dir DIR fetches a model of the hub, and "
        "tools/make_toy_task.py makes a small one"
    )


def check_mtp(directory: Path) -> None:
    """Refuse multi-token prediction for a model without exactly one such layer (UserError)."""
    config = _read_config(directory)
    if (found := next((config[key] for key in MTP_KEYS if config.get(key)), 0)) != 1:
        raise UserError(
            f"actor.mtp_lr with a model that has {found} layers for multi-token prediction",
            source=f"{MTP_KEYS[0]} in {directory / 'config.json'}",
            expected="1 (DeepSeek-V3, GLM-4.5)",
            hint="leave actor.mtp_lr out",
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
        experts = _read_experts(config, family, source)
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
            **experts,
            **_read_attention(config, family, source),
        )
        if family.has_latent_attention:
            shape = replace(shape, **_read_latent(config, rope))
    except KeyError as error:
        raise UserError(
            f"key {error} is missing",
            source=source,
            expected="a complete HF config.json",
            hint="write it with transformers' save_pretrained",
        ) from None
    check_shape(shape, config, source)
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
        if rope_type_of(rope) not in ("default", "yarn") or rope.get("attention_factor") is not None:
            wrong["rope_scaling"] = rope
        _refuse_unserved(
            wrong,
            source,
            "DeepSeek-V3 as published: norms with an epsilon of 1e-6 (which transformers takes for latents "
            "whatever config.json says, and vLLM does not), rotated neighbors, a sigmoid router, positions unscaled "
            "or with yarn without an attention_factor",
        )
    refused = {
        "hidden_act": (config.get("hidden_act") or family.activations[0]) not in family.activations,
        "hidden_activation": config.get("hidden_activation") not in (None, family.activations[0]),
        **{option: bool(config.get(option)) for option in _MUST_BE_OFF},
        "attention_bias": family.qkv_bias is not None and bool(config.get("attention_bias")),
        "quantization_config": bool(config.get("quantization_config")),
        "decoder_sparse_step": config.get("decoder_sparse_step", 1) != 1,
        "sliding_window": family.honors_sliding_window
        and (config.get("sliding_window") or math.inf) < config.get("max_position_embeddings", 0),
        "attn_logit_softcapping": config.get("attn_logit_softcapping") is not None,
        "final_logit_softcapping": config.get("final_logit_softcapping") is not None,
        "rope_scaling": not is_served(rope, config),
        "partial_rotary_factor": family.partial_rotary is None and rope.get("partial_rotary_factor", 1.0) != 1.0,
    }
    if any(refused.values()):
        names = [name for name, is_set in refused.items() if is_set]
        raise UserError(
            f"option(s) {', '.join(f'{n}={show(config.get(n, rope))}' for n in names)} are not served",
            source=source,
            expected=f"hidden_act={family.activations[0]}, full causal attention, no bias beyond the family's, "
            "rotary positions unscaled, or with linear, llama3, yarn or longrope scaling (of longrope with the factors "
            "that follow from its lengths), experts in every layer of a mixture of experts",
            hint="training would silently compute another model; use a checkpoint without these options",
        )


def _read_rotation(config: dict[str, Any], rope: dict[str, Any], family: Family, head_dim: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if family.partial_rotary is not None:
        share = rope.get("partial_rotary_factor", config.get("partial_rotary_factor")) or family.partial_rotary
        found["rotary_dim"] = int(head_dim * share) if share != 1.0 else None
    if family.may_skip_rotary:
        layers, interval = range(config["num_hidden_layers"]), config.get("no_rope_layer_interval", 4)
        rotated = config.get("no_rope_layers") or [(layer + 1) % interval for layer in layers]  # 1 means rotated
        found["unrotated_layers"] = tuple(layer for layer in layers if not rotated[layer])
    return found


def _read_attention(config: dict[str, Any], family: Family, source: str) -> dict[str, Any]:
    if family.has_delta_nets:
        return _read_delta_nets(config, source, is_split=family.splits_projections)
    if not (family.alternates_windows or family.has_sinks):
        return {}
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
        found |= dict(sliding_rope_theta=theta, attention_scale=config["query_pre_attn_scalar"] ** -0.5)
    return found


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
    wrong_types = set(types) - {"linear_attention", "full_attention"}
    if wrong_types or len(types) != len(layers) or net.value_heads % net.key_heads:
        raise UserError(
            f"layer_types = {types}, with {net.value_heads} value heads for {net.key_heads} key heads",
            source=source,
            expected="linear_attention or full_attention for each layer, and equally many value heads for a key head",
            hint="use a checkpoint without these options",
        )
    linear = tuple(layer for layer in layers if types[layer] == "linear_attention")
    return dict(delta_net=net, delta_layers=linear) if linear else {}


def _find_unserved(config: dict[str, Any], served: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
    return {name: config.get(name) for name, values in served.items() if config.get(name) not in values}


def _refuse_unserved(wrong: dict[str, Any], source: str, expected: str) -> None:
    if wrong:
        raise UserError(
            f"option(s) {', '.join(f'{name}={value!r}' for name, value in wrong.items())} are not served",
            source=source,
            expected=expected,
            hint="use a checkpoint without these options",
        )


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
    if family.experts is None:
        return {}
    if family.experts.has_sigmoid_router:
        return _read_sigmoid_experts(config, source)
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
    return dict(
        num_experts=config["n_routed_experts"],
        experts_per_token=per_token,
        normalizes_shares=True,
        dense_layers=config["first_k_dense_replace"],
        dense_ffn_size=config["intermediate_size"] if config["first_k_dense_replace"] else 0,
        shared_ffn_size=config["moe_intermediate_size"] * (config.get("n_shared_experts") or 0),
        router=SigmoidRouter(groups, groups_per_token, float(config["routed_scaling_factor"])),
    )
