"""The export of a run, and a dashboard of a run that is opened from its file."""

import dataclasses
import gzip
import json
import sqlite3
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memoire.dashboard.collect import opened as run_file
from memoire.dashboard.collect.aggregator import RunRecorder
from memoire.dashboard.collect.cluster import Cluster
from memoire.dashboard.collect.history import MAX_EVENTS, EventRow, History
from memoire.dashboard.collect.opened import OpenedRun
from memoire.dashboard.settings import Settings
from memoire.errors import RunFileError
from pageskit import one

NOW = 1_700_000_000.0
SETTINGS = {"a": {"tables": {"default": {"parameters": {"multi_step": 3}}}}}


def run(history, minutes=90, name="r"):
    """Add a run to a history: a point a minute, an event, its settings. Return the history."""
    for minute in range(minutes):
        points = {"return": one(minute + 0.5), "steps": one(100.0 * minute), "nodes_up": one(1.0)}
        history.add(name, NOW + 60.0 * minute, points)
    history.keep_run(name, NOW, {})
    history.keep_run(name, NOW + 60.0 * minutes, {"return_mean": 89.5})
    history.add_event(name, EventRow(NOW + 60.0, "node_down", "a", "a does not answer."))
    history.keep_document(name, "settings", json.dumps(SETTINGS).encode())
    history.flush()
    return history


def exported(history, name="r"):
    row = next(each for each in history.runs() if each.name == name)
    return b"".join(run_file.export_pieces(history, row, NOW + 9_999.0))


@pytest.fixture
def opened(history, tmp_path):
    path = tmp_path / "r.run.gz"
    path.write_bytes(exported(run(history)))
    opened_run = OpenedRun(Settings(nodes=(), open=str(path)))
    yield opened_run
    opened_run.close()


def test_an_opened_run_has_every_point_event_and_setting_of_the_exported_one(history, opened):
    for name in ("return", "steps", "nodes_up"):
        assert list(opened.history.all_points("r", name)) == list(history.all_points("r", name))
    assert opened.events("") == [EventRow(NOW + 60.0, "node_down", "a", "a does not answer.")]
    assert opened.node_settings() == SETTINGS
    (only,) = opened.runs()
    assert (only.name, only.began, only.seen) == ("r", NOW, NOW + 5_400.0)
    assert only.facts == {"return_mean": 89.5} and only.is_current
    overview = opened.newest
    assert (overview.run, overview.recorded, overview.verdicts[0].code) == ("r", NOW + 9_999.0, "recorded")


def test_curves_of_an_opened_run_reach_to_its_end_however_late_it_is_opened(opened):
    curves = opened.curves("", ["return"], 0.0, 2.0**40, 1000)
    known = [value for value in curves.mean["return"] if value is not None]
    assert (known[0], known[-1]) == (0.5, 89.5)


def test_an_opened_run_is_exported_again_as_it_was(history, opened):
    def lines(data):
        return [json.loads(line) for line in gzip.decompress(data).splitlines()]

    assert lines(exported(opened.history))[1:] == lines(exported(history))[1:]


HEAD = {"kind": "run", "format": 1, "run": "r", "began": 1.0, "seen": 2.0, "exported": 3.0, "facts": {}}
POINT = [10, 1, 1.0, 1.0, 1.0, 1]


def packed(*lines, end=True):
    closing = [{"kind": "end", "lines": len(lines)}] if end else []
    return gzip.compress(b"".join(json.dumps(line).encode() + b"\n" for line in [*lines, *closing]))


