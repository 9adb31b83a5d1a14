# SPDX-License-Identifier: Apache-2.0
"""Checks of the ground truths against the reward rules, before the run starts."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_rl.rewards.answers import extract_answer
from megatron_rl.rewards.mathematics import is_readable
from megatron_rl.rewards.plan import RewardPlan
from megatron_rl.rewards.rules import list_truths
from megatron_rl.rewards.scoring import shorten
from megatron_rl.types import Prompt, UserError

_COMPARES_TEXTS = ("math", "exact")


def check_truths(plan: RewardPlan, prompts: Sequence[Prompt]) -> list[str]:
    """Return notes on ground truths that can be compared as text only.

    Raises:
        UserError: a data set has no scorer in the rule by_data_source, or a ground truth is not text for a rule that
            needs it.
    """
    targets = {source.target: source.setting for source in plan.sources}
    if "by_data_source" in targets:
        from megatron_rl.rewards.public_sets import find_scorer

        for data_source in sorted({prompt.data_source for prompt in prompts}):
            find_scorer(data_source)
    for rule in _COMPARES_TEXTS:
        if rule in targets:
            _require_texts(rule, targets[rule], prompts)
    if "math" not in targets:
        return []
    unread = [
        (prompt, truth)
        for prompt in prompts
        for truth in list_truths(prompt.ground_truth)
        if not is_readable(extract_answer(truth) or truth.strip())
    ]
    if not unread:
        return []
    prompt, truth = unread[0]
    return [
        f"ground truths: {len(unread)} cannot be read as mathematics and are compared as text, the first: "
        f"prompt_id {prompt.prompt_id}, {shorten(repr(truth))}"
    ]


def _require_texts(rule: str, setting: str, prompts: Sequence[Prompt]) -> None:
    for prompt in prompts:
        if not all(isinstance(truth, str) for truth in list_truths(prompt.ground_truth)):
            raise UserError(
                f"the rule {rule} cannot compare with the ground truth {shorten(repr(prompt.ground_truth))} of "
                f'prompt_id {prompt.prompt_id}, data_source "{prompt.data_source}"',
                source=setting,
                expected="a text, or a list of texts of which any is right",
                hint="use reward.function, which gets the ground truth as it is",
            )
