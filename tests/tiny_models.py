# SPDX-License-Identifier: Apache-2.0
"""Small random transformers models on disk: the reference that Megatron's models are compared with.

Weights are larger than transformers draws them, and norms and biases are not 1 and 0, so that logits spread (by 0.5)
and no parameter can be left out or swapped unseen. The vocabulary is odd: Megatron pads it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    DeepseekV3Config,
    Gemma3TextConfig,
    Gemma4Config,
    Gemma4TextConfig,
    GemmaConfig,
    Glm4Config,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    GptOssConfig,
    LlamaConfig,
    MiniMaxM2Config,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3_5Config,
    Qwen3_5MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    SmolLM3Config,
)

from megatron_rl.weights.model_config import TEXT_PARTS

VOCAB_SIZE = 517
CONFIGS: dict[str, type[PretrainedConfig]] = {
    "llama": LlamaConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "mistral": MistralConfig,
    "gemma": GemmaConfig,
    "gemma3_text": Gemma3TextConfig,
    "gemma4_text": Gemma4TextConfig,
    "phi3": Phi3Config,
    "glm4": Glm4Config,
    "smollm3": SmolLM3Config,
    "olmo2": Olmo2Config,
    "qwen3_moe": Qwen3MoeConfig,
    "qwen3_next": Qwen3NextConfig,
    "qwen3_5_text": Qwen3_5TextConfig,
    "qwen3_5_moe_text": Qwen3_5MoeTextConfig,
    "mixtral": MixtralConfig,
    "glm4_moe": Glm4MoeConfig,
    "deepseek_v3": DeepseekV3Config,
    "glm4_moe_lite": Glm4MoeLiteConfig,
    "minimax_m2": MiniMaxM2Config,
    "gpt_oss": GptOssConfig,
}
IMAGE_TEXT_CONFIGS: dict[str, type[PretrainedConfig]] = {
    "qwen3_5": Qwen3_5Config,
    "qwen3_5_moe": Qwen3_5MoeConfig,
    "gemma4": Gemma4Config,
}
_DELTA_NETS: dict[str, Any] = dict(
    tie_word_embeddings=False,
    head_dim=16,
    linear_num_key_heads=4,
    linear_num_value_heads=8,
    linear_key_head_dim=8,
    linear_value_head_dim=12,
    linear_conv_kernel_dim=4,
)
_FAMILY_SIZES: dict[str, dict[str, Any]] = {
    "llama": dict(tie_word_embeddings=False),
    "qwen2": dict(tie_word_embeddings=True),
    "qwen3": dict(tie_word_embeddings=False, head_dim=16),  # not hidden_size / heads
    "mistral": dict(tie_word_embeddings=False, sliding_window=None),
    "gemma": dict(tie_word_embeddings=True, head_dim=16),
    "gemma3_text": dict(
        tie_word_embeddings=True,
        head_dim=16,
        query_pre_attn_scalar=24,
        sliding_window=6,
        sliding_window_pattern=2,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "gemma4_text": dict(
        tie_word_embeddings=True,
        head_dim=8,
        num_key_value_heads=8,
        global_head_dim=16,
        num_global_key_value_heads=4,
        attention_k_eq_v=True,
        hidden_size_per_layer_input=0,
        sliding_window=6,
        final_logit_softcapping=3.0,
        rope_parameters={
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "phi3": dict(tie_word_embeddings=False, pad_token_id=0),
    "glm4": dict(tie_word_embeddings=False, head_dim=16, attention_bias=True, pad_token_id=0),
    "smollm3": dict(tie_word_embeddings=True, no_rope_layer_interval=2, pad_token_id=0),
    "olmo2": dict(tie_word_embeddings=False, pad_token_id=0),
    "qwen3_moe": dict(
        tie_word_embeddings=False,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        norm_topk_prob=True,
    ),
    "qwen3_next": _DELTA_NETS
    | dict(
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=96,
        norm_topk_prob=True,
    ),
    "qwen3_5_text": _DELTA_NETS,
    "qwen3_5_moe_text": _DELTA_NETS
    | dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, shared_expert_intermediate_size=96),
    "mixtral": dict(tie_word_embeddings=False, num_local_experts=4, num_experts_per_tok=2),
    "glm4_moe": dict(
        tie_word_embeddings=False,
        head_dim=16,
        attention_bias=True,
        use_qk_norm=True,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        n_shared_experts=2,
        first_k_dense_replace=1,
        routed_scaling_factor=1.5,
        num_mtp_layers=0,
    ),
    "deepseek_v3": dict(
        tie_word_embeddings=False,
        num_key_value_heads=8,
        q_lora_rank=24,
        kv_lora_rank=40,
        qk_nope_head_dim=12,
        qk_rope_head_dim=8,
        v_head_dim=14,
        n_routed_experts=8,
        num_experts_per_tok=4,
        moe_intermediate_size=32,
        n_group=4,
        topk_group=2,
        n_shared_experts=1,
        first_k_dense_replace=1,
        routed_scaling_factor=1.5,
        num_mtp_layers=0,
    ),
    "minimax_m2": dict(
        tie_word_embeddings=False,
        head_dim=16,
        rotary_dim=8,
        intermediate_size=64,
        num_local_experts=4,
        num_experts_per_tok=2,
    ),
    "glm4_moe_lite": dict(
        tie_word_embeddings=False,
        num_key_value_heads=8,
        q_lora_rank=24,
        kv_lora_rank=40,
        qk_nope_head_dim=12,
        qk_rope_head_dim=8,
        v_head_dim=14,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        rms_norm_eps=1e-6,  # of latents in transformers, whatever config.json has
    ),
    "gpt_oss": dict(
        tie_word_embeddings=False,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=6,
        rope_parameters=dict(
            rope_type="yarn",
            rope_theta=1e4,
            factor=4.0,
            beta_fast=32.0,
            beta_slow=1.0,
            truncate=False,
            original_max_position_embeddings=64,
        ),
    ),
}


# head_dim 32 is the smallest that vLLM's CPU attention serves.
ENGINE_SIZES: dict[str, Any] = dict(
    hidden_size=128,
    intermediate_size=192,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)


LATENT_ENGINE_SIZES: dict[str, Any] = dict(
    num_key_value_heads=4,
    qk_nope_head_dim=20,
    qk_rope_head_dim=12,
    head_dim=12,  # transformers' name of the rotated share
    v_head_dim=24,
    kv_lora_rank=40,
    q_lora_rank=24,
    moe_intermediate_size=64,
)


def engine_sizes(family: str) -> dict[str, Any]:
    """Sizes of a model of a family that vLLM serves on a CPU."""
    # Each norm would multiply the gradient of an embedding of zeros, that of padding, by a thousand.
    if family.startswith(("qwen3_next", "qwen3_5")):
        return ENGINE_SIZES | dict(pad_token_id=None, linear_key_head_dim=16, linear_value_head_dim=16)
    if TEXT_PARTS.get(family, family) == "gemma4_text":
        sizes = dict(num_key_value_heads=4, global_head_dim=64, num_global_key_value_heads=2)
        return ENGINE_SIZES | sizes | dict(use_bidirectional_attention="vision")
    if family == "minimax_m2":  # experts that four ranks share, twice as many as heads of keys
        return ENGINE_SIZES | dict(intermediate_size=256)
    return ENGINE_SIZES | (LATENT_ENGINE_SIZES if family in ("deepseek_v3", "glm4_moe_lite") else {})


def save_tiny_model(directory: str | Path, family: str, rope_theta: float = 10000.0, **changes: Any) -> PreTrainedModel:
    """Write a random model in HF format and return it, float32 in evaluation mode.

    Args:
        directory: where to write.
        family: "llama", "qwen2" (tied embeddings, QKV bias), "qwen3" (QK norm), "mistral", "gemma" (tied
            embeddings), "gemma3_text" (windows of 6 in every other layer), "gemma4_text" (layers without a window have
            wider and fewer heads of keys, which are values too), "phi3" (fused matrices), "glm4" (half of
            a head is rotated, as neighbors), "smollm3" (every other layer without rotation), "olmo2" (norms after
            attention and MLP, and of all heads together), "qwen3_next" (three gated delta nets before a layer of
            attention, four experts and a gated shared one), "qwen3_5_text" (the same, dense) or "qwen3_5_moe_text",
            "qwen3_5", "qwen3_5_moe" or "gemma4" (the same in image-text models, with experts as published),
            "qwen3_moe" (QK norm) or "mixtral" with four experts, two
            per token, or "glm4_moe": the same after a dense layer, with a shared expert of twice their size and router
            biases, or "deepseek_v3": with eight experts in groups, four per token, and latent attention, whose heads of
            values are narrower than keys, or "glm4_moe_lite": the
            attention of the latter with the experts of the former, or "minimax_m2": norms of all heads together and
            router biases, or "gpt_oss": with sinks, windows of 6 in every
            other layer, and four experts with biases, two per token.
        rope_theta: base of the rotary positions.
        **changes: further settings of the HF config; with `num_labels=1` it is a `*ForSequenceClassification`.
    """
    sizes = dict(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=256,
        rope_parameters={"rope_type": "default", "rope_theta": rope_theta},
    )
    text = TEXT_PARTS.get(family, family)
    if text == "gemma4_text":
        layers = changes.get("num_hidden_layers", 4)
        sizes["layer_types"] = (["sliding_attention", "full_attention"] * layers)[-layers:]
    config = CONFIGS[text](**(sizes | _FAMILY_SIZES[text] | changes))
    torch.manual_seed(0)
    auto_class = AutoModelForSequenceClassification if "num_labels" in changes else AutoModelForCausalLM
    if family != text:
        auto_class, config = AutoModelForImageTextToText, _add_images(family, config)
    model = auto_class.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.1 * torch.randn_like(parameter)
            else:
                parameter *= 3
        for name, parameter in model.named_parameters():
            if name.endswith("_proj_bias"):  # of the experts of gpt-oss, 0 until now
                parameter += 0.1 * torch.randn_like(parameter)
            if text == "gemma4_text" and name.endswith("q_norm.weight"):  # in place of a scale of scores
                parameter *= len(parameter) ** -0.5
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "layer_scalar")):
                buffer += 0.1 * torch.randn_like(buffer)
    model.save_pretrained(directory)
    if family != text:
        _write_as_published(Path(directory))
    return model


def _add_images(family: str, text: PretrainedConfig) -> PretrainedConfig:
    """The config of an image-text model with this text part."""
    seeing = dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=text.hidden_size)
    seeing |= dict(num_position_embeddings=16, patch_size=4)
    if family == "gemma4":
        seeing = dict(num_hidden_layers=1, hidden_size=16, intermediate_size=16, num_attention_heads=2, head_dim=8)
        seeing |= dict(num_key_value_heads=2, patch_size=4, position_embedding_size=16)
    tied = text.tie_word_embeddings
    return IMAGE_TEXT_CONFIGS[family](text_config=text.to_dict(), vision_config=seeing, tie_word_embeddings=tied)


def _write_as_published(directory: Path) -> None:
    """Experts of a layer in one tensor, not apart as transformers writes them."""
    tensors, packed = load_file(directory / "model.safetensors"), dict[str, list[torch.Tensor]]()
    for name in sorted(name for name in tensors if ".experts." in name):  # with less than ten experts
        block, _, matrix = name.partition(".experts.")
        if not matrix.endswith("up_proj.weight"):
            up = name.replace("gate_proj", "up_proj")
            whole = tensors[name] if "down_proj" in name else torch.cat([tensors[name], tensors[up]])
            kind = "down_proj" if "down_proj" in name else "gate_up_proj"
            packed.setdefault(f"{block}.experts.{kind}", []).append(whole)
    apart = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    stacked = {name: torch.stack(experts) for name, experts in packed.items()}
    save_file(apart | stacked, directory / "model.safetensors", metadata={"format": "pt"})


def draw_tokens(lengths: list[int], seed: int = 0) -> list[np.ndarray]:
    """Random sequences of these lengths."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB_SIZE, size=n) for n in lengths]
