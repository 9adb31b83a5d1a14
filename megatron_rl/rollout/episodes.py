# SPDX-License-Identifier: Apache-2.0
"""Begun samples of an engine. A plain response is an episode without an environment, which ends with its first reply.

Before each step the engine waits until the environments have answered all finished replies, so batch composition
depends only on sampled tokens and runs are bitwise reproducible. The price is that nothing is sampled while an
environment computes.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from megatron_rl.agents.recording import Recording
from megatron_rl.config.sections import AgentsConfig
from megatron_rl.engines.protocol import Request, Sampled, SamplingConfig, derive_seed
from megatron_rl.rollout.order import Samples
from megatron_rl.types import FAILED, Rollout

if TYPE_CHECKING:
    from megatron_rl.agents.episode import Answer
    from megatron_rl.agents.in_rank import AnyEpisodes

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


@dataclass(frozen=True)
class Following:
    """Requests before an engine's next step, keys of newly finished samples, and whether no request can follow."""

    requests: Sequence[Request]
    finished: Sequence[int]
    is_last: bool


@dataclass(frozen=True)
class _Episode:
    """State of one episode on its engine.

    Attributes:
        recording: tokens so far; with an environment, ranks other than the engine's first have nothing else.
        request: full request of the next reply, if one is due.
        finish_reason: finish reason of the last reply.
    """

    recording: Recording
    request: Request | None = None
    finish_reason: str = "stop"
    rollout: Rollout | None = None


