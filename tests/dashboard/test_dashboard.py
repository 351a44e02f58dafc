"""The dashboard over HTTP beside real nodes: exact totals, one poll for all browsers, and access control."""

import contextlib
import csv
import http.client
import io
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request

import pytest

import memoire
from httpkit import ask
from memoire.errors import EndpointError, InsecureWarning
from memoire.nodes.http import NodePages
from memoire.security.access import MAX_WRONG_OF_PROXY, MAX_WRONG_TOKENS, Tokens, WrongTokens
from netkit import DEADLINE, SCHEMA, record, until
from pageskit import Settings, three_actors, watch

pytestmark = pytest.mark.slow

TOKEN = "a-token-that-nobody-knows"


def get(board, path, **headers):
    status, _, body = ask(board, path, headers=headers)
    assert status == 200, body
    return json.loads(body)


@pytest.fixture(scope="module")
def server(shared_cluster):
    return shared_cluster.server(name="home", run="r-1")


@pytest.fixture(scope="module")
def clients(shared_cluster, server):
    return three_actors(shared_cluster, server, "<script>alert(1)</script>")


@pytest.fixture(scope="module")
def board(shared_cluster, server, clients):
    proxy = shared_cluster.proxy([server])
    with NodePages("127.0.0.1:0", server) as one, NodePages("127.0.0.1:0", proxy) as other:
        with watch(one, other, steps=120, expected_actors=5, goal_steps=1_000) as dashboard:
            yield dashboard


def test_an_overview_shows_the_whole_cluster(board):
    seen = until(lambda: (overview := get(board, "/api/overview"))["actors"]["active"] == 3 and overview)
    assert (seen["run"], seen["finished"], seen["missing"]) == ("r-1", False, [])
    assert (seen["totals"]["episodes"], seen["totals"]["steps"], seen["totals"]["accepted_caches"]) == (6, 120, 3)
    assert seen["actors"] == {"active": 3, "silent": 0, "lost": 0, "gone": 0, "expected": 5, "missing": 2, "idle": 0}
    assert seen["learning"]["return_mean"] == 20.0 and seen["learning"]["learner_scalars"] == {"loss": 0.5}
    assert seen["learning"]["client_scalars"]["epsilon"] == pytest.approx(0.2)
    (table,) = seen["tables"]
    assert (table["name"], table["samples"], table["held_caches"]) == ("default", 16, 3)
    assert table["full"] == table["held_bytes"] / table["byte_limit"]
    assert 0.0 < seen["freshness"]["effective"] <= 1.0
    assert {(node["role"], node["state"]) for node in seen["nodes"]} == {("server", "up"), ("proxy", "up")}
    assert seen["verdicts"][0]["code"] == "actors_missing" and "2 of 5" in seen["verdicts"][0]["text"]
    assert [learner["learner"] for learner in get(board, "/api/learners")] == ["server:home"]


def test_runs_stand_side_by_side(shared_cluster):
    server = shared_cluster.server(name="two", run="first")
    client = shared_cluster.client(server)
    with NodePages("127.0.0.1:0", server) as pages, watch(pages) as board:
        record(client, episodes=2, length=10)
        client.update(100.0)
        until(lambda: board.aggregator.newest.totals.steps == 20)
        server.begin_run("second")
        client.update(100.0)
        until(lambda: client.run == "second")
        record(client, episodes=1, length=5)
        client.update(100.0)
        until(lambda: (board.aggregator.newest.run, board.aggregator.newest.totals.steps) == ("second", 5))
        assert get(board, "/api/curves?run=first&name=steps")["greatest"]["steps"][-1] == 20.0
        until(lambda: get(board, "/api/curves?name=steps")["greatest"]["steps"][-1] == 5.0)
        runs = {row["name"]: row["facts"]["totals"]["steps"] for row in get(board, "/api/runs")}
        assert runs["first"] == 20 and "second" in runs
        assert get(board, "/api/overview")["runs"] == ["first", "second"]


def listen(board, last=None):
    """Return a connection to the stream, its response and its frames."""
    parts = urllib.parse.urlsplit(board.url)
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=DEADLINE)
    connection.request("GET", "/api/stream", headers={} if last is None else {"Last-Event-ID": str(last)})
    response = connection.getresponse()

    def frames():
        lines = []
        while line := response.readline():
            if line != b"\n":
                lines.append(line)
            elif lines:
                yield b"".join(lines)
                lines = []

    return connection, response, frames()


