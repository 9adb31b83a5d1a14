# SPDX-License-Identifier: Apache-2.0
"""Samples of an engine: their numbers, their recorded tokens (`Recording`), and the begun ones (`Episodes`).

A key numbers a sample; prompt, seed and engine follow from it. A plain response is an episode without an environment,
which ends with its first reply.

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
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from megatron_rl.config.schema import RunConfig
from megatron_rl.data.prompts import PromptBatches
from megatron_rl.engines.protocol import Request, Sampled, SamplingConfig, derive_seed
from megatron_rl.samples.table import hash_bytes
from megatron_rl.types import FAILED, Branch, KeptSets, Prompt, Rollout, Turn, complete_routes

if TYPE_CHECKING:
    from megatron_rl.agents.episode import Answer
    from megatron_rl.agents.in_rank import AnyEpisodes


class Recording:
    """An episode's record in branches: token sequences that grow by replies and observations.

    A request continues the longest branch that its tokens begin with; its further tokens are an observation. Any other
    request starts a branch, or replaces the prompt before the first reply. So training uses each token from the engine
    exactly once, and no other.
    """

    def __init__(self, prompt: Prompt, sample_index: int) -> None:
        self.prompt, self._sample_index = prompt, sample_index
        self._contexts, self._current = [_Context(_Part(prompt.tokens))], 0
        self._turns: list[Turn] = []
        self.interrupted = 0  # number of tokens of a reply that will be continued
        self.reward: float | None = None  # sum over turns, or `None` without any
        self._state: str | None = None  # that the next request shows; `None`: its further tokens

    @classmethod
    def of(cls, rollout: Rollout) -> Recording:
        """Resume the recording of a rollout that `finish` built; rewards of its earlier turns are not restored."""
        found, last = cls(rollout.prompt, rollout.sample_index), rollout.turns[-1:]
        found._contexts = [_Context.of(branch) for branch in rollout.branches]
        found._turns = list(rollout.turns)
        if last and rollout.finish_reason == "interrupted":
            found._current, found.interrupted = last[0].branch, last[0].stop - last[0].start
        return found

    @property
    def num_turns(self) -> int:
        """Return the number of replies, including an interrupted one."""
        return len(self._turns)

    @property
    def num_forks(self) -> int:
        """Return the number of branches after the first."""
        return len(self._contexts) - 1

    @property
    def tokens(self) -> np.ndarray:
        """Return the tokens of the last request and its reply, [s] int32."""
        return self._contexts[self._current].joined

    @property
    def num_sampled(self) -> int:
        """Return the number of tokens that the engine returned."""
        return sum(turn.stop - turn.start for turn in self._turns)

    def name_state(self, state: str | None) -> None:
        """Set the name of the state that the next request shows; `None`: its further tokens."""
        self._state = state

    def record_request(self, tokens: np.ndarray) -> None:
        """Record a request: continue the longest branch that the tokens begin with, or start a branch."""
        known = [i for i, context in enumerate(self._contexts) if context.begins(tokens)]
        if not known:
            begun = _Context(_Part(tokens))
            self._contexts = [*self._contexts, begun] if self._turns else [begun]
        self._current = max(known, key=lambda i: self._contexts[i].length, default=len(self._contexts) - 1)
        context = self._contexts[self._current]
        shown = tokens[context.length if known and self._turns else 0 :].tobytes()
        state = shown if self._state is None else self._state.encode("utf-8", "backslashreplace")
        context.states[len(tokens)] = hash_bytes(state) >> 1 | 1  # positive
        if len(tokens) > context.length:
            context.append(_Part(tokens[context.length :]))

    def reply(
        self,
        tokens: np.ndarray,
        logprobs: np.ndarray,
        version: int,
        kept: KeptSets | None = None,
        routes: np.ndarray | None = None,
        inserted: np.ndarray | None = None,
        *,
        is_whole: bool = True,
    ) -> None:
        """Record the engine's reply to the last request, or the continuation of an interrupted reply.

        Args:
            tokens, logprobs: [s], new tokens only.
            inserted: [s] bool, tokens that were not sampled, if any.
            kept: [s] token sets that truncated sampling drew the new tokens from.
            version: policy version.
            routes: expert choices for all tokens up to the reply's end, as in `Sampled`.
            is_whole: whether the reply ends here; if not, the next call continues it in the same turn.
        """
        context = self._contexts[self._current]
        start = context.length - self.interrupted
        if self.interrupted:
            self._turns.pop()
        self.interrupted = 0 if is_whole else self.interrupted + len(tokens)
        if is_whole or self.interrupted:
            self._turns.append(Turn(self._current, start, context.length + len(tokens)))
            sampled = True if inserted is None else ~inserted
            context.append(_Part(np.asarray(tokens, np.int32), np.asarray(logprobs), version, sampled, kept))
            context.add_routes(routes, version)

    def last_reply(self) -> tuple[list[int], list[float]]:
        """Return the last reply's tokens and their log-probs."""
        start = self._turns[-1].start
        context = self._contexts[self._current]
        return context.joined[start:].tolist(), context.logprobs[start:].tolist()

    def judge(self, reward: float) -> None:
        """Add the last reply's reward to the episode's.

        If the reply is on the newest branch, the reward is also stored there, as a turn reward.
        """
        self.reward = (self.reward or 0.0) + reward
        if self._turns[-1].branch == self.num_forks:
            self._contexts[-1].rewards[self._turns[-1].stop - 1] = reward

    def finish(self, finish_reason: str) -> Rollout:
        """Build the rollout, without a score; drop an observation after the last reply."""
        branches = [context.as_branch(self.prompt.tokens) for context in self._contexts]
        return Rollout(self.prompt, self._sample_index, branches, list(self._turns), finish_reason)


