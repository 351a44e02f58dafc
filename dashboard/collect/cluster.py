"""What there is in a cluster now, put together from what its nodes say. Pure: no clock, no network.

Ledgers are merged (`ledgers.py`), counters of single nodes are added up over their restarts (`Sums`), and rates come of
what was there ten seconds ago.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from memoire.accounting.ledger import Totals
from memoire.dashboard.settings import Settings
from memoire.pool.freshness import BOUNDS
from memoire.wire.identity import name_hash
from memoire.wire.rows import ACCOUNT

from .answers import (
    ActorRow,
    Actors,
    EpisodeRow,
    Forecast,
    Fresh,
    Latency,
    LearnerRow,
    Learning,
    NodeRow,
    Overview,
    Rates,
    TableRow,
)
from .history import Point
from .ledgers import Kept, ids_of
from .verdict import Signs, verdicts

WINDOW = 10.0
"""Seconds over which rates are taken."""
LONG_WINDOW = 60.0
SLOW = 10.0
"""Seconds between two looks at what forecasts are made of."""
SLOW_WINDOW = 1_200.0
FULL = 0.98
"""Share of a table's room from which on it is full: what comes in takes the place of the oldest."""
ACTORS_EVERY = 2.0
"""Seconds between two looks at the steps of each actor, for its rate."""
NOT_ASKED = "not asked yet"
HARMLESS = ("missing",)
"""Refusals that are nobody's trouble: a stretch of a model that a newer version has overtaken meanwhile."""
MOST_RUNS = 8
"""Runs whose ledgers are at hand; others are read from the history."""
MOST_EPISODES = 20_000


@dataclass(slots=True)
class Answer:
    """What one node said when it was asked, decoded."""

    url: str
    time: float
    """Seconds since 1970, here."""
    took: float = 0.0
    error: str = ""
    """Why it did not answer; "" where it did."""
    status: dict[str, Any] | None = None
    accounts: list[dict[str, Any]] = field(default_factory=list)
    episodes: list[dict[str, Any]] = field(default_factory=list)
    clients: list[dict[str, Any]] | None = None
    settings: dict[str, Any] | None = None


@dataclass(slots=True)
class Node:
    """A node as it is known."""

    url: str
    since: float
    """When its state began."""
    state: str = "down"
    error: str = ""
    status: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    took: float = 0.0
    name: str = ""
    role: str = ""
    runs: list[str] = field(default_factory=list)

    @property
    def is_up(self) -> bool:
        """Whether it answered last time."""
        return self.state != "down"

    @property
    def stats(self) -> dict[str, Any]:
        """Its figures, as it said them last."""
        found: dict[str, Any] = self.status.get("stats") or {}
        return found


class Sums:
    """Counters of many nodes as one: what each gained is added up, and what began anew counts from zero."""

    def __init__(self) -> None:
        self._last: dict[tuple[str, str], tuple[object, float]] = {}
        self.values: dict[str, float] = {}

    def saw(self, who: str, life: object, name: str, value: float) -> None:
        """`who`, in this life of it, says that it has counted so much. What it had when it was first seen is not
        new. One whose life is None has only one: fewer than it had is what somebody heard of it before.
        """
        known = self._last.get((who, name))
        if known is not None and life is None and value < known[1]:
            return
        self._last[who, name] = life, value
        former = value if known is None else known[1] if known[0] == life and known[1] <= value else 0.0
        self.values[name] = self.values.get(name, 0.0) + value - former


class Ring:
    """What was there at some times, for rates: the newest `seconds`, at most one entry in `every`."""

    def __init__(self, seconds: float, every: float = 0.0) -> None:
        self._seconds, self._every = seconds, every
        self._entries: deque[tuple[float, dict[str, float]]] = deque()

    def add(self, time: float, values: Mapping[str, float]) -> None:
        """These are there now."""
        if self._entries and time < self._entries[-1][0] + self._every:
            return
        self._entries.append((time, dict(values)))
        while len(self._entries) > 2 and self._entries[1][0] <= time - self._seconds:
            self._entries.popleft()

    def clear(self) -> None:
        """Begin anew."""
        self._entries.clear()

    def gained(self, name: str, window: float) -> tuple[float, float]:
        """How much more there is than `window` seconds ago, or than when it was seen first, and over how many seconds
        that is; zeros at first.
        """
        known = [entry for entry in self._entries if name in entry[1]]
        if len(known) < 2 or name not in self._entries[-1][1]:
            return 0.0, 0.0
        now, newest = known[-1]
        then, oldest = next((entry for entry in reversed(known) if entry[0] <= now - window), known[0])
        return newest[name] - oldest[name], now - then

    def is_record(self, name: str, since: float) -> bool:
        """Whether there is more than there ever was up to `since` seconds ago: what goes up and down is not rising."""
        known = [(time, values[name]) for time, values in self._entries if name in values]
        return bool(known) and all(value < known[-1][1] for time, value in known if time <= known[-1][0] - since)

    def rate(self, name: str, window: float = WINDOW) -> float:
        """How much more there is each second."""
        gained, seconds = self.gained(name, window)
        return gained / seconds if seconds > 0.0 else 0.0


