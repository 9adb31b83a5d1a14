# SPDX-License-Identifier: Apache-2.0
"""The rollout page: its contents, its treatment of hostile texts and missing fields, and its behavior in Chromium.

The browser tests need playwright and a Chromium on the PATH and are skipped without. Not covered: other browsers.
"""

from __future__ import annotations

import base64
import gzip
import importlib
import json
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from megatron_rl.types import UserError
from tools.viewer.rollout_store import RolloutStore, Scope
from tools.viewer.serving import serve_store

ROOT = Path(__file__).resolve().parents[2]
BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
HOSTILE = (
    "</script><script>window.hacked=1</script><img src=x onerror='window.hacked=2'><!-- \u2028 &lt;b&gt; "
    "\N{GRINNING FACE}"
)
TEXTS = ["The", " sum", " is", " 2", "3", "\n", "####", " 23", ""]


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return importlib.import_module("tools.view_rollouts")


def make_row(prompt_id: int | str, sample: int, texts: list[str] = TEXTS, **fields: Any) -> dict[str, Any]:
    """A row as a run with a critic writes it."""
    n = len(texts)
    engine = [-0.1 * (t % 7) for t in range(n)]
    return {
        "prompt_id": prompt_id,
        "sample_index": sample,
        "prompt": f"What is {prompt_id} + 3?",
        "response": "".join(texts),
        "ground_truth": "9",
        "reward": sample / 4,
        "reward_components": {"math": sample / 4, "format": 1.0},
        "finish_reason": "length" if sample % 4 == 3 else "stop",
        "policy_version": 7,
        "versions": [5] * (n // 3) + [7] * (n - n // 3),
        "tokens": list(range(100, 100 + n)),
        "token_texts": texts,
        "rollout_logprobs": engine,
        "old_logprobs": [x + 0.001 * (t % 3 - 1) for t, x in enumerate(engine)],
        "advantages": [sample / 2 - 0.75] * n,
        "values": [0.1 * (t % 5) for t in range(n)],
        "ratio": [1.0 + 0.05 * (t % 5 - 2) for t in range(n)],
        "clipped": [float(t % 5 == 4) for t in range(n)],
        "entropy": [0.2 * (t % 6) for t in range(n)],
    } | fields


def write_run(run_dir: Path, steps: dict[int, list[dict[str, Any]]]) -> Path:
    """A run directory with nothing but rollouts."""
    (run_dir / "rollouts").mkdir(parents=True)
    for step, rows in steps.items():
        (run_dir / f"rollouts/step_{step}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run_dir


def read_data(page: Path) -> dict[str, Any]:
    """The elements of a page with data by id."""
    found = re.findall(r'<script type="application/octet-stream" id="([^"]+)">(.*?)</script>', page.read_text())
    return {name: json.loads(gzip.decompress(base64.b64decode(text))) for name, text in found}


def test_page_holds_every_rollout_in_order(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Steps in numeric order, groups by step and prompt, chunks that line up with the index; --steps cuts."""
    steps = {step: [make_row(p, s) for p in range(10) for s in range(4)] for step in (2, 10, 1)}
    run_dir, out = write_run(tmp_path / "run", steps), tmp_path / "page.html"
    assert tool.main([str(run_dir), "--out", str(out)]) == 0
    assert re.search(r"page.html: 120 rollouts of 3 steps, 0\.\d MB\n$", capsys.readouterr().out)
    data = read_data(out)
    columns = data["index"]["columns"]
    assert columns["step"] == [1] * 40 + [2] * 40 + [10] * 40
    assert columns["group"] == [i // 4 for i in range(120)] and len(data["index"]["prompts"]) == 30
    assert data["index"]["prompts"][13] == {"id": "3", "text": "What is 3 + 3?", "truth": "9"}
    assert columns["length"] == [9] * 120 and columns["version"] == [7] * 120
    assert [len(data[f"chunk-{i}"]) for i in range(2)] == [64, 56]
    details = data["chunk-1"][70 - 64]
    assert (
        details["texts"] == TEXTS
        and details["advantage"] == [0.25] * 9
        and details["components"] == {"math": 0.5, "format": 1.0}
    )
    assert details["gap"] == [-0.001, 0.0, 0.001] * 3 and details["surprise"][2] == -0.2
    assert details["age"] == [2.0] * 3 + [0.0] * 6
    modes = {mode["key"]: mode for mode in data["index"]["modes"]}
    assert all(mode["num_rollouts"] == 120 for mode in modes.values())
    assert modes["advantage"]["scale"] == 0.75 and modes["gap"]["scale"] == pytest.approx(0.001)
    assert tool.main([str(run_dir), "--out", str(out), "--steps", "2-9"]) == 0
    assert set(read_data(out)["index"]["columns"]["step"]) == {2}


def test_a_rollout_that_failed_shows_no_reward(tool: ModuleType, tmp_path: Path) -> None:
    """Its 0 would lower the means of the charts."""
    failures = [{}, {"finish_reason": "timeout"}, {"reward_components": {"service_failures": 1.0}}]
    rows = [make_row(5, s, reward=0.5) | fields for s, fields in enumerate(failures)]
    run_dir, out = write_run(tmp_path / "run", {1: rows}), tmp_path / "page.html"
    assert tool.main([str(run_dir), "--out", str(out)]) == 0
    assert read_data(out)["index"]["columns"]["reward"] == [0.5, None, None]


def write_pairs(run_dir: Path) -> Path:
    """Two validation pairs, as preference learning writes them."""
    rows = [
        {"prompt_id": i, "sample_index": s, "prompt": f"p{i}", "response": f"{side} {i}", "reward": 0.5 - s - i}
        | {"label": side, "num_tokens": 2, "reward_components": {"margin": 1.0}, "finish_reason": "stop"}
        for i in range(2)
        for s, side in enumerate(("chosen", "rejected"))
    ]
    return write_run(run_dir, {3: rows})


def test_pairs_are_one_group_with_labels(tool: ModuleType, tmp_path: Path) -> None:
    run_dir, out = write_pairs(tmp_path / "run"), tmp_path / "page.html"
    assert tool.main([str(run_dir), "--out", str(out)]) == 0
    index = read_data(out)["index"]
    assert index["columns"]["label"] == ["chosen", "rejected"] * 2 and index["columns"]["group"] == [0, 0, 1, 1]
    assert index["columns"]["response"] == ["chosen 0", "rejected 0", "chosen 1", "rejected 1"]
    assert index["components"] == {"margin": [1.0] * 4}


def test_pairs_are_side_by_side_in_a_browser(browser: Any, tool: ModuleType, tmp_path: Path) -> None:
    """Without a click; a link contains the switch."""
    run_dir, out = write_pairs(tmp_path / "run"), tmp_path / "page.html"
    assert tool.main([str(run_dir), "--out", str(out)]) == 0
    page, events = open_page(browser, out)
    assert [card.text_content() for card in page.locator(".cards.many .card h2").all()] == [
        "chosen response",
        "rejected response",
    ]
    page.uncheck("#side-by-side")
    page.wait_for_url("**group=0**")
    assert page.locator(".card").count() == 1 and events == [out.as_uri()]
    page.close()


TURNS = [
    {"branch": 0, "start": 0, "observed": "", "reward": 0.25},
    {"branch": 0, "start": 3, "observed": " [408] ", "reward": None},
    {"branch": 1, "start": 5, "observed": f"again {HOSTILE}", "reward": 1.0},
]


def test_turns_are_there_as_they_were_logged(tool: ModuleType, tmp_path: Path) -> None:
    run_dir, out = write_run(tmp_path / "run", {1: [make_row(0, 0), make_row(0, 1, turns=TURNS)]}), tmp_path / "page"
    assert tool.main([str(run_dir), "--out", str(out)]) == 0
    plain, episode = read_data(out)["chunk-0"]
    assert "turns" not in plain and episode["turns"] == TURNS


def test_turns_in_a_browser(browser: Any, tool: ModuleType, tmp_path: Path) -> None:
    """Observations between the replies, rewards behind them, branches side by side, and the version of a token."""
    run_dir, out = write_run(tmp_path / "run", {1: [make_row(0, 0, turns=TURNS)]}), tmp_path / "page.html"
    assert tool.main([str(run_dir), "--out", str(out)]) == 0
    page, events = open_page(browser, out)
    boxes = page.locator(".tokens")
    assert boxes.count() == 2 and page.locator(".cards.many .card").count() == 2
    assert boxes.first.text_content() == "The sum isreward 0.25 [408]  23"
    assert boxes.last.text_content() == f"again {HOSTILE}\u23ce\n#### 23\u2039108\u203areward 1"
    page.hover(".tokens [data-t='4']")
    assert "policy_version: 7" in page.locator("#tip").text_content() and events == [out.as_uri()]
    page.close()


def test_texts_cannot_leave_their_element(tool: ModuleType, tmp_path: Path) -> None:
    """No `<` of the run is in the page, in any field, and the policy forbids everything outside the page."""
    row = make_row(
        HOSTILE,
        0,
        [HOSTILE, "\ud800"],
        prompt=HOSTILE,
        ground_truth=HOSTILE,
        finish_reason=HOSTILE,
        reward_components={HOSTILE: 1.0},
    )
    run_dir, out = write_run(tmp_path / "<b>run", {1: [row]}), tmp_path / "page.html"
    assert tool.main([str(run_dir), "--out", str(out)]) == 0
    text = out.read_text()
    assert "<script>window" not in text and "<img" not in text and "<b>run" not in text
    assert len(re.findall("<script", text)) == text.count("</script>") == 3  # chunk, index, the page's own
    assert read_data(out)["index"]["prompts"] == [{"id": HOSTILE, "text": HOSTILE, "truth": HOSTILE}]
    policy = re.search('Content-Security-Policy" content="([^"]+)"', text)[1]
    assert "default-src 'none'" in policy and "unsafe" not in policy
    assert not re.search(r"https?://|innerHTML|insertAdjacentHTML|document\.write|eval\(", text)


def test_missing_fields_are_named(tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows without token values, without tokens, and with invalid numbers; a flag names the missing parts."""
    bare = {"prompt_id": 1, "prompt": "p", "response": "r"}
    old = {k: v for k, v in make_row(2, 0).items() if k in ("prompt_id", "response", "tokens", "rollout_logprobs")}
    nan = float("nan")
    odd = make_row(3, 0, reward=nan, advantages=[None] * 8 + [float("inf")], reward_components={"x": nan})
    for name in ("values", "ratio", "clipped", "entropy", "old_logprobs"):
        del odd[name]
    run_dir, out = write_run(tmp_path / "run", {1: [bare, old, odd]}), tmp_path / "page.html"
    assert tool.main([str(run_dir), "--out", str(out)]) == 0
    assert "not in this run: rollout/train gap, ratio, clipped, entropy, value\n" in capsys.readouterr().out
    data = read_data(out)
    assert data["index"]["columns"]["length"] == [None, 9, 9] and data["index"]["columns"]["reward"] == [None] * 3
    first, second, third = data["chunk-0"]
    assert first == {"components": {}, "ids": None, "texts": None}
    assert second["ids"] == list(range(100, 109)) and second["texts"] is None and len(second["surprise"]) == 9
    assert third["advantage"] == [None] * 9 and third["components"] == {"x": None}


@pytest.mark.parametrize(
    ("content", "arguments", "message"),
    [
        (None, [], "there is no rollouts/ in it"),
        ({}, [], "train with trainer.log_rollouts=N"),
        ({1: []}, [], "train with trainer.log_rollouts=N"),
        ({1: [make_row(0, 0)]}, ["--steps", "5"], "has steps 1 to 1"),
        ({1: [make_row(0, 0), [1]]}, [], "step_1.jsonl:2"),
        ({1: [make_row(0, 0, ratio=[1.0])]}, [], "ratio is not a list of 9 numbers"),
        ({1: [make_row(0, 0, values=["a"] * 9)]}, [], "values is not a list of 9 numbers"),
        ({1: [make_row(0, 0, turns=[{"start": 3}, {"start": 2}])]}, [], '"turns" do not begin at tokens of the 9'),
    ],
)
def test_errors_are_clear(
    tool: ModuleType,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    content: dict[int, Any] | None,
    arguments: list[str],
    message: str,
) -> None:
    run_dir, out = tmp_path / "run", tmp_path / "page.html"
    run_dir.mkdir() if content is None else write_run(run_dir, content)
    assert tool.main([str(run_dir), "--out", str(out), *arguments]) == 2
    assert message in capsys.readouterr().err and list(tmp_path.iterdir()) == [run_dir], "no half a page is left"


def test_half_a_line_is_named(tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = write_run(tmp_path / "run", {1: [make_row(0, 0)]})
    with (run_dir / "rollouts/step_1.jsonl").open("ab") as file:
        file.write('{"prompt": "é'.encode()[:-1])
    assert tool.main([str(run_dir), "--out", str(tmp_path / "page.html")]) == 2
    assert "step_1.jsonl:2" in (message := capsys.readouterr().err) and "no JSON" in message


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Headless Chromium."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    executable = next(filter(None, map(shutil.which, BROWSERS)), None)
    if executable is None:
        pytest.skip(f"no Chromium found: none of {', '.join(BROWSERS)} is on the PATH")
    with playwright.sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        yield found
        found.close()


def open_page(browser: Any, path: Path) -> tuple[Any, list[str]]:
    """Open the page; return it when ready, with its requests and console errors."""
    page, events = browser.new_page(viewport={"width": 1280, "height": 800}), []
    page.on("request", lambda request: events.append(request.url))
    page.on("dialog", lambda dialog: events.append(dialog.message))
    page.on("pageerror", lambda error: events.append(str(error)))
    page.on("console", lambda message: events.append(message.text))
    page.goto(path.as_uri())
    page.wait_for_selector("html[data-ready]", state="attached", timeout=20_000)
    return page, events


def test_hostile_texts_do_nothing_in_a_browser(browser: Any, tool: ModuleType, tmp_path: Path) -> None:
    """They are shown letter by letter; nothing runs, nothing is fetched, nothing is reported."""
    rows = [
        make_row(
            HOSTILE,
            s,
            [HOSTILE, " tail"],
            prompt=HOSTILE,
            ground_truth=HOSTILE,
            finish_reason=HOSTILE,
            reward_components={HOSTILE: 1.0},
        )
        for s in range(2)
    ]
    run_dir, out = write_run(tmp_path / "<img src=x onerror=window.hacked=3>", {1: rows}), tmp_path / "page.html"
    assert tool.main([str(run_dir), "--out", str(out)]) == 0
    page, events = open_page(browser, out)
    page.check("#side-by-side")
    for mode in ("ratio", "clipped", "entropy", "value", "gap"):
        page.select_option("#mode", mode)
    page.hover(".tokens span")
    page.fill("#filters [name=text]", "<script>")
    assert page.evaluate("window.hacked") is None and events == [out.as_uri()]
    assert page.locator("img, #content script").count() == 0
    assert page.locator(".text.prompt").text_content() == HOSTILE
    assert page.locator(".tokens span").first.text_content() == HOSTILE
    assert page.locator(".tokens").count() == 2 and HOSTILE in page.locator("#tip").text_content().replace('\\"', '"')
    page.close()


def test_filter_sort_colours_and_group(browser: Any, tool: ModuleType, tmp_path: Path) -> None:
    """A reader's use of the page, end to end on three steps of small groups; old rows show their missing fields."""
    steps = {step: [make_row(p, s, TEXTS[: 3 + step + s]) for p in (5, 6) for s in range(4)] for step in (1, 2)}
    bare = {k: v for k, v in make_row(9, 0).items() if k in ("prompt_id", "response", "tokens", "reward")}
    run_dir, out = write_run(tmp_path / "run", steps | {3: [bare]}), tmp_path / "page.html"
    assert tool.main([str(run_dir), "--out", str(out)]) == 0
    page, events = open_page(browser, out)
    count, cells = page.locator("#count"), page.locator("#rows .row span")
    assert count.text_content() == "17 of 17 rollouts"
    assert (
        page.locator(".card .facts").text_content() == "reward 0 · tokens 9 · finish unknown · policy_version unknown"
    )
    page.select_option("[name=sort]", "step,1")
    page.locator("#rows .row").first.click()
    assert page.locator(".card.selected .facts").text_content() == (
        "reward 0 · math 0 · format 1 · tokens 4 · finish stop · policy_version 7 · advantage -0.75"
    )
    for name, value, left in (("reward-from", "0.5", 8), ("step-to", "1", 4), ("length-from", "7", 2)):
        page.fill(f"[name={name}]", value)
        assert count.text_content() == f"{left} of 17 rollouts"
    page.click("#filters button[type=reset]")
    page.locator("#count", has_text="17 of 17").wait_for()  # a page function would be evaluated, which the page forbids
    page.select_option("[name=finish]", "length")
    assert count.text_content() == "4 of 17 rollouts"
    page.select_option("[name=finish]", "")
    page.fill("#filters [name=text]", "WHAT IS 6")
    assert count.text_content() == "8 of 17 rollouts"
    page.select_option("[name=sort]", "length,-1")
    assert cells.all_text_contents()[0:35:7] == ["2", "1", "2", "1", "2"]
    assert cells.all_text_contents()[4:35:7] == ["8", "7", "7", "6", "6"]
    page.locator("#rows .row").first.click()
    page.check("#side-by-side")
    assert page.locator(".card").count() == 4 and page.locator(".card.selected .facts b").first.text_content() == "0.75"
    first = page.locator(".card.selected .tokens span").first
    page.select_option("#mode", "surprise")
    color = "element => element.style.background"
    assert first.evaluate(color).startswith("rgba(0, 128, 96"), "surprise"
    assert page.locator(".card.selected").evaluate("e => e.style.borderLeftColor").startswith("rgba(33, 102, 172")
    page.select_option("#mode", "advantage")
    assert first.evaluate(color).startswith("rgba(33, 102, 172"), "advantage 0.75 is blue"
    page.select_option("#mode", "clipped")
    clipped = [bool(x) for x in page.locator(".card.selected .tokens span").evaluate_all(f"all => all.map({color})")]
    assert clipped == [False, False, False, False, True, False, False, False]
    page.select_option("#mode", "ratio")
    assert page.locator("#legend").text_content().startswith("0.91.1111")
    page.hover(".card.selected .tokens span:nth-child(5)")
    tip = page.locator("#tip").text_content()
    assert "token 4, id 104" in tip and "ratio: 1.1" in tip and "clipped: yes" in tip
    page.fill("#filters [name=text]", "")
    page.select_option("[name=sort]", "step,-1")
    page.locator("#rows .row").first.click()
    assert "the texts of the tokens were not logged" in page.locator("#content").text_content()
    assert "this rollout has no ratio" in page.locator("#content").text_content()
    assert events == [out.as_uri()]
    page.close()


def test_search_by_pattern_prompt_component_and_change(browser: Any, tool: ModuleType, tmp_path: Path) -> None:
    """Two runs on the same prompts: patterns, drops between two steps, charts, and the link to the selection."""
    rows = {
        step: [make_row(p, s, reward=1.0 - 0.5 * (p == 6) * (step == 2)) for p in (5, 6) for s in (0, 1)]
        for step in (1, 2)
    }
    runs = [write_run(tmp_path / name, rows) for name in ("one", "two")]
    out = tmp_path / "page.html"
    assert tool.main([*map(str, runs), "--out", str(out)]) == 0
    page, events = open_page(browser, out)
    count = page.locator("#count")
    assert count.text_content() == "16 of 16 rollouts" and page.locator("#summary figure").count() == 3
    page.fill("#filters [name=text]", "is [45] \\+")
    assert count.text_content() == "0 of 16 rollouts"
    page.check("#filters [name=regex]")
    assert count.text_content() == "8 of 16 rollouts"
    page.fill("#filters [name=text]", "(")
    assert count.text_content() == "0 of 16 rollouts" and page.locator("#filters [name=text]:invalid").count() == 1
    page.fill("#filters [name=text]", "")
    page.select_option("[name=change]", "-1")
    assert count.text_content() == "8 of 16 rollouts"
    page.select_option("[name=change]", "1")
    assert count.text_content() == "0 of 16 rollouts"
    page.select_option("[name=change]", "")
    page.select_option("[name=component]", "math")
    page.fill("[name=component-from]", "0.2")
    page.select_option("[name=run]", "1")
    assert count.text_content() == "4 of 16 rollouts"
    page.locator("#summary [data-from='2'] .whole").first.click(force=True)
    assert count.text_content() == "2 of 16 rollouts"
    page.locator("#rows .row").last.click()
    page.check("#side-by-side")
    assert [text.split(":")[0] for text in page.locator(".card h2").all_text_contents()] == ["one", "one", "two", "two"]
    page.wait_for_timeout(500)
    link = page.url
    page.close()
    assert events == [out.as_uri()]
    again = browser.new_page()
    again.goto(link)
    again.wait_for_selector("html[data-ready]", state="attached", timeout=20_000)
    assert again.locator("#count").text_content() == "2 of 16 rollouts"
    assert again.locator(".card.selected .facts b").first.text_content() == "0.5"
    again.click("text=all 8 rollouts of this prompt")
    assert again.locator("#count").text_content() == "8 of 16 rollouts"
    again.close()


@pytest.mark.slow
def test_a_hundred_thousand_rollouts_stay_usable(browser: Any, tool: ModuleType, tmp_path: Path) -> None:
    """Open in under 3 s, filter and sort in under 0.3 s until it is painted, and few elements in the page."""
    templates = [make_row(0, s % 8, (TEXTS[:-1] * 40)[: 60 + 4 * s]) for s in range(50)]
    ends = [
        json.dumps({k: v for k, v in row.items() if k not in ("prompt_id", "sample_index")})[1:] for row in templates
    ]
    (tmp_path / "run/rollouts").mkdir(parents=True)
    for step in range(1, 201):
        with (tmp_path / f"run/rollouts/step_{step}.jsonl").open("w") as file:
            for i in range(500):
                file.write(f'{{"prompt_id": {i // 10}, "sample_index": {i % 10}, {ends[(7 * step + i) % 50]}\n')
    run_dir, out = tmp_path / "run", tmp_path / "page.html"
    assert tool.main([str(run_dir), "--out", str(out)]) == 0
    openings: list[float] = []  # the best of three counts, below too: others work on the machine
    for number in range(3):
        start = time.monotonic()
        page, events = open_page(browser, out)
        openings.append(time.monotonic() - start)
        if number < 2:
            page.close()
    opening = min(openings)
    measure = """async ([name, value]) => {
        const field = document.getElementById("filters")[name], start = performance.now();
        field.value = value;
        field.dispatchEvent(new Event("input", {bubbles: true}));
        await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
        return performance.now() - start;
    }"""
    changes = (
        ("reward-from", "0.5"),
        ("length-to", "150"),
        ("step-from", "20"),
        ("text", "sum is 23"),
        ("text", "zzz"),
        ("text", ""),
        ("sort", "reward,-1"),
        ("sort", "length,1"),
        ("length-to", ""),
    )
    milliseconds: dict[str, float] = {}
    for name, value in (*changes, *changes, *changes):
        found = page.evaluate(measure, [name, value])
        milliseconds[f"{name}={value}"] = min(found, milliseconds.get(f"{name}={value}", found))
        if (name, value) == changes[-1]:
            page.click("#filters button[type=reset]")
            page.locator("#count", has_text="100,000 of 100,000").wait_for()
    rounded = {name: round(found) for name, found in milliseconds.items()}
    print(f"\n{out.stat().st_size / 1e6:.1f} MB opened in {opening:.2f} s; ms: {rounded}")
    assert page.locator("#count").text_content().endswith("of 100,000 rollouts")
    page.locator("#list").evaluate("list => list.scrollTo(0, 1e9)")
    page.wait_for_timeout(100)
    assert page.locator("#rows .row").count() < 80
    page.locator("#rows .row").last.click()
    assert page.locator(".tokens span").count() > 50 and events == [out.as_uri()]
    assert opening < 3 and max(milliseconds.values()) < 300
    page.close()


def test_it_opens_at_a_group_of_the_last_step(browser: Any, tool: ModuleType, tmp_path: Path) -> None:
    """Side by side, colored by advantage: the first group whose rewards differ; then its prompt at every step."""
    alone, equal = [make_row(3, 0)], [make_row(4, s, reward=1.0) for s in range(2)]
    steps = {step: [*alone, *equal, *(make_row(5, s) for s in range(4))] for step in (1, 2)}
    run_dir, out = write_run(tmp_path / "run", steps), tmp_path / "page.html"
    assert tool.main([str(run_dir), "--out", str(out)]) == 0
    page, events = open_page(browser, out)
    assert page.locator("#content h2").first.text_content() == "prompt 5 of step 2 "
    assert page.locator(".card").count() == 4 and page.locator("#mode").input_value() == "advantage"
    page.check("#every-step")
    assert [text.split(":")[0] for text in page.locator(".card h2").all_text_contents()] == ["step 2"] * 4 + [
        "step 1"
    ] * 4
    page.wait_for_url("**steps=1**")
    assert events == [out.as_uri()]
    page.close()


def test_a_selection_is_saved(browser: Any, tool: ModuleType, tmp_path: Path) -> None:
    """As JSONL with the names of the log, and as Markdown whose fences no text closes."""
    rows = [make_row(5, s, source="sums" if s else "", response=f"{HOSTILE}\n```` {s}") for s in range(3)]
    run_dir, out = write_run(tmp_path / "run", {1: rows}), tmp_path / "page.html"
    assert tool.main([str(run_dir), "--out", str(out)]) == 0
    page, _ = open_page(browser, out)
    page.select_option("#filters [name=source]", "sums")
    with page.expect_download() as saved:
        page.click("#save-rows")
    found = [json.loads(line) for line in Path(saved.value.path()).read_text().split("\n")[:-1]]
    names = ("source", "sample_index", "prompt", "response", "reward", "reward_components", "tokens", "token_texts")
    assert [[row[name] for name in names] for row in found] == [[row[name] for name in names] for row in rows[1:]]
    assert {(row["run"], row["step"]) for row in found} == {("run", 1)}
    with page.expect_download() as saved:
        page.click("#save-text")
    text = Path(saved.value.path()).read_text()
    assert text.count("`````\n") == 2 * (2 + 2), "prompt, ground truth and two responses"
    assert "## Ground truth" in text and HOSTILE in text and "reward 0.25" in text
    page.close()


@pytest.fixture
def store_dir(tmp_path: Path) -> Path:
    """A run of 30 steps of 20 groups, with a validation set, an episode with a tool, and metrics."""
    steps = {step: [make_row(p, s) for p in range(20) for s in range(4)] for step in range(1, 31)}
    call = 'I call <tool_call>{"name": "adder", "arguments": {}}</tool_call>'
    steps[7][13] = make_row(
        77, 0, response=call, source="sums", turns=[{"start": 0, "observed": "the sum \N{EURO SIGN}"}]
    )
    run_dir = write_run(tmp_path / "run", steps)
    write_run(run_dir / "validation/sums", {30: [make_row(1, 0, prompt="held out")]})
    lines = [f'{{"step": {step}, "reward/mean": 0.5}}\n' for step in range(1, 31)]
    (run_dir / "metrics.jsonl").write_text("".join(lines))
    return run_dir


def test_pages_from_disk(store_dir: Path) -> None:
    """Whole groups from the last step backwards; every rollout once; searches of each kind; wrong patterns."""
    store = RolloutStore([store_dir])
    assert [part.name for part in store.parts] == ["run", "run, validation sums"] and store.wait() == 2401
    place, seen = (0, 0), []
    while place is not None:
        found = store.read(Scope(place=place))
        columns = found["index"]["columns"]
        assert sum(map(len, found["chunks"])) == len(columns["step"]) <= 404
        ids = [found["index"]["prompts"][group]["id"] for group in columns["group"]]
        seen += list(zip(columns["run"], columns["step"], ids))
        assert seen[-len(ids)] not in seen[: -len(ids)], "no group is cut"
        place = found["next"]
    assert len(seen) == 2401 and [step for _, step, _ in seen] == sorted((step for _, step, _ in seen), reverse=True)
    searches = (
        (Scope(text="ADDER"), [7]),
        (Scope(text="the sum \N{EURO SIGN}"), [7]),
        (Scope(text="sum .\N{EURO SIGN}", is_regex=True), []),
        (Scope(text="sum.{2}$", is_regex=True, first_step=5, last_step=9), [7]),
        (Scope(tool="adder"), [7]),
        (Scope(tool="add"), []),
        (Scope(source="sums"), [7]),
        (Scope(prompt="77"), [7]),
        (Scope(text="held out", part=1), [30]),
        (Scope(text="held out", part=0), []),
        (Scope(text="reward_components"), []),
    )
    for scope, steps in searches:
        found = store.read(scope)
        assert found["index"]["columns"]["step"] == steps and found["next"] is None, scope
    with pytest.raises(UserError, match="regular expression"):
        store.read(Scope(text="(", is_regex=True))
    assert found["curves"][0]["name"] == "run: reward/mean" and len(found["curves"][0]["points"]) == 30


def test_a_long_search_answers_in_parts(store_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = RolloutStore([store_dir])
    monkeypatch.setattr("tools.viewer.rollout_store._SEARCH_SECONDS", -1.0)
    found = store.read(Scope(text="adder"))
    assert found["next"] == (0, 0) and found["index"]["columns"]["step"] == []


def test_the_viewer_reads_from_disk_in_a_browser(browser: Any, store_dir: Path) -> None:
    """It opens at the last step without reading all; a search and the next page are addresses of their own."""
    server = serve_store(RolloutStore([store_dir]), "127.0.0.1", 0)
    page, events = browser.new_page(viewport={"width": 1280, "height": 800}), []
    page.on("pageerror", lambda error: events.append(str(error)))
    page.on("console", lambda message: events.append(message.text))

    def wait() -> None:
        page.wait_for_selector("html[data-ready]", state="attached", timeout=20_000)

    page.goto(server.url)
    wait()
    assert page.locator(".card").count() == 4 and page.locator("#count").text_content().startswith("40")
    page.locator("#found", has_text="on disk: 2,401 rollouts, 30 steps, 1 to 30").wait_for(timeout=10_000)
    with page.expect_navigation():
        page.click("#further")
    wait()
    assert "read: steps 2" in page.locator("#found").text_content() and page.locator(".card").count() == 4
    page.fill("#scope [name=text]", "adder")
    with page.expect_navigation():
        page.click("#scope button[type=submit]")
    wait()
    assert page.locator("#count").text_content() == "1 of 1 rollouts" and "text=adder" in page.url
    assert page.locator("#curves figure").count() == 1
    for query in ("?first=x&part=9&file=-1&byte=zz", "?text=(&regex=on"):
        page.goto(server.url + query)
        page.wait_for_selector("html[data-ready]", state="attached", timeout=20_000)
    assert "expected: a regular expression" in page.locator("#content").text_content()
    page.set_viewport_size({"width": 420, "height": 800})
    page.goto(server.url)
    wait()
    assert page.evaluate("document.documentElement.scrollWidth") == 420
    assert len(events) == 1 and "regular expression" in events[0]
    page.close()
    server.stop()
