"""Cluster state, merged from the answers of all nodes. Pure: no clock, no network.

Ledgers of runs are merged (`actors`); counters of nodes are added up over their restarts (`counters`). Rates cover the
newest ten seconds, forecasts the newest twenty minutes.

`EventWatcher` detects events of a run and its nodes, as marks on the curves: a node goes down, comes back or restarts.
`Forecasts` estimates the times until memory or a disk is full or a goal is reached, at the present pace.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from memoire.accounting.account import Totals
from memoire.dashboard.settings import Settings
from memoire.wire.rows import ACCOUNT

from .actors import ActorList, NewestModels, RunLedger, RunLedgers
from .answers import ActorDetail, ActorRow, EpisodeRow, Forecast, Overview, TableRow
from .counters import LONG_WINDOW, NOT_ASKED, Counters, NodeAnswer, NodeState, RateWindow, learners_of
from .history import EventRow, HistoryPoint
from .overview import (
    figures_of,
    freshness_of,
    inference_of,
    kind_specific_figures,
    learning_of,
    models_of,
    node_row,
    open_addresses,
    roles_of,
    starts_of,
    tables_of,
    verdict_inputs,
)
from .verdict import verdicts

MAX_EPISODES = 20_000
"""Number of newest episodes that are kept for the pages."""


START_TOLERANCE = 2.0
"""Seconds by which a start time derived from a node's uptime may differ between two polls of one process."""


FORECAST_INTERVAL = 10.0
"""Seconds between two records of the figures that forecasts need."""
FORECAST_WINDOW = 1_200.0
FULL = 0.98
"""Share of a table's limit from which the table counts as full: new entries replace the oldest."""


class Forecasts:
    """Counts, held bytes and free disk space of the newest twenty minutes, and forecasts from their growth."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._ring = RateWindow(FORECAST_WINDOW, FORECAST_INTERVAL)

    def remember(self, now: float, totals: Totals, up: list[NodeState]) -> None:
        """Record the figures that forecasts need. `up`: the servers that answer."""
        values = {"steps": float(totals.steps), "episodes": float(totals.episodes)}
        values["held"] = sum(float(node.stats.get("held_bytes", 0)) for node in up)
        values |= {
            f"free {node.url}": float(node.stats["folder"]["free_bytes"]) for node in up if node.stats.get("folder")
        }
        self._ring.add(now, values)

    def clear(self) -> None:
        """Discard the record, because another run is counted."""
        self._ring.clear()

    def forecast(self, totals: Totals, tables: list[TableRow], up: Iterable[NodeState]) -> Forecast:
        """Return the seconds until memory or a disk is full or a goal is reached. `up`: the servers that answer."""
        rate = self._ring.rate
        disks = [
            seconds_until(node.stats["folder"]["free_bytes"], -rate(f"free {node.url}", FORECAST_WINDOW))
            for node in up
            if node.stats.get("folder")
        ]
        settings, goals = self._settings, []
        if settings.goal_steps:
            goals.append(seconds_until(settings.goal_steps - totals.steps, rate("steps", FORECAST_WINDOW)))
        if settings.goal_episodes:
            goals.append(seconds_until(settings.goal_episodes - totals.episodes, rate("episodes", FORECAST_WINDOW)))
        return Forecast(
            memory_full=self._memory_full(tables),
            disk_full=min((each for each in disks if each is not None), default=None),
            goal=min((each for each in goals if each is not None), default=None),
        )

    def _memory_full(self, tables: list[TableRow]) -> float | None:
        if any(table.full is not None and table.full >= FULL for table in tables):
            return 0.0
        by_bytes = [t for t in tables if t.byte_limit and t.full == t.held_bytes / t.byte_limit]
        if not by_bytes or not self._ring.is_record("held", LONG_WINDOW):
            return None
        room = sum(table.byte_limit - table.held_bytes for table in by_bytes)
        return seconds_until(room, self._ring.rate("held", FORECAST_WINDOW))


def seconds_until(amount: float, rate: float) -> float | None:
    """Return the seconds until `amount` is used up at `rate` per second; None if never, or after more than a year."""
    if amount <= 0.0:
        return 0.0
    seconds = amount / rate if rate > 0.0 else math.inf
    return seconds if seconds < 365 * 86_400 else None


@dataclass(slots=True)
class _WatchedNode:
    """State of one node at the last poll."""

    state: str
    since: float
    started: float | None
    """Start time of the node's process, seconds since 1970; None if unknown."""


