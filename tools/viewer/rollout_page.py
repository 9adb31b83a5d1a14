# SPDX-License-Identifier: Apache-2.0
"""Writer of `tools/view_rollouts.py`: one self-contained HTML page of a run's rollouts.

Data is compressed JSON in elements that browsers do not execute: an index, and per-token values in chunks. Texts are
inserted as text only, and a content security policy forbids foreign scripts and all connections.
"""

from __future__ import annotations

import base64
import gzip
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from megatron_rl.observability.metrics import VALIDATION, as_numbers
from megatron_rl.observability.status_server import read_template
from megatron_rl.types import UserError, has_reward

PARTS = Path(__file__).parent
CHUNK = 64  # rollouts per chunk
_SCALE_QUANTILE = 0.99  # quantile of absolute values shown in full color
_COMPRESSION = 4  # gzip level
_TOOL_NAME = re.compile(r'"name"\s*:\s*"([^"\\]{1,80})"')  # in a call, in the formats of tools that models write
_SCALE_VALUES = 32  # values per rollout that the quantile is taken from


@dataclass(frozen=True)
class Mode:
    """A way to color tokens.

    Attributes:
        key, label, meaning: name in the data, in the menu, sentence in the legend.
        kind: "diverging" (around 0), "sequential" (from 0) or "flag".
        transform: "none", "log" or "negative".
    """

    key: str
    label: str
    meaning: str
    kind: str
    transform: str = "none"
    decimals: int = 4


MODES = (
    Mode("surprise", "surprise", "minus the log-prob that the engine reported", "sequential", transform="negative"),
    Mode("advantage", "advantage", "blue: the update makes the token likelier; orange: less likely", "diverging"),
    Mode(
        "gap",
        "rollout/train gap",
        "log-prob of the trainer minus that of the engine, before the update",
        "diverging",
        decimals=6,
    ),
    Mode(
        "ratio",
        "ratio",
        "probability in the last optimizer step that used the token over that before the update",
        "diverging",
        transform="log",
    ),
    Mode("clipped", "clipped", "the loss of that optimizer step was clipped at this token", "flag"),
    Mode("entropy", "entropy", "of the policy's next-token distribution in that optimizer step, in nats", "sequential"),
    Mode("value", "value", "what the critic expected here", "diverging"),
    Mode(
        "age",
        "older weights",
        "optimizer steps between the weights that sampled the token and policy_version, which sampled the last one",
        "sequential",
    ),
)
# Mode -> key of the row; gap and age are computed from two values.
_FIELDS = {
    "advantage": "advantages",
    "ratio": "ratio",
    "clipped": "clipped",
    "entropy": "entropy",
    "value": "values",
    "surprise": "rollout_logprobs",
}


@dataclass(frozen=True)
class Page:
    """A written page: size in bytes, and labels of modes that no rollout has."""

    num_rollouts: int
    num_steps: int
    num_bytes: int
    missing: tuple[str, ...]


def find_rollout_files(run_dir: Path, steps: range | None = None) -> dict[int, Path]:
    """Return rollout files by step.

    Args:
        steps: all if `None`.

    Raises:
        UserError: there are none.
    """
    folder = run_dir / "rollouts"
    expected = "a run directory with rollouts/step_<N>.jsonl"
    if not folder.is_dir():
        found = "no such directory" if not run_dir.is_dir() else "there is no rollouts/ in it"
        raise UserError(
            f"{run_dir}: {found}",
            source="RUN_DIR",
            expected=expected,
            hint="give the run_dir that the run printed first",
        )
    names = {p.stem.removeprefix("step_"): p for p in folder.glob("step_*.jsonl")}
    files = {int(step): names[step] for step in sorted((s for s in names if s.isdigit()), key=int)}
    if not any(path.stat().st_size for path in files.values()):
        raise UserError(
            f"{folder}: no rollouts in it",
            source="RUN_DIR",
            expected=expected,
            hint="train with trainer.log_rollouts=N (-1: all)",
        )
    chosen = {step: path for step, path in files.items() if steps is None or step in steps}
    if not any(path.stat().st_size for path in chosen.values()):
        raise UserError(
            f"{folder} has steps {min(files)} to {max(files)}",
            source="--steps",
            expected="steps that were logged",
            hint="choose others, or leave it out",
        )
    return chosen