def test_all_tabs_get_the_same_bytes_of_one_poll(board, monkeypatch):
    with contextlib.ExitStack() as stack:
        tabs = [listen(board) for _ in range(20)]
        for connection, response, _ in tabs:
            stack.callback(connection.close)
            assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        until(lambda: board.hub.listeners >= 20)
        begin = get(board, "/api/overview")["number"]
        heard = []
        for _, _, frames in tabs:
            assert next(frames) == b"retry: 2000\n"
            # Frames after the moment when all tabs listened.
            later = (frame for frame in frames if int(frame.split(b"\n")[0].removeprefix(b"id: ")) > begin + 1)
            heard.append([next(later) for _ in range(3)])
        assert all(each == heard[0] for each in heard)
        first = json.loads(heard[0][0].split(b"data: ")[1])
        assert set(first) == set(get(board, "/api/overview"))
    until(lambda: board.hub.listeners == 0)


def test_too_many_listeners_are_told_to_ask_now_and_then(board, monkeypatch):
    monkeypatch.setattr("memoire.dashboard.web.api.MAX_LISTENERS", 0)
    status, headers, body = ask(board, "/api/stream")
    assert (status, headers["Retry-After"]) == (503, "10") and b"/api/overview" in body


def test_a_dashboard_ends_at_once_though_somebody_listens(server):
    with NodePages("127.0.0.1:0", server) as pages:
        board = watch(pages)
        connection, _, frames = listen(board)
        with contextlib.closing(connection):
            next(frames)
            began = time.monotonic()
            board.close()
            assert time.monotonic() - began < DEADLINE
            assert all(frame.startswith((b"id: ", b": ")) for frame in frames)  # the stream ends
        assert board._thread not in threading.enumerate()


def test_actors_are_in_the_order_of_their_names_and_of_the_numbers_in_them(shared_cluster):
    server = shared_cluster.server(name="named", run="n")
    names = ["actor-2", "actor-10", "actor-9", "b"]
    for name in names:
        record(client := shared_cluster.client(server, name=name), episodes=1, length=20)
        client.update(100.0)
    with NodePages("127.0.0.1:0", server) as pages, watch(pages) as board:

        def by_name(order):
            return [row["name"] for row in get(board, f"/api/actors?sort=label&order={order}")["rows"]]

        until(lambda: by_name("up") == ["actor-2", "actor-9", "actor-10", "b"])
        assert by_name("down") == by_name("up")[::-1]


def test_actors_are_sorted_filtered_and_paged_with_honest_totals(board, clients):
    page = get(board, "/api/actors?sort=episodes&order=down&limit=2")
    assert (page["total"], page["matching"], [row["episodes"] for row in page["rows"]]) == (3, 3, [3, 2])
    rest = get(board, "/api/actors?sort=episodes&order=down&limit=2&offset=2")
    assert [row["episodes"] for row in rest["rows"]] == [1]
    mine = get(board, f"/api/actors?text={clients[0].client_id.hex()[:8].upper()}")
    assert (mine["total"], mine["matching"]) == (3, 1) and mine["rows"][0]["steps"] == 20
    assert get(board, "/api/actors?state=gone")["matching"] == 0
    assert get(board, "/api/actors?home=home&limit=1")["matching"] == 3
    by_return = get(board, "/api/actors?sort=return_mean")["rows"]
    assert [row["client"] for row in by_return] == sorted(client.client_id.hex() for client in clients)  # equal: by id


def test_one_actor_is_shown_with_its_accounts_facts_and_episodes(board, clients):
    actor = until(lambda: (each := get(board, f"/api/actors/{clients[1].client_id.hex()}"))["facts"] and each)
    assert actor["actor"]["host"] == socket.gethostname()
    assert [home["home"] for home in actor["homes"]] == ["home"] and actor["homes"][0]["steps"] == 40
    assert actor["facts"]["scalars"] == {"epsilon": 0.2}
    assert [(episode["length"], episode["returned"]) for episode in actor["episodes"]] == [(20, 20.0)] * 2
    status, _, body = ask(board, "/api/actors/" + "0" * 32)
    assert status == 404 and "no actor" in json.loads(body)["error"]


