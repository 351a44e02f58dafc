"""What Prometheus reads of a node: the metrics of its role, those of every node, and those of the process."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector, exposition
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from memoire.net.context import library_version
from memoire.net.curve_server import REASONS as PEERS
from memoire.version import VERSION

from .metrics import CATALOGUE, NODE, PROGRAMS

REASONS = ("http_guessing", "http_name", "http_token", *PEERS)
"""Why a request is refused (too many wrong tokens, a name that is not this machine's, a wrong token), or a peer."""

HUNG_UP = "memoire_hung_up_connections"


class ScrapedNode(NamedTuple):
    """A node at the moment of a scrape: stats are None before it is there."""

    role: str
    stats: Any
    stuck: list[str]
    reasons: list[str]
    open: Sequence[str]
    refused: Mapping[str, int]
    hung_up: int
    program: Any = None
    """How the program around it stands; its `role` is one of `PROGRAMS`."""


class NodeCollector(Collector):
    """The metrics of one node, as its role has them."""

    def __init__(self, look: Callable[[], ScrapedNode]) -> None:
        self._look = look

    def collect(self) -> Iterator[Metric]:
        """All families, with the values of this moment."""
        role, stats, stuck, reasons, found_open, refused, hung_up, program = self._look()
        yield build_info(role, str(getattr(stats, "name", "")))
        yield GaugeMetricFamily("memoire_ready", NODE["memoire_ready"], value=float(not reasons))
        yield GaugeMetricFamily("memoire_alive", NODE["memoire_alive"], value=float(not stuck))
        yield open_endpoints(len(found_open))
        yield refused_peers(refused)
        yield CounterMetricFamily(HUNG_UP, NODE[f"{HUNG_UP}_total"], value=float(hung_up))
        for entry in CATALOGUE.get(role, ()) if stats is not None else ():
            yield entry.family(stats)
        for entry in PROGRAMS.get(getattr(program, "role", ""), ()):
            yield entry.family(program)

    def describe(self) -> Iterable[Metric]:
        """Nothing: what there is depends on the role, and is known at a scrape."""
        return ()


def open_endpoints(number: int) -> Metric:
    """How many addresses are open."""
    return GaugeMetricFamily("memoire_open_endpoints", NODE["memoire_open_endpoints"], value=float(number))


def refused_peers(counts: Mapping[str, int]) -> Metric:
    """Who was refused, by reason."""
    name = "memoire_refused_peers"
    family: Any = CounterMetricFamily(name, NODE[f"{name}_total"], labels=["reason"])
    for reason in sorted({*REASONS, *counts}):
        family.add_metric([reason], counts.get(reason, 0))
    return family  # type: ignore[no-any-return]


def build_info(role: str, name: str = "") -> Metric:
    """What this process is made of, and what people call it."""
    labels = {
        "version": VERSION,
        "python": platform.python_version(),
        "libzmq": library_version(),
        "role": role,
        "name": name,
    }
    info = GaugeMetricFamily("memoire_build_info", NODE["memoire_build_info"], labels=list(labels))
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
