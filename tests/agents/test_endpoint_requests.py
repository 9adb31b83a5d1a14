# SPDX-License-Identifier: Apache-2.0
"""Wrong requests to the endpoint of an episode: each gets its error, and costs neither a turn nor the connection.

The endpoint answers in this process, from a function in place of the rank. Not covered: well-formed requests, which are
in test_endpoint.py, and clients that send a byte at a time.
"""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from chat_templates import write_chat_tokenizer
from scripted_policy import QUESTION

from megatron_rl.agents.endpoint import Endpoint, Sample
from megatron_rl.agents.environment import Task
from megatron_rl.agents.episode import Opening, Setup, read_tokenizer
from megatron_rl.agents.requests import EndpointServer

CHAT, TEXT, GENERATE = "/v1/chat/completions", "/v1/completions", "/inference/v1/generate"


class Served:
    """An endpoint, and the prompts that reach its policy."""

    def __init__(self, directory: Path) -> None:
        eos = write_chat_tokenizer(directory, "qwen2.5").eos_token_id
        setup = Setup(None, str(directory), {}, (eos,), False, 4, 1, program="x:y", temperature=0.5, context_length=128)
        setup, tokenizer = read_tokenizer(setup)
        opening = Opening(Task("", "", "", {}, {}, 1, QUESTION), [9])
        self.prompts: list[list[int]] = []
        endpoint = Endpoint(setup, tokenizer, opening, self.sample)
        self.server = EndpointServer(endpoint.list_models, endpoint.answer)
        self.address = ("127.0.0.1", self.server.server_address[1])
        self.headers = {"Authorization": f"Bearer {self.server.token}"}
        self.reply = [*tokenizer.encode("answer"), eos]

    def sample(self, tokens: list[int], max_tokens: int | None) -> Sample:
        """The same reply always."""
        if tokens == [5]:
            raise RuntimeError("the rank is gone")
        self.prompts.append(tokens)
        return Sample(self.reply, [0.0] * len(self.reply), "stop")

    def exchange(self, head: str, body: bytes = b"") -> tuple[int, dict[str, Any], bool]:
        """Status and body of the answer to raw bytes, and whether the connection stays open."""
        with socket.create_connection(self.address, timeout=5) as connection:
            connection.sendall(head.encode() + b"\r\n\r\n" + body)
            answer = http.client.HTTPResponse(connection)
            answer.begin()
            return answer.status, json.loads(answer.read()), not answer.will_close


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    found = Served(tmp_path_factory.mktemp("endpoint"))
    yield found
    found.server.shutdown()


HUGE = 300 << 20
KEY = "Authorization: Bearer {key}\r\n"


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (f"Content-Length: {HUGE}", 401),
        (f"Authorization: Bearer wrong\r\nContent-Length: {HUGE}", 401),
        (f"Expect: 100-continue\r\nContent-Length: {HUGE}", 401),
        ("Transfer-Encoding: chunked", 401),
        (f"{KEY}Content-Length: {10**15}", 413),
        (f"{KEY}Expect: 100-continue\r\nContent-Length: {HUGE}", 413),
        (f"{KEY}Content-Length: -5", 400),
        (f"{KEY}Content-Length: five", 400),
        (f"{KEY}Content-Length: {'9' * 5000}", 413),
        (f"{KEY}Transfer-Encoding: chunked", 411),
    ],
)
def test_bodies_that_are_not_wanted_are_not_read(served: Served, head: str, status: int) -> None:
    """None of them is sent; the answer comes without it, and the connection ends because it may still come."""
    found, body, stays = served.exchange(f"POST {CHAT} HTTP/1.1\r\n{head.format(key=served.server.token)}")
    assert (found, stays) == (status, False)
    assert {*body["error"]} == {"message", "type", "param", "code"} and body["error"]["type"] == "invalid_request_error"


def test_a_wrong_key_is_refused_whatever_the_size_of_the_body(served: Served) -> None:
    for size in (10, 1 << 20):
        client = openai.OpenAI(base_url=f"{served.server.url}/v1", api_key="wrong", max_retries=0)
        with pytest.raises(openai.AuthenticationError):
            client.chat.completions.create(model="any", messages=[{"role": "user", "content": "x" * size}])


