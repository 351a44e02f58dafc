"""Tests of addresses: a request address leads to pages, and pages lead to the request address."""

import re
import socket

import pytest

import memoire
from memoire.cli import doctor, main
from memoire.cli import options as addresses
from memoire.errors import EndpointError, ParameterError
from memoire.net.addresses import page_seen_from
from memoire.nodes.http import NodePages
from netkit import SCHEMA, until

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster():
    with (
        memoire.Server("tcp://127.0.0.1:0", SCHEMA, name="a") as a,
        memoire.Server("tcp://127.0.0.1:0", SCHEMA, name="b") as b,
        NodePages("127.0.0.1:0", a) as pages_a,
        NodePages("127.0.0.1:0") as pages_b,
    ):
        pages_b.show(b)
        with memoire.Proxy("tcp://127.0.0.1:0", [a.endpoint, b.endpoint]) as proxy, NodePages("127.0.0.1:0") as pages:
            pages.show(proxy)
            until(lambda: all(back.servers for back in proxy.stats().backs), 60.0)
            yield {"proxy": (proxy, pages.url), "a": (a, pages_a.url), "b": (b, pages_b.url)}


def test_a_proxy_says_where_its_pages_are_and_those_of_all_servers_behind_it(cluster):
    proxy, page = cluster["proxy"]
    lines = []
    urls = addresses.pages_of([proxy.endpoint], say=lines.append)
    assert urls[0] == page and set(urls) == {where for _, where in cluster.values()}
    assert lines == [f"asked {proxy.endpoint} for pages: {', '.join(urls)}"]


def test_a_server_says_where_its_own_pages_are_and_is_not_counted_a_client(cluster):
    server, page = cluster["b"]
    before = server.clients()
    urls = addresses.pages_of([server.endpoint, page, "dns:name:1", "host:8080"], say=str)
    assert urls == [page, "dns:name:1", "host:8080"]
    assert server.clients() == before


def test_the_page_of_a_proxy_leads_to_those_of_its_servers_where_it_is_given_alone(cluster):
    (_, page), (_, page_a) = cluster["proxy"], cluster["a"]
    lines = []
    for alone in (page, page.removeprefix("http://")):
        urls = addresses.pages_of([alone], say=lines.append)
        assert urls[0] == page and set(urls) == {where for _, where in cluster.values()}
        assert lines.pop() == f"asked {alone} for pages: {', '.join(urls)}"
    for args in ([page, page_a], [page_a], ["dns:name:1"], ["host"]):
        assert addresses.pages_of(args, say=lines.append) == args
    assert lines == []


def test_a_proxy_whose_servers_have_no_pages_is_looked_at_alone(times):
    lines = []
    times(page_asked=0.5)
    proxy = memoire.Proxy("tcp://127.0.0.1:0", ["tcp://127.0.0.1:1"])
    with proxy, NodePages("127.0.0.1:0", proxy) as pages:
        assert addresses.pages_of([pages.url], say=lines.append) == [pages.url]
    assert lines[0].startswith(f"reading only {pages.url}, not the servers behind it: ") and len(lines) == 1


@pytest.mark.parametrize("name", ["proxy", "a"])
def test_pages_say_where_requests_go(cluster, name):
    node, page = cluster[name]
    lines = []
    assert addresses.endpoint_of(page, say=lines.append) == node.endpoint
    assert lines == [f"asked {page} for its address: {node.endpoint}"]
    assert addresses.endpoint_of(node.endpoint, say=lines.append) == node.endpoint and len(lines) == 1


def test_commands_take_either(cluster, capsys, times):
    times(top_rates=0.05)
    proxy, page = cluster["proxy"]
    assert main.main(["totals", page]) == 0 == main.main(["totals", proxy.endpoint])
    assert main.main(["doctor", page]) == doctor.WELL
    assert main.main(["top", "--once", proxy.endpoint]) == 0
    assert capsys.readouterr().err.count("memoire: asked ") == 3


