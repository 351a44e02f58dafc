"""Tests of a node's pages over HTTP: their content, access to them, and that no client blocks other clients."""

import base64
import contextlib
import dataclasses
import errno
import json
import os
import re
import socket
import sqlite3
import threading
import time
import urllib.parse

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import httpkit
import memoire
from memoire.accounting.merge import totals_of
from memoire.errors import EndpointError, InsecureWarning
from memoire.net.thread import ProgressMonitor
from memoire.nodes import http as node
from memoire.nodes import pages as about
from memoire.nodes.http import NodePages
from memoire.security.access import MAX_WRONG_TOKENS, Tokens, WrongTokens
from memoire.security.provision import write_cluster
from memoire.wire.rows import ACCOUNT
from netkit import DEADLINE, SCHEMA, record, until
from statekit import Faulty, failing

OLD, NEW = "old-token-old-token", "new-token-new-token"


def ask(pages, path="/status", method="GET", host=None, headers=()):
    """Return (status, headers, JSON body) of one request."""
    status, answered, body = httpkit.ask(pages, path, method, dict(headers) | ({"Host": host} if host else {}))
    return status, answered, json.loads(body) if body else None


def fetch(pages, path, headers=(), url=None):
    status, _, body = httpkit.ask(url or pages, path, headers=headers)
    return status, body


def dial(pages):
    parts = urllib.parse.urlsplit(pages.url)
    return socket.create_connection((parts.hostname, parts.port), timeout=DEADLINE)


def hear(connection):
    pieces = []
    with contextlib.suppress(ConnectionResetError):
        while piece := connection.recv(1 << 16):
            pieces.append(piece)
    return b"".join(pieces)


@pytest.fixture
def server():
    with memoire.Server("tcp://127.0.0.1:0", SCHEMA, name="home", run="r-1") as running:
        yield running


@pytest.fixture
def pages(server):
    with NodePages("127.0.0.1:0", server) as running:
        yield running


def test_status_shows_each_client_and_what_became_of_its_caches(server, pages):
    with memoire.connect(server.endpoint, seed=0) as client:
        record(client, episodes=2, length=20)
        assert client.push_cache(100.0)
        until(lambda: server.total_caches == 1)
        client.update(100.0)
        (row,) = ask(pages)[2]["clients"]["rows"]
        assert row["client"] == client.client_id.hex()
        assert (row["episodes"], row["steps"], row["accepted_caches"], row["in_flight_bytes"]) == (2, 40, 1, 0)
        assert row["returns_mean"] == 20.0
        gone = row["accepted_caches"] + sum(row["rejected"].values()) + row["lost_caches"]
        assert row["pushed_caches"] == gone + row["in_flight_caches"] == 1
        figures = ask(pages)[2]["stats"]
        assert (figures["presence"], figures["restored"]) == ({"active": 1, "silent": 0, "gone": 0}, 0)
    assert ask(pages)[2]["stats"]["presence"] == {"active": 0, "silent": 0, "gone": 1}


def test_a_ledger_is_handed_out_as_it_is_for_whoever_merges_several(server, pages):
    with memoire.connect(server.endpoint, seed=0) as client:
        record(client, episodes=2, length=20)
        client.update(100.0)
        page = msgspec.msgpack.decode(fetch(pages, "/accounts")[1])
        rows = np.frombuffer(page["rows"], ACCOUNT)
        assert (page["name"], page["run"], page["epoch"], page["durable"]) == ("home", "r-1", server.epoch, False)
        assert totals_of(rows) == server.totals()
        assert rows["since"].tolist() == [server.epoch] and page["next"] == ""
        late = msgspec.msgpack.decode(fetch(pages, f"/accounts?seen={page['time'] + 60}")[1])
        assert late["rows"] == b""
        assert fetch(pages, "/accounts?run=none")[0] == 400


