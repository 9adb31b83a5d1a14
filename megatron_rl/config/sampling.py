# SPDX-License-Identifier: Apache-2.0
"""The settings of `rollout` that say how tokens are drawn."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.config.declaring import option


@dataclass(frozen=True, kw_only=True)
class SamplingSettings:
    """How responses are drawn (docs/sampling.md)."""

    temperature: float = option(1.0, "Sampling temperature; also scales the logits in training.")
    top_p: float = option(
        1.0, "Nucleus sampling: the fewest tokens with this probability together; training scores the same sets."
    )
    top_k: int = option(
        -1, "Draw from so many most likely tokens; -1: from all. Training scores the same sets.", "tokens"
    )
    min_p: float = option(
        0.0, "Draw from tokens at least this fraction as likely as the most likely one; training scores the same sets."
    )
    max_kept_tokens: int = option(
        1024, "top_p and min_p: draw from so many most likely tokens at most (sampling/kept_at_limit).", "tokens"
    )
    validation_temperature: float = option(0.0, "Temperature of validation responses (0: greedy).")
    validation_top_p: float = option(1.0, "top_p of validation responses.")
    validation_top_k: int = option(-1, "top_k of validation responses.", "tokens")

    @property
    def is_truncated(self) -> bool:
        """True if rollouts are drawn from a part of the vocabulary."""
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0
