# SPDX-License-Identifier: Apache-2.0
"""The status page over real HTTP, its refusals, and its handling of hostile texts in Chromium.

The browser test needs playwright and a Chromium on the PATH and is skipped without. Not covered: other browsers.
"""

from __future__ import annotations

import http.client
import json
import logging
import re
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote, urlsplit

import pytest

from megatron_rl.config.schema import ObservabilityConfig
from megatron_rl.observability.failures import Position
from megatron_rl.observability.progress import LOGGER_NAME, RolloutCount, close_rank_log, show_error
from megatron_rl.observability.run import CHECKS, Run
from megatron_rl.observability.status import REMEDIES, StatusPage, average, thin
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.types import UserError

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
HOSTILE = "</pre><script>window.hacked=1</script><img src=x onerror='window.hacked=2'>{{script}} &lt;b&gt; \u2028"
CONFIG_YAML = f"model:\n  path: {HOSTILE}\n"
CONFIG = ObservabilityConfig(trackers=[], status_port=0)


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[tuple[Run, str]]:
    """Return a run with a hostile name that serves its page, and the address that it printed."""
    run = Run(tmp_path / "<b>{{script}}", CONFIG_YAML, 4, CONFIG, 0)
    run.start(
        None,
        lambda: [
            Position(0, 2, "update", 9, None, None, "step.py:1 in f", 0.2, 5),
            Position(1, 2, "update", 9, "all_reduce", (0, 1), HOSTILE, 12.0, 5, memory=3 << 29),
            None,
        ],
    )
    yield run, re.search(r"status page: (http://127\.0\.0\.1:\d+/[\w-]{22}/)\n", capsys.readouterr().out)[1]
    run.close()
    close_rank_log(logging.getLogger(LOGGER_NAME))


def learn(run: Run, stack: ExitStack) -> None:
    """Run two and a half steps; closing the stack leaves the phases of the third."""
    for step in (1, 2):
        run.count(
            {"reward/mean": step / 4, "kl/mean": float("nan")}
            | ({"validation/sums/accuracy": 0.5} if step == 2 else {})
        )
        run.write_rollouts(
            step,
            [
                {
                    "prompt": HOSTILE,
                    "response": f"{step}{HOSTILE}",
                    "ground_truth": "4",
                    "reward": 0.5,
                    "finish_reason": "stop",
                }
            ],
        )
        run.record(step)
    run.log.info("nothing to see")
    run.log.warning("slow disk: %s", HOSTILE)
    stack.enter_context(run.timers.phase("step"))
    stack.enter_context(run.timers.phase("rollout"))
    run._show_rollout(RolloutCount(3, 8, 100, 50.5, 2.0))


def ask(url: str, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
    """Request a path below the page's address, or from the server's root if it begins with "/"."""
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.netloc, timeout=10)
    try:
        connection.request(method, path if path.startswith("/") else address.path + path, headers=headers)
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        connection.close()


def test_status_says_where_the_run_is(run: tuple[Run, str]) -> None:
    with ExitStack() as stack:
        learn(run[0], stack)
        code, headers, body = ask(run[1], "status.json")
    status = json.loads(body)
    assert (code, headers["Content-Type"], headers["Cache-Control"]) == (200, "application/json", "no-store")
    assert (status["run"], status["step"], status["total_steps"], status["phase"]) == ("<b>{{script}}", 2, 4, "rollout")
    assert status["phase_seconds"] >= 0 and status["elapsed_seconds"] > 0 and status["remaining_seconds"] >= 0
    assert status["rollout"] == {"finished": 3, "total": 8, "tokens": 100, "tokens_per_second": 50.5, "seconds": 2.0}
    assert [rank.get("operation", "-") for rank in status["ranks"]] == [None, "all_reduce", "-"]
    assert status["ranks"][1] == {
        "rank": 1,
        "step": 2,
        "phase": "update",
        "operation": "all_reduce",
        "seconds": 12.0,
        "silent_seconds": 0.0,
        "has_left": False,
        "memory": 3 << 29,
    }
    assert status["config"] == CONFIG_YAML and status["directory"] == str(run[0].dir)
    assert status["state"] == {"name": "running", "text": ""} and status["updates"] == 0
    assert [entry["text"] for entry in status["warnings"]] == [f"slow disk: {HOSTILE}"]
    assert {chart["title"]: chart["lines"] for chart in status["charts"]} == {
        "reward": [{"name": "reward/mean", "points": [[1, 0.25], [2, 0.5]]}],
        "validation accuracy": [{"name": "validation/sums/accuracy", "points": [[2, 0.5]]}],
    }
    assert status["samples"] == {
        "step": 2,
        "rows": [
            {
                "prompt": HOSTILE,
                "response": "2" + HOSTILE,
                "ground_truth": "4",
                "reward": "0.5",
                "finish_reason": "stop",
            }
        ],
    }


