# SPDX-License-Identifier: Apache-2.0
"""The page `docs/errors.md`: every error that a user can fix, by topic, read from the syntax trees.

Messages of `UserError` with the same advice share a row. Values computed at run time appear as `{name}`. A function
that builds an error from texts of its callers (`require`, `_damaged`, ...) has one message per caller.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from megatron_rl.types import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_PREEMPTED, EXIT_STALLED, EXIT_USER_ERROR

_ROOMS = ("launch", "tools", "megatron_rl")
_PARTS = ("found", "source", "expected", "hint")
_MARK = "\0"  # encloses a placeholder until the row is formatted
_NAME = re.compile(r"\w[._/]\w|--\w|=")
_INTRODUCTION = """\
# Errors

Everything that a user can fix is one error with four parts, printed once and without a traceback:

```
error: actor.lr = -1.0 is negative
  source:   actor.lr (command line)
  expected: >= 0
  hint:     set actor.lr to 0 or more
```

Input is checked on every rank before any model is built. Once a run has begun, the source of a failure is the rank, the
step and the phase; `logs/rank<N>.log` has the traceback and the last collectives of that rank.

To find an error below, search for some of its words; `{{name}}` stands for a value of the occurrence. Messages
whose own hint says enough stand in a list. `python tools/make_docs.py` makes the page from the sources.

## Exit codes

| a rank or a tool exits with | meaning | what to do |
|---|---|---|
| 0 | done | |
| {failed} | an unexpected error, out of memory, a lost rank, {bad_step}; for a tool: a difference | {read_log} |
| {user_error} | one of the errors on this page | follow the hint |
| {stalled} | the watchdog ended a stuck rank | rank 0 printed [who waited for whom]({watchdog}) |
| {preempted} | a signal stopped the run after it saved | [run the same command again]({signals}) |
| {interrupted} | Ctrl-C | |