def test_log_lines_of_all_servers_are_searched_and_stay_text(board, clients):
    page = get(board, "/api/logs?text=script&limit=2")
    assert len(page["rows"]) == 2 and page["more"] and page["missing"] == []
    assert "<script>" in page["rows"][0]["text"]
    rest = get(board, "/api/logs?text=script&cursor=" + urllib.parse.quote(page["older"]))
    texts = [row["text"] for row in (*page["rows"], *rest["rows"])]
    assert sorted(texts) == [f"line of {n} <script>alert(1)</script>" for n in (1, 2, 3)]
    _, headers, _ = ask(board, "/api/logs")
    assert headers["Content-Type"] == "application/json" and headers["X-Content-Type-Options"] == "nosniff"
    clients[0].log("and another")
    clients[0].update(100.0)
    newer = get(board, "/api/logs?direction=newer&cursor=" + urllib.parse.quote(page["newer"]))
    assert [row["text"] for row in newer["rows"]] == ["and another"]
    mine = get(board, f"/api/logs?client={clients[2].client_id.hex()}")
    assert [row["client"] for row in mine["rows"]] == [clients[2].client_id.hex()]
    assert ask(board, "/api/logs?server=none")[0] == 404
    assert get(board, "/api/logs?run=none") | {"older": "", "newer": ""} == {
        "rows": [], "older": "", "newer": "", "more": False, "missing": []
    }  # fmt: skip
    assert ask(board, "/api/logs?cursor=none")[0] == 422


def test_a_held_sample_is_shown_with_its_arrays(board, clients):
    for path in ("/api/sample", "/api/sample?server=home&table=default"):
        sample = get(board, path)
        assert (sample["server"], sample["table"]) == ("home", "default")
        assert sample["client"] in {client.client_id.hex() for client in clients}
        assert {"obs", "action", "reward"} <= set(sample["arrays"]) and 0.0 < sample["probability"] <= 1.0
    assert ask(board, "/api/sample?server=none")[0] == 404
    assert b"there is no table 'none'" in ask(board, "/api/sample?server=home&table=none")[2]


def test_settings_show_schema_and_parameters_and_no_secret(board):
    settings = until(lambda: (each := get(board, "/api/settings"))["servers"] and each)
    assert settings["servers"]["home"]["tables"]["default"]["schema"] == json.loads(SCHEMA.to_json())
    assert settings["dashboard"]["expected_actors"] == 5 and settings["dashboard"]["token"] is False


def test_curves_are_exported(board):
    until(lambda: "client.epsilon" in get(board, "/api/figures"))
    status, headers, body = ask(board, "/api/export.csv?name=steps&name=client.epsilon")
    assert status == 200 and headers["Content-Disposition"] == 'attachment; filename="memoire-r-1.csv"'
    rows = list(csv.DictReader(io.StringIO(body.decode())))
    assert float(rows[-1]["steps"]) == 120.0 and float(rows[-1]["client.epsilon"]) == pytest.approx(0.2)
    status, headers, body = ask(board, "/api/export.tfevents")
    assert status == 200 and b"brain.Event:2" in body and b"client.epsilon" in body


def test_the_dashboards_metrics_are_its_catalogue(board):
    from memoire.dashboard.web import serve

    text = ask(board, "/metrics")[2].decode()
    names = {name for name in re.findall(r"^# HELP (\S+) ", text, re.M) if not name.startswith(("process_", "python_"))}
    assert names == serve.names()
    assert "\nmemoire_cluster_steps_total 120.0\n" in text and 'memoire_cluster_actors{state="active"} 3.0' in text
    if shutil.which("promtool"):
        done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True, timeout=100)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_what_is_open_to_everybody_is_said_of_each_node_and_of_the_dashboard(board):
    assert get(board, "/api/overview")["open"] == []
    with pytest.warns(InsecureWarning):
        server = memoire.Server("tcp://*:0", SCHEMA, name="wide")
        pages = NodePages("*:0", server)
    with server, pages:
        here = f"http://localhost:{pages.address.rpartition(':')[2]}"
        with watch(here, listen="*:0", insecure=True) as board:
            until(lambda: board.aggregator.newest.nodes[0].open)
            addresses = [server.endpoint, server.push_endpoint, server.pub_endpoint, f"http://{pages.address}"]
            (row,) = get(board, "/api/nodes")
            assert row["open"] == addresses and row["keys"] is False
            shown = get(board, "/api/overview")["open"]
            assert shown == [*(f"wide {address}" for address in addresses), "dashboard http://*:0"]
            assert "\nmemoire_open_endpoints 1.0\n" in ask(board, "/metrics")[2].decode()


