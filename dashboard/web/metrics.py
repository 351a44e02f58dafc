"""What Prometheus reads of a dashboard: the whole cluster's totals, which no single server knows, and itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from memoire.dashboard.collect.aggregator import Aggregator
from memoire.nodes.exposition import build_info, open_endpoints, refused_peers
from memoire.nodes.metrics import NODE

from .event_stream import Hub
from .logins import Logins

COUNTERS = {
    "episodes": ("episodes", "Episodes of this run that all clients closed, each client once."),
    "steps": ("steps", "Entries of this run that all clients recorded, each client once."),
    "caches": ("accepted_caches", "Caches of this run that were accepted by any server."),
    "pushed_caches": ("pushed_caches", "Caches that clients say they pushed."),
    "rejected_caches": ("rejected_caches", "Caches that were rejected on arrival."),
    "skipped_caches": ("skipped_caches", "Caches that clients did not push for want of credit."),
    "generated_bytes": ("generated_bytes", "Bytes of all entries that the clients recorded."),
    "received_bytes": ("received_bytes", "Bytes of caches that arrived."),
    "dropped_log_lines": ("dropped_lines", "Log lines that clients did not take: too many waited."),
}
"""Name without "memoire_cluster_": the field of `Totals`, and its meaning."""
GAUGES = {
    "lost_caches": "Caches that later ones overtook; fewer when they arrive after all.",
    "run_finished": "1 once the run was declared over, 0 before.",
    "expected_actors": "Actors that there should be, as the dashboard was told; 0: nobody knows.",
    "missing_actors": "Of these, those that are not active.",
    "learners": "Learners that were heard from lately.",
    "samples_per_insert_ratio": "Samples drawn for each step recorded, over the newest minute.",
    "learner_waiting_ratio": "Share of its time that the learner that waits most waits for samples.",
    "skipped_ratio": "Share of the caches that clients could not push, over the newest ten seconds.",
    "episode_return_mean": "Mean return of the newest episodes of all servers.",
    "memory_full_seconds": "Seconds until what is held reaches its limit, if it goes on like this.",
    "disk_full_seconds": "Seconds until the disk of a state folder is full, if it goes on like this.",
    "goal_seconds": "Seconds until the goal is reached, if it goes on like this.",
}
LABELLED = {
    "cluster_actors": ("state", "Actors of this run: active, silent, or gone."),
    "dashboard_node_up": ("url", "1 where the node answers, 0 where not."),
    "dashboard_node_seconds": ("url", "Seconds that the newest answer of the node took."),
}
OWN = {
    "dashboard_listeners": "Browsers and programs that follow the stream.",
    "dashboard_history_failed": "1 while the history cannot be written, 0 otherwise.",
    "dashboard_overview_timestamp_seconds": "When the newest overview was made, in seconds since 1970.",
}


def names() -> set[str]:
    """What a scrape shows, without what every Python process has."""
    counters = {f"memoire_cluster_{name}_total" for name in COUNTERS}
    gauges = {f"memoire_cluster_{name}" for name in GAUGES} | {f"memoire_{name}" for name in (*LABELLED, *OWN)}
    return {"memoire_build_info", "memoire_open_endpoints", "memoire_refused_peers_total", *counters, *gauges}


def table() -> str:
    """The catalogue as docs/dashboard.md has it."""
    rows = [(f"cluster_{name}_total", "", text) for name, (_, text) in COUNTERS.items()]
    rows += [(f"cluster_{name}", "", text) for name, text in GAUGES.items()]
    rows += [(name, f" by `{label}`", text) for name, (label, text) in LABELLED.items()]
    rows += [(name, "", text) for name, text in OWN.items()]
    shared = [("open_endpoints", ""), ("refused_peers_total", " by `reason`")]
    rows += [(name, label, NODE[f"memoire_{name}"]) for name, label in shared]
    return "\n".join(f"| `memoire_{name}`{label} | {text} |" for name, label, text in rows)


class DashboardCollector(Collector):
    """The metrics of one dashboard."""

    def __init__(self, aggregator: Aggregator, hub: Hub, gate: Logins) -> None:
        self._aggregator, self._hub, self._gate = aggregator, hub, gate

    def describe(self) -> Iterable[Metric]:
        """Nothing: a scrape shows what there is."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """All families, with the values of this moment."""
        overview = self._aggregator.newest
        yield build_info("dashboard")
        yield open_endpoints(int(self._aggregator.settings.is_open))
        yield refused_peers(self._gate.refused)
        for name, (field, text) in COUNTERS.items():
            value = None if overview is None else getattr(overview.totals, field)
            yield _filled(CounterMetricFamily(f"memoire_cluster_{name}", text), value)
        values: dict[str, float | None] = {}
        if overview is not None:
            values = {
                "lost_caches": overview.totals.lost_caches,
                "run_finished": float(overview.finished),
                "expected_actors": overview.actors.expected,
                "missing_actors": overview.actors.missing,
                "learners": len(overview.learners),
                "samples_per_insert_ratio": overview.rates.samples_per_insert,
                "learner_waiting_ratio": overview.rates.waiting_share,
                "skipped_ratio": overview.rates.skipped_share,
                "episode_return_mean": overview.learning.return_mean,
                "memory_full_seconds": overview.forecast.memory_full,
                "disk_full_seconds": overview.forecast.disk_full,
                "goal_seconds": overview.forecast.goal,
            }
        for name, text in GAUGES.items():
            yield _filled(GaugeMetricFamily(f"memoire_cluster_{name}", text), values.get(name))
        states, nodes = {}, []
        if overview is not None:
            states = {state: getattr(overview.actors, state) for state in ("active", "silent", "gone")}
            nodes = overview.nodes
        up = {node.url: float(node.state != "down") for node in nodes}
        took = {node.url: node.took for node in nodes}
        for (name, (label, text)), found in zip(LABELLED.items(), (states, up, took), strict=True):
            family = GaugeMetricFamily(f"memoire_{name}", text, labels=[label])
            for key, number in found.items():
                family.add_metric([key], number)
            yield family
        own = (
            float(self._hub.listeners),
            float(bool(self._aggregator.trouble)),
            None if overview is None else overview.time,
        )
        for (name, text), value in zip(OWN.items(), own, strict=True):
            yield _filled(GaugeMetricFamily(f"memoire_{name}", text), value)


def _filled(family: CounterMetricFamily | GaugeMetricFamily, value: float | None) -> Metric:
    if value is not None:
        family.add_metric([], value)
    return family
