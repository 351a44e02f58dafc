"""Exported run: the file of a run, and a source for the dashboard's pages that reads the file instead of a cluster.

A file holds one run as JSON lines, compressed with gzip, so that any program can read the file:

    {"kind": "run", "format": 1, "run": "r-1", "began": ..., "seen": ..., "exported": ..., "facts": {...}}
    {"kind": "document", "name": "settings", "body": {...}}      also "overview" and "actors"
    {"kind": "event", "body": {...}}
    {"kind": "figure", "name": "return", "points": [[time, seconds, mean, least, greatest, number], ...]}
    {"kind": "end", "lines": 1234}

Curves can also be exported as CSV, and as event files for TensorBoard.

The reader checks types and sizes, and executes nothing from the file: its author may be untrusted.
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
"""Limit of all lines together, decompressed."""
MAX_TIME = 1 << 40
LINE_POINTS = 5_000
"""Largest number of points on one line."""
DOCUMENTS: dict[str, Any] = {"settings": dict[str, dict[str, Any]], "overview": Overview, "actors": list[ActorRow]}
"""Type of each kind of document."""
MAX_NAME = 80
"""Longest result of `file_name`, in characters."""


def file_name(run: str) -> str:
    """Return a run's name as part of a file name: at most 80 ASCII letters, digits, "-", "_" and ".". The result may be
    empty, or have only dots.
    """
    kept = (letter if (letter.isalnum() and letter.isascii()) or letter in "-_." else "_" for letter in run)
    return "".join(kept)[:MAX_NAME]


_WIDTHS = tuple(width for width, _ in LEVELS)


class RunHead(msgspec.Struct, tag="run", tag_field="kind"):
    """First line of a file: name, times and facts of the run. Times are seconds since 1970."""

    format: int
    run: str
    began: float
    seen: float
    exported: float
    facts: dict[str, Any]
    software: str = ""


class RunDocument(msgspec.Struct, tag="document", tag_field="kind"):
    """Line with one document of the run, of a kind in `DOCUMENTS`."""

    name: str
    body: msgspec.Raw


class Event(msgspec.Struct, tag="event", tag_field="kind"):
    """Line with one event of the run."""

    body: EventRow


class CurvePart(msgspec.Struct, tag="figure", tag_field="kind"):
    """Line with a part of a curve, oldest points first."""

    name: str
    points: list[tuple[int, int, float, float, float, int]]


class EndLine(msgspec.Struct, tag="end", tag_field="kind"):
    """Last line of a file; a truncated file lacks this line."""

    lines: int
    """Number of lines before the last line."""


Line = RunHead | RunDocument | Event | CurvePart | EndLine


def export_pieces(history: History, row: RunInfo, now: float) -> Iterator[bytes]:
    """Yield a run of a history as pieces of an export file."""
    packer = zlib.compressobj(6, zlib.DEFLATED, 16 + zlib.MAX_WBITS)  # 16 selects the gzip format
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
        points = iter(history.all_points(row.name, name))
        while part := list(itertools.islice(points, LINE_POINTS)):
            yield CurvePart(name, [(time, width, *point) for time, width, point in part])


def read(path: str, history: History, max_bytes: int = MAX_FILE_BYTES) -> RunHead:
    """Load the run of a file into an empty history, and return the file's first line.

    Args:
        max_bytes: Limit of all lines together, decompressed.

    Raises:
        RunFileError: the file cannot be read, is not an exported run, exceeds a limit, or was cut short.
    """
    try:
        with gzip.open(path) as file:
            return _Loader(path, history).load(_split(path, file, max_bytes))
    except (OSError, EOFError, zlib.error) as error:
        raise RunFileError(path, str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RunFileError(path, f"a line is malformed ({error})") from error


def _split(path: str, file: gzip.GzipFile, max_bytes: int) -> Iterator[bytes]:
    total = 0
    while line := file.readline(MAX_LINE_BYTES + 1):
        total += len(line)
        if len(line) > MAX_LINE_BYTES or total > max_bytes:
            raise RunFileError(path, f"it has more than {max_bytes} bytes, or a line of more than {MAX_LINE_BYTES}")
        yield line


class _Loader:
    """Loader of one file into a history, line by line."""

    def __init__(self, path: str, history: History) -> None:
        self._path, self._history = path, history
        self._head: RunHead | None = None
        self._names: set[str] = set()
        self._events = 0

    def load(self, lines: Iterable[bytes]) -> RunHead:
        """Load all lines into the history; return the first line."""
        decoder = msgspec.json.Decoder(Line)
        for number, text in enumerate(lines):
            line = decoder.decode(text)
            if isinstance(line, EndLine):
                self._check(line.lines == number, f"it has {number} of {line.lines} lines")
                return self._require_head()
            self._load_line(line)
        raise RunFileError(self._path, "it was cut short: its last line is missing")

    def _load_line(self, line: RunHead | RunDocument | Event | CurvePart) -> None:
        if isinstance(line, RunHead):
            self._load_head(line)
        elif isinstance(line, RunDocument):
            self._check(line.name in DOCUMENTS, f"it has unknown documents named {line.name!r}")
            msgspec.json.decode(line.body, type=DOCUMENTS[line.name])
            self._history.keep_document(self._require_head().run, line.name, bytes(line.body))
        elif isinstance(line, Event):
            self._events += 1
            self._check(self._events <= MAX_EVENTS, f"it has more than {MAX_EVENTS} events")
            self._history.add_event(self._require_head().run, line.body)
        else:
            self._load_curve(line)

    def _load_head(self, head: RunHead) -> None:
        self._check(self._head is None, "it holds two runs")
        self._check(head.format == FORMAT, f"it has format {head.format}, but this memoire reads format {FORMAT}")
        self._check(all(0.0 <= time < MAX_TIME for time in (head.began, head.seen)), "a time of a run is out of range")
        self._head = head
        for time in (head.began, head.seen):
            self._history.keep_run(head.run, time, head.facts)

    def _load_curve(self, figure: CurvePart) -> None:
        self._names.add(figure.name)
        self._check(len(self._names) <= MAX_SERIES, f"it has more than {MAX_SERIES} figures")
        self._check(all(map(_is_sound, figure.points)), f"a point of {figure.name!r} is out of range")
        points = (
            (time, width, HistoryPoint(mean, least, greatest, number))
            for time, width, mean, least, greatest, number in figure.points
        )
        self._history.load(self._require_head().run, figure.name, points)
        self._history.flush()

    def _require_head(self) -> RunHead:
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
    """Yield CSV lines "time,seconds,steps,NAME,NAME (least),NAME (greatest),...", each time once, at its finest."""
    columns = {name: {(time, width): point for time, width, point in history.all_points(run, name)} for name in names}
    steps = {(time, width): point.greatest for time, width, point in history.all_points(run, "steps")}
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
    """Yield the means of these figures as pieces of a TensorBoard event file, whose steps are the run's steps."""
    steps = {(time, width): point.greatest for time, width, point in history.all_points(run, "steps")}
    yield first_event()
    buffer = bytearray()
    for name in names:
        newest = 0
        for time, width, point in history.all_points(run, name):
            newest = max(newest, int(steps.get((time, width), newest)))
            buffer += scalars({name: point.mean}, newest, float(time))
            if len(buffer) > CHUNK:
                yield bytes(buffer)
                buffer.clear()
    yield bytes(buffer)


