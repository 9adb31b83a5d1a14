# SPDX-License-Identifier: Apache-2.0
"""The status page of a run, which rank 0 serves: one self-contained page, which polls `status.json`.

It is served from the opening of the run directory on, so that it shows the loading of models; a file with the same page
stays. The page shows how the run ended: `finished` and `stopped` come from the run, `failed` from the report at the end
of its log.
"""

from __future__ import annotations

import atexit
import json
import logging
import math
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_rl.observability.metrics import (
    SAMPLE_FIELDS,
    STOPPED_FILE,
    Record,
    Sink,
    find_metric,
    log_path,
    phase_seconds,
    replace_text,
    shorten,
    step_of,
)
from megatron_rl.observability.status_server import CHARTS_LIBRARY, PageServer, read_template
from megatron_rl.types import UserError

if TYPE_CHECKING:
    from megatron_rl.observability.failures import Position  # loads torch, which tools/runs.py does without

STATUS_FILE = "status.html"
_PARTS = Path(__file__).parent / "status_page"
_MOST_POINTS = 400  # of a curve in one response
_MOST_ALARMS = 20
_NUM_WARNINGS = 20
_MOST_PHASES = 7  # of the chart of phases
_MOST_TOKENS = 400  # of a sample
_LOOK_SECONDS = 1.0  # between two reads of the heartbeats, for any number of viewers
# A page with a request in the last _VIEWER_SECONDS is open; the end of a run waits for it, _GOODBYE_SECONDS at most.
_VIEWER_SECONDS, _GOODBYE_SECONDS = 5.0, 3.0
# Titles of the charts, in the order of the page; `chart` of a metric names one of them.
CHARTS = (
    "reward", "reward components", "reward by source", "loss", "validation accuracy",
    "tokens per second",
    "KL to the reference", "entropy", "tokens of all responses", "truncated responses, groups without signal",
    "gradient norm", "clipped tokens", "learning rate", "engine against trainer", "explained variance",
    "load of the busiest expert", "dead experts", "entropy of routers", "staleness", "busy engines",
)  # fmt: skip
# Alarm -> its first remedy; docs/health.md has more.
REMEDIES = {
    "entropy": "If the validation accuracy still rises or the task is solved, do nothing. Else raise "
    "algorithm.clip_eps_high or algorithm.entropy_coef, lower actor.lr, or add a KL term.",
    "length": "Read the longest responses in the viewer; then set an overlong penalty or another "
    "algorithm.loss_agg_mode.",
    "mismatch": "Set hybrid.verify=full, which compares every weight after each transfer.",
    "sample-size": "Lower schedule.max_staleness, or see the alarm about the mismatch.",
    "gradient": "Lower actor.lr, or warm up longer (actor.lr_warmup_steps).",
    "clipping": "Use fewer actor.ppo_epochs, larger minibatches or a smaller actor.lr.",
    "truncated": "Raise data.max_response_length, or shorten responses with an overlong penalty.",
    "no-signal": "Look at the samples: if no answer is recognized, correct the reward or the prompts; if prompts are "
    "too easy or too hard, set data.curriculum.kind or algorithm.dynamic_sampling.",
    "restating": "Read responses with the component restates_prompt, and change the reward.",
    "components": "Compare responses from before and after in the viewer, and change the weights of the components.",
    "dead-experts": "Set actor.router_bias_rate where routers have biases, and look at moe/max_load.",
    "critic": "Raise trainer.critic_warmup, or look at value/grad_norm and critic.lr.",
    "engines": "Start the lost engines again; the log has the reason of each loss. If they were only slow, raise "
    "rollout.silent_seconds.",
    "failures": "Read the first traceback in logs/rank<N>.log, and correct the environment or the service.",
}

_TAIL_BYTES = 1 << 16
# Time, level and text of a log line, or level and text of the report that ends a job.
_WARNING = re.compile(r"(?:([\d-]+ [\d:]+),\d+ rank\d+ (WARNING|ERROR|CRITICAL) \S+|(error)): (.*)")
Positions = Callable[[], "Sequence[Position | None]"]


