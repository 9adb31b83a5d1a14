# SPDX-License-Identifier: Apache-2.0
"""Samples of a step: generation, scoring, and resampling of groups without a learning signal (DAPO).

Rollouts are scored and kept on the ranks of their engine; other ranks receive headers (`samples/table.py`). Local
reward sources (rules, functions, services) start during generation if they can.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.config.schema import RunConfig
from megatron_rl.config.sections import SamplingSettings
from megatron_rl.data.prompts import PromptSet
from megatron_rl.engines.protocol import SamplingConfig
from megatron_rl.observability.timers import PhaseTimers
from megatron_rl.parallel.collectives import gather_objects, raise_together, reduce_scalars
from megatron_rl.rewards.answers import compute_validation_metrics
from megatron_rl.rewards.scorer import OVERLONG, Scorer
from megatron_rl.rollout.generation import RolloutGenerator
from megatron_rl.rollout.order import SampleGroups
from megatron_rl.rollout.stream import RolloutStream
from megatron_rl.samples.experience import Experience
from megatron_rl.samples.fetch import Payload, index_branches
from megatron_rl.samples.table import Headers, build_headers, gather_headers, join_headers
from megatron_rl.types import FAILED, Prompt, Rollout, UserError


def describe_kept(
    rollouts: Iterable[Rollout], settings: SamplingSettings, group: dist.ProcessGroup
) -> dict[str, float]:
    """Compute metrics of the token sets that truncated sampling kept, over all engines; collective.

    Args:
        rollouts: empty except on the first rank of an engine.

    Returns:
        sampling/kept_mean, kept_max: tokens per set; kept_at_limit: share of sets that `rollout.max_kept_tokens` may
            have truncated.
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


@dataclass(frozen=True)
class RewardSources:
    """Scorer of local reward sources, and reward models.

    Attributes:
        add_scores: adds the scores of reward models to the rewards of samples; collective.
        needs_greedy_baseline: whether the advantage estimator uses rewards of greedy responses (ReMax).
    """

    scorer: Scorer
    add_scores: Callable[[Experience], Experience] | None
    needs_greedy_baseline: bool