GONE = "this run was opened from a file: its nodes cannot be asked"


class OpenedRun:
    """Exported run behind the interface of `Aggregator`, which pages read.

    Raises:
        RunFileError: the file is not an exported run.
    """

    problem = ""
    """Error of the history file: always empty, because an opened run writes no file."""

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
        """Return the last overview of the run, with one verdict in place of the recorded ones."""
        body = self.history.document(self._head.run, "overview")
        kept = msgspec.json.decode(body, type=Overview) if body else _empty_overview(self._head.run, self._head.seen)
        text = f"This is run {self._head.run} from a file, as it was at its export. Its figures do not change any more."
        verdict = Verdict("good", "recorded", text)
        return dataclasses.replace(kept, verdicts=[verdict], open=[], recorded=self._head.exported)

    def start(self) -> None:
        """Do nothing, because an opened run asks no nodes."""

    def close(self) -> None:
        """Close the history in memory."""
        self.history.close()

    def liveness(self) -> list[str]:
        """Return no problems, because an opened run has no thread that can hang."""
        return []

    def readiness(self) -> list[str]:
        """Return no problems, because the whole run is loaded."""
        return []

    def actors(self) -> list[ActorRow]:
        """Return a row for each actor in the file."""
        return msgspec.json.decode(self.history.document(self._head.run, "actors") or b"[]", type=list[ActorRow])

    def actor(self, client: str) -> ActorDetail | None:
        """Return an exported actor, without accounts and episodes, which the file lacks; None for an unknown client."""
        row = next((row for row in self.actors() if row.client == client), None)
        return None if row is None else ActorDetail(row, [], {}, [])

    def episodes(self, client: str, most: int) -> list[EpisodeRow]:
        """Return no episodes, because the file has no single episodes."""
        return []

    def curves(self, run: str, names: list[str], since: float, until: float, points: int) -> Curves:
        """Return figures of the run between two times, as `History.curves`; `since` 0 is the beginning of the run."""
        end = self._head.seen + 1.0
        until = min(until, end)
        begin = max(min(since or self._head.began, until), 0.0)
        then = max(self._head.exported, end)  # finer levels were pruned before the export
        return self.history.curves(run or self._head.run, names, begin, until, points, then)

    def events(self, run: str) -> list[EventRow]:
        """Return the events of the run, oldest first."""
        return self.history.events(run or self._head.run)

    def runs(self) -> list[RunInfo]:
        """Return the exported run as the current one."""
        return [dataclasses.replace(row, is_current=True) for row in self.history.runs()]

    def statuses(self) -> dict[str, dict[str, Any]]:
        """Return no statuses, because the file has no answers of nodes."""
        return {}

    def node_settings(self, run: str = "") -> dict[str, dict[str, Any]]:
        """Return the settings of each server, by the server's name."""
        settings: dict[str, dict[str, Any]] = msgspec.json.decode(
            self.history.document(run or self._head.run, "settings") or b"{}"
        )
        return settings

    def servers(self) -> dict[str, str]:
        """Return no servers, because an opened run asks no nodes."""
        return {}

    def ask_server(self, name: str, path: str) -> NoReturn:
        """Raise NodeError, because an opened run asks no nodes."""
        raise NodeError(GONE, 404)

    def ask_servers(self, paths: Mapping[str, str]) -> dict[str, Any]:
        """Return a NodeError for each server, because an opened run asks no nodes."""
        return {name: NodeError(GONE, 404) for name in paths}

    def distribution(self, table: str, servers: Iterable[str]) -> ClusterDistribution:
        """Raise NodeError, because an opened run asks no nodes."""
        raise NodeError(GONE, 404)


Source: TypeAlias = Aggregator | OpenedRun
"""Source of the data on the dashboard's pages."""


def _empty_overview(run: str, seen: float) -> Overview:
    """Return an overview for a run whose file has no overview."""
    return Overview(
        number=0, time=seen, run=run, runs=[run], finished=False, durable=False, totals=Totals(), missing=[],
        rates=Rates(), actors=Actors(), tables=[], learning=Learning(), freshness=SampleFreshness(), latency=Latency(),
        forecast=Forecast(), verdicts=[], nodes=[], learners=[],
    )  # fmt: skip
