# SPDX-License-Identifier: Apache-2.0
"""Checks of models against layouts, router replay, `rollout.bitwise`; sizes of caches, router settings for vLLM."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from megatron_rl.extension.registry import ENGINES, name_engines
from megatron_rl.types import UserError
from megatron_rl.weights.families import ModelShape
from megatron_rl.weights.megatron_layout import padded_vocab_size

if TYPE_CHECKING:
    from megatron_rl.parallel.layout import ParallelLayout

_MAX_TRIAL_COLUMNS = 8192  # wider products use the same kernel


def check_training_layout(
    shape: ModelShape, layout: ParallelLayout, *, sequence_parallel: bool = True, section: str = "actor"
) -> None:
    """Refuse a Megatron layout that does not fit the model (UserError)."""
    experts, tp_size, ep_size = shape.num_experts, layout.tp_size, layout.ep_size
    if ep_size > 1 and (experts == 0 or experts % ep_size):
        valid = [n for n in range(1, experts + 1) if experts % n == 0] or [1]
        what = f"does not divide the {experts} experts of the model" if experts else "needs a mixture of experts"
        raise UserError(
            f"expert_model_parallel_size {ep_size} {what}",
            source=f"{section}.expert_model_parallel_size and the model's config.json",
            expected=f"one of {valid}",
            hint="every rank holds as many experts" if experts else f"set {section}.expert_model_parallel_size=1",
        )
    if experts and tp_size > 1 and not sequence_parallel:
        raise UserError(
            f"tensor_model_parallel_size {tp_size} without sequence parallelism does not train experts",
            source=f"{section}.sequence_parallel",
            expected="true for a mixture of experts under tensor parallelism",
            hint=f"set {section}.sequence_parallel=true",
        )
    sizes = [
        ("attention heads", shape.num_heads),
        *(("KV heads", heads) for heads in _list_kv_heads(shape)),
        *((("key heads of linear attention", shape.delta_net.key_heads),) if shape.delta_net else ()),
        *(("feed-forward columns", size) for size in shape.ffn_sizes().values()),
    ]
    for what, size in sizes:
        if size % tp_size:
            raise UserError(
                f"tensor_model_parallel_size {tp_size} does not divide the {size} {what} of the model",
                source=f"{section}.tensor_model_parallel_size and the model's config.json",
                expected="one of "
                f"{[n for n in range(1, shape.full.num_kv_heads + 1) if all(size % n == 0 for _, size in sizes)]}",
                hint="use a smaller TP and more pipeline or data parallelism",
            )
    if layout.chunk_layers or shape.num_layers % (layout.pp_size * layout.vpp_size):
        from megatron_rl.weights.pipeline_stages import check_stages

        check_stages(shape, layout, section)


def check_router_replay(shape: ModelShape, source: str) -> None:
    """Refuse router replay from `source` for a dense model (UserError)."""
    if not shape.num_experts:
        raise UserError(
            f"actor.router_replay = {source!r}, and the model has no routers",
            source="actor.router_replay and the model's config.json",
            expected="off for a dense model",
            hint="leave actor.router_replay out",
        )


def check_rollout_layout(shape: ModelShape, tp_size: int, ep_size: int = 1) -> None:
    """Refuse an engine layout that does not fit the model (UserError); KV heads may be replicated."""
    experts = shape.num_experts
    if ep_size > 1 and (experts == 0 or experts % ep_size):
        what = f"does not divide the {experts} experts of the model" if experts else "needs a mixture of experts"
        raise UserError(
            f"rollout.expert_parallel_size {ep_size} {what}",
            source="rollout.expert_parallel_size and the model's config.json",
            expected=f"1{f', or a divisor of {experts}' if experts else ''}",
            hint="leave rollout.expert_parallel_size out: the ranks of an engine then share each expert",
        )
    if not _fits_engine(shape, tp_size, ep_size):
        valid = [n for n in range(1, shape.num_heads + 1) if _fits_engine(shape, n, ep_size)]
        raise UserError(
            f"rollout.tensor_model_parallel_size {tp_size} does not fit {shape.num_heads} attention heads, "
            f"{' and '.join(map(str, _list_kv_heads(shape)))} KV heads and {shape.ffn_hidden_size} "
            "feed-forward columns",
            source="rollout.tensor_model_parallel_size and the model's config.json",
            expected=f"one of {valid} (divides, or is a multiple of, the KV heads; divides the rest)",
            hint="start with rollout.tensor_model_parallel_size=1",
        )


def _list_kv_heads(shape: ModelShape) -> list[int]:
    """Return the numbers of KV heads of layers, ascending: one, or two."""
    return sorted({shape.num_kv_heads, shape.full.num_kv_heads})


def _fits_engine(shape: ModelShape, tp_size: int, ep_size: int) -> bool:
    net = shape.delta_net
    columns = (size for prefix, size in shape.ffn_sizes().items() if prefix or ep_size == 1)  # no part of an expert
    sizes = (shape.num_heads, *columns, *((net.key_heads,) if net else ()))
    are_heads_whole = all(kv % tp_size == 0 or tp_size % kv == 0 for kv in _list_kv_heads(shape))
    return all(size % tp_size == 0 for size in sizes) and are_heads_whole


def _divides(num_heads: int, num_kv_heads: int, cp_size: int) -> bool:
    return num_heads % cp_size == 0 and (num_kv_heads % cp_size == 0 or cp_size % num_kv_heads == 0)


def check_context_parallel(
    num_heads: int, num_kv_heads: int, tp_size: int, cp_size: int, *, section: str = "actor"
) -> None:
    """Raise UserError if the context parallel size does not fit the model's heads.

    Args:
        num_heads, num_kv_heads: of the whole model, divisible by `tp_size`.
        section: config section, for the error.
    """
    heads, kv_heads = num_heads // tp_size, num_kv_heads // tp_size
    if not _divides(heads, kv_heads, cp_size):
        allowed = [size for size in range(1, heads + 1) if _divides(heads, kv_heads, size)]
        raise UserError(
            f"context_parallel_size {cp_size} cannot divide the {heads} query heads and {kv_heads} KV heads of a "
            f"tensor parallel rank ({num_heads} and {num_kv_heads} of the model over tp = {tp_size})",
            source=f"{section}.context_parallel_size, {section}.tensor_model_parallel_size and the model's config.json",
            expected=f"one of {allowed}: it divides the query heads, and divides the KV heads or is a multiple of them",
            hint=f"set {section}.context_parallel_size to one of these, or change the tensor parallel size",
        )


def check_bitwise(shape: ModelShape, tp_size: int, engine: str) -> None:
    """Refuse, for `rollout.bitwise`, a machine or a model on which engine and trainer differ (UserError)."""
    import torch

    from megatron_rl.parallel.batch_invariant import find_variance

    if torch.cuda.is_available():
        raise UserError(
            "rollout.bitwise on a GPU: the kernels of vLLM and of the trainer add up in different orders there",
            source="rollout.bitwise",
            expected="false on GPUs",
            hint="algorithm.importance_sampling corrects for the gap, and mismatch/max shows it",
        )
    if shape.num_experts and not ENGINES[engine].has("is_actor"):
        raise UserError(
            f"rollout.bitwise with a mixture of {shape.num_experts} experts: rollout.engine = {engine!r} has another "
            "order of products and sums in its experts",
            source="rollout.bitwise",
            expected=f"rollout.engine={name_engines('is_actor')}, which is the policy itself",
            hint=f"set rollout.engine={name_engines('is_actor')}, or rollout.bitwise=false",
        )
    if shape.sliding_layers or shape.delta_net is not None:
        what = "windows slide" if shape.sliding_layers else "recurrence runs in chunks while it trains"
        raise UserError(
            f"rollout.bitwise with a {shape.family} model, whose {what}",
            source="rollout.bitwise",
            expected="a model whose layers attend to the whole sequence",
            hint="set rollout.bitwise=false",
        )
    if variance := find_variance(_list_products(shape, tp_size)):
        raise UserError(
            f"rollout.bitwise needs matrix products whose rows do not depend on each other; here {variance}",
            source="rollout.bitwise",
            expected="a build of torch, a processor and a number of threads for which they do not",
            hint="set OMP_NUM_THREADS=1, or rollout.bitwise=false",
        )


def _list_products(shape: ModelShape, tp_size: int) -> Iterator[tuple[int, ...]]:
    hidden, ffn = shape.hidden_size, shape.ffn_hidden_size // tp_size
    heads = shape.num_heads // tp_size * shape.head_dim
    kv_heads = max(1, shape.num_kv_heads // tp_size) * shape.head_dim
    yield hidden, heads, kv_heads, kv_heads
    yield heads, hidden
    yield hidden, ffn, ffn
    yield ffn, hidden
    columns = padded_vocab_size(shape.vocab_size, tp_size) // tp_size
    padding = -shape.vocab_size % columns  # omitted from the trainer's product, included in vLLM's
    yield hidden, min(columns - padding, _MAX_TRIAL_COLUMNS), *([padding] if padding else [])


def list_cache_sizes(shape: ModelShape, layers: Iterable[int], tp_size: int) -> list[tuple[int, int]]:
    """Return the KV heads of a rank, and their channels, of each of some layers."""
    shapes = map(shape.at, layers)
    return [(max(1, one.num_kv_heads // tp_size), one.head_dim) for one in shapes]


def count_cached(shape: ModelShape, layers: Iterable[int], tp_size: int) -> int:
    """Return the elements of keys and values that a rank caches per token in some layers."""
    return 2 * sum(map(math.prod, list_cache_sizes(shape, layers, tp_size)))


def list_router_options(shape: ModelShape) -> dict[str, Any]:
    """Return settings of config.json that vLLM needs and transformers does not write, by family."""
    found = dict[str, Any](scoring_func="sigmoid")
    if shape.latent is not None:  # vLLM defaults to DeepSeek-V2's
        found |= dict(topk_method="noaux_tc", moe_router_dtype="float32", first_k_dense_replace=shape.dense_layers)
    if shape.family == "minimax_m2":
        found |= dict(use_routing_bias=True, rotary_dim=shape.rotary_dim or shape.head_dim)
    return found
