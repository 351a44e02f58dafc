"""The parts of the dashboard that decide: ledgers that are merged for ever, curves, verdicts, pages of log lines, exports."""

import contextlib
import csv
import io
import math
import sqlite3
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memoire import loggers
from memoire.dashboard.collect import nodes, opened
from memoire.dashboard.collect.actors import KeptRun
from memoire.dashboard.collect.cluster import until
from memoire.dashboard.collect.counters import CounterSums, RateWindow
from memoire.dashboard.collect.history import MAX_SERIES, History
from memoire.dashboard.collect.nodes import LogRow, NodeAddresses, NodeError
from memoire.dashboard.collect.verdict import verdicts
from memoire.dashboard.settings import Settings
from memoire.errors import HistoryError, ParameterError
from memoire.net.addresses import NameResolver
from memoire.wire.rows import ACCOUNT
from netkit import Book
from pageskit import account, one, well_but

# ---------------------------------------------------------------------------------------------------------- ledgers


class Servers:
    """Two servers without state folders, and what clients really did: the slow truth."""

    def __init__(self):
        self.life = [1, 1]
        self.accounts = [{}, {}]  # client -> [steps, accepted caches, since]
        self.steps, self.caches = {}, 0
        self.said = []  # rows as they were read, for answers that come late
        self.now = 1.0

    def work(self, client, home, steps, caches):
        self.now += 1.0
        self.steps[client] = self.steps.get(client, 0) + steps
        self.caches += caches
        mine = self.accounts[home].setdefault(client, [0, 0, self.life[home]])
        mine[0], mine[1] = self.steps[client], mine[1] + caches

    def forget(self, home):
        self.life[home] += 1
        self.accounts[home] = {}

    def read(self, home):
        mine = self.accounts[home].items()
        rows = [account(c, home, steps=s, accepted=a, seen=self.now, since=opened) for c, (s, a, opened) in mine]
        self.said.append(np.concatenate(rows) if rows else np.empty(0, ACCOUNT))
        return self.said[-1]


steps_of_it = st.one_of(
    st.tuples(st.just("work"), st.integers(0, 3), st.integers(0, 1), st.integers(0, 9), st.integers(0, 2)),
    st.tuples(st.just("forget"), st.integers(0, 1)),
    st.tuples(st.just("late"), st.integers(0, 50)),
    st.tuples(st.just("restart")),
)


@given(st.lists(steps_of_it, max_size=40))
@settings(max_examples=60)
def test_kept_totals_are_what_clients_did_though_servers_forget_and_answers_come_late(walk):
    """Each server is read before it forgets, as the dashboard does every two seconds; an answer may come again later."""
    servers, kept = Servers(), KeptRun()
    for step, *arguments in walk:
        if step == "work":
            servers.work(*arguments)
        elif step == "forget":
            kept.take(servers.read(*arguments))
            servers.forget(*arguments)
        elif step == "late" and servers.said:
            kept.take(servers.said[arguments[0] % len(servers.said)])
        elif step == "restart":
            kept = KeptRun(np.frombuffer(kept.rows.tobytes(), ACCOUNT))
    for home in (0, 1):
        kept.take(servers.read(home))
    totals = kept.totals()
    assert totals.steps == sum(servers.steps.values())
    assert totals.accepted_caches == servers.caches
    assert totals.clients == len(servers.steps) == len(kept.clients())


def test_what_a_drained_server_handed_over_counts_once():
    kept = KeptRun()
    mine = account(7, 0, steps=50, accepted=3, seen=2.0, since=11)
    kept.take(mine)
    kept.take(np.concatenate([mine, account(7, 1, steps=80, accepted=2, seen=3.0, since=21)]))
    assert (kept.totals().steps, kept.totals().accepted_caches, kept.totals().clients) == (80, 5, 1)


# ---------------------------------------------------------------------------------------------------------- history

NOW = 1_800_000_000.0


@pytest.fixture
def history():
    made = History(None)
    yield made
    made.close()


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


