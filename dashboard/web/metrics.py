"""What Prometheus reads of a dashboard: the whole cluster's totals, which no single server knows, and itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from memoire.dashboard.collect.answers import Overview
from memoire.dashboard.collect.opened import Source
from memoire.dashboard.collect.verdict import CODES
from memoire.figures import catalogue
from memoire.nodes.metrics import BUILD_INFO, PageGuard, build_info, families
from memoire.tables import registry as kinds
from memoire.tables.base import HandsOutOnce

from .access import Logins
from .stream import ListenerHub

COUNTERS = {
    "episodes": ("episodes", "Episodes that clients closed in this run. Each client is counted once."),
    "steps": ("steps", "Entries that clients recorded in this run. Each client is counted once."),
    "caches": ("accepted_caches", "Caches of this run that servers accepted."),
    "pushed_caches": ("pushed_caches", "Caches that clients report as pushed."),
    "rejected_caches": ("rejected_caches", "Caches that were rejected on arrival."),
    "skipped_caches": ("skipped_caches", "Caches that clients did not push, because their credit was used up."),
    "generated_bytes": ("generated_bytes", "Bytes of all entries that the clients recorded."),
    "received_bytes": ("received_bytes", "Bytes of caches that arrived."),
    "dropped_log_lines": ("dropped_lines", "Log lines that clients dropped, because too many waited to be sent."),
}
"""Name without "memoire_cluster_": the field of `Totals`, and its meaning."""
COUNTED = {
    "samples": ("samples", "Samples that servers handed out since this dashboard first saw them, restarts included."),
    "overwritten_caches": (
        "overwritten",
        "Caches that were overwritten unused, since this dashboard first saw the servers.",
    ),
    "refused": ("refused", "Messages that servers refused, since this dashboard first saw them."),
}
"""Name without "memoire_cluster_": what all servers count, and its meaning."""
GAUGES = {
    "missing_caches": "Caches that later ones overtook, or whose client left. Falls if they arrive after all.",
    "run_finished": "1 when the run is finished, 0 before.",
    "expected_actors": "Actors that there should be (--expected-actors); 0 if that is not known.",
    "missing_actors": "Expected actors that are not active.",
    "learners": "Learners that servers heard lately.",
    "outdated_actors": "Active actors whose model was replaced more than a minute ago.",
    "samples_per_insert_ratio": "Samples drawn for each step recorded, over the newest minute.",
    "learner_waiting_ratio": "Share of its time that a learner waits for samples; of several learners the largest.",
    "skipped_ratio": "Share of the caches that clients could not push, over the newest ten seconds.",
    "episode_return_mean": "Mean return of the newest episodes of all servers.",
    "episode_return_min": "Least return of the newest episodes of all servers.",
    "episode_return_max": "Greatest return of the newest episodes of all servers.",
    "episode_length_mean_steps": "Mean length of the newest episodes of all servers, in entries.",
    "sample_age_median_seconds": "Median age of the samples of recent batches; of several learners the largest.",
    "sample_age_p90_seconds": "Age that nine in ten samples of recent batches stay below; of several the largest.",
    "sample_model_lag_mean": "Mean number of model versions between acting and learning; of several the largest.",
    "rollouts_lag_mean": "Model versions between acting and learning in rollouts; of several tables the largest mean.",
    "actor_model_lag_mean": "Model versions that active actors are behind the newest one, as a mean.",
    "actor_model_lag_max": "Model versions that the active actor farthest behind is behind the newest one.",
    "outdated_inference_nodes": "Inference nodes whose model was replaced more than a minute ago.",
    "sample_effective_ratio": "Effective size of recent batches as a share of their samples; of several the smallest.",
    "sample_left_out_ratio": "Share of all weight that recent draws could not draw from; of several the largest.",
    "memory_full_seconds": "Seconds until what is held reaches its limit, if it goes on like this.",
    "disk_full_seconds": "Seconds until the disk of a state folder is full, if it goes on like this.",
    "goal_seconds": "Seconds until the goal is reached, if it goes on like this.",
}
LABELLED = {
    "cluster_actors": ("state", "Actors of this run: active, silent, lost, or gone."),
    "cluster_nodes": ("role", "Nodes that answer the dashboard."),
    "cluster_expected_nodes": ("role", "Nodes that there should be (--expected-servers and others)."),
    "cluster_missing_nodes": ("role", "Expected nodes that do not answer."),
    "cluster_table_samples_per_insert_ratio": (
        "table",
        "Samples drawn from a table for each step recorded, over the newest minute.",
    ),
    "cluster_table_samples_per_insert_target": (
        "table",
        "Samples that should be drawn from a table for each step: samples_per_insert.",
    ),
    "cluster_table_full_ratio": ("table", "Share of its room that is taken: of bytes, or of caches or entries."),
    "cluster_rollouts_stale_ratio": (
        "table",
        "Entries of rollouts that were too old, as a share of those that left the table in the newest minute.",
    ),
    "cluster_model_version": ("topic", "Newest version of each topic."),
    "cluster_verdict": ("code", "1 for each finding that the overview shows now; 0 for all others."),
    "dashboard_node_up": ("url", "1 if the node answers, 0 if not. The label `name` is the name of the node."),
    "dashboard_node_seconds": (
        "url",
        "Seconds that the newest answer of the node took. The label `name` is the name of the node.",
    ),
}
NAMED = ("dashboard_node_up", "dashboard_node_seconds")
"""Those that have a second label, `name`."""
OWN = {
    "dashboard_listeners": "Browsers and programs that follow the stream.",
    "dashboard_history_failed": "1 while the history cannot be written, 0 otherwise.",
    "dashboard_overview_timestamp_seconds": "When the newest overview was made, in seconds since 1970.",
}


def names() -> set[str]:
    """What a scrape shows, without what every Python process has."""
    counters = {f"memoire_cluster_{name}_total" for name in (*COUNTERS, *COUNTED)}
    gauges = {f"memoire_cluster_{name}" for name in GAUGES} | {f"memoire_{name}" for name in (*LABELLED, *OWN)}
    shared = {sources[0].figure.full_name for sources in catalogue(PageGuard).values()}
    return {BUILD_INFO.full_name, *shared, *counters, *gauges}


def table() -> str:
    """The catalogue as docs/dashboard.md has it."""
    rows = [(f"cluster_{name}_total", "", text) for name, (_, text) in COUNTERS.items()]
    rows += [(f"cluster_{name}", "", text) for name, text in GAUGES.items()]
    rows += [(f"cluster_{name}_total", "", text) for name, (_, text) in COUNTED.items()]
    rows += [(name, f" by `{label}`", text) for name, (label, text) in LABELLED.items()]
    rows += [(name, "", text) for name, text in OWN.items()]
    for (source,) in catalogue(PageGuard).values():
        label = f" by `{source.figure.label}`" if source.figure.label else ""
        rows.append((source.figure.full_name.removeprefix("memoire_"), label, source.figure.help))
    return "\n".join(f"| `memoire_{name}`{label} | {text} |" for name, label, text in rows)


class DashboardCollector(Collector):
    """The metrics of one dashboard."""

    def __init__(self, aggregator: Source, hub: ListenerHub, gate: Logins) -> None:
        self._aggregator, self._hub, self._gate = aggregator, hub, gate

    def describe(self) -> Iterable[Metric]:
        """Nothing: a scrape shows what there is."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """All families, with the values of this moment."""
        overview = self._aggregator.newest
        yield build_info("dashboard")
        settings = self._aggregator.settings
        yield from families(PageGuard([settings.listen] * settings.is_open, self._gate.refused))
        for name, (field, text) in COUNTERS.items():
            value = None if overview is None else getattr(overview.totals, field)
            yield _filled(CounterMetricFamily(f"memoire_cluster_{name}", text), value)
        counted = self._aggregator.counted()
        for name, (key, text) in COUNTED.items():
            value = None if overview is None else counted.get(key, 0.0)
            yield _filled(CounterMetricFamily(f"memoire_cluster_{name}", text), value)
        values = {} if overview is None else _gauges(overview)
        for name, text in GAUGES.items():
            yield _filled(GaugeMetricFamily(f"memoire_cluster_{name}", text), values.get(name))
        labelled = {} if overview is None else _labelled(overview)
        for name, (label, text) in LABELLED.items():
            names_of_labels = [label, "name"] if name in NAMED else [label]
            family = GaugeMetricFamily(f"memoire_{name}", text, labels=names_of_labels)
            for number, *labels in labelled.get(name, ()):
                family.add_metric(labels, number)
            yield family
        own = (
            float(self._hub.listeners),
            float(bool(self._aggregator.trouble)),
            None if overview is None else overview.time,
        )
        for (name, text), value in zip(OWN.items(), own, strict=True):
            yield _filled(GaugeMetricFamily(f"memoire_{name}", text), value)


def _gauges(overview: Overview) -> dict[str, float | None]:
    """Values of `GAUGES`; None for those that nobody knows."""
    actors, rates, learning = overview.actors, overview.rates, overview.learning
    fresh, forecast = overview.freshness, overview.forecast
    rollouts = [each for each in overview.tables if kinds.offers(each.storage, HandsOutOnce)]
    lags = [each.lag_mean for each in rollouts if each.lag_mean is not None]
    return {
        "missing_caches": overview.totals.lost_caches,
        "run_finished": float(overview.finished),
        "expected_actors": actors.expected,
        "missing_actors": actors.missing,
        "learners": len(overview.learners),
        "outdated_actors": overview.outdated,
        "samples_per_insert_ratio": rates.samples_per_insert,
        "learner_waiting_ratio": rates.waiting_share,
        "skipped_ratio": rates.skipped_share,
        "episode_return_mean": learning.return_mean,
        "episode_return_min": learning.return_min,
        "episode_return_max": learning.return_max,
        "episode_length_mean_steps": learning.length_mean,
        "sample_age_median_seconds": fresh.age_median,
        "sample_age_p90_seconds": fresh.age_p90,
        "sample_model_lag_mean": fresh.lag_mean,
        "rollouts_lag_mean": max(lags, default=None),
        "actor_model_lag_mean": None if overview.actor_lag is None else overview.actor_lag.mean,
        "actor_model_lag_max": None if overview.actor_lag is None else overview.actor_lag.max,
        "outdated_inference_nodes": sum(each.is_outdated for each in overview.inference),
        "sample_effective_ratio": fresh.effective,
        "sample_left_out_ratio": fresh.left_out,
        "memory_full_seconds": forecast.memory_full,
        "disk_full_seconds": forecast.disk_full,
        "goal_seconds": forecast.goal,
    }


def _labelled(overview: Overview) -> dict[str, list[tuple[float, str] | tuple[float, str, str]]]:
    """Values of `LABELLED`, each with its labels behind it."""
    tables, nodes, actors = overview.tables, overview.nodes, overview.actors
    awaited = [each for each in overview.roles if each.expected]
    ratios = [(each.samples_per_insert, each.name) for each in tables]
    found = {each.code for each in overview.verdicts}
    return {
        "cluster_actors": [(getattr(actors, state), state) for state in ("active", "silent", "lost", "gone")],
        "cluster_nodes": [(each.up, each.role) for each in overview.roles],
        "cluster_expected_nodes": [(each.expected, each.role) for each in awaited],
        "cluster_missing_nodes": [(each.missing, each.role) for each in awaited],
        "cluster_table_samples_per_insert_ratio": [(ratio, name) for ratio, name in ratios if ratio is not None],
        "cluster_table_samples_per_insert_target": [(each.samples_per_insert_target, each.name) for each in tables],
        "cluster_table_full_ratio": [(each.full, each.name) for each in tables if each.full is not None],
        "cluster_rollouts_stale_ratio": [
            (each.stale_share, each.name) for each in tables if each.stale_share is not None
        ],
        "cluster_model_version": [(version, topic) for topic, version in overview.models.items()],
        "cluster_verdict": [(float(code in found), code) for code in CODES],
        "dashboard_node_up": [(float(each.state != "down"), each.url, each.name) for each in nodes],
        "dashboard_node_seconds": [(each.took, each.url, each.name) for each in nodes],
    }


def _filled(family: CounterMetricFamily | GaugeMetricFamily, value: float | None) -> Metric:
    if value is not None:
        family.add_metric([], value)
    return family
