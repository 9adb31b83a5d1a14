# SPDX-License-Identifier: Apache-2.0
"""Samples that are unfinished or not learned from: what is carried to the next phase, and into checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from megatron_rl.engines.protocol import Request, Sampled
from megatron_rl.engines.sampling import SamplingConfig
from megatron_rl.engines.thinking import join_inserted, mark_inserted
from megatron_rl.rollout.order import Samples
from megatron_rl.types import KeptSets, Rollout, complete_routes

_REASONS = ("interrupted", "stop", "length")


@dataclass(frozen=True)
class Response:
    """A response so far.

    Attributes:
        tokens: [s] int32 sampled tokens.
        logprobs: [s] float32, what the engine reported for them.
        versions: [s] int32, optimizer steps behind the weights that sampled each.
        finish_reason: "stop", "length", or "interrupted" before either.
        kept: [s] what the tokens were drawn from; None: all of them from the whole vocabulary.
        routes: of the prompt's tokens and these, of each those of the last weights that read it, see
            `complete_routes`; None if the engine returns none.
        inserted: [s] bool, these tokens were put in; None: none were.
    """

    tokens: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    finish_reason: str
    kept: KeptSets | None = None
    routes: np.ndarray | None = None
    inserted: np.ndarray | None = None

    @property
    def is_finished(self) -> bool:
        """True if no token follows."""
        return self.finish_reason != "interrupted"

    def extend(self, sampled: Sampled, version: int) -> Response:
        """With what an engine sampled after it with the weights of a version."""
        return Response(
            np.concatenate([self.tokens, np.asarray(sampled.tokens, np.int32)]),
            np.concatenate([self.logprobs, np.asarray(sampled.logprobs, np.float32)]),
            np.concatenate([self.versions, np.full(len(sampled.tokens), version, np.int32)]),
            sampled.finish_reason,
            KeptSets.join_known([(self.kept, len(self.tokens)), (sampled.kept, len(sampled.tokens))]),
            complete_routes(self.routes, sampled.routes, has_moved=bool((self.versions[-1:] != version).any())),
            join_inserted(self, sampled),
        )


NOTHING = Response(np.empty(0, np.int32), np.empty(0, np.float32), np.empty(0, np.int32), "interrupted")


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


class Carried(Protocol):
    """The samples of one engine that have begun and were not taken, by key; the same calls on each of its ranks.

    Attributes:
        counts: sums that `describe` makes metrics of.
    """

    counts: dict[str, float]

    @property
    def keys(self) -> list[int]:
        """Of all of them."""
        ...

    @property
    def num_tokens(self) -> int:
        """Tokens that were sampled of them."""
        ...

    def begin(self, keys: Iterable[int]) -> None:
        """Samples have begun."""

    def find_unfinished(self) -> list[int]:
        """Keys of those to which something must be added; only the first rank knows."""
        ...

    def start(self, keys: Iterable[int], sampling: SamplingConfig) -> None:
        """A phase starts, in which these are continued."""

    def follow(self) -> Following:
        """What comes next, at first what continues those that were interrupted; on the first rank."""
        ...

    def ask(self, requests: Sequence[Request]) -> None:
        """Requests are added to the engine."""

    def hear(self, sampled: Sampled, version: int) -> bool:
        """The engine has sampled something with the weights of a version; whether the sample is finished by that."""
        ...

    def stop(self) -> None:
        """The phase is over."""

    def rollout(self, key: int) -> Rollout:
        """A sample as it is, the same object each time."""
        ...

    def drop(self, keys: Iterable[int]) -> None:
        """These are taken, as far as they are here."""

    def describe(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Metrics, from the sums of `counts` over all engines."""
        ...

    def pack(self) -> dict[str, torch.Tensor]:
        """What a checkpoint has of them."""
        ...

    def load(self, state: Mapping[str, torch.Tensor], is_mine: Callable[[int], bool]) -> None:
        """Add what `pack` made; only samples of some keys."""