def test_a_history_goes_on_in_its_file(tmp_path):
    path = str(tmp_path / "history.db")
    for value in (1.0, 3.0):  # the same second twice: merged, not replaced
        history = History(path)
        history.add("r", NOW, {"x": one(value), "steps": one(10 * value)})
        history.keep_run("r", NOW + value, {}, b"rows")
        history.close()
    history = History(path)
    curves = history.curves("r", ["x"], NOW, NOW + 10, 10, NOW + 10)
    assert curves.mean["x"] == [2.0] and curves.steps == [30.0]
    assert (curves.least["x"], curves.greatest["x"]) == ([1.0], [3.0])
    (row,) = history.runs()
    assert (row.name, row.began, row.seen) == ("r", NOW + 1, NOW + 3)
    assert history.ledger("r") == b"rows" and history.ledger("none") == b""
    history.close()


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
        with pytest.raises(HistoryError, match=f"cannot be used: {why}") as caught:
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
    assert len(rows) - 1 == 240  # a point a minute: none is lost, none is doubled


def test_a_file_that_is_no_history_is_refused_and_left_as_it_is(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("something else " * 100)
    with pytest.raises(HistoryError, match="Give another file"):
        History(str(path))
    assert path.read_text() == "something else " * 100


def test_names_beyond_the_bound_are_counted_and_not_kept(history):
    history.add("r", NOW, {f"x{n}": one(1.0) for n in range(MAX_SERIES + 2)})
    assert len(history.names("r")) == MAX_SERIES and history.left_out == 2


def test_an_event_file_is_read_by_the_rules_of_its_format(history):
    assert loggers.crc32c(b"123456789") == 0xE3069283  # RFC 3720's check value
    for second in range(3):
        history.add("r", NOW + second, {"loss": one(second + 0.5), "steps": one(200.0 * second)})
    data = b"".join(opened.events_of(history, "r", ["loss"]))
    records = []
    while data:
        (length,) = struct.unpack_from("<Q", data)
        body = data[12 : 12 + length]
        assert struct.unpack_from("<I", data, 8)[0] == loggers.masked(data[:8])
        assert struct.unpack_from("<I", data, 12 + length)[0] == loggers.masked(body)
        records.append(body)
        data = data[16 + length :]
    assert b"brain.Event:2" in records[0] and len(records) == 4
    assert records[3][:9] == b"\x09" + struct.pack("<d", NOW + 2)
    assert records[3][9:12] == b"\x10\x90\x03"  # step 400 as a varint
    assert records[3].endswith(b"\x0a\x04loss\x15" + struct.pack("<f", 2.5))


# ------------------------------------------------------------------------------------------------------------ rates


def test_counters_of_nodes_add_up_over_their_restarts():
    sums = CounterSums()
    for life, value in ((1, 100), (1, 150), (2, 30), (2, 30), (2, 40), (3, 400)):
        sums.saw("a", life, "x", value)
    sums.saw("b", 1, "x", 1000)  # what it had when it was first seen is not new
    assert sums.values["x"] == 50 + 30 + 10 + 400
    for value in (10, 30, 20, 40):  # 20: an older word of it
        sums.saw("far", None, "y", value)
    assert sums.values["y"] == 30


def test_rates_are_over_the_window_and_zero_before_there_is_one():
    ring = RateWindow(60.0)
    assert ring.rate("x") == 0.0
    for second in range(100):
        ring.add(float(second), {"x": second * 2.0 if second < 90 else 180.0 + (second - 90) * 10.0})
    assert ring.rate("x", 9.0) == 10.0
    assert ring.gained("none", 10.0) == (0.0, 0.0)


def test_a_forecast_is_none_where_nothing_moves():
    assert (until(100.0, 10.0), until(100.0, 0.0), until(100.0, -1.0), until(-5.0, 1.0)) == (10.0, None, None, 0.0)
    assert until(math.inf, 1.0) is None


# ---------------------------------------------------------------------------------------------------------- verdicts


def test_nobody_is_said_to_wait_only_where_nobody_does():
    assert verdicts(well_but())[0].text.endswith("go out; the learner waits 5% of its time.")
    assert verdicts(well_but(waiting_share=0.01))[0].text.endswith("go out; nobody waits.")
    some = well_but(waiting_share=0.1, skipped_share=0.05)
    assert verdicts(some)[0].text.endswith("the learner waits 10% of its time and actors skip 5% of their caches.")


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({}, "balanced"),
        ({"nodes_down": ("a", "b"), "nodes": 0}, "no_node"),
        ({"servers_up": 0, "nodes_down": ("a",)}, "no_server"),
        ({"nodes_down": ("a",)}, "node_down"),
        ({"unready": ("a",)}, "node_unready"),
        ({"active": 0}, "waiting_for_actors"),
        ({"active": 0, "gone": 2}, "actors_gone"),
        ({"active": 0, "gone": 2, "lost": 1}, "no_actors"),
        ({"expected_servers": 2}, "servers_missing"),
        ({"expected_proxies": 2, "proxies_up": 1}, "proxies_missing"),
        ({"is_still": True}, "no_inserts"),
        ({"nothing_arrives": True}, "no_caches"),
        ({"ratios": [(0.49, 1.0)]}, "learner_behind"),
        ({"ratios": [(0.5, 1.0)]}, "balanced"),
        ({"early_ratios": [(0.19, 8.0)]}, "settling"),
        ({"early_ratios": [(4.0, 8.0)]}, "balanced"),
        ({"sample_age": 60.0, "stale_after": 59.0}, "samples_old"),
        ({"outdated": 1}, "models_behind"),
        ({"rejected_share": 0.5}, "caches_rejected"),
        ({"expected": 6}, "actors_missing"),
        ({"silent": 2}, "actors_silent"),
        ({"idle": 2}, "actors_idle"),
        ({"waiting_share": 0.8}, "learner_waits"),
        ({"skipped_share": 0.5}, "actors_ahead"),
        ({"waiting_share": None, "samples_per_second": 0.0}, "no_learner"),
        ({"waiting_share": 0.0, "is_idle": True}, "no_learner"),
        ({"finished": True, "active": 0}, "finished"),
        ({"inserts_wait": ("demo: 300 samples ahead",), "waiting_share": 0.0}, "inserts_limited"),
        ({"inserts_wait": ("demo: full",), "waiting_share": 0.47, "only_rollouts": True}, "learner_waits"),
        ({"inserts_wait": ("demo: full",), "waiting_share": 0.2, "only_rollouts": True}, "inserts_limited"),
        ({"inserts_wait": ("demo: 300 samples ahead",), "waiting_share": 0.47}, "inserts_limited"),
        ({"draws_wait": ("demo: 37 more entries",), "waiting_share": 0.9}, "draws_limited"),
        ({"disk_used": 0.99}, "disk_full"),
        ({"disk_trouble": "Server a: the disk is full since 3 s"}, "disk_full"),
        ({"refused_per_second": 5.0}, "refused"),
        ({"left_out": 0.5}, "left_out"),
    ],
)
def test_the_headline_names_what_holds_the_run_up(changes, code):
    found = verdicts(well_but(**changes))
    assert found[0].code == code and found[0].text.endswith((".", "?"))


