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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from megatron_rl.agents.episode import Answer
from megatron_rl.agents.in_rank import AnyEpisodes
from megatron_rl.agents.recording import Recording
from megatron_rl.engines.protocol import Request, Sampled
from megatron_rl.engines.sampling import SamplingConfig, derive_seed
from megatron_rl.rollout.carried import Following
from megatron_rl.rollout.order import STRIDE, Samples
from megatron_rl.rollout.packed_episodes import pack_rollouts, unpack_rollouts
from megatron_rl.types import FAILED, Rollout

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
class _Episode:
    """One episode as its engine has it.

    Attributes:
        recording: of it; on the other ranks of the engine all that there is.
        request: for the reply that comes next, from its beginning; None: nobody waits for one.
        finish_reason: how its last reply ended.
        rollout: of an episode that is over.
    """

    recording: Recording
    request: Request | None = None
    finish_reason: str = "stop"
    rollout: Rollout | None = None


class Episodes:
    """The episodes of one engine, see `carried.Carried`; its first rank has their processes, and knows how they end.

    What is interrupted is a reply: the environment waits for the rest of it. All environments have answered before the
    engine's next step, and when a phase is over.

    Args:
        samples: what they are of.
        processes: of their environments; None: another rank of the engine has them.
        in_flight: episodes that are open at a time; None: all.
        shift: from the key of an episode to that of its process, apart from the keys of others.
    """

    def __init__(self, samples: Samples, processes: AnyEpisodes | None, in_flight: int | None, shift: int) -> None:
        self._samples, self._processes, self._in_flight, self._shift = samples, processes, in_flight, shift
        self._episodes: dict[int, _Episode] = {}
        self._waiting: deque[int] = deque()  # that may be opened in the phase
        self._open: set[int] = set()
        self._requests: list[Request] = []  # that the phase starts with
        self._late: dict[int, Answer] = {}  # that came behind the end of the last phase
        self.counts: dict[str, float] = dict.fromkeys(_COUNTED, 0.0)
        self._has_warned = False

    @property
    def keys(self) -> list[int]:
        """See `Carried.keys`."""
        return [*self._episodes]

    @property
    def num_tokens(self) -> int:
        """See `Carried.num_tokens`."""
        return sum(
            len(episode.rollout.response_tokens) if episode.rollout else episode.recording.num_sampled
            for episode in self._episodes.values()
        )

    def begin(self, keys: Iterable[int]) -> None:
        """See `Carried.begin`."""
        self._episodes |= {key: _Episode(Recording(*self._samples.sample_of(key))) for key in keys}

    def find_unfinished(self) -> list[int]:
        """See `Carried.find_unfinished`."""
        return [key for key, episode in self._episodes.items() if episode.rollout is None]

    def start(self, keys: Iterable[int], sampling: SamplingConfig) -> None:
        """See `Carried.start`."""
        self._sampling, self._started = sampling, time.monotonic()
        chosen = sorted({*keys} & {*self.find_unfinished()})
        self._waiting = deque(key for key in chosen if key not in self._open)
        self._requests = [
            self._continue_reply(key, request) for key in chosen if (request := self._episodes[key].request) is not None
        ]

    def follow(self) -> Following:
        """See `Carried.follow`; waits for the environments."""
        assert self._processes is not None
        started, finished = time.monotonic(), list[int]()
        requests, self._requests = self._requests, []
        while True:
            while self._waiting and len(self._open) < (self._in_flight or len(self._episodes)):
                key = self._waiting.popleft()
                self._open.add(key)
                self._processes.open(key + self._shift, self._episodes[key].recording.prompt)
            answers, self._late = self._late | self._processes.wait(), {}
            if not answers:
                break
            for key in sorted(place - self._shift for place in answers):
                requests += self._continue(key, answers[key + self._shift])
                finished += [key] if self._episodes[key].rollout is not None else []
        self.counts["wait_seconds"] += time.monotonic() - started
        return Following(requests, finished, is_last=not self._open)

    def ask(self, requests: Sequence[Request]) -> None:
        """See `Carried.ask`."""
        for request in requests:
            self._episodes[request.key % STRIDE].recording.ask(request.tokens)

    def hear(self, sampled: Sampled, version: int) -> bool:
        """See `Carried.hear`; an episode is finished by its environment."""
        key = sampled.key % STRIDE
        if sampled.key < 0 or key not in self._episodes or np.shape(sampled.tokens) != np.shape(sampled.logprobs):
            self._open.discard(key)  # what is wrong is said in the end
            return False
        episode, is_whole = self._episodes[key], sampled.finish_reason != "interrupted"
        episode.recording.reply(
            sampled.tokens, sampled.logprobs, version, sampled.kept, sampled.routes, is_whole=is_whole
        )
        if is_whole and self._processes is not None:
            self._episodes[key] = replace(episode, request=None, finish_reason=sampled.finish_reason)
            self._processes.tell(key + self._shift, *episode.recording.last_reply(), sampled.finish_reason)
        return False

    def stop(self) -> None:
        """See `Carried.stop`."""
        if self._processes is not None:
            self._late |= self._processes.wait()
            self.counts["seconds"] += time.monotonic() - self._started

    def rollout(self, key: int) -> Rollout:
        """See `Carried.rollout`; on other ranks than the first it does not say how the episode ended."""
        episode = self._episodes[key]
        return episode.rollout or episode.recording.finish("stop")

    def drop(self, keys: Iterable[int]) -> None:
        """See `Carried.drop`."""
        for key in keys:
            self._episodes.pop(key, None)
            self._close(key)

    def describe(self, sums: Mapping[str, float]) -> dict[str, float]:
        """See `Carried.describe`."""
        return describe_episodes(sums)

    def pack(self) -> dict[str, torch.Tensor]:
        """See `Carried.pack`; an episode that is not over has no more than its key there, and begins again."""
        counts = torch.tensor([*self.counts.values()], dtype=torch.float64)  # of a phase that is not described yet
        return pack_rollouts({key: episode.rollout for key, episode in self._episodes.items()}) | {"counts": counts}

    def load(self, state: Mapping[str, torch.Tensor], is_mine: Callable[[int], bool]) -> None:
        """See `Carried.load`."""
        rollouts = unpack_rollouts(state, self._samples)
        for key, rollout in rollouts.items():
            if is_mine(key):
                self._episodes[key] = _Episode(Recording(*self._samples.sample_of(key)), rollout=rollout)
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
            self._processes.close(key + self._shift)

    def _continue_reply(self, key: int, request: Request) -> Request:
        """The request for a reply, or for the rest of it."""
        recording = self._episodes[key].recording
        if not recording.interrupted:
            return request
        tokens = recording.tokens[-recording.interrupted :]
        return request.continued(tokens, self._seed(key, request.turn, len(tokens)))

    def _seed(self, key: int, turn: int, position: int = 0) -> int:
        """Of what follows so many tokens of a reply; the first reply has the seeds of a plain response."""
        if not turn:
            return self._samples.request(key, self._sampling, position).seed
        return derive_seed(self._samples.request(key, self._sampling).seed, turn, 0, 0, position=position)

    def _continue(self, key: int, answer: Answer) -> list[Request]:
        """The request that follows an answer; none where the episode is over."""
        episode, first = self._episodes[key], self._samples.request(key, self._sampling)
        recording = episode.recording
        self.counts["environment_seconds"] += answer.seconds
        if answer.reward is not None:
            recording.judge(answer.reward)
        if answer.tail is None:
            self._end(key, answer, answer.finish_reason or episode.finish_reason)
            return []
        known = [] if answer.tail.is_fork else [recording.tokens]
        tokens = np.concatenate([*known, np.array(answer.tail.tokens, np.int32)])
        room = len(recording.prompt.tokens) + first.sampling.max_tokens - len(tokens)
        if room < 1:
            self._end(key, answer, "length")
            return []
        turn, most = recording.num_turns, min(room, answer.max_tokens or room, first.sampling.max_tokens)
        request = replace(
            first,
            key=key + turn * STRIDE,
            tokens=tokens,
            seed=self._seed(key, turn),
            sampling=replace(first.sampling, max_tokens=most),
            turn=turn,
        )
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
