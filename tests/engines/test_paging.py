# SPDX-License-Identifier: Apache-2.0
"""Continuous batching without a model: a made-up cache must show every segment the tokens of its own response.

tests/training/test_policy_engine.py tests the model on these rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.engines.protocol import Request, Sampled, SamplingConfig
from megatron_rl.engines.wrappers import ContinuousBatch, PagedRows
from megatron_rl.types import UserError

STOP = 7
NUM_BLOCKS, BLOCK_SIZE = 9, 4


def make_request(key: int, length: int, max_tokens: int, temperature: float = 1.0) -> Request:
    tokens = np.arange(length, dtype=np.int32) + 100 * (key + 1)
    return Request(key, tokens, key, SamplingConfig(temperature, max_tokens, (STOP,)))


def make_batch(**changes: Any) -> ContinuousBatch:
    sizes = dict(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, max_num_seqs=3, max_tokens=16)
    return ContinuousBatch(**(sizes | changes))


def run(batch: ContinuousBatch, rng: np.random.Generator, multiple: int = 1) -> tuple[list[Sampled], list[PagedRows]]:
    """Sample random tokens until all is done; the cache holds tokens and positions instead of keys and values."""
    cache = np.full((NUM_BLOCKS * BLOCK_SIZE + multiple, 2), -1)
    finished, steps = [], []
    while batch.has_requests():
        rows = batch.plan(multiple)
        steps.append(rows)
        assert len(rows.tokens) % multiple == 0 and len(np.unique(rows.slots)) == len(rows.slots)
        cache[rows.slots] = np.stack([rows.tokens, rows.positions], 1)
        for index, one in enumerate(rows.running):
            seen = cache[rows.key_slots[rows.key_bounds[index] : rows.key_bounds[index + 1]]]
            whole = [*one.request.tokens.tolist(), *one.tokens]
            assert seen.tolist() == [[token, place] for place, token in enumerate(whole)]
            assert rows.tokens[rows.last[index]] == whole[-1]
        drawn = rng.integers(0, 30, len(rows.running)).tolist()
        finished += batch.record(rows, drawn, [-float(token) for token in drawn])
    return finished, steps


@given(
    sizes=st.lists(st.tuples(st.integers(1, 15), st.integers(1, 18)), min_size=1, max_size=12),
    multiple=st.integers(1, 5),
    seed=st.integers(0, 100),
)
def test_every_response_sees_its_own_tokens(sizes: list[tuple[int, int]], multiple: int, seed: int) -> None:
    """Whatever shares the cache; everything ends, by a stop token or at its limit, and all blocks are free again."""
    batch = make_batch()
    batch.add([make_request(key, *size) for key, size in enumerate(sizes)])
    finished, steps = run(batch, np.random.default_rng(seed), multiple)
    assert sorted(sampled.key for sampled in finished) == list(range(len(sizes)))
    for sampled in finished:
        tokens = sampled.tokens.tolist()
        assert STOP not in tokens[:-1] and len(tokens) == len(sampled.logprobs) <= sizes[sampled.key][1]
        assert sampled.finish_reason == ("stop" if tokens[-1] == STOP else "length")
        assert sampled.finish_reason == "stop" or len(tokens) == sizes[sampled.key][1]
        assert (sampled.logprobs == -sampled.tokens).all()
    assert all(len(rows.running) <= 3 for rows in steps)
    batch.add([make_request(0, 18, 19)])  # the whole cache
    assert len(batch.plan(1).tokens) == 18


def test_requests_wait_for_blocks_and_rows() -> None:
    """In the order in which they came: a small one does not pass a large one."""
    batch = make_batch(max_num_seqs=8)
    batch.add([make_request(0, 10, 11), make_request(1, 10, 10), make_request(2, 2, 2)])  # 5, 5 and 1 blocks
    assert [one.request.key for one in batch.plan(1).running] == [0]
    batch.interrupt([1])
    assert [one.request.key for one in batch.plan(1).running] == [0, 2]
    batch = make_batch(num_blocks=100)
    batch.add([make_request(key, length, 1) for key, length in enumerate((12, 5, 40, 1))])
    admitted = []
    while batch.has_requests():
        rows = batch.plan(1)
        admitted.append([one.request.key for one in rows.running])
        batch.record(rows, [0] * len(rows.running), [0.0] * len(rows.running))
    assert admitted == [[0], [1], [2], [3]], "16 rows at most, but a longer prompt goes alone"


def test_one_temperature_at_a_time() -> None:
    batch = make_batch()
    batch.add([make_request(key, 2, 2, temperature) for key, temperature in enumerate((1.0, 1.0, 0.0, 1.0))])
    _, steps = run(batch, np.random.default_rng(0))
    for rows in steps:
        assert len({one.request.sampling.temperature for one in rows.running}) == 1


def test_interrupted_responses_give_what_they_have() -> None:
    """And their blocks; one that still waits has nothing, and an unknown key is passed over."""
    batch = make_batch(max_num_seqs=2)
    batch.add([make_request(key, 3, 9) for key in range(3)])
    for token in (1, 2):
        rows = batch.plan(1)
        assert batch.record(rows, [token, token + 10], [-1.0, -2.0]) == []
    assert batch.tokens_in_flight() == 4
    found = {sampled.key: sampled for sampled in batch.interrupt([2, 1, 55])}
    assert {key: sampled.tokens.tolist() for key, sampled in found.items()} == {1: [11, 12], 2: []}
    assert {sampled.finish_reason for sampled in found.values()} == {"interrupted"}
    assert found[1].logprobs.tolist() == [-2.0, -2.0] and found[2].logprobs.dtype == np.float32
    assert [one.request.key for one in batch.plan(1).running] == [0] and batch.tokens_in_flight() == 2


def test_a_request_that_never_fits_is_refused() -> None:
    batch = make_batch()
    with pytest.raises(UserError, match=r"30 tokens that may get 8 more(.|\n)*at most 36 tokens"):
        batch.add([make_request(0, 1, 1), make_request(1, 30, 8)])
    assert not batch.has_requests()
