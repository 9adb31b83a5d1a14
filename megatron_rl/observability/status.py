# SPDX-License-Identifier: Apache-2.0
"""The status page of a run: a small read-only web server on rank 0, in threads of its own.

It serves one self-contained page, which polls `status.json`; no request can name a file on disk. A Host header must be
an own name or an address (against DNS rebinding), the path contains a secret that the run prints, and connections are
limited.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import html
import ipaddress
import json
import logging
import math
import re
import secrets
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_rl.observability.metrics import SAMPLE_FIELDS, Record, Sink, find_metric, replace_text, shorten, step_of
from megatron_rl.types import UserError

if TYPE_CHECKING:
    from megatron_rl.observability.failures import Position

_SCRIPTS = ("parts.js", "page.js")
STATUS_FILE = "status.html"
_PARTS = Path(__file__).parent / "status_page"
_UPLOT = _PARTS / "uplot"
_MOST_POINTS = 400  # of a curve in one response
_MOST_ALARMS = 20
_LOOK_SECONDS = 1.0  # between two reads of the heartbeats, for any number of viewers
_MOST_CONNECTIONS = 32
_CONNECTION_SECONDS = 30.0
# Titles of the charts, in the order of the page; `chart` of a metric names one of them.
CHARTS = (
    "reward", "reward components", "reward by source", "loss", "validation accuracy",
    "seconds per step", "tokens per second",
    "KL to the reference", "entropy", "tokens of all responses", "truncated responses, groups without signal",
    "gradient norm", "clipped tokens", "learning rate", "engine against trainer", "explained variance",
    "load of the busiest expert", "dead experts", "entropy of routers", "staleness", "busy engines",
)  # fmt: skip

_TAIL_BYTES = 1 << 16
# Time, level and text of a log line, or level and text of the report that ends a job.
_WARNING = re.compile(r"(?:([\d-]+ [\d:]+),\d+ rank\d+ (WARNING|ERROR|CRITICAL) \S+|(error)): (.*)")

_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
}
Positions = Callable[[], "Sequence[Position | None]"]
Documents = Mapping[str, Callable[[str], Mapping[str, Any]]]  # file name -> its content for the text after "?"


def check_address(host: str, port: int) -> None:
    """Check, before models are built, that the page can be served at an address of this machine (UserError)."""
    try:
        socket.create_server((host, port)).close()
    except (OSError, OverflowError) as error:
        raise _explain(host, port, error) from error


def _explain(host: str, port: int, error: Exception) -> UserError:
    return UserError(
        f"{host}:{port} cannot be served: {error}",
        source="observability.status_port",
        expected="a free port of observability.status_host",
        hint="choose another one, or 0 for any free port",
    )


class StatusPage(Sink):
    """Sink that serves the page of one run until `close`, under a secret path.

    Args:
        now: returns data that change between two steps; called for each response.
        positions: returns the last heartbeat of each rank; empty without a watchdog.
        records: earlier records of a resumed run, for the curves.
        file: gets the page with its data after each step and at the end, if any.

    Raises:
        UserError: the port is taken, or the host is not an address of this machine.
    """

    def __init__(
        self,
        name: str,
        host: str,
        port: int,
        *,
        now: Callable[[], Mapping[str, Any]],
        positions: Positions,
        records: Sequence[Record] = (),
        file: Path | None = None,
    ) -> None:
        self._name, self._now, self._ranks, self._file = name, now, _Ranks(positions), file
        self._curves: dict[str, dict[str, list[tuple[int, float]]]] = {title: {} for title in CHARTS}
        self._samples: dict[str, Any] = {"step": None, "rows": []}
        self._alarms: list[dict[str, Any]] = []
        for record in records:
            self._add(step_of(record), record)
        self._path = f"/{secrets.token_urlsafe(16)}/"
        self._page = read_template(_PARTS, name, connect="'self'")
        try:
            self._server = PageServer((host, port), self._path, self._page, {"status.json": lambda _: self.status()})
        except (OSError, OverflowError) as error:
            raise _explain(host, port, error) from error
        threading.Thread(target=self._server.serve_forever, name="status page", daemon=True).start()

    @property
    def url(self) -> str:
        """Address of the page."""
        host, port = self._server.server_address[:2]
        return f"http://{host}:{port}{self._path}"

    def log(self, step: int, record: Record) -> None:
        """Append the metrics of a step to the curves, and write the file."""
        self._add(step, record)
        self._write()

    def _add(self, step: int, record: Record) -> None:
        for key, value in record.items():
            metric = find_metric(key)
            if metric is not None and metric.chart and value is not None and math.isfinite(value):
                self._curves[metric.chart].setdefault(key, []).append((step, value))

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Replace the previous step's rollouts."""
        if rows:
            texts = [{k: _text(row[k]) for k in SAMPLE_FIELDS if row.get(k) not in (None, {})} for row in rows]
            self._samples = {"step": step, "rows": texts}

    def alarm(self, step: int, name: str, text: str) -> None:
        """Show the alarm above the curves, the newest first."""
        self._alarms.insert(0, {"step": step, "name": name, "text": text})

    def status(self) -> dict[str, Any]:
        """Return the content of status.json."""
        charts = [
            {"title": title, "lines": [{"name": key, "points": thin(points)} for key, points in list(lines.items())]}
            for title, lines in self._curves.items()
            if lines
        ]
        return {
            "run": self._name,
            **self._now(),
            "ranks": self._ranks.look(),
            "alarms": self._alarms[:_MOST_ALARMS],
            "charts": charts,
            "samples": self._samples,
        }

    def freeze(self) -> str:
        """Return the page with its current data in it, without polling."""
        data = json.dumps({**self.status(), "written": time.strftime("%Y-%m-%d %H:%M:%S")}, allow_nan=False)
        data = data.replace("<", "\\u003c")
        return self._page.replace("<main>", f'<script type="application/json" id="frozen">{data}</script>\n<main>', 1)

    def _write(self) -> None:
        if self._file is not None:
            replace_text(self._file, self.freeze(), errors="replace")

    def close(self) -> None:
        """Write the file and stop serving."""
        self._write()
        self._server.shutdown()
        self._server.server_close()


