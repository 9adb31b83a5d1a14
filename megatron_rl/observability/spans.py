# SPDX-License-Identifier: Apache-2.0
"""Spans of a run for OpenTelemetry and Perfetto: phases of a step, requests to engines, episodes, and their tools.

    step                     a phase of `PhaseTimers`, with the same start and end as time/<phase>
      rollout
        episode              one per sample with an environment, from its start to its last answer
          request            one per reply
          environment        reset, or the answer to a reply (a program: all between two requests)
            tool <name>      one per call
        request              of a sample without an environment
      update ...

All ranks of a step have one trace; the outermost phases of other ranks are children of rank 0's. Spans are kept in a
list, and sent by a thread after each record, so that a slow collector does not slow the run.
"""

from __future__ import annotations

import gzip
import json
import logging
import os
import random
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

from megatron_rl.config.sections import ObservabilityConfig
from megatron_rl.observability.metrics import replace_text
from megatron_rl.types import Prompt, UserError

_BATCH = 512  # spans of one message
_MOST_WAITING = 8  # records whose spans may wait to be sent
_PROCESS_BITS = 22  # of a process number in Linux; above them is the rank
_LANE = 100  # number of the first row for requests and episodes in a file
_LOG = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Span:
    """A named part of a step; times in seconds of `time.perf_counter`, `end` is 0 while it is open."""

    name: str
    start: float
    parent: Span | None
    trace: int
    number: int  # its id in the trace
    attributes: dict[str, Any] = field(default_factory=dict)
    end: float = 0.0
    error: str = ""

    def close(self, end: float) -> None:
        """Set the end."""
        self.end = end

    def fail(self, error: str) -> None:
        """Set the error."""
        self.error = error


