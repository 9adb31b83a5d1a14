# SPDX-License-Identifier: Apache-2.0
"""The things that travel: rollouts, groups of them, and the error a user can cause.

Shape legend, used in every docstring of the package (Megatron brackets, sharding by division):

    t   packed tokens of one microbatch        h   hidden size          v   vocabulary
    s   sequence length, b sequences           n   attention heads      np  heads per TP rank
    ng  KV groups                              d   head dimension

Alignment, stated once: ``logprobs[i]`` scores ``tokens[i]``; position 0 of each sequence is masked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np


class UserError(ValueError):
    """Something the user can fix; entry points print it without a traceback and exit with 2.

    Args:
        found: what was found, with the numbers, in one sentence.
        source: where it came from (config key, file and line, command line, rank).
        expected: what would have been accepted.
        hint: what to change.
    """

    def __init__(self, found: str, *, source: str, expected: str, hint: str) -> None:
        self.found, self.source, self.expected, self.hint = found, source, expected, hint
        super().__init__(f"{found}\n  source:   {source}\n  expected: {expected}\n  hint:     {hint}")

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel between ranks by pickle without losing the parts."""
        parts = dict(source=self.source, expected=self.expected, hint=self.hint)
        return _rebuild_user_error, (self.found, parts)


class UserErrors(UserError):
    """Several errors of the user at once, numbered in the text; each part is that of all of them.

    Args:
        errors: in their order, at least one.
    """

    def __init__(self, errors: Sequence[UserError]) -> None:
        parts = {part: "; ".join(getattr(error, part) for error in errors) for part in ("source", "expected", "hint")}
        super().__init__("; ".join(error.found for error in errors), **parts)
        self.errors = tuple(errors)
        numbered = [f"\n{number}. {error}".replace("\n ", "\n    ") for number, error in enumerate(errors, 1)]
        self.args = (f"{len(errors)} mistakes" + "".join(numbered),)

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel between ranks by pickle without losing the parts."""
        return UserErrors, (self.errors,)


class Preempted(Exception):
    """A signal asked the run to stop; what it continues from is on the disk. Entry points exit with EXIT_PREEMPTED."""


# Exit codes of a rank beside 0; see docs/checkpoints.md.
EXIT_FAILED = 1  # an unexpected exception, no memory, a peer that is gone
EXIT_USER_ERROR = 2
EXIT_PREEMPTED = 75  # EX_TEMPFAIL of sysexits.h: start the same command again
EXIT_INTERRUPTED = 130  # Ctrl-C
EXIT_STALLED = 70  # the watchdog ended a rank that was stuck


def text_of(error: BaseException) -> str:
    """The message of an exception; classes of the user's may fail to make one."""
    try:
        return str(error)
    except Exception as caught:
        return f"(its message cannot be printed: {type(caught).__name__})"


def mark_reported(error: BaseException, code: int) -> None:
    """Note that the message of an exception is on the console: who catches it prints nothing and exits with `code`."""
    vars(error)["reported_code"] = code


def reported_code(error: BaseException) -> int | None:
    """The exit code of an exception that has been reported; None: it has not."""
    return getattr(error, "reported_code", None)


def _rebuild_user_error(found: str, parts: dict[str, str]) -> UserError:
    return UserError(found, **parts)


FAILED = ("timeout", "error")  # how episodes end that their environment has failed
SERVICE_FAILURES = "service_failures"  # the reward component that counts services without an answer


def has_reward(finish_reason: str, components: Mapping[str, Any]) -> bool:
    """Return False if the episode of a rollout has failed, or a service that scores it: its reward means nothing."""
    return finish_reason not in FAILED and not components.get(SERVICE_FAILURES)


