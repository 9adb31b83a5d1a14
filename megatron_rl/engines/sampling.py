# SPDX-License-Identifier: Apache-2.0
"""One sampling contract for the engine and for the trainer's scoring, and seeds that depend on nothing else."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace


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