def test_nobody_there_is_told_with_the_address(times):
    times(page_asked=0.5)
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    with pytest.raises(EndpointError, match=rf"cannot ask 'http://127.0.0.1:{port}': .*refused"):
        addresses.endpoint_of(f"http://127.0.0.1:{port}")
    with pytest.raises(EndpointError, match=f"cannot ask 'tcp://127.0.0.1:{port}': .*nothing listens at"):
        addresses.pages_of([f"tcp://127.0.0.1:{port}"])
    with pytest.raises(ParameterError, match="http://HOST:PORT of a node's pages"):
        addresses.endpoint_of("http://proxy")


def test_a_node_without_pages_is_told_how_to_have_some():
    with memoire.Server("tcp://127.0.0.1:0", SCHEMA) as server:
        with pytest.raises(EndpointError, match=re.escape("start the node with --http 127.0.0.1:8080")):
            addresses.pages_of([server.endpoint])


def test_pages_that_ask_for_a_token_or_are_of_no_node_are_told_so():
    server = memoire.Server("tcp://127.0.0.1:0", SCHEMA)
    with server, NodePages("127.0.0.1:0", server, token="t" * 20) as pages:
        with pytest.raises(EndpointError, match="it answers with status 401. Give the tcp:// address of this node"):
            addresses.endpoint_of(pages.url)
    with (
        NodePages("127.0.0.1:0") as nothing,
        pytest.raises(EndpointError, match="the page of a server, proxy or relay"),
    ):
        addresses.endpoint_of(nothing.url)


@pytest.mark.parametrize(
    ("dialled", "page", "seen"),
    [
        ("tcp://far:5560", "http://0.0.0.0:8080", "http://far:8080"),
        ("tcp://far:5560", "http://[::]:8080", "http://far:8080"),
        ("tcp://far:5560", "http://*:8080", "http://far:8080"),
        ("tcp://far:5560", "http://near:8080", "http://near:8080"),
        ("ipc:///run/relay", "http://0.0.0.0:8080", "http://0.0.0.0:8080"),
    ],
)
def test_pages_of_a_whole_machine_are_at_the_host_that_was_dialled(dialled, page, seen):
    assert page_seen_from(dialled, page) == seen


LOOKS = {
    "top": ["top", "--once"],
    "logs": ["logs"],
    "report": ["report", "--to", "tensorboard", "--once", "--folder"],
    "dashboard": ["dashboard", "--listen", "127.0.0.1:0"],
}


@pytest.fixture(scope="module")
def locked(tmp_path_factory):
    """Yield a server with keys and pages, the URL of its pages, and the folder of all keys."""
    keys = tmp_path_factory.mktemp("keys") / "keys"
    assert main.main(["keys", "new", str(keys)]) == 0
    server = memoire.Server("tcp://127.0.0.1:0", SCHEMA, keys=str(keys))
    with server, NodePages("127.0.0.1:0", server) as pages:
        yield server, pages.url, str(keys)


@pytest.mark.parametrize("command", LOOKS)
def test_a_command_without_a_key_says_that_the_address_asks_for_one(command, locked, tmp_path, capsys):
    args = [*LOOKS[command], *([str(tmp_path)] if command == "report" else [])]
    assert main.main([*args, locked[0].endpoint]) == 1
    assert (
        "the node requires a key, and this process has none. Give this process a keys folder" in capsys.readouterr().err
    )


@pytest.mark.parametrize("command", ["top", "logs", "report"])
def test_a_command_with_a_key_finds_the_pages_of_the_address(command, locked, tmp_path, capsys, times):
    times(top_rates=0.05, report_rates=0.05)
    args = [*LOOKS[command], *([str(tmp_path)] if command == "report" else [])]
    assert main.main([*args, locked[0].endpoint, "--keys", locked[2]]) == 0
    assert f"asked {locked[0].endpoint} for pages: {locked[1]}" in capsys.readouterr().err
