# SPDX-License-Identifier: Apache-2.0
"""Where the rollout engines keep every logical tensor.

vLLM, per TP rank: `qkv_proj = [q; k; v]` with the KV heads replicated when tp > KV heads,
`gate_up_proj = [gate; up]` (experts: see `experts.py`), vocabulary rows padded to a multiple of 64, tied
embeddings as one parameter. Plain HF (transformers, checkpoints): every logical tensor is a parameter of its own.
"""

from __future__ import annotations

from functools import lru_cache

from megatron_rl.types import UserError
from megatron_rl.weights.experts import vllm_expert_rows
from megatron_rl.weights.families import ModelShape
from megatron_rl.weights.shard_box import ShardBox, full_box
from megatron_rl.weights.tables import PlacementTable, Row, Rows, split_boxes

VLLM_VOCAB_MULTIPLE = 64
VLLM_PADDED_PARAMETERS = ("model.embed_tokens.weight", "lm_head.weight")


def huggingface_placements(shape: ModelShape) -> list[ShardBox]:
    """The identity: one rank that holds whole HF tensors under their own names."""
    return [ShardBox(name, full_box(size), name, full_box(size)) for name, size in shape.logical_tensors().items()]


def vllm_placements(shape: ModelShape, *, tp_size: int, tp_rank: int) -> PlacementTable:
    """Placements of all parameters of one vLLM TP rank (unquantised; fused experts seen as matrices).

    Raises:
        UserError: vLLM cannot split the padded vocabulary over `tp_size` ranks.
    """
    assert not shape.has_score_head, "engines generate: they need a language-model head"
    padded = -(-shape.vocab_size // VLLM_VOCAB_MULTIPLE) * VLLM_VOCAB_MULTIPLE
    if padded % tp_size:
        raise UserError(
            f"the engine's vocabulary of {padded} rows does not split over {tp_size} ranks",
            source="rollout.tensor_model_parallel_size", expected=f"a divisor of {padded}", hint="use 1, 2, 4 or 8")
    return PlacementTable(_list_rows(shape), split_boxes(shape, tp_size, tp_rank, padded // tp_size))


@lru_cache(maxsize=1)
def _list_rows(shape: ModelShape) -> Rows:
    """What every rank of an engine holds a part of."""
    layer_rows = _list_attention(shape) + (vllm_expert_rows(shape) if shape.num_experts else _DENSE)
    found: list[Row] = [_under_its_own_name("model.embed_tokens.weight", "vocab")]
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}."
        found += [(prefix + param, prefix + hf_name, kind) for param, hf_name, kind in layer_rows]
    found.append(_under_its_own_name("model.norm.weight", "hidden"))
    if not shape.tied_embeddings:
        found.append(_under_its_own_name("lm_head.weight", "vocab"))
    return Rows(found)


def _under_its_own_name(name: str, kind: str) -> Row:
    return name, name, kind


_DENSE: list[Row] = [
    ("mlp.gate_up_proj.weight", "mlp.gate_proj.weight", "gate"),
    ("mlp.gate_up_proj.weight", "mlp.up_proj.weight", "up"), _under_its_own_name("mlp.down_proj.weight", "down")]


def _list_attention(shape: ModelShape) -> list[Row]:
    """Self-attention and both norms of a layer."""
    found = [_under_its_own_name(f"{name}_layernorm.weight", "hidden") for name in ("input", "post_attention")]
    if shape.qk_norm:
        found += [_under_its_own_name(f"self_attn.{name}_norm.weight", "head") for name in "qk"]
    for what in ("weight", "bias") if shape.qkv_bias else ("weight",):
        found += [(f"self_attn.qkv_proj.{what}", f"self_attn.{name}_proj.{what}", f"{name}.{what}") for name in "qkv"]
    return [*found, _under_its_own_name("self_attn.o_proj.weight", "o")]
