"""Curves in one SQLite file: every figure of every run over time, the older the coarser, with the spikes kept.

    level 0   a second each    for an hour         each bucket: count, mean, min, max
    level 1   15 seconds       for two days
    level 2   5 minutes        for 90 days

A point goes into all levels at once, so that nothing has to be summed up later, and a dashboard that was killed has
lost what it had not flushed: seconds. Buckets that are there already are merged, not replaced.
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
"""Seconds of a bucket, and for how many seconds it is kept, level by level."""
FLUSH_INTERVAL = 5.0
PRUNE_INTERVAL = 300.0
MAX_SERIES = 4_096
"""Names of one run; more are not kept (and counted in `left_out`)."""
MAX_EVENTS = 1_000
"""Newest events of a run that are kept."""
MIN_AWAY = 5.0
"""Seconds without a look after which a curve has a gap."""
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
    """What one figure was within a stretch of time."""

    mean: float
    least: float
    greatest: float
    number: int = 1
    """Of values."""

    @classmethod
    def of(cls, values: Sequence[float]) -> HistoryPoint:
        """Of at least one value."""
        return cls(sum(values) / len(values), min(values), max(values), len(values))

    def plus(self, other: HistoryPoint) -> HistoryPoint:
        """Both together."""
        number = self.number + other.number
        mean = (self.mean * self.number + other.mean * other.number) / number
        return HistoryPoint(mean, min(self.least, other.least), max(self.greatest, other.greatest), number)


@dataclass(frozen=True, slots=True)
class RunInfo:
    """A run as it was seen last. Times are seconds since 1970."""

    name: str
    began: float
    seen: float
    facts: dict[str, Any]
    """totals, finished, return_mean: as they were then."""
    is_current: bool = False
    """Whether it is the one that is counted now."""


@dataclass(frozen=True, slots=True)
class EventRow:
    """Something that happened to a run at one moment: a mark on its curves."""

    time: float
    """Seconds since 1970."""
    kind: str
    """run_began, run_finished, node_down, node_back or node_restarted."""
    node: str
    """Name of the node; "" of the run itself."""
    text: str
    """What happened, in a sentence."""


@dataclass(frozen=True, slots=True)
class Curves:
    """Several figures over the same buckets of time; None where a bucket has none."""

    run: str
    bucket: float
    """Seconds of each."""
    time: list[float]
    """Begin of each bucket in which the cluster was looked at, seconds since 1970."""
    steps: list[float | None]
    """Steps that the run had counted then."""
    mean: dict[str, list[float | None]]
    least: dict[str, list[float | None]]
    greatest: dict[str, list[float | None]]
    away: list[list[float]]
    """Stretches in which nobody looked, from the end of a bucket to the beginning of the next."""


def _merge(points: dict[Key, HistoryPoint], key: Key, point: HistoryPoint) -> None:
    known = points.get(key)
    points[key] = point if known is None else known.plus(point)


def stretches_away(times: Sequence[float], bucket: float, patience: float) -> list[list[float]]:
    """Where buckets of so many seconds are more than `patience` seconds apart."""
    ends = ((before + bucket, after) for before, after in itertools.pairwise(times))
    return [[end, after] for end, after in ends if after - end > patience]


def _make_private(path: Path) -> None:
    """Log lines and figures are for the dashboard's owner; a file of a former version could be read by everybody."""
    if path.exists():
        files.tighten(path)
    else:
        os.close(files.create(path))


def _locked(path: str) -> FileLock:
    """Two dashboards with one file would count everything twice."""
    try:
        return FileLock(
            Path(f"{path}.lock"),
            held=lambda holder: HistoryError(path, f"it is in use by {holder}"),
            foreign=lambda what: HistoryError(path, f"{path}.lock is {what}, not its lock"),
            opening=files.append,
        )
    except HistoryError:
        raise
    except OSError as error:
        raise HistoryError(path, str(error)) from error


