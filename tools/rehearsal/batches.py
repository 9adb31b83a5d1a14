# SPDX-License-Identifier: Apache-2.0
"""Batches of a rehearsal: full micro-batches, enough to reach a pipeline's peak."""

from __future__ import annotations

import numpy as np

from megatron_rl.algorithms.losses import aggregate
from megatron_rl.config.run_spec import RoleSpec
from megatron_rl.planning.cluster import Job
from megatron_rl.planning.memory import count_microbatches
from megatron_rl.samples.batch import Padding, TrainBatch, build_train_batch
from megatron_rl.samples.microbatches import share_prompts
from megatron_rl.training.packed_model import PackedModel
from megatron_rl.types import Branch


def pack_full(job: Job, spec: RoleSpec, model: PackedModel) -> TrainBatch:
    """Build this rank's micro-batches, of one prompt each."""
    lengths, prompt, is_shared = find_lengths(job, spec)
    layout, count = job.layout_of(spec), count_rehearsed(job, spec)
    rng, sequences = np.random.default_rng(0), []
    for _ in range(count):
        start = rng.integers(0, 1000, prompt)
        for length in lengths:
            sequences.append(Branch.of_response(np.concatenate([start, rng.integers(0, 1000, length)]), prompt))
    plan = [[[*range(i * len(lengths), (i + 1) * len(lengths))] for i in range(count)]] * layout.dp_size
    return build_train_batch(
        sequences,
        aggregate("token-mean", [*lengths] * count, max(lengths)).weights,
        [(range(len(sequences)), plan)],
        dp_rank=model.groups.at.dp,
        padding=Padding(model.pad_multiple, model.buckets, prompt + max(lengths)),
        device=model.device,
        shared=share_prompts(np.arange(len(sequences)) // len(lengths), [prompt] * len(sequences))
        if is_shared
        else None,
    )


def find_share_in_loss(job: Job, spec: RoleSpec) -> float:
    """Return the share of response tokens in a full microbatch."""
    lengths, prompt, is_shared = find_lengths(job, spec)
    return sum(lengths) / (sum(lengths) + prompt * (1 if is_shared else len(lengths)))


def find_lengths(job: Job, spec: RoleSpec) -> tuple[list[int], int, bool]:
    """Return response lengths, prompt length, and whether the prompt is shared."""
    data, budget = job.config.data, spec.settings.max_tokens_per_microbatch
    is_shared, prompt = bool(spec.settings.share_prompts), data.max_prompt_length
    longest = prompt + data.max_response_length
    if is_shared:
        count = max(1, -(-(budget - prompt) // data.max_response_length))
        room = budget - prompt
    else:
        count = max(1, -(-budget // longest))
        room = budget - prompt * count
    room = max(room, count)
    return [room // count + (i < room % count) for i in range(count)], prompt, is_shared


def count_rehearsed(job: Job, spec: RoleSpec) -> int:
    """Return the number of micro-batches to rehearse: enough to reach a pipeline's peak, and one more."""
    layout = job.layout_of(spec)
    number = count_microbatches(job, layout, spec.settings)
    return min(number, max(2, layout.pp_size + 1) if layout.vpp_size == 1 else 2 * layout.pp_size * layout.vpp_size)
