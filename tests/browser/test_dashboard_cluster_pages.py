"""The dashboard's pages over a cluster that changes, under a path of somebody else's, and asked by strangers."""

import contextlib
import signal
import subprocess
import sys
import threading
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

import memoire
from history import ports
from memoire.nodes.http import NodePages
from netkit import SCHEMA, Cluster, record, until
from pageskit import NAMES, ask, browser, open_page, tiles, watch, window

__all__ = ["browser"]


@pytest.fixture(scope="module")
def small():
    """A server with an actor, and its pages."""
    cluster = Cluster()
    server = cluster.server(name="home", run="r-1")
    client = cluster.client(server)
    record(client, episodes=2, length=20)
    client.log("a line")
    client.update(100.0)
    with NodePages("127.0.0.1:0", server) as pages:
        yield pages.url
    cluster.close()


@contextlib.contextmanager
def dashboard(url, **options):
    with watch(url, **options) as board:
        until(lambda: board.aggregator.newest and board.aggregator.newest.totals.steps == 40)
        yield board


# ------------------------------------------------------------------------------------------------- servers that go away


class Process:
    """`memoire server` with a state folder, at the same addresses after each start."""

    def __init__(self, number, folder):
        self.endpoint, self.http = (f"127.0.0.1:{ports.block()}" for _ in range(2))
        self.name, self.folder = f"server-{number}", folder / str(number)
        self.start()

    def start(self):
        arguments = ["--endpoint", f"tcp://{self.endpoint}", "--schema", SCHEMA.to_json(), "--name", self.name]
        arguments += ["--http", self.http, "--state-dir", str(self.folder), "--run", "big"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "memoire", "server", *arguments],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        until(self.is_ready, 100.0)

    def is_ready(self):
        assert self.process.poll() is None, f"{self.name} ended"
        with contextlib.suppress(OSError):
            return ask(f"http://{self.http}", "readyz")[0] == 200
        return False

    def end(self, how=signal.SIGTERM):
        self.process.send_signal(how)
        self.process.wait(100.0)


def test_a_killed_server_is_told_of_and_totals_stay_what_the_clients_counted(browser, tmp_path):
    with contextlib.ExitStack() as stack:
        servers = [Process(number, tmp_path) for number in range(3)]
        stack.callback(lambda: [server.end(signal.SIGKILL) for server in servers])
        clients = [
            stack.enter_context(
                memoire.connect(f"tcp://{servers[n % 3].endpoint}", seed=n, capacity=1000, timeout=100.0)
            )
            for n in range(6)
        ]
        board = stack.enter_context(watch(*(f"http://{server.http}" for server in servers)))
        page = stack.enter_context(window(browser, board.url))

        def work(episodes):
            for client in clients:
                record(client, episodes=episodes, length=20)
                assert client.push_cache(100.0)
                client.update(100.0)
                until(lambda client=client: client.update(100.0) or client.stats().in_flight_caches == 0)

        def counted():
            found = [client.stats() for client in clients]
            names = {"steps": "steps", "episodes": "episodes", "caches": "accepted_caches"}
            return {title: sum(getattr(each, name) for each in found) for title, name in names.items()}

        work(2)
        open_page(page, board.url, "overview")
        until(lambda: tiles(page) == counted(), 40.0)
        assert counted() == {"steps": 240, "episodes": 12, "caches": 6}
        servers[1].end(signal.SIGKILL)
        page.locator(".verdict.bad", has_text="server-1").wait_for()
        until(lambda: tiles(page) == counted())
        open_page(page, board.url, "nodes")
        page.locator("tr", has_text="server-1").locator(".state.down").wait_for()
        row = page.locator("tr.away", has_text="server-1")
        assert "away since" in row.inner_text() and row.locator("td").count() == 4  # no figure of before
        open_page(page, board.url, "memory")
        page.get_by_text("server-1 does not answer: what it holds is in no figure below").wait_for()
        page.get_by_text("by 2 of 3 servers").wait_for()
        open_page(page, board.url, "logs")
        page.get_by_text("server-1 did not answer").wait_for()
        open_page(page, board.url, "overview")
        servers[1].start()
        down = page.locator(".verdict.bad", has_text="server-1")  # a disk that is nearly full is another one
        until(lambda: down.count() == 0)
        work(3)
        until(lambda: tiles(page) == counted(), 40.0)
        assert counted() == {"steps": 600, "episodes": 30, "caches": 12}


# ----------------------------------------------------------------------------------------------- behind somebody's path


class Under(BaseHTTPRequestHandler):
    """A reverse proxy that shows a dashboard under /memoire and nothing else; takes the path off, or not."""

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
            pass  # a browser that goes away in the middle of an answer

    with Quiet(("127.0.0.1", 0), Under) as front:
        front.back, front.strips = board.url.removeprefix("http://"), strips
        threading.Thread(target=front.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{front.server_port}/memoire"
        front.shutdown()


@pytest.mark.parametrize("strips", [True, False], ids=["path taken off", "path left on"])
def test_it_is_shown_under_a_path_with_and_without_its_slash(browser, small, strips):
    with dashboard(small, root_path="/memoire", token="a-token-of-this-test") as board:
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


# ------------------------------------------------------------------------------------------------------------ strangers


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


def test_a_strange_page_in_the_same_browser_learns_nothing_and_changes_nothing(browser, small):
    """Loopback without a token: whoever opens a page of somebody else's has a browser that reaches the dashboard."""
    with dashboard(small) as board, a_page_of_somebody_else() as url:
        with window(
            browser, url, allowed=(board.url, "ERR_", "CORS", "MIME", "Content Security Policy", "frame")
        ) as page:
            page.goto(url)
            said = page.evaluate(TRIES, board.url)
            assert said.pop("frame") == "hidden"
            assert said.pop("log out") in ("nothing", "opaque 0 0")
            assert set(said.values()) <= {"nothing", "opaque 0 0"}, said
        kind = {"Content-Type": "application/json", "Origin": url.rstrip("/")}
        assert ask(board.url, "api/logout", kind, "POST", "{}")[0] == 403
