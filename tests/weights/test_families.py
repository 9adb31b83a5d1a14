# SPDX-License-Identifier: Apache-2.0
"""Shapes read from config.json against the parameters that transformers makes of the same file."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.types import UserError
from megatron_rl.weights.adapters import read_shape
from megatron_rl.weights.families import FAMILIES
from megatron_rl.weights.head_sizes import FullHeads, LatentSizes
from megatron_rl.weights.model_config import load_model_shape, model_shape_from_config
from megatron_rl.weights.packed_experts import list_file_tensors, list_weights, split_huggingface_experts
from megatron_rl.weights.rollout_layout import check_engine
from megatron_rl.weights.rope import LinearScaling, Llama3Scaling, LongropeScaling, ProportionalScaling, YarnScaling
from megatron_rl.weights.special_parts import SigmoidRouter
from megatron_rl.weights.support import check_rollout_layout, check_training_layout
from shards import make_shape
from tiny_models import CONFIGS, save_tiny_model

SIZES: dict[str, Any] = dict(
    num_hidden_layers=2,
    hidden_size=24,
    intermediate_size=40,
    num_attention_heads=6,
    num_key_value_heads=2,
    vocab_size=70,
    max_position_embeddings=48,
    rms_norm_eps=1e-5,
)
UNSCORED = {
    "gemma4_text",
    "glm4_moe",
    "glm4_moe_lite",
    "minimax_m2",
    "qwen3_5_moe_text",
}  # transformers has no class of them with a score head
LONGROPE: dict[str, Any] = dict(
    rope_type="longrope",
    rope_theta=1e4,
    short_factor=[1.0, 2.0],
    long_factor=[2.0, 4.0],
    original_max_position_embeddings=24,
)
DELTA_NETS: dict[str, Any] = dict(
    head_dim=8,
    linear_num_key_heads=2,
    linear_num_value_heads=6,
    linear_key_head_dim=4,
    linear_value_head_dim=5,
)
EXPERT_SIZES: dict[str, dict[str, Any]] = {
    "qwen3_moe": dict(num_experts=3, num_experts_per_tok=2, moe_intermediate_size=20),
    "qwen3_next": dict(
        num_experts=3,
        num_experts_per_tok=2,
        moe_intermediate_size=20,
        shared_expert_intermediate_size=22,
        **DELTA_NETS,
    ),
    "qwen3_5_text": DELTA_NETS,
    "qwen3_5_moe_text": dict(
        num_experts=3,
        num_experts_per_tok=2,
        moe_intermediate_size=20,
        shared_expert_intermediate_size=22,
        **DELTA_NETS,
    ),
    "mixtral": dict(num_local_experts=3),
    "glm4_moe": dict(
        n_routed_experts=3,
        num_experts_per_tok=2,
        moe_intermediate_size=20,
        first_k_dense_replace=1,
        num_mtp_layers=0,
        head_dim=4,
        rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=1.0),
    ),
    "deepseek_v3": dict(
        n_routed_experts=3,
        num_experts_per_tok=2,
        moe_intermediate_size=20,
        first_k_dense_replace=1,
        num_mtp_layers=0,
        num_key_value_heads=6,
        q_lora_rank=14,
        kv_lora_rank=16,
        qk_nope_head_dim=5,
        qk_rope_head_dim=2,
        v_head_dim=3,
        n_group=1,
        topk_group=1,
        rms_norm_eps=1e-6,
    ),
    "minimax_m2": dict(num_local_experts=3, num_experts_per_tok=2, head_dim=8, rotary_dim=4),
    "glm4_moe_lite": dict(
        n_routed_experts=3,
        num_experts_per_tok=2,
        moe_intermediate_size=20,
        num_key_value_heads=6,
        q_lora_rank=14,
        kv_lora_rank=16,
        qk_nope_head_dim=5,
        qk_rope_head_dim=2,
        v_head_dim=3,
    ),
    "gemma4_text": dict(
        head_dim=8,
        global_head_dim=12,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        hidden_size_per_layer_input=0,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "gpt_oss": dict(
        num_local_experts=3,
        num_experts_per_tok=2,
        head_dim=4,
        rope_parameters=dict(rope_type="default", rope_theta=1e4),
    ),
}


def make_config(family: str = "llama", **changes: Any) -> dict[str, Any]:
    """The content of a config.json, as transformers writes it."""
    sizes = SIZES | EXPERT_SIZES.get(family, {}) | (dict(sliding_window=None) if family == "mistral" else {})
    sizes |= dict(pad_token_id=0) if family in ("phi3", "glm4", "smollm3", "olmo2") else {}
    return json.loads(CONFIGS[family](**(sizes | changes)).to_json_string(use_diff=False))


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {}),
        ("llama", dict(head_dim=8)),
        ("llama", dict(num_key_value_heads=6)),
        ("qwen2", {}),
        ("qwen3", dict(head_dim=16)),
        ("qwen3", dict(num_key_value_heads=1, head_dim=4)),
        ("mistral", dict(sliding_window=None)),
        ("mistral", dict(sliding_window=48, head_dim=8)),
        ("gemma", dict(head_dim=8)),
        ("gemma3_text", dict(head_dim=8)),
        ("phi3", dict(head_dim=8, pad_token_id=0)),
        ("glm4", dict(head_dim=8, attention_bias=True, pad_token_id=0)),
        ("smollm3", dict(pad_token_id=0)),
        ("olmo2", dict(pad_token_id=0)),
        ("qwen3_moe", dict(head_dim=8)),
        ("mixtral", {}),
        ("gpt_oss", {}),
        ("qwen3_next", {}),
        ("qwen3_next", dict(layer_types=["full_attention", "linear_attention"])),
        ("qwen3_5_text", {}),
        ("qwen3_5_moe_text", dict(layer_types=["full_attention", "linear_attention"])),
        ("glm4_moe", {}),
        ("deepseek_v3", {}),
        ("glm4_moe_lite", {}),
        ("minimax_m2", {}),
        ("deepseek_v3", dict(q_lora_rank=None, first_k_dense_replace=0)),
        ("glm4_moe", dict(attention_bias=True, use_qk_norm=True, n_shared_experts=2, first_k_dense_replace=0)),
        ("gemma4_text", {}),
        ("gemma4_text", dict(attention_k_eq_v=False)),
    ],
)
def test_logical_tensors_are_those_of_transformers(
    tmp_path: Path, family: str, changes: dict[str, int], tied: bool
) -> None:
    """Names and shapes; the numbers that shapes do not show are in the next test."""
    config = CONFIGS[family](**(SIZES | EXPERT_SIZES.get(family, {}) | changes), tie_word_embeddings=tied)
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shape = load_model_shape(tmp_path)
    expected = {name: tuple(x.shape) for name, x in split_huggingface_experts(shape, model.state_dict()).items()}
    if tied:
        del expected["lm_head.weight"]  # the embedding under another name; not in checkpoints
    assert shape.logical_tensors() == expected
    assert shape.family == family and shape.tied_embeddings is tied
    assert shape.num_experts == (3 if FAMILIES[family].experts else 0)
    assert (shape.max_position_embeddings, shape.vocab_size) == (48, 70)
    assert shape.rms_norm_eps == (1e-6 if family == "deepseek_v3" else 1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_logical_tensors_are_those_of_checkpoints(tmp_path: Path, family: str) -> None:
    """Names, shapes and values of save_pretrained's output; experts are fused in memory and apart on disk."""
    model = save_tiny_model(tmp_path, family, num_hidden_layers=2)
    shape, written = load_model_shape(tmp_path), load_file(tmp_path / "model.safetensors")
    assert {name: tuple(x.shape) for name, x in written.items()} == {
        name: tensor.size for name, tensor in list_file_tensors(shape).items()
    }
    written = split_huggingface_experts(shape, written)  # of packed experts; other names stay
    assert {name: tuple(x.shape) for name, x in written.items()} == shape.logical_tensors()
    views = split_huggingface_experts(shape, list_weights(model))
    assert views.keys() == written.keys()
    assert all(torch.equal(views[name], x) for name, x in written.items())


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - UNSCORED))
def test_logical_tensors_with_a_score_head_are_those_of_transformers(tmp_path: Path, family: str, tied: bool) -> None:
    """No output layer, with tied and untied embeddings in config.json; the class has the name that we write."""
    changes = SIZES | EXPERT_SIZES.get(family, {}) | (dict(sliding_window=None) if family == "mistral" else {})
    changes |= dict(pad_token_id=0) if family in ("phi3", "glm4", "smollm3", "olmo2") else {}
    config = CONFIGS[family](**changes, tie_word_embeddings=tied, num_labels=1)
    config.architectures = [FAMILIES[family].scoring_architecture]
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = AutoModelForSequenceClassification.from_config(config)
    shape = load_model_shape(tmp_path, head="score")
    views = split_huggingface_experts(shape, model.state_dict())
    assert shape.logical_tensors() == {name: tuple(x.shape) for name, x in views.items()}
    assert list(shape.logical_tensors())[-1] == "score.weight" and not shape.tied_embeddings
    assert type(model).__name__ == FAMILIES[family].scoring_architecture


