"""Prometheus' end of a node: what its figures are at the moment of a scrape.

Nothing is counted here: each scrape reads `stats()`, so that a metric costs nothing while nobody looks. A node's series
are few and do not grow with its clients: labels are from closed sets, or bounded by `MAX_LABELS`. Each metric is
declared on the field that counts it (`memoire.figures`); docs/metrics.md lists them all.

What Prometheus reads of a node: the figures of its stats, those of every node, and those of the process.
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

from memoire.figures import Figure, Source, by, catalogue, counter, gauge
from memoire.net.curve_server import REASONS as PEERS
from memoire.net.sockets import library_version
from memoire.version import VERSION
from memoire.wire.frames import CODES, FOR_INFERENCE
from memoire.wire.types import TYPES

REASONS: Final = ("http_guessing", "http_name", "http_token", *PEERS)
"""Why a request is refused (too many wrong tokens, a name that is not this machine's, a wrong token), or a peer."""
ZEROS: Final[Mapping[str, Iterable[str]]] = {"refused": CODES, "refused_peers": REASONS}
"""Values of labels that are shown before they first happen: rate() needs it."""


def _is_answered(name: str) -> bool:
    """Whether messages of this type are answered."""
    types = [kind for kind in TYPES.values() if kind.name == name and kind not in FOR_INFERENCE]
    return any(kind.sent_by and not kind.pushed for kind in types)


ONLY: Final[Mapping[str, Callable[[str], bool]]] = {"request_duration_seconds": _is_answered}
"""Which values of labels are shown at most."""


@dataclass(frozen=True, slots=True)
class PageGuard:
    """How open the addresses of a process are."""

    # fmt: off
    open: Annotated[Sequence[str], gauge("open_endpoints", "Access", "Addresses of the node that other machines reach "
        "and that ask nobody for a key or token.", docs="security.md")]
    refused: Annotated[Mapping[str, int], counter("refused_peers", "Refused", "Connections and requests that were "
        "refused for who they came from, by reason.", label="reason", docs="security.md")]
    # fmt: on


@dataclass(frozen=True, slots=True)
class ScrapedNode(PageGuard):
    """A node at the moment of a scrape: stats are None before it is there.

    Metrics for everybody by design (/livez, /readyz, /metrics) are not counted as open.
    """

    # fmt: off
    hung_up: Annotated[int, counter("hung_up_connections", "Hung up", "Connections that ended before they had shown a "
        "key: probes, ended processes.")]
    role: str
    stats: Any
    stuck: list[str]
    reasons: list[str]
    program: Any = None
    """How a program around it stands, such as a worker's."""
    # fmt: on

    @property
    def is_ready(
        self,
    ) -> Annotated[
        bool,
        gauge("ready", "Ready", "1 while the node should get new clients, 0 while /readyz says why not."),
    ]:
        """Whether it should get new clients."""
        return not self.reasons

    @property
    def is_alive(
        self,
    ) -> Annotated[
        bool,
        gauge("alive", "Alive", "1 while the node's threads take their turns, 0 while /livez says which one does not."),
    ]:
        """Whether its threads take their turns."""
        return not self.stuck


class NodeCollector(Collector):
    """The metrics of one node, as its role has them."""

    def __init__(self, look: Callable[[], ScrapedNode]) -> None:
        self._look = look

    def collect(self) -> Iterator[Metric]:
        """All families, with the values of this moment."""
        node = self._look()
        yield build_info(node.role, str(getattr(node.stats, "name", "")))
        for figures in (node, node.stats, node.program, *own_figures(node.stats)):
            yield from () if figures is None else families(figures)

    def describe(self) -> Iterable[Metric]:
        """Nothing: what there is depends on the role, and is known at a scrape."""
        return ()


def own_figures(stats: Any) -> Iterator[Any]:
    """What only some kinds of tables count: an object for each kind, which has those of its tables."""
    found: dict[type, dict[str, Any]] = {}
    for name, table in getattr(stats, "tables", {}).items():
        if table.own is not None:
            found.setdefault(type(table.own), {})[name] = table.own
    yield from (by_table(kind)(tables) for kind, tables in found.items())


@functools.cache
def by_table(kind: type) -> type[Any]:
    """A class of figures that tables have on their own, with the tables' names as a label."""
    return dataclasses.make_dataclass("OwnFigures", [("tables", Annotated[dict[str, kind], by("table")])])  # type: ignore[valid-type]


def families(figures: Any, of: str = "") -> Iterator[Metric]:
    """Name, help and present values of each metric that an object has. `of` is as of `memoire.figures.catalogue`."""
    kind: Any = type(figures)
    for name, sources in catalogue(kind, of).items():
        yield family(name, sources, figures)


def family(name: str, sources: Sequence[Source], figures: Any) -> Metric:
    """One metric, with what an object says of it now."""
    first, labels = sources[0].figure, sources[0].labels
    values: dict[tuple[str, ...], Any] = {(key,): 0.0 for key in ZEROS.get(name, ())} | {
        key: value for source in sources for key, value in source.values(figures)
    }
    kinds: Mapping[str, Any] = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}
    found: Any = kinds.get(first.kind, HistogramMetricFamily)(f"memoire_{name}", first.help, labels=labels)
    for key, value in values.items():
        if first.kind != "histogram":
            found.add_metric(key, value)
        elif not key or ONLY.get(name, bool)(key[-1]):
            found.add_metric(key, _buckets(value), value.seconds)
    return found  # type: ignore[no-any-return]


def _buckets(timing: Any) -> list[tuple[str, float]]:
    counts, so_far = [], 0
    for bound, count in zip((*timing.bounds, math.inf), timing.counts, strict=True):
        so_far += count
        counts.append(("+Inf" if math.isinf(bound) else repr(bound), float(so_far)))
    return counts


BUILD_INFO: Final = Figure("gauge", "build_info", "Build", "1, with what this process is made of.")


def build_info(role: str, name: str = "") -> Metric:
    """What this process is made of, and what people call it."""
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
    """The text of a scrape: one collector's metrics, and those of the process."""

    def __init__(self, collector: Collector) -> None:
        self._registry = CollectorRegistry()
        for made in (ProcessCollector, PlatformCollector, GCCollector):
            made(registry=self._registry)
        self._registry.register(collector)

    def text(self, accept: str) -> tuple[bytes, str]:
        """The body, and its content type, as the Accept header asks for."""
        encode, kind = exposition.choose_encoder(accept)
        return encode(self._registry), kind
