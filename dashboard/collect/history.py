"""SQLite file of curves: every figure of every run over time, in three resolutions.

    level 0   buckets of 1 s     kept for an hour    each bucket: count, mean, min, max
    level 1   15 seconds         two days
    level 2   5 minutes          90 days

Each point goes into all levels at once, so old points need no later aggregation; min and max keep the spikes. A killed
dashboard loses only the seconds since its last flush. A flush merges new points into existing buckets.
"""

from __future__ import annotations

import itertools
import os
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from memoire.arguments import ClosingContext
from memoire.disk import files
from memoire.errors import HistoryError
from memoire.replay.files import FileLock

LEVELS = ((1, 3_600), (15, 2 * 86_400), (300, 90 * 86_400))
"""Width of a bucket and its retention, both in seconds, for each level."""
FLUSH_INTERVAL = 5.0
PRUNE_INTERVAL = 300.0
MAX_SERIES = 4_096
"""Figures of one run; points of further figures are discarded, and counted in `left_out`."""
MAX_EVENTS = 1_000
"""Newest events that are kept for each run."""
MIN_AWAY = 5.0
"""Seconds without a point after which a curve has a gap."""
FORMAT = 2

_TABLES = """
CREATE TABLE IF NOT EXISTS runs (
    name TEXT PRIMARY KEY, began REAL NOT NULL, seen REAL NOT NULL, facts BLOB NOT NULL, rows BLOB NOT NULL
);
CREATE TABLE IF NOT EXISTS series (id INTEGER PRIMARY KEY, run TEXT NOT NULL, name TEXT NOT NULL, UNIQUE (run, name));
CREATE TABLE IF NOT EXISTS points (
    series INTEGER NOT NULL, level INTEGER NOT NULL, time INTEGER NOT NULL,
    count INTEGER NOT NULL, mean REAL NOT NULL, least REAL NOT NULL, greatest REAL NOT NULL,
    PRIMARY KEY (series, level, time)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS events (id INTEGER PRIMARY KEY, run TEXT NOT NULL, body BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS events_of_run ON events (run, id);
CREATE TABLE IF NOT EXISTS documents (
    run TEXT NOT NULL, kind TEXT NOT NULL, body BLOB NOT NULL, PRIMARY KEY (run, kind)
);
"""
_PUT = """
INSERT INTO points VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET
    mean = (mean * count + excluded.mean * excluded.count) / (count + excluded.count), count = count + excluded.count,
    least = min(least, excluded.least), greatest = max(greatest, excluded.greatest)
"""


Key = TypeVar("Key")


class HistoryPoint(NamedTuple):
    """Mean, least and greatest value of a figure within a period."""

    mean: float
    least: float
    greatest: float
    number: int = 1
    """Number of values in the period."""

    @classmethod
    def from_values(cls, values: Sequence[float]) -> HistoryPoint:
        """Return the point of at least one value."""
        return cls(sum(values) / len(values), min(values), max(values), len(values))

    def plus(self, other: HistoryPoint) -> HistoryPoint:
        """Return the point of the values of both points."""
        number = self.number + other.number
        mean = (self.mean * self.number + other.mean * other.number) / number
        return HistoryPoint(mean, min(self.least, other.least), max(self.greatest, other.greatest), number)


@dataclass(frozen=True, slots=True)
class RunInfo:
    """Record of a run as the dashboard saw the run last. Times are seconds since 1970."""

    name: str
    began: float
    seen: float
    facts: dict[str, Any]
    """totals, finished and return_mean at the time `seen`."""
    is_current: bool = False
    """True for the run that the cluster counts now."""


@dataclass(frozen=True, slots=True)
class EventRow:
    """Event of a run at one moment, shown as a mark on the run's curves."""

    time: float
    """Moment of the event, in seconds since 1970."""
    kind: str
    """run_began, run_finished, node_down, node_back or node_restarted."""
    node: str
    """Name of the node; "" for an event of the run itself."""
    text: str
    """Sentence that describes the event."""


