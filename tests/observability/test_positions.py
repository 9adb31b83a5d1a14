# SPDX-License-Identifier: Apache-2.0
"""Position of a thread, read by another one, and the report about the positions of all ranks."""

from __future__ import annotations

import sys
import threading
import time

import torch

from megatron_rl.observability.failures import Position, explain_wait, find_place, find_position
from megatron_rl.observability.progress import PhaseTimers


def position(
    rank: int,
    operation: str | None,
    *,
    num_entered: int = 5,
    phase: str = "reward",
    ranks: tuple[int, ...] | None = None,
    seconds: float = 60.0,
) -> Position:
    return Position(rank, 3, phase, num_entered, operation, ranks, "a.py:1 in f", seconds, 9)


def test_positions_travel_as_text() -> None:
    for ranks in (None, (0, 1)):
        one = position(1, "all_reduce", ranks=ranks)
        assert Position.decode(one.encode()) == Position.decode(one.encode().encode()) == one


def test_a_thread_that_waits_is_seen() -> None:
    """`wait` of torch counts as a collective, because asynchronous ones end in it; sleep does not."""
    done, timers, seen = torch.futures.Future(), PhaseTimers(), []
    timers.begin_step(4)
    for work, operation in ((done.wait, "wait"), (lambda: time.sleep(0.5), None)):
        with timers.phase("step"), timers.phase("update"):
            thread = threading.Thread(target=work)
            thread.start()
            time.sleep(0.1)
            seen.append((find_position(7, timers, thread.ident), operation))
            if not done.done():
                done.set_result(None)
            thread.join()
    for found, operation in seen:
        assert (found.rank, found.step, found.phase, found.operation) == (7, 4, "update", operation)
        assert found.num_entered in (2, 4)
    assert find_position(7, timers, thread.ident) is None, "the thread is gone"


def test_the_caller_is_named() -> None:
    assert find_place(sys._getframe())[2].endswith("in test_the_caller_is_named")


def test_the_rank_that_is_in_no_collective_is_waited_for() -> None:
    ranks = tuple(range(4))
    text = explain_wait([position(rank, None if rank == 2 else "all_gather_object", ranks=ranks) for rank in ranks], [])
    assert text.startswith("ranks 0-1,3 waited for rank 2 in step 3, phase reward, all_gather_object\n")
    assert "rank 2: step 3, phase reward: is in no collective for 60 s (a.py:1 in f)" in text
    assert "rank 0: step 3, phase reward: waits in all_gather_object of ranks 0-3 for 60 s" in text


def test_the_rank_that_is_phases_behind_is_waited_for() -> None:
    """Even if that rank waits itself, for a message that is never sent."""
    text = explain_wait([position(0, "barrier"), position(1, "recv", num_entered=4, phase="reshard")], [])
    assert text.startswith("rank 0 waited for rank 1 in step 3, phase reward, barrier")


def test_a_rank_without_an_answer_is_waited_for() -> None:
    text = explain_wait([position(0, "barrier"), None, position(2, "barrier")], [1])
    assert text.startswith("ranks 0,2 waited for rank 1")
    assert "rank 1: no answer; its process is gone or stopped" in text.splitlines()[2]


def test_all_waiting_alike_is_a_deadlock() -> None:
    assert explain_wait([position(0, "recv"), position(1, "all_reduce")], []).startswith("all ranks wait")
