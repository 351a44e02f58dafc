"""Cluster counters: sums over all nodes and their restarts, with rates and windows. Pure: no clock, no network.

`RateWindow` keeps timestamped values and computes their growth, by default over the newest ten seconds.

`NodeState` holds the last answer of one node and the time since which the node is up or down.

`learners_of` lists the learners of a cluster, in servers' processes and remote.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from memoire.accounting.account import Totals
from memoire.figures import BOUNDS, figures_of

from .answers import Counted, Latency, LearnerRow, Rates

WINDOW = 10.0
"""Default window of rates, in seconds."""
LONG_WINDOW = 60.0


class RateWindow:
    """Window of timestamped values, for rates: the newest `seconds`, at most one entry in `every` seconds."""

    def __init__(self, seconds: float, every: float = 0.0) -> None:
        self._seconds, self._every = seconds, every
        self._entries: deque[tuple[float, dict[str, float]]] = deque()

    def add(self, time: float, values: Mapping[str, float]) -> None:
        """Add the values at `time`, unless the newest entry is less than `every` seconds old."""
        if self._entries and time < self._entries[-1][0] + self._every:
            return
        self._entries.append((time, dict(values)))
        while len(self._entries) > 2 and self._entries[1][0] <= time - self._seconds:
            self._entries.popleft()

    def clear(self) -> None:
        """Discard all entries."""
        self._entries.clear()

    def growth(self, name: str, window: float) -> tuple[float, float]:
        """Return (growth of a value over `window` seconds, seconds that this covers). A value recorded for less time
        counts from its first entry; fewer than two entries give zeros.
        """
        known = [entry for entry in self._entries if name in entry[1]]
        if len(known) < 2 or name not in self._entries[-1][1]:
            return 0.0, 0.0
        now, newest = known[-1]
        then, oldest = next((entry for entry in reversed(known) if entry[0] <= now - window), known[0])
        return newest[name] - oldest[name], now - then

    def is_record(self, name: str, since: float) -> bool:
        """True if the newest value exceeds all values recorded `since` seconds before it or earlier."""
        known = [(time, values[name]) for time, values in self._entries if name in values]
        return bool(known) and all(value < known[-1][1] for time, value in known if time <= known[-1][0] - since)

    def rate(self, name: str, window: float = WINDOW) -> float:
        """Return the growth of a value per second over `window`; 0.0 if unknown."""
        gained, seconds = self.growth(name, window)
        return gained / seconds if seconds > 0.0 else 0.0


NOT_ASKED = "not asked yet"


@dataclass(slots=True)
class NodeAnswer:
    """Decoded answers of one node in one poll."""

    url: str
    time: float
    """Time of the answer by the dashboard's clock, in seconds since 1970."""
    took: float = 0.0
    error: str = ""
    """Reason why the node did not answer; "" if the node answered."""
    status: dict[str, Any] | None = None
    accounts: list[dict[str, Any]] = field(default_factory=list)
    episodes: list[dict[str, Any]] = field(default_factory=list)
    clients: list[dict[str, Any]] | None = None
    settings: dict[str, Any] | None = None


@dataclass(slots=True)
class NodeState:
    """Last known status, settings and state of one node."""

    url: str
    since: float
    """Time at which `state` began, in seconds since 1970."""
    state: str = "down"
    error: str = ""
    status: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    took: float = 0.0
    name: str = ""
    role: str = ""
    runs: list[str] = field(default_factory=list)
    _ring: RateWindow = field(default_factory=lambda: RateWindow(WINDOW))
    _life: object = None  # (host, pid) of the node's process

    @property
    def is_up(self) -> bool:
        """True if the node answered the last query."""
        return self.state != "down"

    @property
    def stats(self) -> dict[str, Any]:
        """Statistics in the node's last status; {} before the first."""
        stats: dict[str, Any] = self.status.get("stats") or {}
        return stats

    def apply(self, answer: NodeAnswer) -> None:
        """Store an answer of the node, or the error in place of an answer."""
        self.took = answer.took
        if answer.status is not None:
            self.status = answer.status
            self.role = str(answer.status.get("role", ""))
            self.name = str(self.stats.get("name") or self.stats.get("client") or self.stats.get("reader") or "")
        state = "down" if answer.error else "up" if self.status.get("ready") else "unready"
        if state != self.state:
            self.state, self.since = state, answer.time
        self.error = answer.error
        if answer.status is not None:
            self._count(answer.time)
        if answer.settings is not None:
            self.settings = answer.settings
        for page in answer.accounts:
            self.runs = [str(name) for name in page["runs"]]

    def _count(self, now: float) -> None:
        """Record the processor time and requests of the node's process; a new process discards the record."""
        process = self.status.get("process") or {}
        life = process.get("host"), process.get("pid")
        if life != self._life:
            self._ring.clear()
        self._life = life
        values = {"cpu": process.get("cpu_seconds"), "requests": _requests(self.stats)} | _inference_counts(self.stats)
        self._ring.add(now, {name: float(value) for name, value in values.items() if value is not None})

    def rate(self, name: str) -> float | None:
        """Return the growth per second of a counter such as "cpu" or "requests", over `WINDOW`; None if unknown."""
        _, seconds = self._ring.growth(name, WINDOW)
        return self._ring.rate(name) if seconds > 0.0 and self.is_up else None

    def growth(self, name: str) -> tuple[float, float]:
        """Return (growth, seconds) of a counter of the node's process over `WINDOW`; zeros if unknown."""
        return self._ring.growth(name, WINDOW)

    def note_silence(self, seconds: float) -> None:
        """Record how long the node has been silent; keep the last status of a node that has answered before."""
        if not self.status and not self.is_up:
            self.error = f"{self.url} has not answered for {seconds:.1f} s"


