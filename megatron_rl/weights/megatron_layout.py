# SPDX-License-Identifier: Apache-2.0
"""Placement of logical tensors in Megatron's parameters, for any TP, PP, VPP and EP, and in its checkpoints.

Names come from `nn.ModuleList(model_chunks).named_parameters()`: chunk number, then the GPTModel's name.

* `linear_qkv`: `[q; k; v]` of this rank's heads, as in the engine (`models/attention.py`; megatron-core interleaves KV
  groups), in whole KV groups; `[q; k]` if values are outputs of the keys' projection;
* `linear_fc1`: `[gate; up]` of this rank's columns;
* latent attention: whole down-projections, up-projections sharded by heads;
* gated delta nets: `in_proj` is `[qkvz; ba]` of this rank's key heads, or `[q; k; v; z; b; a]` if split in the
  checkpoint; `conv_weight` is `[q; k; v]`;
* experts: EP rank r owns `[r * E/ep, (r+1) * E/ep)`, sharded over TP or whole (expert tensor parallel size 1); tables
  list `mlp.experts.linear_fc1.weight` [E/ep, 2 f, h] as `mlp.experts.local_experts.<e>.linear_fc1.weight`;
* embeddings: rows padded with zeros to a multiple of 64 and of TP;
* tied embeddings under PP: the last stage has a copy, `output_layer.weight`;
* a score head is `score.weight` on every TP rank of the last stage, instead of an output layer.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from megatron_rl.weights.families import DENSE, FUSED_KINDS, MTP_KINDS, SCORE_HEAD, SHARED, ModelShape
from megatron_rl.weights.family import CONV_PARTS, FULL, PROJECTION_KINDS
from megatron_rl.weights.placement_tables import PlacementTable, Row, Share, TableRows, list_parts, split_boxes
from megatron_rl.weights.shard_box import Box, full_box, rows

if TYPE_CHECKING:
    from megatron_rl.parallel.layout import ParallelLayout
    from megatron_rl.weights.adapters import AdapterShape


VOCAB_MULTIPLE = 64
ROUTER_BIAS = "mlp.router.expert_bias"  # not trained; always float32
PADDED_PARAMETERS = ("embedding.word_embeddings.weight", "output_layer.weight")


def padded_vocab_size(vocab_size: int, tp_size: int) -> int:
    """Return the embedding's rows: the next multiple of 64 and of TP."""
    multiple = math.lcm(VOCAB_MULTIPLE, tp_size)
    return -(-vocab_size // multiple) * multiple


def choose_chunk_tokens(vocab_size: int, tp_size: int, memory_bytes: int | None) -> int:
    """Return how many tokens' logits exist at once by default: 512 without a GPU, else a power of two up to 8192.

    Two float32 copies and a gradient take at most a 40th of the GPU's memory, unless 512 tokens take more.
    """
    fitting = 0 if memory_bytes is None else memory_bytes // (480 * padded_vocab_size(vocab_size, tp_size) // tp_size)
    return min(max(512, 1 << fitting.bit_length() >> 1), 8192)


def divide_layers(num_layers: int, layout: ParallelLayout) -> tuple[int, ...]:
    """Return how many layers each model chunk has; chunk c of stage p is number c * pp + p, as in Megatron."""
    counts = layout.chunk_layers or (None,) * (layout.pp_size * layout.vpp_size)
    rest, shares = num_layers - sum(filter(None, counts)), counts.count(None)
    return tuple(rest // shares if count is None else count for count in counts)


def stage_layers(num_layers: int, layout: ParallelLayout, pp_rank: int, chunk: int) -> range:
    """Return the global layer numbers of a model chunk."""
    counts, number = divide_layers(num_layers, layout), chunk * layout.pp_size + pp_rank
    start = sum(counts[:number])
    return range(start, start + counts[number])


def count_stage_layers(num_layers: int, layout: ParallelLayout, pp_rank: int) -> int:
    """Return how many layers the model chunks of a pipeline stage have together."""
    return sum(divide_layers(num_layers, layout)[pp_rank :: layout.pp_size])


def megatron_placements(shape: ModelShape, layout: ParallelLayout, rank: int) -> PlacementTable:
    """Return the placements of one rank's parameters."""
    at, vocab_rows = layout.expert_coordinates(rank), padded_vocab_size(shape.vocab_size, layout.tp_size)
    of_layer, of_expert = find_shares(layout, rank)
    boxes = split_boxes(shape, of_layer, vocab_rows // layout.tp_size, of_expert)
    return PlacementTable(_list_rows(shape, layout, at.pp, at.ep), boxes)


def find_shares(layout: ParallelLayout, rank: int) -> tuple[Share, Share]:
    """Return a rank's share of a layer, and of an expert, under TP."""
    experts = layout.expert_coordinates(rank).tp
    return Share(layout.tp_size, layout.coordinates(rank).tp), Share(layout.expert_tp_size, experts)


@lru_cache(maxsize=1)  # ranks of a TP group are requested consecutively
def _list_rows(shape: ModelShape, layout: ParallelLayout, pp_rank: int, ep_rank: int) -> TableRows:
    found: list[Row] = []
    pp_size, vpp_size, per_rank = layout.pp_size, layout.vpp_size, shape.num_experts // layout.ep_size
    experts = range(ep_rank * per_rank, (ep_rank + 1) * per_rank)
    sorts = {shape.sort_of(layer): layer for layer in range(shape.num_layers)}
    layer_rows = {sort: _list_layer(shape, layer, experts) for sort, layer in sorts.items()}
    if shape.mtp_layer:
        hf, final = f"model.layers.{shape.mtp_layer}.", {"shared_head.norm.weight": "decoder.final_layernorm.weight"}
        found += [(f"0.{final.get(name, name)}", hf + name, kind) for name, kind in MTP_KINDS.items()]
        mine = layer_rows[shape.sort_of(0)]
        return TableRows([*found, *((f"0.decoder.layers.0.{param}", hf + name, kind) for param, name, kind in mine)])
    for chunk in range(vpp_size):
        is_first = pp_rank == 0 and chunk == 0
        is_last = pp_rank == pp_size - 1 and chunk == vpp_size - 1
        if is_first:
            found.append((f"{chunk}.embedding.word_embeddings.weight", "model.embed_tokens.weight", "vocab"))
        for local, layer in enumerate(stage_layers(shape.num_layers, layout, pp_rank, chunk)):
            ours, hf = f"{chunk}.decoder.layers.{local}.", f"model.layers.{layer}."
            mine = layer_rows[shape.sort_of(layer)]
            found += [(ours + param, hf + hf_name, kind) for param, hf_name, kind in mine]
        if is_last:
            found.append((f"{chunk}.decoder.final_layernorm.weight", "model.norm.weight", "hidden"))
            if shape.has_score_head:
                found.append((f"{chunk}.{SCORE_HEAD}", SCORE_HEAD, "score"))
            elif not (shape.tied_embeddings and is_first):
                source = "model.embed_tokens.weight" if shape.tied_embeddings else "lm_head.weight"
                found.append((f"{chunk}.output_layer.weight", source, "vocab"))
    return TableRows(found)


def _list_layer(shape: ModelShape, layer: int, experts: range) -> list[Row]:
    found: list[Row] = [
        (layer_parameter(name, part), name, boxes)
        for name, kind in shape.layer_kinds(layer).items()
        for part, boxes in list_parts(kind)
    ]
    if not shape.has_experts(layer):
        return found
    from megatron_rl.weights.packed_experts import name_expert

    for local, expert in enumerate(experts):
        found += [
            (name_expert(layer_parameter(name, kind).replace("mlp.", "mlp.experts."), local), name, kind)
            for name, kind in shape.expert_kinds(expert).items()
        ]
    return found


_MATRICES = {
    # Sharded by heads. megatron-core sums the gradients of `q_layernorm`, which it takes for replicated.
    "q.norm": "self_attention.q_norm.weight",
    "k.norm": "self_attention.k_norm.weight",
    "input_norm": "input_layernorm.weight",
    "attention_output_norm": "post_self_attn_layernorm.weight",
    "mlp_norm": "pre_mlp_layernorm.weight",
    "mlp_output_norm": "post_mlp_layernorm.weight",
    "o": "self_attention.linear_proj.weight",
    "q_down": "self_attention.linear_q_down_proj.weight",
    "q_latent_norm": "self_attention.q_layernorm.weight",
    "q_up": "self_attention.linear_q_up_proj.weight",
    "kv_down": "self_attention.linear_kv_down_proj.weight",
    "kv_latent_norm": "self_attention.kv_layernorm.weight",
    "kv_up": "self_attention.linear_kv_up_proj.weight",
    "router": "mlp.router.weight",
    "router_bias": ROUTER_BIAS,
    "logit_bias": "mlp.router.bias",
    "sinks": "self_attention.core_attention.softmax_offset",
    "o.bias": "self_attention.linear_proj.bias",
    "shared_router": "mlp.shared_experts.gate_weight",
    "layer_scalar": "layer_scalar",
    **dict.fromkeys(PROJECTION_KINDS, "self_attention.in_proj.weight"),
    "delta_norm": "self_attention.norm.weight",
    "delta_o": "self_attention.linear_proj.weight",
    **dict.fromkeys(CONV_PARTS, "self_attention.conv_weight"),
}
for prefix, mlp in (("", "mlp"), (DENSE, "mlp"), (SHARED, "mlp.shared_experts")):
    _MATRICES |= {f"{prefix}{half}": f"{mlp}.linear_fc1.weight" for half in ("gate", "up")}
    _MATRICES[f"{prefix}down"] = f"{mlp}.linear_fc2.weight"
    _MATRICES |= {f"{prefix}{half}.bias": f"{mlp}.linear_fc1.bias" for half in ("gate", "up")}
    _MATRICES[f"{prefix}down.bias"] = f"{mlp}.linear_fc2.bias"


def layer_parameter(hf_name: str, kind: str) -> str:
    """Return the Megatron name, relative to the layer, of an HF tensor's parameter; for experts, as in a dense MLP."""
    kind = kind.removeprefix(FULL)
    if kind == "head":  # q_norm and k_norm
        return hf_name.replace("self_attn", "self_attention").replace("_norm", "_layernorm")
    if kind == "delta_head":
        return hf_name.replace("linear_attn", "self_attention")
    return _MATRICES.get(kind) or f"self_attention.linear_qkv.{kind.partition('.')[2]}"


def find_shard_key(layout: ParallelLayout, rank: int) -> Hashable:
    """Return a key shared by ranks with equal placements."""
    at, experts = layout.coordinates(rank), layout.expert_coordinates(rank)
    return at.tp, at.pp, experts.tp, experts.ep


Table = dict[str, tuple["GlobalPlacement", ...]]


@dataclass(frozen=True, slots=True)
class GlobalPlacement:
    """`key[*leading][box]` holds `hf_box` of a logical tensor."""

    key: str
    shape: tuple[int, ...]  # shape of `key`, stacked dimensions included
    leading: tuple[int, ...]  # index in stacked dimensions: none, (layer,), or (layer, expert)
    box: Box  # box in the other dimensions
    hf_box: Box


# Exceptions from `layer_parameter`: by name, and by kind within a layer.
_KEYS = {
    "model.embed_tokens.weight": "embedding.word_embeddings.weight",
    "model.norm.weight": "decoder.final_layernorm.weight",
    "lm_head.weight": "output_layer.weight",
    SCORE_HEAD: SCORE_HEAD,  # megatron-core has no such head
}
_FUSED_NORMS = {
    "input_norm": "self_attention.linear_qkv.layer_norm_weight",
    "mlp_norm": "mlp.linear_fc1.layer_norm_weight",
    "q_latent_norm": "self_attention.linear_q_up_proj.layer_norm_weight",
    "kv_latent_norm": "self_attention.linear_kv_up_proj.layer_norm_weight",
}


def megatron_global_placements(shape: ModelShape | AdapterShape) -> Table:
    """Return logical tensor -> placements in Megatron's checkpoints, in ascending rows, which cover each element once.

    Names and shapes are megatron-core's, so that a plain `GPTModel` (Transformer Engine's layer spec) loads our
    checkpoints and vice versa: a *global tensor* per kind of parameter, layers stacked in front (then experts), for any
    layout:

    * `linear_qkv`: interleaved per KV group, `[q of group 0; k0; v0; q of group 1; ...]`, gates after a group's q;
    * `linear_fc1`: `[gate; up]` of all columns;
    * norms fused by Transformer Engine into the next linear layer carry its name;
    * gated delta nets: as in the checkpoint, under our own names, as megatron-core's norm of them is zero-centered;
    * embeddings: without padding rows, which megatron-core's checkpoints have.

    Adapters and multi-token prediction, unknown to megatron-core, are global tensors of their own.
    """
    if not isinstance(shape, ModelShape) or shape.mtp_layer:
        return {
            name: (GlobalPlacement(name, size, (), full_box(size), full_box(size)),)
            for name, size in shape.logical_tensors().items()
        }
    cuts = _cut_kinds(shape)
    table = {name: _place(cuts[kind], _KEYS[name]) for name, kind in shape.tensor_kinds().items() if name in _KEYS}
    for layer in range(shape.num_layers):
        prefix, fused = f"model.layers.{layer}.", dict(_FUSED_NORMS)
        if shape.has_experts(layer):  # a norm before a router is not fused
            del fused["mlp_norm"]
        if shape.latent is not None or layer in shape.delta_layers:  # nor is a norm before two down-projections
            del fused["input_norm"]
        ours, stack, leading = "decoder.layers.", (shape.num_layers,), (layer,)
        if shape.dense_layers or shape.delta_layers or shape.full_heads:  # unequal layers cannot be stacked
            ours, stack, leading = f"decoder.layers.{layer}.", (), ()
        for name, kind in shape.layer_kinds(layer).items():
            if name.startswith("linear_attn."):
                key = name.replace("linear_attn", "self_attention")
                table[prefix + name] = _place(cuts[kind], f"{ours}{key}", stack, leading)
                continue
            place = _place_gated if kind == "q.weight" and shape.query_dim > shape.head_dim else _place
            table[prefix + name] = tuple(
                piece
                for part, cut in list_parts(kind)
                for piece in place(cuts[cut], f"{ours}{fused.get(kind) or layer_parameter(name, part)}", stack, leading)
            )
        for expert in range(shape.num_experts if shape.has_experts(layer) else 0):
            for name, kind in shape.expert_kinds(expert).items():
                key = layer_parameter(name, kind).replace("mlp.", f"{ours}mlp.experts.experts.")
                table[prefix + name] = _place(cuts[kind], key, (*stack, shape.num_experts), (*leading, expert))
    return table


class _Cut(NamedTuple):
    """Place of one kind of matrix in a fused Megatron tensor: from row `first` of each of `groups` equal parts.

    In its HF tensor, of shape `size`, the kind has `count` rows from `start`.
    """

    size: tuple[int, ...]
    groups: int
    first: int
    group_rows: int
    start: int
    count: int
    heads: int = 1


def _cut_kinds(shape: ModelShape) -> dict[str, _Cut]:
    cuts = {kind: _Cut(size, 1, 0, size[0], 0, size[0]) for kind, size in shape.kind_sizes().items()}
    d, groups = shape.head_dim, shape.num_kv_heads
    q_rows = shape.num_heads // groups * shape.query_dim
    for name, first in (("q", 0), ("k", q_rows), ("v", q_rows + d)):
        for kind in (f"{name}.weight", f"{name}.bias"):
            cuts[kind] = cuts[kind]._replace(groups=groups, first=first, group_rows=q_rows + 2 * d)
    cuts["q.weight"] = cuts["q.weight"]._replace(heads=shape.num_heads // groups)
    cuts |= shape.full_heads.name_cuts(_cut_kinds(shape.full)) if shape.full_heads else {}
    for prefix, ffn in shape.ffn_sizes().items():
        for half, kind in enumerate((f"{prefix}gate", f"{prefix}up")):
            for one in (kind, f"{kind}.bias"):
                cuts[one] = cuts[one]._replace(first=half * ffn, group_rows=2 * ffn)
    for fused, parts in FUSED_KINDS.items():
        start = 0
        for part in parts if fused in cuts else ():
            cuts[f"{fused}.{part}"] = cuts[part]._replace(size=cuts[fused].size, start=start)
            start += cuts[part].count
    return cuts


def _place(
    cut: _Cut, key: str, stack: tuple[int, ...] = (), leading: tuple[int, ...] = ()
) -> tuple[GlobalPlacement, ...]:
    count, fused = cut.count // cut.groups, (cut.groups * cut.group_rows, *cut.size[1:])
    starts = range(cut.first, fused[0], cut.group_rows)
    return tuple(
        GlobalPlacement(
            key,
            (*stack, *fused),
            leading,
            rows(start, start + count, fused),
            rows(cut.start + group * count, cut.start + (group + 1) * count, cut.size),
        )
        for group, start in enumerate(starts)
    )


def _place_gated(
    cut: _Cut, key: str, stack: tuple[int, ...] = (), leading: tuple[int, ...] = ()
) -> tuple[GlobalPlacement, ...]:
    """Place rows that are `[q; gate]` per head in HF files; the global tensor has all q of a group, then its gates."""
    places = []
    for whole in _place(cut, key, stack, leading):
        (first, last), (start, _) = whole.box[0], whole.hf_box[0]
        width = (last - first) // (2 * cut.heads)  # rows per head
        for row in range(2 * cut.heads):
            head, half = divmod(row, 2)
            at = first + (half * cut.heads + head) * width
            places.append(
                replace(
                    whole,
                    box=rows(at, at + width, whole.shape[len(leading) :]),
                    hf_box=rows(start + row * width, start + (row + 1) * width, cut.size),
                )
            )
    return tuple(places)
