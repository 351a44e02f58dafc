"""What the nodes of a cluster count, as one: added up over their restarts, with rates. Pure.

Rates come of what was there ten seconds ago.
"""

from __future__ import annotations

from collections.abc import Iterable

from memoire.accounting.account import Totals
from memoire.accounting.timings import BOUNDS

from .answers import Latency, LearnerRow, Rates
from .learners import embedded, waited
from .node_state import NodeState
from .rates import LONG_WINDOW, WINDOW, RateWindow

HARMLESS = ("missing", "disk")
"""Refusals that no sender can mend: a stretch of a model that a newer version has overtaken meanwhile, and what waits
for a disk, which is a finding of its own.
"""


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
        values = dict(self._sums.values)
        values |= {
            "steps": totals.steps,
            "episodes": totals.episodes,
            "caches": totals.accepted_caches,
            "generated": totals.generated_bytes,
            "received": totals.received_bytes,
            "skipped": totals.skipped_caches,
            "pushed": totals.pushed_caches,
            "rejected": totals.rejected_caches,
        }
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
        drawn = sum(self._ring.gained(name, LONG_WINDOW)[0] for name in ("pushed", "skipped"))
        came = sum(self._ring.gained(name, LONG_WINDOW)[0] for name in ("caches", "rejected"))
        return drawn >= FEW_CACHES and came == 0 and self._ring.gained("caches", LONG_WINDOW)[1] > LONG_WINDOW / 2

    @property
    def rejected_share(self) -> float:
        """The share of rejected caches among those that arrived in the newest minute."""
        accepted, rejected = (self._ring.gained(name, LONG_WINDOW)[0] for name in ("caches", "rejected"))
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
    def totals(self) -> dict[str, float]:
        """What all servers counted in all of their lives since this dashboard met them: samples, overwritten, ..."""
        return self._sums.values

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
        rate = self._ring.rate
        skipped, pushed = self._ring.gained("skipped", WINDOW)[0], self._ring.gained("pushed", WINDOW)[0]
        drawn, inserted = (rate(name, LONG_WINDOW) for name in ("samples", "steps"))
        shares = [row.waiting_share for row in learners if row.waiting_share is not None]
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
