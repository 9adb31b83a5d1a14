# SPDX-License-Identifier: Apache-2.0
"""Servers that fail, lie or do not respond: a small HTTP server with a behavior per test.

The tokens of a response follow from its seed, as a real server's do. vLLM's own server is in test_served.py, and one
that is killed in tests/run/test_served_in_loop.py.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from aiohttp import web

from megatron_rl.config.schema import RolloutConfig
from megatron_rl.config.sections import ServerConfig
from megatron_rl.engines.endings import StopStrings
from megatron_rl.engines.protocol import EngineSpec, Request, Sampled, SamplingConfig
from megatron_rl.engines.servers.served import ServedEngine
from megatron_rl.engines.servers.server_apis import Ask
from megatron_rl.engines.servers.server_client import ServerFailure, ServerProcess
from megatron_rl.parallel.collectives import Process
from megatron_rl.rollout.generation import generate
from megatron_rl.types import UserError
from megatron_rl.weights.families import ModelShape

SHAPE = ModelShape(
    family="qwen2",
    num_layers=1,
    hidden_size=8,
    ffn_hidden_size=8,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    vocab_size=517,
    tied_embeddings=True,
    qkv_bias=True,
    qk_norm=False,
    rms_norm_eps=1e-6,
    rope_theta=1e4,
    max_position_embeddings=256,
)
SAMPLING = SamplingConfig(temperature=1.0, max_tokens=5, stop_token_ids=(2,))
REQUESTS = [Request(key, np.arange(3, 9, dtype=np.int32), 100 + key, SAMPLING) for key in range(4)]
Answer = Callable[["Endpoint", dict[str, Any], web.StreamResponse], Any]


def draw(seed: int) -> list[int]:
    """Return the tokens of the response to a seed."""
    return np.random.default_rng(seed).integers(3, 500, 5).tolist()


def make_event(tokens: list[int], finish_reason: str | None = None, **changes: Any) -> bytes:
    """Encode a part of a streamed response."""
    logprobs = {"token_logprobs": [-0.5] * len(tokens)}
    choice = {"index": 0, "text": "x", "token_ids": tokens, "logprobs": logprobs, "finish_reason": finish_reason}
    return b"data: " + json.dumps({"choices": [choice | changes]}).encode() + b"\n\n"


async def answer_well(endpoint: Endpoint, body: dict[str, Any], response: web.StreamResponse) -> None:
    """Two parts, and the further fields of OpenAI's format."""
    tokens = draw(body["seed"])
    await response.write(make_event(tokens[:2]))
    await response.write(make_event(tokens[2:], "length"))
    await response.write(b'data: {"choices": [], "usage": {}}\n\ndata: [DONE]\n\n')


class Endpoint:
    """A server on a thread.

    Attributes:
        answer: its behavior.
        bodies, updates: received requests.
        callers: client addresses of the requests.
    """

    def __init__(self, answer: Answer) -> None:
        self.answer, self.bodies, self.updates = answer, [], []
        self.callers: list[Any] = []
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self.url = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()

    async def _start(self) -> str:
        app = web.Application()
        app.router.add_get("/v1/models", self._name)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_post("/update", self._update)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def _name(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "a model"}]})

    async def _update(self, request: web.Request) -> web.Response:
        self.updates.append(await request.json())
        return web.Response()

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        assert request.transport is not None
        self.callers.append(request.transport.get_extra_info("peername"))
        response = web.StreamResponse()
        await response.prepare(request)
        await self.answer(self, body, response)
        return response

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    server = Endpoint(answer_well)
    yield server
    server.close()


