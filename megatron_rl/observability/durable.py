# SPDX-License-Identifier: Apache-2.0
"""Atomic replacement of a file."""

from __future__ import annotations

import os
from pathlib import Path


def replace_text(path: Path, text: str, errors: str = "strict") -> None:
    """Replace a file atomically and durably: a reader sees the old or the new content.

    Args:
        errors: handling of characters that UTF-8 cannot encode, as in `str.encode`.
    """
    partial = path.with_name(path.name + ".partial")
    with open(partial, "w", encoding="utf-8", errors=errors) as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
