# SPDX-License-Identifier: Apache-2.0
"""Samples of a step: generation, scoring, and resampling of groups without a learning signal (DAPO).

Rollouts are scored and kept on the ranks of their engine; other ranks receive headers (`samples/table.py`). Local
reward sources (rules, functions, services) start during generation if they can.

Samples have bounded staleness: begun ahead of their step (`RolloutStream`), carried over phases, and never dropped. No
response begins with weights more than `schedule.max_staleness` steps older than the weights trained on it, and every
prompt is trained on once (the rule: `rollout.phase_ends`). Unfinished samples keep tokens, log-probs and policy
versions and continue on their engine in the next phase. Seeds depend on the position in the data order and the number
of existing tokens, not on the engine or the time of an interruption.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.config.schema import RunConfig
from megatron_rl.data.prompts import PromptBatches, PromptSet
from megatron_rl.engines.protocol import SamplingConfig
from megatron_rl.observability.progress import PhaseTimers
from megatron_rl.parallel.collectives import gather_objects, open_store, raise_together, reduce_scalars, world
from megatron_rl.rewards.answers import CORRECT_FROM, compute_validation_metrics
from megatron_rl.rewards.scoring import OVERLONG, Scorer
from megatron_rl.rollout.episodes import SampleGroups, SampleOrder, describe_episodes
from megatron_rl.rollout.generation import OnFinished, Phase, RolloutGenerator
from megatron_rl.rollout.phase_ends import (
    AfterSteps,
    PhaseEnd,
    PhaseTarget,
    ScheduleTrace,
    TrainingEnd,
    find_window,
    open_phase_end,
    read_trace,
)
from megatron_rl.samples.experience import Experience
from megatron_rl.samples.table import Headers, Payload, build_headers, gather_headers, index_branches, join_headers
from megatron_rl.types import FAILED, Prompt, Rollout, UserError

if TYPE_CHECKING:
    from megatron_rl.rollout.by_source import MixedScorer


@dataclass(frozen=True)
class Taken:
    """Complete groups that a step takes; dynamic sampling may drop some later."""

    prompts: list[Prompt]  # equal on every rank
    steps: list[int]  # training step of each prompt, if none is dropped
    rollouts: list[tuple[int, Rollout]]  # (prompt index, rollout) of this rank's engine
    metrics: dict[str, float]


@dataclass(frozen=True)
class Clock:
    """End conditions of generation: `training` beside training (unless steps are counted or replayed), else `end`."""

    end: PhaseEnd
    training: TrainingEnd | None = None
    trace: ScheduleTrace | None = None


class RolloutStream:
    """Samples of a run in data order, which may begin before their step; every rank makes the same calls."""

    def __init__(
        self, generator: RolloutGenerator, order: SampleOrder, config: RunConfig, clock: Clock, group: dist.ProcessGroup
    ) -> None:
        self._generator, self._order, self._clock, self._group = generator, order, clock, group
        self.prompts: Any = order.prompts
        self._carried = generator.open(order)
        self.runs_ahead = clock.training is not None  # dedicated engines generate during training
        self._schedule, self._rollout, self._config = config.schedule, config.rollout, config
        self._drains = config.schedule.updates == "drain"
        self._batch_size, self._group_size = config.data.train_batch_size, order.group_size
        self._step = 0  # step of the last phase
        self._open: list[int] = []  # positions of begun, untaken prompts

    def next_batch(self) -> list[Prompt] | None:
        """Return a step's prompts if none may begin or has begun ahead, else `None`: `take` is to be called."""
        return None if self._schedule.max_staleness > 0 or self._open else next(self._order.prompts)

    def take(
        self, sampling: SamplingConfig, on_finished: OnFinished | None, count: int | None = None, round: int = 0
    ) -> Taken:
        """Generate until the next groups are complete, and take them; collective.

        Args:
            on_finished: called on an engine's first rank; given on every rank or on none.
            count: prompts to take; `data.train_batch_size` if `None`.
            round: number of earlier calls in the step. Later rounds generate only if too few groups are complete.

        Raises:
            Exception: as `RolloutGenerator.run`.
        """
        self._step += round == 0
        wanted, ahead = count or self._batch_size, self._schedule.max_staleness * self._batch_size
        passed = ahead // 2 if self._schedule.order == "whole" else 0
        needed, new = find_window(self._open, self._order.prompts.position, wanted, ahead, passed)
        self._begin(new, sampling.max_tokens)
        self._order.prompts.advance(len(new))
        self._open += new
        left = self._count_unfinished()
        held, holders, missing = np.split(
            self._sum_over_engines([len(self._carried.keys), *(left > 0), *left]), [1, 1 + len(left)]
        )
        assert held == len(left) * self._group_size, f"{held} samples of {len(left)} prompts have begun"
        target = PhaseTarget(needed, wanted, left, holders)
        generates = round == 0 or not target.is_reached(missing)
        awaited = needed if needed == wanted else len(left)
        keys = self._carried.keys
        if self._drains and self.runs_ahead:  # other samples continue during training
            positions = {*self._open[:awaited]}
            keys = [key for key in keys if key // self._group_size in positions]
        busy_share = None
        if generates:
            name = f"rollout {round}" if round else "rollout"
            end = self._find_replayed(name) or self._clock.end
            self._carried.start(keys, sampling)
            phase = Phase(self._open[:awaited], left, None if self._drains else end)
            self._clock.end.begin(target)
            self._run(phase, on_finished, int(missing[:awaited].sum()), name)
            missing, busy_share = self._sum_over_engines(self._count_unfinished()), phase.busy_share()
        chosen = np.flatnonzero(missing == 0)[:wanted].tolist()  # the needed ones, then other complete ones
        assert len(chosen) == wanted, f"{len(chosen)} of {wanted} prompts are whole"
        return self._hand_out([self._open[group] for group in chosen], busy_share)

    def _hand_out(self, positions: Sequence[int], busy_share: float | None) -> Taken:
        keys = [position * self._group_size + sample for position in positions for sample in range(self._group_size)]
        held = {*self._carried.keys}
        rollouts = [
            (number // self._group_size, self._carried.rollout(key)) for number, key in enumerate(keys) if key in held
        ]
        self._carried.drop(keys)
        self._open = sorted({*self._open} - {*positions})
        counts, found = self._carried.counts, [len(self._carried.keys), self._carried.num_tokens, busy_share or 0.0]
        carried, tokens, busy, *sums = self._sum_over_engines([*found, *counts.values()]).tolist()
        metrics = {"schedule/carried": carried, "schedule/carried_tokens": tokens} | self._generator.metrics
        metrics |= describe_episodes(dict(zip(counts, sums, strict=True)))
        counts.update(dict.fromkeys(counts, 0.0))
        if busy_share is not None:
            metrics["schedule/engine_busy"] = busy / len(self._generator.engines.of)
        prompts = [self._order.prompts.prompt(position) for position in positions]
        steps = [self._order.step_of(position * self._group_size) for position in positions]
        return Taken(prompts, steps, rollouts, metrics)

    def _count_unfinished(self) -> np.ndarray:
        """Count this engine's unfinished samples of each open (begun, untaken) prompt, [open prompts]."""
        counts = Counter(key // self._group_size for key in self._carried.find_unfinished())
        return np.array([counts[position] for position in self._open], np.int64)

    def run_ahead(self, sampling: SamplingConfig, on_finished: OnFinished | None) -> None:
        """Continue begun samples on dedicated engines until rank 0 signals that training ends; collective as `take`."""
        training, name = self._clock.training, "beside training"
        assert training is not None
        training.begin()
        if self._group.rank() == 0:
            training.signal()
        every = self._schedule.steps_per_update
        end = self._find_replayed(name) or (training if every is None else AfterSteps(every))
        self._carried.start(self._carried.keys, sampling)
        self._run(Phase([], np.empty(0), None if self._drains else end), on_finished, None, name)

    def _run(self, phase: Phase, on_finished: OnFinished | None, total: int | None, name: str) -> None:
        self._generator.run(self._carried, phase, on_finished, total)
        if self._clock.trace is not None:
            self._clock.trace.write(self._step, name, phase.num_steps)

    def _find_replayed(self, name: str) -> PhaseEnd | None:
        return None if self._clock.trace is None else self._clock.trace.find_end(self._step, name)

    def _begin(self, positions: range, max_tokens: int) -> None:
        loads = np.zeros(len(self._generator.engines.of))
        loads[self._generator.engine_index] = len(self._carried.find_unfinished())
        loads = self._sum_over_engines(loads).astype(np.int64)
        prompts = [self._order.prompts.prompt(position) for position in positions]
        mine = self._generator.assign(prompts, self._group_size, max_tokens, loads)
        self._carried.begin([positions.start * self._group_size + key for key in mine])

    def _sum_over_engines(self, values: Sequence[float] | np.ndarray) -> np.ndarray:
        total = torch.zeros(len(values), dtype=torch.float64)
        if self._generator.is_first:
            total += torch.as_tensor(values, dtype=torch.float64)
        dist.all_reduce(total, group=self._group)
        return total.numpy()

    def state_dict(self) -> dict[str, Any]:
        """Return the step and the number of open (begun, untaken) prompts, whose samples are in `rank_state`.

        They are the last prompts that began, without `taken`: prompts taken out of order (`order: whole`).
        """
        begun = self._order.prompts.position
        span = range(min(self._open, default=begun), begun)
        return {
            "step": self._step,
            "open": len(self._open),
            "taken": sorted({*span} - {*self._open}),
            "group_size": self._group_size,
            "order": self._schedule.order,
            "truncated": self._config.is_truncated,
            "episodes": self._config.has_episodes,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved state, after the state of the prompts (UserError: see `check_begun`)."""
        from megatron_rl.rollout.packed_episodes import check_begun

        taken = state.get("taken", [])
        check_begun(state, self.state_dict())
        begun, self._step = self._order.prompts.position, state.get("step", 0)
        self._open = sorted({*range(begun - state["open"] - len(taken), begun)} - {*taken})

    def rank_state(self) -> dict[str, torch.Tensor]:
        """Return the samples of this rank's engine on its first rank, else nothing."""
        if not self._carried.keys or not self._generator.is_first:
            return {}
        place = torch.tensor([self._generator.engine_index, len(self._generator.engines.of)])
        return self._carried.pack() | {"engine": place}

    def load_rank_states(self, states: Sequence[Mapping[str, torch.Tensor]]) -> None:
        """Load the samples of all ranks: on their previous engines, or evenly if the number of engines has changed."""
        mine, num_engines = self._generator.engine_index, len(self._generator.engines.of)
        unit = self._group_size if self._rollout.dispatch == "groups" else 1
        self._carried.drop(self._carried.keys)
        for state in states:
            engine, of = state["engine"].tolist()

            def is_mine(key: int, engine: int = engine, of: int = of) -> bool:
                return (engine if of == num_engines else key // unit % num_engines) == mine

            self._carried.load(state, is_mine)


def open_stream(
    generator: RolloutGenerator,
    prompts: PromptBatches[Prompt],
    config: RunConfig,
    *,
    is_apart: bool,
    timeout: timedelta | None,
    trace: Path | None,
) -> RolloutStream:
    """Build the stream; collective.

    Args:
        is_apart: the engines have dedicated ranks.
        trace: output directory of the schedule trace, if any.

    Raises:
        UserError: the trace to replay is missing or has other engines; on every rank.
    """
    schedule, engines, recorder = config.schedule, generator.engines.of, None
    every, begins_ahead = schedule.steps_per_update, schedule.max_staleness > 0
    end = open_phase_end(every, engines, timeout)
    training = TrainingEnd(open_store("training", world())) if is_apart and begins_ahead else None
    is_timed = begins_ahead and schedule.updates == "in_flight" and every is None
    if schedule.replay is not None or (trace is not None and is_timed):
        replayed = None if schedule.replay is None else read_trace(Path(schedule.replay), len(engines))
        mine = generator.engine_index if generator.is_first else None
        recorder = ScheduleTrace(len(engines), mine, trace if is_timed else None, replayed)
    return RolloutStream(generator, SampleOrder(prompts, config), config, Clock(end, training, recorder), world())


@dataclass(frozen=True)
class RewardSources:
    """Scorer of local reward sources, and reward models."""

    scorer: Scorer | MixedScorer
    # Adds the scores of reward models to the rewards of samples, given the step of each prompt; collective.
    add_scores: Callable[[Experience, Sequence[int]], Experience] | None
    needs_greedy_baseline: bool  # whether the advantage estimator uses rewards of greedy responses (ReMax)
    needs_turns: bool = False  # whether it uses the states of turns


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
        in reward (DAPO, arXiv 2503.14476, section 3.2): in full rounds, dropping surplus groups, or,
        if samples begin ahead of their step, exactly the missing number. After `max_sampling_rounds` batches of
        prompts, groups without a signal fill the batch, so that its size is constant.
        """
        algorithm, wanted = self._config.algorithm, self._config.data.train_batch_size
        resamples = algorithm.dynamic_sampling
        most = wanted * (algorithm.max_sampling_rounds if resamples else 1)
        parts: list[Experience] = []
        informative: list[bool] = []  # per group
        curriculum = self._stream.prompts if self._config.data.curriculum.kind != "off" else None
        while sum(informative) < wanted and len(informative) < most:
            missing = min(wanted - sum(informative), most - len(informative))
            part = self._draw(step, len(parts), missing)
            informative += find_informative(part.headers, resamples) if resamples else [True] * len(part.prompts)
            parts.append(part)
            if curriculum is not None:
                is_passed = correctness_of(part.headers.rollouts) >= CORRECT_FROM
                curriculum.observe(part.prompts, part.headers.split_rewarded(is_passed))
            failed = self._check_failures(parts, f"step {step}")
        found = sum(informative)
        metrics = {name: value for part in parts for name, value in part.metrics.items()}
        if self._config.has_episodes:
            metrics["agents/failed"] = failed
        if curriculum is not None:
            metrics |= curriculum.describe()
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
            samples.add_baselines(self.generate(SampleGroups(samples.prompts, 1, self.sampling_by_source(0.0), step)))
        return samples

    def _draw(self, step: int, round: int, missing: int) -> Experience:
        prompts = self._stream.next_batch()
        if prompts is not None:
            return self.generate(SampleGroups(prompts, self._config.rollout.n, self.sampling_by_source(), step, round))
        with self._timers.phase("rollout"):
            taken = self._stream.take(self.sampling_by_source(), self._on_finished, missing, round)
        samples = self._score(taken.prompts, taken.rollouts, taken.steps)
        samples.metrics.update(taken.metrics)
        return samples

    def run_ahead(self) -> None:
        """Let dedicated engines generate until training ends; collective."""
        self._stream.run_ahead(self.sampling_by_source(), self._on_finished)

    def validate(
        self, validation: dict[str, PromptSet], on_set: Callable[[str, list[Experience]], None] | None = None
    ) -> dict[str, float]:
        """Compute `validation/<set>/<metric>`; `on_set` is called on every rank with each set's samples. Collective."""
        config, metrics = self._config, {}
        for name, prompt_set in validation.items():
            drawn = config.rollout.for_validation(name)
            view = config.by_source.get(prompt_set.prompts[0].source, config)
            base, budget = self.sampling(drawn.temperature, view), drawn.thinking_budget
            sampling = replace(base, top_p=drawn.top_p, top_k=drawn.top_k, min_p=0.0, thinking_budget=budget)
            parts = [self.generate(SampleGroups(prompt_set.prompts, drawn.n, sampling, step=0), with_answers=True)]
            headers = join_headers([part.headers for part in parts]).rollouts
            correct, answers = (x.reshape(-1, drawn.n).tolist() for x in (correctness_of(headers), headers["answer"]))
            found = compute_validation_metrics(correct, answers)
            if self._config.has_episodes:
                found["failed"] = float(headers.has_failed.mean())
            metrics |= {f"validation/{name}/{metric}": value for metric, value in found.items()}
            self._check_failures(parts, f'the validation set "{name}"', metrics)
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

    def _check_failures(
        self, parts: Sequence[Experience], what: str, others: Mapping[str, float] | None = None
    ) -> float:
        """Return the share of failed episodes; `what` names the samples in errors.

        Args:
            others: metrics of the samples before; `None` for a training step.

        Raises:
            BadStep: this share, or that of responses whose reward service failed, exceeds `max_failed_share`, or no
                response has a reward; on every rank.
        """
        headers, most = [part.headers.rollouts for part in parts], self._config.trainer.max_failed_share
        episodes = np.concatenate([part.has_failed for part in headers])
        services = ~episodes & ~np.concatenate([part.has_reward for part in headers])
        if is_bad_step(episodes, services, most):
            from megatron_rl.rollout.bad_steps import explain_failures

            is_episode = episodes.sum() >= services.sum()
            said = gather_objects(self._failures.get(bool(is_episode), ""), self._group)
            counts = int(episodes.sum()), int(services.sum()), len(episodes)
            raise explain_failures(counts, what, most, said, parts if others is None else (), others or {})
        return float(episodes.mean())

    def sampling(self, temperature: float | None = None, config: RunConfig | None = None) -> SamplingConfig:
        """Return the settings for training or, with a `temperature`, for validation and baselines (no `min_tokens`).

        Args:
            config: of a source of prompts; by default the run's.
        """
        config = config or self._config
        rollout = config.rollout
        return SamplingConfig(
            rollout.temperature if temperature is None else temperature,
            config.data.max_response_length,
            self._stop_token_ids,
            rollout.top_p,
            rollout.top_k,
            rollout.min_p,
            rollout.max_kept_tokens,
            rollout.min_tokens if temperature is None else 0,
            rollout.thinking_budget,
        )

    def sampling_by_source(self, temperature: float | None = None) -> SamplingConfig:
        """Return the settings of `sampling` for prompts of all sources."""
        if not self._config.data.sources:
            return self.sampling(temperature)
        from megatron_rl.rollout.by_source import mix_sampling

        return mix_sampling(self._config, partial(self.sampling, temperature))

    def _score(
        self,
        prompts: Sequence[Prompt],
        held: Sequence[tuple[int, Rollout]],
        steps: Sequence[int],
        with_answers: bool = False,
    ) -> Experience:
        has_kept = self._config.is_truncated and not with_answers
        with self._timers.phase("reward"):
            headers, num_bytes = self._score_here(held, steps, with_answers)
            route_shape = None if with_answers else self.generator.route_shape
            ranks, has_episodes = np.array(self.generator.engines.of), self._config.has_episodes
            branches = index_branches(held, headers)
            has_states = has_episodes and not with_answers and self._rewards.needs_turns
            payload = Payload(branches, ranks, num_bytes, has_kept, route_shape, has_episodes, has_states)
            samples = Experience(headers, prompts, payload, self._group)
            if self._rewards.add_scores is not None:
                samples = self._rewards.add_scores(samples, steps)
        mine = [rollout for _, rollout in held] if self.generator.is_first else []
        if has_kept:
            from megatron_rl.engines.truncation import describe_kept

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
        if scorer.is_concurrent or self._config.has_episodes or scorer.takes_groups:
            mine = held if place == 0 else []
        else:
            mine = held[place :: self.generator.engines.width]
        scored, error = [], None
        try:
            rollouts = [rollout for _, rollout in mine]
            self._timers.expect(len(rollouts))
            scored = scorer.finish(rollouts, [steps[index] for index, _ in mine], self._timers.advance)
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


def is_bad_step(episodes: np.ndarray, services: np.ndarray, most: float) -> bool:
    """Return whether a larger share than `most` of the episodes or of the rewards failed, or (if below 1) all did.

    Args:
        episodes: bool per response, its episode failed; services: its reward service failed.
    """
    return bool(max(episodes.mean(), services.mean()) > most or (most < 1 and (episodes | services).all()))


def find_informative(headers: Headers, metric: str | Literal[True]) -> list[bool]:
    """Return for each group whether its responses differ in the number that `algorithm.dynamic_sampling` names.

    Rollouts without a reward (failed episode or reward service) are ignored.

    Args:
        metric: true excludes the overlong penalty, because all-wrong responses of different lengths would differ in
            it; "reward" includes it; otherwise a reported number, where "acc" defaults to the reward, as in verl.

    Raises:
        UserError: the reward does not report the number; on every rank.
    """
    rollouts = headers.rollouts
    values = rollouts["reward"] if metric == "reward" else correctness_of(rollouts)
    reported = np.full(len(rollouts), np.nan) if metric is True else rollouts.component(metric)
    is_missing = np.isnan(reported) & rollouts.has_reward
    if metric not in (True, "reward", "acc") and is_missing.any():
        known = sorted({"reward", *rollouts.reported(int(is_missing.argmax()))} - {OVERLONG})
        raise UserError(
            f'algorithm.dynamic_sampling = "{metric}" is not reported by the reward',
            source="algorithm.dynamic_sampling",
            expected=f"true, or one of {', '.join(known)}",
            hint="a reward function that returns a dict reports all numbers of it",
        )
    judged = np.where(is_missing, values, reported)
    return [len(group) > 0 and bool(np.ptp(group) > 0) for group in headers.split_rewarded(judged)]


def correctness_of(headers: Headers) -> np.ndarray:
    """Return rewards without the overlong penalty, which only shapes training."""
    return headers["reward"] - np.nan_to_num(headers.component(OVERLONG))
