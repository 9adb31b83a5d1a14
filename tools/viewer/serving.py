# SPDX-License-Identifier: Apache-2.0
"""Server of the rollout page: the page, and pages of rollouts of a `RolloutStore`."""

from __future__ import annotations

import json
from urllib.parse import parse_qs

from megatron_rl.observability.status_server import PageServer, read_template
from megatron_rl.types import UserError
from tools.viewer.rollout_page import PARTS
from tools.viewer.rollout_store import RolloutStore, Scope


def serve_store(store: RolloutStore, host: str, port: int) -> PageServer:
    """Serve the rollouts until `stop`.

    Raises:
        UserError: the address cannot be served.
    """
    title = ", ".join(part.name for part in store.parts)
    page = read_template(PARTS, title, connect="'self'").replace("{{data}}", "").encode()

    def answer(file: str, query: str) -> tuple[str, bytes] | None:
        if file == "":
            return "text/html; charset=utf-8", page
        if file == "count.json":
            return "application/json", json.dumps(store.num_rollouts).encode()
        if file != "rollouts.json":
            return None
        try:
            found = store.read(read_scope(query))
        except UserError as error:
            found = {"error": str(error)}
        text = json.dumps(found, separators=(",", ":"), allow_nan=False)
        return "application/json", text.encode()

    try:
        server = PageServer(host, port, answer)
    except (OSError, OverflowError) as error:
        raise UserError(
            f"{host}:{port} cannot be served: {error}",
            source="--host, --port",
            expected="a free port of this machine",
            hint="choose another one, or 0 for any free port",
        ) from error
    server.serve()
    return server


def read_scope(query: str) -> Scope:
    """Parse the query of a request; numbers that are none are as if left out."""
    said = {name: values[-1] for name, values in parse_qs(query).items()}

    def number(name: str, otherwise: int) -> int:
        return int(said[name]) if said.get(name, "").isascii() and said.get(name, "").isdigit() else otherwise

    part = number("part", -1)
    return Scope(
        part=None if part < 0 else part,
        first_step=number("first", 0),
        last_step=number("last", 1 << 62),
        text=said.get("text", ""),
        is_regex=said.get("regex") == "on",
        source=said.get("source", ""),
        tool=said.get("tool", ""),
        prompt=said.get("prompt", ""),
        place=(number("file", 0), number("byte", 0)),
    )