class StatusPage(Sink):
    """Sink that serves the page of one run until `close`, under a secret path.

    Args:
        now: returns data that change between two steps; called for each response.
        file: gets the page with its data after each step and at the end, if any.
        log: rank 0's log, in which the report of a failure appears.

    Raises:
        UserError: the port is taken, or the host is not an address of this machine.
    """

    def __init__(
        self,
        name: str,
        host: str,
        port: int,
        *,
        now: Callable[[], Mapping[str, Any]],
        file: Path | None = None,
        log: Path | None = None,
    ) -> None:
        self._name, self._now, self._ranks, self._file, self._log = name, now, _Ranks(), file, log
        self._curves: dict[str, dict[str, list[tuple[float, ...]]]] = {title: {} for title in CHARTS}
        self._times: list[tuple[int, dict[str, float]]] = []
        self._samples: dict[str, Any] = {"step": None, "rows": []}
        self._alarms: list[dict[str, Any]] = []
        self._places: list[dict[str, Any]] = []
        self._list_members: Callable[[], list[dict[str, Any]]] = list
        self._updates = 0
        self._state = {"name": "running", "text": ""}
        self._log_size = log.stat().st_size if log is not None and log.exists() else 0
        self._viewers: dict[str, tuple[float, str]] = {}  # open page -> time of its last question, state that it saw
        self._is_closed = self._has_begun = False
        self._page = read_template(_PARTS, name, connect="'self'", libraries=(CHARTS_LIBRARY,))
        try:
            self._server = PageServer(host, port, self._answer, self._look_for_failure)
        except (OSError, OverflowError) as error:
            raise UserError(
                f"{host}:{port} cannot be served: {error}",
                source="observability.status_port",
                expected="a free port, and an address of this machine",
                hint="choose another one, or 0 for any free port",
            ) from error
        self.url = self._server.url
        self._server.serve()
        atexit.register(self.close)  # of a run that fails before its first step

    def begin(self, records: Sequence[Record], positions: Positions) -> None:
        """Add the records of a resumed run to the curves, and show the heartbeats of ranks.

        Args:
            positions: returns the last heartbeat of each rank; empty without a watchdog.
        """
        self._ranks, self._has_begun = _Ranks(positions), True
        for record in records:
            self._add(step_of(record), record)

    def place(self, roles: Mapping[str, Any], engines: Sequence[Sequence[int]], updates: int) -> None:
        """Set the map of ranks, and the optimizer steps of a step.

        Args:
            roles: `RoleInputs` by name.
            engines: ranks of each rollout engine.
            updates: optimizer steps of a step.
        """
        found: dict[int, dict[str, str]] = {}
        for role in roles.values():
            layout = role.layout
            sizes = {"tp": layout.tp_size, "pp": layout.pp_size, "dp": layout.dp_size, "cp": layout.cp_size}
            for rank in layout.ranks:
                at = layout.coordinates(rank)
                where = [f"{axis}{getattr(at, axis)}" for axis, size in sizes.items() if size > 1]
                found.setdefault(rank, {})[role.spec.title] = " ".join(where)
        for number, members in enumerate(engines):
            for place, rank in enumerate(members):
                found.setdefault(rank, {})[f"engine {number}"] = f"tp{place}" if len(members) > 1 else ""
        self._places = [{"rank": rank, "roles": found[rank]} for rank in sorted(found)]
        self._updates = updates

    def follow_engines(self, list_members: Callable[[], list[dict[str, Any]]]) -> None:
        """Add engines outside the job to the map; `list_members` is called for each response."""
        self._list_members = list_members

    def log(self, step: int, record: Record) -> None:
        """Append the metrics of a step to the curves, and write the file."""
        self._add(step, record)
        self._write()

    def _add(self, step: int, record: Record) -> None:
        for key, value in record.items():
            metric = find_metric(key)
            if metric is not None and metric.chart and value is not None and math.isfinite(value):
                lines = self._curves.setdefault(metric.chart, {})
                lines.setdefault(key, []).append((step, value, *_find_band(record, key, value)))
        times = phase_seconds(record)
        if "verify" in times and "reshard" in times:  # the one is a part of the other
            times["reshard"] = max(0.0, times["reshard"] - times["verify"])
        if times:
            rest = (record.get("time/step") or 0.0) - sum(times.values())
            self._times.append((step, times | ({"other": rest} if rest > 0 else {})))

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Replace the previous step's rollouts."""
        if rows:
            self._samples = {"step": step, "rows": [_describe_sample(row) for row in rows]}

    def alarm(self, step: int, name: str, text: str) -> None:
        """Show the alarm above the curves, the newest first, with a remedy."""
        self._alarms.insert(0, {"step": step, "name": name, "text": text, "remedy": REMEDIES.get(name, "")})

    def end(self, name: str, text: str) -> None:
        """Show how the run ended, unless it has ended already.

        Args:
            name: "finished", "stopped" or "failed".
        """
        if self._state["name"] == "running":
            self._state = {"name": name, "text": text}

    def status(self) -> dict[str, Any]:
        """Return the content of status.json."""
        charts = [
            {"title": title, "lines": [{"name": key, "points": thin(points)} for key, points in list(lines.items())]}
            for title, lines in list(self._curves.items())
            if lines
        ]
        return {
            "run": self._name,
            "state": self._state,
            **self._now(),
            "directory": str(self._file.parent) if self._file else "",
            "warnings": read_warnings(self._log, _NUM_WARNINGS) if self._log else [],
            "ranks": self._ranks.look(),
            "places": self._places,
            "members": self._list_members(),
            "all_updates": self._updates,
            "alarms": self._alarms[:_MOST_ALARMS],
            "charts": charts,
            "times": average(self._times),
            "samples": self._samples,
        }

    def _answer(self, file: str, query: str) -> tuple[str, bytes] | None:
        if file == "":
            return "text/html; charset=utf-8", self._page.encode()
        if file != "status.json":
            return None
        status = self.status()
        if query:  # of an open page, which names itself; a script's request has none
            self._viewers[query[:32]] = time.monotonic(), status["state"]["name"]
        return "application/json", json.dumps(status, allow_nan=False).encode()

    def freeze(self) -> str:
        """Return the page with its current data in it, without polling."""
        data = json.dumps({**self.status(), "written": time.strftime("%Y-%m-%d %H:%M:%S")}, allow_nan=False)
        data = data.replace("<", "\\u003c")
        return self._page.replace("<main>", f'<script type="application/json" id="frozen">{data}</script>\n<main>', 1)

    def _write(self) -> None:
        # The file of an earlier attempt stays if this one ends before it has records.
        if self._file is not None and (self._has_begun or not self._file.exists()):
            replace_text(self._file, self.freeze(), errors="replace")

    def _look_for_failure(self) -> None:
        """Show and keep the report of a failure once it is in the log; the process may end without `close`."""
        if self._log is None or self._state["name"] != "running" or not self._log.exists():
            return
        if (size := self._log.stat().st_size) != self._log_size:
            found = read_warnings(self._log, 1, since=self._log_size)
            self._log_size = size
            if found and found[0]["time"] is None:
                self.end("failed", str(found[0]["text"]))
                self._write()

    def close(self) -> None:
        """Write the file and stop serving, as soon as open pages have seen how the run ended."""
        if self._is_closed:
            return
        self._is_closed = True
        atexit.unregister(self.close)
        self._look_for_failure()
        stop = self._file and self._file.with_name(STOPPED_FILE)
        if stop and stop.exists() and self._state["name"] == "running":
            found = json.loads(stop.read_text(encoding="utf-8"))
            self.end("stopped", f"{found['signal']} after step {found['step']}: the same command resumes the run.")
        self.end("stopped", "")
        self._write()
        deadline = time.monotonic() + _GOODBYE_SECONDS
        while time.monotonic() < deadline and any(
            seen == "running" and time.monotonic() - asked < _VIEWER_SECONDS
            for asked, seen in list(self._viewers.values())
        ):
            time.sleep(0.05)
        self._server.stop()


