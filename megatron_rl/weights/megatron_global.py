# SPDX-License-Identifier: Apache-2.0
"""Where a Megatron distributed checkpoint keeps every logical tensor.

These are megatron-core's own names and shapes, so that a plain `GPTModel` (Transformer Engine's layer spec) reads
our checkpoints and we read those that it wrote: one *global tensor* per kind of parameter with the layers
stacked in front (and the experts behind them), whatever the layout. Fused parameters:

* `linear_qkv`: interleaved per KV group, `[q of group 0; k0; v0; q of group 1; ...]`;
* `linear_fc1`: `[gate; up]` of all columns;
* norms that Transformer Engine fuses into the next linear carry its name;
* embeddings: the rows of the vocabulary (a checkpoint of megatron-core has padding rows behind them).
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.weights.families import FAMILIES, ModelShape
from megatron_rl.weights.shard_box import Box, full_box, rows

Table = dict[str, tuple["GlobalPlacement", ...]]


@dataclass(frozen=True, slots=True)
class GlobalPlacement:
    """`key[*leading][box]` holds `hf_box` of a logical tensor.

    Attributes:
        key: name of the global tensor.
        shape: its shape, stacked dimensions included.
        leading: index in the stacked dimensions: none, (layer,), or (layer, expert).
        box: in the remaining dimensions; as large as `hf_box`.
        hf_box: box of the logical tensor.
    """

    key: str
    shape: tuple[int, ...]
    leading: tuple[int, ...]
    box: Box
    hf_box: Box


def megatron_global_placements(shape: ModelShape) -> Table:
    """Logical tensor -> its placements, ascending in its rows; they cover it, each element once."""
    table: Table = {}
    layers = (shape.num_layers,)

    def place_whole(hf_name: str, key: str, stack: tuple[int, ...] = (), leading: tuple[int, ...] = ()) -> None:
        box = full_box(sizes[hf_name])
        table[hf_name] = (GlobalPlacement(key, (*stack, *sizes[hf_name]), leading, box, box),)

    sizes = shape.logical_tensors()
    place_whole("model.embed_tokens.weight", "embedding.word_embeddings.weight")
    place_whole("model.norm.weight", "decoder.final_layernorm.weight")
    if "lm_head.weight" in sizes:
        place_whole("lm_head.weight", "output_layer.weight")
    if shape.has_score_head:
        place_whole("score.weight", "score.weight")  # megatron-core has no such head
    for layer in range(shape.num_layers):
        hf, key = f"model.layers.{layer}.", "decoder.layers."
        for name, megatron_name in _whole_tensors(shape).items():
            place_whole(hf + name, key + megatron_name, layers, (layer,))
        table |= _qkv(shape, layer, "weight", (shape.hidden_size,))
        if shape.qkv_bias:
            table |= _qkv(shape, layer, "bias", ())
        names = FAMILIES[shape.family].experts
        if names is None:
            place_whole(f"{hf}mlp.down_proj.weight", f"{key}mlp.linear_fc2.weight", layers, (layer,))
            table |= _gate_up(
                shape, f"{key}mlp.linear_fc1.weight", (f"{hf}mlp.gate_proj.weight", f"{hf}mlp.up_proj.weight"),
                layers, (layer,))
            continue
        stack = (shape.num_layers, shape.num_experts)
        for expert in range(shape.num_experts):
            block = f"{hf}{names.block}.experts.{expert}."
            place_whole(f"{block}{names.down}.weight", f"{key}mlp.experts.experts.linear_fc2.weight", stack,
                        (layer, expert))
            table |= _gate_up(
                shape, f"{key}mlp.experts.experts.linear_fc1.weight",
                (f"{block}{names.gate}.weight", f"{block}{names.up}.weight"), stack, (layer, expert))
    return table


def _whole_tensors(shape: ModelShape) -> dict[str, str]:
    """Tensors of a layer that are a stacked tensor's slice as they are."""
    names = {
        "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
        "self_attn.o_proj.weight": "self_attention.linear_proj.weight",
        "post_attention_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
    }
    if shape.qk_norm:
        names["self_attn.q_norm.weight"] = "self_attention.q_layernorm.weight"
        names["self_attn.k_norm.weight"] = "self_attention.k_layernorm.weight"
    experts = FAMILIES[shape.family].experts
    if experts is not None:
        names["post_attention_layernorm.weight"] = "pre_mlp_layernorm.weight"
        names[f"{experts.block}.gate.weight"] = "mlp.router.weight"
    return names


def _qkv(shape: ModelShape, layer: int, what: str, rest: tuple[int, ...]) -> Table:
    """The q, k and v projections of a layer; `rest` are the dimensions after the first (none for a bias)."""
    d, groups = shape.head_dim, shape.num_kv_heads
    q_rows = shape.num_heads // groups * d
    group_rows = q_rows + 2 * d
    size = (shape.num_layers, groups * group_rows, *rest)
    table: Table = {}
    for name, first, count in (("q", 0, q_rows), ("k", q_rows, d), ("v", q_rows + d, d)):
        table[f"model.layers.{layer}.self_attn.{name}_proj.{what}"] = tuple(
            GlobalPlacement(
                f"decoder.layers.self_attention.linear_qkv.{what}", size, (layer,),
                rows(group * group_rows + first, group * group_rows + first + count, size[1:]),
                rows(group * count, (group + 1) * count, size[1:]))
            for group in range(groups))
    return table


def _gate_up(
    shape: ModelShape, key: str, hf_names: tuple[str, str], stack: tuple[int, ...], leading: tuple[int, ...]
) -> Table:
    ffn, h = shape.ffn_hidden_size, shape.hidden_size
    return {
        hf_name: (GlobalPlacement(
            key, (*stack, 2 * ffn, h), leading, rows(half * ffn, (half + 1) * ffn, (2 * ffn, h)),
            full_box((ffn, h))),)
        for half, hf_name in enumerate(hf_names)
    }
