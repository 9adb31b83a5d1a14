# SPDX-License-Identifier: Apache-2.0
"""Responses that are unfinished or not learned from: what is carried to the next phase, and into checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megatron_rl.engines.protocol import Sampled
from megatron_rl.types import KeptSets, complete_routes

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
        routes: of the prompt's tokens and these, of each those that were known first: with them its successor was
            sampled. None: the engine tells none.
    """

    tokens: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    finish_reason: str
    kept: KeptSets | None = None
    routes: np.ndarray | None = None

    @property
    def is_finished(self) -> bool:
        """True if no token follows."""
        return self.finish_reason != "interrupted"

    def extend(self, sampled: Sampled, version: int) -> Response:
        """With what an engine sampled after it with the weights of a version."""
        parts = (self.kept, len(self.tokens)), (sampled.kept, len(sampled.tokens))
        has_kept = any(kept is not None for kept, _ in parts)
        return Response(
            np.concatenate([self.tokens, np.asarray(sampled.tokens, np.int32)]),
            np.concatenate([self.logprobs, np.asarray(sampled.logprobs, np.float32)]),
            np.concatenate([self.versions, np.full(len(sampled.tokens), version, np.int32)]),
            sampled.finish_reason,
            KeptSets.join([kept or KeptSets.whole(length) for kept, length in parts]) if has_kept else None,
            complete_routes(self.routes, sampled.routes),
        )


NOTHING = Response(np.empty(0, np.int32), np.empty(0, np.float32), np.empty(0, np.int32), "interrupted")


def pack_responses(responses: Mapping[int, Response]) -> dict[str, torch.Tensor]:
    """Responses by number as a few tensors, which `unpack_responses` reads."""
    parts = list(responses.values())
    kept = [part.kept or KeptSets.whole(len(part.tokens)) for part in parts]
    sets = {}
    if any(part.kept is not None for part in parts):
        joined = KeptSets.join(kept)
        sets = {"kept_ids": torch.from_numpy(joined.ids), "kept_counts": torch.from_numpy(joined.counts)}
    return (
        sets
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
    routes: list[np.ndarray | None] = [None] * len(tokens)
    if "routes" in tensors:
        lengths = tensors["route_lengths"].numpy()
        parts = np.split(tensors["routes"].numpy(), np.cumsum(lengths)[:-1])
        routes = [part if length else None for part, length in zip(parts, lengths.tolist(), strict=True)]
    responses = map(Response, tokens, logprobs, versions, reasons, kept, routes)
    return dict(zip(tensors["keys"].tolist(), responses, strict=True))


def _pack_routes(responses: Sequence[Response]) -> dict[str, torch.Tensor]:
    """One after another, with the number of tokens of each; {}: there are none."""
    found = [response.routes for response in responses if response.routes is not None]
    if not found:
        return {}
    lengths = [0 if response.routes is None else len(response.routes) for response in responses]
    return {"routes": torch.from_numpy(np.concatenate(found)), "route_lengths": torch.tensor(lengths)}
