"""Polling thread of the dashboard: queries all nodes, merges their answers and publishes overviews.

The polling load does not depend on the number of viewers. A small pool of threads queries the nodes, so that a node
that hangs delays no other node. A node is queried again only after its answer or timeout.

`RunRecorder` writes totals, ledgers and events of runs into the history.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from urllib.parse import urlencode

import msgspec

from memoire.dashboard.settings import Settings
from memoire.errors import MemoireError
from memoire.limits import wall_clock
from memoire.net.thread import ProgressMonitor

from .answers import ActorDetail, ActorRow, EpisodeRow, Overview
from .cluster import Cluster
from .counters import NodeAnswer
from .history import FLUSH_INTERVAL, MIN_AWAY, PRUNE_INTERVAL, Curves, EventRow, History, HistoryPoint, RunInfo
from .nodes import ClusterDistribution, NodeAddresses, NodeError, NodeQuestions, answer_error, ask_all, merged

_log = logging.getLogger(__name__)

ASKERS = 16
"""Nodes that are queried at a time: threads of the pool."""
TIMEOUT = 5.0
"""Seconds in which a node must send one page."""
PAGES_TIMEOUT = 60.0
"""Seconds in which a node must send all pages of one poll."""
ACCOUNTS_INTERVAL = 2.0
"""Seconds between two readings of a server's ledger; more if a reading takes long."""
PART_OF_TIME = 0.1
"""Largest share of time for reading one server's ledger: a reading of 1 s is repeated after 10 s."""
CLIENTS_INTERVAL = 10.0
"""Seconds between two readings of facts about actors that no ledger has: hosts, models, scalars."""
SETTINGS_INTERVAL = 30.0
OVERLAP = 5.0
"""Seconds of a ledger that are read again, so that changes during the last reading are not missed."""
INSPECTION_LIFETIME = 2.0
"""Seconds for which the distribution of a table is cached for all viewers."""
MAX_PAGES = 100


LEDGER_INTERVAL = 10.0
"""Seconds between two saves of the ledger in the history."""
MAX_KEPT_ACTORS = 1_000
"""Actors of a run that the history keeps for a run opened from a file."""


class RunRecorder:
    """Writer of runs into the history. Call the methods on the aggregator's thread only.

    Args:
        lock: Lock that guards the cluster.
    """

    def __init__(self, history: History, cluster: Cluster, lock: threading.RLock) -> None:
        self._history, self._cluster, self._lock = history, cluster, lock
        self._kept_at = self._flushed_at = self._pruned_at = 0.0
        self.trouble = ""
        """Reason why the history cannot be written; "" if writing works."""

    def record(self, newest: Overview, former: Overview | None, events: list[EventRow], now: float) -> None:
        """Write the events and due parts of the newest run, and the final state of a run that it replaces.

        Args:
            former: The overview before `newest`; None for the first.
            events: Events between the two overviews.
        """
        before, self.trouble = self.trouble, ""
        if former is not None and former.run != newest.run:
            self.keep(former, now)
            self._kept_at = 0.0
        with self._record_error():
            self._write_events(newest.run, events)
        with self._record_error():
            self._save_due(newest, now)
        if self.trouble and not before:
            _log.error("%s", self.trouble)

    @contextmanager
    def _record_error(self) -> Iterator[None]:
        try:
            yield
        except MemoireError as error:
            self.trouble = str(error)

    def _write_events(self, run: str, events: list[EventRow]) -> None:
        """Write events of a run; skip a beginning or end that the history already has."""
        if not run or not events:
            return
        known = {event.kind for event in self._history.events(run)}
        for event in events:
            if event.kind not in ("run_began", "run_finished") or event.kind not in known:
                self._history.add_event(run, event)

    def _save_due(self, newest: Overview, now: float) -> None:
        """Save the ledger, flush and prune the history if the interval of each has passed."""
        if now >= self._kept_at + LEDGER_INTERVAL:
            self._kept_at = now
            self.keep(newest, now)
        if now >= self._flushed_at + FLUSH_INTERVAL:
            self._flushed_at = now
            self._history.flush()
        if now >= self._pruned_at + PRUNE_INTERVAL:
            self._pruned_at = now
            self._history.prune(now)

    def keep(self, newest: Overview | None, now: float) -> None:
        """Write the current totals, ledger, actors and settings of the run of `newest` into the history."""
        if newest is None or not newest.run:
            return
        with self._lock:
            ledger = self._cluster.ledger_of(newest.run)
            documents = self._documents(newest)
        facts = {
            "totals": ledger.totals(),
            "finished": newest.finished,
            "return_mean": newest.learning.return_mean,
            "length_mean": newest.learning.length_mean,
            "actors": newest.actors,
        }

        with self._record_error():
            self._history.keep_run(newest.run, now, facts, ledger.rows.tobytes())
            for kind, body in documents.items():
                self._history.keep_document(newest.run, kind, body)

    def _documents(self, newest: Overview) -> dict[str, bytes]:
        """Return the JSON documents, by kind, that a run opened from a file shows beside its curves."""
        documents = {"overview": newest, "actors": self._cluster.actors()[:MAX_KEPT_ACTORS]}
        settings = {node.name: node.settings for node in self._cluster.servers if node.settings}
        if settings:
            documents["settings"] = {
                name: {key: value for key, value in values.items() if key not in ("run", "runs")}
                for name, values in settings.items()
            }
        return {kind: msgspec.json.encode(value) for kind, value in documents.items()}


