# SPDX-License-Identifier: Apache-2.0
"""The section `data`: prompts, and the sampling weights of their files."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

from megatron_rl.config.sections import MISSING, option

LONGEST_PERIOD = 100_000  # prompts after which a mixture of files repeats


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Prompts."""

    train_files: list[str] = option(MISSING, "JSONL or parquet files with training prompts, or reasoning-gym:NAME.")
    weights: list[float] | None = option(
        None,
        "Shares of the train files in the prompts, on any scale, each file with its own epochs; default: each "
        "prompt once per epoch.",
    )
    pass_rates: str | None = option(
        None,
        "Rollouts of the train files by tools/evaluate.py; prompts with a rate not in pass_rate_range are left out.",
    )
    pass_rate_range: list[float] = option([0.1, 0.9], "Least and largest share of correct responses.")
    validation_files: list[str] = option(
        [],
        "JSONL or parquet files; a set has its file's name (gsm8k/test.parquet: test, or gsm8k-test beside another"
        " test).",
    )
    train_batch_size: int = option(MISSING, "Prompts per rollout batch (one step of the main loop).", "prompts", ge=1)
    validation_limit: int | None = option(
        None, "Use only the first N validation prompts; default: all.", "prompts", ge=1
    )
    max_prompt_length: int = option(1024, "Longest prompt.", "tokens", ge=1)
    max_response_length: int = option(1024, "Longest response.", "tokens", ge=1)
    overlong_prompts: Literal["error", "truncate", "truncate_right", "truncate_middle", "drop"] = option(
        "error",
        "Prompts longer than max_prompt_length: refuse, keep the end (truncate), the beginning (truncate_right) or"
        " both (truncate_middle), or drop. Chats lose messages, never the template.",
    )
    apply_chat_template_kwargs: dict[str, Any] = option(
        {}, "Options of the chat template, such as enable_thinking; a row's column chat_template_kwargs overrides them."
    )
    special_tokens_in_contents: bool = option(
        False,
        "Read the text of special tokens in messages, tools and their results as these tokens; default: as text. Plain "
        "text prompts may have them anyway.",
    )
    prompt_key: str = option("prompt", "Column with the prompt: text, or a list of chat messages.")
    answer_key: str = option("answer", "Column with the ground truth in the plain schema; SFT: the response to learn.")
    shuffle: bool = option(True, "Shuffle the prompts of each epoch (by trainer.seed).")


def reduce_weights(weights: Sequence[float]) -> list[int]:
    """Return the smallest integers in the proportion of positive weights, taken as decimals."""
    shares = [Fraction(repr(weight)) for weight in weights]
    unit = math.lcm(*(share.denominator for share in shares))
    whole = [int(share * unit) for share in shares]
    return [share // math.gcd(*whole) for share in whole]
