"""Pictures of every page of a running dashboard, in both themes, on a phone and on two desktops.

    python tools/screenshots.py http://127.0.0.1:8265 FOLDER

Needs playwright, and chromium on the path. Exit status 1 where a page complained, is wider than its window,
or cuts a table on a desktop.
"""

import argparse
import shutil
import sys
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

PAGES = (
    "overview", "live", "learning", "lag", "inference", "starts", "runs", "memory", "actors", "nodes", "logs",
    "settings", "glossary",
)  # fmt: skip
LISTS = ("actors", "nodes")
"""Pages of which the first thing in the list is looked at, too."""
SIZES = {"desktop": (1360, 900), "phone": (390, 844), "wide": (1920, 1080)}
FLAGS = ("--no-sandbox", "--disable-background-networking", "--disable-component-update", "--disable-sync")
PHONE = 700
"""Pixels up to which a table may be scrolled sideways."""
CUT = """[...document.querySelectorAll(".scroll")].filter((each) => each.scrollWidth > each.clientWidth + 1)
    .map((each) => each.getAttribute("aria-label"))"""
SETTLE = 2500
"""Milliseconds for which a page may draw its curves."""


def take(page: Page, folder: Path, name: str, kind: str, wrong: list[str]) -> None:
    """One picture, once the page has settled; what is wrong with it is added to `wrong`."""
    page.wait_for_timeout(SETTLE)
    page.screenshot(path=folder / f"{name}-{kind}.png", full_page=True)
    drawn, width = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    if drawn > width:
        wrong.append(f"{name} is {drawn} pixels wide on a {kind} of {width}")
    wrong += [f"{name} cuts the table {table!r} on a {kind}" for table in page.evaluate(CUT)] if width > PHONE else []


def main() -> int:
    """Take the pictures; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="of the dashboard")
    parser.add_argument("folder", type=Path, help="where the pictures go")
    parser.add_argument("--only", choices=PAGES, action="append", help="only this page; may be repeated")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    wrong: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=list(FLAGS))
        for theme in ("light", "dark"):
            for kind, (width, height) in SIZES.items():
                context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=theme)
                page = context.new_page()
                page.on("console", lambda said: wrong.append(said.text) if said.type in ("error", "warning") else None)
                page.on("pageerror", lambda error: wrong.append(str(error)))
                for name in given.only or PAGES:
                    page.goto(f"{given.url.rstrip('/')}/#/{name}")
                    take(page, given.folder, name, f"{theme}-{kind}", wrong)
                    if name in LISTS and page.locator("tbody a").count():
                        page.locator("tbody a").first.click()
                        take(page, given.folder, f"{name}-one", f"{theme}-{kind}", wrong)
                context.close()
        browser.close()
    print("\n".join(wrong) or f"{given.folder}: nothing complained")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