torchrun itself exits with 1; `launch/train_single_node.sh` (with `RUN_DIR`) and `launch/train_multi_node.sh` return
{preempted}.
"""
_VALUES = {
    "failed": EXIT_FAILED,
    "bad_step": "a step with nothing to learn from",
    "user_error": EXIT_USER_ERROR,
    "stalled": EXIT_STALLED,
    "preempted": EXIT_PREEMPTED,
    "interrupted": EXIT_INTERRUPTED,
    "watchdog": "checkpoints.md#the-watchdog",
    "read_log": "follow the hint; the traceback is in `logs/rank<N>.log`",
    "signals": "checkpoints.md#signals-and-exit-codes",
}


@dataclass(frozen=True)
class Row:
    """One error.

    Attributes:
        parts: found, source, expected and hint, with marked placeholders.
    """

    path: Path
    line: int
    parts: tuple[str, ...]

    @property
    def advice(self) -> str:
        """Return the hint if it names a setting, command or file, or is long."""
        known = self.parts[3].split(_MARK)[::2]
        return self.parts[3] if _NAME.search(" ".join(known)) or len(" ".join(known).split()) > 9 else ""


# Topic -> a one-line description and path prefixes; the longest matching prefix decides the topic of an error.
_AREAS: dict[str, tuple[str, tuple[str, ...]]] = {
    "Settings, recipes and the command line": (
        "A name, a type, a bound, or settings that do not go together.",
        ("config/", "compat/", "run/loading", "run/command_line", "run/preview", "launch/"),
    ),
    "Batch sizes": (
        "Prompts, responses, minibatches and token budgets that do not divide or do not fit.",
        ("config/batch_plan", "config/sft_plan"),
    ),
    "Layouts, placement and memory": (
        "Ranks that do not suffice, sizes that do not divide, models that do not fit.",
        ("parallel/", "planning/", "tools/planning/"),
    ),
    "Model directories and families": (
        "Missing or damaged files, architectures and options of config.json that are not supported, adapters.",
        ("weights/", "models/", "run/models", "checkpoint/huggingface", "checkpoint/peft"),
    ),
    "Data, prompts and tokenizers": (
        "Files, rows, columns, chat templates and lengths.",
        ("data/", "run/inputs", "extension/reasoning_gym"),
    ),
    "Rewards": ("Rules, functions, workers, services and ground truths.", ("rewards/",)),
    "Algorithms and plugins": (
        "Estimators, losses, aggregations, and your own files.",
        ("algorithms/", "extension/", "samples/"),
    ),
    "Engines, sampling and servers": (
        "What an engine cannot serve, servers that fail, responses that differ from their request.",
        ("engines/", "transfer/probe", "transfer/coding", "rollout/"),
    ),
    "Environments, tools and episodes": ("Your environment, its processes, and chat templates.", ("agents/",)),
    "The run stops during training": (
        "A loss, a norm, a rank or a phase that fails after the start.",
        ("training/", "run/", "observability/failures", "transfer/"),
    ),
    "Checkpoints, resuming and conversion": (
        "Directories, damaged or missing files, a second job, inputs that have changed.",
        ("checkpoint/", "run/checkpoints", "run/opening", "tools/conversion/"),
    ),
    "Logs, metrics and pages": (
        "Run directories, W&B, the status page, the viewer.",
        ("observability/", "tools/viewer/"),
    ),
    "Replays": ("Capsules and their replay.", ("capsule/", "tools/replay/")),
    "Tools, benchmarks and rehearsals": ("Arguments and inputs of commands beside training.", ("",)),
}


def format_page(root: Path) -> str:
    """Format the page without duplicates."""
    areas: dict[str, dict[str, dict[str, None]]] = {area: {} for area in _AREAS}
    for row in read_rows(root):
        messages = areas[_find_area(row.path)].setdefault(_format_cell(row.advice), {})
        messages[_format_cell(row.parts[0])] = None
    parts = [_INTRODUCTION.format(**_VALUES)]
    for area, (about, _) in _AREAS.items():
        if areas[area]:
            others = areas[area].pop("", {})
            parts.append(f"\n## {area}\n\n{about}\n\n| message | what to do |\n|---|---|\n")
            parts += [f"| {'<br>'.join(messages)} | {advice} |\n" for advice, messages in areas[area].items()]
            parts += ["\n", *(f"- {message}\n" for message in others)] if others else []
    return "".join(parts)


def _find_area(path: Path) -> str:
    name = path.as_posix().removeprefix("megatron_rl/")
    prefixes = {prefix: area for area, (_, prefixes) in _AREAS.items() for prefix in prefixes}
    return prefixes[max((prefix for prefix in prefixes if name.startswith(prefix)), key=len)]


@cache
def read_rows(root: Path) -> tuple[Row, ...]:
    """List all errors by file and line."""
    trees = {
        path.relative_to(root): ast.parse(path.read_text(encoding="utf-8"))
        for room in _ROOMS
        for path in sorted((root / room).rglob("*.py"))
    }
    public = [builder for tree in trees.values() for builder in _find_builders(tree) if builder.is_shared]
    rows: list[Row] = []
    for path, tree in trees.items():
        found = {row.line: row for row in _ModuleReader(path, tree, public).rows()}  # a line has one error
        rows += [found[line] for line in sorted(found)]
    return tuple(rows)


@dataclass(frozen=True)
class _Builder:
    """A function that puts its arguments into the parts of an error."""

    function: ast.FunctionDef
    error: ast.Call
    parameters: tuple[str, ...]
    advice: frozenset[str]  # parameters used in the message, the expectation or the hint

    @property
    def is_shared(self) -> bool:
        """Whether other modules may call it."""
        return not self.function.name.startswith("_") and self.parameters[:1] != ("self",)

    def bind(self, call: ast.Call) -> dict[str, ast.expr]:
        """Map parameters to a call's arguments."""
        names = self.parameters[self.parameters[:1] == ("self",) :]
        return dict(zip(names, call.args)) | {word.arg: word.value for word in call.keywords if word.arg}


