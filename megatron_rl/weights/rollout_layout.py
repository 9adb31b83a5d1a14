# SPDX-License-Identifier: Apache-2.0
"""Placement of logical tensors in rollout engines, and the models that engines refuse.

* vLLM, per TP rank: `qkv_proj = [q; k; v]` with KV heads replicated if tp > KV heads, `gate_up_proj = [gate; up]`,
  vocabulary rows padded to a multiple of 64, tied embeddings once; all experts on every rank, per layer `w13_weight`
  [E, 2 * ffn/tp, h] = `[gate; up]` and `w2_weight` [E, h, ffn/tp]; with expert parallelism E / ep consecutive experts,
  whole, per rank, numbered from 0;
* gpt-oss: gates and ups alternate by rows, as two views; `w2_bias` is on the first rank only, as results are summed;
* gated delta nets: `in_proj_qkvz` and `in_proj_ba` as in the checkpoint, or `[q; k; v; z]` and `[b; a]` if split there;
* latent attention: nothing is fused; with a latent cache, views of the down-projections that vLLM fuses;
* values that are the keys' projections: a second copy of their rows, `[q; k; k]`;
* plain HF (transformers, checkpoints): nothing is fused.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from megatron_rl.extension.registry import ENGINES, name_engines
from megatron_rl.types import UserError
from megatron_rl.weights.families import SHARED, ModelShape
from megatron_rl.weights.family import FAMILIES, FULL
from megatron_rl.weights.packed_experts import is_packed
from megatron_rl.weights.placement_tables import PlacementTable, Share, TableRows, list_parts, split_boxes
from megatron_rl.weights.shard_box import ShardBox, full_box

if TYPE_CHECKING:
    from megatron_rl.weights.adapters import AdapterShape

LARGEST_RANK = 512  # largest buffer of vLLM for adapters
VLLM_VOCAB_MULTIPLE = 64
VLLM_PADDED_PARAMETERS = ("model.embed_tokens.weight", "model.embedding.weight", "lm_head.weight")
# gpt-oss: checkpoint name -> vLLM's name.
_RENAMED = {"model.embed_tokens": "model.embedding", ".self_attn.": ".attn."}


def check_engine(
    shape: ModelShape, engine: str, quantization: str = "none", adapters: AdapterShape | None = None
) -> None:
    """Refuse a model, a quantization or separate `adapters` that the engine does not support (UserError)."""
    supports = ENGINES[engine].has
    if shape.delta_net is not None and not supports("delta_nets"):
        raise UserError(
            f"rollout.engine = {engine!r} with a {shape.family} model: its cache holds keys and values, no states",
            source="rollout.engine and the model's config.json",
            expected=name_engines("delta_nets"),
            hint=f"set rollout.engine={name_engines('delta_nets')}; on a CPU, one that serves it there",
        )
    if quantization != "none" and (shape.num_experts or shape.delta_net is not None or shape.full_heads is not None):
        raise UserError(
            f"rollout.quantization={quantization} with "
            + ("a mixture of experts" if shape.num_experts else f"a {shape.family} model"),
            source="rollout.quantization",
            expected="a dense model whose layers attend alike: kernels of experts take no codes with a scale per row, "
            "and linear attention and heads of two sizes are not tried",
            hint="set rollout.quantization=none",
        )
    if adapters is not None and adapters.rank > LARGEST_RANK:
        raise UserError(
            f"vLLM serves adapters up to rank {LARGEST_RANK}, these have {adapters.rank}",
            source="actor.lora.rank and hybrid.lora",
            expected=f"at most {LARGEST_RANK}",
            hint="set hybrid.lora=merge",
        )
    if adapters is not None and adapters.has_experts:
        raise UserError(
            "adapters of experts, which are not written into vLLM's own buffers",
            source="actor.lora.target_modules and hybrid.lora",
            expected="hybrid.lora=merge, or adapters of attention alone",
            hint="set hybrid.lora=merge",
        )
    if not FAMILIES[shape.family].has_sinks:
        return
    if not supports("sinks"):
        raise UserError(
            f"rollout.engine = {engine!r} with a {shape.family} model, whose heads have sinks and whose "
            "experts are packed in files",
            source="rollout.engine and the model's config.json",
            expected=f"{name_engines('sinks')} for this family",
            hint=f"set rollout.engine={name_engines('sinks')}",
        )
    from megatron_rl.weights.rope import YarnScaling

    is_published = shape.sliding_layers == tuple(range(0, shape.num_layers, 2)) and shape.rms_norm_eps == 1e-5
    if not supports("any_sinks") and not (is_published and isinstance(shape.rope_scaling, YarnScaling)):
        raise UserError(
            f"rollout.engine = {engine!r} with a {shape.family} model of windows in the layers {shape.sliding_layers}, "
            f"an epsilon of {shape.rms_norm_eps} and {shape.rope_scaling}",
            source="rollout.engine and the model's config.json",
            expected="windows in every other layer from the first on, an epsilon of 1e-5, and yarn, as published",
            hint=f"set rollout.engine={name_engines('any_sinks')}",
        )


def huggingface_placements(shape: ModelShape) -> list[ShardBox]:
    """Return the identity placement: whole HF tensors under their own names."""
    return [ShardBox(name, full_box(size), name, full_box(size)) for name, size in shape.logical_tensors().items()]


def vllm_placements(shape: ModelShape, *, tp_size: int, place: int, ep_size: int = 1) -> PlacementTable:
    """Return the placements of one rank of a vLLM engine (unquantized; experts as matrices).

    Args:
        place: index of the rank in its engine of `max(tp_size, ep_size)` ranks; its remainder by `tp_size` is the TP
            rank.
        ep_size: 1, or all ranks of the engine; divides the number of experts.

    Raises:
        UserError: `tp_size` does not divide the padded vocabulary.
    """
    assert not shape.has_score_head, "engines generate: they need a language-model head"
    padded = -(-shape.vocab_size // VLLM_VOCAB_MULTIPLE) * VLLM_VOCAB_MULTIPLE
    if padded % tp_size:
        raise UserError(
            f"the engine's vocabulary of {padded} rows does not split over {tp_size} ranks",
            source="rollout.tensor_model_parallel_size",
            expected=f"a divisor of {padded}",
            hint="use 1, 2, 4 or 8",
        )
    tp_rank, is_split = place % tp_size, ep_size > 1
    boxes = split_boxes(shape, Share(tp_size, tp_rank), padded // tp_size, Share(1, 0) if is_split else None)
    names, packed = FAMILIES[shape.family].experts, is_packed(shape)
    if ep_size > tp_size and names is not None and names.is_shared_whole:
        whole = split_boxes(shape, Share(1, 0), padded)
        boxes = boxes | {kind: pair for kind, pair in whole.items() if kind.startswith(SHARED)}
    if packed:  # ups are parameters of their own
        boxes = boxes | {up: (boxes[gate][0], boxes[up][1]) for gate, up in (("gate", "up"), ("gate.bias", "up.bias"))}
    experts = Share(ep_size, place) if is_split else Share(1, 0)
    return PlacementTable(_list_rows(shape, experts, tp_rank == 0 or is_split or not packed), boxes)


@lru_cache(maxsize=256)  # at most one per rank of an engine
def _list_rows(shape: ModelShape, experts: Share, is_first: bool) -> TableRows:
    packed, mine = is_packed(shape), range(*experts.cut(shape.num_experts))
    return TableRows(
        (_find_param(name, kind, packed, mine.start), name, _ALONE.get(boxes, boxes))
        for name, kind in shape.tensor_kinds().items()
        if (expert := _find_expert(name)) is None or expert in mine
        for boxes in _list_boxes(shape, kind)
        if is_first or kind != "down.bias"
    )


def _list_boxes(shape: ModelShape, kind: str) -> list[str]:
    found = [boxes for _, boxes in list_parts(kind)]
    is_shared = shape.full_heads is not None and shape.full_heads.shares_values and kind == f"{FULL}k.weight"
    return [*found, f"{FULL}v.weight"] if is_shared else found


_ALONE = {kind: f"{kind}.alone" for kind in ("delta_ba", "delta_b", "delta_a")}  # boxes if not fused with qkvz
_FUSED = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj"),
    **dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj"),
    **dict.fromkeys(("in_proj_qkv", "in_proj_z"), "in_proj_qkvz"),
    **dict.fromkeys(("in_proj_b", "in_proj_a"), "in_proj_ba"),
}


def _find_expert(hf_name: str) -> int | None:
    _, _, of_expert = hf_name.partition(".experts.")
    return int(of_expert.partition(".")[0]) if of_expert else None


def _find_param(hf_name: str, kind: str, is_packed: bool, first_expert: int) -> str:
    block, _, of_expert = hf_name.partition(".experts.")
    if of_expert:
        expert, matrix, what = of_expert.split(".")
        is_down = kind in ("down", "down.bias")
        fused = f"{block}.experts.routed_experts.{'w2' if is_down else 'w13'}_{what}.{int(expert) - first_expert}"
        return f"{fused}.{matrix}" if is_packed and not is_down else fused
    for ours, theirs in _RENAMED.items() if is_packed else ():
        hf_name = hf_name.replace(ours, theirs)
    if kind == "q_up":  # nothing is fused with it
        return hf_name
    *block, name, what = hf_name.split(".")
    return ".".join([*block, _FUSED.get(name, name), what])
