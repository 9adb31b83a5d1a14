# SPDX-License-Identifier: Apache-2.0
"""The samples of a step: generated, scored, and drawn again where a group teaches nothing (DAPO).

What an engine has generated is scored on its own ranks, and stays there: rewards come from local sources (rules,
functions, services), which start while other responses are still being generated where they can. Other ranks get the
headers. A reward model is a role, which fetches what it scores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.config.sampling_settings import SamplingSettings
from megatron_rl.config.schema import RunConfig
from megatron_rl.data.prompts import PromptSet
from megatron_rl.engines.sampling import SamplingConfig
from megatron_rl.observability.timers import PhaseTimers
from megatron_rl.parallel.collectives import gather_objects, raise_together, reduce_scalars
from megatron_rl.rewards.plan import MODEL, OVERLONG, RewardPlan, add_model_scores
from megatron_rl.rewards.scorer import Scorer
from megatron_rl.rewards.validation import compute_validation_metrics, estimate_pass_at_k
from megatron_rl.rollout.generation import RolloutGenerator
from megatron_rl.rollout.order import SampleGroups
from megatron_rl.rollout.stream import RolloutStream
from megatron_rl.samples.experience import Experience
from megatron_rl.samples.fetch import hold
from megatron_rl.samples.table import FINISH_REASONS, Headers, build_headers, gather_headers, join_headers
from megatron_rl.types import FAILED, Prompt, Rollout, UserError


def describe_kept(
    rollouts: Iterable[Rollout], settings: SamplingSettings, group: dist.ProcessGroup
) -> dict[str, float]:
    """Metrics of the kept sets of all engines; collective.

    Args:
        rollouts: of this rank's engine on its first rank; none elsewhere.
        settings: of the run.
        group: all ranks.

    Returns:
        sampling/kept_mean, kept_max: their sizes; sampling/kept_at_limit: the share of them that
        `rollout.max_kept_tokens` may have made smaller.
    """
    counts = [branch.kept.counts for rollout in rollouts for branch in rollout.branches if branch.kept is not None]
    sizes = np.concatenate([np.empty(0, np.int32), *counts])
    sizes = sizes[sizes > 0]
    limit, device = settings.max_kept_tokens, torch.device("cpu")
    is_bounded = 0 < settings.top_k <= limit
    sums = {"tokens": len(sizes), "ids": sizes.sum(), "at_limit": 0 if is_bounded else (sizes == limit).sum()}
    sums = reduce_scalars({name: float(value) for name, value in sums.items()}, dist.ReduceOp.SUM, group, device)
    largest = reduce_scalars({"max": float(sizes.max(initial=0))}, dist.ReduceOp.MAX, group, device)
    tokens = max(sums["tokens"], 1.0)
    return {
        "sampling/kept_mean": sums["ids"] / tokens,
        "sampling/kept_max": largest["max"],
        "sampling/kept_at_limit": sums["at_limit"] / tokens,
    }


def describe_thoughts(rollouts: Iterable[Rollout], group: dist.ProcessGroup) -> dict[str, float]:
    """sampling/thoughts_ended, the share of responses whose thought `rollout.thinking_budget` has ended; collective.

    Args:
        rollouts: of this rank's engine on its first rank; none elsewhere.
        group: all ranks.
    """
    ended = [len(rollout.answer_tokens) > len(rollout.response_tokens) for rollout in rollouts]
    sums = {"rollouts": float(len(ended)), "ended": float(sum(ended))}
    sums = reduce_scalars(sums, dist.ReduceOp.SUM, group, torch.device("cpu"))
    return {"sampling/thoughts_ended": sums["ended"] / max(sums["rollouts"], 1.0)}


# A reward model: one score per rollout; collective, the same on every rank.
ResponseModel = Callable[[Experience], Sequence[float] | np.ndarray]


@dataclass(frozen=True)
class RewardSources:
    """Where rewards come from.

    Attributes:
        plan: how scores add up.
        scorer: local sources of this rank.
        model: scores rollouts where the plan gives it a weight; None: there is none.
        needs_greedy_baseline: the estimator wants the reward of a greedy response to each prompt.
    """

    plan: RewardPlan
    scorer: Scorer
    model: ResponseModel | None
    needs_greedy_baseline: bool


class Collector:
    """Generates and scores; must be used inside of `hybrid.rollout_mode()`.

    Args:
        generator: the engines, with the actor's weights.
        stream: the order of the training prompts, and the samples that have begun.
        rewards: where rewards come from.
        config: the resolved config.
        stop_token_ids: end a response.
        timers: count the phases "rollout" and "reward".
        group: all ranks.
    """

    def __init__(
        self,
        *,
        generator: RolloutGenerator,
        stream: RolloutStream,
        rewards: RewardSources,
        config: RunConfig,
        stop_token_ids: tuple[int, ...],
        timers: PhaseTimers,
        group: dist.ProcessGroup,
    ) -> None:
        self._generator, self._stream, self._rewards, self._config = generator, stream, rewards, config
        self._stop_token_ids, self._timers, self._group = stop_token_ids, timers, group
        self._on_finished = rewards.scorer.begin if rewards.scorer.is_concurrent else None
        self._failures: dict[bool, str] = {}  # the last one of an episode (True), and of a service, scored here

    def collect(self, step: int) -> Experience:
        """`train_batch_size` scored groups; collective.

        With `algorithm.dynamic_sampling`, prompts are drawn until `train_batch_size` groups have responses that differ
        in `dynamic_sampling_metric` (DAPO, arXiv 2503.14476, section 3.2): in rounds of `train_batch_size`, of which
        surplus groups are dropped; or, where samples begin ahead of their step, as many as are missing, so that there
        is no surplus. After `max_sampling_rounds * train_batch_size` prompts, groups without a signal fill the batch,
        so that its size never changes.
        """
        algorithm, wanted = self._config.algorithm, self._config.data.train_batch_size
        resamples = algorithm.dynamic_sampling
        most = wanted * (algorithm.max_sampling_rounds if resamples else 1)
        parts: list[Experience] = []
        informative: list[bool] = []  # of each group
        while sum(informative) < wanted and len(informative) < most:
            missing = min(wanted - sum(informative), most - len(informative))
            part = self._draw(step, len(parts), missing)
            informative += (
                find_informative(part.headers, algorithm.dynamic_sampling_metric)
                if resamples
                else [True] * len(part.prompts)
            )
            parts.append(part)
            failed = self._check_failures(parts, f"step {step}")
        found = sum(informative)
        metrics = {name: value for part in parts for name, value in part.metrics.items()}
        if self._config.agents.has_episodes:
            metrics["agents/failed"] = failed
        if resamples:
            metrics |= {
                "sampling/rounds": len(parts),
                "sampling/generated_groups": len(informative),
                "sampling/informative_groups": found,
                "sampling/filled_groups": max(0, wanted - found),
                "sampling/dropped_groups": max(0, found - wanted),
            }
        in_order = sorted(range(len(informative)), key=lambda group: not informative[group])  # the others fill up
        samples = Experience.join(parts, in_order[:wanted], metrics)
        if self._rewards.needs_greedy_baseline:  # ReMax, arXiv 2310.10505
            samples.add_baselines(self.generate(SampleGroups(samples.prompts, 1, self.sampling(0.0), step)))
        return samples

    def _draw(self, step: int, round: int, missing: int) -> Experience:
        """The next groups: all that begin and end in this step; of those that begin ahead of it, what is missing."""
        if not self._stream.is_in_use:
            groups = SampleGroups(self._stream.next_batch(), self._config.rollout.n, self.sampling(), step, round)
            return self.generate(groups)
        with self._timers.phase("rollout"):
            taken = self._stream.take(self.sampling(), self._on_finished, missing, round)
        samples = self._score(taken.prompts, taken.rollouts, taken.steps)
        samples.add_metrics(taken.metrics)
        return samples

    @property
    def runs_ahead(self) -> bool:
        """Whether engines on ranks of their own generate beside training."""
        return self._stream.runs_ahead

    def run_ahead(self) -> None:
        """They do so until it has ended; collective."""
        self._stream.run_ahead(self.sampling(), self._on_finished)

    def validate(
        self, validation: dict[str, PromptSet], on_set: Callable[[str, list[Experience]], None] | None = None
    ) -> dict[str, float]:
        """Metrics of every validation set, `validation/<set>/<metric>`; collective.

        Args:
            validation: sets by name.
            on_set: called on every rank with the name of each set and its scored samples, batch by batch.
        """
        config, metrics = self._config, {}
        for name, prompt_set in validation.items():
            drawn = config.rollout.for_validation(name)
            sampling = replace(
                self.sampling(drawn.temperature),
                top_p=drawn.top_p,
                top_k=drawn.top_k,
                min_p=0.0,
                thinking_budget=drawn.thinking_budget,
            )
            parts = [self.generate(SampleGroups(prompt_set.prompts, drawn.n, sampling, step=0), with_answers=True)]
            headers = join_headers([part.headers for part in parts]).rollouts
            shape = (-1, drawn.n)
            found = compute_validation_metrics(
                correctness_of(headers).reshape(shape).tolist(), headers["answer"].reshape(shape).tolist()
            )
            failed = self._check_failures(parts, f'the validation set "{name}"')
            if self._config.agents.has_episodes:
                found["failed"] = failed
            metrics |= {f"validation/{name}/{metric}": value for metric, value in found.items()}
            if on_set is not None:
                on_set(name, parts)
        return metrics

    def generate(self, groups: SampleGroups, with_answers: bool = False) -> Experience:
        """Scored responses; collective.

        Args:
            groups: what to generate.
            with_answers: the headers tell equal answers; the responses are not learned from.
        """
        with self._timers.phase("rollout"):
            generated = self._generator.generate(groups, self._on_finished)
        held = [(key // groups.group_size, rollout) for key, rollout in sorted(generated.items())]
        samples = self._score(groups.prompts, held, [groups.step] * len(groups.prompts), with_answers)
        samples.add_metrics(self._generator.metrics)
        return samples

    def _check_failures(self, parts: Sequence[Experience], what: str) -> float:
        """The share of episodes that have failed so far; collective if too many have.

        Args:
            parts: of what was generated.
            what: they are of, for the error.

        Raises:
            UserError: of episodes, or of rewards, a larger share has failed than may; on every rank.
        """
        config, headers = self._config, [part.headers.rollouts for part in parts]
        episodes = np.concatenate([part.has_failed for part in headers])
        services = ~episodes & ~np.concatenate([part.has_reward for part in headers])
        most = config.trainer.max_failed_share
        for is_episode, has_failed in ((True, episodes), (False, services)):
            if has_failed.mean() > most:
                said = [text for text in gather_objects(self._failures.get(is_episode, ""), self._group) if text]
                count = f"{has_failed.sum()} of {len(has_failed)}"
                found = f"{count} episodes of {what} failed; the last one"
                if not is_episode:
                    found = f"the reward service failed on {count} responses of {what}; the last time"
                raise UserError(
                    f"{found}:\n{said[0].rstrip() if said else 'before the run was resumed'}",
                    source=f"trainer.max_failed_share = {most:g}",
                    expected="a smaller share, as nothing is learned from what failed",
                    hint="correct what failed; trainer.max_failed_share=1 continues without it",
                )
        return float(episodes.mean())

    def sampling(self, temperature: float | None = None) -> SamplingConfig:
        """How responses are drawn: for training, or at another temperature, without `min_tokens` then."""
        rollout = self._config.rollout
        return SamplingConfig(
            rollout.temperature if temperature is None else temperature,
            self._config.data.max_response_length,
            self._stop_token_ids,
            rollout.top_p,
            rollout.top_k,
            rollout.min_p,
            rollout.max_kept_tokens,
            rollout.min_tokens if temperature is None else 0,
            rollout.thinking_budget,
        )

    def _score(
        self,
        prompts: Sequence[Prompt],
        held: Sequence[tuple[int, Rollout]],
        steps: Sequence[int],
        with_answers: bool = False,
    ) -> Experience:
        """The experience of what the engines have generated: `held` by this rank's, with the index of the prompt."""
        has_kept = self._config.rollout.is_truncated and not with_answers
        with self._timers.phase("reward"):
            headers, num_bytes = self._score_here(held, steps, with_answers)
            route_shape = None if with_answers else self._generator.route_shape
            ranks, has_episodes = np.array(self._generator.engines.of), self._config.agents.has_episodes
            payload = hold(held, headers, ranks, num_bytes, has_kept, route_shape, has_episodes)
            samples = Experience(headers, prompts, payload, self._group)
            if self._rewards.model is not None:
                scores = np.asarray(self._rewards.model(samples), np.float64)
                rollouts = headers.rollouts
                plan, name = self._rewards.plan, lambda index: rollouts.list_titles()[index]
                rewards = add_model_scores(plan, rollouts["reward"], scores, name)
                samples = samples.rescore(rewards, MODEL, scores)
        mine = [rollout for _, rollout in held] if self._generator.is_first else []
        if has_kept:
            samples.add_metrics(describe_kept(mine, self._config.rollout, self._group))
        if self._config.rollout.thinking_budget is not None and not with_answers:
            samples.add_metrics(describe_thoughts(mine, self._group))
        return samples

    def _score_here(
        self, held: Sequence[tuple[int, Rollout]], steps: Sequence[int], with_answers: bool
    ) -> tuple[Headers, int]:
        """Score a share of what this engine has generated, and tell all ranks the headers.

        Raises:
            UserError: a source failed on some rank; raised on all of them.
        """
        scorer, engines = self._rewards.scorer, self._generator.engines
        engine, place = engines.find(self._group.rank())
        # The engine's first rank has begun already, or it alone knows how episodes ended.
        if scorer.is_concurrent or self._config.agents.has_episodes:
            mine = held if place == 0 else []
        else:
            mine = held[place :: engines.width]
        scored, error = [], None
        try:
            scored = scorer.finish([rollout for _, rollout in mine], [steps[index] for index, _ in mine])
        except Exception as caught:  # the other ranks must learn of it before they wait for this one
            error = caught
        raise_together(error, self._group)
        self._failures |= {rollout.finish_reason in FAILED: rollout.failure for rollout in scored if rollout.failure}
        headers = build_headers(
            zip((index for index, _ in mine), scored, strict=True),
            holder=engine,
            mask_truncated=self._config.algorithm.mask_truncated,
            with_answers=with_answers,
        )
        return gather_headers(headers, self._group)

    def close(self) -> None:
        """End the workers of the reward sources, and release the engine."""
        self._rewards.scorer.close()
        self._generator.close()


