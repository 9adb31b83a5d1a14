# SPDX-License-Identifier: Apache-2.0
"""Chat templates in the style of published models, and a byte-level tokenizer with their special tokens.

Its merges make one token of common words, which may also be sampled letter by letter.
"""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as RustTokenizer
from transformers import PreTrainedTokenizerFast

from megatron_rl.data.tokenizer import HuggingFaceTokenizer

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|eot_id|>", "<|eom_id|>")
_HEADERS = ("<|start_header_id|>", "<|end_header_id|>")

_TOOLS = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0]['role'] == 'system' %}
        {{- messages[0]['content'] }}
    {%- else %}
        {{- 'You are a helpful assistant.' }}
    {%- endif %}
    {{- "\\n\\n# Tools\\n\\nYou may call one or more functions.\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools>\\n\\nReturn <tool_call>\\n{\\"name\\": <function-name>, \\"arguments\\": <args>}\\n</tool_call>" }}
    {{- "<|im_end|>\\n" }}
{%- elif messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- endif %}
"""
_TOOL_RESPONSES = """
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' }}
        {{- message.content }}
        {{- '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
# Append-only.
QWEN2_5 = (
    _TOOLS
    + """
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) or (message.role == "assistant") %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
"""
    + _TOOL_RESPONSES
)
# Strips the thoughts of every reply before the last message of the user; keeps them while tools answer.
QWEN3 = (
    _TOOLS
    + """
{%- set ns = namespace(searching=true, last_query=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.searching and message.role == "user" %}
        {%- set ns.searching = false %}
        {%- set ns.last_query = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set thoughts = '' %}
        {%- if '</think>' in content %}
            {%- set thoughts = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query and (loop.last or thoughts) %}
            {{- '<|im_start|>assistant\\n<think>\\n' + thoughts.strip('\\n') + '\\n</think>\\n\\n' + content }}
        {%- else %}
            {{- '<|im_start|>assistant\\n' + content }}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
"""
    + _TOOL_RESPONSES
)
LLAMA3 = (
    "{% for message in messages %}{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'"
    " + message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}"
    "{% endif %}{{ content }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)


def _write_template(begin: str, call: str, end: str, result: str, user: str = "{{ message.content }}") -> str:
    """Return a short template with tools: marks around a reply and a call, and the result of a tool."""
    return (
        "{% if tools %}{{ '[TOOLS]' + tools | tojson }}{% endif %}{% for message in messages %}"
        "{% if message.role == 'tool' %}"
        + result
        + "{% elif message.role == 'assistant' %}"
        + begin
        + "{{ message.content }}{% for tool_call in message.tool_calls or [] %}{% set call = tool_call.function %}"
        + call
        + "{% endfor %}"
        + end
        + "{% else %}"
        + user
        + "{% endif %}{% endfor %}{% if add_generation_prompt %}"
        + begin
        + "{% endif %}"
    )


def spell_deepseek(name: str) -> str:
    """A mark of DeepSeek's, which has bars and spaces of its own."""
    return f"<|{name}|>".replace("|", "\uff5c").replace(" ", "\u2581")


_SEP, _BEGIN, _END = (spell_deepseek(f"tool {name}") for name in ("sep", "call begin", "call end"))
_DEEPSEEK_CALLS = [spell_deepseek(f"tool calls {name}") for name in ("begin", "end")]
_DEEPSEEK_RESULT = "<tool_output>{{ message.content }}</tool_output>"
LLAMA3_1 = _write_template(
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    """{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}""",
    "<|eot_id|>",
    "<|start_header_id|>ipython<|end_header_id|>\n\n{{ message.content }}<|eot_id|>",
)
GLM4 = _write_template(
    "<|assistant|>\n",
    "<tool_call>{{ call.name }}\n{% for name, value in call.arguments.items() %}<arg_key>{{ name }}</arg_key>\n"
    "<arg_value>{{ value if value is string else value | tojson }}</arg_value>\n{% endfor %}</tool_call>",
    "",
    "<|observation|>\n<tool_response>\n{{ message.content }}\n</tool_response>",
)
QWEN3_CODER = _write_template(
    "<|im_start|>assistant\n",
    "<tool_call>\n<function={{ call.name }}>\n{% for name, value in call.arguments.items() %}<parameter={{ name }}>\n"
    "{{ value if value is string else value | tojson }}\n</parameter>\n{% endfor %}</function>\n</tool_call>",
    "<|im_end|>\n",
    "<|im_start|>user\n<tool_response>\n{{ message.content }}\n</tool_response><|im_end|>\n",
)
# These want arguments as text; the older one raises for an object.
DEEPSEEK_V3 = _write_template(
    "",
    f"{_DEEPSEEK_CALLS[0]}{_BEGIN}function{_SEP}{{{{ call.name + '\n```json\n' + call.arguments + '\n```' }}}}{_END}"
    f"{_DEEPSEEK_CALLS[1]}",
    spell_deepseek("end of sentence"),
    _DEEPSEEK_RESULT,
)
DEEPSEEK_V3_1 = _write_template(
    "",
    f"{_DEEPSEEK_CALLS[0]}{_BEGIN}{{{{ call.name }}}}{_SEP}{{{{ call.arguments }}}}{_END}{_DEEPSEEK_CALLS[1]}",
    spell_deepseek("end of sentence"),
    _DEEPSEEK_RESULT,
)
# Raises for a result without an id of nine characters.
_MISTRAL_RESULT = (
    "{% if message.tool_call_id | length != 9 %}{{ raise_exception('ids have length 9') }}{% endif %}"
    """[TOOL_RESULTS] {"content": {{ message.content }}, "call_id": "{{ message.tool_call_id }}"}[/TOOL_RESULTS]"""
)
MISTRAL = _write_template(
    "",
    "{{ '[TOOL_CALLS] [' if loop.first else ', ' }}"
    """{"name": "{{ call.name }}", "arguments": {{ call.arguments | tojson }}, "id": "{{ tool_call.id }}"}"""
    "{{ ']' if loop.last }}",
    "</s>",
    _MISTRAL_RESULT,
)
MISTRAL_V11 = _write_template(
    "", "[TOOL_CALLS]{{ call.name }}[ARGS]{{ call.arguments | tojson }}", "</s>", _MISTRAL_RESULT
)
TEMPLATES = {"qwen2.5": QWEN2_5, "qwen3": QWEN3, "llama3": LLAMA3}
TOOL_TEMPLATES = {
    "llama3.1": LLAMA3_1,
    "glm4": GLM4,
    "qwen3-coder": QWEN3_CODER,
    "deepseek-v3": DEEPSEEK_V3,
    "deepseek-v3.1": DEEPSEEK_V3_1,
    "mistral": MISTRAL,
    "mistral-v11": MISTRAL_V11,
}
_CLOSERS = {
    "qwen2.5": "<|im_end|>",
    "qwen3": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "llama3.1": "<|eot_id|>",
    "glm4": "<|observation|>",
    "qwen3-coder": "<|im_end|>",
    "deepseek-v3": spell_deepseek("end of sentence"),
    "deepseek-v3.1": spell_deepseek("end of sentence"),
    "mistral": "</s>",
    "mistral-v11": "</s>",
}
# Special tokens that stand in tool calls.
_MARKS = {
    "llama3.1": ["<|python_tag|>"],
    "deepseek-v3": [*_DEEPSEEK_CALLS, _BEGIN, _END, _SEP],
    "deepseek-v3.1": [*_DEEPSEEK_CALLS, _BEGIN, _END, _SEP],
    "glm4": ["<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"],
    "mistral": ["[TOOL_CALLS]"],
    "mistral-v11": ["[TOOL_CALLS]", "[ARGS]"],
}


def write_chat_tokenizer(directory: Path, template: str) -> HuggingFaceTokenizer:
    """A tokenizer with one of `TEMPLATES` or `TOOL_TEMPLATES`, whose EOS closes a message."""
    rust = RustTokenizer(models.BPE())
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    words = "hello assistant user system think answer tool_call tool_response calculate expression result"
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=[AddedToken(text, special=True) for text in (*SPECIAL, *_HEADERS)],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    rust.train_from_iterator([words] * 20, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=rust,
        eos_token=_CLOSERS[template],
        bos_token="<|begin_of_text|>",
        chat_template=(TEMPLATES | TOOL_TEMPLATES)[template],
    )
    fast.add_tokens([AddedToken(text, special=True, normalized=False) for text in _MARKS.get(template, [])])
    fast.save_pretrained(directory)
    return HuggingFaceTokenizer(directory)
