# SPDX-License-Identifier: Apache-2.0
"""The key of a server: made for each run, and known to the server by its environment, which no list of processes shows.

vLLM's own `--api-key` leaves the routes open that load weights and run code, so `KeyGuard` (`--middleware`) guards all.
"""

from __future__ import annotations

import hmac
import os
import secrets
from collections.abc import Awaitable, Callable
from typing import Any

KEY_VARIABLE = "MEGATRON_RL_SERVER_KEY"
# Starts SGLang's server as `-m` does; it takes its key from nowhere else.
START_SGLANG = (
    "import os, runpy, sys; "
    f"sys.argv += ['--api-key', os.environ['{KEY_VARIABLE}']]; "
    "runpy.run_module('sglang.launch_server', run_name='__main__', alter_sys=True)"
)


def find_key(is_started: bool) -> str | None:
    """The key of the user's variable; else a new one for a server that is started here."""
    return os.environ.get(KEY_VARIABLE) or (secrets.token_urlsafe(32) if is_started else None)


class KeyGuard:
    """Answers 401 to every request without the key; an ASGI application around another one.

    Args:
        app: that is guarded.
    """

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app, self._expected = app, f"Bearer {os.environ[KEY_VARIABLE]}".encode()

    async def __call__(self, scope: dict[str, Any], receive: Callable[..., Any], send: Callable[..., Any]) -> None:
        """Pass a request on, or refuse it before its body is read."""
        given = dict(scope.get("headers") or ()).get(b"authorization", b"")
        if scope["type"] == "lifespan" or hmac.compare_digest(given, self._expected):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await send({"type": "http.response.start", "status": 401, "headers": [(b"connection", b"close")]})
            await send({"type": "http.response.body", "body": b'{"error": "no key, or a wrong one"}'})
