"""A run out of a file, asked as if its cluster were still there. Nothing changes any more, and no node is asked.

One run in one file, to be opened elsewhere: JSON lines, compressed with gzip. Any program can read it.

    {"kind": "run", "format": 1, "run": "r-1", "began": ..., "seen": ..., "exported": ..., "facts": {...}}
    {"kind": "document", "name": "settings", "body": {...}}      also "overview" and "actors"
    {"kind": "event", "body": {...}}
    {"kind": "figure", "name": "return", "points": [[time, seconds, mean, least, greatest, number], ...]}
    {"kind": "end", "lines": 1234}

Curves are also written as CSV for tables, and as event files that TensorBoard reads.

Everything is read with bounds, and nothing in it is run: the file may come from anybody.
"""

from __future__ import annotations

import csv
import dataclasses
import gzip
import io
import itertools
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NoReturn, TypeAlias

import msgspec

from memoire.accounting.account import Totals
from memoire.dashboard.settings import Settings
from memoire.errors import RunFileError
from memoire.loggers import first_event, scalars
from memoire.tables.inspection import SampleFreshness
from memoire.version import SOFTWARE

from .aggregator import Aggregator
from .answers import (
    ActorDetail,
    ActorRow,
    Actors,
    EpisodeRow,
    Forecast,
    Latency,
    Learning,
    Overview,
    Rates,
    Verdict,
)
from .history import LEVELS, MAX_EVENTS, MAX_SERIES, Curves, EventRow, History, HistoryPoint, RunInfo
from .nodes import ClusterDistribution, NodeError

FORMAT = 1
MAX_LINE_BYTES = 64 << 20
MAX_FILE_BYTES = 1 << 30
"""Of all lines together, decompressed."""
MAX_TIME = 1 << 40
LINE_POINTS = 5_000
"""Points on one line at most."""
DOCUMENTS: dict[str, Any] = {"settings": dict[str, dict[str, Any]], "overview": Overview, "actors": list[ActorRow]}
"""Kinds of documents, and what each has to be."""
MAX_NAME = 80
"""Characters of a name of a file."""


def file_name(run: str) -> str:
    """A run's name as part of the name of a file: ASCII letters, digits, "-", "_" and ".", at most 80; it may be empty,
    or have nothing but dots.
    """
    kept = (letter if (letter.isalnum() and letter.isascii()) or letter in "-_." else "_" for letter in run)
    return "".join(kept)[:MAX_NAME]


_WIDTHS = tuple(width for width, _ in LEVELS)


class RunHead(msgspec.Struct, tag="run", tag_field="kind"):
    """What the run is."""

    format: int
    run: str
    began: float
    seen: float
    exported: float
    facts: dict[str, Any]
    software: str = ""


class RunDocument(msgspec.Struct, tag="document", tag_field="kind"):
    """Something that was kept of the run whole."""

    name: str
    body: msgspec.Raw


class Event(msgspec.Struct, tag="event", tag_field="kind"):
    """Something that happened."""

    body: EventRow


class CurvePart(msgspec.Struct, tag="figure", tag_field="kind"):
    """A part of a curve, the oldest points first."""

    name: str
    points: list[tuple[int, int, float, float, float, int]]


class EndLine(msgspec.Struct, tag="end", tag_field="kind"):
    """The last line: a file that was cut short has none."""

    lines: int
    """Before this one."""


Line = RunHead | RunDocument | Event | CurvePart | EndLine


def written(history: History, row: RunInfo, now: float) -> Iterator[bytes]:
    """A run of a history as pieces of such a file."""
    packer = zlib.compressobj(6, zlib.DEFLATED, 16 + zlib.MAX_WBITS)  # 16: as gzip
    lines = 0
    for line in _lines(history, row, now):
        lines += 1
        if piece := packer.compress(msgspec.json.encode(line) + b"\n"):
            yield piece
    yield packer.compress(msgspec.json.encode(EndLine(lines)) + b"\n") + packer.flush()


def _lines(history: History, row: RunInfo, now: float) -> Iterator[Line]:
    yield RunHead(FORMAT, row.name, row.began, row.seen, now, row.facts, SOFTWARE)
    for name in DOCUMENTS:
        if body := history.document(row.name, name):
            yield RunDocument(name, msgspec.Raw(body))
    yield from map(Event, history.events(row.name))
    for name in history.names(row.name):
        points = iter(history.all(row.name, name))
        while part := list(itertools.islice(points, LINE_POINTS)):
            yield CurvePart(name, [(time, width, *point) for time, width, point in part])


