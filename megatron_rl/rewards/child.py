# SPDX-License-Identifier: Apache-2.0
"""A child process that runs a Python module and serves messages: `python -m MODULE FILE_DESCRIPTOR`.

It is a new interpreter, because forking a process with gloo, vLLM or CUDA threads is unsafe, and does not inherit
environment variables that look like secrets.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Collection
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from typing import Any

# Matches WANDB_API_KEY and HF_TOKEN, but not TOKENIZERS_PARALLELISM.
_SECRET = re.compile(r"(?:^|_)(?:KEY|APIKEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)(?:_|$)", re.IGNORECASE)


class ChildProcess:
    """The parent's end of one child process.

    Args:
        module: run with the connection's file descriptor as `sys.argv[1]`.
        secrets: secret-looking environment variables to pass on.
    """

    def __init__(self, module: str, secrets: Collection[str] = ()) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            kept = {name: text for name, text in os.environ.items() if name in secrets or not _SECRET.search(name)}
            # A new session, so that the child's own children can be killed with it.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env={**kept, "PYTHONPATH": os.pathsep.join(sys.path)},
            )
        self._connection = Connection(ours.detach())

    def ask(self, message: Any, seconds: float) -> Any:
        """Send a message and wait for the reply (TimeoutError; EOFError or OSError if the process is gone)."""
        self._connection.send(message)
        if not self._connection.poll(seconds):
            raise TimeoutError
        return self._connection.recv()

    def tell(self, message: Any, descriptor: int | None = None) -> None:
        """Send a message and optionally a file descriptor (OSError if the process is gone)."""
        self._connection.send(message)
        if descriptor is not None:
            send_handle(self._connection, descriptor, self._process.pid)

    def dismiss(self) -> None:
        """Request the process to exit."""
        with contextlib.suppress(OSError):
            self._connection.send(None)

    def end(self, grace: float) -> int:
        """Wait up to `grace` seconds, kill the process and its children, and return the exit code."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(max(grace, 0.0))
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        return self._process.wait()