@pytest.mark.slow
def test_closed_episodes_are_read_page_by_page_and_what_was_forgotten_is_counted(server, pages, monkeypatch):
    with memoire.connect(server.endpoint, seed=0) as client:
        record(client, episodes=5, length=20)
        client.update(100.0)
        first = ask(pages, "/episodes?most=3")[2]
        assert [row["number"] for row in first["rows"]] == [1, 2, 3]
        assert (first["next"], first["missed"], first["run"], first["epoch"]) == (3, 0, "r-1", server.epoch)
        assert first["rows"][0]["client"] == client.client_id.hex()
        assert (first["rows"][0]["length"], first["rows"][0]["return"]) == (20, 20.0)
        second = ask(pages, "/episodes?after=3")[2]
        assert [row["number"] for row in second["rows"]] == [4, 5]
        assert ask(pages, "/episodes?after=5")[2]["rows"] == []
        record(client, episodes=1100, length=1)  # the node keeps a thousand lines
        client.update(100.0)
        until(lambda: server.totals().returns_count == 1105)
        later = ask(pages, "/episodes?after=5")[2]
        assert (later["missed"], later["rows"][0]["number"], later["next"]) == (100, 106, 205)


def test_a_held_sample_and_how_all_of_them_are_spread_can_be_looked_at(server, pages):
    status, _, reply = ask(pages, "/sample")
    assert status == 404 and reply["error"].startswith("table 'default' holds no sample now")
    assert ask(pages, "/distribution")[2]["effective"] is None
    with memoire.connect(server.endpoint, seed=0) as client:
        record(client, episodes=1, length=20)
        assert client.push_cache(100.0)
        until(lambda: server.total_caches == 1)
        unused = server.stats().tables["default"].unused_samples
        sample = ask(pages, "/sample?table=default")[2]
        assert (sample["table"], sample["client"]) == ("default", client.client_id.hex())
        array = sample["arrays"]["obs"]
        obs = np.frombuffer(base64.b64decode(array["data"]), array["dtype"]).reshape(array["shape"])
        assert (obs == sample["number"]).all() and array["axes"] == obs.ndim - len(SCHEMA["obs"].shape)
        assert 0.0 < sample["probability"] <= 1.0 and sample["age"] >= 0.0 and sample["model_lag"] is None
        spread = ask(pages, "/distribution?table=default")[2]
        assert (spread["storage"], spread["looked"], spread["held"]) == ("caches", unused, unused)
        assert sum(spread["weights"]["counts"]) == sum(spread["ages"]["counts"]) + spread["ages"]["zeros"] == unused
        assert 1.0 <= spread["effective"] <= spread["population"] * 1.5
        assert server.stats().tables["default"].unused_samples == unused  # nothing was taken
        batch = server.get_batch(16, timeout=100.0)
        assert len(batch.ids) == 16
        fresh = ask(pages)[2]["stats"]["tables"]["default"]["freshness"]
        assert 0.0 < fresh["effective"] <= 1.0 and fresh["ages"] == sorted(fresh["ages"]) and len(fresh["weights"]) == 7
        assert ask(pages, "/sample?table=none")[0] == ask(pages, "/distribution?table=none")[0] == 400


def test_settings_are_schema_parameters_and_limits(server, pages):
    server.configure(importance_exponent=0.5)
    page = ask(pages, "/settings")[2]
    table = page["tables"]["default"]
    assert table["schema"] == json.loads(SCHEMA.to_json()) and table["entry_bytes"] == SCHEMA.entry_bytes
    assert table["parameters"]["importance_exponent"] == 0.5 and table["parameters_version"] == 2
    assert page["limits"]["held_bytes"] == server.limits.held_bytes
    assert [run["name"] for run in page["runs"]] == ["r-1"]


def test_an_actor_and_a_learner_show_how_they_stand(server):
    with (
        memoire.connect(server.endpoint, seed=0) as client,
        memoire.Reader([server.endpoint]) as reader,
        NodePages("127.0.0.1:0", client) as actor,
        NodePages("127.0.0.1:0", reader) as learner,
    ):
        assert ask(actor, "/readyz")[0] == ask(learner, "/readyz")[0] == 200
        assert ask(actor)[2]["role"] == "actor" and ask(actor)[2]["stats"]["client"] == client.client_id.hex()
        assert ask(learner)[2]["role"] == "learner" and ask(learner)[2]["stats"]["servers"] == ["home"]
        status, _, reply = ask(actor, "/accounts")
        assert status == 404 and reply["error"] == "only a server has accounts: ask a server's pages"
        client._io.channel.heard_at -= 60.0
        assert 60.0 <= ask(actor)[2]["stats"]["silent"] < 60.0 + DEADLINE
        status, _, reply = ask(actor, "/readyz")
        assert status == 503 and reply["reasons"][0].startswith("silent: The home of this client, server 'home', was")
        reader.close()
        assert ask(learner, "/readyz")[2]["reasons"] == ["closing: this reader is closing"]


