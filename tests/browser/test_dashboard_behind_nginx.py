"""The dashboard behind nginx, with a token that exists and with one that an OIDC proxy adds (docs/kubernetes.md)."""

import json
import re

import pytest

from memoire.nodes.http import NodePages
from netkit import Cluster, record, until
from nginxkit import nginx, oidc_proxy
from pageskit import ask, browser, watch, window

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
