# SPDX-License-Identifier: Apache-2.0
"""One sampling contract for the engine and for the trainer's scoring, and seeds that depend on nothing else."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass


@dataclass(frozen=True)
class SamplingConfig:
    """How responses are drawn.

    Attributes:
        temperature: divides the logits, in the engine and in training; 0 is greedy (validation only).
        max_tokens: longest response.
        stop_token_ids: sampling one of these ends the response; it is part of the response.

    There is no top-p or top-k: training scores the full softmax, and a truncated sampler would disagree.
    """

    temperature: float
    max_tokens: int
    stop_token_ids: tuple[int, ...]

    @property
    def is_greedy(self) -> bool:
        """True if the most likely token is always taken."""
        return self.temperature == 0.0


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
