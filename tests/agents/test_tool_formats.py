# SPDX-License-Identifier: Apache-2.0
"""Formats of tool calls: found from the chat template, read from tokens, and compared with vLLM's parsers.

The templates are short ones with the marks of the published ones. Not covered: replies of a model that has learned
another format than its template shows.
"""

from __future__ import annotations

import json
import time
from types import SimpleNamespace

import numpy as np
import pytest
from chat_templates import spell_deepseek, write_chat_tokenizer

from megatron_rl.agents.environment import TOOL, Task, calculate
from megatron_rl.agents.episode import Opening, Setup, play_environment
from megatron_rl.agents.program import check_episodes
from megatron_rl.agents.tool_formats import FORMATS, find_tool_format, read_reply, read_tool_calls
from megatron_rl.agents.tools.tool import ToolEnvironment
from megatron_rl.config.sections import AgentsConfig
from megatron_rl.types import Prompt, UserError

OF_TEMPLATE = {
    "qwen2.5": "hermes",  # ours shows no earlier calls
    "llama3": "hermes",
    "llama3.1": "llama3",
    "glm4": "glm",
    "qwen3-coder": "qwen3_coder",
    "deepseek-v3": "deepseek",
    "deepseek-v3.1": "deepseek",
    "mistral": "mistral",
    "mistral-v11": "mistral",
}
SPEC = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {
            "type": "object",
            "properties": {
                "place": {"type": "string"},
                "depth": {"type": "integer"},
                "ratio": {"anyOf": [{"type": "number"}, {"type": "null"}]},
                "deep": {"type": "boolean"},
                "names": {"type": "array"},
                "more": {"type": "object"},
            },
        },
    },
}
ARGUMENTS = {"place": "12", "depth": 3, "ratio": 0.5, "deep": True, "names": ["a", 1], "more": {"b": {"c": "}"}}}
JSON = json.dumps(ARGUMENTS)
SEP, BEGIN, END = (spell_deepseek(f"tool {name}") for name in ("sep", "call begin", "call end"))
CALLS_BEGIN, CALLS_END = (spell_deepseek(f"tool calls {name}") for name in ("begin", "end"))
TEXTS = {name: value if isinstance(value, str) else json.dumps(value) for name, value in ARGUMENTS.items()}
GLM = "".join(f"<arg_key>{name}</arg_key>\n<arg_value>{text}</arg_value>\n" for name, text in TEXTS.items())
QWEN = "".join(f"<parameter={name}>\n{text}\n</parameter>\n" for name, text in TEXTS.items())
# Format -> a reply with a call of `look`, and two calls.
REPLIES = {
    "hermes": [f'<tool_call>\n{{"name": "look", "arguments": {JSON}}}\n</tool_call>'],
    "qwen3_coder": [f"<tool_call>\n<function=look>\n{QWEN}</function>\n</tool_call>"],
    "glm": [f"<tool_call>look\n{GLM}</tool_call>"],
    "deepseek": [
        f"{CALLS_BEGIN}{BEGIN}look{SEP}{JSON}{END}{CALLS_END}",
        f"{CALLS_BEGIN}{BEGIN}function{SEP}look\n```json\n{JSON}\n```{END}{CALLS_END}",
    ],
    "mistral": [
        f'[TOOL_CALLS] [{{"name": "look", "arguments": {JSON}}}]',
        f"[TOOL_CALLS]look[ARGS]{JSON}",
    ],
    "llama3": [f'{{"name": "look", "parameters": {JSON}}}', f'<|python_tag|>{{"name": "look", "arguments": {JSON}}}'],
}
CASES = [(name, reply) for name, replies in REPLIES.items() for reply in replies]


def read(name, text, tools=(SPEC,)):
    rest, calls = read_tool_calls(text, FORMATS[name], tools)
    return rest, [(call.name, call.arguments) for call in calls]


