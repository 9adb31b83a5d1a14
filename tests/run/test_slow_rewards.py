# SPDX-License-Identifier: Apache-2.0
"""A reward service that is slower than generation and training, in every schedule: nothing is lost or out of order.

Not covered: a service that fails (tests/test_reward_service_in_loop.py), and the cost of waiting for it.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from distributed import run_ranks
from rl_runs import overrides_for, read_records, train

SETTINGS = [
    "data.validation_files=[]",
    "data.shuffle=false",
    "trainer.total_steps=4",
    "trainer.save_freq=null",
    "trainer.log_rollouts=-1",
    "rollout.max_num_seqs=3",
    "rollout.dispatch=samples",
    "reward.service_batch_size=2",
]
AHEAD = ["schedule.max_staleness=1", "algorithm.importance_sampling=token-truncate"]
APART = ["placement.actor=0", "placement.reference=0", "placement.rollout=1"]
PAUSES = (0.3, 0.0, 0.05)  # seconds, of one request after another


class _SlowService(BaseHTTPRequestHandler):
    """The score of a response is its length."""

    def do_POST(self) -> None:
        samples = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["samples"]
        time.sleep(PAUSES[samples[0]["sample_index"] % len(PAUSES)])
        answer = json.dumps({"scores": [{"score": float(len(sample["response"]))} for sample in samples]}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: object) -> None:
        """A test's output has no place for it."""


@pytest.fixture(scope="module")
def service() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _SlowService)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/score"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize(
    "schedule",
    [
        pytest.param([], id="synchronous"),
        pytest.param(AHEAD, id="colocated", marks=pytest.mark.slow),
        pytest.param([*AHEAD, *APART], id="own ranks"),
    ],
)
def test_every_response_is_scored_once_and_in_order(
    schedule: list[str], service: str, task: Path, tmp_path: Path, vllm_imported: None
) -> None:
    """Two passes over sixteen prompts in four steps: each prompt once in each pass, four samples, its own reward."""
    overrides = overrides_for(task, tmp_path / "run", *SETTINGS, *schedule, f"reward.function={service}")
    assert run_ranks(train, 2, overrides, timeout=150) == [None, None]
    steps = [
        [json.loads(line) for line in (tmp_path / f"run/rollouts/step_{step}.jsonl").read_bytes().splitlines()]
        for step in range(1, 5)
    ]
    assert all(row["reward"] == len(row["response"]) for rows in steps for row in rows)
    found = [[(row["prompt_id"], row["sample_index"]) for row in rows] for rows in steps]
    batches = [range(8), range(8, 16)] * 2
    assert found == [[(prompt, sample) for prompt in batch for sample in range(4)] for batch in batches]
    records = read_records(tmp_path / "run")
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    assert all(record.get("schedule/staleness_max", 0) <= bool(schedule) for record in records)
