# SPDX-License-Identifier: Apache-2.0
"""The loop that steps an engine: order of requests, interruptions, errors, and ranks that stay equal.

With a scripted engine on its own clock, and with vLLM for its own faults. Not covered: GPUs.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import megatron_rl.parallel  # noqa: F401 (before megatron.core)
from distributed import run_ranks
from megatron_rl.checkpoint.huggingface import load_huggingface
from megatron_rl.config.schema import RolloutConfig
from megatron_rl.engines.protocol import ClosedBatches, EngineSpec, Request, Sampled, SamplingConfig
from megatron_rl.engines.vllm.vllm_engine import VllmEngine
from megatron_rl.engines.wrappers import OneTurn
from megatron_rl.parallel.collectives import init_distributed, world
from megatron_rl.parallel.groups import build_groups
from megatron_rl.parallel.layout import EngineRanks, ParallelLayout
from megatron_rl.rollout.generation import Channel, ControlMessage, generate, open_channel, serve
from megatron_rl.weights.model_config import load_model_shape
from tiny_models import ENGINE_SIZES, save_tiny_model
from tools.benchmarks._scripted_engine import ScriptedEngine
from tools.planning.engine_clock import StepCost

SAMPLED = SamplingConfig(temperature=0.7, max_tokens=40, stop_token_ids=(2, 5))
COST = StepCost(fixed=1.0, per_request=0.1)
Stream = list[tuple[int, list[int], list[float], str]]


class Inbox:
    """Orders for an engine, put here by any thread of its first rank and taken by `serve`."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._messages: list[ControlMessage] = []

    def put(self, message: ControlMessage) -> None:
        """Add a request; it joins the waiting ones, unless it interrupts a waiting request."""
        with self._changed:
            waiting = {request.key for request in self._messages[-1].requests} if self._messages else set()
            if self._messages and waiting.isdisjoint(message.interrupts):
                waits = self._messages[-1]
                self._messages[-1] = ControlMessage(
                    [*waits.interrupts, *message.interrupts],
                    [*waits.requests, *message.requests],
                    waits.stop or message.stop,
                )
            else:
                self._messages.append(message)
            self._changed.notify()

    def take(self, wait: bool) -> ControlMessage:
        """Return the arrived requests, possibly none; with `wait`, wait for the first."""
        with self._changed:
            if wait:
                self._changed.wait_for(lambda: self._messages)
            return self._messages.pop(0) if self._messages else ControlMessage()


def make_request(key: int, turn: int = 0, num_tokens: int = 3) -> Request:
    return Request(key, np.arange(num_tokens, dtype=np.int32) + 3, 1000 + key, SAMPLED, turn)


def run_only(requests: Sequence[Request]) -> Callable[[bool], ControlMessage]:
    """A `take` callback for `serve` that runs exactly these requests."""
    return lambda is_idle: ControlMessage(requests=requests, stop=True)


def script(lengths: Sequence[int], slots: int = 4) -> ScriptedEngine:
    return ScriptedEngine(dict(enumerate(lengths)), slots, COST)


def open_pair(rank: int, width: int = 2) -> Channel:
    """The channel of an engine of neighbors."""
    return open_channel(EngineRanks.consecutive(range(4), width), rank)


def describe(sampled: Sampled) -> tuple[int, list[int], list[float], str]:
    return sampled.key, sampled.tokens.tolist(), sampled.logprobs.tolist(), sampled.finish_reason


def share_messages(rank: int, world_size: int) -> list[list[ControlMessage]]:
    """Return the messages of each channel: engines of two ranks, one engine, and that one through its group."""
    message = ControlMessage(
        interrupts=[4, 2**40],
        stop=True,
        requests=[
            Request(3, np.array([5, 6], np.int32), 2**62 + 1, SamplingConfig(0.1, 9, ()), turn=2),
            Request(-1, np.array([], np.int32), 0, SamplingConfig(0.0, 1, (2, 5))),
        ],
    )
    large = ControlMessage(requests=[Request(0, np.arange(1 << 22, dtype=np.int32), 0, SAMPLED)])  # 16 MiB
    channels = [open_pair(rank), open_pair(rank, 4), Channel(world())]
    return [
        [channel.share(sent if channel.is_first else None) for sent in (message, ControlMessage(), large, message)]
        for channel in channels
    ]


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_messages_arrive_as_they_were_sent(shared: list[list[list[ControlMessage]]], rank: int) -> None:
    """The temperature's bits and a seed of 63 bits included; more bytes than shared memory has; the first one again."""
    for (message, *_), (found, empty, large, again) in zip(shared[0], shared[rank], strict=True):
        check_equal(found, message)
        check_equal(again, message)
        assert (
            (*empty.interrupts, *empty.requests) == ()
            and not empty.stop
            and np.array_equal(large.requests[0].tokens, np.arange(1 << 22))
        )