class Spans:
    """Recorder of one rank's spans.

    Args:
        run_dir: gets traces/step_<N>.json.
        session: a random number, equal on all ranks.
        gather: returns an object of every rank, in rank order; collective.

    Raises:
        UserError: a variable of OpenTelemetry has a value that its exporter refuses.
    """

    def __init__(
        self,
        run_dir: Path,
        settings: ObservabilityConfig,
        rank: int,
        session: int,
        gather: Callable[[Any], Sequence[Any]],
    ) -> None:
        self._dir, self._rank, self._session, self._gather = run_dir, rank, session, gather
        self._steps = frozenset(settings.trace_steps)
        self._chance = random.Random(os.urandom(16))  # a generator of its own: the run's are left alone
        self._offset = time.time_ns() - round(time.perf_counter() * 1e9)
        self._open: list[Span] = []  # phases, the outermost first
        self._running: dict[Hashable, Span] = {}  # requests and episodes
        self._ended: list[Span] = []
        self._step: int | None = None  # number of a step that has ended since the last `flush`
        self._sender = _Sender(run_dir, self._rank) if "otlp" in settings.trackers else None

    def begin(self, name: str, start: float, step: int) -> Span:
        """Open a phase within the current one."""
        if self._open:
            span = self._child(name, start, self._open[-1])
        else:
            trace, attributes = self._digest(f"{step}", 16), {"step": step}
            span = Span(name, start, None, trace, self._digest(f"{step} {name}", 8), attributes)
            if self._rank:
                span = Span(name, start, span, trace, self._chance.getrandbits(64), attributes)
        self._open.append(span)
        return span

    def end(self, span: Span, end: float) -> None:
        """Close a phase."""
        self._open.remove(span)
        if span.name == "step":
            self._step = span.attributes["step"]
        self._close(span, end)

    def begin_requests(self, owner: Hashable, requests: Iterable[Any]) -> None:
        """Open the spans of `protocol.Request`s that an engine gets; `owner` has at most one per key at a time."""
        for request in requests:
            episode = self._running.get(("episode", owner, request.key))
            span = self._begin_running(("request", owner, request.key), "request", episode)
            span.attributes.update({"sample": request.key, "turn": request.turn, "gen_ai.operation.name": "chat"})
            span.attributes["gen_ai.usage.input_tokens"] = len(request.tokens)

    def end_request(self, owner: Hashable, sampled: Any) -> None:
        """Close the span of a request that has got its response, a `protocol.Sampled`."""
        span = self._running.pop(("request", owner, sampled.key), None)
        if span is not None:
            span.attributes["gen_ai.usage.output_tokens"] = len(sampled.tokens)
            span.attributes["gen_ai.response.finish_reasons"] = [sampled.finish_reason]
            self._close(span, time.perf_counter())

    def begin_episode(self, key: tuple[Hashable, int], prompt: Prompt) -> None:
        """Open the span of an episode; `key`: its owner, as in `begin_requests`, and its number there."""
        span = self._begin_running(("episode", *key), "episode", None)
        span.attributes.update({"sample": key[1], "prompt_id": prompt.prompt_id, "source": prompt.source})

    def add_answer(self, key: tuple[Hashable, int], answer: Any) -> None:
        """Add the spans of an environment's `episode.Answer` and of its tools; the last answer closes the episode."""
        episode = self._running.get(("episode", *key))
        if episode is None:
            return
        if answer.began:
            environment = self._child("environment", answer.began, episode)
            for name, start, end in answer.calls:
                tool = self._child(f"tool {name}", start, environment)
                tool.attributes.update({"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": name})
                self._close(tool, end)
            self._close(environment, answer.began + answer.seconds)
        if answer.tail is None:
            self.end_episode(key, answer.finish_reason or "done", answer.failure)

    def end_episode(self, key: tuple[Hashable, int], reason: str, failure: str = "") -> None:
        """Close the span of an episode, if it is open."""
        span = self._running.pop(("episode", *key), None)
        if span is not None:
            span.attributes["finish_reason"] = reason
            span.fail(failure.strip().rpartition("\n")[2])
            self._close(span, time.perf_counter())

    def follow(self, processes: Any) -> Any:
        """Return a proxy of the environments' processes, `in_rank.AnyEpisodes`, that records their episodes."""
        return _FollowedEpisodes(processes, self)

    def flush(self) -> None:
        """Send the spans that have ended; after a step of `trace_steps` also write its file, which is collective."""
        ended, self._ended = self._ended, []
        step, self._step = self._step, None
        if step in self._steps:
            found = self._gather(self._describe_events(ended))
            if self._rank == 0:
                folder = self._dir / "traces"
                folder.mkdir(exist_ok=True)
                events = [event for events in found for event in events]
                text = json.dumps(join_profiles(events, self._dir / "profile", step))
                replace_text(folder / f"step_{step}.json", text)
        if self._sender is not None and ended:
            self._sender.send([self._place(span) for span in ended])

    def close(self) -> None:
        """Send the rest, and wait for it."""
        if self._sender is not None:
            self._sender.send([self._place(span) for span in self._ended])
            self._sender.close()

    def _digest(self, text: str, size: int) -> int:
        return int.from_bytes(blake2b(f"{self._session} {text}".encode(), digest_size=size).digest(), "big")

    def _child(self, name: str, start: float, parent: Span) -> Span:
        return Span(name, start, parent, parent.trace, self._chance.getrandbits(64))

    def _begin_running(self, key: Hashable, name: str, parent: Span | None) -> Span:
        span = self._running[key] = self._child(name, time.perf_counter(), parent or self._open[-1])
        return span

    def _close(self, span: Span, end: float) -> None:
        span.close(end)
        self._ended.append(span)

    def _place(self, span: Span) -> tuple[Span, int, int]:
        """Return a span with its start and end in nanoseconds since 1970."""
        return span, round(span.start * 1e9) + self._offset, round(span.end * 1e9) + self._offset

    def _describe_events(self, spans: Sequence[Span]) -> list[dict[str, Any]]:
        """Return Chrome events with times in nanoseconds; episodes and requests are in rows in which none overlap."""
        process = (self._rank << _PROCESS_BITS) + os.getpid()
        is_loose = {span: span.name == "episode" or span.name == "request" for span in spans}
        rows, free = dict.fromkeys((span for span in spans), 1), list[float]()
        for span in sorted(spans, key=lambda span: (span.start, -span.end)):
            if span.parent is not None and rows.get(span.parent, 1) != 1:
                rows[span] = rows[span.parent]
            elif is_loose[span] or (span.parent is not None and span.parent.name in ("episode", "environment")):
                row = next((row for row, end in enumerate(free) if end <= span.start), len(free))
                free[row : row + 1] = [span.end]
                rows[span] = _LANE + row
        names = {1: "phases"} | {_LANE + row: f"requests {row}" for row in range(len(free))}
        events = [_name_event("process_name", process, 0, f"rank {self._rank}")]
        events += [_name_event("thread_name", process, row, name) for row, name in names.items()]
        for span, start, end in map(self._place, spans):
            arguments = span.attributes | ({"error": span.error} if span.error else {})
            event = {"ph": "X", "cat": "megatron_rl", "name": span.name, "pid": process, "tid": rows[span]}
            events.append(event | {"ts": start, "dur": end - start, "args": arguments})
        return events


