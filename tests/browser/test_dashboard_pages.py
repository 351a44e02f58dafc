"""The dashboard's pages in a real browser.

The pages load only their own files, have no errors, keep hostile text as text, and recover when the dashboard is away.
The tests also cover a changing cluster, a path behind a reverse proxy, and requests by pages of other sites.
"""

import contextlib
import re
import threading
import urllib.parse
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import memoire
from httpkit import ask
from memoire.dashboard.collect.answers import terms
from memoire.dashboard.terminal import top
from memoire.nodes.http import NodePages
from memoire.wire import messages
from memoire.wire.frames import encode, parse
from netkit import SCHEMA, record, until
from pageskit import (
    DESKTOP,
    NAMES,
    PHONE,
    check_drawn,
    complaints,
    open_page,
    three_actors,
    tiles,
    watch,
    window,
)

pages = pytest.importorskip("memoire.dashboard.web.pages")


HOSTILE = "</span><img src=x onerror=alert(1)><script>alert(2)</script>"
EXPECTED = {
    "overview": "Does it learn?",
    "live": "Steps and samples",
    "learning": "Return of episodes",
    "lag": "No model was published yet",
    "inference": "No inference node is known",
    "starts": "No node keeps start states",
    "prompts": "No table stores prompts",
    "runs": "current",
    "memory": "Table default",
    "actors": "1–3 of 3 actors",
    "nodes": "home",
    "logs": "line of 3",
    "settings": "Names are those of the Python API",
    "glossary": "Effective size",
}


@pytest.fixture(scope="module")
def node(shared_cluster):
    """A server with data of three actors, one hostile."""
    server = shared_cluster.server(name="home", run="r-1")
    clients = three_actors(shared_cluster, server, HOSTILE)
    with NodePages("127.0.0.1:0", server) as answers:
        yield server, clients, answers


@pytest.fixture(scope="module")
def board(node):
    with watch(node[2], steps=120) as dashboard:
        yield dashboard


@pytest.mark.parametrize("size", [PHONE, DESKTOP], ids=["phone", "desktop"])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_page_is_drawn_without_a_complaint_in_both_themes(browser, board, node, theme, size):
    parts = {
        f"actors?id={node[1][0].client_id.hex()}": "Everything that servers report",
        f"nodes?url={node[2].url}": "Everything that it reports",
    }
    with window(browser, board.url, size=size, color_scheme=theme) as page:
        for name, text in (EXPECTED | parts).items():
            open_page(page, board.url, name)
            page.get_by_text(text).first.wait_for()
            if name in ("overview", "live", "learning", "memory"):
                page.wait_for_selector(".uplot canvas")
            assert page.evaluate("document.querySelectorAll('button, a, input, select').length") > 10
            assert is_named(page, size), name
            check_drawn(page, size, name)
        back = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", back))) > 384) is (theme == "light")
    assert set(EXPECTED) - {"glossary"} == set(NAMES)


def is_named(page, size):
    """Return True if the page's name is visible: in the list of pages, or on a phone on the menu button."""
    if "glossary" in page.url:
        return True  # only the footer links to the glossary
    shown = page.locator("nav [aria-current=page]")
    if size == PHONE:
        button = page.get_by_role("button", name=shown.text_content(), exact=True)
        return button.is_visible() and not shown.is_visible()
    return shown.is_visible() and shown.bounding_box()["x"] + shown.bounding_box()["width"] < size["width"]


def test_a_figure_explains_itself_by_pointer_touch_and_keyboard(browser, board):
    with window(browser, board.url) as page:
        open_page(page, board.url, "memory")
        name, bubble = page.get_by_role("button", name="Effective size").first, page.locator("#help")
        name.hover()
        bubble.get_by_text("1 ÷ Σ p²").wait_for()
        page.mouse.move(2, 2)
        bubble.wait_for(state="hidden")
        name.focus()
        page.keyboard.press("Enter")
        bubble.get_by_text("1 ÷ Σ p²").wait_for()
        box = bubble.bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= DESKTOP["width"]
        assert complaints(page) == []
        page.keyboard.press("Escape")
        bubble.wait_for(state="hidden")
        name.click()
        bubble.get_by_role("link", name="All terms").click()
        page.locator(".glossary .here", has_text="Effective size").wait_for()
        bubble.wait_for(state="hidden")


