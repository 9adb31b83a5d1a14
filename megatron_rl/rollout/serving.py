# SPDX-License-Identifier: Apache-2.0
"""The stepping loop of an engine. Its first rank broadcasts a control message before each step.

The ranks of an engine stay in sync only if they receive the same requests before the same step.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megatron_rl.engines.protocol import Request, RolloutEngine, Sampled
from megatron_rl.parallel.collectives import align_group_names, make_group
from megatron_rl.parallel.layout import EngineRanks

if TYPE_CHECKING:
    from megatron_rl.parallel.pairs import Pair


@dataclass(frozen=True)
class ControlMessage:
    """Actions of an engine's ranks before the next step, in field order.

    Attributes:
        interrupts: keys of requests to abort, keeping their partial results.
        requests: requests to add, in the order of (turn, key).
        stop: no message follows; running requests are completed.
    """

    interrupts: Sequence[int] = ()
    requests: Sequence[Request] = ()
    stop: bool = False


class Channel:
    """Broadcast channel from an engine's first rank to its other ranks: 8 bytes for an empty message.

    Args:
        group: CPU group of the engine's ranks; `None` if a single rank, or every rank by itself, creates the messages.
        star: faster connections between the first and each other rank.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, star: Sequence[Pair] = ()) -> None:
        self._group, self._star = group, star
        self.is_first = group is None or group.rank() == 0

    def share(self, message: ControlMessage | None) -> ControlMessage:
        """Return the first rank's message; collective over the engine."""
        if self._group is None:
            assert message is not None
            return message
        payload = torch.empty(0, dtype=torch.uint8)
        if message is not None and (message.interrupts or message.requests or message.stop):
            payload = torch.frombuffer(bytearray(pickle.dumps(message)), dtype=torch.uint8)
        size = torch.tensor([len(payload)])
        self._bring(size, self._group)
        if not size:
            return ControlMessage()
        if message is None:
            payload = torch.empty(int(size), dtype=torch.uint8)
        self._bring(payload, self._group)
        return message or pickle.loads(payload.numpy().tobytes())

    def _bring(self, values: torch.Tensor, group: dist.ProcessGroup) -> None:
        if not self._star or not self._star[0].fits(values.nbytes):
            dist.broadcast(values, dist.get_global_rank(group, 0), group=group)
            return
        for pair in self._star:
            if self.is_first:
                pair.send(values)
            else:
                pair.receive(values)


def open_channel(engines: EngineRanks, rank: int, timeout: timedelta | None = None) -> Channel:
    """Open the channel of this rank's engine; collective over the job."""
    if engines.width == 1:
        return Channel()
    align_group_names()
    from megatron_rl.parallel.pairs import open_star

    index, _ = engines.places.get(rank, (-1, 0))
    group = None if index < 0 else make_group(engines.of[index], timeout)
    return Channel(group, open_star(group, timeout) if group is not None else ())


def serve(
    engine: RolloutEngine,
    take: Callable[[bool], ControlMessage],
    on_sampled: Callable[[Sampled], None],
    channel: Channel | None = None,
    on_requests: Callable[[Sequence[Request]], None] | None = None,
) -> Exception | None:
    """Step an engine until a stop message and completion of all requests; collective over the engine's ranks.

    Args:
        take: called before each step on the first rank (without a channel on every rank, with equal results), with
            whether the engine is idle.
        on_sampled: called on every rank with each finished or interrupted result.
        on_requests: called on every rank before requests are added.

    Returns:
        The first exception of `take` or `on_sampled`, after which neither is called. All requests are interrupted, or
        completed if a stop message came first.

    Raises:
        Exception: an error of the engine; all requests are interrupted.
    """
    running: set[int] = set()
    errors: list[Exception] = []
    channel = channel or Channel()

    def take_message() -> ControlMessage:
        if not errors:
            try:
                return take(not engine.has_requests())
            except Exception as error:
                errors.append(error)
        return ControlMessage(interrupts=sorted(running), stop=True)  # after an error

    def deliver(sampled: Sequence[Sampled]) -> None:
        for one in sampled:
            running.discard(one.key)
            if not errors:
                try:
                    on_sampled(one)
                except Exception as error:  # deferred, because other ranks would wait
                    errors.append(error)

    try:
        is_last = False
        while not is_last or engine.has_requests():
            if not is_last:
                message = channel.share(take_message() if channel.is_first else None)
                is_last = message.stop
                deliver(engine.interrupt(message.interrupts) if message.interrupts else [])
                if on_requests is not None:
                    on_requests(message.requests)
                if message.requests:  # in an order independent of their arrival
                    engine.add(sorted(message.requests, key=lambda request: (request.turn, request.key)))
                    running.update(request.key for request in message.requests)
            deliver(engine.step() if engine.has_requests() else [])
    except BaseException:
        engine.interrupt(sorted(running))
        raise
    return errors[0] if errors else None


def generate(engine: RolloutEngine, requests: Sequence[Request]) -> list[Sampled]:
    """Generate results for a batch of requests, in their order; collective over the engine's ranks."""
    found: dict[int, Sampled] = {}
    message = ControlMessage(requests=requests, stop=True)
    error = serve(engine, lambda is_idle: message, lambda sampled: found.update({sampled.key: sampled}))
    if error is not None:
        raise error
    return [found[request.key] for request in requests if request.key in found]
