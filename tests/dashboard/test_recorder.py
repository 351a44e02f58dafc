"""What is kept of runs, and what is said, where the disk refuses some of it."""

import dataclasses
import sqlite3
import threading

import pytest

from memoire.dashboard.collect.aggregator import LEDGER_INTERVAL, RunRecorder
from memoire.dashboard.collect.answers import EventRow
from memoire.dashboard.collect.cluster import Cluster
from memoire.dashboard.collect.history import History
from memoire.dashboard.settings import Settings

BEGAN = EventRow(1.0, "run_began", "", "The run began.")


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "history.db")


@pytest.fixture
def recorder(path):
    """With a history in a file, and an overview of a run to record."""
    history, cluster = History(path), Cluster(Settings(nodes=("http://a:1",)))
    blank, _ = cluster.look(0.0)
    yield RunRecorder(history, cluster, threading.RLock()), dataclasses.replace(blank, run="first"), history
    history.close()


def refuse(path, table):
    """Let the file take no more rows of a table."""
    with sqlite3.connect(path, isolation_level=None) as db:
        db.execute(f"CREATE TRIGGER full BEFORE INSERT ON {table} BEGIN SELECT RAISE(ABORT, 'no room here'); END")


def test_what_happened_is_kept_once_and_a_run_that_ended_is_kept_at_once(recorder):
    made, first, history = recorder
    made.record(first, None, [BEGAN], 101.0)
    made.record(first, first, [BEGAN], 102.0)
    second = dataclasses.replace(first, run="second")
    made.record(second, first, [], 103.0)
    assert len(history.events("first")) == 1 and made.trouble == ""
    assert {run.name: run.seen for run in history.runs()} == {"first": 103.0, "second": 103.0}


@pytest.mark.parametrize("table", ["events", "runs"])
def test_a_history_that_takes_something_no_more_says_so_and_keeps_the_rest(recorder, path, caplog, table):
    made, first, history = recorder
    refuse(path, table)
    second = dataclasses.replace(first, run="second")
    made.record(first, None, [BEGAN], 101.0)
    made.record(second, first, [BEGAN], 102.0)
    assert "no room here" in made.trouble
    assert [record.message for record in caplog.records] == [made.trouble]  # said once
    kept = {"events": len(history.events("second")), "runs": len(history.runs())}
    assert kept.pop(table) == 0 and kept.popitem()[1] > 0


def test_trouble_is_over_once_everything_that_was_due_is_written(recorder, path):
    made, first, _ = recorder
    refuse(path, "events")
    made.record(first, None, [BEGAN], 101.0)
    with sqlite3.connect(path, isolation_level=None) as db:
        db.execute("DROP TRIGGER full")
    assert made.trouble
    made.record(first, first, [], 101.0 + LEDGER_INTERVAL)
    assert made.trouble == ""
