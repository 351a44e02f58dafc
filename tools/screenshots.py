"""Screenshots of every page of a running dashboard, in both themes, in the sizes of a phone and of two desktops.

    python tools/screenshots.py http://127.0.0.1:8265 FOLDER

Needs playwright, and chromium on the path. Exit status 1 if a page logs a warning or an error, is wider than its
window, or cuts off a table on a desktop.
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
"""Pages with a list whose first entry gets a screenshot, too."""
SIZES = {"desktop": (1360, 900), "phone": (390, 844), "wide": (1920, 1080)}
FLAGS = ("--no-sandbox", "--disable-background-networking", "--disable-component-update", "--disable-sync")
PHONE = 700
"""Window width in pixels up to which a table may need to be scrolled sideways."""
CUT = """[...document.querySelectorAll(".scroll")].filter((each) => each.scrollWidth > each.clientWidth + 1)
    .map((each) => each.getAttribute("aria-label"))"""
SETTLE = 2500
"""Milliseconds that a page gets to draw its curves."""


def take(page: Page, folder: Path, name: str, kind: str, wrong: list[str]) -> None:
    """Take a screenshot after `SETTLE`; add messages about the page's faults to `wrong`."""
    page.wait_for_timeout(SETTLE)
    page.screenshot(path=folder / f"{name}-{kind}.png", full_page=True)
    drawn, width = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    if drawn > width:
        wrong.append(f"{name} is {drawn} pixels wide on a {kind} of {width}")
    wrong += (
        [f"{name} cuts off the table {table!r} on a {kind}" for table in page.evaluate(CUT)] if width > PHONE else []
    )


def main() -> int:
    """Take the screenshots, print the faults and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="URL of the dashboard")
    parser.add_argument("folder", type=Path, help="folder for the screenshots")
    parser.add_argument("--only", choices=PAGES, action="append", help="take only this page; may be repeated")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    wrong: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=list(FLAGS))
        for theme in ("light", "dark"):
            for kind, (width, height) in SIZES.items():
                context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=theme)
                page = context.new_page()
                page.on(
                    "console", lambda entry: wrong.append(entry.text) if entry.type in ("error", "warning") else None
                )
                page.on("pageerror", lambda error: wrong.append(str(error)))
                for name in args.only or PAGES:
                    page.goto(f"{args.url.rstrip('/')}/#/{name}")
                    take(page, args.folder, name, f"{theme}-{kind}", wrong)
                    if name in LISTS and page.locator("tbody a").count():
                        page.locator("tbody a").first.click()
                        take(page, args.folder, f"{name}-one", f"{theme}-{kind}", wrong)
                context.close()
        browser.close()
    print("\n".join(wrong) or f"{args.folder}: no page has a fault")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