@pytest.mark.parametrize("down", [(), ("server-1",)])
def test_silent_actors_may_have_a_server_that_is_away(down):
    found = verdicts(well_but(silent=2, nodes_down=down))
    (text,) = [each.text for each in found if each.code == "actors_silent"]
    assert ("If their server is away, start it again. Otherwise look at their machine" in text) == bool(down)
    assert ("an end. Look at their machine and network; after --lost-after seconds" in text) != bool(down)


# -------------------------------------------------------------------------------------------------------- log lines


class Books:
    """Log lines of several servers, as their /logs pages hand them out."""

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
        found = [line for line in self.lines[name] if after < line[0] < before]
        found = found[::-1] if "newest" in query else found
        rows = [
            {"index": index, "received": at, "time": "", "client": "", "label": "", "text": f"{name} {index}"}
            for index, at in found[: int(query["most"])]
        ]
        return {"rows": rows, "is_all": len(found) <= int(query["most"])}


books = st.dictionaries(
    st.sampled_from("abc"), st.lists(st.integers(0, 30), max_size=12).map(sorted), min_size=1, max_size=3
).map(lambda found: Books({name: list(enumerate(times, 1)) for name, times in found.items()}))


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

    for name, count in later:  # lines that come now
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
    book = Books({"a": [(1, 10.0), (2, 30.0)], "b": [(1, 20.0)]})
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


# --------------------------------------------------------------------------------------------------- nodes, settings


def test_names_are_looked_up_and_what_was_found_before_stays_while_the_name_server_is_silent():
    book = Book()
    addresses = NodeAddresses(["http://fixed:1/", "dns:servers:8080"], NameResolver(book, fresh=0.0))
    assert addresses.now() == ["http://fixed:1"]
    one, two = "http://10.0.0.1:8080", "http://[::2]:8080"
    for known, expected, trouble in (
        ({"servers": ["10.0.0.1"]}, [one], {}),
        ({}, [one], {"servers:8080": "Name or service not known"}),
        ({"servers": ["::2", "10.0.0.1"]}, [one, two], {}),
    ):
        book.known = known
        addresses.look()
        assert addresses.now() == ["http://fixed:1", *expected] and addresses.trouble == trouble


