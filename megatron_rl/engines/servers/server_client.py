# SPDX-License-Identifier: Apache-2.0
"""A server over HTTP: requests whose answers stream in on a thread, and plain questions.

Each request is a stream of its own, so that what has come of it is here whenever it is interrupted: the connection is
closed then, and the server stops.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import numpy as np

from megatron_rl.engines.protocol import Request, Sampled
from megatron_rl.engines.sampling import StopStrings
from megatron_rl.types import KeptSets, UserError

# Environment variables that torchrun sets for a rank; a server that inherits them takes itself for one.
_OF_THE_LAUNCHER = ("RANK", "WORLD_SIZE", "MASTER_", "LOCAL_", "GROUP_", "ROLE_", "TORCHELASTIC_", "TORCH_NCCL_")
# Runs beside the server: the end of its input is the end of the rank, however that came. It kills the whole session.
_WATCH = (
    "import os, signal, subprocess, sys, threading\n"
    "def follow():\n"
    "    sys.stdin.buffer.read()\n"
    "    os.killpg(0, signal.SIGKILL)\n"
    "threading.Thread(target=follow, daemon=True).start()\n"
    "code = subprocess.call(sys.argv[1:], stdin=subprocess.DEVNULL)\n"
    "print('the server has ended with exit code', code, flush=True)\n"
    "os.killpg(0, signal.SIGKILL)\n"
)
_LAST_BYTES = 2000


class ServerProcess:
    """One server.

    Args:
        command: that starts it.
        environment: variables beside the rank's.
        log_file: what it says is appended to it.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log_file: Path) -> None:
        self._log_file = log_file
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(_OF_THE_LAUNCHER)}
        with open(log_file, "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _WATCH, *command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=inherited | dict(environment),
            )

    @property
    def has_ended(self) -> bool:
        """True if it runs no more."""
        return self._process.poll() is not None

    def read_log(self) -> str:
        """The last of what it said."""
        with open(self._log_file, "rb") as log:
            log.seek(max(0, self._log_file.stat().st_size - _LAST_BYTES))
            return log.read().decode(errors="replace")

    def end(self) -> None:
        """Kill it and what it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()


def find_free_port() -> int:
    """A port of the loopback interface that nobody has."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


T = TypeVar("T")
_LINE_BYTES = 64 << 20  # an event is a line, and the first one may repeat the prompt
_TROUBLE = (aiohttp.ClientError, OSError, TimeoutError, json.JSONDecodeError)


class ServerFailure(Exception):
    """A server that is gone, or fails at what it served before: worth another attempt."""


@dataclass
class ServerAnswer:
    """What has come of a request.

    Attributes:
        request: that is answered.
        tokens, logprobs: sampled so far, [s].
        finish_reason: "stop" or "length"; None: more is to come.
        num_cached: as in `Sampled`.
        kept: what the tokens were drawn from, one set each, where the stream brings it.
    """

    request: Request
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    num_cached: int | None = None
    kept: list[KeptSets] = field(default_factory=list)

    def extend(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[float],
        finish_reason: str | None,
        kept: Sequence[Sequence[int]] = (),
    ) -> None:
        """More has come, maybe the last of it."""
        self.tokens += tokens
        self.logprobs += logprobs
        self.kept += [KeptSets(np.array(ids, np.int32), np.array([len(ids)], np.int32)) for ids in kept]
        self.finish_reason = finish_reason

    def count_cached(self, num_tokens: int | None) -> None:
        """How many tokens of the request the server had in its cache."""
        self.num_cached = num_tokens

    def completes_text(self, stop: StopStrings, first: int) -> bool:
        """True if a token from place `first` on ends the answer; what came behind it is dropped."""
        for end in range(first + 1, len(self.tokens) + 1):
            if self.request.ends_by(stop, self.tokens[:end]):
                del self.tokens[end:], self.logprobs[end:], self.kept[end:]
                self.finish_reason = "stop"
                return True
        return False

    def to_sampled(self) -> Sampled:
        """As an engine returns it."""
        tokens, logprobs = np.array(self.tokens, np.int32), np.array(self.logprobs, np.float32)
        reason = self.finish_reason or "interrupted"
        kept = KeptSets.join(self.kept) if self.kept else None
        return Sampled(self.request.key, tokens, logprobs, reason, kept, self.num_cached)