class Episodes:
    """Begun samples of one engine by key (`order.Samples`), until a step takes them.

    Every rank of the engine makes the same calls; environment processes and episode results are on its first rank only.

    Attributes:
        counts: input of `describe_episodes`.
    """

    def __init__(self, samples: Samples, run_seed: int, agents: AgentsConfig, processes: AnyEpisodes | None) -> None:
        self.samples, self._run_seed, self._processes = samples, run_seed, processes
        self._is_plain, self._in_flight = not agents.has_episodes, agents.episodes_in_flight
        self._episodes: dict[int, _Episode] = {}
        self._waiting: deque[int] = deque()  # keys that may be opened in the phase
        self._open: set[int] = set()
        self._requests: list[Request] = []  # first requests of the phase
        self._late: dict[int, Answer] = {}  # answers received after the end of the last phase
        self.counts: dict[str, float] = dict.fromkeys(_COUNTED, 0.0)
        self._has_warned = False

    @property
    def keys(self) -> list[int]:
        """Keys of all samples."""
        return [*self._episodes]

    @property
    def num_tokens(self) -> int:
        """Tokens sampled by engines so far."""
        return sum(episode.recording.num_sampled for episode in self._episodes.values())

    def begin(self, keys: Iterable[int]) -> None:
        """Add new samples."""
        self._episodes |= {key: _Episode(Recording(*self.samples.sample_of(key))) for key in keys}

    def find_unfinished(self) -> list[int]:
        """Return keys of unfinished samples; with an environment, valid on the first rank only."""
        return [key for key, episode in self._episodes.items() if episode.rollout is None]

    def start(self, keys: Iterable[int], sampling: SamplingConfig) -> None:
        """Start a phase that continues the given samples."""
        self._sampling, self._started = sampling, time.monotonic()
        chosen = sorted({*keys} & {*self.find_unfinished()})
        if self._is_plain:
            prompts = {key: self.samples.sample_of(key)[0] for key in chosen}
            due = [Request(key, prompt.tokens, self._seed(key, 0), sampling) for key, prompt in prompts.items()]
        else:
            self._waiting = deque(key for key in chosen if key not in self._open)
            due = [request for key in chosen if (request := self._episodes[key].request) is not None]
        self._requests = [self._continue_reply(request) for request in due]

    def follow(self) -> Following:
        """Return the next requests, interrupted replies first; the first rank waits for environments."""
        started, finished = time.monotonic(), list[int]()
        requests, self._requests = self._requests, []
        while self._processes is not None:
            while self._waiting and len(self._open) < (self._in_flight or len(self._episodes)):
                key = self._waiting.popleft()
                self._open.add(key)
                self._processes.open((self, key), self._episodes[key].recording.prompt)
            answers, self._late = self._late | self._wait(self._processes), {}
            if not answers:
                break
            for key in sorted(answers):
                requests += self._continue(key, answers[key])
                finished += [key] if self._episodes[key].rollout is not None else []
        self.counts["wait_seconds"] += time.monotonic() - started
        return Following(requests, finished, is_last=not self._open)

    def _wait(self, processes: AnyEpisodes) -> dict[int, Answer]:
        return {key: answer for (_, key), answer in processes.wait().items()}

    def record_requests(self, requests: Sequence[Request]) -> None:
        """Append the tokens of requests to the recordings of their episodes (nothing for plain responses)."""
        for request in () if self._is_plain else requests:
            self._episodes[request.key].recording.record_request(request.tokens)

    def receive(self, sampled: Sampled, version: int) -> bool:
        """Record sampled tokens with their policy version; return whether a plain response is finished."""
        key, is_whole = sampled.key, sampled.finish_reason != "interrupted"
        recording = self._episodes[key].recording
        recording.reply(
            sampled.tokens, sampled.logprobs, version, sampled.kept, sampled.routes, sampled.inserted, is_whole=is_whole
        )
        if is_whole and self._is_plain:
            self._episodes[key] = _Episode(recording, rollout=recording.finish(sampled.finish_reason))
        elif is_whole and self._processes is not None:
            self._episodes[key] = _Episode(recording, finish_reason=sampled.finish_reason)
            self._processes.send_reply((self, key), *recording.last_reply(), sampled.finish_reason)
        return is_whole and self._is_plain

    def stop(self) -> None:
        """End the phase, after all environments have answered."""
        if self._processes is not None:
            self._late |= self._wait(self._processes)
            self.counts["seconds"] += time.monotonic() - self._started

    def rollout(self, key: int) -> Rollout:
        """Return a finished sample; an unknown finish reason becomes "stop"."""
        episode = self._episodes[key]
        return episode.rollout or episode.recording.finish("stop")

    def drop(self, keys: Iterable[int]) -> None:
        """Remove samples that a step has taken; keys of other engines are ignored."""
        for key in keys:
            self._episodes.pop(key, None)
            self._close(key)

    def pack(self) -> dict[str, torch.Tensor]:
        """Return the checkpoint state; unfinished episodes with an environment are stored by key only."""
        from megatron_rl.rollout.packed_episodes import pack_rollouts

        rollouts = {
            key: one.recording.finish("interrupted")
            if one.rollout is None and self._is_plain and one.recording.num_turns
            else one.rollout
            for key, one in self._episodes.items()
        }
        counts = torch.tensor([*self.counts.values()], dtype=torch.float64)  # not yet reported as metrics
        return pack_rollouts(rollouts) | {"counts": counts}

    def load(self, state: Mapping[str, torch.Tensor], is_mine: Callable[[int], bool]) -> None:
        """Add the samples of a `pack` result that `is_mine` selects."""
        from megatron_rl.rollout.packed_episodes import unpack_rollouts

        rollouts = unpack_rollouts(state, self.samples)
        for key, rollout in rollouts.items():
            if is_mine(key) and rollout is None:
                self.begin([key])
            elif is_mine(key) and rollout is not None:
                is_over = rollout.finish_reason != "interrupted"
                self._episodes[key] = _Episode(Recording.of(rollout), rollout=rollout if is_over else None)
        if "counts" in state and is_mine(min(rollouts)):  # exactly one engine adds the counts
            for name, value in zip(self.counts, state["counts"].tolist(), strict=True):
                self.counts[name] += value

    def close(self) -> None:
        """Stop the processes of episodes left open by an error."""
        for key in [*self._open]:
            self._close(key)

    def _close(self, key: int) -> None:
        if key in self._open:
            self._open.discard(key)
            assert self._processes is not None
            self._processes.close((self, key))

    def _continue_reply(self, request: Request) -> Request:
        recording = self._episodes[request.key].recording
        if not recording.interrupted:
            return request
        tokens = recording.tokens[-recording.interrupted :]
        return request.continued(tokens, self._seed(request.key, request.turn, len(tokens)))

    def _seed(self, key: int, turn: int, position: int = 0) -> int:
        """Derive the seed for sampling a reply from its token `position` on (positive after an interruption)."""
        first = derive_seed(self._run_seed, *self.samples.seed_parts(key), position=0 if turn else position)
        return derive_seed(first, turn, 0, 0, position=position) if turn else first

    def _continue(self, key: int, answer: Answer) -> list[Request]:
        episode, sampling = self._episodes[key], self._sampling
        recording = episode.recording
        self.counts["environment_seconds"] += answer.seconds
        if answer.reward is not None:
            recording.judge(answer.reward)
        if answer.tail is None:
            self._end(key, answer, answer.finish_reason or episode.finish_reason)
            return []
        known = [] if answer.tail.is_fork else [recording.tokens]
        tokens = np.concatenate([*known, np.array(answer.tail.tokens, np.int32)])
        room = len(recording.prompt.tokens) + sampling.max_tokens - len(tokens)
        if room < 1:
            self._end(key, answer, "length")
            return []
        turn, most = recording.num_turns, min(room, answer.max_tokens or room, sampling.max_tokens)
        request = Request(key, tokens, self._seed(key, turn), replace(sampling, max_tokens=most), turn)
        self._episodes[key] = replace(episode, request=request)
        return [request]

    def _end(self, key: int, answer: Answer, finish_reason: str) -> None:
        self._close(key)
        episode, has_failed = self._episodes[key], finish_reason in FAILED
        recording = episode.recording
        rollout = recording.finish(finish_reason)
        tokens = sum(len(branch.tokens) for branch in rollout.branches)
        found = {
            "episodes": 1,
            "turns": recording.num_turns,
            "forks": recording.num_forks,
            "tokens_sampled": recording.num_sampled,
            "tokens_observed": tokens - recording.num_sampled - len(rollout.prompt.tokens),
        }
        ends = {"turns": "max_turns", "timeout": "timeouts", "error": "errors"}
        if finish_reason in ends:
            found[ends[finish_reason]] = 1
        for name, value in found.items():
            self.counts[name] += value
        if has_failed and not self._has_warned:
            self._has_warned = True
            logging.getLogger(__name__).warning(
                "the environment of prompt_id %d, sample %d failed (%s), others are counted only: %s",
                rollout.prompt.prompt_id,
                rollout.sample_index,
                finish_reason,
                answer.failure,
            )
        reward = 0.0 if has_failed else float("nan") if recording.reward is None else recording.reward
        failure = answer.failure if has_failed else ""
        rollout = replace(rollout, reward=reward, reward_components=answer.components, failure=failure)
        self._episodes[key] = replace(episode, rollout=rollout)


def describe_episodes(sums: Mapping[str, float]) -> dict[str, float]:
    """Compute the `agents/...` metrics from `Episodes.counts`, summed over all engines."""
    episodes = sums["episodes"]
    if not episodes:
        return {}  # no episode has ended
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