def describe_set(headers: Headers, group_size: int) -> dict[str, float]:
    """What an evaluation says of a set beyond `compute_validation_metrics`.

    Args:
        headers: of rollouts, one row each.
        group_size: responses to each prompt.

    Returns:
        "prompts", their number; "truncated", the share of responses that were cut; and pass@j for the powers of two
        below the number of responses to a prompt.
    """
    rewards = correctness_of(headers).reshape(-1, group_size)
    sizes = [2**power for power in range(group_size.bit_length()) if 2**power < group_size]
    return {
        "prompts": float(len(rewards)),
        "truncated": float(np.mean(headers["finish_reason"] == FINISH_REASONS.index("length"))),
        **{f"pass@{size}": estimate_pass_at_k(rewards, size) for size in sizes},
    }


def find_informative(headers: Headers, metric: str | None) -> list[bool]:
    """Which groups have responses that differ in what `algorithm.dynamic_sampling_metric` names.

    Args:
        headers: of scored responses.
        metric: None: the reward without the overlong punishment, by which all-wrong responses of different lengths
            would differ; "reward": with it; else a number that the reward reports. A reward that reports no "acc" is
            its own accuracy, as in verl.

    Rollouts without a reward, whose episode or reward service has failed, are not looked at.

    Raises:
        UserError: the reward reports no such number; on every rank alike.
    """
    rollouts = headers.rollouts
    values = rollouts["reward"] if metric == "reward" else correctness_of(rollouts)
    reported = np.full(len(rollouts), np.nan) if metric is None else rollouts.component(metric)
    is_missing = np.isnan(reported) & rollouts.has_reward
    if metric not in (None, "reward", "acc") and is_missing.any():
        known = sorted({"reward", *rollouts.reported(int(is_missing.argmax()))} - {OVERLONG})
        raise UserError(
            f'algorithm.dynamic_sampling_metric = "{metric}" is not reported by the reward',
            source="algorithm.dynamic_sampling_metric",
            expected=f"null, or one of {', '.join(known)}",
            hint="a reward function that returns a dict reports all numbers of it",
        )
    judged = np.where(is_missing, values, reported)
    return [len(group) > 0 and bool(np.ptp(group) > 0) for group in headers.split_rewarded(judged)]


def correctness_of(headers: Headers) -> np.ndarray:
    """What responses are worth by themselves: the overlong punishment shapes training only."""
    return headers["reward"] - np.nan_to_num(headers.component(OVERLONG))
