# SPDX-License-Identifier: Apache-2.0
"""What the first rank of an engine tells its other ranks before each step, and how it gets there.

The ranks of an engine stay equal only if they see the same requests between the same two steps.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_rl.engines.protocol import Request
from megatron_rl.parallel.collectives import align_group_names, make_group
from megatron_rl.parallel.layout import EngineRanks
from megatron_rl.parallel.pairs import Pair, open_star


@dataclass(frozen=True)
class ControlMessage:
    """What the ranks of an engine do before its next step, in this order.

    Attributes:
        interrupts: keys of requests to end as they are.
        weights: the version of weights that are ready to be received.
        requests: to add; in the order of (turn, key), whatever their order here.
        stop: no message follows: what runs is run to its end.
    """

    interrupts: Sequence[int] = ()
    weights: int | None = None
    requests: Sequence[Request] = ()
    stop: bool = False

    def is_empty(self) -> bool:
        """True if there is nothing to do."""
        return not self.interrupts and self.weights is None and not self.requests and not self.stop


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
