"""Logic of the dashboard: curves, verdicts, pages of log lines, exports, settings, and the lifetime of logins."""

import asyncio
import contextlib
import csv
import importlib.util
import io
import json
import logging
import sqlite3
import sys
import threading
import time
import urllib.request
from dataclasses import make_dataclass
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.datastructures import Headers

from httpkit import ask
from memoire import loggers
from memoire.dashboard.collect import nodes, opened
from memoire.dashboard.collect.aggregator import TIMEOUT, Aggregator
from memoire.dashboard.collect.counters import CounterSums, RateWindow
from memoire.dashboard.collect.history import MAX_SERIES, History
from memoire.dashboard.collect.nodes import LogRow, NodeAddresses, NodeError
from memoire.dashboard.collect.verdict import LITTLE, verdicts
from memoire.dashboard.settings import Settings
from memoire.dashboard.terminal.log_tail import tail
from memoire.dashboard.web import access, pages
from memoire.dashboard.web.pages import ListenerHub
from memoire.dashboard.web.serve import Dashboard
from memoire.errors import HistoryError, ParameterError, ProtocolError
from memoire.net.addresses import NameResolver
from memoire.security.access import Tokens
from netkit import Book
from pageskit import one, well_but
from poolkit import Clock

NOW = 1_800_000_000.0


@given(
    st.lists(st.tuples(st.integers(0, 600), st.floats(-1e6, 1e6), st.booleans()), min_size=1, max_size=60),
    st.integers(2, 50),
)
@settings(max_examples=30)
def test_curves_keep_the_spikes_and_the_means_of_everything_that_was_added(added, points):
    history = History(None)
    for offset, value, is_flushed in added:
        history.add("r", NOW + offset, {"x": one(value)})
        if is_flushed:
            history.flush()
    curves = history.curves("r", ["x"], NOW, NOW + 601, points, NOW + 601)
    assert len(curves.time) <= points + 1 and curves.time == sorted(set(curves.time))
    for place, begin in enumerate(curves.time):
        mine = [value for offset, value, _ in added if begin <= NOW + offset < begin + curves.bucket]
        assert curves.least["x"][place] == min(mine) and curves.greatest["x"][place] == max(mine)
        assert curves.mean["x"][place] == pytest.approx(sum(mine) / len(mine), rel=1e-9, abs=1e-6)
    history.close()


def test_a_history_goes_on_in_its_file_which_one_dashboard_has_at_a_time(tmp_path):
    path = str(tmp_path / "history.db")
    for value in (1.0, 3.0):  # the ring merges two values in one second
        with History(path) as history:
            history.add("r", NOW, {"x": one(value), "steps": one(10 * value)})
            history.keep_run("r", NOW + value, {"n": value}, b"rows")
    history = History(path)
    curves = history.curves("r", ["x"], NOW, NOW + 10, 10, NOW + 10)
    assert curves.mean["x"] == [2.0] and curves.steps == [30.0]
    assert (curves.least["x"], curves.greatest["x"]) == ([1.0], [3.0])
    (row,) = history.runs()
    assert (row.name, row.began, row.seen, row.facts) == ("r", NOW + 1, NOW + 3, {"n": 3.0})
    assert history.ledger("r") == b"rows" and history.ledger("none") == b"" and not list(history.all_points("x", "r"))
    with pytest.raises(HistoryError, match="it is in use by this process"):
        History(path)
    history.close()
    History(path).close()


@pytest.mark.parametrize(
    ("content", "why"),
    [("PRAGMA user_version = 77", "it has format 77"), ("CREATE TABLE series (a)", "no such column")],
)
def test_a_file_that_is_no_history_is_named_once_and_not_left_locked(tmp_path, content, why):
    path = str(tmp_path / "history.db")
    with contextlib.closing(sqlite3.connect(path)) as other:
        other.execute(content)
        other.commit()
    for _ in range(2):
        with pytest.raises(HistoryError, match=f"cannot use its history file .*: {why}") as caught:
            History(path)
    assert str(caught.value).count(path) == 1