class Cluster:
    """All that the nodes of one cluster said, as one.

    Args:
        restore: The ledger of a run that was seen before: its rows, packed.
    """

    def __init__(self, settings: Settings, restore: Callable[[str], bytes] = lambda run: b"") -> None:
        self._settings, self._restore = settings, restore
        self.nodes: dict[str, Node] = {}
        self.run = ""
        self.episodes: deque[EpisodeRow] = deque(maxlen=MOST_EPISODES)
        """The newest ones of the run, the newest last."""
        self._fresh_episodes: list[tuple[str, list[EpisodeRow]]] = []  # with their run
        self._kept: dict[str, Kept] = {}
        self._facts: dict[str, dict[str, dict[str, Any]]] = {}  # node, client in hex -> as this home says it
        self._homes: dict[int, str] = {}
        self._sums, self._waits = Sums(), Sums()
        self._ring, self._slow = Ring(LONG_WINDOW), Ring(SLOW_WINDOW, SLOW)
        self._actor_ring: deque[tuple[float, dict[bytes, int]]] = deque()
        self._actor_rows: tuple[tuple[int, int], list[ActorRow]] | None = None
        self._number = 0
        self._totals: tuple[str, int, Totals] = ("", -1, Totals())
        self._time = 0.0

    # ----------------------------------------------------------------------------------------------- what comes in

    def listed(self, urls: Iterable[str], now: float) -> None:
        """These are the nodes that there should be: others are forgotten."""
        wanted = list(urls)
        for url in [url for url in self.nodes if url not in wanted]:
            del self.nodes[url]
            self._facts.pop(url, None)
        for url in wanted:
            self.nodes.setdefault(url, Node(url, now, error=NOT_ASKED))

    def waits_for(self, url: str, seconds: float) -> None:
        """A node that has never answered was asked so long ago; of one that has, what it said last still holds."""
        node = self.nodes.get(url)
        if node is not None and not node.status and not node.is_up:
            node.error = f"{url} has not answered for {seconds:.1f} s"

    def apply(self, answer: Answer) -> None:
        """Take what a node said."""
        node = self.nodes.get(answer.url)
        if node is None:
            return
        node.took = answer.took
        if answer.status is not None:
            node.status = answer.status
            node.role = str(answer.status.get("role", ""))
            node.name = str(node.stats.get("name") or node.stats.get("client") or node.stats.get("reader") or "")
        state = "down" if answer.error else "up" if node.status.get("ready") else "unready"
        if state != node.state:
            node.state, node.since = state, answer.time
        node.error = answer.error
        if answer.settings is not None:
            node.settings = answer.settings
        if node.role == "server" and not answer.error:
            self._homes[name_hash(node.name)] = node.name
            self._count(node)
        for told in answer.accounts:
            node.runs = [str(name) for name in told["runs"]]
            self._take_accounts(told)
        if answer.clients is not None:
            self._facts[answer.url] = {row["client"]: row for row in answer.clients}
        for page in answer.episodes:
            rows = [EpisodeRow(row["client"], row["time"], row["length"], row["return"]) for row in page["rows"]]
            self._fresh_episodes.append((page["run"], rows))

    def _take_accounts(self, told: dict[str, Any]) -> None:
        if told["row_bytes"] != ACCOUNT.itemsize:
            return  # of another version: shown by its software
        self.kept(told["run"]).take(np.frombuffer(told["rows"], ACCOUNT))

    def _count(self, node: Node) -> None:
        stats = node.stats
        life = stats.get("epoch")
        tables = stats.get("tables") or {}
        counted = {
            "samples": sum(table["samples"] for table in tables.values()),
            "refused": sum(count for code, count in (stats.get("refused") or {}).items() if code not in HARMLESS),
            "overwritten": stats.get("overwritten_caches", 0),
            "log_lines": stats.get("log_lines", 0),
        }
        for kind in (stats.get("requests") or {}).values():
            for place, count in enumerate(kind["counts"]):
                counted[f"request {place}"] = counted.get(f"request {place}", 0) + count
        for name, value in counted.items():
            self._sums.saw(node.url, life, name, value)

    def kept(self, run: str) -> Kept:
        """The ledger of a run."""
        if run not in self._kept:
            self._kept[run] = Kept(np.frombuffer(self._restore(run), ACCOUNT))
            while len(self._kept) > MOST_RUNS:
                del self._kept[next(name for name in self._kept if name not in (run, self.run))]
        return self._kept[run]

    # ------------------------------------------------------------------------------------------------ what there is

    @property
    def servers(self) -> list[Node]:
        """Those that answered at least once."""
        return [node for node in self.nodes.values() if node.role == "server"]

    def look(self, now: float) -> tuple[Overview, dict[str, Point]]:
        """How everything stands now, and the figures for the history."""
        self._time = now
        self._choose_run()
        up = [node for node in self.servers if node.is_up]
        totals = self.totals()
        learners = self._learners(now)
        self._remember(now, totals, up, learners)
        self._remember_actors(now)
        rates = self._rates(learners)
        actors = self._actors(now)
        nodes = [_node_row(node) for node in self.nodes.values()]
        tables = self._tables(up)
        fresh, latency, learning = self._freshness(up), self._latency(), self._learning(up)
        overview = Overview(
            number=self._number,
            time=now,
            run=self.run,
            runs=list(dict.fromkeys(name for node in self.servers for name in node.runs)),
            finished=bool(up) and all(node.stats.get("finished") for node in up),
            durable=bool(up) and all(node.stats.get("durable") for node in up),
            totals=totals,
            missing=[node.name or node.url for node in self.nodes.values() if not node.is_up],
            rates=rates,
            actors=actors,
            tables=tables,
            learning=learning,
            freshness=fresh,
            latency=latency,
            forecast=self._forecast(totals, tables),
            verdicts=[],
            nodes=nodes,
            learners=[row for row, _ in learners],
            open=self._open(nodes),
        )
        overview.verdicts.extend(verdicts(self._signs(overview, up)))
        self._number += 1
        return overview, self._figures(overview)

    def _open(self, nodes: list[NodeRow]) -> list[str]:
        own = [f"dashboard http://{self._settings.listen}"] if self._settings.is_open else []
        return [*(f"{node.name or node.url} {address}" for node in nodes for address in node.open), *own]

    def totals(self) -> Totals:
        """Of the run, each client once."""
        kept = self.kept(self.run)
        if self._totals[:2] != (self.run, kept.version):
            self._totals = self.run, kept.version, kept.totals()
        return self._totals[2]

    def _choose_run(self) -> None:
        """The one that most servers count; they hear of a new one after each other."""
        runs = Counter(str(node.stats["run"]) for node in self.servers if node.is_up and "run" in node.stats)
        chosen = max(runs, key=lambda name: (runs[name], name == self.run)) if runs else self.run
        if chosen != self.run:
            self.run = chosen
            self._ring.clear()
            self._slow.clear()
            self._actor_ring.clear()
            self.episodes.clear()

    def _remember(self, now: float, totals: Totals, up: list[Node], learners: list[tuple[LearnerRow, float]]) -> None:
        lives = {_embedded(node): node.stats.get("epoch") for node in up}
        for row, _ in learners:  # those far away count what they take themselves, and have another name in each life
            life = lives.get(row.learner)
            self._sums.saw(f"learner {row.learner}", life, "batches", row.batches)
            self._waits.saw("", life, row.learner, row.waited)
        values = dict(self._sums.values)
        values |= {
            "steps": totals.steps,
            "episodes": totals.episodes,
            "caches": totals.accepted_caches,
            "generated": totals.generated_bytes,
            "received": totals.received_bytes,
            "skipped": totals.skipped_caches,
            "pushed": totals.pushed_caches,
        }
        values |= {f"waited {row.learner}": self._waits.values[row.learner] for row, _ in learners}
        self._ring.add(now, values)
        slow = {"steps": float(totals.steps), "episodes": float(totals.episodes)}
        slow["held"] = sum(float(node.stats.get("held_bytes", 0)) for node in up)
        slow |= {
            f"free {node.url}": float(node.stats["folder"]["free_bytes"]) for node in up if node.stats.get("folder")
        }
        self._slow.add(now, slow)

    def _remember_actors(self, now: float) -> None:
        """How far each actor is, whether anybody looks or not: rates must not begin with the first who asks."""
        ring = self._actor_ring
        if ring and now < ring[-1][0] + ACTORS_EVERY:
            return
        clients = self.kept(self.run).clients()
        ring.append((now, dict(zip(ids_of(clients), clients["steps"].tolist(), strict=True))))
        while len(ring) > 2 and ring[1][0] <= now - WINDOW:
            ring.popleft()

    def _rates(self, learners: list[tuple[LearnerRow, float]]) -> Rates:
        rate = self._ring.rate
        skipped, pushed = self._ring.gained("skipped", WINDOW)[0], self._ring.gained("pushed", WINDOW)[0]
        drawn, inserted = (rate(name, LONG_WINDOW) for name in ("samples", "steps"))
        shares = [row.waiting_share for row, _ in learners if row.waiting_share is not None]
        return Rates(
            episodes=rate("episodes"),
            steps=rate("steps"),
            caches=rate("caches"),
            samples=rate("samples"),
            batches=rate("batches"),
            generated_bytes=rate("generated"),
            received_bytes=rate("received"),
            log_lines=rate("log_lines"),
            refused=rate("refused"),
            skipped_share=skipped / (skipped + pushed) if skipped > 0 else 0.0,
            waiting_share=max(shares, default=None),
            samples_per_insert=drawn / inserted if inserted > 0 else None,
        )

    def _learners(self, now: float) -> list[tuple[LearnerRow, float]]:
        """Each learner once, with when it was heard: those in servers' processes, and those far away."""
        found: dict[str, tuple[LearnerRow, float]] = {}
        for node in self.servers:
            stats = node.stats
            if node.is_up and stats.get("batches"):
                name, own = _embedded(node), {key: stats[key] for key in ("batches", "samples", "waited")}
                found[name] = self._learner(name, node.name, now, own, {}), now
            for each in stats.get("learners") or ():
                known = found.get(each["learner"])
                if known is None or each["last_seen"] > known[1]:
                    row = self._learner(
                        each["learner"], each["host"], each["last_seen"], each["figures"], each["scalars"]
                    )
                    found[each["learner"]] = row, each["last_seen"]
        return list(found.values())

    def _learner(
        self, name: str, where: str, seen: float, figures: Mapping[str, float], scalars: dict[str, float]
    ) -> LearnerRow:
        gained, seconds = self._ring.gained(f"waited {name}", WINDOW)
        return LearnerRow(
            learner=name,
            where=where,
            last_seen=seen,
            batches=figures.get("batches", 0.0),
            samples=figures.get("samples", 0.0),
            waited=float(figures.get("waited", 0.0)),
            waiting_share=min(1.0, max(0.0, gained / seconds)) if seconds > 0.0 else None,
            scalars=scalars,
        )

    def _actors(self, now: float) -> Actors:
        rows = self.kept(self.run).clients()
        gone = int((rows["flags"] & 1).sum())
        heard = rows["last_seen"] >= now - self._settings.silent_after
        counted = int((heard & (rows["flags"] & 1 == 0)).sum())
        idle = sum(node.stats.get("guests", 0) for node in self.servers if node.state != "down")
        active, expected = counted + idle, self._settings.expected_actors
        return Actors(active, len(rows) - gone - counted, gone, expected, max(0, expected - active), idle)

    def _tables(self, up: list[Node]) -> list[TableRow]:
        names = dict.fromkeys(name for node in up for name in node.stats.get("tables") or {})
        return [
            self._table(name, {node.name: (node.stats.get("tables") or {}).get(name) for node in up}) for name in names
        ]

    def _table(self, name: str, told: Mapping[str, dict[str, Any] | None]) -> TableRow:
        rows = [row for row in told.values() if row is not None]
        sums = {
            key: sum(row.get(key, 0) for row in rows)  # a node of another version may know less
            for key in (
                "clients", "held_caches", "held_bytes", "byte_limit", "unused_samples", "samples", "batches",
                "waited", "overwritten_caches", "episodes", "steps", "capacity",
            )
        }  # fmt: skip
        number = sum(row.get("held_caches" if row["storage"] == "caches" else "held_samples", 0) for row in rows)
        limits = ((sums["held_bytes"], sums["byte_limit"]), (number, sums["capacity"]))
        return TableRow(
            name=name,
            storage=rows[0]["storage"],
            samples_per_insert_target=rows[0]["samples_per_insert"],
            draws_wait=next((row["rate"]["draws_wait"] for row in rows if row["rate"]["draws_wait"]), ""),
            inserts_wait=next((row["rate"]["inserts_wait"] for row in rows if row["rate"]["inserts_wait"]), ""),
            full=max((held / limit for held, limit in limits if limit), default=None),
            facts={server: row for server, row in told.items() if row is not None},
            **sums,
        )

    def _learning(self, up: list[Node]) -> Learning:
        recent = [node.stats["recent"] for node in up if (node.stats.get("recent") or {}).get("count")]
        count = sum(each["count"] for each in recent)
        scalars: dict[str, tuple[float, int]] = {}
        learner: dict[str, float] = {}
        for node in up:
            for name, spread in (node.stats.get("scalars") or {}).items():
                total, number = scalars.get(name, (0.0, 0))
                scalars[name] = total + spread["mean"] * spread["count"], number + spread["count"]
            learner |= node.stats.get("learner_scalars") or {}
        found = {name: total / number for name, (total, number) in scalars.items() if number}
        if not count:
            return Learning(client_scalars=found, learner_scalars=learner)
        return Learning(
            return_mean=sum(each["return_mean"] * each["count"] for each in recent) / count,
            return_min=min(each["return_min"] for each in recent),
            return_max=max(each["return_max"] for each in recent),
            length_mean=sum(each["length_mean"] * each["count"] for each in recent) / count,
            client_scalars=found,
            learner_scalars=learner,
        )

    def _freshness(self, up: list[Node]) -> Fresh:
        said = [table["freshness"] for node in up for table in (node.stats.get("tables") or {}).values()]
        said += [each["figures"] for node in up for each in node.stats.get("learners") or ()]
        names = Fresh.__dataclass_fields__

        def worst(name: str) -> float | None:
            values = [each[name] for each in said if each and each.get(name) is not None]
            return (min if name == "effective" else max)(values, default=None)

        return Fresh(**{name: worst(name) for name in names})

    def _latency(self) -> Latency:
        counts = [self._ring.gained(f"request {place}", WINDOW)[0] for place in range(len(BOUNDS) + 1)]
        return Latency(_quantile(counts, 0.5), _quantile(counts, 0.99))

    def _forecast(self, totals: Totals, tables: list[TableRow]) -> Forecast:
        rate = self._slow.rate
        servers = [node for node in self.servers if node.is_up]
        disks = [
            _until(node.stats["folder"]["free_bytes"], -rate(f"free {node.url}", SLOW_WINDOW))
            for node in servers
            if node.stats.get("folder")
        ]
        settings, goals = self._settings, []
        if settings.goal_steps:
            goals.append(_until(settings.goal_steps - totals.steps, rate("steps", SLOW_WINDOW)))
        if settings.goal_episodes:
            goals.append(_until(settings.goal_episodes - totals.episodes, rate("episodes", SLOW_WINDOW)))
        return Forecast(
            memory_full=self._memory_full(tables),
            disk_full=min((each for each in disks if each is not None), default=None),
            goal=min((each for each in goals if each is not None), default=None),
        )

    def _memory_full(self, tables: list[TableRow]) -> float | None:
        if any(table.full is not None and table.full >= FULL for table in tables):
            return 0.0
        by_bytes = [t for t in tables if t.byte_limit and t.full == t.held_bytes / t.byte_limit]
        if not by_bytes or not self._slow.is_record("held", LONG_WINDOW):
            return None
        left = sum(table.byte_limit - table.held_bytes for table in by_bytes)
        return _until(left, self._slow.rate("held", SLOW_WINDOW))

    def _signs(self, overview: Overview, up: list[Node]) -> Signs:
        folders = [node.stats["folder"] for node in up if node.stats.get("folder")]
        rates, actors = overview.rates, overview.actors
        drawn, seconds = self._ring.gained("samples", LONG_WINDOW)
        return Signs(
            nodes=len(overview.nodes),
            nodes_down=tuple(node.name or node.url for node in overview.nodes if node.state == "down"),
            unready=tuple(node.name or node.url for node in overview.nodes if node.state == "unready"),
            servers_up=len(up),
            finished=overview.finished,
            active=actors.active,
            silent=actors.silent,
            idle=actors.idle,
            expected=actors.expected,
            steps=overview.totals.steps,
            steps_per_second=rates.steps,
            samples_per_second=rates.samples,
            waiting_share=rates.waiting_share,
            skipped_share=rates.skipped_share,
            left_out=overview.freshness.left_out,
            is_idle=drawn == 0 and seconds > LONG_WINDOW / 2,
            disk_used=max((1.0 - f["free_bytes"] / f["disk_bytes"] for f in folders if f["disk_bytes"]), default=None),
            refused_per_second=rates.refused,
            draws_wait=tuple(f"{table.name}: {table.draws_wait}" for table in overview.tables if table.draws_wait),
            inserts_wait=tuple(
                f"{table.name}: {table.inserts_wait}" for table in overview.tables if table.inserts_wait
            ),
        )

    def _figures(self, overview: Overview) -> dict[str, Point]:
        """What the history keeps of this moment, by name: see docs/dashboard.md."""
        totals, rates, actors = overview.totals, overview.rates, overview.actors
        figures: dict[str, float | None] = {
            "steps": totals.steps,
            "episodes": totals.episodes,
            "caches": totals.accepted_caches,
            "actors_active": actors.active,
            "actors_silent": actors.silent,
            "learners": len(overview.learners),
            "skipped_caches": totals.skipped_caches,
            "rejected_caches": totals.rejected_caches,
            "lost_caches": totals.lost_caches,
            "generated_bytes": totals.generated_bytes,
            "received_bytes": totals.received_bytes,
            "request_p50": overview.latency.p50,
            "request_p99": overview.latency.p99,
            "nodes_up": sum(node.state != "down" for node in overview.nodes),
        }
        figures |= {f"{name}_per_second": getattr(rates, name) for name in _RATES}
        figures |= {name: getattr(rates, name) for name in ("skipped_share", "waiting_share", "samples_per_insert")}
        figures |= {f"sample_{name}": getattr(overview.freshness, name) for name in Fresh.__dataclass_fields__}
        figures |= {f"client.{name}": value for name, value in overview.learning.client_scalars.items()}
        figures |= {f"learner.{name}": value for name, value in overview.learning.learner_scalars.items()}
        for table in overview.tables:
            figures |= {f"table.{table.name}.{name}": getattr(table, name) for name in _OF_TABLE}
        for node in overview.nodes:
            figures[f"node.{node.name or node.url}.memory_bytes"] = node.memory_bytes
        points = {
            name: Point(float(value), float(value), float(value))
            for name, value in figures.items()
            if value is not None and math.isfinite(value)
        }
        fresh = [row for run, rows in self._fresh_episodes if run == self.run for row in rows]
        self._fresh_episodes.clear()
        self.episodes.extend(fresh)
        if fresh:
            points["return"] = Point.of([row.returned for row in fresh])
            points["length"] = Point.of([float(row.length) for row in fresh])
        return points

    # ----------------------------------------------------------------------------------------------------- actors

    def actors(self) -> list[ActorRow]:
        """Every actor of the run, as of the newest look."""
        kept = self.kept(self.run)
        key = kept.version, int(self._time)
        if self._actor_rows is None or self._actor_rows[0] != key:
            self._actor_rows = key, self._actor_list(kept)
        return self._actor_rows[1]

    def _actor_list(self, kept: Kept) -> list[ActorRow]:
        clients, now = kept.clients(), self._time
        # Columns as lists: a hundred times quicker to read one by one than the rows of an array.
        columns = {name: clients[name].tolist() for name in (*_OF_ACTOR, *_MADE_OF)}
        ids = ids_of(clients)
        then, before = self._actor_ring[0] if self._actor_ring else (now, {})
        homes, heard = self._newest_homes(kept), now - self._settings.silent_after
        rows = []
        for place, client in enumerate(ids):
            facts = self.facts_of(client.hex())
            label, flags, count, total, skipped = (columns[name][place] for name in _MADE_OF)
            gained = columns["steps"][place] - before.get(client, 0) if now > then else 0
            is_heard = columns["last_seen"][place] >= heard
            rows.append(
                ActorRow(
                    client=client.hex(),
                    label=f"{label:08x}",
                    host=str(facts.get("host", "")),
                    table=str(facts.get("table", "")),
                    home=homes.get(client, ""),
                    state="gone" if flags & 1 else "active" if is_heard else "silent",
                    steps_per_second=gained / max(now - then, 1e-9),
                    return_mean=total / count if count else None,
                    skipped_caches=skipped,
                    **{name: columns[name][place] for name in _OF_ACTOR},
                )
            )
        return rows

    def _newest_homes(self, kept: Kept) -> dict[bytes, str]:
        rows = kept.rows[np.argsort(kept.rows["last_seen"], kind="stable")]
        names = (self._homes.get(home, "") for home in rows["home"].tolist())
        return dict(zip(ids_of(rows), names, strict=True))

    def homes_of(self, client: bytes) -> list[dict[str, Any]]:
        """The accounts of one actor, one for each home."""
        rows = self.kept(self.run).rows
        mine = rows[(rows["client"] == np.frombuffer(client, "<u8")).all(axis=1)]
        names = [name for name in ACCOUNT.names or () if name != "client"]
        return [
            {name: row[name].item() for name in names}
            | {"home": self._homes.get(int(row["home"]), f"former life {int(row['home']):016x}")}
            for row in mine
        ]

    def facts_of(self, client: str) -> dict[str, Any]:
        """What its newest home says of an actor beside its account."""
        found = [rows[client] for rows in self._facts.values() if client in rows]
        return max(found, key=lambda row: float(row["last_seen"]), default={})


