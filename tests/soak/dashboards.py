"""Trial of a dashboard over thousands of actors, in a browser."""

import argparse
import contextlib
import json
import os
import secrets
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
from _kit import CANNOT, end, memory, run_named, say, table

import memoire
from memoire.nodes.http import NodePages
from memoire.wire import messages
from memoire.wire.frames import encode, parse

SCHEMA = memoire.Schema(
    {"obs": memoire.Column(np.float32, (64,), "state"), "reward": memoire.Column(np.float32, (), "reward")}
)
ACTORS = 3000
LINES_EACH = 333
LAST = "the needle in the stack"
EVERY = 5.0
"""Seconds between two updates of an actor."""
NEEDLE = "/api/logs?text=needle&limit=100"


class Actors:
    """Messages of 3000 actors to a server, in the frames of the real protocol."""

    def __init__(self, server: memoire.Server) -> None:
        self.dispatcher = server._dispatcher
        self.ids = [secrets.token_bytes(16) for _ in range(ACTORS)]
        self.number = 0
        self.steps = [0] * ACTORS

    def say(self, place: int, body: messages.Body) -> None:
        self.number += 1
        self.dispatcher.answer(
            parse(encode(body, client=self.ids[place], sequence=self.number, run=self.dispatcher.run))
        )

    def begin(self) -> None:
        for place in range(ACTORS):
            self.say(place, messages.Hello(label=place + 1, host=f"host-{place}", software="soak"))
            words = [f"step {n} of actor {place}: all is well" for n in range(LINES_EACH)]
            if place == ACTORS // 2:
                words[7] = LAST
            lines = [messages.Line(n, 1.7e9 + n, place + 1, text) for n, text in enumerate(words, 1)]
            self.say(place, messages.Update(lines=lines))

    def go_on(self, ended: threading.Event) -> None:
        place, begun = 0, time.monotonic()
        while not ended.is_set():
            self.steps[place] += 1000
            episode = self.steps[place] // 1000
            self.say(
                place,
                messages.Update(
                    steps=self.steps[place],
                    episodes=episode,
                    ended=[messages.Ended(episode, time.time(), 1000, float(place % 100))],
                    scalars={"epsilon": 0.1},
                ),
            )
            place = (place + 1) % ACTORS
            begun += EVERY / ACTORS
            ended.wait(max(0.0, begun - time.monotonic()))


def be_the_server(folder: str) -> int:
    """Serve until SIGTERM; print the address of the pages, and at the end the steps that the actors reported."""
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    with memoire.Server("tcp://127.0.0.1:0", SCHEMA, name="soak", run="soak", state=folder) as server:
        actors = Actors(server)
        actors.begin()
        with NodePages("127.0.0.1:0", server) as pages:
            print(pages.url, flush=True)
            actors.go_on(ended)
            print(sum(actors.steps), flush=True)
            time.sleep(10.0)  # the dashboard polls once more
    return 0


def get(url: str, path: str) -> bytes:
    with urllib.request.urlopen(urllib.parse.urljoin(url, path), timeout=30.0) as answer:
        return bytes(answer.read())


@contextlib.contextmanager
def running() -> Iterator[tuple[str, subprocess.Popen[str], subprocess.Popen[str]]]:
    """Run a cluster and its dashboard; once all is shown, yield the dashboard's address and both processes."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:

        def begin(*command: str) -> tuple[subprocess.Popen[str], str]:
            process = stack.enter_context(
                subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True)
            )
            stack.callback(process.kill)
            assert process.stdout is not None
            return process, process.stdout.readline().strip()

        history = os.path.join(folder, "history.db")
        server, url = begin(__file__, "dashboard_pages", "--serve", os.path.join(folder, "state"))
        command = ["-m", "memoire", "dashboard", url, "--listen", "127.0.0.1:0", "--history", history]
        board, line = begin(*command, "--expected-actors", str(ACTORS))
        shown = line.removeprefix("memoire dashboard: ")
        while True:
            with contextlib.suppress(OSError):
                is_found = LAST in get(shown, NEEDLE).decode()  # all lines are on disk
                if is_found and json.loads(get(shown, "/api/overview"))["actors"]["active"] == ACTORS:
                    break
            time.sleep(0.5)
        yield shown, server, board


try:
    from playwright.sync_api import Page, TimeoutError, sync_playwright
except ImportError:
    sync_playwright = None
SLOWEST = 2.0
"""Seconds that a step may take at the median."""
HEAP_GROWTH, ELEMENT_GROWTH, PROCESS_GROWTH = 8 << 20, 500, 64 << 20
PAGES = {
    "overview": ".tile .value", "live": ".uplot canvas", "learning": ".uplot canvas", "memory": ".uplot canvas",
    "actors": "tbody tr:nth-child(100)", "nodes": "tbody a", "logs": ".lines li:nth-child(200)", "settings": "div.settings",
}  # fmt: skip
"""Element of each page that exists once the page is drawn."""
FLAGS = ("--no-sandbox", "--disable-background-networking", "--enable-precise-memory-info")


Times = defaultdict[str, list[float]]
"""Seconds of each repetition of a step, by the step's name."""


@contextlib.contextmanager
def timed(times: Times, step: str) -> Iterator[None]:
    began = time.monotonic()
    yield
    times[step].append(time.monotonic() - began)


