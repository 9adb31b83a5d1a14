# SPDX-License-Identifier: Apache-2.0
"""Samples that have begun: what an engine is asked for them, and what it has sampled.

An environment answers each reply of an episode, and the engine is asked again, until it is done. A plain response is an
episode without an environment, which ends with its first reply.

Requests join the engine between two of its steps, and an episode that waits for its environment has no place in it.
The engine waits in turn, before its next step, until the environments have answered all that it has finished: so what
is computed together follows from what was sampled, and a run is reproducible bit by bit. The price is that nothing is
sampled while an environment thinks.
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
from megatron_rl.engines.protocol import Request, Sampled
from megatron_rl.engines.sampling import SamplingConfig, derive_seed
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
    """What comes before the next step of an engine.

    Attributes:
        requests: to add.
        finished: keys of samples that are finished.
        is_last: no request comes after these.
    """

    requests: Sequence[Request]
    finished: Sequence[int]
    is_last: bool


@dataclass(frozen=True)
class _Episode:
    """One episode as its engine has it.

    Attributes:
        recording: of it; with an environment, all that there is on other ranks than the first of the engine.
        request: for the reply that comes next, from its beginning; None: nobody waits for one.
        finish_reason: how its last reply ended.
        rollout: of an episode that is over.
    """

    recording: Recording
    request: Request | None = None
    finish_reason: str = "stop"
    rollout: Rollout | None = None


class Episodes:
    """The samples of one engine that have begun and were not taken, by key; the same calls on each of its ranks.

    A reply may be interrupted: the environment waits for the rest of it. All environments have answered before the
    engine's next step, and when a phase is over. The engine's first rank has their processes, and knows how they end.

    Args:
        samples: what they are of.
        run_seed: seed of the run, see `derive_seed`.
        agents: whether they have an environment, and how many are open at a time.
        processes: of their environments; None: they have none, or another rank of the engine has them.

    Attributes:
        samples: see above.
        counts: sums that `describe_episodes` makes metrics of.
    """

    def __init__(self, samples: Samples, run_seed: int, agents: AgentsConfig, processes: AnyEpisodes | None) -> None:
        self.samples, self._run_seed, self._processes = samples, run_seed, processes
        self._is_plain, self._in_flight = not agents.has_episodes, agents.episodes_in_flight
        self._episodes: dict[int, _Episode] = {}
        self._waiting: deque[int] = deque()  # that may be opened in the phase
        self._open: set[int] = set()
        self._requests: list[Request] = []  # that the phase starts with
        self._late: dict[int, Answer] = {}  # that came behind the end of the last phase
        self.counts: dict[str, float] = dict.fromkeys(_COUNTED, 0.0)
        self._has_warned = False

    @property
    def keys(self) -> list[int]:
        """Of all of them."""
        return [*self._episodes]

    @property
    def num_tokens(self) -> int:
        """Tokens that an engine returned for them."""
        return sum(episode.recording.num_sampled for episode in self._episodes.values())

    def begin(self, keys: Iterable[int]) -> None:
        """Samples have begun."""
        self._episodes |= {key: _Episode(Recording(*self.samples.sample_of(key))) for key in keys}

    def find_unfinished(self) -> list[int]:
        """Keys of those to which something must be added; with an environment, only the first rank knows."""
        return [key for key, episode in self._episodes.items() if episode.rollout is None]

    def start(self, keys: Iterable[int], sampling: SamplingConfig) -> None:
        """A phase starts, in which these are continued."""
        self._sampling, self._started = sampling, time.monotonic()
        chosen = sorted({*keys} & {*self.find_unfinished()})
        if self._is_plain:
            self._requests = [self._continue_reply(self._first_request(key)) for key in chosen]
            return
        self._waiting = deque(key for key in chosen if key not in self._open)
        requests = (self._episodes[key].request for key in chosen)
        self._requests = [self._continue_reply(request) for request in requests if request is not None]

    def follow(self) -> Following:
        """What comes next, at first what continues interrupted replies; on the first rank, waits for environments."""
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

    def ask(self, requests: Sequence[Request]) -> None:
        """Requests are added to the engine."""
        for request in () if self._is_plain else requests:
            self._episodes[request.key].recording.ask(request.tokens)

    def hear(self, sampled: Sampled, version: int) -> bool:
        """Take what the engine has sampled with the weights of a version; return whether that ends the episode.

        One with an environment is ended by it, see `follow`.
        """
        key, is_whole = sampled.key, sampled.finish_reason != "interrupted"
        recording = self._episodes[key].recording
        recording.reply(
            sampled.tokens,
            sampled.logprobs,
            version,
            sampled.kept,
            sampled.routes,
            sampled.inserted,
            is_whole=is_whole,
        )
        if is_whole and self._is_plain:
            self._episodes[key] = _Episode(recording, rollout=recording.finish(sampled.finish_reason))
        elif is_whole and self._processes is not None:
            self._episodes[key] = _Episode(recording, finish_reason=sampled.finish_reason)
            self._processes.tell((self, key), *recording.last_reply(), sampled.finish_reason)
        return is_whole and self._is_plain

    def stop(self) -> None:
        """The phase is over."""
        if self._processes is not None:
            self._late |= self._wait(self._processes)
            self.counts["seconds"] += time.monotonic() - self._started

    def rollout(self, key: int) -> Rollout:
        """A sample that is over, the same object each time; ranks that do not know how it ended say "stop"."""
        episode = self._episodes[key]
        return episode.rollout or episode.recording.finish("stop")

    def drop(self, keys: Iterable[int]) -> None:
        """These are taken, as far as they are here."""
        for key in keys:
            self._episodes.pop(key, None)
            self._close(key)

    def pack(self) -> dict[str, torch.Tensor]:
        """What a checkpoint has of them.

        Of a response that is not over, the tokens that there are; an episode with an environment begins again.
        """
        from megatron_rl.rollout.packed_episodes import pack_rollouts

        rollouts = {
            key: one.recording.finish("interrupted")
            if one.rollout is None and self._is_plain and one.recording.num_turns
            else one.rollout
            for key, one in self._episodes.items()
        }
        counts = torch.tensor([*self.counts.values()], dtype=torch.float64)  # of a phase that is not described yet
        return pack_rollouts(rollouts) | {"counts": counts}

    def load(self, state: Mapping[str, torch.Tensor], is_mine: Callable[[int], bool]) -> None:
        """Add what `pack` made; only samples of some keys."""
        from megatron_rl.rollout.packed_episodes import unpack_rollouts

        rollouts = unpack_rollouts(state, self.samples)
        for key, rollout in rollouts.items():
            if is_mine(key) and rollout is None:
                self.begin([key])
            elif is_mine(key) and rollout is not None:
                is_over = rollout.finish_reason != "interrupted"
                self._episodes[key] = _Episode(Recording.of(rollout), rollout=rollout if is_over else None)
        if "counts" in state and is_mine(min(rollouts)):  # one engine takes them
            for name, value in zip(self.counts, state["counts"].tolist(), strict=True):
                self.counts[name] += value

    def close(self) -> None:
        """End the processes of episodes that are open; there are some after an error only."""
        for key in [*self._open]:
            self._close(key)

    def _close(self, key: int) -> None:
        if key in self._open:
            self._open.discard(key)
            assert self._processes is not None
            self._processes.close((self, key))

    def _first_request(self, key: int) -> Request:
        prompt, _ = self.samples.sample_of(key)
        return Request(key, prompt.tokens, self._seed(key, 0), self._sampling)

    def _continue_reply(self, request: Request) -> Request:
        """The request for a reply, or for the rest of it."""
        recording = self._episodes[request.key].recording
        if not recording.interrupted:
            return request
        tokens = recording.tokens[-recording.interrupted :]
        return request.continued(tokens, self._seed(request.key, request.turn, len(tokens)))

    def _seed(self, key: int, turn: int, position: int = 0) -> int:
        """Of what follows so many tokens of a reply."""
        first = derive_seed(self._run_seed, *self.samples.seed_parts(key), position=0 if turn else position)
        return derive_seed(first, turn, 0, 0, position=position) if turn else first

    def _continue(self, key: int, answer: Answer) -> list[Request]:
        """The request that follows an answer; none where the episode is over."""
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
        self._count(rollout, recording)
        if has_failed:
            self._warn(rollout, answer.failure)
        reward = 0.0 if has_failed else float("nan") if recording.reward is None else recording.reward
        failure = answer.failure if has_failed else ""
        rollout = replace(rollout, reward=reward, reward_components=answer.components, failure=failure)
        self._episodes[key] = replace(episode, rollout=rollout)

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
    """The metrics `agents/...` of a generation, from the sums over all engines of what `Episodes` counts."""
    episodes = sums["episodes"]
    if not episodes:
        return {}  # none has ended
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