def test_a_name_server_that_is_silent_for_one_name_keeps_nobody_from_the_others():
    book = Book(here=["10.0.0.1"], late=["10.0.0.2"])
    book.hanging.add("late")
    addresses = NodeAddresses(["dns:late:8080", "dns:here:8080", "dns:here:http"], NameResolver(book, fresh=0.0))
    addresses.look(timeout=0.3)
    assert addresses.now() == ["http://10.0.0.1:8080"]
    assert addresses.trouble["late:8080"] == "no answer from the name server within 0.3 s"
    assert addresses.trouble["here:http"] == "dns:here:http has no port: give its number, as in dns:NAME:8080"
    book.released.set()
    addresses.look(timeout=100.0)
    assert addresses.now() == ["http://10.0.0.2:8080", "http://10.0.0.1:8080"] and list(addresses.trouble) == [
        "here:http"
    ]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"nodes": ()}, "at least one node"),
        ({"nodes": ("server-0:8080",)}, "http://HOST:PORT, or dns:NAME:PORT"),
        ({"listen": "0.0.0.0:8265"}, "a token"),
        ({"listen": "*:8265"}, "a token"),
        ({"poll_every": 0.0}, "seconds above 0"),
        ({"root_path": "a"}, "begins with /"),
    ],
)
def test_settings_that_cannot_be_are_refused(changes, words):
    with pytest.raises(ParameterError, match=words):
        Settings(**{"nodes": ("http://a:1",)} | changes)


def test_secrets_are_not_shown():
    shown = Settings(
        nodes=("http://a:1",), listen="*:1", token="s3cret-s3cret-s3", node_token="n0de-n0de-n0de-n"
    ).shown()
    assert shown["token"] is True and "s3cret" not in repr(shown) and "n0de" not in repr(shown)


# ------------------------------------------------------------------------------------------------------ how it is spread


def said(total, effective, first, counts, **more):
    histogram = {"first": first, "counts": counts, "zeros": 1, "least": 0.0, "greatest": float(first)}
    facts = {"storage": "caches", "looked": 5, "held": 50, "population": 100.0, "total_weight": total}
    return facts | {"effective": effective, "weights": histogram, "ages": histogram} | more


def test_servers_parts_of_a_table_are_one_distribution():
    weights = [np.array([1.0, 1.0, 4.0]), np.array([2.0, 3.0, 3.0, 8.0])]
    parts = {
        f"server-{n}": said(each.sum(), each.sum() ** 2 / np.square(each).sum(), 8 * n, [1, 2])
        for n, each in enumerate(weights)
    }
    found = nodes.merged("default", parts, ["server-9"])
    both = np.concatenate(weights)
    assert found.effective == pytest.approx(both.sum() ** 2 / np.square(both).sum())
    assert (found.looked, found.held, found.population) == (10, 100, 200.0)
    assert found.weights.counts == [1, 2, 0, 0, 0, 0, 0, 0, 1, 2] and found.weights.bounds[0] == 1.0
    assert found.weights.bounds[8] == pytest.approx(10.0) and len(found.weights.bounds) == 11
    assert (found.weights.zeros, found.weights.least, found.weights.greatest) == (2, 0.0, 8.0)
    assert (found.servers, found.missing) == (["server-0", "server-1"], ["server-9"])


def test_actors_are_counted_in_buckets_of_equal_width():
    found = nodes.spread_of("steps", [1.0, 2.0, 2.0, 9.0], 4)
    assert (found.actors, found.median, found.mean, found.histogram.counts) == (4, 2.0, 3.5, [3, 0, 0, 1])
    assert nodes.spread_of("steps", [], 4).histogram.bounds == []
    assert sum(nodes.spread_of("steps", [5.0, 5.0], 4).histogram.counts) == 2


def test_one_dashboard_has_a_file_of_curves_at_a_time(tmp_path):
    path = str(tmp_path / "kept.db")
    history = History(path)
    with pytest.raises(HistoryError, match="it is in use by this process"):
        History(path)
    history.close()
    History(path).close()
