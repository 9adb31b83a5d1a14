# SPDX-License-Identifier: Apache-2.0
"""Branches of the package that run only on a GPU, found in its syntax trees.

A branch is a conditional part that requires CUDA, the statements after an `if` that leaves on a CPU, a direct call of
`torch.cuda`, or an import of a GPU-only library.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "megatron_rl"
_GPU_LIBRARIES = ("flash_attn", "transformer_engine", "torch.nn.attention.varlen")
_APART = ("parallel/cpu_runtime.py",)  # the CPU stand-in for GPUs
_LEAVING = (ast.Return, ast.Raise, ast.Continue)
_HARMLESS = ("is_available", "Stream", "CUDAGraph")  # called on every device, or types


@dataclass(frozen=True)
class Branch:
    """A branch that runs only on a GPU.

    Attributes:
        function: enclosing qualified name; "" at module level.
        text: first line.
        line: line number of `text`.
        last: last line of the first statement.
        is_expression: whether a CPU runs part of the line.
    """

    file: str
    function: str
    text: str
    line: int
    last: int
    is_expression: bool

    @property
    def key(self) -> tuple[str, str, str]:
        """Return an identity independent of line numbers."""
        return self.file, self.function, self.text


def list_branches() -> list[Branch]:
    """List branches by file and line."""
    found: dict[tuple[str, str, str], Branch] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        if not name.startswith(_APART):
            for branch in sorted(_Finder(name, path.read_text(encoding="utf-8")).run(), key=lambda b: b.line):
                found.setdefault(branch.key, branch)
    return [*found.values()]


class _Finder:
    def __init__(self, file: str, source: str) -> None:
        self._file, self._lines, self._tree = file, source.splitlines(), ast.parse(source)
        self._names: dict[str, bool] = {}  # condition assigned to a variable -> whether true means a GPU
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Assign):
                self._name_conditions(node)

    def run(self) -> Iterator[Branch]:
        yield from self._visit(self._tree, "")

    def _name_conditions(self, node: ast.Assign) -> None:
        pairs = [(target, node.value) for target in node.targets]
        for target, value in list(pairs):
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                pairs += zip(target.elts, value.elts, strict=False)
        for target, value in pairs:
            name = target.attr if isinstance(target, ast.Attribute) else getattr(target, "id", "")
            if name and (self._means_gpu(value, True) or self._means_gpu(value, False)):
                self._names[name] = self._means_gpu(value, True)

    def _means_gpu(self, test: ast.expr, value: bool) -> bool:
        """Whether a test with this value implies a GPU."""
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            return self._means_gpu(test.operand, not value)
        if isinstance(test, ast.BoolOp):
            found = [self._means_gpu(part, value) for part in test.values]
            return any(found) if isinstance(test.op, ast.And) == value else all(found)
        if isinstance(test, ast.Compare) and ast.unparse(test.left).endswith(".type") and len(test.ops) == 1:
            named, is_equal = ast.unparse(test.comparators[0]).strip("'\""), isinstance(test.ops[0], ast.Eq)
            return value == is_equal if named == "cuda" else value != is_equal if named == "cpu" else False
        text = ast.unparse(test)
        if text == "torch.cuda.is_available()" or text.endswith(".is_cuda"):
            return value
        name = text.rpartition(".")[2]
        return isinstance(test, ast.Name | ast.Attribute) and self._names.get(name) == value

    def _visit(self, node: ast.AST, function: str) -> Iterator[Branch]:
        for block in (getattr(node, name, None) for name in ("body", "orelse", "finalbody", "handlers")):
            if isinstance(block, list):
                yield from self._visit_block(block, function)

    def _visit_block(self, block: list[ast.AST], function: str) -> Iterator[Branch]:
        for number, node in enumerate(block):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                yield from self._visit(node, f"{function}.{node.name}".lstrip("."))
                continue
            if isinstance(node, ast.If):
                if self._means_gpu(node.test, True):
                    yield self._describe(node.body[0], function)
                elif self._means_gpu(node.test, False) and node.orelse:
                    yield self._describe(node.orelse[0], function)
                elif self._means_gpu(node.test, False) and isinstance(node.body[-1], _LEAVING) and block[number + 1 :]:
                    yield self._describe(block[number + 1], function)
                    return  # all that follows is one branch
            yield from self._visit_expressions(node, function)
            yield from self._visit(node, function)

    def _visit_expressions(self, node: ast.AST, function: str) -> Iterator[Branch]:
        """Yield branches of a statement's own expressions, without the statements nested in it."""
        if isinstance(node, ast.Import | ast.ImportFrom) and function:
            module = node.module or "" if isinstance(node, ast.ImportFrom) else node.names[0].name
            if module.startswith(_GPU_LIBRARIES):
                yield self._describe(node, function)
            return
        own = [child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.stmt | ast.ExceptHandler)]
        parts = [part for child in own for part in ast.walk(child)]
        for part in parts:
            if isinstance(part, ast.IfExp) and (self._means_gpu(part.test, True) or self._means_gpu(part.test, False)):
                yield self._describe(node, function, is_expression=True)
                return
        calls = [ast.unparse(part.func) for part in parts if isinstance(part, ast.Call)]
        if any(call.startswith("torch.cuda.") and not call.endswith(_HARMLESS) for call in calls):
            is_mixed = any(isinstance(part, ast.IfExp) for part in parts)
            yield self._describe(node, function, is_expression=is_mixed)

    def _describe(self, node: ast.AST, function: str, is_expression: bool = False) -> Branch:
        assert isinstance(node, ast.stmt | ast.ExceptHandler)
        text, last = self._lines[node.lineno - 1].strip(), node.lineno if _has_block(node) else node.end_lineno
        return Branch(self._file, function, text, node.lineno, last or node.lineno, is_expression)


def _has_block(node: ast.AST) -> bool:
    return hasattr(node, "body")
