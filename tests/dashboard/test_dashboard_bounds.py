"""One step on each side of what the dashboard bounds, and how long a login holds."""

import logging
import threading
import time
import urllib.request

import pytest
from starlette.datastructures import Headers

from memoire.dashboard.collect import nodes, verdict
from memoire.dashboard.collect.cluster import FULL, until
from memoire.dashboard.collect.history import History
from memoire.dashboard.settings import Settings
from memoire.dashboard.terminal.log_tail import tail
from memoire.dashboard.terminal.top import Column, _section
from memoire.dashboard.web.access import MAX_BODY_BYTES, too_long
from memoire.dashboard.web.serve import Dashboard
from memoire.errors import ParameterError, ProtocolError
from memoire.net.addresses import NameResolver
from memoire.security.access import Tokens
from pageskit import one, well_but
from poolkit import Clock


@pytest.mark.parametrize(
    ("length", "status"),
    [
        ("0", None),
        (str(MAX_BODY_BYTES), None),
        (str(MAX_BODY_BYTES + 1), 413),
        ("9" * 30, 413),
        ("-1", 411),
        ("", 411),
    ],
)
def test_a_body_is_refused_by_its_length_before_it_is_read(length, status):
    refused = too_long(Headers({"content-length": length}))
    assert (refused and refused.status_code) == status


def test_a_body_of_no_said_length_is_refused():
    assert too_long(Headers({"transfer-encoding": "chunked"})).status_code == 411
    assert too_long(Headers({})) is None


@pytest.mark.parametrize(("every", "timeout"), [(0.0, 1.0), (1.0, 0.0), (-1.0, 1.0), (float("nan"), 1.0)])
def test_lines_are_followed_with_a_pause_and_a_deadline(every, timeout):
    with pytest.raises(ParameterError, match="seconds above 0"):
        tail(["http://127.0.0.1:1"], {}, every=every, timeout=timeout)


def test_a_line_of_a_node_that_is_down_is_red_and_others_are_not():
    rows = [("a", "server", "away", "1"), ("away", "server", "up", "2"), ("c", "away", "up", "3")]
    titles = ("node", "role", "state", "load")
    columns = [Column(title, lambda row, now, at=at: row[at]) for at, title in enumerate(titles)]
    lines = _section(columns, rows, 0.0)
    assert [(line.text.split()[0], line.style) for line in lines[2:]] == [("a", "red"), ("away", ""), ("c", "")]


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


def test_a_table_is_full_a_little_before_its_last_byte():
    assert 0.9 < FULL < 1.0
    assert until(0.0, 0.0) == 0.0 and until(-1.0, 5.0) == 0.0 and until(5.0, 0.0) is None and until(6.0, 3.0) == 2.0


@pytest.mark.parametrize(("skipped", "said"), [(0.0, False), (verdict.LITTLE, False), (verdict.LITTLE + 0.01, True)])
def test_a_little_that_is_skipped_is_said_where_all_is_well(skipped, said):
    (found,) = verdict.verdicts(well_but(active=1, waiting_share=0.0, skipped_share=skipped))
    assert (found.level, found.code) == ("good", "balanced")
    assert ("actors skip" in found.text) == said != ("nobody waits" in found.text)


def test_a_run_that_was_seen_is_seen_later_with_its_newest_facts(tmp_path):
    history = History(tmp_path / "kept.db")
    history.keep_run("a", 5.0, {}, b"x")
    history.keep_run("a", 9.0, {"n": 1}, b"yy")
    (row,) = history.runs()
    assert (row.name, row.began, row.seen, row.facts, history.ledger("a")) == ("a", 5.0, 9.0, {"n": 1}, b"yy")
    assert history.ledger("b") == b""
    history.add("a", 10.0, {"steps": one(3.0)})
    assert [point.mean for _, _, point in history.all("a", "steps")] == [3.0] and not list(history.all("steps", "a"))
    history.close()


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


gate = pytest.importorskip("memoire.dashboard.web.access", reason="starlette is not installed")
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
def door(path, clock):
    return gate.Logins(Tokens(path), clock)


HERE = gate.RequestOrigin("10.0.0.1", "10.0.0.1")


def by(number):
    """A browser that keeps this number."""
    return Headers({"cookie": f"other=1; {gate.COOKIE}={number}"})


def is_in(door, number):
    found = {door.has_login(by(number)), door.admits(by(number), HERE), door.still_admits(by(number))}
    assert len(found) == 1
    return found.pop()


def test_a_login_holds_for_a_week_and_not_a_moment_longer(door, clock):
    number = door.log_in(OLD, HERE)
    clock.now += 7 * 86_400 - 0.001
    assert is_in(door, number)
    clock.now += 0.001
    assert not is_in(door, number)


def test_who_logs_out_ends_that_login_alone(door):
    mine, other = door.log_in(OLD, HERE), door.log_in(OLD, HERE)
    door.log_out(by(mine))
    assert (is_in(door, mine), is_in(door, other)) == (False, True)
    door.log_out(by("of nobody"))
    door.log_out(Headers({}))
    assert is_in(door, other)


def test_a_login_ends_with_the_token_it_was_made_with_and_with_no_other(door, path):
    by_old, by_new = door.log_in(OLD, HERE), door.log_in(NEW, HERE)
    path.write_text(f"{NEW}\n")
    assert (is_in(door, by_old), is_in(door, by_new)) == (False, True)


def test_a_login_too_many_ends_none_that_is_used_and_the_page_says_so(door, path, clock):
    numbers = [door.log_in(number % 2 and OLD or NEW, HERE) for number in range(gate.MAX_LOGINS)]
    clock.now += gate.LOGIN_IDLE_TIMEOUT
    path.write_text(f"{NEW}\n")
    assert [is_in(door, number) for number in numbers[:4]] == [True, False, True, False]
    used = [door.log_in(NEW, HERE) for _ in range(gate.MAX_LOGINS - 2)]
    with pytest.raises(ProtocolError, match="1000 logins are known here, the most"):
        door.log_in(NEW, HERE)
    assert [is_in(door, number) for number in (*numbers[:4], *used)] == [True, False] * 2 + [True] * len(used)


def test_a_login_ends_with_the_process_that_made_it(door, path, clock):
    number = door.log_in(OLD, HERE)
    assert is_in(door, number) and not is_in(gate.Logins(Tokens(path), clock), number)


def test_nobody_is_let_in_without_a_number_or_by_a_wrong_one(door):
    assert door.log_in("wrong-token-wrong", HERE) is None
    for headers in ({}, {"cookie": ""}, {"cookie": f"{gate.COOKIE}="}, {"cookie": f"{gate.COOKIE}={OLD}"}):
        assert not door.has_login(Headers(headers)) and not door.still_admits(Headers(headers))
    assert door.refused["http_token"] == 1  # a wrong number is no guess at a token


def test_whoever_came_with_a_token_in_a_header_stays_as_long_as_it_holds(door, path):
    mine = Headers({"authorization": f"Bearer {OLD}"})
    assert door.admits(mine, HERE) and door.still_admits(mine)
    path.write_text(f"{NEW}\n")
    assert not door.still_admits(mine)
