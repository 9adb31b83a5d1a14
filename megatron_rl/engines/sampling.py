# SPDX-License-Identifier: Apache-2.0
"""The sampling contract of engine and trainer, and seeds independent of scheduling."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace


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
        thinking_budget: response tokens after which an open thought is closed (`engines.wrappers`).
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
