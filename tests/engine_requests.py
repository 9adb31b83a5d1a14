# SPDX-License-Identifier: Apache-2.0
"""Batches of requests to an engine, without a rollout around them."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_rl.engines.protocol import Request, RolloutEngine, Sampled
from megatron_rl.rollout.serving import ControlMessage, serve


def generate(engine: RolloutEngine, requests: Sequence[Request]) -> list[Sampled]:
    """Generate results for a batch of requests, in their order; collective over the engine's ranks."""
    found: dict[int, Sampled] = {}
    message = ControlMessage(requests=requests, stop=True)
    error = serve(engine, lambda is_idle: message, lambda sampled: found.update({sampled.key: sampled}))
    if error is not None:
        raise error
    return [found[request.key] for request in requests if request.key in found]
