# SPDX-License-Identifier: Apache-2.0
"""Responses of scripted lengths for the benchmark tools: random tokens and rewards from a seed (needs numpy only).

Nothing is generated, so every contestant computes the same tokens, and the same ones again in the next run.
"""

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
        response_lengths: per prompt, tokens of its responses.
        seed: of tokens and rewards.
    """

    prompt_lengths: Sequence[int]
    response_lengths: Sequence[Sequence[int]]
    seed: int = 0

    @property
    def group_of(self) -> list[int]:
        """The prompt of each response."""
        return [group for group, lengths in enumerate(self.response_lengths) for _ in lengths]

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sequence, its prompt included."""
        pairs = zip(self.prompt_lengths, self.response_lengths, strict=True)
        return [prompt + length for prompt, lengths in pairs for length in lengths]

    @property
    def longest_response(self) -> int:
        """Tokens of the longest response."""
        return max(map(max, self.response_lengths))

    def draw_rewards(self) -> np.ndarray:
        """[num_responses]."""
        return np.random.default_rng([self.seed, 1]).normal(size=len(self.group_of))

    def draw_tokens(self, vocab_size: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """Prompt and response [s] int64 of each sequence; a group has one prompt."""
        rng = np.random.default_rng([self.seed, 0])
        pairs = []
        for prompt_length, lengths in zip(self.prompt_lengths, self.response_lengths, strict=True):
            prompt = rng.integers(_FIRST_TOKEN, vocab_size, prompt_length)
            pairs += [(prompt, rng.integers(_FIRST_TOKEN, vocab_size, length)) for length in lengths]
        return pairs


def draw_geometric_lengths(shape: tuple[int, int], mean: float, limit: int, seed: int) -> list[list[int]]:
    """Lengths of responses that end with equal probability at every token, cut at a limit.

    Args:
        shape: prompts, and responses to each.
        mean: without the limit.
    """
    rng = np.random.default_rng([seed, 2])
    return np.minimum(rng.geometric(1.0 / mean, shape), limit).tolist()


def draw_lognormal_lengths(
    shape: tuple[int, int], median: float, sigma: float, limit: int, seed: int
) -> list[list[int]]:
    """Long-tailed lengths: exp of a normal with standard deviation `sigma`, at least 1, cut at a limit."""
    rng = np.random.default_rng([seed, 3])
    return np.clip(np.rint(median * np.exp(sigma * rng.normal(size=shape))), 1, limit).astype(int).tolist()
