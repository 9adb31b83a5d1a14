# SPDX-License-Identifier: Apache-2.0
"""The rollouts of a step: generated, scored, and drawn again where a group teaches nothing (DAPO).

Rewards come from local sources (rules, functions, services), each rank scoring a share of the rollouts, and
from a reward model, which all ranks run together. Slow local sources start while other responses are still
being generated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch.distributed as dist

from megatron_rl.config.batch_plan import BatchPlan
from megatron_rl.config.schema import RunConfig
from megatron_rl.data.prompts import PromptBatches, PromptSet
from megatron_rl.engines.sampling import SamplingConfig
from megatron_rl.experience.collected import Collected, rollouts_of
from megatron_rl.observability.timers import PhaseTimers
from megatron_rl.parallel.collectives import raise_together
from megatron_rl.rewards.plan import OVERLONG, RewardPlan, add_model_score
from megatron_rl.rewards.scorer import Scorer
from megatron_rl.rewards.validation import compute_validation_metrics, name_answer
from megatron_rl.types import Prompt, Rollout, RolloutGroup, UserError
from megatron_rl.weight_sync.hybrid_engine import HybridEngine


class ResponseModel(Protocol):
    """A reward model: scores rollouts; collective, the same on every rank."""

    def __call__(self, rollouts: Sequence[Rollout]) -> Sequence[float]:
        """One score per rollout."""


class Collector:
    """Generates and scores; must be used inside of `hybrid.rollout_mode()`.

    Args:
        hybrid: the engine with the actor's weights.
        prompts: training prompts.
        scorer: local reward sources of this rank.
        reward_plan: how scores add up.
        reward_model: scores rollouts where the plan gives it a weight.
        config: the resolved config.
        plan: batch arithmetic.
        stop_token_ids: end a response.
        needs_greedy_baseline: the advantage estimator wants the reward of a greedy response to each prompt.
        timers: count the phase "reward".
        group: all ranks.
    """

    def __init__(
        self, *, hybrid: HybridEngine, prompts: PromptBatches, scorer: Scorer, reward_plan: RewardPlan,
        reward_model: ResponseModel | None, config: RunConfig, plan: BatchPlan, stop_token_ids: tuple[int, ...],
        needs_greedy_baseline: bool, timers: PhaseTimers, group: dist.ProcessGroup,
    ) -> None:
        self._hybrid, self._prompts, self._scorer, self._reward_plan = hybrid, prompts, scorer, reward_plan
        self._reward_model, self._config, self._plan = reward_model, config, plan
        self._stop_token_ids, self._needs_greedy_baseline = stop_token_ids, needs_greedy_baseline
        self._timers, self._group = timers, group

    def sampling(self, temperature: float) -> SamplingConfig:
        """The sampling contract at a temperature."""
        return SamplingConfig(temperature, self._config.data.max_response_length, self._stop_token_ids)

    def collect(self, step: int) -> Collected:
        """`train_batch_size` scored groups; collective.

        With `algorithm.dynamic_sampling`, rounds of `train_batch_size` prompts are drawn until that many groups have
        responses that differ in `dynamic_sampling_metric` (DAPO, arXiv 2503.14476, section 3.2); surplus groups are
        dropped. After
        `max_sampling_rounds` groups without a signal fill the batch, so that its size never changes.
        """
        wanted, algorithm = self._plan.train_batch_size, self._config.algorithm
        informative: list[RolloutGroup] = []
        uninformative: list[RolloutGroup] = []
        rounds = 0
        while len(informative) < wanted and rounds < (algorithm.max_sampling_rounds if self._resamples else 1):
            groups = self.generate(
                next(self._prompts), self._plan.group_size, self._config.rollout.temperature, step, round=rounds)
            for group in groups:
                is_kept = not self._resamples or is_informative(group, algorithm.dynamic_sampling_metric)
                (informative if is_kept else uninformative).append(group)
            rounds += 1
        kept = (informative + uninformative)[:wanted]
        metrics = {
            "sampling/rounds": rounds, "sampling/generated_groups": len(informative) + len(uninformative),
            "sampling/informative_groups": len(informative),
            "sampling/filled_groups": max(0, wanted - len(informative)),
            "sampling/dropped_groups": max(0, len(informative) - wanted),
        } if self._resamples else {}
        return Collected(kept, self._score_greedy_responses(kept, step), metrics)

    @property
    def _resamples(self) -> bool:
        return self._config.algorithm.dynamic_sampling

    def _score_greedy_responses(self, groups: Sequence[RolloutGroup], step: int) -> np.ndarray | None:
        """Reward of the greedy response to each prompt (ReMax, arXiv 2310.10505)."""
        if not self._needs_greedy_baseline:
            return None
        greedy = self.generate([group.prompt for group in groups], 1, 0.0, step)
        return np.array([rollout.reward for rollout in rollouts_of(greedy)])

    def validate(self, validation: dict[str, PromptSet]) -> dict[str, float]:
        """Metrics of every validation set, `validation/<set>/<metric>`; collective."""
        config, metrics = self._config, {}
        for name, prompt_set in validation.items():
            groups: list[RolloutGroup] = []
            size = config.data.validation_batch_size or len(prompt_set.prompts)
            for first in range(0, len(prompt_set.prompts), size):
                groups += self.generate(
                    prompt_set.prompts[first : first + size], config.rollout.validation_n,
                    config.rollout.validation_temperature, step=0)
            found = compute_validation_metrics(
                [[_reward_without_shaping(rollout) for rollout in group.rollouts] for group in groups],
                [[name_answer(rollout.response) for rollout in group.rollouts] for group in groups])
            metrics |= {f"validation/{name}/{metric}": value for metric, value in found.items()}
        return metrics

    def generate(
        self, prompts: Sequence[Prompt], group_size: int, temperature: float, step: int, round: int = 0
    ) -> list[RolloutGroup]:
        """Scored responses, one group per prompt; collective."""
        self._scorer.step = step
        on_finished = self._scorer.begin if self._scorer.is_concurrent else None
        groups = self._hybrid.generate(
            prompts, group_size=group_size, sampling=self.sampling(temperature), step=step, round=round,
            on_finished=on_finished)
        with self._timers.phase("reward"):
            self._score(groups)
        return groups

    def _score(self, groups: list[RolloutGroup]) -> None:
        """Fill in response texts and rewards.

        Raises:
            UserError: a source failed on some rank; raised on all of them.
        """
        rank, rollouts = self._group.rank(), rollouts_of(groups)
        if self._scorer.is_concurrent:  # scored where they were generated
            owners = [self._hybrid.rank_of_group(i) for i, group in enumerate(groups) for _ in group.rollouts]
        else:
            owners = [i % self._group.size() for i in range(len(rollouts))]
        mine = [rollout for rollout, owner in zip(rollouts, owners, strict=True) if owner == rank]
        _run_together(lambda: self._scorer.finish(mine), self._group)
        shares: list[Any] = [None] * self._group.size()
        dist.all_gather_object(
            shares, [(r.response, r.reward, r.reward_components) for r in mine], group=self._group)
        for peer, share in enumerate(shares):
            theirs = [rollout for rollout, owner in zip(rollouts, owners, strict=True) if owner == peer]
            for rollout, scored in zip(theirs, share, strict=True):
                rollout.response, rollout.reward, rollout.reward_components = scored
        if self._reward_model is not None:
            for rollout, score in zip(rollouts, self._reward_model(rollouts), strict=True):
                add_model_score(self._reward_plan, rollout, float(score))

    def close(self) -> None:
        """End the workers of the reward sources."""
        self._scorer.close()


def is_informative(group: RolloutGroup, metric: str | None) -> bool:
    """True if the responses of a group differ in what `algorithm.dynamic_sampling_metric` names.

    Args:
        group: scored.
        metric: None: the reward without the overlong punishment, by which all-wrong responses of different lengths
            would differ; "reward": with it; else a number that the reward reports. A reward that reports no "acc" is
            its own accuracy, as in verl.

    Raises:
        UserError: the reward reports no such number; on every rank alike.
    """
    return bool(np.ptp([_judged_value(rollout, metric) for rollout in group.rollouts]) > 0)


def _judged_value(rollout: Rollout, metric: str | None) -> float:
    if metric in rollout.reward_components:
        return rollout.reward_components[metric]
    if metric == "reward":
        return rollout.reward
    if metric not in (None, "acc"):
        known = sorted({"reward", *rollout.reward_components} - {OVERLONG})
        raise UserError(
            f'algorithm.dynamic_sampling_metric = "{metric}" is not reported by the reward',
            source="algorithm.dynamic_sampling_metric", expected=f"null, or one of {', '.join(known)}",
            hint="a reward function that returns a dict reports all numbers of it")
    return _reward_without_shaping(rollout)


def _reward_without_shaping(rollout: Rollout) -> float:
    """What a response is worth by itself: the overlong punishment shapes training only."""
    return rollout.reward - rollout.reward_components.get(OVERLONG, 0.0)


def _run_together(work: Callable[[], None], group: dist.ProcessGroup) -> None:
    """Do this rank's share, and raise on every rank what it raised on any."""
    error = None
    try:
        work()
    except Exception as caught:  # the other ranks must learn of it before they wait for this one
        error = caught
    raise_together(error, group)