WRONG = {
    "not gzip": (b"something else", "Not a gzipped file"),
    "empty": (gzip.compress(b""), "cut short"),
    "no end": (packed(HEAD, end=False), "cut short"),
    "half of the stream": (packed(HEAD)[:30], "ended before"),
    "another number of lines": (packed(HEAD, {"kind": "end", "lines": 7}), "it has 1 of 7 lines"),
    "no JSON": (gzip.compress(b"{\n"), "a line is malformed"),
    "not UTF-8": (gzip.compress(b'{"kind": "\xff"}\n'), "a line is malformed"),
    "deep": (gzip.compress(b"[" * 100_000 + b"\n"), "a line is malformed"),
    "unknown kind": (packed({"kind": "code"}), "a line is malformed"),
    "a later format": (packed(HEAD | {"format": 2}), "it has format 2"),
    "two runs": (packed(HEAD, HEAD), "two runs"),
    "no run": (packed({"kind": "figure", "name": "x", "points": [POINT]}), "does not begin with a run"),
    "a wrong document": (packed(HEAD, {"kind": "document", "name": "overview", "body": {}}), "a line is malformed"),
    "an unknown document": (packed(HEAD, {"kind": "document", "name": "x", "body": {}}), "documents named 'x'"),
    "a width that is none": (packed(HEAD, {"kind": "figure", "name": "x", "points": [[10, 7, 1, 1, 1, 1]]}), "'x'"),
    "a negative time": (packed(HEAD, {"kind": "figure", "name": "x", "points": [[-1, 1, 1, 1, 1, 1]]}), "'x'"),
    "no values": (packed(HEAD, {"kind": "figure", "name": "x", "points": [[1, 1, 1, 1, 1, 0]]}), "'x'"),
    "a time of a run": (packed(HEAD | {"began": -1.0}), "a time"),
    "events": (
        packed(HEAD, *[{"kind": "event", "body": {"time": 1, "kind": "", "node": "", "text": ""}}] * (MAX_EVENTS + 1)),
        f"more than {MAX_EVENTS} events",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_file_that_is_no_run_is_refused_in_words(wrong, tmp_path, history):
    data, words = WRONG[wrong]
    path = tmp_path / "wrong.gz"
    path.write_bytes(data)
    with pytest.raises(RunFileError, match="Export the run again") as raised:
        run_file.read(str(path), history)
    assert words in str(raised.value) and "wrong.gz" in str(raised.value)


def test_a_file_that_unpacks_to_more_than_its_bound_is_refused(tmp_path, history):
    path = tmp_path / "bomb.gz"
    path.write_bytes(packed(HEAD, *[{"kind": "event", "body": {"time": 1, "kind": "", "node": "", "text": ""}}] * 50))
    with pytest.raises(RunFileError, match="more than 1000 bytes"):
        run_file.read(str(path), history, max_bytes=1_000)


@given(st.binary(max_size=200))
def test_no_bytes_raise_anything_else(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("run") / "x.gz"
    path.write_bytes(gzip.compress(data))
    with History(None) as other, pytest.raises(RunFileError):
        run_file.read(str(path), other)


BEGAN = EventRow(1.0, "run_began", "", "The run began.")


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "history.db")


@pytest.fixture
def recorder(path):
    """A recorder with a history in a file, and an overview of a run to record."""
    history, cluster = History(path), Cluster(Settings(nodes=("http://a:1",)))
    blank, _ = cluster.refresh(0.0)
    yield RunRecorder(history, cluster, threading.RLock()), dataclasses.replace(blank, run="first"), history
    history.close()


def test_what_happened_is_kept_once_and_a_run_that_ended_is_kept_at_once(recorder):
    run_recorder, first, history = recorder
    run_recorder.record(first, None, [BEGAN], 101.0)
    run_recorder.record(first, first, [BEGAN], 102.0)
    second = dataclasses.replace(first, run="second")
    run_recorder.record(second, first, [], 103.0)
    assert len(history.events("first")) == 1 and run_recorder.trouble == ""
    assert {run.name: run.seen for run in history.runs()} == {"first": 103.0, "second": 103.0}


@pytest.mark.parametrize("table", ["events", "runs"])
def test_a_history_that_takes_something_no_more_says_so_and_keeps_the_rest(recorder, path, caplog, table):
    run_recorder, first, history = recorder
    with sqlite3.connect(path, isolation_level=None) as db:
        db.execute(f"CREATE TRIGGER full BEFORE INSERT ON {table} BEGIN SELECT RAISE(ABORT, 'no room here'); END")
    second = dataclasses.replace(first, run="second")
    run_recorder.record(first, None, [BEGAN], 101.0)
    run_recorder.record(second, first, [BEGAN], 102.0)
    assert "no room here" in run_recorder.trouble
    assert [record.message for record in caplog.records] == [run_recorder.trouble]  # logged once
    kept = {"events": len(history.events("second")), "runs": len(history.runs())}
    assert kept.pop(table) == 0 and kept.popitem()[1] > 0
