# SPDX-License-Identifier: Apache-2.0
"""The table of runs: states, numbers, differences, filter and order; and its page in Chromium.

The browser test needs playwright and a Chromium on the PATH and is skipped without.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest

from megatron_rl.types import UserError
from tools.runs_page import table as table_module
from tools.runs_page.server import compare_samples, make_server
from tools.runs_page.table import RunTable, read_tail, select

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
HOSTILE = "</script><img src=x onerror='window.hacked=1'>"
CONFIG = (
    "data:\n  seed: 1\nactor:\n  lr: {lr:.6f}\n  lora:\n    rank: 8\ntrainer:\n  total_steps: 4\n  run_dir: {name}\n"
)


def write_run(path: Path, lr: float = 1e-4, steps: int = 4, rise: float = 0.1, **files: str) -> Path:
    """A run with a validation after steps 0, 2 and 4; `files`: name without extension -> text."""
    (path / "logs").mkdir(parents=True)
    (path / "logs/rank0.log").write_text("2026-01-01 10:00:00,000 rank0 INFO x: begins\n")
    (path / "config.yaml").write_text(CONFIG.format(lr=lr, name=path))
    rows = [
        {"step": step, "reward/mean": rise * step}
        | ({"validation/test/accuracy": [0.2, 0.2 + rise, 0.1 + rise][step // 2]} if step % 2 == 0 else {})
        for step in range(steps + 1)
    ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, text in files.items():
        (path / {"summary": "summary.json", "stopped": "stopped.json", "lock": "run.lock"}[name]).write_text(text)
    for kind in (path, path / "validation/test"):
        (kind / "rollouts").mkdir(parents=True)
        answers = [
            {"prompt": prompt, "response": f"{path.name} {prompt}", "ground_truth": "5", "reward": rise}
            for prompt in ("2+3=", f"of {path.name} alone", HOSTILE)
        ]
        (kind / "rollouts/step_4.jsonl").write_text("".join(json.dumps(row) + "\n" for row in answers))
    return path


def test_the_table_loads_without_torch() -> None:
    """Importing torch takes longer than reading 500 runs."""
    code = "import sys; import tools.runs; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2]).returncode == 0


@pytest.fixture()
def root(tmp_path: Path) -> Path:
    """A directory with a run in each state; "grid/low" has another learning rate."""
    write_run(tmp_path / "done", summary="{}")
    write_run(tmp_path / "grid/low", lr=1e-5, rise=0.2, summary="{}")
    write_run(tmp_path / "going", steps=3, lock="{}")
    write_run(tmp_path / "halted", steps=2, stopped='{"signal": "SIGTERM", "step": 2}')
    died = write_run(tmp_path / "died", steps=1)
    with (died / "logs/rank0.log").open("a") as log:
        log.write("error: the disk is full\n  source:   trainer.run_dir\n")
    (tmp_path / "no_run").mkdir()
    return tmp_path


def test_states_numbers_and_differences(root: Path) -> None:
    rows = {row.name: row for row in RunTable(root).read()}
    assert {name: (row.state, row.reason) for name, row in rows.items()} == {
        "died": ("failed", "the disk is full"),
        "done": ("finished", ""),
        "going": ("running", ""),
        "grid/low": ("finished", ""),
        "halted": ("stopped", "SIGTERM after step 2"),
    }
    low = rows["grid/low"]
    assert (low.step, low.steps, low.best, low.validation, low.reward) == (4, 4, 0.4, pytest.approx(0.3), 0.8)
    assert low.courses == {"test": {"last": 0.1 + 0.2, "last_step": 4, "best": 0.4, "best_step": 2}}
    assert low.differences == {"actor.lr": 1e-5} and rows["done"].differences == {}
    assert rows["going"].step == 3 and rows["died"].validation == 0.2


def test_a_lock_without_heartbeats_is_of_a_run_that_died(root: Path) -> None:
    table, lock = RunTable(root), root / "going/run.lock"
    os.utime(lock, (time.time() - 31, time.time() - 31))
    state = {row.name: (row.state, row.reason) for row in table.read()}["going"]
    assert state == ("failed", "it ended without a report")
    os.utime(lock)
    assert {row.name: row.state for row in table.read()}["going"] == "running"


def test_files_are_read_again_only_when_they_change(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table, read = RunTable(root), []
    monkeypatch.setattr(table_module, "read_tail", lambda path: read.append(path.parent.name) or read_tail(path))
    reader = table_module.read_tail
    table.read()
    assert sorted(read) == ["died", "done", "going", "halted", "low"]
    read.clear()
    with (root / "going/metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "reward/mean": 0.9}\n{"step": 5, "rew')  # a write that was cut off
    rows = {row.name: row for row in table.read()}
    assert read == ["going"] and (rows["going"].step, rows["going"].reward) == (4, 0.9)
    assert table_module.read_tail is reader


def test_best_of_a_long_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the part that is read, marked as such; of all of it in the summary of a finished run."""
    run = write_run(tmp_path / "long")
    monkeypatch.setattr(table_module, "_TAIL_BYTES", 120)
    [row] = RunTable(tmp_path).read()
    assert (row.step, row.best, row.is_best_exact) == (4, 0.2, False)
    course = {"first": 0.2, "last": 0.2, "last_step": 4, "best": 0.3, "best_step": 2}
    (run / "summary.json").write_text(json.dumps({"validation": {"test": course}}))
    [row] = RunTable(tmp_path).read()
    assert (row.best, row.is_best_exact) == (0.3, True) and row.courses["test"]["best_step"] == 2