@pytest.fixture(scope="module")
def guarded_board(server, clients):
    with NodePages("127.0.0.1:0", server, token="node-token-node-token") as pages:
        options = {"token": TOKEN, "node_token": "node-token-node-token", "hosts": ("board.example",)}
        with watch(pages, steps=120, **options) as board:
            yield board


@pytest.fixture
def guarded(guarded_board):
    gate = guarded_board.gate
    gate._guesses = WrongTokens(lambda: 1000.0)  # forgets the wrong tokens of other tests
    gate._guesses_of_proxies, gate._proven = WrongTokens(lambda: 1000.0, MAX_WRONG_OF_PROXY), {}
    return guarded_board


PATHS = (
    "/api/overview", "/api/stream", "/api/nodes", "/api/learners", "/api/settings", "/api/actors", "/api/episodes",
    "/api/figures", "/api/curves?name=steps", "/api/runs", "/api/export.csv", "/api/export.tfevents", "/api/logs",
    "/api/openapi.json", "/api/sample?server=home", "/api/distribution", "/api/spread", "/api/events", "/api/export.run",
)  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
def test_without_the_token_nobody_gets_in(guarded, path):
    for headers in ({}, {"Authorization": "Bearer " + TOKEN[:-1]}, {"Cookie": "memoire_session=" + TOKEN}):
        status, answered, body = ask(guarded, path, headers=headers)
        assert status == 401 and answered["WWW-Authenticate"] == "Bearer" and TOKEN.encode() not in body
        assert answered["Content-Security-Policy"].startswith("default-src 'none'")


def test_every_path_of_the_api_is_tried_above(guarded):
    described = json.loads(ask(guarded, "/api/openapi.json", headers={"Authorization": f"Bearer {TOKEN}"})[2])["paths"]
    tried = {path.partition("?")[0] for path in PATHS} | {"/api/actors/{client}"}
    free = {"/api/login", "/api/logout", "/api/session", "/metrics", "/livez", "/readyz"}
    assert set(described) <= tried | free
    assert all(described[path]["get"]["description"] for path in tried - {"/api/openapi.json"})


def test_the_token_lets_in_as_a_header_and_as_a_cookie_that_no_script_reads(guarded):
    assert get(guarded, "/api/overview", Authorization=f"Bearer {TOKEN}")["run"] == "r-1"
    assert get(guarded, "/api/session") == {"needs_token": True, "is_let_in": False, "software": "memoire 0.1.0"}
    status, cookie = log_in(guarded)
    assert status == 204 and "HttpOnly" in cookie and "SameSite=strict" in cookie and TOKEN not in cookie
    assert get(guarded, "/api/overview", Cookie=cookie.partition(";")[0])["run"] == "r-1"
    assert get(guarded, "/api/session", Cookie=cookie.partition(";")[0])["is_let_in"] is True
    assert "Secure" not in cookie and "Max-Age=604800" in cookie and "Path=/" in cookie
    for scheme in ("https", "http"):  # a proxy may end TLS
        cookie = log_in(guarded, Origin=f"{scheme}://board.example", Host="board.example")[1]
        assert cookie and ("Secure" in cookie) == (scheme == "https")


def log_in(board, token=TOKEN, **headers):
    """Return the status of a login, and its cookie."""
    kind = {"Content-Type": "application/json"} | headers
    status, answered, body = ask(board, "/api/login", "POST", kind, json.dumps({"token": token}))
    assert TOKEN.encode() not in body
    return status, answered.get("Set-Cookie", "")


def test_who_logs_out_is_out_wherever_his_cookie_has_gone(guarded):
    cookie = log_in(guarded)[1].partition(";")[0]
    other = log_in(guarded)[1].partition(";")[0]
    assert ask(guarded, "/api/overview", headers={"Cookie": cookie})[0] == 200
    status, answered, _ = ask(guarded, "/api/logout", "POST", {"Cookie": cookie})
    assert status == 204 and "Max-Age=0" in answered["Set-Cookie"]
    assert ask(guarded, "/api/overview", headers={"Cookie": cookie})[0] == 401
    assert ask(guarded, "/api/overview", headers={"Cookie": other})[0] == 200


