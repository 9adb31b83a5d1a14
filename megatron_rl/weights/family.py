# SPDX-License-Identifier: Apache-2.0
"""Model families: a row of `FAMILIES` says what the architecture fixes.

A new family of the building blocks that are here is one row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True)
class ExpertNames:
    """How a family of mixtures of experts names its tensors and sizes.

    Attributes:
        block: the MLP of a layer; its router is `<block>.<router>`, its experts `<block>.experts.<e>`.
        gate, up, down: the matrices of an expert.
        size_key: config.json's name for an expert's columns.
        shared: the expert that serves every token, `<block>.<shared>`; None: there is none.
        bias: what is added to a router's scores when experts are chosen, `<block>.<bias>`; None: nothing is.
        router: its name.
        has_biases: the router and every matrix of an expert have a bias.
        packing: how files hold the experts of a layer in one tensor, see `weights/packed_experts.py`: always in
            "turns", or in "halves" where they are not apart, as they are written; None: never.
        shared_gate: `<block>.<shared_gate>` weighs the shared expert by a sigmoid; None: it counts whole.
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
        """Whether files, and vLLM, always have the experts of a layer in one tensor."""
        return self.packing == "turns"

    @property
    def has_sigmoid_router(self) -> bool:
        """Scores are sigmoids, experts are chosen with a bias, and the first layers may be dense (DeepSeek-V3)."""
        return self.bias is not None


@dataclass(frozen=True)
class SigmoidRouter:
    """How experts are chosen by sigmoids (DeepSeek-V3, arXiv 2412.19437, equations 13 to 16).

    Attributes:
        num_groups: of the experts, of equal size.
        groups_per_token: those with the largest sums of their two best experts; a token's experts are in them.
        scale: that the shares of the experts of a token are multiplied by; they add up to 1 before.
    """

    num_groups: int = 1
    groups_per_token: int = 1
    scale: float = 1.0


@dataclass(frozen=True)
class LatentSizes:
    """Channels of multi-head latent attention.

    Attributes:
        query: of the latent of queries; 0: they are projected from the hidden states.
        key_value: of the latent of keys and values.
        rotary: of a head of queries, and of what all heads of keys share, that are rotated.
        value: of a head of values.
    """

    query: int
    key_value: int
    rotary: int
    value: int


@dataclass(frozen=True)
class Family:
    """What the architecture fixes and config.json does not say.

    Attributes:
        architecture: name of the transformers class with a language-model head.
        qkv_bias: the q, k and v projections have a bias; None: config.json's `attention_bias` says.
        qk_norm: q and k are normalized per head; None: config.json's `use_qk_norm` says.
        norms_all_heads: they are normalized over all heads together.
        honors_head_dim: config.json's `head_dim` is used (else hidden_size / num_heads always).
        fuses: which of `FUSED_KINDS` are one tensor of a checkpoint each.
        rotates_neighbors: the pairs of channels that are rotated lie beside each other, not half a head apart.
        partial_rotary: share of a head that is rotated where config.json does not say; None: all of it always.
        may_skip_rotary: config.json's `no_rope_layers` lists layers whose q and k are not rotated.
        honors_sliding_window: config.json's `sliding_window` alone limits the attention.
        activations: config.json's `hidden_act` that are served; all of them mean the first (the default as well).
        ties_by_default: what a config.json without `tie_word_embeddings` means.
        norms: norms of a layer -> their kinds, one of `NORM_KINDS`, in the order of the checkpoint.
        alternates_windows: some layers see a sliding window, with a base of rotary positions of their own (Gemma 3).
        zero_centered_norms: a norm multiplies by 1 + weight, in float32.
        rope_theta: what a config.json without it means.
        scales_embedding: the embedding is multiplied by the square root of the hidden size, rounded to its type.
        has_latent_attention: queries, keys and values are projected up from latents (DeepSeek-V3).
        has_sinks: every head has a logit that takes part in its softmax and adds nothing to the sum; the output
            projection of attention has a bias (gpt-oss).
        has_delta_nets: some layers are gated delta nets, and the others weigh what their heads give by sigmoids of
            gates that are projected with the queries (Qwen3-Next).
        splits_projections: of gated delta nets, see `DeltaNetSizes.is_split` (Qwen3.5).
        experts: names of the mixture of experts; None for dense families.
        scoring: name of the transformers class with a score head, where it is not the other's with that ending.
        vllm_module: of vLLM's models that has the architecture, where it is not called as the family.
        image_text: `model_type` of image-text models whose text part it is; see `weights/text_part.py`.
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


# Mixtures with sigmoid routers: experts that all tokens share, and a bias that takes part in the choice.
_SIGMOID_EXPERTS = ExpertNames(
    "mlp",
    "gate_proj",
    "up_proj",
    "down_proj",
    size_key="moe_intermediate_size",
    shared="shared_experts",
    bias="gate.e_score_correction_bias",
)

# Mixtures with a shared expert that a sigmoid weighs.
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
    # Its first configs say "gelu" and mean the approximation, as transformers and vLLM know.
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
    # "silu" of its configs is the clamped activation.
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
# Names in config.json of the same architecture.
ALIASES = {"kimi_k2": "deepseek_v3"}
