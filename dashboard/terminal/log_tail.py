"""The log lines of all servers on a terminal, oldest first: `memoire logs`, made of pages of `logs.search`.

The figures of a whole cluster to somebody else's tool while the run goes on: what `memoire report` does.

It asks the nodes and merges as the dashboard does, so names and numbers are those of its curves.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, NamedTuple

import msgspec

from memoire.accounting.runs import format_line
from memoire.dashboard.collect import nodes as logs
from memoire.dashboard.collect.aggregator import TIMEOUT, Aggregator
from memoire.dashboard.collect.history import History
from memoire.dashboard.collect.nodes import LogPage, LogRow, NodeAddresses, NodeError, ask, ask_all
from memoire.dashboard.collect.opened import file_name
from memoire.dashboard.settings import Settings
from memoire.errors import EndpointError, ParameterError, escape
from memoire.limits import wall_clock
from memoire.loggers import Logger
from memoire.nodes.supervision import discard
from memoire.security.access import Tokens

from .top import FIRST_RATES, INCOMPLETE, PAGES, asked_once, node_address

ASKERS = 16
"""Nodes that are asked at a time."""
PAGE_LINES = 1000
"""Lines that a server is asked for at a time: the most that it gives."""
FIRST = 10
"""Lines that are shown before those that are followed, where nobody says how many."""
CUT_SHORT = 141
"""Exit status when whoever reads the lines has had enough, as of a process that ends by SIGPIPE."""
_UNITS = {"s": 1.0, "m": 60.0, "h": 3_600.0, "d": 86_400.0}


def _on_stderr(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


class _Server(NamedTuple):
    url: str
    life: object
    durable: bool


class LogServers:
    """The servers among some nodes, and how to ask them. What does not answer is said once, on stderr.

    Args:
        nodes: Where nodes' pages are; "dns:NAME:PORT" is every address of a name.
        token: What they ask for.
        timeout: Seconds that each has for a page.
        complain: Takes a sentence about a node that does not answer.
    """

    def __init__(
        self, nodes: Sequence[str], token: Tokens | str | None, timeout: float, complain: Callable[[str], object]
    ) -> None:
        self._addresses = NodeAddresses(Settings(nodes=tuple(map(node_address, nodes))).nodes)
        self._addresses.look()
        self._addresses.begin()
        self._given, self._token, self._timeout, self._complain = nodes, token, timeout, complain
        self._pool = ThreadPoolExecutor(ASKERS, thread_name_prefix="memoire-logs")
        self._said: set[str] = set()
        self.found: dict[str, _Server] = {}
        """By name."""
        self.silent: dict[str, str] = {}
        """Why it does not answer, by address."""
        self.began_anew: set[str] = set()
        """Servers that have forgotten their lines since the look before, and number them from 1 again."""

    def close(self) -> None:
        """Wait for nobody."""
        self._addresses.close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def look(self) -> None:
        """Find out who is a server.

        Raises:
            EndpointError: nobody answers, or no server does, and none ever did.
        """
        urls = self._addresses.now()
        answers = ask_all(self._pool, {url: partial(self._status, url) for url in urls})
        self.silent = {url: str(told) for url, told in answers.items() if isinstance(told, NodeError)}
        self.silent |= {name: f"{name}: {why}" for name, why in self._addresses.trouble.items()}
        self.began_anew = set()
        others = []
        for url, told in answers.items():
            if isinstance(told, NodeError):
                continue
            if told.get("role") != "server":
                others.append(url)
                continue
            name, server = str(told["stats"]["name"]), _Server(url, told["stats"]["epoch"], told["stats"]["durable"])
            known = self.found.get(name, server)
            if known.life != server.life and not server.durable:
                self.began_anew.add(name)
            self.found[name] = server
        if not self.found:
            whys = [*self.silent.values(), *(f"{url} is no server" for url in others)]
            raise EndpointError(" ".join(self._given), "ask", escape("; ".join(whys[:3])) or "nobody is there", PAGES)
        for url in sorted(set(self.silent) - self._said):
            self._complain(f"memoire: {escape(self.silent[url])}: its lines are missing")
        self._said = set(self.silent)

    def _status(self, url: str) -> Any:
        told = self._page(url, "/status?clients=no")
        if told["role"] == "server" and "name" not in told["stats"]:
            raise KeyError("name")
        return told

    def ask(self, paths: dict[str, str]) -> dict[str, Any]:
        """A page of each of these servers, by name, or the NodeError that came instead.

        Raises:
            ParameterError: no server takes what is asked for, such as a run that none of them knows.
        """
        answers = ask_all(
            self._pool, {name: partial(self._page, self.found[name].url, path) for name, path in paths.items()}
        )
        refusals = [told for told in answers.values() if isinstance(told, NodeError) and told.status == 400]
        if refusals and len(refusals) == len(answers):
            raise ParameterError("logs", self._given, escape(refusals[0].text))
        for name, told in answers.items():
            if isinstance(told, NodeError) and told.status != 400:
                self.silent[self.found[name].url] = str(told)
        return answers

    def _page(self, url: str, path: str) -> Any:
        return msgspec.json.decode(ask(url, path, token=self._token, timeout=self._timeout))


def tail(
    nodes: Sequence[str],
    wanted: dict[str, str],
    *,
    token: Tokens | str | None = None,
    follow: bool = False,
    last: int | None = None,
    every: float = 1.0,
    timeout: float = 5.0,
    page_lines: int = PAGE_LINES,
    say: Callable[[str], object] = print,
    complain: Callable[[str], object] = _on_stderr,
) -> int:
    """Print the lines of all servers among these nodes, the oldest first.

    Args:
        nodes: Where nodes' pages are; "dns:NAME:PORT" is every address of a name.
        wanted: text, client, label, since, until, run, as `wanted_lines` makes them.
        token: What the nodes ask for.
        follow: Go on with lines that come later, until Ctrl-C. Lines that come from several servers at about the same
            time may then be as much as `every` late behind each other.
        last: Only so many, the newest; None: all, or 10 where they are followed.
        every: Seconds between two looks.
        timeout: Seconds that each node has for a page.
        page_lines: Lines on a page.
        say: Takes each line, without its line break.
        complain: Takes a sentence about a node that does not answer.

    Returns:
        The exit status: 0, or 3 when a node did not answer, so that lines may be missing.

    Raises:
        EndpointError: no server answers.
        ParameterError: an address is none, or no server knows the run.
    """
    if not every > 0.0 or not timeout > 0.0:
        raise ParameterError("--every, --timeout", (every, timeout), "seconds above 0")
    sources = LogServers(nodes, token, timeout, complain)
    try:
        sources.look()
        places: dict[str, int] = {}
        if last is None and follow:
            last = FIRST
        if last is not None:
            rows, places = _newest(sources, wanted, last, page_lines)
            _write(rows, say)
        else:
            for page in _pages(sources, wanted, places, page_lines):
                _write(page.rows[::-1], say)
        while follow:
            time.sleep(every)
            sources.look()
            for name in sources.began_anew:
                places.pop(name, None)
            for page in _pages(sources, wanted, places, page_lines):
                _write(page.rows[::-1], say)
    except BrokenPipeError:  # the end of `memoire logs | head`
        discard()
        return CUT_SHORT
    finally:
        sources.close()
    return INCOMPLETE if sources.silent else 0


def _write(rows: list[LogRow], say: Callable[[str], object]) -> None:
    for row in rows:
        say(format_line(row.received, int(row.label, 16), row.text, row.name)[:-1])
    if rows:
        sys.stdout.flush()


def _pages(sources: LogServers, wanted: dict[str, str], places: dict[str, int], lines: int) -> Iterator[LogPage]:
    """Page after page of what comes behind `places`, which go on with them."""
    more = True
    while more:
        page = logs.search(sources.ask, list(sources.found), wanted, places, "newer", lines)
        places |= logs.read_cursor(page.newer)
        more = page.more and bool(page.rows)
        yield page


def _newest(sources: LogServers, wanted: dict[str, str], last: int, lines: int) -> tuple[list[LogRow], dict[str, int]]:
    """The newest lines, the oldest of them first, and where those that come later begin."""
    rows: list[LogRow] = []
    places: dict[str, int] = {}
    newer: dict[str, int] = {}
    more = True
    while more:
        page = logs.search(sources.ask, list(sources.found), wanted, places, "older", min(lines, max(1, last)))
        newer = newer or logs.read_cursor(page.newer)
        places |= logs.read_cursor(page.older)
        rows += page.rows
        more = page.more and len(rows) < last and bool(page.rows)
    return rows[:last][::-1], newer


def wanted_lines(
    *,
    text: str = "",
    client: str | None = None,
    label: str | None = None,
    since: str | None = None,
    until: str | None = None,
    run: str | None = None,
    now: Callable[[], float] = wall_clock,
) -> dict[str, str]:
    """What servers are asked for, of what a person has typed.

    Raises:
        ParameterError: something cannot be read.
    """
    moments = {name: _moment(name, given, now) for name, given in (("since", since), ("until", until)) if given}
    if client and not re.fullmatch("([0-9a-fA-F]{2})+", client):
        raise ParameterError(
            "--client", client, "the id of an actor in hex, as `memoire top` or the dashboard shows it"
        )
    if label and not re.fullmatch("[0-9a-fA-F]{1,8}", label):
        raise ParameterError("--label", label, "up to 8 digits in hex, as they stand in a line")
    named = {"text": text, "client": client, "label": label, "run": run, **moments}
    return {name: value for name, value in named.items() if value}


def _moment(name: str, given: str, now: Callable[[], float]) -> str:
    """Seconds since 1970 of "10m" (ago), of seconds since 1970, or of an ISO 8601 time (UTC without an offset)."""
    try:
        if re.fullmatch(r"[0-9]+(\.[0-9]+)?[smhd]", given):
            return repr(now() - float(given[:-1]) * _UNITS[given[-1]])
        if re.fullmatch(r"[0-9]{6,11}(\.[0-9]+)?", given):
            return given
        moment = datetime.fromisoformat(given)
    except ValueError:
        expected = "a time such as 2026-01-31T12:00:00 (UTC), seconds since 1970, or 30s, 10m, 2h, 1d ago"
        raise ParameterError(f"--{name}", given, expected) from None
    # Half a microsecond sooner: the time of a line as it is printed is rounded, and chooses that line.
    return repr((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() - 5e-7)


def report(
    nodes: Sequence[str],
    open_logger: Callable[[str], Logger],
    *,
    node_token: Tokens | str | None = None,
    every: float = 10.0,
    only: Sequence[str] = (),
    once: bool = False,
    say: Callable[[str], object] = print,
) -> int:
    """Give a cluster's figures to a logger, again and again, until its run is finished or Ctrl-C. Blocks.

    Args:
        nodes: Where nodes' pages are; "dns:NAME:PORT" is every address of a name.
        open_logger: Called with the name of a run, for each run that begins; its logger is closed when the run ends.
        node_token: What the nodes ask for.
        every: Seconds between two looks.
        only: Patterns of names, such as "sample_*"; none takes every figure.
        once: Look once, and return.
        say: Takes a line at each beginning and end.

    Returns:
        The exit status: 0; 3 if a node did not answer at the last look.

    Raises:
        EndpointError: nobody answers, at the first look.
        ParameterError: a node's address is malformed, or `every` is not above 0.
    """
    if not every > 0.0:
        raise ParameterError("--every", every, "seconds above 0")
    settings = Settings(nodes=tuple(map(node_address, nodes)), node_token=node_token, poll_every=min(every, TIMEOUT))
    with closing(Aggregator(settings, History(None))) as watch:
        asked_once(watch, nodes)
        time.sleep(FIRST_RATES)
        watch.turn(settings.poll_every)
        while True:
            status, is_over = _follow(watch, open_logger, every, only, once, say)
            if is_over:
                return status


def _follow(
    watch: Aggregator,
    open_logger: Callable[[str], Logger],
    every: float,
    only: Sequence[str],
    once: bool,
    say: Callable[[str], object],
) -> tuple[int, bool]:
    """Give the figures of one run, until it ends: the exit status, and whether that is all."""
    seen = watch.turn(watch.settings.poll_every)
    run, looks = seen.run, 0
    with closing(open_logger(run)) as logger:
        say(f"run {run!r}: reporting every {every:g} s")
        while seen.run == run:
            figures = {name: point.mean for name, point in watch.figures.items()}
            logger.log(chosen(figures, only), int(seen.totals.steps))
            looks += 1
            if once or seen.finished:
                say(f"run {run!r}: {'finished' if seen.finished else 'reported'}, {looks} looks")
                return INCOMPLETE if seen.missing else 0, True
            time.sleep(every)
            seen = watch.turn(watch.settings.poll_every)
    say(f"run {run!r}: over, {looks} looks")
    return 0, False


def chosen(figures: Mapping[str, float], patterns: Iterable[str]) -> dict[str, float]:
    """Those whose name one of the patterns matches; all where there is no pattern."""
    wanted = list(patterns)
    return {
        name: value for name, value in figures.items() if not wanted or any(fnmatchcase(name, each) for each in wanted)
    }


def folder_name(run: str) -> str:
    """A run's name as that of a folder: without separators, and never empty, "." or ".."."""
    safe = file_name(run)
    return safe if safe.strip(".") else f"run{safe.replace('.', '_')}"