@pytest.mark.parametrize(("name", "reply"), CASES)
def test_calls_have_the_arguments_that_were_written_and_the_types_of_the_tool(name, reply):
    assert read(name, reply) == ("", [("look", ARGUMENTS)])
    assert read(name, f"First: {reply}") == ("First:", [("look", ARGUMENTS)])
    joined = reply + "; " * (name == "llama3") + reply
    assert read(name, joined)[1] == [("look", ARGUMENTS)] * 2
    assert read(name, "no call, {1} but <tool> and [x]") == ("no call, {1} but <tool> and [x]", [])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "<tool_call>{broken}</tool_call>"),
        ("hermes", "<tool_call>[1]</tool_call>"),
        ("hermes", f"<tool_call>{'[' * 10**5}</tool_call>"),
        ("qwen3_coder", "<tool_call>look</tool_call>"),
        ("glm", "<tool_call>look at it</tool_call>"),
        ("glm", "<tool_call>look<arg_key>a</arg_key>1</arg_value></tool_call>"),
        ("deepseek", f"{BEGIN}look{SEP}{{broken{END}"),
        ("mistral", "[TOOL_CALLS] [{broken"),
        ("mistral", '[TOOL_CALLS] [{"name": "look"}]'),
        ("llama3", '{"name": "look", "parameters": {broken'),
    ],
)
def test_a_call_that_is_wrong_is_one_without_arguments(name, text):
    assert read(name, text)[1] == [("", None)]


# Format -> beginning and end of a call in it.
AROUND = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "qwen3_coder": ("<tool_call><function=f>", "</function></tool_call>"),
    "glm": ("<tool_call>f<arg_key>", "</arg_value></tool_call>"),
    "deepseek": (f"{BEGIN}f{SEP}", END),
    "mistral": ("[TOOL_CALLS]", ""),
    "llama3": ("", ""),
}
FILLERS = [
    "\n",
    " ",
    "\u3000",
    "{",
    "[",
    '{"',
    '{"a":',
    '[{"a":[',
    '{":',
    '{"name":"',
    '{"name": "f", "parameters": {',
    "{}",
]
FILLERS += [
    '"',
    "\\",
    "1",
    "a",
    "<",
    "```json\n",
    "<parameter=",
    "<parameter=a>",
    "</parameter>",
    "[ARGS]",
    "a[CALL_ID]a",
]