def test_a_language_model_can_be_given_a_score_head_but_not_the_reverse() -> None:
    config = make_config("qwen2", tie_word_embeddings=True)
    language, scoring = (model_shape_from_config(config, source="here", head=head) for head in ("lm", "score"))
    assert language == replace(scoring, has_score_head=False, tied_embeddings=True)
    assert "score.weight" not in language.logical_tensors() and scoring.logical_tensors()["score.weight"] == (1, 24)
    for name in ("Qwen2ForSequenceClassification", "Qwen2ForTokenClassification"):
        scorer = config | {"architectures": [name]}
        assert model_shape_from_config(scorer, source="here", head="score") == scoring
        with pytest.raises(UserError, match=f"{name} has no language-model head") as caught:
            model_shape_from_config(scorer, source="here")
        assert caught.value.expected == "a Qwen2ForCausalLM"


@pytest.mark.parametrize("family", FAMILIES)
def test_numbers_that_are_not_sizes(family: str) -> None:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 5e5}
    if FAMILIES[family].alternates_windows:
        rope = {"full_attention": rope, "sliding_attention": rope | {"rope_theta": 1e4}}
    shape = model_shape_from_config(make_config(family, rope_parameters=rope), source="here")
    rotary = {"glm4_moe": 2, "glm4": 64, "deepseek_v3": 2, "glm4_moe_lite": 2, "minimax_m2": 4}
    rotary |= {"qwen3_next": 2, "qwen3_5_text": 2, "qwen3_5_moe_text": 2}
    assert shape.rotary_dim == rotary.get(family) and shape.unrotated_layers == ()
    assert shape.rope_theta == 5e5
    assert (shape.qkv_bias, shape.qk_norm) == {
        "llama": (False, False),
        "qwen2": (True, False),
        "qwen3": (False, True),
        "qwen3_moe": (False, True),
        "qwen3_next": (False, True),
        "qwen3_5_text": (False, True),
        "qwen3_5_moe_text": (False, True),
        "mistral": (False, False),
        "mixtral": (False, False),
        "gemma": (False, False),
        "glm4_moe": (False, False),
        "gemma3_text": (False, True),
        "gemma4_text": (False, True),
        "phi3": (False, False),
        "glm4": (True, False),
        "deepseek_v3": (False, False),
        "glm4_moe_lite": (False, False),
        "minimax_m2": (False, True),
        "smollm3": (False, False),
        "olmo2": (False, True),
        "gpt_oss": (True, False),
    }[family]


