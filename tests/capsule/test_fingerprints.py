# SPDX-License-Identifier: Apache-2.0
"""Fingerprints of a parameter do not depend on its sharding, and locate one changed element.

Not covered: roles on ranks (test_replay.py compares fingerprints of several layouts).
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.capsule.recorder import (
    Fingerprints,
    fingerprint_pieces,
    sample_places,
)
from megatron_rl.checkpoint.pieces import Piece
from tools.replay.comparing import locate_change, value_before

SHAPES = st.one_of(st.tuples(st.integers(1, 200)), st.tuples(st.integers(1, 40), st.integers(1, 40)))
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])


def fingerprint(tensor: torch.Tensor, cuts: tuple[int, ...] = ()) -> Fingerprints:
    """Compute the fingerprints of a tensor that is cut by rows into pieces."""
    bounds = [0, *cuts, len(tensor)]
    shape = tuple(tensor.shape)
    return fingerprint_pieces(
        {"x": shape},
        (
            Piece("x", shape, (start,) + (0,) * (tensor.ndim - 1), tensor[start:stop])
            for start, stop in zip(bounds, bounds[1:], strict=False)
        ),
        None,
    )


@given(shape=SHAPES, dtype=DTYPES, seed=st.integers(0, 1 << 30), data=st.data())
def test_one_changed_element_is_found_with_the_value_it_had(
    shape: tuple[int, ...], dtype: torch.dtype, seed: int, data: st.DataObject
) -> None:
    before = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    place = data.draw(st.integers(0, before.numel() - 1))
    value = torch.tensor(data.draw(st.floats(-1e6, 1e6, width=32))).to(dtype)
    after = before.clone()
    after.view(-1)[place] = value
    change = locate_change(fingerprint(before).bits[0], fingerprint(after).bits[0], shape)
    if value.view(-1).view(torch.uint8).equal(before.view(-1)[place : place + 1].view(torch.uint8)):
        assert change is None
    else:
        assert change is not None and change[0] == place
        assert value_before(after.view(-1)[place], change[1]) == before.view(-1)[place].item()


def test_the_largest_tensors_are_within_reach() -> None:
    """Sums wrap around, also for a flipped sign (2^31); more than 2^32 elements would leave that one ambiguous."""
    shape, wrap = (256_000, 16_384), 1 << 64
    for growth in (-(1 << 31), 12_345, -7):
        for place in (0, 123_456_789, 256_000 * 16_384 - 1):
            sums = [(growth * (2 * place + 1) + wrap // 2) % wrap - wrap // 2, growth]
            assert locate_change([0, 0], sums, shape) == (place, growth)
    assert locate_change([0, 0], [-(1 << 31), -(1 << 31)], (256_000, 18_432)) is None


def test_many_changes_are_not_taken_for_one() -> None:
    before = torch.arange(5000.0).reshape(50, 100)
    prints = fingerprint(before).bits[0], fingerprint(before + 1).bits[0]
    assert locate_change(*prints, (50, 100)) is None


@given(shape=SHAPES, dtype=DTYPES, data=st.data())
def test_cuts_do_not_matter(shape: tuple[int, ...], dtype: torch.dtype, data: st.DataObject) -> None:
    tensor = torch.randn(shape).to(dtype)
    cut = data.draw(st.integers(0, shape[0]))
    whole, cut_up = fingerprint(tensor), fingerprint(tensor, (cut,))
    assert np.array_equal(whole.bits, cut_up.bits) and np.array_equal(whole.samples, cut_up.samples)
    np.testing.assert_allclose(whole.sizes, cut_up.sizes, rtol=1e-12)
    assert whole.sizes[0, 1] == tensor.double().abs().max() and whole.sizes[0, 0] == pytest.approx(
        tensor.double().norm().item(), rel=1e-12
    )
    np.testing.assert_array_equal(whole.samples[0], tensor.double().view(-1)[sample_places("x", shape)])


def test_an_element_that_is_missing_or_counted_twice_is_an_error() -> None:
    tensor = torch.ones(4, 3)
    for rows in ([slice(0, 3)], [slice(0, 4), slice(3, 4)]):
        with pytest.raises(AssertionError, match="each element counts once"):
            fingerprint_pieces({"x": (4, 3)}, [Piece("x", (4, 3), (r.start, 0), tensor[r]) for r in rows], None)
