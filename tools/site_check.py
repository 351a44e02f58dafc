"""Whether every link of a built site leads somewhere, and whether a page loads anything from elsewhere.

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
"""Elements whose target a browser fetches by itself."""
RELATIONS = ("canonical", "prev", "next", "alternate")
"""Links of a page's head that are not fetched."""
FETCHED = re.compile(rb"(?:url\(\s*['\"]?|@import\s+['\"])(https?:)?//")
"""What a style sheet fetches from elsewhere."""


class Reader(HTMLParser):
    """The anchors of a page, what it links to, and what it loads."""

    def __init__(self) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Take down what an element names."""
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given[name] for name in ("id", "name") if given.get(name)}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if (target := given.get(LOADED.get(tag, ""))) and given.get("rel") not in RELATIONS:
            self.loads.append(target)
            self.links.append(target)


@cache
def read(page: Path) -> Reader:
    """A page of the site."""
    reader = Reader()
    reader.feed(page.read_text(encoding="utf-8"))
    return reader


def fault_of(site: Path, page: Path, link: str) -> str | None:
    """Why a link leads nowhere."""
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
    """Everything that is wrong with a site."""
    site, found = site.resolve(), []
    for page in sorted(site.rglob("*.html")):
        if page.name == "404.html":
            continue  # its links begin at the top of wherever it is served
        for link in read(page).links:
            found.append(fault_of(site, page, link))
        for target in read(page).loads:
            if urlsplit(target).netloc:
                found.append(f"{page.relative_to(site)} loads {target} from elsewhere")
    for sheet in sorted(site.rglob("*.css")):
        if FETCHED.search(sheet.read_bytes()):
            found.append(f"{sheet.relative_to(site)} loads something from elsewhere")
    return [fault for fault in found if fault]


if __name__ == "__main__":
    wrong = faults(Path(sys.argv[1]))
    print("\n".join(wrong) or "every link leads somewhere")
    sys.exit(bool(wrong))
