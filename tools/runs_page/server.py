# SPDX-License-Identifier: Apache-2.0
"""Server of `tools/runs.py --serve`: the page of a table of runs, and the curves and samples of those that are chosen.

It is the server of the status page: under a secret path, on this machine only, and read-only. Requests name runs of the
table, never files.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from megatron_rl.observability.metrics import ROLLOUTS, VALIDATION, accuracy_set, shorten, step_of
from megatron_rl.observability.status import thin
from megatron_rl.observability.status_server import CHARTS_LIBRARY, PageServer, read_template
from megatron_rl.types import UserError
from tools.runs_page.table import COLUMNS, RunRow, RunTable, select, show_value
from tools.viewer.comparison import find_differences
from tools.viewer.rollout_page import find_rollout_files

MOST_CHOSEN = 8  # runs over each other: one color each
_ROW_FIELDS = ("name", "state", "reason", "step", "steps", "validation", "best", "is_best_exact", "reward", "loss")
_USUAL_KEYS = ("reward/mean", "sft/loss", "preference/loss", "policy/entropy", "kl/mean", "time/step")
_MOST_CURVES = 12
_LAST_STEPS = 20  # whose rollouts are searched for equal prompts
_MOST_PROMPTS = 400  # read per run
_PROMPTS_SHOWN, _RESPONSES_SHOWN = 4, 4


def serve(table: RunTable, port: int) -> None:
    """Print the page's address and serve it until an interrupt (UserError if the port is taken)."""
    server = make_server(table, port)
    print(f"runs of {table.root}: {server.url}  (Ctrl-C ends it)", flush=True)
    try:
        server.serve_forever()
    finally:
        server.server_close()


def make_server(table: RunTable, port: int = 0) -> PageServer:
    """Return the server of a table's page, bound to a port of 127.0.0.1."""
    page = read_template(Path(__file__).parent, f"Runs of {table.root}", "'self'", libraries=(CHARTS_LIBRARY,))
    documents = {"runs.json": _list_runs, "chosen.json": _describe_chosen}
    lock = threading.Lock()

    def answer(file: str, query: str) -> tuple[str, bytes] | None:
        if not file:
            return "text/html; charset=utf-8", page.encode()
        if file not in documents:
            return None
        try:
            with lock:  # of the table's cache
                found = documents[file](table, parse_qs(query))
        except UserError as error:
            found = {"error": str(error)}
        return "application/json", json.dumps(found, allow_nan=False).encode()

    try:
        return PageServer("127.0.0.1", port, answer)
    except (OSError, OverflowError) as error:
        raise UserError(
            f"127.0.0.1:{port} cannot be served: {error}",
            source="--serve",
            expected="a free port",
            hint="leave the number out for any free port",
        ) from error


def _list_runs(table: RunTable, query: Mapping[str, list[str]]) -> dict[str, Any]:
    rows = table.read()
    chosen = select(rows, " ".join(query.get("filter", [])).split(), query.get("sort", ["age"])[0])
    return {"count": len(rows), "columns": COLUMNS, "rows": [_describe_row(row) for row in chosen]}


def _describe_row(row: RunRow) -> dict[str, Any]:
    differences = {key: show_value(value) for key, value in row.differences.items()}
    values = {name: getattr(row, name) for name in _ROW_FIELDS}
    return values | {"age": round(row.age), "differences": differences}


def _describe_chosen(table: RunTable, query: Mapping[str, list[str]]) -> dict[str, Any]:
    known = {row.name: row for row in table.read()}
    rows = [known[name] for name in query.get("run", [])[:MOST_CHOSEN] if name in known]
    records = [table.load_records(row.path) for row in rows]
    keys = sorted({key for run in records for record in run for key in record} - {"step"})
    accuracies = [key for key in keys if accuracy_set(key) is not None]
    wanted = query.get("key") or [_USUAL_KEYS[0], *accuracies, *_USUAL_KEYS[1:]]
    differences = find_differences([row.settings for row in rows])
    sets = [ROLLOUTS, *sorted({name for row in rows for name in _find_sets(row.path)})]
    chosen_set = query.get("set", [""])[0]
    if chosen_set not in sets:
        chosen_set = sets[1] if len(sets) > 1 else ROLLOUTS
    return {
        "names": [row.name for row in rows],
        "differences": [{"key": key, "values": list(map(show_value, values))} for key, values in differences.items()],
        "keys": keys,
        "curves": [
            {"key": key, "lines": [_read_line(run, key) for run in records]}
            for key in wanted[:_MOST_CURVES]
            if key in keys
        ],
        "sets": sets,
        "set": chosen_set,
        "samples": compare_samples([row.path for row in rows], chosen_set, int(query.get("at", ["0"])[0])),
    }


def _read_line(records: Sequence[Mapping[str, float | None]], key: str) -> list[tuple[float, ...]]:
    return thin([(step_of(record), value) for record in records if (value := record.get(key)) is not None])


def _find_sets(run_dir: Path) -> list[str]:
    folder = run_dir / VALIDATION
    return [f"{VALIDATION}/{path.name}" for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []


def compare_samples(run_dirs: Sequence[Path], kind: str, first: int = 0) -> dict[str, Any]:
    """Return the last logged responses of runs to the prompts that all of them have.

    Args:
        kind: "rollouts", or "validation/<set>".
        first: prompts to leave out at the beginning.
    """
    found = [_read_prompts(run_dir if kind == ROLLOUTS else run_dir / kind) for run_dir in run_dirs]
    common = [prompt for prompt in (found[0] if found else {}) if all(prompt in run for run in found)]
    prompts = [
        {"prompt": shorten(prompt), "truth": found[0][prompt]["truth"], "runs": [run[prompt] for run in found]}
        for prompt in common[first : first + _PROMPTS_SHOWN]
    ]
    return {"count": len(common), "first": first, "prompts": prompts}


def _read_prompts(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the last logged responses by prompt, the newest step first."""
    try:
        files = find_rollout_files(folder)
    except UserError:
        return {}  # none are logged
    prompts: dict[str, dict[str, Any]] = {}
    for step in sorted(files, reverse=True)[:_LAST_STEPS]:
        with files[step].open(encoding="utf-8") as file:
            for line in file:
                row = json.loads(line)
                prompt = str(row.get("prompt", ""))
                if prompt not in prompts and len(prompts) == _MOST_PROMPTS:
                    return prompts
                truth = shorten(str(row.get("ground_truth") or ""))
                entry = prompts.setdefault(prompt, {"step": step, "truth": truth, "rows": []})
                if entry["step"] == step and len(entry["rows"]) < _RESPONSES_SHOWN:
                    names = ("reward", "finish_reason", "label")
                    entry["rows"].append(
                        {name: row.get(name) for name in names} | {"response": shorten(str(row.get("response", "")))}
                    )
    return prompts
