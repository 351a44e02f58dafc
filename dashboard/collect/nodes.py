"""Addresses of nodes, HTTP requests to them, and their answers combined over all servers.

Distributions: of a table, combined from the /distribution of all servers, and of actors by a figure. Without I/O.

Log lines of all servers in pages, newest first. Without I/O: the caller passes in the function that asks the servers.

Each server numbers its lines. A cursor is a position in the lines of every server: "12@server-0,7@server-1". Direction
"older" reads the lines before the cursor, "newer" the lines after the cursor, also lines that are written later.
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
"""Seconds between two look-ups of the same name."""
LOOKUP_TIMEOUT = 3.0
"""Seconds that a look-up of all names may take."""
MAX_NODES = 1024
MAX_ANSWER_BYTES = 16 << 20
"""Largest body of one page, in bytes."""
MAX_TOTAL_PAGE_BYTES = 128 << 20


class NodeError(Exception):
    """Error of a request to a node, with the reason, and the HTTP status of its answer; status 0 without an answer."""

    def __init__(self, text: str, status: int = 0) -> None:
        super().__init__(text)
        self.status = status


def answer_error(who: str, error: Exception) -> NodeError:
    """Return an error in the answer of the node `who` as a NodeError; a NodeError unchanged."""
    return error if isinstance(error, NodeError) else NodeError(f"{who} sent an answer that cannot be read: {error}")


def ask_all(pool: Executor, questions: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
    """Call all functions in parallel. Return each result, or the NodeError of a call that failed, by name."""

    def call(name: str) -> Any:
        try:
            return questions[name]()
        except (NodeError, msgspec.DecodeError, KeyError, TypeError) as error:
            return answer_error(name, error)

    return dict(zip(questions, pool.map(call, questions), strict=True))


def ask(url: str, path: str, *, token: Tokens | str | None = None, timeout: float = 2.0, accept: str = "") -> bytes:
    """Return the body of a page. The request carries the token, or the first of several tokens.

    Args:
        timeout: Seconds for the whole request: name look-up, connection and complete answer.

    Raises:
        NodeError: no complete answer arrives in time, the body is too long, or the status is not 200.
    """
    bearer = token.first if isinstance(token, Tokens) else token
    headers = {"Accept": accept or "*/*"} | ({} if bearer is None else {"Authorization": f"Bearer {bearer}"})
    try:
        status, body = _get(url, path, headers, time.monotonic() + timeout)
    except TimeoutError:
        raise NodeError(f"{url} does not answer: {path} did not arrive completely within {timeout:g} s") from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise NodeError(f"{url} does not answer: {_describe(error)}") from None
    if len(body) > MAX_ANSWER_BYTES:
        raise NodeError(f"{url}{path} answered with more than {MAX_ANSWER_BYTES} bytes")
    if status != 200:
        raise NodeError(f"{url}{path} answered {status}: {_reason(body)}", status)
    return body


class NodeQuestions:
    """Sequence of requests to one node, with a time limit and a byte limit for all pages together.

    Args:
        timeout: Seconds for each page.
        seconds: Seconds for all pages together.
        is_over: Function called before each page; True refuses the request.
        max_bytes: Bytes that all pages together may have.
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
        """Return the body of a page.

        Raises:
            NodeError: as for `ask`; or `is_over` returned True, or all pages together exceed their time or bytes.
        """
        remaining = self._deadline - time.monotonic()
        if remaining <= 0.0 or self._is_over():
            why = "the dashboard is closing" if remaining > 0.0 else f"its pages took more than {self._seconds:g} s"
            raise NodeError(f"{self._url} was not asked for {path}: {why}")
        body = ask(self._url, path, token=self._token, timeout=min(self._timeout, remaining))
        self._bytes += len(body)
        if self._bytes > self._max_bytes:
            raise NodeError(f"{self._url} answered with more than {self._max_bytes} bytes in all")
        return body

    def json(self, path: str) -> dict[str, Any]:
        """Return the decoded JSON body of a page. Raises NodeError, as `get`, or msgspec.DecodeError."""
        body: dict[str, Any] = msgspec.json.decode(self.get(path))
        return body


