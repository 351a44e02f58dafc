"""The dashboard behind nginx, with a token that exists and with one that an OIDC proxy adds (docs/kubernetes.md)."""

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from memoire.nodes.http import NodePages
from netkit import Cluster, record, until
from pageskit import ask, browser, watch, window

CONFIG = """
daemon off;
pid {folder}/pid;
error_log {folder}/error.log;
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    server {{
        listen 127.0.0.1:{port};
        {locations}
    }}
}}
"""
PASS = "proxy_pass http://{back}; proxy_set_header Host $http_host; proxy_buffering off;"
PLAIN = "location / {{ " + PASS + " }}"
LOGGED_IN = (
    """
        location = /_auth {{
            internal;
            proxy_pass {asked};
            proxy_pass_request_body off;
            proxy_set_header Content-Length "";
            proxy_set_header Authorization "";
        }}
        location / {{
            auth_request /_auth;
            auth_request_set $token $upstream_http_authorization;
            proxy_set_header Authorization $token;
            error_page 401 = @login;
            """
    + PASS
    + """
        }}
        location @login {{ return 302 {login}; }}
"""
)
"""What the controller ingress-nginx makes of the annotations auth-url, auth-signin and auth-response-headers."""
PATH = f"{os.environ.get('PATH', '')}:/usr/sbin"


@contextlib.contextmanager
def nginx(folder, back, asked="", login=""):
    """Its address.

    Args:
        back: HOST:PORT of what it stands in front of.
        asked: Address at which it asks about each request; "" lets all of them through.
        login: Where it sends people who are not logged in.
    """
    if (program := shutil.which("nginx", path=PATH)) is None:
        pytest.skip("nginx is not installed")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    locations = (LOGGED_IN if asked else PLAIN).format(back=back, asked=asked, login=login)
    (folder / "nginx.conf").write_text(CONFIG.format(folder=folder, port=port, locations=locations), encoding="utf-8")
    command = [program, "-p", str(folder), "-e", str(folder / "error.log"), "-c", str(folder / "nginx.conf")]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            deadline = time.monotonic() + 30.0
            while not is_open(port):
                assert process.poll() is None, (folder / "error.log").read_text(encoding="utf-8")
                assert time.monotonic() < deadline, "nginx did not start within 30 s"
                time.sleep(0.05)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(20.0)


def is_open(port):
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1.0):
        return True
    return False


class _Answers(BaseHTTPRequestHandler):
    def do_GET(self):
        is_known = self.server.cookie in self.headers.get("Cookie", "")
        self.send_response(202 if is_known else 401)
        if is_known:
            self.send_header("Authorization", self.server.header)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def oidc_proxy(cookie, header):
    """Answers as oauth2-proxy at /oauth2/auth: 401, or 202 with the header of its injectResponseHeaders; its address.

    Args:
        cookie: Of people who are logged in.
    """
    with ThreadingHTTPServer(("127.0.0.1", 0), _Answers) as server:
        server.cookie, server.header = cookie, header
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/oauth2/auth"
        finally:
            server.shutdown()


__all__ = ["browser"]

HOST, TOKEN = "memoire.rl.example.com", "a-token-of-this-test"
LOGIN = "https://auth.example.com/oauth2/start"
KNOWN = {"Host": HOST, "Cookie": "_oauth2_proxy=me"}
"""What somebody's browser sends who is logged in."""


@pytest.fixture(scope="module")
def board():
    """A dashboard with a token, of a server with an actor."""
    cluster = Cluster()
    server = cluster.server(name="home", run="r-1")
    client = cluster.client(server)
    record(client, episodes=2, length=20)
    client.update(100.0)
    hosts = [HOST, "127.0.0.1"]
    with NodePages("127.0.0.1:0", server) as pages, watch(pages.url, token=TOKEN, hosts=hosts) as made:
        until(lambda: made.aggregator.newest and made.aggregator.newest.totals.steps == 40)
        yield made
    cluster.close()


@pytest.fixture
def outside(board, tmp_path):
    """The address of nginx in front of it, which asks an OIDC proxy about each request."""
    with oidc_proxy("_oauth2_proxy=me", f"Bearer {TOKEN}") as asked, nginx(tmp_path, back(board), asked, LOGIN) as url:
        yield url


def back(board):
    return board.url.removeprefix("http://")


def test_with_a_token_that_exists_the_dashboard_asks_for_it_itself(board, tmp_path):
    with nginx(tmp_path, back(board)) as url:
        assert ask(url, "api/overview", {"Host": HOST})[0] == 401
        assert ask(url, "api/overview", {"Host": HOST, "Authorization": "Bearer wrong-token-of-nobody"})[0] == 401
        status, _, body = ask(url, "api/overview", {"Host": HOST, "Authorization": f"Bearer {TOKEN}"})
        assert status == 200 and json.loads(body)["totals"]["steps"] == 40
        assert ask(url, "api/overview", {"Host": "other.example.com", "Authorization": f"Bearer {TOKEN}"})[0] == 421


def test_whoever_is_logged_in_at_the_provider_needs_no_token(outside):
    status, _, body = ask(outside, "api/overview", KNOWN)
    assert status == 200 and json.loads(body)["totals"]["steps"] == 40
    forged = KNOWN | {"Authorization": "Bearer a-token-that-somebody-made-up"}
    assert ask(outside, "api/overview", forged)[0] == 200  # the proxy's header takes its place


def test_whoever_is_not_logged_in_is_sent_to_the_provider_whatever_they_send(outside, board):
    for more in ({}, {"Authorization": f"Bearer {TOKEN}"}, {"Cookie": "_oauth2_proxy=somebody"}):
        for path in ("", "api/overview", "api/stream"):
            status, headers, body = ask(outside, path, {"Host": HOST} | more)
            assert (status, headers["Location"]) == (302, LOGIN), path
            assert b"steps" not in body
    assert ask(board.url, "api/overview", {"Host": HOST})[0] == 401  # nobody comes past the proxy without the token


def test_in_a_browser_the_page_is_live_and_asks_for_nothing(browser, outside):
    with window(browser, outside) as page:
        page.context.add_cookies([{"name": "_oauth2_proxy", "value": "me", "url": outside}])
        page.goto(outside)
        page.wait_for_selector("#live[data-state=live]")
        assert page.get_by_label("Token").count() == 0
        assert re.search("40", page.locator("main").inner_text())
