# SPDX-License-Identifier: Apache-2.0
"""Figures of the house, from the syntax tree: sizes, records, attributes set from outside, parameters, imports.

    python tests/house_figures.py                  # the working tree
    python tests/house_figures.py --at ec0295a     # a commit

tests/test_house.py holds the limits. Nothing here imports the package.

An attribute is set from outside by `x.a = ...`, `x.y.a += ...` or `setattr(x, ...)` if x is not self or cls alone.
It counts if a class of the package declares `a` (in its body, or as self.a); what an object does to its own parts
counts too. Not declarations: properties with a setter, which are calls; values set once, by a descriptor of the
package whose `__set__` asserts that; and fields of frozen dataclasses, which cannot be set. A name that another class
declares in the plain way counts all the same, since the object's class is unknown here. Not counted either:
attributes that no class of the package declares, and those in LIBRARY, which libraries share with the package; an
argument whose annotation is a class of a library (the type check covers it); imported modules; the `ctx`
of an autograd function; PATCHES, files that exist to change libraries; and an object that its own class makes by
cls(...) or __new__. So an attribute that is added to an object and declared nowhere is not found.
"""

from __future__ import annotations

import argparse
import ast
import io
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # runs from a checkout without installation

from tools._rooms import WINGS

PACKAGE = "megatron_rl"
# Imported by launch/pretrain_grpo.py before it trains, with any config.
PLAIN_RUN = (f"{PACKAGE}.run.command_line", f"{PACKAGE}.run.inputs", f"{PACKAGE}.run.grpo")
# Records of one response between engine and batch; views of them (Branch, Turn, rows of a batch) do not count.
RECORDS = ("Generation", "Sample", "PackedSequence", "SftExample", "Response", "Rollout")
# Tensors (data, sequence_parallel), megatron-core's scheduler (num_steps), multiprocessing.Value (value).
LIBRARY = {"data", "sequence_parallel", "num_steps", "value"}
PATCHES = {f"{PACKAGE}.parallel.cpu_runtime"}
MAX_PARAMETERS = 7
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Tree:
    """The parsed modules of the package by dotted name, and their texts."""

    modules: Mapping[str, ast.Module]
    texts: Mapping[str, str]

    @classmethod
    def read(cls, root: Path) -> Tree:
        """Parse the package below a checkout."""
        texts = {}
        for path in sorted((root / PACKAGE).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            texts[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text(encoding="utf-8")
        return cls({name: ast.parse(text) for name, text in texts.items()}, texts)

    @cached_property
    def classes(self) -> list[ast.ClassDef]:
        """All classes, inner ones too."""
        return [node for tree in self.modules.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]

    @cached_property
    def imports(self) -> dict[str, set[str]]:
        """Module -> modules of the package that it imports, inside of functions and under TYPE_CHECKING too."""
        return {name: set(self._imports_of(ast.walk(tree))) - {name} for name, tree in self.modules.items()}

    @cached_property
    def loaded(self) -> dict[str, set[str]]:
        """Module -> modules of the package that importing it imports."""
        return {name: set(self._imports_of(_walk_loaded(tree))) - {name} for name, tree in self.modules.items()}

    def find_closure(self, roots: Iterable[str]) -> set[str]:
        """Return the modules that importing some of them loads: those that no function imports when it is called."""
        found, todo = set[str](), [*roots]
        while todo:
            name = todo.pop()
            if name not in found:
                found.add(name)
                todo += self.loaded[name]
        return found

    def _imports_of(self, nodes: Iterable[ast.AST]) -> Iterator[str]:
        for node in nodes:
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            for found in names:
                for candidate in (found, found.rpartition(".")[0]):
                    # The version, which every room may import, is in the root.
                    if candidate in self.modules and candidate != PACKAGE:
                        yield candidate
                        break


def _walk_loaded(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that run when a module is imported."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function) or (isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"):
            continue
        yield child
        yield from _walk_loaded(child)


def count_train_lines(tree: Tree) -> int:
    """Lines of `Trainer.train`."""
    [method] = [
        node
        for owner in tree.classes
        if owner.name == "Trainer"
        for node in owner.body
        if isinstance(node, Function) and node.name == "train"
    ]
    return (method.end_lineno or 0) - method.lineno + 1


def list_root_modules(tree: Tree) -> list[str]:
    """Modules that lie in the root of the package, its __init__.py aside."""
    rooms = {name.split(".")[1] for name in tree.modules if name.count(".") > 1}
    return [name for name in tree.modules if name.count(".") == 1 and name.split(".")[1] not in rooms]


def list_records(tree: Tree) -> list[str]:
    """Which of RECORDS there are."""
    return [name for name in RECORDS if any(owner.name == name for owner in tree.classes)]


def list_long_signatures(tree: Tree) -> list[str]:
    """`module.function (n)` with more than MAX_PARAMETERS parameters; self, cls and the ctx of autograd are none."""
    found = []
    for name, module in tree.modules.items():
        for path, node in _functions(module):
            parts = node.args
            given = (*parts.posonlyargs, *parts.args, *parts.kwonlyargs, parts.vararg, parts.kwarg)
            names = [argument.arg for argument in given if argument]
            count = len(names) - (names[:1] in (["self"], ["cls"], ["ctx"]))
            if count > MAX_PARAMETERS:
                found.append(f"{name}.{path} ({count})")
    return found


def count_wings(tree: Tree) -> dict[str, int]:
    """Return the lines of each of WINGS."""
    starts = {wing: tuple(f"{PACKAGE}.{start}" for start in found.modules) for wing, found in WINGS.items()}
    return {
        wing: sum(len(text.splitlines()) for name, text in tree.texts.items() if f"{name}.".startswith(found))
        for wing, found in starts.items()
    }


def list_single_importers(tree: Tree) -> list[str]:
    """Return the modules that one module imports, a neighbor in their own room."""
    importers = {
        name: [other for other, found in tree.imports.items() if name in found and other != PACKAGE]
        for name in tree.modules
    }
    room = {name: name.rpartition(".")[0] for name in tree.modules}
    return [name for name, found in importers.items() if len(found) == 1 and room[found[0]] == room[name]]


def list_forwarders(tree: Tree) -> list[str]:
    """Return the functions whose body is a call with exactly their parameters, in any order."""
    found = []
    for name, module in tree.modules.items():
        for path, node in _functions(module):
            body = [x for x in node.body if not (isinstance(x, ast.Expr) and isinstance(x.value, ast.Constant))]
            value = getattr(body[0], "value", None) if len(body) == 1 else None
            value = value.value if isinstance(value, ast.Await) else value
            if not isinstance(value, ast.Call):
                continue
            given = [*value.args, *(keyword.value for keyword in value.keywords)]
            names = [getattr(x.value if isinstance(x, ast.Starred) else x, "id", None) for x in given]
            parts = node.args
            own = [x.arg for x in (*parts.posonlyargs, *parts.args, *parts.kwonlyargs, parts.vararg, parts.kwarg) if x]
            if sorted(map(str, names)) == sorted(own[own[:1] in (["self"], ["cls"]) :]):
                found.append(f"{name}.{path}")
    return found


def _functions(node: ast.AST, path: str = "") -> Iterator[tuple[str, Function]]:
    """All functions below a node with their dotted names."""
    for child in ast.iter_child_nodes(node):
        inner = f"{path}.{child.name}".lstrip(".") if isinstance(child, Function | ast.ClassDef) else path
        if isinstance(child, Function):
            yield inner, child
        yield from _functions(child, inner)


def find_circles(imports: Mapping[str, set[str]]) -> list[list[str]]:
    """Strongly connected components of two modules or more (each module of one reaches all of it)."""
    reach: dict[str, set[str]] = {}
    for start in imports:
        seen, todo = set(), [start]
        while todo:
            for name in imports[todo.pop()] - seen:
                seen.add(name)
                todo.append(name)
        reach[start] = seen
    circles = {tuple(sorted(b for b in reach[a] if a in reach[b])) for a in reach if a in reach[a]}
    return [list(circle) for circle in sorted(circles)]


def count_outside_attributes(tree: Tree) -> Counter[str]:
    """Module -> attributes that it sets on objects of others; see the head of this file."""
    descriptors = {
        owner.name
        for owner in tree.classes
        if any(
            isinstance(node, Function)
            and node.name == "__set__"
            and any(isinstance(x, ast.Assert | ast.Raise) for x in ast.walk(node))
            for node in owner.body
        )
    }
    ours = set().union(*(_list_plain(owner, descriptors) for owner in tree.classes)) - LIBRARY
    return Counter(
        {
            name: count
            for name, module in tree.modules.items()
            if name not in PATCHES and (count := _count_in(module, ours))
        }
    )


def _list_plain(owner: ast.ClassDef, descriptors: set[str]) -> set[str]:
    """Attributes that anyone may set on an object of a class."""
    if any("frozen=True" in ast.unparse(decorator) for decorator in owner.decorator_list):
        return set()
    plain, guarded = set(), set()
    for node in owner.body:
        value = getattr(node, "value", None)
        is_guarded = isinstance(value, ast.Call) and getattr(value.func, "id", "") in descriptors
        (guarded if is_guarded else plain).update(t.id for t in _targets(node) if isinstance(t, ast.Name))
    for node in ast.walk(owner):
        plain |= {t.attr for t in _targets(node) if isinstance(t, ast.Attribute) and _is_own(t.value)}
        if isinstance(node, Function):
            guarded |= {node.name for mark in node.decorator_list if getattr(mark, "attr", "") == "setter"}
    return plain - guarded


def _count_in(module: ast.Module, ours: set[str]) -> int:
    others = {"ctx"} | {
        (alias.asname or alias.name).split(".")[0]
        for node in ast.walk(module)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    others |= {
        target.id
        for node in ast.walk(module)
        for target in _targets(node)
        if isinstance(target, ast.Name) and _is_construction(getattr(node, "value", None))
    }
    count = 0
    for node, theirs in _walk_with_arguments(module, _list_library_classes(module)):
        for target in _targets(node):
            if isinstance(target, ast.Attribute) and target.attr in ours and not _is_own(target.value):
                count += _root(target.value) not in others and getattr(target.value, "id", "") not in theirs
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "setattr" and not _is_own(node.args[0]):
            count += _root(node.args[0]) not in others
    return count


def _list_library_classes(module: ast.Module) -> set[str]:
    """Return names imported from elsewhere; names of typing carry no information about an object."""
    return {
        alias.asname or alias.name
        for node in ast.walk(module)
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] not in (PACKAGE, "typing")
        for alias in node.names
    }


def _walk_with_arguments(
    node: ast.AST, classes: set[str], theirs: frozenset[str] = frozenset()
) -> Iterator[tuple[ast.AST, frozenset[str]]]:
    """All nodes below one, each with the arguments of its functions whose annotations are such classes."""
    for child in ast.iter_child_nodes(node):
        found = theirs
        if isinstance(child, Function):
            given = (*child.args.posonlyargs, *child.args.args, *child.args.kwonlyargs)
            found = theirs.difference(a.arg for a in given) | {
                a.arg for a in given if getattr(a.annotation, "id", "") in classes
            }
        yield child, found
        yield from _walk_with_arguments(child, classes, found)


def _targets(node: ast.AST) -> Iterator[ast.expr]:
    """Yield the targets of an assignment, tuples unpacked."""
    todo: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        todo = list(node.targets)
    elif isinstance(node, ast.AnnAssign | ast.AugAssign):
        todo = [node.target]
    while todo:
        target = todo.pop()
        if isinstance(target, ast.Tuple | ast.List):
            todo += target.elts
        else:
            yield target


def _is_own(value: ast.expr) -> bool:
    return isinstance(value, ast.Name) and value.id in ("self", "cls")


def _root(value: ast.expr) -> str:
    while isinstance(value, ast.Attribute | ast.Subscript | ast.Call):
        value = value.func if isinstance(value, ast.Call) else value.value
    return value.id if isinstance(value, ast.Name) else ""


def _is_construction(value: ast.expr | None) -> bool:
    """cls(...), X.__new__(...)."""
    return isinstance(value, ast.Call) and (
        getattr(value.func, "id", "") == "cls" or getattr(value.func, "attr", "") == "__new__"
    )


def format_figures(tree: Tree) -> str:
    """Format all figures, one line each, with their parts."""
    outside, circles = count_outside_attributes(tree), find_circles(tree.imports)
    signatures = list_long_signatures(tree)
    widest = sorted(((len(found), name) for name, found in tree.loaded.items()), reverse=True)[:5]
    root, records = list_root_modules(tree), list_records(tree)
    closure, wings = tree.find_closure(PLAIN_RUN), count_wings(tree)
    lines = sum(len(text.splitlines()) for text in tree.texts.values())
    singles, forwarders = list_single_importers(tree), list_forwarders(tree)
    rows = [
        ("modules of the package", len(tree.texts), ""),
        ("modules of a plain run", len(closure), ""),
        ("lines of a plain run", sum(len(tree.texts[name].splitlines()) for name in closure), ""),
        ("lines of the package", lines, ""),
        ("lines without its wings", lines - sum(wings.values()), ", ".join(f"{n} {c}" for n, c in wings.items())),
        ("lines of Trainer.train", count_train_lines(tree), ""),
        ("modules in the root", len(root), ", ".join(name.split(".")[1] for name in root)),
        ("records of a response", len(records), ", ".join(records)),
        ("attributes set from outside", outside.total(), ", ".join(f"{n} {c}" for n, c in outside.most_common())),
        (f"more than {MAX_PARAMETERS} parameters", len(signatures), ", ".join(signatures)),
        ("single importers in a room", len(singles), ", ".join(singles)),
        ("forwarding functions", len(forwarders), ", ".join(forwarders)),
        ("largest fan-out", widest[0][0], ", ".join(f"{name} {count}" for count, name in widest)),
        ("import circles", len(circles), "; ".join(", ".join(circle) for circle in circles)),
    ]
    return "\n".join(f"{name:28} {value:>6}  {what.replace(PACKAGE + '.', '')}".rstrip() for name, value, what in rows)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--at", metavar="COMMIT", help="of this commit instead of the working tree")
    commit = parser.parse_args().at
    if commit is None:
        print(format_figures(Tree.read(ROOT)))
        return
    with tempfile.TemporaryDirectory() as directory:
        archive = subprocess.run(["git", "archive", commit, PACKAGE], cwd=ROOT, capture_output=True, check=True).stdout
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            files.extractall(directory, filter="data")
        print(format_figures(Tree.read(Path(directory))))


if __name__ == "__main__":
    main()
