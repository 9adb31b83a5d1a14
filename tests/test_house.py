# SPDX-License-Identifier: Apache-2.0
"""The rules of the code, read from the syntax tree: layers, import walls, sizes, documentation, coupling.

Rooms lie in layers and import downwards only; rooms of one layer do not import each other. Nothing here imports the
package, so a broken module cannot hide a broken rule. Not covered: the content of docstrings, and imports by name
(``importlib.import_module``).
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

import house_figures
from tools._rooms import ROOMS, WINGS

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "megatron_rl"

LAYERS = {name: room.layer for name, room in ROOMS.items()}
# types.py is the vocabulary of all rooms, also of its own layer; extension/ imports only it, and the config needs it.
SHARED_WITHIN_LAYER = {"types", "extension"}

# The rooms that may import megatron.core; vllm may be imported in one file of the package.
MEGATRON_CORE_ROOMS = {"parallel", "models", "training", "checkpoint"}
# Rooms whose job includes talking to the terminal.
PRINTING_ROOMS = {"observability", "run", "launch", "tools"}

MAX_FUNCTION_LINES = 60

# Exceptions older than these limits: the lists may only shrink.
MAX_FAN_OUT = 23
MAX_SINGLE_IMPORTERS, MAX_FORWARDERS = 30, 35
MAX_LINES_WITHOUT_WINGS = 45_000
# A plain run (one rank on a CPU, a dense model, rules, prompts of text) loads fewer lines than this, and none of these.
MAX_LOADED_LINES = 24_315
BEHIND_DOORS = (
    "agents.adapters",
    "agents.environment",
    "agents.episode",
    "agents.in_rank",
    "agents.tools",
    "agents.transcript",
    "algorithms.estimators",
    "algorithms.importance",
    "algorithms.policy_losses",
    "algorithms.turn_estimators",
    "capsule.",
    "checkpoint.peft",
    "checkpoint.resuming",
    "compat.",
    "config.feature_checks",
    "config.flags",
    "config.mixture",
    "config.plugin_options",
    "config.sft_plan",
    "config.source_settings",
    "config.suggestions",
    "data.chats",
    "data.chosen_order",
    "data.passed_rows",
    "engines.elastic.",
    "engines.endings",
    "engines.local.",
    "engines.servers.",
    "engines.truncation",
    "engines.vllm.",
    "engines.wrappers",
    "extension.reasoning_gym",
    "extension.user_code",
    "models.attention_kernels",
    "models.layer_variants",
    "models.experts",
    "models.lora_linears",
    "models.other_stages",
    "models.routing",
    "observability.curves",
    "observability.failures",
    "observability.status",
    "observability.console",
    "observability.trackers",
    "parallel.batch_invariant",
    "parallel.chunked_divergence",
    "planning.cluster",
    "parallel.pairs",
    "parallel.ulysses",
    "planning.memory",
    "planning.parameters",
    "planning.throughput",
    "rewards.calls",
    "rewards.child",
    "rewards.functions",
    "rewards.mathematics",
    "rewards.public_sets",
    "rewards.quantities",
    "rewards.service",
    "rewards.silence",
    "rewards.terms",
    "rollout.bad_steps",
    "rollout.by_source",
    "rollout.packed_episodes",
    "run.mixed_inputs",
    "run.summary",
    "run.watchdog",
    "run.user_program",
    "samples.balancing",
    "samples.branches",
    "samples.corrections",
    "samples.fixed_shapes",
    "training.adapted_model",
    "training.cuda_graph",
    "training.fully_sharded",
    "training.muon",
    "training.roles.critic",
    "training.roles.frozen",
    "training.roles.mtp",
    "training.router_replay",
    "transfer.coding",
    "transfer.computed",
    "transfer.probe",
    "transfer.transports",
    "weights.adapters",
    "weights.quantization",
    "weights.packed_experts",
    "weights.rollout_layout",
    "weights.rope",
    "weights.row_shards",
    "weights.special_parts",
    "weights.support",
)
WIDE_MODULES: dict[str, int] = {}
IMPORT_CIRCLES: list[list[str]] = []


@dataclass(frozen=True)
class Import:
    """One imported module, as an absolute dotted name."""

    line: int
    module: str


@dataclass(frozen=True)
class Source:
    """One Python file of the house."""

    path: Path  # relative to the repository
    text: str
    tree: ast.Module

    @property
    def room(self) -> str:
        """Sub-package or root module of the package; ``launch`` or ``tools`` for entry points."""
        parts = self.path.with_suffix("").parts
        return parts[0] if parts[0] != PACKAGE else parts[1]

    @property
    def is_package_root(self) -> bool:
        return self.path == Path(PACKAGE, "__init__.py")

    def imports(self) -> Iterator[Import]:
        """Yield every import, also those inside functions and TYPE_CHECKING blocks, once per imported name."""
        package = self.path.parent.parts
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield Import(node.lineno, alias.name)
            elif isinstance(node, ast.ImportFrom):
                base = package[: len(package) - node.level + 1] if node.level else ()
                module = ".".join((*base, *([node.module] if node.module else [])))
                # "from megatron import core" imports megatron.core: the names count as well.
                for alias in node.names:
                    yield Import(node.lineno, f"{module}.{alias.name}")


def parse(path: Path) -> Source:
    """Parse one file of the repository."""
    text = path.read_text(encoding="utf-8")
    return Source(path.relative_to(ROOT), text, ast.parse(text, filename=str(path)))


@cache
def read_house() -> tuple[Source, ...]:
    """All Python files of the package, the tools and the launchers."""
    paths = [*(ROOT / PACKAGE).rglob("*.py"), *(ROOT / "tools").rglob("*.py"), *(ROOT / "launch").glob("*.py")]
    return tuple(parse(path) for path in sorted(paths))


def is_within(module: str, package: str) -> bool:
    """Whether a dotted name is the package or lies in it."""
    return module == package or module.startswith(package + ".")


def find_room(module: str) -> str | None:
    """The room that an absolute dotted name belongs to; None outside the house."""
    parts = module.split(".")
    if parts[0] in ("launch", "tools"):
        return parts[0]
    return parts[1] if parts[0] == PACKAGE and len(parts) > 1 and parts[1] in LAYERS else None


def find_upward_imports(source: Source) -> Iterator[str]:
    """Yield one line per import that does not point to a lower layer."""
    for item in source.imports():
        room = find_room(item.module)
        if room is None or room == source.room:
            continue
        here, there = LAYERS[source.room], LAYERS[room]
        if there > here or (there == here and room not in SHARED_WITHIN_LAYER):
            yield f"{source.path}:{item.line}: {source.room} (L{here}) imports {item.module} (L{there})"


def find_wall_breaches(source: Source) -> Iterator[str]:
    """Yield one line per import of megatron from a room that must not import it."""
    for item in source.imports():
        where = f"{source.path}:{item.line}: imports {item.module}"
        if is_within(item.module, "megatron.training"):
            yield f"{where}; megatron.training keeps its state in globals and is never used"
        elif is_within(item.module, "megatron") and source.room not in MEGATRON_CORE_ROOMS:
            yield f"{where}; only {', '.join(sorted(MEGATRON_CORE_ROOMS))} may"


def find_size_problems(source: Source) -> Iterator[str]:
    """Yield one line per function that is too long."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            num_lines = node.end_lineno - node.lineno + 1
            if num_lines > MAX_FUNCTION_LINES:
                yield f"{source.path}:{node.lineno}: {node.name} has {num_lines} lines; at most {MAX_FUNCTION_LINES}"


