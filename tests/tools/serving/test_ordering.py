# SPDX-License-Identifier: Apache-2.0
"""The queue of a server: order, repetitions, limits and time, without HTTP and without a model.

Not covered: several models' fairness, and memory of answers that no one fetches within `keep_seconds`.
"""

from __future__ import annotations

import json
import random
import threading
from typing import Any

import numpy as np
import pytest

from tools.serving.ordering import SAMPLE, Answer, BusyError, Call, RequestQueue, answer_json

MODELS, REQUESTS = ("a", "b"), 2000


class Clock:
    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def make_call(model: str, number: int, kind: str = "work", size: int = 1, group: Any = None) -> Call:
    return Call(f"{model}/{number}", kind, number, lambda result: result, group=group, size=size)


def drain(queue: RequestQueue) -> list[str]:
    found = []
    while calls := queue.take(0.0):
        for call in calls:
            found.append(call.request_id)
            queue.finish(call, Answer(call.request_id.encode()))
    return found


def take_steps(order: list[tuple[str, int]]) -> dict[str, np.ndarray]:
    """Gradient descent on a quadratic whose gradient depends on the request: equal only for equal steps in order."""
    weights = {model: np.linspace(-1, 1, 8) for model in MODELS}
    for model, number in order:
        rng = np.random.default_rng(number)
        weights[model] = weights[model] - 0.1 * (weights[model] * rng.random(8) + rng.standard_normal(8))
    return weights


def test_two_thousand_requests_over_a_bad_network_run_once_and_in_order() -> None:
    """A tenth is sent again, order is shuffled within a window, a tenth of the answers is cut off and fetched again."""
    rng, queue = random.Random(0), RequestQueue(most_bytes=400)
    for model in MODELS:
        queue.open_model(model)
    serial = [(model, number) for number in range(1, REQUESTS // 2 + 1) for model in MODELS]
    sent = sorted(serial, key=lambda one: one[1] + rng.uniform(0, 40))
    for one in rng.sample(serial, REQUESTS // 10):
        sent.insert(rng.randrange(len(sent)), one)
    ran: list[tuple[str, int]] = []
    is_done = threading.Event()

    def work() -> None:
        while not is_done.is_set():
            for call in queue.take(0.01):
                ran.append((call.request_id[0], call.payload))
                queue.finish(call, answer_json({"request": call.request_id}))

    worker = threading.Thread(target=work)
    worker.start()
    refused = 0
    pending = list(sent)
    while pending:
        model, number = pending.pop(0)
        try:
            queue.add_numbered(model, number, make_call(model, number))
        except BusyError:  # the client sends it again, later
            refused += 1
            pending.insert(min(len(pending), rng.randrange(1, 30)), (model, number))
    for model, number in serial:
        for _ in range(2 if rng.random() < 0.1 else 1):
            future = queue.find(f"{model}/{number}")
            assert future is not None
            assert json.loads(future.result(10).body) == {"request": f"{model}/{number}"}
    is_done.set()
    worker.join()
    assert len(ran) == REQUESTS
    found, expected = take_steps(ran), take_steps(serial)
    assert all(np.array_equal(found[model], expected[model]) for model in MODELS)
    assert refused > 0  # the limit was met, and nothing was lost by it


def test_later_numbers_wait_and_a_repetition_has_the_first_answer() -> None:
    queue = RequestQueue()
    queue.open_model("a")
    for number in (3, 2):
        queue.add_numbered("a", number, make_call("a", number))
    assert drain(queue) == [] and queue.count()["early"] == 2
    queue.add_numbered("a", 1, make_call("a", 1))
    assert drain(queue) == ["a/1", "a/2", "a/3"]
    first = queue.find("a/2")
    queue.add_numbered("a", 2, make_call("a", 2))
    assert drain(queue) == [] and queue.find("a/2") is first


def test_a_request_that_never_comes_ends_the_wait_of_the_later_ones() -> None:
    clock = Clock()
    queue = RequestQueue(gap_seconds=10, now=clock)
    queue.open_model("a")
    for number in (5, 3):
        queue.add_numbered("a", number, make_call("a", number))
    clock.seconds = 9
    assert queue.take(0.0) == []
    clock.seconds = 11
    taken = [queue.take(0.0)[0] for _ in range(2)]
    assert [call.request_id for call in taken] == ["a/3", "a/5"]
    assert all("request 1 of a never came" in str(call.payload) for call in taken)
    queue.add_numbered("a", 6, make_call("a", 6))
    assert drain(queue) == ["a/6"]


def test_answers_are_kept_for_some_time_only() -> None:
    clock = Clock()
    queue = RequestQueue(keep_seconds=10, now=clock)
    queue.add(make_call("a", 0))
    assert drain(queue) == ["a/0"]
    clock.seconds = 9
    queue.take(0.0)
    assert queue.find("a/0") is not None
    clock.seconds = 11
    queue.take(0.0)
    assert queue.find("a/0") is None


def test_samples_of_the_same_weights_are_taken_together_and_bounded() -> None:
    queue = RequestQueue(most_samples=4)
    for number, group in enumerate(("x", "y", "x", "x")):
        queue.add(make_call("s", number, SAMPLE, group=group))
    with pytest.raises(BusyError):
        queue.add(make_call("s", 9, SAMPLE, group="x"))
    queue.cancel("s/3")
    assert b"canceled" in queue.find("s/3").result(0).body  # pyright: ignore[reportOptionalMemberAccess]
    assert [[call.request_id for call in queue.take(0.0)] for _ in range(2)] == [["s/0", "s/2"], ["s/1"]]


def test_the_number_that_is_due_is_admitted_at_the_limit() -> None:
    queue = RequestQueue(most_bytes=10)
    queue.open_model("a")
    queue.add_numbered("a", 2, make_call("a", 2, size=10))
    with pytest.raises(BusyError):
        queue.add_numbered("a", 3, make_call("a", 3, size=10))
    queue.add_numbered("a", 1, make_call("a", 1, size=10))
    assert drain(queue) == ["a/1", "a/2"]


def test_a_closed_model_leaves_nothing_behind() -> None:
    queue = RequestQueue(most_bytes=10)
    queue.open_model("a")
    queue.add_numbered("a", 1, make_call("a", 1))
    for number in (4, 3):  # which wait for 2
        queue.add_numbered("a", number, make_call("a", number, size=4))
    queue.close_model("a")
    queue.close_model("unknown")
    queue.add_numbered("a", 2, make_call("a", 2, size=0))  # its request came before, and this thread was slower
    assert queue.count()["early"] == 0 and drain(queue) == ["a/1", "a/3", "a/4", "a/2"]
    assert queue.open_model("a")