class EventWatcher:
    """Detector of changes of the run and its nodes since the last call. The first sight of a node is no event."""

    def __init__(self) -> None:
        self._nodes: dict[str, _WatchedNode] = {}
        self._run = ""
        self._finished = False

    def new_events(self, now: float, run: str, nodes: Iterable[NodeState], *, finished: bool) -> list[EventRow]:
        """Return the events since the last call, the oldest first."""
        known, self._nodes = self._nodes, {node.url: _observe(node) for node in nodes}
        events = self._run_events(now, run, finished)
        for node in nodes:
            before = known.get(node.url)
            if before is not None:
                events += _node_events(now, node.name or node.url, before, self._nodes[node.url])
            if node.state == "down" and before is not None:
                self._nodes[node.url].started = before.started
        return events

    def _run_events(self, now: float, run: str, finished: bool) -> list[EventRow]:
        has_begun = bool(run) and run != self._run
        has_ended = finished and not (self._finished and run == self._run)
        self._run, self._finished = run, finished
        events = [EventRow(now, "run_began", "", f"The dashboard first saw run {run}.")] if has_begun else []
        return [*events, EventRow(now, "run_finished", "", f"Run {run} was finished.")] if has_ended else events


def _observe(node: NodeState) -> _WatchedNode:
    uptime, time = node.stats.get("uptime"), node.status.get("time")
    started = float(time) - float(uptime) if uptime is not None and time is not None and node.is_up else None
    return _WatchedNode(node.state, node.since, started)


def _node_events(now: float, name: str, before: _WatchedNode, seen: _WatchedNode) -> list[EventRow]:
    if before.state != "down" and seen.state == "down":
        return [EventRow(now, "node_down", name, f"{name} does not answer.")]
    is_new = None not in (before.started, seen.started) and seen.started > before.started + START_TOLERANCE  # type: ignore[operator]
    if is_new:
        return [EventRow(now, "node_restarted", name, f"{name} was restarted.")]
    if before.state == "down" and seen.state != "down" and before.started is not None:
        return [EventRow(now, "node_back", name, f"{name} answers again, after {now - before.since:.0f} s.")]
    return []


