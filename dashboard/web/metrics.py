"""What Prometheus reads of a dashboard: the whole cluster's figures, which no single server knows, and its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from memoire.dashboard.collect.answers import NodeRow, Overview
from memoire.dashboard.collect.opened import Source
from memoire.figures import by, catalogue, gauge
from memoire.nodes.metrics import BUILD_INFO, PageGuard, build_info, families, family

from .access import Logins
from .stream import ListenerHub


@dataclass(frozen=True, slots=True)
class WatchedNode:
    """A node as this dashboard asks it."""

    # fmt: off
    url: str
    name: str
    is_up: Annotated[bool, gauge("dashboard_node_up", "Up", "1 if the node answers, 0 if not.")]
    took: Annotated[float, gauge("dashboard_node_seconds", "Answer", "Seconds that its newest answer took.")]
    # fmt: on


@dataclass(frozen=True, slots=True)
class ScrapedDashboard(PageGuard):
    """A dashboard at the moment of a scrape."""

    # fmt: off
    listeners: Annotated[int, gauge("dashboard_listeners", "Listeners", "Programs that follow the stream.")]
    history_failed: Annotated[bool, gauge("dashboard_history_failed", "History failed", "1 while the history cannot be "
        "written, 0 otherwise.")]
    time: Annotated[float | None, gauge("dashboard_overview_timestamp_seconds", "Newest overview", "When the newest "
        "overview was made, in seconds since 1970.")]
    nodes: Annotated[Sequence[WatchedNode], by("url name", "url name")]
    # fmt: on


def names() -> set[str]:
    """What a scrape shows, without what every Python process has."""
    figures = (catalogue(ScrapedDashboard), catalogue(Overview, "cluster"))
    return {BUILD_INFO.full_name, *(sources[0].figure.full_name for each in figures for sources in each.values())}


class DashboardCollector(Collector):
    """The metrics of one dashboard."""

    def __init__(self, aggregator: Source, hub: ListenerHub, gate: Logins) -> None:
        self._aggregator, self._hub, self._gate = aggregator, hub, gate

    def describe(self) -> Iterable[Metric]:
        """Nothing: a scrape shows what there is."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """All families, with the values of this moment."""
        overview, settings = self._aggregator.newest, self._aggregator.settings
        nodes: list[NodeRow] = [] if overview is None else overview.nodes
        yield build_info("dashboard")
        yield from families(
            ScrapedDashboard(
                open=[settings.listen] * settings.is_open,
                refused=self._gate.refused,
                listeners=self._hub.listeners,
                history_failed=bool(self._aggregator.trouble),
                time=None if overview is None else overview.time,
                nodes=[WatchedNode(each.url, each.name, each.state != "down", each.took) for each in nodes],
            )
        )
        for name, sources in catalogue(Overview, "cluster").items():
            yield family(name, sources, overview)
