# SPDX-License-Identifier: Apache-2.0
"""The client against a real uvicorn service: batches, retries, both failure policies. No network but the loopback."""

from __future__ import annotations

import contextlib
import logging
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import requests

from distributed import find_free_port
from megatron_rl.config.schema import RewardConfig
from megatron_rl.rewards.scoring import Score
from megatron_rl.rewards.service import RequestFailed, RewardService, post_within
from megatron_rl.types import Rollout, UserError
from reward_samples import make_rollout

SERVICE = Path(__file__).with_name("misbehaving_service.py")
QUICK = RewardConfig(service_batch_size=4, service_retries=2)


def start_service() -> tuple[subprocess.Popen[bytes], str]:
    port = find_free_port()
    process = subprocess.Popen([sys.executable, str(SERVICE), str(port)])
    deadline = time.monotonic() + 60
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return process, f"http://127.0.0.1:{port}"
        except OSError:
            assert process.poll() is None and time.monotonic() < deadline, "the service did not start"
            time.sleep(0.02)


def stop(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


@pytest.fixture(scope="module")
def service() -> Iterator[str]:
    process, url = start_service()
    yield url
    stop(process)


def ask(url: str, config: RewardConfig, samples: list[Rollout]) -> list[Score]:
    client = RewardService(url, config, "reward.function")
    try:
        waits = [client.begin(sample) for sample in samples]
        return [wait() for wait in waits]
    finally:
        client.close()


def samples_of(count: int) -> list[Rollout]:
    return [make_rollout("x" * n, prompt_id=100 + n, sample_index=n) for n in range(count)]


def seen(service: str, test: str) -> dict[str, int]:
    return requests.get(f"{service}/seen/{test}", timeout=20).json()


def test_batches_come_back_in_order(service):
    scores = ask(f"{service}/score/order", QUICK, samples_of(10))
    assert scores == [Score(float(n), {"prompt_id": 100.0 + n}) for n in range(10)]
    assert seen(service, "order")["requests"] == 3  # 4 + 4 + 2


def test_service_is_told_everything(service):
    """numpy values, as parquet files give them, included."""
    sample = make_rollout()
    prompt = replace(sample.prompt, extra_info={"level": np.float32(2.5), "options": np.arange(3)})
    sample = replace(sample, prompt=prompt)
    assert ask(f"{service}/echo/told", QUICK, [sample]) == [Score(5.0, {"level": 2.5, "keys": 7.0})]


def test_full_batches_leave_before_they_are_waited_for(service):
    client = RewardService(f"{service}/score/early", QUICK, "reward.function")
    waits = [client.begin(sample) for sample in samples_of(6)]
    deadline = time.monotonic() + 20
    while seen(service, "early")["requests"] < 1:
        assert time.monotonic() < deadline
    assert seen(service, "early")["requests"] == 1, "two samples are in the open batch"
    assert [wait().value for wait in waits] == [0, 1, 2, 3, 4, 5]
    assert seen(service, "early")["requests"] == 2
    client.close()


def test_concurrency_is_bounded(service):
    config = replace(QUICK, service_batch_size=1, service_concurrency=3)
    ask(f"{service}/slow-0.2/bounded", config, samples_of(9))
    assert seen(service, "bounded")["requests"] == 9 and 1 < seen(service, "bounded")["most_busy"] <= 3


@pytest.mark.parametrize("code", [429, 500, 503])
def test_passing_trouble_is_retried(service, code):
    assert [s.value for s in ask(f"{service}/flaky-{code}-2/passing{code}", QUICK, samples_of(3))] == [0, 1, 2]
    assert seen(service, f"passing{code}")["requests"] == 3


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr("megatron_rl.rewards.service.BACKOFF_SECONDS", 0.02)


def test_pauses_double(service, monkeypatch):
    """The lower bound only: 0.2 + 0.4 s; how late a thread wakes is the machine's business."""
    monkeypatch.setattr("megatron_rl.rewards.service.BACKOFF_SECONDS", 0.2)
    start = time.monotonic()
    ask(f"{service}/flaky-500-2/pauses", QUICK, samples_of(1))
    assert time.monotonic() - start >= 0.6


@pytest.mark.parametrize(
    "behavior, message, attempts",
    [
        ("status-503", "status 503: 'not today'", 3),
        ("status-422", "status 422", 1),
        ("status-404", "status 404", 1),
        ("status-307", "status 307", 1),
        ("text", "a bad answer", 3),
        ("short", "0 scores for 1 samples", 3),
        ("words", "'good' \\(str\\) as the score", 3),
        ("nan", "nan \\(float\\) as the score", 3),
        ("slow-3", "not done within reward.timeout_seconds = 0.3", 3),
        ("nested", "a bad answer", 3),
        ("drip", "not done within reward.timeout_seconds = 0.3", 3),
        ("large", "an answer of more than 4,000,000 bytes", 3),
    ],
)
def test_lasting_trouble_stops_the_run(service, behavior, message, attempts, monkeypatch):
    monkeypatch.setattr("megatron_rl.rewards.service.MAX_ANSWER_BYTES", 4_000_000)
    url = f"{service}/{behavior}/lasting-{behavior}"
    timeout = 0.3 if "0.3" in message else 20.0
    with pytest.raises(UserError, match=message) as caught:
        ask(url, replace(QUICK, timeout_seconds=timeout), [make_rollout()])
    assert f"{url} gave no scores for 1 responses in {attempts} attempt(s)" in str(caught.value)
    assert "prompt ids: 17" in str(caught.value) and caught.value.source == "reward.function"
    assert seen(service, f"lasting-{behavior}")["requests"] == attempts


@pytest.mark.parametrize("head", [b"", b"HTTP/1.1 200 OK\r\nx: "])
def test_headers_that_never_end(head):
    """A server that sends one byte of its headers every 50 ms; of TLS only the plain half is covered."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with server.accept()[0] as connection, contextlib.suppress(OSError):
                connection.sendall(head)
                while True:
                    connection.sendall(b"x")
                    time.sleep(0.05)

        threading.Thread(target=serve, daemon=True).start()
        start = time.monotonic()
        with pytest.raises(RequestFailed, match=r"timeout_seconds = 0\.5"):
            post_within(f"http://127.0.0.1:{server.getsockname()[1]}/score", b"{}", 0.5, 1000)
        assert 0.5 <= time.monotonic() - start < 10


def test_credentials_are_sent_and_not_shown(service, caplog):
    url = service.replace("http://", "http://user:token@")
    assert ask(f"{url}/user-token/secret", QUICK, samples_of(1)) == [Score(1.0)]
    config = replace(QUICK, service_on_failure="fallback", service_retries=0)
    with pytest.raises(UserError) as caught:
        ask(f"{url}/text/secret", replace(QUICK, service_retries=0), samples_of(1))
    with caplog.at_level(logging.WARNING, logger="megatron_rl"):
        ask("http://user:token@127.0.0.1:9/score", config, samples_of(1))
    for message in (str(caught.value), caplog.text):
        assert "token" not in message and "http://***@127.0.0.1" in message


def test_fallback_is_counted_and_logged(service, caplog):
    config = replace(QUICK, service_on_failure="fallback", service_retries=1)
    with caplog.at_level(logging.WARNING, logger="megatron_rl"):
        scores = ask(f"{service}/flaky-500-2/fallback", replace(config, service_concurrency=1), samples_of(6))
    failed = [replace(score, failure="") for score in scores[:4]]
    assert failed == [Score(0.0, {"service_failures": 1.0})] * 4, "both attempts of the first batch failed"
    assert all("gave no scores for 4 responses in 2 attempt(s)" in score.failure for score in scores[:4])
    assert scores[4:] == [
        Score(4.0, {"prompt_id": 104.0, "service_failures": 0.0}),
        Score(5.0, {"prompt_id": 105.0, "service_failures": 0.0}),
    ]
    assert "prompt ids: 100, 101, 102, 103; nothing is learned from them" in caplog.text


def test_fallback_does_not_hide_other_errors(service):
    """Errors outside the service, here a sample that JSON cannot hold, are raised with either policy."""
    with pytest.raises(TypeError, match="keys must be str"):
        rollout = make_rollout()
        rollout = replace(rollout, prompt=replace(rollout.prompt, extra_info={(1, 2): 3}))
        ask(f"{service}/score/keys", replace(QUICK, service_on_failure="fallback"), [rollout])


@pytest.mark.parametrize("policy", ["stop", "fallback"])
def test_service_killed_in_the_middle(policy):
    """The batch on its way and those after it fail by the policy; the batch before keeps its scores."""
    process, url = start_service()
    config = replace(QUICK, service_on_failure=policy, service_concurrency=1)
    try:
        fast, slow = (RewardService(f"{url}/{path}/kill", config, "reward.function") for path in ("score", "slow-20"))
        assert [wait().value for wait in [fast.begin(s) for s in samples_of(4)]] == [0, 1, 2, 3]
        waits = [slow.begin(sample) for sample in samples_of(8)]
        deadline = time.monotonic() + 20
        while seen(url, "kill")["most_busy"] < 1:
            assert time.monotonic() < deadline
    finally:
        stop(process)
    if policy == "fallback":
        scores = [wait() for wait in waits]
        assert [replace(score, failure="") for score in scores] == [Score(0.0, {"service_failures": 1.0})] * 8
        assert all("in 3 attempt(s); the last one: ConnectionError" in score.failure for score in scores)
    else:
        for wait in (waits[0], waits[7]):
            with pytest.raises(UserError, match=r"in 3 attempt\(s\); the last one: ConnectionError"):
                wait()
    fast.close()
    slow.close()


def test_close_does_not_wait_for_retries(service, monkeypatch):
    monkeypatch.setattr("megatron_rl.rewards.service.BACKOFF_SECONDS", 1000.0)
    client = RewardService(f"{service}/status-500/close", QUICK, "reward.function")
    for sample in samples_of(4):
        wait = client.begin(sample)
    deadline = time.monotonic() + 20
    while seen(service, "close")["requests"] < 1:
        assert time.monotonic() < deadline
    client.close()
    with pytest.raises(UserError, match="status 500"):
        wait()