def nest(depth: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(depth):
        found = [found]
    return found


def chat(**fields: Any) -> str:
    return json.dumps({"messages": QUESTION, **fields})


def say(**fields: Any) -> str:
    return chat(messages=[{"role": "user", "content": "hello", **fields}])


def call(arguments: Any, **fields: Any) -> str:
    function = {"name": "look", "arguments": arguments, **fields}
    return say(role="assistant", tool_calls=[{"id": "1", "type": "function", "function": function}])


WRONG = {
    "deep JSON": (CHAT, "[" * 100_000),
    "deep message": (CHAT, '{"messages": ' + "[" * 50_000 + "]" * 50_000 + "}"),
    "deep tools": (CHAT, chat(tools=nest(500))),
    "parameters 5": (CHAT, chat(tools=[{"type": "function", "function": {"name": "a", "parameters": 5}}])),
    "deep arguments": (CHAT, call("[" * 50_000)),
    "no JSON": (CHAT, "hello"),
    "no UTF-8": (CHAT, b'{"messages": "\xff"}'),
    "a list": (CHAT, "[]"),
    "an empty body": (CHAT, ""),
    "NaN": (CHAT, chat(temperature=float("nan"))),
    "infinity": (CHAT, chat(temperature=float("inf"))),
    "a long number": (CHAT, '{"max_tokens": ' + "9" * 5000 + "}"),
    "surrogate": (CHAT, say(content="\ud800")),
    "surrogate in a name": (CHAT, chat(**{"\udfff": 1})),
    "surrogate in a text": (TEXT, json.dumps({"prompt": "a\ud83d"})),
    "surrogate in arguments": (CHAT, call('{"a": "\\ud800"}')),
    "messages 5": (CHAT, chat(messages=5)),
    "messages of numbers": (CHAT, chat(messages=[5])),
    "messages null": (CHAT, chat(messages=None)),
    "content {}": (CHAT, say(content={"a": 1})),
    "content 5": (CHAT, say(content=5)),
    "content of numbers": (CHAT, say(content=[5])),
    "role 5": (CHAT, say(role=5)),
    "tool_calls 5": (CHAT, say(tool_calls=5)),
    "tool_calls {}": (CHAT, say(tool_calls={"a": 1})),
    "arguments 5": (CHAT, call(5)),
    "arguments of a list": (CHAT, call("[1]")),
    "name of a call": (CHAT, call("{}", name=5)),
    "max_tokens x": (CHAT, chat(max_tokens="x")),
    "a long value": (CHAT, chat(temperature="x" * 10**5)),
    "a long prompt of texts": (TEXT, json.dumps({"prompt": ["x" * 10**5, 5]})),
    "max_tokens 0": (CHAT, chat(max_tokens=0)),
    "max_tokens true": (CHAT, chat(max_tokens=True)),
    "max_tokens 1.5": (CHAT, chat(max_tokens=1.5)),
    "temperature hot": (CHAT, chat(temperature="hot")),
    "n": (CHAT, chat(n=10**9)),
    "stop 5": (CHAT, chat(stop=5)),
    "stop {}": (CHAT, chat(stop={"a": 1})),
    "tools 5": (CHAT, chat(tools=5)),
    "tools of numbers": (CHAT, chat(tools=[5])),
    "tools without a name": (CHAT, chat(tools=[{"type": "function", "function": {}}])),
    "tool_choice": (CHAT, chat(tool_choice=[5])),
    "model 5": (CHAT, chat(model=5)),
    "model deep": (CHAT, chat(model=nest(100))),
    "stream x": (CHAT, chat(stream="x")),
    "stream_options 5": (CHAT, chat(stream=True, stream_options=5)),
    "stream_options of a list": (CHAT, chat(stream=True, stream_options=["include_usage"])),
    "include_usage x": (CHAT, chat(stream=True, stream_options={"include_usage": "x"})),
    "logprobs x": (CHAT, chat(logprobs="x")),
    "return_token_ids x": (CHAT, chat(return_token_ids="x")),
    "prompt 5": (TEXT, '{"prompt": 5}'),
    "prompt {}": (TEXT, '{"prompt": {"a": 1}}'),
    "prompts": (TEXT, '{"prompt": ["a", "b"]}'),
    "prompt of texts and tokens": (TEXT, '{"prompt": ["a", 5]}'),
    "token 1e30": (TEXT, json.dumps({"prompt": [10**30]})),
    "token -1": (TEXT, '{"prompt": [-1]}'),
    "sampling_params 5": (GENERATE, '{"token_ids": [9], "sampling_params": 5}'),
    "stop_token_ids 5": (GENERATE, '{"token_ids": [9], "sampling_params": {"stop_token_ids": 5}}'),
    "stop_token_ids of lists": (GENERATE, '{"token_ids": [9], "sampling_params": {"stop_token_ids": [[5], "x"]}}'),
    "sampling_params of a chat": (CHAT, chat(sampling_params=5)),
    "token_ids {}": (GENERATE, '{"token_ids": {"a": 1}}'),
}


@pytest.mark.parametrize(("path", "body"), WRONG.values(), ids=WRONG)
def test_wrong_bodies_get_400_and_cost_no_turn(served: Served, path: str, body: str | bytes) -> None:
    """The next request comes through the same connection."""
    connection = http.client.HTTPConnection(*served.address, timeout=10)
    connection.connect()
    first, known = connection.sock, len(served.prompts)
    connection.request("POST", path, body, served.headers)
    answer = connection.getresponse()
    found = json.loads(answer.read())
    assert answer.status == 400 and {*found["error"]} == {"message", "type", "param", "code"}
    assert 0 < len(found["error"]["message"]) <= 1000 and len(served.prompts) == known
    connection.request("POST", GENERATE, json.dumps({"token_ids": [9], "user": path}), served.headers)
    answer = connection.getresponse()
    assert answer.status == 200 and json.loads(answer.read())["choices"][0]["token_ids"] == served.reply
    assert connection.sock is first
    connection.close()


def test_a_client_that_retries_is_told_of_its_mistake(served: Served) -> None:
    """A connection that is closed would have it try again, and then report the network."""
    client = openai.OpenAI(base_url=f"{served.server.url}/v1", api_key=served.server.token, max_retries=2)
    with pytest.raises(openai.BadRequestError, match="stream_options"):
        client.chat.completions.create(model="any", messages=QUESTION, stream=True, stream_options=5)
    assert client.chat.completions.create(model="any", messages=QUESTION).choices[0].message.content


def test_what_is_not_the_fault_of_the_request_is_no_400(served: Served) -> None:
    """Nor silence: the program sees which error it was."""
    client = openai.OpenAI(base_url=f"{served.server.url}/v1", api_key=served.server.token, max_retries=0)
    with pytest.raises(openai.InternalServerError, match="RuntimeError: the rank is gone"):
        client.completions.create(model="any", prompt=[5])
