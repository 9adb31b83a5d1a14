# SPDX-License-Identifier: Apache-2.0
"""How a setting is declared: a field of a frozen dataclass with its default, one sentence, its unit and its bounds."""

from __future__ import annotations

import dataclasses
from typing import Any

MISSING = dataclasses.MISSING


def option(default: Any, doc: str, unit: str = "", **bounds: Any) -> Any:
    """Declare one setting.

    Args:
        default: its default; `MISSING` where the user must give one.
        doc: one sentence for `--help`.
        unit: unit of the value ("tokens", "prompts", "seconds", ...), where it has one.
        bounds: `ge`, `gt`, `le`, `lt`: numbers that the value is compared with; for the error `wrong`, what a value
            outside of them is, and `hint`, what to do, where the usual words are not enough.
    """
    metadata = {"doc": doc, "unit": unit, "bounds": bounds}
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=lambda: type(default)(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)
