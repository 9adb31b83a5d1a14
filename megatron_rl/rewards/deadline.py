# SPDX-License-Identifier: Apache-2.0
"""HTTP POST with a deadline for the whole request and a limit on the response size.

The timeout of `requests` bounds each wait for data, so a service that sends a byte now and then never reaches it. Here
a timer shuts the connection down.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import Any

import requests
from requests.adapters import HTTPAdapter
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool

_CHUNK_BYTES = 1 << 16
_REQUEST = threading.local()  # the thread's current request, with which its connections register


class DeadlineExceeded(Exception):
    """A request that did not finish in time."""


class TooLarge(Exception):
    """A response that exceeds its size limit."""


class _Deadline:
    def __init__(self, seconds: float) -> None:
        self._sockets: list[socket.socket] = []
        self._lock, self.is_over = threading.Lock(), False
        self._timer = threading.Timer(seconds, self._end)
        self._timer.daemon = True

    def __enter__(self) -> _Deadline:
        _REQUEST.deadline = self
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        del _REQUEST.deadline
        with self._lock:
            while self._sockets:
                self._sockets.pop().close()

    def watch(self, connection: socket.socket) -> None:
        """Register a socket's duplicate, which stays valid when TLS takes the socket over."""
        with self._lock:
            self._sockets.append(connection.dup())
            if self.is_over:
                self._shut_down()

    def _end(self) -> None:
        with self._lock:
            self.is_over = True
            self._shut_down()

    def _shut_down(self) -> None:
        for each in self._sockets:
            with contextlib.suppress(OSError):  # the peer closed it first
                each.shutdown(socket.SHUT_RDWR)


class _WatchedConnection(HTTPConnection):
    def _new_conn(self) -> socket.socket:
        connection = super()._new_conn()
        _REQUEST.deadline.watch(connection)
        return connection


class _WatchedTlsConnection(HTTPSConnection):
    def _new_conn(self) -> socket.socket:
        connection = super()._new_conn()
        _REQUEST.deadline.watch(connection)
        return connection


class _WatchedPool(HTTPConnectionPool):
    ConnectionCls = _WatchedConnection  # pyright: ignore[reportAssignmentType]  # its own class fits as little


class _WatchedTlsPool(HTTPSConnectionPool):
    ConnectionCls = _WatchedTlsConnection  # pyright: ignore[reportAssignmentType]  # likewise


class _WatchedAdapter(HTTPAdapter):
    def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
        super().init_poolmanager(*args, **kwargs)
        self.poolmanager.pool_classes_by_scheme = {"http": _WatchedPool, "https": _WatchedTlsPool}


def post_within(url: str, body: bytes, seconds: float, max_answer_bytes: int) -> tuple[int, bytes]:
    """Post JSON and return the status and the body; redirects are not followed.

    Args:
        url: http or https; `user:password@` becomes basic authentication.
        seconds: for the whole request except the DNS lookup.
        max_answer_bytes: of the decompressed body.

    Raises:
        DeadlineExceeded, TooLarge: the request exceeded a limit.
        requests.RequestException, urllib3.exceptions.HTTPError, OSError: it failed.
    """
    start = time.monotonic()
    with requests.Session() as session, _Deadline(seconds) as deadline:
        for scheme in ("http://", "https://"):
            session.mount(scheme, _WatchedAdapter())
        try:
            with session.post(
                url,
                data=body,
                headers={"Content-Type": "application/json"},
                timeout=seconds,
                allow_redirects=False,
                stream=True,
            ) as response:
                answer = bytearray()
                while chunk := response.raw.read1(_CHUNK_BYTES, decode_content=True):
                    answer += chunk
                    if len(answer) > max_answer_bytes:
                        raise TooLarge(f"an answer of more than {max_answer_bytes:,} bytes")
                status = response.status_code
        except TooLarge:
            raise
        except Exception as error:
            if deadline.is_over or isinstance(error, requests.Timeout):
                raise _late(start, seconds) from error
            raise
        if deadline.is_over:  # a shut-down connection looks like the end of the response
            raise _late(start, seconds)
        return status, bytes(answer)


def _late(start: float, seconds: float) -> DeadlineExceeded:
    return DeadlineExceeded(
        f"not done within reward.service_timeout_seconds = {seconds:g} ({time.monotonic() - start:.1f} s)"
    )
