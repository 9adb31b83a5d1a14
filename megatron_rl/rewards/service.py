# SPDX-License-Identifier: Apache-2.0
"""Client of an HTTP reward service, with batching, retries, and a failure policy.

docs/rewards.md shows a request and its answer, which has a score per sample, in order. Connection errors, timeouts,
429, 5xx and malformed answers are retried; any other status means a wrong request. The timeout of `requests` bounds
only each wait for data; here a timer shuts the connection down.
"""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

from megatron_rl.config.fields import redact
from megatron_rl.config.schema import RewardConfig
from megatron_rl.rewards.scoring import Score, parse_score, shorten
from megatron_rl.types import SERVICE_FAILURES, Rollout, UserError

_MOST_NAMED_PROMPTS = 8
_LONGEST_TEXT = 10_000  # bytes of a response quoted in errors
MAX_ANSWER_BYTES = 64 << 20
BACKOFF_SECONDS = 0.5  # before the second attempt; doubles each time
_OK, _TOO_MANY_REQUESTS = 200, 429
_CHUNK_BYTES = 1 << 16


def check_url(url: str, setting: str) -> None:
    """Refuse a URL without a host (UserError); `setting`: config setting that contains it."""
    if not urlsplit(url).hostname:
        raise UserError(
            f'"{redact(url)}" names no host',
            source=setting,
            expected="http://host:port/path",
            hint="write the whole URL",
        )


class RequestFailed(Exception):
    """A failed request to the service; `retry`: another attempt may succeed."""

    def __init__(self, what: str, *, retry: bool = True) -> None:
        super().__init__(what)
        self.retry = retry


class RewardService:
    """A reward source that posts batches to an HTTP service from threads."""

    def __init__(self, url: str, config: RewardConfig, setting: str) -> None:
        import requests  # noqa: F401  # now, not in a thread after the first rollouts; the check of a URL needs none

        self._url, self._config, self._setting = url, config, setting
        self._open: list[tuple[Rollout, Future[Score]]] = []
        self._threads = ThreadPoolExecutor(config.service_concurrency, thread_name_prefix="reward-service")
        self._is_closed = threading.Event()

    def begin(self, rollout: Rollout, step: int = 0) -> Callable[[], Score]:
        """Add a rollout to the open batch, and return a function that waits for its score.

        The batch is sent when it is full or a score is awaited.
        """
        future: Future[Score] = Future()
        self._open.append((rollout, future))
        if len(self._open) == self._config.service_batch_size:
            self._send_open_batch()

        def wait() -> Score:
            self._send_open_batch()
            return future.result()

        return wait

    def close(self) -> None:
        """Drop queued batches; wait for requests in flight."""
        self._is_closed.set()
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _send_open_batch(self) -> None:
        if self._open:
            self._threads.submit(self._score_batch, self._open)
            self._open = []

    def _score_batch(self, batch: list[tuple[Rollout, Future[Score]]]) -> None:
        try:
            scores = self._request_scores([rollout for rollout, _ in batch])
        except Exception as error:  # raised by the waiting callers
            for _, future in batch:
                future.set_exception(error)
        else:
            for (_, future), score in zip(batch, scores, strict=True):
                future.set_result(score)

    def _request_scores(self, rollouts: Sequence[Rollout]) -> list[Score]:
        attempt = 1
        while True:
            try:
                return [self._count(score, 0.0) for score in self._post(rollouts)]
            except RequestFailed as failure:
                is_last = not failure.retry or attempt > self._config.service_retries
                if is_last or self._is_closed.wait(BACKOFF_SECONDS * 2 ** (attempt - 1)):
                    return self._give_up(rollouts, attempt, failure)
                attempt += 1

    def _post(self, rollouts: Sequence[Rollout]) -> list[Score]:
        samples = [_describe(rollout) for rollout in rollouts]
        # Arrays become lists, and other types, such as dates, become text.
        body = json.dumps({"samples": samples}, default=lambda x: x.tolist() if hasattr(x, "tolist") else str(x))
        status, answer = post_within(self._url, body.encode(), self._config.timeout_seconds, MAX_ANSWER_BYTES)
        if status != _OK:
            text = shorten(repr(answer[:_LONGEST_TEXT].decode(errors="replace")))
            raise RequestFailed(f"status {status}: {text}", retry=status == _TOO_MANY_REQUESTS or status >= 500)
        try:
            found = json.loads(answer)
            scores = found.get("scores") if isinstance(found, dict) else None
            if not isinstance(scores, list):
                raise ValueError(f'no list "scores" in {shorten(repr(found))}')
            if len(scores) != len(rollouts):
                raise ValueError(f"{len(scores)} scores for {len(rollouts)} samples")
            return [parse_score(score) for score in scores]
        except (ValueError, RecursionError) as error:
            raise RequestFailed(f"a bad answer: {error}") from error

    def _give_up(self, rollouts: Sequence[Rollout], attempts: int, failure: RequestFailed) -> list[Score]:
        ids = sorted({rollout.prompt.prompt_id for rollout in rollouts})
        named = ", ".join(map(str, ids[:_MOST_NAMED_PROMPTS])) + (", ..." if len(ids) > _MOST_NAMED_PROMPTS else "")
        found = (
            f"the reward service {redact(self._url)} gave no scores for {len(rollouts)} responses in {attempts} "
            f"attempt(s); the last one: {failure}\n  prompt ids: {named}"
        )
        if self._config.service_on_failure == "stop":
            raise UserError(
                found,
                source=self._setting,
                expected='status 200 and {"scores": [one per sample]}',
                hint="start or fix the service, raise reward.service_retries, or set "
                "reward.service_on_failure=fallback",
            ) from failure
        logging.getLogger(__name__).warning("%s; nothing is learned from them", found)
        return [self._count(Score(0.0, failure=found), 1.0) for _ in rollouts]

    def _count(self, score: Score, failures: float) -> Score:
        if self._config.service_on_failure == "stop":
            return score
        return replace(score, components={**score.components, SERVICE_FAILURES: failures})