@pytest.mark.parametrize(
    ("family", "change", "expected"),
    [
        ("qwen3_moe", dict(norm_topk_prob=True), (3, 2, True)),
        ("qwen3_moe", dict(norm_topk_prob=False), (3, 2, False)),
        ("qwen3_moe", dict(num_experts=8, num_local_experts=None), (8, 2, False)),  # as published
        ("qwen3_moe", dict(num_experts_per_tok=1), (3, 1, False)),
        ("qwen3_next", {}, (3, 2, True)),
        ("qwen3_5_moe_text", {}, (3, 2, True)),
        ("mixtral", dict(num_experts_per_tok=3), (3, 3, True)),
        ("llama", {}, (0, 0, False)),
    ],
)
def test_routing_numbers(family: str, change: dict[str, Any], expected: tuple[int, int, bool]) -> None:
    shape = model_shape_from_config(make_config(family) | change, source="here")
    assert (shape.num_experts, shape.experts_per_token, shape.normalizes_shares) == expected


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (dict(routed_scaling_factor=2.5), (1, 1, 2.5)),
        (dict(n_group=4, topk_group=4), (1, 1, 1.0)),
        (dict(n_group=4, topk_group=2, num_experts_per_tok=4, n_routed_experts=8), (4, 2, 1.0)),
    ],
)
def test_sigmoid_routers(change: dict[str, Any], expected: tuple[int, int, float]) -> None:
    shape = model_shape_from_config(make_config("glm4_moe") | change, source="here")
    assert shape.router == SigmoidRouter(*expected)
    assert (shape.dense_layers, shape.dense_ffn_size, shape.shared_ffn_size) == (1, 40, 20)


@pytest.mark.parametrize(
    "change",
    [dict(norm_topk_prob=False), dict(num_experts_per_tok=1), dict(n_group=4, topk_group=2, num_experts_per_tok=3)],
)
def test_sigmoid_routers_that_megatron_core_computes_in_another_way_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="experts per token in"):
        model_shape_from_config(make_config("glm4_moe") | change, source="here")


