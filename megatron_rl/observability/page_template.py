# SPDX-License-Identifier: Apache-2.0
"""HTML pages made of one page.html, page.css and the scripts beside them, with a policy that lets nothing else run."""

from __future__ import annotations

import base64
import hashlib
import html
from pathlib import Path

_SCRIPTS = ("parts.js", "page.js")


def read_template(folder: Path, title: str, connect: str = "'none'") -> str:
    """The page with its style and its script in it.

    Args:
        folder: holds page.html with `{{title}}`, `{{policy}}`, `{{style}}` and `{{script}}`, page.css, page.js, and
            maybe parts.js, which comes before it.
        title: any text.
        connect: what the script may connect to, as a content security policy says it.
    """
    page, style = ((folder / name).read_text(encoding="utf-8") for name in ("page.html", "page.css"))
    script = "".join((folder / name).read_text(encoding="utf-8") for name in _SCRIPTS if (folder / name).exists())
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; connect-src {connect}; "
        "base-uri 'none'; form-action 'none'"
    )
    escaped = html.escape(title).replace("{", "&#123;")  # nor is it taken for a place of the template
    values = {"style": style, "policy": policy, "title": escaped, "script": script}
    for name, value in values.items():
        page = page.replace(f"{{{{{name}}}}}", value)
    return page


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