@pytest.fixture
def build(endpoint: Endpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., ServedEngine]]:
    """Build an engine in this process, which has no group."""
    monkeypatch.setattr("megatron_rl.engines.servers.served.align_group_names", lambda: None)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    engines = []

    def make(stop: StopStrings | None = None, silent_seconds: float = 5.0, **server: Any) -> ServedEngine:
        settings = {"on_update": f"{endpoint.url}/update", **server}
        config = ServerConfig(endpoints=[endpoint.url + "/"], directory=str(tmp_path / "weights"), **settings)
        engines.append(
            ServedEngine(
                EngineSpec(
                    model_path=str(tmp_path / "model"),
                    shape=SHAPE,
                    dtype="float32",
                    max_prompt_length=40,
                    max_response_length=24,
                    config=RolloutConfig(engine="openai", server=config, silent_seconds=silent_seconds),
                    process=Process(0, 1, 0, 1, torch.device("cpu")),
                    seed=0,
                    stop=stop,
                )
            )
        )
        engines[-1].end_weight_update()
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def test_server_that_is_well(endpoint: Endpoint, build: Callable[..., ServedEngine], tmp_path: Path) -> None:
    """The posted request, the parsed response, and the path of its weights."""
    engine = build()
    found = generate(engine, REQUESTS)
    assert [one.tokens.tolist() for one in found] == [draw(request.seed) for request in REQUESTS]
    assert all(one.finish_reason == "length" and one.logprobs.tolist() == [-0.5] * 5 for one in found)
    assert endpoint.updates == [{"model_path": str(tmp_path / "weights" / "engine_0")}]
    body = min(endpoint.bodies, key=lambda one: one["seed"])
    assert body["model"] == "a model" and body["prompt"] == [3, 4, 5, 6, 7, 8] and body["stop_token_ids"] == [2]
    engine.end_weight_update()
    assert len(endpoint.updates) == 2
    files = sorted(path.name for path in (tmp_path / "weights" / "engine_0").iterdir())
    assert files == ["config.json", "model-00001-of-00001.safetensors", "model.safetensors.index.json"]


def test_requests_have_connections_of_their_own(endpoint: Endpoint, build: Callable[..., ServedEngine]) -> None:
    """A server closes an idle connection after some seconds, and a request sent at that moment would be lost."""
    engine = build()
    for request in REQUESTS:
        generate(engine, [request])
    assert len(endpoint.callers) == len({*endpoint.callers}) == 4


@pytest.mark.parametrize("how", ["breaks off", "ends early", "says that it failed"])
def test_requests_of_a_server_that_fails_run_again(
    endpoint: Endpoint, build: Callable[..., ServedEngine], how: str
) -> None:
    """With the current weights and the same seeds; their partial results are dropped."""

    async def fail_twice(endpoint: Endpoint, body: dict[str, Any], response: web.StreamResponse) -> None:
        if body["seed"] != 102 or len(endpoint.updates) > 2:
            await answer_well(endpoint, body, response)
            return
        await response.write(make_event(draw(1)))
        if how == "breaks off":
            raise ConnectionResetError
        if how == "says that it failed":
            await response.write(b'data: {"error": {"message": "no", "code": 500}}\n\n')

    engine = build()
    endpoint.answer = fail_twice
    found = generate(engine, REQUESTS)
    assert [one.tokens.tolist() for one in found] == [draw(request.seed) for request in REQUESTS]
    assert len(endpoint.updates) == 3, "it was given its weights again each time"


def test_endless_failures_end_the_run_with_one_message(endpoint: Endpoint, build: Callable[..., ServedEngine]) -> None:
    async def fail(endpoint: Endpoint, body: dict[str, Any], response: web.StreamResponse) -> None:
        raise ConnectionResetError

    engine = build()
    endpoint.answer = fail
    with pytest.raises(UserError, match="failed 4 times without a response between") as caught:
        generate(engine, REQUESTS)
    assert caught.value.source == endpoint.url and len(endpoint.updates) == 4


def test_server_that_says_nothing_has_failed(endpoint: Endpoint, build: Callable[..., ServedEngine]) -> None:
    async def wait(endpoint: Endpoint, body: dict[str, Any], response: web.StreamResponse) -> None:
        if len(endpoint.updates) == 1:
            await response.write(make_event(draw(1)[:1]))
            await asyncio.sleep(30)
        await answer_well(endpoint, body, response)

    engine = build(silent_seconds=0.3)
    endpoint.answer = wait
    assert [one.tokens.tolist() for one in generate(engine, REQUESTS[:1])] == [draw(100)]


