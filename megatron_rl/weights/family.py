# SPDX-License-Identifier: Apache-2.0
"""What a row of `families.py` says."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ExpertNames:
    """How a family of mixtures of experts names its tensors and sizes.

    Attributes:
        block: the MLP of a layer; its router is `<block>.gate`, its experts `<block>.experts.<e>`.
        gate, up, down: the matrices of an expert.
        size_key: config.json's name for an expert's columns.
        shared: the expert that serves every token, `<block>.<shared>`; None: there is none.
        bias: what is added to a router's scores when experts are chosen, `<block>.<bias>`; None: nothing is.
    """

    block: str
    gate: str
    up: str
    down: str
    size_key: str
    shared: str | None = None
    bias: str | None = None

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
class Family:
    """What the architecture fixes and config.json does not say.

    Attributes:
        architecture: name of the transformers class with a language-model head.
        qkv_bias: the q, k and v projections have a bias; None: config.json's `attention_bias` says.
        qk_norm: q and k are normalized per head; None: config.json's `use_qk_norm` says.
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
        experts: names of the mixture of experts; None for dense families.
        scoring: name of the transformers class with a score head, where it is not the other's with that ending.
        vllm_module: of vLLM's models that has the architecture, where it is not called as the family.
    """

    architecture: str
    qkv_bias: bool | None = False
    qk_norm: bool | None = False
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
    experts: ExpertNames | None = None
    scoring: str | None = None
    vllm_module: str | None = None

    @property
    def scoring_architecture(self) -> str:
        """Name of the transformers class with a score head."""
        return self.scoring or self.architecture.replace("ForCausalLM", "ForSequenceClassification")
