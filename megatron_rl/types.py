# SPDX-License-Identifier: Apache-2.0
"""Shared data types: prompts, rollouts, user errors, and exit codes.

Shape legend of the package (Megatron brackets, sharding by division):

    t   packed tokens of one microbatch        h   hidden size          v   vocabulary
    s   sequence length, b sequences           n   attention heads      np  heads per TP rank
    ng  KV groups                              d   head dimension

Alignment: ``logprobs[i]`` scores ``tokens[i]``; position 0 of each sequence is masked.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

# Nonzero exit codes of a rank; see docs/checkpoints.md.
EXIT_FAILED = 1  # unexpected exception, out of memory, lost peer, or BadStep
EXIT_USER_ERROR = 2
EXIT_PREEMPTED = 75  # EX_TEMPFAIL of sysexits.h: run the same command again
EXIT_INTERRUPTED = 130  # Ctrl-C
EXIT_STALLED = 70  # the watchdog ended a stuck rank


class UserError(ValueError):
    """An error that the user can fix; entry points print it without a traceback and exit with 2.

    Args:
        found: one sentence with the numbers.
        source: config key, file and line, command line, or rank.
    """

    exit_code = EXIT_USER_ERROR

    def __init__(self, found: str, *, source: str, expected: str, hint: str) -> None:
        self.found, self.source, self.expected, self.hint = found, source, expected, hint
        super().__init__(f"{found}\n  source:   {source}\n  expected: {expected}\n  hint:     {hint}")

    def _render_traceback_(self) -> list[str]:
        """Return what a notebook shows instead of a traceback."""
        return [f"{type(self).__name__}: {self}"]

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle with all parts, to be sent between ranks."""
        return partial(UserError, source=self.source, expected=self.expected, hint=self.hint), (self.found,)


class BadStep(UserError):
    """A step with nothing to learn from, which ends the run; `metrics` has the metrics that it counted."""

    exit_code = EXIT_FAILED

    def __init__(self, found: str, *, source: str, expected: str, hint: str, metrics: Mapping[str, float] = {}) -> None:
        super().__init__(found, source=source, expected=expected, hint=hint)
        self.metrics = metrics


class UserErrors(UserError):
    """Several user errors as one, numbered in the text; `found`, `source`, `expected` and `hint` are joined."""

    def __init__(self, errors: Sequence[UserError]) -> None:
        parts = {part: "; ".join(getattr(error, part) for error in errors) for part in ("source", "expected", "hint")}
        super().__init__("; ".join(error.found for error in errors), **parts)
        self.errors = tuple(errors)
        numbered = [f"\n{number}. {error}".replace("\n ", "\n    ") for number, error in enumerate(errors, 1)]
        self.args = (f"{len(errors)} mistakes" + "".join(numbered),)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle with all errors."""
        return UserErrors, (self.errors,)


class Preempted(Exception):
    """A stop by a signal, after the run's state was saved; entry points exit with EXIT_PREEMPTED."""


@dataclass(frozen=True)
class Deferred:
    """Callable that stands for a function or class of this package and imports its module only when called."""

    module: str
    name: str

    def __call__(self, *args: Any) -> Any:
        """Import the function or class, call it with `args`, and return its result."""
        return getattr(importlib.import_module(self.module), self.name)(*args)


def text_of(error: BaseException) -> str:
    """Return the message of an exception, even if its `__str__` raises."""
    try:
        return str(error)
    except Exception as caught:
        return f"(its message cannot be printed: {type(caught).__name__})"


def mark_reported(error: BaseException, code: int) -> None:
    """Mark an exception as printed: handlers only exit with `code`."""
    vars(error)["reported_code"] = code


def reported_code(error: BaseException) -> int | None:
    """Return the exit code of an exception marked by `mark_reported`, else `None`."""
    return getattr(error, "reported_code", None)


FAILED = ("timeout", "error")  # finish reasons of episodes whose environment failed
SERVICE_FAILURES = "service_failures"  # reward component that counts failed service calls


def has_reward(finish_reason: str, components: Mapping[str, Any]) -> bool:
    """Return whether a rollout's reward is valid: neither its episode nor its reward service failed."""
    return finish_reason not in FAILED and not components.get(SERVICE_FAILURES)


