# SPDX-License-Identifier: Apache-2.0
"""What an episode was made of: the tokens of its requests as the engine saw them, and what it sampled."""

from __future__ import annotations

import numpy as np

from megatron_rl.types import Branch, KeptSets, Prompt, Rollout, Turn, complete_routes


class Recording:
    """The requests and replies of one episode.

    A request that begins with all of a branch continues it (the longest one); what it has beyond is an observation.
    Any other one begins a branch, or takes the place of a prompt that nothing was sampled of. So a token is learned if
    and only if the engine returned it, and only once.

    Args:
        prompt: the task.
        sample_index: of the rollout in its group.

    Attributes:
        prompt: see above.
        num_turns: replies so far, one that was interrupted included.
        num_forks: branches beyond the first.
        reward: sum over turns; None: no turn has one.
        interrupted: tokens of a reply that is to be continued.
    """

    def __init__(self, prompt: Prompt, sample_index: int) -> None:
        self.prompt, self._sample_index = prompt, sample_index
        self._contexts, self._current = [_Context(prompt.tokens)], 0
        self._turns: list[Turn] = []
        self.interrupted = 0
        self.reward: float | None = None

    @property
    def num_turns(self) -> int:
        """Replies so far, one that was interrupted included."""
        return len(self._turns)

    @property
    def num_forks(self) -> int:
        """Branches beyond the first."""
        return len(self._contexts) - 1

    @property
    def tokens(self) -> np.ndarray:
        """[s] int32, the context of the last request, and the reply to it."""
        return self._contexts[self._current].joined

    @property
    def num_sampled(self) -> int:
        """Tokens that the engine returned."""
        return sum(turn.stop - turn.start for turn in self._turns)

    def ask(self, tokens: np.ndarray) -> None:
        """A request was made."""
        known = [i for i, context in enumerate(self._contexts) if context.begins(tokens)]
        if not known:
            self._contexts = [*self._contexts, _Context(tokens)] if self._turns else [_Context(tokens)]
        self._current = max(known, key=lambda i: self._contexts[i].length, default=len(self._contexts) - 1)
        context = self._contexts[self._current]
        if len(tokens) > context.length:
            context.append(tokens[context.length :])

    def reply(
        self,
        tokens: np.ndarray,
        logprobs: np.ndarray,
        version: int,
        kept: KeptSets | None = None,
        routes: np.ndarray | None = None,
        *,
        is_whole: bool = True,
    ) -> None:
        """The engine answered it, or continued the answer.

        Args:
            tokens, logprobs, kept: [s] of the answer, or of what is new of it.
            version: of the weights.
            routes: of the whole context with the answer, as in `Sampled`.
            is_whole: nothing continues it.
        """
        context = self._contexts[self._current]
        start = context.length - self.interrupted
        if self.interrupted:
            self._turns.pop()
        self.interrupted = 0 if is_whole else self.interrupted + len(tokens)
        if is_whole or self.interrupted:
            self._turns.append(Turn(self._current, start, context.length + len(tokens)))
            context.append(tokens, logprobs, version, kept)
            context.add_routes(routes, version)

    def last_reply(self) -> tuple[list[int], list[float]]:
        """The tokens of the last reply, and their log-probs."""
        start = self._turns[-1].start
        context = self._contexts[self._current]
        return context.joined[start:].tolist(), np.concatenate(context.logprobs)[start:].tolist()

    def judge(self, reward: float) -> None:
        """The last reply is worth so much; in a branch that others follow, the episode is."""
        self.reward = (self.reward or 0.0) + reward
        if self._turns[-1].branch == self.num_forks:
            self._contexts[-1].rewards[self._turns[-1].stop - 1] = reward

    def finish(self, finish_reason: str) -> Rollout:
        """The rollout, not scored; an observation behind the last reply is left out."""
        branches = [context.as_branch(self.prompt.tokens) for context in self._contexts]
        return Rollout(self.prompt, self._sample_index, branches, list(self._turns), finish_reason)


class _Context:
    """One branch in parts."""

    def __init__(self, tokens: np.ndarray) -> None:
        self.tokens: list[np.ndarray] = []
        self._sampled: list[np.ndarray] = []
        self.logprobs: list[np.ndarray] = []
        self._versions: list[np.ndarray] = []
        self._kept: list[KeptSets | None] = []
        self.rewards: dict[int, float] = {}  # by the place of a token
        self._routes: np.ndarray | None = None
        self._routed_by: int | None = None  # version of the weights that read it last
        self.length = 0
        self.append(tokens)

    @property
    def joined(self) -> np.ndarray:
        """[s] int32, all tokens."""
        return np.concatenate(self.tokens)

    def begins(self, tokens: np.ndarray) -> bool:
        """Whether other tokens begin with all of this."""
        return len(tokens) >= self.length and np.array_equal(tokens[: self.length], self.joined)

    def append(
        self,
        tokens: np.ndarray,
        logprobs: np.ndarray | None = None,
        version: int = 0,
        kept: KeptSets | None = None,
    ) -> None:
        """Tokens that were sampled, if there are log-probs."""
        count = len(tokens)
        self.tokens.append(np.asarray(tokens, np.int32))
        self._sampled.append(np.full(count, logprobs is not None))
        self.logprobs.append(np.zeros(count, np.float32) if logprobs is None else np.asarray(logprobs, np.float32))
        self._versions.append(np.full(count, version, np.int32))
        self._kept.append(kept)
        self.length += count

    def add_routes(self, routes: np.ndarray | None, version: int) -> None:
        """Take the routes of the tokens so far, which the engine returned with the weights of a version."""
        self._routes = complete_routes(self._routes, routes, has_moved=version != self._routed_by)
        self._routed_by = version

    def as_branch(self, prompt: np.ndarray) -> Branch:
        """The branch, up to its last sampled token; of one without, the prompt's last token is taken for a response."""
        tokens, sampled = self.joined, np.concatenate(self._sampled)
        stop = int(np.flatnonzero(sampled)[-1]) + 1 if sampled.any() else len(tokens)
        shared = tokens[: len(prompt)] == prompt[: len(tokens)]
        num_prompt_tokens = min(len(shared) if shared.all() else int(shared.argmin()), stop - 1)
        return Branch(
            tokens[:stop],
            sampled[:stop],
            np.concatenate(self.logprobs)[:stop],
            np.concatenate(self._versions)[:stop],
            num_prompt_tokens,
            self._join_kept(stop),
            self._place_rewards(stop),
            routes=None if self._routes is None else self._routes[:stop],
        )

    def _join_kept(self, stop: int) -> KeptSets | None:
        joined = KeptSets.join_known([*zip(self._kept, map(len, self.tokens), strict=True)])
        return joined and joined.cut(stop)

    def _place_rewards(self, stop: int) -> np.ndarray | None:
        if not self.rewards:
            return None
        rewards = np.zeros(stop, np.float32)
        rewards[[*self.rewards]] = [*self.rewards.values()]
        return rewards
