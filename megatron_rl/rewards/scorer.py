# SPDX-License-Identifier: Apache-2.0
"""Scores one rank's rollouts, concurrently with generation if a source supports it.

    generator.generate(..., on_finished=scorer.begin)         # workers and services start at once
    scored = scorer.finish(rollouts of this rank)             # waits

Invariant: scores do not depend on whether or when `begin` was called.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

import numpy as np
import psutil

from megatron_rl.config.schema import RewardConfig
from megatron_rl.rewards.answers import RESTATES, restates_prompt
from megatron_rl.rewards.functions import RewardFunction
from megatron_rl.rewards.plan import RewardPlan, add_components, compute_reward, keep_reward
from megatron_rl.rewards.rules import RULES, list_truths
from megatron_rl.rewards.scoring import Score, compute_score
from megatron_rl.types import Rollout

if TYPE_CHECKING:
    from megatron_rl.rewards.service import RewardService
    from megatron_rl.rewards.workers import WorkerPool

_END_SECONDS = 5.0


class RewardSource(Protocol):
    """Interface of a source of scores."""

    def begin(self, rollout: Rollout, step: int = 0) -> Callable[[], Score]:
        """Start scoring a decoded response; return a function that waits for the score (UserError if it failed).

        Must not raise itself: the rollout engine calls it.
        """
        ...


class FunctionInRank:
    """A rule or function run in this process when its score is awaited; it cannot be interrupted."""

    def __init__(self, function: RewardFunction) -> None:
        self._function = function

    def begin(self, rollout: Rollout, step: int = 0) -> Callable[[], Score]:
        """Defer the call until the score is awaited."""
        return partial(compute_score, self._function, rollout, step)


class FunctionInWorker:
    """A rule or function run in the worker processes."""

    def __init__(self, pool: WorkerPool, index: int) -> None:
        self._pool, self._index = pool, index

    def begin(self, rollout: Rollout, step: int = 0) -> Callable[[], Score]:
        """Submit the rollout to the next free worker."""
        return self._pool.submit(self._index, rollout, step).result


class Scorer:
    """The local reward sources of one rank; no communication with other ranks.

    With reward.workers=0, rules and functions run during `finish`, and a function that hangs blocks the run until the
    collective timeout.

    Args:
        decode: response tokens -> text.

    Attributes:
        is_concurrent: whether scoring starts before `finish`.
    """

    def __init__(self, plan: RewardPlan, config: RewardConfig, decode: Callable[[Sequence[int]], str]) -> None:
        self._plan, self._decode = plan, decode
        functions = [(spec.target, spec.setting) for spec in plan.sources if spec.function]
        self._pool: WorkerPool | None = None
        if config.workers and functions:
            from megatron_rl.rewards.workers import WorkerPool

            self._pool = WorkerPool(
                functions, config.workers, config.timeout_seconds, answer=config.answer, secrets=config.worker_secrets
            )
        self._services: list[RewardService] = []
        self._sources: list[RewardSource] = []
        for spec in plan.sources:
            if spec.function is None:
                from megatron_rl.rewards.service import RewardService

                self._services.append(RewardService(spec.target, config, spec.setting))
                self._sources.append(self._services[-1])
            elif self._pool is None:
                self._sources.append(FunctionInRank(spec.function))
            else:
                self._sources.append(FunctionInWorker(self._pool, functions.index((spec.target, spec.setting))))
        self.is_concurrent = any(not isinstance(source, FunctionInRank) for source in self._sources)
        self._begun: dict[int, tuple[Rollout, Rollout, list[Callable[[], Score]]]] = {}
        self._runs_users_code = self._pool is None and any(name not in RULES for name, _ in functions)
        self._left_behind: set[psutil.Process] = set()

    def begin(self, rollout: Rollout, step: int = 0) -> None:
        """Decode the last turn and start scoring it (step 0: validation); `finish` must get the same object.

        The reward of an environment is kept.
        """
        decoded = replace(rollout, response=self._decode(rollout.answer_tokens.tolist()))
        sources = self._sources if math.isnan(rollout.reward) else []
        waits = [source.begin(decoded, step) for source in sources]
        self._begun[id(rollout)] = rollout, decoded, waits  # an id is unique only while its object exists

    def finish(self, rollouts: Sequence[Rollout], step: int | Sequence[int] = 0) -> list[Rollout]:
        """Return the rollouts with response and reward, without the reward model's part.

        The component `RESTATES` is 1.0 if an answer that restates the prompt got a positive reward.

        Args:
            rollouts: of this rank; not begun ones are begun with `step`, one for all or one per rollout.

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
                if math.isnan(decoded.reward):
                    reward, components = compute_reward(self._plan, scores, decoded)
                else:
                    reward, components = keep_reward(self._plan, decoded)
                components = add_components(decoded.reward_components, components)
                if reward > 0 and _restates(decoded):
                    components[RESTATES] = 1.0
                scored.append(replace(decoded, reward=reward, reward_components=components, failure=failure))
        return scored

    @contextmanager
    def _notice_children(self) -> Iterator[None]:
        """Track processes that user functions start in this process and leave running."""
        if not self._runs_users_code:
            yield
            return
        before = {*psutil.Process().children()}
        try:
            yield
        finally:
            self._left_behind |= {*psutil.Process().children()} - before

    def close(self) -> None:
        """End workers, requests, and processes left behind by reward functions."""
        for left in self._left_behind:
            with suppress(psutil.NoSuchProcess):
                for process in [*left.children(recursive=True), left]:
                    with suppress(psutil.NoSuchProcess):
                        process.kill()
        psutil.wait_procs(self._left_behind, timeout=_END_SECONDS)
        if self._pool is not None:
            self._pool.close()
        for service in self._services:
            service.close()


def _restates(rollout: Rollout) -> bool:
    prompt, truths = rollout.prompt, list_truths(rollout.prompt.ground_truth)
    are_texts = all(isinstance(truth, str) for truth in truths)
    return are_texts and restates_prompt(rollout.response, prompt.text, truths, prompt.data_source)
