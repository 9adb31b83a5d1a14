# SPDX-License-Identifier: Apache-2.0
"""HTTP server of an episode's endpoint on the loopback interface; requests need the episode's token."""

from __future__ import annotations

import hmac
import json
import secrets
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, cast

from megatron_rl.agents.endpoint import PATHS, Endpoint, split_into_chunks
from megatron_rl.agents.requests import BadRequest, read_json, read_stream

_LARGEST_BODY = 32 << 20  # bytes
_LONGEST_MESSAGE = 1000  # characters


class EndpointServer(ThreadingHTTPServer):
    """A server for one endpoint, with a thread per connection.

    Attributes:
        token: bearer token that requests must carry.
        url: base URL, without /v1.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.endpoint, self.token = endpoint, secrets.token_urlsafe(16)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, daemon=True).start()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # one connection for many requests
    disable_nagle_algorithm = True
    wbufsize = -1  # headers and body in one packet

    def do_GET(self) -> None:
        """Return one model, or the list of models."""
        path = self.path.partition("?")[0]
        if self._read_body() is None:
            return
        models = self._served.endpoint.list_models()
        if path == "/v1/models":
            self._send(200, models)
        elif path.startswith("/v1/models/"):
            self._send(200, models["data"][0])
        else:
            self._refuse(404, f"there is no {path} here")

    def do_POST(self) -> None:
        """Answer a completion request."""
        body, path = self._read_body(), self.path.partition("?")[0]
        if body is None:
            return
        if path not in PATHS:
            self._refuse(404, f"there is no {path} here")
            return
        try:
            request = read_json(body)
            if not isinstance(request, dict):
                raise BadRequest("the body is no object")
            is_streamed, with_usage = read_stream(request)
            answer = self._served.endpoint.answer(path, request)
        except BadRequest as error:
            self._refuse(400, str(error), error.field)
            return
        except RecursionError:
            self._refuse(400, "the body is nested too deeply")
            return
        except Exception as error:  # the program receives the message of any error
            self._refuse(500, f"{type(error).__name__}: {error}")
            return
        if is_streamed:
            lines = [json.dumps(chunk) for chunk in split_into_chunks(answer, with_usage)]
            self._write("".join(f"data: {line}\n\n" for line in [*lines, "[DONE]"]), "text/event-stream")
        else:
            self._send(200, answer)

    @property
    def _served(self) -> EndpointServer:
        return cast(EndpointServer, self.server)

    def handle_expect_100(self) -> bool:
        """Check the headers before the client sends the body."""
        return self._is_welcome() and super().handle_expect_100()

    def _read_body(self) -> bytes | None:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0)) if self._is_welcome() else None

    def _is_welcome(self) -> bool:
        """Check the headers; close the connection if a body is left unread."""
        length, is_chunked = self.headers.get("Content-Length") or "0", "Transfer-Encoding" in self.headers
        given, expected = self.headers.get("Authorization") or "", f"Bearer {self._served.token}"
        refusal = None
        if not hmac.compare_digest(given.encode(), expected.encode()):
            refusal = 401, "this is the endpoint of another episode: the key is in the variable OPENAI_API_KEY"
        elif is_chunked:
            refusal = 411, "a body needs a Content-Length here"
        elif not length.isdecimal():
            refusal = 400, f"Content-Length = {length} is no number"
        elif len(length) > 12 or int(length) > _LARGEST_BODY:
            refusal = 413, f"a body has at most {_LARGEST_BODY} bytes here"
        if refusal is not None:
            self.close_connection |= is_chunked or length != "0"
            self._refuse(*refusal)
        return refusal is None

    def _refuse(self, status: int, message: str, field: str | None = None) -> None:
        kind = "invalid_request_error" if status < 500 else "server_error"
        self._send(
            status, {"error": {"message": message[:_LONGEST_MESSAGE], "type": kind, "param": field, "code": None}}
        )

    def _send(self, status: int, body: Mapping[str, Any]) -> None:
        self._write(json.dumps(body), "application/json", status)

    def _write(self, text: str, kind: str, status: int = 200) -> None:
        content = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""
