# SPDX-License-Identifier: Apache-2.0
"""Parsing of config.json into a `ModelShape`, and the adapters that a run gives it.

Image-text models (published Qwen3.5) have a text part: a section of config.json, and tensors `model.language_model.*`;
others are `model.visual.*`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_rl.types import UserError
from megatron_rl.weights.config_checks import (
    OBJECT,
    TEXT,
    TEXTS,
    check_config,
    check_kinds,
    read_json,
    require,
    show,
)
from megatron_rl.weights.families import Head, ModelShape
from megatron_rl.weights.family import ALIASES, FAMILIES, Family, rope_type_of

if TYPE_CHECKING:
    from megatron_rl.config.sections import LoraConfig
    from megatron_rl.weights.adapters import AdapterShape

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

        config = refuse_special(config, family, rope, source)
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
            "that follow from its lengths), experts in every layer of a mixture of experts",
            hint="training would silently compute another model; use a checkpoint without these options",
        )


def _serves_scaling(rope: dict[str, Any], config: dict[str, Any]) -> bool:
    if rope_type_of(rope) == "default":
        return True
    from megatron_rl.weights.rope import is_served

    return is_served(rope, config)


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
