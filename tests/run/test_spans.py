# SPDX-License-Identifier: Apache-2.0
"""Spans of a run with episodes and tools: received by a collector over OTLP, and written as a file for Perfetto.

Not covered: a look at the file in Perfetto.
"""

from __future__ import annotations

import json
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from distributed import run_ranks
from megatron_rl.config.checks import check_config
from megatron_rl.config.schema import ActorConfig, ModelConfig, RunConfig
from megatron_rl.config.sections import DataConfig, ObservabilityConfig
from megatron_rl.observability.metrics import read_metrics
from megatron_rl.observability.spans import Spans
from megatron_rl.types import UserError
from rl_runs import overrides_for, train

otlp = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
otlp_services = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc")

ENVIRONMENT = """
import time
from megatron_rl.agents.environment import Observation, ToolCall
from megatron_rl.agents.tools.tool import ToolEnvironment

def look(number: int) -> str:
    time.sleep(0.002)
    return f"{number}="

class Looks(ToolEnvironment):
    def __init__(self):
        super().__init__({"look": look})

    def step(self, reply):
        return Observation([{"role": "tool", "content": self._run(ToolCall("look", {"number": 7}))}], reward=0.5)
"""
RUN = ("data.max_response_length=24", "actor.max_tokens_per_microbatch=256", "data.validation_files=[]")
TURNS, SAMPLES, STEPS = 2, 32, 2


class Collector(HTTPServer):
    """Receiver of spans: (resource attributes, span), as OpenTelemetry's own messages."""

    def __init__(self) -> None:
        self.spans: list[tuple[dict[str, Any], Any]] = []
        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        assert self.path == "/v1/traces"
        body = self.rfile.read(int(self.headers["Content-Length"]))
        for group in otlp.ExportTraceServiceRequest.FromString(body).resource_spans:
            resource = {item.key: read_value(item.value) for item in group.resource.attributes}
            self.server.spans += [(resource, span) for scope in group.scope_spans for span in scope.spans]
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


def read_value(value: Any) -> Any:
    return getattr(value, value.WhichOneof("value"))


@pytest.fixture()
def collector() -> Iterator[Collector]:
    server = Collector()
    yield server
    server.shutdown()
    server.server_close()


def test_spans_by_grpc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second transport of OpenTelemetry: the same spans, with the same ids."""
    grpc, stubs = pytest.importorskip("grpc"), otlp_services
    received: list[Any] = []

    class Service(stubs.TraceServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:
            received.extend(s for r in request.resource_spans for scope in r.scope_spans for s in scope.spans)
            return otlp.ExportTraceServiceResponse()

    server = grpc.server(ThreadPoolExecutor(1))
    stubs.add_TraceServiceServicer_to_server(Service(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
    spans = Spans(tmp_path, ObservabilityConfig(trackers=["otlp"]), 0, 7, lambda mine: [mine])
    step = spans.begin("step", 1.0, 4)
    update = spans.begin("update", 2.0, 4)
    spans.end(update, 2.5)
    spans.end(step, 3.0)
    spans.flush()
    spans.close()
    server.stop(1).wait()
    assert [(span.name, span.end_time_unix_nano - span.start_time_unix_nano) for span in received] == [
        ("update", 500_000_000),
        ("step", 2_000_000_000),
    ]
    assert received[0].parent_span_id == received[1].span_id


def play(task: Path, run: Path, *overrides: str) -> list[dict[str, Any]]:
    """The records of a run of two ranks without what depends on the machine."""
    assert run_ranks(train, 2, overrides_for(task, run, *RUN, "trainer.log_rollouts=-1", *overrides)) == [None, None]
    return read_metrics(run)


def without_machine(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    machine = (
        "time/",
        "memory/",
        "tokens/per_second",
        "throughput/",
        "mfu/",
        "agents/environment_seconds",
        "agents/wait_share",
    )
    return [{key: value for key, value in record.items() if not key.startswith(machine)} for record in records]


def test_spans_of_a_run(
    task: Path, tmp_path: Path, vllm_imported: None, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run equals the one that nothing watches; spans have its phases' names, parents and seconds; files nest."""
    (tmp_path / "looks.py").write_text(ENVIRONMENT)
    looks = (f"agents.environment={tmp_path}/looks.py:Looks", f"agents.max_turns={TURNS}")
    plain = play(task, tmp_path / "plain", *looks)
    assert not (tmp_path / "plain/traces").exists() and not collector.spans
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{collector.server_address[1]}")
    traced = ("observability.trackers=[tensorboard,otlp]", "observability.trace_steps=[2]", "trainer.profile_steps=[2]")
    watched = ("--explain", "observability.status_port=0", "trainer.max_silent_steps=9")
    records = play(task, tmp_path / "traced", *looks, *traced, *watched)
    assert without_machine(records) == without_machine(plain)
    rollouts = [(tmp_path / run / "rollouts/step_2.jsonl").read_text() for run in ("plain", "traced")]
    assert rollouts[0] == rollouts[1]
    check_sent(collector.spans, records)
    check_file(tmp_path / "traced", records[-1])


