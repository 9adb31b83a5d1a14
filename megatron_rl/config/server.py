# SPDX-License-Identifier: Apache-2.0
"""Settings of engines that are servers, `rollout.server`, and what must hold for them (docs/servers.md)."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.config.declaring import option


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Engines in processes of their own, which are asked over HTTP."""

    endpoints: list[str] = option(
        [],
        "Running servers, such as http://host:8000, one per engine; default: the first rank of each engine starts "
        "and watches one (vllm_server, sglang).",
    )
    directory: str | None = option(
        None,
        "Directory of the weights for servers, the same path on all nodes; default: /dev/shm, for servers that are"
        " started here.",
    )
    on_update: str | None = option(
        None,
        "Engine openai: URL to post to, or command, that makes the server load new weights; {directory} is where "
        "they are.",
    )
    python: str | None = option(
        None, "Interpreter of the servers; default: this one (sglang has an environment of its own)."
    )
    restarts: int = option(3, "Failures of a server in a row that end the run.", ge=0)
    silent_seconds: float = option(
        600.0, "A server that says nothing for so long, or takes longer to start, has failed.", "seconds", gt=0
    )