def test_an_export_has_every_moment_once_as_finely_as_it_is_kept(history):
    for minute in range(240):
        history.add("r", NOW + 60.0 * minute, {"x": one(float(minute)), "steps": one(100.0 * minute)})
    history.flush()
    history.prune(NOW + 240 * 60.0)
    rows = list(csv.reader(io.StringIO(b"".join(opened.csv_of(history, "r", ["x"])).decode())))
    assert rows[0] == ["time", "seconds", "steps", "x", "x (least)", "x (greatest)"]
    times, widths = [int(row[0]) for row in rows[1:]], [int(row[1]) for row in rows[1:]]
    assert all(begin + width <= after for begin, width, after in zip(times, widths, times[1:], strict=False))
    assert set(widths) == {1, 15}
    assert float(rows[-1][3]) == 239.0 and float(rows[-1][2]) == 23_900.0
    assert len(rows) - 1 == 240  # a point a minute: no point is lost or doubled


def test_a_file_that_is_no_history_is_refused_and_left_as_it_is(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("something else " * 100)
    with pytest.raises(HistoryError, match="Give another file"):
        History(str(path))
    assert path.read_text() == "something else " * 100


def test_names_beyond_the_bound_are_counted_and_not_kept(history):
    history.add("r", NOW, {f"x{n}": one(1.0) for n in range(MAX_SERIES + 2)})
    assert len(history.names("r")) == MAX_SERIES and history.left_out == 2


def test_an_exported_event_file_has_the_means_at_their_steps(history):
    assert loggers.crc32c(b"123456789") == 0xE3069283  # RFC 3720's check value
    for second in range(3):
        history.add("r", NOW + second, {"loss": one(second + 0.5), "steps": one(200.0 * second)})
    written = [loggers.scalars({"loss": second + 0.5}, 200 * second, NOW + second) for second in range(3)]
    assert b"".join(opened.events_of(history, "r", ["loss"])) == loggers.first_event() + b"".join(written)


def test_counters_of_nodes_add_up_over_their_restarts():
    sums = CounterSums()
    for life, value in ((1, 100), (1, 150), (2, 30), (2, 30), (2, 40), (3, 400)):
        sums.add_report("a", life, "x", value)
    sums.add_report("b", 1, "x", 1000)  # counts before the first observation are not new
    assert sums.values["x"] == 50 + 30 + 10 + 400
    for value in (10, 30, 20, 40):  # 20: an older count
        sums.add_report("far", None, "y", value)
    assert sums.values["y"] == 30


def test_rates_are_over_the_window_and_zero_before_there_is_one():
    ring = RateWindow(60.0)
    assert ring.rate("x") == 0.0
    for second in range(100):
        ring.add(float(second), {"x": second * 2.0 if second < 90 else 180.0 + (second - 90) * 10.0})
    assert ring.rate("x", 9.0) == 10.0
    assert ring.growth("none", 10.0) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("waiting", "skipped", "words"),
    [
        (0.05, 0.0, "go out; the learner waits 5% of its time."),
        (0.01, 0.0, "go out; neither side waits."),
        (0.1, 0.05, "the learner waits 10% of its time and actors skip 5% of their caches."),
        (0.0, LITTLE, "go out; neither side waits."),
        (0.0, LITTLE + 0.01, "go out; actors skip 3% of their caches."),
    ],
)
def test_nobody_is_said_to_wait_only_where_nobody_does(waiting, skipped, words):
    (verdict,) = verdicts(well_but(waiting_share=waiting, skipped_share=skipped))
    assert verdict.code == "balanced" and verdict.text.endswith(words)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"ratios": [(0.49, 1.0)]}, "learner_behind"),
        ({"ratios": [(0.5, 1.0)]}, "balanced"),
        ({"early_ratios": [(0.19, 8.0)]}, "settling"),
        ({"early_ratios": [(4.0, 8.0)]}, "balanced"),
        ({"sample_age": 60.0, "stale_after": 59.0}, "samples_old"),
        ({"inserts_wait": ["replay"]}, "inserts_limited"),
        ({"disk_trouble": "Server a: the disk is full since 3 s"}, "disk_full"),
    ],
)
def test_the_headline_names_what_holds_the_run_up(changes, code):
    findings = verdicts(well_but(**changes))
    assert findings[0].code == code and findings[0].text.endswith((".", "?"))


@pytest.mark.parametrize("down", [(), ("server-1",)])
def test_silent_actors_may_have_a_server_that_is_away(down):
    findings = verdicts(well_but(silent=2, nodes_down=down))
    (text,) = [each.text for each in findings if each.code == "actors_silent"]
    assert ("If their server is away, start it again. Otherwise look at their machine" in text) == bool(down)
    assert ("an end. Look at their machine and network; after --lost-after seconds" in text) != bool(down)


