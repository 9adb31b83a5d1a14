# SPDX-License-Identifier: Apache-2.0
"""SIGTERM and SIGUSR1 as a wish: the program learns of it at its next safe point, all ranks at the same one."""

from __future__ import annotations

import logging
import signal
import threading
from types import FrameType

import torch
import torch.distributed as dist

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopRequest:
    """Catches the signals from its making to `close`; a signal to any rank counts for all.

    Args:
        log: told if they cannot be caught.

    Attributes:
        signal: that this rank has received; 0: none.
    """

    def __init__(self, log: logging.Logger) -> None:
        self.signal = 0
        self._previous = {}
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._note) for number in STOP_SIGNALS}
        else:  # Ray Train runs a rank in a thread
            log.info("signals are not caught: the program does not run in the main thread")

    @property
    def is_here(self) -> bool:
        """True if this rank has received a signal."""
        return bool(self.signal)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self.signal:
            self.signal = number

    def agreed(self, group: dist.ProcessGroup) -> str | None:
        """Name of the signal that some rank has received, the same on all ranks; collective over `group`."""
        received = torch.tensor(self.signal)
        dist.all_reduce(received, dist.ReduceOp.MAX, group=group)
        return signal.Signals(int(received)).name if received else None

    def close(self) -> None:
        """Give the signals back."""
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous = {}