def test_what_is_not_for_everybody_asks_for_the_token(server):
    with NodePages("127.0.0.1:0", server, token="s3cret") as pages:
        for path in ("/", "/livez", "/readyz", "/metrics"):
            assert fetch(pages, path)[0] == 200
        for path in ("/status", "/settings", "/accounts", "/episodes", "/logs", "/sample"):
            status, body = fetch(pages, path)
            assert status == 401 and b"Authorization: Bearer TOKEN" in body
            assert fetch(pages, path, {"Authorization": "Bearer s3cre"})[0] == 401
            assert fetch(pages, path, {"Authorization": "Bearer s3cret"})[0] == (404 if path == "/sample" else 200)


def test_a_token_that_changes_in_its_file_lets_in_at_once_and_the_old_one_no_more(server, tmp_path):
    path = tmp_path / "token"
    path.write_text(OLD)
    bearer = {name: {"Authorization": f"Bearer {name}"} for name in (OLD, NEW)}
    with NodePages("127.0.0.1:0", server, token=Tokens(path)) as pages:
        assert [fetch(pages, "/status", bearer[name])[0] for name in (OLD, NEW)] == [200, 401]
        path.write_text(f"{OLD}\n{NEW}")
        assert [fetch(pages, "/status", bearer[name])[0] for name in (OLD, NEW)] == [200, 200]
        path.write_text(NEW)
        assert [fetch(pages, "/status", bearer[name])[0] for name in (OLD, NEW)] == [401, 200]
        path.unlink()
        assert [fetch(pages, "/status", bearer[name])[0] for name in (OLD, NEW)] == [401, 401]
        assert fetch(pages, "/livez")[0] == fetch(pages, "/metrics")[0] == 200


def test_who_guesses_tokens_has_to_wait_and_is_counted(server):
    with NodePages("127.0.0.1:0", server, token=OLD) as pages:
        pages._guesses = WrongTokens(lambda: 1000.0)  # a stopped clock forgives no guess
        for number in range(MAX_WRONG_TOKENS):
            assert fetch(pages, "/status", {"Authorization": f"Bearer wrong-{number}"})[0] == 401
        status, headers, reply = ask(pages, headers={"Authorization": f"Bearer {OLD}"})  # the right token fails, too
        assert status == 429 and int(headers["Retry-After"]) >= 1 and OLD not in json.dumps(reply)
        assert fetch(pages, "/status")[0] == 401  # a request without a token is no guess
        assert fetch(pages, "/readyz")[0] == 200
        counted = {f'memoire_refused_peers_total{{reason="{reason}"}} {count}' for reason, count in
                   (("http_token", f"{MAX_WRONG_TOKENS}.0"), ("http_guessing", "1.0"), ("http_name", "0.0"))}  # fmt: skip
        assert counted <= set(fetch(pages, "/metrics")[1].decode().splitlines())


@pytest.mark.parametrize("header", ["Basic " + "b2xk", "bearer", OLD, "Bearer", "Bearer  "])
def test_what_is_no_bearer_token_is_not_let_in(server, header):
    with NodePages("127.0.0.1:0", server, token=OLD) as pages:
        assert fetch(pages, "/status", {"Authorization": header})[0] == 401
        assert fetch(pages, f"/status?token={OLD}&access_token={OLD}")[0] == 401  # tokens in addresses end up in logs


def test_probes_and_metrics_have_a_port_of_their_own_where_one_is_given(server):
    with NodePages("127.0.0.1:0", server, token=OLD, probes="127.0.0.1:0") as pages:
        for path in ("/", "/livez", "/readyz", "/metrics"):
            assert fetch(pages, path, url=pages.probes_url)[0] == 200
        for path in ("/status", "/settings", "/accounts", "/episodes", "/logs", "/sample"):
            assert fetch(pages, path, {"Authorization": f"Bearer {OLD}"}, pages.probes_url)[0] == 404
        assert [fetch(pages, path)[0] for path in ("/livez", "/readyz", "/metrics", "/status")] == [200, 200, 401, 401]
        assert fetch(pages, "/metrics", {"Authorization": f"Bearer {OLD}"})[0] == 200
    with NodePages(None, server, probes="127.0.0.1:0") as pages:
        assert pages.url is None and fetch(pages, "/readyz", url=pages.probes_url)[0] == 200
    with pytest.raises(EndpointError), NodePages("127.0.0.1:0", server, probes="nowhere"):
        pass


