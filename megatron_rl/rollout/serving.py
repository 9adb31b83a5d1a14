# SPDX-License-Identifier: Apache-2.0
"""The only place that steps an engine: a loop over control messages, and a batch of requests as one use of it.

The ranks of an engine stay equal only if they see the same requests between the same two steps: its first rank sends
them a message before each.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_rl.engines.protocol import Request, RolloutEngine, Sampled
from megatron_rl.parallel.collectives import align_group_names, make_group
from megatron_rl.parallel.layout import EngineRanks
from megatron_rl.parallel.pairs import Pair, open_star


@dataclass(frozen=True)
class ControlMessage:
    """Actions of the ranks of an engine before its next step, in this order.

    Attributes:
        interrupts: keys of requests to end as they are.
        requests: to add; in the order of (turn, key), whatever their order here.
        stop: no message follows: what runs is run to its end.
    """

    interrupts: Sequence[int] = ()
    requests: Sequence[Request] = ()
    stop: bool = False

    def is_empty(self) -> bool:
        """True if there is nothing to do."""
        return not self.interrupts and not self.requests and not self.stop


class Channel:
    """Brings the message of an engine's first rank to its other ranks: 8 bytes for an empty one.

    Args:
        group: of the engine's ranks, moves CPU tensors; its first rank is the engine's. None: an engine of one rank, or
            every rank has the same messages by itself.
        star: the first rank's pairs with the others, the others' with the first; none: the group moves everything.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, star: Sequence[Pair] = ()) -> None:
        self._group, self._star = group, star
        self.is_first = group is None or group.rank() == 0

    def share(self, message: ControlMessage | None) -> ControlMessage:
        """The message of the first rank; the others give None. Collective over the engine."""
        if self._group is None:
            assert message is not None
            return message
        payload = torch.empty(0, dtype=torch.uint8)
        if message is not None and not message.is_empty():
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
        if not self._star or not Pair.fits(values.nbytes):
            dist.broadcast(values, dist.get_global_rank(group, 0), group=group)
            return
        for pair in self._star:
            if self.is_first:
                pair.send(values)
            else:
                pair.receive(values)


def open_channel(engines: EngineRanks, rank: int, timeout: timedelta | None = None) -> Channel:
    """The channel of this rank's engine; of a rank without one, to itself. Collective over the job."""
    if engines.width == 1:
        return Channel()
    align_group_names()
    index, _ = engines.find(rank)
    group = None if index < 0 else make_group(engines.of[index], timeout)
    return Channel(group, open_star(group, timeout) if group is not None else ())


Listener = Callable[[Sampled], None]


def serve(
    engine: RolloutEngine,
    take: Callable[[bool], ControlMessage],
    on_sampled: Listener,
    channel: Channel | None = None,
    on_requests: Callable[[Sequence[Request]], None] | None = None,
) -> Exception | None:
    """Step an engine until a message says stop and everything is finished; the same call on every rank of it.

    Args:
        engine: this rank's share.
        take: called before each step on the first rank of the engine (without a channel on every rank, and must return
            the same there); its argument: whether to wait, as nothing runs.
        on_sampled: told of everything that is finished or interrupted, in the order of the engine, on every rank.
        channel: to the other ranks of the engine.
        on_requests: told of the requests of each message before they are added, on every rank.

    Returns:
        The first exception of `take` or `on_sampled`. The engine has not been left in the middle: raised by `take`, all
        requests are interrupted; so are they if `on_sampled` raised and "stop" had not been said. It is told of nothing
        afterwards.

    Raises:
        Exception: what the engine raised; no request is left in the engine.
    """
    loop = _Loop(engine, on_sampled)
    channel = channel or Channel()
    try:
        while True:
            message = channel.share(loop.take(take) if channel.is_first else None)
            loop.tell(engine.interrupt(message.interrupts) if message.interrupts else [])
            if on_requests is not None:
                on_requests(message.requests)
            loop.add(message.requests)
            loop.step()
            if message.stop:
                break
        while engine.has_requests():
            loop.step()
    except BaseException:
        engine.interrupt(sorted(loop.running))
        raise
    return loop.error


class _Loop:
    """Which requests run, and the first error of those who are called back."""

    def __init__(self, engine: RolloutEngine, on_sampled: Listener) -> None:
        self._engine, self._on_sampled = engine, on_sampled
        self.running: set[int] = set()
        self.error: Exception | None = None

    def take(self, take: Callable[[bool], ControlMessage]) -> ControlMessage:
        """The next message; the last one after an error."""
        if self.error is None:
            try:
                return take(not self._engine.has_requests())
            except Exception as error:
                self.error = error
        return ControlMessage(interrupts=sorted(self.running), stop=True)

    def add(self, requests: Sequence[Request]) -> None:
        """Add them in an order that does not depend on when they came."""
        if requests:
            self._engine.add(sorted(requests, key=lambda request: (request.turn, request.key)))
            self.running.update(request.key for request in requests)

    def step(self) -> None:
        """One step, if there is something to do."""
        if self._engine.has_requests():
            self.tell(self._engine.step())

    def tell(self, sampled: Sequence[Sampled]) -> None:
        """Hand on what is finished; an error must wait, or the other ranks of the engine would."""
        for one in sampled:
            self.running.discard(one.key)
            if self.error is None:
                try:
                    self._on_sampled(one)
                except Exception as error:
                    self.error = error


def close_batch(requests: Sequence[Request]) -> Callable[[bool], ControlMessage]:
    """What `serve` takes to run these requests and no others."""
    return lambda wait: ControlMessage(requests=requests, stop=True)


def generate(engine: RolloutEngine, requests: Sequence[Request]) -> list[Sampled]:
    """What an engine samples for a batch of requests, in their order; the same call on every rank of the engine.

    Requests to which it returns nothing are left out.
    """
    found: dict[int, Sampled] = {}
    error = serve(engine, close_batch(requests), lambda sampled: found.update({sampled.key: sampled}))
    if error is not None:
        raise error
    return [found[request.key] for request in requests if request.key in found]