def test_every_name_that_is_shown_has_an_explanation(browser, board, node):
    """A name without an explanation would be plain text, as would a misspelt name."""
    source = Path(pages.__file__).parent.parent / "static"
    known = dict(terms())
    texts = [path.read_text() for path in (source / "pages").glob("*.js")]
    named = {name for text in texts for name in re.findall(r"\b(?:term|column)(?:\(|: )\"([\w.]+)\"", text)}
    assert len(named) > 30 and named <= known.keys()
    docs = {figure.docs for figure in known.values() if figure.docs}
    folder = Path(__file__).parents[2] / "docs"
    assert [each for each in sorted(docs) if not (folder / each).exists()] == []


def test_settings_that_differ_from_their_default_stand_out(browser, board):
    with window(browser, board.url) as page:
        open_page(page, board.url, "settings")
        changed = page.locator("tr.changed code")
        changed.first.wait_for()
        names = set(changed.all_inner_texts())
        assert "poll_every" in names and not {"silent_after", "start"} & names
        row = page.locator("tr.changed", has_text="poll_every").locator("td").all_inner_texts()
        assert row == ["poll_every", "100 ms", "1.0 s"]
        page.get_by_text("settings with their defaults").last.click()
        usual = page.locator("tr:not(.changed)", has_text="silent_after")
        assert usual.locator("td").all_inner_texts() == ["silent_after", "20 s"]


def test_a_node_has_its_curves_first_and_what_it_said_folded(browser, board, node):
    with window(browser, board.url) as page:
        open_page(page, board.url, f"nodes?url={node[2].url}")
        page.locator("figure", has_text="CPU").locator(".uplot canvas").wait_for()
        page.locator("figure", has_text="Memory").locator(".uplot canvas").wait_for()
        fold = page.locator(".folds details", has_text="Counters").first
        assert fold.get_by_text("uptime").is_hidden()
        fold.locator("summary").click()
        fold.get_by_text("uptime").wait_for()
        before = fold.locator("dl").inner_text()
        until(lambda: fold.locator("dl").inner_text() != before)  # the page was redrawn, and the row is still unfolded
        assert fold.get_by_text("uptime").is_visible()


def test_pages_and_the_terminal_write_figures_alike(browser, board):
    values = [0, 0.5, 3.14159, 1.23e-4, 99.96, 100.4, 1234.6, 9999, 12_345, 99_950, 999_900, 1.5e6, 2.34e9, 7.1e12]
    values += [86_399, 250_000]
    with window(browser, board.url) as page:
        open_page(page, board.url, "overview")
        script = "async (values) => { const m = await import('./static/format.js'); return ['figure', 'bytes', 'share', 'duration', 'count'].map((n) => values.map(m[n])); }"
        shown = page.evaluate(script, values)
    calls = (top.figure, top.bytes_of, top.share, top.duration, top.count)
    assert shown == [[call(value) for value in values] for call in calls]


def test_log_lines_stay_text_are_searched_and_linked(browser, board, node):
    with window(browser, board.url) as page:
        open_page(page, board.url, "logs")
        page.get_by_text(HOSTILE).first.wait_for()
        assert page.locator(".lines img, .lines script").count() == 0
        page.keyboard.press("/")
        page.keyboard.type("of 2")
        until(
            lambda: page.locator(".lines li").count() == 1 and "text=of+2" in page.url
        )  # the page has searched for the whole text
        page.locator("mark").wait_for()
        page.locator(".lines a").first.click()
        page.locator("li.here").wait_for()  # the page shows lines around the found line
        until(lambda: page.locator(".lines li").count() == 3)
        assert "of 2" in page.locator("li.here").text_content()
        with page.expect_download() as download:
            page.get_by_role("button", name="Download").click()
        assert Path(download.value.path()).read_text().count(HOSTILE) == 3
        page.get_by_text("All lines").click()
        until(lambda: page.locator(".lines li").count() == 3)
        node[1][0].log("one more, live")
        node[1][0].update(100.0)
        page.get_by_text("one more, live").wait_for()


def test_whatever_actors_call_themselves_stays_text(browser):
    """Hosts, software and scalars come from actors, so they may have any text."""
    with memoire.Server("tcp://127.0.0.1:0", SCHEMA, name="home", run="r-1") as server:
        client, run, scalar = bytes(range(16)), server._dispatcher.run, "<img src=x onerror=alert(3)>"
        hello = messages.Hello(label=7, host=HOSTILE, software=HOSTILE)
        for number, body in enumerate((hello, messages.Update(steps=5, scalars={scalar: 0.5})), 1):
            server._dispatcher.answer(parse(encode(body, client=client, sequence=number, run=run)))
        with NodePages("127.0.0.1:0", server) as answers, watch(answers, steps=5) as board:
            with window(browser, board.url) as page:
                shown = {
                    "actors": HOSTILE,
                    f"actors?id={client.hex()}": HOSTILE,
                    "overview": scalar,
                    "learning": scalar,
                }
                for name, text in (shown | {f"nodes?url={answers.url}": "Everything that it reports"}).items():
                    open_page(page, board.url, name)
                    page.get_by_text(text).first.wait_for()
                    assert page.locator("main img, main script").count() == 0