@pytest.fixture(scope="module")
def shared() -> list[list[list[ControlMessage]]]:
    """The result of `share_messages` by rank."""
    return run_ranks(share_messages, 4)


def check_equal(found: ControlMessage, message: ControlMessage) -> None:
    assert (found.interrupts, found.stop) == ([4, 2**40], True)
    for one, expected in zip(found.requests, message.requests, strict=True):
        assert one.tokens.tolist() == expected.tokens.tolist() and one.tokens.dtype == np.int32
        assert (one.key, one.seed, one.sampling, one.turn) == (
            expected.key,
            expected.seed,
            expected.sampling,
            expected.turn,
        )
    assert len(found.requests) == 2


def test_a_batch_comes_back_in_its_order() -> None:
    """Two run at once: the clock shows the waiting times."""
    engine = script([5, 2, 3, 1], slots=2)
    told: list[int] = []
    assert serve(engine, run_only([make_request(k) for k in range(4)]), lambda s: told.append(s.key)) is None
    assert told == [1, 0, 2, 3] and engine.seconds == pytest.approx(5 * 1.2 + 1 * 1.1)
    found = generate(script([5, 2, 3, 1], slots=2), [make_request(k) for k in (2, 0, 3)])
    assert [(s.key, len(s.tokens)) for s in found] == [(2, 3), (0, 5), (3, 1)]


def test_requests_are_added_by_turn_and_key() -> None:
    """Whatever the order in which they came: here with a slot for one, the order of answers is that of adding."""
    inbox, told = Inbox(), []
    for key, turn in ((5, 1), (4, 0), (1, 1), (2, 0)):
        inbox.put(ControlMessage(requests=[make_request(key, turn)]))
    inbox.put(ControlMessage(stop=True))
    serve(script([1] * 6, slots=1), inbox.take, lambda s: told.append(s.key))
    assert told == [2, 4, 1, 5]


def test_interrupted_and_added_while_others_run() -> None:
    """A listener adds, then interrupts: the partial response has the tokens of the steps it ran."""
    inbox, told = Inbox(), []
    inbox.put(ControlMessage(requests=[make_request(0), make_request(1)]))

    def listen(sampled: Sampled) -> None:
        told.append((sampled.key, len(sampled.tokens), sampled.finish_reason))
        if sampled.key == 1:  # after 2 steps
            inbox.put(ControlMessage(requests=[make_request(2)]))
        if sampled.key == 2:  # after 3 more
            inbox.put(ControlMessage(interrupts=[0, 1, 77], stop=True))

    assert serve(script([30, 2, 3]), inbox.take, listen) is None
    assert told == [(1, 2, "stop"), (2, 3, "stop"), (0, 5, "interrupted")]


def test_an_interrupt_does_not_overtake_its_request() -> None:
    """Both wait in the inbox: the request is added first, and ends without being lost."""
    inbox, told = Inbox(), []
    inbox.put(ControlMessage(requests=[make_request(0)]))
    inbox.put(ControlMessage(interrupts=[0]))
    inbox.put(ControlMessage(stop=True))
    serve(script([9]), inbox.take, lambda s: told.append((s.key, s.finish_reason)))
    assert told == [(0, "interrupted")]


def test_requests_join_behind_the_interruptions_of_their_message() -> None:
    """A request may have the key of one that the same message interrupts."""
    found: list[Any] = []
    messages = [
        ControlMessage(requests=[make_request(0)]),
        ControlMessage(interrupts=[0], requests=[make_request(0)], stop=True),
    ]
    serve(script([3, 3]), lambda wait: messages.pop(0), lambda s: found.append((s.key, len(s.tokens))))
    assert found == [(0, 1), (0, 3)]


def test_one_turn_engines_generate_what_waits() -> None:
    """Requests that are drawn alike are one call; too many and too few answers show in the keys."""
    calls: list[tuple[int, float]] = []

    class Whole(ClosedBatches):
        def generate(self, prompts: Any, seeds: Any, sampling: SamplingConfig) -> list[Sampled]:
            calls.append((len(prompts), sampling.temperature))
            answered = [*prompts, prompts[0]] if sampling.is_greedy else prompts[:-1]
            return [Sampled(0, prompt, np.zeros(len(prompt), np.float32), "stop") for prompt in answered]

    greedy = SamplingConfig(0.0, 4, ())
    requests = [make_request(0), make_request(1, num_tokens=5), Request(2, np.ones(1, np.int32), 0, greedy)]
    told: list[tuple[int, int]] = []
    engine = OneTurn(Whole())
    engine.add([make_request(9)])
    assert [s.finish_reason for s in engine.interrupt([9, 10])] == ["interrupted"] and not engine.has_requests()
    serve(engine, run_only(requests), lambda s: told.append((s.key, len(s.tokens))))
    assert calls == [(2, 0.7), (1, 0.0)] and told == [(0, 3), (2, 1), (2, 1)]


