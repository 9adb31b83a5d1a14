# SPDX-License-Identifier: Apache-2.0
"""Parsers for tool calls in model output, one per format.

    hermes       <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>            Qwen2.5, Qwen3, Hermes
    qwen3_coder  <tool_call><function=add><parameter=a>1</parameter></function></tool_call>   Qwen3-Coder, Qwen3.5
    glm          <tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>   GLM-4.5
    deepseek     <|tool_call_begin|>add<|tool_sep|>{"a": 1}<|tool_call_end|>, or          V3.1
                 function<|tool_sep|>add, and the arguments as a block of JSON            V3, R1
    mistral      [TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}], or add[ARGS]{"a": 1}
    llama3       {"name": "add", "parameters": {"a": 1}}                                  Llama 3.1 and later

DeepSeek's marks use other bar and space characters than shown. A run uses the format that parses a tool call rendered
by its chat template.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_rl.agents.environment import ToolCall
from megatron_rl.data.tokenizer import Tokenizer
from megatron_rl.types import UserError

SETTING, AUTO = "agents.tool_format", "auto"
# Tool name -> parameter name -> JSON schema.
Schemas = Mapping[str, Mapping[str, Any]]
# Span in the text, and the call.
_Found = tuple[int, int, ToolCall]

_WRONG = ToolCall("", None)
_MARKS = ("calls begin", "calls end", "call begin", "call end", "sep")
_DEEPSEEK = {name: f"<|tool {name}|>".replace("|", "\uff5c").replace(" ", "\u2581") for name in _MARKS}
_MISTRAL = "[TOOL_CALLS]"
# Possessive quantifiers only: parsing takes linear time on any reply.
_MISTRAL_NAME = re.compile(r"\s*+([\w.-]++)\s*+(?:\[CALL_ID\]\s*+(\w++)\s*+)?+(?:\[ARGS\])?+\s*+(?=\{)")
_PYTHON_TAG = "<|python_tag|>"
_LLAMA_BEGUN = re.compile(r'\s*+(?:<\|python_tag\|>)?+\s*+\{\s*+"name"')
_OBJECT = re.compile(r'\{\s*+"')
_DECODER = json.JSONDecoder()
_SPACES = re.compile(r"\s*+")
_MOST_FAILURES, _MOST_WORK = 200, 4  # limits of JSON parsing per reply; the work is in multiples of its length
_PROBE: dict[str, Any] = {
    "name": "probe",
    "description": "Probe.",
    "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
}
_TYPES: dict[str, set[type]] = {
    "string": {str},
    "integer": {int},
    "number": {int, float},
    "boolean": {bool},
    "array": {list},
    "object": {dict},
    "null": {type(None)},
}


@dataclass(frozen=True)
class ToolFormat:
    """A tool-call format of a model family."""

    find: Callable[[str, Schemas], list[_Found]]  # (text, parameters of the tools) -> calls
    marks: tuple[str, ...]  # delimiters, removed from the text around calls; decoded even if they are special tokens


def _find_blocks(read: Callable[[str, Schemas], ToolCall]) -> Callable[[str, Schemas], list[_Found]]:
    return lambda text, schemas: [
        (begin, end, read(inside.strip(), schemas))
        for begin, end, inside in _find_between(text, "<tool_call>", "</tool_call>")
    ]


def _find_between(text: str, opening: str, closing: str) -> Iterator[tuple[int, int, str]]:
    begin = text.find(opening)
    while begin >= 0 and (end := text.find(closing, begin + len(opening))) >= 0:
        yield begin, end + len(closing), text[begin + len(opening) : end]
        begin = text.find(opening, end + len(closing))


def _read_hermes(text: str, _: Schemas) -> ToolCall:
    return _read_object(_load(text), "arguments")


def _read_qwen(text: str, schemas: Schemas) -> ToolCall:
    name, _, inside = text.removeprefix("<function=").partition(">")
    is_call = text.startswith("<function=") and inside.endswith("</function>") and name and "\n" not in name
    if not is_call:
        return _WRONG
    parts = [part.partition(">") for _, _, part in _find_between(inside, "<parameter=", "</parameter>")]
    pairs = [
        (key, value.removeprefix("\n").removesuffix("\n")) for key, mark, value in parts if mark and "\n" not in key
    ]
    return _type_arguments(name, pairs, schemas)


def _read_glm(text: str, schemas: Schemas) -> ToolCall:
    name, mark, arguments = text.partition("<arg_key>")
    if len(name.split()) != 1 or "<" in name or (mark and not arguments.endswith("</arg_value>")):
        return _WRONG
    pairs = []
    for _, _, part in _find_between(mark + arguments, "<arg_key>", "</arg_value>"):
        key, _, value = part.partition("</arg_key>")
        if not (value := value.lstrip()).startswith("<arg_value>"):
            return _WRONG
        pairs.append((key.strip(), value.removeprefix("<arg_value>")))
    return _type_arguments(name, pairs, schemas)


def _find_deepseek(text: str, _: Schemas) -> list[_Found]:
    calls = _find_between(text, _DEEPSEEK["call begin"], _DEEPSEEK["call end"])
    return [(begin, end, _read_deepseek(inside)) for begin, end, inside in calls]


def _read_deepseek(text: str) -> ToolCall:
    name, _, rest = text.partition(_DEEPSEEK["sep"])
    head, fence, block = rest.strip().partition("```json")
    if fence and block.endswith("```") and len(head.split()) == 1:
        name, rest = head, block.removesuffix("```")
    return _read_object({"name": name.strip(), "arguments": _load(rest)}, "arguments")


def _find_mistral(text: str, _: Schemas) -> list[_Found]:
    """Find calls as one JSON list after a mark [TOOL_CALLS], or as one name and its arguments after each mark."""
    found: list[_Found] = []
    for mark in re.finditer(re.escape(_MISTRAL), text):
        if found and mark.start() < found[-1][1]:  # inside an argument
            continue
        named = _MISTRAL_NAME.match(text, mark.end())
        value, stop = _load_at(text, named.end() if named else mark.end())
        stop = len(text) if value is None else stop
        if named:
            value = {"name": named[1], "arguments": value, "id": named[2]}
        calls = [_read_object(call, "arguments") for call in (value if isinstance(value, list) else [value])]
        found += [(stop if i else mark.start(), stop, call) for i, call in enumerate(calls)]
    return found


def _find_llama(text: str, _: Schemas) -> list[_Found]:
    """Find bare JSON objects with a name and `parameters` (or `arguments`); stop after too many parse failures."""
    found: list[_Found] = []
    failures, work, stop = 0, 0, 0
    while failures < _MOST_FAILURES and work <= _MOST_WORK * len(text) and (begun := _OBJECT.search(text, stop)):
        value, stop = _load_at(text, begun.start())
        key = "arguments" if isinstance(value, dict) and "arguments" in value else "parameters"
        call = _read_object(value, key)
        if call.arguments is not None:
            found.append((begun.start(), stop, call))
        if value is None:
            failures, work, stop = failures + 1, work + stop - begun.start(), begun.start() + 1
    return found or [(0, len(text), _WRONG)] * bool(_LLAMA_BEGUN.match(text))


# Order of detection; llama3 is last because it also parses JSON of other formats.
FORMATS = {
    "hermes": ToolFormat(_find_blocks(_read_hermes), ("<tool_call>", "</tool_call>")),
    "qwen3_coder": ToolFormat(_find_blocks(_read_qwen), ("<tool_call>", "</tool_call>")),
    "glm": ToolFormat(
        _find_blocks(_read_glm),
        ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    "deepseek": ToolFormat(_find_deepseek, tuple(_DEEPSEEK.values())),
    "mistral": ToolFormat(_find_mistral, (_MISTRAL, "[CALL_ID]", "[ARGS]")),
    "llama3": ToolFormat(_find_llama, (_PYTHON_TAG,)),
}


def read_reply(
    tokenizer: Tokenizer, name: str | None, tokens: Sequence[int], tools: Sequence[Any]
) -> tuple[str, list[ToolCall]]:
    """Return a reply's text outside of tool calls, and the calls: none if the format's name is `None`.

    Args:
        tools: in OpenAI format; their schemas type the arguments in formats without types.
    """
    if name is None:
        return tokenizer.decode(tokens), []
    return read_tool_calls(tokenizer.decode(tokens, FORMATS[name].marks), FORMATS[name], tools)


def read_tool_calls(text: str, tool_format: ToolFormat, tools: Sequence[Any] = ()) -> tuple[str, list[ToolCall]]:
    """Return the text outside of tool calls, and the calls with ids; see `read_reply`."""
    specs = [tool.get("function", tool) if isinstance(tool, dict) else {} for tool in tools]
    schemas = {spec.get("name", ""): (spec.get("parameters") or {}).get("properties") or {} for spec in specs}
    found = tool_format.find(text, schemas)
    edges = [0, *(edge for begin, end, _ in found for edge in (begin, end)), len(text)]
    rest = "".join(text[stop:begin] for stop, begin in zip(edges[::2], edges[1::2], strict=True))
    for mark in tool_format.marks:
        rest = rest.replace(mark, "")
    # Mistral's templates require ids of nine letters and digits.
    return rest.strip(), [replace(call, id=call.id or f"call{i:05d}") for i, (_, _, call) in enumerate(found)]


def find_tool_format(tokenizer: Tokenizer, options: Mapping[str, Any]) -> str | None:
    """Return the format (see `agents.tool_format`) in which the chat template writes earlier tool calls.

    Args:
        options: arguments of the template.

    Returns:
        "hermes" also if the template writes no calls; `None` if it writes them in an unsupported format.
    """
    question, arguments, written = "questionoftheprobe", {"place": "word"}, ""
    tools = [{"type": "function", "function": _PROBE}]
    for given in (arguments, json.dumps(arguments)):  # templates accept one or the other
        call = {"type": "function", "id": "call00000", "function": {"name": _PROBE["name"], "arguments": given}}
        reply = {"role": "assistant", "content": "", "tool_calls": [call]}
        messages = [{"role": "user", "content": question}, reply]
        try:
            written = tokenizer.apply_chat_template(messages, **{**options, "tools": tools}).rpartition(question)[2]
        except UserError:
            continue
        for name, tool_format in FORMATS.items():
            _, found = read_tool_calls(written, tool_format, tools)
            if [(call.name, call.arguments) for call in found] == [(_PROBE["name"], arguments)]:
                return name
    return None if _PROBE["name"] in written else "hermes"


def require_format(name: str | None, source: str) -> str:
    """Return the tool-call format (UserError if unsupported, that is, `None`)."""
    if name is None:
        raise UserError(
            "the chat template writes tool calls in a format that is not known",
            source=source,
            expected=", ".join(FORMATS),
            hint="name the one that replies use, or leave tools out and read replies in an environment",
        )
    return name


def require_shown(is_shown: bool, source: str) -> None:
    """Raise UserError unless the chat template shows tools."""
    if not is_shown:
        raise UserError(
            "the chat template does not show tools",
            source=source,
            expected="a chat template that knows tools",
            hint="describe the calls in the prompt, or use the template of another model",
        )


def shows_tools(tokenizer: Tokenizer, options: Mapping[str, Any]) -> bool:
    """Return whether a chat is rendered differently with tools than without."""
    question, tools = [{"role": "user", "content": "question"}], [{"type": "function", "function": _PROBE}]
    with_tools = tokenizer.apply_chat_template(question, **{**options, "tools": tools})
    return with_tools != tokenizer.apply_chat_template(question, **options)


def _load(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _load_at(text: str, place: int) -> tuple[Any, int]:
    """Parse JSON at an index; return the value and its end, or `None` and the index of the failure."""
    begun = _SPACES.match(text, place)
    assert begun is not None  # the pattern matches the empty string
    try:
        return _DECODER.raw_decode(text, begun.end())
    except json.JSONDecodeError as error:
        return None, error.pos
    except (ValueError, RecursionError):  # too many digits, or nested too deeply
        return None, len(text)


def _read_object(call: Any, key: str) -> ToolCall:
    name, arguments = (call.get("name"), call.get(key)) if isinstance(call, dict) else (None, None)
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return _WRONG
    return ToolCall(name, arguments, str(call.get("id") or ""))


def _type_arguments(name: str, pairs: Sequence[tuple[str, str]], schemas: Schemas) -> ToolCall:
    name = name.strip()
    properties = schemas.get(name, {})
    return ToolCall(name, {key: _read_value(text, properties.get(key)) for key, text in pairs})


def _read_value(text: str, schema: Any) -> Any:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = {"True": True, "False": False}.get(text, text)
    return value if any(type(value) in _TYPES.get(name, ()) for name in _list_types(schema)) else text


def _list_types(schema: Any) -> list[str]:
    if not isinstance(schema, dict):
        return []
    types = schema.get("type", [])
    parts = [kind for part in schema.get("anyOf", []) for kind in _list_types(part)]
    return [*([types] if isinstance(types, str) else types), *parts]
