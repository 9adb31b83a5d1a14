# SPDX-License-Identifier: Apache-2.0
"""Loads examples of supervised fine-tuning: prompts with responses, or whole conversations.

A list of messages that ends with the assistant is a conversation. Each reply is learned after the text that the chat
template writes before it. Where the template writes earlier messages otherwise than before (without their reasoning),
the reply begins a branch of its own.

Invariants: special tokens in contents, and in responses to chats, stay text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_rl.config.schema import DataConfig
from megatron_rl.data.chats import read_messages
from megatron_rl.data.prompts import PromptSet, fit_rows, read_options, read_tools, tokenize_prompt
from megatron_rl.data.rows import Row
from megatron_rl.data.tokenizer import HuggingFaceTokenizer, Tokenizer
from megatron_rl.types import Branch, Prompt, Rollout, UserError


@dataclass(frozen=True)
class SftSet(PromptSet):
    """SFT examples of a list of files; their responses are the targets."""

    examples: list[Rollout]


def load_sft_examples(files: list[str], tokenizer: Tokenizer, cfg: DataConfig) -> SftSet:
    """Read, check and tokenize conversations, and prompts with responses (column answer_key).

    Raises:
        UserError: as `load_prompts`; also a response longer than `max_response_length` with its EOS, and a conversation
            longer than prompt and response together, or that the chat template cannot write reply by reply.
    """

    def fit(row: Row) -> tuple[Rollout | None, bool]:
        value = row.columns[cfg.prompt_key]
        last = value[-1] if isinstance(value, list) and value else None
        if isinstance(last, dict) and last.get("role") == "assistant":
            if row.columns.get(cfg.answer_key) is not None:
                raise UserError(
                    f'a conversation that ends with a reply, and a response in column "{cfg.answer_key}"',
                    source=row.location,
                    expected="one of the two: each reply of a conversation is learned",
                    hint="remove the column or the last reply, or set data.answer_key to a column that is absent",
                )
            return _fit_conversation(row, tokenizer, cfg)
        response = encode_response(row, row.scalar_text(cfg.answer_key), tokenizer, cfg)
        prompt, is_too_long = tokenize_prompt(row, tokenizer, cfg, read_tools(row))
        if prompt is None:
            return None, True
        prompt = Prompt(row.index, prompt.tokens, text="", ground_truth=None, row=row.columns)
        return Rollout.from_response(prompt, 0, np.asarray(response, np.int32), None, "stop"), is_too_long

    counts, starts = Counter[str](), list[int]()
    examples = list(fit_rows(files, cfg, counts, starts, fit))
    prompts = [example.prompt for example in examples]
    return SftSet(prompts, counts["truncated"], counts["dropped"], starts, examples)


def encode_response(
    row: Row, text: str, tokenizer: Tokenizer, cfg: DataConfig, before: Sequence[int] = ()
) -> list[int]:
    """Return the tokens of a response, after those `before`, with EOS (UserError above `max_response_length`)."""
    encode = tokenizer.encode_content if isinstance(row.columns.get(cfg.prompt_key), list) else tokenizer.encode
    response = [*before, *encode(text), tokenizer.eos_token_id]
    if len(response) > cfg.max_response_length:
        raise UserError(
            f"the response has {len(response)} tokens with its EOS",
            source=row.location,
            expected=f"at most data.max_response_length = {cfg.max_response_length} tokens",
            hint="raise data.max_response_length, or shorten the response",
        )
    return response


def _fit_conversation(row: Row, tokenizer: Tokenizer, cfg: DataConfig) -> tuple[Rollout | None, bool]:
    """Tokenize a conversation; refuse, cut at its end or drop (`None`) a too long one, as configured."""
    parts = _split_conversation(row, tokenizer, cfg)
    limit, longest = cfg.max_prompt_length + cfg.max_response_length, 0
    branches = list[Branch]()
    for pieces in parts:
        lengths = [len(piece) for piece in pieces]
        tokens = np.array([token for piece in pieces for token in piece], np.int32)[:limit]
        sampled = np.repeat(np.arange(len(pieces)) % 2 == 1, lengths)[:limit]
        longest = max(longest, sum(lengths))
        zeros = np.broadcast_to(np.float32(0), len(tokens))
        branches += [Branch(tokens, sampled, zeros, zeros.astype(np.int32), lengths[0])] if sampled.any() else []
    if longest > limit and cfg.overlong_prompts not in ("drop", "truncate_right"):
        raise UserError(
            f"the conversation has {longest} tokens",
            source=row.location,
            expected=f"at most data.max_prompt_length + data.max_response_length = {limit} tokens",
            hint="raise them, or set data.overlong_prompts to truncate_right or drop",
        )
    if not branches or (longest > limit and cfg.overlong_prompts == "drop"):
        return None, True
    first = branches[0]
    prompt = Prompt(row.index, first.tokens[: first.num_prompt_tokens], "", ground_truth=None, row=row.columns)
    return Rollout(prompt, 0, branches, [], "stop"), longest > limit


def _split_conversation(row: Row, tokenizer: Tokenizer, cfg: DataConfig) -> list[list[list[int]]]:
    """Return the tokens of each branch, in pieces: context, reply, context, reply, ..."""
    column: list[Any] = row.columns[cfg.prompt_key]
    for message in column:
        if isinstance(message, dict) and message.get("tool_calls") and message.get("content") is None:
            message["content"] = ""
    messages, options = read_messages(column, row, cfg.prompt_key), read_options(row, cfg, read_tools(row))
    if "enable_thinking" in row.columns:
        options["enable_thinking"] = row.optional("enable_thinking", bool, True)
    if not isinstance(tokenizer, HuggingFaceTokenizer) or messages[0]["role"] == "assistant":
        raise UserError(
            f"a conversation that the {messages[0]['role']} begins, with a {type(tokenizer).__name__}",
            source=row.location,
            expected="a message before the first reply, and a Hugging Face tokenizer with a chat template",
            hint="correct the row, or give prompts and responses as texts in two columns",
        )
    parts, text = list[list[list[int]]](), ""
    for number in (i for i, message in enumerate(messages) if message["role"] == "assistant"):
        before = tokenizer.render(messages[:number], **options)
        after = tokenizer.render(messages[: number + 1], **(options | {"add_generation_prompt": False}))
        if not after.startswith(before):
            raise UserError(
                f"the chat template writes reply {number} otherwise than it begins one: {after[-80:]!r}",
                source=row.location,
                expected="a template whose text before a reply stays the same with the reply",
                hint="set data.apply_chat_template_kwargs, or give prompts and responses as texts in two columns",
            )
        if not text or not before.startswith(text):
            parts.append([])
            text = ""
        parts[-1] += map(tokenizer.encode_rendered, (before[len(text) :], after[len(before) :]))
        text = after
    return parts
