"""Where the nodes are, and how they are asked: plain HTTP, one short question each.

How things are spread: what a table holds, over all servers, out of what each says at /distribution; and actors by a
figure. Pure.

Log lines of all servers as one list, newest first, a page at a time. Pure: whoever asks the servers is passed in.

Each server numbers its lines. A cursor is where every server's lines were left off, "12@server-0,7@server-1": with
direction "older" the lines before it, with "newer" those after it, which may not have been written yet.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import math
import queue
import re
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal
from urllib.parse import quote, unquote, urlencode

import msgspec
import numpy as np

from memoire.errors import ParameterError
from memoire.figures import shown
from memoire.net.addresses import LookupResult, NameResolver, connect_before, shared_names
from memoire.security.access import Tokens
from memoire.tables import registry
from memoire.tables.inspection import PER_TEN

RESOLVE_INTERVAL = 5.0
"""Seconds between two look-ups of a name."""
LOOKUP_TIMEOUT = 3.0
"""Seconds that a look-up of all names may take."""
MAX_NODES = 1024
MAX_ANSWER_BYTES = 16 << 20
"""Bytes of one page."""
MAX_TOTAL_PAGE_BYTES = 128 << 20


class NodeError(Exception):
    """A node did not answer, or not with what was asked for; says why."""

    def __init__(self, text: str, status: int = 0) -> None:
        super().__init__(text, status)
        self.text, self.status = text, status

    def __str__(self) -> str:
        return self.text


def misunderstood(who: str, error: Exception) -> NodeError:
    """What came in place of an answer as it should be; a NodeError as it is."""
    return error if isinstance(error, NodeError) else NodeError(f"{who} answered what is not understood: {error}")


def ask_all(pool: Executor, questions: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
    """What each of these calls returns, by name, all made at the same time; or the NodeError that came instead."""

    def one(name: str) -> Any:
        try:
            return questions[name]()
        except (NodeError, msgspec.DecodeError, KeyError, TypeError) as error:
            return misunderstood(name, error)

    return dict(zip(questions, pool.map(one, questions), strict=True))


def ask(url: str, path: str, *, token: Tokens | str | None = None, timeout: float = 2.0, accept: str = "") -> bytes:
    """The body of a page; the first of the tokens is given.

    Args:
        timeout: Seconds for everything: to find and reach the node, and to have the whole answer.

    Raises:
        NodeError: nobody answers in time, or something else than 200.
    """
    given = token.first if isinstance(token, Tokens) else token
    headers = {"Accept": accept or "*/*"} | ({} if given is None else {"Authorization": f"Bearer {given}"})
    try:
        status, body = _get(url, path, headers, time.monotonic() + timeout)
    except TimeoutError:
        raise NodeError(f"{url} does not answer: {path} did not come as a whole within {timeout:g} s") from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise NodeError(f"{url} does not answer: {_words(error)}") from None
    if len(body) > MAX_ANSWER_BYTES:
        raise NodeError(f"{url}{path} answered with more than {MAX_ANSWER_BYTES} bytes")
    if status != 200:
        raise NodeError(f"{url}{path} answered {status}: {_reason(body)}", status)
    return body


class NodeQuestions:
    """Pages of one node, one after the other, within so many seconds in all.

    Args:
        timeout: Seconds that it has for one page.
        seconds: And for all of them.
        is_over: Asked before each page: whether nobody waits for them any more.
        max_bytes: Bytes that all pages may have together.
    """

    def __init__(
        self,
        url: str,
        token: Tokens | str | None,
        timeout: float,
        seconds: float,
        is_over: Callable[[], bool],
        *,
        max_bytes: int = MAX_TOTAL_PAGE_BYTES,
    ) -> None:
        self._url, self._token, self._timeout, self._seconds, self._is_over = url, token, timeout, seconds, is_over
        self._max_bytes = max_bytes
        self._deadline, self._bytes = time.monotonic() + seconds, 0

    def get(self, path: str) -> bytes:
        """The body of a page.

        Raises:
            NodeError: as `ask`; or all pages together took too long, or are too long.
        """
        left = self._deadline - time.monotonic()
        if left <= 0.0 or self._is_over():
            why = "the dashboard ends" if left > 0.0 else f"its pages took more than {self._seconds:g} s"
            raise NodeError(f"{self._url} was not asked for {path}: {why}")
        body = ask(self._url, path, token=self._token, timeout=min(self._timeout, left))
        self._bytes += len(body)
        if self._bytes > self._max_bytes:
            raise NodeError(f"{self._url} answered with more than {self._max_bytes} bytes in all")
        return body

    def json(self, path: str) -> dict[str, Any]:
        """The same, read."""
        told: dict[str, Any] = msgspec.json.decode(self.get(path))
        return told


def _get(url: str, path: str, headers: dict[str, str], deadline: float) -> tuple[int, bytes]:
    """Status and body of a page, up to a byte more than is taken."""
    parts = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port or 80)
    with contextlib.closing(connection):
        connection.sock = connect_before(connection.host, connection.port, deadline)
        connection.request("GET", parts.path.rstrip("/") + path, headers=headers)
        with connection.getresponse() as answer:
            return answer.status, answer.read(MAX_ANSWER_BYTES + 1)


def _words(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or str(error) or type(error).__name__)


def _reason(body: bytes) -> str:
    try:
        said: Any = msgspec.json.decode(body)
        return str(said["error"])[:300]
    except (msgspec.DecodeError, KeyError, TypeError):
        return "it does not say why"


class NodeAddresses:
    """The nodes' addresses: those given, and those of names, looked up on threads of their own.

    Args:
        given: "http://..." or "dns:NAME:PORT".
        resolver: Looks names up; None is the one of this process.
    """

    def __init__(self, given: Iterable[str], resolver: NameResolver | None = None) -> None:
        given = tuple(given)
        self._fixed = [each.rstrip("/") for each in given if not each.startswith("dns:")]
        self._names = [each[4:] for each in given if each.startswith("dns:")]
        self._resolver = resolver or shared_names()
        self._found: dict[str, list[str]] = {}
        self.trouble: dict[str, str] = {}
        """Names that were not found, and why."""
        self._closed = threading.Event()

    def begin(self) -> None:
        """Look the names up again and again, until `close`."""
        if self._names:
            threading.Thread(target=self._run, name="memoire-dashboard-dns", daemon=True).start()

    def now(self) -> list[str]:
        """All of them, each once."""
        found = [url for name in self._names for url in self._found.get(name, [])]
        return list(dict.fromkeys([*self._fixed, *found]))[:MAX_NODES]

    def close(self) -> None:
        """Look nothing up any more."""
        self._closed.set()

    def look(self, timeout: float = LOOKUP_TIMEOUT) -> None:
        """Look all names up once, all at the same time; addresses found before stay if the name server is silent.

        Args:
            timeout: Seconds for all of them. A later answer counts at the next look.
        """
        deadline = time.monotonic() + timeout
        answers: queue.SimpleQueue[tuple[str, LookupResult]] = queue.SimpleQueue()
        for name in self._names:
            self._resolver.ask(name.rpartition(":")[0], partial(_pass_on, answers, name))
        silent = dict.fromkeys(self._names, f"no answer from the name server within {timeout:g} s")
        with contextlib.suppress(queue.Empty):
            while silent:
                name, found = answers.get(timeout=max(0.0, deadline - time.monotonic()))
                silent.pop(name, None)
                self._take(name, found)
        self.trouble |= silent

    def _take(self, name: str, found: LookupResult) -> None:
        try:
            urls = _urls(found.addresses, int(name.rpartition(":")[2]))
        except ValueError:
            self.trouble[name] = f"dns:{name} has no port: give its number, as in dns:NAME:8080"
            return
        if found.trouble:
            self.trouble[name] = found.trouble
        else:
            self._found[name] = urls
            self.trouble.pop(name, None)

    def _run(self) -> None:
        while not self._closed.is_set():
            began = time.monotonic()
            self.look()
            self._closed.wait(max(0.1, RESOLVE_INTERVAL - (time.monotonic() - began)))


def _pass_on(answers: queue.SimpleQueue[tuple[str, LookupResult]], name: str, found: LookupResult) -> None:
    answers.put((name, found))


def _urls(addresses: Iterable[str], port: int) -> list[str]:
    return [f"http://[{each}]:{port}" if ":" in each else f"http://{each}:{port}" for each in sorted(addresses)]


@dataclass(frozen=True, slots=True)
class ClusterHistogram:
    """How many values lie where."""

    bounds: list[float]
    """Where buckets begin, and where the last one ends: one more than `counts`, or none."""
    counts: list[int]
    zeros: int
    """Values that are 0: in no bucket."""
    least: float | None
    greatest: float | None


@dataclass(frozen=True, slots=True)
class ClusterDistribution:
    """How what a table holds is spread, over all servers."""

    # fmt: off
    table: str
    storage: str
    unit: str
    """What was looked at, in words: "entries", or "samples", which were drawn by weight already."""
    weighed: str
    """What the weights are, as a sentence."""
    looked: int
    """How many were looked at, of `held`."""
    held: int
    """Samples, or entries of episodes, that can be drawn."""
    population: float
    """Entries of positive weight, in the actors' memories or in the servers' episodes."""
    effective: Annotated[float | None, shown("Effective size", "So many entries of equal chance would be drawn as "
        "often twice. It is the number of entries where all chances are alike, and 1 where a single entry is always "
        "drawn.", formula="1 ÷ Σ p²", docs="sampling.md")]
    weights: ClusterHistogram
    """What draws are proportional to."""
    ages: ClusterHistogram
    """Seconds since the entries were recorded."""
    servers: list[str]
    missing: list[str]
    """Servers that did not answer."""
    # fmt: on


@dataclass(frozen=True, slots=True)
class ActorSpread:
    """How the actors of a run are spread by one figure."""

    figure: str
    actors: int
    """Those that have the figure."""
    median: float | None
    mean: float | None
    histogram: ClusterHistogram
    """In buckets of equal width."""


def merged(table: str, told: Mapping[str, Mapping[str, Any]], missing: Sequence[str]) -> ClusterDistribution:
    """All servers' parts as one.

    Args:
        told: What each server says, by name.
        missing: Servers that did not answer.
    """
    parts = list(told.values())
    storage = parts[0]["storage"] if parts else ""
    kind = registry.words_of(storage)
    most = max((part["total_weight"] for part in parts), default=0.0)
    weights = [part["total_weight"] / most if most > 0.0 else 0.0 for part in parts]  # their sum could overflow
    total = math.fsum(weights)
    # p of an entry is its chance at its server, times that server's share of the whole weight.
    twice = math.fsum(
        (weight / total) ** 2 / part["effective"]
        for weight, part in zip(weights, parts, strict=True)
        if part["effective"]
    )
    return ClusterDistribution(
        table=table,
        storage=storage,
        unit=kind.unit,
        weighed=kind.weighed,
        looked=sum(part["looked"] for part in parts),
        held=sum(part["held"] for part in parts),
        population=math.fsum(part["population"] for part in parts),
        effective=1.0 / twice if twice > 0.0 else None,
        weights=_added([part["weights"] for part in parts]),
        ages=_added([part["ages"] for part in parts]),
        servers=sorted(told),
        missing=sorted(missing),
    )


def _added(parts: Sequence[Mapping[str, Any]]) -> ClusterHistogram:
    """Histograms of the same buckets as one. A part stands for what it looked at."""
    some = [part for part in parts if part["counts"]]
    seen = [part for part in parts if part["counts"] or part["zeros"]]
    first = min((part["first"] for part in some), default=0)
    end = max((part["first"] + len(part["counts"]) for part in some), default=first)
    counts = [0] * (end - first)
    for part in some:
        for place, count in enumerate(part["counts"], part["first"] - first):
            counts[place] += count
    return ClusterHistogram(
        bounds=[10.0 ** (bucket / PER_TEN) for bucket in range(first, end + 1)] if counts else [],
        counts=counts,
        zeros=sum(part["zeros"] for part in parts),
        least=min((part["least"] for part in seen), default=None),
        greatest=max((part["greatest"] for part in seen), default=None),
    )


def spread_of(figure: str, values: Sequence[float], bins: int) -> ActorSpread:
    """How actors are spread by the values of one figure, in so many buckets of equal width."""
    if not values:
        return ActorSpread(figure, 0, None, None, ClusterHistogram([], [], 0, None, None))
    counts, bounds = np.histogram(values, bins)
    return ActorSpread(
        figure=figure,
        actors=len(values),
        median=float(np.median(values)),
        mean=float(np.mean(values)),
        histogram=ClusterHistogram(bounds.tolist(), counts.tolist(), 0, min(values), max(values)),
    )


@dataclass(frozen=True, slots=True)
class LogRow:
    """One log line."""

    server: str
    index: int
    """At its server, growing."""
    received: float
    time: str
    client: str
    label: str
    text: str
    """As the actor sent it: never to be taken for markup."""
    name: str = ""
    """That a person or Kubernetes gave to the actor; "" for none."""


@dataclass(frozen=True, slots=True)
class LogPage:
    """Lines of all servers together, and how to go on."""

    rows: list[LogRow]
    older: str
    """Give this as `cursor` with direction=older for the lines before these."""
    newer: str
    """Give this as `cursor` with direction=newer for the lines after these: later ones too, that are not there yet."""
    more: bool
    """Whether there are more in the direction that was asked for."""
    missing: list[str]
    """Servers that did not answer."""


CURSOR = r"([0-9]{1,15}@[A-Za-z0-9_.~%-]{1,800}(,[0-9]{1,15}@[A-Za-z0-9_.~%-]{1,800})*)?"

Direction = Literal["older", "newer"]
AskServers = Callable[[dict[str, str]], dict[str, Any]]


def read_cursor(text: str) -> dict[str, int]:
    """What `LogPage.older` and `newer` say.

    Raises:
        ParameterError: it is none of them.
    """
    if not re.fullmatch(CURSOR, text):
        raise ParameterError("cursor", text[:80], "as a page of lines gave it, in `older` or `newer`")
    pairs = (part.split("@") for part in text.split(",") if part)
    return {unquote(name): int(index) for index, name in pairs}


def write_cursor(places: Mapping[str, int]) -> str:
    """What `read_cursor` reads."""
    return ",".join(f"{index}@{quote(name, safe='')}" for name, index in sorted(places.items()))


def search(
    ask: AskServers,
    servers: list[str],
    wanted: Mapping[str, str],
    cursor: Mapping[str, int],
    direction: Direction,
    most: int,
) -> LogPage:
    """A page of lines.

    Raises:
        ParameterError: the servers do not take what is wanted; says why.

    Args:
        wanted: text, client, label, since, until, run: as the servers' /logs takes them, which search themselves.
        cursor: Where a page before left off; a server that is not in it begins at its newest line (older), or at its
            oldest one (newer).
    """
    edge = {"older": "before", "newer": "after"}[direction]
    asked = {name: dict(wanted) | {"most": str(most)} for name in servers}
    for name, query in asked.items():
        if name in cursor:
            query[edge] = str(max(0, cursor[name]))
        if direction == "older":
            query["newest"] = "1"
    answers = ask({name: f"/logs?{urlencode(query)}" for name, query in asked.items()})
    found: dict[str, list[LogRow]] = {}
    missing, more = [], False
    for name, told in answers.items():
        if isinstance(told, NodeError):
            if told.status == 400 and "run" not in wanted:
                raise ParameterError("logs", dict(wanted), told.text)
            if told.status != 400:  # else it has never heard of this run, and has no line of it
                missing.append(name)
            continue
        found[name] = [LogRow(server=name, **row) for row in told["rows"]]
        more = more or not told["is_all"]
    rows = _together(found.values(), direction)
    more, rows = more or len(rows) > most, rows[:most]
    older, newer = (write_cursor(dict(cursor) | edge) for edge in _edges(found, rows, cursor, direction))
    rows.sort(
        key=lambda row: (row.received, row.server, row.index), reverse=True
    )  # a page shows the newest first, however it was found
    return LogPage(rows, older, newer, more, missing)


def _together(found: Iterable[list[LogRow]], direction: Direction) -> list[LogRow]:
    """All in the order of their times, yet each server's in the order of their numbers, also where its clock was set
    back: a page that ends in between leaves none out.
    """
    sign, placed = -1 if direction == "older" else 1, []
    for each in found:
        latest = itertools.accumulate((sign * row.received for row in each), max)
        placed += [(time, row.server, number, row) for number, (time, row) in enumerate(zip(latest, each, strict=True))]
    return [row for *_, row in sorted(placed, key=lambda each: each[:3])]


def _edges(
    found: Mapping[str, list[LogRow]], rows: list[LogRow], cursor: Mapping[str, int], direction: Direction
) -> tuple[dict[str, int], dict[str, int]]:
    """Where to go on, in both directions: a server whose lines did not get onto the page goes on where it was."""
    older, newer = {}, {}
    for name, came in found.items():
        shown = [row.index for row in rows if row.server == name]
        seen = [row.index for row in came]
        if direction == "older":
            older[name] = min(shown, default=max(seen, default=-1) + 1)
            newer[name] = max(seen, default=max(0, cursor.get(name, 1) - 1))
        else:
            older[name] = min(shown, default=cursor.get(name, 0) + 1)
            newer[name] = max(shown, default=cursor.get(name, 0))
    return older, newer