def _describe(rollout: Rollout) -> dict[str, Any]:
    prompt = rollout.prompt
    return {
        "data_source": prompt.data_source,
        "prompt": prompt.text,
        "response": rollout.response,
        "ground_truth": prompt.ground_truth,
        "extra_info": prompt.extra_info,
        "prompt_id": prompt.prompt_id,
        "sample_index": rollout.sample_index,
    }


class _Deadline:
    def __init__(self, seconds: float) -> None:
        self._sockets: list[socket.socket] = []
        self._lock, self.is_over = threading.Lock(), False
        self._timer = threading.Timer(seconds, self._end)
        self._timer.daemon = True

    def __enter__(self) -> _Deadline:
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        with self._lock:
            while self._sockets:
                self._sockets.pop().close()

    def watch(self, connection: socket.socket) -> None:
        """Shut a socket down at the deadline, through a duplicate, because TLS invalidates the original."""
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


def _watch_connections(pool: Any, deadline: _Deadline) -> Any:
    """Return a class of urllib3's connection pools whose connections end at the deadline."""

    class Connection(pool.ConnectionCls):
        def _new_conn(self) -> socket.socket:
            connection = super()._new_conn()
            deadline.watch(connection)
            return connection

    return type("Pool", (pool,), {"ConnectionCls": Connection})


def post_within(url: str, body: bytes, seconds: float, max_answer_bytes: int) -> tuple[int, bytes]:
    """Post JSON and return the status and the body; redirects are not followed.

    Args:
        url: http or https; `user:password@` becomes basic authentication.
        seconds: for the whole request except the DNS lookup.
        max_answer_bytes: of the decompressed body.

    Raises:
        RequestFailed: the request failed or exceeded a limit.
    """
    import requests
    from requests.adapters import HTTPAdapter

    start, deadline, failure = time.monotonic(), _Deadline(seconds), None
    status, answer = 0, bytearray()
    try:
        with requests.Session() as session, deadline:
            for scheme in ("http", "https"):
                adapter = HTTPAdapter()
                pool = adapter.poolmanager.pool_classes_by_scheme[scheme]
                adapter.poolmanager.pool_classes_by_scheme = {scheme: _watch_connections(pool, deadline)}
                session.mount(f"{scheme}://", adapter)
            with session.post(
                url,
                data=body,
                headers={"Content-Type": "application/json"},
                timeout=seconds,
                allow_redirects=False,
                stream=True,
            ) as response:
                status = response.status_code
                while chunk := response.raw.read1(_CHUNK_BYTES, decode_content=True):
                    answer += chunk
                    if len(answer) > max_answer_bytes:
                        raise RequestFailed(f"an answer of more than {max_answer_bytes:,} bytes")
    except RequestFailed:
        raise
    except Exception as error:  # requests, urllib3 and their dependencies raise many types
        failure = error
    if deadline.is_over or isinstance(failure, requests.Timeout):  # a shut-down connection looks like the body's end
        took = time.monotonic() - start
        raise RequestFailed(f"not done within reward.timeout_seconds = {seconds:g} ({took:.1f} s)") from failure
    if failure is not None:
        raise RequestFailed(f"{type(failure).__name__}: {shorten(redact(str(failure)))}") from failure
    return status, bytes(answer)