def open_page(run_dir: Path, settings: Any, now: Callable[[], Mapping[str, Any]], log: logging.Logger) -> StatusPage:
    """Serve the page of a run by `settings`, an `ObservabilityConfig`, and log its address."""
    files = {"file": run_dir / STATUS_FILE, "log": log_path(run_dir, 0)}
    page = StatusPage(run_dir.resolve().name, *settings.status_address, now=now, **files)
    log.info("status page: %s", page.url)
    return page


def _find_band(record: Record, key: str, value: float) -> tuple[float, ...]:
    """Return the bounds of a mean: a standard deviation to each side, else minimum and maximum; () without them."""
    base = key.removesuffix("mean")
    if base == key:
        return ()
    spread, low, high = (record.get(f"{base}{name}") for name in ("std", "min", "max"))
    if spread is not None and math.isfinite(spread):
        return value - spread, value + spread
    return (low, high) if low is not None and high is not None else ()


def _describe_sample(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the texts of a rollout, and its tokens as [text, advantage, log-prob], of which a run may lack some."""
    found: dict[str, Any] = {k: _text(row[k]) for k in SAMPLE_FIELDS if row.get(k) not in (None, {})}
    if texts := row.get("token_texts"):
        nothing = [None] * len(texts)
        columns = (row.get(name) or nothing for name in ("advantages", "rollout_logprobs"))
        found["tokens"] = list(zip(texts, *columns))[:_MOST_TOKENS]
        found["num_tokens"] = len(texts)
    return found


class _Ranks:
    """Cache of the ranks' heartbeats and of the seconds since each changed, refreshed at most once a second."""

    def __init__(self, positions: Positions = tuple) -> None:
        self._positions, self._lock = positions, threading.Lock()
        self._heard: dict[int, tuple[int, float]] = {}  # rank -> its last `looks`, and the time of their change
        self._last: list[dict[str, Any]] = []
        self._looked_at = -math.inf

    def look(self) -> list[dict[str, Any]]:
        """Return per rank its step, phase, collective and silent seconds, for status.json."""
        with self._lock:
            now = time.monotonic()
            if now - self._looked_at >= _LOOK_SECONDS:
                self._last = [self._describe(rank, beat, now) for rank, beat in enumerate(self._positions())]
                self._looked_at = now
            return self._last

    def _describe(self, rank: int, beat: Position | None, now: float) -> dict[str, Any]:
        if beat is None:
            return {"rank": rank}
        looks, since = self._heard.get(rank, (beat.looks, now))
        since = since if looks == beat.looks else now
        self._heard[rank] = beat.looks, since
        return {
            "rank": rank,
            "step": beat.step,
            "phase": beat.phase,
            "operation": beat.operation,
            "seconds": round(beat.seconds, 1),
            "silent_seconds": round(now - since, 1),
            "has_left": beat.is_closed,
            "memory": beat.memory,
        }


def read_warnings(path: Path, most: int, since: int = 0) -> list[dict[str, str | None]]:
    """Return time, level and text of the last warnings and errors of a log, the newest first, without alarms.

    Args:
        since: byte of the log from which on to read.
    """
    try:
        with path.open("rb") as file:
            file.seek(max(since, path.stat().st_size - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").split("\n")
    except OSError:
        return []
    found: list[dict[str, str | None]] = []
    is_open = False
    for line in lines:
        if match := _WARNING.match(line):
            time, level, report, text = match.groups()
            is_open = not text.startswith("health: ")
            if is_open:
                found.append({"time": time, "level": (level or report).lower(), "text": text})
        elif is_open and line.startswith("  "):
            found[-1]["text"] = f"{found[-1]['text']}\n{line}"
        else:
            is_open = False
    return found[-most:][::-1]


def thin(points: Sequence[tuple[float, ...]]) -> list[tuple[float, ...]]:
    """Return at most _MOST_POINTS of the points, evenly spaced, with the last one."""
    stride = -(-len(points) // _MOST_POINTS)
    return list(points[::-1][::stride][::-1]) if points else []


def average(times: Sequence[tuple[int, Mapping[str, float]]]) -> dict[str, Any]:
    """Return mean seconds by phase, largest phase first, of at most _MOST_POINTS groups of consecutive steps.

    All but the _MOST_PHASES largest phases are counted as "other".

    Returns:
        `steps`: the last step of each group, and `seconds` by phase, one number per group.
    """
    size = max(1, -(-len(times) // _MOST_POINTS))
    groups = [times[first : first + size] for first in range(0, len(times), size)]
    sums: dict[str, float] = {}
    for _, seconds in times:
        for name, value in seconds.items():
            sums[name] = sums.get(name, 0.0) + value
    named = sorted(sums.keys() - {"other"}, key=lambda name: -sums[name])[:_MOST_PHASES]
    means = {name: [0.0] * len(groups) for name in [*named, *(["other"] if len(named) < len(sums) else [])]}
    for place, group in enumerate(groups):
        for _, seconds in group:
            for name, value in seconds.items():
                means[name if name in named else "other"][place] += value / len(group)
    return {"steps": [group[-1][0] for group in groups], "seconds": means}


def _text(value: Any) -> str:
    return shorten(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
