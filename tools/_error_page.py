# SPDX-License-Identifier: Apache-2.0
"""The page `docs/errors.md`: every error that a user can fix, read from the syntax trees of the sources.

Every `UserError(found, source=, expected=, hint=)` of the package, the tools and the launchers is one row. Parts that
only the moment of the error knows are shown as `{name}`. A function that builds an error out of texts that its callers
give (`require`, `_damaged`, ...) is one row per caller.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron_rl.types import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_PREEMPTED, EXIT_STALLED, EXIT_USER_ERROR

_ROOMS = ("launch", "tools", "megatron_rl")
_PARTS = ("found", "source", "expected", "hint")
_MARK = "\0"  # encloses a placeholder until the row is formatted
_INTRODUCTION = """\
# Errors

Whatever a user can fix is one error with four parts, printed once and without a traceback:

```
error: actor.lr = -1.0 is negative
  source:   actor.lr (command line)
  expected: >= 0
  hint:     set actor.lr to 0 or more
```

Settings, model directory, data, layout and rewards are checked before any model is built, on every rank alike. Once a
run has begun, what fails on one rank or on all of them ends the job with one message of the same form: its source is
the rank, the step and the phase. The traceback is in `logs/rank<N>.log`, with the last collectives of that rank. This
page lists all such errors by the room of the code that raises them. `{{name}}` stands for what only the moment knows.
It is made from the sources by `python tools/make_docs.py`.

## Exit codes

| a rank or a tool exits with | meaning | what to do |
|---|---|---|
| 0 | done | |
| {failed} | an unexpected error, no memory, a lost rank; a tool: a difference | follow the hint; {traceback} |
| {user_error} | one of the errors on this page | follow the hint |
| {stalled} | the watchdog ended a rank that was stuck | rank 0 printed [who waited for whom]({watchdog}) |
| {preempted} | a signal asked the run to stop, and it has saved | [start the same command again]({signals}) |
| {interrupted} | Ctrl-C | |

torchrun itself exits with 1 for all of them; `launch/train_single_node.sh` (with `RUN_DIR`) and
`launch/train_multi_node.sh` pass {preempted} on.
"""
_VALUES = {
    "failed": EXIT_FAILED,
    "user_error": EXIT_USER_ERROR,
    "stalled": EXIT_STALLED,
    "preempted": EXIT_PREEMPTED,
    "interrupted": EXIT_INTERRUPTED,
    "watchdog": "checkpoints.md#the-watchdog",
    "traceback": "the traceback is in `logs/rank<N>.log`",
    "signals": "checkpoints.md#signals-and-exit-codes",
}


@dataclass(frozen=True)
class _Row:
    """The four parts of one error, with marked placeholders."""

    path: Path
    line: int
    parts: tuple[str, ...]


def format_page(root: Path) -> str:
    """The page as Markdown.

    Args:
        root: of the checkout; the sources below it are read, not imported.
    """
    lines = [_INTRODUCTION.format(**_VALUES)]
    room, path = "", Path()
    for row in _read_rows(root):
        if (new_room := _name_room(row.path)) != room:
            lines.append(f"\n## {new_room}\n")
            room = new_room
        if row.path != path:
            heading = row.path.as_posix().removeprefix("megatron_rl/")
            lines.append(f"\n### {heading}\n\n| message | source | expected | hint |\n|---|---|---|---|\n")
            path = row.path
        lines.append(f"| {' | '.join(map(_format_cell, row.parts))} |\n")
    return "".join(lines)


def _name_room(path: Path) -> str:
    """`config` for a file of that sub-package, the file's own name for modules of the package's root."""
    return path.parts[0] if path.parts[0] != "megatron_rl" else path.with_suffix("").parts[1]


def _read_rows(root: Path) -> list[_Row]:
    trees = {
        path.relative_to(root): ast.parse(path.read_text(encoding="utf-8"))
        for room in _ROOMS
        for path in sorted((root / room).rglob("*.py"))
    }
    public = [builder for tree in trees.values() for builder in _find_builders(tree) if builder.is_shared]
    rows = []
    for path, tree in trees.items():
        found = {row.line: row for row in _ModuleReader(path, tree, public).rows()}  # a line has one error
        rows += [found[line] for line in sorted(found)]
    return rows


@dataclass(frozen=True)
class _Builder:
    """A function that puts its arguments into the parts of an error."""

    function: ast.FunctionDef
    error: ast.Call
    parameters: tuple[str, ...]
    advice: frozenset[str]  # parameters that are in the message, in what is expected, or in the hint

    @property
    def is_shared(self) -> bool:
        """Whether other modules may call it."""
        return not self.function.name.startswith("_") and self.parameters[:1] != ("self",)

    def bind(self, call: ast.Call) -> dict[str, ast.expr]:
        """The arguments of a call by parameter."""
        names = self.parameters[self.parameters[:1] == ("self",) :]
        return dict(zip(names, call.args)) | {word.arg: word.value for word in call.keywords if word.arg}


def _find_builders(tree: ast.Module) -> Iterator[_Builder]:
    """Functions whose error's message or advice contains one of their own parameters."""
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
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "UserError"


def _parts_of(call: ast.Call) -> dict[str, ast.expr]:
    return dict(zip(_PARTS, call.args)) | {word.arg: word.value for word in call.keywords if word.arg in _PARTS}


class _ModuleReader:
    """Finds the errors of one module."""

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

    def rows(self) -> Iterator[_Row]:
        """One per error written out, or per call of a function that builds one out of texts."""
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
        """Whether an argument has words of its own, rather than values that are only known later."""
        if isinstance(value, ast.Name):
            value = self._constants.get(value.id, value)
        if isinstance(value, ast.IfExp):
            return self._is_prose(value.body) or self._is_prose(value.orelse)
        pieces = value.values if isinstance(value, ast.JoinedStr) else [value]
        return any(isinstance(piece, ast.Constant) and re.search("[a-z]", str(piece.value)) for piece in pieces)

    def _row(self, error: ast.Call, line: int, values: Mapping[str, ast.expr]) -> _Row:
        parts = _parts_of(error)
        return _Row(self._path, line, tuple(self._say(parts[part], values) for part in _PARTS))

    def _say(self, node: ast.expr, values: Mapping[str, ast.expr]) -> str:
        """An expression as a reader of the error would see it, with marked placeholders."""
        if isinstance(node, ast.Name) and node.id in values:
            return self._say(values[node.id], {})
        if isinstance(node, ast.Name) and node.id in self._constants:
            return self._say(self._constants[node.id], {})
        if isinstance(node, ast.Constant):
            return str(node.value)
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
    """A short name for what an expression will say."""
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
    """What is called says less than what it is called with, as a rule."""
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
    """Text for a table of Markdown: placeholders as code, everything else as it is."""
    pieces = " ".join(text.split()).split(_MARK)
    cells = [f"`{{{piece.strip('_')}}}`" if index % 2 else _escape(piece) for index, piece in enumerate(pieces)]
    return "".join(cells)


def _escape(text: str) -> str:
    return re.sub(r"([\\`*_\[\]|<>#~$])", r"\\\1", text)
