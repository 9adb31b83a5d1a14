# SPDX-License-Identifier: Apache-2.0
"""Comparison of a replayed step with its capsule, down to the first number that differs (pure).

Inputs must be bitwise equal in any layout, results in the same layout. In another layout, results may differ by
`tolerance * max(1, |recorded|)`, since sums are taken in another order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from megatron_rl.capsule.recorder import Fingerprints, Section, Values, sample_places
from megatron_rl.transfer.executor import view_bits

ReadTensor = Callable[[str, str], torch.Tensor]  # (section, logical tensor) -> value in the state's files
_WRAP = 1 << 64
_BITWISE, _CLOSE, _DIFFERENT, _MISSING = "bitwise", "within tolerance", "DIFFERENT", "MISSING"


@dataclass(frozen=True)
class Difference:
    """The first difference of a quantity or logical tensor, by element, token, or optimizer step.

    Attributes:
        recorded, found: `None` if unavailable.
    """

    what: str
    where: str
    recorded: float | None
    found: float | None
    note: str = ""

    def __str__(self) -> str:
        values = "" if self.found is None else f": {self.recorded!r} recorded, {self.found!r} now"
        return f"{self.what}{' at ' if self.where else ''}{self.where}{values}{'; ' if self.note else ''}{self.note}"


@dataclass(frozen=True)
class Row:
    """One line of the comparison: a quantity, or all parameters of a section.

    Attributes:
        count: numbers compared, or logical tensors.
        verdict: bitwise, within tolerance, DIFFERENT or MISSING.
        max_abs, max_relative: largest stored difference, absolute and relative to max(1, |recorded|).
        num_different: numbers or logical tensors beyond tolerance.
        differences: the first; for parameters, one per tensor.
    """

    what: str
    count: int
    verdict: str
    max_abs: float
    max_relative: float
    num_different: int
    differences: tuple[Difference, ...] = ()


def compare_sections(
    recorded: Sequence[Section], found: Sequence[Section], *, tolerance: float | None, read: ReadTensor
) -> list[Row]:
    """Compare all numbers of a step, in order of computation.

    Args:
        tolerance: bitwise if `None`.
        read: reads a differing parameter from the state.
    """
    by_name, rows = {section.name: section for section in found}, []
    for section in recorded:
        allowed = None if section.is_input else tolerance
        other = by_name.get(section.name)
        if other is None:
            rows.append(_missing(section.name))
        elif isinstance(section.content, Fingerprints):
            assert isinstance(other.content, Fingerprints), "a name is of one kind"
            rows.append(_compare_parameters(section.name, section.content, other.content, allowed, read))
        else:
            assert not isinstance(other.content, Fingerprints), "a name is of one kind"
            rows += _compare_all_values(section.name, section.content, other.content, allowed)
    return rows


def find_first(rows: Sequence[Row]) -> Difference | None:
    """Return the first difference in order of computation."""
    return next((row.differences[0] for row in rows if row.differences), None)


def _missing(what: str) -> Row:
    return Row(what, 0, _MISSING, 0.0, 0.0, 1, (Difference(what, "", None, None, "the replay has no such thing"),))


def _compare_all_values(
    section: str, recorded: Sequence[Values], found: Sequence[Values], tolerance: float | None
) -> list[Row]:
    others = {values.name: values for values in found}
    rows = [
        _compare_values(f"{section}: {values.name}", values, others[values.name], tolerance)
        if values.name in others
        else _missing(f"{section}: {values.name}")
        for values in recorded
    ]
    if recorded and recorded[0].index == "update":  # a step's metrics precede the next step's
        first_step = [_first_step(values, others.get(values.name), tolerance) for values in recorded]
        rows = [rows[place] for place in sorted(range(len(rows)), key=first_step.__getitem__)]
    return rows


def _first_step(values: Values, other: Values | None, tolerance: float | None) -> float:
    """Return the optimizer step in which a metric first differs; infinity if none."""
    if values.index != "update" or other is None or len(other.array) != len(values.array):
        return float("inf")
    different = _is_different(values.array, other.array, tolerance)
    return float(different.argmax()) if different.any() else float("inf")


def _is_different(recorded: np.ndarray, found: np.ndarray, tolerance: float | None) -> np.ndarray:
    both_nan = np.isnan(recorded) & np.isnan(found)
    if tolerance is None:
        bits = recorded.view(f"u{recorded.itemsize}") == found.view(f"u{found.itemsize}")
        return ~(bits | both_nan)
    with np.errstate(invalid="ignore"):
        gap = np.abs(found.astype(np.float64) - recorded)
        return ~((gap <= tolerance * np.maximum(1.0, np.abs(recorded))) | both_nan | (recorded == found))


def _measure(recorded: np.ndarray, found: np.ndarray) -> tuple[float, float]:
    """Return the largest difference, absolute and relative to max(1, |recorded|), ignoring NaN."""
    with np.errstate(invalid="ignore"):
        gap = np.nan_to_num(np.abs(found.astype(np.float64) - recorded), nan=0.0)
        scale = np.nan_to_num(np.maximum(1.0, np.abs(recorded.astype(np.float64))), nan=1.0)
    return float(gap.max(initial=0.0)), float((gap / scale).max(initial=0.0))


def describe_place(values: Values, position: int) -> str:
    """Describe the owner of the element at `position` for a message, such as "rollout 3, token 5"."""
    if values.index == "token":
        assert values.lengths is not None, "tokens have them"
        ends = np.cumsum(values.lengths)
        rollout = int(np.searchsorted(ends, position, side="right"))
        return f"rollout {rollout}, token {position - int(ends[rollout] - values.lengths[rollout])}"
    return "" if values.index == "step" else f"{values.index} {position + (values.index == 'update')}"


def _compare_values(what: str, recorded: Values, found: Values, tolerance: float | None) -> Row:
    if recorded.array.shape != found.array.shape or recorded.array.dtype != found.array.dtype:
        note = f"{len(recorded.array)} numbers were recorded, {len(found.array)} are there now"
        return Row(what, len(recorded.array), _DIFFERENT, 0.0, 0.0, 1, (Difference(what, "", None, None, note),))
    different = _is_different(recorded.array, found.array, tolerance)
    gaps, count = _measure(recorded.array, found.array), int(different.sum())
    if not count:
        is_equal = not _is_different(recorded.array, found.array, None).any()
        return Row(what, len(different), _BITWISE if is_equal else _CLOSE, *gaps, 0)
    place = int(different.argmax())
    first = Difference(
        what,
        describe_place(recorded, place),
        recorded.array[place].item(),
        found.array[place].item(),
        f"{count} of {len(different)} numbers differ",
    )
    return Row(what, len(different), _DIFFERENT, *gaps, count, (first,))


def _compare_parameters(
    section: str, recorded: Fingerprints, found: Fingerprints, tolerance: float | None, read: ReadTensor
) -> Row:
    if recorded.shapes != found.shapes:
        return _missing(section)
    unequal = (recorded.bits != found.bits).any(1)
    different = unequal
    if tolerance is not None:
        old, new = (np.concatenate([prints.sizes, prints.samples], axis=1) for prints in (recorded, found))
        different = unequal & _is_different(old, new, tolerance).any(1)
    gaps = _measure(recorded.samples[unequal], found.samples[unequal])
    names, wrong = list(recorded.shapes), np.flatnonzero(different).tolist()
    verdict = _DIFFERENT if wrong else _CLOSE if unequal.any() else _BITWISE
    return Row(
        section,
        len(names),
        verdict,
        *gaps,
        len(wrong),
        tuple(_describe_parameter(section, names[row], row, recorded, found, read) for row in wrong),
    )


def _describe_parameter(
    section: str, name: str, row: int, recorded: Fingerprints, found: Fingerprints, read: ReadTensor
) -> Difference:
    """Describe the only differing element if it can be read, otherwise the worst sampled element."""
    what, shape = f"{section}: {name}", recorded.shapes[name]
    old, new, places = recorded.samples[row], found.samples[row], sample_places(name, shape)
    change = locate_change(recorded.bits[row], found.bits[row], shape) if section.endswith("before") else None
    if change is not None and not ((old != new) & (places != change[0])).any():
        value = read(section, name).reshape(-1)[change[0]]
        before = value_before(value, change[1])
        if before is not None:
            return Difference(what, _describe_element(change[0], shape), before, value.item(), "the only element")
    sizes = (
        f"norm {recorded.sizes[row, 0]:.9g} recorded, {found.sizes[row, 0]:.9g} now; "
        f"{int((old != new).sum())} of {len(old)} sampled elements differ"
    )
    place = int(np.abs(new - old).argmax())
    if old[place] == new[place]:
        return Difference(what, "", None, None, sizes)
    return Difference(what, _describe_element(int(places[place]), shape), old[place].item(), new[place].item(), sizes)


def _describe_element(position: int, shape: tuple[int, ...]) -> str:
    return str([int(index) for index in np.unravel_index(position, shape)])


def make_report(rows: Sequence[Row], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the result as JSON."""
    first = find_first(rows)
    return {
        "verdict": "different" if first else "equal",
        "first_difference": asdict(first) if first else None,
        **settings,
        "rows": [asdict(row) for row in rows],
    }