def test_who_guesses_at_the_dashboard_has_to_wait(guarded, times):
    times(wrong_token=0.0)
    cookie = log_in(guarded)[1].partition(";")[0]
    before = guarded.gate.refused["http_guessing"]
    for number in range(MAX_WRONG_TOKENS):  # logins and headers share a count
        if number % 2:
            assert log_in(guarded, f"wrong-{number}")[0] == 403
        else:
            assert ask(guarded, "/api/overview", headers={"Authorization": f"Bearer {number}"})[0] == 401
    assert log_in(guarded)[0] == 429
    status, answered, _ = ask(guarded, "/api/overview", headers={"Authorization": f"Bearer {TOKEN}"})
    assert status == 429 and int(answered["Retry-After"]) >= 1
    assert guarded.gate.refused["http_guessing"] == before + 2
    assert ask(guarded, "/api/overview", headers={"Cookie": cookie})[0] == 200  # a valid login continues
    assert 'memoire_refused_peers_total{reason="http_guessing"}' in ask(guarded, "/metrics")[2].decode()


def test_who_guesses_under_changing_addresses_of_a_proxy_has_to_wait_and_disturbs_nobody_who_had_the_token(guarded):
    def give(token, address):
        headers = {"Authorization": f"Bearer {token}", "X-Forwarded-For": address}
        return ask(guarded, "/api/overview", headers=headers)[0]

    assert give(TOKEN, "198.51.100.7") == 200
    answers = [give("wrong", f"203.0.113.{number}") for number in range(MAX_WRONG_OF_PROXY + 1)]
    assert answers == MAX_WRONG_OF_PROXY * [401] + [429]
    assert give(TOKEN, "198.51.100.8") == 429  # answers equal those to guesses
    assert give(TOKEN, "198.51.100.7") == 200
    assert get(guarded, "/api/overview", Authorization=f"Bearer {TOKEN}")["run"] == "r-1"  # sent without the proxy
    assert [give("wrong", "198.51.100.7") for _ in range(MAX_WRONG_TOKENS + 1)] == MAX_WRONG_TOKENS * [401] + [429]


def test_one_guesser_behind_a_proxy_is_slowed_alone(guarded):
    wrong = {"Authorization": "Bearer wrong", "X-Forwarded-For": "203.0.113.1"}
    answers = [ask(guarded, "/api/overview", headers=wrong)[0] for _ in range(2 * MAX_WRONG_OF_PROXY)]
    assert answers.count(401) == MAX_WRONG_TOKENS
    right = {"Authorization": f"Bearer {TOKEN}", "X-Forwarded-For": "203.0.113.2"}
    assert ask(guarded, "/api/overview", headers=right)[0] == 200


def test_a_wrong_token_is_answered_late(guarded, times):
    times(wrong_token=0.2)
    began = time.monotonic()
    assert log_in(guarded, "wrong")[0] == 403 and time.monotonic() - began > 0.2


def test_a_token_that_changes_in_its_file_ends_logins_and_streams_that_the_old_one_began(server, tmp_path):
    path, new = tmp_path / "token", "another-token-another"
    node_path = tmp_path / "node-token"
    path.write_text(TOKEN)
    node_path.write_text(TOKEN)
    with NodePages("127.0.0.1:0", server, token=Tokens(node_path)) as pages:
        with watch(pages, token=Tokens(path), node_token=Tokens(node_path), probes="127.0.0.1:0") as board:
            cookie = log_in(board)[1].partition(";")[0]
            stream = urllib.request.Request(f"{board.url}/api/stream", headers={"Cookie": cookie})
            with urllib.request.urlopen(stream, timeout=100.0) as heard:
                assert heard.readline() == b"retry: 2000\n"
                path.write_text(new)
                while heard.readline():
                    pass  # read until the stream ends
            assert ask(board, "/api/overview", headers={"Cookie": cookie})[0] == 401
            assert log_in(board)[0] == 403 and log_in(board, new)[0] == 204
            node_path.write_text(new)  # the token changes at node and dashboard
            number = board.aggregator.newest.number
            until(lambda: board.aggregator.newest.number > number + 2 and not board.aggregator.newest.missing)
            # Probes and metrics have their own port; with that port, the dashboard's port asks for a token for metrics.
            for name, status in (("/readyz", 200), ("/metrics", 200), ("/api/overview", 404)):
                assert ask(board.probes_url, name)[0] == status
            assert [ask(board, name)[0] for name in ("/livez", "/metrics")] == [200, 401]


@pytest.mark.parametrize(
    ("host", "status"), [("evil.example", 421), ("", 421), ("board.example:8265", 200), ("localhost", 200)]
)
def test_it_answers_to_its_own_names_only(guarded, host, status):
    before = guarded.gate.refused["http_name"]
    assert ask(guarded, "/api/overview", headers={"Host": host, "Authorization": f"Bearer {TOKEN}"})[0] == status
    assert guarded.gate.refused["http_name"] == before + (status == 421)
    assert ask(guarded, "/livez", headers={"Host": host})[0] == 200  # probes use the address as host


