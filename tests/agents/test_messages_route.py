# SPDX-License-Identifier: Apache-2.0
"""The Anthropic-style route of an episode's endpoint: the same tokens as OpenAI's route, in another form.

One test takes the client of the package anthropic, if it can be imported or ANTHROPIC_PYTHON names an interpreter that
can. Not covered: images, documents and thoughts as blocks, which are refused.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chat_templates import write_chat_tokenizer
from scripted_policy import QUESTION

from megatron_rl.agents.endpoint import Endpoint, Sample
from megatron_rl.agents.environment import Task
from megatron_rl.agents.episode import Opening, Setup, read_tokenizer
from megatron_rl.agents.requests import EndpointServer

CALL = '<tool_call>\n{"name": "calculate", "arguments": {"expression": "12*34"}}\n</tool_call>'
SCHEMA = {"type": "object", "properties": {"expression": {"type": "string"}}}
OPENAI_TOOLS = [{"type": "function", "function": {"name": "calculate", "description": "c", "parameters": SCHEMA}}]
TOOLS = [{"name": "calculate", "description": "c", "input_schema": SCHEMA, "cache_control": {"type": "ephemeral"}}]


class Served:
    """An endpoint whose policy has scripted replies, and the prompts that reach it."""

    def __init__(self, directory: Path) -> None:
        eos = write_chat_tokenizer(directory, "qwen2.5").eos_token_id
        setup = Setup(None, str(directory), {}, (eos,), False, 4, 1, program="x:y", temperature=0.5, context_length=128)
        setup, self.tokenizer = read_tokenizer(setup)
        self.setup, self.eos = setup, eos

    def begin(self, *replies: str) -> None:
        """Begin an episode."""
        self.prompts: list[list[int]] = []
        self.replies = [*replies]
        tokens = self.tokenizer.encode_rendered(self.tokenizer.render(QUESTION))
        endpoint = Endpoint(
            self.setup, self.tokenizer, Opening(Task("", "", "", {}, {}, 1, QUESTION), tokens), self._sample
        )
        self.server = EndpointServer(endpoint.list_models, endpoint.answer)

    def _sample(self, tokens: list[int], max_tokens: int | None) -> Sample:
        reply = [*self.tokenizer.encode(self.replies[len(self.prompts)]), self.eos]
        self.prompts.append(tokens)
        is_cut = max_tokens is not None and max_tokens < len(reply)
        return Sample(reply[:max_tokens], [0.0] * len(reply[:max_tokens]), "length" if is_cut else "stop")

    def post(self, path: str, **body: Any) -> Any:
        """Return the answer to a request; a list of events if it is streamed."""
        headers = {"x-api-key": self.server.token} if path == "/v1/messages" else {}
        headers |= {"Authorization": f"Bearer {self.server.token}"} if not headers else {}
        request = urllib.request.Request(self.server.url + path + "?beta=true", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=10) as answer:
            text = answer.read().decode()
        if not body.get("stream"):
            return json.loads(text)
        events = [block.split("\n") for block in text.strip().split("\n\n")]
        found = [json.loads(data.removeprefix("data: ")) for _, data in events]
        assert [name for name, _ in events] == [f"event: {event['type']}" for event in found]
        return found


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return Served(tmp_path_factory.mktemp("endpoint"))


@pytest.fixture
def served(loaded: Served) -> Iterator[Served]:
    loaded.begin(f"hello {CALL}", "408", "answer")
    yield loaded
    loaded.server.shutdown()


def play_openai(served: Served) -> list[list[int]]:
    """Play a conversation with a tool call, its result and a question; return its prompts."""
    messages: list[Any] = [{"role": "system", "content": "Be brief."}, *QUESTION]
    for further in ([{"role": "tool", "content": "408"}], [{"role": "user", "content": "answer"}], []):
        reply = served.post("/v1/chat/completions", messages=messages, tools=OPENAI_TOOLS)["choices"][0]["message"]
        calls = [call["id"] for call in reply.get("tool_calls") or []]
        messages += [reply, *({**one, "tool_call_id": calls[0]} if one["role"] == "tool" else one for one in further)]
    return served.prompts


def play_anthropic(served: Served) -> tuple[list[list[int]], list[Any]]:
    """Play the same conversation; return its prompts and replies."""
    messages: list[Any] = [{"role": "user", "content": QUESTION[0]["content"]}]
    replies = []
    for further in ("result", "answer", ""):
        system = [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]
        replies.append(served.post("/v1/messages", system=system, messages=messages, tools=TOOLS, max_tokens=99))
        blocks = replies[-1]["content"]
        reply: list[Any] = [{"type": "text", "text": further}]
        if further == "result":
            use = blocks[-1]["id"]
            reply = [{"type": "tool_result", "tool_use_id": use, "content": [{"type": "text", "text": "408"}]}]
        messages += [{"role": "assistant", "content": blocks}, {"role": "user", "content": reply}]
    return served.prompts, replies


def test_a_conversation_has_the_tokens_of_the_other_route(served: Served) -> None:
    prompts, replies = play_anthropic(served)
    served.server.shutdown()
    served.begin(*served.replies)
    assert play_openai(served) == prompts
    assert len(prompts) == 3 and all(later[: len(first)] == first for first, later in zip(prompts, prompts[1:]))
    assert "Be brief." in served.tokenizer.decode(prompts[0]) and "# Tools" in served.tokenizer.decode(prompts[0])
    first, second, _ = replies
    assert first["content"][0] == {"type": "text", "text": "hello"} and first["stop_reason"] == "tool_use"
    assert first["content"][1] | {"id": ""} == {
        "type": "tool_use",
        "id": "",
        "name": "calculate",
        "input": {"expression": "12*34"},
    }
    assert (second["content"], second["stop_reason"]) == ([{"type": "text", "text": "408"}], "end_turn")
    reply = [*served.tokenizer.encode(served.replies[1]), served.eos]
    assert second["usage"] == {"input_tokens": len(prompts[1]), "output_tokens": len(reply)}
    assert (second["type"], second["role"]) == ("message", "assistant")


def test_a_conversation_goes_on_by_the_other_route(served: Served) -> None:
    answer = served.post("/v1/messages", messages=QUESTION, tools=TOOLS)
    (use,) = [block for block in answer["content"] if block["type"] == "tool_use"]
    function = {"name": use["name"], "arguments": json.dumps(use["input"])}
    call = {"id": use["id"], "type": "function", "function": function}
    messages = [*QUESTION, {"role": "assistant", "content": "hello", "tool_calls": [call]}]
    messages += [{"role": "tool", "tool_call_id": use["id"], "content": "408"}]
    served.post("/v1/chat/completions", messages=messages, tools=OPENAI_TOOLS)
    reply = [*served.tokenizer.encode(served.replies[0]), served.eos]
    assert served.prompts[1][: len(served.prompts[0]) + len(reply)] == served.prompts[0] + reply


def test_events_carry_the_reply_and_a_retry_costs_no_turn(served: Served) -> None:
    fields: dict[str, Any] = {"messages": QUESTION, "tools": TOOLS, "max_tokens": 99}
    whole = served.post("/v1/messages", **fields)
    events = served.post("/v1/messages", **fields, stream=True)
    assert len(served.prompts) == 1
    blocks = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert blocks == [{"type": "text", "text": ""}, {**whole["content"][1], "input": {}}]
    assert deltas[0]["text"] == "hello" and json.loads(deltas[1]["partial_json"]) == {"expression": "12*34"}
    assert events[0]["message"] == {**whole, "content": [], "stop_reason": None} | {
        "usage": {**whole["usage"], "output_tokens": 0}
    }
    assert events[-2]["delta"]["stop_reason"] == "tool_use" and events[-2]["usage"] == whole["usage"]


def test_a_reply_is_cut_at_the_limit_of_the_request(served: Served) -> None:
    answer = served.post("/v1/messages", messages=QUESTION, max_tokens=2)
    assert (answer["stop_reason"], answer["usage"]["output_tokens"]) == ("max_tokens", 2)


REFUSED = {
    "rollout.temperature": {"temperature": 1.0},
    "rollout.top_k": {"top_k": 5},
    "rollout.stop": {"stop_sequences": ["x"]},
    "say auto": {"tool_choice": {"type": "any"}},
    "the chat template": {"thinking": {"type": "enabled", "budget_tokens": 1024}},
    "container is not known": {"container": "c"},
    "input_schema": {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
    "blocks of the type text": {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
    "with a type": {"messages": [{"role": "user", "content": ["hello"]}]},
    "the role user": {"messages": [{"role": "tool", "content": "hello"}]},
    "no object with a type": {"tool_choice": "auto"},
    "at least one message": {"messages": []},
    "content is a text": {"messages": [{"role": "user", "content": 5}]},
    "function that has a name": {
        "messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "1", "input": {}}]}]
    },
}


@pytest.mark.parametrize("message", REFUSED)
def test_wrong_requests_get_an_error_and_cost_no_turn(served: Served, message: str) -> None:
    with pytest.raises(urllib.error.HTTPError) as caught:
        served.post("/v1/messages", **{"messages": QUESTION, "max_tokens": 9, **REFUSED[message]})
    body = json.loads(caught.value.read())
    assert (caught.value.code, body["type"], body["error"]["type"]) == (400, "error", "invalid_request_error")
    assert message in body["error"]["message"], body["error"]["message"]
    assert not served.prompts


CLIENT = """
import anthropic
client = anthropic.Anthropic(max_retries=0)
tools = [{"name": "calculate", "description": "c", "input_schema": {"type": "object", "properties": {}}}]
messages = [{"role": "user", "content": "hello"}]
first = client.messages.create(model="any", max_tokens=99, messages=messages, tools=tools)
(use,) = [block for block in first.content if block.type == "tool_use"]
messages += [{"role": "assistant", "content": first.content}]
messages += [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id, "content": "408"}]}]
with client.messages.stream(model="any", max_tokens=99, messages=messages, tools=tools) as stream:
    text = "".join(stream.text_stream)
    last = stream.get_final_message()
print(use.input["expression"], first.stop_reason, text, last.stop_reason, last.usage.output_tokens > 0)
try:
    client.messages.create(model="any", max_tokens=99, messages=messages, extra_body={"top_k": 5})
except anthropic.BadRequestError as error:
    print("rollout.top_k" in str(error))
"""


@pytest.mark.slow
def test_the_client_of_the_package_anthropic(served: Served) -> None:
    interpreter = os.environ.get("ANTHROPIC_PYTHON") or sys.executable
    if interpreter == sys.executable and importlib.util.find_spec("anthropic") is None:
        pytest.skip("anthropic is not installed, and ANTHROPIC_PYTHON names no interpreter that has it")
    names = {"ANTHROPIC_BASE_URL": served.server.url, "ANTHROPIC_API_KEY": served.server.token}
    done = subprocess.run([interpreter, "-c", CLIENT], env=names, capture_output=True, text=True, timeout=120)
    assert done.stdout.split("\n") == ["12*34 tool_use 408 end_turn True", "True", ""], done.stderr
    assert len(served.prompts) == 2
