# SPDX-License-Identifier: Apache-2.0
"""A program that gives the policy a second try, for launch/recipes/toy_mixture.yaml."""

from typing import Any

import openai


def agent(task: Any, base_url: str) -> float:
    """Return 1.0 for a right first answer, 0.5 for a right second one, else 0.0."""
    client, messages = openai.OpenAI(), list(task.messages)
    for reward in (1.0, 0.5):
        answer = client.chat.completions.create(model="policy", messages=messages).choices[0].message.content or ""
        if answer.strip() == task.ground_truth:
            return reward
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "no"}]
    return 0.0
