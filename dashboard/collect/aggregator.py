"""One thread that asks all nodes, whatever the number of people who look, and hands what it found to whoever wants it.

Each node is asked on a thread of a small pool: one that hangs delays nobody else, and is not asked again before it has
answered or its time is up.

`RunRecorder` writes into the history what runs came to, and what happened to them.
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
from .nodes import ClusterDistribution, NodeAddresses, NodeError, NodeQuestions, ask_all, merged, misunderstood

_log = logging.getLogger(__name__)

ASKERS = 16
"""Nodes that are asked at a time."""
TIMEOUT = 5.0
"""Seconds that a node has for one page."""
PAGES_TIMEOUT = 60.0
"""Seconds that it has for all pages of one look."""
ACCOUNTS_INTERVAL = 2.0
"""Seconds between two readings of a server's ledger; more where a reading takes long."""
PART_OF_TIME = 0.1
"""Of its time at most so much is spent on reading one server's ledger."""
CLIENTS_INTERVAL = 10.0
"""Seconds between two readings of what is in no ledger: hosts, models, scalars of single actors."""
SETTINGS_INTERVAL = 30.0
OVERLAP = 5.0
"""Seconds of a ledger that are read once more: what changed while it was read is not missed."""
INSPECTION_LIFETIME = 2.0
"""Seconds for which one look at what is held serves everybody who asks."""
MAX_PAGES = 100


LEDGER_INTERVAL = 10.0
"""Seconds between two savings of the ledger in the history."""
MAX_KEPT_ACTORS = 1_000
"""Actors of a run that are listed when it is opened from a file."""


class RunRecorder:
    """Keeps runs. Methods belong to the aggregator's thread.

    Args:
        lock: The cluster's.
    """

    def __init__(self, history: History, cluster: Cluster, lock: threading.RLock) -> None:
        self._history, self._cluster, self._lock = history, cluster, lock
        self._kept_at = self._flushed_at = self._pruned_at = 0.0
        self.trouble = ""
        """Why the history cannot be written; "" if it can."""

    def record(self, newest: Overview, former: Overview | None, events: list[EventRow], now: float) -> None:
        """Keep what the last look saw: of the run that it ended, what it came to; of its own, what is due.

        Args:
            former: What the look before saw; None for the first.
            events: What happened between the two.
        """
        before, self.trouble = self.trouble, ""
        if former is not None and former.run != newest.run:
            self.keep(former, now)
            self._kept_at = 0.0
        with self._attempt():
            self._note(newest.run, events)
        with self._attempt():
            self._save(newest, now)
        if self.trouble and not before:
            _log.error("%s", self.trouble)

    @contextmanager
    def _attempt(self) -> Iterator[None]:
        try:
            yield
        except MemoireError as error:
            self.trouble = str(error)

    def _note(self, run: str, events: list[EventRow]) -> None:
        """Write what happened to a run; of one that was seen before, its beginning is known."""
        if not run or not events:
            return
        known = {event.kind for event in self._history.events(run)}
        for event in events:
            if event.kind not in ("run_began", "run_finished") or event.kind not in known:
                self._history.add_event(run, event)

    def _save(self, newest: Overview, now: float) -> None:
        """Write to the disk what is due."""
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
        """Keep totals, ledger, actors and settings of this run as they are."""
        if newest is None or not newest.run:
            return
        with self._lock:
            kept = self._cluster.kept(newest.run)
            documents = self._documents(newest)
        facts = {
            "totals": kept.totals(),
            "finished": newest.finished,
            "return_mean": newest.learning.return_mean,
            "length_mean": newest.learning.length_mean,
            "actors": newest.actors,
        }

        with self._attempt():
            self._history.keep_run(newest.run, now, facts, kept.rows.tobytes())
            for kind, body in documents.items():
                self._history.keep_document(newest.run, kind, body)

    def _documents(self, newest: Overview) -> dict[str, bytes]:
        """What a run that is opened from a file shows beside its curves, as JSON."""
        documents = {"overview": newest, "actors": self._cluster.actors()[:MAX_KEPT_ACTORS]}
        settings = {node.name: node.settings for node in self._cluster.servers if node.settings}
        if settings:
            documents["settings"] = {
                name: {key: value for key, value in told.items() if key not in ("run", "runs")}
                for name, told in settings.items()
            }
        return {kind: msgspec.json.encode(value) for kind, value in documents.items()}


