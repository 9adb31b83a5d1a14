# SPDX-License-Identifier: Apache-2.0
"""A config in readable form: dict, YAML, and values as a recipe spells them."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import yaml

from megatron_rl.config.schema import ACTOR_DECIDES, RunConfig

WIDTH = 100  # of texts in columns


def config_to_dict(cfg: RunConfig) -> dict[str, dict[str, Any]]:
    """Return the resolved config as section -> key -> value, with JSON and YAML types.

    Credentials in URLs are removed, since the result is written to files, checkpoints and W&B.
    """
    sections = dataclasses.asdict(cfg)
    for role in (sections["critic"], sections["reward_model"], *sections["teachers"].values()):
        for leaf in ACTOR_DECIDES:
            role.pop(leaf, None)
    return _redact_all(sections)


def redact(text: str) -> str:
    """Replace the credentials of each URL in a text, `http://user:token@host`, by ***."""
    return re.sub(r"(https?://)[^/?#\s]+@", r"\1***@", text)


def _redact_all(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _redact_all(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_redact_all(item) for item in value]
    return redact(value) if isinstance(value, str) else value


def dump_yaml(cfg: RunConfig) -> str:
    """Return the resolved config as YAML; `load_config` reads an equal config back, except for credentials in URLs."""
    return format_yaml(config_to_dict(cfg))


def format_yaml(sections: dict[str, Any]) -> str:
    """Return nested settings as YAML."""
    return yaml.dump(sections, Dumper=_Dumper, sort_keys=False, default_flow_style=False, width=WIDTH)


class _Dumper(yaml.SafeDumper):
    """YAML writer that indents lists inside mappings."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


def render(value: Any) -> str:
    """Format a setting's value as a recipe spells it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if dataclasses.is_dataclass(value):
        items = (f"{item.name}: {render(getattr(value, item.name))}" for item in dataclasses.fields(value))
        return f"{{{', '.join(items)}}}"
    return json.dumps(value) if isinstance(value, str) and "\n" in value else str(value)
