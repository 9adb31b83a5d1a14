# SPDX-License-Identifier: Apache-2.0
"""The generated pages agree with the code, and are complete.

`python tools/make_docs.py` fixes the first test. Not covered: whether an error reads well.
"""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

from megatron_rl import types
from megatron_rl.config.fields import list_fields
from tools import _error_page
from tools._architecture_page import PLACES, SAMPLES_ROAD, WEIGHTS_ROAD

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return importlib.import_module("tools.make_docs")


@pytest.fixture(scope="module")
def pages(tool: ModuleType) -> dict[str, str]:
    """Generate all pages, by name."""
    return {path.name: text for path, text in tool.make_pages().items()}


def test_committed_pages_are_up_to_date(pages: dict[str, str]) -> None:
    stale = [name for name, text in pages.items() if (ROOT / "docs" / name).read_text(encoding="utf-8") != text]
    assert not stale, "run python tools/make_docs.py"


def test_the_tool_writes_and_checks(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    monkeypatch.setattr(tool, "make_pages", lambda: {page: "new"})
    assert tool.main(["--check"]) == 1 and not page.exists()
    assert tool.main([]) == 0 and page.read_text() == "new"
    assert "page.md: written" in capsys.readouterr().out
    assert tool.main(["--check"]) == 0 and capsys.readouterr().out == ""


def test_every_setting_has_a_row_or_a_link_to_one(pages: dict[str, str]) -> None:
    """Few enough have a row of their own."""
    page, fields = pages["config.md"], list_fields()
    rows = [line for line in page.splitlines() if line.startswith("| <a id=")]
    repeated = dict(re.findall(r'<a id="(\S+)"></a>\[`\1`\]\(#(\S+)\)', page))
    with_row = [row.split('"')[1] for row in rows]
    assert sorted([*with_row, *repeated]) == sorted(fields) and len(with_row) <= 270
    assert {*repeated.values()} <= {*with_row}
    assert repeated["critic.zero_stage"] == "actor.zero_stage" and "[`top_p`](#rollout.top_p)" in page
    assert "critic.lr" in with_row and "data.sources.NAME.weight" in with_row  # another default; of sources alone
    assert all((fields[a].doc, fields[a].default) == (fields[b].doc, fields[b].default) for a, b in repeated.items())
    cells = {row.split('"')[1]: [cell.strip() for cell in row.strip("|").split(" | ")] for row in rows}
    assert all(len(row) == 5 for row in cells.values())
    assert cells["model.path"][2] == "**required**"
    assert cells["rollout.n"][1:] == ["integer", "`8`", "responses", "Responses per prompt (group size)."]
    assert cells["algorithm.kl_type"][1:3] == ["`k1`, `k2`, `k3`, `abs`", "`k3`"]
    assert cells["data.validation_limit"][1:4] == ["integer or null", "`null`", "prompts"]


def write_module(root: Path, text: str) -> str:
    """The rows of the page for a package of one module."""
    for room in ("launch", "tools", "megatron_rl/room"):
        (root / room).mkdir(parents=True)
    (root / "megatron_rl/room/a.py").write_text(text)
    page = _error_page.format_page(root)
    return page[page.index("## Tools, benchmarks") :]


def test_errors_are_read_from_the_syntax_tree(tmp_path: Path) -> None:
    """Placeholders, constants of the module, alternatives, values of calls, and characters of Markdown; messages with
    the same advice are one row, and one whose hint is short is in the list."""
    page = write_module(
        tmp_path,
        """
_WHERE = "a setting"
def f(path, n, items):
    raise UserError(f"{path.name} has {len(items)} | {n + 1:.2f} *", source=_WHERE,
                    expected="1", hint=f"set a.b={n}, not " + ", ".join(sorted(items)))
    raise UserError(f"no {_WHERE}" if n else "nothing", source="", expected="1", hint=f"set a.b={n}, not {items}")
    raise UserError("nothing", source="", expected="1", hint="give one")
""",
    )
    assert page.splitlines()[-3:] == [
        "| `{name}` has `{number of items}` \\| `{n}` \\*<br>no a setting / nothing | set a.b=`{n}`, not `{items}` |",
        "",
        "- nothing",
    ]


def test_an_error_built_by_a_helper_is_a_row_per_caller(tmp_path: Path) -> None:
    page = write_module(
        tmp_path,
        """
def _bad(path, what):
    return UserError(f"{path} is {what}", source=str(path), expected="a file", hint="fix it")
def f(path, size):
    if size:
        raise _bad(path, f"{size} bytes long")
    raise _bad(path, what="missing")
""",
    )
    assert page.splitlines()[-2:] == ["- `{path}` is `{size}` bytes long", "- `{path}` is missing"]


def test_no_error_of_the_sources_is_left_out(pages: dict[str, str]) -> None:
    """A module has a row for each UserError that is written out in it, or more, and the page has every row."""
    rows = _error_page.read_rows(ROOT)
    counts = Counter(row.path for row in rows)
    for room in ("launch", "tools", "megatron_rl"):
        for path in (ROOT / room).rglob("*.py"):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            errors = [
                node
                for node in ast.walk(tree)
                if isinstance(node, ast.Call)
                and len(node.keywords) == 3
                and getattr(node.func, "id", "") == "UserError"
            ]
            assert counts[path.relative_to(ROOT)] >= len(errors), path
    listed = pages["errors.md"].partition("\n## Settings, ")[2].replace("<br>", "\n| ").splitlines()
    messages = {re.split(r" (?<!\\)\| ", line)[0][2:].removesuffix(" |") for line in listed if line[:2] in ("| ", "- ")}
    assert messages - {"message"} == {_error_page._format_cell(row.parts[0]) for row in rows}


def test_the_example_and_the_exit_codes_are_real(pages: dict[str, str]) -> None:
    """The error that the page shows is printed, word by word, by the command that it names; so is its status."""
    page = pages["errors.md"]
    done = subprocess.run(
        [sys.executable, "launch/pretrain_grpo.py", "launch/recipes/toy_arithmetic.yaml", "--dry-run", "actor.lr=-1"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stderr.strip() == page.split("```\n")[1].strip()
    assert done.returncode == types.EXIT_USER_ERROR
    codes = [value for name, value in vars(types).items() if name.startswith("EXIT_")]
    assert len(codes) >= 2 and all(f"\n| {code} | " in page for code in codes)


@pytest.mark.parametrize(("topic", "file", "name"), PLACES + SAMPLES_ROAD + WEIGHTS_ROAD)
def test_a_topic_leads_to_a_name_in_its_file(topic: str, file: str, name: str) -> None:
    tree = ast.parse((ROOT / "megatron_rl" / file).read_text(encoding="utf-8"))
    assert name in [getattr(node, "name", None) for node in tree.body], topic
