# SPDX-License-Identifier: Apache-2.0
"""Where Megatron keeps every logical tensor, for any TP, PP, VPP and EP.

Parameter names are those of `nn.ModuleList(model_chunks).named_parameters()`: the chunk's number,
then the name inside the GPTModel. Fused parameters:

* `linear_qkv`: `[q; k; v]` of this rank's heads (megatron-core's own order interleaves them per KV group;
  ours is the rollout engine's, see `models/attention.py`); a TP rank holds whole KV groups;
* `linear_fc1`: `[gate; up]` of this rank's columns (experts: see `experts.py`);
* embeddings: rows of the vocabulary padded with zeros to a multiple of 64 and of TP;
* tied embeddings under PP: the last stage keeps a copy of the embedding as `output_layer.weight`;
* a score head is `score.weight` on every TP rank of the last stage, in place of an output layer.
"""

from __future__ import annotations

import math

from megatron_rl.weights.experts import megatron_expert_placements
from megatron_rl.weights.families import SCORE_HEAD, ModelShape
from megatron_rl.weights.shard_box import ShardBox, columns, full_box, rows

VOCAB_MULTIPLE = 64
PADDED_PARAMETERS = ("embedding.word_embeddings.weight", "output_layer.weight")


def padded_vocab_size(vocab_size: int, tp_size: int) -> int:
    """Vocabulary size of the Megatron embedding: the next multiple of 64 that TP divides."""
    multiple = math.lcm(VOCAB_MULTIPLE, tp_size)
    return -(-vocab_size // multiple) * multiple


def stage_layers(num_layers: int, pp_size: int, vpp_size: int, pp_rank: int, chunk: int) -> range:
    """Global numbers of the layers in one model chunk (interleaved assignment of Megatron)."""
    per_chunk = num_layers // (pp_size * vpp_size)
    start = chunk * (num_layers // vpp_size) + pp_rank * per_chunk
    return range(start, start + per_chunk)


def megatron_placements(
    shape: ModelShape, *, tp_size: int, tp_rank: int, pp_size: int = 1, pp_rank: int = 0, vpp_size: int = 1,
    ep_size: int = 1, ep_rank: int = 0,
) -> list[ShardBox]:
    """Placements of all parameters of one rank's model chunks."""
    placements: list[ShardBox] = []
    for chunk in range(vpp_size):
        is_first = pp_rank == 0 and chunk == 0
        is_last = pp_rank == pp_size - 1 and chunk == vpp_size - 1
        if is_first:
            placements.append(_vocab_rows(
                shape, f"{chunk}.embedding.word_embeddings.weight", "model.embed_tokens.weight", tp_size, tp_rank))
        for local, layer in enumerate(stage_layers(shape.num_layers, pp_size, vpp_size, pp_rank, chunk)):
            param, hf = f"{chunk}.decoder.layers.{local}.", f"model.layers.{layer}."
            placements += _attention(shape, param, hf, tp_size, tp_rank)
            if shape.num_experts:
                placements += megatron_expert_placements(
                    shape, param, hf, tp_size=tp_size, tp_rank=tp_rank, ep_size=ep_size, ep_rank=ep_rank)
            else:
                placements += _feed_forward(shape, param, hf, tp_size, tp_rank)
        if is_last:
            norm = full_box((shape.hidden_size,))
            placements.append(ShardBox(f"{chunk}.decoder.final_layernorm.weight", norm, "model.norm.weight", norm))
            if shape.has_score_head:
                score = full_box((1, shape.hidden_size))
                placements.append(ShardBox(f"{chunk}.{SCORE_HEAD}", score, SCORE_HEAD, score))
            elif not (shape.tied_embeddings and is_first):
                source = "model.embed_tokens.weight" if shape.tied_embeddings else "lm_head.weight"
                placements.append(_vocab_rows(shape, f"{chunk}.output_layer.weight", source, tp_size, tp_rank))
    return placements


def _vocab_rows(shape: ModelShape, param: str, hf_name: str, tp_size: int, tp_rank: int) -> ShardBox:
    per_rank = padded_vocab_size(shape.vocab_size, tp_size) // tp_size
    start = min(tp_rank * per_rank, shape.vocab_size)
    stop = min(start + per_rank, shape.vocab_size)
    size = (shape.vocab_size, shape.hidden_size)
    return ShardBox(param, rows(0, stop - start, size), hf_name, rows(start, stop, size))


def _attention(shape: ModelShape, param: str, hf: str, tp_size: int, tp_rank: int) -> list[ShardBox]:
    """Self-attention and both norms of a layer."""
    h, d = shape.hidden_size, shape.head_dim

    def whole(name: str, hf_name: str, size: int) -> ShardBox:
        box = full_box((size,))
        return ShardBox(param + name, box, hf + hf_name, box)

    placements = [
        whole("input_layernorm.weight", "input_layernorm.weight", h),
        whole("pre_mlp_layernorm.weight", "post_attention_layernorm.weight", h),
    ]
    if shape.qk_norm:
        placements += [
            whole("self_attention.q_layernorm.weight", "self_attn.q_norm.weight", d),
            whole("self_attention.k_layernorm.weight", "self_attn.k_norm.weight", d),
        ]
    placements += _qkv(shape, param, hf, "weight", (h,), tp_size, tp_rank)
    if shape.qkv_bias:
        placements += _qkv(shape, param, hf, "bias", (), tp_size, tp_rank)

    q_cols, o_size = shape.num_heads * d // tp_size, (h, shape.num_heads * d)
    placements.append(ShardBox(
        param + "self_attention.linear_proj.weight", columns(0, q_cols, o_size),
        hf + "self_attn.o_proj.weight", columns(tp_rank * q_cols, (tp_rank + 1) * q_cols, o_size)))
    return placements


def _feed_forward(shape: ModelShape, param: str, hf: str, tp_size: int, tp_rank: int) -> list[ShardBox]:
    """The dense MLP of a layer."""
    ffn, size = shape.ffn_hidden_size // tp_size, (shape.ffn_hidden_size, shape.hidden_size)
    start, stop = tp_rank * ffn, (tp_rank + 1) * ffn
    turned = shape.hidden_size, shape.ffn_hidden_size
    placements = [ShardBox(
        param + "mlp.linear_fc2.weight", columns(0, ffn, turned),
        hf + "mlp.down_proj.weight", columns(start, stop, turned))]
    for half, name in enumerate(("gate", "up")):
        placements.append(ShardBox(
            param + "mlp.linear_fc1.weight", rows(half * ffn, (half + 1) * ffn, size),
            hf + f"mlp.{name}_proj.weight", rows(start, stop, size)))
    return placements


def _qkv(
    shape: ModelShape, param: str, hf: str, what: str, rest: tuple[int, ...], tp_size: int, tp_rank: int
) -> list[ShardBox]:
    """`[q; k; v]` of this rank; `rest` are the dimensions after the first (none for a bias)."""
    base, placements = 0, []
    for name, heads in (("q", shape.num_heads), ("k", shape.num_kv_heads), ("v", shape.num_kv_heads)):
        size = heads // tp_size * shape.head_dim
        placements.append(ShardBox(
            f"{param}self_attention.linear_qkv.{what}", rows(base, base + size, (0, *rest)),
            f"{hf}self_attn.{name}_proj.{what}", rows(tp_rank * size, (tp_rank + 1) * size, (0, *rest))))
        base += size
    return placements