def _requests(stats: dict[str, Any]) -> int | None:
    """Return the requests that a server or proxy has answered so far; None for other roles."""
    requests = stats.get("requests")
    if isinstance(requests, dict):
        return sum(sum(kind["counts"]) for kind in requests.values())
    return requests if isinstance(requests, int) else None


def _inference_counts(stats: Mapping[str, Any]) -> dict[str, float]:
    """Return the counters of an inference node by name; {} for other roles."""
    if "computed_seconds" not in stats:
        return {}
    waits, durations = stats.get("waits") or {}, stats.get("durations") or {}  # older nodes send no waits
    counters: dict[str, float] = {
        "rows": stats["rows"],
        "batched_rows": stats["batched_rows"],
        "computed": stats["computed_seconds"],
        "refusals": sum((stats.get("refused") or {}).values()),
        "waited": sum(each["seconds"] for each in waits.values()),
    }
    counters |= {f"batches {reason}": number for reason, number in (stats.get("batches") or {}).items()}
    for place in range(len(BOUNDS) + 1):
        counters[f"answered {place}"] = sum(each["counts"][place] for each in durations.values())
    return counters


def learners_of(
    servers: Iterable[NodeState], now: float, gained: Callable[[str, float], tuple[float, float]]
) -> list[LearnerRow]:
    """Return each learner once, from the report of the server that received the learner's last message.

    Args:
        now: Seconds since 1970.
        gained: Returns (growth, seconds) of a counter over a window in seconds, like `Counters.gained`.
    """
    rows: dict[str, LearnerRow] = {}
    for node in servers:
        stats = node.stats
        if node.is_up and stats.get("batches"):
            name, figures = embedded(node), {key: stats[key] for key in ("batches", "samples", "waited")}
            rows[name] = _learner_row(name, node.name, now, figures, {}, gained)
        for each in stats.get("learners") or ():
            name, seen = each["learner"], each["last_seen"]
            if name not in rows or seen > rows[name].last_seen:
                rows[name] = _learner_row(
                    name, each["host"], seen, each["figures"], each["scalars"], gained, each.get("name", "")
                )
    return list(rows.values())


def embedded(node: NodeState) -> str:
    """Return the id of the learner in a server's process."""
    return f"server:{node.name}"


def wait_counter(learner: str) -> str:
    """Return the name of the counter of a learner's waiting time in seconds."""
    return f"waited {learner}"


def _learner_row(
    name: str,
    where: str,
    seen: float,
    figures: Mapping[str, float],
    scalars: dict[str, float],
    gained: Callable[[str, float], tuple[float, float]],
    display_name: str = "",
) -> LearnerRow:
    wait, seconds = gained(wait_counter(name), WINDOW)
    lag = figures.get("lag_mean"), figures.get("lag_max")
    return LearnerRow(
        learner=name,
        where=where,
        last_seen=seen,
        batches=figures.get("batches", 0.0),
        samples=figures.get("samples", 0.0),
        waited=float(figures.get("waited", 0.0)),
        waiting_share=min(1.0, max(0.0, wait / seconds)) if seconds > 0.0 else None,
        scalars=scalars,
        name=display_name,
        lag=(lag[0], lag[1]) if lag[0] is not None and lag[1] is not None else None,
    )