@dataclass(frozen=True, slots=True)
class Curves:
    """Values of several figures in the same time buckets; None if a figure has no point in a bucket."""

    run: str
    bucket: float
    """Width of a bucket in seconds."""
    time: list[float]
    """Beginning of each bucket that has a point, in seconds since 1970."""
    steps: list[float | None]
    """Greatest number of steps of the run in each bucket."""
    mean: dict[str, list[float | None]]
    least: dict[str, list[float | None]]
    greatest: dict[str, list[float | None]]
    away: list[list[float]]
    """Gaps without points, each [end of a bucket, beginning of the next bucket], in seconds since 1970."""


def _merge(points: dict[Key, HistoryPoint], key: Key, point: HistoryPoint) -> None:
    known = points.get(key)
    points[key] = point if known is None else known.plus(point)


def recording_gaps(times: Sequence[float], bucket: float, patience: float) -> list[list[float]]:
    """Return [end, begin] of each gap of more than `patience` seconds between buckets of `bucket` seconds."""
    ends = ((before + bucket, after) for before, after in itertools.pairwise(times))
    return [[end, after] for end, after in ends if after - end > patience]


def _make_private(path: Path) -> None:
    """Create the file for its owner only, because it holds log lines; restrict a file of an older version."""
    if path.exists():
        files.restrict_permissions(path)
    else:
        os.close(files.create(path))


def _lock_history(path: str) -> FileLock:
    """Lock the history file, because two dashboards with one file would count each point twice."""
    try:
        return FileLock(
            Path(f"{path}.lock"),
            held=lambda holder: HistoryError(path, f"it is in use by {holder}"),
            foreign=lambda what: HistoryError(path, f"{path}.lock is {what}, not the lock file"),
            opening=files.append,
        )
    except HistoryError:
        raise
    except OSError as error:
        raise HistoryError(path, str(error)) from error


