# SPDX-License-Identifier: Apache-2.0
"""Records the exact tokens of an episode's requests and replies."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from megatron_rl.types import Branch, KeptSets, Prompt, Rollout, Turn, complete_routes


class Recording:
    """An episode's record in branches: token sequences that grow by replies and observations.

    A request continues the longest branch that its tokens begin with; its further tokens are an observation. Any other
    request starts a branch, or replaces the prompt before the first reply. So training uses each token from the engine
    exactly once, and no other.

    Attributes:
        reward: sum over turns, or `None` without any.
        interrupted: number of tokens of a reply that will be continued.
    """

    def __init__(self, prompt: Prompt, sample_index: int) -> None:
        self.prompt, self._sample_index = prompt, sample_index
        self._contexts, self._current = [_Context(_Part(prompt.tokens))], 0
        self._turns: list[Turn] = []
        self.interrupted = 0
        self.reward: float | None = None

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

    def record_request(self, tokens: np.ndarray) -> None:
        """Record a request: continue the longest branch that the tokens begin with, or start a branch."""
        known = [i for i, context in enumerate(self._contexts) if context.begins(tokens)]
        if not known:
            begun = _Context(_Part(tokens))
            self._contexts = [*self._contexts, begun] if self._turns else [begun]
        self._current = max(known, key=lambda i: self._contexts[i].length, default=len(self._contexts) - 1)
        context = self._contexts[self._current]
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
        )