class _Ranks:
    """Cache of the ranks' heartbeats and of the seconds since each changed, refreshed at most once a second."""

    def __init__(self, positions: Positions) -> None:
        self._positions, self._lock = positions, threading.Lock()
        self._heard: dict[int, tuple[int, float]] = {}  # rank -> its last `looks`, and the time of their change
        self._last: list[dict[str, Any]] = []
        self._looked_at = -math.inf

    def look(self) -> list[dict[str, Any]]:
        """Return per rank its step, phase, collective and silent seconds, for status.json."""
        with self._lock:
            now = time.monotonic()
            if now - self._looked_at >= _LOOK_SECONDS:
                self._last = [self._describe(rank, beat, now) for rank, beat in enumerate(self._positions())]
                self._looked_at = now
            return self._last

    def _describe(self, rank: int, beat: Position | None, now: float) -> dict[str, Any]:
        if beat is None:
            return {"rank": rank}
        looks, since = self._heard.get(rank, (beat.looks, now))
        since = since if looks == beat.looks else now
        self._heard[rank] = beat.looks, since
        return {
            "rank": rank,
            "step": beat.step,
            "phase": beat.phase,
            "operation": beat.operation,
            "seconds": round(beat.seconds, 1),
            "silent_seconds": round(now - since, 1),
            "has_left": beat.is_closed,
            "memory": beat.memory,
        }