def _get(url: str, path: str, headers: dict[str, str], deadline: float) -> tuple[int, bytes]:
    """Return status and body of a page, read up to one byte beyond `MAX_ANSWER_BYTES`."""
    parts = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port or 80)
    with contextlib.closing(connection):
        connection.sock = connect_before(connection.host, connection.port, deadline)
        connection.request("GET", parts.path.rstrip("/") + path, headers=headers)
        with connection.getresponse() as answer:
            return answer.status, answer.read(MAX_ANSWER_BYTES + 1)


def _describe(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or str(error) or type(error).__name__)


def _reason(body: bytes) -> str:
    try:
        content: Any = msgspec.json.decode(body)
        return str(content["error"])[:300]
    except (msgspec.DecodeError, KeyError, TypeError):
        return "no reason given"


class NodeAddresses:
    """URLs of nodes: fixed URLs, and URLs of DNS names, which background threads look up.

    Args:
        addresses: "http://..." or "dns:NAME:PORT".
        resolver: Resolver of the names; None takes the resolver that this process shares.
    """

    def __init__(self, addresses: Iterable[str], resolver: NameResolver | None = None) -> None:
        addresses = tuple(addresses)
        self._fixed = [each.rstrip("/") for each in addresses if not each.startswith("dns:")]
        self._names = [each[4:] for each in addresses if each.startswith("dns:")]
        self._resolver = resolver or shared_names()
        self._resolved: dict[str, list[str]] = {}
        self.trouble: dict[str, str] = {}
        """Error text of each name whose newest look-up failed."""
        self._closed = threading.Event()

    def begin(self) -> None:
        """Start a thread that looks the names up every `RESOLVE_INTERVAL` seconds, until `close`."""
        if self._names:
            threading.Thread(target=self._run, name="memoire-dashboard-dns", daemon=True).start()

    def known_urls(self) -> list[str]:
        """Return all known URLs, each once, at most `MAX_NODES`."""
        resolved = [url for name in self._names for url in self._resolved.get(name, [])]
        return list(dict.fromkeys([*self._fixed, *resolved]))[:MAX_NODES]

    def close(self) -> None:
        """End the thread that looks the names up."""
        self._closed.set()

    def resolve_names(self, timeout: float = LOOKUP_TIMEOUT) -> None:
        """Look all names up once, in parallel, and wait. Known addresses stay if the name server does not answer.

        Args:
            timeout: Seconds for all names. The next call uses answers that arrive later.
        """
        deadline = time.monotonic() + timeout
        answers: queue.SimpleQueue[tuple[str, LookupResult]] = queue.SimpleQueue()
        for name in self._names:
            self._resolver.ask(name.rpartition(":")[0], partial(_put_result, answers, name))
        silent = dict.fromkeys(self._names, f"no answer from the name server within {timeout:g} s")
        with contextlib.suppress(queue.Empty):
            while silent:
                name, result = answers.get(timeout=max(0.0, deadline - time.monotonic()))
                silent.pop(name, None)
                self._apply(name, result)
        self.trouble |= silent

    def _apply(self, name: str, result: LookupResult) -> None:
        try:
            urls = _urls(result.addresses, int(name.rpartition(":")[2]))
        except ValueError:
            self.trouble[name] = f"dns:{name} has no port: give its number, as in dns:NAME:8080"
            return
        if result.trouble:
            self.trouble[name] = result.trouble
        else:
            self._resolved[name] = urls
            self.trouble.pop(name, None)

    def _run(self) -> None:
        while not self._closed.is_set():
            began = time.monotonic()
            self.resolve_names()
            self._closed.wait(max(0.1, RESOLVE_INTERVAL - (time.monotonic() - began)))


def _put_result(answers: queue.SimpleQueue[tuple[str, LookupResult]], name: str, result: LookupResult) -> None:
    answers.put((name, result))


def _urls(addresses: Iterable[str], port: int) -> list[str]:
    return [f"http://[{each}]:{port}" if ":" in each else f"http://{each}:{port}" for each in sorted(addresses)]


@dataclass(frozen=True, slots=True)
class ClusterHistogram:
    """Histogram of values from several servers or actors."""

    bounds: list[float]
    """Bounds of the buckets, ascending: one more than `counts`; empty without buckets."""
    counts: list[int]
    zeros: int
    """Number of values equal to 0, which are in no bucket."""
    least: float | None
    greatest: float | None


