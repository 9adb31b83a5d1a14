# SPDX-License-Identifier: Apache-2.0
"""Where Megatron keeps every logical tensor, for any TP, PP and VPP.

Parameter names are those of `nn.ModuleList(model_chunks).named_parameters()`: the chunk's number,
then the name inside the GPTModel. Fused parameters:

* `linear_qkv`: rows interleaved per KV group, `[q .. q, k, v]` for group 0, then group 1, ...; a TP
  rank holds whole groups;
* `linear_fc1`: `[gate; up]` of this rank's columns;
* embeddings: rows of the vocabulary padded with zeros to a multiple of 64 and of TP;
* tied embeddings under PP: the last stage keeps a copy of the embedding as `output_layer.weight`.
"""

from __future__ import annotations

import math

from megatron_rl.weights.families import ModelShape
from megatron_rl.weights.placement import Placement, columns, full_box, rows

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
    shape: ModelShape, *, tp_size: int, tp_rank: int, pp_size: int = 1, pp_rank: int = 0, vpp_size: int = 1
) -> list[Placement]:
    """Placements of all parameters of one rank's model chunks."""
    placements: list[Placement] = []
    for chunk in range(vpp_size):
        is_first = pp_rank == 0 and chunk == 0
        is_last = pp_rank == pp_size - 1 and chunk == vpp_size - 1
        if is_first:
            placements.append(_vocab_rows(
                shape, f"{chunk}.embedding.word_embeddings.weight", "model.embed_tokens.weight", tp_size, tp_rank))
        for local, layer in enumerate(stage_layers(shape.num_layers, pp_size, vpp_size, pp_rank, chunk)):
            placements += _layer(shape, f"{chunk}.decoder.layers.{local}.", f"model.layers.{layer}.", tp_size, tp_rank)
        if is_last:
            norm = full_box((shape.hidden_size,))
            placements.append(Placement(f"{chunk}.decoder.final_layernorm.weight", norm, "model.norm.weight", norm))
            if not (shape.tied_embeddings and is_first):
                source = "model.embed_tokens.weight" if shape.tied_embeddings else "lm_head.weight"
                placements.append(_vocab_rows(shape, f"{chunk}.output_layer.weight", source, tp_size, tp_rank))
    return placements


def _vocab_rows(shape: ModelShape, param: str, hf_name: str, tp_size: int, tp_rank: int) -> Placement:
    per_rank = padded_vocab_size(shape.vocab_size, tp_size) // tp_size
    start = min(tp_rank * per_rank, shape.vocab_size)
    stop = min(start + per_rank, shape.vocab_size)
    size = (shape.vocab_size, shape.hidden_size)
    return Placement(param, rows(0, stop - start, size), hf_name, rows(start, stop, size))


def _layer(shape: ModelShape, param: str, hf: str, tp_size: int, tp_rank: int) -> list[Placement]:
    h, d = shape.hidden_size, shape.head_dim

    def whole(name: str, hf_name: str, size: int) -> Placement:
        box = full_box((size,))
        return Placement(param + name, box, hf + hf_name, box)

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

    q_cols = shape.num_heads * d // tp_size
    ffn = shape.ffn_hidden_size // tp_size
    o_size, down_size = (h, shape.num_heads * d), (h, shape.ffn_hidden_size)
    placements += [
        Placement(param + "self_attention.linear_proj.weight", columns(0, q_cols, o_size),
                  hf + "self_attn.o_proj.weight", columns(tp_rank * q_cols, (tp_rank + 1) * q_cols, o_size)),
        Placement(param + "mlp.linear_fc2.weight", columns(0, ffn, down_size),
                  hf + "mlp.down_proj.weight", columns(tp_rank * ffn, (tp_rank + 1) * ffn, down_size)),
    ]
    for half, name in enumerate(("gate", "up")):
        size = (shape.ffn_hidden_size, h)
        placements.append(Placement(
            param + "mlp.linear_fc1.weight", rows(half * ffn, (half + 1) * ffn, size),
            hf + f"mlp.{name}_proj.weight", rows(tp_rank * ffn, (tp_rank + 1) * ffn, size)))
    return placements


def _qkv(
    shape: ModelShape, param: str, hf: str, what: str, rest: tuple[int, ...], tp_size: int, tp_rank: int
) -> list[Placement]:
    """Per KV group `[q .. q, k, v]`; `rest` are the dimensions after the first (none for a bias)."""
    d = shape.head_dim
    q_rows = shape.num_heads // shape.num_kv_heads * d
    groups = shape.num_kv_heads // tp_size
    placements = []
    for local in range(groups):
        group, base = tp_rank * groups + local, local * (q_rows + 2 * d)
        for name, offset, size in (("q", 0, q_rows), ("k", q_rows, d), ("v", q_rows + d, d)):
            placements.append(Placement(
                f"{param}self_attention.linear_qkv.{what}", rows(base + offset, base + offset + size, (0, *rest)),
                f"{hf}self_attn.{name}_proj.{what}", rows(group * size, (group + 1) * size, (0, *rest))))
    return placements