def test_filter_and_order(root: Path) -> None:
    rows = RunTable(root).read()

    def names(*terms: str, order: str = "name") -> list[str]:
        return [row.name for row in select(rows, terms, order)]

    assert names("state=finished") == ["done", "grid/low"] and names("grid") == names("lr=0.00001") == ["grid/low"]
    assert names("lr!=1e-5", "best>0.25") == ["done", "going", "halted"] and names("step<2") == ["died"]
    assert names("actor.lr=1") == [] and names("lora.rank=8", "failed") == ["died"]
    assert names(order="-reward") == ["grid/low", "done", "going", "halted", "died"]
    assert names(order="lr")[0] == "grid/low" and names(order="-name")[0] == "halted"
    with pytest.raises(UserError, match="no run has 'learning_rate'"):
        names("learning_rate>1")


def test_command(root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "150")
    tool = importlib.import_module("tools.runs")
    assert tool.main([str(root), "--filter", "step>2", "--sort=-best"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == "name state step validation best reward age differs in"
    assert lines[1] == "grid/low finished 4/4 0.3000 0.4000 0.8000 0 s actor.lr=1e-05"
    assert [line.split()[0] for line in lines[2:4]] == ["done", "going"]
    assert lines[4] == "3 of 5 runs: 1 running, 2 finished"
    assert tool.main([str(root / "lost")]) == 2 and "there is no directory" in capsys.readouterr().err


def test_samples_at_equal_prompts(root: Path) -> None:
    runs = [root / "done", root / "grid/low"]
    found = compare_samples(runs, "validation/test")
    assert found["count"] == 2 and [entry["prompt"] for entry in found["prompts"]] == ["2+3=", HOSTILE]
    assert [run["rows"][0]["response"] for run in found["prompts"][0]["runs"]] == ["done 2+3=", "low 2+3="]
    assert [run["step"] for run in found["prompts"][0]["runs"]] == [4, 4] and found["prompts"][0]["truth"] == "5"
    assert compare_samples(runs, "rollouts", first=1)["prompts"][0]["prompt"] == HOSTILE
    assert compare_samples([root / "done", root / "no_run"], "rollouts")["count"] == 0


@pytest.fixture()
def address(root: Path) -> Iterator[str]:
    """Address of the served page."""
    server = make_server(RunTable(root))
    server.serve()
    yield server.url
    server.stop()


def test_documents(address: str) -> None:
    """A filter's mistake is an answer; a request cannot name a run outside the table."""
    listed = json.loads(urlopen(f"{address}runs.json?filter=state%3Dfinished&sort=-best").read())
    assert listed["count"] == 5 and [row["name"] for row in listed["rows"]] == ["grid/low", "done"]
    assert listed["rows"][0]["differences"] == {"actor.lr": "1e-05"}
    assert "no run has 'lost'" in json.loads(urlopen(f"{address}runs.json?sort=lost").read())["error"]
    query = "run=done&run=grid/low&run=../../etc&key=reward/mean"
    chosen = json.loads(urlopen(f"{address}chosen.json?{query}").read())
    assert chosen["names"] == ["done", "grid/low"] and chosen["sets"] == ["rollouts", "validation/test"]
    assert chosen["differences"] == [{"key": "actor.lr", "values": ["0.0001", "1e-05"]}]
    [curve] = chosen["curves"]
    assert curve["key"] == "reward/mean"
    assert curve["lines"][0] == [[step, pytest.approx(0.1 * step)] for step in range(5)]


def test_page_in_a_browser(address: str, root: Path) -> None:
    """Rows, filter, curves of two runs, their differences and answers; a text does nothing; a new step appears."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    executable = next(filter(None, map(shutil.which, BROWSERS)), None)
    if executable is None:
        pytest.skip(f"no Chromium found: none of {', '.join(BROWSERS)} is on the PATH")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        page, events = browser.new_page(), []
        page.on("pageerror", lambda error: events.append(str(error)))
        page.on("console", lambda message: events.append(message.text))
        page.goto(address)
        page.wait_for_selector("html[data-ready]", state="attached", timeout=20_000)
        assert page.locator("#rows tr").count() == 5 and page.locator("#count").text_content() == "5 runs"
        page.fill("[name=filter]", "state=finished")
        page.locator("#count", has_text="2 of 5 runs").wait_for()
        page.fill("[name=filter]", "lost>1")
        page.locator("#mistake", has_text="no run has 'lost'").wait_for()
        page.fill("[name=filter]", "")
        page.locator("#count", has_text="5 runs").wait_for()
        for name in ("done", "grid/low"):
            page.click(f"tr[data-name='{name}']")
        page.wait_for_selector("html[data-chosen='done grid/low']", state="attached")
        assert [figure.get_attribute("data-key") for figure in page.locator("#curves figure").all()] == [
            "reward/mean",
            "validation/test/accuracy",
        ]
        legend = page.locator("[data-key='reward/mean'] .u-series").all_text_contents()
        assert [text.replace(" ", "") for text in legend] == ["step4", "done0.4", "grid/low0.8"]
        assert page.locator("#differences").text_content() == "actor.lr0.00011e-05"
        assert page.locator("#place").text_content() == "prompts 1 to 2 of 2"
        assert page.locator("#samples article pre").all_text_contents() == [
            f"{run} {prompt}" for prompt in ("2+3=", HOSTILE) for run in ("done", "low")
        ]
        with (root / "grid/low/metrics.jsonl").open("a") as file:
            file.write('{"step": 5, "reward/mean": 0.9}\n')
        page.locator("[data-name='grid/low'] .column-step", has_text="5/4").wait_for(timeout=20_000)
        page.locator("[data-key='reward/mean'] .u-series", has_text="0.9").wait_for()
        assert page.evaluate("window.hacked") is None and not events
        browser.close()


def test_benchmark(root: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Its copies are a table of that many runs, with other settings."""
    bench, folder = importlib.import_module("tools.benchmarks.bench_runs"), tmp_path_factory.mktemp("many")
    bench.make_runs(root / "done", folder, 6, num_steps=9)
    rows = RunTable(folder).read()
    assert [row.step for row in rows] == [8] * 6 and len({row.settings["data.seed"] for row in rows}) == 6
    assert {row.state for row in rows} == {"finished", "failed"} and rows[0].best is not None
