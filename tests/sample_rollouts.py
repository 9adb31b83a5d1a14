# SPDX-License-Identifier: Apache-2.0
"""Scored rollouts by hand for the tests of samples/, and rollouts of all engines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch.distributed as dist

from megatron_rl.types import Branch, Prompt, Rollout


def make_prompt(prompt_id: int) -> Prompt:
    return Prompt(prompt_id, np.arange(2 + prompt_id, dtype=np.int32), f"prompt {prompt_id}", "4")


def make_rollout(prompt: Prompt, sample_index: int, length: int, reward: float, **components: float) -> Rollout:
    rollout = Rollout.from_response(
        prompt,
        sample_index,
        np.arange(length, dtype=np.int32),
        np.zeros(length, np.float32),
        "length" if length > 4 else "stop",
        versions=7,
    )
    return replace(rollout, response=f"#### {length % 3}", reward=reward, reward_components=components)


def split(rollout: Rollout, sizes: tuple[int, ...]) -> Rollout:
    """The same tokens in several branches, each behind the whole prompt."""
    (branch,), branches, start = rollout.branches, [], rollout.branches[0].num_prompt_tokens
    for size in sizes:
        tokens = np.concatenate([rollout.prompt.tokens, branch.tokens[start : start + size]])
        branches.append(Branch.of_response(tokens, branch.num_prompt_tokens, versions=7))
        start += size
    return replace(rollout, branches=branches)


def gather_rollouts(generated: Mapping[int, Rollout]) -> list[Rollout]:
    """Return the rollouts of all engines, by index of the sample; collective."""
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, generated)
    joined = {index: rollout for part in parts for index, rollout in part.items()} | generated
    assert sorted(joined) == list(range(len(joined)))
    return [joined[index] for index in range(len(joined))]


PROMPTS = [make_prompt(5), make_prompt(3)]
ROLLOUTS = [
    (0, make_rollout(PROMPTS[0], 0, 4, 0.5, b=1.0, overlong=0.0)),
    (0, make_rollout(PROMPTS[0], 1, 6, 1.0, a=2.0, overlong=-1.0)),
    (1, make_rollout(PROMPTS[1], 0, 3, -1.0, b=3.0, overlong=0.0)),
    (1, make_rollout(PROMPTS[1], 1, 1, 0.25, b=4.0, overlong=0.0)),
]
