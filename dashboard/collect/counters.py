"""What the nodes of a cluster count, as one: added up over their restarts, with rates. Pure.

Rates come of what was there ten seconds ago.

The learners of a cluster: those in servers' processes, and those far away. Pure.

One node as the dashboard knows it: what it said last, and since when it is up. Pure.

What was there at some times, and how fast it grows. Pure.
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
"""Seconds over which rates are taken."""
LONG_WINDOW = 60.0


class RateWindow:
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


NOT_ASKED = "not asked yet"


@dataclass(slots=True)
class NodeAnswer:
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
class NodeState:
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
    _ring: RateWindow = field(default_factory=lambda: RateWindow(WINDOW))
    _life: object = None  # what tells a process from the one that was there before

    @property
    def is_up(self) -> bool:
        """Whether it answered last time."""
        return self.state != "down"

    @property
    def stats(self) -> dict[str, Any]:
        """Its figures, as it said them last."""
        found: dict[str, Any] = self.status.get("stats") or {}
        return found

    def apply(self, answer: NodeAnswer) -> None:
        """Take what it said, or that it said nothing."""
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
        for told in answer.accounts:
            self.runs = [str(name) for name in told["runs"]]

    def _count(self, now: float) -> None:
        """Remember what its process has used and answered so far; another process begins at nothing."""
        process = self.status.get("process") or {}
        life = process.get("host"), process.get("pid")
        if life != self._life:
            self._ring.clear()
        self._life = life
        counted = {"cpu": process.get("cpu_seconds"), "requests": _answered(self.stats)} | _inferred(self.stats)
        self._ring.add(now, {name: float(value) for name, value in counted.items() if value is not None})

    def rate(self, name: str) -> float | None:
        """What "cpu" (seconds) or "requests" gain each second, over the newest ten; None where that is not known."""
        _, seconds = self._ring.gained(name, WINDOW)
        return self._ring.rate(name) if seconds > 0.0 and self.is_up else None

    def gained(self, name: str) -> tuple[float, float]:
        """How much a counter of its process gained over the newest ten seconds, and in how many; zeros at first."""
        return self._ring.gained(name, WINDOW)

    def note_silence(self, seconds: float) -> None:
        """It was asked so long ago: of one that has ever answered, what it said last still holds."""
        if not self.status and not self.is_up:
            self.error = f"{self.url} has not answered for {seconds:.1f} s"


def _answered(stats: dict[str, Any]) -> int | None:
    """Requests that a node has answered so far: a server's by kind, a proxy's in one figure; None of others."""
    requests = stats.get("requests")
    if isinstance(requests, dict):
        return sum(sum(kind["counts"]) for kind in requests.values())
    return requests if isinstance(requests, int) else None


def _inferred(stats: Mapping[str, Any]) -> dict[str, float]:
    """What an inference node has counted so far, by name; nothing of another node."""
    if "computed_seconds" not in stats:
        return {}
    waits, durations = stats.get("waits") or {}, stats.get("durations") or {}  # older versions have none
    found: dict[str, float] = {
        "rows": stats.get("rows", 0),
        "batched_rows": stats.get("batched_rows", 0),
        "computed": stats["computed_seconds"],
        "refusals": sum((stats.get("refused") or {}).values()),
        "waited": sum(each["seconds"] for each in waits.values()),
    }
    found |= {f"batches {reason}": number for reason, number in (stats.get("batches") or {}).items()}
    for place in range(len(BOUNDS) + 1):
        found[f"answered {place}"] = sum(each["counts"][place] for each in durations.values())
    return found


def learners_of(
    servers: Iterable[NodeState], now: float, gained: Callable[[str, float], tuple[float, float]]
) -> list[LearnerRow]:
    """Each learner once, as the server says that heard of it last.

    Args:
        now: Seconds since 1970.
        gained: How much a counter gained within so many seconds, and in how many, as of `Counters`.
    """
    found: dict[str, LearnerRow] = {}
    for node in servers:
        stats = node.stats
        if node.is_up and stats.get("batches"):
            name, own = embedded(node), {key: stats[key] for key in ("batches", "samples", "waited")}
            found[name] = _row(name, node.name, now, own, {}, gained)
        for each in stats.get("learners") or ():
            name, seen = each["learner"], each["last_seen"]
            if name not in found or seen > found[name].last_seen:
                found[name] = _row(
                    name, each["host"], seen, each["figures"], each["scalars"], gained, each.get("name", "")
                )
    return list(found.values())


def embedded(node: NodeState) -> str:
    """What the learner in a server's process is called."""
    return f"server:{node.name}"


