# SPDX-License-Identifier: Apache-2.0
"""A small read-only web server for one page and its data, in threads of its own, and templates of such pages.

No request can name a file. A Host header must be an own name or an address (against DNS rebinding), the path contains a
secret that is printed at the start, and connections are limited.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import html
import ipaddress
import logging
import secrets
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

_SCRIPTS = ("parts.js", "page.js")
CHARTS_LIBRARY = Path(__file__).parent / "status_page" / "uplot"
_MOST_CONNECTIONS = 32
_CONNECTION_SECONDS = 30.0
_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
}
# Path below the page's address, and query -> content type and body; `None`: there is nothing.
Answer = Callable[[str, str], "tuple[str, bytes] | None"]


class PageServer(ThreadingHTTPServer):
    """Server of one page under a secret path, in a thread of its own from `serve` to `stop`.

    Args:
        answer: called in many threads.
        tick: called twice a second.

    Raises:
        OSError, OverflowError: the address cannot be served.
    """

    daemon_threads = True
    allow_reuse_port = False  # two runs must not share a port

    def __init__(self, host: str, port: int, answer: Answer, tick: Callable[[], None] = lambda: None) -> None:
        self.host, self.path, self.answer, self._tick = host, f"/{secrets.token_urlsafe(16)}/", answer, tick
        self._open: dict[socket.socket, float] = {}  # connection -> its start
        super().__init__((host, port), _Handler)

    @property
    def url(self) -> str:
        """Address of the page."""
        host, port = self.server_address[:2]
        return f"http://{host}:{port}{self.path}"

    def serve(self) -> None:
        """Begin to serve, in a thread."""
        threading.Thread(target=self.serve_forever, name="page server", daemon=True).start()

    def stop(self) -> None:
        """Stop serving; may be called again."""
        self.shutdown()
        self.server_close()

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
        self._tick()
        for request, began in list(self._open.items()):
            if time.monotonic() - began > _CONNECTION_SECONDS:
                with suppress(OSError):  # it has ended
                    request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log at debug level: a reader that went away is no event of the run."""
        logging.getLogger(__name__).debug("page server: a request failed", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    """Handler of GET and HEAD; any other request is an error."""

    server: PageServer
    server_version, sys_version = "megatron_rl", ""
    timeout = 10.0  # seconds without data until a connection is closed

    def do_GET(self) -> None:
        """Send the result of the server's `answer`, or an error."""
        hosts = self.headers.get_all("Host", [])
        if len(hosts) != 1 or not _is_own_name(hosts[0], self.server.host):
            self.send_error(421, "Misdirected Request", "Use localhost, this machine's name or an address of it.")
            return
        path, _, query = self.path.partition("?")
        folder, _, file = path.rpartition("/")
        if not hmac.compare_digest(f"{folder}/".encode(), self.server.path.encode()):
            self.send_error(404, explain="The address is the one that was printed at the start.")
            return
        found = self.server.answer(file, query)
        if found is None:
            self.send_error(404)
            return
        content_type, body = found
        self.send_response(200)
        for name, value in {"Content-Type": content_type, "Content-Length": str(len(body)), **_HEADERS}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


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


def read_template(folder: Path, title: str, connect: str = "'none'", libraries: Sequence[Path] = ()) -> str:
    """Return the page with its title, style and scripts inlined.

    Args:
        folder: contains page.html, page.css, page.js, and optionally parts.js, which is put before page.js.
        connect: sources of the script's connections, in the syntax of a content security policy.
        libraries: directories whose scripts and styles are put before the page's.
    """
    own = {".css": [folder / "page.css"], ".js": [path for name in _SCRIPTS if (path := folder / name).exists()]}
    style, script = (
        "\n".join(
            path.read_text(encoding="utf-8")
            for path in [*(x for library in libraries for x in library.glob(f"*{kind}")), *paths]
        )
        for kind, paths in own.items()
    )
    page = (folder / "page.html").read_text(encoding="utf-8")
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