def test_pages_of_a_program_are_where_its_environment_says(server, tmp_path, monkeypatch):
    with NodePages.from_environment(server) as pages:
        assert pages.url is pages.probes_url is None
    (tmp_path / "token").write_text(OLD)
    monkeypatch.setenv("MEMOIRE_HTTP", "127.0.0.1:0")
    monkeypatch.setenv("MEMOIRE_PROBES", "127.0.0.1:0")
    monkeypatch.setenv("MEMOIRE_HTTP_TOKEN_FILE", str(tmp_path / "token"))
    with NodePages.from_environment(server) as pages:
        assert fetch(pages, "/status")[0] == 401 and fetch(pages, "/readyz", url=pages.probes_url)[0] == 200
        assert fetch(pages, "/status", {"Authorization": f"Bearer {OLD}"})[0] == 200


@pytest.mark.parametrize(
    ("address", "token", "is_open"),
    [("127.0.0.1:0", None, False), ("*:0", OLD, False), ("*:0", None, True)],
)
def test_status_and_metrics_say_what_is_open_to_everybody(server, address, token, is_open):
    with pytest.warns(InsecureWarning) if is_open else contextlib.nullcontext():
        pages = NodePages(address, server, token=token, probes="*:0")
    with pages:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        security = ask(pages, headers=headers)[2]["security"]
        assert security["open"] == ([f"http://{pages.address}"] if is_open else []) and security["keys"] is False
        text = fetch(pages, "/metrics", url=pages.probes_url)[1].decode()
        assert f"\nmemoire_open_endpoints {float(is_open)}\n" in text


def test_a_server_with_keys_is_open_to_nobody_and_counts_who_is_refused(tmp_path):
    write_cluster(tmp_path)
    with memoire.Server("tcp://*:0", SCHEMA, keys=tmp_path) as server, NodePages("127.0.0.1:0", server) as pages:
        assert ask(pages)[2]["security"] == {"keys": True, "open": [], "refused": {}, "hung_up": 0}
        port = int(server.endpoint.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), timeout=100.0) as stranger:
            stranger.sendall(b"\xff" + 8 * b"\0" + b"\x01\x7f\x03\x00NULL".ljust(55, b"\0"))
            hear(stranger)
        until(lambda: sum(ask(pages)[2]["security"]["refused"].values()) == 1, 30.0)
        text = fetch(pages, "/metrics")[1].decode()
        assert "\nmemoire_open_endpoints 0.0\n" in text
        counts = re.findall(r'memoire_refused_peers_total\{reason="(\w+)"\} ([\d.]+)', text)
        assert dict(counts)["plain"] == "1.0" and {"unknown", "revoked", "role"} < dict(counts).keys()


@dataclasses.dataclass
class Wordy:
    """Client whose row on a page is long."""

    client: str
    text: str = about.MAX_PAGE_BYTES // 2 * "x"


class Crowd:
    """Fake server of nine clients."""

    def clients(self, after="", most=None):
        return [Wordy(name) for name in "abcdefghi" if name > after][:most]


@pytest.mark.parametrize("most", [1, 2, 5, 9, 100])
def test_pages_of_clients_with_much_to_say_are_short_and_leave_nobody_out(most):
    seen, after, pages = [], "", 0
    while after is not None:
        page = about.client_page(Crowd(), {"after": after, "most": str(most)})
        assert sum(map(len, page["rows"])) < 1.5 * about.MAX_PAGE_BYTES
        seen += [json.loads(bytes(row))["client"] for row in page["rows"]]
        after, pages = page["next"], pages + 1
    assert seen == list("abcdefghi") and pages == 9


@pytest.mark.parametrize("query", ["most=0", "most=1001", "most=x", "most=-1", "most=1e3", "most=%C2%B2", "most="])
def test_a_page_of_a_size_that_cannot_be_is_refused(pages, query):
    status, _, reply = ask(pages, f"/status?{query}")
    assert status == 400 and "most must be a number from 1 to 1000" in reply["error"]