def test_thirds_of_the_layers_are_lines_of_one_chart() -> None:
    """A chart has a metric and its thirds, but no other metric."""
    keys = ["moe/max_load", "moe/max_load/first", "moe/max_load/last", "moe/mean_load", "moe/entropy/last"]
    page = StatusPage("run", "127.0.0.1", 0, now=dict)
    page.log(1, dict.fromkeys(keys, 1.0))
    charts = page.status()["charts"]
    page.close()
    assert {chart["title"]: [line["name"] for line in chart["lines"]] for chart in charts} == {
        "load of the busiest expert": keys[:3],
        "entropy of routers": keys[4:],
    }


def test_only_two_paths_and_two_methods(run: tuple[Run, str]) -> None:
    run_dir = run[0].dir
    (run_dir / "config.yaml").write_text("secret")
    for path in ("config.yaml", "../config.yaml", "/etc/passwd", f"/{run_dir}/config.yaml", "status.json/", "x"):
        code, _, body = ask(run[1], path)
        assert code == 404 and b"secret" not in body, path
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "PATCH"):
        assert ask(run[1], "", method)[0] == 501
    code, headers, body = ask(run[1], "", "HEAD")
    assert (code, body) == (200, b"") and int(headers["Content-Length"]) > 1000
    code, headers, body = ask(run[1], "?x=1")
    page = body.decode()
    assert code == 200 and headers["X-Content-Type-Options"] == "nosniff"
    assert page.count("<script") == 1 and "<b>" not in page and "{{" not in page
    forbidden = r"innerHTML|insertAdjacentHTML|document\.write|eval\(|https?://(?!github\.com/leeoniya/uPlot )"
    assert not re.search(forbidden, page)
    policy = re.search('Content-Security-Policy" content="([^"]+)"', page)[1]
    assert "default-src 'none'" in policy and "connect-src 'self'" in policy and "unsafe" not in policy


def test_only_who_knows_the_token_is_answered(run: tuple[Run, str], tmp_path: Path) -> None:
    """Another user of the node sees the port but not the run's output."""
    token = urlsplit(run[1]).path.strip("/")
    assert ask(run[1], "status.json")[0] == 200
    for path in (
        "/",
        "/status.json",
        "//status.json",
        f"/{token[:-1]}/status.json",
        f"/{token}x/status.json",
        f"/{token}",
        f"/x/{token}/status.json",
        f"/?token={token}",
        "/%C3%A9/",
    ):
        code, _, body = ask(run[1], path)
        assert code == 404 and token.encode() not in body and b"<script" not in body, path
    pages = [StatusPage("run", "127.0.0.1", 0, now=dict) for _ in range(2)]
    paths = [urlsplit(page.url).path for page in pages]
    assert len({token, *(path.strip("/") for path in paths)}) == 3
    for page in pages:
        page.close()


@pytest.mark.parametrize(
    ("host", "code"),
    [
        ("127.0.0.1:8080", 200),
        ("localhost", 200),
        ("LOCALHOST:9", 200),
        ("[::1]:80", 200),
        ("10.1.2.3", 200),
        (socket.gethostname(), 200),
        ("attacker.example", 421),
        ("127.0.0.1.attacker.example:8080", 421),
        ("localhost.attacker.example", 421),
        ("", 421),
        ("[x", 421),
    ],
)
def test_only_its_own_names_are_answered(run: tuple[Run, str], host: str, code: int) -> None:
    """A foreign name that resolves to this machine is refused (DNS rebinding)."""
    for path in ("", "status.json"):
        assert ask(run[1], path, Host=host)[0] == code


def read_all(connection: socket.socket) -> bytes:
    """Receive until the other side closes the connection."""
    connection.settimeout(10)
    try:
        return b"".join(iter(lambda: connection.recv(1 << 16), b""))
    except ConnectionResetError:
        return b""