class _Part(NamedTuple):
    """A run of tokens; `logprobs` is `None` if no engine sampled it."""

    tokens: np.ndarray
    logprobs: np.ndarray | None = None
    versions: int | np.ndarray = 0
    sampled: bool | np.ndarray = True
    kept: KeptSets | None = None


class _Context:
    def __init__(self, part: _Part) -> None:
        self._parts: list[_Part] = []
        self.rewards: dict[int, float] = {}  # by token index
        self.states: dict[int, int] = {}  # likewise
        self._routes: np.ndarray | None = None
        self._routed_by: int | None = None  # policy version of the latest routes
        self.length = self._replied = 0  # in tokens; end of the last reply
        self.append(part)

    @classmethod
    def of(cls, branch: Branch) -> _Context:
        found = cls(_Part(branch.tokens, branch.logprobs, branch.versions, branch.sampled, branch.kept))
        if branch.routes is not None:
            found.add_routes(branch.routes, int(branch.versions[-1]))
        return found

    @property
    def joined(self) -> np.ndarray:
        """Return all tokens, [s] int32."""
        return np.concatenate([part.tokens for part in self._parts])

    @property
    def logprobs(self) -> np.ndarray:
        """Return all log-probs, [s] float32, 0 for tokens that the engine did not return."""
        parts = (np.zeros(len(p.tokens), np.float32) if p.logprobs is None else p.logprobs for p in self._parts)
        return np.concatenate([*parts], dtype=np.float32)

    def begins(self, tokens: np.ndarray) -> bool:
        return len(tokens) >= self.length and np.array_equal(tokens[: self.length], self.joined)

    def append(self, part: _Part) -> None:
        self._parts.append(part)
        self.length += len(part.tokens)
        if part.logprobs is not None:
            self._replied = self.length

    def add_routes(self, routes: np.ndarray | None, version: int) -> None:
        if routes is not None:
            self._routes = complete_routes(self._routes, routes, has_moved=version != self._routed_by)
            self._routed_by = version

    def as_branch(self, prompt: np.ndarray) -> Branch:
        """Build the branch up to the last reply; without a reply, the branch's last token becomes the response."""
        tokens, stop, place = self.joined, self._replied or self.length, 0
        sampled, versions = np.zeros(len(tokens), bool), np.zeros(len(tokens), np.int32)
        for part in self._parts:
            here, place = slice(place, place + len(part.tokens)), place + len(part.tokens)
            if part.logprobs is not None:
                sampled[here], versions[here] = part.sampled, part.versions
        num_shared = len(prompt)
        if self._parts[0].tokens is not prompt:
            shared = tokens[:num_shared] == prompt[: len(tokens)]
            num_shared = len(shared) if shared.all() else int(shared.argmin())
        rewards = np.zeros(stop, np.float32) if self.rewards else None
        if rewards is not None:
            rewards[[*self.rewards]] = [*self.rewards.values()]
        known = {index: state for index, state in self.states.items() if index < stop}
        states = np.zeros(stop, np.int64) if known else None
        if states is not None:
            states[[*known]] = [*known.values()]
        kept = KeptSets.join_known([(part.kept, len(part.tokens)) for part in self._parts])
        return Branch(
            tokens[:stop],
            sampled[:stop],
            self.logprobs[:stop],
            versions[:stop],
            min(num_shared, stop - 1),
            kept and kept.cut(stop),
            rewards,
            routes=None if self._routes is None else self._routes[:stop],
            states=states,
        )


