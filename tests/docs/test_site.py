# SPDX-License-Identifier: Apache-2.0
"""The site builds without a warning, has every page in its navigation, and loads nothing from elsewhere.

Not covered: whether external links lead anywhere, and the rendering in a browser.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
# Resources that a browser fetches to show a page; <a href> is not one.
FETCHED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src", "link": "href"}


class Page(HTMLParser):
    """References of a built page: resources it fetches, its links, and the names of its anchors."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.ids |= {found[name] for name in ("id", "name") if found.get(name)}
        if tag == "a" and found.get("href"):
            self.links.append(found["href"])
        if tag in FETCHED and found.get(FETCHED[tag]):
            self.fetched.append(found[FETCHED[tag]])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site; strict: a warning is an error."""
    out = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", ".mkdocs.yml", "--site-dir", str(out)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "WARNING" not in done.stderr and "Traceback" not in done.stderr, done.stderr[-3000:]
    return out


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    """Parse all pages, except the one for missing addresses, whose own address is unknown."""
    return {path: Page(path) for path in site.glob("*.html") if path.name != "404.html"}


def list_nav(entry: object) -> list[str]:
    """List the files of a navigation tree."""
    if isinstance(entry, str):
        return [entry]
    children = entry.values() if isinstance(entry, dict) else entry
    return [name for child in children for name in list_nav(child)]


def test_every_page_is_in_the_navigation_once() -> None:
    nav = list_nav(yaml.safe_load((ROOT / ".mkdocs.yml").read_text())["nav"])
    assert sorted(nav) == sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))


def test_links_and_pictures_lead_somewhere(pages: dict[Path, Page]) -> None:
    """Every relative reference of every page is a file of the site, and its anchor is on that page."""
    broken, num_links = [], 0
    for path, page in pages.items():
        for target in [*page.links, *page.fetched]:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                continue
            num_links += 1
            file = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not file.exists():
                broken.append(f"{path.name}: {target}")
            elif parts.fragment and file in pages and unquote(parts.fragment) not in pages[file].ids:
                broken.append(f"{path.name}: {target} (no such place)")
    assert not broken, broken[:20]
    assert num_links > 1000


def test_nothing_is_fetched_from_elsewhere(site: Path, pages: dict[Path, Page]) -> None:
    """No page, style sheet or picture names a resource of another host for its own rendering."""
    foreign = [
        f"{path.name}: {url}"
        for path, page in pages.items()
        for url in page.fetched
        if url.startswith(("http:", "https:", "//"))
    ]
    remote = re.compile(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//[^)\s]+")
    foreign += [f"{path.name}: {url}" for path in site.rglob("*.css") for url in remote.findall(path.read_text())]
    assert not foreign, foreign
    assert all(page.fetched for page in pages.values())


@pytest.mark.parametrize("name", sorted(path.name for path in (DOCS / "images").glob("*.svg")))
def test_pictures_explain_themselves(name: str) -> None:
    """Text is text, there is a title and a background, nothing is fetched, and no text leaves the picture."""
    text = (DOCS / "images" / name).read_text(encoding="utf-8")
    root = ET.fromstring(text)
    space = "{http://www.w3.org/2000/svg}"
    width, height = (float(value) for value in root.get("viewBox").split()[2:])
    background = root.find(f"{space}rect")
    assert (float(background.get("width")), float(background.get("height"))) == (width, height)
    assert root.find(f"{space}title").text and root.find(f"{space}desc").text
    assert not re.search(r"href|url\((?!#)|<image|<style|<script", text)
    labels = root.findall(f"{space}text")
    assert len(labels) > 10
    assert all(0 <= float(label.get("x")) <= width and 0 <= float(label.get("y")) <= height for label in labels)
    assert any(name in path.read_text() for path in DOCS.glob("*.md")), "no page shows it"
