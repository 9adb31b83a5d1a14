# SPDX-License-Identifier: Apache-2.0
"""Model families: what an HF config.json says about shapes, and the logical tensors that follow.

A family is one row of `FAMILIES`. Everything else (Megatron's and vLLM's tables, conversion) is made
from the `ModelShape`, so that a new family with these building blocks is one row. The logical tensors of
a mixture of experts are those of published checkpoints: one set of matrices per expert.

A model ends in one of two heads: `lm_head` (or the tied embedding) with a row per token, or `score` with a
single row, the head of transformers' `*ForSequenceClassification` with one label and of our critics.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from megatron_rl.types import UserError

Head = Literal["lm", "score"]
SCORE_HEAD = "score.weight"
_MUST_BE_OFF = ("use_bidirectional_attention", "use_sliding_window", "attention_bias", "mlp_bias", "mlp_only_layers",
                "router_jitter_noise")
_SCORING_SUFFIXES = ("ForSequenceClassification", "ForTokenClassification")


@dataclass(frozen=True)
class ExpertNames:
    """How a family of mixtures of experts names its tensors and sizes.

    Attributes:
        block: the MLP of a layer; its router is `<block>.gate`, its experts `<block>.experts.<e>`.
        gate, up, down: the matrices of an expert.
        size_key: config.json's name for an expert's columns.
    """

    block: str
    gate: str
    up: str
    down: str
    size_key: str


@dataclass(frozen=True)
class RopeScaling:
    """Rotary frequencies stretched for long contexts as in Llama 3.1 (`rope_type` "llama3").

    A frequency that turns less than `low_freq_factor` times in the context of pretraining is divided by `factor`, one
    that turns more than `high_freq_factor` times is kept, and in between the two are mixed.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class Family:
    """What the architecture fixes and config.json does not say.

    Attributes:
        architecture: name of the transformers class with a language-model head.
        qkv_bias: the q, k and v projections have a bias.
        qk_norm: q and k are normalised per head.
        honours_head_dim: config.json's `head_dim` is used (else hidden_size / num_heads always).
        honours_sliding_window: config.json's `sliding_window` alone limits the attention.
        activations: config.json's `hidden_act` that are served; all of them mean the first (the default as well).
        ties_by_default: what a config.json without `tie_word_embeddings` means.
        zero_centered_norms: a norm multiplies by 1 + weight, in float32.
        scales_embedding: the embedding is multiplied by the square root of the hidden size, rounded to its type.
        experts: names of the mixture of experts; None for dense families.
    """

    architecture: str
    qkv_bias: bool = False
    qk_norm: bool = False
    honours_head_dim: bool = True
    honours_sliding_window: bool = False
    activations: tuple[str, ...] = ("silu",)
    ties_by_default: bool = False
    zero_centered_norms: bool = False
    scales_embedding: bool = False
    experts: ExpertNames | None = None

    @property
    def scoring_architecture(self) -> str:
        """Name of the transformers class with a score head."""
        return self.architecture.replace("ForCausalLM", "ForSequenceClassification")


FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM"),
    "qwen2": Family("Qwen2ForCausalLM", qkv_bias=True, honours_head_dim=False),
    "qwen3": Family("Qwen3ForCausalLM", qk_norm=True),
    "mistral": Family("MistralForCausalLM", honours_sliding_window=True),
    # Its first configs say "gelu" and mean the approximation, as transformers and vLLM know.
    "gemma": Family(
        "GemmaForCausalLM", activations=("gelu_pytorch_tanh", "gelu"), ties_by_default=True, zero_centered_norms=True,
        scales_embedding=True),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", qk_norm=True, experts=ExpertNames(
        "mlp", "gate_proj", "up_proj", "down_proj", size_key="moe_intermediate_size")),
    "mixtral": Family("MixtralForCausalLM", honours_sliding_window=True, experts=ExpertNames(
        "block_sparse_moe", "w1", "w3", "w2", size_key="intermediate_size")),
}