@dataclass(frozen=True)
class Prompt:
    """One task for the policy.

    Attributes:
        prompt_id: row index over all data files, before filtering.
        tokens: [s] int32.
        text: with the chat template applied.
        ground_truth: reference for the reward: a text, or a list or dict if the reward function takes it.
        data_source: selects the scorer with reward.function=by_data_source.
        extra_info: further columns for the reward function.
        row: all columns except the prompt's.
        messages: before the template, or `None` for plain text.
        tools: in OpenAI format.
        source: name of its source in `data.sources`; empty without them.
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
    source: str = ""


@dataclass(frozen=True, slots=True)
class KeptSets:
    """For each token, the set from which truncated sampling (top-p and its relatives) drew it.

    Attributes:
        ids: [k] int32 token ids, concatenated sets.
        counts: [s] int32 set sizes; 0 means the whole vocabulary.
    """

    ids: np.ndarray
    counts: np.ndarray

    @classmethod
    def whole(cls, length: int) -> KeptSets:
        """Return whole-vocabulary sets for `length` tokens."""
        return cls(np.empty(0, np.int32), np.zeros(length, np.int32))

    @classmethod
    def join(cls, parts: Sequence[KeptSets]) -> KeptSets:
        """Concatenate the token sets that sampling kept, of at least one part."""
        return cls(np.concatenate([part.ids for part in parts]), np.concatenate([part.counts for part in parts]))

    @classmethod
    def join_known(cls, parts: Sequence[tuple[KeptSets | None, int]]) -> KeptSets | None:
        """Concatenate (token sets, number of tokens); `None`, as a part or the result, is the whole vocabulary."""
        if all(kept is None for kept, _ in parts):
            return None
        return cls.join([kept or cls.whole(length) for kept, length in parts])

    def split(self) -> list[KeptSets]:
        """Return the set that sampling kept for each token, one object each."""
        pieces = np.split(self.ids, np.cumsum(self.counts))[:-1]
        return [KeptSets(ids, self.counts[i : i + 1]) for i, ids in enumerate(pieces)]

    def cut(self, length: int) -> KeptSets:
        """Return the token sets that sampling kept for the first `length` tokens."""
        counts = self.counts[:length]
        return KeptSets(self.ids[: counts.sum()], counts)


@dataclass(frozen=True)
class RouteShape:
    """The shape of MoE routes: per token, `choices` of `experts` in each of `layers`.

    Routes are arrays [s, layers, choices] of `dtype`; its maximum marks an unknown choice.
    """

    layers: int
    choices: int
    experts: int

    @property
    def dtype(self) -> type[np.integer[Any]]:
        """Return the smallest sufficient dtype that torch and numpy share."""
        return np.uint8 if self.experts < 256 else np.int16

    @classmethod
    def of(cls, routes: np.ndarray) -> RouteShape:
        """Infer the shape from an array of routes; `experts` is the maximum of its dtype, only an upper bound."""
        return cls(routes.shape[1], routes.shape[2], int(np.iinfo(routes.dtype).max))

    def unknown(self, length: int) -> np.ndarray:
        """Return an array that marks the routes of `length` tokens as unknown."""
        return np.full((length, self.layers, self.choices), np.iinfo(self.dtype).max, self.dtype)


def complete_routes(
    first: np.ndarray | None, later: np.ndarray | None, *, has_moved: bool = False
) -> np.ndarray | None:
    """Merge the routes (`RouteShape`) of a sequence's two forward passes; `None` for a pass without routes.

    Args:
        first: of a prefix; takes precedence.
        later: of the whole sequence.
        has_moved: whether weights changed between the passes; then `later` takes precedence, as tokens sampled after
            it depend on its routes.
    """
    if first is None or later is None:
        return first if later is None else later
    begin, unknown = later[: len(first)], np.iinfo(first.dtype).max
    known = np.where(begin == unknown, first, begin) if has_moved else np.where(first == unknown, begin, first)
    return np.concatenate([known, later[len(first) :]])


@dataclass(frozen=True, slots=True)
class Branch:
    """One context window of a rollout, exactly as the engine processed it.

    Attributes:
        tokens: [s] int32, prompt, sampled tokens and observations.
        sampled: [s] bool, sampled by the policy in this branch; only these are trained on.
        logprobs: [s] float32 behavior log-probs if `sampled`, else 0.
        versions: [s] int32 policy version (optimizer steps) if `sampled`, else undefined.
        num_prompt_tokens: length of the task's prompt at the start.
        kept: [s] token sets that truncated sampling kept; `None` means the whole vocabulary.
        rewards: [s] float32 turn rewards, at the last token of each turn.
        states: [s] int64 hash of the state that each turn answers, at its first token, else 0; `None`: no episode.
        routes: [s, layers, choices] experts chosen by the engine (`RouteShape`).
    """

    tokens: np.ndarray
    sampled: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    num_prompt_tokens: int
    kept: KeptSets | None = None
    rewards: np.ndarray | None = None
    routes: np.ndarray | None = None
    states: np.ndarray | None = None

    @classmethod
    def of_response(
        cls,
        tokens: np.ndarray,
        num_prompt_tokens: int,
        logprobs: np.ndarray | None = None,
        versions: int | np.ndarray = 0,
        kept: KeptSets | None = None,
    ) -> Branch:
        """Build a branch from a prompt and its response.

        Args:
            tokens: [s] prompt and response.
            logprobs: [s - num_prompt_tokens]; zeros if `None`.
            versions: policy version of the response, or [s - num_prompt_tokens].
            kept: [s - num_prompt_tokens], as in `Branch`.
        """
        length = len(tokens)
        if logprobs is None:
            padded = np.broadcast_to(np.float32(0), length)  # a view without its own memory
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
        """Return the number of sampled tokens, except at position 0, which has no prediction."""
        return int(np.count_nonzero(self.sampled[1:]))


@dataclass(frozen=True, slots=True)
class Turn:
    """One reply of the policy: tokens [start, stop) of `Rollout.branches[branch]`."""

    branch: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Rollout:
    """One episode on a prompt: turns (replies) in branches (context windows); a plain response has one of each.

    Attributes:
        sample_index: position in the group, 0 <= sample_index < group_size.
        finish_reason: "stop" (EOS or stop token) or "length" (token limit); with an environment also "turns" (turn
            limit), "timeout" or "error" (failed, excluded from training).
        response: text of the last turn.
        reward: NaN until scored.
        reward_components: name -> value, logged individually.
        failure: error of the environment or reward service, or "".
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
        """Build a rollout from one response; see `Branch.of_response`."""
        tokens, start = np.concatenate([prompt.tokens, response_tokens]), len(prompt.tokens)
        branch = Branch.of_response(tokens, start, logprobs, versions, kept)
        return cls(prompt, sample_index, [branch], [Turn(0, start, len(tokens))], finish_reason)

    @property
    def response_tokens(self) -> np.ndarray:
        """Return all sampled tokens, including EOS, in order, [s] int32."""
        return np.concatenate([branch.tokens[branch.sampled] for branch in self.branches])

    @property
    def answer_tokens(self) -> np.ndarray:
        """Return the tokens of the last turn, [s] int32."""
        if not self.turns:
            return np.empty(0, np.int32)
        turn = self.turns[-1]
        return self.branches[turn.branch].tokens[turn.start : turn.stop]

    @property
    def rollout_logprobs(self) -> np.ndarray:
        """Return the behavior log-probs of the sampled tokens, branch after branch, [s] float32."""
        return np.concatenate([branch.logprobs[branch.sampled] for branch in self.branches])

    @property
    def versions(self) -> np.ndarray:
        """Return the policy version of each sampled token, branch after branch, [s] int32."""
        return np.concatenate([branch.versions[branch.sampled] for branch in self.branches])

    @property
    def policy_version(self) -> int:
        """Return the newest policy version that sampled a token."""
        return int(self.versions.max(initial=0))


@dataclass(frozen=True)
class LossLedger:
    """Global counts of one minibatch, to check the loss's divisor.

    Attributes:
        num_tokens: tokens in the loss.
        num_sequences: responses, including those without loss tokens.
        denominator: divisor of the sum over tokens (for seq-mean-token-mean, of sequence means).
        weight_sum: sum of `loss_weights` over tokens in the loss.
        metrics: metrics of the loss aggregation, by name.
    """

    mode: str
    num_tokens: int
    num_sequences: int
    denominator: float
    weight_sum: float
    metrics: dict[str, float] = field(default_factory=dict)
