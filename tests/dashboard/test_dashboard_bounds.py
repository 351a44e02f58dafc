"""The dashboard at its bounds: where a figure begins to mean something, and what is said one step before."""

import itertools
import logging
import sys
import threading
import time
import urllib.request

import pytest
from starlette.datastructures import Headers

from memoire.dashboard.collect import nodes, verdict
from memoire.dashboard.collect.actors import ACTORS_INTERVAL, ActorList, KeptRun
from memoire.dashboard.collect.cluster import FULL, Cluster, until
from memoire.dashboard.collect.counters import WINDOW
from memoire.dashboard.collect.history import History
from memoire.dashboard.settings import Settings
from memoire.dashboard.terminal.log_tail import _write, tail
from memoire.dashboard.terminal.top import _section
from memoire.dashboard.web.access import MAX_BODY_BYTES, too_long
from memoire.dashboard.web.serve import Dashboard
from memoire.errors import ParameterError
from memoire.loggers import _bytes, _varint
from memoire.net.addresses import NameResolver
from pageskit import account, one


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


def test_lines_go_out_at_once(monkeypatch):
    flushed = []
    monkeypatch.setattr(sys, "stdout", type("Out", (), {"flush": lambda self: flushed.append(1)})())
    row = type("Row", (), {"received": 0.0, "label": "ff", "text": "words", "name": ""})()
    said = []
    _write([], said.append)
    assert not flushed
    _write([row], said.append)
    assert len(flushed) == len(said) == 1 and said[0].endswith("words")


def test_a_line_of_a_node_that_is_down_is_red_and_others_are_not():
    rows = [("a", "server", "away", "1"), ("away", "server", "up", "2"), ("c", "away", "up", "3")]
    lines = _section("nodes", rows, ("node", "role", "state", "load"))
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


def test_rates_of_actors_are_zero_before_the_first_look():
    cluster = Cluster(Settings(nodes=("http://127.0.0.1:1",)))
    cluster.kept(cluster.run).take(account(1, 0, steps=500, accepted=3, seen=5.0))
    (row,) = cluster.actors()
    assert (row.steps, row.steps_per_second) == (500, 0.0)


@pytest.mark.parametrize("value", [0, 1, 127, 128, 129, 300, 16_383, 16_384, 2**40 + 5])
def test_a_varint_is_read_as_it_was_written(value):
    packed = _varint(value)
    assert sum((byte & 0x7F) << 7 * place for place, byte in enumerate(packed)) == value
    assert all(byte & 0x80 for byte in packed[:-1]) and not packed[-1] & 0x80
    assert _bytes(3, b"x" * 200)[:3] == bytes([3 << 3 | 2, 0xC8, 0x01])


def test_a_table_is_full_a_little_before_its_last_byte():
    assert 0.9 < FULL < 1.0
    assert until(0.0, 0.0) == 0.0 and until(-1.0, 5.0) == 0.0 and until(5.0, 0.0) is None and until(6.0, 3.0) == 2.0


@pytest.mark.parametrize(("skipped", "said"), [(0.0, False), (verdict.LITTLE, False), (verdict.LITTLE + 0.01, True)])
def test_a_little_that_is_skipped_is_said_where_all_is_well(skipped, said):
    signs = verdict.VerdictInputs(
        nodes=1, nodes_down=(), unready=(), servers_up=1, finished=False, active=1, silent=0, idle=0, expected=0,
        steps=5, steps_per_second=3.0, samples_per_second=2.0, waiting_share=0.0, skipped_share=skipped,
        disk_used=None, refused_per_second=0.0,
    )  # fmt: skip
    (found,) = verdict.verdicts(signs)
    assert (found.level, found.code) == ("good", "balanced")
    assert ("actors skip" in found.text) == said != ("nobody waits" in found.text)


def test_a_run_that_was_seen_is_seen_later_with_its_newest_facts(tmp_path):
    history = History(tmp_path / "kept.db")
    history.keep_run("a", 5.0, b"{}", b"x")
    history.keep_run("a", 9.0, b'{"n": 1}', b"yy")
    (row,) = history.runs()
    assert (row.name, row.began, row.seen, row.facts, history.ledger("a")) == ("a", 5.0, 9.0, b'{"n": 1}', b"yy")
    assert history.ledger("b") == b""
    history.add("a", 10.0, {"steps": one(3.0)})
    assert [point.mean for _, _, point in history.all("a", "steps")] == [3.0] and not list(history.all("steps", "a"))
    history.close()


def test_actors_are_remembered_now_and_then_for_as_long_as_a_rate_looks_back():
    actors, kept = (
        ActorList(Settings(nodes=("http://127.0.0.1:1",))),
        KeptRun(account(1, 0, steps=500, accepted=3, seen=5.0)),
    )
    for tenth in range(10 * int(3 * WINDOW)):
        actors.remember(tenth / 10, kept)
    times = [time for time, _ in actors._ring]
    assert all(after - before >= ACTORS_INTERVAL for before, after in itertools.pairwise(times))
    assert WINDOW - ACTORS_INTERVAL <= times[-1] - times[0] <= WINDOW + 2 * ACTORS_INTERVAL


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