@dataclass(frozen=True, slots=True)
class ClusterDistribution:
    """Distribution of weights and ages in a table, over all servers."""

    # fmt: off
    table: str
    storage: str
    unit: str
    """Noun for the examined items: "entries", or "samples", which were already drawn by weight."""
    weighed: str
    """Sentence that explains the weights."""
    looked: int
    """Number of items that were examined, out of `held`."""
    held: int
    """Number of samples, or entries of episodes, that can be drawn."""
    population: float
    """Number of entries of positive weight, in the actors' memories or in the servers' episodes."""
    effective: Annotated[float | None, shown("Effective size", "Number of equally likely entries with the same chance "
        "that two draws coincide. It is the number of entries if all chances are equal, and 1 if a single entry is "
        "always drawn.", formula="1 ÷ Σ p²", docs="sampling.md")]
    weights: ClusterHistogram
    """Weights of the examined items: the chances of draws are proportional to the weights."""
    ages: ClusterHistogram
    """Seconds since the entries were recorded."""
    servers: list[str]
    missing: list[str]
    """Servers that did not answer."""
    # fmt: on


@dataclass(frozen=True, slots=True)
class ActorSpread:
    """Distribution of a run's actors by one figure."""

    figure: str
    actors: int
    """Number of actors that have the figure."""
    median: float | None
    mean: float | None
    histogram: ClusterHistogram
    """Histogram of the actors' values, in buckets of equal width."""


def merged(table: str, answers: Mapping[str, Mapping[str, Any]], missing: Sequence[str]) -> ClusterDistribution:
    """Return the distributions of all servers combined into one.

    Args:
        answers: Decoded /distribution of each server, by the server's name.
        missing: Servers that did not answer.
    """
    parts = list(answers.values())
    storage = parts[0]["storage"] if parts else ""
    kind = registry.kind_or_default(storage)
    greatest = max((part["total_weight"] for part in parts), default=0.0)
    weights = [part["total_weight"] / greatest if greatest > 0.0 else 0.0 for part in parts]  # a sum may overflow
    total = math.fsum(weights)
    # An entry's p is its probability at its server, times the server's share of the total weight.
    sum_of_squares = math.fsum(
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
        effective=1.0 / sum_of_squares if sum_of_squares > 0.0 else None,
        weights=_sum_histograms([part["weights"] for part in parts]),
        ages=_sum_histograms([part["ages"] for part in parts]),
        servers=sorted(answers),
        missing=sorted(missing),
    )


def _sum_histograms(parts: Sequence[Mapping[str, Any]]) -> ClusterHistogram:
    """Add up histograms of the same bucket grid; each server counts by the values that it examined."""
    bucketed = [part for part in parts if part["counts"]]
    filled = [part for part in parts if part["counts"] or part["zeros"]]
    first = min((part["first"] for part in bucketed), default=0)
    end = max((part["first"] + len(part["counts"]) for part in bucketed), default=first)
    counts = [0] * (end - first)
    for part in bucketed:
        for place, count in enumerate(part["counts"], part["first"] - first):
            counts[place] += count
    return ClusterHistogram(
        bounds=[10.0 ** (bucket / PER_TEN) for bucket in range(first, end + 1)] if counts else [],
        counts=counts,
        zeros=sum(part["zeros"] for part in parts),
        least=min((part["least"] for part in filled), default=None),
        greatest=max((part["greatest"] for part in filled), default=None),
    )


def spread_of(figure: str, values: Sequence[float], bins: int) -> ActorSpread:
    """Return the distribution of actors by their values of one figure, in `bins` buckets of equal width."""
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
    """Log line of an actor, as a server stores the line."""

    server: str
    index: int
    """Number of the line at its server, ascending."""
    received: float
    time: str
    client: str
    label: str
    text: str
    """Text as the actor sent it, untrusted: pages must escape it."""
    name: str = ""
    """Name that a person or Kubernetes gave to the actor; "" if the actor has no name."""


@dataclass(frozen=True, slots=True)
class LogPage:
    """Page of log lines from all servers, with cursors for the pages before and after."""

    rows: list[LogRow]
    older: str
    """Cursor for the lines before this page: pass as `cursor` with direction=older."""
    newer: str
    """Cursor for the lines after this page, also for future lines: pass as `cursor` with direction=newer."""
    more: bool
    """True if more lines exist in the requested direction."""
    missing: list[str]
    """Servers that did not answer."""


