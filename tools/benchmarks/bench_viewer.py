# SPDX-License-Identifier: Apache-2.0
"""Time of the rollout viewer on many rollouts on disk: to open, to show a page, to turn it, and to search.

    python tools/benchmarks/bench_viewer.py --rollouts 1000000 --json FILE

Rollouts of 20 tokens with the values of a GRPO run are written to a temporary directory, 500 in each step. `open` is
from the start of the viewer to the first answer of its server, `page` in Chromium (if playwright and a Chromium are
there) until the rollouts are drawn. Files that were just written are read from memory, not from a disk.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # runs from a checkout without installation

from tools.viewer.rollout_store import RolloutStore
from tools.viewer.serving import serve_store

_PER_STEP, _GROUP, _TOKENS = 500, 10, 20
_BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
_RARE = "a rare answer"  # in the first step only, which a search reads last


def write_run(run_dir: Path, num_rollouts: int) -> int:
    """Write the rollouts; return their bytes."""
    values = {
        "num_tokens": _TOKENS,
        "ground_truth": "42",
        "reward": 1.0,
        "reward_components": {"math": 1.0},
        "finish_reason": "stop",
        "policy_version": 7,
        "versions": [7] * _TOKENS,
        "tokens": list(range(100, 100 + _TOKENS)),
        "token_texts": [f" word{i}" for i in range(_TOKENS)],
        **{name: [0.123456] * _TOKENS for name in ("rollout_logprobs", "old_logprobs", "advantages", "entropy")},
    }
    end, folder = json.dumps(values)[1:], run_dir / "rollouts"
    folder.mkdir(parents=True)
    num_bytes = 0
    for step in range(1, num_rollouts // _PER_STEP + 1):
        lines = "".join(
            f'{{"prompt_id": {step * _PER_STEP + i // _GROUP}, "sample_index": {i % _GROUP}, "prompt": "question {i}", '
            f'"response": "{_RARE if step == 1 and i == 0 else "an answer"} {step} {i}", {end}\n'
            for i in range(_PER_STEP)
        )
        (folder / f"step_{step}.jsonl").write_text(lines)
        num_bytes += len(lines)
    return num_bytes


def fetch(url: str) -> dict[str, Any]:
    """Return the JSON at an address."""
    with urllib.request.urlopen(url) as answer:
        return json.load(answer)


def measure(seconds: dict[str, float], name: str, action: Callable[[], Any]) -> Any:
    """Run an action, record its seconds, and return its result."""
    start = time.perf_counter()
    result = action()
    seconds[name] = round(time.perf_counter() - start, 3)
    return result


def search(url: str, text: str) -> int:
    """Search on until the end; return the number of rollouts found."""
    found, place = 0, [0, 0]
    while place is not None:
        page = fetch(f"{url}rollouts.json?text={quote(text)}&file={place[0]}&byte={place[1]}")
        found, place = found + len(page["index"]["columns"]["step"]), page["next"]
    return found


def draw(url: str, seconds: dict[str, float]) -> None:
    """Open the page in Chromium, twice: the first time starts it."""
    executable = next(filter(None, map(shutil.which, _BROWSERS)), None)
    if executable is None:
        return
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        for name in ("page, first", "page"):
            page = browser.new_page(viewport={"width": 1400, "height": 900})

            def show(page: Any = page) -> None:
                page.goto(url)
                page.wait_for_selector("html[data-ready=yes]", state="attached", timeout=60_000)

            measure(seconds, name, show)
            page.close()
        browser.close()


def main(arguments: list[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=1_000_000, help="a multiple of 500 (1000000)")
    parser.add_argument("--json", type=Path, help="write the result here as well", metavar="FILE")
    options = parser.parse_args(arguments)
    seconds: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as directory:
        run_dir = Path(directory) / "run"
        num_bytes = write_run(run_dir, options.rollouts)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        start = time.perf_counter()
        store = RolloutStore([run_dir])
        server = serve_store(store, "127.0.0.1", 0)
        first = fetch(f"{server.url}rollouts.json")
        seconds["open"] = round(time.perf_counter() - start, 3)
        assert first["index"]["columns"]["step"][0] == options.rollouts // _PER_STEP
        measure(seconds, "count", store.wait)
        file, byte = first["next"]
        measure(seconds, "next page", lambda: fetch(f"{server.url}rollouts.json?file={file}&byte={byte}"))
        measure(seconds, "page of the first step", lambda: fetch(f"{server.url}rollouts.json?last=1"))
        draw(server.url, seconds)
        assert measure(seconds, "search of everything", lambda: search(server.url, _RARE)) == 1
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        server.stop()
    result = {
        "rollouts": store.num_rollouts,
        "gigabytes": round(num_bytes / 1e9, 3),
        "seconds": seconds,
        "memory_mib": grown >> 10,  # beyond what the process had after its imports
    }
    print(json.dumps(result, indent=2))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
