# SPDX-License-Identifier: Apache-2.0
"""From prompts to episodes: an environment answers each reply, and the engine is asked again, until it is done.

Requests join the engine between two of its steps, and an episode that waits for its environment has no place in it.
The engine waits in turn, before its next step, until the environments have answered all that it has finished: so what
is computed together follows from what was sampled, and a run is reproducible bit by bit. The price is that nothing is
sampled while an environment thinks.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.agents.episode import Answer
from megatron_rl.agents.processes import EpisodeProcesses
from megatron_rl.agents.recording import Recording
from megatron_rl.config.schema import RunConfig
from megatron_rl.engines.protocol import Request, Sampled
from megatron_rl.engines.sampling import SamplingConfig, derive_seed
from megatron_rl.parallel.collectives import reduce_scalars
from megatron_rl.rollout.control import ControlMessage
from megatron_rl.rollout.generation import RolloutGenerator, name_sample
from megatron_rl.types import Prompt, Rollout

_FAILED = ("timeout", "error")
_COUNTED = (
    "episodes",
    "turns",
    "forks",
    "max_turns",
    "timeouts",
    "errors",
    "tokens_sampled",
    "tokens_observed",
    "environment_seconds",
    "wait_seconds",
    "seconds",
)


class EpisodeGenerator:
    """Generates groups of episodes in place of responses; the same calls on every rank.

    Args:
        generator: the engines.
        processes: of this rank's environments.
        config: of the run.
        group: all ranks.

    Attributes:
        engines: the ranks of each.
        is_first: this rank is the first of its engine.
        metrics: of the last generation, the same on every rank.
        route_shape: of the routes that rollouts come with; None: they come without.
    """

    def __init__(
        self, generator: RolloutGenerator, processes: EpisodeProcesses, config: RunConfig, group: dist.ProcessGroup
    ) -> None:
        self._generator, self._processes, self._group = generator, processes, group
        self._in_flight = config.agents.episodes_in_flight
        self.engines, self.is_first = generator.engines, generator.is_first
        self.route_shape = generator.route_shape
        self.metrics: dict[str, float] = {}

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        group_size: int,
        sampling: SamplingConfig,
        step: int,
        round: int = 0,
        on_finished: Callable[[Rollout], None] | None = None,
    ) -> dict[int, Rollout]:
        """As `RolloutGenerator.generate`; only the first rank of an engine knows how its episodes ended.

        `sampling.max_tokens` bounds the tokens behind the prompt, observations included.
        """
        generator, total = self._generator, len(prompts) * group_size
        first = generator.build_requests(prompts, group_size=group_size, sampling=sampling, step=step, round=round)
        version = generator.policy_version
        recordings = {r.key: Recording(prompts[r.key // group_size], r.key % group_size, version) for r in first}
        rollouts: dict[int, Rollout] = {}

        def end(index: int, rollout: Rollout) -> None:
            rollouts[index] = rollout
            generator.count(len(rollout.response_tokens))
            if on_finished is not None:
                on_finished(rollout)

        processes = self._processes if generator.is_first else None
        episodes = _Episodes(first, recordings, total, processes, self._in_flight, end)
        try:
            generator.serve(
                episodes.requests,
                episodes.take,
                episodes.hear,
                name=lambda key: name_sample(prompts, group_size, key % total),
                total=total,
                on_requests=episodes.ask,
            )
        finally:
            episodes.close()
        counts = reduce_scalars(episodes.counts, dist.ReduceOp.SUM, self._group, torch.device("cpu"))
        self.metrics = describe_episodes(counts) | generator.metrics
        if generator.is_first:
            return rollouts
        return {index: recording.finish("stop") for index, recording in recordings.items()}

    def close(self) -> None:
        """End the processes, and release the engine."""
        self._processes.close_all()
        self._generator.close()


class _Episodes:
    """The episodes of one engine in one generation.

    Args:
        first: their first requests, in order.
        recordings: of each, by the key of that.
        total: samples of all engines; the key of a further request is the first one's plus a multiple of it.
        processes: of their environments; None: another rank of the engine has them.
        in_flight: episodes that are open at a time; None: all.
        on_end: told of each.

    Attributes:
        requests: that were made so far.
        counts: of `_COUNTED`.
    """

    def __init__(
        self,
        first: Sequence[Request],
        recordings: Mapping[int, Recording],
        total: int,
        processes: EpisodeProcesses | None,
        in_flight: int | None,
        on_end: Callable[[int, Rollout], None],
    ) -> None:
        self._first, self._recordings, self._total = {r.key: r for r in first}, recordings, total
        self._processes, self._on_end = processes, on_end
        self._waiting, self._in_flight = deque(self._first), in_flight or len(first)
        self._ends: dict[int, str] = {}  # of the episodes that are open, how their last reply ended
        self.requests: list[Request] = []
        self.counts: dict[str, float] = dict.fromkeys(_COUNTED, 0.0)
        self._started, self._has_warned = time.monotonic(), False

    def take(self, is_idle: bool) -> ControlMessage:
        """The next message; see `rollout.serving.serve`."""
        assert self._processes is not None
        started, requests = time.monotonic(), list[Request]()
        while True:
            while self._waiting and len(self._ends) < self._in_flight:
                index = self._waiting.popleft()
                self._ends[index] = "stop"
                self._processes.open(index, self._recordings[index].prompt)
            answers = self._processes.wait()
            if not answers:
                break
            for index in sorted(answers):
                requests += self._continue(index, answers[index])
        self.counts["wait_seconds"] += time.monotonic() - started
        self.requests += requests
        return ControlMessage(requests=requests, stop=not self._ends)

    def ask(self, requests: Sequence[Request]) -> None:
        """Requests are added to the engine; on each of its ranks."""
        for request in requests:
            self._recordings[request.key % self._total].ask(request.tokens)

    def hear(self, sampled: Sampled) -> None:
        """The engine has answered one; on each of its ranks."""
        index = sampled.key % self._total
        if sampled.key < 0 or np.shape(sampled.tokens) != np.shape(sampled.logprobs):
            self._ends.pop(index, None)  # what is wrong is said in the end
            return
        self._recordings[index].reply(sampled.tokens, sampled.logprobs, sampled.kept, sampled.routes)
        if self._processes is not None:
            self._ends[index] = sampled.finish_reason
            self._processes.tell(index, sampled.tokens.tolist(), sampled.logprobs.tolist(), sampled.finish_reason)

    def close(self) -> None:
        """End the processes of episodes that are open; there are some after an error only."""
        for index in self._ends:
            assert self._processes is not None
            self._processes.close(index)
        if self._processes is not None:
            self.counts["seconds"] = time.monotonic() - self._started

    def _continue(self, index: int, answer: Answer) -> list[Request]:
        """The request that follows an answer; none where the episode is over."""
        first, recording = self._first[index], self._recordings[index]
        self.counts["environment_seconds"] += answer.seconds
        if answer.reward is not None:
            recording.judge(answer.reward)
        if answer.tail is None:
            self._end(index, answer, answer.finish_reason or self._ends[index])
            return []
        known = [] if answer.tail.is_fork else [recording.tokens]
        tokens = np.concatenate([*known, np.array(answer.tail.tokens, np.int32)])
        room = len(recording.prompt.tokens) + first.sampling.max_tokens - len(tokens)
        if room < 1:
            self._end(index, answer, "length")
            return []
        turn, most = recording.num_turns, min(room, answer.max_tokens or room, first.sampling.max_tokens)
        return [
            replace(
                first,
                key=index + turn * self._total,
                tokens=tokens,
                seed=derive_seed(first.seed, turn, 0, 0) if turn else first.seed,
                sampling=replace(first.sampling, max_tokens=most),
                turn=turn,
            )
        ]

    def _end(self, index: int, answer: Answer, finish_reason: str) -> None:
        assert self._processes is not None
        self._processes.close(index)
        del self._ends[index]
        recording, has_failed = self._recordings[index], finish_reason in _FAILED
        rollout = recording.finish(finish_reason)
        self._count(rollout, recording)
        if has_failed:
            self._warn(rollout, answer.failure)
        reward = 0.0 if has_failed else float("nan") if recording.reward is None else recording.reward
        self._on_end(index, replace(rollout, reward=reward, reward_components=answer.components))

    def _count(self, rollout: Rollout, recording: Recording) -> None:
        tokens = sum(len(branch.tokens) for branch in rollout.branches)
        ends = {"turns": "max_turns", "timeout": "timeouts", "error": "errors"}
        found = {
            "episodes": 1,
            "turns": recording.num_turns,
            "forks": recording.num_forks,
            "tokens_sampled": recording.num_sampled,
            "tokens_observed": tokens - recording.num_sampled - len(rollout.prompt.tokens),
        }
        if rollout.finish_reason in ends:
            found[ends[rollout.finish_reason]] = 1
        for name, value in found.items():
            self.counts[name] += value

    def _warn(self, rollout: Rollout, failure: str) -> None:
        """Say how the first one failed; the others are counted."""
        if not self._has_warned:
            self._has_warned = True
            logging.getLogger(__name__).warning(
                "the environment of prompt_id %d, sample %d failed (%s), others are counted only: %s",
                rollout.prompt.prompt_id,
                rollout.sample_index,
                rollout.finish_reason,
                failure,
            )


def describe_episodes(sums: Mapping[str, float]) -> dict[str, float]:
    """The metrics `agents/...` of a generation, from the sums over all engines of what `_Episodes` counts."""
    episodes = max(sums["episodes"], 1.0)
    return {
        "agents/turns": sums["turns"] / episodes,
        "agents/forks": sums["forks"] / episodes,
        "agents/tokens_sampled": sums["tokens_sampled"],
        "agents/tokens_observed": sums["tokens_observed"],
        "agents/max_turns": sums["max_turns"] / episodes,
        "agents/timeouts": sums["timeouts"],
        "agents/errors": sums["errors"],
        "agents/environment_seconds": sums["environment_seconds"] / episodes,
        "agents/wait_share": sums["wait_seconds"] / max(sums["seconds"], 1e-9),
    }
