# SPDX-License-Identifier: Apache-2.0
"""The endpoint of an episode, called by the stock `openai` client: every call is a turn of exact tokens.

A scripted policy replaces the engine. Not covered: the engine (tests/run/test_agents_in_loop.py).
"""

from __future__ import annotations

import json

import pytest
from scripted_policy import QUESTION, ScriptedPolicy

from megatron_rl.agents.program import find_program
from megatron_rl.types import UserError

PROGRAMS = '''
import asyncio, json, os, time, urllib.error, urllib.request
import openai
from megatron_rl.agents.environment import Done

TOOLS = [{"type": "function", "function": {"name": "calculate", "parameters": {}}}]


def agent(task, base_url):
    if task.row["kind"] == "asynchronous":
        return asynchronous(task, base_url)
    said = globals()[task.row["kind"]](openai.OpenAI(max_retries=0), task, base_url)
    result, seen = said if isinstance(said, tuple) else (said, None)
    with open(task.row["out"], "w") as file:
        json.dump(seen, file)
    return result


def chat(client, task, base_url):
    messages = [*task.messages]
    first = client.chat.completions.create(model="any", messages=messages, temperature=0.5)
    messages += [first.choices[0].message.model_dump(), {"role": "user", "content": "result 12"}]
    second = client.chat.completions.create(model="any", messages=messages, logprobs=True)
    return 0.75, [first.model_dump(), second.model_dump(), [model.id for model in client.models.list()]]


def tools(client, task, base_url):
    messages = [*task.messages]
    first = client.chat.completions.create(model="any", messages=messages, tools=TOOLS, stream=True)
    text, calls, reasons = "", [], []
    for chunk in first:
        delta = chunk.choices[0].delta
        text += delta.content or ""
        calls += delta.tool_calls or []
        reasons.append(chunk.choices[0].finish_reason)
    calls = [call.model_dump(exclude={"index"}) for call in calls]
    messages += [{"role": "assistant", "content": text or None, "tool_calls": calls}]
    messages += [{"role": "tool", "tool_call_id": calls[0]["id"], "content": "408"}]
    second = client.chat.completions.create(
        model="any", messages=messages, tools=TOOLS, stream=True, stream_options={"include_usage": True}
    )
    usage = [chunk.usage.model_dump() for chunk in second if chunk.usage]
    return Done(1.0, {"calls": len(calls)}), [text, calls, reasons, usage]


def text(client, task, base_url):
    first = client.completions.create(model="any", prompt="hello").choices[0].text
    whole = "hello" + first + " result"
    second = client.completions.create(model="any", prompt=whole, max_tokens=2, extra_body={"return_token_ids": True})
    return None, [first, second.model_dump()]


def repeats(client, task, base_url):
    answers = [client.chat.completions.create(model="any", messages=task.messages).model_dump() for _ in range(3)]
    again = client.chat.completions.create(model="any", messages=task.messages, user="again").model_dump()
    return 1, [*answers, again]


def interleaves(client, task, base_url):
    """Two conversations in turns."""
    talks = [[{"role": "user", "content": name}] for name in ("hello", "answer")]
    for _ in range(2):
        for talk in talks:
            reply = client.chat.completions.create(model="any", messages=talk).choices[0].message
            talk += [{"role": "assistant", "content": reply.content}, {"role": "user", "content": "result"}]
    return 1.0


PARAMS = {"logprobs": 1, "max_tokens": 3}


def generates(client, task, base_url):
    request = urllib.request.Request(
        base_url.removesuffix("/v1") + "/inference/v1/generate",
        json.dumps({"model": "any", "token_ids": [9, 10], "sampling_params": PARAMS}).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
    )
    with urllib.request.urlopen(request) as answer:
        return 1.0, json.loads(answer.read())


REFUSED = (
    {"temperature": 0.7}, {"top_p": 0.9}, {"n": 2}, {"seed": 3}, {"stop": ["x"]}, {"presence_penalty": 0.1},
    {"logit_bias": {"5": 1}}, {"tool_choice": "required"}, {"response_format": {"type": "json_object"}},
    {"extra_body": {"top_k": 5}}, {"extra_body": {"guided_regex": "a"}}, {"max_tokens": 0}, {"messages": []},
)


def refused(client, task, base_url):
    found = []
    for fields in REFUSED:
        try:
            client.chat.completions.create(**{"model": "any", "messages": task.messages, **fields})
            found.append("taken")
        except openai.BadRequestError as error:
            found.append(error.body["message"])
    for call in (
        lambda: openai.OpenAI(api_key="wrong", max_retries=0).models.list(),
        lambda: client.embeddings.create(model="any", input="x"),
        lambda: client.completions.create(model="any", prompt=[10**6]),
    ):
        try:
            call()
        except openai.APIStatusError as error:
            found.append(f"{error.status_code} {error.body['message']}")
    accepted = dict(temperature=0.5, top_p=1, n=1, stop=[], presence_penalty=0, logit_bias={}, tool_choice="auto")
    client.chat.completions.create(model="any", messages=task.messages, **accepted)
    return 1.0, found


async def asynchronous(task, base_url):
    client = openai.AsyncOpenAI(max_retries=0)
    asked = [[{"role": "user", "content": text}] for text in ("hello", "answer", "result")]
    await asyncio.gather(*(client.chat.completions.create(model="any", messages=ask) for ask in asked))
    return 0.5


def needs_tools(client, task, base_url):
    client.chat.completions.create(model="any", messages=task.messages, tools=TOOLS)
    return 1.0


def tries_tools(client, task, base_url):
    """Continues without them."""
    try:
        client.chat.completions.create(model="any", messages=task.messages, tools=TOOLS)
    except openai.BadRequestError as error:
        client.chat.completions.create(model="any", messages=task.messages, tools=TOOLS, tool_choice="none")
        return 0.5, error.body


def silent(client, task, base_url):
    return 1.0


def raises(client, task, base_url):
    client.chat.completions.create(model="any", messages=task.messages)
    raise RuntimeError("lost the thread")


def says_nonsense(client, task, base_url):
    client.chat.completions.create(model="any", messages=task.messages)
    return "good"


def never_ends(client, task, base_url):
    for number in range(100):
        client.chat.completions.create(model="any", messages=task.messages, user=str(number))


def hangs(client, task, base_url):
    client.chat.completions.create(model="any", messages=task.messages)
    time.sleep(1000)
'''
CALL = '<tool_call>\n{"name": "calculate", "arguments": {"expression": "12*34"}}\n</tool_call>'