@pytest.mark.parametrize(
    ("change", "message"),
    [({"token_ids": None}, "no token_ids"), ({"logprobs": None}, "no logprobs")],
)
def test_server_that_returns_text_alone_is_refused(
    endpoint: Endpoint, build: Callable[..., ServedEngine], change: dict[str, Any], message: str
) -> None:
    async def answer(endpoint: Endpoint, body: dict[str, Any], response: web.StreamResponse) -> None:
        await response.write(make_event([5], "length", **change))

    engine = build()
    endpoint.answer = answer
    with pytest.raises(UserError, match=message):
        engine.probe()
    assert len(endpoint.updates) == 1, "another attempt would change nothing"


def test_request_that_is_refused_is_not_tried_again(endpoint: Endpoint, build: Callable[..., ServedEngine]) -> None:
    async def answer(endpoint: Endpoint, body: dict[str, Any], response: web.StreamResponse) -> None:
        await response.write(b'data: {"error": {"message": "too long", "code": 400}}\n\n')

    engine = build()
    endpoint.answer = answer
    with pytest.raises(UserError, match="too long"):
        generate(engine, REQUESTS)


def test_hook_that_fails_ends_the_run(endpoint: Endpoint, build: Callable[..., ServedEngine]) -> None:
    with pytest.raises(UserError, match="ls /nowhere ends with 2: .*No such file"):
        build(on_update="ls /nowhere")


def test_what_has_come_is_returned_by_an_interruption(endpoint: Endpoint, build: Callable[..., ServedEngine]) -> None:
    """The connection is closed, which is how a server learns of it."""
    left = threading.Event()

    async def begin(endpoint: Endpoint, body: dict[str, Any], response: web.StreamResponse) -> None:
        await response.write(make_event(draw(body["seed"])[:3]))
        try:
            while True:
                await asyncio.sleep(0.05)
                await response.write(b": still here\n\n")
        finally:
            left.set()

    engine = build()
    endpoint.answer = begin
    engine.add(REQUESTS[:2])
    while engine.tokens_in_flight() < 6:
        assert engine.step() == []
    found = engine.interrupt([1, 0, 7])
    assert [(one.key, one.tokens.tolist(), one.finish_reason) for one in found] == [
        (1, draw(101)[:3], "interrupted"),
        (0, draw(100)[:3], "interrupted"),
    ]
    assert not engine.has_requests() and engine.tokens_in_flight() == 0 and left.wait(10)


@pytest.mark.parametrize("parts", [1, 2, 5])
def test_stop_strings_end_an_answer(endpoint: Endpoint, build: Callable[..., ServedEngine], parts: int) -> None:
    """With the token that completes one, however many tokens come at a time; the connection is closed, if it must."""
    left = threading.Event()

    async def send_parts(endpoint: Endpoint, body: dict[str, Any], response: web.StreamResponse) -> None:
        tokens = draw(body["seed"])
        for i in range(0, 5, parts):
            await response.write(make_event(tokens[i : i + parts], "length" if i + parts >= 5 else None))
        try:
            while body["seed"] == 100:
                await asyncio.sleep(0.05)
                await response.write(b": still here\n\n")
        finally:
            left.set()

    first, wanted = draw(100), "".join(f"<{token}>" for token in draw(100)[1:4])[1:-1]
    engine = build(stop=StopStrings([wanted], lambda tokens: "".join(f"<{token}>" for token in tokens)))
    endpoint.answer = send_parts
    ended, whole = generate(engine, REQUESTS[:2])
    assert (ended.tokens.tolist(), len(ended.logprobs), ended.finish_reason) == (first[:4], 4, "stop")
    assert (whole.tokens.tolist(), whole.finish_reason) == (draw(101), "length") and left.wait(10)
    continued = Request(5, np.array([9, *first[:3]], np.int32), 100, SAMPLING, num_sampled=3)
    endpoint.answer = answer_with(first[3:])
    (found,) = generate(engine, [continued])
    assert (found.tokens.tolist(), found.finish_reason) == (first[3:4], "stop"), "it began before the interruption"


