# SPDX-License-Identifier: Apache-2.0
"""Client of an HTTP reward service, with batching, retries, and a failure policy.

    POST {"samples": [{"data_source", "prompt", "response", "ground_truth", "extra_info",
                       "prompt_id", "sample_index"}, ...]}
    200  {"scores": [number | {"score": number, component: number, ...}, ...]}    one per sample, in order

Batches follow the order in which responses finish, so each sample must be scored independently. Connection errors,
timeouts, 429, 5xx and malformed answers are retried; any other status means a wrong request. urllib3's `Retry` could
not be interrupted, and does not check answers.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from megatron_rl.config.rendering import redact
from megatron_rl.config.schema import RewardConfig
from megatron_rl.rewards.deadline import DeadlineExceeded, TooLarge, post_within
from megatron_rl.rewards.scoring import Score, parse_score, shorten
from megatron_rl.types import SERVICE_FAILURES, Rollout, UserError

_MOST_NAMED_PROMPTS = 8
_LONGEST_TEXT = 10_000  # bytes of a response quoted in errors
MAX_ANSWER_BYTES = 64 << 20
BACKOFF_SECONDS = 0.5  # before the second attempt; doubles each time
_OK, _TOO_MANY_REQUESTS = 200, 429


class _RequestFailed(Exception):
    """A failed attempt."""

    def __init__(self, what: str, *, retry: bool) -> None:
        super().__init__(what)
        self.retry = retry


class RewardService:
    """A reward source that posts batches to an HTTP service from threads."""

    def __init__(self, url: str, config: RewardConfig, setting: str) -> None:
        self._url, self._config, self._setting = url, config, setting
        self._open: list[tuple[Rollout, Future[Score]]] = []
        self._threads = ThreadPoolExecutor(config.service_concurrency, thread_name_prefix="reward-service")
        self._is_closed = threading.Event()

    def begin(self, rollout: Rollout, step: int = 0) -> Callable[[], Score]:
        """Add a rollout to the open batch, which is sent when it is full or a score is awaited."""
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
        config, attempt = self._config, 1
        while True:
            try:
                scores = self._post(rollouts)
            except _RequestFailed as failure:
                if not failure.retry or attempt > config.service_retries:
                    return self._give_up(rollouts, attempt, failure)
                if self._is_closed.wait(BACKOFF_SECONDS * 2 ** (attempt - 1)):
                    return self._give_up(rollouts, attempt, failure)
                attempt += 1
            else:
                return [self._count(score, 0.0) for score in scores]

    def _post(self, rollouts: Sequence[Rollout]) -> list[Score]:
        told = [_describe(rollout) for rollout in rollouts]
        body = json.dumps({"samples": told}, default=_to_json).encode()
        config = self._config
        try:
            status, answer = post_within(self._url, body, config.service_timeout_seconds, MAX_ANSWER_BYTES)
        except (DeadlineExceeded, TooLarge) as error:
            raise _RequestFailed(str(error), retry=True) from error
        except Exception as error:  # requests, urllib3 and their dependencies raise many types
            raise _RequestFailed(f"{type(error).__name__}: {shorten(redact(str(error)))}", retry=True) from error
        if status != _OK:
            text = shorten(repr(answer[:_LONGEST_TEXT].decode(errors="replace")))
            raise _RequestFailed(f"status {status}: {text}", retry=status == _TOO_MANY_REQUESTS or status >= 500)
        try:
            return _parse_answer(json.loads(answer), len(rollouts))
        except (ValueError, RecursionError) as error:  # of `json` or of `_parse_answer`
            raise _RequestFailed(f"a bad answer: {error}", retry=True) from error

    def _give_up(self, rollouts: Sequence[Rollout], attempts: int, failure: _RequestFailed) -> list[Score]:
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


def _parse_answer(answer: Any, num_samples: int) -> list[Score]:
    scores = answer.get("scores") if isinstance(answer, dict) else None
    if not isinstance(scores, list):
        raise ValueError(f'no list "scores" in {shorten(repr(answer))}')
    if len(scores) != num_samples:
        raise ValueError(f"{len(scores)} scores for {num_samples} samples")
    return [parse_score(score) for score in scores]


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


def _to_json(value: Any) -> Any:
    """Convert numpy values to lists and numbers, and other types, such as dates, to text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)