_RATES = (
    "episodes", "steps", "caches", "samples", "batches", "generated_bytes", "received_bytes", "log_lines", "refused",
)  # fmt: skip
_OF_ACTOR = (
    "first_seen", "last_seen", "episodes", "steps", "generated_bytes", "pushed_caches", "accepted_caches",
    "rejected_caches", "lost_caches", "received_bytes", "dropped_lines",
)  # fmt: skip
_MADE_OF = ("label", "flags", "returns_count", "returns_sum", "skipped")
_OF_TABLE = ("held_bytes", "held_caches", "unused_samples", "clients", "overwritten_caches")


def _embedded(node: Node) -> str:
    """What the learner in a server's process is called."""
    return f"server:{node.name}"


def _node_row(node: Node) -> NodeRow:
    process, security = node.status.get("process") or {}, node.status.get("security") or {}
    reasons = [node.error] if node.error else [str(reason) for reason in node.status.get("reasons", ())]
    return NodeRow(
        name=node.name,
        url=node.url,
        role=node.role,
        state=node.state,
        since=node.since,
        reasons=reasons,
        software=str(node.status.get("software", "")),
        uptime=node.stats.get("uptime"),
        memory_bytes=process.get("memory_bytes"),
        descriptors=process.get("descriptors"),
        most_descriptors=process.get("most_descriptors"),
        faults=int(node.stats.get("faults", 0)),
        took=node.took,
        keys=None if not security else bool(security.get("keys")),
        open=tuple(str(address) for address in security.get("open") or ()),
        refused=sum(int(count) for count in (security.get("refused") or {}).values()),
    )


def _quantile(counts: list[float], part: float) -> float | None:
    """Where this part of all lies, within its bucket as if spread evenly; the last bucket has no end."""
    total, so_far = sum(counts), 0.0
    if total <= 0.0:
        return None
    for place, count in enumerate(counts[:-1]):
        if so_far + count >= part * total:
            low = BOUNDS[place - 1] if place else 0.0
            return low + (BOUNDS[place] - low) * (part * total - so_far) / count
        so_far += count
    return BOUNDS[-1]


def _until(left: float, rate: float) -> float | None:
    """Seconds until this much is gone; None where that is more than a year, or never."""
    if left <= 0.0:
        return 0.0
    seconds = left / rate if rate > 0.0 else math.inf
    return seconds if seconds < 365 * 86_400 else None