class Failing(ScriptedEngine):
    """An engine whose third step raises."""

    steps = 0

    def step(self) -> list[Sampled]:
        self.steps += 1
        if self.steps == 3:
            raise MemoryError("third step")
        return super().step()


def test_errors_leave_no_request_behind() -> None:
    """Of the engine: raised at once. Of a listener: a batch runs to its end; open work is interrupted. Of `take`."""
    engine = Failing({0: 9, 1: 9}, 4, COST)
    with pytest.raises(MemoryError):
        generate(engine, [make_request(0), make_request(1)])
    assert not engine.has_requests()

    calls: list[int] = []

    def fail(sampled: Sampled) -> None:
        calls.append(sampled.key)
        raise ValueError("no listener")

    engine = script([2, 5])
    error = serve(engine, run_only([make_request(0), make_request(1)]), fail)
    assert str(error) == "no listener" and calls == [0] and engine.seconds == pytest.approx(2 * 1.2 + 3 * 1.1)
    inbox, engine = Inbox(), script([2, 5])
    inbox.put(ControlMessage(requests=[make_request(0), make_request(1)]))
    error = serve(engine, inbox.take, fail)  # without a stop message
    assert str(error) == "no listener" and engine.seconds == pytest.approx(2 * 1.2) and not engine.has_requests()

    def take(wait: bool) -> ControlMessage:
        if engine.has_requests():
            raise KeyError("no inbox")
        return ControlMessage(requests=[make_request(0)])

    engine, told = script([5]), []
    assert isinstance(serve(engine, take, lambda s: told.append(describe(s))), KeyError)
    assert not engine.has_requests() and told == []


def put_late(inbox: Inbox, num_requests: int, seed: int) -> None:
    """Answers of environments: three turns of each episode, each after a random delay; some are interrupted."""
    rng = random.Random(seed)
    for turn in range(3):
        for key in rng.sample(range(num_requests), num_requests):
            time.sleep(rng.random() * 0.004)
            inbox.put(ControlMessage(requests=[make_request(turn * num_requests + key, turn)]))
            if rng.random() < 0.2:  # one that has just begun, or any
                late = [turn * num_requests + key, rng.randrange(3 * num_requests)]
                inbox.put(ControlMessage(interrupts=[rng.choice(late)]))
    inbox.put(ControlMessage(stop=True))


def serve_late(rank: int, world_size: int) -> tuple[list[Any], float]:
    """Serve on two engines of two ranks; return the messages of each rank, with their steps."""
    lengths = np.random.default_rng(0).integers(1, 30, 300)
    engine, told = ScriptedEngine(dict(enumerate(lengths.tolist())), 6, COST), []
    build_groups(ParallelLayout(world_size, pp_size=world_size))  # the two ends of a pipeline have one group more
    channel, inbox = open_pair(rank), Inbox()
    if channel.is_first:
        threading.Thread(target=put_late, args=(inbox, 100, rank), daemon=True).start()
    error = serve(engine, inbox.take, lambda s: told.append((engine.seconds, *describe(s))), channel)
    assert error is None
    return told, engine.seconds


def test_ranks_of_an_engine_hear_the_same() -> None:
    """300 requests at random times: each pair of ranks adds and interrupts them between the same two steps."""
    results = run_ranks(serve_late, 4)
    for first, second in ((0, 1), (2, 3)):
        assert results[first] == results[second] and len(results[first][0]) == 300
    assert {reason for _, _, _, _, reason in results[0][0]} >= {"stop", "interrupted"}
    assert results[0] != results[2], "delays were the same: this test shows nothing"


def fail_on_first(rank: int, world_size: int) -> str:
    """The first rank's listener fails while both wait for more."""
    inbox, channel = Inbox(), open_pair(rank)
    inbox.put(ControlMessage(requests=[make_request(0)]))

    def listen(sampled: Sampled) -> None:
        if rank == 0:
            raise ValueError("no listener")

    return str(serve(script([3]), inbox.take, listen, channel))


def test_an_error_of_a_listener_ends_all_ranks() -> None:
    assert run_ranks(fail_on_first, 2, timeout=30) == ["no listener", "None"]


# With vLLM.

