# SPDX-License-Identifier: Apache-2.0
"""The page `docs/config.md`: type, default, unit and meaning of every setting, from `schema.py`."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_rl.config.fields import FieldInfo, list_fields, render, section_classes
from megatron_rl.config.source_settings import OWN

_INTRODUCTION = """\
# Settings

A recipe is nested YAML: `section:` with `key: value` below it. On the command line, `section.key=value` or
`--section.key value` overrides it. Megatron's spelling of a key works where it has one meaning; among roles it means
the actor (`--pipeline-model-parallel-size 2`). [verl's names](verl_keys.md) and [TRL's](migrating.md#trl) are accepted.
An unknown name is an error that suggests the closest ones. `--dry-run` prints the changed ones, and a run writes
all to `<run_dir>/config.yaml`.

A default in bold must be given. `null` means "not given". Each setting is an anchor: `#actor.lr`.
{rows} settings have a row, and {repeated} repeat one of them for another role.
`python tools/make_docs.py` makes this page from `megatron_rl/config/schema.py`.
"""
_OF_A_ROLE = "With the actor's meaning and default"
_OF_A_SOURCE = "In place of the run's values, a source takes"
_HEADER = """
## {section}

{doc}

| setting | type | default | unit | meaning |
|---|---|---|---|---|
"""


def format_page() -> str:
    """Format the page."""
    fields = list_fields()
    parts, repeated = list[str](), 0
    for section, section_class in section_classes().items():
        doc = " ".join((section_class.__doc__ or "").split())
        parts.append(_HEADER.format(section=section, doc=doc))
        found = [(info, _find_other(info, fields)) for info in fields.values() if info.section == section]
        parts += [_format_row(info) for info, other in found if other is None]
        same = [f'<a id="{one.name}"></a>[`{one.name}`](#{other.name})' for one, other in found if other is not None]
        if same:
            repeated += len(same)
            parts.append(f"\n{_OF_A_ROLE}: {', '.join(same)}.\n")
        if section == "data":
            own = ", ".join(f"[`{leaf}`](#{setting})" for leaf, setting in OWN.items())
            parts.append(f"\n{_OF_A_SOURCE} {own} of its own.\n")
    return "".join([_INTRODUCTION.format(rows=len(fields) - repeated, repeated=repeated), *parts])


def _find_other(info: FieldInfo, fields: Mapping[str, FieldInfo]) -> FieldInfo | None:
    """Return the setting that `info` repeats for another role, if any."""
    other = fields.get(f"actor.{info.leaf.removeprefix('NAME.')}")
    is_same = other is not None and info.section != "actor" and (info.doc, info.default) == (other.doc, other.default)
    return other if is_same else None


def _format_row(info: FieldInfo) -> str:
    default = "**required**" if info.required else f"`{render(info.default)}`"
    cells = (f'<a id="{info.name}"></a>`{info.name}`', _format_type(info), default, info.unit, _escape(info.doc))
    return f"| {' | '.join(cells)} |\n"


def _format_type(info: FieldInfo) -> str:
    if not info.choices:
        return info.describe_type()
    words = ", ".join(f"`{choice}`" for choice in info.choices) + (" or null" if info.accepts_none else "")
    return f"list of {words}" if info.describe_type().startswith("list of") else words


def _escape(text: str) -> str:
    """Escape Markdown and HTML, also inside tables."""
    for old, new in (("\\", "\\\\"), ("|", "\\|"), ("<", "&lt;"), ("*", "\\*"), ("_", "\\_")):
        text = text.replace(old, new)
    return text