HARMLESS = ("missing", "disk")
"""Refusal codes that no sender can avoid: "missing" (a part of a model that a newer version replaced) and "disk"
(a write that waits for the disk, which has its own verdict).
"""


SHARES = ("skipped_share", "waiting_share", "samples_per_insert")
"""Fields of `Rates` that are not the growth per second of a counter."""
CALLED = {"caches": "accepted_caches"}
"""Counter names of the fields of `Rates` that have another name."""
FEW_CACHES = 3
"""Caches drawn in a minute below which a missing arrival is not reported."""


class CounterSums:
    """Sums of the growth of many nodes' counters. A counter of a restarted node counts from zero again."""

    def __init__(self) -> None:
        self._last: dict[tuple[str, str], tuple[object, float]] = {}
        self.values: dict[str, float] = {}

    def add_report(self, who: str, life: object, name: str, value: float) -> None:
        """Add the growth of a counter since the last report of `who`. The first report adds nothing; a new `life`
        counts from zero. With `life` None a smaller value is an outdated report and is ignored.
        """
        known = self._last.get((who, name))
        if known is not None and life is None and value < known[1]:
            return
        self._last[who, name] = life, value
        former = value if known is None else known[1] if known[0] == life and known[1] <= value else 0.0
        self.values[name] = self.values.get(name, 0.0) + value - former