CURSOR = r"([0-9]{1,15}@[A-Za-z0-9_.~%-]{1,800}(,[0-9]{1,15}@[A-Za-z0-9_.~%-]{1,800})*)?"

Direction = Literal["older", "newer"]
AskServers = Callable[[dict[str, str]], dict[str, Any]]


def read_cursor(text: str) -> dict[str, int]:
    """Parse `LogPage.older` or `newer` into the line number of each server.

    Raises:
        ParameterError: the text is not a cursor.
    """
    if not re.fullmatch(CURSOR, text):
        raise ParameterError("cursor", text[:80], "the value of `older` or `newer` in a page of lines")
    pairs = (part.split("@") for part in text.split(",") if part)
    return {unquote(name): int(index) for index, name in pairs}


def write_cursor(places: Mapping[str, int]) -> str:
    """Format the line number of each server as a cursor for `read_cursor`."""
    return ",".join(f"{index}@{quote(name, safe='')}" for name, index in sorted(places.items()))


def search(
    ask: AskServers,
    servers: list[str],
    wanted: Mapping[str, str],
    cursor: Mapping[str, int],
    direction: Direction,
    most: int,
) -> LogPage:
    """Return a page of at most `most` log lines.

    Raises:
        ParameterError: a server rejects the conditions; the message has the reason.

    Args:
        wanted: Conditions for the servers' /logs, which search: text, client, label, since, until, run.
        cursor: Position of the previous page at each server. A server without a position begins at its newest line
            (older), or at its oldest line (newer).
    """
    edge = {"older": "before", "newer": "after"}[direction]
    asked = {name: dict(wanted) | {"most": str(most)} for name in servers}
    for name, query in asked.items():
        if name in cursor:
            query[edge] = str(max(0, cursor[name]))
        if direction == "older":
            query["newest"] = "1"
    answers = ask({name: f"/logs?{urlencode(query)}" for name, query in asked.items()})
    lines: dict[str, list[LogRow]] = {}
    missing, more = [], False
    for name, answer in answers.items():
        if isinstance(answer, NodeError):
            if answer.status == 400 and "run" not in wanted:
                raise ParameterError.with_text(
                    f"The servers refused the request for log lines {dict(wanted)}: {answer}"
                )
            if answer.status != 400:  # 400: the server does not know this run, and has no lines of the run
                missing.append(name)
            continue
        lines[name] = [LogRow(server=name, **row) for row in answer["rows"]]
        more = more or not answer["is_all"]
    rows = _merge_lines(lines.values(), direction)
    more, rows = more or len(rows) > most, rows[:most]
    older, newer = (write_cursor(dict(cursor) | edge) for edge in _next_positions(lines, rows, cursor, direction))
    rows.sort(key=lambda row: (row.received, row.server, row.index), reverse=True)  # newest first in each direction
    return LogPage(rows, older, newer, more, missing)


def _merge_lines(lines: Iterable[list[LogRow]], direction: Direction) -> list[LogRow]:
    """Return all lines by time, but each server's lines by number, even if the server's clock was set back. A page that
    ends between two of a server's lines omits no line.
    """
    sign, placed = -1 if direction == "older" else 1, []
    for each in lines:
        latest = itertools.accumulate((sign * row.received for row in each), max)
        placed += [(time, row.server, number, row) for number, (time, row) in enumerate(zip(latest, each, strict=True))]
    return [row for *_, row in sorted(placed, key=lambda each: each[:3])]


def _next_positions(
    lines: Mapping[str, list[LogRow]], rows: list[LogRow], cursor: Mapping[str, int], direction: Direction
) -> tuple[dict[str, int], dict[str, int]]:
    """Return the positions for the older and the newer page. A server without lines on this page keeps its position."""
    older, newer = {}, {}
    for name, received in lines.items():
        shown = [row.index for row in rows if row.server == name]
        seen = [row.index for row in received]
        if direction == "older":
            older[name] = min(shown, default=max(seen, default=-1) + 1)
            newer[name] = max(seen, default=max(0, cursor.get(name, 1) - 1))
        else:
            older[name] = min(shown, default=cursor.get(name, 0) + 1)
            newer[name] = max(shown, default=cursor.get(name, 0))
    return older, newer