@dataclass(slots=True)
class _ReadPosition:
    """Read position in one node's pages, and the times at which more pages are due. While a query of the node is in
    flight, the position belongs to the thread of that query.
    """

    seen: float = 0.0
    """Server time: the next reading asks for accounts of `run` that changed since then; 0.0 asks for all."""
    run: str = ""
    inherited: int = 0
    accounts_due: float = 0.0
    clients_due: float = 0.0
    settings_due: float = 0.0
    versions: list[int] = field(default_factory=list)
    """Version of the parameters of each table."""
    clients: int = 0
    after: int = 0
    """Number of the newest episode that was read."""
    episodes_of: tuple[str, int] = ("", 0)
    """Run and life (epoch) of the server to which the number in `after` belongs."""


class Aggregator:
    """Poller of all nodes: merges their answers into overviews and records these in the history.

    Args:
        settings: Addresses of the nodes, polling interval and token.
        history: Store of the curves; the aggregator owns and closes it.
        on_look: Called on the polling thread with each new overview.
        clock: Returns seconds since 1970.
        cluster: Merges the answers; None creates a cluster.
    """

    def __init__(
        self,
        settings: Settings,
        history: History,
        on_look: Callable[[Overview], None] = lambda overview: None,
        clock: Callable[[], float] = wall_clock,
        cluster: Cluster | None = None,
    ) -> None:
        self.settings, self.history = settings, history
        self._on_look, self._clock = on_look, clock
        self._addresses = NodeAddresses(settings.nodes)
        self._lock = threading.RLock()  # guards the cluster
        self._cluster = Cluster(settings, history.ledger) if cluster is None else cluster
        self._positions: dict[str, _ReadPosition] = {}
        self._pending: dict[str, Future[NodeAnswer]] = {}
        self._query_starts: dict[str, float] = {}  # start of each query (monotonic), written by its pool thread
        self._pool = ThreadPoolExecutor(ASKERS, thread_name_prefix="memoire-dashboard-ask")
        self._stopping = threading.Event()
        self._turn_start = time.monotonic()
        self._progress = ProgressMonitor()
        self.newest: Overview | None = None
        """The newest overview; None before the first."""
        self.figures: Mapping[str, HistoryPoint] = {}
        """Figures of the newest overview, by the names of their curves."""
        self._distribution_lock = threading.Lock()  # guards _distributions
        self._distributions: dict[str, tuple[float, ClusterDistribution]] = {}
        self._recorder = RunRecorder(history, self._cluster, self._lock)
        self._thread = threading.Thread(target=self._run, name="memoire-dashboard", daemon=True)

    def start(self) -> None:
        """Start the polling thread and the address lookups."""
        self._addresses.begin()
        self._thread.start()

    def close(self) -> None:
        """Stop polling, save the newest state of the run, and close the history."""
        self._stopping.set()
        self._addresses.close()
        if self._thread.ident is not None:
            self._thread.join(2 * TIMEOUT)
        self._pool.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            self._recorder.keep(self.newest, self._clock())
            try:
                self.history.close()
            except MemoireError as error:
                _log.error("%s", error)

    # ---------------------------------------------------------------------------------------------------------- queries

    @property
    def problem(self) -> str:
        """Reason why the history cannot be written; "" if writing works."""
        return self._recorder.trouble

    def liveness(self) -> list[str]:
        """Return the faults that only a restart can repair, one sentence each."""
        if self._thread.ident is None or self._stopping.is_set():
            return []
        silence = self._progress.silence(self._turn_start)
        return [f"the thread that asks the nodes has not taken a turn for {silence:.0f} s"] if silence else []

    def readiness(self) -> list[str]:
        """Return the reasons why the dashboard has no overview yet, one sentence each."""
        return [] if self.newest is not None else ["starting: the nodes have not been asked yet"]

    def actors(self) -> list[ActorRow]:
        """Return every actor of the run that is counted now."""
        with self._lock:
            return self._cluster.actors()

    def actor(self, client: str) -> ActorDetail | None:
        """Return the details of one actor; None if the run has no actor of this id."""
        with self._lock:
            return self._cluster.actor(client)

    def episodes(self, client: str, most: int) -> list[EpisodeRow]:
        """Return at most `most` closed episodes of the run, the newest first; `client` "" means all clients."""
        with self._lock:
            newest = reversed(self._cluster.episodes)
            return list(itertools.islice((each for each in newest if client in ("", each.client)), most))

    def curves(self, run: str, names: list[str], since: float, until: float, points: int) -> Curves:
        """Return curves of a run's figures from `since` to `until`; `run` "" means the run that is counted now."""
        now, newest = self._clock(), self.newest
        run = run or (newest.run if newest is not None else "")
        began = next((row.began for row in self.history.runs() if row.name == run), now - 3600.0)
        until = max(min(until, now + 1.0), 0.0)
        begin, patience = max(min(since or began, until), 0.0), max(MIN_AWAY, 3 * self.settings.poll_every)
        return self.history.curves(run, names, begin, until, points, now, patience)

    def events(self, run: str) -> list[EventRow]:
        """Return the events of a run, the oldest first; `run` "" means the run that is counted now."""
        return self.history.events(run or ("" if self.newest is None else self.newest.run))

    def runs(self) -> list[RunInfo]:
        """Return every run in the history, the newest last."""
        current = "" if self.newest is None else self.newest.run
        return [replace(row, is_current=row.name == current) for row in self.history.runs()]

    def statuses(self) -> dict[str, dict[str, Any]]:
        """Return the last status of each node, by address."""
        with self._lock:
            return {url: node.status for url, node in self._cluster.nodes.items()}

    def node_settings(self, run: str = "") -> dict[str, dict[str, Any]]:
        """Return schema, parameters and limits of each server by name: now, or the last ones of `run`."""
        if run:
            settings: dict[str, dict[str, Any]] = msgspec.json.decode(self.history.document(run, "settings") or b"{}")
            return settings
        with self._lock:
            return {node.name: node.settings for node in self._cluster.servers if node.settings}

    def servers(self) -> dict[str, str]:
        """Return the address of the pages of each server that has answered, by name."""
        with self._lock:
            return {node.name: node.url for node in self._cluster.servers}

    # --------------------------------------------------------------------------------------------------- polling thread

    def _run(self) -> None:
        while not self._stopping.is_set():
            began = time.monotonic()
            self._turn_start = began
            try:
                self.poll(self.settings.poll_every)
            except Exception:
                _log.exception("polling the nodes failed")
            self._stopping.wait(max(0.01, self.settings.poll_every - (time.monotonic() - began)))

    def resolve_names_periodically(self) -> None:
        """Resolve the nodes' names now and then periodically; for callers that call `tick` in place of `start`."""
        self._addresses.resolve_names()
        self._addresses.begin()

    def poll(self, patience: float) -> Overview:
        """Query all nodes, wait at most `patience` seconds for their answers, and return the new overview."""
        urls = self._addresses.known_urls()
        with self._lock:
            self._cluster.set_addresses(urls, self._clock())
        for url in urls:
            if url not in self._pending:
                known = self._positions.setdefault(url, _ReadPosition())
                self._pending[url] = self._pool.submit(self._ask, url, known, self._cluster.run)
        wait_for(self._pending.values(), timeout=patience)
        for url, answer in [(url, future) for url, future in self._pending.items() if future.done()]:
            del self._pending[url]
            self._query_starts.pop(url, None)
            self._apply(url, answer.result())
        now = self._clock()
        with self._lock:
            for url in self._pending.keys() & self._query_starts.keys():
                self._cluster.note_unanswered(url, time.monotonic() - self._query_starts[url])
            overview, figures = self._cluster.refresh(now)
            events = self._cluster.events(now, finished=overview.finished)
            if overview.run:
                self.history.add(overview.run, now, figures)
            former, self.newest, self.figures = self.newest, overview, figures
        self._recorder.record(overview, former, events, now)
        self._on_look(overview)
        return overview

    def _apply(self, url: str, answer: NodeAnswer) -> None:
        with self._lock:
            self._cluster.apply(answer)
        known = self._positions[url]
        if answer.status is None:
            return
        now, stats = time.monotonic(), answer.status.get("stats", {})
        for page in answer.accounts:
            if page["run"] == stats["run"]:
                is_whole = page["inherited"] == known.inherited  # otherwise inherited accounts may be older
                known.seen, known.run = page["time"] - OVERLAP if is_whole else 0.0, page["run"]
                known.inherited = page["inherited"]
                known.accounts_due = now + max(ACCOUNTS_INTERVAL, page["took"] / PART_OF_TIME)
        if answer.clients is not None:
            known.clients_due, known.clients = now + CLIENTS_INTERVAL, len(answer.clients)
        elif known.clients != stats.get("totals", {}).get("clients"):
            known.clients_due = min(known.clients_due, now + ACCOUNTS_INTERVAL)  # a client came or went
        versions = [table["parameters_version"] for table in (stats.get("tables") or {}).values()]
        if answer.settings is not None:
            known.settings_due = now + SETTINGS_INTERVAL
        elif versions != known.versions:
            known.settings_due = 0.0
        known.versions = versions
        for page in answer.episodes:
            known.after, known.episodes_of = page["next"], (page["run"], page["epoch"])

    def _ask(self, url: str, known: _ReadPosition, run: str) -> NodeAnswer:
        began = self._query_starts[url] = time.monotonic()
        answer = NodeAnswer(url, self._clock())
        node = NodeQuestions(url, self.settings.node_token, TIMEOUT, PAGES_TIMEOUT, self._stopping.is_set)
        try:
            answer.status = node.json("/status?clients=no")
            if answer.status.get("role") == "server":
                _ask_server(node, known, run, answer)
        except (NodeError, msgspec.DecodeError, KeyError, TypeError) as error:
            answer.error = str(answer_error(url, error))
        except Exception as error:  # a foreign server at this address must not stop the polling
            _log.exception("polling %s failed", url)
            answer.error = repr(error)
        answer.took, answer.time = time.monotonic() - began, self._clock()
        return answer

    def ask_server(self, name: str, path: str) -> Any:
        """Fetch a page that the dashboard does not keep from the server `name`. Blocks for at most `TIMEOUT` seconds.

        Raises:
            NodeError: No server has this name, or the server does not answer.
        """
        url = self.servers().get(name)
        if url is None:
            raise NodeError(f"unknown server {name!r}; known servers: {', '.join(self.servers()) or 'none yet'}", 404)
        return NodeQuestions(url, self.settings.node_token, TIMEOUT, TIMEOUT, self._stopping.is_set).json(path)

    def distribution(self, table: str, servers: Iterable[str]) -> ClusterDistribution:
        """Return the distribution of a table over these servers, at most `INSPECTION_LIFETIME` seconds old.

        Blocks like `ask_server`.
        """
        with self._distribution_lock:
            known = self._distributions.get(table)
            if known is None or time.monotonic() > known[0] + INSPECTION_LIFETIME:
                answers = self.ask_servers(dict.fromkeys(servers, f"/distribution?{urlencode({'table': table})}"))
                pages = {name: answer for name, answer in answers.items() if isinstance(answer, dict)}
                known = time.monotonic(), merged(table, pages, [name for name in answers if name not in pages])
                self._distributions[table] = known
            return known[1]

    def ask_servers(self, paths: dict[str, str]) -> dict[str, Any]:
        """Fetch one page of each server; return the pages by server name, or a NodeError in place of a failed page."""
        return ask_all(self._pool, {name: partial(self.ask_server, name, path) for name, path in paths.items()})


