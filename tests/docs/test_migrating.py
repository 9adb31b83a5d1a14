# SPDX-License-Identifier: Apache-2.0
"""The key tables of docs/migrating.md and the YAML of the pages name settings that exist.

Not covered: whether the other systems still use these names; the page gives the versions that were read.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_rl.config.fields import list_fields, list_options, section_classes
from megatron_rl.run.loading import load_config

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
NO_SETTINGS = {"actor.cpu_offloading", "data.sources"}  # unknown according to a page; a list of settings
OTHER_NAMES = {"verl_keys.md", "python_api.md"}  # settings of verl, attributes of objects
REQUIRED = ["model.path=m", "data.train_files=[t.jsonl]", "data.train_batch_size=256"]


def read_tables() -> dict[str, list[list[str]]]:
    """Rows of the table below each heading of the page, in cells."""
    tables = {}
    for part in (DOCS / "migrating.md").read_text(encoding="utf-8").split("\n## ")[1:]:
        rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in part.splitlines() if line.startswith("| ")]
        if rows:
            tables[part.splitlines()[0]] = [[cell.strip() for cell in row] for row in rows[1:]]
    return tables


TABLES = read_tables()


def test_there_is_a_table_for_each_system_but_verl() -> None:
    assert {name: len(rows) > 30 for name, rows in TABLES.items()} == dict.fromkeys(
        ("slime", "OpenRLHF", "TRL", "ms-swift"), True
    )


@pytest.mark.parametrize("name", TABLES)
def test_no_name_of_theirs_stands_twice(name: str) -> None:
    keys = [key for row in TABLES[name] for key in re.findall(r"`([^`]+)`", row[0])]
    assert len(keys) == len(set(keys)), sorted(key for key in set(keys) if keys.count(key) > 1)
    assert len(keys) >= len(TABLES[name])


@pytest.mark.parametrize("name", TABLES)
def test_every_name_of_ours_exists(name: str) -> None:
    """The column "here" is one setting; others may be named beside it."""
    for row in TABLES[name]:
        assert len(row) == 3, row
        assert re.fullmatch(r"`[a-z_.0-9]+`", row[1]) and row[1].strip("`") in list_fields() | list_options(), row


@pytest.mark.parametrize("page", sorted({path.name for path in DOCS.glob("*.md")} - OTHER_NAMES))
def test_every_setting_that_a_page_names_exists(page: str) -> None:
    """`section.key` and `section.key=value` in code."""
    sections, fields = section_classes(), list_fields()
    text = (DOCS / page).read_text(encoding="utf-8")
    for section, leaf in re.findall(r"`([a-z_]+)\.([a-z_0-9]+)(?=[`=:\s])", text):
        is_file = leaf in ("md", "py", "partial")
        assert section not in sections or is_file or f"{section}.{leaf}" in {*fields, *NO_SETTINGS}


@pytest.mark.parametrize("page", sorted(path.name for path in DOCS.glob("*.md") if "```yaml\n" in path.read_text()))
def test_yaml_of_pages_loads(page: str) -> None:
    """Every block, on top of the settings that must be given, is a config that the program accepts."""
    blocks = re.findall(r"```yaml\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    for block in blocks:
        sections = yaml.safe_load(block)
        given = {f"{section}.{key}" for section, settings in sections.items() for key in settings}
        missing = [setting for setting in REQUIRED if setting.partition("=")[0] not in given]
        extra = ["reward_model.path=r"] if "1.0 model" in block else []
        load_config(None, [*missing, *extra, *flatten(sections)])


def read_pair(system: str) -> tuple[str, dict[str, Any]]:
    """The recipe of a system as its users write it, and ours beside it."""
    part = next(part for part in (DOCS / "migrating.md").read_text().split("\n## ") if part.startswith(system))
    (theirs,) = re.findall(rf'```\w+ title="{system}"\n(.*?)```', part, re.DOTALL)
    (ours,) = re.findall(r'```yaml title="here"\n(.*?)```', part, re.DOTALL)
    return theirs, yaml.safe_load(ours)


BESIDE = {"verl": (), "TRL": ("data.train_files", "data.train_batch_size", "actor.ppo_mini_batch_size")}


@pytest.mark.parametrize("system", BESIDE)
def test_a_recipe_that_is_read_means_ours(system: str, tmp_path: Path) -> None:
    """Their file, with the settings that the page requires besides, resolves to the config of our file."""
    theirs, ours = read_pair(system)
    (tmp_path / "theirs.yaml").write_text(theirs)
    overrides = [text for text in flatten(ours) if text.partition("=")[0] in BESIDE[system]]
    assert len(overrides) == len(BESIDE[system])
    assert load_config(tmp_path / "theirs.yaml", overrides).config == load_config(ours).config


@pytest.mark.parametrize("system", ["slime", "OpenRLHF", "ms-swift"])
def test_a_recipe_of_flags_is_translated_by_the_table(system: str) -> None:
    """Each flag has a row whose setting ours gives; ms-swift's may be TRL's. Values are compared by eye."""
    theirs, ours = read_pair(system)
    load_config(ours)
    rows = TABLES[system] + [[f"`--{row[0].strip('`')}`", *row[1:]] for row in TABLES["TRL"] if system == "ms-swift"]
    given = {text.partition("=")[0] for text in flatten(ours)}
    flags = {word for word in theirs.split() if word.startswith("--")} - {"--rlhf_type"}
    targets = {
        flag: [row[1].strip("`") for row in rows if f"`{flag}`" in re.findall("`[^`]+`", row[0])] for flag in flags
    }
    assert len(flags) > 10
    assert not {flag for flag, found in targets.items() if not given & set(found)}


def flatten(settings: dict[str, Any], prefix: str = "") -> list[str]:
    """Nested settings as overrides."""
    found = []
    for key, value in settings.items():
        if isinstance(value, dict):
            found += flatten(value, f"{prefix}{key}.")
        else:
            text = yaml.safe_dump(value, default_flow_style=True).removesuffix("..." + chr(10)).strip()
            found.append(f"{prefix}{key}={text}")
    return found