def _name_event(kind: str, process: int, row: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": row, "args": {"name": name}}


def join_profiles(events: Sequence[dict[str, Any]], folder: Path, step: int) -> dict[str, Any]:
    """Return Chrome's trace of events and of the profiler's files of the step, in microseconds after its base time.

    Args:
        events: with `ts` and `dur` in nanoseconds since 1970.
        folder: of step_<N>_rank_<R>.json.gz, if the step was profiled.
    """
    files = sorted(folder.glob(f"step_{step}_rank_*.json.gz"))
    base, joined = min((event["ts"] for event in events if "ts" in event), default=0), list[dict[str, Any]]()
    for file in files:
        with gzip.open(file, "rt", encoding="utf-8") as stream:
            profile = json.load(stream)
        rank = int(file.name.removesuffix(".json.gz").rpartition("_")[2])
        shift = (profile.get("baseTimeNanoseconds", 0) - base) / 1000
        for event in profile["traceEvents"]:
            if isinstance(event.get("pid"), int):
                event["pid"] += rank << _PROCESS_BITS
            if event["ph"] == "M" and event["name"] == "process_name":
                continue  # the rank's name is among the other events
            joined.append(event | ({"ts": event["ts"] + shift} if "ts" in event else {}))
    for event in events:
        moved = {"ts": (event["ts"] - base) / 1000, "dur": event["dur"] / 1000} if "ts" in event else {}
        joined.append(event | moved)
    return {"traceEvents": joined, "displayTimeUnit": "ms", "baseTimeNanoseconds": base}


class _FollowedEpisodes:
    """Proxy of the processes of environments, with the spans of their episodes."""

    def __init__(self, processes: Any, spans: Spans) -> None:
        self._processes, self._spans = processes, spans
        self.send_reply, self.close_all = processes.send_reply, processes.close_all

    def open(self, key: Any, prompt: Prompt) -> None:
        self._spans.begin_episode(key, prompt)
        self._processes.open(key, prompt)

    def wait(self) -> Mapping[Any, Any]:
        answers = self._processes.wait()
        for key, answer in answers.items():
            self._spans.add_answer(key, answer)
        return answers

    def close(self, key: Any) -> None:
        self._spans.end_episode(key, "length or dropped")
        self._processes.close(key)


class _Sender:
    """Thread that sends spans by OTLP, set up by OpenTelemetry's own variables (OTEL_EXPORTER_OTLP_ENDPOINT ...)."""

    def __init__(self, run_dir: Path, rank: int) -> None:
        from opentelemetry.sdk.resources import Resource

        protocol = os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
        protocol = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", protocol)
        try:
            if protocol == "grpc":
                from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
            elif protocol == "http/protobuf":
                from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            else:
                raise ValueError(f"OTEL_EXPORTER_OTLP_PROTOCOL = {protocol!r}")
            self._exporter = OTLPSpanExporter()
        except ValueError as error:
            raise UserError(
                f"spans cannot be sent: {error}",
                source="otlp in observability.trackers, and the environment variables of OpenTelemetry",
                expected="OTEL_EXPORTER_OTLP_PROTOCOL = http/protobuf or grpc, and valid values of the others",
                hint="correct the variable on every rank, or leave otlp out of observability.trackers",
            ) from error
        named = {"service.name": "megatron_rl"} if "OTEL_SERVICE_NAME" not in os.environ else {}
        own = {"service.instance.id": f"{run_dir.name}/rank{rank}", "megatron_rl.run": run_dir.name}
        self._resource = Resource.create({**named, **own, "megatron_rl.rank": rank})
        self._thread = ThreadPoolExecutor(1, "spans")
        self._waiting: list[Future[None]] = []
        self._has_warned = False

    def send(self, spans: Sequence[tuple[Span, int, int]]) -> None:
        """Send spans in the background; if the collector is too slow, they are lost with a warning."""
        self._waiting = [future for future in self._waiting if not future.done()]
        if len(self._waiting) < _MOST_WAITING:
            self._waiting.append(self._thread.submit(self._export, spans))
        else:
            self._warn()

    def close(self) -> None:
        """Wait until all is sent or refused."""
        self._thread.shutdown()
        self._exporter.shutdown()

    def _warn(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            _LOG.warning("spans are lost: the collector of OTEL_EXPORTER_OTLP_ENDPOINT is slow or does not answer")

    def _export(self, spans: Sequence[tuple[Span, int, int]]) -> None:
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.sdk.trace.export import SpanExportResult
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope
        from opentelemetry.trace import SpanContext, Status, StatusCode, TraceFlags

        scope, sampled = InstrumentationScope("megatron_rl"), TraceFlags(TraceFlags.SAMPLED)

        def convert(span: Span, start: int, end: int) -> ReadableSpan:
            parent = span.parent and SpanContext(span.parent.trace, span.parent.number, False, sampled)
            return ReadableSpan(
                span.name,
                context=SpanContext(span.trace, span.number, False, sampled),
                parent=parent,
                resource=self._resource,
                attributes=span.attributes,
                status=Status(StatusCode.ERROR, span.error) if span.error else Status(),
                start_time=start,
                end_time=end,
                instrumentation_scope=scope,
            )

        for first in range(0, len(spans), _BATCH):
            batch = [convert(*placed) for placed in spans[first : first + _BATCH]]
            if self._exporter.export(batch) is not SpanExportResult.SUCCESS:
                self._warn()