class Counters:
    """Counters of the run's totals, of servers and of learners, with rates derived from them."""

    def __init__(self) -> None:
        self._sums = CounterSums()
        self._waits = CounterSums()  # waiting times of each learner
        self._ring = RateWindow(LONG_WINDOW)

    def count(self, node: NodeState) -> None:
        """Add the counters of a server, which restart at zero with each life (epoch) of the server."""
        stats = node.stats
        life = stats.get("epoch")
        tables = stats.get("tables") or {}
        counted = {
            "samples": sum(table["samples"] for table in tables.values()),
            "refused": sum(count for code, count in (stats.get("refused") or {}).items() if code not in HARMLESS),
            "overwritten": stats.get("overwritten_caches", 0),
            "log_lines": stats.get("log_lines", 0),
        }
        if delay := stats.get("feedback_delay"):  # older servers send no delay
            counted |= {"feedback": sum(delay["counts"]), "feedback seconds": delay["seconds"]}
        for kind in (stats.get("requests") or {}).values():
            for place, count in enumerate(kind["counts"]):
                counted[f"request {place}"] = counted.get(f"request {place}", 0) + count
        for name, value in counted.items():
            self._sums.add_report(node.url, life, name, value)
        for name, table in tables.items():
            self._sums.add_report(node.url, life, f"samples of {name}", table["samples"])
            self._sums.add_report(node.url, life, f"too old in {name}", table.get("passed_over_samples", 0))
            # Clients report their steps again to a server that was restarted.
            self._sums.add_report(node.url, None, f"steps of {name}", table.get("steps", 0))

    def remember(self, now: float, totals: Totals, up: Iterable[NodeState], learners: list[LearnerRow]) -> None:
        """Record the current sums, totals and learners' waits. `up`: the servers that answer."""
        lives = {embedded(node): node.stats.get("epoch") for node in up}
        for row in learners:  # remote learners have their own counts, and an id per life
            life = lives.get(row.learner)
            self._sums.add_report(f"learner {row.learner}", life, "batches", row.batches)
            self._waits.add_report("", life, row.learner, row.waited)
        values = self._sums.values | asdict(totals)
        values |= {wait_counter(row.learner): self._waits.values[row.learner] for row in learners}
        self._ring.add(now, values)

    def clear(self) -> None:
        """Discard the recorded values, because another run is counted."""
        self._ring.clear()

    def growth(self, name: str, window: float) -> tuple[float, float]:
        """Return (growth of a counter over `window` seconds, seconds that this covers), like `RateWindow.gained`."""
        return self._ring.growth(name, window)

    @property
    def is_idle(self) -> bool:
        """True if no samples were drawn for a minute."""
        drawn, seconds = self._ring.growth("samples", LONG_WINDOW)
        return drawn == 0 and seconds > LONG_WINDOW / 2

    @property
    def is_still(self) -> bool:
        """True if no step was recorded for a minute."""
        recorded, seconds = self._ring.growth("steps", LONG_WINDOW)
        return recorded == 0 and seconds > LONG_WINDOW / 2

    @property
    def nothing_arrives(self) -> bool:
        """True if actors drew caches in the newest minute and no cache reached a server."""
        gained = self._ring.growth
        drawn = sum(gained(name, LONG_WINDOW)[0] for name in ("pushed_caches", "skipped_caches"))
        came = sum(gained(name, LONG_WINDOW)[0] for name in ("accepted_caches", "rejected_caches"))
        return drawn >= FEW_CACHES and came == 0 and gained("accepted_caches", LONG_WINDOW)[1] > LONG_WINDOW / 2

    @property
    def rejected_share(self) -> float:
        """Share of rejected caches among the caches that arrived in the newest minute."""
        gained = self._ring.growth
        accepted, rejected = (gained(name, LONG_WINDOW)[0] for name in ("accepted_caches", "rejected_caches"))
        return rejected / (accepted + rejected) if rejected > 0 else 0.0

    def feedback(self, entries: int) -> tuple[float, float] | None:
        """Return (mean seconds from the arrival of TD errors to their acknowledgment by actors, seconds in which actors
        record `entries`, the size of their memories), over the newest minute; None if unknown.
        """
        waited, acknowledged, steps = (
            self._ring.growth(name, LONG_WINDOW)[0] for name in ("feedback seconds", "feedback", "steps")
        )
        seconds = self._ring.growth("steps", LONG_WINDOW)[1]
        if not (entries and acknowledged > 0 and steps > 0):
            return None
        return waited / acknowledged, entries * seconds / steps

    @property
    def counter_totals(self) -> Counted:
        """Counters of all servers since this dashboard first saw each server, added up over restarts."""
        return Counted(**{name: int(self._sums.values.get(name, 0)) for name in figures_of(Counted)})

    def ratio(self, table: str) -> float | None:
        """Return the samples drawn from a table per recorded step, over the newest minute; None if unknown."""
        ratio, is_early = self._ratio(table)
        return None if is_early else ratio

    def early_ratio(self, table: str) -> float | None:
        """Return the samples per step of a table that was not watched for long enough to judge; None otherwise."""
        ratio, is_early = self._ratio(table)
        return ratio if is_early else None

    def _ratio(self, table: str) -> tuple[float | None, bool]:
        drawn, seconds = self._ring.growth(f"samples of {table}", LONG_WINDOW)
        # A client that moves reports all its steps to its new home server, so the run's steps are the upper limit.
        steps = min(self._ring.growth(name, LONG_WINDOW)[0] for name in (f"steps of {table}", "steps"))
        return drawn / steps if steps > 0 else None, seconds <= LONG_WINDOW / 2

    def stale_share(self, table: str) -> float | None:
        """Return the share of a rollout table's entries that were skipped as too old, among all entries that left the
        table in the newest minute; None if no entry left.
        """
        stale, taken = (self._ring.growth(f"{kind} {table}", LONG_WINDOW)[0] for kind in ("too old in", "samples of"))
        return stale / (stale + taken) if stale + taken > 0 else None

    def rates(self, learners: Iterable[LearnerRow]) -> Rates:
        """Return the growth per second of all counters, with the shares and ratios of `SHARES`."""
        rate, gained = self._ring.rate, self._ring.growth
        skipped, pushed = (gained(name, WINDOW)[0] for name in ("skipped_caches", "pushed_caches"))
        drawn, inserted = (rate(name, LONG_WINDOW) for name in ("samples", "steps"))
        shares = [row.waiting_share for row in learners if row.waiting_share is not None]
        return Rates(
            **{each.name: rate(CALLED.get(each.name, each.name)) for each in fields(Rates) if each.name not in SHARES},
            skipped_share=skipped / (skipped + pushed) if skipped > 0 else 0.0,
            waiting_share=max(shares, default=None),
            samples_per_insert=drawn / inserted if inserted > 0 else None,
        )

    def latency(self) -> Latency:
        """Return quantiles of the request times over the newest ten seconds."""
        counts = [self._ring.growth(f"request {place}", WINDOW)[0] for place in range(len(BOUNDS) + 1)]
        return Latency(quantile(counts, 0.5), quantile(counts, 0.99))


def quantile(counts: list[float], part: float) -> float | None:
    """Return the quantile `part` of a histogram over `BOUNDS`, interpolated, at most the last bound; None if empty."""
    total, so_far = sum(counts), 0.0
    if total <= 0.0:
        return None
    for place, count in enumerate(counts[:-1]):
        if so_far + count >= part * total:
            low = BOUNDS[place - 1] if place else 0.0
            return low + (BOUNDS[place] - low) * (part * total - so_far) / count
        so_far += count
    return BOUNDS[-1]