def test_a_request_names_one_host(run: tuple[Run, str]) -> None:
    address = urlsplit(run[1])
    for hosts in ("", "Host: localhost\r\nHost: localhost\r\n"):
        with socket.create_connection((address.hostname, address.port)) as connection:
            connection.sendall(f"GET {address.path} HTTP/1.0\r\n{hosts}\r\n".encode())
            assert b" 421 " in read_all(connection)


def test_connections_are_few_and_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silent connections neither exhaust threads nor block the page for long."""
    from megatron_rl.observability import status_server as module

    page = StatusPage("run", "127.0.0.1", 0, now=dict)
    address, threads = urlsplit(page.url), threading.active_count()
    with ExitStack() as stack:
        for number in range(1, module._MOST_CONNECTIONS + 1):
            held = stack.enter_context(socket.create_connection((address.hostname, address.port)))
            held.sendall(b"GET ")
            wait_until(lambda number=number: len(page._server._open) == number)
        for _ in range(8):
            assert read_all(stack.enter_context(socket.create_connection((address.hostname, address.port)))) == b""
        assert threading.active_count() == threads + module._MOST_CONNECTIONS
        monkeypatch.setattr(module, "_CONNECTION_SECONDS", 0.2)
        wait_until(lambda: not page._server._open)
        monkeypatch.undo()
        assert ask(page.url, "status.json")[0] == 200
    page.close()


def wait_until(is_done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not is_done():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_taken_port_is_refused(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"127.0.0.1:{port} cannot be served") as caught:
            StatusPage("run", "127.0.0.1", port, now=dict)
    assert caught.value.source == "observability.status_port"
    page = StatusPage("run", "127.0.0.1", port, now=dict)  # free again
    ask(page.url, "status.json")
    page.close()
    page.close()
    with pytest.raises(ConnectionRefusedError):
        ask(page.url, "status.json")
    # A restarted run:
    StatusPage("run", "127.0.0.1", port, now=dict).close()


def test_a_resumed_run_shows_its_curves(tmp_path: Path) -> None:
    records = [{"step": step, "reward/mean": None if step == 2 else step / 1000} for step in range(1, 1001)]
    page = StatusPage("run", "127.0.0.1", 0, now=dict)
    page.begin(records, tuple)
    page.log(1001, {"reward/mean": 2.0})
    (chart,) = page.status()["charts"]
    page.close()
    points = chart["lines"][0]["points"]
    assert 300 < len(points) <= 400 and points[-1] == (1001, 2.0) and points == sorted(points)
    assert thin([(1, 0.5)]) == [(1, 0.5)] and thin([]) == []


def test_a_file_of_the_last_step_stays(run: tuple[Run, str]) -> None:
    """status.html is complete after each step, and no text can end its script."""
    assert not (run[0].dir / "status.html").exists()
    with ExitStack() as stack:
        learn(run[0], stack)
    text = (run[0].dir / "status.html").read_text()
    (data,) = re.findall(r'<script type="application/json" id="frozen">(.*?)</script>', text)
    assert json.loads(data)["samples"]["rows"][0]["prompt"] == HOSTILE
    assert json.loads(data)["charts"][0]["lines"] == [{"name": "reward/mean", "points": [[1, 0.25], [2, 0.5]]}]


def test_silence_of_a_rank_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_rl.observability import status as module

    now, looks = [100.0], [5]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    ranks = module._Ranks(lambda: [Position(0, 1, "update", 3, None, None, "x", 4.0, looks[0])])
    assert ranks.look()[0]["silent_seconds"] == 0.0
    now[0] = 107.0
    assert ranks.look()[0]["silent_seconds"] == 7.0
    looks[0], now[0] = 6, 107.5
    assert ranks.look()[0]["silent_seconds"] == 7.0, "the ranks are looked at once a second"
    now[0] = 109.0
    assert ranks.look()[0]["silent_seconds"] == 0.0


def look_closer(page: Any) -> None:
    """Smooth the curves of `learn`, make them logarithmic, point at a step, zoom, and go back."""
    reward = page.locator("figure", has_text="reward/mean")
    seen = lambda: reward.locator("b").text_content()  # noqa: E731
    plotted = lambda what: page.evaluate(f"(() => {{ const {{plot}} = shown.get('reward'); return {what}; }})()")  # noqa: E731
    assert seen() == "0.5" and plotted("plot.data") == [[1, 2], [0.25, 0.5]]
    page.locator("#smooth").fill("1")
    assert page.locator("#smooth-text").text_content() == "mean of 3 values"
    assert seen() == "0.375" and plotted("plot.data") == [[1, 2], [0.25, 0.375], [0.25, 0.5]], (
        "and the values themselves"
    )
    page.locator("#smooth").fill("0")
    ticks = plotted("plot.axes[1]._splits")
    assert len(ticks) >= 3 and all(round(x, 2) == x for x in ticks), "round numbers"
    page.locator("#log").check()
    assert plotted("plot.scales.y.distr") == 3
    page.locator("#log").uncheck()
    box = reward.locator(".u-over").bounding_box()
    at, other = reward.locator(".at"), page.locator("figure", has_text="validation accuracy").locator(".at")
    page.mouse.move(box["x"] + box["width"] * 0.3, box["y"] + 40)
    assert seen() == "0.25" and at.text_content() == "at step 1"
    page.wait_for_timeout(2500)  # the page is redrawn meanwhile
    assert seen() == "0.25" and at.text_content() == "at step 1"
    page.mouse.move(box["x"] + box["width"] * 0.9, box["y"] + 40)
    assert seen() == "0.5" and at.text_content() == other.text_content() == "at step 2", "all charts show this step"
    page.mouse.move(1, 1)
    assert seen() == "0.5" and at.text_content() == ""


def show_pairs(run: Run) -> None:
    """Validate on two pairs."""
    pairs = [("chosen", "3", 0.5), ("rejected", "4", -0.25), ("chosen", "5", 0.125), ("rejected", "6", 2.0)]
    common = {"prompt": HOSTILE, "ground_truth": None, "finish_reason": "stop"}
    rows = [{**common, "label": label, "response": text, "reward": reward} for label, text, reward in pairs]
    run.write_validation(3, "pairs", iter(rows), is_shown=True)


def test_only_validation_that_is_shown_replaces_the_samples(run: tuple[Run, str]) -> None:
    with ExitStack() as stack:
        learn(run[0], stack)
        run[0].write_validation(2, "sums", [{"response": "not on the page"}])
        assert json.loads(ask(run[1], "status.json")[2])["samples"]["rows"][0]["response"] == "2" + HOSTILE
        show_pairs(run[0])
    samples = json.loads(ask(run[1], "status.json")[2])["samples"]
    assert samples["step"] == 3 and samples["rows"][1] == {
        "label": "rejected",
        "prompt": HOSTILE,
        "response": "4",
        "reward": "-0.25",
        "finish_reason": "stop",
    }
    assert (run[0].dir / "validation/pairs/rollouts/step_3.jsonl").read_text().count("\n") == 4


@contextmanager
def open_browser() -> Iterator[Any]:
    """Start Chromium, or skip the test."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    executable = next(filter(None, map(shutil.which, BROWSERS)), None)
    if executable is None:
        pytest.skip(f"no Chromium found: none of {', '.join(BROWSERS)} is on the PATH")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.mark.parametrize("width", [1600, 1100, 500])
