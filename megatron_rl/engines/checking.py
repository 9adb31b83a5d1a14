# SPDX-License-Identifier: Apache-2.0
"""Is what an engine returned what it was asked for? Checked where responses enter the program, before they travel."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from megatron_rl.engines.protocol import Sampled
from megatron_rl.types import RouteShape, UserError


def check_sampled(
    responses: Sequence[Sampled],
    requests: Sequence[str],
    *,
    max_tokens: int,
    vocab_size: int,
    engine: str,
    is_truncated: bool = False,
    has_whole: bool = False,
) -> None:
    """Compare the responses of one engine with its requests.

    Args:
        responses: what it returned, in the order of the requests.
        requests: what each request is called in a message.
        max_tokens: longest response.
        vocab_size: token ids are below.
        engine: that made them, as a message calls it.
        is_truncated: tokens were drawn from a part of the vocabulary, which a response must tell.
        has_whole: some of them from the whole vocabulary.

    Raises:
        UserError: their number, a length, a token id, a log-prob or a kept set is not what it must be; names the first
            such one.
    """
    if len(responses) != len(requests):
        raise UserError(
            f"{len(responses)} responses to {len(requests)} requests",
            source=engine,
            expected="one response per request, in their order",
            hint="this is a fault of the engine: check its version against requirements.txt, or set rollout.engine=hf",
        )
    for response, request in zip(responses, requests, strict=True):
        num_tokens, num_logprobs = len(response.tokens), len(response.logprobs)
        source = f"{engine}, {request}"
        if num_tokens != num_logprobs or np.ndim(response.tokens) != 1:
            raise UserError(
                f"a response of {num_tokens} tokens with {num_logprobs} log-probs",
                source=source,
                expected="one log-prob per sampled token, both [s]",
                hint="an engine of your own must return the log-prob of each sampled token, the stop token included; "
                "otherwise set rollout.engine=hf and compare",
            )
        if not 1 <= num_tokens <= max_tokens:
            raise UserError(
                f"a response of {num_tokens} tokens",
                source=source,
                expected=f"1 to {max_tokens} (data.max_response_length)",
                hint="the engine must stop at sampling.max_tokens, and needs room for a token behind the longest "
                "prompt: see data.max_prompt_length and data.max_response_length",
            )
        if is_truncated and not _has_kept_sets(response, has_whole):
            raise UserError(
                "a response whose tokens are not in the sets that they were drawn from",
                source=source,
                expected="Sampled.kept with a set for each token, which has the token",
                hint="an engine of your own must return these sets (engines/truncation.py makes them); otherwise set "
                "rollout.top_p=1.0, top_k=-1, min_p=0 and min_tokens=0",
            )
    _check_values(responses, requests, vocab_size, engine)


def check_routes(responses: Iterable[Sampled], engine: str, shape: RouteShape) -> None:
    """Compare the routes of the responses of one engine with those that its model has.

    Args:
        responses: each with a token.
        engine: that made them, as a message calls it.
        shape: of the routes.

    Raises:
        UserError: they are not there, have another shape or type, or name experts that there are not.
    """
    for response in responses:
        if not _has_routes(response, shape):
            raise UserError(
                "a response without the experts of its tokens",
                source=engine,
                expected=f"Sampled.routes, [prompt and response, {shape.layers}, {shape.choices}] "
                f"{shape.dtype.__name__}",
                hint="set rollout.engine=vllm, hf or megatron, or actor.router_replay=trainer",
            )


def _has_routes(response: Sampled, shape: RouteShape) -> bool:
    routes = response.routes
    if routes is None or routes.dtype != shape.dtype or routes.shape[1:] != (shape.layers, shape.choices):
        return False
    is_unknown = routes == np.iinfo(shape.dtype).max
    return len(routes) > len(response.tokens) and bool(((routes < shape.experts) | is_unknown).all())


def _has_kept_sets(response: Sampled, has_whole: bool) -> bool:
    kept = response.kept
    if kept is None or len(kept.counts) != len(response.tokens) or kept.counts.sum() != len(kept.ids):
        return False
    rows = np.repeat(np.arange(len(kept.counts)), kept.counts)
    has_token = np.bincount(rows[kept.ids == response.tokens[rows]], minlength=len(kept.counts)) > 0
    is_free = has_whole if response.inserted is None else has_whole | response.inserted
    return bool((has_token | (is_free & (kept.counts == 0))).all())


def _check_values(responses: Sequence[Sampled], requests: Sequence[str], vocab_size: int, engine: str) -> None:
    if not responses:
        return
    owners = np.repeat(np.arange(len(responses)), [len(g.tokens) for g in responses])
    tokens = np.concatenate([g.tokens for g in responses])
    logprobs = np.concatenate([g.logprobs for g in responses])
    for bad in np.flatnonzero((tokens < 0) | (tokens >= vocab_size))[:1].tolist():
        raise UserError(
            f"token id {tokens[bad]} in a response",
            source=f"{engine}, {requests[int(owners[bad])]}",
            expected=f"0 to {vocab_size - 1}, the vocabulary of model.path",
            hint="model.path and model.tokenizer may belong to different models; an engine must not sample the rows "
            "that pad its vocabulary",
        )
    for bad in np.flatnonzero(~np.isfinite(logprobs))[:1].tolist():
        raise UserError(
            f"log-prob {logprobs[bad]} of a sampled token",
            source=f"{engine}, {requests[int(owners[bad])]}",
            expected="finite log-probs",
            hint="the engine's weights or activations have overflowed: set hybrid.verify=full to rule out its weights, "
            "lower actor.lr if this comes after some steps, or set model.dtype=float32",
        )