def test_a_server_is_alive_and_ready_until_it_closes_and_then_alive_but_not_ready(server, pages):
    assert ask(pages, "/livez")[::2] == (200, {"alive": True, "reasons": []})
    assert ask(pages, "/readyz")[::2] == (200, {"ready": True, "reasons": []})
    server.close()
    assert ask(pages, "/livez")[0] == 200
    status, _, reply = ask(pages, "/readyz")
    assert status == 503 and reply["reasons"] == ["closing: this server is closing"]
    assert ask(pages)[2]["ready"] is False


def test_a_stuck_thread_makes_a_node_neither_alive_nor_ready(server, pages, times):
    go_on, inside = threading.Event(), threading.Event()
    requests = server._io.requests.worker
    requests._progress = ProgressMonitor(0.05, waited=lambda: 0.0)  # on a busy machine the thread would be slow
    times(thread_runnable=0.05, thread_idle=0.01)
    requests.post(lambda: (inside.set(), go_on.wait(DEADLINE)))
    try:
        assert inside.wait(DEADLINE)
        until(lambda: "thread memoire-requests is stuck: no turn for" in str(ask(pages, "/livez")[2]["reasons"]))
        assert ask(pages, "/livez")[0] == ask(pages, "/readyz")[0] == 503
    finally:
        go_on.set()
    requests._progress = ProgressMonitor()
    until(lambda: ask(pages, "/livez")[0] == 200)


@pytest.mark.slow
def test_a_server_that_takes_caches_without_a_pause_is_alive(monkeypatch):
    """The thread that takes caches need not wait on its poller, but its turns still count."""
    with memoire.Server("tcp://127.0.0.1:0", SCHEMA) as server:
        (puller,) = server._io.pullers
        monkeypatch.setattr(memoire.net.sockets, "receive", lambda *_, **__: [b"no cache"])
        puller.post(lambda: puller._turn({}))
        until(lambda: sum(server.stats().refused.values()))
        monkeypatch.setattr(puller.poller, "wait", lambda _: {})
        for _ in range(3):
            seen = puller._turned
            until(lambda seen=seen: puller._turned > seen)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_died_is_told(server, pages):
    def die():
        raise SystemExit

    server._io.requests.worker.post(die)
    until(lambda: ask(pages, "/livez")[0] == 503)
    assert ask(pages, "/livez")[2]["reasons"] == ["thread memoire-requests has died: its log says why"]


@pytest.mark.slow
def test_a_full_disk_makes_a_server_unready_until_there_is_room(tmp_path, store_by):
    fault = Faulty("before commit")
    store_by(fault.open_store)
    server = memoire.Server("tcp://127.0.0.1:0", SCHEMA, state=tmp_path / "state")
    with server, NodePages("127.0.0.1:0", server) as pages:
        assert ask(pages, "/readyz")[0] == 200 and ask(pages)[2]["stats"]["durable"]
        fault.error = failing(sqlite3.SQLITE_FULL, "SQLITE_FULL")
        server.finish()
        until(lambda: ask(pages, "/readyz")[0] == 503)
        assert re.match(r"state: the disk is full since \d+ s .*nothing is ack", ask(pages, "/readyz")[2]["reasons"][0])
        assert ask(pages, "/livez")[0] == 200
        fault.error = None
        until(lambda: ask(pages, "/readyz")[0] == 200)


def test_a_disk_that_failed_makes_a_server_one_to_restart(tmp_path, store_by):
    fault = Faulty("before commit")
    store_by(fault.open_store)
    server = memoire.Server("tcp://127.0.0.1:0", SCHEMA, state=tmp_path / "state")
    with server, NodePages("127.0.0.1:0", server) as pages:
        fault.error = OSError(errno.EIO, os.strerror(errno.EIO))
        server.finish()
        until(lambda: ask(pages, "/livez")[0] == 503)
        assert "could not be saved: [Errno 5]" in ask(pages, "/livez")[2]["reasons"][0]


def test_a_node_that_runs_out_of_descriptors_is_not_ready(pages, monkeypatch):
    monkeypatch.setattr(about, "ENOUGH_DESCRIPTORS", 1e-9)
    status, _, reply = ask(pages, "/readyz")
    assert status == 503 and re.match(r"descriptors: \d+ of \d+ are in use", reply["reasons"][0])
    assert ask(pages, "/livez")[0] == 200


