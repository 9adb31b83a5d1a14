# SPDX-License-Identifier: Apache-2.0
"""Loads preferences: pairs of responses to one prompt, or single responses with a label.

    {"prompt": ..., "chosen": ..., "rejected": ..., "margin": 1.0, "weight": 1.0}
    {"prompt": ..., "completion": ..., "label": true}         (loss kto; pairs are read as two of these)

Responses are texts, or lists with one message of the assistant. Without a prompt, `chosen` and `rejected` are whole
conversations, and the prompt is their common beginning. margin and weight may be left out.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import numpy as np

from megatron_rl.config.schema import DataConfig
from megatron_rl.data.chats import read_messages
from megatron_rl.data.prompts import PromptSet, fit_rows, parse_messages, read_tools, tokenize_prompt
from megatron_rl.data.rows import Row, wrong_type
from megatron_rl.data.sft_examples import encode_response
from megatron_rl.data.tokenizer import Tokenizer
from megatron_rl.types import Prompt, Rollout, UserError

_PAIR, _SINGLE = ("chosen", "rejected"), ("completion", "label")


@dataclass(frozen=True)
class Preference:
    """A pair, chosen response first, or one response.

    Attributes:
        is_chosen: of a single response, its label.
        margin: least difference of rewards that the loss is content with.
        weight: weight of its loss.
    """

    prompt: Prompt
    responses: list[Rollout]
    is_chosen: bool = True
    margin: float = 0.0
    weight: float = 1.0


@dataclass(frozen=True)
class PreferenceSet(PromptSet):
    """Preferences of a list of files."""

    examples: list[Preference]


def load_preferences(
    files: list[str], tokenizer: Tokenizer, cfg: DataConfig, *, is_paired: bool, limit: int | None = None
) -> PreferenceSet:
    """Read, check and tokenize preferences.

    Args:
        is_paired: read pairs; else single responses, two from each pair.
        limit: keep only the first N rows.

    Raises:
        UserError: as `load_prompts`; also a missing column, a response that is no single reply or longer than
            `max_response_length` with its EOS, equal responses, or a margin or weight that is no finite number.
    """

    def fit(row: Row) -> tuple[list[Preference] | None, bool]:
        has_pair = any(name in row.columns for name in _PAIR)
        names = _PAIR if has_pair or is_paired else _SINGLE[:1]
        tokens = [encode_response(row, _read_response(row, name), tokenizer, cfg) for name in names]
        prompt, is_too_long = tokenize_prompt(row, tokenizer, cfg, read_tools(row))
        if prompt is None:
            return None, True
        if len(tokens) == 2 and tokens[0] == tokens[1]:
            raise UserError(
                "the chosen response is the rejected one",
                source=row.location,
                expected="two different responses",
                hint="remove the row",
            )
        prompt = Prompt(row.index, prompt.tokens, text=prompt.text, ground_truth=None)
        margin, weight = (_read_number(row, *given) for given in (("margin", 0.0), ("weight", 1.0)))
        rollouts = [
            Rollout.from_response(prompt, i, np.asarray(response, np.int32), None, "stop")
            for i, response in enumerate(tokens)
        ]
        if is_paired:
            return [Preference(prompt, rollouts, True, margin, weight)], is_too_long
        labels = (True, False) if has_pair else (row.require("label"),)
        if not all(label in (True, False) for label in labels):
            raise wrong_type("label", labels[0], row.location, "true or false")
        singles = [Rollout.from_response(prompt, 0, rollout.response_tokens, None, "stop") for rollout in rollouts]
        found = [Preference(prompt, [s], bool(x), weight=weight) for s, x in zip(singles, labels, strict=True)]
        return found, is_too_long

    counts, starts = Counter[str](), list[int]()
    examples = [part for row in fit_rows(files, cfg, counts, starts, fit, limit, _share_prompt(cfg)) for part in row]
    prompts = [example.prompt for example in examples]
    return PreferenceSet(prompts, counts["truncated"], counts["dropped"], starts, examples)


def _share_prompt(cfg: DataConfig) -> Any:
    """Return a function that splits the prompt off a pair of whole conversations."""

    def prepare(row: Row) -> None:
        for name in (*_PAIR, _SINGLE[0]):
            if name in row.columns:
                row.columns[name] = parse_messages(row.columns[name])
        chosen, rejected = map(row.columns.get, _PAIR)
        if row.columns.get(cfg.prompt_key) is None and isinstance(chosen, list) and isinstance(rejected, list):
            same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False)))
            row.columns[cfg.prompt_key] = chosen[:same]
            row.columns.update(chosen=chosen[same:], rejected=rejected[same:])

    return prepare


def _read_response(row: Row, name: str) -> str:
    value = row.require(name)
    if not isinstance(value, list):
        return row.scalar_text(name)
    messages = read_messages(value, row, name)
    if len(messages) != 1 or messages[0]["role"] != "assistant":
        roles = ", ".join(message["role"] for message in messages)
        raise wrong_type(name, roles, row.location, "a text, or one message of the assistant after the prompt")
    return messages[0]["content"]


def _read_number(row: Row, name: str, default: float) -> float:
    value = row.columns.get(name, default)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not np.isfinite(value):
        raise wrong_type(name, value, row.location, "a finite number")
    return float(value)
