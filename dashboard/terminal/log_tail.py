"""Output of `memoire logs` and of `memoire report`.

`tail` prints the log lines of all servers, oldest first. `report` writes the figures of a whole cluster to a logger
while a run goes on; names and numbers are those of the dashboard's curves.
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
from memoire.nodes.supervision import discard_output
from memoire.security.access import Tokens

from .top import FIRST_RATES, INCOMPLETE, PAGES, first_poll, node_address

ASKERS = 16
"""Number of nodes that are asked at the same time."""
PAGE_LINES = 1000
"""Log lines on a page of a server: the maximum that a server returns."""
FIRST = 10
"""Default number of log lines to show before following the log."""
CUT_SHORT = 141
"""Exit status if the reader of standard output closes the pipe, as of a process that SIGPIPE ends."""
_UNITS = {"s": 1.0, "m": 60.0, "h": 3_600.0, "d": 86_400.0}


def _on_stderr(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


class _Server(NamedTuple):
    url: str
    life: object
    durable: bool


class LogServers:
    """Client of the log pages of all servers among some nodes. If a node does not answer, the client reports that once.

    Args:
        nodes: Addresses of the nodes' pages; "dns:NAME:PORT" means every address of a name.
        token: Token of the nodes.
        timeout: Seconds that each node has for a page.
        complain: Called with a sentence about a node that does not answer.
    """

    def __init__(
        self, nodes: Sequence[str], token: Tokens | str | None, timeout: float, complain: Callable[[str], object]
    ) -> None:
        self._addresses = NodeAddresses(Settings(nodes=tuple(map(node_address, nodes))).nodes)
        self._addresses.resolve_names()
        self._addresses.begin()
        self._nodes, self._token, self._timeout, self._complain = nodes, token, timeout, complain
        self._pool = ThreadPoolExecutor(ASKERS, thread_name_prefix="memoire-logs")
        self._reported: set[str] = set()
        self.servers: dict[str, _Server] = {}
        """Servers by name."""
        self.silent: dict[str, str] = {}
        """Reasons of nodes that do not answer, by address."""
        self.restarted: set[str] = set()
        """Servers that lost their lines since the last poll, and number them from 1 again."""

    def close(self) -> None:
        """Close without waiting for requests that are under way."""
        self._addresses.close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def poll(self) -> None:
        """Poll all nodes, and update the list of servers.

        Raises:
            EndpointError: No server has ever answered.
        """
        urls = self._addresses.known_urls()
        answers = ask_all(self._pool, {url: partial(self._status, url) for url in urls})
        self.silent = {url: str(answer) for url, answer in answers.items() if isinstance(answer, NodeError)}
        self.silent |= {name: f"{name}: {why}" for name, why in self._addresses.trouble.items()}
        self.restarted = set()
        others = []
        for url, status in answers.items():
            if isinstance(status, NodeError):
                continue
            if status.get("role") != "server":
                others.append(url)
                continue
            stats = status["stats"]
            name, server = str(stats["name"]), _Server(url, stats["epoch"], stats["durable"])
            known = self.servers.get(name, server)
            if known.life != server.life and not server.durable:
                self.restarted.add(name)
            self.servers[name] = server
        if not self.servers:
            whys = [*self.silent.values(), *(f"{url} is not a server" for url in others)]
            raise EndpointError(
                " ".join(self._nodes), "ask", escape("; ".join(whys[:3])) or "no node has an address", PAGES
            )
        for url in sorted(set(self.silent) - self._reported):
            self._complain(f"memoire: {escape(self.silent[url])}: its lines are missing")
        self._reported = set(self.silent)

    def _status(self, url: str) -> Any:
        status = self._page(url, "/status?clients=no")
        if status["role"] == "server" and "name" not in status["stats"]:
            raise KeyError("name")
        return status

    def ask(self, paths: dict[str, str]) -> dict[str, Any]:
        """Return a page of each server by name, or the NodeError of its request.

        Raises:
            ParameterError: All servers refuse the request, for example because of an unknown run.
        """
        answers = ask_all(
            self._pool, {name: partial(self._page, self.servers[name].url, path) for name, path in paths.items()}
        )
        refusals = [each for each in answers.values() if isinstance(each, NodeError) and each.status == 400]
        if refusals and len(refusals) == len(answers):
            raise ParameterError.with_text(f"All servers refused the request for log lines: {escape(str(refusals[0]))}")
        for name, answer in answers.items():
            if isinstance(answer, NodeError) and answer.status != 400:
                self.silent[self.servers[name].url] = str(answer)
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
    """Print the log lines of all servers among some nodes, oldest first.

    Args:
        nodes: Addresses of the nodes' pages; "dns:NAME:PORT" means every address of a name.
        wanted: Filter by text, client, label, since, until and run, as `wanted_lines` returns it.
        token: Token of the nodes.
        follow: Print new lines until Ctrl-C. Lines of several servers may then be out of order by up to `every`
        seconds.
        last: Number of newest lines to print; None means all, or 10 with `follow`.
        every: Seconds between two polls.
        timeout: Seconds that each node has for a page.
        page_lines: Lines on a page.
        say: Called with each line, without its line break.
        complain: Called with a sentence about a node that does not answer.

    Returns:
        The exit status: 0, or 3 if a node did not answer, so that lines may be missing.

    Raises:
        EndpointError: No server answers.
        ParameterError: An address is malformed, or no server knows the run.
    """
    if not every > 0.0 or not timeout > 0.0:
        raise ParameterError.with_text(f"--every and --timeout must be above 0 s, got {every:g} s and {timeout:g} s.")
    sources = LogServers(nodes, token, timeout, complain)
    try:
        sources.poll()
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
            sources.poll()
            for name in sources.restarted:
                places.pop(name, None)
            for page in _pages(sources, wanted, places, page_lines):
                _write(page.rows[::-1], say)
    except BrokenPipeError:  # the end of `memoire logs | head`
        discard_output()
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
    """Yield pages of lines after `places`, and advance `places`."""
    more = True
    while more:
        page = logs.search(sources.ask, list(sources.servers), wanted, places, "newer", lines)
        places |= logs.read_cursor(page.newer)
        more = page.more and bool(page.rows)
        yield page


def _newest(sources: LogServers, wanted: dict[str, str], last: int, lines: int) -> tuple[list[LogRow], dict[str, int]]:
    """Return the newest lines, oldest first, and the places at which later lines begin."""
    rows: list[LogRow] = []
    places: dict[str, int] = {}
    newer: dict[str, int] = {}
    more = True
    while more:
        page = logs.search(sources.ask, list(sources.servers), wanted, places, "older", min(lines, last))
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
    """Return the filter of log lines from command-line arguments, in the form that servers take.

    Raises:
        ParameterError: An argument is malformed.
    """
    moments = {name: _moment(name, value, now) for name, value in (("since", since), ("until", until)) if value}
    if client and not re.fullmatch("([0-9a-fA-F]{2})+", client):
        raise ParameterError(
            "--client", client, "the id of an actor in hex, as `memoire top` or the dashboard shows it"
        )
    if label and not re.fullmatch("[0-9a-fA-F]{1,8}", label):
        raise ParameterError("--label", label, "up to 8 digits in hex, as they stand in a line")
    named = {"text": text, "client": client, "label": label, "run": run, **moments}
    return {name: value for name, value in named.items() if value}


def _moment(name: str, value: str, now: Callable[[], float]) -> str:
    """Return the seconds since 1970 of a time: "10m" (ago), seconds since 1970, or ISO 8601 (UTC without an offset)."""
    try:
        if re.fullmatch(r"[0-9]+(\.[0-9]+)?[smhd]", value):
            return repr(now() - float(value[:-1]) * _UNITS[value[-1]])
        if re.fullmatch(r"[0-9]{6,11}(\.[0-9]+)?", value):
            return value
        moment = datetime.fromisoformat(value)
    except ValueError:
        expected = "a time such as 2026-01-31T12:00:00 (UTC), seconds since 1970, or 30s, 10m, 2h, 1d ago"
        raise ParameterError(f"--{name}", value, expected) from None
    # Half a microsecond earlier, since the printed time of a line is rounded and has to select the line.
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
    """Write the figures of a cluster to a logger, periodically, until its run is finished or Ctrl-C. Blocks.

    Args:
        nodes: Addresses of the nodes' pages; "dns:NAME:PORT" means every address of a name.
        open_logger: Called with the name of each run that begins. The returned logger is closed when the run ends.
        node_token: Token of the nodes.
        every: Seconds between two polls.
        only: Patterns of names, such as "sample_*"; an empty sequence selects every figure.
        once: Poll once, and return.
        say: Called with a line at the beginning and end of each run.

    Returns:
        The exit status: 0, or 3 if a node did not answer the last poll.

    Raises:
        EndpointError: No node answers the first poll.
        ParameterError: The address of a node is malformed, or `every` is not above 0.
    """
    if not every > 0.0:
        raise ParameterError("--every", every, "seconds above 0")
    settings = Settings(nodes=tuple(map(node_address, nodes)), node_token=node_token, poll_every=min(every, TIMEOUT))
    with closing(Aggregator(settings, History(None))) as watch:
        first_poll(watch, nodes)
        time.sleep(FIRST_RATES)
        watch.poll(settings.poll_every)
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
    """Write the figures of one run until it ends; return the exit status, and True if reporting is done."""
    seen = watch.poll(watch.settings.poll_every)
    run, looks = seen.run, 0
    with closing(open_logger(run)) as logger:
        say(f"run {run!r}: reporting every {every:g} s")
        while seen.run == run:
            figures = {name: point.mean for name, point in watch.figures.items()}
            logger.log(matching_figures(figures, only), int(seen.totals.steps))
            looks += 1
            if once or seen.finished:
                say(f"run {run!r}: {'finished' if seen.finished else 'reported'}, {looks} looks")
                return INCOMPLETE if seen.missing else 0, True
            time.sleep(every)
            seen = watch.poll(watch.settings.poll_every)
    say(f"run {run!r}: over, {looks} looks")
    return 0, False


def matching_figures(figures: Mapping[str, float], patterns: Iterable[str]) -> dict[str, float]:
    """Return the figures whose names match one of the patterns; all figures if there are no patterns."""
    wanted = list(patterns)
    return {
        name: value for name, value in figures.items() if not wanted or any(fnmatchcase(name, each) for each in wanted)
    }


def folder_name(run: str) -> str:
    """Return the name of a run as the name of a folder: without separators, and never empty, "." or ".."."""
    safe = file_name(run)
    return safe if safe.strip(".") else f"run{safe.replace('.', '_')}"