@dataclass(frozen=True)
class Prompt:
    """One task for the policy.

    Attributes:
        prompt_id: index in the data file after filtering; stable across runs and layouts.
        tokens: [s] int32 prompt token ids.
        text: the prompt as text (chat template applied).
        ground_truth: what the reward rule compares with: a text, or a list or dict for a reward function that takes it.
        data_source: name of the data set (picks the scorer with reward.rule=by_data_source).
        extra_info: further columns, handed to the reward function.
        row: all columns but the prompt's.
        messages: the prompt as chat messages, before the template; None: it is plain text.
        tools: that the template describes, in the form of OpenAI's API.
    """

    prompt_id: int
    tokens: np.ndarray
    text: str
    ground_truth: Any
    data_source: str = "default"
    extra_info: dict[str, Any] = field(default_factory=dict)
    row: dict[str, Any] = field(default_factory=dict)
    messages: list[dict[str, Any]] | None = None
    tools: list[Any] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class KeptSets:
    """The tokens among which each of some tokens was drawn, where sampling was truncated (top-p and its relatives).

    Attributes:
        ids: [k] int32 token ids, set after set.
        counts: [s] int32, ids of each set; 0: the whole vocabulary.
    """

    ids: np.ndarray
    counts: np.ndarray

    @classmethod
    def whole(cls, length: int) -> KeptSets:
        """So many tokens that were drawn from the whole vocabulary, or not drawn at all."""
        return cls(np.empty(0, np.int32), np.zeros(length, np.int32))

    @classmethod
    def join(cls, parts: Sequence[KeptSets]) -> KeptSets:
        """One after another; at least one."""
        return cls(np.concatenate([part.ids for part in parts]), np.concatenate([part.counts for part in parts]))

    @classmethod
    def join_known(cls, parts: Sequence[tuple[KeptSets | None, int]]) -> KeptSets | None:
        """The sets of parts with their numbers of tokens; one without sets has the whole vocabulary. None if all do."""
        if all(kept is None for kept, _ in parts):
            return None
        return cls.join([kept or cls.whole(length) for kept, length in parts])

    def split(self) -> list[KeptSets]:
        """The set of each token by itself."""
        stops = np.cumsum(self.counts)
        return [
            KeptSets(ids, self.counts[i : i + 1]) for i, ids in enumerate(np.split(self.ids, stops)[: len(self.counts)])
        ]

    def cut(self, length: int) -> KeptSets:
        """The sets of the first tokens."""
        counts = self.counts[:length]
        return KeptSets(self.ids[: counts.sum()], counts)


@dataclass(frozen=True)
class RouteShape:
    """What routers decide for a token: the numbers of `choices` experts in each of `layers`, out of `experts`.

    Routes are arrays [s, layers, choices] of `dtype`; its largest number stands for a choice that is not known.
    """

    layers: int
    choices: int
    experts: int

    @property
    def dtype(self) -> type[np.integer[Any]]:
        """The smallest that torch and numpy share."""
        return np.uint8 if self.experts < 256 else np.int16

    @classmethod
    def of(cls, routes: np.ndarray) -> RouteShape:
        """Of routes that are there; how many experts there are is not known then, only a bound."""
        return cls(routes.shape[1], routes.shape[2], int(np.iinfo(routes.dtype).max))

    def unknown(self, length: int) -> np.ndarray:
        """The routes of so many tokens of which nothing is known."""
        return np.full((length, self.layers, self.choices), np.iinfo(self.dtype).max, self.dtype)


def complete_routes(
    first: np.ndarray | None, later: np.ndarray | None, *, has_moved: bool = False
) -> np.ndarray | None:
    """Routes of a sequence from two forwards, [s, layers, choices]: of each token those that were known first.

    Args:
        first: of its beginning; None: nothing is known.
        later: of all of it; None: nothing is known.
        has_moved: the later forward had other weights, and its routes count where they are known: what it sampled
            follows from them.
    """
    if first is None or later is None:
        return first if later is None else later
    begin, unknown = later[: len(first)], np.iinfo(first.dtype).max
    known = np.where(begin == unknown, first, begin) if has_moved else np.where(first == unknown, begin, first)
    return np.concatenate([known, later[len(first) :]])


@dataclass(frozen=True, slots=True)
class Branch:
    """One context window of a rollout, exactly as the engine saw it.

    Attributes:
        tokens: [s] int32, prompt, sampled tokens and observations.
        sampled: [s] bool, the policy sampled this token here; these are the tokens that are learned.
        logprobs: [s] float32, what the engine reported where `sampled`; 0 elsewhere.
        versions: [s] int32, optimizer steps behind the weights that sampled the token; without meaning elsewhere.
        num_prompt_tokens: length of the task's prompt, with which the branch begins.
        kept: [s] what each token was drawn from; None: all of them from the whole vocabulary.
        rewards: [s] float32, of turns, at the last token of each; None: no turn has a reward of its own.
        routes: [s, layers, choices] the experts that the engine chose for each token (`RouteShape`); None: not known.
    """

    tokens: np.ndarray
    sampled: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    num_prompt_tokens: int
    kept: KeptSets | None = None
    rewards: np.ndarray | None = None
    routes: np.ndarray | None = None

    @classmethod
    def of_response(
        cls,
        tokens: np.ndarray,
        num_prompt_tokens: int,
        logprobs: np.ndarray | None = None,
        versions: int | np.ndarray = 0,
        kept: KeptSets | None = None,
    ) -> Branch:
        """A prompt and the response to it.

        Args:
            tokens: [s] prompt and response.
            num_prompt_tokens: how many of them are the prompt's.
            logprobs: [s - num_prompt_tokens] of the response; None: unknown, zeros.
            versions: of the whole response, or [s - num_prompt_tokens] of its tokens.
            kept: [s - num_prompt_tokens] what they were drawn from; None: the whole vocabulary.
        """
        length = len(tokens)
        if logprobs is None:
            padded = np.broadcast_to(np.float32(0), length)  # without memory of its own
        else:
            padded = np.concatenate([np.zeros(num_prompt_tokens, np.float32), np.asarray(logprobs, np.float32)])
        return cls(
            np.asarray(tokens, np.int32),
            np.arange(length) >= num_prompt_tokens,
            padded,
            np.broadcast_to(np.int32(versions), length)
            if np.ndim(versions) == 0
            else np.concatenate([np.zeros(num_prompt_tokens, np.int32), versions]),
            num_prompt_tokens,
            kept and KeptSets.join([KeptSets.whole(num_prompt_tokens), kept]),
        )

    @property
    def num_loss_tokens(self) -> int:
        """Tokens that enter the loss: sampled ones, but for one at position 0, which nothing predicts."""
        return int(np.count_nonzero(self.sampled[1:]))