@dataclass(frozen=True)
class ModelShape:
    """A decoder-only transformer: RMSNorm, rotary positions, grouped-query attention, a gated MLP.

    Sizes are those of the HF config; `vocab_size` is without padding. In a mixture of experts every layer
    has `num_experts` (0: dense) of `ffn_hidden_size` columns; `experts_per_token` of them serve a token,
    and their shares add up to 1 with `normalizes_shares`. With `has_score_head` the model ends in `score.weight`
    [1, h] and has no output layer, tied or not.
    """

    family: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tied_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    num_experts: int = 0
    experts_per_token: int = 0
    normalizes_shares: bool = False
    has_score_head: bool = False
    rope_scaling: RopeScaling | None = None

    def kind_sizes(self) -> dict[str, tuple[int, ...]]:
        """Kind of a tensor -> its shape. Tensors of one kind are cut alike in every layout."""
        h, q, kv = self.hidden_size, self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        sizes: dict[str, tuple[int, ...]] = {
            "vocab": (self.vocab_size, h), "hidden": (h,), "head": (self.head_dim,), "score": (1, h), "o": (h, q),
            "router": (self.num_experts, h), "gate": (self.ffn_hidden_size, h), "up": (self.ffn_hidden_size, h),
            "down": (h, self.ffn_hidden_size)}
        for name, size in (("q", q), ("k", kv), ("v", kv)):
            sizes |= {f"{name}.weight": (size, h), f"{name}.bias": (size,)}
        return sizes

    def layer_kinds(self) -> dict[str, str]:
        """HF tensor of a layer (without the layer's prefix) -> its kind, in checkpoint order; without experts."""
        kinds = {"input_layernorm.weight": "hidden"}
        for name in "qkv":
            for what in ("weight", "bias") if self.qkv_bias else ("weight",):
                kinds[f"self_attn.{name}_proj.{what}"] = f"{name}.{what}"
        if self.qk_norm:
            kinds |= {"self_attn.q_norm.weight": "head", "self_attn.k_norm.weight": "head"}
        kinds |= {"self_attn.o_proj.weight": "o", "post_attention_layernorm.weight": "hidden"}
        names = FAMILIES[self.family].experts
        if names is not None:
            return kinds | {f"{names.block}.gate.weight": "router"}
        return kinds | {f"mlp.{kind}_proj.weight": kind for kind in ("gate", "up", "down")}

    def expert_kinds(self, expert: int) -> dict[str, str]:
        """The same for the matrices of one expert of a layer."""
        names = FAMILIES[self.family].experts
        assert names is not None, f"{self.family} is dense"
        matrices = f"{names.block}.experts.{expert}."
        return {f"{matrices}{getattr(names, kind)}.weight": kind for kind in ("gate", "up", "down")}

    def tensor_kinds(self) -> dict[str, str]:
        """HF tensor -> its kind, in checkpoint order."""
        layer = self.layer_kinds()
        for expert in range(self.num_experts):
            layer |= self.expert_kinds(expert)
        kinds = {"model.embed_tokens.weight": "vocab"}
        for number in range(self.num_layers):
            kinds |= {f"model.layers.{number}.{name}": kind for name, kind in layer.items()}
        kinds["model.norm.weight"] = "hidden"
        if self.has_score_head:
            kinds[SCORE_HEAD] = "score"
        elif not self.tied_embeddings:
            kinds["lm_head.weight"] = "vocab"
        return kinds

    def logical_tensors(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every HF tensor, in checkpoint order."""
        sizes = self.kind_sizes()
        return {name: sizes[kind] for name, kind in self.tensor_kinds().items()}

    def check_training_layout(
        self, tp_size: int, pp_size: int, vpp_size: int, ep_size: int = 1, *, sequence_parallel: bool = True,
        section: str = "actor",
    ) -> None:
        """Refuse a Megatron layout that cannot hold this model.

        Args:
            tp_size: tensor parallel size; likewise pp, vpp, ep.
            sequence_parallel: megatron-core trains experts under TP only with it.
            section: of the configuration, for the error.

        Raises:
            UserError: naming the sizes and the values that work.
        """
        self._check_expert_layout(tp_size, ep_size, sequence_parallel, section)
        for what, size in (("attention heads", self.num_heads), ("KV heads", self.num_kv_heads),
                           ("feed-forward columns", self.ffn_hidden_size)):
            if size % tp_size:
                raise UserError(
                    f"tensor_model_parallel_size {tp_size} does not divide the {size} {what} of the model",
                    source=f"{section}.tensor_model_parallel_size and the model's config.json",
                    expected=f"one of {self._tp_sizes()}",
                    hint="use a smaller TP and more pipeline or data parallelism",
                )
        if self.num_layers % (pp_size * vpp_size):
            valid = [n for n in range(1, self.num_layers + 1) if self.num_layers % n == 0]
            raise UserError(
                f"pp * vpp = {pp_size} * {vpp_size} = {pp_size * vpp_size} does not divide "
                f"the {self.num_layers} layers of the model",
                source=f"{section}.pipeline_model_parallel_size, {section}.virtual_pipeline_model_parallel_size",
                expected=f"pp * vpp one of {valid}",
                hint="every chunk of every stage holds the same number of layers",
            )

    def _check_expert_layout(self, tp_size: int, ep_size: int, sequence_parallel: bool, section: str) -> None:
        experts = self.num_experts
        if ep_size > 1 and (experts == 0 or experts % ep_size):
            valid = [n for n in range(1, experts + 1) if experts % n == 0] or [1]
            what = f"does not divide the {experts} experts of the model" if experts else "needs a mixture of experts"
            raise UserError(
                f"expert_model_parallel_size {ep_size} {what}",
                source=f"{section}.expert_model_parallel_size and the model's config.json", expected=f"one of {valid}",
                hint="every rank holds as many experts" if experts else f"set {section}.expert_model_parallel_size=1")
        if experts and tp_size > 1 and not sequence_parallel:
            raise UserError(
                f"tensor_model_parallel_size {tp_size} without sequence parallelism does not train experts",
                source=f"{section}.sequence_parallel",
                expected="true for a mixture of experts under tensor parallelism",
                hint=f"set {section}.sequence_parallel=true")

    def check_rollout_layout(self, tp_size: int) -> None:
        """Refuse an engine layout that cannot hold this model; KV heads may be replicated.

        Raises:
            UserError: naming the sizes and the values that work.
        """
        if not self._fits_engine(tp_size):
            valid = [n for n in range(1, self.num_heads + 1) if self._fits_engine(n)]
            raise UserError(
                f"rollout.tensor_model_parallel_size {tp_size} does not fit {self.num_heads} attention heads, "
                f"{self.num_kv_heads} KV heads and {self.ffn_hidden_size} feed-forward columns",
                source="rollout.tensor_model_parallel_size and the model's config.json",
                expected=f"one of {valid} (divides, or is a multiple of, the KV heads; divides the rest)",
                hint="start with rollout.tensor_model_parallel_size=1",
            )

    def _fits_engine(self, tp_size: int) -> bool:
        kv = self.num_kv_heads
        divides = self.num_heads % tp_size == 0 and self.ffn_hidden_size % tp_size == 0
        return divides and (kv % tp_size == 0 or tp_size % kv == 0)

    def _tp_sizes(self) -> list[int]:
        sizes = (self.num_heads, self.num_kv_heads, self.ffn_hidden_size)
        return [n for n in range(1, self.num_kv_heads + 1) if all(size % n == 0 for size in sizes)]


def load_model_shape(directory: str | Path, head: Head = "lm") -> ModelShape:
    """Read `config.json` of an HF model directory.

    Args:
        head: what the role needs. A language model can be given a score head; the reverse is refused.

    Raises:
        UserError: no such directory or file, unknown architecture, the wrong head, or an option that is not served.
    """
    file = Path(directory) / "config.json"
    if not file.is_file():
        raise UserError(
            f"there is no {file}", source="model.path", expected="a model directory in Hugging Face format",
            hint="tools/make_toy_task.py makes a small one; check for a typo or a missing download",
        )
    try:
        config = json.loads(file.read_bytes())
        if not isinstance(config, dict):
            raise ValueError(f"a {type(config).__name__}")
    except ValueError as error:
        raise UserError(f"{file} holds no JSON object: {error}", source=str(file), expected="an HF config.json",
                        hint="the file may be half downloaded: download config.json again") from None
    return model_shape_from_config(config, source=str(file), head=head)


def model_shape_from_config(config: dict[str, Any], source: str, head: Head = "lm") -> ModelShape:
    """Make the shape from the content of a config.json; see `load_model_shape`."""
    family = FAMILIES.get(config.get("model_type", ""))
    if family is None:
        raise UserError(
            f"unknown architecture {config.get('model_type')!r}", source=source,
            expected=f"model_type one of {sorted(FAMILIES)}",
            hint="docs/add_a_family.md says how to add one: often a row in weights/families.py",
        )
    scoring = [name for name in config.get("architectures") or () if name.endswith(_SCORING_SUFFIXES)]
    if scoring and head == "lm":
        raise UserError(
            f"{scoring[0]} has no language-model head", source=source, expected=f"a {family.architecture}",
            hint="a reward model or critic belongs to reward_model.path or critic.path")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    refused = {
        "hidden_act": (config.get("hidden_act") or family.activations[0]) not in family.activations,
        "hidden_activation": config.get("hidden_activation") not in (None, family.activations[0]),
        **{name: bool(config.get(name)) for name in _MUST_BE_OFF},
        "decoder_sparse_step": config.get("decoder_sparse_step", 1) != 1,
        "sliding_window": family.honours_sliding_window and _cuts_attention(config),
        "rope_scaling": _rope_type(rope) not in ("default", "llama3"),
    }
    if any(refused.values()):
        names = [name for name, is_set in refused.items() if is_set]
        raise UserError(
            f"option(s) {', '.join(f'{n}={config.get(n, rope)!r}' for n in names)} are not served", source=source,
            expected=f"hidden_act={family.activations[0]}, full causal attention, no bias beyond the family's, "
                     "rotary positions unscaled or scaled as in Llama 3.1, experts in every layer of a mixture of "
                     "experts",
            hint="training would silently compute another model; use a checkpoint without these options",
        )
    try:
        num_heads, hidden = config["num_attention_heads"], config["hidden_size"]
        head_dim = (config.get("head_dim") if family.honours_head_dim else None) or hidden // num_heads
        experts = _read_experts(config, family, source)
        size_key = family.experts.size_key if family.experts else "intermediate_size"
        return ModelShape(
            family=config["model_type"], num_layers=config["num_hidden_layers"], hidden_size=hidden,
            ffn_hidden_size=config[size_key], num_heads=num_heads,
            num_kv_heads=config.get("num_key_value_heads") or num_heads, head_dim=head_dim,
            vocab_size=config["vocab_size"],
            tied_embeddings=head == "lm" and bool(config.get("tie_word_embeddings", family.ties_by_default)),
            has_score_head=head == "score",
            qkv_bias=family.qkv_bias, qk_norm=family.qk_norm, rms_norm_eps=config["rms_norm_eps"],
            rope_theta=float(rope.get("rope_theta") or config.get("rope_theta", 10000.0)),
            max_position_embeddings=config["max_position_embeddings"], rope_scaling=_read_rope_scaling(rope), **experts,
        )
    except KeyError as error:
        raise UserError(f"key {error} is missing", source=source, expected="a complete HF config.json",
                        hint="write it with transformers' save_pretrained") from None


def _rope_type(rope: dict[str, Any]) -> str:
    return rope.get("rope_type") or rope.get("type") or "default"


def _read_rope_scaling(rope: dict[str, Any]) -> RopeScaling | None:
    if _rope_type(rope) == "default":
        return None
    return RopeScaling(**{field.name: rope[field.name] for field in fields(RopeScaling)})


def _cuts_attention(config: dict[str, Any]) -> bool:
    window = config.get("sliding_window")
    return window is not None and window < config.get("max_position_embeddings", 0)


def _read_experts(config: dict[str, Any], family: Family, source: str) -> dict[str, Any]:
    """The fields of a ModelShape that only a mixture of experts has."""
    if family.experts is None:
        return {}
    # transformers 5 writes num_local_experts where published Qwen3-MoE configs have num_experts.
    num_experts = config.get("num_experts") or config["num_local_experts"]
    per_token = config["num_experts_per_tok"]
    # Mixtral has no such option: its shares always add up to 1.
    normalizes_shares = bool(config.get("norm_topk_prob")) if config["model_type"] != "mixtral" else True
    if per_token == 1 and normalizes_shares:
        raise UserError(
            "num_experts_per_tok = 1 with normalised shares", source=source, expected="2 experts per token or more",
            hint="the share of a single expert is always 1, so its router would never learn")
    return dict(num_experts=num_experts, experts_per_token=per_token, normalizes_shares=normalizes_shares)