def _find_builders(tree: ast.Module) -> Iterator[_Builder]:
    """Find functions whose error uses their parameters."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef):
            continue
        parameters = tuple(arg.arg for arg in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs))
        errors = [call for call in ast.walk(node) if _is_error(call)]
        if len(errors) != 1:
            continue
        parts = [part for name, part in _parts_of(errors[0]).items() if name != "source"]
        names = {name.id for part in parts for name in ast.walk(part) if isinstance(name, ast.Name)}
        if advice := names & set(parameters) - {"self"}:
            yield _Builder(node, errors[0], parameters, frozenset(advice))


def _is_error(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("UserError", "BadStep")


def _parts_of(call: ast.Call) -> dict[str, ast.expr]:
    return dict(zip(_PARTS, call.args)) | {word.arg: word.value for word in call.keywords if word.arg in _PARTS}


class _ModuleReader:
    """Reader of one module's errors."""

    def __init__(self, path: Path, tree: ast.Module, shared: list[_Builder]) -> None:
        self._path, self._tree = path, tree
        own = list(_find_builders(tree))
        imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
        self._builders = {b.function.name: b for b in shared if b.function.name in imported}
        self._builders |= {b.function.name: b for b in own}
        self._constants = {
            target.id: node.value
            for node in tree.body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name) and isinstance(node.value, ast.Constant | ast.JoinedStr)
        }

    def rows(self) -> Iterator[Row]:
        """Yield a row per literal error and per builder call."""
        calls = [(node, builder) for node in ast.walk(self._tree) if (builder := self._builder_of(node)) is not None]
        replaced = {
            builder.error
            for node, builder in calls
            if any(self._is_prose(value) for name, value in builder.bind(node).items() if name in builder.advice)
        }
        for node, builder in calls:
            texts = {name: value for name, value in builder.bind(node).items() if self._is_text(value)}
            if builder.error in replaced and texts:
                yield self._row(builder.error, node.lineno, texts)
        for node in ast.walk(self._tree):
            if _is_error(node) and node not in replaced and len(_parts_of(node)) == len(_PARTS):
                yield self._row(node, node.lineno, {})

    def _builder_of(self, node: ast.AST) -> _Builder | None:
        if not isinstance(node, ast.Call):
            return None
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        return self._builders.get(name)

    def _is_text(self, value: ast.expr) -> bool:
        return isinstance(value, ast.JoinedStr) or self._is_prose(value)

    def _is_prose(self, value: ast.expr) -> bool:
        """Whether an argument contains literal words."""
        if isinstance(value, ast.Name):
            value = self._constants.get(value.id, value)
        if isinstance(value, ast.IfExp):
            return self._is_prose(value.body) or self._is_prose(value.orelse)
        pieces = value.values if isinstance(value, ast.JoinedStr) else [value]
        return any(isinstance(piece, ast.Constant) and re.search("[a-z]", str(piece.value)) for piece in pieces)

    def _row(self, error: ast.Call, line: int, values: Mapping[str, ast.expr]) -> Row:
        parts = _parts_of(error)
        return Row(self._path, line, tuple(self._say(parts[part], values) for part in _PARTS))

    def _say(self, node: ast.expr, values: Mapping[str, ast.expr]) -> str:
        """Render an expression as text, with a marked placeholder for each value that is computed at run time."""
        if isinstance(node, ast.Name) and node.id in values:
            return self._say(values[node.id], {})
        if isinstance(node, ast.Name) and node.id in self._constants:
            return self._say(self._constants[node.id], {})
        if isinstance(node, ast.Constant):
            return f"{node.value:g}" if isinstance(node.value, float) else str(node.value)
        if isinstance(node, ast.JoinedStr):
            return "".join(self._say(value, values) for value in node.values)
        if isinstance(node, ast.FormattedValue):
            return self._say(node.value, values)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add) and not isinstance(node.right, ast.Constant):
            return self._say(node.left, values) + self._say(node.right, values)
        if isinstance(node, ast.IfExp):
            first, second = self._say(node.body, values), self._say(node.orelse, values)
            return first if first.startswith(f"{second} (") else " / ".join(text for text in (first, second) if text)
        return f"{_MARK}{_name(node)}{_MARK}"


def _name(node: ast.expr) -> str:
    """Return the name of an expression's placeholder."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return "type" if node.attr == "__name__" else node.attr
    if isinstance(node, ast.Subscript | ast.Starred | ast.FormattedValue):
        return _name(node.value)
    if isinstance(node, ast.BoolOp):
        return _name(node.values[0])
    if isinstance(node, ast.List | ast.Tuple) and node.elts:
        return _name(node.elts[0])
    if isinstance(node, ast.BinOp):
        is_product = isinstance(node.op, ast.Mult) and not any(isinstance(part, ast.Call) for part in ast.walk(node))
        return ast.unparse(node).replace("self.", "") if is_product else _name(node.left)
    if isinstance(node, ast.ListComp | ast.GeneratorExp | ast.SetComp):
        return _name(node.generators[0].iter)
    return _name_call(node) if isinstance(node, ast.Call) else "..."


def _name_call(node: ast.Call) -> str:
    """Return the name of a call's placeholder: mostly its first argument's, since that is more specific."""
    function = node.func
    if isinstance(function, ast.Name) and function.id == "len":
        return f"number of {_name(node.args[0])}"
    arguments = [name for name in map(_name, node.args) if name not in ("...", "self")]
    if isinstance(function, ast.Attribute) and function.attr == "get":
        return "value"
    if arguments:
        return arguments[0]
    if not isinstance(function, ast.Attribute):
        return _name(function)
    owner = _name(function.value)
    return function.attr if owner == "self" or owner.istitle() else owner


def _format_cell(text: str) -> str:
    """Format a table cell, with placeholders as code."""
    pieces = " ".join(text.split()).split(_MARK)
    cells = [f"`{{{piece.strip('_')}}}`" if index % 2 else _escape(piece) for index, piece in enumerate(pieces)]
    return "".join(cells)


def _escape(text: str) -> str:
    return re.sub(r"([\\`*_\[\]|<>#~$])", r"\\\1", text)
