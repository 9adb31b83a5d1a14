# SPDX-License-Identifier: Apache-2.0
"""The sampling contract of engine and trainer, stop strings, and seeds independent of scheduling.

The token that completes a stop string ends the response; all its tokens are trained on, and rewards read the text
before the string. Special tokens and incomplete UTF-8 characters decode to no text.
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
    """The tags around a thought, and the tokens that close it.

    Args:
        closing: text with the closing tag, such as </think>.

    Attributes:
        closing: [s] int32 tokens of that text.

    Raises:
        UserError: no closing tag, or the tokenizer cannot encode it.
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
        """Return whether prompt and response end inside a thought."""
        text = self._read(tokens)
        opening, closing = map(text.rfind, self._tags)
        return opening > closing

    def _read(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(tokens, keep=self._tags)


_BROKEN = "\N{REPLACEMENT CHARACTER}"
_MORE_TOKENS = 8  # special tokens, and the first token, whose leading space some tokenizers drop


class StopStrings:
    """A detector of stop strings.

    Args:
        strings: at least one, all non-empty.
        decode: token ids -> text.
    """

    def __init__(self, strings: Sequence[str], decode: Callable[[list[int]], str]) -> None:
        self._strings, self._decode = tuple(strings), decode
        self._most_tokens = max(len(text.encode()) for text in strings) + _MORE_TOKENS

    def ends(self, tokens: Sequence[int]) -> bool:
        """Return whether the last token completes a stop string."""
        return bool(len(tokens)) and self._find([*map(int, tokens[-self._most_tokens :])]) is not None

    def read(self, tokens: Sequence[int]) -> str:
        """Return the text of a response, without a stop string that its last token completes."""
        tokens = [*map(int, tokens)]
        end = self._find(tokens) if self.ends(tokens) else None
        return self._decode(tokens)[:end]

    def _find(self, tokens: list[int]) -> int | None:
        """Return the start (character index) of the stop string that the last token completes, or `None`.

        Of several completed strings, the first to end counts.
        """
        before, text = len(self._decode(tokens[:-1]).rstrip(_BROKEN)), self._decode(tokens)
        starts = {string: text.find(string, max(0, before - len(string) + 1)) for string in self._strings}
        found = [string for string, start in starts.items() if start >= 0]
        return starts[min(found, key=lambda string: starts[string] + len(string))] if found else None


@dataclass(frozen=True)
class SamplingConfig:
    """Sampling parameters.

    `min_tokens`, `min_p`, `top_k` and `top_p`, in this order, restrict the tokens to draw from (`engines.truncation`).
    Engines return these sets ("kept sets"), and training normalizes log-probs over them.

    Attributes:
        temperature: divides logits in engine and training; 0 is greedy (validation only).
        stop_token_ids: end the response, as part of it.
        top_p: keeps the fewest most likely tokens of this total probability; 1 is off.
        top_k: keeps this many most likely tokens; -1 is off.
        min_p: keeps tokens at least this fraction as likely as the best; 0 is off.
        max_kept_tokens: maximum set size.
        thinking_budget: response tokens after which an open thought is closed (`engines.thinking`).
        min_tokens: response length below which no stop token or string ends it.
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
        """True if the most likely token is always chosen."""
        return self.temperature == 0.0

    @property
    def is_truncated(self) -> bool:
        """True if some tokens are drawn from restricted sets."""
        return not self.is_greedy and (self.keeps_likely or self.min_tokens > 0)

    @property
    def keeps_likely(self) -> bool:
        """True if top-p, top-k or min-p restricts the tokens to draw from."""
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0

    def draws_like(self, other: SamplingConfig) -> bool:
        """Return whether both draw tokens from the same distribution; length limits and stop tokens may differ."""
        return self == replace(other, max_tokens=self.max_tokens, stop_token_ids=self.stop_token_ids)


def derive_seed(run_seed: int, step: int, prompt_id: int, sample_index: int, round: int = 0, position: int = 0) -> int:
    """Derive the 63-bit seed of a response, or of its continuation after `position` tokens.

    It depends on the arguments only, so DP size and scheduling never change a sample.

    Args:
        round: earlier sampling rounds of the step (dynamic sampling).
    """
    parts = [run_seed, step, prompt_id, sample_index]
    if round or position:
        parts.append(round)
    if position:
        parts.append(position)
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1
