# SPDX-License-Identifier: Apache-2.0
"""The example service as a process of its own: scores, help, a clean end, and a port that is taken."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests

from distributed import find_free_port
from megatron_rl.config.schema import RewardConfig
from megatron_rl.rewards.plan import build_reward_plan, open_scorer
from reward_samples import decode, make_rollout

TOOL = Path(__file__).resolve().parents[2] / "tools" / "reward_service.py"


@pytest.fixture
def service() -> Iterator[tuple[subprocess.Popen[str], int]]:
    port = find_free_port()
    process = subprocess.Popen([sys.executable, str(TOOL), f"--port={port}"], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            break
        except OSError:
            assert process.poll() is None and time.monotonic() < deadline, "the service did not start"
            time.sleep(0.02)
    yield process, port
    process.kill()
    process.communicate()


def test_trainer_side_and_service_agree(service):
    """A scorer with this service, the way a run has it; then SIGTERM, as a scheduler sends it."""
    process, port = service
    config = RewardConfig(function=f"http://127.0.0.1:{port}/score", service_retries=0)
    rollouts = [make_rollout(r, t) for r, t in [("82", "82"), (r"\boxed{\frac{1}{2}}", "0.5"), ("#### 83", "82")]]
    scorer = open_scorer(build_reward_plan(config, 100), decode)
    rollouts = scorer.finish(rollouts)
    scorer.close()
    assert [r.reward for r in rollouts] == [0.0, 1.0, 0.0]
    assert [(r.reward_components["format"], r.reward_components["unmarked_answers"]) for r in rollouts] == [
        (0.0, 1.0),
        (1.0, 0.0),
        (1.0, 0.0),
    ]
    refused = requests.post(f"http://127.0.0.1:{port}/score", json={"samples": [{"response": "82"}]}, timeout=20)
    assert refused.status_code == 422
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0
    assert process.stderr.read() == ""


def test_port_that_is_taken(service):
    """Exits with an error that names the port; Ctrl-C ends the first one cleanly."""
    process, port = service
    second = subprocess.run([sys.executable, str(TOOL), f"--port={port}"], capture_output=True, text=True, timeout=60)
    assert second.returncode != 0 and str(port) in second.stderr and "Traceback" not in second.stderr
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 0


def test_help_names_the_options():
    result = subprocess.run([sys.executable, str(TOOL), "--help"], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0 and "--host" in result.stdout and "--port" in result.stdout