def test_actors_are_sorted_filtered_and_looked_at(browser, board):
    with window(browser, board.url) as page:
        open_page(page, board.url, "actors?sort=steps&order=down")
        column = page.locator("tbody td:nth-child(8)")
        until(lambda: column.all_inner_texts() == ["60", "40", "20"])
        page.get_by_role("button", name="Steps", exact=True).click()
        until(lambda: column.all_inner_texts() == ["20", "40", "60"])
        assert "order=up" in page.url
        page.locator("input[type=search]").fill("no such actor")
        page.get_by_text("No actor matches").wait_for()
        page.locator("input[type=search]").fill("")
        page.locator("tbody a").first.click()
        page.get_by_text("Newest episodes").first.wait_for()
        page.get_by_text("Facts from its server").click()
        page.get_by_role("term").filter(has_text="pushed bytes").wait_for()
        page.get_by_text("Account at each server").click()
        page.get_by_role("cell", name="generated bytes").wait_for()


def test_everything_is_reached_by_the_keyboard(browser, board):
    focus = "document.activeElement"
    with window(browser, board.url) as page:
        open_page(page, board.url, "overview")
        page.keyboard.press("Tab")
        assert page.evaluate(f"{focus}.className") == "skip"  # the first element skips the navigation
        page.keyboard.press("Enter")
        assert page.evaluate(f"{focus}.id") == "content"
        page.keyboard.press("/")  # a page without search: the key leads to the logs
        page.get_by_label("Search all lines").wait_for()
        open_page(page, board.url, "actors")
        page.get_by_text(EXPECTED["actors"]).wait_for()
        page.keyboard.press("/")
        assert page.evaluate(f"{focus}.type") == "search"
        page.keyboard.type("t")  # in the search, the letter does not switch the theme
        page.keyboard.press("Escape")
        assert page.evaluate(f"{focus}.tagName") == "BODY"
        page.get_by_label("Id, label or host").fill("")
        page.get_by_text(EXPECTED["actors"]).wait_for()
        reached = set()
        for _ in range(40):
            page.keyboard.press("Tab")
            shown = page.evaluate(f"[{focus}.tagName, getComputedStyle({focus}).outlineStyle, {focus}.textContent]")
            assert shown[0] == "BODY" or shown[1] != "none", shown  # the focus is visible
            reached.add(shown[2])
        assert {"Steps", "Return, last 20"} <= reached  # the keyboard sorts columns
        assert any(re.fullmatch("[0-9a-f]{8}", text) for text in reached)


def test_a_page_says_that_the_dashboard_is_gone_and_recovers(browser, node):
    with contextlib.ExitStack() as stack:
        board = stack.enter_context(watch(node[2], steps=120))
        listen = urllib.parse.urlsplit(board.url).netloc
        page = stack.enter_context(window(browser, board.url, allowed=("Failed to load resource", "ERR_")))
        open_page(page, board.url, "overview")
        board.close()
        page.wait_for_selector("#live[data-state=stale]")
        page.get_by_text("The dashboard does not answer").wait_for()
        stack.enter_context(watch(node[2], steps=120, listen=listen))
        page.wait_for_selector("#live[data-state=live]")
        page.get_by_text("The dashboard does not answer").wait_for(state="hidden")


def test_what_is_open_to_everybody_is_said_on_every_page(browser, node, board):
    with watch(node[2], steps=120, listen="*:0", insecure=True) as wide, window(browser, wide.url) as page:
        for name in ("overview", "nodes", "logs"):
            open_page(page, wide.url, name)
            line = page.locator("#open summary")
            line.get_by_text("One address is open to everybody").wait_for()
            assert page.locator("#open").bounding_box()["height"] < 50  # the line stays folded until a click
            line.click()
            page.locator("#open li", has_text="dashboard http://*:0").wait_for()
            line.click()  # folded again
    with window(browser, board.url) as page:
        open_page(page, board.url, "nodes")
        page.get_by_text("this machine").wait_for()
        assert not page.locator("#open").is_visible()


