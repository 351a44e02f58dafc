"""Do the dashboard's pages stay quick and small in a browser with 3000 actors and a million log lines?

The cluster of `dashboard_load.py`: 3000 actors that told a million log lines and go on. In a real Chromium every page is
loaded, actors are sorted and searched, lines are searched and paged back. Then the pages stay open for ten minutes, one
after the other, with a tick a second. Each step must take two seconds at the median at most; after the first minute neither the
page's memory (what is left of its heap after a collection, and its elements) nor the dashboard's may grow by more than
the bounds below; and no page may complain.
"""

import argparse
import contextlib
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from _kit import CANNOT, end, memory, say, table
from dashboard_load import ACTORS, LAST, LINES_EACH, get

try:
    from playwright.sync_api import Page, TimeoutError, sync_playwright
except ImportError:
    sync_playwright = None

SLOWEST = 2.0
"""Seconds that a step may take at the median."""
HEAP_GROWTH, ELEMENT_GROWTH, PROCESS_GROWTH = 8 << 20, 500, 64 << 20
PAGES = {
    "overview": ".tile .value",
    "live": ".uplot canvas",
    "learning": ".uplot canvas",
    "memory": ".uplot canvas",
    "actors": "tbody tr:nth-child(100)",
    "nodes": "tbody a",
    "logs": ".lines li:nth-child(200)",
    "settings": "dl.tree",
}
"""What is there once a page is drawn."""
FLAGS = ("--no-sandbox", "--disable-background-networking", "--enable-precise-memory-info")


class Times:
    """How long each step took, in seconds."""

    def __init__(self) -> None:
        self.seen: dict[str, list[float]] = defaultdict(list)

    @contextlib.contextmanager
    def of(self, step: str) -> Iterator[None]:
        """Time what the block does."""
        began = time.monotonic()
        yield
        self.seen[step].append(time.monotonic() - began)

    def rows(self) -> list[list[str]]:
        """For a table, in milliseconds."""
        return [
            [step, f"{1e3 * statistics.median(found):.0f}", f"{1e3 * max(found):.0f}", str(len(found))]
            for step, found in self.seen.items()
        ]


def once_through(page: "Page", url: str, times: Times) -> None:
    """What somebody does who looks for one actor and one line among all of them.

    Waits by locators: a handle of an element would keep it, and with it a page that is long gone.
    """
    for name, drawn in PAGES.items():
        page.goto("about:blank")
        with times.of(f"load {name}"):
            page.goto(f"{url}/#/{name}")
            page.locator(drawn).first.wait_for()
    page.goto(f"{url}/#/actors")
    page.locator(PAGES["actors"]).first.wait_for()
    with times.of("sort actors by steps"):
        page.get_by_role("button", name="Steps", exact=True).click()
        page.locator("th[aria-sort=descending]").wait_for()
        page.wait_for_function("document.querySelector('tbody').rows.length === 100")
    with times.of("page of the next hundred"):
        page.get_by_role("button", name="After").click()
        page.get_by_text("101–200 of").wait_for()
    with times.of("search actors by host"):
        page.locator("input[type=search]").fill("host-2977")
        page.get_by_text("1–1 of").wait_for()
    with times.of("look at one actor"):
        page.locator("tbody a").first.click()
        page.get_by_text("What its server knows").wait_for()
    page.goto(f"{url}/#/logs")
    page.locator(PAGES["logs"]).first.wait_for()
    with times.of("search a rare word in all lines"):
        page.locator("input[type=search]").fill(LAST)
        page.locator("mark").wait_for()
    with times.of("what was said around it"):
        page.locator(".lines a").first.click()
        page.locator("li.here").wait_for()
    with times.of("all lines again"):
        page.get_by_text("All lines").click()
        page.locator(PAGES["logs"]).first.wait_for()
    with times.of("200 older lines"):
        page.get_by_role("button", name="Older lines").click()
        page.locator(".lines li:nth-child(400)").wait_for()


def held(page: "Page") -> tuple[int, int]:
    """Bytes of the page's heap after a collection, and its elements with those that are only still known to scripts."""
    session = page.context.new_cdp_session(page)
    session.send("HeapProfiler.collectGarbage")
    session.send("Performance.enable")
    found = {each["name"]: each["value"] for each in session.send("Performance.getMetrics")["metrics"]}
    session.detach()
    return int(found["JSHeapUsedSize"]), int(found["Nodes"])