def format_report(rows: Sequence[Row], title: str) -> str:
    """Format the result as a table."""
    lines = [title, "", f"{'what':44}{'count':>10}{'largest gap':>14}{'relative':>12}  verdict"]
    for row in rows:
        lines.append(
            f"{row.what:44}{row.count:>10,}{row.max_abs:>14.3g}{row.max_relative:>12.3g}  {row.verdict}"
            + (f" ({row.num_different:,})" if row.num_different else "")
        )
    first = find_first(rows)
    lines += [
        "",
        f"first difference: {first}" if first else "no difference",
        "",
        f"verdict: {'different' if first else 'equal'}",
    ]
    return "\n".join(lines)


def locate_change(before: Sequence[int], after: Sequence[int], shape: tuple[int, ...]) -> tuple[int, int] | None:
    """Locate the single element whose change explains the difference of two fingerprints.

    Args:
        before, after: digest and total.

    Returns:
        Its row-major position and the increase of its bits, or `None` if no single element explains it.
    """
    digest, total = (int(b) - int(a) & _WRAP - 1 for a, b in zip(before, after, strict=True))
    if total == 0:
        return None
    twos = (total & -total).bit_length() - 1  # solves digest = total * (2 i + 1) modulo 2^(64 - twos)
    modulus = _WRAP >> twos
    factor = (digest >> twos) * pow(total >> twos, -1, modulus) % modulus
    index, volume = factor // 2, int(np.prod(shape))
    if not factor % 2 or digest % (1 << twos) or not index < volume <= modulus // 2:
        return None
    return index, total - _WRAP if total >> 63 else total


def value_before(value: torch.Tensor, growth: int) -> float | None:
    """Return an element's (0-d) value before its bits grew by `growth`, or `None` if out of range."""
    bits = view_bits(value)
    old, limits = int(bits) - growth, torch.iinfo(bits.dtype)
    return torch.tensor(old, dtype=bits.dtype).view(value.dtype).item() if limits.min <= old <= limits.max else None
