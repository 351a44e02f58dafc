"""A run out of a file, asked as if its cluster were still there. Nothing changes any more, and no node is asked."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn, TypeAlias

import msgspec

from memoire.accounting.account import Totals
from memoire.dashboard.settings import Settings

from . import run_file
from .aggregator import Aggregator
from .answers import (
    ActorDetail,
    ActorRow,
    Actors,
    ClusterDistribution,
    EpisodeRow,
    EventRow,
    Forecast,
    Latency,
    Learning,
    Overview,
    Rates,
    RunInfo,
    SampleFreshness,
)
from .history import Curves, History
from .nodes import NodeError
from .verdict import Verdict

GONE = "this run was opened from a file: its nodes cannot be asked"


class OpenedRun:
    """What `Aggregator` is for a cluster, for an exported run.

    Raises:
        RunFileError: the file holds no run.
    """

    trouble = ""
    """Nothing is written."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.history = History(None)
        try:
            self._head = run_file.read(str(settings.open), self.history)
        except BaseException:
            self.history.close()
            raise
        self.newest: Overview = self._as_recorded()

    def _as_recorded(self) -> Overview:
        """The newest overview of the run, with one verdict in place of those of then."""
        body = self.history.document(self._head.run, "overview")
        kept = msgspec.json.decode(body, type=Overview) if body else _nothing(self._head.run, self._head.seen)
        text = f"This is run {self._head.run} out of a file, as it stood when it was exported. Nothing changes here."
        verdict = Verdict("good", "recorded", text)
        return dataclasses.replace(kept, verdicts=[verdict], open=[], recorded=self._head.exported)

    def start(self) -> None:
        """There is nothing to ask."""

    def close(self) -> None:
        """Let go of it."""
        self.history.close()

    def liveness(self) -> list[str]:
        """Nothing can hang."""
        return []

    def readiness(self) -> list[str]:
        """It is all there."""
        return []

    def counted(self) -> dict[str, float]:
        """What servers counted beside is not in the file."""
        return {}

    def actors(self) -> list[ActorRow]:
        """The actors that were exported."""
        return msgspec.json.decode(self.history.document(self._head.run, "actors") or b"[]", type=list[ActorRow])

    def actor(self, client: str) -> ActorDetail | None:
        """One of them; its accounts and episodes are not in the file."""
        row = next((row for row in self.actors() if row.client == client), None)
        return None if row is None else ActorDetail(row, [], {}, [])

    def episodes(self, client: str, most: int) -> list[EpisodeRow]:
        """Single episodes are not in the file."""
        return []

    def curves(self, run: str, names: list[str], since: float, until: float, points: int) -> Curves:
        """Its figures over time."""
        end = self._head.seen + 1.0
        until = min(until, end)
        begin = max(min(since or self._head.began, until), 0.0)
        then = max(self._head.exported, end)  # by then the finest points of a former run were gone
        return self.history.curves(run or self._head.run, names, begin, until, points, then)

    def events(self, run: str) -> list[EventRow]:
        """What happened to it, the oldest first."""
        return [msgspec.json.decode(body, type=EventRow) for body in self.history.events(run or self._head.run)]

    def runs(self) -> list[RunInfo]:
        """The one run."""
        head = self._head
        return [RunInfo(head.run, head.began, head.seen, True, head.facts)]

    def statuses(self) -> dict[str, dict[str, Any]]:
        """What nodes said is not in the file."""
        return {}

    def node_settings(self, run: str = "") -> dict[str, dict[str, Any]]:
        """Settings of each server, by its name."""
        found: dict[str, dict[str, Any]] = msgspec.json.decode(
            self.history.document(run or self._head.run, "settings") or b"{}"
        )
        return found

    def servers(self) -> dict[str, str]:
        """None can be asked."""
        return {}

    def ask_server(self, name: str, path: str) -> NoReturn:
        """Raises NodeError."""
        raise NodeError(GONE, 404)

    def ask_servers(self, paths: Mapping[str, str]) -> dict[str, Any]:
        """A NodeError for each."""
        return {name: NodeError(GONE, 404) for name in paths}

    def distribution(self, table: str, servers: Iterable[str]) -> ClusterDistribution:
        """Always raises NodeError: an exported run has no nodes to ask."""
        raise NodeError(GONE, 404)


Source: TypeAlias = Aggregator | OpenedRun
"""What pages are made of."""


def _nothing(run: str, seen: float) -> Overview:
    """The overview of a run of which none was kept."""
    return Overview(
        number=0, time=seen, run=run, runs=[run], finished=False, durable=False, totals=Totals(), missing=[],
        rates=Rates(), actors=Actors(), tables=[], learning=Learning(), freshness=SampleFreshness(), latency=Latency(),
        forecast=Forecast(), verdicts=[], nodes=[], learners=[],
    )  # fmt: skip