def once_through(page: "Page", url: str, times: Times) -> None:
    """Look for one among all actors and one among all lines, as a user does.

    Locators wait: a handle of an element would keep the element, and with it a page that is long gone.
    """
    for name, drawn in PAGES.items():
        page.goto("about:blank")
        with timed(times, f"load {name}"):
            page.goto(f"{url}/#/{name}")
            page.locator(drawn).first.wait_for()
    page.goto(f"{url}/#/actors")
    page.locator(PAGES["actors"]).first.wait_for()
    with timed(times, "sort actors by steps"):
        page.get_by_role("button", name="Steps", exact=True).click()
        page.locator("th[aria-sort=descending]").wait_for()
        page.wait_for_function("document.querySelector('tbody').rows.length === 100")
    with timed(times, "page of the next hundred"):
        page.get_by_role("button", name="After").click()
        page.get_by_text("101–200 of").wait_for()
    with timed(times, "search actors by host"):
        page.locator("input[type=search]").fill("host-2977")
        page.get_by_text("1–1 of").wait_for()
    with timed(times, "look at one actor"):
        page.locator("tbody a").first.click()
        page.get_by_text("Facts from its server").wait_for()
    page.goto(f"{url}/#/logs")
    page.locator(PAGES["logs"]).first.wait_for()
    with timed(times, "search a rare word in all lines"):
        page.locator("input[type=search]").fill(LAST)
        page.locator("mark").wait_for()
    with timed(times, "what was said around it"):
        page.locator(".lines a").first.click()
        page.locator("li.here").wait_for()
    with timed(times, "all lines again"):
        page.get_by_text("All lines").click()
        page.locator(PAGES["logs"]).first.wait_for()
    with timed(times, "200 older lines"):
        page.get_by_role("button", name="Older lines").click()
        page.locator(".lines li:nth-child(400)").wait_for()


def held(page: "Page") -> tuple[int, int]:
    """Return the bytes of the page's heap after a collection, and its elements, also those that only scripts keep."""
    session = page.context.new_cdp_session(page)
    session.send("HeapProfiler.collectGarbage")
    session.send("Performance.enable")
    metrics = {each["name"]: each["value"] for each in session.send("Performance.getMetrics")["metrics"]}
    session.detach()
    return int(metrics["JSHeapUsedSize"]), int(metrics["Nodes"])


def stay(page: "Page", pid: int, seconds: float) -> list[tuple[float, int, int, int]]:
    """Show each page for ten seconds; return (second, heap, elements, dashboard's bytes) after each round."""
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


def dashboard_pages() -> int:
    """Do the dashboard's pages stay quick and small in a browser with 3000 actors and a million log lines?

    A server with a state folder gets HELLO and UPDATE messages of 3000 actors, each with 333 log lines at first, and
    then goes on: every actor updates every five seconds. A `memoire dashboard` watches it with a history in a file. In
    a real Chromium every page is loaded, actors are sorted and searched, lines are searched and paged back. Afterwards
    the pages stay open for ten minutes, one after the other, with a tick a second. Each step may take two seconds in
    the median. After the first minute neither the page's memory (its heap after a collection, and its elements) nor the
    dashboard's may grow by more than the bounds below. No page may complain, and at the end the dashboard has counted
    all that the actors reported.
    """
    options = argparse.ArgumentParser()
    options.add_argument("--rounds", type=int, default=5, help="of loading, sorting and searching")
    options.add_argument("--seconds", type=float, default=600.0, help="of ticks")
    options.add_argument("--serve", help=argparse.SUPPRESS)
    args = options.parse_args()
    if args.serve:
        return be_the_server(args.serve)
    chromium = shutil.which("chromium")
    if sync_playwright is None or chromium is None:
        print("Chromium or playwright is not installed.")
        return CANNOT
    wrong: list[str] = []

    def heard(message: Any) -> None:
        if message.type in ("error", "warning"):
            wrong.append(f"a page said: {message.text}")

    times: Times = defaultdict(list)
    with running() as (url, server, board), sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=list(FLAGS))
        page = browser.new_page(viewport={"width": 1360, "height": 900})
        page.on("console", heard)
        page.on("pageerror", lambda error: wrong.append(f"a page failed: {error}"))
        page.set_default_timeout(60_000)
        for number in range(args.rounds):
            say(f"round {number + 1} of {args.rounds}")
            once_through(page, url, times)
        page.goto(f"{url}/#/overview")
        seen = stay(page, board.pid, args.seconds)
        browser.close()
        server.terminate()
        reported = int(server.stdout.readline())
        time.sleep(6.0)
        totals = json.loads(get(url, "/api/overview"))["totals"]
    if (totals["steps"], totals["clients"]) != (reported, ACTORS):
        wrong.append(f"{totals['steps']} steps are shown, and {reported} were told")
    rows = []
    for step, seconds in times.items():
        median = statistics.median(seconds)
        rows.append([step, f"{1e3 * median:.0f}", f"{1e3 * max(seconds):.0f}", str(len(seconds))])
        wrong += [f"{step} took {median:.2f} s"] * (median > SLOWEST)
    first, last = next((each for each in seen if each[0] > 60.0), seen[-1]), seen[-1]
    bounds = (("heap", HEAP_GROWTH), ("elements", ELEMENT_GROWTH), ("dashboard", PROCESS_GROWTH))
    for place, (what, most) in enumerate(bounds, 1):
        if last[place] - first[place] > most:
            wrong.append(f"{what} grew from {first[place]} to {last[place]}")
    print(table(["step, in the browser", "median, ms", "longest, ms", "times"], rows))
    print(
        f"\n{ACTORS} actors, {ACTORS * LINES_EACH:,} log lines. {last[0]:.0f} s of ticks: the page's heap had "
        f"{first[1] / 2**20:.1f} MiB after its first minute and {last[1] / 2**20:.1f} at the end, with {first[2]} and "
        f"{last[2]} elements; the dashboard {first[3] >> 20} and {last[3] >> 20} MiB."
    )
    return end(wrong)


if __name__ == "__main__":
    run_named(globals())
