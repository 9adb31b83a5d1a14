# SPDX-License-Identifier: Apache-2.0
"""The order of the prompts: epochs, mixtures of files, random access, batches, resume. Not covered: reading files."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.config.sections import reduce_weights
from megatron_rl.data.chosen_order import Turns
from megatron_rl.data.prompts import PromptBatches
from megatron_rl.types import Prompt, UserError


def make_prompts(count: int) -> list[Prompt]:
    return [Prompt(i, np.zeros(1, np.int32), "", "") for i in range(count)]


def make_batches(size: int, batch: int, shuffle: bool = True, seed: int = 3) -> PromptBatches:
    return PromptBatches(make_prompts(size), batch, shuffle, seed)


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
    """The prompt at a position does not depend on earlier reads."""
    in_order = sum(take(make_batches(7, 1, seed=seed), 61), [])
    stream = make_batches(7, 1, seed=seed)
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


@given(shares=st.lists(st.integers(1, 30), min_size=1, max_size=6))
def test_files_have_their_share_of_every_beginning(shares):
    """Counts after n turns are within one of n times the share, and a turn's number is the count before it."""
    turns, total = Turns(shares), sum(shares)
    counts = [0] * len(shares)
    for position in range(2 * total + 1):
        party, before = turns.at(position)
        assert before == counts[party]
        counts[party] += 1
        assert all(
            abs(count * total - (position + 1) * share) < total for count, share in zip(counts, shares, strict=True)
        )


def mix(
    sizes: list[int], weights: list[float] | None, seed: int = 5, shuffle: bool = True, batch: int = 1
) -> PromptBatches:
    return PromptBatches(make_prompts(sum(sizes)), batch, shuffle, seed, weights=weights, file_sizes=sizes)


def test_a_mixture_has_epochs_of_each_file():
    """Two files of 4 and 10 prompts, 3 to 1: the small one three times while the other is seen once, each in full."""
    stream = mix([4, 10], [0.75, 0.25])
    ids = [stream.prompt(i).prompt_id for i in range(40)]
    small, large = [i for i in ids if i < 4], [i for i in ids if i >= 4]
    assert (len(small), len(large)) == (30, 10) and sorted(large) == list(range(4, 14))
    epochs = [small[start : start + 4] for start in range(0, 28, 4)]
    assert all(sorted(epoch) == [0, 1, 2, 3] for epoch in epochs) and len(set(map(tuple, epochs))) > 1
    expected = np.random.default_rng([5, 1, 0]).permutation(10) + 4
    assert large == expected.tolist()
    assert ids != [mix([4, 10], [3, 1], seed=6).prompt(i).prompt_id for i in range(40)]
    assert ids == [mix([4, 10], [3, 1]).prompt(i).prompt_id for i in range(40)]  # any scale
    in_order = mix([2, 2], [1, 1], shuffle=False)
    assert sorted(in_order.prompt(i).prompt_id for i in range(4)) == [0, 1, 2, 3]


def test_without_weights_files_are_one_set():
    ids = [mix([4, 10], None).prompt(i).prompt_id for i in range(28)]
    assert ids == take(make_batches(14, 14, seed=5), 2)[0] + take(make_batches(14, 14, seed=5), 2)[1]


def test_a_mixture_resumes_at_its_position():
    first = mix([4, 10], [1, 1], batch=3)
    whole = take(mix([4, 10], [1, 1], batch=3), 12)
    take(first, 7)
    resumed = mix([4, 10], [1, 1], batch=3)
    resumed.load_state_dict(first.state_dict())
    assert take(resumed, 5) == whole[7:]


def test_weights_are_proportions():
    assert reduce_weights([0.7, 0.2, 0.1]) == [7, 2, 1]
    assert reduce_weights([50.0, 100.0]) == [1, 2] and reduce_weights([1e-05, 1.0]) == [1, 100_000]
