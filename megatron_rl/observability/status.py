# SPDX-License-Identifier: Apache-2.0
"""The status page of a run: a small read-only web server on rank 0.

`/` is one self-contained page that asks for `/status.json` every few seconds; there is nothing else. The server reads
no file that a request names, keeps its data in memory and runs in a thread of its own.
"""

from __future__ import annotations

import json
import logging
import math
import socketserver
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from megatron_rl.observability.metrics import NumberRecord, Sink, is_validation_accuracy
from megatron_rl.observability.page_template import read_template
from megatron_rl.observability.positions import Position
from megatron_rl.observability.tensorboard import shorten
from megatron_rl.types import UserError

_PARTS = Path(__file__).parent / "status_page"
_MOST_POINTS = 400  # of a curve in one answer
_LOOK_SECONDS = 1.0  # between two looks at the ranks, however many people watch
_SAMPLE_FIELDS = ("prompt", "response", "ground_truth", "reward", "finish_reason")
# Title of a chart -> which metrics are lines of it.
CHARTS: dict[str, Callable[[str], bool]] = {
    "reward": lambda key: key == "reward/mean",
    "loss": lambda key: key == "sft/loss",
    "validation accuracy": is_validation_accuracy,
    "seconds per step": lambda key: key in ("time/step", "time/rollout", "time/update"),
    "tokens per second": lambda key: key == "tokens/per_second",
    "KL to the reference": lambda key: key == "kl/mean",
    "entropy": lambda key: key == "policy/entropy",
}

Positions = Callable[[], Sequence[Position | None]]


class StatusPage(Sink):
    """Serves the page of one run until `close`.

    Args:
        name: of the run.
        host, port: where; port 0: any free one.
        now: what changes between two steps, asked for each answer.
        positions: the last heartbeat of each rank, None where there was none; empty where nobody watches the ranks.
        records: of the run so far, where it is resumed.

    Raises:
        UserError: the port is taken, or the host is not one of this machine.
    """

    def __init__(self, name: str, host: str, port: int, *, now: Callable[[], Mapping[str, Any]], positions: Positions,
                 records: Sequence[Mapping[str, float | None]] = ()) -> None:
        self._name, self._now, self._ranks = name, now, _Ranks(positions)
        self._curves: dict[str, dict[str, list[tuple[int, float]]]] = {title: {} for title in CHARTS}
        self._samples: dict[str, Any] = {"step": None, "rows": []}
        for record in records:
            self._add(int(record["step"] or 0), record)
        try:
            self._server = _Server((host, port), self.status, read_template(_PARTS, name, connect="'self'"))
        except (OSError, OverflowError) as error:
            raise UserError(
                f"{host}:{port} cannot be served: {error}", source="observability.status_port",
                expected="a free port of observability.status_host",
                hint="choose another one, or 0 for any free port") from error
        threading.Thread(target=self._server.serve_forever, name="status page", daemon=True).start()

    @property
    def url(self) -> str:
        """Where it is served."""
        host, port = self._server.server_address[:2]
        return f"http://{host}:{port}/"

    def log(self, step: int, record: NumberRecord) -> None:
        """Go on with the curves."""
        self._add(step, record)

    def _add(self, step: int, record: Mapping[str, float | None]) -> None:
        for title, is_line in CHARTS.items():
            for key, value in record.items():
                if is_line(key) and value is not None and math.isfinite(value):
                    self._curves[title].setdefault(key, []).append((step, value))

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Show these rollouts instead of those of the step before."""
        if rows:
            self._samples = {"step": step, "rows": [
                {name: _text(row.get(name)) for name in _SAMPLE_FIELDS} for row in rows]}

    def status(self) -> dict[str, Any]:
        """What /status.json says."""
        charts = [
            {"title": title, "lines": [{"name": key, "points": thin(points)} for key, points in list(lines.items())]}
            for title, lines in self._curves.items() if lines]
        return {"run": self._name, **self._now(), "ranks": self._ranks.look(), "charts": charts,
                "samples": self._samples}

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()


@dataclass
class _Heard:
    looks: int
    since: float


class _Ranks:
    """Heartbeats, looked at once a second at most, and for how long each rank has been silent."""

    def __init__(self, positions: Positions) -> None:
        self._positions, self._lock = positions, threading.Lock()
        self._heard: dict[int, _Heard] = {}
        self._last: list[dict[str, Any]] = []
        self._looked_at = -math.inf

    def look(self) -> list[dict[str, Any]]:
        """One entry per rank."""
        with self._lock:
            now = time.monotonic()
            if now - self._looked_at >= _LOOK_SECONDS:
                self._last = [self._describe(rank, beat, now) for rank, beat in enumerate(self._positions())]
                self._looked_at = now
            return self._last

    def _describe(self, rank: int, beat: Position | None, now: float) -> dict[str, Any]:
        if beat is None:
            return {"rank": rank}
        heard = self._heard.setdefault(rank, _Heard(beat.looks, now))
        if heard.looks != beat.looks:
            heard.looks, heard.since = beat.looks, now
        return {"rank": rank, "step": beat.step, "phase": beat.phase, "operation": beat.operation,
                "seconds": round(beat.seconds, 1), "silent_seconds": round(now - heard.since, 1),
                "has_left": beat.is_closed}


def thin(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """At most _MOST_POINTS of the points, evenly spaced; the last one is among them."""
    stride = -(-len(points) // _MOST_POINTS)
    return list(points[::-1][::stride][::-1]) if points else []


def _text(value: Any) -> str:
    return shorten(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_port = False  # two runs must not share a port

    def __init__(self, address: tuple[str, int], status: Callable[[], Mapping[str, Any]], page: str) -> None:
        self.status, self.page = status, page.encode()
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        """Bind without asking the name service what this machine is called, as HTTPServer does."""
        socketserver.TCPServer.server_bind(self)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A reader that went away is nothing to tell on the console."""
        logging.getLogger(__name__).debug("status page: a request failed", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    """GET and HEAD of two paths; everything else is an error."""

    server: _Server
    server_version, sys_version = "megatron_rl", ""
    timeout = 10.0  # seconds that a connection may be silent

    def do_GET(self) -> None:
        """Answer with the page, the status, or 404."""
        path = self.path.partition("?")[0]
        if path == "/":
            self._send("text/html; charset=utf-8", self.server.page)
        elif path == "/status.json":
            self._send("application/json", json.dumps(self.server.status(), allow_nan=False).encode())
        else:
            self.send_error(404)

    do_HEAD = do_GET

    def _send(self, content_type: str, body: bytes) -> None:
        self.send_response(200)
        for name, value in (("Content-Type", content_type), ("Content-Length", str(len(body))),
                            ("Cache-Control", "no-store"), ("X-Content-Type-Options", "nosniff"),
                            ("X-Frame-Options", "DENY"), ("Referrer-Policy", "no-referrer")):
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing on the console."""