def test_dense_layers_of_glm_lite_are_counted_or_named() -> None:
    """Published files count them; transformers writes a kind for each layer."""
    written = make_config("glm4_moe_lite")
    assert written["mlp_layer_types"] == ["dense", "sparse"] and "first_k_dense_replace" not in written
    published = {name: value for name, value in written.items() if name != "mlp_layer_types"}
    shape = model_shape_from_config(written, source="here")
    assert shape == model_shape_from_config(published | dict(first_k_dense_replace=1), source="here")
    assert (shape.dense_layers, shape.dense_ffn_size, shape.rms_norm_eps) == (1, 40, 1e-5)
    with pytest.raises(UserError, match="dense layers behind mixtures"):
        model_shape_from_config(written | dict(mlp_layer_types=["sparse", "dense"]), source="here")


def test_minimax_reads_published_numbers() -> None:
    """Rotated channels of a head by `rotary_dim`, no dense layers, and no scale of the experts."""
    published = make_config("minimax_m2", head_dim=8)
    published["rope_parameters"].pop("partial_rotary_factor", None)
    published |= dict(scoring_func="sigmoid", use_routing_bias=True, rotary_dim=4, use_mtp=True, num_mtp_modules=3)
    shape = model_shape_from_config(published | dict(attn_type_list=[1, 1]), source="here")
    assert (shape.rotary_dim, shape.dense_layers, shape.shared_ffn_size) == (4, 0, 0)
    assert shape.router == SigmoidRouter(1, 1, 1.0)
    for change in (dict(scoring_func="softmax"), dict(attn_type_list=[0, 1]), dict(use_routing_bias=False)):
        with pytest.raises(UserError, match=next(iter(change))):
            model_shape_from_config(published | change, source="here")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (dict(rms_norm_eps=1e-5), "rms_norm_eps=1e-05"),
        (dict(rope_interleave=False), "rope_interleave=False"),
        (dict(scoring_func="softmax"), "scoring_func='softmax'"),
        (dict(rope_parameters=dict(rope_type="linear", rope_theta=1e4, factor=2.0)), "linear"),
        (dict(attention_bias=True), "attention_bias=True"),
        (dict(quantization_config=dict(quant_method="fp8")), "quantization_config="),
    ],
)
def test_latent_attention_that_is_not_deepseeks_is_refused(change: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=named):
        model_shape_from_config(make_config("deepseek_v3") | change, source="here")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (dict(attention_bias=False), "attention_bias=False"),
        (dict(swiglu_limit=6.0), "swiglu_limit=6.0"),
        (dict(swiglu_alpha=1.0), "swiglu_alpha=1.0"),
        (dict(rope_parameters=None), "rope_scaling=None"),
        (dict(quantization_config=dict(quant_method="fp8")), "quantization_config="),
        (dict(hidden_act="gelu"), "hidden_act='gelu'"),
    ],
)
def test_gpt_oss_that_is_not_as_published_is_refused(change: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=named):
        model_shape_from_config(make_config("gpt_oss") | change, source="here")


def test_windows_and_positions_of_gpt_oss_as_published() -> None:
    """Names and numbers of the configuration of gpt-oss-20b."""
    config = make_config("gpt_oss") | dict(num_hidden_layers=4, rope_parameters=None, rope_theta=150000)
    config |= dict(
        sliding_window=128,
        max_position_embeddings=131072,
        layer_types=["sliding_attention", "full_attention"] * 2,
        quantization_config=dict(quant_method="mxfp4", modules_to_not_convert=["lm_head"]),
        rope_scaling=dict(
            rope_type="yarn",
            factor=32.0,
            beta_fast=32.0,
            beta_slow=1.0,
            truncate=False,
            original_max_position_embeddings=4096,
        ),
    )
    shape = model_shape_from_config(config, source="here")
    assert (shape.sliding_layers, shape.sliding_window, shape.sliding_rope_theta) == ((0, 2), 128, 0.0)
    assert shape.rope_scaling == YarnScaling(32.0, 4096, 0.1 * math.log(32) + 1, 32.0, 1.0, False)
    assert (shape.rope_theta, shape.max_position_embeddings) == (150000.0, 131072)
    assert model_shape_from_config(config | dict(layer_types=None), source="here") == shape
    for engine in ("vllm", "hf", "megatron"):
        check_engine(shape, engine)
    with pytest.raises(UserError, match="rollout.engine = 'vllm_server' with a gpt_oss model"):
        check_engine(shape, "vllm_server")
    for change in (dict(sliding_layers=(1, 3)), dict(rms_norm_eps=1e-6), dict(rope_scaling=None)):
        other = replace(shape, **change)
        check_engine(other, "hf")
        with pytest.raises(UserError, match="rollout.engine = 'vllm' with a gpt_oss model of windows"):
            check_engine(other, "vllm")


