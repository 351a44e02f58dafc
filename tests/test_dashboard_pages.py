"""The dashboard's pages in a real browser: nothing but our own files, no error, hostile text stays text, a server that goes."""

import contextlib
import os
import re
import shutil
import urllib.parse
from pathlib import Path

import pytest

import memoire
from memoire.cluster.node import NodePages
from netkit import Cluster, record, until

serving = pytest.importorskip("memoire.dashboard.serve", reason="fastapi is not installed")
pages = pytest.importorskip("memoire.dashboard.pages")
sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
Settings = pytest.importorskip("memoire.dashboard.settings").Settings

pytestmark = pytest.mark.browser
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = ("--no-sandbox", "--disable-background-networking", "--disable-component-update", "--disable-sync")
HOSTILE = "</span><img src=x onerror=alert(1)><script>alert(2)</script>"
NAMES = ("overview", "live", "learning", "memory", "actors", "nodes", "logs", "settings")
DESKTOP, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("chromium is not installed")
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield started
        started.close()


@pytest.fixture(scope="module")
def cluster():
    made = Cluster()
    yield made
    made.close()


@pytest.fixture(scope="module")
def node(cluster):
    """A server with three actors that have something to show, one of them hostile."""
    server = cluster.server(name="home", run="r-1")
    clients = [cluster.client(server, seed=n) for n in range(3)]
    for number, client in enumerate(clients, 1):
        record(client, episodes=number, length=20)
        client.scalars({"epsilon": number / 10})
        client.log(f"line of {number} {HOSTILE}")
        assert client.push_cache(5.0)
        client.update(5.0)
    server.scalars({"loss": 0.5})
    until(lambda: server.total_caches == 3)
    server.get_batch(16, timeout=5.0)
    with NodePages("127.0.0.1:0", server) as answers:
        yield server, clients, answers


@contextlib.contextmanager
def dashboard(node, **options):
    settings = {"nodes": (node[2].url,), "listen": "127.0.0.1:0", "poll_every": 0.1}
    with serving.Dashboard(Settings(**settings | options)) as board:
        until(lambda: board.aggregator.newest and board.aggregator.newest.totals.steps == 120)
        yield board


@pytest.fixture(scope="module")
def board(node):
    with dashboard(node) as made:
        yield made