def test_a_proxy_whose_servers_are_all_away_is_not_ready(server, times):
    with memoire.Proxy("tcp://127.0.0.1:0", [server.endpoint]) as proxy, NodePages("127.0.0.1:0", proxy) as pages:
        until(lambda: ask(pages, "/readyz")[0] == 200)
        server.close()
        times(server_away=0.2)
        until(lambda: ask(pages, "/readyz")[0] == 503)
        assert ask(pages, "/readyz")[2]["reasons"] == [f"away: none of {server.endpoint} answers"]
        assert ask(pages, "/livez")[0] == 200


def test_a_loopback_address_answers_only_to_loopback_names(pages):
    """A browser's page can point any name to 127.0.0.1, but its requests carry that name."""
    for host in ("localhost", "127.0.0.1:80", "[::1]:8080", "LOCALHOST:1"):
        assert ask(pages, "/livez", host=host)[0] == 200
    for host in ("evil.example", "evil.example:80", "localhost.evil.example", "127.0.0.1.evil.example", "10.0.0.1"):
        status, _, reply = ask(pages, host=host)
        assert status == 421 and set(reply) == {"error"}


def test_an_open_address_answers_to_every_name(server):
    with pytest.warns(InsecureWarning), NodePages("*:0", server) as pages:
        assert ask(pages, "/livez", host="memoire-server-0.cluster.local:8080")[0] == 200
        assert pages.url.startswith("http://[::1]:" if socket.has_dualstack_ipv6() else "http://127.0.0.1:")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH", "get"])
def test_nothing_but_reading_is_allowed(pages, method):
    status, headers, _ = ask(pages, method=method)
    assert (status, headers["Allow"]) == (405, "GET, HEAD")


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"", 400),
        (b"GET", 400),
        (b"GET /livez", 400),
        (b"GET /livez HTTP/1.1 x", 400),
        (b"GET /livez HTTP/2.0", 505),
        (b"\xff\xfe\x00", 400),
        (b"GET //[ HTTP/1.1", 400),
        (b"GET /livez HTTP/1.1\r\nHost: [", 400),
        (b"GET /livez?" + b"a=1&" * 20 + b" HTTP/1.1", 400),
        (b"GET /../livez HTTP/1.1", 404),
        (b"GET /livez HTTP/1.0", 200),
        (b"GET http://localhost/livez HTTP/1.1\r\nHost: localhost", 200),
    ],
)
def test_a_request_that_is_none_is_answered_with_what_is_wrong(pages, request_, status):
    assert int(pages.answer(request_, pages._main, "").split(b" ")[1]) == status


@given(st.binary(max_size=200) | st.text().map(lambda text: f"GET {text} HTTP/1.1\r\nHost: {text}".encode()))
@settings(max_examples=300, deadline=None)
def test_no_request_makes_a_page_fail(request_):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        door = node._HttpAddress(listener, frozenset(about.PAGES), about.OPEN)
    for token in (None, "a-token"):
        head, _, body = NodePages(None, token=token).answer(request_, door, "10.0.0.1").partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 ") and not head.startswith(b"HTTP/1.1 500")
        assert request_.startswith(b"HEAD ") or json.loads(body)


def test_a_page_that_fails_is_said_and_the_others_go_on(caplog):
    class Failing(memoire.Server):
        def stats(self):
            raise RuntimeError("a fault of ours")

    with Failing("tcp://127.0.0.1:0", SCHEMA) as server, NodePages("127.0.0.1:0", server) as pages:
        status, _, reply = ask(pages)
        assert (status, reply) == (500, {"error": "the page could not be made; the log says why"})
        assert "a fault of ours" in caplog.text
        assert ask(pages, "/livez")[0] == 200


