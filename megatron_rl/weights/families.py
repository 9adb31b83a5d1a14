# SPDX-License-Identifier: Apache-2.0
"""Model families: what an HF config.json says about shapes, and the logical tensors that follow.

A family is one row of `FAMILIES`. Everything else (Megatron's and vLLM's tables, conversion) is made
from the `ModelShape`, so that a new family with these building blocks is one row.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.types import UserError


@dataclass(frozen=True)
class Family:
    """What the architecture fixes and config.json does not say.

    Attributes:
        architecture: name of the transformers class.
        qkv_bias: the q, k and v projections have a bias.
        qk_norm: q and k are normalised per head.
        honours_head_dim: config.json's `head_dim` is used (else hidden_size / num_heads always).
    """

    architecture: str
    qkv_bias: bool = False
    qk_norm: bool = False
    honours_head_dim: bool = True


FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM"),
    "qwen2": Family("Qwen2ForCausalLM", qkv_bias=True, honours_head_dim=False),
    "qwen3": Family("Qwen3ForCausalLM", qk_norm=True),
}


@dataclass(frozen=True)
class ModelShape:
    """A decoder-only transformer: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

    Sizes are those of the HF config; `vocab_size` is without padding.
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

    def logical_tensors(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every HF tensor, in checkpoint order."""
        h, d, ffn = self.hidden_size, self.head_dim, self.ffn_hidden_size
        q, kv = self.num_heads * d, self.num_kv_heads * d
        tensors: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, h)}
        for layer in range(self.num_layers):
            prefix = f"model.layers.{layer}."
            block: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (h,)}
            for name, size in (("q", q), ("k", kv), ("v", kv)):
                block[f"self_attn.{name}_proj.weight"] = (size, h)
                if self.qkv_bias:
                    block[f"self_attn.{name}_proj.bias"] = (size,)
            if self.qk_norm:
                block |= {"self_attn.q_norm.weight": (d,), "self_attn.k_norm.weight": (d,)}
            block["self_attn.o_proj.weight"] = (h, q)
            block["post_attention_layernorm.weight"] = (h,)
            block |= {"mlp.gate_proj.weight": (ffn, h), "mlp.up_proj.weight": (ffn, h)}
            block["mlp.down_proj.weight"] = (h, ffn)
            tensors |= {prefix + name: size for name, size in block.items()}
        tensors["model.norm.weight"] = (h,)
        if not self.tied_embeddings:
            tensors["lm_head.weight"] = (self.vocab_size, h)
        return tensors

    def check_training_layout(self, tp_size: int, pp_size: int, vpp_size: int) -> None:
        """Refuse a Megatron layout that cannot hold this model.

        Raises:
            UserError: naming the sizes and the values that work.
        """
        for what, size in (("attention heads", self.num_heads), ("KV heads", self.num_kv_heads),
                           ("feed-forward columns", self.ffn_hidden_size)):
            if size % tp_size:
                raise UserError(
                    f"tensor_model_parallel_size {tp_size} does not divide the {size} {what} of the model",
                    source="actor.tensor_model_parallel_size and the model's config.json",
                    expected=f"one of {self._tp_sizes()}",
                    hint="use a smaller TP and more pipeline or data parallelism",
                )
        if self.num_layers % (pp_size * vpp_size):
            valid = [n for n in range(1, self.num_layers + 1) if self.num_layers % n == 0]
            raise UserError(
                f"pp * vpp = {pp_size} * {vpp_size} = {pp_size * vpp_size} does not divide "
                f"the {self.num_layers} layers of the model",
                source="actor.pipeline_model_parallel_size, actor.virtual_pipeline_model_parallel_size",
                expected=f"pp * vpp one of {valid}",
                hint="every chunk of every stage holds the same number of layers",
            )

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


def load_model_shape(directory: str | Path) -> ModelShape:
    """Read `config.json` of an HF model directory.

    Raises:
        UserError: no such directory or file, unknown architecture, or an option that is not served.
    """
    file = Path(directory) / "config.json"
    if not file.is_file():
        raise UserError(
            f"there is no {file}", source="model.path", expected="a model directory in Hugging Face format",
            hint="tools/make_toy_task.py makes a small one; check for a typo or a missing download",
        )
    try:
        config = json.loads(file.read_text())
    except json.JSONDecodeError as error:
        raise UserError(f"{file} is not JSON: {error}", source=str(file), expected="an HF config.json",
                        hint="the file may be half downloaded") from None
    return model_shape_from_config(config, source=str(file))


def model_shape_from_config(config: dict[str, Any], source: str) -> ModelShape:
    """Make the shape from the content of a config.json; see `load_model_shape`."""
    family = FAMILIES.get(config.get("model_type", ""))
    if family is None:
        raise UserError(
            f"unknown architecture {config.get('model_type')!r}", source=source,
            expected=f"model_type one of {sorted(FAMILIES)}", hint="a family is one row of weights/families.py",
        )
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    refused = {
        "hidden_act": config.get("hidden_act", "silu") != "silu",
        "use_sliding_window": bool(config.get("use_sliding_window")),
        "attention_bias": bool(config.get("attention_bias")),
        "mlp_bias": bool(config.get("mlp_bias")),
        "rope_scaling": (rope.get("rope_type") or rope.get("type") or "default") != "default",
    }
    if any(refused.values()):
        names = [name for name, is_set in refused.items() if is_set]
        raise UserError(
            f"option(s) {', '.join(f'{n}={config.get(n, rope)!r}' for n in names)} are not served", source=source,
            expected="SwiGLU, full attention, no bias beyond the family's, unscaled rotary positions",
            hint="training would silently compute another model; use a checkpoint without these options",
        )
    try:
        num_heads, hidden = config["num_attention_heads"], config["hidden_size"]
        head_dim = (config.get("head_dim") if family.honours_head_dim else None) or hidden // num_heads
        return ModelShape(
            family=config["model_type"], num_layers=config["num_hidden_layers"], hidden_size=hidden,
            ffn_hidden_size=config["intermediate_size"], num_heads=num_heads,
            num_kv_heads=config.get("num_key_value_heads") or num_heads, head_dim=head_dim,
            vocab_size=config["vocab_size"], tied_embeddings=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=family.qkv_bias, qk_norm=family.qk_norm, rms_norm_eps=config["rms_norm_eps"],
            rope_theta=float(rope.get("rope_theta") or config.get("rope_theta", 10000.0)),
            max_position_embeddings=config["max_position_embeddings"],
        )
    except KeyError as error:
        raise UserError(f"key {error} is missing", source=source, expected="a complete HF config.json",
                        hint="write it with transformers' save_pretrained") from None
