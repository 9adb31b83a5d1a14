# SPDX-License-Identifier: Apache-2.0
"""Write the pages of docs/ that are generated from code.

    python tools/make_docs.py            # after a change of the schema, an error, a metric, or an alias
    python tools/make_docs.py --check    # status 1 if a page is out of date

The whole site: python -m mkdocs build --strict -f .mkdocs.yml.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # runs from a checkout without installation

from tools import _architecture_page, _error_page, _metrics_page, _settings_page, _verl_page
from tools._arguments import Arguments


def make_pages() -> dict[Path, str]:
    """Return path and text of every page."""
    docs = ROOT / "docs"
    return {
        docs / "architecture.md": _architecture_page.format_page(),
        docs / "config.md": _settings_page.format_page(),
        docs / "errors.md": _error_page.format_page(ROOT),
        docs / "metrics.md": _metrics_page.format_page(),
        docs / "verl_keys.md": _verl_page.format_page(),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = Arguments(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; status 1 if a page is not up to date")
    check = parser.parse_args(argv).check
    pages = make_pages()
    stale = [path for path, text in pages.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    for path in stale:
        if not check:
            path.write_text(pages[path], encoding="utf-8")
        print(f"{path.relative_to(ROOT)}: {'not up to date, run python tools/make_docs.py' if check else 'written'}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
