# SPDX-License-Identifier: Apache-2.0
"""The page `docs/config.md`: type, default, unit and meaning of every setting, from `schema.py`."""

from __future__ import annotations

from megatron_rl.config.fields import FieldInfo, list_fields, render, section_classes

_INTRODUCTION = """\
# Settings

A recipe is nested YAML: `section:` with `key: value` below it. On the command line, `section.key=value` or
`--section.key value` overrides it. Megatron's spelling of a key works where it has one meaning; among roles it means
the actor (`--pipeline-model-parallel-size 2`). [verl's names](verl_keys.md) and [TRL's](migrating.md#trl) are accepted.
An unknown name is an error that suggests the closest ones. `--dry-run` prints the changed ones, and a run writes
all to `<run_dir>/config.yaml`.

A default in bold must be given. `null` means "not given". Each row is an anchor: `#actor.lr`.
`python tools/make_docs.py` makes this page from `megatron_rl/config/schema.py`.
"""
_HEADER = """
## {section}

{doc}

| setting | type | default | unit | meaning |
|---|---|---|---|---|
"""


def format_page() -> str:
    """Format the page."""
    fields = list_fields()
    parts = [_INTRODUCTION]
    for section, section_class in section_classes().items():
        doc = " ".join((section_class.__doc__ or "").split())
        parts.append(_HEADER.format(section=section, doc=doc))
        for info in fields.values():
            if info.section == section:
                parts.append(_format_row(info, fields.get(f"actor.{info.leaf}")))
    return "".join(parts)


def _format_row(info: FieldInfo, actors: FieldInfo | None) -> str:
    """Format a row; text shared with the actor's setting becomes a link."""
    default = "**required**" if info.required else f"`{render(info.default)}`"
    meaning = _escape(info.doc)
    if actors is not None and info.name != actors.name and info.doc == actors.doc and len(info.doc.split()) > 3:
        meaning = f"see [`{actors.name}`](#{actors.name})"
    cells = (f'<a id="{info.name}"></a>`{info.name}`', _format_type(info), default, info.unit, meaning)
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