def stay(page: "Page", pid: int, seconds: float) -> list[tuple[float, int, int, int]]:
    """One page after the other, ten seconds each, without loading anew: (second, heap, elements, dashboard's bytes) at the
    overview, once a round.
    """
    seen = []
    began = time.monotonic()
    while time.monotonic() < began + seconds:
        for name, drawn in PAGES.items():
            page.evaluate(f"location.hash = '#/{name}'")
            try:
                page.locator(drawn).first.wait_for()
            except TimeoutError as error:
                raise AssertionError(f"{name} shows {page.locator('main').inner_text()[:500]!r}") from error
            page.wait_for_timeout(10_000)
        page.evaluate("location.hash = '#/overview'")
        page.locator(PAGES["overview"]).first.wait_for()
        seen.append((time.monotonic() - began, *held(page), memory(pid)))
        say(
            f"{seen[-1][0]:.0f} s: heap {seen[-1][1] / 2**20:.1f} MiB, {seen[-1][2]} elements, dashboard {seen[-1][3] >> 20} MiB"
        )
    return seen


@contextlib.contextmanager
def running() -> Iterator[tuple[str, int]]:
    """The cluster and its dashboard: the address and the process of the dashboard."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        script = os.path.join(os.path.dirname(__file__), "dashboard_load.py")
        command = [sys.executable, script, "--serve", os.path.join(folder, "state")]
        server = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        stack.callback(server.kill)
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        command = [sys.executable, "-m", "memoire", "dashboard", url, "--listen", "127.0.0.1:0"]
        command += ["--history", os.path.join(folder, "history.db"), "--expected-actors", str(ACTORS)]
        board = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        stack.callback(board.kill)
        assert board.stdout is not None
        shown = board.stdout.readline().removeprefix("memoire dashboard: ").strip()
        while True:
            with contextlib.suppress(AssertionError):
                if LAST in get(shown, "/api/logs?text=needle&limit=100").decode():  # all lines are on disk
                    break
            time.sleep(0.5)
        yield shown, board.pid


def main() -> int:
    """The trial; its exit status."""
    options = argparse.ArgumentParser()
    options.add_argument("--rounds", type=int, default=5, help="of loading, sorting and searching")
    options.add_argument("--seconds", type=float, default=600.0, help="of ticks")
    given = options.parse_args()
    chromium = shutil.which("chromium")
    if sync_playwright is None or chromium is None:
        print("Chromium or playwright is not installed.")
        return CANNOT
    wrong: list[str] = []

    def heard(said: Any) -> None:
        if said.type in ("error", "warning"):
            wrong.append(f"a page said: {said.text}")

    times = Times()
    with running() as (url, pid), sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=list(FLAGS))
        page = browser.new_page(viewport={"width": 1360, "height": 900})
        page.on("console", heard)
        page.on("pageerror", lambda error: wrong.append(f"a page failed: {error}"))
        page.set_default_timeout(60_000)
        for number in range(given.rounds):
            say(f"round {number + 1} of {given.rounds}")
            once_through(page, url, times)
        page.goto(f"{url}/#/overview")
        seen = stay(page, pid, given.seconds)
        browser.close()
    wrong += [
        f"{step} took {statistics.median(found):.2f} s"
        for step, found in times.seen.items()
        if statistics.median(found) > SLOWEST
    ]
    first, last = next((each for each in seen if each[0] > 60.0), seen[-1]), seen[-1]
    bounds = (("heap", HEAP_GROWTH), ("elements", ELEMENT_GROWTH), ("dashboard", PROCESS_GROWTH))
    for place, (what, most) in enumerate(bounds, 1):
        if last[place] - first[place] > most:
            wrong.append(f"{what} grew from {first[place]} to {last[place]}")
    print(table(["step, in the browser", "median, ms", "longest, ms", "times"], times.rows()))
    print(
        f"\n{ACTORS} actors, {ACTORS * LINES_EACH:,} log lines. {last[0]:.0f} s of ticks: the page's heap had "
        f"{first[1] / 2**20:.1f} MiB after its first minute and {last[1] / 2**20:.1f} at the end, with {first[2]} and "
        f"{last[2]} elements; the dashboard {first[3] >> 20} and {last[3] >> 20} MiB."
    )
    return end(wrong)


if __name__ == "__main__":
    sys.exit(main())
