# SPDX-License-Identifier: Apache-2.0
"""HTTP client of a server, on a thread, and the server's process.

Each request has its own stream: an interrupt closes its connection, which ends its generation, and keeps its tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import aiohttp
import numpy as np

from megatron_rl.engines.protocol import Request, Sampled
from megatron_rl.types import KeptSets, UserError

if TYPE_CHECKING:
    from megatron_rl.engines.endings import StopStrings

# torchrun's variables for a rank; a server that inherits them would act as that rank.
_OF_THE_LAUNCHER = ("RANK", "WORLD_SIZE", "MASTER_", "LOCAL_", "GROUP_", "ROLE_", "TORCHELASTIC_", "TORCH_NCCL_")
# Supervises the server: when the rank exits, for any reason, this stdin closes and the whole session is killed.
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
    """A server as a child process; `environment` is added to the rank's variables."""

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
        """True if the process has exited."""
        return self._process.poll() is not None

    def read_log(self) -> str:
        """Return the last 2,000 bytes of the log."""
        with open(self._log_file, "rb") as log:
            log.seek(max(0, self._log_file.stat().st_size - _LAST_BYTES))
            return log.read().decode(errors="replace")

    def end(self) -> None:
        """Kill the process group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()


T = TypeVar("T")
_LINE_BYTES = 64 << 20  # an event is a line, and the first one may repeat the prompt
_TROUBLE = (aiohttp.ClientError, OSError, TimeoutError, json.JSONDecodeError)


class ServerFailure(Exception):
    """A failure that a retry may cure."""


@dataclass
class ServerAnswer:
    """A response as received so far."""

    request: Request
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None  # "stop" or "length" once finished
    num_cached: int | None = None
    kept: list[KeptSets] = field(default_factory=list)

    def extend(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[float],
        finish_reason: str | None,
        kept: Sequence[Sequence[int]] = (),
    ) -> None:
        """Append the tokens of an event, and set the finish reason."""
        self.tokens += tokens
        self.logprobs += logprobs
        self.kept += [KeptSets(np.array(ids, np.int32), np.array([len(ids)], np.int32)) for ids in kept]
        self.finish_reason = finish_reason

    def count_cached(self, num_tokens: int | None) -> None:
        """Record how many prompt tokens the prefix cache served."""
        self.num_cached = num_tokens

    def completes_text(self, stop: StopStrings, first: int) -> bool:
        """Return whether a token from index `first` on completes a stop string; if so, end the answer there."""
        for end in range(first + 1, len(self.tokens) + 1):
            if self.request.ends_by(stop, self.tokens[:end]):
                del self.tokens[end:], self.logprobs[end:], self.kept[end:]
                self.finish_reason = "stop"
                return True
        return False

    def to_sampled(self) -> Sampled:
        """Convert to an engine's response."""
        tokens, logprobs = np.array(self.tokens, np.int32), np.array(self.logprobs, np.float32)
        reason = self.finish_reason or "interrupted"
        kept = KeptSets.join(self.kept) if self.kept else None
        return Sampled(self.request.key, tokens, logprobs, reason, kept, self.num_cached)


class ServerClient:
    """Connections to one server, which has failed if it is silent for `silent_seconds`."""

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
        # No keep-alive: a server may close an idle connection just as the next request is sent over it.
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
        """Send a request and stream its response in the background; `read` appends each event to the answer."""
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
                        response.close()  # the server then stops generating
                        break
            if answer.finish_reason is None:
                raise ServerFailure(f"{url} ended its answer too early")
            self._news.put(answer)
        except _TROUBLE as error:
            self._news.put(ServerFailure(f"{url}: {type(error).__name__} {error}"))
        except Exception as error:
            self._news.put(error)

    def take(self, seconds: float) -> list[Sampled]:
        """Return responses finished within `seconds` (ServerFailure: one failed, UserError: one was refused)."""
        found: list[Sampled] = []
        with contextlib.suppress(queue.Empty):
            news = self._news.get(timeout=seconds)
            while not isinstance(news, Exception):
                key = news.request.key
                if self._answers.get(key) is news:  # otherwise cancelled meanwhile, and the key may have a new request
                    self._tasks.pop(key, None)
                    found.append(self._answers.pop(key).to_sampled())
                news = self._news.get_nowait()
            if not found:
                raise news
            self._news.put(news)  # finished responses first; the error is raised by the next call
        return found

    def cancel(self, keys: Sequence[int] | None = None) -> list[ServerAnswer]:
        """Cancel requests, by default all with queued events; return their partial answers, in order of `keys`."""
        chosen = list(self._answers) if keys is None else keys
        self._wait(self._end([self._tasks.pop(key) for key in chosen if key in self._tasks]))
        while keys is None and not self._news.empty():
            self._news.get()
        return [self._answers.pop(key) for key in chosen if key in self._answers]

    async def _end(self, tasks: Sequence[asyncio.Task[None]]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def count_tokens(self) -> int:
        """Count received tokens of unfinished requests."""
        return sum(len(answer.tokens) for answer in list(self._answers.values()))

    def ask(self, url: str, body: Mapping[str, Any] | None = None, *, method: str = "POST") -> Any:
        """Make a call; return its JSON, if any (ServerFailure if it may succeed later, UserError if it is refused)."""
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
        """Close connections and thread."""
        self.cancel()
        self._wait(self._session.close())
        self._loop.call_soon_threadsafe(self._loop.stop)


async def _check(response: aiohttp.ClientResponse, url: str) -> None:
    """Raise ServerFailure for transient HTTP errors, UserError for others."""
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