def find_header_problems(source: Source) -> Iterator[str]:
    """Yield missing parts of a file's head; an __init__.py without code needs no docstring."""
    if not source.text.startswith("# SPDX-License-Identifier: Apache-2.0\n"):
        yield f"{source.path}: the first line is not the SPDX line"
    if not source.text.isascii():
        yield f"{source.path}: not ASCII"
    if source.tree.body and ast.get_docstring(source.tree) is None:
        yield f"{source.path}: no module docstring"


def find_undocumented(source: Source) -> Iterator[str]:
    """Yield the public functions, classes and methods without a docstring (overloads and properties included)."""
    yield from _find_undocumented_in(source, source.tree.body, prefix="")


def _find_undocumented_in(source: Source, body: list[ast.stmt], prefix: str) -> Iterator[str]:
    for node in body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) or node.name.startswith("_"):
            continue
        if ast.get_docstring(node) is None:
            yield f"{source.path}:{node.lineno}: {prefix}{node.name} has no docstring"
        if isinstance(node, ast.ClassDef):
            yield from _find_undocumented_in(source, node.body, prefix=f"{node.name}.")


def find_forbidden_calls(source: Source) -> Iterator[str]:
    """Yield calls of print in quiet rooms and of Megatron's global getter anywhere."""
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name == "print" and isinstance(node.func, ast.Name) and source.room not in PRINTING_ROOMS:
            yield f"{source.path}:{node.lineno}: print; log, or return what is to be shown"
        # typing.get_args reads a type; Megatron's get_args() reads a global.
        if name == "get_args" and not node.args:
            yield f"{source.path}:{node.lineno}: get_args(); pass the configuration"