class CarriedResponses:
    """Plain responses, each of one request that is interrupted and continued; see `Carried`.

    Args:
        samples: what they are of.
    """

    def __init__(self, samples: Samples) -> None:
        self._samples = samples
        self._held: dict[int, Response] = {}
        self._rollouts: dict[int, Rollout] = {}
        self._requests: list[Request] = []  # that the phase starts with
        self.counts: dict[str, float] = {}

    @property
    def keys(self) -> list[int]:
        """See `Carried.keys`."""
        return [*self._held]

    @property
    def num_tokens(self) -> int:
        """See `Carried.num_tokens`."""
        return sum(len(held.tokens) for held in self._held.values())

    def begin(self, keys: Iterable[int]) -> None:
        """See `Carried.begin`."""
        self._held |= dict.fromkeys(keys, NOTHING)

    def find_unfinished(self) -> list[int]:
        """See `Carried.find_unfinished`."""
        return [key for key, held in self._held.items() if not held.is_finished]

    def start(self, keys: Iterable[int], sampling: SamplingConfig) -> None:
        """See `Carried.start`."""
        parts = [(key, self._held[key].tokens) for key in sorted({*keys} & {*self.find_unfinished()})]
        self._requests = [
            request.continued(tokens, request.seed)
            for key, tokens in parts
            for request in [self._samples.request(key, sampling, position=len(tokens))]
        ]

    def follow(self) -> Following:
        """See `Carried.follow`."""
        requests, self._requests = self._requests, []
        return Following(requests, [], is_last=True)

    def ask(self, requests: Sequence[Request]) -> None:
        """See `Carried.ask`."""

    def hear(self, sampled: Sampled, version: int) -> bool:
        """See `Carried.hear`."""
        held = self._held.get(sampled.key)
        if held is None or np.shape(sampled.tokens) != np.shape(sampled.logprobs):
            return False  # what is wrong is said at the end
        held = self._held[sampled.key] = held.extend(sampled, version)
        return held.is_finished

    def stop(self) -> None:
        """See `Carried.stop`."""

    def rollout(self, key: int) -> Rollout:
        """See `Carried.rollout`."""
        if key not in self._rollouts:
            (prompt, sample), held = self._samples.sample_of(key), self._held[key]
            rollout = Rollout.from_response(
                prompt, sample, held.tokens, held.logprobs, held.finish_reason, held.versions, held.kept
            )
            self._rollouts[key] = rollout.with_routes(held.routes).with_inserted(held.inserted)
        return self._rollouts[key]

    def drop(self, keys: Iterable[int]) -> None:
        """See `Carried.drop`."""
        for key in keys:
            self._held.pop(key, None)
            self._rollouts.pop(key, None)

    def describe(self, sums: Mapping[str, float]) -> dict[str, float]:
        """See `Carried.describe`."""
        return {}

    def pack(self) -> dict[str, torch.Tensor]:
        """See `Carried.pack`."""
        return pack_responses(self._held)

    def load(self, state: Mapping[str, torch.Tensor], is_mine: Callable[[int], bool]) -> None:
        """See `Carried.load`."""
        self._held |= {key: response for key, response in unpack_responses(state).items() if is_mine(key)}


def pack_responses(responses: Mapping[int, Response]) -> dict[str, torch.Tensor]:
    """Responses by number as a few tensors, which `unpack_responses` reads."""
    parts = list(responses.values())
    kept = [part.kept or KeptSets.whole(len(part.tokens)) for part in parts]
    further = {}
    if any(part.kept is not None for part in parts):
        joined = KeptSets.join(kept)
        further = {"kept_ids": torch.from_numpy(joined.ids), "kept_counts": torch.from_numpy(joined.counts)}
    if any(part.inserted is not None for part in parts):
        further["inserted"] = torch.from_numpy(np.concatenate([mark_inserted(part) for part in parts]))
    return (
        further
        | _pack_routes(parts)
        | {
            "keys": torch.tensor(list(responses), dtype=torch.int64),
            "lengths": torch.tensor([len(part.tokens) for part in parts], dtype=torch.int64),
            "reasons": torch.tensor([_REASONS.index(part.finish_reason) for part in parts], dtype=torch.uint8),
            "tokens": torch.from_numpy(np.concatenate([NOTHING.tokens, *(part.tokens for part in parts)])),
            "logprobs": torch.from_numpy(np.concatenate([NOTHING.logprobs, *(part.logprobs for part in parts)])),
            "versions": torch.from_numpy(np.concatenate([NOTHING.versions, *(part.versions for part in parts)])),
        }
    )


def unpack_responses(tensors: Mapping[str, torch.Tensor]) -> dict[int, Response]:
    """The responses by number."""
    bounds = np.cumsum(tensors["lengths"].numpy())[:-1]
    tokens, logprobs, versions = (
        np.split(tensors[name].numpy(), bounds) for name in ("tokens", "logprobs", "versions")
    )
    reasons = [_REASONS[index] for index in tensors["reasons"].tolist()]
    kept: list[KeptSets | None] = [None] * len(tokens)
    if "kept_ids" in tensors:
        counts = np.split(tensors["kept_counts"].numpy(), bounds)
        ids = np.split(tensors["kept_ids"].numpy(), np.cumsum([part.sum() for part in counts])[:-1])
        kept = list(map(KeptSets, ids, counts))
    inserted: list[np.ndarray | None] = [None] * len(tokens)
    if "inserted" in tensors:
        inserted = list(np.split(tensors["inserted"].numpy(), bounds))
    routes: list[np.ndarray | None] = [None] * len(tokens)
    if "routes" in tensors:
        lengths = tensors["route_lengths"].numpy()
        parts = np.split(tensors["routes"].numpy(), np.cumsum(lengths)[:-1])
        routes = [part if length else None for part, length in zip(parts, lengths.tolist(), strict=True)]
    responses = map(Response, tokens, logprobs, versions, reasons, kept, routes, inserted)
    return dict(zip(tensors["keys"].tolist(), responses, strict=True))


def _pack_routes(responses: Sequence[Response]) -> dict[str, torch.Tensor]:
    """One after another, with the number of tokens of each; {}: there are none."""
    found = [response.routes for response in responses if response.routes is not None]
    if not found:
        return {}
    lengths = [0 if response.routes is None else len(response.routes) for response in responses]
    return {"routes": torch.from_numpy(np.concatenate(found)), "route_lengths": torch.tensor(lengths)}