def waited(learner: str) -> str:
    """The counter of the seconds that a learner waited."""
    return f"waited {learner}"


def _row(
    name: str,
    where: str,
    seen: float,
    figures: Mapping[str, float],
    scalars: dict[str, float],
    gained: Callable[[str, float], tuple[float, float]],
    given: str = "",
) -> LearnerRow:
    more, seconds = gained(waited(name), WINDOW)
    lag = figures.get("lag_mean"), figures.get("lag_max")
    return LearnerRow(
        learner=name,
        where=where,
        last_seen=seen,
        batches=figures.get("batches", 0.0),
        samples=figures.get("samples", 0.0),
        waited=float(figures.get("waited", 0.0)),
        waiting_share=min(1.0, max(0.0, more / seconds)) if seconds > 0.0 else None,
        scalars=scalars,
        name=given,
        lag=(lag[0], lag[1]) if lag[0] is not None and lag[1] is not None else None,
    )


HARMLESS = ("missing", "disk")
"""Refusals that no sender can mend: a stretch of a model that a newer version has overtaken meanwhile, and what waits
for a disk, which is a finding of its own.
"""


SHARES = ("skipped_share", "waiting_share", "samples_per_insert")
"""Fields of `Rates` that are no counter's growth each second."""
CALLED = {"caches": "accepted_caches"}
"""Counters that `Rates` calls otherwise."""
FEW_CACHES = 3
"""Caches that may be on their way without a word."""


class CounterSums:
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


