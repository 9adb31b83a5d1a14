# SPDX-License-Identifier: Apache-2.0
"""Chat messages as prompts: read, shortened, and with the control tokens (marks) in their contents kept as text.

A tokenizer turns the text of a mark into its token anywhere. So a guard character is inserted into the marks of
contents before the chat template is applied; marks without a guard then come from the template.

    content     the file has <|im_end|>
    guarded     the file has <G|im_end|>
    rendered    <|im_start|>user\nthe file has <G|im_end|><|im_end|>\n
    tokens      151644 ... "<", "|", "im", "_end", "|", ">" 151645 ...
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
from tokenizers import AddedToken
from tokenizers import Tokenizer as RustTokenizer

from megatron_rl.data.rows import Row, wrong_type
from megatron_rl.types import Prompt, UserError

T = TypeVar("T")
GUARD = "\ufdd0"  # U+FDD0, a Unicode noncharacter
_GUARDS = re.compile(f"{GUARD}({GUARD}?)")  # two stand for one in the content
_BARS = re.compile("<[|\uff5c].*[|\uff5c]>", re.DOTALL)
_NAMES = ("role", "type")  # fields whose values templates compare
_EXPECTED = (
    'chat messages {"role": text, "content": text}; a content may be a list of parts {"type": "text", "text": text}'
)


def is_mark(text: str, is_special: bool) -> bool:
    """Return whether a token is a control token: declared special, or spelled <|...|>.

    DeepSeek does not declare the mark of a user turn. Tags such as <think> are mostly neither, and remain tokens in
    contents.
    """
    return is_special or _BARS.fullmatch(text) is not None


def remove_guards(text: str) -> str:
    """Return a rendered text without the guard characters of `Marks.guard`, as the policy sees it."""
    return _GUARDS.sub(r"\1", text) if GUARD in text else text


class Marks:
    """Control tokens (marks) of a fast tokenizer; a guard, a character inserted into a mark, keeps the mark text."""

    def __init__(self, tokenizer: RustTokenizer) -> None:
        added, model_ids = tokenizer.get_added_tokens_decoder(), tokenizer.get_vocab(with_added_tokens=False)
        self._marks = {token.content: i for i, token in added.items() if is_mark(token.content, token.special)}
        secret = f"\ufdd1{secrets.token_hex(16)}"
        self._names = {mark: f"{secret}{i}\ufdd1" for mark, i in self._marks.items()}
        self._encoder = RustTokenizer(tokenizer.model)
        if tokenizer.normalizer is not None:
            self._encoder.normalizer = tokenizer.normalizer
        if tokenizer.pre_tokenizer is not None:
            self._encoder.pre_tokenizer = tokenizer.pre_tokenizer
        # New ids start at the model's token count, but the model's own ids may exceed it.
        taken = range(len(model_ids), max(model_ids.values(), default=0) + 1)
        named = {self._names.get(token.content, token.content): i for i, token in added.items()}
        self._encoder.add_tokens([AddedToken(f"{secret}unused{i}\ufdd1", normalized=False) for i in taken])
        self._encoder.add_tokens([_rename(added[i], name) for name, i in named.items()])
        self._ids = {self._encoder.token_to_id(name): i for name, i in named.items()}
        self._lengths = sorted({len(mark) for mark in self._marks})
        self._begun = {mark[:stop] for mark in self._marks for stop in range(1, len(mark))}
        first = "".join(sorted({mark[0] for mark in self._marks}))
        self._first = re.compile(f"[{re.escape(first + GUARD)}]")
        folded = any(token.normalized for token in added.values() if token.content in self._marks)
        self._normalize = tokenizer.normalizer.normalize_str if folded and tokenizer.normalizer is not None else None

    def guard(self, value: Any) -> Any:
        """Insert guards into the marks in the texts of a message, a tool, or a list of them.

        A partial mark at a text's end gets one too, since the next text may complete it.
        """
        if isinstance(value, str):
            return self._guard_text(value)
        if isinstance(value, list | tuple):
            return [self.guard(part) for part in value]
        if not isinstance(value, dict):
            return value
        return {
            _keep_word(name) or self.guard(name): (name in _NAMES and _keep_word(part)) or self.guard(part)
            for name, part in value.items()
        }

    @staticmethod
    def guards(text: str) -> bool:
        """Return whether a rendered text contains a guard."""
        return GUARD in text

    def encode(self, text: str) -> list[int]:
        """Encode a rendered text; only marks without a guard become control tokens."""
        found = sorted((mark for mark in self._names if mark in text), key=len, reverse=True)
        if found:
            text = re.sub("|".join(map(re.escape, found)), lambda match: self._names[match[0]], text)
        tokens: list[int] = []
        for i in self._encoder.encode(remove_guards(text), add_special_tokens=False).ids:
            if i in self._ids:
                tokens.append(self._ids[i])
            elif i in self._controls:  # pieces of text form a mark in the model's own vocabulary
                model = self._encoder.model
                tokens += [piece.id for letter in model.id_to_token(i) for piece in model.tokenize(letter)]
            else:
                tokens.append(i)
        return tokens

    @cached_property
    def _controls(self) -> set[int]:
        """Return the ids of all marks except the unknown token."""
        return set(self._marks.values()) - {piece.id for piece in self._encoder.model.tokenize(GUARD)}

    def _guard_text(self, text: str) -> str:
        places = [match.start() for match in self._first.finditer(text)]
        end = len(text.rstrip())  # templates may strip contents
        places = [i for i in places if text[i] == GUARD or self._begins_mark(text, i, end)]
        if not places and self._normalize is not None and text.strip():
            shown = self._normalize(text)
            if any(mark in shown for mark in self._marks):
                places = [len(text) - len(text.lstrip())]
        return GUARD.join(text[start:stop] for start, stop in pairwise([0, *(i + 1 for i in places), len(text)]))

    def _begins_mark(self, text: str, place: int, end: int) -> bool:
        """Return whether `text[place:]` starts with a mark, or `text[place:end]` is the start of one."""
        is_whole = any(text[place : place + length] in self._marks for length in self._lengths)
        return is_whole or (end - place < self._lengths[-1] and text[place:end] in self._begun)


def _keep_word(text: Any) -> str | None:
    return text if isinstance(text, str) and text.isidentifier() else None


def _rename(token: AddedToken, name: str) -> AddedToken:
    """Return a copy of a token under the name `name`; a token with a new name is matched before normalization."""
    normalized = token.normalized and name == token.content
    strips = {"lstrip": token.lstrip, "rstrip": token.rstrip}
    return AddedToken(name, single_word=token.single_word, normalized=normalized, special=token.special, **strips)


def add_system_prompt(row: Row, column: str, text: str) -> None:
    """Insert a system message into a row's chat that has none; UserError if the prompt is plain text."""
    messages = row.columns[column]
    if isinstance(messages, str):
        raise UserError(
            "the prompt is plain text, which has no system message",
            source=f"{row.location}, data.system_prompt",
            expected="a list of chat messages",
            hint="leave data.system_prompt out, or write the prompts as messages",
        )
    known = [one for one in messages if isinstance(one, dict)] if isinstance(messages, list) else []
    if known and all(one.get("role") != "system" for one in known):
        row.columns[column] = [{"role": "system", "content": text}, *messages]