@contextlib.contextmanager
def window(browser, board, *, size=DESKTOP, allowed=(), **options):
    """A page that must not complain, nor ask anybody else."""
    wrong, ours = [], urllib.parse.urlsplit(board.url).netloc
    with contextlib.closing(browser.new_context(viewport=size, **options)) as context:
        page = context.new_page()
        page.on("console", lambda said: wrong.append(said.text) if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("dialog", lambda dialog: wrong.append(f"a dialog: {dialog.message}") or dialog.dismiss())
        page.on("request", lambda asked: wrong.append(asked.url) if not is_ours(asked.url, ours) else None)
        page.set_default_timeout(8000)
        yield page
    assert [each for each in wrong if not any(part in each for part in allowed)] == []


def is_ours(url, ours):
    return url.startswith(("blob:", "data:")) or urllib.parse.urlsplit(url).netloc == ours


def open_page(page, board, name):
    page.goto(f"{board.url}/#/{name}")
    page.wait_for_selector("#live[data-state=live]")


@pytest.mark.parametrize(("theme", "size"), [("light", PHONE), ("dark", DESKTOP)])
def test_every_page_is_drawn_without_a_complaint_in_both_themes(browser, board, theme, size):
    with window(browser, board, size=size, color_scheme=theme) as page:
        expected = {"overview": "Does it learn?", "live": "In and out", "learning": "Return of episodes"}
        expected |= {"memory": "Table default", "actors": "1–3 of 3 actors", "nodes": "home", "logs": "line of 3"}
        expected |= {"settings": "priority exponent"}
        for name in NAMES:
            open_page(page, board, name)
            page.get_by_text(expected[name]).first.wait_for()
            if name in ("live", "learning", "memory"):
                page.wait_for_selector(".uplot canvas")
            assert page.evaluate("document.documentElement.scrollWidth") <= size["width"], name
            assert page.evaluate("document.querySelectorAll('button, a, input, select').length") > 10
            unnamed = "[...document.querySelectorAll('input, select, button')].filter(e => !(e.ariaLabel || e.textContent || e.labels?.length))"
            assert page.evaluate(f"{unnamed}.map(e => e.outerHTML)") == []
        back = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", back))) > 384) is (theme == "light")


def test_totals_on_the_page_are_what_the_clients_counted(browser, board):
    with window(browser, board) as page:
        open_page(page, board, "overview")
        tiles = page.locator(".tile")
        shown = [(each.locator(".label").inner_text(), each.locator(".value").inner_text()) for each in tiles.all()]
        assert shown == [("Total steps", "120"), ("Total episodes", "6"), ("Total caches", "3")]


def test_log_lines_stay_text_are_searched_and_linked(browser, board, node):
    with window(browser, board) as page:
        open_page(page, board, "logs")
        page.get_by_text(HOSTILE).first.wait_for()
        assert page.locator(".lines img, .lines script").count() == 0
        page.keyboard.press("/")
        page.keyboard.type("of 2")
        page.locator("mark").wait_for()
        assert page.locator(".lines li").count() == 1 and "text=of+2" in page.url
        page.locator(".lines a").first.click()
        page.locator("li.here").wait_for()  # what was said around it
        assert page.locator(".lines li").count() == 3 and "of 2" in page.locator("li.here").text_content()
        with page.expect_download() as download:
            page.get_by_role("button", name="Download").click()
        assert Path(download.value.path()).read_text().count(HOSTILE) == 3
        page.get_by_text("All lines").click()
        until(lambda: page.locator(".lines li").count() == 3)
        node[1][0].log("one more, live")
        node[1][0].update(5.0)
        page.get_by_text("one more, live").wait_for()


def test_actors_are_sorted_filtered_and_looked_at(browser, board):
    with window(browser, board) as page:
        open_page(page, board, "actors?sort=steps&order=down")
        column = page.locator("tbody td:nth-child(8)")
        until(lambda: column.all_inner_texts() == ["60", "40", "20"])
        page.get_by_role("button", name="Steps", exact=True).click()
        until(lambda: column.all_inner_texts() == ["20", "40", "60"])
        assert "order=up" in page.url
        page.locator("input[type=search]").fill("no such actor")
        page.get_by_text("No actor is like this").wait_for()
        page.locator("input[type=search]").fill("")
        page.locator("tbody a").first.click()
        page.get_by_text("What its server knows").wait_for()
        page.get_by_text("Newest episodes").first.wait_for()


def test_keys_change_the_theme_and_pause(browser, board):
    with window(browser, board) as page:
        open_page(page, board, "overview")
        themes = []
        for _ in range(3):
            page.keyboard.press("t")
            themes.append(page.evaluate("document.documentElement.dataset.theme"))
        assert themes == ["light", "dark", "system"]
        page.keyboard.press("p")
        page.wait_for_selector("#live[data-state=paused]")
        page.keyboard.press("p")
        page.wait_for_selector("#live[data-state=live]")


def test_a_page_says_that_the_dashboard_is_gone_and_recovers(browser, node):
    with contextlib.ExitStack() as stack:
        board = stack.enter_context(dashboard(node))
        listen = urllib.parse.urlsplit(board.url).netloc
        page = stack.enter_context(window(browser, board, allowed=("Failed to load resource", "ERR_")))
        open_page(page, board, "overview")
        board.close()
        page.wait_for_selector("#live[data-state=stale]")
        stack.enter_context(dashboard(node, listen=listen))
        page.wait_for_selector("#live[data-state=live]")


def test_what_is_open_to_everybody_is_said_on_every_page(browser, node, board):
    with dashboard(node, listen="*:0", insecure=True) as wide, window(browser, wide) as page:
        for name in ("overview", "nodes", "logs"):
            open_page(page, wide, name)
            page.get_by_text(
                "Open to everybody who reaches it: dashboard http://*:0. Keys and tokens close it."
            ).wait_for()
    with window(browser, board) as page:
        open_page(page, board, "nodes")
        page.get_by_text("this machine").wait_for()
        assert not page.locator("#open").is_visible()


def test_who_has_no_token_logs_in_first(browser, node):
    with dashboard(node, token="a-token") as board, window(browser, board, allowed=("403",)) as page:
        page.goto(board.url)
        page.get_by_label("Token").fill("another")
        page.keyboard.press("Enter")
        page.get_by_text("this is not the token").wait_for()
        page.get_by_label("Token").fill("a-token")
        page.keyboard.press("Enter")
        page.get_by_text("Does it learn?").wait_for()


def test_charts_are_plain_where_uplot_is_not_the_one_that_is_known(browser, node, monkeypatch):
    monkeypatch.setattr(pages, "KNOWN", set())
    with dashboard(node) as board, window(browser, board) as page:
        open_page(page, board, "live")
        page.wait_for_selector(".plot svg.spark path")
        assert page.locator(".uplot").count() == 0


def test_nothing_but_the_pages_files_is_served(board):
    files = pages.load()
    assert {"index.html", "main.js", "style.css", "vendor/uplot.js"} <= set(files) and files["vendor/uplot.js"].body
    for path in ("static/../api.py", "static/%2e%2e/api.py", "static/", "static/nothing.js", "static//etc/passwd"):
        assert ask(board, path)[0] == 404
    status, headers, body = ask(board, "static/main.js")
    assert status == 200 and body == files["main.js"].body and "text/javascript" in headers["Content-Type"]
    assert ask(board, "static/main.js", {"If-None-Match": headers["ETag"]})[0] == 304


def ask(board, path, headers=None):
    from http.client import HTTPConnection

    with contextlib.closing(HTTPConnection(urllib.parse.urlsplit(board.url).netloc, timeout=5.0)) as connection:
        connection.request("GET", f"/{path}", headers=headers or {})
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()


def test_no_page_makes_markup_of_text():
    """What actors send goes into pages as text nodes only."""
    folder = os.path.join(os.path.dirname(pages.__file__), "static")
    scripts = [os.path.join(at, name) for at, _, names in os.walk(folder) for name in names if name.endswith(".js")]
    assert len(scripts) > 10 and memoire.__version__
    for script in scripts:
        with open(script, encoding="utf-8") as file:
            text = file.read()
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text), (
            script
        )
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text), script