class ServerClient:
    """Connections to one server, on a thread of its own.

    Args:
        silent_seconds: a server that says nothing for so long has failed.
        stop: strings that end a response.
        key: that is sent with each request.

    Attributes:
        key: see above.
    """

    def __init__(self, silent_seconds: float, stop: StopStrings | None = None, key: str | None = None) -> None:
        self._stop, self.key = stop, key
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=silent_seconds, sock_read=silent_seconds)
        self._answers: dict[int, ServerAnswer] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._news: queue.SimpleQueue[ServerAnswer | Exception] = queue.SimpleQueue()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="server-client", daemon=True).start()
        self._session = self._wait(self._open())

    async def _open(self) -> aiohttp.ClientSession:
        # Servers close connections that have been idle, maybe while the next request is on its way: each has its own.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        return aiohttp.ClientSession(
            timeout=self._timeout, connector=connector, read_bufsize=_LINE_BYTES, headers=headers
        )

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def submit(
        self, url: str, body: Mapping[str, Any], request: Request, read: Callable[[Any, ServerAnswer], None]
    ) -> None:
        """Begin a request.

        Args:
            url, body: what is posted.
            request: that it is made of.
            read: adds an event of the stream to the answer.
        """
        answer = self._answers[request.key] = ServerAnswer(request)
        self._wait(self._begin(self._stream(url, body, answer, read), request.key))

    async def _begin(self, work: Coroutine[Any, Any, None], key: int) -> None:
        self._tasks[key] = asyncio.create_task(work)

    async def _stream(
        self, url: str, body: Mapping[str, Any], answer: ServerAnswer, read: Callable[[Any, ServerAnswer], None]
    ) -> None:
        try:
            async with self._session.post(url, json=body) as response:
                await _check(response, url)
                async for line in response.content:
                    text = line.removeprefix(b"data:").strip()
                    if not line.startswith(b"data:") or text == b"[DONE]":
                        continue
                    first = len(answer.tokens)
                    read(json.loads(text), answer)
                    if self._stop is not None and answer.completes_text(self._stop, first):
                        response.close()  # at which the server stops
                        break
            if answer.finish_reason is None:
                raise ServerFailure(f"{url} ended its answer too early")
            self._news.put(answer)
        except _TROUBLE as error:
            self._news.put(ServerFailure(f"{url}: {type(error).__name__} {error}"))
        except Exception as error:
            self._news.put(error)

    def take(self, seconds: float) -> list[Sampled]:
        """The answers that are finished, after waiting so long for the first one.

        Raises:
            ServerFailure: a request failed; the others are still there.
            UserError: the server refuses one.
        """
        found: list[Sampled] = []
        with contextlib.suppress(queue.Empty):
            news = self._news.get(timeout=seconds)
            while not isinstance(news, Exception):
                key = news.request.key
                if self._answers.get(key) is news:  # else it was ended meanwhile, and its key may have a new request
                    self._tasks.pop(key, None)
                    found.append(self._answers.pop(key).to_sampled())
                news = self._news.get_nowait()
            if not found:
                raise news
            self._news.put(news)  # those that are finished first
        return found

    def cancel(self, keys: Sequence[int] | None = None) -> list[ServerAnswer]:
        """End requests, all of them by default; what has come of them, in the order of the keys."""
        keys = list(self._answers) if keys is None else keys
        self._wait(self._end([self._tasks.pop(key) for key in keys if key in self._tasks]))
        return [self._answers.pop(key) for key in keys if key in self._answers]

    async def _end(self, tasks: Sequence[asyncio.Task[None]]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def forget_news(self) -> None:
        """What was said of requests that have been ended means nothing."""
        while not self._news.empty():
            self._news.get()

    def count_tokens(self) -> int:
        """That have come of unfinished requests."""
        return sum(len(answer.tokens) for answer in list(self._answers.values()))

    def ask(self, url: str, body: Mapping[str, Any] | None = None, *, method: str = "POST") -> Any:
        """The answer to a question: JSON, or None where there is none.

        Raises:
            ServerFailure: there is no good answer.
            UserError: the server refuses.
        """
        return self._wait(self._ask(url, body, method))

    async def _ask(self, url: str, body: Mapping[str, Any] | None, method: str) -> Any:
        try:
            async with self._session.request(method, url, json=body) as response:
                await _check(response, url)
                text = await response.text()
                return json.loads(text) if text[:1] in ("{", "[") else None
        except _TROUBLE as error:
            raise ServerFailure(f"{url}: {type(error).__name__} {error}") from error

    def close(self) -> None:
        """End all connections, and the thread."""
        self.cancel()
        self._wait(self._session.close())
        self._loop.call_soon_threadsafe(self._loop.stop)


async def _check(response: aiohttp.ClientResponse, url: str) -> None:
    """Tell what the server cannot do now from what it will never do."""
    if response.status < 400:
        return
    text = (await response.text())[:500]
    if response.status >= 500 or response.status in (408, 429):
        raise ServerFailure(f"{url} answers {response.status}: {text}")
    raise UserError(
        f"the server answers {response.status}: {text}",
        source=url,
        expected="a server that takes this request",
        hint="see docs/servers.md: how it must be started, and which versions were tried",
    )