class ServerLogs:
    """Log lines of several servers, served like their /logs pages."""

    def __init__(self, lines):
        self.lines = lines  # server -> list of (index, received)
        self.away = set()

    def ask(self, paths):
        return {name: self.page(name, path) for name, path in paths.items()}

    def page(self, name, path):
        from urllib.parse import parse_qs, urlsplit

        if name in self.away:
            return NodeError("away")
        query = {key: value[0] for key, value in parse_qs(urlsplit(path).query).items()}
        after, before = int(query.get("after", 0)), int(query.get("before", 1 << 53))
        lines = [line for line in self.lines[name] if after < line[0] < before]
        lines = lines[::-1] if "newest" in query else lines
        rows = [
            {"index": index, "received": at, "time": "", "client": "", "label": "", "text": f"{name} {index}"}
            for index, at in lines[: int(query["most"])]
        ]
        return {"rows": rows, "is_all": len(lines) <= int(query["most"])}


books = st.dictionaries(
    st.sampled_from("abc"), st.lists(st.integers(0, 30), max_size=12).map(sorted), min_size=1, max_size=3
).map(lambda servers: ServerLogs({name: list(enumerate(times, 1)) for name, times in servers.items()}))


@given(books, st.integers(1, 7), st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3)), max_size=4))
@settings(max_examples=50)
def test_every_line_is_found_once_by_paging_back_and_every_new_one_by_following(book, most, later):
    servers = list(book.lines)

    def page(cursor, direction):
        return nodes.search(book.ask, servers, {}, nodes.read_cursor(cursor), direction, most)

    everything = {(name, index) for name, lines in book.lines.items() for index, _ in lines}
    first = newest = page("", "older")
    seen = [(row.server, row.index) for row in newest.rows]
    while newest.more:
        newest = page(newest.older, "older")
        assert newest.rows
        seen += [(row.server, row.index) for row in newest.rows]
    assert sorted(seen) == sorted(everything) and len(seen) == len(set(seen))

    for name, count in later:  # new lines
        if name in book.lines:
            begin = len(book.lines[name])
            book.lines[name] += [(begin + n + 1, 100 + n) for n in range(count)]
    followed, tail = [], first
    while True:
        tail = page(tail.newer, "newer")
        followed += [(row.server, row.index) for row in tail.rows]
        if not tail.rows:
            break
    now = {(name, index) for name, lines in book.lines.items() for index, _ in lines}
    assert sorted(followed) == sorted(now - everything)


def test_what_a_server_does_not_understand_is_the_fault_of_the_question_but_for_a_run_that_it_never_met():
    def ask(questions):
        return dict.fromkeys(questions, NodeError("level=9: one of the levels", 400))

    with pytest.raises(ParameterError, match="one of the levels"):
        nodes.search(ask, ["a"], {"level": "9"}, {}, "older", 10)
    page = nodes.search(ask, ["a"], {"run": "7"}, {}, "older", 10)
    assert (page.rows, page.missing) == ([], [])


@given(st.dictionaries(st.text(min_size=1, max_size=20), st.integers(0, 10**15 - 1), max_size=4))
def test_a_cursor_is_read_as_it_was_written(places):
    places = {name.encode("utf-8", "replace").decode(): index for name, index in places.items()}
    assert nodes.read_cursor(nodes.write_cursor(places)) == places


def test_the_newest_lines_come_first_and_who_is_away_is_named():
    book = ServerLogs({"a": [(1, 10.0), (2, 30.0)], "b": [(1, 20.0)]})
    book.away = {"b"}
    page = nodes.search(book.ask, ["a", "b"], {}, {}, "older", 10)
    assert page.missing == ["b"] and [row.received for row in page.rows] == [30.0, 10.0]
    book.away = set()
    page = nodes.search(book.ask, ["a", "b"], {}, {}, "older", 10)
    assert page.rows == [
        LogRow("a", 2, 30.0, "", "", "", "a 2"),
        LogRow("b", 1, 20.0, "", "", "", "b 1"),
        LogRow("a", 1, 10.0, "", "", "", "a 1"),
    ]


