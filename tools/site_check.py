"""Checks of a built site: every link has a target, and no page loads anything from another host.

python tools/site_check.py build/site/html/0.1
"""

from __future__ import annotations

import re
import sys
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADED = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src", "object": "data"}
"""Attribute with the address that a browser loads by itself, by element."""
RELATIONS = ("canonical", "prev", "next", "alternate")
"""Relations of `<link>` elements that a browser does not load."""
FETCHED = re.compile(rb"(?:url\(\s*['\"]?|@import\s+['\"])(https?:)?//")
"""Addresses on other hosts that a style sheet loads."""


class Reader(HTMLParser):
    """Parser that collects a page's anchors, links, and the addresses that it loads."""

    def __init__(self) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Record an element's anchors, link and loaded address."""
        values = {name: value or "" for name, value in attrs}
        self.anchors |= {values[name] for name in ("id", "name") if values.get(name)}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if (target := values.get(LOADED.get(tag, ""))) and values.get("rel") not in RELATIONS:
            self.loads.append(target)
            self.links.append(target)


@cache
def read(page: Path) -> Reader:
    """Parse a page of the site, once."""
    reader = Reader()
    reader.feed(page.read_text(encoding="utf-8"))
    return reader


def fault_of(site: Path, page: Path, link: str) -> str | None:
    """Return a message if a link's target is missing, else None."""
    parts = urlsplit(link)
    if parts.scheme or parts.netloc or link.startswith("data:"):
        return None
    target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
    target = target / "index.html" if target.is_dir() else target
    if not target.exists() or site not in target.parents:
        return f"{page.relative_to(site)} links to {link}, which is not there"
    if parts.fragment and target.suffix == ".html" and unquote(parts.fragment) not in read(target).anchors:
        return f"{page.relative_to(site)} links to {link}, and that page has no such heading"
    return None


def faults(site: Path) -> list[str]:
    """Return messages about all faults of a site."""
    site, messages = site.resolve(), []
    for page in sorted(site.rglob("*.html")):
        if page.name == "404.html":
            continue  # links of page 404 begin at the top of the site
        for link in read(page).links:
            messages.append(fault_of(site, page, link))
        for target in read(page).loads:
            if urlsplit(target).netloc:
                messages.append(f"{page.relative_to(site)} loads {target} from elsewhere")
    for sheet in sorted(site.rglob("*.css")):
        if FETCHED.search(sheet.read_bytes()):
            messages.append(f"{sheet.relative_to(site)} loads something from elsewhere")
    return [fault for fault in messages if fault]


if __name__ == "__main__":
    wrong = faults(Path(sys.argv[1]))
    print("\n".join(wrong) or "every link has a target")
    sys.exit(bool(wrong))
