"""What there is in a cluster now, put together from what its nodes say. Pure: no clock, no network.

Ledgers of runs are merged (`ledgers`), counters of single nodes are added up over their restarts (`counters`). Rates
come of what was there ten seconds ago, forecasts of the newest twenty minutes.

`EventWatcher` finds what happens to a run and its nodes, as marks on its curves: a node goes away, comes back or begins
again. `Forecasts` says when memory or a disk will be full, and a goal reached, if it goes on like this.
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

from .actors import ActorList, KeptRun, NewestModels, RunLedgers
from .answers import ActorDetail, ActorRow, EpisodeRow, Forecast, Overview, TableRow
from .counters import LONG_WINDOW, NOT_ASKED, Counters, NodeAnswer, NodeState, RateWindow, learners_of
from .history import EventRow, HistoryPoint
from .overview import (
    figures_of,
    freshness_of,
    inference_of,
    learning_of,
    models_of,
    node_row,
    open_addresses,
    own_of,
    roles_of,
    signs_of,
    starts_of,
    tables_of,
)
from .verdict import verdicts

MAX_EPISODES = 20_000
"""Newest episodes that pages show."""


START_TOLERANCE = 2.0
"""Seconds by which a node's start, as its uptime says it, may differ between two looks at one life of it."""


FORECAST_INTERVAL = 10.0
"""Seconds between two looks at what forecasts are made of."""
FORECAST_WINDOW = 1_200.0
FULL = 0.98
"""Share of a table's room from which on it is full: what comes in takes the place of the oldest."""