@dataclass(slots=True)
class _Asked:
    """What one node was asked for so far, and from where on it is asked for more. It is asked once at a time: while it
    is, this belongs to the thread that asks.
    """

    seen: float = 0.0
    """Accounts of `run` that changed since then are not known."""
    run: str = ""
    inherited: int = 0
    accounts_due: float = 0.0
    clients_due: float = 0.0
    settings_due: float = 0.0
    versions: list[int] = field(default_factory=list)
    """Of its tables' parameters."""
    clients: int = 0
    after: int = 0
    """Newest episode that is known."""
    episodes_of: tuple[str, int] = ("", 0)
    """Run and life of the server in which it has this number."""


class Aggregator:
    """Asks, merges, keeps.

    Args:
        settings: Where the nodes are, and how often they are asked.
        history: Where curves are kept; it belongs to the aggregator from now on.
        on_look: Called on the thread with each new overview.
        clock: Seconds since 1970.
        cluster: What takes the answers; None makes one.
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
        self._lock = threading.RLock()  # the cluster's
        self._cluster = Cluster(settings, history.ledger) if cluster is None else cluster
        self._known: dict[str, _Asked] = {}
        self._asked: dict[str, Future[NodeAnswer]] = {}
        self._asking: dict[str, float] = {}  # since when an asker's thread waits for a node; of each its own alone
        self._pool = ThreadPoolExecutor(ASKERS, thread_name_prefix="memoire-dashboard-ask")
        self._ended = threading.Event()
        self._turned = time.monotonic()
        self._progress = ProgressMonitor()
        self.newest: Overview | None = None
        """The newest overview; None before the first."""
        self.figures: Mapping[str, HistoryPoint] = {}
        """Those of the newest look, by the names of their curves."""
        self._looking = threading.Lock()  # the next one's
        self._distributions: dict[str, tuple[float, ClusterDistribution]] = {}
        self._recorder = RunRecorder(history, self._cluster, self._lock)
        self._thread = threading.Thread(target=self._run, name="memoire-dashboard", daemon=True)

    def start(self) -> None:
        """Begin to ask."""
        self._addresses.begin()
        self._thread.start()

    def close(self) -> None:
        """End, and write what is not written yet."""
        self._ended.set()
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

    # ---------------------------------------------------------------------------------------------- what is asked of it

    @property
    def trouble(self) -> str:
        """Why the history cannot be written; "" if it can."""
        return self._recorder.trouble

    def liveness(self) -> list[str]:
        """What only a restart can mend, a sentence each."""
        if self._thread.ident is None or self._ended.is_set():
            return []
        silence = self._progress.silence(self._turned)
        return [f"the thread that asks the nodes has not taken a turn for {silence:.0f} s"] if silence else []

    def readiness(self) -> list[str]:
        """Why there is nothing to see yet, a sentence each."""
        return [] if self.newest is not None else ["starting: the nodes have not been asked yet"]

    def actors(self) -> list[ActorRow]:
        """Every actor of the run."""
        with self._lock:
            return self._cluster.actors()

    def actor(self, client: str) -> ActorDetail | None:
        """All that is known of one actor; None where there is none."""
        with self._lock:
            return self._cluster.actor(client)

    def episodes(self, client: str, most: int) -> list[EpisodeRow]:
        """The newest closed episodes of the run, the newest first; of one client, or of all where that is ""."""
        with self._lock:
            newest = reversed(self._cluster.episodes)
            return list(itertools.islice((each for each in newest if client in ("", each.client)), most))

    def curves(self, run: str, names: list[str], since: float, until: float, points: int) -> Curves:
        """Figures of a run ("": the one that is counted now) over time."""
        now, newest = self._clock(), self.newest
        run = run or (newest.run if newest is not None else "")
        began = next((row.began for row in self.history.runs() if row.name == run), now - 3600.0)
        until = max(min(until, now + 1.0), 0.0)
        begin, patience = max(min(since or began, until), 0.0), max(MIN_AWAY, 3 * self.settings.poll_every)
        return self.history.curves(run, names, begin, until, points, now, patience)

    def events(self, run: str) -> list[EventRow]:
        """What happened to a run ("": the one that is counted now), the oldest first."""
        return self.history.events(run or ("" if self.newest is None else self.newest.run))

    def runs(self) -> list[RunInfo]:
        """Every run that was ever seen, the newest last."""
        current = "" if self.newest is None else self.newest.run
        return [replace(row, is_current=row.name == current) for row in self.history.runs()]

    def statuses(self) -> dict[str, dict[str, Any]]:
        """Everything that each node said last, by its address."""
        with self._lock:
            return {url: node.status for url, node in self._cluster.nodes.items()}

    def node_settings(self, run: str = "") -> dict[str, dict[str, Any]]:
        """Schema, parameters and limits of each server, by its name: now, or as they were last in a run."""
        if run:
            found: dict[str, dict[str, Any]] = msgspec.json.decode(self.history.document(run, "settings") or b"{}")
            return found
        with self._lock:
            return {node.name: node.settings for node in self._cluster.servers if node.settings}

    def servers(self) -> dict[str, str]:
        """Address of the pages of each server that was ever met, by its name."""
        with self._lock:
            return {node.name: node.url for node in self._cluster.servers}

    # ------------------------------------------------------------------------------------------------ the thread's

    def _run(self) -> None:
        while not self._ended.is_set():
            began = time.monotonic()
            self._turned = began
            try:
                self.turn(self.settings.poll_every)
            except Exception:
                _log.exception("the nodes could not be asked")
            self._ended.wait(max(0.01, self.settings.poll_every - (time.monotonic() - began)))

    def look_up(self) -> None:
        """Look up the nodes' names now, and from then on now and then: instead of `start`."""
        self._addresses.look()
        self._addresses.begin()

    def turn(self, patience: float) -> Overview:
        """Ask all nodes once, wait so many seconds for those that are slow, and look."""
        urls = self._addresses.now()
        with self._lock:
            self._cluster.listed(urls, self._clock())
        for url in urls:
            if url not in self._asked:
                known = self._known.setdefault(url, _Asked())
                self._asked[url] = self._pool.submit(self._ask, url, known, self._cluster.run)
        wait_for(self._asked.values(), timeout=patience)
        for url, answer in [(url, future) for url, future in self._asked.items() if future.done()]:
            del self._asked[url]
            self._asking.pop(url, None)
            self._learn(url, answer.result())
        now = self._clock()
        with self._lock:
            for url in self._asked.keys() & self._asking.keys():
                self._cluster.waits_for(url, time.monotonic() - self._asking[url])
            overview, figures = self._cluster.look(now)
            events = self._cluster.events(now, finished=overview.finished)
            if overview.run:
                self.history.add(overview.run, now, figures)
            former, self.newest, self.figures = self.newest, overview, figures
        self._recorder.record(overview, former, events, now)
        self._on_look(overview)
        return overview

    def _learn(self, url: str, answer: NodeAnswer) -> None:
        with self._lock:
            self._cluster.apply(answer)
        known = self._known[url]
        if answer.status is None:
            return
        now, stats = time.monotonic(), answer.status.get("stats", {})
        for told in answer.accounts:
            if told["run"] == stats["run"]:
                is_whole = told["inherited"] == known.inherited  # else what came from elsewhere may be older
                known.seen, known.run = told["time"] - OVERLAP if is_whole else 0.0, told["run"]
                known.inherited = told["inherited"]
                known.accounts_due = now + max(ACCOUNTS_INTERVAL, told["took"] / PART_OF_TIME)
        if answer.clients is not None:
            known.clients_due, known.clients = now + CLIENTS_INTERVAL, len(answer.clients)
        elif known.clients != stats.get("totals", {}).get("clients"):
            known.clients_due = min(known.clients_due, now + ACCOUNTS_INTERVAL)  # somebody is new
        versions = [table["parameters_version"] for table in (stats.get("tables") or {}).values()]
        if answer.settings is not None:
            known.settings_due = now + SETTINGS_INTERVAL
        elif versions != known.versions:
            known.settings_due = 0.0
        known.versions = versions
        for page in answer.episodes:
            known.after, known.episodes_of = page["next"], (page["run"], page["epoch"])

    def _ask(self, url: str, known: _Asked, run: str) -> NodeAnswer:
        began = self._asking[url] = time.monotonic()
        answer = NodeAnswer(url, self._clock())
        node = NodeQuestions(url, self.settings.node_token, TIMEOUT, PAGES_TIMEOUT, self._ended.is_set)
        try:
            answer.status = node.json("/status?clients=no")
            if answer.status.get("role") == "server":
                _ask_server(node, known, run, answer)
        except (NodeError, msgspec.DecodeError, KeyError, TypeError) as error:
            answer.error = str(misunderstood(url, error))
        except Exception as error:  # whatever a stranger at this address says: it must not end the asking
            _log.exception("asking %s failed", url)
            answer.error = repr(error)
        answer.took, answer.time = time.monotonic() - began, self._clock()
        return answer

    def ask_server(self, name: str, path: str) -> Any:
        """A page of a server, now: for what is not kept here. Blocks for `TIMEOUT` seconds at most.

        Raises:
            NodeError: there is no such server, or it does not answer.
        """
        url = self.servers().get(name)
        if url is None:
            raise NodeError(f"there is no server {name!r}; there are {', '.join(self.servers()) or 'none yet'}", 404)
        return NodeQuestions(url, self.settings.node_token, TIMEOUT, TIMEOUT, self._ended.is_set).json(path)

    def distribution(self, table: str, servers: Iterable[str]) -> ClusterDistribution:
        """How what these servers hold in a table is spread: now, or up to `INSPECTION_LIFETIME` seconds ago.

        Blocks as `ask_server` does.
        """
        with self._looking:
            known = self._distributions.get(table)
            if known is None or time.monotonic() > known[0] + INSPECTION_LIFETIME:
                found = self.ask_servers(dict.fromkeys(servers, f"/distribution?{urlencode({'table': table})}"))
                told = {name: answer for name, answer in found.items() if isinstance(answer, dict)}
                known = time.monotonic(), merged(table, told, [name for name in found if name not in told])
                self._distributions[table] = known
            return known[1]

    def ask_servers(self, paths: dict[str, str]) -> dict[str, Any]:
        """A page of each of these servers, now, by name; or the NodeError that came instead."""
        return ask_all(self._pool, {name: partial(self.ask_server, name, path) for name, path in paths.items()})


