# SPDX-License-Identifier: Apache-2.0
"""One HTTP request with a deadline for all of it and a bound on its answer.

The time limit of `requests` bounds each wait for data: a service that sends a byte now and then would never reach it,
not even with its headers. Here a timer shuts the connection down at the deadline, whatever is being waited for.
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
_REQUEST = threading.local()  # the request that this thread is in: its connections add their sockets to it


class DeadlineExceeded(Exception):
    """The request was not done in time."""


class TooLarge(Exception):
    """The answer is larger than its bound."""


class _Deadline:
    """Shuts the sockets of one request down when its time is over."""

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
        """Take part in a new connection; a duplicate stays valid when TLS takes the socket over."""
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
            with contextlib.suppress(OSError):  # the peer was faster
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
    """Post JSON; redirects are not followed.

    Args:
        url: http or https; `user:password@` is sent as basic authentication.
        body: the JSON.
        seconds: time for all of it but looking up the host's name.
        max_answer_bytes: bound on the answer, decompressed.

    Returns:
        The status and the answer.

    Raises:
        DeadlineExceeded: it took longer.
        TooLarge: the answer is longer.
        requests.RequestException, urllib3.exceptions.HTTPError, OSError: the request failed.
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
        if deadline.is_over:  # a connection that is shut down looks like the end of the answer
            raise _late(start, seconds)
        return status, bytes(answer)


def _late(start: float, seconds: float) -> DeadlineExceeded:
    return DeadlineExceeded(
        f"not done within reward.service_timeout_seconds = {seconds:g} ({time.monotonic() - start:.1f} s)"
    )
