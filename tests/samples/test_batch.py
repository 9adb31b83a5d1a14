# SPDX-License-Identifier: Apache-2.0
"""Packed tensors: values on a batch done by hand, slices that are aligned views, padding that enters nothing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.samples.batch import Padding, TrainBatch, build_train_batch, expand_to_tokens
from megatron_rl.samples.microbatches import plan_microbatches, share_prompts
from megatron_rl.types import Branch

CPU = torch.device("cpu")


def make_sequence(tokens: list[int], num_prompt_tokens: int) -> Branch:
    """Rollout logprobs are minus the token, so that alignment shows in the values."""
    logprobs = -np.asarray(tokens[num_prompt_tokens:], np.float32)
    return Branch.of_response(np.asarray(tokens, np.int32), num_prompt_tokens, logprobs)


SEQUENCES = [make_sequence([10, 11, 12], 1), make_sequence([20, 21, 22, 23], 2), make_sequence([30, 31], 1)]


@pytest.fixture
def batch() -> TrainBatch:
    """Two minibatches on one rank: {0, 1} in one microbatch and an empty one, {2} in one; multiples of 4."""
    plans = [((0, 1), [[[0, 1], []]]), ((2,), [[[0]]])]
    return build_train_batch(SEQUENCES, [0.5, 0.25, 0.125], plans, dp_rank=0, padding=Padding(4), device=CPU)


def test_flat_tensors_by_hand(batch: TrainBatch) -> None:
    """Microbatch 1 holds 3 + 4 tokens and 1 of padding, microbatch 2 is 4 of padding, microbatch 3 is 2 + 2."""
    assert batch.tokens.tolist() == [10, 11, 12, 20, 21, 22, 23, 0, 0, 0, 0, 0, 30, 31, 0, 0]
    assert batch.position_ids.tolist() == [0, 1, 2, 0, 1, 2, 3, 0, 0, 1, 2, 3, 0, 1, 0, 1]
    assert batch.predecessors.tolist() == [0, 0, 1, 3, 3, 4, 5, 7, 0, 0, 1, 2, 0, 0, 2, 2]
    assert batch.loss_mask.int().tolist() == [0, 1, 1, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 1, 0, 0]
    assert batch.sequence_ids.tolist() == [0, 0, 0, 1, 1, 1, 1, -1, -1, -1, -1, -1, 2, 2, -1, -1]
    assert batch.loss_weights.tolist() == [0, 0.5, 0.5, 0, 0, 0.25, 0.25, 0, 0, 0, 0, 0, 0, 0.125, 0, 0]
    assert batch.rollout_logprobs.tolist() == [0, -11, -12, 0, 0, -22, -23, 0, 0, 0, 0, 0, 0, -31, 0, 0]
    assert batch.minibatch_sizes == [2, 1]


def test_types(batch: TrainBatch) -> None:
    integers = (batch.tokens, batch.position_ids, batch.predecessors, batch.sequence_ids)
    assert {x.dtype for x in integers} == {torch.int64}
    assert {batch.loss_weights.dtype, batch.rollout_logprobs.dtype} == {torch.float32}
    assert batch.loss_mask.dtype == torch.bool
    assert {piece.cu_seqlens.dtype for piece in batch.slices} == {torch.int32}


def test_slices_by_hand(batch: TrainBatch) -> None:
    """Padding is a sequence of its own: attention over it is finite and nobody else sees it."""
    found = [(s.start, s.stop, s.cu_seqlens.tolist(), s.max_seqlen) for s in batch.slices]
    assert found == [(0, 8, [0, 3, 7, 8], 4), (8, 12, [0, 4], 4), (12, 16, [0, 2, 4], 2)]


def test_no_padding_where_none_is_needed() -> None:
    batch = build_train_batch(
        SEQUENCES, [1, 1, 1], [((0, 1, 2), [[[0, 1, 2]]])], dp_rank=0, padding=Padding(1), device=CPU
    )
    assert batch.slices[0].cu_seqlens.tolist() == [0, 3, 7, 9] and batch.sequence_ids.min() == 0


@pytest.mark.parametrize("pad_multiple", [1, 2, 8])
def test_empty_microbatch_is_one_padding_sequence(pad_multiple: int) -> None:
    batch = build_train_batch(
        SEQUENCES, [1, 1, 1], [((0,), [[[0]], [[]]])], dp_rank=1, padding=Padding(pad_multiple), device=CPU
    )
    assert batch.slices[0].cu_seqlens.tolist() == [0, pad_multiple]
    assert batch.sequence_ids.tolist() == [-1] * pad_multiple
    assert not batch.loss_mask.any() and not batch.loss_weights.any()


def test_first_position_is_masked_without_a_prompt() -> None:
    """Nothing predicts position 0, so a response that starts there loses its first token."""
    sequence = make_sequence([5, 6, 7], 0)
    batch = build_train_batch([sequence], [1.0], [((0,), [[[0]]])], dp_rank=0, padding=Padding(1), device=CPU)
    assert batch.loss_mask.tolist() == [False, True, True] and batch.loss_weights.tolist() == [0, 1, 1]


def test_microbatches_are_aligned_views(batch: TrainBatch) -> None:
    """All token-level tensors are cut alike, and writing into a part is writing into the whole."""
    batch = replace(batch, old_logprobs=torch.arange(16.0))
    for whole, part in zip(batch.slices, batch.microbatches(), strict=True):
        (piece,) = part.slices
        assert (piece.start, piece.stop) == (0, whole.stop - whole.start) and part.minibatch_sizes == [1]
        assert piece.cu_seqlens.tolist() == whole.cu_seqlens.tolist() and piece.cu_seqlens[-1] == len(part.tokens)
        assert part.old_logprobs.tolist() == list(range(whole.start, whole.stop))
        assert torch.equal(part.tokens, batch.tokens[whole.start : whole.stop])
        assert torch.equal(part.loss_weights, batch.loss_weights[whole.start : whole.stop])
        assert part.ref_logprobs is None
        part.old_logprobs.add_(100)
    assert batch.old_logprobs.tolist() == list(range(100, 116))


def test_minibatches_are_aligned_views(batch: TrainBatch) -> None:
    first, second = batch.minibatches()
    assert first.tokens.tolist() == batch.tokens[:12].tolist() and second.tokens.tolist() == [30, 31, 0, 0]
    assert first.minibatch_sizes == [2] and second.minibatch_sizes == [1]
    assert [(s.start, s.stop) for s in first.slices + second.slices] == [(0, 8), (8, 12), (0, 4)]
    assert second.tokens.data_ptr() == batch.tokens[12:].data_ptr()
    assert [m.tokens.tolist() for m in first.microbatches()] == [m.tokens.tolist() for m in batch.microbatches()[:2]]


def test_expand_to_tokens(batch: TrainBatch) -> None:
    found = expand_to_tokens(np.array([1.5, -2.0, 3.0]), batch)
    assert found.dtype == torch.float32
    assert found.tolist() == [1.5] * 3 + [-2.0] * 4 + [0.0] * 5 + [3.0] * 2 + [0.0] * 2
    assert expand_to_tokens([1.5, -2.0, 3.0], list(batch.minibatches())[1]).tolist() == [3.0, 3.0, 0.0, 0.0]


SHARED = [
    make_sequence([1, 2, 3, 40, 41], 3),
    make_sequence([1, 2, 3, 50], 3),
    make_sequence([7, 8, 60], 2),
    make_sequence([1, 2, 3, 70, 71], 3),
]


def test_shared_prompts_by_hand() -> None:
    """Responses 40 41, 50 and 70 71 to prompt 1 2 3; 60 to 7 8; row 4 of 50's prediction is the prompt's last."""
    batch = build_train_batch(
        SHARED,
        [1.0, 2.0, 3.0, 4.0],
        [(range(4), [[[0, 1, 3, 2]]])],
        dp_rank=0,
        padding=Padding(4),
        device=CPU,
        shared=share_prompts([5, 5, 6, 5], [3, 3, 2, 3]),
    )
    assert batch.tokens.tolist() == [1, 2, 3, 40, 41, 50, 70, 71, 7, 8, 60, 0]
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 4, 3, 3, 4, 0, 1, 2, 0]
    assert batch.predecessors.tolist() == [0, 0, 1, 2, 3, 2, 2, 6, 8, 8, 9, 11]
    assert batch.sequence_ids.tolist() == [0, 0, 0, 0, 0, 1, 3, 3, 2, 2, 2, -1]
    assert batch.loss_weights.tolist() == [0, 0, 0, 1, 1, 2, 4, 4, 0, 0, 3, 0]
    assert batch.rollout_logprobs.tolist() == [0, 0, 0, -40, -41, -50, -70, -71, 0, 0, -60, 0]
    (piece,) = batch.slices
    assert piece.cu_seqlens.tolist() == [0, 5, 6, 8, 11, 12] and piece.max_seqlen == 5
    assert piece.keys.cu_seqlens.tolist() == [0, 5, 9, 14, 17, 18] and piece.keys.max_seqlen == 5
    assert piece.keys.index.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 5, 0, 1, 2, 6, 7, 8, 9, 10, 11]


def test_a_prompt_is_shared_within_a_microbatch_only() -> None:
    """Parts of a group in two microbatches have a copy each; only parts with two members have keys."""
    batch = build_train_batch(
        SHARED,
        [1.0] * 4,
        [((0, 1, 3), [[[0], [1, 2]]])],
        dp_rank=0,
        padding=Padding(1),
        device=CPU,
        shared=share_prompts([5, 5, 6, 5], [3, 3, 2, 3]),
    )
    assert batch.tokens.tolist() == [1, 2, 3, 40, 41, 1, 2, 3, 50, 70, 71]
    assert [s.keys is None for s in batch.slices] == [True, False]
    assert batch.slices[1].keys.index.tolist() == [0, 1, 2, 3, 0, 1, 2, 4, 5]


def test_shared_prompts_without_tokens() -> None:
    """An empty prompt brings nothing: each response is a sequence; an empty response is no segment."""
    sequences = [make_sequence([5, 6], 0), make_sequence([7], 0), make_sequence([9], 1), make_sequence([9], 1)]
    batch = build_train_batch(
        sequences,
        [1.0] * 4,
        [(range(4), [[[0, 1, 2, 3]]])],
        dp_rank=0,
        padding=Padding(1),
        device=CPU,
        shared=share_prompts([0, 0, 1, 1], [0, 0, 1, 1]),
    )
    assert batch.tokens.tolist() == [5, 6, 7, 9] and batch.predecessors.tolist() == [0, 0, 2, 3]
    assert batch.slices[0].keys is None and batch.slices[0].cu_seqlens.tolist() == [0, 2, 3, 4]


def test_different_prompts_in_a_group_are_refused() -> None:
    shared = share_prompts([0, 0, 0], [1, 1, 1])
    with pytest.raises(AssertionError, match="sequences have in common what they share"):
        build_train_batch(
            SEQUENCES, [1, 1, 1], [((0, 1), [[[0, 1]]])], dp_rank=0, padding=Padding(1), device=CPU, shared=shared
        )


@given(
    groups=st.lists(
        st.tuples(st.integers(0, 6), st.lists(st.integers(0, 10), min_size=1, max_size=4)), min_size=1, max_size=6
    ),
    dp_size=st.integers(1, 3),
    pad_multiple=st.integers(1, 4),
)
def test_shared_prompts_give_back_what_went_in(
    groups: list[tuple[int, list[int]]], dp_size: int, pad_multiple: int
) -> None:
    """Over all ranks: each response is there once, in order, and its tokens can be read back along its predecessors."""
    rng = np.random.default_rng(0)
    sequences, group_of = [], []
    for group, (prompt, responses) in enumerate(groups):
        shared = rng.integers(1, 99, size=prompt).tolist()
        sequences += [make_sequence(shared + rng.integers(1, 99, size=n).tolist(), prompt) for n in responses]
        group_of += [group] * len(responses)
    shared = share_prompts(group_of, [s.num_prompt_tokens for s in sequences])
    plan = plan_microbatches([len(s.tokens) for s in sequences], dp_size=dp_size, max_tokens=20, shared=shared)
    found: dict[int, list[int]] = {}
    for dp_rank in range(dp_size):
        batch = build_train_batch(
            sequences,
            [1.0] * len(sequences),
            [(range(len(sequences)), plan)],
            dp_rank=dp_rank,
            padding=Padding(pad_multiple),
            device=CPU,
            shared=shared,
        )
        for part in batch.microbatches():
            assert len(part.tokens) % pad_multiple == 0 and part.slices[0].cu_seqlens[-1] == len(part.tokens)
            for index in part.sequence_ids[part.loss_mask].unique().tolist():
                assert index not in found
                found[index] = _read_backwards(part, index)
    expected = {i: s.tokens.tolist() for i, s in enumerate(sequences) if len(s.tokens) > max(s.num_prompt_tokens, 1)}
    assert found == expected


def _read_backwards(part: TrainBatch, index: int) -> list[int]:
    """Tokens of a sequence from its last one along the predecessors; positions count down to 0."""
    rows = ((part.sequence_ids == index) & part.loss_mask).nonzero()[:, 0]
    row, tokens = int(rows[-1]), []
    for position in range(int(part.position_ids[row]), -1, -1):
        assert part.position_ids[row] == position
        tokens.append(int(part.tokens[row]))
        previous, row = row, int(part.predecessors[row])
    assert row == previous, "position 0 names itself"
    return tokens[::-1]


@given(
    lengths=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 10)), min_size=1, max_size=12),
    split=st.integers(0, 12),
    dp_size=st.integers(1, 3),
    pad_multiple=st.integers(1, 4),
    count_multiple=st.integers(1, 2),
)
def test_every_token_counts_once(
    lengths: list[tuple[int, int]], split: int, dp_size: int, pad_multiple: int, count_multiple: int
) -> None:
    """Over all DP ranks and microbatches, every rollout's tokens, weights and logprobs are there exactly once.

    Two minibatches cut at a random place; weights are distinct powers, so that a swap shows. Does not cover how
    weights are computed (tests/algorithms/test_aggregation.py).
    """
    rng = np.random.default_rng(0)
    sequences = [make_sequence(rng.integers(1, 99, size=p + r).tolist(), p) for p, r in lengths]
    weights = [1.0 + i for i in range(len(sequences))]
    cut = min(split, len(sequences))
    plans = []
    for indices in (range(cut), range(cut, len(sequences))):
        sizes = [len(sequences[i].tokens) for i in indices]
        plan = plan_microbatches(sizes, dp_size=dp_size, max_tokens=20, count_multiple=count_multiple)
        plans.append((indices, plan))
    total, seen = 0.0, []
    for dp_rank in range(dp_size):
        batch = build_train_batch(sequences, weights, plans, dp_rank=dp_rank, padding=Padding(pad_multiple), device=CPU)
        for number, minibatch in enumerate(batch.minibatches()):
            for part in minibatch.microbatches():
                assert len(part.tokens) % pad_multiple == 0 and len(part.tokens) >= pad_multiple
                total += float(part.loss_weights.sum())
                seen += [(number, i) for i in _check_microbatch(part, sequences)]
    assert total == sum(w * r for w, (_, r) in zip(weights, lengths, strict=True))
    assert sorted(seen) == [(int(i >= cut), i) for i in range(len(sequences))]


def _check_microbatch(part: TrainBatch, sequences: list[Branch]) -> list[int]:
    """Compare each packed sequence with its source; returns the indices of the rollouts."""
    bounds, found = part.slices[0].cu_seqlens.tolist(), []
    for start, stop in zip(bounds[:-1], bounds[1:], strict=True):
        ids = set(part.sequence_ids[start:stop].tolist())
        assert len(ids) == 1 and part.position_ids[start:stop].tolist() == list(range(stop - start))
        (index,) = ids
        if index == -1:
            assert not part.loss_mask[start:stop].any() and not part.loss_weights[start:stop].any()
            assert not part.rollout_logprobs[start:stop].any() and stop == bounds[-1]
            continue
        source = sequences[index]
        assert part.tokens[start:stop].tolist() == source.tokens.tolist()
        assert part.rollout_logprobs[start:stop].tolist() == source.logprobs.tolist()
        assert part.loss_mask[start:stop].tolist() == [i >= source.num_prompt_tokens for i in range(stop - start)]
        found.append(index)
    return found