def write_page(run_dirs: Sequence[Path], out: Path, steps: range | None = None) -> Page:
    """Write the page; several runs' responses to a prompt are side by side.

    Args:
        steps: all if `None`.

    Raises:
        UserError: no rollouts, or an invalid line.
    """
    found = [find_rollout_files(run_dir, steps) for run_dir in run_dirs]
    names = [name_part(run_dir) for run_dir in run_dirs]
    head, tail = read_template(PARTS, ", ".join(names)).split("{{data}}")
    index, temporary = RolloutIndex(names), out.with_name(f".{out.name}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as page:
            page.write(head)
            chunk: list[dict[str, Any]] = []
            for run, step, path in [(run, *file) for run, files in enumerate(found) for file in files.items()]:
                for where, row in _read_rows(path):
                    chunk.append(index.add(run, step, row, where))
                    if len(chunk) == CHUNK:
                        _write_data(page, index.next_chunk(), chunk)
                        chunk = []
            _write_data(page, index.next_chunk(), chunk)
            content = index.finish()
            _write_data(page, "index", content)
            page.write(tail)
        os.replace(temporary, out)
    finally:
        temporary.unlink(missing_ok=True)
    missing = tuple(mode["label"] for mode in content["modes"] if not mode["num_rollouts"])
    return Page(len(index.columns["step"]), len(set(index.columns["step"])), out.stat().st_size, missing)


def name_part(run_dir: Path) -> str:
    """Return the name of a run, or of a run's validation set."""
    path = run_dir.resolve()
    return f"{path.parents[1].name}, validation {path.name}" if path.parent.name == VALIDATION else path.name


def texts_of(row: Mapping[str, Any]) -> list[str]:
    """Return the texts of a row in which one searches: prompt, response, ground truth, and observations."""
    turns = [turn for turn in row.get("turns") or () if isinstance(turn, dict)]
    return [
        *(_text(row.get(name)) for name in ("prompt", "response", "ground_truth")),
        *(_text(x.get("observed")) for x in turns),
    ]


def tools_of(row: Mapping[str, Any]) -> list[str]:
    """Return the names of the tools that an episode called, each once."""
    return sorted(set(_TOOL_NAME.findall(_text(row.get("response"))))) if row.get("turns") else []


_COLUMNS = ("run", "step", "group", "sample", "reward", "length", "finish", "version", "response", "label", "source")
_COLUMNS += "tools", "observed"


class RolloutIndex:
    """The page's index of its rollouts; `columns` has a list for each field."""

    def __init__(self, runs: Sequence[str]) -> None:
        names = (
            "run",
            "step",
            "group",
            "sample",
            "reward",
            "length",
            "finish",
            "version",
            "response",
            "label",
            "source",
        )
        names += "tools", "observed"
        self.columns: dict[str, list[Any]] = {name: [] for name in names}
        self._runs, self._num_chunks = runs, 0
        self._groups: dict[tuple[int, str, str], int] = {}
        self._components: dict[str, dict[int, float | int | None]] = {}  # name -> rollout number -> value
        self._prompts: list[dict[str, Any]] = []
        self._sizes: dict[str, list[np.ndarray]] = {mode.key: [] for mode in MODES}

    def add(self, run: int, step: int, row: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Add a rollout; return the details for its chunk."""
        prompt_id, tokens, texts = _text(row.get("prompt_id")), row.get("tokens"), row.get("token_texts")
        if row.get("source"):  # a filter finds all prompts of a source by its name
            prompt_id = f"{_text(row['source'])} {prompt_id}"
        prompt, number = _text(row.get("prompt")), len(self.columns["step"])
        group = self._groups.setdefault((step, prompt_id, prompt), len(self._groups))
        if group == len(self._prompts):
            self._prompts.append({"id": prompt_id, "text": prompt, "truth": _text(row.get("ground_truth"))})
        stated, finish, found = row.get("num_tokens"), _text(row.get("finish_reason")), row.get("reward_components")
        components = {k: _number(x) for k, x in found.items()} if isinstance(found, dict) else {}
        length = next((len(x) for x in (tokens, texts) if isinstance(x, list)), stated if type(stated) is int else None)
        entry = {
            "run": run,
            "step": step,
            "group": group,
            "sample": _number(row.get("sample_index")),
            "reward": _number(row.get("reward")) if has_reward(finish, components) else None,
            "length": length,
            "finish": finish,
            "version": _number(row.get("policy_version")),
            "response": _text(row.get("response")),
            "label": _text(row.get("label")),
            "source": _text(row.get("source")),
            "tools": tools_of(row),
            "observed": "\n".join(texts_of(row)[3:]),
        }
        for name, value in entry.items():
            self.columns[name].append(value)
        ids = _read_numbers(row, "tokens", length, where)
        for name, value in components.items():
            self._components.setdefault(name, {})[number] = value
        details: dict[str, Any] = {
            "components": components,
            "ids": None if ids is None else np.nan_to_num(ids).astype(np.int64).tolist(),
            "texts": [_text(x) for x in texts] if isinstance(texts, list) and len(texts) == length else None,
        }
        if turns := _read_turns(row, length, where):
            details["turns"] = turns
        for mode in MODES:
            values = _find_values(mode.key, row, length, where)
            if values is not None:
                some = values[:: -(-len(values) // _SCALE_VALUES) or 1]
                self._sizes[mode.key].append(np.abs(_TRANSFORMS[mode.transform](some)).astype(np.float32))
                details[mode.key] = as_numbers(values, mode.decimals)
        return details

    def next_chunk(self) -> str:
        """Return the next chunk's element id."""
        self._num_chunks += 1
        return f"chunk-{self._num_chunks - 1}"

    def finish(self) -> dict[str, Any]:
        """Return the index; a mode's color is full at `scale`."""
        modes = [
            asdict(mode) | {"scale": _find_scale(self._sizes[mode.key]), "num_rollouts": len(self._sizes[mode.key])}
            for mode in MODES
        ]
        everyone = range(len(self.columns["step"]))
        components = {name: [found.get(i) for i in everyone] for name, found in self._components.items()}
        return {
            "runs": self._runs,
            "chunk": CHUNK,
            "modes": modes,
            "prompts": self._prompts,
            "columns": self.columns,
            "components": components,
        }


_TRANSFORMS = {
    "none": lambda x: x,
    "negative": lambda x: -x,
    "log": lambda x: np.log(np.maximum(x, 1e-30)),
}


def _find_scale(sizes: list[np.ndarray]) -> float:
    found = np.concatenate(sizes) if sizes else np.zeros(0)
    found = found[np.isfinite(found)]
    scale = float(np.quantile(found, _SCALE_QUANTILE)) if len(found) else 0.0
    return scale or (float(found.max(initial=0.0)) or 1.0)


def _find_values(key: str, row: Mapping[str, Any], length: int | None, where: str) -> np.ndarray | None:
    """Return a mode's values [length] of a row, NaN if missing; `None` if the row lacks them."""
    if key == "gap":
        trainer, engine = (_read_numbers(row, name, length, where) for name in ("old_logprobs", "rollout_logprobs"))
        return None if trainer is None or engine is None else trainer - engine
    if key == "age":
        versions = _read_numbers(row, "versions", length, where)
        return None if versions is None else versions.max(initial=0) - versions
    return _read_numbers(row, _FIELDS[key], length, where)


def _read_turns(row: Mapping[str, Any], length: int | None, where: str) -> list[dict[str, Any]]:
    """Return the turns of an episode; [] for a plain response."""
    turns = row.get("turns") or []
    starts = [turn["start"] for turn in turns if isinstance(turn, dict) and isinstance(turn.get("start"), int)]
    if len(starts) < len(turns) or starts != sorted(starts) or max(starts, default=0) > (length or 0):
        raise bad_row(where, f'"turns" do not begin at tokens of the {length}, one after another')
    return [
        {
            "branch": _number(turn.get("branch")) or 0,
            "start": turn["start"],
            "observed": _text(turn.get("observed")),
            "reward": _number(turn.get("reward")),
        }
        for turn in turns
    ]


def _read_numbers(row: Mapping[str, Any], name: str, length: int | None, where: str) -> np.ndarray | None:
    values = row.get(name)
    if values is None or length is None:
        return None
    try:
        found = np.array(values, np.float64)
    except (TypeError, ValueError):
        found = None
    if found is None or found.shape != (length,):
        raise bad_row(where, f"{name} is not a list of {length} numbers")
    return found


def _read_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each row of a file with its location."""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            where = f"{path}:{number}"
            try:
                row = json.loads(line)
            except ValueError as error:
                raise bad_row(where, f"no JSON: {error}") from error
            if not isinstance(row, dict):
                raise bad_row(where, f"a {type(row).__name__}")
            yield where, row


def bad_row(where: str, found: str) -> UserError:
    """Return the error of a line that is no rollout."""
    return UserError(
        found,
        source=where,
        expected="one rollout per line, as a run writes them",
        hint="if the run is writing this file at the moment, try again; else remove the line",
    )


def _text(value: Any) -> str:
    return value if isinstance(value, str) else "" if value is None else json.dumps(value, ensure_ascii=False)


def _number(value: Any) -> float | int | None:
    """Return a finite number, or `None`."""
    return +value if isinstance(value, int | float) and abs(value) <= sys.float_info.max else None


def _write_data(page: TextIO, name: str, value: Any) -> None:
    """Write a value as compressed JSON in base64, which cannot close its element."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    data = base64.b64encode(gzip.compress(text.encode(), _COMPRESSION, mtime=0)).decode()
    page.write(f'<script type="application/octet-stream" id="{name}">{data}</script>\n')