def test_a_page_that_hangs_holds_up_no_probe():
    go_on, inside = threading.Event(), threading.Event()

    class Hanging(memoire.Server):
        def stats(self):
            inside.set()
            go_on.wait(DEADLINE)
            return super().stats()

    with contextlib.ExitStack() as stack:
        server = stack.enter_context(Hanging("tcp://127.0.0.1:0", SCHEMA))
        pages = stack.enter_context(NodePages("127.0.0.1:0", server))
        stack.callback(go_on.set)
        hanging = stack.enter_context(dial(pages))
        hanging.sendall(b"GET /status HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert inside.wait(DEADLINE)
        assert ask(pages, "/livez")[0] == ask(pages, "/readyz")[0] == 200
        waiting = [stack.enter_context(dial(pages)) for _ in range(node.MAX_WAITING)]
        for connection in waiting:
            connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        until(lambda: pages._page_requests.qsize() == node.MAX_WAITING)
        status, headers, reply = ask(pages, "/")  # one more request would only wait
        assert (status, headers["Retry-After"]) == (503, "1") and "16 requests wait" in reply["error"]
        go_on.set()
        assert all(hear(connection).startswith(b"HTTP/1.1 200") for connection in (hanging, *waiting))


def test_silent_connections_do_not_keep_anybody_out(server):
    # The pages close before these connections time out.
    with NodePages("127.0.0.1:0", server, request_timeout=60.0) as pages, contextlib.ExitStack() as stack:
        for _ in range(3 * node.MAX_CONNECTIONS):
            stack.enter_context(dial(pages)).sendall(b"GET /livez")
        assert ask(pages, "/livez")[0] == 200


def test_a_request_that_drips_is_ended_in_time(server):
    with NodePages("127.0.0.1:0", server, request_timeout=0.3) as pages, dial(pages) as connection:
        began = time.monotonic()
        with contextlib.suppress(ConnectionError):
            while time.monotonic() - began < DEADLINE:
                connection.sendall(b"x")
                connection.settimeout(0.02)
                with contextlib.suppress(TimeoutError):
                    if not connection.recv(1):
                        break
        assert 0.2 < time.monotonic() - began < node.REQUEST_TIMEOUT


def test_a_request_without_end_is_refused(pages):
    with dial(pages) as connection:
        connection.sendall(b"GET /livez HTTP/1.1\r\n" + b"x: y\r\n" * (node.MAX_REQUEST_BYTES // 6 + 1))
        assert hear(connection).startswith(b"HTTP/1.1 431 ")


@pytest.mark.slow
def test_who_does_not_take_the_answer_is_cut_off_and_holds_up_nobody(server):
    large = {**about.PAGES, "/": lambda node, request: about.Page(200, bytes(32 << 20))}
    with NodePages("127.0.0.1:0", server, pages=large, request_timeout=0.5) as pages, dial(pages) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert ask(pages, "/livez")[0] == 200
        until(lambda: not pages._connections)


def test_descriptors_do_not_grow_with_requests(pages):
    ask(pages)
    before = about.process_facts()["descriptors"]
    for _ in range(50):
        ask(pages, "/livez")
    until(lambda: about.process_facts()["descriptors"] <= before)


@pytest.mark.parametrize("address", ["", "8080", "localhost", "127.0.0.1:x", "127.0.0.1:-1", "127.0.0.1:70000", ":²"])
def test_what_is_no_address_is_refused(address):
    with pytest.raises(EndpointError, match="it is not HOST:PORT. Give HOST:PORT, such as '127.0.0.1:8080'"):
        NodePages(address)


def test_a_taken_address_is_refused_with_what_to_give_instead():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(EndpointError, match=f"cannot serve HTTP at '{address}': .*Give a free HOST:PORT"):
            NodePages(address)


def test_who_comes_in_the_moment_of_the_end_is_hung_up_on(server):
    for _ in range(10):
        pages = NodePages("127.0.0.1:0", server)
        with contextlib.ExitStack() as stack:
            connections = [stack.enter_context(dial(pages)) for _ in range(10)]
            pages.close()
            assert [hear(connection) for connection in connections] == [b""] * 10
        assert not pages._connections


def test_a_forked_child_does_not_keep_the_address(server):
    """The child would not answer: clients must learn at once that nothing listens."""
    pages = NodePages("127.0.0.1:0", server)
    stop, go_on = os.pipe()
    begun, begin = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(begin, b"x")
        os.close(go_on)
        os.read(stop, 1)
        os._exit(0)
    try:
        assert os.read(begun, 1)
        assert ask(pages, "/livez")[0] == 200
        pages.close()
        with pytest.raises(ConnectionRefusedError):
            dial(pages)
    finally:
        for end in (go_on, stop, begun, begin):
            os.close(end)
        assert os.waitpid(child, 0)[1] == 0


def test_no_address_opens_nothing():
    before = threading.active_count()
    with NodePages(None) as pages:
        assert pages.url is None and threading.active_count() == before
