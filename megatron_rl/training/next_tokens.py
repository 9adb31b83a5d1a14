# SPDX-License-Identifier: Apache-2.0
"""Sampling of next tokens, scored by the trainer's log-prob formula."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from megatron_rl.engines.sampling import SamplingConfig
from megatron_rl.engines.truncation import add_gumbel_noise, truncate
from megatron_rl.models.heads import gather_for_vocab_shards
from megatron_rl.models.stages import HiddenStatesModel
from megatron_rl.parallel.batch_invariant import MIN_ROWS
from megatron_rl.parallel.chunked_logprobs import scale_logits
from megatron_rl.parallel.collectives import gather_rows
from megatron_rl.parallel.kept_sets import PackedKeptSets
from megatron_rl.parallel.vocab_parallel import compute_summary, find_vocab_shard, gather_summaries, merge_summaries
from megatron_rl.training.packed_model import PackedModel
from megatron_rl.types import KeptSets


def draw_next_tokens(
    model: PackedModel,
    hidden: torch.Tensor,
    last: torch.Tensor,
    sampling: SamplingConfig,
    generators: Sequence[torch.Generator],
    places: Sequence[int],
) -> tuple[torch.Tensor, torch.Tensor, KeptSets | None]:
    """Sample one token per response; collective over TP.

    Args:
        hidden: [t, 1, h] of the last stage, or [t/tp, 1, h] under TP-SP.
        last: [b] int64, rows of `hidden` that predict the tokens.
        sampling: greedy sampling scores at temperature 1.
        generators: [b], equal on all TP ranks.
        places: [b], number of tokens that each response already has.

    Returns:
        Tokens [b] int64, log-probs [b] float32, and kept sets if sampling is truncated; equal on all TP ranks.
    """
    tp_group, stage = model.groups.tp, model.stages[-1]
    assert isinstance(stage, HiddenStatesModel), "a language model"
    weight = stage.output_weight
    shard = find_vocab_shard(model.shape.vocab_size, len(weight), tp_group.rank())
    whole = gather_for_vocab_shards(hidden, sequence_parallel=model.config.sequence_parallel, tp_group=tp_group)
    count, padding = len(last), max(0, MIN_ROWS - len(last))  # batch invariance
    z = scale_logits(whole[F.pad(last, (0, padding))], weight[: shard.width], sampling.temperature or 1.0)  # [b, v/tp]
    scores = z
    if tp_group.size() > 1:
        columns = F.pad(z, (0, len(weight) - shard.width)).t().contiguous()  # [v/tp with padding, b]
        scores = gather_rows(columns[None], tp_group).flatten(0, 1)[: model.shape.vocab_size].t()  # [b, v]
    scores, kept = scores[:count], None
    if sampling.is_truncated:
        scores, kept = truncate(scores, sampling, places)
        z = PackedKeptSets.pack([kept], z.device).pad(padding).mask(z, shard)
    if not sampling.is_greedy:
        scores = add_gumbel_noise(scores, generators)
    tokens = scores.argmax(-1)
    summary = compute_summary(z, F.pad(tokens, (0, padding)), shard)  # overwrites z
    return tokens, merge_summaries(gather_summaries(summary, tp_group))[0][:count], kept