def test_who_has_no_token_logs_in_first(browser, node):
    with watch(node[2], steps=120, token="a-token") as board, window(browser, board.url, allowed=("403",)) as page:
        page.goto(board.url)
        page.get_by_label("Token").fill("another")
        page.keyboard.press("Enter")
        page.get_by_text("the token is wrong").wait_for()
        assert complaints(page) == []
        page.get_by_label("Token").fill("a-token")
        page.keyboard.press("Enter")
        page.get_by_text("Does it learn?").wait_for()
        assert page.evaluate("document.cookie") == ""  # hidden from scripts
        assert "a-token" not in page.url + page.content()
        page.get_by_role("button", name="log out").click()
        page.get_by_label("Token").wait_for()


def test_charts_are_plain_where_uplot_is_not_the_one_that_is_known(browser, node, monkeypatch):
    monkeypatch.setattr(pages, "KNOWN", set())
    with watch(node[2], steps=120) as board, window(browser, board.url) as page:
        open_page(page, board.url, "live")
        page.wait_for_selector(".plot svg.spark path")
        assert page.locator(".uplot").count() == 0


def test_nothing_but_the_pages_files_is_served(board):
    files = pages.load()
    assert {"index.html", "main.js", "style.css", "vendor/uplot.js"} <= set(files) and files["vendor/uplot.js"].body
    for path in ("static/../api.py", "static/%2e%2e/api.py", "static/", "static/nothing.js", "static//etc/passwd"):
        assert ask(board.url, path)[0] == 404
    ours = {path for path in files if path.endswith(".js") and "/" not in path.removeprefix("pages/")}
    named = set(re.findall('modulepreload" href="static/([^"]+)"', ask(board.url, "")[2].decode()))
    assert named == ours  # the page preloads these files
    status, headers, body = ask(board.url, "static/main.js")
    assert status == 200 and body == files["main.js"].body and "text/javascript" in headers["Content-Type"]
    assert ask(board.url, "static/main.js", headers={"If-None-Match": headers["ETag"]})[0] == 304


def test_no_page_makes_markup_of_text():
    """Pages insert text from actors as text nodes only."""
    scripts = list((Path(memoire.__file__).parent / "dashboard" / "static").rglob("*.js"))
    assert len(scripts) > 10
    for script in scripts:
        text = script.read_text(encoding="utf-8")
        markup = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function"
        assert not re.search(rf"{markup}|https?://(?!www\.w3\.org/2000/svg)", text), script


def test_a_server_that_goes_away_is_told_of_and_totals_stay_what_the_clients_counted(browser, cluster, tmp_path):
    with contextlib.ExitStack() as stack:
        folders = [tmp_path / str(number) for number in range(3)]
        servers = [cluster.server(name=f"server-{n}", run="big", state=folder) for n, folder in enumerate(folders)]
        clients = [cluster.client(servers[n % 3], seed=n, timeout=100.0) for n in range(6)]
        shown = [stack.enter_context(NodePages("127.0.0.1:0", server)) for server in servers]
        board = stack.enter_context(watch(*shown))
        page = stack.enter_context(window(browser, board.url))

        def work(episodes):
            for client in clients:
                record(client, episodes=episodes, length=20)
                assert client.push_cache(100.0)
                client.update(100.0)
                until(lambda client=client: client.update(100.0) or client.stats().in_flight_caches == 0)

        def counted():
            stats = [client.stats() for client in clients]
            names = {"steps": "steps", "episodes": "episodes", "caches": "accepted_caches"}
            return {title: sum(getattr(each, name) for each in stats) for title, name in names.items()}

        work(2)
        open_page(page, board.url, "overview")
        until(lambda: tiles(page) == counted(), 40.0)
        assert counted() == {"steps": 240, "episodes": 12, "caches": 6}
        shown[1].close()
        servers[1].close()
        page.locator(".verdict.bad", has_text="server-1").wait_for()
        until(lambda: tiles(page) == counted())
        open_page(page, board.url, "nodes")
        page.locator("tr", has_text="server-1").locator(".state.down").wait_for()
        row = page.locator("tr.away", has_text="server-1")
        assert "away since" in row.inner_text() and row.locator("td").count() == 4  # no former figures
        open_page(page, board.url, "memory")
        page.get_by_text("server-1 does not answer: the figures below do not include its data").wait_for()
        page.get_by_text("by 2 of 3 servers").wait_for()
        open_page(page, board.url, "logs")
        page.get_by_text("server-1 did not answer").wait_for()
        open_page(page, board.url, "overview")
        again = cluster.restart(servers[1], state=folders[1])
        stack.enter_context(NodePages(shown[1].address, again))
        down = page.locator(".verdict.bad", has_text="server-1")  # a finding about a nearly full disk is allowed
        until(lambda: down.count() == 0)
        work(3)
        until(lambda: tiles(page) == counted(), 40.0)
        assert counted() == {"steps": 600, "episodes": 30, "caches": 12}