class Forecasts:
    """What there was in the newest twenty minutes, and what follows from it."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._ring = RateWindow(FORECAST_WINDOW, FORECAST_INTERVAL)

    def remember(self, now: float, totals: Totals, up: list[NodeState]) -> None:
        """Keep what there is now. `up`: the servers that answer."""
        values = {"steps": float(totals.steps), "episodes": float(totals.episodes)}
        values["held"] = sum(float(node.stats.get("held_bytes", 0)) for node in up)
        values |= {
            f"free {node.url}": float(node.stats["folder"]["free_bytes"]) for node in up if node.stats.get("folder")
        }
        self._ring.add(now, values)

    def clear(self) -> None:
        """Another run is counted."""
        self._ring.clear()

    def forecast(self, totals: Totals, tables: list[TableRow], up: Iterable[NodeState]) -> Forecast:
        """When something is full or done. `up`: the servers that answer."""
        rate = self._ring.rate
        disks = [
            until(node.stats["folder"]["free_bytes"], -rate(f"free {node.url}", FORECAST_WINDOW))
            for node in up
            if node.stats.get("folder")
        ]
        settings, goals = self._settings, []
        if settings.goal_steps:
            goals.append(until(settings.goal_steps - totals.steps, rate("steps", FORECAST_WINDOW)))
        if settings.goal_episodes:
            goals.append(until(settings.goal_episodes - totals.episodes, rate("episodes", FORECAST_WINDOW)))
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
        left = sum(table.byte_limit - table.held_bytes for table in by_bytes)
        return until(left, self._ring.rate("held", FORECAST_WINDOW))


def until(left: float, rate: float) -> float | None:
    """Seconds until this much is gone; None where that is more than a year, or never."""
    if left <= 0.0:
        return 0.0
    seconds = left / rate if rate > 0.0 else math.inf
    return seconds if seconds < 365 * 86_400 else None


@dataclass(slots=True)
class _WatchedNode:
    """One node as it was at the last look."""

    state: str
    since: float
    started: float | None
    """When its process began, seconds since 1970; None where nobody knows."""


class EventWatcher:
    """Finds what has changed since the last look. What it sees first has not happened: it was there before."""

    def __init__(self) -> None:
        self._nodes: dict[str, _WatchedNode] = {}
        self._run = ""
        self._finished = False

    def look(self, now: float, run: str, nodes: Iterable[NodeState], *, finished: bool) -> list[EventRow]:
        """The events since the last look, the oldest first."""
        known, self._nodes = self._nodes, {node.url: _as_seen(node) for node in nodes}
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
        found = [EventRow(now, "run_began", "", f"The dashboard saw run {run} first.")] if has_begun else []
        return [*found, EventRow(now, "run_finished", "", f"Run {run} was finished.")] if has_ended else found


def _as_seen(node: NodeState) -> _WatchedNode:
    uptime, time = node.stats.get("uptime"), node.status.get("time")
    started = float(time) - float(uptime) if uptime is not None and time is not None and node.is_up else None
    return _WatchedNode(node.state, node.since, started)


def _node_events(now: float, name: str, before: _WatchedNode, seen: _WatchedNode) -> list[EventRow]:
    if before.state != "down" and seen.state == "down":
        return [EventRow(now, "node_down", name, f"{name} does not answer.")]
    is_new = None not in (before.started, seen.started) and seen.started > before.started + START_TOLERANCE  # type: ignore[operator]
    if is_new:
        return [EventRow(now, "node_restarted", name, f"{name} started again.")]
    if before.state == "down" and seen.state != "down" and before.started is not None:
        return [EventRow(now, "node_back", name, f"{name} answers again, after {now - before.since:.0f} s.")]
    return []


class Cluster:
    """All that the nodes of one cluster said, as one.

    Args:
        restore: The ledger of a run that was seen before: its rows, packed.
    """

    def __init__(self, settings: Settings, restore: Callable[[str], bytes] = lambda run: b"") -> None:
        self._settings = settings
        self.nodes: dict[str, NodeState] = {}
        """By address."""
        self.run = ""
        """The one that is counted now."""
        self.episodes: deque[EpisodeRow] = deque(maxlen=MAX_EPISODES)
        """The newest ones of the run, the newest last."""
        self._fresh_episodes: list[tuple[str, list[EpisodeRow]]] = []  # with their run
        self._ledgers = RunLedgers(restore)
        self._counters = Counters()
        self._forecasts = Forecasts(settings)
        self._actors = ActorList(settings)
        self._models = NewestModels()
        self._events = EventWatcher()
        self._number = 0  # of the next overview
        self._time = 0.0  # of the newest one

    # ----------------------------------------------------------------------------------------------- what comes in

    def listed(self, urls: Iterable[str], now: float) -> None:
        """These are the nodes that there should be: others are forgotten."""
        wanted = list(urls)
        for url in [url for url in self.nodes if url not in wanted]:
            del self.nodes[url]
            self._actors.forget(url)
        for url in wanted:
            self.nodes.setdefault(url, NodeState(url, now, error=NOT_ASKED))

    def waits_for(self, url: str, seconds: float) -> None:
        """A node was asked so long ago, and has not answered."""
        if url in self.nodes:
            self.nodes[url].note_silence(seconds)

    def apply(self, answer: NodeAnswer) -> None:
        """Take what a node said."""
        node = self.nodes.get(answer.url)
        if node is None:
            return
        node.apply(answer)
        if node.role == "server" and not answer.error:
            self._actors.name_home(node.name)
            self._counters.count(node)
        for told in answer.accounts:
            if told["row_bytes"] == ACCOUNT.itemsize:  # or it is of another version: shown by its software
                self.kept(told["run"]).take(np.frombuffer(told["rows"], ACCOUNT))
        if answer.clients is not None:
            self._actors.take_facts(answer.url, answer.clients)
        for page in answer.episodes:
            rows = [
                EpisodeRow(row["client"], row["time"], row["length"], row["return"], row.get("kind") == "test")
                for row in page["rows"]
            ]
            self._fresh_episodes.append((page["run"], rows))

    def kept(self, run: str) -> KeptRun:
        """The ledger of a run."""
        return self._ledgers.of(run, self.run)

    # ------------------------------------------------------------------------------------------------ what there is

    @property
    def servers(self) -> list[NodeState]:
        """Those that answered at least once."""
        return [node for node in self.nodes.values() if node.role == "server"]

    def look(self, now: float) -> tuple[Overview, dict[str, HistoryPoint]]:
        """How everything stands now, and the figures for the history."""
        self._time = now
        self._choose_run()
        up = [node for node in self.servers if node.is_up]
        kept, totals = self.kept(self.run), self.totals()
        learners = learners_of(self.servers, now, self._counters.gained)
        self._counters.remember(now, totals, up, learners)
        self._forecasts.remember(now, totals, up)
        self._actors.remember(now, kept)
        nodes = [node_row(node) for node in self.nodes.values()]
        tables, models = tables_of(up, learners, self._counters), models_of(up)
        awaited = self._models.replaced(now, models)
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
            actors=self._actors.presence(kept, self.servers, now),
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
            outdated=self._actors.outdated(kept, awaited, now),
            inference=inference_of(self.nodes.values(), models, awaited),
            starts=starts_of(self.nodes.values()),
            own=own_of(self.servers),
            actor_lag=self._actors.lag(kept, now),
            open=open_addresses(nodes, self._settings),
            counted=self._counters.counted,
        )
        overview.verdicts.extend(verdicts(signs_of(overview, up, self._counters, self._settings)))
        self._number += 1
        return overview, figures_of(overview) | self._episode_figures()

    def events(self, now: float, *, finished: bool) -> list[EventRow]:
        """What happened to the run and its nodes since this was asked last."""
        return self._events.look(now, self.run, list(self.nodes.values()), finished=finished)

    def totals(self) -> Totals:
        """Of the run, each client once."""
        return self.kept(self.run).totals()

    def _choose_run(self) -> None:
        """The one that most servers count; they hear of a new one after each other."""
        runs = Counter(str(node.stats["run"]) for node in self.servers if node.is_up and "run" in node.stats)
        chosen = max(runs, key=lambda name: (runs[name], name == self.run)) if runs else self.run
        if chosen != self.run:
            self.run = chosen
            self._counters.clear()
            self._forecasts.clear()
            self._actors.clear()
            self.episodes.clear()

    def _episode_figures(self) -> dict[str, HistoryPoint]:
        """Returns and lengths of the episodes that ended since the last look; those of tests by themselves."""
        fresh = [row for run, rows in self._fresh_episodes if run == self.run for row in rows]
        self._fresh_episodes.clear()
        self.episodes.extend(fresh)
        trained = [row for row in fresh if not row.is_test]
        self._actors.take_episodes(trained)
        found = _points("return", "length", trained) | _points(
            "test_return", "test_length", [row for row in fresh if row.is_test]
        )
        return found | self._actors.return_quantiles() if trained else found

    # ----------------------------------------------------------------------------------------------------- actors

    def actors(self) -> list[ActorRow]:
        """Every actor of the run, as of the newest look."""
        return self._actors.rows(self.kept(self.run), self._time)

    def actor(self, client: str) -> ActorDetail | None:
        """All that is known of one actor; None if there is none."""
        row = next((row for row in self.actors() if row.client == client), None)
        if row is None:
            return None
        episodes = [each for each in reversed(self.episodes) if each.client == client][:100]
        homes = self._actors.homes_of(self.kept(self.run), bytes.fromhex(client))
        return ActorDetail(row, homes, self._actors.facts_of(client), episodes)


def _points(returns: str, lengths: str, rows: list[EpisodeRow]) -> dict[str, HistoryPoint]:
    """Two figures of episodes, by these names; {} of none."""
    if not rows:
        return {}
    found = [float(row.length) for row in rows]
    return {returns: HistoryPoint.of([row.returned for row in rows]), lengths: HistoryPoint.of(found)}
