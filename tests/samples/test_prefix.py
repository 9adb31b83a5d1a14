# SPDX-License-Identifier: Apache-2.0
"""Shared prefixes of sequences, and the keys of segments after them, by hand and against brute force."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.samples.batch import build_segment_keys
from megatron_rl.samples.branches import arrange_branches
from megatron_rl.samples.microbatches import SharedPrefixes, share_prompts
from megatron_rl.types import Branch

CPU = torch.device("cpu")


def make_branch(tokens: list[int], num_prompt_tokens: int = 0, routes: list[int] | None = None) -> Branch:
    branch = Branch.of_response(np.array(tokens, np.int32), num_prompt_tokens)
    if routes is None:
        return branch
    array = np.array(routes, np.uint8).reshape(-1, 1, 1)
    return Branch(branch.tokens, branch.sampled, branch.logprobs, branch.versions, num_prompt_tokens, routes=array)


def count_common(first: list[int], second: list[int]) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )


def test_keys_are_the_prefix_and_then_the_segments_own() -> None:
    """Rows 0-3 with a prompt of two, rows 4-5 behind it, row 6 alone, rows 7-8 behind rows 0, 4 and 5."""
    paths = [np.arange(4), np.array([0, 1, 4, 5]), np.array([6]), np.array([0, 4, 5, 7, 8])]
    keys = build_segment_keys(paths, [4, 2, 1, 2], CPU)
    assert keys.index.tolist() == [0, 1, 2, 3, 0, 1, 4, 5, 6, 0, 4, 5, 7, 8]
    assert keys.cu_seqlens.tolist() == [0, 4, 8, 9, 14] and keys.max_seqlen == 5
    assert keys.index.dtype == torch.int64 and keys.cu_seqlens.dtype == torch.int32


def test_without_prefixes_there_are_no_keys() -> None:
    assert build_segment_keys([np.arange(4), np.array([4, 5])], [4, 2], CPU) is None


def test_prompts_by_hand() -> None:
    """Groups 5, 5, 6, 5: members of a group are neighbors, and a part without the second still shares the prompt."""
    shared = share_prompts([5, 5, 6, 5], [3, 3, 2, 3])
    assert shared.places.tolist() == [0, 1, 3, 2] and shared.num_shared.tolist() == [0, 3, 3, 0]
    assert shared.measure([0, 3, 2]).tolist() == [0, 3, 0] and shared.measure([2]).tolist() == [0]
    assert shared.measure([]).tolist() == []
    part = shared.part(1, 4)
    assert part.places.tolist() == [0, 2, 1] and part.num_shared.tolist() == [0, 3, 0]
    assert part.shareable.tolist() == [3, 2, 3]


def test_branches_by_hand() -> None:
    """The third continues the first; the second leaves the prompt 1 2 after its first token, and comes last."""
    branches = [make_branch([1, 2, 3, 4], 2), make_branch([1, 9], 1), make_branch([1, 2, 3, 5], 2)]
    assert arrange_branches(branches) == ([0, 2, 1], [0, 1, 3])
    assert arrange_branches(branches[:1]) == ([0], [0])


def test_tokens_that_went_to_other_experts_are_not_shared() -> None:
    first, second = make_branch([1, 2, 3], routes=[7, 7, 7]), make_branch([1, 2, 4], routes=[7, 5, 7])
    assert arrange_branches([first, second])[1] == [0, 1]
    assert arrange_branches([make_branch([1, 2, 3]), second])[1] == [0, 0], "of one they are not known"


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=7), min_size=1, max_size=8), st.data())
def test_any_two_branches_share_what_they_have_in_common(sequences: list[list[int]], data: st.DataObject) -> None:
    """Neighbors or not, in any selection of them."""
    places, num_shared = arrange_branches([make_branch(tokens) for tokens in sequences])
    order = np.argsort(places)
    shared = SharedPrefixes(np.array(places), np.array(num_shared)[order], np.array([len(s) for s in sequences]))
    members = [i for i in order.tolist() if data.draw(st.booleans())]
    expected = [count_common(sequences[a], sequences[b]) for a, b in zip(members, members[1:], strict=False)]
    assert shared.measure(members).tolist() == [0, *expected][: len(members)]