@pytest.mark.parametrize("text", ["x", "1", "1@", "@a", "1@a,", "1@a b", "-1@a", "9" * 20 + "@a", "\ud800"])
def test_a_cursor_that_is_none_is_refused(text):
    with pytest.raises(ParameterError, match="cursor"):
        nodes.read_cursor(text)


def test_names_are_looked_up_and_what_was_found_before_stays_while_the_name_server_is_silent():
    book = Book()
    addresses = NodeAddresses(["http://fixed:1/", "dns:servers:8080"], NameResolver(book, fresh=0.0))
    assert addresses.known_urls() == ["http://fixed:1"]
    one, two = "http://10.0.0.1:8080", "http://[::2]:8080"
    for known, expected, trouble in (
        ({"servers": ["10.0.0.1"]}, [one], {}),
        ({}, [one], {"servers:8080": "Name or service not known"}),
        ({"servers": ["::2", "10.0.0.1"]}, [one, two], {}),
    ):
        book.known = known
        addresses.resolve_names()
        assert addresses.known_urls() == ["http://fixed:1", *expected] and addresses.trouble == trouble


def test_a_name_server_that_is_silent_for_one_name_keeps_nobody_from_the_others():
    book = Book(here=["10.0.0.1"], late=["10.0.0.2"])
    book.hanging.add("late")
    addresses = NodeAddresses(["dns:late:8080", "dns:here:8080", "dns:here:http"], NameResolver(book, fresh=0.0))
    addresses.resolve_names(timeout=0.3)
    assert addresses.known_urls() == ["http://10.0.0.1:8080"]
    assert addresses.trouble["late:8080"] == "no answer from the name server within 0.3 s"
    assert addresses.trouble["here:http"] == "dns:here:http has no port: give its number, as in dns:NAME:8080"
    book.released.set()
    addresses.resolve_names(timeout=100.0)
    assert addresses.known_urls() == ["http://10.0.0.2:8080", "http://10.0.0.1:8080"] and list(addresses.trouble) == [
        "here:http"
    ]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"nodes": ()}, "at least one node.*--node"),
        ({"nodes": ("server-0:8080",)}, "http://HOST:PORT, or dns:NAME:PORT"),
        ({"open": "x.gz"}, "--open"),
        ({"listen": "0.0.0.0:8265"}, "a token"),
        ({"listen": "*:8265"}, "a token"),
        ({"poll_every": 0.0}, "poll_every and silent_after must be above 0 s, got 0 s"),
        ({"lost_after": 0.0}, "lost_after"),
        ({"stale_after": 0.0}, "stale_after"),
        ({"expected_servers": -1}, "expected_servers"),
        ({"goal_return": float("nan")}, "goal_return"),
        ({"root_path": "a"}, "begins with /"),
    ],
)
def test_settings_that_cannot_be_are_refused(changes, words):
    with pytest.raises(ParameterError, match=words):
        Settings(**{"nodes": ("http://a:1",)} | changes)


def test_secrets_are_not_shown():
    shown = Settings(
        nodes=("http://a:1",), listen="*:1", token="s3cret-s3cret-s3", node_token="n0de-n0de-n0de-n"
    ).visible_settings()
    assert shown["token"] is True and "s3cret" not in repr(shown) and "n0de" not in repr(shown)


def test_settings_that_are_not_set_are_shown_as_the_defaults():
    nodes = ("http://a:1",)
    assert Settings(nodes=nodes).visible_settings() == Settings.defaults() | {"nodes": nodes}


def part_of(total, effective, first, counts, **more):
    histogram = {"first": first, "counts": counts, "zeros": 1, "least": 0.0, "greatest": float(first)}
    facts = {"storage": "caches", "looked": 5, "held": 50, "population": 100.0, "total_weight": total}
    return facts | {"effective": effective, "weights": histogram, "ages": histogram} | more