@cache
def read_engine_names() -> frozenset[str]:
    """Return the names of the rollout engines, from the table of their abilities."""
    body = parse(ROOT / PACKAGE / "extension/registry.py").tree.body
    (table,) = (
        node.value for node in body if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "ENGINES"
    )
    return frozenset(keyword.arg for keyword in table.keywords)


def find_engine_names(source: Source) -> Iterator[str]:
    """Yield one line per place outside of the engines that decides by the name of one.

    A place is a comparison, `startswith`, a case of `match`, a literal table that is looked up, or a collection of
    nothing but names.
    """
    if source.room == "engines" or source.path.is_relative_to(Path(PACKAGE, "compat")):
        return
    for node in ast.walk(source.tree):
        if any(_is_engine_name(part) for part in _list_deciding(node)):
            yield f"{source.path}:{node.lineno}: decides by the name of an engine; ask `rollout.supports`"


def _list_deciding(node: ast.AST) -> list[ast.expr | None]:
    """The expressions that a node compares with, or all that it looks up."""
    if isinstance(node, ast.Compare):
        return [part for side in (node.left, *node.comparators) for part in _list_elements(side) or [side]]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.args[:1] if node.func.attr == "startswith" else _list_elements(node.func.value)
    if isinstance(node, ast.Subscript):
        return _list_elements(node.value)
    if isinstance(node, ast.MatchValue):
        return [node.value]
    elements = [] if isinstance(node, ast.Dict) else _list_elements(node)
    return elements if len(elements) > 1 and all(map(_is_engine_name, elements)) else []


def _list_elements(node: ast.AST) -> list[ast.expr | None]:
    if isinstance(node, ast.Dict):
        return node.keys
    return [*node.elts] if isinstance(node, ast.Tuple | ast.List | ast.Set) else []