class History(ClosingContext):
    """History file of curves, locked by one process at a time. Thread-safe. `add` works in memory, `flush` writes.

    Args:
        path: Path of the file; None keeps the history in memory.

    Raises:
        HistoryError: the file cannot be opened, is in use, or is not a history file.
    """

    def __init__(self, path: str | None) -> None:
        path = os.path.abspath(path) if path else None
        self.path = path or ":memory:"
        self.left_out = 0
        """Number of points discarded because their run already has `MAX_SERIES` figures."""
        self._lock = threading.RLock()
        self._pending: dict[tuple[int, int, int], HistoryPoint] = {}
        self._ids: dict[tuple[str, str], int] = {}
        self._counts: dict[str, int] = {}
        self._file_lock = _lock_history(path) if path else None
        try:
            if path:
                _make_private(Path(path))
            self._db = sqlite3.connect(self.path, check_same_thread=False, isolation_level=None)
            version = self._db.execute("PRAGMA user_version").fetchone()[0]
            if version not in (0, FORMAT):
                raise HistoryError(self.path, f"it has format {version}, but this memoire writes format {FORMAT}")
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = NORMAL")
            self._db.executescript(_TABLES)
            self._db.execute(f"PRAGMA user_version = {FORMAT}")
            for number, run, name in self._db.execute("SELECT id, run, name FROM series"):
                self._ids[run, name] = number
                self._counts[run] = self._counts.get(run, 0) + 1
        except BaseException as error:
            self._unlock()
            if isinstance(error, HistoryError) or not isinstance(error, sqlite3.Error | OSError):
                raise
            raise HistoryError(self.path, str(error)) from error

    # ------------------------------------------------------------------------------------------------- writing

    def add(self, run: str, time: float, points: Mapping[str, HistoryPoint]) -> None:
        """Add a point of each figure at this time, in memory until `flush`."""
        with self._lock:
            for name, point in points.items():
                self.left_out += not self.load(run, name, [(time, 0, point)])

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """Lock the database for this thread and yield it. Raise HistoryError for an SQLite error, after a rollback."""
        with self._lock:
            try:
                yield self._db
            except sqlite3.Error as error:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise HistoryError(self.path, str(error)) from error

    def _id(self, run: str, name: str) -> int | None:
        number = self._ids.get((run, name))
        if number is None and self._counts.get(run, 0) < MAX_SERIES:
            number = self._db.execute("INSERT INTO series (run, name) VALUES (?, ?)", (run, name)).lastrowid
            assert number is not None
            self._ids[run, name] = number
            self._counts[run] = self._counts.get(run, 0) + 1
        return number

    def flush(self) -> None:
        """Write the added points. Raises HistoryError; the points are then kept for the next flush."""
        with self._writing() as database:
            rows = [(*key, point.number, *point[:3]) for key, point in self._pending.items()]
            database.execute("BEGIN")
            database.executemany(_PUT, rows)
            database.execute("COMMIT")
            self._pending.clear()

    def prune(self, now: float) -> None:
        """Delete points that are older than the retention of their level. Raises HistoryError."""
        with self._writing() as database:
            numbers = [number for (number,) in database.execute("SELECT id FROM series")]
            for level, (_, kept) in enumerate(LEVELS):
                rows = [(number, level, int(now - kept)) for number in numbers]
                database.executemany("DELETE FROM points WHERE series = ? AND level = ? AND time < ?", rows)

    def close(self) -> None:
        """Flush, close the file and release its lock, also if the flush raises HistoryError."""
        with self._lock:
            try:
                self.flush()
            finally:
                self._db.close()
                self._unlock()

    def _unlock(self) -> None:
        if self._file_lock is not None:
            self._file_lock.release()

    # ------------------------------------------------------------------------------------------------- reading

    def names(self, run: str) -> list[str]:
        """Return the names of a run's figures, sorted."""
        with self._lock:
            return sorted(name for known, name in self._ids if known == run)

    def curves(
        self,
        run: str,
        names: Sequence[str],
        since: float,
        until: float,
        points: int,
        now: float,
        patience: float = MIN_AWAY,
    ) -> Curves:
        """Return these figures between two times, in at most about `points` buckets, of the finest level that reaches
        back to `since`, or of a coarser level that still has `points` buckets. More buckets than that are merged.

        Args:
            patience: Longest gap without a point, in seconds, that `away` leaves out.
        """
        level = next((at for at, (_, kept) in enumerate(LEVELS) if now - kept <= since), len(LEVELS) - 1)
        width = LEVELS[level][0]
        while level + 1 < len(LEVELS) and (until - since) / LEVELS[level + 1][0] >= points:
            level += 1
            width = LEVELS[level][0]
        bucket = width * max(1, -(-int(until - since) // (width * max(1, points))))
        curve = {name: self._buckets(run, name, level, since, until, bucket) for name in {*names, "steps"}}
        times = sorted({time for buckets in curve.values() for time in buckets})
        return Curves(
            run=run,
            bucket=float(bucket),
            time=[float(time) for time in times],
            steps=[point.greatest if (point := curve["steps"].get(time)) else None for time in times],
            mean={name: [p.mean if (p := curve[name].get(time)) else None for time in times] for name in names},
            least={name: [p.least if (p := curve[name].get(time)) else None for time in times] for name in names},
            greatest={name: [p.greatest if (p := curve[name].get(time)) else None for time in times] for name in names},
            away=recording_gaps(times, float(bucket), max(patience, float(width))),
        )

    def _buckets(
        self, run: str, name: str, level: int, since: float, until: float, bucket: int
    ) -> dict[int, HistoryPoint]:
        merged: dict[int, HistoryPoint] = {}
        for time, point in self._points(run, name, level, since, until):
            _merge(merged, time // bucket * bucket, point)
        return merged

    def _points(self, run: str, name: str, level: int, since: float, until: float) -> list[tuple[int, HistoryPoint]]:
        with self._lock:
            number = self._ids.get((run, name))
            if number is None:
                return []
            width = LEVELS[level][0]
            begin = int(since) // width * width  # beginning of the bucket that contains `since`
            points = {
                time: HistoryPoint(mean, least, greatest, count)
                for time, count, mean, least, greatest in self._db.execute(
                    "SELECT time, count, mean, least, greatest FROM points "
                    "WHERE series = ? AND level = ? AND time >= ? AND time < ? ORDER BY time",
                    (number, level, begin, until),
                )
            }
            for (known, at, time), point in self._pending.items():
                if known == number and at == level and begin <= time < until:
                    _merge(points, time, point)
            return sorted(points.items())

    def all_points(self, run: str, name: str) -> Iterator[tuple[int, int, HistoryPoint]]:
        """Yield all points of a figure, oldest first, as (begin, width in seconds, point), each time once."""
        until = float("inf")
        pieces: list[list[tuple[int, int, HistoryPoint]]] = []
        for level, (width, _) in enumerate(LEVELS):  # the finest level holds the newest points
            rows = [(time, width, point) for time, point in self._points(run, name, level, 0.0, 2.0**53)]
            rows = [row for row in rows if row[0] + width <= until]
            if rows:
                pieces.append(rows)
                until = min(until, rows[0][0])
        for rows in reversed(pieces):
            yield from rows

    # ---------------------------------------------------------------------------------------------------- runs

    def keep_run(self, run: str, time: float, facts: Mapping[str, Any], rows: bytes = b"") -> None:
        """Write a run's facts, for display, and its packed ledger rows. The first call's `time` is the beginning."""
        with self._writing() as database:
            database.execute(
                "INSERT INTO runs VALUES (?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET seen = excluded.seen, "
                "facts = excluded.facts, rows = excluded.rows",
                (run, time, time, msgspec.json.encode(facts), rows),
            )

    def runs(self) -> list[RunInfo]:
        """Return all recorded runs, in the order in which they began."""
        with self._lock:
            rows = self._db.execute("SELECT name, began, seen, facts FROM runs ORDER BY began, name")
            return [RunInfo(name, began, seen, msgspec.json.decode(facts)) for name, began, seen, facts in rows]

    def load(self, run: str, name: str, points: Iterable[tuple[float, int, HistoryPoint]]) -> bool:
        """Add points to a figure, as `all_points` yields them: (begin, width in seconds, point). Each point goes into
        all levels whose buckets are not narrower. Return False if the run already has `MAX_SERIES` other figures.
        """
        with self._lock:
            number = self._id(run, name)
            if number is None:
                return False
            for time, seconds, point in points:
                for level, (width, _) in enumerate(LEVELS):
                    if width >= seconds:
                        _merge(self._pending, (number, level, int(time // width * width)), point)
            return True

    # ---------------------------------------------------------------------------------------- events and documents

    def add_event(self, run: str, event: EventRow) -> None:
        """Write an event of a run; delete the oldest events beyond `MAX_EVENTS`."""
        with self._writing() as database:
            database.execute("INSERT INTO events (run, body) VALUES (?, ?)", (run, msgspec.json.encode(event)))
            database.execute(
                "DELETE FROM events WHERE run = ? AND id <= "
                "(SELECT id FROM events WHERE run = ? ORDER BY id DESC LIMIT 1 OFFSET ?)",
                (run, run, MAX_EVENTS),
            )

    def events(self, run: str) -> list[EventRow]:
        """Return the events of a run, oldest first."""
        with self._lock:
            rows = self._db.execute("SELECT body FROM events WHERE run = ? ORDER BY id", (run,))
            return [msgspec.json.decode(body, type=EventRow) for (body,) in rows]

    def keep_document(self, run: str, kind: str, body: bytes) -> None:
        """Write the newest document of a kind, such as settings or overview, over the run's previous one."""
        with self._writing() as database:
            database.execute("INSERT OR REPLACE INTO documents VALUES (?, ?, ?)", (run, kind, body))

    def document(self, run: str, kind: str) -> bytes:
        """Return the newest document of this kind; b"" if the run has no such document."""
        return self._fetch_blob("SELECT body FROM documents WHERE run = ? AND kind = ?", run, kind)

    def ledger(self, run: str) -> bytes:
        """Return the packed ledger rows of a run; b"" if the run is unknown."""
        return self._fetch_blob("SELECT rows FROM runs WHERE name = ?", run)

    def _fetch_blob(self, query: str, *names: str) -> bytes:
        with self._lock:
            row = self._db.execute(query, names).fetchone()
            return b"" if row is None else bytes(row[0])
