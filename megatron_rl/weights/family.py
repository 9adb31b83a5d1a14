# SPDX-License-Identifier: Apache-2.0
"""Model families: properties that the architecture fixes. A family of existing building blocks is one row of
`FAMILIES`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True)
class ExpertNames:
    """Names of tensors and sizes in a family of mixtures of experts.

    Attributes:
        block: MLP of a layer; its router is `<block>.<router>`, its experts `<block>.experts.<e>`.
        gate, up, down: matrices of an expert.
        size_key: key in config.json of an expert's columns.
        shared: expert that serves every token, `<block>.<shared>`; `None` if there is none.
        bias: added to router scores for the choice of experts, `<block>.<bias>`; `None` if there is none.
        has_biases: the router and every matrix of an expert have a bias.
        packing: how files store a layer's experts in one tensor, see `weights/packed_experts.py`: always in "turns", or
            possibly in "halves" (read, never written); `None` if never.
        shared_gate: `<block>.<shared_gate>` scales the shared expert by a sigmoid; `None` if it is not scaled.
    """

    block: str
    gate: str
    up: str
    down: str
    size_key: str
    shared: str | None = None
    bias: str | None = None
    router: str = "gate"
    has_biases: bool = False
    packing: Literal["turns", "halves"] | None = None
    shared_gate: str | None = None

    @property
    def is_packed(self) -> bool:
        """True if files and vLLM always store a layer's experts in one tensor."""
        return self.packing == "turns"

    @property
    def has_sigmoid_router(self) -> bool:
        """True for sigmoid scores, a bias in the choice of experts, and possibly dense first layers (DeepSeek-V3)."""
        return self.bias is not None


@dataclass(frozen=True)
class SigmoidRouter:
    """Choice of experts by sigmoid scores (DeepSeek-V3, arXiv 2412.19437, equations 13 to 16).

    Attributes:
        num_groups: groups of experts, of equal size.
        groups_per_token: groups with the largest sums of their two best experts, from which a token's experts are
            chosen.
        scale: factor of a token's expert weights, after they are normalized to 1.
    """

    num_groups: int = 1
    groups_per_token: int = 1
    scale: float = 1.0


@dataclass(frozen=True)
class LatentSizes:
    """Channels of multi-head latent attention.

    Attributes:
        query: query latent; 0 if queries are projected from the hidden states.
        key_value: latent of keys and values.
        rotary: rotated channels of each query head, and of the key part that all heads share.
        value: value channels per head.
    """

    query: int
    key_value: int
    rotary: int
    value: int


@dataclass(frozen=True)
class Family:
    """Architecture properties that config.json does not contain.

    Attributes:
        architecture: transformers class with a language-model head.
        qkv_bias: q, k and v projections have a bias; config.json's `attention_bias` decides if `None`.
        qk_norm: q and k are normalized per head; config.json's `use_qk_norm` decides if `None`.
        norms_all_heads: q and k are normalized over all heads together.
        honors_head_dim: config.json's `head_dim` is used; otherwise hidden_size / num_heads.
        fuses: kinds of `FUSED_KINDS` that are single tensors of a checkpoint.
        rotates_neighbors: rotates pairs of neighboring channels, not channels half a head apart.
        partial_rotary: default share of rotated channels; `None` if all of them are always rotated.
        may_skip_rotary: config.json's `no_rope_layers` lists layers without rotary positions.
        honors_sliding_window: config.json's `sliding_window` alone limits attention.
        activations: supported values of `hidden_act`; all mean the first, which is also the default.
        ties_by_default: default of `tie_word_embeddings`.
        norms: norms of a layer -> kinds of `NORM_KINDS`, in checkpoint order.
        alternates_windows: some layers have a sliding window and a rotary base of their own (Gemma 3).
        zero_centered_norms: norms multiply by 1 + weight, in float32.
        rope_theta: default of config.json.
        scales_embedding: the embedding is multiplied by sqrt(hidden size), rounded to its dtype.
        has_latent_attention: queries, keys and values are projected up from latents (DeepSeek-V3).
        has_sinks: each head has a logit that only adds to the softmax denominator; the output projection of attention
            has a bias (gpt-oss).
        has_delta_nets: some layers are gated delta nets; in the others, sigmoid gates, projected with the queries,
            scale the head outputs (Qwen3-Next).
        splits_projections: see `DeltaNetSizes.is_split` (Qwen3.5).
        experts: names in a mixture of experts; `None` for dense families.
        scoring: transformers class with a score head, if not `architecture` with the usual suffix.
        vllm_module: vLLM's model module, if not named after the family.
        image_text: `model_type` of image-text models with this text part; see `weights/text_part.py`.
    """

    architecture: str
    qkv_bias: bool | None = False
    qk_norm: bool | None = False
    norms_all_heads: bool = False
    fuses: tuple[str, ...] = ()
    rotates_neighbors: bool = False
    partial_rotary: float | None = None
    may_skip_rotary: bool = False
    honors_head_dim: bool = True
    honors_sliding_window: bool = False
    activations: tuple[str, ...] = ("silu",)
    ties_by_default: bool = False
    norms: tuple[tuple[str, str], ...] = (("input_layernorm", "input_norm"), ("post_attention_layernorm", "mlp_norm"))
    alternates_windows: bool = False
    zero_centered_norms: bool = False
    rope_theta: float = 1e4
    scales_embedding: bool = False
    has_latent_attention: bool = False
    has_sinks: bool = False
    has_delta_nets: bool = False
    splits_projections: bool = False
    experts: ExpertNames | None = None
    scoring: str | None = None
    vllm_module: str | None = None
    image_text: str | None = None

    @property
    def scoring_architecture(self) -> str:
        """Name of the transformers class with a score head."""
        return self.scoring or self.architecture.replace("ForCausalLM", "ForSequenceClassification")


