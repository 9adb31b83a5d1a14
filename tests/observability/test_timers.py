# SPDX-License-Identifier: Apache-2.0
"""Phase timers with a clock that is set by hand."""

from __future__ import annotations

import pytest

from megatron_rl.observability.progress import PhaseTimers


class Clock:
    """Clock whose seconds are set by the test."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_phases_accumulate_until_popped() -> None:
    clock = Clock()
    timers = PhaseTimers(clock)
    for seconds in (1.0, 2.5):
        with timers.phase("rollout"):
            clock.now += seconds
    with timers.phase("update"):
        clock.now += 4.0
    assert timers.pop() == {"time/rollout": 3.5, "time/update": 4.0}
    assert timers.pop() == {}


def test_outer_phase_includes_the_inner_one() -> None:
    clock = Clock()
    timers = PhaseTimers(clock)
    with timers.phase("step"):
        clock.now += 1.0
        with timers.phase("update"):
            clock.now += 2.0
    assert timers.pop() == {"time/update": 2.0, "time/step": 3.0}


def test_parts_of_a_phase_are_counted_until_it_ends() -> None:
    timers = PhaseTimers(Clock())
    timers.advance()
    with timers.phase("reward"):
        timers.expect(3)
        timers.advance()
        timers.advance()
        assert timers.part == (2, 3)
    assert timers.part is None


def test_a_phase_that_raises_is_counted() -> None:
    clock = Clock()
    timers = PhaseTimers(clock)
    with pytest.raises(RuntimeError), timers.phase("update"):
        clock.now += 1.0
        raise RuntimeError
    assert timers.pop() == {"time/update": 1.0}
