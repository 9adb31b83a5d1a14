# SPDX-License-Identifier: Apache-2.0
"""SIGTERM and SIGUSR1 as a wish: the program learns of it at its next safe point, all ranks at the same one."""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
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
        self.signal, self._told = 0, False
        self._previous, self._wakeup, self._previous_wakeup = {}, None, -1
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._note) for number in STOP_SIGNALS}
            # Python runs `_note` when the main thread comes back from C++, which may be never: a collective without
            # its peer. The interpreter writes the number of the signal here at once.
            self._wakeup = socket.socketpair()
            for end in self._wakeup:
                end.setblocking(False)
            self._previous_wakeup = signal.set_wakeup_fd(self._wakeup[1].fileno(), warn_on_full_buffer=False)
        else:  # Ray Train runs a rank in a thread
            log.info("signals are not caught: the program does not run in the main thread")

    @property
    def is_here(self) -> bool:
        """True if this rank has received a signal; may be asked by another thread while the main thread waits."""
        if not self.signal and self._wakeup is not None:
            with contextlib.suppress(BlockingIOError):
                self._told = self._told or any(number in STOP_SIGNALS for number in self._wakeup[0].recv(4096))
        return self._told or bool(self.signal)

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
        if self._wakeup is not None:
            signal.set_wakeup_fd(self._previous_wakeup)
            for end in self._wakeup:
                end.close()
        self._previous, self._wakeup = {}, None