@pytest.fixture(scope="module")
def rank(tmp_path_factory):
    found = ScriptedPolicy(tmp_path_factory.mktemp("endpoint"), PROGRAMS)
    yield found
    found.processes.close_all()


def test_a_chat_is_one_branch_of_the_sampled_tokens(rank):
    answer, rollout, requests, (first, second, models) = rank.play("chat", "hello")
    assert (answer.reward, answer.finish_reason, models) == (0.75, None, ["policy"])
    (branch,) = rollout.branches
    assert requests[0] == rank.encode(QUESTION) == rollout.prompt.tokens.tolist()
    assert branch.tokens[branch.sampled].tolist() == rank.spell("hello") * 2  # "hello" is one token to the encoder
    whole = rank.tokenizer.apply_chat_template(
        [*QUESTION, {"role": "assistant", "content": "hello"}, {"role": "user", "content": "result 12"}]
    )
    assert rank.tokenizer._tokenizer.decode(requests[1]) == whole
    assert first["choices"][0]["message"]["content"] == "hello" and first["choices"][0]["finish_reason"] == "stop"
    assert first["usage"]["prompt_tokens"] == len(requests[0]) and first["usage"]["completion_tokens"] == 6
    content = second["choices"][0]["logprobs"]["content"]
    assert [entry["logprob"] for entry in content] == [-float(i) for i in range(6)]
    assert "".join(entry["token"] for entry in content) == "hello"


def test_tool_calls_are_streamed_and_put_back_as_they_were_sampled(rank):
    answer, rollout, requests, (text, calls, reasons, usage) = rank.play("tools", f"hello {CALL}", "408")
    assert (answer.reward, answer.components) == (1.0, {"calls": 1.0})
    assert text == "hello" and reasons == [None, "tool_calls"]
    assert calls[0]["function"] == {"name": "calculate", "arguments": '{"expression": "12*34"}'}
    (branch,) = rollout.branches
    assert requests[1][: len(requests[0])] == requests[0]
    assert branch.tokens[branch.sampled].tolist() == rank.spell(f"hello {CALL}") + rank.spell("408")
    observed = rank.tokenizer._tokenizer.decode(requests[1][rollout.turns[0].stop :])
    assert observed == "\n<|im_start|>user\n<tool_response>\n408\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    counts = {"prompt_tokens": len(requests[1]), "completion_tokens": 4, "total_tokens": len(requests[1]) + 4}
    assert [{name: found[name] for name in counts} for found in usage] == [counts]
    assert "# Tools" in rank.tokenizer._tokenizer.decode(requests[0])


