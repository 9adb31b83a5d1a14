# SPDX-License-Identifier: Apache-2.0
"""The ladder of shapes by hand, its bound on padding, and packed tensors that have its shapes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.samples.batch import Padding, TrainBatch, build_train_batch, double_until
from megatron_rl.samples.fixed_shapes import Buckets, build_buckets, padding_metrics
from megatron_rl.samples.microbatches import share_prompts
from megatron_rl.types import Branch

CPU = torch.device("cpu")


def test_default_ladder_has_sixteenths_that_are_multiples() -> None:
    assert build_buckets(64, [], 1, 8).sizes == tuple(range(4, 65, 4))
    assert build_buckets(64, [], 8, 8).sizes == tuple(range(8, 65, 8))
    assert build_buckets(10, [], 4, 8).sizes == (4, 8, 12)
    assert build_buckets(100, [128, 30], 4, 8).sizes == (32, 128)


@given(budget=st.integers(16, 10_000), share=st.floats(0.5, 1.0))
def test_at_most_a_ninth_of_a_microbatch_that_is_half_full_is_padding(budget: int, share: float) -> None:
    """But for the rounding of sixteenths to whole tokens."""
    size = max(round(budget * share), -(-budget // 2))
    padded = Padding(1, build_buckets(budget, [], 1, 8)).find_size(size)
    assert size <= padded <= budget and padded - size <= budget / 16 + 1


def test_room_is_doubled() -> None:
    assert [double_until(8, n) for n in (1, 8, 9, 33)] == [8, 8, 16, 64]
    assert [double_until(64, n) for n in (3, 64, 65, 300)] == [64, 64, 128, 512]


def test_padding_metrics_by_hand() -> None:
    found = padding_metrics([(6, 8), (8, 8), (9, 12)])
    assert found == pytest.approx(
        {
            "packing/padding_share": 1 - 23 / 28,
            "packing/padding_share_8": 1 - 14 / 16,
            "packing/padding_share_12": 1 - 9 / 12,
        }
    )


def pack(lengths: list[int], *, group_of: list[int] | None = None, max_seqlen: int | None = None) -> TrainBatch:
    """One microbatch; prompts have two tokens."""
    prompt = [1, 2]
    sequences = [Branch.of_response(np.array([*prompt, *range(3, n + 1)], np.int64), 2) for n in lengths]
    return build_train_batch(
        sequences,
        [1.0] * len(lengths),
        [(range(len(lengths)), [[list(range(len(lengths)))]])],
        dp_rank=0,
        padding=Padding(1, buckets=Buckets((16, 32), 4), max_seqlen=max_seqlen),
        device=CPU,
        shared=None if group_of is None else share_prompts(group_of, [2] * len(lengths)),
    )


def test_bucketed_microbatch_by_hand() -> None:
    """3 + 4 tokens, 9 of padding in segments of at most 5, and room for 8 segments because 4 would leave none empty."""
    (piece,) = pack([3, 4], max_seqlen=5).slices
    assert piece.cu_seqlens.tolist() == [0, 3, 7, 12, 16, 16, 16, 16, 16] and piece.max_seqlen == 5
    assert piece.is_bucketed and piece.keys is None and (piece.start, piece.stop) == (0, 16)


def test_shared_prompts_have_padded_keys() -> None:
    """The second response sees the prompt (rows 0, 1) and itself; the last segment, which has no query, the padding."""
    batch = pack([4, 5], group_of=[0, 0])
    (piece,) = batch.slices
    assert piece.cu_seqlens.tolist() == [0, 4, 7, 16, 16]
    assert piece.keys.index.tolist() == [0, 1, 2, 3, 0, 1, 4, 5, 6, *range(7, 16), *[-1] * 14]
    assert piece.keys.cu_seqlens.tolist() == [0, 4, 9, 18, 32] and piece.keys.max_seqlen == 16
    assert batch.sequence_ids.tolist() == [0] * 4 + [1] * 3 + [-1] * 9 and not batch.loss_mask[7:].any()


@given(lengths=st.lists(st.integers(3, 7), min_size=1, max_size=4), shares=st.booleans())
def test_shapes_are_those_of_the_ladder(lengths: list[int], shares: bool) -> None:
    batch = pack(lengths, group_of=[0] * len(lengths) if shares else None, max_seqlen=8)
    (piece,) = batch.slices
    assert len(batch.tokens) in (16, 32) and len(piece.cu_seqlens) in (5, 9, 17) and piece.max_seqlen == 8
    assert int(piece.cu_seqlens.diff().max()) <= 8 and piece.cu_seqlens[-1] == len(batch.tokens)
    assert piece.cu_seqlens[-1] == piece.cu_seqlens[-2], "there is an empty segment"
    assert int(batch.loss_mask.sum()) == sum(n - 2 for n in lengths)