class Counters:
    """All that is counted: by the run's totals, by servers and by learners."""

    def __init__(self) -> None:
        self._sums = CounterSums()
        self._waits = CounterSums()  # of each learner
        self._ring = RateWindow(LONG_WINDOW)

    def count(self, node: NodeState) -> None:
        """Take what a server has counted in this life of it."""
        stats = node.stats
        life = stats.get("epoch")
        tables = stats.get("tables") or {}
        counted = {
            "samples": sum(table["samples"] for table in tables.values()),
            "refused": sum(count for code, count in (stats.get("refused") or {}).items() if code not in HARMLESS),
            "overwritten": stats.get("overwritten_caches", 0),
            "log_lines": stats.get("log_lines", 0),
        }
        if delay := stats.get("feedback_delay"):  # servers of former versions say none
            counted |= {"feedback": sum(delay["counts"]), "feedback seconds": delay["seconds"]}
        for kind in (stats.get("requests") or {}).values():
            for place, count in enumerate(kind["counts"]):
                counted[f"request {place}"] = counted.get(f"request {place}", 0) + count
        for name, value in counted.items():
            self._sums.saw(node.url, life, name, value)
        for name, table in tables.items():
            self._sums.saw(node.url, life, f"samples of {name}", table["samples"])
            self._sums.saw(node.url, life, f"too old in {name}", table.get("passed_over_samples", 0))
            # Clients tell a server that was restarted the same steps again.
            self._sums.saw(node.url, None, f"steps of {name}", table.get("steps", 0))

    def remember(self, now: float, totals: Totals, up: Iterable[NodeState], learners: list[LearnerRow]) -> None:
        """Keep what there is now. `up`: the servers that answer."""
        lives = {embedded(node): node.stats.get("epoch") for node in up}
        for row in learners:  # those far away count what they take themselves, and have another name in each life
            life = lives.get(row.learner)
            self._sums.saw(f"learner {row.learner}", life, "batches", row.batches)
            self._waits.saw("", life, row.learner, row.waited)
        values = self._sums.values | asdict(totals)
        values |= {waited(row.learner): self._waits.values[row.learner] for row in learners}
        self._ring.add(now, values)

    def clear(self) -> None:
        """Another run is counted: its rates begin anew."""
        self._ring.clear()

    def gained(self, name: str, window: float) -> tuple[float, float]:
        """As of `RateWindow`."""
        return self._ring.gained(name, window)

    @property
    def is_idle(self) -> bool:
        """Whether nobody has drawn for a minute."""
        drawn, seconds = self._ring.gained("samples", LONG_WINDOW)
        return drawn == 0 and seconds > LONG_WINDOW / 2

    @property
    def is_still(self) -> bool:
        """Whether no step was recorded for a minute."""
        recorded, seconds = self._ring.gained("steps", LONG_WINDOW)
        return recorded == 0 and seconds > LONG_WINDOW / 2

    @property
    def nothing_arrives(self) -> bool:
        """Whether actors drew caches for a minute, and servers got none of them."""
        gained = self._ring.gained
        drawn = sum(gained(name, LONG_WINDOW)[0] for name in ("pushed_caches", "skipped_caches"))
        came = sum(gained(name, LONG_WINDOW)[0] for name in ("accepted_caches", "rejected_caches"))
        return drawn >= FEW_CACHES and came == 0 and gained("accepted_caches", LONG_WINDOW)[1] > LONG_WINDOW / 2

    @property
    def rejected_share(self) -> float:
        """The share of rejected caches among those that arrived in the newest minute."""
        gained = self._ring.gained
        accepted, rejected = (gained(name, LONG_WINDOW)[0] for name in ("accepted_caches", "rejected_caches"))
        return rejected / (accepted + rejected) if rejected > 0 else 0.0

    def feedback(self, entries: int) -> tuple[float, float] | None:
        """Seconds from the arrival of TD errors until their actors acknowledged them, as a mean of the newest minute;
        and in how many seconds actors record as much as their memories hold, `entries`. None if that is not known.
        """
        waited, acknowledged, steps = (
            self._ring.gained(name, LONG_WINDOW)[0] for name in ("feedback seconds", "feedback", "steps")
        )
        seconds = self._ring.gained("steps", LONG_WINDOW)[1]
        if not (entries and acknowledged > 0 and steps > 0):
            return None
        return waited / acknowledged, entries * seconds / steps

    @property
    def counted(self) -> Counted:
        """What all servers counted in all of their lives since this dashboard met them."""
        return Counted(**{name: int(self._sums.values.get(name, 0)) for name in figures_of(Counted)})

    def ratio(self, table: str) -> float | None:
        """Samples drawn from a table for each step recorded, over the newest minute; None if that is not known."""
        ratio, is_early = self._ratio(table)
        return None if is_early else ratio

    def early_ratio(self, table: str) -> float | None:
        """The same of a table that was not watched for long enough to judge."""
        ratio, is_early = self._ratio(table)
        return ratio if is_early else None

    def _ratio(self, table: str) -> tuple[float | None, bool]:
        drawn, seconds = self._ring.gained(f"samples of {table}", LONG_WINDOW)
        # A client that moves tells its new home all its steps: no table gets more than the run.
        steps = min(self._ring.gained(name, LONG_WINDOW)[0] for name in (f"steps of {table}", "steps"))
        return drawn / steps if steps > 0 else None, seconds <= LONG_WINDOW / 2

    def stale_share(self, table: str) -> float | None:
        """Of a table of rollouts: entries that were passed over as a share of those that left it in the newest minute;
        None if none left.
        """
        stale, taken = (self._ring.gained(f"{what} {table}", LONG_WINDOW)[0] for what in ("too old in", "samples of"))
        return stale / (stale + taken) if stale + taken > 0 else None

    def rates(self, learners: Iterable[LearnerRow]) -> Rates:
        """How much more there is each second."""
        rate, gained = self._ring.rate, self._ring.gained
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
        """How long requests took, over the newest ten seconds."""
        counts = [self._ring.gained(f"request {place}", WINDOW)[0] for place in range(len(BOUNDS) + 1)]
        return Latency(quantile(counts, 0.5), quantile(counts, 0.99))


def quantile(counts: list[float], part: float) -> float | None:
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