def answer_with(tokens: list[int]) -> Answer:
    async def answer(endpoint: Endpoint, body: dict[str, Any], response: web.StreamResponse) -> None:
        await response.write(make_event(tokens, "length"))

    return answer


def test_interrupted_responses_whose_kept_sets_are_lost_begin_again(
    endpoint: Endpoint, build: Callable[..., ServedEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server does not return the sets its tokens were drawn from, and training needs them."""
    engine = build()
    server = engine._server
    engine.add(REQUESTS[:2])
    while engine.tokens_in_flight() < 10:
        time.sleep(0.01)

    def lose(ask: Ask, sampled: list[Sampled]) -> list[Sampled]:
        raise ServerFailure("gone")

    with monkeypatch.context() as patches:
        patches.setattr(server._api, "complete", lose)
        found = engine.interrupt([0, 1])
    assert [(one.key, len(one.tokens), one.finish_reason) for one in found] == [
        (key, 0, "interrupted") for key in (0, 1)
    ]
    assert [one.tokens.tolist() for one in generate(engine, REQUESTS)] == [draw(100 + key) for key in range(4)]
    assert len(endpoint.updates) == 2, "the server was given its weights again"


def test_request_with_the_key_of_one_that_was_interrupted_at_its_end_gets_its_own_answer(
    endpoint: Endpoint, build: Callable[..., ServedEngine]
) -> None:
    """The first was finished but not yet reported when it was interrupted."""
    engine = build()
    engine.add(REQUESTS[:1])
    deadline = time.monotonic() + 10
    while engine._server.client._news.empty():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    (ended,) = engine.interrupt([0])
    assert ended.tokens.tolist() == draw(100) and ended.finish_reason == "length"
    (found,) = generate(engine, [replace(REQUESTS[0], seed=7)])
    assert found.tokens.tolist() == draw(7) and found.finish_reason == "length"


def test_engine_on_two_nodes_is_refused(tmp_path: Path) -> None:
    """A server is started by its first rank, and the others would write weights that it cannot see."""
    (tmp_path / "config.json").write_text("{}")
    config = RolloutConfig(engine="vllm_server", tensor_model_parallel_size=2)
    process = Process(1, 5, 1, 4, torch.device("cpu"))
    spec = EngineSpec(str(tmp_path), SHAPE, "float32", 40, 24, config, process, seed=0, ranks=range(1, 5))
    with pytest.raises(UserError, match="ranks 3 to 4 are one engine on two nodes"):
        ServedEngine(spec)


def test_server_that_is_started_ends_with_what_it_has_started(tmp_path: Path) -> None:
    """And its last words are kept; nothing of torchrun's reaches it."""
    log = tmp_path / "log"
    process = ServerProcess(["bash", "-c", "echo rank ${RANK-none}; sleep 100 & exit 3"], {}, log)
    process._process.wait(20)
    assert process.has_ended and process.read_log() == "rank none\nthe server has ended with exit code 3\n"
    process.end()


def test_server_ends_with_its_rank(tmp_path: Path) -> None:
    """Which is killed, and so cannot end anything itself."""
    program = (
        "import sys, time; from pathlib import Path\n"
        "from megatron_rl.engines.servers.server_client import ServerProcess\n"
        "server = ServerProcess(['sleep', '100'], {}, Path(sys.argv[1]))\n"
        "print(server._process.pid, flush=True); time.sleep(100)\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "log")]
    rank = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert rank.stdout is not None
    watch = psutil.Process(int(rank.stdout.readline()))
    deadline = time.monotonic() + 60
    while not (servers := watch.children()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    rank.kill()
    rank.communicate()
    assert not psutil.wait_procs([watch, *servers], timeout=30)[1]
