# SPDX-License-Identifier: Apache-2.0
"""The order of the prompts: epochs, random access, batches and resume. Not covered: reading files."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.data.stream import PromptBatches, PromptStream
from megatron_rl.types import Prompt, UserError


def make_prompts(count: int) -> list[Prompt]:
    return [Prompt(i, np.zeros(1, np.int32), "", "") for i in range(count)]


def make_batches(size: int, batch: int, shuffle: bool = True, seed: int = 3) -> PromptBatches:
    return PromptBatches(PromptStream(make_prompts(size), shuffle, seed), batch)


def take(batches: PromptBatches, count: int) -> list[list[int]]:
    return [[p.prompt_id for p in next(batches)] for _ in range(count)]


@given(size=st.integers(1, 12), batch=st.integers(1, 12), seed=st.integers(0, 2**63 - 1), shuffle=st.booleans())
def test_every_epoch_shows_every_prompt_once(size, batch, seed, shuffle):
    if batch > size:
        with pytest.raises(UserError, match="cannot fill a batch"):
            make_batches(size, batch, shuffle, seed)
        return
    drawn = take(make_batches(size, batch, shuffle, seed), 3 * size)
    assert {len(ids) for ids in drawn} == {batch}
    stream = [i for ids in drawn for i in ids]
    epochs = [stream[start : start + size] for start in range(0, len(stream), size)]
    assert all(Counter(epoch) == Counter(range(size)) for epoch in epochs)
    assert shuffle or all(epoch == list(range(size)) for epoch in epochs)


def test_order_depends_on_seed_and_epoch_only():
    """The order is numpy's permutations one after another, whatever the batches; their statistics are not tested."""
    make = lambda seed, batch: take(make_batches(50, batch, seed=seed), 100 // batch)  # noqa: E731
    flat = [sum(make(*arguments), []) for arguments in ((1, 10), (1, 10), (1, 25), (2, 10))]
    expected = [np.random.default_rng([1, epoch]).permutation(50).tolist() for epoch in range(2)]
    assert flat[0] == flat[1] == flat[2] == sum(expected, [])
    assert flat[0] != flat[3] and expected[0] != expected[1]


@given(positions=st.lists(st.integers(0, 60), min_size=1), seed=st.integers(0, 9))
def test_a_position_may_be_asked_for_at_any_time(positions, seed):
    """What comes at a position does not depend on what was asked for before."""
    in_order = sum(take(make_batches(7, 1, seed=seed), 61), [])
    stream = PromptStream(make_prompts(7), True, seed)
    assert [stream.prompt(i).prompt_id for i in positions] == [in_order[i] for i in positions]


@pytest.mark.parametrize("before", [0, 1, 3, 5])
def test_resume_goes_on_where_it_stopped(before):
    whole = take(make_batches(10, 4), 9)
    first = make_batches(10, 4)
    take(first, before)
    resumed = make_batches(10, 4)
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert take(resumed, 9 - before) == whole[before:]
    with pytest.raises(UserError, match="made with 10 prompts, there are 11"):
        make_batches(11, 4).load_state_dict(first.state_dict())


def test_a_state_at_the_end_of_an_epoch_is_that_at_the_start_of_the_next():
    """Checkpoints of both spellings exist."""
    resumed = make_batches(8, 4)
    resumed.load_state_dict({"epoch": 0, "offset": 8, "num_prompts": 8})
    whole = take(make_batches(8, 4), 4)
    assert resumed.state_dict() == {"epoch": 1, "offset": 0, "num_prompts": 8}
    assert take(resumed, 2) == whole[2:]
