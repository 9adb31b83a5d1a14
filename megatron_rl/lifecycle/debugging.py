# SPDX-License-Identifier: Apache-2.0
"""The rank that waits for a debugger: `trainer.debug_rank`.

Only that rank imports debugpy. The others wait for it in their collectives, as long as it takes.
"""

from __future__ import annotations

import importlib
import os
import socket
import sys

from megatron_rl.config.schema import RunConfig

_PORT = 5678  # that IDEs propose
_LOCALHOST = "127.0.0.1"
_PATIENCE_SECONDS = 7 * 24 * 3600.0


def wait_for_debugger(config: RunConfig) -> RunConfig:
    """Let the rank that is debugged wait until an IDE attaches to it, before the ranks meet.

    Returns:
        The config, with a limit for collectives that lets the other ranks wait.
    """
    if config.trainer.debug_rank is None:
        return config
    if int(os.environ.get("RANK", "0")) == config.trainer.debug_rank:
        debugpy = importlib.import_module("debugpy")
        debugpy.configure(subProcess=False)  # an engine's processes would wait for an IDE, too
        _, port = debugpy.listen((_LOCALHOST, _PORT if _is_free(_PORT) else 0))
        sys.stderr.write(
            f"rank {config.trainer.debug_rank} waits for a debugger at {_LOCALHOST}:{port} of {socket.gethostname()}, "
            "and the other ranks wait for it (docs/extending.md#debugging-a-rank)\n"
        )
        sys.stderr.flush()
        debugpy.wait_for_client()
    return config.with_sections({"trainer": {"collective_timeout": _PATIENCE_SECONDS}})


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((_LOCALHOST, port))
        except OSError:
            return False
    return True