# Sigmoid routers: shared experts, and a bias in the choice of experts.
_SIGMOID_EXPERTS = ExpertNames(
    "mlp",
    "gate_proj",
    "up_proj",
    "down_proj",
    size_key="moe_intermediate_size",
    shared="shared_experts",
    bias="gate.e_score_correction_bias",
)

# A shared expert, scaled by a sigmoid.
_GATED_EXPERTS = ExpertNames(
    "mlp",
    "gate_proj",
    "up_proj",
    "down_proj",
    size_key="moe_intermediate_size",
    shared="shared_expert",
    shared_gate="shared_expert_gate",
)

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
        zero_centered_norms=True,
        scales_embedding=True,
        scoring="Gemma3TextForSequenceClassification",
        vllm_module="gemma3",
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
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        qk_norm=True,
        experts=ExpertNames("mlp", "gate_proj", "up_proj", "down_proj", size_key="moe_intermediate_size"),
    ),
    "qwen3_next": Family(
        "Qwen3NextForCausalLM",
        qk_norm=True,
        partial_rotary=0.25,
        zero_centered_norms=True,
        has_delta_nets=True,
        experts=_GATED_EXPERTS,
    ),
    "qwen3_5_text": Family(
        "Qwen3_5ForCausalLM",
        qk_norm=True,
        partial_rotary=0.25,
        zero_centered_norms=True,
        has_delta_nets=True,
        splits_projections=True,
        scoring="Qwen3_5TextForSequenceClassification",
        vllm_module="qwen3_5",
        image_text="qwen3_5",
    ),
    "qwen3_5_moe_text": Family(
        "Qwen3_5MoeForCausalLM",
        qk_norm=True,
        partial_rotary=0.25,
        zero_centered_norms=True,
        has_delta_nets=True,
        splits_projections=True,
        experts=replace(_GATED_EXPERTS, packing="halves"),
        vllm_module="qwen3_5",
        image_text="qwen3_5_moe",
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        honors_sliding_window=True,
        experts=ExpertNames("block_sparse_moe", "w1", "w3", "w2", size_key="intermediate_size"),
    ),
    "glm4_moe": Family(
        "Glm4MoeForCausalLM",
        qkv_bias=None,
        qk_norm=None,
        partial_rotary=0.5,
        experts=_SIGMOID_EXPERTS,
    ),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        rotates_neighbors=True,
        has_latent_attention=True,
        experts=_SIGMOID_EXPERTS,
        vllm_module="deepseek_v2",
    ),
    # "silu" in its configs means the clamped activation.
    "gpt_oss": Family(
        "GptOssForCausalLM",
        qkv_bias=True,
        activations=("clamped_silu", "silu"),
        rope_theta=1.5e5,
        has_sinks=True,
        experts=ExpertNames(
            "mlp",
            "gate_proj",
            "up_proj",
            "down_proj",
            size_key="intermediate_size",
            router="router",
            has_biases=True,
            packing="turns",
        ),
    ),
}
# Other values of `model_type` for the same architecture.
ALIASES = {"kimi_k2": "deepseek_v3"}
