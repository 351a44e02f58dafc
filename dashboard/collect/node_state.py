"""One node as the dashboard knows it: what it said last, and since when it is up. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from memoire.accounting.timings import BOUNDS

from .rates import WINDOW, RateWindow

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
