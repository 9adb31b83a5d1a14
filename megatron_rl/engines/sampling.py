# SPDX-License-Identifier: Apache-2.0
"""One sampling contract for the engine and for the trainer's scoring, and seeds that depend on nothing else.

Stop strings end a response with the token that completes one of them, and all its tokens are learned from; rewards read
the text before the string. Special tokens have no text, nor does a character of which bytes are missing.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from megatron_rl.types import UserError

if TYPE_CHECKING:
    from megatron_rl.data.tokenizer import Tokenizer


_CLOSING_TAG = re.compile(r"</\w+>|\[/\w+\]")


class Thoughts:
    """The tags around a thought, and the tokens that end one that takes too long.

    Args:
        closing: text with the closing tag, such as </think>; the opening one is the same without the slash.
        tokenizer: of the policy.

    Attributes:
        closing: [s] int32 tokens of that text.

    Raises:
        UserError: the text has no closing tag, or the tokenizer cannot write it.
    """

    def __init__(self, closing: str, tokenizer: Tokenizer) -> None:
        found = _CLOSING_TAG.search(closing)
        tag = found.group() if found else ""
        self._tags, self._tokenizer = (tag.replace("/", ""), tag), tokenizer
        self.closing = np.array(tokenizer.encode(closing), np.int32)
        if not tag or tag not in self._read(self.closing.tolist()):
            raise UserError(
                f"the text {closing!r} ends no thought: its tokens are {self.closing.tolist()}",
                source="rollout.thinking_end",
                expected="a text with a closing tag, such as </think> or [/THINK], that the tokenizer writes and reads",
                hint="take the tag from the model's chat template, or set rollout.thinking_budget=null",
            )

    def are_open(self, tokens: Sequence[int]) -> bool:
        """Whether these tokens, the prompt's and the response's, end inside a thought."""
        text = self._read(tokens)
        opening, closing = map(text.rfind, self._tags)
        return opening > closing

    def _read(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(tokens, keep=self._tags)


_BROKEN = "\N{REPLACEMENT CHARACTER}"
_MORE_TOKENS = 8  # special ones, and the first, of which some tokenizers drop a leading space


class StopStrings:
    """Looks for the strings at the end of responses.

    Args:
        strings: not empty; none of them is.
        decode: token ids -> text.
    """

    def __init__(self, strings: Sequence[str], decode: Callable[[list[int]], str]) -> None:
        self._strings, self._decode = tuple(strings), decode
        self._most_tokens = max(len(text.encode()) for text in strings) + _MORE_TOKENS

    def ends(self, tokens: Sequence[int]) -> bool:
        """Whether the last one of these sampled tokens completes a string; only the last few are looked at."""
        return bool(len(tokens)) and self._find([*map(int, tokens[-self._most_tokens :])]) is not None

    def read(self, tokens: Sequence[int]) -> str:
        """The text of a response, up to the string that its last token completes."""
        tokens = [*map(int, tokens)]
        end = self._find(tokens) if self.ends(tokens) else None
        return self._decode(tokens)[:end]

    def _find(self, tokens: list[int]) -> int | None:
        """Return the start of the string that the last token completes; of several, the one that is complete first."""
        before, text = len(self._decode(tokens[:-1]).rstrip(_BROKEN)), self._decode(tokens)
        starts = {string: text.find(string, max(0, before - len(string) + 1)) for string in self._strings}
        found = [string for string, start in starts.items() if start >= 0]
        return starts[min(found, key=lambda string: starts[string] + len(string))] if found else None


@dataclass(frozen=True)
class SamplingConfig:
    """How responses are drawn.

    A token is drawn from the tokens that `min_tokens`, `min_p`, `top_k` and `top_p` leave, one after another
    (`engines.truncation` has the one definition). An engine returns these sets, and training scores each token within
    its own.

    Attributes:
        temperature: divides the logits, in the engine and in training; 0 is greedy (validation only).
        max_tokens: longest response.
        stop_token_ids: sampling one of these ends the response; it is part of the response.
        top_p: the fewest most likely tokens that have this probability together; 1: all.
        top_k: the so many most likely tokens; -1: all.
        min_p: tokens at least this fraction as likely as the most likely one; 0: all.
        max_kept_tokens: no set is larger: of a larger one, the most likely tokens are left.
        thinking_budget: a thought that is not over after so many tokens of the response is ended (`engines.thinking`);
            None: none is.
        min_tokens: so many tokens of a response are drawn without `stop_token_ids`, and no stop string ends it before.
    """

    temperature: float
    max_tokens: int
    stop_token_ids: tuple[int, ...]
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    max_kept_tokens: int = 1024
    min_tokens: int = 0
    thinking_budget: int | None = None

    @property
    def is_greedy(self) -> bool:
        """True if the most likely token is always taken."""
        return self.temperature == 0.0

    @property
    def is_truncated(self) -> bool:
        """True if tokens are drawn from a part of the vocabulary."""
        return not self.is_greedy and (self.keeps_likely or self.min_tokens > 0)

    @property
    def keeps_likely(self) -> bool:
        """True if every token is drawn from the likely ones."""
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0

    def draws_like(self, other: SamplingConfig) -> bool:
        """True if both draw a token from the same distribution."""
        return self == replace(other, max_tokens=self.max_tokens, stop_token_ids=self.stop_token_ids)


def derive_seed(run_seed: int, step: int, prompt_id: int, sample_index: int, round: int = 0, position: int = 0) -> int:
    """Seed of one response, 63 bits, or of what continues it after `position` tokens.

    `round` counts the times that a step samples again.

    It depends on these numbers only, so that neither the DP size nor the order of scheduling
    changes what is sampled.
    """
    parts = [run_seed, step, prompt_id, sample_index]
    if round or position:
        parts.append(round)
    if position:
        parts.append(position)
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1
