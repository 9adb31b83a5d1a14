# SPDX-License-Identifier: Apache-2.0
"""A server that a rank starts and watches; it never outlives the rank, and nothing that it has started outlives it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

# What torchrun says to a rank; a server that hears it takes itself for one.
_OF_THE_LAUNCHER = ("RANK", "WORLD_SIZE", "MASTER_", "LOCAL_", "GROUP_", "ROLE_", "TORCHELASTIC_", "TORCH_NCCL_")
# Runs beside the server: the end of its input is the end of the rank, however that came. It kills the whole session.
_WATCH = (
    "import os, signal, subprocess, sys, threading\n"
    "def follow():\n"
    "    sys.stdin.buffer.read()\n"
    "    os.killpg(0, signal.SIGKILL)\n"
    "threading.Thread(target=follow, daemon=True).start()\n"
    "code = subprocess.call(sys.argv[1:], stdin=subprocess.DEVNULL)\n"
    "print('the server has ended with exit code', code, flush=True)\n"
    "os.killpg(0, signal.SIGKILL)\n"
)
_LAST_BYTES = 2000


class ServerProcess:
    """One server.

    Args:
        command: that starts it.
        environment: variables beside the rank's.
        log_file: what it says is appended to it.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log_file: Path) -> None:
        self._log_file = log_file
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(_OF_THE_LAUNCHER)}
        with open(log_file, "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _WATCH, *command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=inherited | dict(environment),
            )

    @property
    def has_ended(self) -> bool:
        """True if it runs no more."""
        return self._process.poll() is not None

    def read_log(self) -> str:
        """The last of what it said."""
        with open(self._log_file, "rb") as log:
            log.seek(max(0, self._log_file.stat().st_size - _LAST_BYTES))
            return log.read().decode(errors="replace")

    def end(self) -> None:
        """Kill it and what it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()


def find_free_port() -> int:
    """A port of the loopback interface that nobody has."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