class History(ClosingContext):
    """The file, which one process at a time has. Thread-safe; `add` costs no disk, `flush` writes.

    Raises:
        HistoryError: it cannot be opened, or is something else.
    """

    def __init__(self, path: str | None) -> None:
        path = os.path.abspath(path) if path else None
        self.path = path or ":memory:"
        self.left_out = 0
        """Points of names beyond `MAX_SERIES`."""
        self._lock = threading.RLock()
        self._pending: dict[tuple[int, int, int], HistoryPoint] = {}
        self._ids: dict[tuple[str, str], int] = {}
        self._counts: dict[str, int] = {}
        self._file_lock = _locked(path) if path else None
        try:
            if path:
                _make_private(Path(path))
            self._db = sqlite3.connect(self.path, check_same_thread=False, isolation_level=None)
            version = self._db.execute("PRAGMA user_version").fetchone()[0]
            if version not in (0, FORMAT):
                raise HistoryError(self.path, f"it has format {version}, and this memoire writes {FORMAT}")
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
        """Keep what these figures were at this time."""
        with self._lock:
            for name, point in points.items():
                self.left_out += not self.load(run, name, [(time, 0, point)])

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """The database, for this thread alone. Raises HistoryError for what goes wrong with it."""
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
        """Write what was added. Raises HistoryError; nothing is lost then, and the next flush tries again."""
        with self._writing() as database:
            rows = [(*key, point.number, *point[:3]) for key, point in self._pending.items()]
            database.execute("BEGIN")
            database.executemany(_PUT, rows)
            database.execute("COMMIT")
            self._pending.clear()

    def prune(self, now: float) -> None:
        """Take out what is older than its level is kept."""
        with self._writing() as database:
            numbers = [number for (number,) in database.execute("SELECT id FROM series")]
            for level, (_, kept) in enumerate(LEVELS):
                rows = [(number, level, int(now - kept)) for number in numbers]
                database.executemany("DELETE FROM points WHERE series = ? AND level = ? AND time < ?", rows)

    def close(self) -> None:
        """Write the rest, and let go of the file."""
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
        """All figures of a run."""
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
        """These figures between two times, in at most about `points` buckets: the finest level that reaches back so
        far, several of its buckets taken together where there are more.

        Args:
            patience: Seconds without a look that are no gap yet.
        """
        level = next((at for at, (_, kept) in enumerate(LEVELS) if now - kept <= since), len(LEVELS) - 1)
        width = LEVELS[level][0]
        while level + 1 < len(LEVELS) and (until - since) / LEVELS[level + 1][0] >= points:
            level += 1
            width = LEVELS[level][0]
        bucket = width * max(1, -(-int(until - since) // (width * max(1, points))))
        found = {name: self._buckets(run, name, level, since, until, bucket) for name in {*names, "steps"}}
        times = sorted({time for buckets in found.values() for time in buckets})
        return Curves(
            run=run,
            bucket=float(bucket),
            time=[float(time) for time in times],
            steps=[point.greatest if (point := found["steps"].get(time)) else None for time in times],
            mean={name: [p.mean if (p := found[name].get(time)) else None for time in times] for name in names},
            least={name: [p.least if (p := found[name].get(time)) else None for time in times] for name in names},
            greatest={name: [p.greatest if (p := found[name].get(time)) else None for time in times] for name in names},
            away=stretches_away(times, float(bucket), max(patience, float(width))),
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
            begin = int(since) // width * width  # the bucket that it lies in
            found = {
                time: HistoryPoint(mean, least, greatest, count)
                for time, count, mean, least, greatest in self._db.execute(
                    "SELECT time, count, mean, least, greatest FROM points "
                    "WHERE series = ? AND level = ? AND time >= ? AND time < ? ORDER BY time",
                    (number, level, begin, until),
                )
            }
            for (known, at, time), point in self._pending.items():
                if known == number and at == level and begin <= time < until:
                    _merge(found, time, point)
            return sorted(found.items())

    def all(self, run: str, name: str) -> Iterator[tuple[int, int, HistoryPoint]]:
        """Everything that is kept of a figure, each time once, as finely as it is there: begin, seconds and figure."""
        until = float("inf")
        pieces: list[list[tuple[int, int, HistoryPoint]]] = []
        for level, (width, _) in enumerate(LEVELS):  # the finest one is the newest
            rows = [(time, width, point) for time, point in self._points(run, name, level, 0.0, 2.0**53)]
            rows = [row for row in rows if row[0] + width <= until]
            if rows:
                pieces.append(rows)
                until = min(until, rows[0][0])
        for rows in reversed(pieces):
            yield from rows

    # ---------------------------------------------------------------------------------------------------- runs

    def keep_run(self, run: str, time: float, facts: Mapping[str, Any], rows: bytes = b"") -> None:
        """Keep what is known of a run: facts for people, and its ledger."""
        with self._writing() as database:
            database.execute(
                "INSERT INTO runs VALUES (?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET seen = excluded.seen, "
                "facts = excluded.facts, rows = excluded.rows",
                (run, time, time, msgspec.json.encode(facts), rows),
            )

    def runs(self) -> list[RunInfo]:
        """All runs that were ever seen, in the order in which they began."""
        with self._lock:
            found = self._db.execute("SELECT name, began, seen, facts FROM runs ORDER BY began, name")
            return [RunInfo(name, began, seen, msgspec.json.decode(facts)) for name, began, seen, facts in found]

    def load(self, run: str, name: str, points: Iterable[tuple[float, int, HistoryPoint]]) -> bool:
        """Take what `all` of another history gave: begin, seconds and figure. Each goes into all levels that are not
        finer than it is. False: the run has too many figures.
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
        """Keep something that happened to a run. Of more than `MAX_EVENTS` the oldest go."""
        with self._writing() as database:
            database.execute("INSERT INTO events (run, body) VALUES (?, ?)", (run, msgspec.json.encode(event)))
            database.execute(
                "DELETE FROM events WHERE run = ? AND id <= "
                "(SELECT id FROM events WHERE run = ? ORDER BY id DESC LIMIT 1 OFFSET ?)",
                (run, run, MAX_EVENTS),
            )

    def events(self, run: str) -> list[EventRow]:
        """What happened to a run, the oldest first."""
        with self._lock:
            found = self._db.execute("SELECT body FROM events WHERE run = ? ORDER BY id", (run,))
            return [msgspec.json.decode(body, type=EventRow) for (body,) in found]

    def keep_document(self, run: str, kind: str, body: bytes) -> None:
        """Keep the newest of a kind of document of a run: its settings, its overview."""
        with self._writing() as database:
            database.execute("INSERT OR REPLACE INTO documents VALUES (?, ?, ?)", (run, kind, body))

    def document(self, run: str, kind: str) -> bytes:
        """The newest of this kind; empty where there is none."""
        return self._one("SELECT body FROM documents WHERE run = ? AND kind = ?", run, kind)

    def ledger(self, run: str) -> bytes:
        """Its rows, packed; empty where it is not known."""
        return self._one("SELECT rows FROM runs WHERE name = ?", run)

    def _one(self, question: str, *names: str) -> bytes:
        with self._lock:
            row = self._db.execute(question, names).fetchone()
            return b"" if row is None else bytes(row[0])