@dataclass(frozen=True, slots=True)
class Turn:
    """One exchange: the tokens [start, stop) of a branch, sampled in answer to one request."""

    branch: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Rollout:
    """One episode on one prompt; a plain response is one branch with one turn.

    Attributes:
        prompt: the task.
        sample_index: position inside the group, 0 <= sample_index < group_size.
        branches: its context windows.
        turns: its exchanges, in their order.
        finish_reason: "stop" (EOS or stop token) or "length" (cut at the limit); with an environment also "turns" (cut
            at their limit), "timeout" or "error" (it failed: the rollout is not learned from).
        response: the last turn as text.
        reward: filled in by scoring.
        reward_components: name -> value, logged one by one.
        failure: of its environment, or of the service that scores it: what it said; "": there is none.
    """

    prompt: Prompt
    sample_index: int
    branches: list[Branch]
    turns: list[Turn]
    finish_reason: str
    response: str = ""
    reward: float = float("nan")
    reward_components: dict[str, float] = field(default_factory=dict)
    failure: str = ""

    @classmethod
    def from_response(
        cls,
        prompt: Prompt,
        sample_index: int,
        response_tokens: np.ndarray,
        logprobs: np.ndarray | None,
        finish_reason: str,
        versions: int | np.ndarray = 0,
        kept: KeptSets | None = None,
    ) -> Rollout:
        """One response to a prompt; arguments as in `Branch.of_response`."""
        tokens, start = np.concatenate([prompt.tokens, response_tokens]), len(prompt.tokens)
        branch = Branch.of_response(tokens, start, logprobs, versions, kept)
        return cls(prompt, sample_index, [branch], [Turn(0, start, len(tokens))], finish_reason)

    def with_routes(self, routes: np.ndarray | None) -> Rollout:
        """The same response with the routes of its tokens, prompt and response."""
        return replace(self, branches=[replace(self.branches[0], routes=routes)])

    @property
    def response_tokens(self) -> np.ndarray:
        """[s] int32, all sampled tokens in their order (the EOS token included where it was sampled)."""
        return np.concatenate([branch.tokens[branch.sampled] for branch in self.branches])

    @property
    def answer_tokens(self) -> np.ndarray:
        """[s] int32, the tokens of the last turn."""
        if not self.turns:
            return np.empty(0, np.int32)
        turn = self.turns[-1]
        return self.branches[turn.branch].tokens[turn.start : turn.stop]

    @property
    def rollout_logprobs(self) -> np.ndarray:
        """[s] float32, what the engine reported for `response_tokens`."""
        return np.concatenate([branch.logprobs[branch.sampled] for branch in self.branches])

    @property
    def versions(self) -> np.ndarray:
        """[s] int32, optimizer steps behind the weights that sampled each of `response_tokens`."""
        return np.concatenate([branch.versions[branch.sampled] for branch in self.branches])

    @property
    def policy_version(self) -> int:
        """Optimizer steps behind the newest weights that sampled a token of it."""
        return int(self.versions.max(initial=0))


@dataclass(frozen=True)
class LossLedger:
    """Global counts of one minibatch: what its loss must have divided by.

    Attributes:
        mode: `algorithm.loss_agg_mode`.
        num_tokens: tokens in the loss.
        num_sequences: responses, those without a token in the loss included.
        denominator: what the sum over tokens (for seq-mean-token-mean: the sum of sequence means) is divided by.
        weight_sum: sum of `loss_weights` over the tokens in the loss.
        metrics: of the aggregation, by name.
    """

    mode: str
    num_tokens: int
    num_sequences: int
    denominator: float
    weight_sum: float
    metrics: dict[str, float] = field(default_factory=dict)