def _is_engine_name(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value in read_engine_names()


RULES = {
    "imports point down": find_upward_imports,
    "megatron stays behind its wall": find_wall_breaches,
    "functions are short": find_size_problems,
    "files have a head": find_header_problems,
    "public names are documented": find_undocumented,
    "no print and no global arguments": find_forbidden_calls,
    "engines are asked what they support": find_engine_names,
}


@pytest.mark.parametrize("rule", RULES)
def test_house_keeps(rule: str) -> None:
    problems = [problem for source in read_house() for problem in RULES[rule](source)]
    assert not problems, "\n" + "\n".join(problems)


def test_every_room_has_a_layer() -> None:
    rooms = {source.room for source in read_house() if not source.is_package_root}
    assert rooms - LAYERS.keys() == set(), "give the new room a layer in tools/_rooms.py"


@cache
def read_tree() -> house_figures.Tree:
    """The package, for the figures that take all of it at once."""
    return house_figures.Tree.read(ROOT)


def short(name: str) -> str:
    """The name of a module without the package's."""
    return name.removeprefix(f"{PACKAGE}.")


@pytest.mark.parametrize("command", [("format", "--check"), ("check",)], ids=" ".join)
def test_ruff_has_nothing_to_say(command: tuple[str, ...]) -> None:
    ruff = [sys.executable, "-m", "ruff", *command, "--quiet", "."]
    result = subprocess.run(ruff, cwd=house_figures.ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_modules_import_few_others() -> None:
    """Imports inside functions, for configs that need them, do not count."""
    wide = {short(name): len(found) for name, found in read_tree().loaded.items()}
    assert not {name: count for name, count in wide.items() if count > WIDE_MODULES.get(name, MAX_FAN_OUT)}


def test_a_plain_run_loads_what_it_needs() -> None:
    """GRPO of a dense model without adapters, episodes, foreign names and a planner imports none of their modules."""
    tree = read_tree()
    loaded = {short(name): len(tree.texts[name].splitlines()) for name in tree.find_closure(house_figures.PLAIN_RUN)}
    assert not [door for door in BEHIND_DOORS if not any(short(name).startswith(door) for name in tree.modules)]
    entered = {name for name in loaded if name.startswith(BEHIND_DOORS)}
    assert not entered, f"import them where a config asks for them: {sorted(entered)}"
    assert sum(loaded.values()) <= MAX_LOADED_LINES


def test_wings_are_apart() -> None:
    """A plain run loads none of them; without them the package is at most as large as it should be."""
    tree = read_tree()
    closure = {f"{short(name)}." for name in tree.find_closure(house_figures.PLAIN_RUN)}
    wings = house_figures.count_wings(tree)
    assert not [name for name in closure for wing in WINGS.values() if name.startswith(wing.modules)]
    assert min(wings.values()) > 100  # each has modules
    assert sum(len(text.splitlines()) for text in tree.texts.values()) - sum(wings.values()) <= MAX_LINES_WITHOUT_WINGS


def test_modules_and_functions_have_work_of_their_own() -> None:
    """Not a module for one neighbor, nor a function that only forwards, but for as many as there are."""
    tree = read_tree()
    assert len(house_figures.list_single_importers(tree)) <= MAX_SINGLE_IMPORTERS
    assert len(house_figures.list_forwarders(tree)) <= MAX_FORWARDERS


def test_names_of_files_and_classes_are_used_once() -> None:
    """Of modules, and of public classes, in the whole package."""
    tree = read_tree()
    files = Counter(name.rpartition(".")[2] for name in tree.modules if not (ROOT / name.replace(".", "/")).is_dir())
    classes = Counter(node.name for node in tree.classes if not node.name.startswith("_"))
    assert len(files) > 150 and len(classes) > 300
    assert not [name for name, count in (files + classes).items() if max(files[name], classes[name]) > 1]


def test_imports_have_no_circle() -> None:
    """Also for imports inside functions or under TYPE_CHECKING."""
    circles = [[short(name) for name in circle] for circle in house_figures.find_circles(read_tree().imports)]
    assert not [circle for circle in circles if circle not in IMPORT_CIRCLES]


def test_attributes_are_set_by_their_owner() -> None:
    """house_figures.py defines which assignments count."""
    assert not house_figures.count_outside_attributes(read_tree())


def test_figures_find_what_they_should() -> None:
    """The figures themselves, on a house of two modules."""
    texts = {
        "megatron_rl.a": "from megatron_rl import b\nclass Trainer:\n    x: int\n    def train(self, "
        + ", ".join(f"p{n}" for n in range(8))
        + "):\n        self.x = 1\n        self.part.x = 2\n",
        "megatron_rl.b": "import torch\ndef f(t, ctx):\n    from megatron_rl.a import Trainer\n"
        "    t.x, t.other = 1, 2\n    t.x += 1\n    ctx.x = 1\n    torch.x = 3\n    setattr(t, 'x', 4)\n",
    }
    tree = house_figures.Tree({name: ast.parse(text) for name, text in texts.items()}, texts)
    assert house_figures.list_long_signatures(tree) == ["megatron_rl.a.Trainer.train (8)"]
    assert house_figures.find_circles(tree.imports) == [["megatron_rl.a", "megatron_rl.b"]]
    assert house_figures.count_outside_attributes(tree) == {"megatron_rl.a": 1, "megatron_rl.b": 3}
    assert house_figures.count_train_lines(tree) == 3 and len(house_figures.list_root_modules(tree)) == 2
    assert house_figures.list_single_importers(tree) == ["megatron_rl.a", "megatron_rl.b"]


@pytest.mark.parametrize(
    ("body", "count"),
    [
        ("x = Once()", 0),
        ("x = Twice()", 1),
        ("x = Once", 1),
        ("x: Once", 1),
        ("def f(self):\n  self.x = 1", 1),
        ("@property\n def x(self): ...\n @x.setter\n def x(self, value):\n  self.x = value", 0),
    ],
)
@pytest.mark.parametrize(
    ("other", "more"),
    [("", 0), ("@dataclass(frozen=True)\nclass B:\n x: int\n", 0), ("@dataclass\nclass B:\n x: int\n", 1)],
)
def test_what_is_set_once_is_set_from_outside(body: str, count: int, other: str, more: int) -> None:
    """Unless another class has a plain attribute of that name: then it may as well be that one."""
    text = (
        "class Once:\n def __set__(self, a, value):\n  assert self.n not in a.found\n  a.found[self.n] = value\n"
        "class Twice:\n def __set__(self, a, value):\n  a.found[self.n] = value\n"
        f"class A:\n {body}\n{other}a.x = 1\n"
    )
    tree = house_figures.Tree({"megatron_rl.a": ast.parse(text)}, {"megatron_rl.a": text})
    assert house_figures.count_outside_attributes(tree).total() == max(count, more)


def test_arguments_of_a_library_are_not_ours() -> None:
    """In the annotated function, and for the object itself, not its parts."""
    text = (
        "from typing import Any\nfrom megatron.core import Adam\nfrom megatron_rl.b import Ours\n"
        "class A:\n x: int\n"
        "def f(a: Adam, b: Ours, c: Any, d):\n a.x = 0\n a.part.x = b.x = c.x = d.x = 1\n"
        " def g(a, d: Adam):\n  a.x = 1\n  d.x = 0\n"
        "def h(a):\n a.x = 1\n"
    )
    tree = house_figures.Tree({"megatron_rl.a": ast.parse(text)}, {"megatron_rl.a": text})
    assert house_figures.count_outside_attributes(tree).total() == 6


def test_vllm_is_imported_in_at_most_one_file() -> None:
    importers = {
        str(source.path)
        for source in read_house()
        if source.path.parts[0] == PACKAGE and any(is_within(item.module, "vllm") for item in source.imports())
    }
    assert len(importers) <= 1, sorted(importers)


def _source(path: str, text: str) -> Source:
    return Source(Path(path), text, ast.parse(text))


@pytest.mark.parametrize(
    ("rule", "path", "text", "num_problems"),
    [
        (find_upward_imports, "megatron_rl/data/a.py", "from megatron_rl.run.grpo import Trainer", 1),
        (find_upward_imports, "megatron_rl/data/a.py", "from megatron_rl import rollout, types", 1),
        (find_upward_imports, "megatron_rl/data/a.py", "from ..rewards import rules", 1),
        (find_upward_imports, "megatron_rl/data/a.py", "from . import packing\nfrom .packing import pack", 0),
        (find_upward_imports, "megatron_rl/data/a.py", "import megatron_rl.config.schema", 0),
        (find_upward_imports, "megatron_rl/config/a.py", "from megatron_rl.types import UserError", 0),
        (find_upward_imports, "megatron_rl/run/grpo.py", "def f():\n    import tools.plan", 1),
        (find_upward_imports, "tools/plan.py", "from megatron_rl.run.grpo import Trainer", 0),
        (find_wall_breaches, "megatron_rl/data/a.py", "from megatron import core", 1),
        (find_wall_breaches, "megatron_rl/models/a.py", "from megatron.core import tensor_parallel", 0),
        (find_wall_breaches, "megatron_rl/models/a.py", "from megatron import training", 1),
        (find_wall_breaches, "megatron_rl/data/a.py", "import megatron_rl.types", 0),
        (find_size_problems, "tools/a.py", "def f():\n" + "    x = 1\n" * MAX_FUNCTION_LINES, 1),
        (find_header_problems, "tools/a.py", "x = 1", 2),
        (find_undocumented, "tools/a.py", "class A:\n    def f(self): ...\n    def _g(self): ...", 2),
        (find_forbidden_calls, "megatron_rl/data/a.py", "print(1); get_args(); get_args(int)", 2),
        (find_forbidden_calls, "tools/a.py", "print(1)", 0),
        (
            find_engine_names,
            "tools/a.py",
            "a.engine == 'vllm'; 'hf' != a; a in ('x', 'sglang'); a not in ['openai']",
            4,
        ),
        (find_engine_names, "launch/a.py", "a.startswith('vllm'); {'hf': 1}.get(a, 2); {'megatron': 1}[a]", 3),
        (find_engine_names, "megatron_rl/data/a.py", "SERVERS = ('vllm_server', 'openai')", 1),
        (find_engine_names, "megatron_rl/data/a.py", "match a:\n    case 'hf' | 'vllm':\n        pass", 2),
        (find_engine_names, "megatron_rl/engines/a.py", "a == 'vllm'", 0),
        (find_engine_names, "megatron_rl/compat/a.py", "a == 'vllm'", 0),
        (find_engine_names, "megatron_rl/data/a.py", "find_spec('vllm'); a == 'torch'; b = {'hf': 1}", 0),
    ],
)
def test_rules_find_what_they_should(rule, path: str, text: str, num_problems: int) -> None:
    """The rules themselves, on one-line houses: a rule that finds nothing looks like a tidy house."""
    assert len(list(rule(_source(path, text)))) == num_problems