def test_servers_parts_of_a_table_are_one_distribution():
    weights = [np.array([1.0, 1.0, 4.0]), np.array([2.0, 3.0, 3.0, 8.0])]
    parts = {
        f"server-{n}": part_of(each.sum(), each.sum() ** 2 / np.square(each).sum(), 8 * n, [1, 2])
        for n, each in enumerate(weights)
    }
    distribution = nodes.merged("default", parts, ["server-9"])
    both = np.concatenate(weights)
    assert distribution.effective == pytest.approx(both.sum() ** 2 / np.square(both).sum())
    assert (distribution.looked, distribution.held, distribution.population) == (10, 100, 200.0)
    assert distribution.weights.counts == [1, 2, 0, 0, 0, 0, 0, 0, 1, 2] and distribution.weights.bounds[0] == 1.0
    assert distribution.weights.bounds[8] == pytest.approx(10.0) and len(distribution.weights.bounds) == 11
    assert (distribution.weights.zeros, distribution.weights.least, distribution.weights.greatest) == (2, 0.0, 8.0)
    assert (distribution.servers, distribution.missing) == (["server-0", "server-1"], ["server-9"])


def test_actors_are_counted_in_buckets_of_equal_width():
    spread = nodes.spread_of("steps", [1.0, 2.0, 2.0, 9.0], 4)
    assert (spread.actors, spread.median, spread.mean, spread.histogram.counts) == (4, 2.0, 3.5, [3, 0, 0, 1])
    assert nodes.spread_of("steps", [], 4).histogram.bounds == []
    assert sum(nodes.spread_of("steps", [5.0, 5.0], 4).histogram.counts) == 2


@pytest.mark.parametrize(
    ("length", "status"),
    [
        (None, None),
        ("0", None),
        (str(access.MAX_BODY_BYTES), None),
        (str(access.MAX_BODY_BYTES + 1), 413),
        ("-1", 411),
        ("", 411),
    ],
)
def test_a_body_is_refused_by_its_length_before_it_is_read(length, status):
    refused = access.too_long(Headers({} if length is None else {"content-length": length}))
    assert (refused and refused.status_code) == status


@pytest.mark.parametrize(("every", "timeout"), [(0.0, 1.0), (1.0, 0.0), (-1.0, 1.0), (float("nan"), 1.0)])
def test_lines_are_followed_with_a_pause_and_a_deadline(every, timeout):
    with pytest.raises(ParameterError, match="--every and --timeout must be above 0 s"):
        tail(["http://127.0.0.1:1"], {}, every=every, timeout=timeout)


def test_names_are_looked_up_again_one_pause_after_the_last_time():
    waited = []

    class Closed(threading.Event):
        def wait(self, timeout):
            waited.append(timeout)
            self.set()

    slow = NameResolver(lambda host: time.sleep(0.2) or [])
    addresses = nodes.NodeAddresses(["dns:name:1"], slow)
    addresses._closed = Closed()
    addresses._run()
    assert len(waited) == 1 and 0.1 <= waited[0] <= nodes.RESOLVE_INTERVAL - 0.2


def test_a_dashboard_logs_no_request_and_ends_its_thread(caplog):
    caplog.set_level(logging.INFO)
    board = Dashboard(Settings(nodes=("http://127.0.0.1:1",), listen="127.0.0.1:0"))
    try:
        with urllib.request.urlopen(f"{board.url}/livez", timeout=60) as answer:  # noqa: S310
            names = {name.lower() for name in answer.headers}
    finally:
        board.close()
    assert not {"server", "date"} & names
    assert not [record for record in caplog.records if record.name == "uvicorn.access"]
    assert "memoire-dashboard-http" not in {thread.name for thread in threading.enumerate()}


def test_a_request_that_all_servers_refuse_is_answered_with_their_reason():
    with Dashboard(Settings(nodes=("http://127.0.0.1:1",), listen="127.0.0.1:0")) as board:
        board.aggregator.ask_servers = lambda paths: {"a": NodeError("text: too long", 400)}
        status, _, body = ask(board, "/api/logs")
    assert status == 400 and json.loads(body)["error"].endswith("text: too long")


def test_nodes_are_polled_again_at_most_one_pause_after_the_last_poll_began():
    polled, waited = [], []
    with contextlib.closing(Aggregator(Settings(nodes=("http://a:1",), poll_every=1000.0), History(None))) as watch:

        def poll(patience):
            polled.append(patience)
            if len(polled) == 3:
                watch._stopping.set()

        watch.poll, watch._stopping.wait = poll, waited.append
        watch._run()
    assert polled == 3 * [1000.0] and len(waited) == 3 and all(0.0 < each <= 1000.0 for each in waited)


def test_closing_waits_for_a_poll_as_long_as_a_node_may_take_for_its_page():
    aggregator, waited = Aggregator(Settings(nodes=("http://a:1",)), History(None)), []
    aggregator._thread = SimpleNamespace(ident=1, join=waited.append)
    aggregator.close()
    assert waited[0] > TIMEOUT


