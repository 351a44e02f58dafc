"""Prometheus metrics of a node, collected at the moment of a scrape.

Nothing is counted in this module: each scrape reads `stats()`, so that metrics cost nothing between scrapes. A node has
few series, and their number does not grow with its clients: labels come from closed sets, or are bounded by
`MAX_LABELS`. Each metric is declared on the field that counts it (`memoire.figures`); docs/metrics.md lists them all.

A scrape has the figures of the node's stats, those that every node has, and those of the process.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector, exposition
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from memoire.figures import Figure, MetricSource, by, catalogue, counter, gauge
from memoire.net.curve_server import REASONS as PEERS
from memoire.net.sockets import library_version
from memoire.version import VERSION
from memoire.wire.frames import CODES, FOR_INFERENCE
from memoire.wire.types import TYPES

REASONS: Final = ("http_guessing", "http_name", "http_token", *PEERS)
"""Reasons of refused requests (too many wrong tokens, a foreign host name, a wrong token) and of refused peers."""
ZEROS: Final[Mapping[str, Iterable[str]]] = {"refused": CODES, "refused_peers": REASONS}
"""Label values that are shown before they first occur, because rate() needs a first value."""


def _is_answered(name: str) -> bool:
    """Return True if messages of this type are answered."""
    types = [kind for kind in TYPES.values() if kind.name == name and kind not in FOR_INFERENCE]
    return any(kind.sent_by and not kind.pushed for kind in types)


ONLY: Final[Mapping[str, Callable[[str], bool]]] = {"request_duration_seconds": _is_answered}
"""Filters of the label values that a metric shows, by metric."""


@dataclass(frozen=True, slots=True)
class PageGuard:
    """Access to a process' addresses: the open ones, and refused connections and requests."""

    # fmt: off
    open: Annotated[Sequence[str], gauge("open_endpoints", "Access", "Addresses of the node that other machines can "
        "reach and that require no key or token.", docs="security.md")]
    refused: Annotated[Mapping[str, int], counter("refused_peers", "Refused", "Connections and requests that were "
        "refused because of their sender, by reason.", label="reason", docs="security.md")]
    # fmt: on


@dataclass(frozen=True, slots=True)
class ScrapedNode(PageGuard):
    """Node at the moment of a scrape; stats are None before the process has a node.

    Pages that are open by design (/livez, /readyz, /metrics) do not count as open addresses.
    """

    # fmt: off
    hung_up: Annotated[int, counter("hung_up_connections", "Hung up", "Connections that ended before they sent a "
        "key: probes, ended processes.")]
    role: str
    stats: Any
    stuck: list[str]
    reasons: list[str]
    program: Any = None
    """Stats of a program around the node, such as a worker; None without one."""
    # fmt: on

    @property
    def is_ready(
        self,
    ) -> Annotated[
        bool,
        gauge("ready", "Ready", "1 while the node should get new clients, else 0; /readyz has the reasons."),
    ]:
        """True if the node should get new clients."""
        return not self.reasons

    @property
    def is_alive(
        self,
    ) -> Annotated[
        bool,
        gauge("alive", "Alive", "1 while all threads of the node run, 0 while one is stuck; /livez names it."),
    ]:
        """True if no thread of the node is stuck."""
        return not self.stuck


class NodeCollector(Collector):
    """The metrics of one node, as its role has them."""

    def __init__(self, read_node: Callable[[], ScrapedNode]) -> None:
        self._read_node = read_node

    def collect(self) -> Iterator[Metric]:
        """Yield all metric families with their present values."""
        node = self._read_node()
        yield build_info(node.role, str(getattr(node.stats, "name", "")))
        for figures in (node, node.stats, node.program, *kind_figures(node.stats)):
            yield from () if figures is None else families(figures)

    def describe(self) -> Iterable[Metric]:
        """Return no families: they depend on the node's role, which is known only at a scrape."""
        return ()


def kind_figures(stats: Any) -> Iterator[Any]:
    """Yield an object for each kind of table, with the figures that only tables of this kind count."""
    by_kind: dict[type, dict[str, Any]] = {}
    for name, table in getattr(stats, "tables", {}).items():
        if table.own is not None:
            by_kind.setdefault(type(table.own), {})[name] = table.own
    yield from (by_table(kind)(tables) for kind, tables in by_kind.items())


@functools.cache
def by_table(kind: type) -> type[Any]:
    """Return a class of the figures of one kind of table, with the tables' names as a label."""
    return dataclasses.make_dataclass("OwnFigures", [("tables", Annotated[dict[str, kind], by("table")])])  # type: ignore[valid-type]


def families(figures: Any, of: str = "") -> Iterator[Metric]:
    """Yield the metrics of an object with their present values. `of` as in `memoire.figures.catalogue`."""
    kind: Any = type(figures)
    for name, sources in catalogue(kind, of).items():
        yield family(name, sources, figures)


def family(name: str, sources: Sequence[MetricSource], figures: Any) -> Metric:
    """Return one metric with its present values in an object."""
    first, labels = sources[0].figure, sources[0].labels
    values: dict[tuple[str, ...], Any] = {(key,): 0.0 for key in ZEROS.get(name, ())} | {
        key: value for source in sources for key, value in source.values(figures)
    }
    kinds: Mapping[str, Any] = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}
    metric: Any = kinds.get(first.kind, HistogramMetricFamily)(f"memoire_{name}", first.help, labels=labels)
    for key, value in values.items():
        if first.kind != "histogram":
            metric.add_metric(key, value)
        elif not key or ONLY.get(name, bool)(key[-1]):
            metric.add_metric(key, _buckets(value), value.seconds)
    return metric  # type: ignore[no-any-return]


def _buckets(timing: Any) -> list[tuple[str, float]]:
    counts, so_far = [], 0
    for bound, count in zip((*timing.bounds, math.inf), timing.counts, strict=True):
        so_far += count
        counts.append(("+Inf" if math.isinf(bound) else repr(bound), float(so_far)))
    return counts


BUILD_INFO: Final = Figure("gauge", "build_info", "Build", "1, with versions, role and name of this process as labels.")


def build_info(role: str, name: str = "") -> Metric:
    """Return a metric with the versions, role and name of this process as labels."""
    labels = {
        "version": VERSION,
        "python": platform.python_version(),
        "libzmq": library_version(),
        "role": role,
        "name": name,
    }
    info = GaugeMetricFamily(BUILD_INFO.full_name, BUILD_INFO.help, labels=list(labels))
    info.add_metric(list(labels.values()), 1)
    return info


class Exposition:
    """Text of a scrape: one collector's metrics, and those of the process."""

    def __init__(self, collector: Collector) -> None:
        self._registry = CollectorRegistry()
        for collector_class in (ProcessCollector, PlatformCollector, GCCollector):
            collector_class(registry=self._registry)
        self._registry.register(collector)

    def text(self, accept: str) -> tuple[bytes, str]:
        """Return the body and its content type, as the Accept header asks."""
        encode, kind = exposition.choose_encoder(accept)
        return encode(self._registry), kind
