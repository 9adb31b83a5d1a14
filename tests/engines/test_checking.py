# SPDX-License-Identifier: Apache-2.0
"""Responses that do not match their requests: every error names engine, ranks, request and numbers.

tests/launch/test_failures.py tests the error on all ranks and on the console.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from megatron_rl.engines.protocol import Request, Sampled, SamplingConfig
from megatron_rl.rollout.generation import check_sampled
from megatron_rl.types import KeptSets, UserError

SOURCE = "rollout engine 2 (VllmEngine, ranks 4-5), prompt_id 9, sample 1"


def check(response: Sampled, **sampling: Any) -> None:
    """Compare a response with a request for four tokens."""
    request = Request(9, np.zeros(3, np.int32), 0, SamplingConfig(1.0, 4, (), **sampling))
    check_sampled(response, request, vocab_size=16, source=SOURCE)


def response(tokens: list[int], logprobs: list[float] | None = None) -> Sampled:
    logprobs = [-0.5] * len(tokens) if logprobs is None else logprobs
    return Sampled(0, np.array(tokens, np.int32), np.array(logprobs, np.float32), "stop")


GOOD = response([1, 2, 15, 0])


def test_good_responses_pass() -> None:
    check(GOOD)
    check(response([0]))


@pytest.mark.parametrize(
    ("bad", "found", "expected"),
    [
        (response([1, 2], [-1.0]), "a response of 2 tokens with 1 log-probs", "one log-prob per sampled token"),
        (response([1] * 5), "a response of 5 tokens", "1 to 4 (data.max_response_length)"),
        (response([]), "a response of 0 tokens", "1 to 4 (data.max_response_length)"),
        (response([3, 16]), "token id 16 in a response", "0 to 15, the vocabulary of model.path"),
        (response([-1]), "token id -1 in a response", "0 to 15, the vocabulary of model.path"),
        (response([3, 4], [-0.1, float("nan")]), "log-prob nan of a sampled token", "finite log-probs"),
        (response([3], [-float("inf")]), "log-prob -inf of a sampled token", "finite log-probs"),
    ],
)
def test_a_fault_is_named(bad: Sampled, found: str, expected: str) -> None:
    with pytest.raises(UserError) as caught:
        check(bad)
    assert caught.value.found == found and caught.value.expected.startswith(expected) and caught.value.hint
    assert caught.value.source == SOURCE


@pytest.mark.parametrize(
    ("ids", "counts", "is_right"),
    [
        ([3, 5, 4], [2, 1], True),
        ([5, 3, 9, 4], [3, 1], True),
        ([3, 5, 5], [2, 1], False),  # the second set is without its token
        ([4, 3], [1, 1], False),
        ([3, 4], [2, 0], False),
        ([3, 4, 7], [1, 1], False),
        ([3], [1], False),
        (None, None, False),
    ],
)
def test_kept_sets_must_have_their_tokens(ids: list[int] | None, counts: list[int] | None, is_right: bool) -> None:
    kept = None if ids is None else KeptSets(np.array(ids, np.int32), np.array(counts, np.int32))
    sampled = replace(response([3, 4]), kept=kept)
    if is_right:
        check(sampled, top_k=3)
    else:
        with pytest.raises(UserError, match="not in the sets"):
            check(sampled, top_k=3)
    check(sampled)


def test_tokens_may_be_drawn_from_the_whole_vocabulary() -> None:
    """With `min_tokens` alone: the first token has a set, the second one needs none, but a set must have its token."""
    ids = np.array([3, 9], np.int32)
    right = replace(response([3, 4]), kept=KeptSets(ids, np.array([2, 0], np.int32)))
    check(right, min_tokens=1)
    wrong = replace(response([4, 4]), kept=KeptSets(ids, np.array([2, 0], np.int32)))
    with pytest.raises(UserError, match="not in the sets"):
        check(wrong, min_tokens=1)
