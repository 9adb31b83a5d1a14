# SPDX-License-Identifier: Apache-2.0
"""Where the rollout engines keep every logical tensor.

vLLM, per TP rank: `qkv_proj = [q; k; v]` with the KV heads replicated when tp > KV heads,
`gate_up_proj = [gate; up]` (experts: see `experts.py`), vocabulary rows padded to a multiple of 64, tied
embeddings as one parameter. Plain HF (transformers, checkpoints): every logical tensor is a parameter of its own.
"""

from __future__ import annotations

from megatron_rl.types import UserError
from megatron_rl.weights.experts import vllm_expert_placements
from megatron_rl.weights.families import ModelShape
from megatron_rl.weights.shard_box import ShardBox, columns, full_box, rows

VLLM_VOCAB_MULTIPLE = 64
VLLM_PADDED_PARAMETERS = ("model.embed_tokens.weight", "lm_head.weight")


def huggingface_placements(shape: ModelShape) -> list[ShardBox]:
    """The identity: one rank that holds whole HF tensors under their own names."""
    return [ShardBox(name, full_box(size), name, full_box(size)) for name, size in shape.logical_tensors().items()]


def vllm_placements(shape: ModelShape, *, tp_size: int, tp_rank: int) -> list[ShardBox]:
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
    placements = [_vocab_rows(shape, "model.embed_tokens.weight", padded // tp_size, tp_rank)]
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}."
        placements += _attention(shape, prefix, tp_size, tp_rank)
        if shape.num_experts:
            placements += vllm_expert_placements(shape, prefix, tp_size=tp_size, tp_rank=tp_rank)
        else:
            placements += _feed_forward(shape, prefix, tp_size, tp_rank)
    norm = full_box((shape.hidden_size,))
    placements.append(ShardBox("model.norm.weight", norm, "model.norm.weight", norm))
    if not shape.tied_embeddings:
        placements.append(_vocab_rows(shape, "lm_head.weight", padded // tp_size, tp_rank))
    return placements


def _vocab_rows(shape: ModelShape, name: str, per_rank: int, tp_rank: int) -> ShardBox:
    start = min(tp_rank * per_rank, shape.vocab_size)
    stop = min(start + per_rank, shape.vocab_size)
    size = (shape.vocab_size, shape.hidden_size)
    return ShardBox(name, rows(0, stop - start, size), name, rows(start, stop, size))


def _attention(shape: ModelShape, prefix: str, tp_size: int, tp_rank: int) -> list[ShardBox]:
    """Self-attention and both norms of a layer."""
    h, d = shape.hidden_size, shape.head_dim
    whole = {"input_layernorm.weight": h, "post_attention_layernorm.weight": h}
    if shape.qk_norm:
        whole |= {"self_attn.q_norm.weight": d, "self_attn.k_norm.weight": d}
    placements = [
        ShardBox(prefix + name, full_box((size,)), prefix + name, full_box((size,))) for name, size in whole.items()
    ]
    q_rows = shape.num_heads // tp_size * d
    kv_heads = max(shape.num_kv_heads // tp_size, 1)
    # With more ranks than KV heads, tp / KV heads neighbouring ranks hold the same head.
    kv_start = tp_rank * shape.num_kv_heads // tp_size * d
    kv_rows = kv_heads * d
    for what, rest in (("weight", (h,)), *((("bias", ()),) if shape.qkv_bias else ())):
        base = 0
        for name, start, size in (("q", tp_rank * q_rows, q_rows), ("k", kv_start, kv_rows), ("v", kv_start, kv_rows)):
            placements.append(ShardBox(
                f"{prefix}self_attn.qkv_proj.{what}", rows(base, base + size, (0, *rest)),
                f"{prefix}self_attn.{name}_proj.{what}", rows(start, start + size, (0, *rest))))
            base += size
    placements.append(_columns(prefix + "self_attn.o_proj.weight", (h, shape.num_heads * d), tp_size, tp_rank))
    return placements


def _feed_forward(shape: ModelShape, prefix: str, tp_size: int, tp_rank: int) -> list[ShardBox]:
    """The dense MLP of a layer."""
    h, ffn = shape.hidden_size, shape.ffn_hidden_size // tp_size
    placements = []
    for half, name in enumerate(("gate", "up")):
        size = (shape.ffn_hidden_size, h)
        placements.append(ShardBox(
            prefix + "mlp.gate_up_proj.weight", rows(half * ffn, (half + 1) * ffn, size),
            f"{prefix}mlp.{name}_proj.weight", rows(tp_rank * ffn, (tp_rank + 1) * ffn, size)))
    placements.append(_columns(prefix + "mlp.down_proj.weight", (h, shape.ffn_hidden_size), tp_size, tp_rank))
    return placements


def _columns(name: str, size: tuple[int, int], tp_size: int, tp_rank: int) -> ShardBox:
    """A matrix under its own name whose columns are split evenly."""
    width = size[1] // tp_size
    return ShardBox(name, columns(0, width, size), name, columns(tp_rank * width, (tp_rank + 1) * width, size))
