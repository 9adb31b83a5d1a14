# SPDX-License-Identifier: Apache-2.0
"""A Python interpreter of its own that serves messages: `python -m MODULE FILE_DESCRIPTOR`.

It is no fork, because forking a process in which gloo, vLLM or CUDA have threads is not safe. It does not inherit the
variables of the environment that look like secrets.
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

# Words of a name, between underscores: WANDB_API_KEY and HF_TOKEN, but not TOKENIZERS_PARALLELISM.
_SECRET = re.compile(r"(?:^|_)(?:KEY|APIKEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)(?:_|$)", re.IGNORECASE)


class ChildProcess:
    """The parent's end of one child.

    Args:
        module: what the child runs; it finds its end of the connection as `sys.argv[1]`.
        secrets: variables of the environment that it gets although they look like secrets.
    """

    def __init__(self, module: str, secrets: Collection[str] = ()) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            # In a session of its own, so that what the child starts can be killed with it.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env={**environment_without_secrets(secrets), "PYTHONPATH": os.pathsep.join(sys.path)},
            )
        self._connection = Connection(ours.detach())

    def ask(self, message: Any, seconds: float) -> Any:
        """Send and wait; raises TimeoutError, or EOFError or OSError when the process is gone."""
        self._connection.send(message)
        if not self._connection.poll(seconds):
            raise TimeoutError
        return self._connection.recv()

    def tell(self, message: Any, descriptor: int | None = None) -> None:
        """Send, with a file descriptor for the process if one is given; raises OSError when the process is gone."""
        self._connection.send(message)
        if descriptor is not None:
            send_handle(self._connection, descriptor, self._process.pid)

    def dismiss(self) -> None:
        """Ask the process to leave; an idle one does so at once."""
        with contextlib.suppress(OSError):
            self._connection.send(None)

    def end(self, grace: float) -> int:
        """Wait `grace` seconds for the end of the process, then kill it and what it started; its exit code."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(max(grace, 0.0))
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        return self._process.wait()


def environment_without_secrets(kept: Collection[str] = ()) -> dict[str, str]:
    """The environment but for the variables whose names say key, token, secret or password; `kept` ones stay."""
    return {name: value for name, value in os.environ.items() if name in kept or not _SECRET.search(name)}
