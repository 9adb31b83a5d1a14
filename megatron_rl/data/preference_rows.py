# SPDX-License-Identifier: Apache-2.0
"""Loads preferences: pairs of responses to one prompt, or single responses with a label, as a whole or of each step.

    {"prompt": ..., "chosen": ..., "rejected": ..., "margin": 1.0, "weight": 1.0}
    {"prompt": ..., "completion": ..., "label": true}         (loss kto; pairs are read as two of these)
    {"prompt": ..., "completions": [...], "labels": [true, false, ...]}                          (loss process)

Responses are texts, or lists with one message of the assistant. Without a prompt, `chosen` and `rejected` are whole
conversations, and the prompt is their common beginning. margin and weight may be left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
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
    """A pair, chosen response first, or one response."""

    prompt: Prompt
    responses: list[Rollout]
    is_chosen: bool = True  # of a single response, its label
    margin: float = 0.0  # least difference of rewards that the loss is content with
    weight: float = 1.0  # weight of its loss
    # step_ends, step_labels: [k] int64 place of each step's last token in prompt and response; [k] bool.
    step_ends: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    step_labels: np.ndarray = field(default_factory=lambda: np.zeros(0, bool))


@dataclass(frozen=True)
class PreferenceSet(PromptSet):
    """Preferences of a list of files."""

    examples: list[Preference]


def load_preferences(
    files: list[str],
    tokenizer: Tokenizer,
    cfg: DataConfig,
    *,
    is_paired: bool,
    limit: int | None = None,
    step_separator: str | None = None,
) -> PreferenceSet:
    """Read, check and tokenize preferences.

    Args:
        is_paired: read pairs; else single responses, two from each pair.
        limit: keep only the first N rows.
        step_separator: read responses in steps, and write it between them.

    Raises:
        UserError: as `load_prompts`; also a missing column, a response that is no single reply or longer than
            `max_response_length` with its EOS, equal responses, labels that do not fit the steps, a margin or weight
            that is no finite number, or a separator that is no token.
    """
    if step_separator is not None:
        find_marker(tokenizer, step_separator)

    def fit(row: Row) -> tuple[list[Preference] | None, bool]:
        if step_separator is not None:
            return _fit_steps(row, tokenizer, cfg, tokenizer.encode(step_separator))
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


def _fit_steps(
    row: Row, tokenizer: Tokenizer, cfg: DataConfig, between: list[int]
) -> tuple[list[Preference] | None, bool]:
    """Tokenize a response in steps: tokens `between` end each of them, and EOS ends the last one."""
    steps, labels = row.require("completions"), row.require("labels")
    is_sound = isinstance(steps, list) and isinstance(labels, list) and len(steps) == len(labels) > 0
    if not (is_sound and all(isinstance(step, str) for step in steps) and all(x in (True, False) for x in labels)):
        raise wrong_type("labels", labels, row.location, "a list of true or false, one for each text of completions")
    before, ends = list[int](), list[int]()
    for step in steps[:-1]:
        before += encode_response(row, step, tokenizer, cfg)[:-1] + between
        ends.append(len(before) - 1)
    response = np.asarray(encode_response(row, steps[-1], tokenizer, cfg, before), np.int32)
    prompt, is_too_long = tokenize_prompt(row, tokenizer, cfg, read_tools(row))
    if prompt is None:
        return None, True
    places = np.array([*ends, len(response) - 1]) + len(prompt.tokens)
    rollout, weight = Rollout.from_response(prompt, 0, response, None, "stop"), _read_number(row, "weight", 1.0)
    return [Preference(prompt, [rollout], True, 0.0, weight, places, np.array(labels, bool))], is_too_long


def find_marker(tokenizer: Tokenizer, separator: str) -> Callable[[int], bool]:
    """Return a function: token id -> whether its text ends with the separator of steps (UserError if none does)."""

    @cache
    def is_marker(token: int) -> bool:
        return tokenizer.decode([token], [separator]).endswith(separator)

    tokens = tokenizer.encode(separator)
    if not separator or not tokens or not is_marker(tokens[-1]):
        raise UserError(
            f"the text {separator!r} is {len(tokens)} tokens, none of which ends with it",
            source="reward_model.step_separator",
            expected="a text that is one token, by which steps are found in responses",
            hint='set reward_model.step_separator="\\n"',
        )
    return is_marker


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
