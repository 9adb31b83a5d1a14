# SPDX-License-Identifier: Apache-2.0
"""Responses that are not what was asked for: each fault is found, and names engine, ranks, request and numbers.

That all ranks raise it, and what the console shows, is tested in tests/launch/test_failures.py.
"""

from __future__ import annotations

import numpy as np
import pytest

from megatron_rl.engines.checking import EngineName, check_generations
from megatron_rl.engines.protocol import Generation
from megatron_rl.types import UserError

REQUESTS = ["prompt_id 4, sample 0", "prompt_id 9, sample 1"]


def generation(tokens: list[int], logprobs: list[float] | None = None) -> Generation:
    logprobs = [-0.5] * len(tokens) if logprobs is None else logprobs
    return Generation(np.array(tokens, np.int32), np.array(logprobs, np.float32), "stop")


GOOD = generation([1, 2, 15, 0])


def check(*generations: Generation) -> None:
    check_generations(generations, REQUESTS[: max(len(generations), 1)], max_tokens=4, vocab_size=16,
                      engine=EngineName(2, range(4, 6), "VllmEngine"))


def test_good_responses_pass() -> None:
    check(GOOD, generation([0]))
    check_generations([], [], max_tokens=4, vocab_size=16, engine=EngineName(0, range(1), "VllmEngine"))


@pytest.mark.parametrize(("bad", "found", "expected"), [
    (generation([1, 2], [-1.0]), "a response of 2 tokens with 1 log-probs", "one log-prob per sampled token"),
    (generation([1] * 5), "a response of 5 tokens", "1 to 4 (data.max_response_length)"),
    (generation([]), "a response of 0 tokens", "1 to 4 (data.max_response_length)"),
    (generation([3, 16]), "token id 16 in a response", "0 to 15, the vocabulary of model.path"),
    (generation([-1]), "token id -1 in a response", "0 to 15, the vocabulary of model.path"),
    (generation([3, 4], [-0.1, float("nan")]), "log-prob nan of a sampled token", "finite log-probs"),
    (generation([3], [-float("inf")]), "log-prob -inf of a sampled token", "finite log-probs")])
def test_a_fault_is_named(bad: Generation, found: str, expected: str) -> None:
    with pytest.raises(UserError) as caught:
        check(GOOD, bad)
    assert caught.value.found == found and caught.value.expected.startswith(expected) and caught.value.hint
    assert caught.value.source == "rollout engine 2 (VllmEngine, ranks 4-5), prompt_id 9, sample 1"


def test_a_missing_response_is_named() -> None:
    with pytest.raises(UserError, match="0 responses to 1 requests"):
        check()