def read_messages(value: Sequence[Any], row: Row, column: str) -> list[dict[str, Any]]:
    """Return the messages with text contents; text parts are joined (UserError for malformed or no messages)."""
    if not value:
        raise wrong_type(column, value, row.location, "at least one chat message")
    messages = []
    for message in value:
        content = _join_parts(message.get("content")) if isinstance(message, dict) else None
        if content is None or not isinstance(message.get("role"), str):
            raise wrong_type(column, message, row.location, _EXPECTED)
        messages.append({**message, "content": content})
    return messages


def _join_parts(content: Any) -> str | None:
    if not isinstance(content, list):
        return content if isinstance(content, str) else None
    texts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in content]
    strings = [text for text in texts if isinstance(text, str)]
    return "".join(strings) if len(strings) == len(texts) else None


def render_messages(
    messages: list[dict[str, Any]], tokenizer: Any, options: Mapping[str, Any]
) -> tuple[str, list[int]]:
    """Return the text of a conversation by the chat template, as the policy sees it, and its tokens."""
    rendered = tokenizer.render(messages, **options)
    return remove_guards(rendered), tokenizer.encode_rendered(rendered)


def shorten_messages(
    messages: list[dict[str, Any]],
    limit: int,
    policy: str,
    tokenizer: Any,
    options: Mapping[str, Any],
    place: str,
) -> tuple[str, list[int]]:
    """Cut the longest contents to a common length, so that the conversation has at most `limit` tokens.

    Args:
        messages: with text contents.
        policy: see `keep_tokens`.
        tokenizer: one of `data/tokenizer.py`.
        options: template arguments.
        place: file and line, for the error.

    Returns:
        The rendered text and its tokens.

    Raises:
        UserError: the template alone is longer.
    """
    contents = [tokenizer.encode_content(message["content"]) for message in messages]
    longest = max(map(len, contents))
    while True:
        text, tokens = render_messages(messages, tokenizer, options)
        if len(tokens) <= limit:
            return text, tokens
        if not longest:
            raise UserError(
                f"the chat template alone has {len(tokens)} tokens",
                source=place,
                expected=f"fewer than data.max_prompt_length = {limit}",
                hint="raise data.max_prompt_length",
            )
        # Cutting may split or merge tokens at the edge; the next iteration cuts the excess.
        wanted = sum(min(len(content), longest) for content in contents) - (len(tokens) - limit)
        while longest and sum(min(len(content), longest) for content in contents) > wanted:
            longest -= 1
        messages = [
            message
            if len(content) <= longest
            else {**message, "content": tokenizer.decode(keep_tokens(content, longest, policy))}
            for message, content in zip(messages, contents, strict=True)
        ]