class Cluster:
    """State of one cluster, merged from the answers of its nodes.

    Args:
        restore: Returns the packed rows of the ledger of an earlier run.
    """

    def __init__(self, settings: Settings, restore: Callable[[str], bytes] = lambda run: b"") -> None:
        self._settings = settings
        self.nodes: dict[str, NodeState] = {}
        """State of each node, by address."""
        self.run = ""
        """Name of the run that is counted now; "" before the first."""
        self.episodes: deque[EpisodeRow] = deque(maxlen=MAX_EPISODES)
        """Newest `MAX_EPISODES` closed episodes of the run, the newest last."""
        self._fresh_episodes: list[tuple[str, list[EpisodeRow]]] = []  # fresh episodes with their run
        self._ledgers = RunLedgers(restore)
        self._counters = Counters()
        self._forecasts = Forecasts(settings)
        self._actors = ActorList(settings)
        self._models = NewestModels()
        self._events = EventWatcher()
        self._number = 0  # number of the next overview
        self._time = 0.0  # time of the newest overview

    # ------------------------------------------------------------------------------------------------------------ input

    def set_addresses(self, urls: Iterable[str], now: float) -> None:
        """Add nodes with new addresses, and remove the nodes whose address is not in `urls`."""
        addresses = list(urls)
        for url in [url for url in self.nodes if url not in addresses]:
            del self.nodes[url]
            self._actors.forget(url)
        for url in addresses:
            self.nodes.setdefault(url, NodeState(url, now, error=NOT_ASKED))

    def note_unanswered(self, url: str, seconds: float) -> None:
        """Note that a node has left a query unanswered for `seconds`."""
        if url in self.nodes:
            self.nodes[url].note_silence(seconds)

    def apply(self, answer: NodeAnswer) -> None:
        """Merge the answer of a node; ignore the answer of a node that was removed."""
        node = self.nodes.get(answer.url)
        if node is None:
            return
        node.apply(answer)
        if node.role == "server" and not answer.error:
            self._actors.name_home(node.name)
            self._counters.count(node)
        for page in answer.accounts:
            if page["row_bytes"] == ACCOUNT.itemsize:  # a server of another version shows the version
                self.ledger_of(page["run"]).take(np.frombuffer(page["rows"], ACCOUNT))
        if answer.clients is not None:
            self._actors.take_facts(answer.url, answer.clients)
        for page in answer.episodes:
            rows = [
                EpisodeRow(row["client"], row["time"], row["length"], row["return"], row.get("kind") == "test")
                for row in page["rows"]
            ]
            self._fresh_episodes.append((page["run"], rows))

    def ledger_of(self, run: str) -> RunLedger:
        """Return the ledger of a run, from the cache or the history."""
        return self._ledgers.ledger_of(run, self.run)

    # ----------------------------------------------------------------------------------------------------------- output

    @property
    def servers(self) -> list[NodeState]:
        """Servers that have answered at least once."""
        return [node for node in self.nodes.values() if node.role == "server"]

    def refresh(self, now: float) -> tuple[Overview, dict[str, HistoryPoint]]:
        """Choose the run, record counters, and return the new overview and the figures for the history."""
        self._time = now
        self._choose_run()
        up = [node for node in self.servers if node.is_up]
        ledger, totals = self.ledger_of(self.run), self.totals()
        learners = learners_of(self.servers, now, self._counters.growth)
        self._counters.remember(now, totals, up, learners)
        self._forecasts.remember(now, totals, up)
        self._actors.remember(now, ledger)
        nodes = [node_row(node) for node in self.nodes.values()]
        tables, models = tables_of(up, learners, self._counters), models_of(up)
        awaited = self._models.update_expected_versions(now, models)
        overview = Overview(
            number=self._number,
            time=now,
            run=self.run,
            runs=list(dict.fromkeys(name for node in self.servers for name in node.runs)),
            finished=bool(up) and all(node.stats.get("finished") for node in up),
            durable=bool(up) and all(node.stats.get("durable") for node in up),
            totals=totals,
            missing=[node.name or node.url for node in self.nodes.values() if not node.is_up],
            rates=self._counters.rates(learners),
            actors=self._actors.state_counts(ledger, self.servers, now),
            tables=tables,
            learning=learning_of(up, self._settings.goal_return),
            freshness=freshness_of(up),
            latency=self._counters.latency(),
            forecast=self._forecasts.forecast(totals, tables, up),
            verdicts=[],
            nodes=nodes,
            learners=learners,
            roles=roles_of(nodes, self._settings),
            models=models,
            outdated=self._actors.outdated(ledger, awaited, now),
            inference=inference_of(self.nodes.values(), models, awaited),
            starts=starts_of(self.nodes.values()),
            own=kind_specific_figures(self.servers),
            actor_lag=self._actors.lag(ledger, now),
            open=open_addresses(nodes, self._settings),
            counted=self._counters.counter_totals,
        )
        overview.verdicts.extend(verdicts(verdict_inputs(overview, up, self._counters, self._settings)))
        self._number += 1
        return overview, figures_of(overview) | self._episode_figures()

    def events(self, now: float, *, finished: bool) -> list[EventRow]:
        """Return the events of the run and its nodes since the last call, the oldest first."""
        return self._events.new_events(now, self.run, list(self.nodes.values()), finished=finished)

    def totals(self) -> Totals:
        """Return the totals of the run that is counted now; each client counts once."""
        return self.ledger_of(self.run).totals()

    def _choose_run(self) -> None:
        """Choose the run that most servers count, because servers change to a new run one after the other."""
        runs = Counter(str(node.stats["run"]) for node in self.servers if node.is_up and "run" in node.stats)
        chosen = max(runs, key=lambda name: (runs[name], name == self.run)) if runs else self.run
        if chosen != self.run:
            self.run = chosen
            self._counters.clear()
            self._forecasts.clear()
            self._actors.clear()
            self.episodes.clear()

    def _episode_figures(self) -> dict[str, HistoryPoint]:
        """Return figures of the episodes that ended since the last poll, with separate curves for test episodes."""
        fresh = [row for run, rows in self._fresh_episodes if run == self.run for row in rows]
        self._fresh_episodes.clear()
        self.episodes.extend(fresh)
        trained = [row for row in fresh if not row.is_test]
        self._actors.take_episodes(trained)
        figures = _episode_points("return", "length", trained) | _episode_points(
            "test_return", "test_length", [row for row in fresh if row.is_test]
        )
        return figures | self._actors.return_quantiles() if trained else figures

    # ----------------------------------------------------------------------------------------------------------- actors

    def actors(self) -> list[ActorRow]:
        """Return every actor of the run, as of the newest overview."""
        return self._actors.rows(self.ledger_of(self.run), self._time)

    def actor(self, client: str) -> ActorDetail | None:
        """Return the details of one actor; None if the run has no actor of this id."""
        row = next((row for row in self.actors() if row.client == client), None)
        if row is None:
            return None
        episodes = [each for each in reversed(self.episodes) if each.client == client][:100]
        homes = self._actors.homes_of(self.ledger_of(self.run), bytes.fromhex(client))
        return ActorDetail(row, homes, self._actors.facts_of(client), episodes)


def _episode_points(returns: str, lengths: str, rows: list[EpisodeRow]) -> dict[str, HistoryPoint]:
    """Return the history points of returns and lengths under these two names; {} if `rows` is empty."""
    if not rows:
        return {}
    values = [float(row.length) for row in rows]
    return {
        returns: HistoryPoint.from_values([row.returned for row in rows]),
        lengths: HistoryPoint.from_values(values),
    }
