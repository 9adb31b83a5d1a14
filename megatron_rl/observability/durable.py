# SPDX-License-Identifier: Apache-2.0
"""Files that are replaced as a whole."""

from __future__ import annotations

import os
from pathlib import Path


def replace_text(path: Path, text: str, errors: str = "strict") -> None:
    """Write a file beside its place, bring it to the disk and move it there: a reader sees the old or the new file.

    Args:
        path: of the file.
        text: its content.
        errors: what UTF-8 cannot encode, as in `str.encode`.
    """
    partial = path.with_name(path.name + ".partial")
    with open(partial, "w", encoding="utf-8", errors=errors) as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