def degenerate(name, length):
    """Return looping replies of about `size` characters, as a diverged policy writes them."""
    begin, end = AROUND[name]
    for filler in [*FILLERS, *FORMATS[name].marks]:
        body = filler * (length // len(filler))
        yield from (body, begin + body, begin + body + end, begin + '{"a":' * 900 + body + end)
        yield begin + body[: length // 2] + "x" + body[: length // 2] + end
        for mark in [begin + filler, *(mark + filler for mark in FORMATS[name].marks)]:
            yield mark * (length // len(mark)) + end


@pytest.mark.parametrize("name", FORMATS)
def test_a_degenerate_reply_is_read_at_once(name):
    """All replies together; with a pattern that gives back, one of 2,000 line breaks takes longer than the bound."""
    started = time.process_time()
    for reply in degenerate(name, 30_000):
        for call in read_tool_calls(reply, FORMATS[name], [SPEC])[1]:
            assert isinstance(call.name, str)
    assert time.process_time() - started < 10


def test_a_call_behind_text_with_many_brackets_is_found():
    call = '{"name": "look", "parameters": {"depth": 3}}'
    for text in (r"\frac{a}{b} " * 3000, '{"a": b} ' * 100, '{"a": 1} ' * 3000, '{"a": [' * 3):
        assert read("llama3", text + call)[1] == [("look", {"depth": 3})]


def test_what_is_said_around_calls_remains_and_ids_are_those_that_were_written():
    text = 'So [TOOL_CALLS] [{"name": "a", "arguments": {}, "id": "abcdefghi"}, {"name": "b", "arguments": {}}] then'
    rest, calls = read_tool_calls(text, FORMATS["mistral"])
    assert rest == "So  then" and [(call.name, call.id) for call in calls] == [("a", "abcdefghi"), ("b", "call00001")]
    assert read("llama3", 'It is {"name": "x"} or {"a": 1}.')[1] == []
    assert read("glm", "<tool_call>look</tool_call>")[1] == [("look", {})]
    assert read("qwen3_coder", "<tool_call><function=find><parameter=n>3</parameter></function></tool_call>")[1] == [
        ("find", {"n": "3"})  # a tool without a schema
    ]


def test_texts_become_what_the_schema_says_where_they_can():
    def value(name, text):
        argument = f"<arg_key>{name}</arg_key><arg_value>{text}</arg_value>"
        ((_, arguments),) = read("glm", f"<tool_call>look{argument}</tool_call>")[1]
        return arguments[name]

    assert [value("place", text) for text in ("12", "null", '{"a": 1}')] == ["12", "null", '{"a": 1}']
    assert [value("depth", text) for text in ("12", "true", "far")] == [12, "true", "far"]
    assert [value("ratio", text) for text in ("12", "0.5", "null", "half")] == [12, 0.5, None, "half"]
    assert [value("deep", text) for text in ("true", "False", "1")] == [True, False, "1"]


@pytest.mark.parametrize("template", OF_TEMPLATE)
def test_the_format_is_that_of_the_chat_template(template, tmp_path):
    assert find_tool_format(write_chat_tokenizer(tmp_path, template), {}) == OF_TEMPLATE[template]


SAID = {
    "llama3.1": '<|python_tag|>{"name": "calculate", "parameters": {"expression": "12*34"}}',
    "glm4": "<tool_call>calculate\n<arg_key>expression</arg_key>\n<arg_value>12*34</arg_value>\n</tool_call>",
    "qwen3-coder": "<tool_call><function=calculate><parameter=expression>12*34</parameter></function></tool_call>",
    "deepseek-v3": f"{CALLS_BEGIN}{BEGIN}function{SEP}calculate"
    f'\n```json\n{{"expression": "12*34"}}\n```{END}{CALLS_END}',
    "mistral": '[TOOL_CALLS] [{"name": "calculate", "arguments": {"expression": "12*34"}, "id": "abcdefghi"}]',
    "mistral-v11": '[TOOL_CALLS]calculate[ARGS]{"expression": "12*34"}',
}
SHOWN = {
    "llama3.1": "<|start_header_id|>ipython<|end_header_id|>\n\n408<|eot_id|>",
    "glm4": "\n<tool_response>\n408\n</tool_response>",
    "qwen3-coder": "<tool_response>\n408\n</tool_response>",
    "deepseek-v3": "<tool_output>408</tool_output>",
    "mistral": '[TOOL_RESULTS] {"content": 408, "call_id": "abcdefghi"}[/TOOL_RESULTS]',
    "mistral-v11": '[TOOL_RESULTS] {"content": 408, "call_id": "call00000"}[/TOOL_RESULTS]',
}


@pytest.mark.parametrize("template", SAID)
def test_a_tool_is_called_and_answers_as_the_template_has_it(template, tmp_path):
    """Also if the marks are special tokens, which the text of a reply omits."""
    tokenizer = write_chat_tokenizer(tmp_path, template)
    setup = Setup(None, "", {}, (tokenizer.eos_token_id,), False, 4, 1, tool_format=OF_TEMPLATE[template])
    messages = [{"role": "user", "content": "hello"}]
    task = Task("", "", "", {}, {}, 1, messages, [TOOL])
    episode = play_environment(lambda: ToolEnvironment({"calculate": calculate}), setup, tokenizer, Opening(task, []))
    next(episode)
    reply = [*tokenizer.encode(SAID[template]), tokenizer.eos_token_id]
    tail = episode.send((reply, "stop")).tail
    assert tail is not None and not tail.is_fork
    assert SHOWN[template] in tokenizer._tokenizer.decode(tail.tokens)
    assert tail.tokens[0] != tokenizer.eos_token_id  # the sampled one stands
    assert episode.send(([*tokenizer.encode("It is 408."), tokenizer.eos_token_id], "stop")).tail is None


def test_texts_of_replies_show_only_the_marks_that_are_asked_for(tmp_path):
    tokenizer = write_chat_tokenizer(tmp_path, "mistral")
    tokens = tokenizer.encode("hello [TOOL_CALLS] 12</s><|im_end|>")
    assert tokenizer.decode(tokens) == "hello  12"
    assert tokenizer.decode(tokens, ["[TOOL_CALLS]", "</s>"]) == "hello [TOOL_CALLS] 12</s>"
    assert read_reply(tokenizer, None, tokens, []) == ("hello  12", [])


def test_the_format_is_told_at_the_start_and_an_unknown_one_refused(tmp_path):
    tokenizer = write_chat_tokenizer(tmp_path, "glm4")

    def check(**settings):
        agents = AgentsConfig(**({"tools": ["calculator"]} | settings))
        config = SimpleNamespace(agents=agents, data=SimpleNamespace(apply_chat_template_kwargs={}))
        tools, messages = [TOOL] * bool(agents.tools), [{"role": "user", "content": "hello"}]
        text = tokenizer.apply_chat_template(messages, **({"tools": tools} if tools else {}))
        prompt = Prompt(0, np.array([1], np.int32), text, "", messages=messages, tools=tools)
        return check_episodes(config, tokenizer, SimpleNamespace(prompts=[prompt]))

    assert check() == ["replies call tools in the format glm (agents.tool_format)"]
    assert check(tool_format="llama3") == ["replies call tools in the format llama3 (agents.tool_format)"]
    tokenizer._tokenizer.chat_template = tokenizer._tokenizer.chat_template.replace("arg_key", "argument")
    with pytest.raises(UserError, match="in a format that is not known"):
        check()
    assert check(tools=[], program="json:loads") == [] == check(tools=[], environment="calculator")
    tokenizer._tokenizer.chat_template = tokenizer._tokenizer.chat_template.replace(
        "{{ '[TOOLS]' + tools | tojson }}", ""
    )
    assert check(tools=[], program="json:loads") == [
        "the chat template does not show tools: a request of the program that has some is refused"
    ]


VLLM = {  # format -> name of vLLM's parser, template whose tokenizer it wants
    "hermes": ("hermes", "qwen2.5"),
    "qwen3_coder": ("qwen3_coder", "qwen3-coder"),
    "glm": ("glm45", "glm4"),
    "llama3": ("llama3_json", "llama3.1"),
}
VARIANTS = {"deepseek": ("deepseek_v31", "deepseek_v3"), "mistral": ("mistral", "mistral")}
TEMPLATE_OF = {"deepseek": ("deepseek-v3.1", "deepseek-v3"), "mistral": ("mistral", "mistral-v11")}


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_vllms_parsers_read_the_same(name, tmp_path):
    """Names, arguments and the remaining text, white space aside; for Llama, vLLM drops the remaining text."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    for place, reply in enumerate(REPLIES[name]):
        parser_name, template = VLLM.get(name) or (VARIANTS[name][place], TEMPLATE_OF[name][place])
        tokenizer = write_chat_tokenizer(tmp_path / str(place), template)._tokenizer
        request = ChatCompletionRequest(
            model="any",
            messages=[{"role": "user", "content": "hello"}],
            tools=[SPEC],
            chat_template_kwargs={"enable_thinking": False},
        )
        build = ToolParserManager.get_tool_parser(parser_name)
        for text in (reply, f"First: {reply}", reply + ("; " if name == "llama3" else "") + reply):
            if name == "mistral" and text.count("[TOOL_CALLS]") > 1 and place == 0:
                continue  # one list has all calls
            theirs = build(tokenizer, request.tools).extract_tool_calls(text, request)
            rest, calls = read(name, text)
            found = [(call.function.name, json.loads(call.function.arguments)) for call in theirs.tool_calls]
            assert found == calls
            assert theirs.tools_called and (theirs.content or "").strip() == ("" if name == "llama3" else rest)
