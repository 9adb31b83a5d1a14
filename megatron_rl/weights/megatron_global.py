# SPDX-License-Identifier: Apache-2.0
"""Placement of logical tensors in Megatron distributed checkpoints.

Names and shapes are megatron-core's, so that a plain `GPTModel` (Transformer Engine's layer spec) loads our checkpoints
and vice versa: a *global tensor* per kind of parameter, layers stacked in front (then experts), for any layout:

* `linear_qkv`: interleaved per KV group, `[q of group 0; k0; v0; q of group 1; ...]`, gates after a group's q;
* `linear_fc1`: `[gate; up]` of all columns;
* norms fused by Transformer Engine into the next linear layer carry its name;
* gated delta nets: as in the checkpoint, under our own names, as megatron-core's norm of them is zero-centered;
* embeddings: without padding rows, which megatron-core's checkpoints have.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from megatron_rl.weights.families import FUSED_KINDS, SCORE_HEAD, ModelShape
from megatron_rl.weights.megatron_layout import layer_parameter
from megatron_rl.weights.placement_tables import list_parts
from megatron_rl.weights.shard_box import Box, full_box, rows

if TYPE_CHECKING:
    from megatron_rl.weights.adapters import AdapterShape

Table = dict[str, tuple["GlobalPlacement", ...]]


@dataclass(frozen=True, slots=True)
class GlobalPlacement:
    """`key[*leading][box]` holds `hf_box` of a logical tensor.

    Attributes:
        shape: shape of `key`, stacked dimensions included.
        leading: index in stacked dimensions: none, (layer,), or (layer, expert).
        box: box in the other dimensions.
    """

    key: str
    shape: tuple[int, ...]
    leading: tuple[int, ...]
    box: Box
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
    """Return logical tensor -> placements, in ascending rows, which cover each element once.

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
        if shape.dense_layers or shape.delta_layers:  # unequal layers cannot be stacked
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