# --------------------------------------------------------------------------------------------- on the askers' threads


def _ask_server(node: NodeQuestions, known: _Asked, run: str, answer: NodeAnswer) -> None:
    """Ask a server for what is due, while this run is counted."""
    assert answer.status is not None
    now, own = time.monotonic(), str(answer.status["stats"]["run"])
    if now >= known.accounts_due or known.run != run:
        for each in filter(None, dict.fromkeys([own, run])):
            for told in _accounts(node, each, known.seen if each == run == known.run else 0.0):
                answer.accounts.append(told | {"took": time.monotonic() - now})
    answer.episodes = _episodes(node, known)
    if now >= known.clients_due:
        answer.clients = _clients(node)
    if now >= known.settings_due:
        answer.settings = node.json("/settings")


def _accounts(node: NodeQuestions, run: str, seen: float) -> list[dict[str, Any]]:
    """The pages of a server's ledger; none where it has never heard of this run."""
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


def _episodes(node: NodeQuestions, asked: _Asked) -> list[dict[str, Any]]:
    pages: list[dict[str, Any]] = []
    after, known = asked.after, asked.episodes_of
    while len(pages) < MAX_PAGES:
        page = node.json(f"/episodes?most=1000&after={after}")
        if (page["run"], page["epoch"]) != known and after:  # numbers have begun anew
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
