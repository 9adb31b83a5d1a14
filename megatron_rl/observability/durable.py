# SPDX-License-Identifier: Apache-2.0
"""Atomic replacement of a file."""

from __future__ import annotations

import os
from pathlib import Path


def replace_text(path: Path, text: str, errors: str = "strict") -> None:
    """Replace a file atomically and durably; `errors` handles what UTF-8 cannot encode, as in `str.encode`."""
    partial = path.with_name(path.name + ".partial")
    with open(partial, "w", encoding="utf-8", errors=errors) as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