GREEDY = SamplingConfig(temperature=0.0, max_tokens=24, stop_token_ids=())


def build_vllm(model: Path, rollout_tp: int) -> VllmEngine:
    """The model's weights, in one rank or two."""
    process = init_distributed(2)
    engine = VllmEngine(
        EngineSpec(
            model_path=str(model),
            shape=load_model_shape(model),
            dtype="float32",
            max_prompt_length=80,
            max_response_length=24,
            process=process,
            seed=0,
            config=RolloutConfig(max_num_seqs=8, tensor_model_parallel_size=rollout_tp),
        )
    )
    load_huggingface(model, engine.placements(process.rank), engine.params)
    engine.end_weight_update()
    return engine


def vllm_requests(sampling: SamplingConfig, number: int = 6) -> list[Request]:
    rng = np.random.default_rng(1)
    return [Request(i, rng.integers(3, 517, 10 + 11 * i, dtype=np.int32), i, sampling) for i in range(number)]


def interrupt_and_resume(rank: int, world_size: int, model: Path) -> dict[str, Any]:
    """Greedy: uninterrupted; then interrupted after five steps, and resumed from the partial responses."""
    engine, requests = build_vllm(model, 1), vllm_requests(GREEDY)
    whole = generate(engine, requests)
    engine.end_weight_update()
    partial: dict[int, Sampled] = {}
    steps = 0

    def take(wait: bool) -> ControlMessage:
        nonlocal steps
        steps += 1
        return {
            1: ControlMessage(requests=requests[:4]),
            3: ControlMessage(requests=requests[4:]),
            9: ControlMessage(interrupts=range(6), stop=True),
        }.get(steps, ControlMessage())

    assert serve(engine, take, lambda s: partial.update({s.key: s})) is None
    left = engine.has_requests(), engine.tokens_in_flight()
    resumed = generate(
        engine,
        [
            Request(
                r.key,
                np.append(r.tokens, partial[r.key].tokens),
                r.seed,
                SamplingConfig(0.0, 24 - len(partial[r.key].tokens), ()),
            )
            for r in requests
        ],
    )
    engine.end_weight_update()  # raises while a request runs
    engine.close()
    return {
        "whole": [describe(s) for s in whole],
        "partial": [describe(partial[r.key]) for r in requests],
        "resumed": [describe(s) for s in resumed],
        "left": left,
    }


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    save_tiny_model(directory, "qwen2", **ENGINE_SIZES, num_hidden_layers=2, tie_word_embeddings=False)
    return directory


def test_a_resumed_response_is_the_uninterrupted_one(model: Path, vllm_imported: None) -> None:
    """Tokens equal, log-probs to rounding of another batch; requests that were added later have fewer tokens."""
    found = run_ranks(interrupt_and_resume, 1, model, timeout=150)[0]
    assert found["left"] == (False, 0)
    assert [len(tokens) for _, tokens, _, _ in found["partial"]] == [8, 8, 8, 8, 6, 6]
    assert {reason for *_, reason in found["partial"]} == {"interrupted"}
    for whole, partial, resumed in zip(found["whole"], found["partial"], found["resumed"], strict=True):
        assert partial[1] + resumed[1] == whole[1] and len(set(whole[1])) > 1
        assert partial[2] + resumed[2] == pytest.approx(whole[2], abs=1e-5)


def serve_vllm_late(rank: int, world_size: int, model: Path) -> tuple[Stream, Stream]:
    """Two TP ranks, requests that come late at the first; and each request alone."""
    engine, requests = build_vllm(model, 2), vllm_requests(SamplingConfig(1.0, 24, tuple(range(0, 517, 9))))
    inbox, told, channel = Inbox(), [], open_pair(rank)

    def put() -> None:
        for request in requests:
            inbox.put(ControlMessage(requests=[request]))
            time.sleep(0.02)
        inbox.put(ControlMessage(stop=True))

    if rank == 0:
        threading.Thread(target=put, daemon=True).start()
    assert serve(engine, inbox.take, lambda s: told.append(describe(s)), channel) is None
    alone = [describe(s) for request in requests for s in generate(engine, [request])]
    engine.close()
    return told, alone


def test_vllm_ranks_hear_the_same(model: Path, vllm_imported: None) -> None:
    """Equal streams on both ranks, and the result of each request is independent of the other requests."""
    (told, alone), other = run_ranks(serve_vllm_late, 2, model, timeout=150)
    assert other == (told, alone)
    for found, expected in zip(sorted(told), alone, strict=True):
        assert (found[0], found[1], found[3]) == (expected[0], expected[1], expected[3])
        assert found[2] == pytest.approx(expected[2], abs=1e-5)
