# SPDX-License-Identifier: Apache-2.0
"""Serve sandboxes of this machine over HTTP, for `agents.sandbox.kind: http://HOST:PORT` (docs/agents.md).

    python tools/serve_sandboxes.py --kind docker --port 8100

It has no password: keep it in a private network. A sandbox that gets no command for --idle-minutes is ended, such as
those of a killed run.
"""

from __future__ import annotations

import argparse
import base64
import json
import threading
import time
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from megatron_rl.agents.sandbox import Sandbox, check_sandbox, start_sandbox
from megatron_rl.config.sections import SandboxConfig


class SandboxServer(ThreadingHTTPServer):
    """A server whose sandboxes have one kind."""

    def __init__(self, address: tuple[str, int], config: SandboxConfig, idle_seconds: float) -> None:
        super().__init__(address, _Handler)
        self._config, self._idle_seconds = config, idle_seconds
        self._boxes: dict[str, tuple[Sandbox, float]] = {}  # each with the time of its last use

    def start(self, limits: dict[str, Any]) -> dict[str, Any]:
        """Start a sandbox with a client's limits and image."""
        name, image = limits.pop("id"), limits.pop("image") or self._config.image
        self._boxes[name] = start_sandbox(replace(self._config, image=image, **limits)), time.monotonic()
        return {}

    def run(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        """Run a command (KeyError if there is no such sandbox)."""
        box = self._boxes[name][0]
        self._boxes[name] = box, time.monotonic() + body["seconds"]
        result = box.run(body["command"], base64.b64decode(body["stdin"]), body["seconds"], body["most"])
        return {"code": result.code, "why": result.why, "output": base64.b64encode(result.output).decode()}

    def end(self, name: str) -> dict[str, Any]:
        """End a sandbox, if it is there."""
        box, _ = self._boxes.pop(name, (None, 0.0))
        if box is not None:
            threading.Thread(target=box.close).start()
        return {}

    def service_actions(self) -> None:
        """End the sandboxes that are no longer used; called about twice a second."""
        oldest = time.monotonic() - self._idle_seconds
        for name in [name for name, (_, used) in self._boxes.items() if used < oldest]:
            self.end(name)

    def server_close(self) -> None:
        """End all sandboxes, and the server."""
        super().server_close()
        for name in [*self._boxes]:
            self.end(name)


class _Handler(BaseHTTPRequestHandler):
    server: SandboxServer

    def do_POST(self) -> None:
        """Start a sandbox, or run a command in one."""
        match self.path.strip("/").split("/"):
            case ["sandboxes"]:
                self._answer(self.server.start)
            case ["sandboxes", name, "run"]:
                self._answer(lambda body: self.server.run(name, body))
            case _:
                self.send_error(404)

    def do_DELETE(self) -> None:
        """End a sandbox."""
        self._answer(lambda _: self.server.end(self.path.rpartition("/")[2]))

    def _answer(self, act: Any) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
        try:
            text = json.dumps(act(body)).encode()
        except KeyError:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


def main() -> None:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", default="local", choices=("local", "docker", "podman"), help="of the sandboxes")
    parser.add_argument("--image", help="for clients that name none")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8100)
    parser.add_argument("--idle-minutes", type=float, default=60.0)
    arguments = parser.parse_args()
    config = SandboxConfig(kind=arguments.kind, image=arguments.image)
    for note in check_sandbox(config) if config.kind == "local" or config.image else []:
        print(note)
    server = SandboxServer((arguments.host, arguments.port), config, 60 * arguments.idle_minutes)
    print(f"sandboxes on http://{arguments.host}:{server.server_address[1]}", flush=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        thread.join()
    except KeyboardInterrupt:
        server.shutdown()
    finally:
        server.server_close()


if __name__ == "__main__":
    main()
