# SPDX-License-Identifier: Apache-2.0
"""Scores one rank's rollouts, concurrently with generation if a source supports it.

    generator.generate(..., on_finished=scorer.begin)         # workers and services start at once
    scored = scorer.finish(rollouts of this rank)             # waits

Invariant: scores do not depend on whether or when `begin` was called.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from functools import partial

import numpy as np

from megatron_rl.config.schema import RewardConfig
from megatron_rl.rewards.answers import RESTATES, restates_prompt
from megatron_rl.rewards.plan import RewardPlan, compute_reward
from megatron_rl.rewards.scoring import Rule, Score, list_truths, score_by_rule
from megatron_rl.types import Rollout

# (decoded response, step) -> function that waits for the score (UserError if it failed). It must not raise itself: the
# rollout engine calls it.
RewardSource = Callable[[Rollout, int], Callable[[], Score]]


class Scorer:
    """The local reward sources of one rank; no communication with other ranks.

    With reward.workers=0, rules and functions run during `finish`, and a function that hangs blocks the run until the
    collective timeout.

    Args:
        decode: response tokens -> text.

    Attributes:
        is_concurrent: whether scoring starts before `finish`.
        takes_groups: whether a source scores all responses to a prompt in one call.
    """

    def __init__(self, plan: RewardPlan, config: RewardConfig, decode: Callable[[Sequence[int]], str]) -> None:
        self._plan, self._decode = plan, decode
        self._sources: list[RewardSource] = []
        self._open = ExitStack()
        functions = [(spec.target, spec.setting) for spec in plan.sources if spec.function and not spec.takes_group]
        pool = None
        if config.workers and functions:
            from megatron_rl.rewards.functions import WorkerPool

            pool = WorkerPool(
                functions, config.workers, config.timeout_seconds, answer=config.answer, secrets=config.worker_secrets
            )
            self._open.callback(pool.close)
        here = [spec for spec in plan.sources if spec.function and (pool is None or spec.takes_group)]
        runs_code = any(not isinstance(spec.function, Rule) for spec in here)
        left = None
        if runs_code:
            from megatron_rl.rewards.functions import LeftBehind, compute_score, is_batched

            left = LeftBehind()
        self._notice_children: Callable[[], AbstractContextManager] = left.notice if left else nullcontext
        for spec in plan.sources:
            if spec.function is None:
                from megatron_rl.rewards.service import RewardService

                service = RewardService(spec.target, config, spec.setting)
                self._open.callback(service.close)
                self._sources.append(service.begin)
            elif spec not in here:
                assert pool is not None
                submit = partial(pool.submit, functions.index((spec.target, spec.setting)))
                self._sources.append(lambda *sample, submit=submit: submit(*sample).result)
            elif isinstance(spec.function, Rule):  # runs when its score is awaited
                self._sources.append(lambda rollout, step, rule=spec.function: partial(score_by_rule, rule, rollout))
            elif is_batched(spec.function):
                from megatron_rl.rewards.calls import BatchSource

                self._sources.append(BatchSource(spec.function).begin)
            else:  # likewise, and cannot be interrupted
                self._sources.append(lambda *sample, score=spec.function: partial(compute_score, score, *sample))
        if left:
            self._open.callback(left.kill)  # at the end, before requests in flight are waited for
        self.is_concurrent = any(spec.function is None or pool is not None for spec in plan.sources)
        self.takes_groups = plan.takes_groups
        self._begun: dict[int, tuple[Rollout, Rollout, list[Callable[[], Score]]]] = {}

    def begin(self, rollout: Rollout, step: int = 0) -> None:
        """Decode the last turn and start scoring it (step 0: validation); `finish` must get the same object.

        A rollout with an environment's reward is only decoded.
        """
        decoded = replace(rollout, response=self._decode(rollout.answer_tokens.tolist()))
        sources = self._sources if math.isnan(rollout.reward) else []
        waits = [begin(decoded, step) for begin in sources]
        self._begun[id(rollout)] = rollout, decoded, waits  # an id is unique only while its object exists

    def finish(self, rollouts: Sequence[Rollout], step: int | Sequence[int] = 0) -> list[Rollout]:
        """Return this rank's rollouts with response and reward, without the reward model's part.

        The component `RESTATES` is 1.0 if an answer that restates the prompt got a positive reward.

        Args:
            step: one for all or one per rollout; for rollouts that `begin` has not received.

        Raises:
            UserError: a source failed on a rollout or a sum is not finite; the first in order.
        """
        for rollout, its_step in zip(rollouts, np.broadcast_to(step, len(rollouts)).tolist(), strict=True):
            if id(rollout) not in self._begun:
                self.begin(rollout, its_step)
        scored = []
        with self._notice_children():
            for _, decoded, waits in (self._begun.pop(id(rollout)) for rollout in rollouts):
                scores = [wait() for wait in waits]
                failure = next((score.failure for score in scores if score.failure), decoded.failure)
                reward, components = compute_reward(self._plan, scores, decoded)
                prompt, truths = decoded.prompt, list_truths(decoded.prompt.ground_truth)
                are_texts = reward > 0 and all(isinstance(truth, str) for truth in truths)
                if are_texts and restates_prompt(decoded.response, prompt.text, truths, prompt.data_source):
                    components[RESTATES] = 1.0
                scored.append(replace(decoded, reward=reward, reward_components=components, failure=failure))
        return scored

    def close(self) -> None:
        """End workers, requests, and processes left behind by reward functions."""
        self._open.close()