class Under(BaseHTTPRequestHandler):
    """A reverse proxy that shows a dashboard only under /memoire, and removes this path from requests if `strips` is
    set.
    """

    protocol_version = "HTTP/1.0"

    def do_GET(self):
        path, _, rest = self.path.partition("?")
        if path != "/memoire" and not path.startswith("/memoire/"):
            self.send_error(404)
            return
        if self.server.strips:
            path = path.removeprefix("/memoire") or "/"
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        with contextlib.closing(HTTPConnection(self.server.back, timeout=100.0)) as connection:
            connection.request(self.command, path + ("?" + rest if rest else ""), body or None, dict(self.headers))
            answer = connection.getresponse()
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in ("transfer-encoding", "connection"):
                    self.send_header(name, value)
            self.end_headers()
            with contextlib.suppress(OSError):
                while chunk := answer.read1(65536):
                    self.wfile.write(chunk)

    do_POST = do_HEAD = do_GET

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def shown_under(board, strips):
    class Quiet(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_):
            pass  # a browser that disconnects in the middle of an answer

    with Quiet(("127.0.0.1", 0), Under) as front:
        front.back, front.strips = board.url.removeprefix("http://"), strips
        threading.Thread(target=front.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{front.server_port}/memoire"
        front.shutdown()


@pytest.mark.parametrize("strips", [True, False], ids=["path taken off", "path left on"])
def test_it_is_shown_under_a_path_with_and_without_its_slash(browser, node, strips):
    with watch(node[2], steps=120, root_path="/memoire", token="a-token-of-this-test") as board:
        with shown_under(board, strips) as url, window(browser, url) as page:
            for start in (url, f"{url}/"):
                page.context.clear_cookies()
                page.goto(start)
                page.get_by_label("Token").fill("a-token-of-this-test")
                page.keyboard.press("Enter")
                page.wait_for_selector("#live[data-state=live]")
                assert page.evaluate("document.styleSheets.length") == 3
                for name in NAMES:
                    page.goto(f"{start}#/{name}")
                    page.locator(f"nav [aria-current=page][data-page={name}]").wait_for()
                page.goto(f"{start}#/learning")
                with page.expect_download() as download:
                    page.get_by_text("CSV").click()
                assert "steps" in download.value.path().read_text()
                assert page.context.cookies()[0]["path"] == "/memoire"


@contextlib.contextmanager
def a_page_of_somebody_else():
    class Blank(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(b"<!doctype html><title>a stranger</title><iframe></iframe>")

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Blank) as front:
        threading.Thread(target=front.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{front.server_port}/"
        front.shutdown()


TRIES = """async (board) => {
  const said = {};
  const ask = async (name, path, options) => {
    try {
      const answer = await fetch(board + path, options);
      said[name] = `${answer.type} ${answer.status} ${(await answer.text()).length}`;
    } catch (error) { said[name] = "nothing"; }
  };
  await ask("read", "/api/overview", {});
  await ask("read with cookies", "/api/logs", {credentials: "include"});
  await ask("read blindly", "/api/overview", {mode: "no-cors"});
  await ask("log out", "/api/logout", {method: "POST", mode: "no-cors"});
  said.stream = await new Promise((done) => {
    const source = new EventSource(board + "/api/stream");
    source.onopen = () => done("open");
    source.onerror = () => { source.close(); done("nothing"); };
  });
  said.frame = await new Promise((done) => {
    const frame = document.querySelector("iframe");
    frame.onload = () => { try { done(frame.contentDocument ? frame.contentDocument.title : "hidden"); } catch { done("hidden"); } };
    frame.src = board + "/";
    setTimeout(() => done("hidden"), 3000);
  });
  return said;
}"""


def test_a_strange_page_in_the_same_browser_learns_nothing_and_changes_nothing(browser, node):
    """A dashboard on loopback without a token: any website that the user opens can send requests to it."""
    with watch(node[2], steps=120) as board, a_page_of_somebody_else() as url:
        allowed = (board.url, "ERR_", "CORS", "MIME", "Content Security Policy", "frame")
        with window(browser, url, allowed=allowed) as page:
            page.goto(url)
            results = page.evaluate(TRIES, board.url)
            assert results.pop("frame") == "hidden"
            assert results.pop("log out") in ("nothing", "opaque 0 0")
            assert set(results.values()) <= {"nothing", "opaque 0 0"}, results
        kind = {"Content-Type": "application/json", "Origin": url.rstrip("/")}
        assert ask(board, "api/logout", "POST", kind, "{}")[0] == 403