def read_warnings(path: Path, most: int) -> list[dict[str, str | None]]:
    """Return time, level and text of the last warnings and errors of a log, the newest first, without alarms."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").split("\n")
    except OSError:
        return []
    found: list[dict[str, str | None]] = []
    is_open = False
    for line in lines:
        if match := _WARNING.match(line):
            time, level, report, text = match.groups()
            is_open = not text.startswith("health: ")
            if is_open:
                found.append({"time": time, "level": (level or report).lower(), "text": text})
        elif is_open and line.startswith("  "):
            found[-1]["text"] = f"{found[-1]['text']}\n{line}"
        else:
            is_open = False
    return found[-most:][::-1]


def thin(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return at most _MOST_POINTS of the points, evenly spaced, with the last one."""
    stride = -(-len(points) // _MOST_POINTS)
    return list(points[::-1][::stride][::-1]) if points else []


def _text(value: Any) -> str:
    return shorten(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


def _is_own_name(host: str, own: str) -> bool:
    """Return True if a Host header is a name of this machine, such as `own`, or an address: no foreign DNS name."""
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
    name = name.strip("[]").lower()
    if name in ("localhost", own.lower(), socket.gethostname().lower()):
        return True
    try:
        return bool(ipaddress.ip_address(name))
    except ValueError:
        return False


class PageServer(ThreadingHTTPServer):
    """Server of one page and its JSON documents below a secret path.

    Args:
        path: begins and ends with "/".
        documents: a UserError that one raises is sent as {"error": text}.
    """

    daemon_threads = True
    allow_reuse_port = False  # two runs must not share a port

    def __init__(self, address: tuple[str, int], path: str, page: str, documents: Documents) -> None:
        self.host, self.path, self.page, self.documents = address[0], path, page.encode(), documents
        self._open: dict[socket.socket, float] = {}  # connection -> its start
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        """Bind without HTTPServer's look-up of the machine's name."""
        socketserver.TCPServer.server_bind(self)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start a thread for a connection, or close it if too many are open."""
        if len(self._open) >= _MOST_CONNECTIONS:
            super().shutdown_request(request)
            return
        self._open[request] = time.monotonic()
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Remove a connection that ends."""
        self._open.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Close connections that are open for too long, even busy ones; called twice a second."""
        for request, began in list(self._open.items()):
            if time.monotonic() - began > _CONNECTION_SECONDS:
                with suppress(OSError):  # it has ended
                    request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log at debug level: a reader that went away is no event of the run."""
        logging.getLogger(__name__).debug("status page: a request failed", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    """Handler of GET and HEAD for the page and its documents; any other request is an error."""

    server: PageServer
    server_version, sys_version = "megatron_rl", ""
    timeout = 10.0  # seconds without data until a connection is closed

    def do_GET(self) -> None:
        """Send the page, the status, or an error."""
        hosts = self.headers.get_all("Host", [])
        if len(hosts) != 1 or not _is_own_name(hosts[0], self.server.host):
            self.send_error(421, "Misdirected Request", "Use localhost, this machine's name or an address of it.")
            return
        path, _, query = self.path.partition("?")
        folder, _, file = path.rpartition("/")
        if not hmac.compare_digest(f"{folder}/".encode(), self.server.path.encode()):
            self.send_error(404, explain="The address is the one that the run printed when it started.")
        elif file == "":
            self._send("text/html; charset=utf-8", self.server.page)
        elif file in self.server.documents:
            self._send("application/json", json.dumps(self._describe(file, query), allow_nan=False).encode())
        else:
            self.send_error(404)

    do_HEAD = do_GET

    def _describe(self, file: str, query: str) -> Mapping[str, Any]:
        try:
            return self.server.documents[file](query)
        except UserError as error:
            return {"error": str(error)}

    def _send(self, content_type: str, body: bytes) -> None:
        self.send_response(200)
        for name, value in {"Content-Type": content_type, "Content-Length": str(len(body)), **_HEADERS}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


def read_template(folder: Path, title: str, connect: str = "'none'", has_plots: bool = False) -> str:
    """Return the page with its title, style and scripts inlined.

    Args:
        folder: contains page.html, page.css, page.js, and optionally parts.js, which is put before page.js.
        connect: sources of the script's connections, in the syntax of a content security policy.
        has_plots: put uPlot before them.
    """
    page, style = ((folder / name).read_text(encoding="utf-8") for name in ("page.html", "page.css"))
    script = "".join((folder / name).read_text(encoding="utf-8") for name in _SCRIPTS if (folder / name).exists())
    if has_plots:
        style = (_UPLOT / "uPlot.min.css").read_text(encoding="utf-8") + style
        script = (_UPLOT / "uPlot.iife.min.js").read_text(encoding="utf-8") + script
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; connect-src {connect}; "
        "base-uri 'none'; form-action 'none'"
    )
    escaped = html.escape(title).replace("{", "&#123;")  # so that a title is not taken for a placeholder
    for name, value in {"style": style, "policy": policy, "title": escaped, "script": script}.items():
        page = page.replace(f"{{{{{name}}}}}", value)
    return page


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
