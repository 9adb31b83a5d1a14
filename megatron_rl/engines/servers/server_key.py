# SPDX-License-Identifier: Apache-2.0
"""The key of a run's servers: random, passed in the environment, which process lists do not show.

vLLM's own `--api-key` leaves endpoints open that load weights and run code; `KeyGuard` (`--middleware`) protects all.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Awaitable, Callable
from typing import Any

KEY_VARIABLE = "MEGATRON_RL_SERVER_KEY"


class KeyGuard:
    """An ASGI middleware that refuses requests without the key of the run's servers (401)."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app, self._expected = app, f"Bearer {os.environ[KEY_VARIABLE]}".encode()

    async def __call__(self, scope: dict[str, Any], receive: Callable[..., Any], send: Callable[..., Any]) -> None:
        """Forward a request, or refuse it before its body is read."""
        given = dict(scope.get("headers") or ()).get(b"authorization", b"")
        if scope["type"] == "lifespan" or hmac.compare_digest(given, self._expected):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await send({"type": "http.response.start", "status": 401, "headers": [(b"connection", b"close")]})
            await send({"type": "http.response.body", "body": b'{"error": "no key, or a wrong one"}'})
