# SPDX-License-Identifier: Apache-2.0
"""The sampling settings of `rollout`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from megatron_rl.config.sections import option

_HISTORY = "not served: a token's probability would depend on which tokens came before, by a rule that training lacks"
_FORBIDDEN = "not served: it forbids tokens, and which ones is not recorded for training"
# Settings of samplers that users look for, and why they are missing (docs/sampling.md).
NOT_SERVED = {
    **dict.fromkeys(("repetition_penalty", "presence_penalty", "frequency_penalty"), _HISTORY),
    **dict.fromkeys(("logit_bias", "bad_words", "structured_outputs"), _FORBIDDEN),
}


@dataclass(frozen=True)
class ValidationSampling:
    """Sampling of one validation set."""

    n: int
    temperature: float
    top_p: float
    top_k: int
    thinking_budget: int | None


@dataclass(frozen=True, kw_only=True)
class SamplingSettings:
    """Sampling of responses (docs/sampling.md)."""

    temperature: float = option(
        1.0,
        "Sampling temperature; also scales the logits in training.",
        gt=0,
        hint="greedy sampling gives every response of a group the same reward; use 1.0",
    )
    top_p: float = option(
        1.0,
        "Nucleus sampling; training scores the same sets.",
        gt=0,
        le=1,
        wrong="is no probability",
        hint="1.0 switches it off",
    )
    top_k: int = option(-1, "Draw from so many most likely tokens; -1: all. Training scores the same sets.", "tokens")
    min_p: float = option(
        0.0,
        "Draw from tokens at least this fraction as likely as the likeliest; training scores the same sets.",
        ge=0,
        lt=1,
        wrong="is no fraction",
        hint="0 switches it off",
    )
    min_tokens: int = option(
        0,
        "Neither end-of-response tokens nor rollout.stop end a response before so many tokens; training scores the"
        " same sets.",
        "tokens",
    )
    thinking_budget: int | None = option(
        None,
        "End a thought after so many tokens of the response with rollout.thinking_end; null: never.",
        "tokens",
        gt=0,
        wrong="is no number of tokens",
        hint="null: no budget",
    )
    thinking_end: str = option(
        "\n</think>\n\n", "Text that ends a thought at thinking_budget, closing tag included; not learned from."
    )
    max_kept_tokens: int = option(
        1024,
        "top_p, min_p and min_tokens: draw from so many most likely tokens at most (sampling/kept_at_limit).",
        "tokens",
        ge=1,
    )
    stop: list[str] = option(
        [], "Texts that end a response: the tokens that complete one stay, rewards read the text before it."
    )
    stop_token_ids: list[int] = option(
        [], "Tokens that end a response, besides the tokenizer's EOS and generation_config.json's."
    )
    validation_temperature: float = option(0.0, "Temperature of validation responses (0: greedy).", ge=0)
    validation_top_p: float = option(
        1.0, "top_p of validation responses.", gt=0, le=1, wrong="is no probability", hint="1.0 switches it off"
    )
    validation_top_k: int = option(-1, "top_k of validation responses.", "tokens")
    validation_n: int = option(
        1, "Responses per validation prompt; 2 or more: mean@k, pass@k, maj@k.", "responses", ge=1
    )
    validation_sets: dict[str, Any] = option(
        {}, "Exceptions by set: its name -> any of n, temperature, top_p, top_k, thinking_budget."
    )

    @property
    def is_truncated(self) -> bool:
        """Whether rollouts are drawn from a part of the vocabulary."""
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0 or self.min_tokens > 0

    @property
    def is_ever_truncated(self) -> bool:
        """Whether rollouts or validation responses are."""
        sets = (self.for_validation(name) for name in (*self.validation_sets, ""))
        return self.is_truncated or any(one.top_p < 1.0 or one.top_k > 0 for one in sets)

    def for_validation(self, name: str) -> ValidationSampling:
        """Return the sampling of a validation set."""
        common = ValidationSampling(
            self.validation_n,
            self.validation_temperature,
            self.validation_top_p,
            self.validation_top_k,
            self.thinking_budget,
        )
        return replace(common, **self.validation_sets.get(name, {}))
