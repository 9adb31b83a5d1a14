# SPDX-License-Identifier: Apache-2.0
"""Settings of engines that are servers, `rollout.server`, and what must hold for them (docs/servers.md)."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.config.declaring import option

SERVER_ENGINES = ("vllm_server", "openai", "sglang")


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Engines in processes of their own, which are asked over HTTP."""

    endpoints: list[str] = option(
        [],
        "Servers that run already, such as http://host:8000, one per engine; default: the first rank of each engine "
        "starts one on its own node and watches it (vllm_server, sglang).",
    )
    directory: str | None = option(
        None,
        "Directory in which servers find the weights, one per engine below it, under the same path on their nodes; "
        "default: in the memory of the node (/dev/shm), for servers that are started here.",
    )
    on_update: str | None = option(
        None,
        "Engine openai: what makes the server load new weights, a URL that is posted to, or a command; {directory} in "
        "it is where they are.",
    )
    python: str | None = option(
        None, "Interpreter that servers are started with; default: this one (sglang has an environment of its own)."
    )
    restarts: int = option(3, "Failures of a server in a row, without a response between them, that end the run.")
    start_seconds: float = option(600.0, "Time for a server to start, or to come back.", "seconds")
    silent_seconds: float = option(600.0, "A server that says nothing for so long has failed.", "seconds")