def test_pairs_are_side_by_side_in_a_browser(run: tuple[Run, str], width: int) -> None:
    """Chosen left and rejected right, a pair in a row, at every width; no field without a value."""
    show_pairs(run[0])
    with open_browser() as browser:
        page = browser.new_page(viewport={"width": width, "height": 800})
        page.goto(run[1])
        page.wait_for_selector("html[data-ready]", state="attached", timeout=20_000)
        cards = page.locator("article").all()
        boxes = [card.bounding_box() for card in cards]
        assert [card.locator("p").text_content() for card in cards] == [
            "chosen, reward 0.5, finish stop",
            "rejected, reward -0.25, finish stop",
            "chosen, reward 0.125, finish stop",
            "rejected, reward 2.0, finish stop",
        ]
        assert [card.locator("h3").all_text_contents() for card in cards] == [["prompt", "response"]] * 4
        assert [card.locator("pre").nth(1).text_content() for card in cards] == ["3", "4", "5", "6"]
    tops, lefts = [box["y"] for box in boxes], [box["x"] for box in boxes]
    assert tops[0] == tops[1] < tops[2] == tops[3] and lefts[0] == lefts[2] < lefts[1] == lefts[3]
    assert lefts[0] + boxes[0]["width"] <= lefts[1] and lefts[1] + boxes[1]["width"] <= width


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_in_a_browser(run: tuple[Run, str], scheme: str) -> None:
    """The page follows the run, executes none of its texts, and shows when the server is gone."""
    stack = ExitStack()
    learn(run[0], stack)
    engine = {
        "name": HOSTILE,
        "state": "serves",
        "version": 2,
        "newest_version": 3,
        "requests": 5,
        "silent_seconds": 0.5,
    }
    lost = {"name": "engine 8 on 10.0.0.2", "state": "lost", "silent_seconds": 75.0}
    run[0].page.follow_engines(lambda: [engine, lost])
    events: list[Any] = []
    with open_browser() as browser:
        page = browser.new_page(viewport={"width": 1100, "height": 800}, color_scheme=scheme)
        page.on("request", lambda request: events.append(request.url))
        page.on("pageerror", lambda error: events.append(str(error)))
        page.on("console", lambda message: events.append(message.text))
        page.goto(run[1])
        page.wait_for_selector("html[data-ready]", state="attached", timeout=20_000)
        assert page.locator("#run").text_content() == "<b>{{script}}"
        assert page.locator("#steps-text").text_content() == "step 2 of 4"
        assert page.locator("#now-text").text_content() == "generating: 3 of 8 responses, 51 tokens/s"
        assert (
            page.locator("#part").get_attribute("value") == "3" and page.locator("#state").text_content() == "running"
        )
        assert page.locator("figure canvas").count() == 2 and page.locator("#glance dd").first.text_content() == (
            "0.25 \u2192 0.5step 1 to 2"
        )
        words = page.locator(".place span").all_text_contents()
        assert words == ["weights 2 of 3", "5 requests", "serves", "lost 1 min 15 s ago"]
        assert page.locator(".place.late b").all_text_contents() == [lost["name"]]
        look_closer(page)
        assert "1.50 GiB" in page.locator("#ranks tr").nth(1).text_content()
        assert page.locator("#warnings li").text_content().endswith(f"warning: slow disk: {HOSTILE}")
        assert page.locator("#config").text_content() == CONFIG_YAML and not page.locator("#config").is_visible()
        assert page.locator("#ranks tr").count() == 3 and "all_reduce" in page.locator("#ranks").text_content()
        assert page.locator("article pre").nth(1).text_content() == "2" + HOSTILE
        assert page.evaluate("window.hacked") is None and page.locator("article img, article script").count() == 0
        dark = page.evaluate("getComputedStyle(document.body).backgroundColor") != "rgb(255, 255, 255)"
        assert dark == (scheme == "dark")
        stack.close()
        run[0].count({"reward/mean": 1.0})
        run[0].record(3)
        page.locator("#steps-text", has_text="step 3 of 4").wait_for(timeout=10_000)
        assert {event.partition("?")[0] for event in events} == {run[1], f"{run[1]}status.json"}
        run[0].close()
        page.locator("#state", has_text="stopped").wait_for(timeout=10_000)
        assert not page.locator("#lost").is_visible() and not page.locator("#now").is_visible()
        events.clear()
        page.goto(f"file://{quote(str(run[0].dir))}/status.html")
        page.wait_for_selector("html[data-ready]", state="attached", timeout=20_000)
        assert page.locator("#config").text_content() == CONFIG_YAML and page.locator("#warnings li").count() == 1
        page.set_viewport_size({"width": 320, "height": 600})
        assert page.evaluate("document.documentElement.scrollWidth") == 320, "nothing sticks out on a small screen"
        assert page.locator("#lost").text_content().startswith("This is a file, written at 20")
        assert page.locator("#steps-text").text_content() == "step 3 of 4"
        assert page.locator("article pre").nth(1).text_content() == "2" + HOSTILE
        assert page.evaluate("window.hacked") is None and len(events) == 1, "it asks for nothing"


