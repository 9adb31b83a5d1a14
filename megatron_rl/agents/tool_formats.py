# SPDX-License-Identifier: Apache-2.0
"""How models write tool calls: a table of formats, each with its reader.

    hermes       <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>            Qwen2.5, Qwen3, Hermes
    qwen3_coder  <tool_call><function=add><parameter=a>1</parameter></function></tool_call>   Qwen3-Coder, Qwen3.5
    glm          <tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>   GLM-4.5
    deepseek     <|tool_call_begin|>add<|tool_sep|>{"a": 1}<|tool_call_end|>, or          V3.1
                 function<|tool_sep|>add, and the arguments as a block of JSON            V3, R1
    mistral      [TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}], or add[ARGS]{"a": 1}
    llama3       {"name": "add", "parameters": {"a": 1}}                                  Llama 3.1 and later

DeepSeek's marks have other bars and spaces than shown. The format of a run is the one that reads back what the chat
template writes for a tool call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_rl.agents.environment import ToolCall
from megatron_rl.data.tokenizer import Tokenizer
from megatron_rl.types import UserError

SETTING, AUTO = "agents.tool_format", "auto"
# Name of a tool -> name of a parameter -> its JSON schema.
Schemas = Mapping[str, Mapping[str, Any]]
# Where it begins and ends in the text, and what it says.
_Found = tuple[int, int, ToolCall]

_WRONG = ToolCall("", None)
_BLOCK = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
_QWEN_FUNCTION = re.compile(r"<function=([^>\n]+)>(.*)</function>", re.DOTALL)
_QWEN_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_GLM_CALL = re.compile(r"([^\s<]+)\s*((?:<arg_key>.*</arg_value>)?)", re.DOTALL)
_GLM_ARGUMENT = re.compile(r"<arg_key>\s*(.*?)\s*</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
_MARKS = ("calls begin", "calls end", "call begin", "call end", "sep")
_DEEPSEEK = {name: f"<|tool {name}|>".replace("|", "\uff5c").replace(" ", "\u2581") for name in _MARKS}
_DEEPSEEK_CALL = re.compile(f"{_DEEPSEEK['call begin']}(.*?){_DEEPSEEK['call end']}", re.DOTALL)
_DEEPSEEK_V3 = re.compile(r"\s*(\S+)\s*```json\s*(.*?)\s*```\s*", re.DOTALL)
_MISTRAL = "[TOOL_CALLS]"
_MISTRAL_NAME = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\s*(\w+)\s*)?(?:\[ARGS\])?\s*(?=\{)")
_PYTHON_TAG = "<|python_tag|>"
_LLAMA_BEGUN = re.compile(r'\s*(?:<\|python_tag\|>)?\s*\{\s*"name"')
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
    """How a family of models writes tool calls.

    Attributes:
        find: text and parameters of the tools -> the calls in it.
        marks: that belong to no call, or that a tokenizer may count as special tokens: read, and not shown as text.
    """

    find: Callable[[str, Schemas], list[_Found]]
    marks: tuple[str, ...]


def _find_blocks(read: Callable[[str, Schemas], ToolCall]) -> Callable[[str, Schemas], list[_Found]]:
    """For formats that put each call between <tool_call> and </tool_call>."""
    return lambda text, schemas: [(*match.span(), read(match[1], schemas)) for match in _BLOCK.finditer(text)]


def _read_hermes(text: str, _: Schemas) -> ToolCall:
    return _read_object(_load(text), "arguments")


def _read_qwen(text: str, schemas: Schemas) -> ToolCall:
    found = _QWEN_FUNCTION.fullmatch(text)
    return _WRONG if found is None else _type_arguments(found[1], _QWEN_PARAMETER.findall(found[2]), schemas)


def _read_glm(text: str, schemas: Schemas) -> ToolCall:
    found = _GLM_CALL.fullmatch(text)
    return _WRONG if found is None else _type_arguments(found[1], _GLM_ARGUMENT.findall(found[2]), schemas)


def _find_deepseek(text: str, _: Schemas) -> list[_Found]:
    return [(*match.span(), _read_deepseek(match[1])) for match in _DEEPSEEK_CALL.finditer(text)]


def _read_deepseek(text: str) -> ToolCall:
    name, _, rest = text.partition(_DEEPSEEK["sep"])
    if found := _DEEPSEEK_V3.fullmatch(rest):
        name, rest = found.groups()
    return _read_object({"name": name.strip(), "arguments": _load(rest)}, "arguments")


def _find_mistral(text: str, _: Schemas) -> list[_Found]:
    """One mark before a list of calls, or one before each name."""
    found: list[_Found] = []
    for mark in re.finditer(re.escape(_MISTRAL), text):
        if found and mark.start() < found[-1][1]:  # in an argument
            continue
        named = _MISTRAL_NAME.match(text, mark.end())
        value, stop = _load_at(text, named.end() if named else mark.end())
        if named:
            value = {"name": named[1], "arguments": value, "id": named[2]}
        calls = [_read_object(call, "arguments") for call in (value if isinstance(value, list) else [value])]
        found += [(stop if i else mark.start(), stop, call) for i, call in enumerate(calls)]
    return found


def _find_llama(text: str, _: Schemas) -> list[_Found]:
    """Objects with a name and parameters, wherever they are; `arguments` will do."""
    found: list[_Found] = []
    place = text.find("{")
    while place >= 0:
        value, stop = _load_at(text, place)
        key = "arguments" if isinstance(value, dict) and "arguments" in value else "parameters"
        call = _read_object(value, key)
        if call.arguments is not None:
            found.append((place, stop, call))
        place = text.find("{", stop if isinstance(value, dict) else place + 1)
    return found or [(0, len(text), _WRONG)] * bool(_LLAMA_BEGUN.match(text))


# In the order in which they are tried: the last one would read others' JSON, too.
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


class ToolReader:
    """Reads the tool calls of replies.

    Args:
        tokenizer: of the policy.
        name: of the format; None: no calls are read.
    """

    def __init__(self, tokenizer: Tokenizer, name: str | None) -> None:
        self._tokenizer, self._format = tokenizer, FORMATS[name] if name else None

    def read(self, tokens: Sequence[int], tools: Sequence[Any]) -> tuple[str, list[ToolCall]]:
        """What a reply says beside its tool calls, and these.

        Args:
            tokens: of the reply.
            tools: that it was shown, in the form of OpenAI's API: where the format has no types, theirs are taken.
        """
        if self._format is None:
            return self._tokenizer.decode(tokens), []
        return read_tool_calls(self._tokenizer.decode(tokens, self._format.marks), self._format, tools)


def read_tool_calls(text: str, tool_format: ToolFormat, tools: Sequence[Any] = ()) -> tuple[str, list[ToolCall]]:
    """What a text says beside its tool calls, and these, each with an id; see `ToolReader.read`."""
    found = tool_format.find(text, {spec["name"]: _list_properties(spec) for spec in map(_open_spec, tools)})
    rest, stop = "", 0
    for begin, end, _ in found:
        rest, stop = rest + text[stop:begin], end
    rest += text[stop:]
    for mark in tool_format.marks:
        rest = rest.replace(mark, "")
    # Mistral's templates want ids of nine letters and digits.
    return rest.strip(), [replace(call, id=call.id or f"call{i:05d}") for i, (_, _, call) in enumerate(found)]


def find_tool_format(tokenizer: Tokenizer, options: Mapping[str, Any]) -> str | None:
    """The format in which the chat template writes the calls of earlier replies.

    Args:
        tokenizer: with the template.
        options: of the template.

    Returns:
        "hermes" also where it writes none; None where it writes them in a format that is not known.
    """
    question, arguments, written = "questionoftheprobe", {"place": "word"}, ""
    tools = [{"type": "function", "function": _PROBE}]
    for given in (arguments, json.dumps(arguments)):  # templates take one or the other
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


def _open_spec(tool: Any) -> dict[str, Any]:
    return {"name": "", **(tool.get("function", tool) if isinstance(tool, dict) else {})}


def _list_properties(spec: dict[str, Any]) -> Mapping[str, Any]:
    return (spec.get("parameters") or {}).get("properties") or {}


def _load(text: str) -> Any:
    """The value of JSON text; None where it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _load_at(text: str, place: int) -> tuple[Any, int]:
    """The JSON value at a place, and where it ends; None and the end of the text where there is none."""
    place += len(text[place:]) - len(text[place:].lstrip())
    try:
        return json.JSONDecoder().raw_decode(text, place)
    except (ValueError, RecursionError):
        return None, len(text)


def _read_object(call: Any, key: str) -> ToolCall:
    """A call as JSON has it, its arguments under a key."""
    name, arguments = (call.get("name"), call.get(key)) if isinstance(call, dict) else (None, None)
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return _WRONG
    return ToolCall(name, arguments, str(call.get("id") or ""))


def _type_arguments(name: str, pairs: Sequence[tuple[str, str]], schemas: Schemas) -> ToolCall:
    """A call whose arguments are texts: each becomes what its schema says, if it can."""
    name = name.strip()
    properties = schemas.get(name, {})
    return ToolCall(name, {key: _read_value(text, properties.get(key)) for key, text in pairs})


def _read_value(text: str, schema: Any) -> Any:
    """A text as the first type of its schema that it is; without a schema it stays a text."""
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
