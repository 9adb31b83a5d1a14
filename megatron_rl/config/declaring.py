# SPDX-License-Identifier: Apache-2.0
"""How a setting is declared: a field of a frozen dataclass with a default, one sentence, and a unit."""

from __future__ import annotations

import dataclasses
from typing import Any

MISSING = dataclasses.MISSING


def option(default: Any, doc: str, unit: str = "") -> Any:
    """Declare one setting.

    Args:
        default: its default; `MISSING` where the user must give one.
        doc: one sentence for `--help`.
        unit: unit of the value ("tokens", "prompts", "seconds", ...), where it has one.
    """
    metadata = {"doc": doc, "unit": unit}
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=lambda: type(default)(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)