def test_charts_zoom_together(run: tuple[Run, str]) -> None:
    for step in range(1, 31):
        run[0].count({"reward/mean": step / 4, "policy/entropy": 1.0})
        run[0].record(step)
    with open_browser() as browser:
        page = browser.new_page(viewport={"width": 1100, "height": 800})
        page.goto(run[1])
        page.wait_for_selector("html[data-ready]", state="attached", timeout=20_000)
        steps = "[...shown.values()].map(({plot}) => [plot.scales.x.min, plot.scales.x.max])"
        assert page.evaluate(steps) == [[1, 30]] * 2
        box = page.locator(".u-over").first.bounding_box()
        page.mouse.move(box["x"] + box["width"] * 9 / 29, box["y"] + 40)
        page.mouse.down()
        page.mouse.move(box["x"] + box["width"] * 19 / 29, box["y"] + 40, steps=4)
        page.mouse.up()
        assert page.evaluate(steps) == [[10, 20]] * 2
        page.wait_for_timeout(2500)
        assert page.evaluate(steps) == [[10, 20]] * 2, "also after the page is redrawn"
        page.click("#all-steps")
        assert page.evaluate(steps) == [[1, 30]] * 2


def test_a_killed_run_and_a_failed_one(run: tuple[Run, str]) -> None:
    """The page shows the report of a failure before the process ends, and the loss of a run that said nothing."""
    with open_browser() as browser:
        page = browser.new_page()
        page.goto(run[1])
        page.wait_for_selector("html[data-ready]", state="attached", timeout=20_000)
        show_error(f"no memory\n  hint:     {HOSTILE}", run[0].log_file)
        page.locator("#state", has_text="failed").wait_for(timeout=10_000)
        assert page.locator("#end").text_content() == f"no memory\n  hint:     {HOSTILE}"
        other = StatusPage("run", "127.0.0.1", 0, now=run[0]._describe_now, file=run[0].dir / "other.html")
        page.goto(other.url)
        page.locator("#state", has_text="running").wait_for(timeout=10_000)
        other._server.stop()
        page.wait_for_selector("#lost:not([hidden])", timeout=10_000)
        assert page.locator("#lost").text_content().startswith("No answer since ")
        assert page.locator("#lost").text_content().endswith(f"logs/rank0.log in {run[0].dir}.")
    other.close()


