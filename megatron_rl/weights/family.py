# SPDX-License-Identifier: Apache-2.0
"""Model families. A new family of existing building blocks is one row of `FAMILIES`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

FULL = "full_"  # prefix of the kinds of heads of `ModelShape.full_heads`
# Kinds of tensors of gated delta nets.
CONV_PARTS = ("delta_conv.q", "delta_conv.k", "delta_conv.v")  # stacked by rows
QKV_PARTS = ("delta_q", "delta_k", "delta_v")  # likewise
# Parts of each engine parameter, for fused and for split projections.
DELTA_TOGETHER = (("delta_qkvz",), ("delta_ba",))
DELTA_APART = ((*QKV_PARTS, "delta_z"), ("delta_b", "delta_a"))
PROJECTION_KINDS = tuple(kind for parts in (*DELTA_TOGETHER, *DELTA_APART) for kind in parts)


@dataclass(frozen=True)
class ExpertNames:
    """Names of tensors and sizes in a mixture of experts."""

    block: str = "mlp"  # MLP of a layer, with `<block>.<router>` and `<block>.experts.<e>`
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    size_key: str = "moe_intermediate_size"  # config.json's key of an expert's columns
    shared: str | None = None  # `<block>.<shared>` serves every token; `None` without such an expert
    bias: str | None = None  # `<block>.<bias>` is added to scores when experts are chosen; `None` without it
    router: str = "gate"
    has_biases: bool = False  # router and expert matrices have biases
    # Files pack a layer's experts (`weights/packed_experts.py`): "turns" always, "halves" in some checkpoints, `None`
    # never.
    packing: Literal["turns", "halves"] | None = None
    is_shared_whole: bool = False  # vLLM does not split shared experts over TP in engines with data parallel parts
    shared_gate: str | None = None  # `<block>.<shared_gate>` scales the shared expert by a sigmoid; unscaled if `None`

    @property
    def is_packed(self) -> bool:
        """True if files and vLLM always pack a layer's experts."""
        return self.packing == "turns"

    @property
    def has_sigmoid_router(self) -> bool:
        """True for sigmoid scores with a bias in the choice, and possibly dense first layers (DeepSeek-V3)."""
        return self.bias is not None


@dataclass(frozen=True)
class Family:
    """Architecture properties that config.json does not contain."""

    architecture: str  # transformers class with a language-model head
    qkv_bias: bool | None = False  # q, k and v have a bias; `None` defers to `attention_bias`
    qk_norm: bool | None = False  # q and k are normalized per head; `None` defers to `use_qk_norm`
    norms_all_heads: bool = False  # they are normalized over all heads together
    fuses: tuple[str, ...] = ()  # `FUSED_KINDS` that are single tensors of a checkpoint
    rotates_neighbors: bool = False  # rotates neighboring channels, not channels half a head apart
    partial_rotary: float | None = None  # default share of rotated channels; `None` if always all
    may_skip_rotary: bool = False  # `no_rope_layers` lists layers without rotary positions
    honors_head_dim: bool = True  # `head_dim` is read; otherwise hidden_size / num_heads
    honors_sliding_window: bool = False  # `sliding_window` alone limits attention
    activations: tuple[str, ...] = ("silu",)  # supported `hidden_act`, all equivalent to the first, the default
    ties_by_default: bool = False  # default of `tie_word_embeddings`
    # Norms of a layer -> kinds, in checkpoint order.
    norms: tuple[tuple[str, str], ...] = (("input_layernorm", "input_norm"), ("post_attention_layernorm", "mlp_norm"))
    alternates_windows: bool = False  # some layers have sliding windows and their own rotary base (Gemma 3)
    zero_centered_norms: bool = False  # norms multiply by 1 + weight, in float32
    rope_theta: float = 1e4
    scales_embedding: bool = False  # multiplied by sqrt(hidden size), rounded to its dtype
    has_latent_attention: bool = False  # q, k and v are projected from latents (DeepSeek-V3)
    # Each head has a logit in its softmax denominator; the attention output has a bias (gpt-oss).
    has_sinks: bool = False
    # Some layers are gated delta nets; others have sigmoid gates on head outputs, projected with the queries
    # (Qwen3-Next).
    has_delta_nets: bool = False
    splits_projections: bool = False  # see `DeltaNetSizes.is_split` (Qwen3.5)
    has_full_heads: bool = False  # full layers have heads of their own; values are normalized, layers scaled (Gemma 4)
    experts: ExpertNames | None = None  # names in a mixture of experts; `None` if dense
    scoring: str | None = None  # transformers class with a score head, if irregular
    vllm_module: str | None = None  # vLLM's module, if not named after the family
    image_text: str | None = None  # `model_type` of image-text models with this text part (`weights/model_config.py`)

    @property
    def is_plain(self) -> bool:
        """True for dense models whose layers attend alike."""
        has_kinds_of_layers = self.alternates_windows or self.has_sinks or self.has_delta_nets
        return self.experts is None and not (self.has_latent_attention or has_kinds_of_layers)

    @property
    def scoring_architecture(self) -> str:
        """Name of the transformers class with a score head."""
        return self.scoring or self.architecture.replace("ForCausalLM", "ForSequenceClassification")