def check_sent(received: list[tuple[dict[str, Any], Any]], records: list[dict[str, Any]]) -> None:
    spans = {span.span_id: span for _, span in received}
    resources = {span.span_id: resource for resource, span in received}
    assert {(r["service.name"], r["megatron_rl.run"]) for r in resources.values()} == {("megatron_rl", "traced")}
    counts = Counter(span.name for span in spans.values())
    num_turns = round(SAMPLES * sum(record["agents/turns"] for record in records))
    assert counts["episode"] == SAMPLES * STEPS and num_turns > SAMPLES * STEPS
    assert counts["request"] == counts["tool look"] == num_turns
    assert counts["environment"] == num_turns + SAMPLES * STEPS  # reset, too
    assert counts["step"] == 2 * STEPS  # of two ranks

    def path_of(span: Any) -> list[str]:
        return [*(path_of(spans[span.parent_span_id]) if span.parent_span_id else []), span.name]

    for span in spans.values():
        path = path_of(span)
        rank = resources[span.span_id]["megatron_rl.rank"]
        start = ["step"] if rank == 0 else ["step", "step"]  # another rank's step is a child of rank 0's
        inner = ["episode", "environment", "tool look"]
        if span.name in inner:
            assert path == [*start, "rollout", *inner[: inner.index(span.name) + 1]]
        if span.name == "request":
            assert path == [*start, "rollout", "episode", "request"]
        if span.parent_span_id and spans[span.parent_span_id].name != "step":
            parent = spans[span.parent_span_id]
            assert parent.start_time_unix_nano <= span.start_time_unix_nano
            assert span.end_time_unix_nano <= parent.end_time_unix_nano and span.trace_id == parent.trace_id
    assert len({span.trace_id for span in spans.values() if span.name == "step"}) == STEPS
    first = {
        item.key: read_value(item.value)
        for span in spans.values()
        if span.name == "request"
        for item in span.attributes
    }
    assert first["gen_ai.operation.name"] == "chat" and first["gen_ai.usage.output_tokens"] > 0
    for phase in ("step", "rollout", "update", "reward"):  # rank 0's record has the times of rank 0's spans
        found = [s for s in spans.values() if s.name == phase and resources[s.span_id]["megatron_rl.rank"] == 0]
        seconds = sum(s.end_time_unix_nano - s.start_time_unix_nano for s in found) / 1e9
        assert seconds == pytest.approx(sum(record[f"time/{phase}"] for record in records), abs=1e-6)


def check_file(run_dir: Path, record: dict[str, Any]) -> None:
    assert [path.name for path in (run_dir / "traces").iterdir()] == ["step_2.json"]
    trace = json.loads((run_dir / "traces/step_2.json").read_text())
    spans = [event for event in trace["traceEvents"] if event.get("cat") == "megatron_rl"]
    named = {event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"}
    assert {"rank 0", "rank 1"} <= named and Counter(event["name"] for event in spans)["episode"] == SAMPLES
    for row in {(event["pid"], event["tid"]) for event in spans}:
        open_until: list[float] = []  # ends of the spans around, the outermost first
        events = [event for event in spans if (event["pid"], event["tid"]) == row]
        for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
            while open_until and event["ts"] >= open_until[-1]:
                open_until.pop()
            assert not open_until or event["ts"] + event["dur"] <= open_until[-1] + 1e-3
            open_until.append(event["ts"] + event["dur"])
    (step,) = [event for event in spans if event["name"] == "step" and event["pid"] < 1 << 22]
    assert step["dur"] / 1e6 == pytest.approx(record["time/step"], abs=1e-6) and step["args"] == {"step": 2}
    (ours,) = [event for event in spans if event["name"] == "rollout" and event["pid"] == step["pid"]]
    profiled = [event for event in trace["traceEvents"] if event.get("cat") == "user_annotation"]
    (theirs,) = [event for event in profiled if event["name"] == "rollout"]
    assert theirs["pid"] == step["pid"] and abs(ours["ts"] - theirs["ts"]) < 2e4  # microseconds, by two clocks
    assert any(event.get("cat") == "cpu_op" for event in trace["traceEvents"])


def test_a_missing_package_is_refused_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    rest: dict[str, Any] = dict(
        model=ModelConfig(path="m"),
        data=DataConfig(train_files=["t"], train_batch_size=8),
        actor=ActorConfig(ppo_mini_batch_size=8),
    )
    check_config(RunConfig(**rest, observability=ObservabilityConfig(trackers=["otlp"])))
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(UserError, match="needs the package opentelemetry-exporter-otlp") as caught:
        check_config(RunConfig(**rest, observability=ObservabilityConfig(trackers=["otlp"])))
    assert caught.value.source == "observability.trackers"


def test_an_unknown_protocol_is_refused_on_every_rank(
    task: Path, tmp_path: Path, vllm_imported: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "smoke signals")
    found = run_ranks(train, 2, overrides_for(task, tmp_path / "run", "observability.trackers=[tensorboard,otlp]"))
    assert [text is not None and "smoke signals" in text for text in found] == [True, True]
