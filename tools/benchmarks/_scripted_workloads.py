# SPDX-License-Identifier: Apache-2.0
"""Responses of scripted lengths with seeded tokens and rewards, equal for all contestants (needs numpy only)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_FIRST_TOKEN = 2  # 0 is padding, 1 ends a sequence


@dataclass(frozen=True)
class Workload:
    """Groups of responses by length.

    Attributes:
        prompt_lengths: tokens of each prompt.
        response_lengths: tokens of each prompt's responses.
    """

    prompt_lengths: Sequence[int]
    response_lengths: Sequence[Sequence[int]]
    seed: int = 0

    @property
    def group_of(self) -> list[int]:
        """Return the prompt index of each response."""
        return [group for group, lengths in enumerate(self.response_lengths) for _ in lengths]

    @property
    def lengths(self) -> list[int]:
        """Return tokens per sequence, with prompt."""
        pairs = zip(self.prompt_lengths, self.response_lengths, strict=True)
        return [prompt + length for prompt, lengths in pairs for length in lengths]

    @property
    def longest_response(self) -> int:
        """Return the tokens of the longest response."""
        return max(map(max, self.response_lengths))

    def draw_rewards(self) -> np.ndarray:
        """Draw rewards [num_responses]."""
        return np.random.default_rng([self.seed, 1]).normal(size=len(self.group_of))

    def draw_tokens(self, vocab_size: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """Draw prompt and response [s] int64 of each sequence."""
        rng = np.random.default_rng([self.seed, 0])
        pairs = []
        for prompt_length, lengths in zip(self.prompt_lengths, self.response_lengths, strict=True):
            prompt = rng.integers(_FIRST_TOKEN, vocab_size, prompt_length)
            pairs += [(prompt, rng.integers(_FIRST_TOKEN, vocab_size, length)) for length in lengths]
        return pairs


def draw_geometric_lengths(shape: tuple[int, int], mean: float, limit: int, seed: int) -> list[list[int]]:
    """Draw lengths with a constant end probability per token, cut at a limit.

    Args:
        shape: prompts, responses per prompt.
    """
    rng = np.random.default_rng([seed, 2])
    return np.minimum(rng.geometric(1.0 / mean, shape), limit).tolist()


def draw_lognormal_lengths(
    shape: tuple[int, int], median: float, sigma: float, limit: int, seed: int
) -> list[list[int]]:
    """Draw lognormal lengths between 1 and a limit."""
    rng = np.random.default_rng([seed, 3])
    return np.clip(np.rint(median * np.exp(sigma * rng.normal(size=shape))), 1, limit).astype(int).tolist()
