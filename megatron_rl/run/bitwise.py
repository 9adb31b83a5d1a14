# SPDX-License-Identifier: Apache-2.0
"""Check that engine and trainer can compute the same bits here (rollout.bitwise)."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from megatron_rl.extension.registry import find_engine, name_engines
from megatron_rl.parallel.batch_invariant import find_variance
from megatron_rl.types import UserError
from megatron_rl.weights.families import ModelShape
from megatron_rl.weights.megatron_layout import padded_vocab_size

_MAX_TRIAL_COLUMNS = 8192  # wider products use the same kernel


def check_bitwise(shape: ModelShape, tp_size: int, engine: str) -> None:
    """Refuse a machine or a model on which engine and trainer differ (UserError)."""
    if torch.cuda.is_available():
        raise UserError(
            "rollout.bitwise on a GPU: the kernels of vLLM and of the trainer add up in different orders there",
            source="rollout.bitwise",
            expected="false on GPUs",
            hint="algorithm.importance_sampling corrects for the gap, and mismatch/max shows it",
        )
    if shape.num_experts and not find_engine(engine).has("is_actor"):
        raise UserError(
            f"rollout.bitwise with a mixture of {shape.num_experts} experts: rollout.engine = {engine!r} has another "
            "order of products and sums in its experts",
            source="rollout.bitwise",
            expected=f"rollout.engine={name_engines('is_actor')}, which is the policy itself",
            hint=f"set rollout.engine={name_engines('is_actor')}, or rollout.bitwise=false",
        )
    if shape.sliding_layers:
        raise UserError(
            f"rollout.bitwise with a {shape.family} model, whose windows slide",
            source="rollout.bitwise",
            expected="a model whose layers see the whole sequence",
            hint="set rollout.bitwise=false",
        )
    if shape.delta_net is not None:
        raise UserError(
            f"rollout.bitwise with a {shape.family} model, whose recurrence runs in chunks while it trains",
            source="rollout.bitwise",
            expected="a model whose layers attend",
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