@pytest.mark.parametrize(("last", "numbers"), [(None, [3]), (1, [2, 3]), (3, []), (9, [3])])
def test_a_listener_that_comes_again_gets_what_it_missed_or_else_the_newest(last, numbers):
    hub, seen = ListenerHub(), make_dataclass("Seen", ["number"])
    for number in (1, 2, 3):
        hub.put(seen(number))
    hub.close()

    async def frames():
        return [frame async for frame in hub.listen(last)]

    _, *heard = asyncio.run(frames())
    assert heard == [b'id: %d\nevent: overview\ndata: {"number":%d}\n\n' % (number, number) for number in numbers]


def test_a_chart_library_of_an_unknown_version_is_left_out_with_a_warning(monkeypatch, tmp_path, caplog):
    (tmp_path / "vendor").mkdir()
    (tmp_path / "vendor" / "uplot.min.css").write_text("later")
    folders = [str(tmp_path)]
    spec = importlib.util.spec_from_file_location("youplot", tmp_path / "x.py", submodule_search_locations=folders)
    monkeypatch.setitem(sys.modules, "youplot", importlib.util.module_from_spec(spec))
    assert pages.vendored("uplot.min.css") == b""
    assert "uplot.min.css of the installed youplot has an unknown version" in caplog.text


OLD, NEW = "old-token-old-token", "new-token-new-token"


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "token"
    path.write_text(f"{OLD}\n{NEW}\n")
    return path


@pytest.fixture
def clock():
    return Clock(1000.0)


@pytest.fixture
def logins(path, clock):
    return access.Logins(Tokens(path), clock)


HERE = access.RequestOrigin("10.0.0.1", "10.0.0.1")


def by(number):
    """Return the headers of a browser with this number in its cookie."""
    return Headers({"cookie": f"other=1; {access.COOKIE}={number}"})


def is_in(logins, number):
    answers = {logins.has_login(by(number)), logins.admits(by(number), HERE), logins.still_admits(by(number))}
    assert len(answers) == 1
    return answers.pop()


def test_a_login_holds_for_a_week_and_not_a_moment_longer(logins, clock):
    number = logins.log_in(OLD, HERE)
    clock.now += 7 * 86_400 - 0.001
    assert is_in(logins, number)
    clock.now += 0.001
    assert not is_in(logins, number)


def test_a_login_too_many_ends_none_that_is_used_and_the_page_says_so(logins, path, clock):
    numbers = [logins.log_in(number % 2 and OLD or NEW, HERE) for number in range(access.MAX_LOGINS)]
    clock.now += access.LOGIN_IDLE_TIMEOUT
    path.write_text(f"{NEW}\n")
    assert [is_in(logins, number) for number in numbers[:4]] == [True, False, True, False]
    used = [logins.log_in(NEW, HERE) for _ in range(access.MAX_LOGINS - 2)]
    with pytest.raises(ProtocolError, match="1000 logins are known here, the most"):
        logins.log_in(NEW, HERE)
    assert [is_in(logins, number) for number in (*numbers[:4], *used)] == [True, False] * 2 + [True] * len(used)


def test_nobody_is_let_in_without_a_number_or_by_a_wrong_one(logins, path, clock):
    assert logins.log_in("wrong-token-wrong", HERE) is None
    number = logins.log_in(OLD, HERE)
    assert is_in(logins, number) and not is_in(access.Logins(Tokens(path), clock), number)  # logins of another process
    logins.log_out(by("unknown"))
    assert is_in(logins, number)
    for headers in ({}, {"cookie": ""}, {"cookie": f"{access.COOKIE}="}, {"cookie": f"{access.COOKIE}={OLD}"}):
        assert not logins.has_login(Headers(headers)) and not logins.still_admits(Headers(headers))
    assert logins.refused["http_token"] == 1  # a wrong number is no guess at a token


def test_whoever_came_with_a_token_in_a_header_stays_as_long_as_it_holds(logins, path):
    mine = Headers({"authorization": f"Bearer {OLD}"})
    assert logins.admits(mine, HERE) and logins.still_admits(mine)
    path.write_text(f"{NEW}\n")
    assert not logins.still_admits(mine)