@pytest.mark.parametrize(
    "headers", [{"Origin": "http://evil.example"}, {"Sec-Fetch-Site": "cross-site"}, {"Origin": "null"}]
)
def test_a_strange_page_cannot_log_anybody_in_or_out(guarded, headers):
    kind, before = {"Content-Type": "application/json"} | headers, guarded.gate.refused["http_origin"]
    for path in ("/api/login", "/api/logout"):
        assert ask(guarded, path, "POST", kind, json.dumps({"token": TOKEN}))[0] == 403
    assert guarded.gate.refused["http_origin"] == before + 2


@pytest.mark.parametrize(
    ("headers", "body", "status"),
    [
        ({"Content-Length": str(1 << 40)}, None, 413),
        ({"Content-Length": "9000"}, b"x" * 9000, 413),
        ({"Transfer-Encoding": "chunked"}, None, 411),
    ],
)
def test_a_body_that_is_too_long_is_refused_before_it_is_read(guarded, headers, body, status):
    for path in ("/api/login", "/api/logout", "/api/none"):
        assert ask(guarded, path, "POST", {"Content-Type": "application/json"} | headers, body)[0] == status


def test_who_connects_and_says_nothing_is_cut_off(server, times):
    times(browser_request=0.2, browser_body=0.2)
    login = b"POST /api/login HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 99\r\n"
    with NodePages("127.0.0.1:0", server) as pages, watch(pages, token=TOKEN) as board:
        parts = urllib.parse.urlsplit(board.url)
        whole = b"GET /api/session HTTP/1.1\r\nHost: localhost\r\n\r\n"
        for data in (b"", b"GET /api/session HTTP/1.1\r\n", whole + b"GET /", login + b"\r\n{"):
            with socket.create_connection((parts.hostname, parts.port), timeout=100.0) as silent:
                silent.sendall(data)
                while silent.recv(4096):
                    pass  # read until the server closes the connection
        assert ask(board, "/api/session")[0] == 200


def test_nothing_can_be_changed(board):
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        for path in ("/api/overview", "/api/actors", "/api/settings", "/metrics"):
            assert ask(board, path, method)[0] == 405


@pytest.mark.parametrize(
    "path",
    ["actors?limit=0", "actors?sort=none", "actors/xyz", "curves", "curves?name=x&points=1", "curves?name=x&since=nan",
     "curves?name=x&since=-1", "logs?client=xyz", "none"],
)  # fmt: skip
def test_what_cannot_be_asked_is_refused_in_words(board, path):
    status, _, body = ask(board, f"/api/{path}")
    assert status == (404 if path == "none" else 422) and json.loads(body)["error"]


def test_before_the_first_look_it_is_alive_and_not_ready():
    from memoire.dashboard.collect.aggregator import Aggregator
    from memoire.dashboard.collect.history import History

    aggregator = Aggregator(Settings(nodes=("http://127.0.0.1:1",)), History(None))
    assert aggregator.liveness() == [] and aggregator.readiness() == ["starting: the nodes have not been asked yet"]
    assert aggregator.poll(5.0).verdicts[0].code == "no_node"
    assert aggregator.readiness() == []
    aggregator.close()


def test_an_address_that_is_taken_is_an_error_of_ours(board):
    with pytest.raises(EndpointError, match="serve HTTP at"):
        watch("http://127.0.0.1:1", listen=urllib.parse.urlsplit(board.url).netloc)


@pytest.mark.processes
def test_the_command_prints_its_address_and_ends_when_told(server, tmp_path):
    token = tmp_path / "token"
    token.write_text(TOKEN)
    with NodePages("127.0.0.1:0", server) as pages:
        command = [sys.executable, "-m", "memoire", "dashboard", pages.url, "--listen", "127.0.0.1:0"]
        command += ["--history", str(tmp_path / "history.db"), "--token-file", str(token)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            url = process.stdout.readline().removeprefix("memoire dashboard: ").strip()
            until(lambda: ask(url, "/readyz")[0] == 200)
            assert get(url, "/api/overview", Authorization=f"Bearer {TOKEN}")["totals"]["steps"] >= 0
            process.send_signal(signal.SIGTERM)
            assert process.wait(100.0) == 0
    assert (tmp_path / "history.db").exists()