def test_a_failure_of_an_earlier_attempt_is_over(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("error: an earlier attempt\n")
    page = StatusPage("run", "127.0.0.1", 0, now=dict, log=log, file=tmp_path / "page.html")
    page._look_for_failure()
    assert page.status()["state"]["name"] == "running"
    log.open("a").write("error: this attempt\n  hint: x\n")
    page._look_for_failure()
    page.end("finished", "")
    assert page.status()["state"] == {"name": "failed", "text": "this attempt\n  hint: x"}
    assert '"name": "failed"' in (tmp_path / "page.html").read_text()
    page.close()


def test_the_end_waits_for_open_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts, which send no name, and pages closed long ago are not waited for."""
    from megatron_rl.observability import status as module

    page = StatusPage("run", "127.0.0.1", 0, now=dict)
    ask(page.url, "status.json")
    ask(page.url, "status.json?me")
    page.end("finished", "all is done")
    closing = threading.Thread(target=page.close)
    closing.start()
    closing.join(0.2)
    assert closing.is_alive()
    status = json.loads(ask(page.url, "status.json?me")[2])
    closing.join(5)
    assert status["state"] == {"name": "finished", "text": "all is done"} and not closing.is_alive()
    other = StatusPage("run", "127.0.0.1", 0, now=dict)
    monkeypatch.setattr(module, "_GOODBYE_SECONDS", 0.1)
    ask(other.url, "status.json?me")
    other.close()


def test_a_run_that_a_signal_stopped_says_so(run: tuple[Run, str]) -> None:
    run[0].note_stop({"signal": "SIGTERM", "step": 2, "exit_code": 75})
    run[0].close()
    text = (run[0].dir / "status.html").read_text()
    assert '"text": "SIGTERM after step 2: the same command resumes the run."' in text and '"name": "stopped"' in text


def test_a_refused_run_keeps_the_page_of_the_one_before(tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    file.write_text("of a finished run")
    StatusPage("run", "127.0.0.1", 0, now=dict, file=file).close()
    assert file.read_text() == "of a finished run"
    page = StatusPage("run", "127.0.0.1", 0, now=dict, file=file)
    page.begin([], tuple)
    page.close()
    assert '"name": "stopped"' in file.read_text()


def test_a_loading_run_has_a_page(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", CONFIG_YAML, 4, CONFIG, 0)
    assert run.page is not None
    run.timers.begin_step(0, "loading weights")
    status = json.loads(ask(run.page.url, "status.json")[2])
    assert (status["phase"], status["step"], status["ranks"]) == ("loading weights", 0, [])
    run.log.info("captured %d graphs", 3)
    with run.timers.phase("reward"):
        run.timers.expect(8)
        run.timers.advance()
        status = json.loads(ask(run.page.url, "status.json")[2])
    assert (status["line"], status["part"]) == ("captured 3 graphs", [1, 8])
    run.start(None, tuple)
    run.finish()
    assert '"state": {"name": "finished"' in (tmp_path / "run/status.html").read_text()
    close_rank_log(logging.getLogger(LOGGER_NAME))


def test_the_map_of_ranks() -> None:
    page = StatusPage("run", "127.0.0.1", 0, now=dict)
    role = SimpleNamespace(layout=ParallelLayout(4, tp_size=2, cp_size=2), spec=SimpleNamespace(title="actor"))
    page.place({"actor": role}, [(2, 3), (4, 5)], 3)
    assert [place["roles"] for place in page.status()["places"]] == [
        {"actor": "tp0 cp0"},
        {"actor": "tp1 cp0"},
        {"actor": "tp0 cp1", "engine 0": "tp0"},
        {"actor": "tp1 cp1", "engine 0": "tp1"},
        {"engine 1": "tp0"},
        {"engine 1": "tp1"},
    ]
    page.place({"actor": role}, role.layout.model_copies().of, 3)
    assert page.status()["places"][3]["roles"] == {"actor": "tp1 cp1", "engine 1": "tp1"}
    assert page.status()["members"] == []
    page.follow_engines(lambda: [{"name": "engine 7 (b) on 10.0.0.2", "state": "joins"}])
    assert page.status()["members"] == [{"name": "engine 7 (b) on 10.0.0.2", "state": "joins"}]
    page.close()


def test_every_alarm_says_what_to_do() -> None:
    settings = (Path(__file__).resolve().parents[2] / "docs/config.md").read_text()
    assert REMEDIES.keys() == CHECKS.keys()
    named = {name for text in REMEDIES.values() for name in re.findall(r"\b(?:\w+\.)+[a-z_]+\b", text)}
    assert len(named) > 10
    assert [name for name in named - {"rank.log"} if f"`{name}`" not in settings and "logs" not in name] == []
    page = StatusPage("run", "127.0.0.1", 0, now=dict)
    page.alarm(3, "truncated", "too long")
    assert page.status()["alarms"][0]["remedy"] == REMEDIES["truncated"]
    page.close()


def test_bands_and_seconds() -> None:
    page = StatusPage("run", "127.0.0.1", 0, now=dict)
    page.log(1, {"reward/mean": 0.5, "reward/std": 0.25, "time/reshard": 2.0, "time/verify": 0.5, "time/step": 5.0})
    page.log(2, {"reward/mean": 0.5, "reward/min": 0.0, "reward/max": 1.0, "time/reward": 4.0, "time/step": 4.0})
    status = page.status()
    page.close()
    assert status["charts"][0]["lines"] == [
        {"name": "reward/mean", "points": [(1, 0.5, 0.25, 0.75), (2, 0.5, 0.0, 1.0)]}
    ]
    assert status["times"] == {
        "steps": [1, 2],
        "seconds": {"reward": [0, 4.0], "reshard": [1.5, 0], "verify": [0.5, 0], "other": [3.0, 0]},
    }
    phases = {f"p{i}": 10.0 - i for i in range(10)}
    assert list(average([(1, phases | {"other": 1.0})])["seconds"].items())[6:] == [("p6", [4.0]), ("other", [7.0])]
    many = average([(step, {"update": 1.0} | ({"save": 10.0} if step == 7 else {})) for step in range(1, 1001)])
    assert len(many["steps"]) == 334 and many["steps"][-1] == 1000
    assert many["seconds"]["save"][2] == pytest.approx(10 / 3), "no step is left out"


def test_samples_have_their_tokens() -> None:
    page = StatusPage("run", "127.0.0.1", 0, now=dict)
    row = {"prompt": "p", "response": "ab", "token_texts": ["a", "b"] * 300, "advantages": [0.5, None] * 300}
    page.samples(1, [row])
    (found,) = page.status()["samples"]["rows"]
    page.close()
    assert found["tokens"][:2] == [("a", 0.5, None), ("b", None, None)]
    assert len(found["tokens"]) == 400 and found["num_tokens"] == 600