_SIGMOID_EXPERTS = ExpertNames(shared="shared_experts", bias="gate.e_score_correction_bias")
_MIXTRAL_EXPERTS = ExpertNames("block_sparse_moe", "w1", "w3", "w2", "intermediate_size")
_GATED_EXPERTS = ExpertNames(shared="shared_expert", shared_gate="shared_expert_gate", is_shared_whole=True)
_GEMMA: dict[str, Any] = dict(
    qk_norm=True,
    activations=("gelu_pytorch_tanh",),
    ties_by_default=True,
    norms=(
        ("input_layernorm", "input_norm"),
        ("post_attention_layernorm", "attention_output_norm"),
        ("pre_feedforward_layernorm", "mlp_norm"),
        ("post_feedforward_layernorm", "mlp_output_norm"),
    ),
    alternates_windows=True,
    rope_theta=1e6,
    scales_embedding=True,
)
_DELTA_NETS: dict[str, Any] = dict(qk_norm=True, partial_rotary=0.25, zero_centered_norms=True, has_delta_nets=True)
FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM"),
    "qwen2": Family("Qwen2ForCausalLM", qkv_bias=True, honors_head_dim=False),
    "qwen3": Family("Qwen3ForCausalLM", qk_norm=True),
    "mistral": Family("MistralForCausalLM", honors_sliding_window=True),
    # Early configs contain "gelu" and mean the tanh approximation, which transformers and vLLM use, too.
    "gemma": Family(
        "GemmaForCausalLM",
        activations=("gelu_pytorch_tanh", "gelu"),
        ties_by_default=True,
        zero_centered_norms=True,
        scales_embedding=True,
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        zero_centered_norms=True,
        scoring="Gemma3TextForSequenceClassification",
        vllm_module="gemma3",
        **_GEMMA,
    ),
    "gemma4_text": Family(
        "Gemma4ForCausalLM", has_full_heads=True, vllm_module="gemma4", image_text="gemma4", **_GEMMA
    ),
    "phi3": Family("Phi3ForCausalLM", fuses=("qkv", "gate_up"), partial_rotary=1.0, honors_sliding_window=True),
    "glm4": Family(
        "Glm4ForCausalLM",
        qkv_bias=None,
        fuses=("gate_up",),
        partial_rotary=0.5,
        rotates_neighbors=True,
        norms=(
            ("input_layernorm", "input_norm"),
            ("post_self_attn_layernorm", "attention_output_norm"),
            ("post_attention_layernorm", "mlp_norm"),
            ("post_mlp_layernorm", "mlp_output_norm"),
        ),
    ),
    "smollm3": Family("SmolLM3ForCausalLM", may_skip_rotary=True, ties_by_default=True, rope_theta=2e6),
    "olmo2": Family(
        "Olmo2ForCausalLM",
        qk_norm=True,
        norms_all_heads=True,
        norms=(
            ("post_attention_layernorm", "attention_output_norm"),
            ("post_feedforward_layernorm", "mlp_output_norm"),
        ),
    ),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", qk_norm=True, experts=ExpertNames()),
    "qwen3_next": Family("Qwen3NextForCausalLM", experts=_GATED_EXPERTS, **_DELTA_NETS),
    "qwen3_5_text": Family(
        "Qwen3_5ForCausalLM",
        splits_projections=True,
        scoring="Qwen3_5TextForSequenceClassification",
        vllm_module="qwen3_5",
        image_text="qwen3_5",
        **_DELTA_NETS,
    ),
    "qwen3_5_moe_text": Family(
        "Qwen3_5MoeForCausalLM",
        splits_projections=True,
        experts=replace(_GATED_EXPERTS, packing="halves"),
        vllm_module="qwen3_5",
        image_text="qwen3_5_moe",
        **_DELTA_NETS,
    ),
    "mixtral": Family("MixtralForCausalLM", honors_sliding_window=True, experts=_MIXTRAL_EXPERTS),
    "minimax_m2": Family(
        "MiniMaxM2ForCausalLM",
        qk_norm=True,
        norms_all_heads=True,
        partial_rotary=1.0,
        experts=replace(_MIXTRAL_EXPERTS, bias="e_score_correction_bias"),
    ),
    "glm4_moe": Family("Glm4MoeForCausalLM", qkv_bias=None, qk_norm=None, partial_rotary=0.5, experts=_SIGMOID_EXPERTS),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        rotates_neighbors=True,
        has_latent_attention=True,
        experts=replace(_SIGMOID_EXPERTS, is_shared_whole=True),
        vllm_module="deepseek_v2",
    ),
    "glm4_moe_lite": Family(
        "Glm4MoeLiteForCausalLM", rotates_neighbors=True, has_latent_attention=True, experts=_SIGMOID_EXPERTS
    ),
    # "silu" in its configs means the clamped activation.
    "gpt_oss": Family(
        "GptOssForCausalLM",
        qkv_bias=True,
        activations=("clamped_silu", "silu"),
        rope_theta=1.5e5,
        has_sinks=True,
        experts=ExpertNames(size_key="intermediate_size", router="router", has_biases=True, packing="turns"),
    ),
}
# Other values of `model_type` for the same architecture.
ALIASES = {"kimi_k2": "deepseek_v3"}


def rope_type_of(rope: Mapping[str, Any]) -> str:
    """Return the type of the rotary scaling in config.json, one of `weights/rope.py` or "default"."""
    return rope.get("rope_type") or rope.get("type") or "default"
