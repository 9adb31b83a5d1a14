# SPDX-License-Identifier: Apache-2.0
"""Where the rollout engines keep every logical tensor.

vLLM, per TP rank: `qkv_proj = [q; k; v]` with the KV heads replicated when tp > KV heads,
`gate_up_proj = [gate; up]`, vocabulary rows padded to a multiple of 64, tied embeddings as one parameter; all experts
on every rank, fused per layer as `w13_weight` [E, 2 * ffn/tp, h] = `[gate; up]` and `w2_weight` [E, h, ffn/tp].
With latent attention every projection is a parameter of its own: vLLM computes full heads then (`VLLM_MLA_DISABLE`).
Plain HF (transformers, checkpoints): every logical tensor is a parameter of its own.
"""

from __future__ import annotations

from functools import lru_cache

from megatron_rl.types import UserError
from megatron_rl.weights.families import ModelShape
from megatron_rl.weights.shard_box import ShardBox, full_box
from megatron_rl.weights.tables import PlacementTable, Rows, Share, list_parts, split_boxes

VLLM_VOCAB_MULTIPLE = 64
VLLM_PADDED_PARAMETERS = ("model.embed_tokens.weight", "lm_head.weight")


def huggingface_placements(shape: ModelShape) -> list[ShardBox]:
    """The identity: one rank that holds whole HF tensors under their own names."""
    return [ShardBox(name, full_box(size), name, full_box(size)) for name, size in shape.logical_tensors().items()]


def vllm_placements(shape: ModelShape, *, tp_size: int, tp_rank: int) -> PlacementTable:
    """Placements of all parameters of one vLLM TP rank (unquantized; fused experts seen as matrices).

    Raises:
        UserError: vLLM cannot split the padded vocabulary over `tp_size` ranks.
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
    return PlacementTable(_list_rows(shape), split_boxes(shape, Share(tp_size, tp_rank), padded // tp_size))


@lru_cache(maxsize=1)
def _list_rows(shape: ModelShape) -> Rows:
    """What every rank of an engine holds a part of."""
    return Rows(
        (_find_param(name, kind), name, boxes)
        for name, kind in shape.tensor_kinds().items()
        for _, boxes in list_parts(kind)
    )


_FUSED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}


def _find_param(hf_name: str, kind: str) -> str:
    """The parameter that a logical tensor is a part of; an expert's as `split_experts` names it."""
    block, _, of_expert = hf_name.partition(".experts.")
    if of_expert:
        fused = "w2_weight" if kind == "down" else "w13_weight"
        return f"{block}.experts.routed_experts.{fused}.{of_expert.partition('.')[0]}"
    if kind == "q_up":  # nothing is fused with it
        return hf_name
    *block, name, what = hf_name.split(".")
    return ".".join([*block, _FUSED.get(name, name), what])