def test_scores_of_latent_attention_grow_with_yarn() -> None:
    """Kimi-K2 is the same architecture under another name."""
    rope = dict(rope_type="yarn", rope_theta=1e4, factor=40.0, mscale=1.0, mscale_all_dim=1.0)
    config = make_config("deepseek_v3") | dict(rope_parameters=rope | dict(original_max_position_embeddings=24))
    shape = model_shape_from_config(config, source="here")
    assert shape.attention_scale == pytest.approx(7**-0.5 * 1.3688879**2)
    assert (shape.latent, shape.head_dim, shape.rotary_dim) == (LatentSizes(14, 16, 2, 3), 7, 2)
    assert shape.attention_elements == 24 * 14 + 14 * 42 + 24 * 18 + 16 * 48 + 18 * 24
    assert model_shape_from_config(config | dict(model_type="kimi_k2"), source="here") == shape


def test_a_single_expert_per_token_with_normalised_shares_is_refused() -> None:
    with pytest.raises(UserError, match="num_experts_per_tok = 1 with normalized shares"):
        model_shape_from_config(make_config("mixtral") | dict(num_experts_per_tok=1), source="here")


@pytest.mark.parametrize(
    ("spelling", "expected"),
    [
        ({"rope_theta": 1e6}, 1e6),
        ({"rope_theta": 1e6, "rope_scaling": None}, 1e6),
        ({"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}, 1e6),
        ({"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}, "rope_theta": 2.0}, 1e6),
        ({"rope_theta": 1e6, "rope_scaling": {"type": "default"}}, 1e6),
        ({}, 1e4),
    ],
    ids=["transformers 4", "null scaling", "transformers 5", "both", "default scaling", "neither"],
)
def test_rope_theta_of_transformers_4_and_5(spelling: dict[str, Any], expected: float) -> None:
    config = make_config()
    for key in ("rope_theta", "rope_scaling", "rope_parameters"):
        config.pop(key, None)
    assert model_shape_from_config(config | spelling, source="here").rope_theta == expected


@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
def test_rope_scaling_of_llama_3(key: str) -> None:
    config = make_config() | {"rope_parameters": None}
    scaling = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
    shape = model_shape_from_config(config | {key: scaling | {"rope_type": "llama3"}}, source="here")
    assert shape.rope_scaling == Llama3Scaling(8.0, 1.0, 4.0, 8192)
    assert model_shape_from_config(config, source="here").rope_scaling is None
    del scaling["low_freq_factor"]
    with pytest.raises(UserError, match="key 'low_freq_factor' is missing"):
        model_shape_from_config(config | {key: scaling | {"rope_type": "llama3"}}, source="here")


def test_what_is_rotated() -> None:
    def read(family: str, **changes: Any) -> Any:
        return model_shape_from_config(make_config(family, num_hidden_layers=8) | changes, source="here")

    assert read("smollm3").unrotated_layers == (3, 7)
    assert read("smollm3", no_rope_layers=[0, 1] * 4).unrotated_layers == (0, 2, 4, 6)
    assert read("smollm3", no_rope_layers=None, no_rope_layer_interval=3).unrotated_layers == (2, 5)
    rope = {"rope_type": "default", "rope_theta": 1e4}
    assert read("phi3", rope_parameters=rope | {"partial_rotary_factor": 0.5}).rotary_dim == 2
    assert read("phi3", rope_parameters=None, rope_theta=1e4, partial_rotary_factor=0.5).rotary_dim == 2
    with pytest.raises(UserError, match="partial_rotary_factor"):
        read("llama", rope_parameters=rope | {"partial_rotary_factor": 0.5})


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("glm4_moe", dict(rope_scaling=YarnScaling(4.0, 48, 1.1, 32.0, 1.0, True))),
        ("gemma3_text", dict(rope_scaling=LinearScaling(8.0))),
        ("deepseek_v3", {}),
        ("qwen3_next", {}),
        ("qwen3_5_text", {}),
        ("phi3", dict(rope_scaling=LongropeScaling((1.0, 2.0), 1.2), rotary_dim=4)),
        ("smollm3", dict(unrotated_layers=(1, 3))),
        ("llama", dict(rope_scaling=Llama3Scaling(8.0, 1.0, 4.0, 8192))),
        ("gemma4_text", dict(rope_scaling=ProportionalScaling(0.25))),
    ],
)
def test_a_manifest_holds_all_of_a_shape(family: str, changes: dict[str, Any]) -> None:
    shape = make_shape(family, **changes)
    assert read_shape(json.loads(json.dumps(asdict(shape)))) == shape
    assert hash(read_shape(json.loads(json.dumps(asdict(shape))))) == hash(shape)


def test_gemma_4_reads_published_numbers_and_those_of_each_layer() -> None:
    """Published files have one size for all full layers, transformers 5 writes that of each layer."""
    written = make_config("gemma4_text", final_logit_softcapping=30.0)
    assert written["per_layer_config"] == {"1": {"head_dim": 12, "num_key_value_heads": 1}}
    published = {name: value for name, value in written.items() if name != "per_layer_config"}
    published |= dict(global_head_dim=12, num_global_key_value_heads=1, use_bidirectional_attention="vision")
    shape = model_shape_from_config(published, source="here")
    assert shape == model_shape_from_config(written, source="here")
    assert (shape.full_heads, shape.head_dim, shape.num_kv_heads) == (FullHeads(1, 12, True), 8, 2)
    assert (shape.logit_softcap, shape.attention_scale, shape.sliding_layers) == (30.0, 1.0, (0,))
    assert (shape.rope_scaling, shape.rope_theta, shape.sliding_rope_theta) == (ProportionalScaling(0.25), 1e6, 1e4)
    own = published | dict(attention_k_eq_v=False)  # then transformers and vLLM ignore the number of heads
    assert model_shape_from_config(own, source="here").full_heads == FullHeads(2, 12, False)
    for change, named in (
        (dict(per_layer_config={"0": {"head_dim": 12}}), "per_layer_config"),
        (dict(per_layer_config={"1": {"num_attention_heads": 3}}), "per_layer_config"),
        (dict(layer_types=["full_attention", "sliding_attention"], per_layer_config=None), "last layer has a window"),
    ):
        with pytest.raises(UserError, match=named):
            model_shape_from_config(written | change, source="here")


def test_windows_of_gemma_3() -> None:
    """Of configs as transformers 4 wrote them, and 5."""

    def read(**changes: Any) -> Any:
        config = make_config("gemma3_text", num_hidden_layers=7) | changes
        return model_shape_from_config(config, source="here")

    old = dict(
        layer_types=None, rope_parameters=None, rope_theta=1e6, rope_local_base_freq=5e3, sliding_window_pattern=3
    )
    shape = read(**old, rope_scaling={"rope_type": "linear", "factor": 8.0}, sliding_window=9)
    assert (shape.sliding_layers, shape.sliding_window) == ((0, 1, 3, 4, 6), 9)
    assert (shape.rope_theta, shape.sliding_rope_theta) == (1e6, 5e3) and shape.rope_scaling == LinearScaling(8.0)
    new = read(query_pre_attn_scalar=16)
    assert (new.sliding_layers, new.sliding_window, new.attention_scale) == ((0, 1, 2, 3, 4, 6), 4096, 0.25)
    assert (new.rope_theta, new.sliding_rope_theta, new.rope_scaling) == (1e6, 1e4, None)
    with pytest.raises(UserError, match="final_logit_softcapping=30.0"):
        read(final_logit_softcapping=30.0)


def test_positions_that_a_scaling_allows() -> None:
    """YaRN extends the config.json of a short model; the short factors of LongRoPE end at the pretraining length."""

    def read(rope: dict[str, Any]) -> Any:
        return model_shape_from_config(make_config() | {"rope_parameters": rope}, source="here")

    yarn = read(dict(rope_type="yarn", rope_theta=1e4, factor=4.0))
    assert yarn.max_position_embeddings == 4 * 48 and yarn.rope_scaling == YarnScaling(
        4.0, 48, 0.1 * math.log(4.0) + 1.0, 32.0, 1.0, True
    )
    mscale = read(dict(rope_type="yarn", rope_theta=1e4, factor=40.0, mscale=0.7, mscale_all_dim=1.0)).rope_scaling
    assert mscale.attention_factor == pytest.approx(1.2582216 / 1.3688879)
    longrope = read(LONGROPE)
    assert longrope.max_position_embeddings == 24 and longrope.rope_scaling.short_factor == (1.0, 2.0)
    with pytest.raises(UserError, match="key 'factor' is missing"):
        read(dict(rope_type="linear", rope_theta=1e4))


@pytest.mark.parametrize(
    ("family", "change", "named"),
    [
        ("llama", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ("gemma", {"hidden_act": "silu"}, "hidden_act='silu'"),
        ("gemma", {"hidden_activation": "gelu"}, "hidden_activation='gelu'"),
        ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        ("qwen2", {"use_sliding_window": True}, "use_sliding_window=True"),
        ("qwen3", {"attention_bias": True}, "attention_bias=True"),
        ("llama", {"mlp_bias": True}, "mlp_bias=True"),
        ("mistral", {"sliding_window": 47}, "sliding_window=47"),
        ("mixtral", {"sliding_window": 4}, "sliding_window=4"),
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise=0.1"),
        ("qwen3_moe", {"mlp_only_layers": [1]}, r"mlp_only_layers=\[1\]"),
        ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step=2"),
        ("qwen3_next", {"attention_bias": True}, "attention_bias=True"),
        ("qwen3_5_text", {"attn_output_gate": False}, "attn_output_gate=False"),
        ("qwen3_5_text", {"output_gate_type": "sigmoid"}, "output_gate_type='sigmoid'"),
        ("qwen3_5_moe_text", {"norm_topk_prob": False}, "norm_topk_prob=False"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 5e5, "factor": 8.0}}, "dynamic"),
        ("qwen2", {"rope_parameters": None, "rope_scaling": {"type": "mrope", "mrope_section": [1, 2, 3]}}, "mrope"),
        ("llama", {"rope_parameters": LONGROPE | {"attention_factor": 1.5}}, "longrope"),
        ("llama", {"rope_parameters": LONGROPE | {"factor": 4.0}}, "longrope"),
        ("llama", {"rope_parameters": {"rope_type": "proportional", "rope_theta": 1e4}}, "proportional"),
        ("gemma3_text", {"final_logit_softcapping": 30.0}, "final_logit_softcapping=30"),
        ("gemma4_text", {"hidden_size_per_layer_input": 4}, "hidden_size_per_layer_input=4"),
        ("gemma4_text", {"num_kv_shared_layers": 1}, "num_kv_shared_layers=1"),
        ("gemma4_text", {"enable_moe_block": True}, "enable_moe_block=True"),
        ("gemma4_text", {"num_experts": 8}, "num_experts=8"),
        ("gemma4_text", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention='all'"),
        ("gemma4_text", {"rope_parameters": None}, "rope_parameters"),
        (
            "gemma4_text",
            {
                "rope_parameters": {
                    "full_attention": {"rope_type": "proportional", "rope_theta": 1e6},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
                }
            },
            "rope_parameters",
        ),
        ("gemma4_text", {"attention_bias": True}, "attention_bias=True"),
    ],
)
def test_options_that_are_not_served_are_refused(family: str, change: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=named) as caught:
        model_shape_from_config(make_config(family) | change, source="dir/config.json")
    assert caught.value.source == "dir/config.json" and "not served" in caught.value.found


@pytest.mark.parametrize("family", FAMILIES)
def test_a_config_that_does_not_mention_tying_means_what_transformers_means(family: str) -> None:
    """The published configs of Gemma leave it out: its embeddings are tied."""
    config = make_config(family)
    del config["tie_word_embeddings"]
    expected = CONFIGS[family](**config).tie_word_embeddings
    assert expected is (family in ("gemma", "gemma3_text", "gemma4_text", "smollm3"))
    assert model_shape_from_config(config, source="here").tied_embeddings is expected


def test_the_activation_of_gemma_as_its_first_configs_spell_it() -> None:
    config = make_config("gemma")
    for change in ({"hidden_act": "gelu"}, {"hidden_act": "gelu", "hidden_activation": None}, {"hidden_act": None}):
        assert model_shape_from_config(config | change, source="here") == model_shape_from_config(config, source="here")


def test_unknown_architecture_lists_the_known_ones() -> None:
    with pytest.raises(UserError, match=r"unknown architecture 'gpt2'") as caught:
        model_shape_from_config({"model_type": "gpt2"}, source="here")
    assert all(family in caught.value.expected for family in FAMILIES) and "add_a_family.md" in caught.value.hint
    with pytest.raises(UserError, match="unknown architecture None"):
        model_shape_from_config({}, source="here")


@pytest.mark.parametrize("key", ["hidden_size", "num_attention_heads", "vocab_size", "max_position_embeddings"])
def test_a_missing_key_is_named(key: str) -> None:
    config = make_config()
    del config[key]
    with pytest.raises(UserError, match=f"key '{key}' is missing"):
        model_shape_from_config(config, source="here")


@pytest.mark.parametrize(
    ("files", "hint"),
    [
        ({"a.gguf": "GGUF"}, "python tools/unpack_gguf.py {0}/a.gguf --out DIR, and set model.path=DIR"),
        ({"adapter_config.json": '{"base_model_name_or_path": "me/base"}'}, "model.path=me/base, actor.lora.path={0}"),
        (
            {"latest_checkpointed_iteration.txt": "20\n", "iter_0000020/.metadata": ""},
            "convert_megatron_to_hf.py --checkpoint {0}/iter_0000020 --config",
        ),
        ({"latest_checkpointed_iteration.txt": "release"}, "--checkpoint {0}/release --config"),
        ({"README.md": "empty"}, "hf download OWNER/NAME --local-dir "),
    ],
)
def test_other_formats_are_followed_by_their_command(files: dict[str, str], hint: str, tmp_path: Path) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    with pytest.raises(UserError) as caught:
        load_model_shape(tmp_path)
    assert hint.format(tmp_path) in str(caught.value)
    assert "toy" not in str(caught.value) or "README.md" in files


@pytest.mark.parametrize("name", ["a.gguf", "iter_0000020"])
def test_a_file_or_directory_alone_is_enough(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"(unpack_gguf.py|--checkpoint) {tmp_path / name}"):
        load_model_shape(tmp_path / name)


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no directory .*nowhere"):
        load_model_shape(tmp_path / "nowhere")
    for content in (b'{"model_type": "lla', b"\xff\xfe", b"[]", b""):
        (tmp_path / "config.json").write_bytes(content)
        with pytest.raises(UserError, match="config.json holds no JSON object"):
            load_model_shape(tmp_path)


def lay_out(tp_size: int, pp_size: int, vpp_size: int, ep_size: int = 1) -> ParallelLayout:
    return ParallelLayout(tp_size * pp_size * ep_size, tp_size, pp_size, vpp_size, ep_size=ep_size)


def test_training_layouts_that_hold_the_model() -> None:
    shape = make_shape()  # 8 heads, 4 KV heads, 40 columns, 4 layers
    for sizes in ((1, 1, 1), (2, 2, 2), (4, 4, 1), (1, 1, 4)):
        check_training_layout(shape, lay_out(*sizes))


@pytest.mark.parametrize(
    ("sizes", "found", "expected"),
    [
        ((8, 1, 1), "tensor_model_parallel_size 8 does not divide the 4 KV heads", r"one of \[1, 2, 4\]"),
        ((3, 1, 1), "tensor_model_parallel_size 3 does not divide the 8 attention heads", r"one of \[1, 2, 4\]"),
        ((1, 3, 1), r"pp \* vpp = 3 \* 1 = 3 does not divide the 4 layers", r"one of \[1, 2, 4\]"),
        ((1, 2, 4), r"pp \* vpp = 2 \* 4 = 8 does not divide", r"one of \[1, 2, 4\]"),
    ],
)
def test_training_layouts_that_do_not_fit_name_those_that_do(
    sizes: tuple[int, int, int], found: str, expected: str
) -> None:
    with pytest.raises(UserError, match=f"(?s){found}.*{expected}"):
        check_training_layout(make_shape(), lay_out(*sizes))


def test_feed_forward_columns_limit_the_layout_too() -> None:
    with pytest.raises(UserError, match=r"(?s)4 does not divide the 42 feed-forward columns.*one of \[1, 2\]"):
        check_training_layout(make_shape(ffn_hidden_size=42), lay_out(4, 1, 1))


def test_expert_parallel_layouts() -> None:
    """Which ranks the experts may take is the layout's matter (tests/parallel/test_layout.py)."""
    shape = make_shape("qwen3_moe", num_experts=6)
    for ep_size in (1, 2, 3, 6):
        check_training_layout(shape, lay_out(1, 1, 1, ep_size), sequence_parallel=False)
    with pytest.raises(UserError, match=r"(?s)size 4 does not divide the 6 experts.*one of \[1, 2, 3, 6\]"):
        check_training_layout(shape, lay_out(1, 1, 1, 4))
    with pytest.raises(UserError, match=r"(?s)size 2 needs a mixture of experts.*one of \[1\]"):
        check_training_layout(make_shape("llama"), lay_out(1, 1, 1, 2))
    with pytest.raises(UserError, match="(?s)without sequence parallelism.*actor.sequence_parallel=true"):
        check_training_layout(shape, lay_out(2, 1, 1), sequence_parallel=False)
    with pytest.raises(UserError, match="critic.sequence_parallel=true"):
        check_training_layout(shape, lay_out(2, 1, 1), sequence_parallel=False, section="critic")


def test_rollout_layouts_may_replicate_kv_heads() -> None:
    for tp_size in (1, 2, 4, 8):
        check_rollout_layout(make_shape(), tp_size)
        check_rollout_layout(make_shape(num_kv_heads=1), tp_size)


@pytest.mark.parametrize(
    ("changes", "tp_size", "valid"),
    [
        ({}, 3, [1, 2, 4, 8]),
        ({}, 16, [1, 2, 4, 8]),
        (dict(ffn_hidden_size=42), 4, [1, 2]),
        (dict(num_heads=12, num_kv_heads=4, ffn_hidden_size=48), 6, [1, 2, 4, 12]),
    ],
)
def test_rollout_layouts_that_do_not_fit_name_those_that_do(
    changes: dict[str, int], tp_size: int, valid: list[int]
) -> None:
    with pytest.raises(UserError, match=f"rollout.tensor_model_parallel_size {tp_size} does not fit") as caught:
        check_rollout_layout(make_shape(**changes), tp_size)
    assert str(valid) in caught.value.expected