def read(path: str, history: History, max_bytes: int = MAX_FILE_BYTES) -> RunHead:
    """Put the run of a file into a history that is empty; what the file says of it.

    Args:
        max_bytes: Of all lines together, decompressed.

    Raises:
        RunFileError: it cannot be read, is something else, or was cut short.
    """
    try:
        with gzip.open(path) as file:
            return _Reader(path, history).take(_split(path, file, max_bytes))
    except (OSError, EOFError, zlib.error) as error:
        raise RunFileError(path, str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RunFileError(path, f"a line of it is not as it should be ({error})") from error


def _split(path: str, file: gzip.GzipFile, max_bytes: int) -> Iterator[bytes]:
    total = 0
    while line := file.readline(MAX_LINE_BYTES + 1):
        total += len(line)
        if len(line) > MAX_LINE_BYTES or total > max_bytes:
            raise RunFileError(path, f"it has more than {max_bytes} bytes, or a line of more than {MAX_LINE_BYTES}")
        yield line


class _Reader:
    """Takes one file, line by line."""

    def __init__(self, path: str, history: History) -> None:
        self._path, self._history = path, history
        self._head: RunHead | None = None
        self._names: set[str] = set()
        self._events = 0

    def take(self, lines: Iterable[bytes]) -> RunHead:
        """Put all lines into the history."""
        decoder = msgspec.json.Decoder(Line)
        for number, text in enumerate(lines):
            line = decoder.decode(text)
            if isinstance(line, EndLine):
                self._check(line.lines == number, f"{number} lines of {line.lines} are there")
                return self._known()
            self._put(line)
        raise RunFileError(self._path, "its end is missing: it was cut short")

    def _put(self, line: RunHead | RunDocument | Event | CurvePart) -> None:
        if isinstance(line, RunHead):
            self._begin(line)
        elif isinstance(line, RunDocument):
            self._check(line.name in DOCUMENTS, f"nobody knows documents named {line.name!r}")
            msgspec.json.decode(line.body, type=DOCUMENTS[line.name])
            self._history.keep_document(self._known().run, line.name, bytes(line.body))
        elif isinstance(line, Event):
            self._events += 1
            self._check(self._events <= MAX_EVENTS, f"it has more than {MAX_EVENTS} events")
            self._history.add_event(self._known().run, line.body)
        else:
            self._draw(line)

    def _begin(self, head: RunHead) -> None:
        self._check(self._head is None, "it holds two runs")
        self._check(head.format == FORMAT, f"it has format {head.format}, and this memoire reads {FORMAT}")
        self._check(all(0.0 <= time < MAX_TIME for time in (head.began, head.seen)), "a time is out of range")
        self._head = head
        for time in (head.began, head.seen):
            self._history.keep_run(head.run, time, head.facts)

    def _draw(self, figure: CurvePart) -> None:
        self._names.add(figure.name)
        self._check(len(self._names) <= MAX_SERIES, f"it has more than {MAX_SERIES} figures")
        self._check(all(map(_is_sound, figure.points)), f"a point of {figure.name!r} is out of range")
        points = (
            (time, width, HistoryPoint(mean, least, greatest, number))
            for time, width, mean, least, greatest, number in figure.points
        )
        self._history.load(self._known().run, figure.name, points)
        self._history.flush()

    def _known(self) -> RunHead:
        if self._head is None:
            raise RunFileError(self._path, "it does not begin with a run")
        return self._head

    def _check(self, is_right: bool, reason: str) -> None:
        if not is_right:
            raise RunFileError(self._path, reason)


def _is_sound(point: tuple[int, int, float, float, float, int]) -> bool:
    time, width, *values, number = point
    return 0 <= time < MAX_TIME and width in _WIDTHS and 1 <= number < 1 << 53 and all(map(math.isfinite, values))


CHUNK: Final = 64 << 10


def csv_of(history: History, run: str, names: Sequence[str]) -> Iterator[bytes]:
    """Lines "time,seconds,steps,NAME,NAME (least),NAME (greatest),...": each bucket once, as finely as it is kept."""
    columns = {name: {(time, width): point for time, width, point in history.all(run, name)} for name in names}
    steps = {(time, width): point.greatest for time, width, point in history.all(run, "steps")}
    keys = sorted({key for column in columns.values() for key in column})
    text = io.StringIO()
    write = csv.writer(text).writerow
    write(
        ["time", "seconds", "steps", *(f"{name}{part}" for name in names for part in ("", " (least)", " (greatest)"))]
    )
    for key in keys:
        row: list[object] = [key[0], key[1], steps.get(key, "")]
        for name in names:
            point = columns[name].get(key)
            row += ["", "", ""] if point is None else [repr(point.mean), repr(point.least), repr(point.greatest)]
        write(row)
        if text.tell() > CHUNK:
            yield text.getvalue().encode()
            text.seek(0)
            text.truncate()
    yield text.getvalue().encode()


def events_of(history: History, run: str, names: Sequence[str]) -> Iterator[bytes]:
    """The means of these figures as a TensorBoard event file; its steps are the run's."""
    steps = {(time, width): point.greatest for time, width, point in history.all(run, "steps")}
    yield first_event()
    buffer = bytearray()
    for name in names:
        newest = 0
        for time, width, point in history.all(run, name):
            newest = max(newest, int(steps.get((time, width), newest)))
            buffer += scalars({name: point.mean}, newest, float(time))
            if len(buffer) > CHUNK:
                yield bytes(buffer)
                buffer.clear()
    yield bytes(buffer)


GONE = "this run was opened from a file: its nodes cannot be asked"


class OpenedRun:
    """What `Aggregator` is for a cluster, for an exported run.

    Raises:
        RunFileError: the file holds no run.
    """

    trouble = ""
    """Nothing is written."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.history = History(None)
        try:
            self._head = read(str(settings.open), self.history)
        except BaseException:
            self.history.close()
            raise
        self.newest: Overview = self._as_recorded()

    def _as_recorded(self) -> Overview:
        """The newest overview of the run, with one verdict in place of those of then."""
        body = self.history.document(self._head.run, "overview")
        kept = msgspec.json.decode(body, type=Overview) if body else _nothing(self._head.run, self._head.seen)
        text = f"This is run {self._head.run} out of a file, as it stood when it was exported. Nothing changes here."
        verdict = Verdict("good", "recorded", text)
        return dataclasses.replace(kept, verdicts=[verdict], open=[], recorded=self._head.exported)

    def start(self) -> None:
        """There is nothing to ask."""

    def close(self) -> None:
        """Let go of it."""
        self.history.close()

    def liveness(self) -> list[str]:
        """Nothing can hang."""
        return []

    def readiness(self) -> list[str]:
        """It is all there."""
        return []

    def actors(self) -> list[ActorRow]:
        """The actors that were exported."""
        return msgspec.json.decode(self.history.document(self._head.run, "actors") or b"[]", type=list[ActorRow])

    def actor(self, client: str) -> ActorDetail | None:
        """One of them; its accounts and episodes are not in the file."""
        row = next((row for row in self.actors() if row.client == client), None)
        return None if row is None else ActorDetail(row, [], {}, [])

    def episodes(self, client: str, most: int) -> list[EpisodeRow]:
        """Single episodes are not in the file."""
        return []

    def curves(self, run: str, names: list[str], since: float, until: float, points: int) -> Curves:
        """Its figures over time."""
        end = self._head.seen + 1.0
        until = min(until, end)
        begin = max(min(since or self._head.began, until), 0.0)
        then = max(self._head.exported, end)  # by then the finest points of a former run were gone
        return self.history.curves(run or self._head.run, names, begin, until, points, then)

    def events(self, run: str) -> list[EventRow]:
        """What happened to it, the oldest first."""
        return self.history.events(run or self._head.run)

    def runs(self) -> list[RunInfo]:
        """The one run."""
        return [dataclasses.replace(row, is_current=True) for row in self.history.runs()]

    def statuses(self) -> dict[str, dict[str, Any]]:
        """What nodes said is not in the file."""
        return {}

    def node_settings(self, run: str = "") -> dict[str, dict[str, Any]]:
        """Settings of each server, by its name."""
        found: dict[str, dict[str, Any]] = msgspec.json.decode(
            self.history.document(run or self._head.run, "settings") or b"{}"
        )
        return found

    def servers(self) -> dict[str, str]:
        """None can be asked."""
        return {}

    def ask_server(self, name: str, path: str) -> NoReturn:
        """Raises NodeError."""
        raise NodeError(GONE, 404)

    def ask_servers(self, paths: Mapping[str, str]) -> dict[str, Any]:
        """A NodeError for each."""
        return {name: NodeError(GONE, 404) for name in paths}

    def distribution(self, table: str, servers: Iterable[str]) -> ClusterDistribution:
        """Always raises NodeError: an exported run has no nodes to ask."""
        raise NodeError(GONE, 404)


Source: TypeAlias = Aggregator | OpenedRun
"""What pages are made of."""


def _nothing(run: str, seen: float) -> Overview:
    """The overview of a run of which none was kept."""
    return Overview(
        number=0, time=seen, run=run, runs=[run], finished=False, durable=False, totals=Totals(), missing=[],
        rates=Rates(), actors=Actors(), tables=[], learning=Learning(), freshness=SampleFreshness(), latency=Latency(),
        forecast=Forecast(), verdicts=[], nodes=[], learners=[],
    )  # fmt: skip
