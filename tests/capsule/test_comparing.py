# SPDX-License-Identifier: Apache-2.0
"""Verdicts on numbers: equal bits, tolerance, NaN, missing values, and the choice of the first difference.

Not covered: parameters of a real model and the numbers of a real step (test_replay.py).
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_rl.capsule.recorder import Fingerprints, Section, Values, encode_sections, fingerprint_pieces
from megatron_rl.checkpoint.pieces import Piece
from tools.replay.comparing import Row, compare_sections, describe_place, find_first, format_report, make_report
from tools.replay.recording import decode_sections

NAN = float("nan")


def no_file(section: str, name: str) -> torch.Tensor:
    raise AssertionError(f"nobody asked for {name}")


def compare(recorded: list[Section], found: list[Section], tolerance: float | None = None) -> list[Row]:
    return compare_sections(recorded, found, tolerance=tolerance, read=no_file)


def section(name: str, *values: Values, is_input: bool = False) -> list[Section]:
    return [Section(name, is_input, list(values))]


def numbers(name: str, *values: float, index: str = "rollout", dtype: type = np.float32) -> Values:
    return Values(name, index, np.array(values, dtype))


@pytest.mark.parametrize(
    ("old", "new", "tolerance", "verdict"),
    [
        ((1.0, 2.0), (1.0, 2.0), None, "bitwise"),
        ((1.0, 2.0), (1.0, 2.0000002), None, "DIFFERENT"),
        ((0.0,), (-0.0,), None, "DIFFERENT"),
        ((0.0,), (-0.0,), 1e-5, "within tolerance"),
        ((NAN, 1.0), (NAN, 1.0), None, "bitwise"),
        ((NAN,), (1.0,), 1e-5, "DIFFERENT"),
        ((float("inf"),), (float("inf"),), 1e-5, "bitwise"),
        ((1000.0,), (1000.005,), 1e-5, "within tolerance"),  # relative for large numbers,
        ((1e-7,), (2e-7,), 1e-5, "within tolerance"),  # absolute for small ones
        ((1.0,), (1.0001,), 1e-5, "DIFFERENT"),
        ((1.0,), (1.0, 2.0), 1e-5, "DIFFERENT"),
    ],
)
def test_verdict(old: tuple[float, ...], new: tuple[float, ...], tolerance: float | None, verdict: str) -> None:
    (row,) = compare(section("forward", numbers("x", *old)), section("forward", numbers("x", *new)), tolerance)
    assert row.verdict == verdict and (row.num_different > 0) == (verdict == "DIFFERENT")


def test_inputs_have_no_tolerance() -> None:
    old, new = (section("rollouts", numbers("reward", 1.0, x), is_input=True) for x in (2.0, 2.0000002))
    (row,) = compare(old, new, 1e-2)
    assert row.verdict == "DIFFERENT" and row.differences[0].where == "rollout 1"


def test_tokens_are_named_by_rollout() -> None:
    lengths = np.array([2, 0, 3])
    old, new = (
        Values("old_logprobs", "token", np.array([0, 0, 0, x, y], np.float32), lengths) for x, y in ((0, 0), (0.5, 1))
    )
    (row,) = compare(section("forward", old), section("forward", new), 1e-5)
    first = row.differences[0]
    assert (first.where, first.recorded, first.found) == ("rollout 2, token 1", 0.0, 0.5)
    assert row.num_different == 2 and (row.max_abs, row.max_relative) == (1.0, 1.0)


def test_the_first_optimizer_step_that_differs_comes_first() -> None:
    """The loss differs in the second step, the norm in the first already: the norm is the first difference."""

    def updates(second_loss: float, first_norm: float) -> list[Section]:
        return section(
            "actor updates",
            numbers("policy/loss", 1.0, second_loss, index="update"),
            numbers("policy/grad_norm", first_norm, 3.0, index="update"),
        )

    rows = compare(updates(2.0, 5.0), updates(2.5, 5.5))
    first = find_first(rows)
    assert (first.what, first.where) == ("actor updates: policy/grad_norm", "update 1")
    assert {row.what for row in rows} == {"actor updates: policy/loss", "actor updates: policy/grad_norm"}


def test_what_is_missing_is_different() -> None:
    old = [*section("forward", numbers("values", 1.0)), *section("estimate", numbers("returns", 1.0))]
    rows = compare(old, section("forward", numbers("x", 1.0)))
    assert [row.verdict for row in rows] == ["MISSING", "MISSING"]
    assert make_report(rows, {})["verdict"] == "different"
    assert "first difference: forward: values; the replay has no such thing" in format_report(rows, "title")


def parameters(**tensors: torch.Tensor) -> Fingerprints:
    return fingerprint_pieces(
        {name: tuple(tensor.shape) for name, tensor in tensors.items()},
        (Piece(name, tuple(tensor.shape), (0,) * tensor.ndim, tensor) for name, tensor in tensors.items()),
        None,
    )


def test_parameters_after_the_step() -> None:
    """One tensor off by rounding, another by more: the sample gives the gap."""
    a, b = torch.linspace(-1, 1, 600).reshape(20, 30), torch.ones(7)
    old = [Section("actor weights after", False, parameters(a=a, b=b))]
    new = [Section("actor weights after", False, parameters(a=a + 1e-7, b=b))]
    assert compare(old, new, 1e-5)[0].verdict == "within tolerance"
    (row,) = compare(old, new)
    assert row.verdict == "DIFFERENT" and row.differences[0].what == "actor weights after: a"
    new = [Section("actor weights after", False, parameters(a=a + 1e-7, b=b + 0.5))]
    (row,) = compare(old, new, 1e-5)
    (difference,) = row.differences
    assert difference.what == "actor weights after: b" and (difference.recorded, difference.found) == (1.0, 1.5)
    assert row.count == 2 and row.num_different == 1 and row.max_abs == 0.5


def test_sections_come_back_from_the_disk() -> None:
    from safetensors.numpy import load

    sections = [
        Section("actor weights before", True, parameters(a=torch.randn(3, 4))),
        Section("actor optimizer before", True, parameters()),
        *section(
            "forward",
            Values("tokens", "token", np.arange(5, dtype=np.int32), np.array([2, 3])),
            numbers("x", NAN, 1.0, dtype=np.float64),
        ),
    ]
    entries, content = encode_sections(sections)
    again = decode_sections(entries, load(content))
    assert {row.verdict for row in compare(sections, again)} == {"bitwise"}
    assert [s.name for s in again] == [s.name for s in sections] and describe_place(again[2].content[0], 4) == (
        "rollout 1, token 2"
    )