# -------------------------------------------------------------------------------------------------- threads of the pool


def _ask_server(node: NodeQuestions, known: _ReadPosition, run: str, answer: NodeAnswer) -> None:
    """Fetch the due pages of a server into `answer`. `run`: the run that is counted now."""
    assert answer.status is not None
    now, server_run = time.monotonic(), str(answer.status["stats"]["run"])
    if now >= known.accounts_due or known.run != run:
        for each in filter(None, dict.fromkeys([server_run, run])):
            for page in _accounts(node, each, known.seen if each == run == known.run else 0.0):
                answer.accounts.append(page | {"took": time.monotonic() - now})
    answer.episodes = _episodes(node, known)
    if now >= known.clients_due:
        answer.clients = _clients(node)
    if now >= known.settings_due:
        answer.settings = node.json("/settings")


def _accounts(node: NodeQuestions, run: str, seen: float) -> list[dict[str, Any]]:
    """Fetch the pages of a server's ledger of `run`; [] if the server does not know the run."""
    pages: list[dict[str, Any]] = []
    after = ""
    while not pages or (after and len(pages) < MAX_PAGES):
        try:
            body = node.get("/accounts?" + urlencode({"run": run, "seen": repr(seen), "after": after}))
        except NodeError as error:
            if error.status == 400:
                return []
            raise
        pages.append(msgspec.msgpack.decode(body))
        after = pages[-1]["next"]
    return pages


def _episodes(node: NodeQuestions, position: _ReadPosition) -> list[dict[str, Any]]:
    pages: list[dict[str, Any]] = []
    after, known = position.after, position.episodes_of
    while len(pages) < MAX_PAGES:
        page = node.json(f"/episodes?most=1000&after={after}")
        if (page["run"], page["epoch"]) != known and after:  # a new run or life numbers its episodes from the start
            after, known = 0, (page["run"], page["epoch"])
            continue
        pages.append(page)
        after, known = page["next"], (page["run"], page["epoch"])
        if len(page["rows"]) < 1000:
            break
    return pages


def _clients(node: NodeQuestions) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    after: str | None = ""
    while after is not None and len(rows) < MAX_PAGES * 1000:
        page = node.json(f"/status?most=1000&after={after}")["clients"]
        rows += page["rows"]
        after = page["next"]
    return rows
