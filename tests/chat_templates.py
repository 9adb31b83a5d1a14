# SPDX-License-Identifier: Apache-2.0
"""Chat templates as published models have them, and a byte-level tokenizer that knows their special tokens.

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
TEMPLATES = {"qwen2.5": QWEN2_5, "qwen3": QWEN3, "llama3": LLAMA3}
_CLOSERS = {"qwen2.5": "<|im_end|>", "qwen3": "<|im_end|>", "llama3": "<|eot_id|>"}


def write_chat_tokenizer(directory: Path, template: str) -> HuggingFaceTokenizer:
    """A tokenizer with one of `TEMPLATES`, whose EOS closes a message."""
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
        chat_template=TEMPLATES[template],
    )
    fast.save_pretrained(directory)
    return HuggingFaceTokenizer(directory)