class Collector:
    """Producer of scored samples in `hybrid.rollout_mode()`; `runs_ahead`: engines also generate during training."""

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
        self.generator, self._stream, self._rewards, self._config = generator, stream, rewards, config
        self._stop_token_ids, self._timers, self._group = stop_token_ids, timers, group
        self.runs_ahead = stream.runs_ahead
        self._on_finished = rewards.scorer.begin if rewards.scorer.is_concurrent else None
        self._failures: dict[bool, str] = {}  # last failure of an episode (True), of a reward service (False)

    def collect(self, step: int) -> Experience:
        """Collect `train_batch_size` scored groups; collective.

        With `algorithm.dynamic_sampling`, prompts are drawn until `train_batch_size` groups have responses that differ
        in `dynamic_sampling_metric` (DAPO, arXiv 2503.14476, section 3.2): in full rounds, dropping surplus groups, or,
        if samples begin ahead of their step, exactly the missing number. After `max_sampling_rounds` batches of
        prompts, groups without a signal fill the batch, so that its size is constant.
        """
        algorithm, wanted = self._config.algorithm, self._config.data.train_batch_size
        resamples = algorithm.dynamic_sampling
        most = wanted * (algorithm.max_sampling_rounds if resamples else 1)
        parts: list[Experience] = []
        informative: list[bool] = []  # per group
        while sum(informative) < wanted and len(informative) < most:
            missing = min(wanted - sum(informative), most - len(informative))
            part = self._draw(step, len(parts), missing)
            metric = algorithm.dynamic_sampling_metric
            informative += find_informative(part.headers, metric) if resamples else [True] * len(part.prompts)
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
        in_order = sorted(range(len(informative)), key=lambda group: not informative[group])  # informative groups first
        samples = Experience.join(parts, in_order[:wanted], metrics)
        if self._rewards.needs_greedy_baseline:  # ReMax, arXiv 2310.10505
            samples.add_baselines(self.generate(SampleGroups(samples.prompts, 1, self.sampling(0.0), step)))
        return samples

    def _draw(self, step: int, round: int, missing: int) -> Experience:
        prompts = self._stream.next_batch()
        if prompts is not None:
            return self.generate(SampleGroups(prompts, self._config.rollout.n, self.sampling(), step, round))
        with self._timers.phase("rollout"):
            taken = self._stream.take(self.sampling(), self._on_finished, missing, round)
        samples = self._score(taken.prompts, taken.rollouts, taken.steps)
        samples.metrics.update(taken.metrics)
        return samples

    def run_ahead(self) -> None:
        """Let dedicated engines generate until training ends; collective."""
        self._stream.run_ahead(self.sampling(), self._on_finished)

    def validate(
        self, validation: dict[str, PromptSet], on_set: Callable[[str, list[Experience]], None] | None = None
    ) -> dict[str, float]:
        """Compute `validation/<set>/<metric>`; `on_set` is called on every rank with each set's samples. Collective."""
        config, metrics = self._config, {}
        for name, prompt_set in validation.items():
            drawn = config.rollout.for_validation(name)
            base, budget = self.sampling(drawn.temperature), drawn.thinking_budget
            sampling = replace(base, top_p=drawn.top_p, top_k=drawn.top_k, min_p=0.0, thinking_budget=budget)
            parts = [self.generate(SampleGroups(prompt_set.prompts, drawn.n, sampling, step=0), with_answers=True)]
            headers = join_headers([part.headers for part in parts]).rollouts
            correct, answers = (x.reshape(-1, drawn.n).tolist() for x in (correctness_of(headers), headers["answer"]))
            found = compute_validation_metrics(correct, answers)
            failed = self._check_failures(parts, f'the validation set "{name}"')
            if self._config.agents.has_episodes:
                found["failed"] = failed
            metrics |= {f"validation/{name}/{metric}": value for metric, value in found.items()}
            if on_set is not None:
                on_set(name, parts)
        return metrics

    def generate(self, groups: SampleGroups, with_answers: bool = False) -> Experience:
        """Generate and score complete groups; `with_answers` adds a hash of each answer to the headers. Collective."""
        with self._timers.phase("rollout"):
            generated = self.generator.generate(groups, self._on_finished)
        held = [(key // groups.group_size, rollout) for key, rollout in sorted(generated.items())]
        samples = self._score(groups.prompts, held, [groups.step] * len(groups.prompts), with_answers)
        samples.metrics.update(self.generator.metrics)
        return samples

    def _check_failures(self, parts: Sequence[Experience], what: str) -> float:
        """Return the share of failed episodes; `what` names the samples in errors.

        Raises:
            UserError: this share, or that of responses whose reward service failed, exceeds `max_failed_share`; on
                every rank.
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
                    hint="correct the cause; trainer.max_failed_share=1 continues without it",
                )
        return float(episodes.mean())

    def sampling(self, temperature: float | None = None) -> SamplingConfig:
        """Return the settings for training or, with a `temperature`, for validation and baselines (no `min_tokens`)."""
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
        has_kept = self._config.rollout.is_truncated and not with_answers
        with self._timers.phase("reward"):
            headers, num_bytes = self._score_here(held, steps, with_answers)
            route_shape = None if with_answers else self.generator.route_shape
            ranks, has_episodes = np.array(self.generator.engines.of), self._config.agents.has_episodes
            branches = index_branches(held, headers)
            payload = Payload(branches, ranks, num_bytes, has_kept, route_shape, has_episodes)
            samples = Experience(headers, prompts, payload, self._group)
            if self._rewards.add_scores is not None:
                samples = self._rewards.add_scores(samples)
        mine = [rollout for _, rollout in held] if self.generator.is_first else []
        if has_kept:
            samples.metrics.update(describe_kept(mine, self._config.rollout, self._group))
        if self._config.rollout.thinking_budget is not None and not with_answers:
            # Of a thought that its budget has ended, the closing tokens were not sampled.
            ended = [len(rollout.answer_tokens) > len(rollout.response_tokens) for rollout in mine]
            sums = {"rollouts": float(len(ended)), "ended": float(sum(ended))}
            sums = reduce_scalars(sums, dist.ReduceOp.SUM, self._group, torch.device("cpu"))
            samples.metrics.update({"sampling/thoughts_ended": sums["ended"] / max(sums["rollouts"], 1.0)})
        return samples

    def _score_here(
        self, held: Sequence[tuple[int, Rollout]], steps: Sequence[int], with_answers: bool
    ) -> tuple[Headers, int]:
        """Score this rank's share of its engine's rollouts, and gather the headers of all ranks.

        Raises:
            UserError: a rollout could not be scored; on every rank.
        """
        scorer, place = self._rewards.scorer, self.generator.place_in_engine
        # Only the engine's first rank has started scoring, or has the results of episodes, or scores whole groups.
        if scorer.is_concurrent or self._config.agents.has_episodes or scorer.takes_groups:
            mine = held if place == 0 else []
        else:
            mine = held[place :: self.generator.engines.width]
        scored, error = [], None
        try:
            scored = scorer.finish([rollout for _, rollout in mine], [steps[index] for index, _ in mine])
        except Exception as caught:  # raised together, before other ranks wait for this one
            error = caught
        raise_together(error, self._group)
        self._failures |= {rollout.finish_reason in FAILED: rollout.failure for rollout in scored if rollout.failure}
        pairs = zip((index for index, _ in mine), scored, strict=True)
        mask_truncated = self._config.algorithm.mask_truncated
        headers = build_headers(
            pairs, holder=self.generator.engine_index, mask_truncated=mask_truncated, with_answers=with_answers
        )
        headers, num_bytes = gather_headers(headers, self._group)
        if scorer.takes_groups:
            from megatron_rl.rewards.calls import check_holders

            check_holders(headers["prompt_id"], headers["group"], headers["holder"])
        return headers, num_bytes

    def close(self) -> None:
        """Stop the workers of reward sources and close the engine."""
        self._rewards.scorer.close()
        self.generator.close()


def find_informative(headers: Headers, metric: str | None) -> list[bool]:
    """Return for each group whether its responses differ in `algorithm.dynamic_sampling_metric`.

    Rollouts without a reward (failed episode or reward service) are ignored.

    Args:
        metric: `None` excludes the overlong penalty, because all-wrong responses of different lengths would differ in
            it; "reward" includes it; otherwise a reported number, where "acc" defaults to the reward, as in verl.

    Raises:
        UserError: the reward does not report the number; on every rank.
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
    """Return rewards without the overlong penalty, which only shapes training."""
    return headers["reward"] - np.nan_to_num(headers.component(OVERLONG))
