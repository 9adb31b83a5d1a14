# SPDX-License-Identifier: Apache-2.0
"""Checks of engine responses, on the engine's ranks."""

from __future__ import annotations

import numpy as np

from megatron_rl.engines.protocol import Request, Sampled
from megatron_rl.types import RouteShape, UserError


def check_sampled(
    response: Sampled, request: Request, *, vocab_size: int, source: str, route_shape: RouteShape | None = None
) -> None:
    """Check a response against its request.

    Args:
        source: engine and request, for errors.
        route_shape: shape of the expert choices (routes) that a response must have, if any.

    Raises:
        UserError: invalid length, token id, log-prob, routes, or kept set (the tokens that truncated sampling kept).
    """
    num_tokens, num_logprobs, max_tokens = len(response.tokens), len(response.logprobs), request.sampling.max_tokens
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
    if request.sampling.is_truncated:
        from megatron_rl.engines.truncation import check_kept_sets

        check_kept_sets(response, not request.sampling.keeps_likely, source)
    _check_values(response, vocab_size, source)
    if route_shape is not None and not _has_routes(response, route_shape):
        layers, choices, dtype = route_shape.layers, route_shape.choices, route_shape.dtype.__name__
        raise UserError(
            "a response without the experts of its tokens",
            source=source,
            expected=f"Sampled.routes, [prompt and response, {layers}, {choices}] {dtype}",
            hint="set rollout.engine=vllm, hf or megatron, or actor.router_replay=trainer",
        )


def _check_values(response: Sampled, vocab_size: int, source: str) -> None:
    tokens, logprobs = np.asarray(response.tokens), np.asarray(response.logprobs)
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        raise UserError(
            f"token id {tokens[(tokens < 0) | (tokens >= vocab_size)][0]} in a response",
            source=source,
            expected=f"0 to {vocab_size - 1}, the vocabulary of model.path",
            hint="model.path and model.tokenizer may belong to different models; an engine must not sample the rows "
            "that pad its vocabulary",
        )
    if not np.isfinite(logprobs).all():
        raise UserError(
            f"log-prob {logprobs[~np.isfinite(logprobs)][0]} of a sampled token",
            source=source,
            expected="finite log-probs",
            hint="the engine's weights or activations have overflowed: set hybrid.verify=full to rule out its weights, "
            "lower actor.lr if this comes after some steps, or set model.dtype=float32",
        )


def miscounted(num_responses: int, num_requests: int, source: str) -> UserError:
    """Build the error for a number of responses that differs from the number of requests."""
    return UserError(
        f"{num_responses} responses to {num_requests} requests",
        source=source,
        expected="one response per request, in their order",
        hint="this is a fault of the engine: check its version against requirements.txt, or set rollout.engine=hf",
    )


def _has_routes(response: Sampled, shape: RouteShape) -> bool:
    routes = response.routes
    if routes is None or routes.dtype != shape.dtype or routes.shape[1:] != (shape.layers, shape.choices):
        return False
    is_unknown = routes == np.iinfo(shape.dtype).max
    return len(routes) > len(response.tokens) and bool(((routes < shape.experts) | is_unknown).all())