def test_plain_text_is_continued_and_a_reply_is_bounded_where_the_request_says_so(rank):
    answer, rollout, requests, (first, second) = rank.play("text", "answer")
    assert answer.reward is None and first == "answer"
    known = rank.tokenizer.encode("hello") + rank.spell("answer")
    assert requests == [rank.tokenizer.encode("hello"), known + rank.tokenizer.encode(" result")]
    choice = second["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("an", "length")
    assert choice["token_ids"] == rank.spell("an", closed=False) and second["prompt_token_ids"] == requests[1]
    assert len(rollout.branches) == 1


def test_a_repeated_request_is_told_what_was_said_and_another_user_is_another_request(rank):
    answer, rollout, requests, seen = rank.play("repeats", "hello", "answer")
    assert answer.reward == 1.0 and len(requests) == 2 and requests[0] == requests[1]
    assert seen[0] == seen[1] == seen[2] != seen[3]
    assert [branch.tokens[branch.sampled].tolist() for branch in rollout.branches] == [
        rank.spell("hello"),
        rank.spell("answer"),
    ]


def test_conversations_in_turns_are_a_branch_each(rank):
    _, rollout, requests, _ = rank.play("interleaves", "hello", "answer")
    assert [turn.branch for turn in rollout.turns] == [0, 1, 0, 1]
    for branch, text in zip(rollout.branches, ("hello", "answer"), strict=True):
        assert branch.tokens[branch.sampled].tolist() == rank.spell(text) * 2
    assert all(
        rollout.branches[turn.branch].tokens[: turn.start].tolist() == request
        for turn, request in zip(rollout.turns, requests, strict=True)
    )


def test_tokens_in_tokens_out(rank):
    _, rollout, requests, seen = rank.play("generates", "answer")
    assert requests == [[9, 10]] and rollout.branches[0].num_prompt_tokens < 2
    choice = seen["choices"][0]
    assert choice["token_ids"] == rank.spell("answer")[:3] and choice["finish_reason"] == "length"
    assert choice["logprobs"]["content"][1]["token"] == f"token_id:{choice['token_ids'][1]}"
    assert choice["logprobs"]["content"][1]["logprob"] == -1.0


def test_what_the_run_decides_is_refused_by_the_name_of_its_setting(rank):
    answer, _, requests, found = rank.play("refused", "answer")
    assert answer.reward == 1.0 and len(requests) == 1
    names = ["rollout.temperature", "rollout.top_p", "rollout.n", "trainer.seed", "rollout.stop", "no penalties"]
    names += ["no biases", "say auto", "response_format", "rollout.top_k", "guided_regex", "max_tokens", "at least one"]
    names += [
        "401 this is the endpoint of another",
        "404 there is no /v1/embeddings",
        "400 1000000 is no token",
    ]
    assert len(found) == len(names)
    assert all(name in message for name, message in zip(names, found, strict=True)), found


SHOWS_NONE, UNKNOWN = "the chat template does not show tools", "the chat template writes tool calls in a format"


@pytest.mark.parametrize(
    ("template", "pattern", "message"),
    [
        ("llama3", "", SHOWS_NONE),
        pytest.param("glm4", "arg_key", UNKNOWN, marks=pytest.mark.slow),
    ],
)
def test_tools_that_the_template_cannot_show_or_call_are_refused(template, pattern, message, tmp_path):
    """The client gets status 400, and an episode that fails of it the error of the run, in four parts."""
    (tmp_path / "chat").mkdir()
    rank = ScriptedPolicy(tmp_path / "chat", PROGRAMS, template=template)
    if pattern:
        rank.tokenizer._tokenizer.chat_template = rank.tokenizer._tokenizer.chat_template.replace(pattern, "name")
        rank.tokenizer._tokenizer.save_pretrained(tmp_path / "chat")
    try:
        answer, _, requests, said = rank.play("tries_tools", "answer")
        assert (answer.reward, len(requests)) == (0.5, 1) and said["param"] == "tools"
        assert said["message"].startswith(message) and ("another model" in said["message"]) == (message == SHOWS_NONE)
        answer, _, requests, _ = rank.play("needs_tools", "answer")
        assert (answer.finish_reason, requests) == ("error", [])
        *_, last = answer.failure.partition("UserError: ")
        assert last.startswith(message)
        assert [line.split(":")[0].strip() for line in last.splitlines()[1:]] == ["source", "expected", "hint"]
    finally:
        rank.processes.close_all()


def test_requests_at_the_same_time_are_answered_one_after_another(rank):
    answer, rollout, requests, _ = rank.play("asynchronous", "answer")
    assert answer.reward == 0.5 and len(rollout.branches) == 3
    asked = [rank.encode([{"role": "user", "content": text}]) for text in ("hello", "answer", "result")]
    assert sorted(requests) == sorted(asked)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("silent", "without a request to its endpoint"),
        ("raises", "lost the thread"),
        ("says_nonsense", "a str instead of Observation or Done"),
    ],
)
def test_a_program_that_fails_is_an_episode_that_failed(rank, kind, message):
    answer, *_ = rank.play(kind)
    assert answer.finish_reason == "error" and message in answer.failure


def test_a_program_that_never_ends_is_cut_with_the_reward_0(rank):
    answer, rollout, _, _ = rank.play("never_ends")
    assert (answer.finish_reason, answer.reward, len(rollout.turns)) == ("turns", 0.0, 4)


def test_a_program_that_hangs_is_killed(rank):
    answer, *_ = rank.play("hangs")
    assert answer.finish_reason == "timeout" and "agents.turn_timeout_seconds" in answer.failure


def test_a_program_that_is_not_there_is_named(tmp_path):
    (tmp_path / "empty.py").write_text("")
    for name, message in (
        ("agent", "names no function"),
        (f"{tmp_path / 'empty.py'}:agent", 'defines no function "agent"'),
        ("no_such_module:agent", "ModuleNotFoundError"),
    ):
        with pytest.raises(UserError, match=message):
            find_program(name)
    assert find_program("json:loads") is json.loads
