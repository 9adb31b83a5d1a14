# SPDX-License-Identifier: Apache-2.0
r"""Explain a first step without a learning signal: what is equal, and two responses with what the rule read in them.

    health: all 64 rewards are 0; no response marks its answer by \boxed{} or ####. Ask for the mark in the prompts, ...
      response '3 + 2 is 5' (reward 0), ground truth '5', extracted nothing
      response '7' (reward 0), ground truth '9', extracted nothing

A reward that is 0 for every response may be right, if the task is too hard, or due to a prompt that does not ask for
the form that the rule reads. The text lets a reader decide.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from megatron_rl.rewards.answers import extract_answer
from megatron_rl.rewards.scoring import UNMARKED, RewardPlan, shorten
from megatron_rl.types import Rollout

_MARK = (
    "Ask for the mark in the prompts, as tools/prepare_prompts.py does, or use the rule math_any "
    "(reward.function=math_any), which takes the last expression"
)
_HARD = "Read the responses: the prompts are too hard, or the reward does not read what they say"
_ROOM = "Raise data.max_response_length: all that follows the prompt counts, such as a game's rules"
_EASY = "The prompts are too easy, or the reward accepts everything"
_GROUPS = "Prompts are too easy or too hard: set data.curriculum or algorithm.dynamic_sampling, or filter them"


def explain_silence(
    rollouts: Any,
    metrics: Mapping[str, float],
    fetch: Callable[[], Sequence[tuple[Rollout, Any]]],
    plans: Mapping[str, RewardPlan],
) -> str:
    """Return a message if a step has no learning signal, else ""; collective.

    Args:
        rollouts: headers of all rollouts.
        metrics: of `describe_rollouts` and `describe_episodes`.
        fetch: returns decoded rollouts to quote, on rank 0; collective.
        plans: reward of each source of prompts.
    """
    rewards, size = rollouts["reward"][rollouts.has_reward], int(rollouts["sample_index"].max()) + 1
    if not len(rewards):
        return ""
    are_equal, found, advice = len(rewards) > 1 and np.ptp(rewards) == 0, list[str](), ""
    if are_equal:
        found.append(f"all {len(rewards)} rewards are {rewards[0]:g}")
        advice = _EASY if rewards[0] > 0 else _HARD
    elif size > 1 and metrics["reward/uninformative_groups"] == 1:
        found.append("the responses to each prompt have equal rewards, which teach nothing")
        advice = _GROUPS
    if metrics.get("agents/turns") == 0:
        found.append("no episode has a reply, as the first observation leaves no room for one")
        advice = _ROOM
    elif metrics.get(f"reward/{UNMARKED}") == 1 and not all(map(_takes_any, plans.values())):
        found.append(r"no response marks its answer by \boxed{} or ####")
        advice = _MARK
    if not found:
        return ""
    lines = [f"health: {'; '.join(found)}. {advice} (docs/health.md#no-signal)"]
    return "\n".join([*lines, *(_quote(rollout) for rollout, _ in fetch())])


def _takes_any(plan: RewardPlan) -> bool:
    return any(source.target == "math_any" for source in plan.sources)


def _quote(rollout: Rollout) -> str:
    prompt, reads = rollout.prompt, ""
    if UNMARKED in rollout.reward_components:  # of the rule math, which has scored it
        answer = extract_answer(rollout.response, prompt.data_source)
        reads = f", extracted {'nothing' if answer is None else shorten(repr(answer))}"
    truth = f", ground truth {shorten(repr(prompt.ground_truth))}" if prompt.ground_truth else ""
    return f"  response {shorten(repr(rollout.response))} (reward {rollout.reward:g}){truth}{reads}"