def keep_tokens(tokens: list[T], limit: int, policy: str) -> list[T]:
    """Keep the last `limit` tokens ("truncate"), the first ("truncate_right"), or half per end ("truncate_middle")."""
    first = {"truncate": 0, "truncate_right": limit, "truncate_middle": limit // 2}[policy]
    return tokens[:first] + tokens[len(tokens) - (limit - first) :]


def read_given_prompts(
    prompts: Any, tokenizer: Any, limit: int, n: Any = None, temperature: Any = None
) -> list[Prompt]:
    """Return prompts for `policy.sample`: texts and messages are encoded, `Prompt`s with tokens stay.

    Args:
        prompts: a sequence of `Prompt`s, texts, lists of chat messages or token ids, also mixed; or one text.
        limit: largest number of tokens.
        n, temperature: of `policy.sample`, checked only.

    Raises:
        UserError: an element is none of these, has no tokens, too many or unknown ones; or a number is wrong.
    """
    for name, value, kind, least in (("n", n, int, 1), ("temperature", temperature, int | float, 0)):
        if value is not None and not (isinstance(value, kind) and value >= least):
            raise _refuse_sample(f"{name} = {value!r}", f"a number from {least}")
    if not isinstance(prompts, Sequence) or not prompts:
        raise _refuse_sample(f"prompts = {prompts!r:.80}", "a list of prompts")
    found = [
        _read_given(number, given, tokenizer)
        for number, given in enumerate([prompts] if isinstance(prompts, str) else prompts)
    ]
    for number, prompt in enumerate(found):
        if not 0 < len(prompt.tokens) <= limit:
            expected = f"1 to data.max_prompt_length = {limit} tokens"
            raise _refuse_sample(f"prompt {number} has {len(prompt.tokens)} tokens", expected)
        if wrong := [int(i) for i in prompt.tokens if not 0 <= i < tokenizer.vocab_size]:
            expected = f"token ids from 0 to {tokenizer.vocab_size - 1}"
            raise _refuse_sample(f"prompt {number} has the token id {wrong[0]}", expected)
    return found


def _read_given(number: int, given: Any, tokenizer: Any) -> Prompt:
    if isinstance(given, Prompt) and not isinstance(given.tokens, str):
        return given
    prompt = given if isinstance(given, Prompt) else Prompt(number, np.zeros(0, np.int32), "", ground_truth=None)
    text = given.tokens if isinstance(given, Prompt) else given
    if isinstance(text, str):
        return replace(prompt, tokens=np.array(tokenizer.encode(text), np.int32), text=text)
    if isinstance(text, Sequence) and text and all(isinstance(part, Mapping) for part in text):
        row = Row(number, 0, f"prompt {number} of policy.sample", {"prompt": [*text]})
        messages = read_messages([*text], row, "prompt")
        rendered, tokens = render_messages(messages, tokenizer, {})
        return replace(prompt, tokens=np.array(tokens, np.int32), text=rendered, messages=messages)
    ids = np.asarray(text) if isinstance(text, Sequence) or hasattr(text, "__array__") else np.zeros(0)
    if ids.ndim != 1 or not len(ids) or ids.dtype.kind not in "iu":
        expected = "a text, a list of chat messages, a list of token ids, or a Prompt"
        raise _refuse_sample(f"prompt {number} is a {type(given).__name__}: {given!r:.80}", expected)
    return replace(prompt, tokens=ids.astype(np.int32), text=tokenizer.decode(ids.tolist()))


def _refuse_sample(found: str, expected: str) -> UserError:
    hint = 'write policy.sample(step, ["What is 2 + 3?"], n=8, temperature=1.0)'
    return UserError(found, source="policy.sample", expected=expected, hint=hint)