class Samples:
    """Samples (rollouts to generate), by key = prompt position * group_size + sample index; equal on every rank."""

    group_size: int
    round: int = 0

    def sample_of(self, key: int) -> tuple[Prompt, int]:
        """Return a sample's prompt and its index in the group."""
        return self._find_prompt(key // self.group_size)[0], key % self.group_size

    def step_of(self, key: int) -> int:
        """Return the step that trains on a sample, provided that no earlier group is dropped."""
        raise NotImplementedError

    def seed_parts(self, key: int) -> tuple[int, int, int, int]:
        """Return the arguments of `derive_seed` after the run's seed: step, prompt_id, sample, round.

        A prompt that occurs twice, at an epoch boundary, gets different seeds.
        """
        prompt, occurrence = self._find_prompt(key // self.group_size)
        return self.step_of(key), prompt.prompt_id, occurrence * self.group_size + key % self.group_size, self.round

    def _find_prompt(self, position: int) -> tuple[Prompt, int]:
        """Return the prompt at a position, and the number of its previous occurrences in the batch."""
        raise NotImplementedError


@dataclass(frozen=True)
class SampleGroups(Samples):
    """Samples whose groups begin and end in one call of `generate`."""

    prompts: Sequence[Prompt]
    group_size: int
    sampling: SamplingConfig
    step: int
    round: int = 0

    def __len__(self) -> int:
        return len(self.prompts) * self.group_size

    def step_of(self, key: int) -> int:
        """Return the step of all samples."""
        return self.step

    def _find_prompt(self, position: int) -> tuple[Prompt, int]:
        return self.prompts[position], self._occurrences[position]

    @cached_property
    def _occurrences(self) -> list[int]:
        return count_occurrences(self.prompts)


class SampleOrder(Samples):
    """Samples of a whole run, numbered in data order."""

    def __init__(self, prompts: PromptBatches[Prompt], config: RunConfig) -> None:
        self.prompts, self.group_size = prompts, config.rollout.n
        self._batch_size = config.data.train_batch_size

        def read(number: int) -> list[tuple[Prompt, int]]:
            first = number * self._batch_size
            batch = [prompts.prompt(position) for position in range(first, first + self._batch_size)]
            return list(zip(batch, count_occurrences(batch), strict=True))

        self._batch = lru_cache(maxsize=config.schedule.max_staleness + 2)(read)

    def step_of(self, key: int) -> int:
        """Return the step whose batch has the sample's prompt."""
        return key // self.group_size // self._batch_size + 1

    def _find_prompt(self, position: int) -> tuple[Prompt, int]:
        return self._batch(position // self._batch_size)[position % self._batch_size]


def count_occurrences(prompts: Sequence[Prompt]) -> list[int]:
    """Count previous occurrences of each prompt in the batch (nonzero only at an epoch boundary)."""
    seen: dict[int, int] = {}
    counts = []
    for prompt in prompts:
        counts.append(seen.get(prompt.prompt_id, 0))
        seen[prompt.prompt_id] = counts[-1] + 1
    return counts


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
    """State of one episode on its engine."""

    recording: Recording  # tokens so far; with an environment, ranks other than the engine's first have nothing else
    request: Request | None = None  # full request of the next reply, if one is due
    finish_reason: str = "stop"  # finish reason of the last reply
    rollout: Rollout | None = None


class Episodes:
    """Begun samples of one engine by key (`Samples`), until a step takes them.

    Every rank of the engine makes the same calls; environment processes and episode results are on its first rank only.

    Args:
        config: its sources decide which prompts get plain responses.

    Attributes:
        counts: input of `describe_episodes`.
    """

    def __init__(self, samples: Samples, config: RunConfig, processes: AnyEpisodes | None) -> None:
        self.samples, self._run_seed, self._processes = samples, config.trainer.seed, processes
        self._plain = {name for name, one in config.by_source.items() if not one.agents.has_episodes}
        self._in_flight = config.agents.episodes_in_flight
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
        chosen, due = sorted({*keys} & {*self.find_unfinished()}), list[Request]()
        self._waiting = deque(key for key in chosen if key not in self._open and not self._is_plain(key))
        for key in chosen:
            prompt, request = self._prompt(key), self._episodes[key].request
            if self._is_plain(key):
                due.append(Request(key, prompt.tokens, self._seed(key, 0), sampling.for_source(prompt.source)))
            elif request is not None:
                due.append(request)
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

    def _prompt(self, key: int) -> Prompt:
        return self._episodes[key].recording.prompt

    def _is_plain(self, key: int) -> bool:
        return self._prompt(key).source in self._plain

    def _wait(self, processes: AnyEpisodes) -> dict[int, Answer]:
        return {key: answer for (_, key), answer in processes.wait().items()}

    def record_requests(self, requests: Sequence[Request]) -> None:
        """Append the tokens of requests to the recordings of their episodes (nothing for plain responses)."""
        for request in requests:
            if not self._is_plain(request.key):
                self._episodes[request.key].recording.record_request(request.tokens)

    def receive(self, sampled: Sampled, version: int) -> bool:
        """Record sampled tokens with their policy version; return whether a plain response is finished."""
        key, is_whole = sampled.key, sampled.finish_reason != "interrupted"
        recording = self._episodes[key].recording
        recording.reply(
            sampled.tokens, sampled.logprobs, version, sampled.kept, sampled.routes, sampled.inserted, is_whole=is_whole
        )
        is_plain = self._is_plain(key)
        if is_whole and is_plain:
            self._episodes[key] = _Episode(recording, rollout=recording.finish(sampled.finish_reason))
        elif is_whole and self._processes is not None:
            self._episodes[key] = _Episode(recording, finish_reason=sampled.finish_reason)
            self._processes.send_reply((self, key), *recording.last_reply(), sampled.finish_reason)
        return is_whole and is_plain

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
            if one.rollout is None and self._is_plain(key) and one.recording.num_turns
            else one.rollout
            for key, one in self._episodes.items()
        }
        counts = torch.tensor([*self.counts.values()], dtype=torch.float64)  # not yet reported as metrics
        return pack_rollouts(rollouts) | {"counts": counts}

    def load(self, state: Mapping[str, torch.Tensor], is_mine: Callable[[int], bool]) -> None:
        """Add the samples of a `pack` result that `is_mine` selects."""
        from megatron_rl.rollout.packed_episodes import unpack_rollouts

        rollouts = unpack_rollouts(state, self.samples.sample_of)
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
        episode, recording = self._episodes[key], self._episodes[key].recording
        sampling = self._sampling.for_source(recording.prompt.source)
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
        recording.name_state(answer.state)
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
