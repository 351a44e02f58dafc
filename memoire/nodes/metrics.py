"""The catalogue: every metric of every role, read from the stats of its node at the moment of a scrape.

Nothing is counted here: each scrape reads `stats()`, so that a metric costs nothing while nobody looks. A node's series
are few and do not grow with its clients: labels are from closed sets, or bounded by `MAX_LABELS`. Docs: metrics.md.

What Prometheus reads of a node: the metrics of its role, those of every node, and those of the process.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector, exposition
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from memoire.accounting.figures import Timing
from memoire.net.context import library_version
from memoire.net.curve_server import REASONS as PEERS
from memoire.version import VERSION
from memoire.wire.frames import CODES, FOR_INFERENCE
from memoire.wire.types import TYPES

MAX_LABELS = 64
"""Series of one metric whose label is named by users (topics, scalars, backs): the first ones by name."""

Kind: TypeAlias = Literal["counter", "gauge", "histogram"]
Value: TypeAlias = "float | Mapping[str, Any] | None"
"""A number, None where there is none yet, or one for each value of the label."""


@dataclass(frozen=True)
class MetricEntry:
    """One metric of the catalogue."""

    name: str
    """Without "memoire_", and without the "_total" of a counter."""
    kind: Kind
    help: str
    read: Callable[[Any], Value]
    """From the stats of its node."""
    label: str = ""

    @property
    def full_name(self) -> str:
        """As a scrape shows it."""
        return f"memoire_{self.name}" + "_total" * (self.kind == "counter")

    def family(self, stats: Any) -> Metric:
        """Name, help and present values."""
        name, value = f"memoire_{self.name}", self.read(stats)
        labels = [self.label] if self.label else []
        if self.kind == "histogram":
            histogram = HistogramMetricFamily(name, self.help, labels=labels)
            timings: list[tuple[str, Any]] = _pairs(value) if labels else [] if value is None else [("", value)]
            for label, timing in timings:
                histogram.add_metric([label] * len(labels), _buckets(timing), timing.seconds)
            return histogram
        family: Any = (CounterMetricFamily if self.kind == "counter" else GaugeMetricFamily)(
            name, self.help, labels=labels
        )
        if labels:
            for label, number in _pairs(value):
                family.add_metric([label], number)
        elif isinstance(value, int | float) and not math.isnan(value):
            family.add_metric([], value)
        return family  # type: ignore[no-any-return]


def _pairs(value: Value) -> list[tuple[str, Any]]:
    assert isinstance(value, Mapping)
    return sorted(value.items())[:MAX_LABELS]


def _buckets(timing: Timing) -> list[tuple[str, float]]:
    counts, so_far = [], 0
    for bound, count in zip((*timing.bounds, math.inf), timing.counts, strict=True):
        so_far += count
        counts.append(("+Inf" if math.isinf(bound) else repr(bound), float(so_far)))
    return counts


def _field(name: str) -> Callable[[Any], Value]:
    """A field of the stats, or one within another ("totals.steps"); none where that is None."""
    path = name.split(".")

    def read(stats: Any) -> Value:
        for part in path:
            if stats is None:
                return None
            stats = getattr(stats, part)
        return stats  # type: ignore[no-any-return]

    return read


def _counter(name: str, help_: str, read: str | Callable[[Any], Value], label: str = "") -> MetricEntry:
    return MetricEntry(name, "counter", help_, _field(read) if isinstance(read, str) else read, label)


def _gauge(name: str, help_: str, read: str | Callable[[Any], Value], label: str = "") -> MetricEntry:
    return MetricEntry(name, "gauge", help_, _field(read) if isinstance(read, str) else read, label)


def _of_tables(kind: Kind, name: str, help_: str, read: str) -> MetricEntry:
    """A field of the stats of each table that has one; of a text, whether there is any."""
    field = _field(read)

    def read_all(stats: Any) -> Value:
        found: dict[str, Any] = {name: field(table) for name, table in stats.tables.items()}
        values = {name: float(bool(value)) if isinstance(value, str) else value for name, value in found.items()}
        return {name: value for name, value in values.items() if value is not None}

    return MetricEntry(name, kind, help_, read_all, "table")


def _of_origins(kind: Kind, name: str, help_: str, field: str) -> MetricEntry:
    """A field of the start states of each origin."""
    return MetricEntry(name, kind, help_, lambda s: {each.name: getattr(each, field) for each in s.starts}, "origin")


# ------------------------------------------------------------------------------------------------------ the catalogue

REQUESTS = {kind.name for kind in TYPES.values() if kind.sent_by and not kind.pushed and kind not in FOR_INFERENCE}
"""Types of message that are answered."""

EVERY = (
    _counter("faults", "Turns of the node's threads that failed: faults of memoire's own.", "faults"),
    _counter(
        "refused",
        "Messages that were refused, by code.",
        lambda s: dict.fromkeys(CODES, 0) | s.refused,
        "code",
    ),
)
"""What every role has."""

DROPPED_REPLIES = _counter(
    "dropped_replies", "Replies dropped because their connection had no room for too long.", "dropped_replies"
)

SERVER = (
    _gauge("uptime_seconds", "Seconds since the server was started.", "uptime"),
    _gauge("run_info", "1, with the name of the run that is counted now.", lambda s: {s.run: 1}, "run"),
    _gauge("run_finished", "1 once the run was declared over, 0 before.", lambda s: float(s.finished)),
    _gauge("durable", "1 where a reply means on disk, 0 where it means in memory.", lambda s: float(s.durable)),
    _counter("backup_restores", "How often an older backup was put back into the state folder.", "restored"),
    _counter("episodes", "Episodes of this run that this server's clients closed.", "totals.episodes"),
    _counter("steps", "Entries of this run that this server's clients recorded.", "totals.steps"),
    _counter("caches", "Caches of this run that were accepted here.", "totals.accepted_caches"),
    _gauge("clients", "Clients of this run: active, silent for client_timeout, or gone.", "presence", "state"),
    _gauge(
        "accounts",
        "Clients that were ever counted in this run, by where their accounts are: in memory, or folded away.",
        lambda s: {"memory": s.accounts_in_memory, "folded": s.accounts_folded},
        "state",
    ),
    _gauge(
        "new_clients_left",
        "New clients that the key with the fewest left may bring at once before further ones have to wait.",
        "newcomers_left",
    ),
    _counter("generated_bytes", "Bytes of all entries that the clients recorded.", "totals.generated_bytes"),
    _counter("received_bytes", "Bytes of caches that arrived.", "totals.received_bytes"),
    _counter("pushed_caches", "Caches that clients say they pushed.", "totals.pushed_caches"),
    _gauge(
        "lost_caches",
        "Caches that later ones overtook, or whose client left first; fewer when they arrive after all.",
        "totals.lost_caches",
    ),
    _counter(
        "dropped_caches",
        "Caches that were not used, by reason: skipped for want of credit, rejected on arrival, overwritten unused.",
        lambda s: {
            "skipped": s.totals.skipped_caches,
            "rejected": s.totals.rejected_caches,
            "overwritten": s.overwritten_caches,
        },
        "reason",
    ),
    _counter("log_lines", "Log lines of this run.", "log_lines"),
    _counter("dropped_log_lines", "Log lines that clients did not take: too many waited.", "totals.dropped_lines"),
    MetricEntry(
        "request_duration_seconds",
        "histogram",
        "Seconds that a request took from its arrival to its answer, by type.",
        lambda s: {kind: timing for kind, timing in s.requests.items() if kind in REQUESTS},
        "type",
    ),
    DROPPED_REPLIES,
    _gauge("credit_bytes", "Bytes that each client of the first table may have on the way.", "credit"),
    _gauge("model_version", "Newest version of each topic.", "models", "topic"),
    _gauge("holder_bytes", "Bytes that are held for peers, by holder.", "holders", "holder"),
    _gauge("budget_bytes", "Bytes that all holders may have together.", "budget"),
    _gauge("model_bytes", "Bytes of models that are kept.", "model_bytes"),
    _counter(
        "feedback_samples",
        "TD errors from learners: given = applied + superseded + gone + stale + lost + waiting.",
        lambda s: {
            "given": s.feedback.given,
            "applied": s.feedback.applied,
            "superseded": s.feedback.superseded,
            "gone": s.feedback.gone,
            "stale": s.feedback.stale,
            "lost": s.feedback.lost,
        },
        "outcome",
    ),
    _gauge("feedback_waiting_samples", "TD errors that clients have not acknowledged.", "feedback.waiting"),
    _counter(
        "feedback_overflowed", "Of the lost ones, those that were too many for one client.", "feedback_overflowed"
    ),
    MetricEntry(
        "feedback_delay_seconds",
        "histogram",
        "Seconds from the arrival of a TD error until its client acknowledged it.",
        _field("feedback_delay"),
    ),
    _gauge("actor_entries", "Entries that the memories of active clients hold.", "actor_entries"),
    _gauge("episode_return_mean", "Mean return of the newest episodes (at most 100).", "recent.return_mean"),
    _gauge("episode_return_min", "Least return of the newest episodes.", "recent.return_min"),
    _gauge("episode_return_max", "Greatest return of the newest episodes.", "recent.return_max"),
    _gauge("episode_length_mean_steps", "Mean length of the newest episodes.", "recent.length_mean"),
    _gauge("test_episode_return_mean", "Mean return of the newest test episodes (at most 100).", "tested.return_mean"),
    _gauge("test_episode_length_mean_steps", "Mean length of the newest test episodes.", "tested.length_mean"),
    _gauge(
        "client_scalar",
        "Mean over this server's active clients of what they report by client.scalars, by name.",
        lambda s: {name: scalar.mean for name, scalar in s.scalars.items()},
        "name",
    ),
    _gauge(
        "learner_scalar",
        "What learners report by Server.scalars or Reader.scalars.",
        "learner_scalars",
        "name",
    ),
    _gauge("learners", "Readers that were heard from within a minute.", lambda s: len(s.learners)),
    _gauge("state_bytes", "Bytes of the files in the state folder.", "folder.bytes"),
    _gauge("state_disk_free_bytes", "Bytes free on the disk of the state folder.", "folder.free_bytes"),
    _gauge("state_disk_bytes", "Size of the disk of the state folder.", "folder.disk_bytes"),
    _of_tables("counter", "batches", "Batches that get_batch handed out in this process.", "batches"),
    _of_tables("counter", "samples", "Samples handed out, here and to readers.", "samples"),
    _of_tables(
        "counter",
        "batch_wait_seconds",
        "Seconds that get_batch waited for samples; its rate is the learner's waiting share.",
        "waited",
    ),
    _of_tables("gauge", "held_caches", "Caches that are held.", "held_caches"),
    _of_tables("gauge", "held_bytes", "Bytes of what is held.", "held_bytes"),
    _of_tables("gauge", "held_limit_bytes", "Bytes that are held at most.", "byte_limit"),
    _of_tables("gauge", "unused_samples", "Held samples that were never drawn.", "unused_samples"),
    _of_tables("counter", "overwritten_caches", "Caches taken out for want of room.", "overwritten_caches"),
    _of_tables("counter", "overwritten_samples", "Samples in them that were not drawn.", "overwritten_samples"),
    _of_tables("counter", "split_fragments", "Fragments of rollouts that a take has split.", "split_fragments"),
    _of_tables(
        "counter", "passed_over_samples", "Held samples let go because they were too old.", "passed_over_samples"
    ),
    _of_tables("counter", "table_steps", "Entries of this run that clients recorded for the table.", "steps"),
    _of_tables("counter", "table_episodes", "Episodes of this run that clients closed for the table.", "episodes"),
    _of_tables("gauge", "table_entries", "Entries that can be drawn.", "rate.entries"),
    _of_tables(
        "gauge", "samples_surplus", "samples_per_insert * inserts - draws: above 0 learners are behind.", "rate.surplus"
    ),
    _of_tables("gauge", "draws_limited", "1 while a batch has to wait for entries, 0 otherwise.", "rate.draws_wait"),
    _of_tables("gauge", "inserts_limited", "1 while clients have to wait for draws, 0 otherwise.", "rate.inserts_wait"),
    _of_tables("counter", "limited_seconds", "Seconds that batches waited for entries.", "rate.waited"),
    _of_tables("gauge", "table_clients", "Clients of the table that have not left.", "clients"),
    _of_tables("gauge", "parameters_version", "One more with each change of the parameters.", "parameters_version"),
    _of_tables(
        "gauge", "samples_per_insert_target", "The parameter samples_per_insert of the table.", "samples_per_insert"
    ),
    _of_tables(
        "gauge", "sample_age_median_seconds", "Median age of the samples of a recent batch.", "freshness.age_median"
    ),
    _of_tables("gauge", "sample_age_p90_seconds", "Age that 90 % of a recent batch stay below.", "freshness.age_p90"),
    _of_tables("gauge", "sample_age_max_seconds", "Age of the oldest sample of a recent batch.", "freshness.age_max"),
    _of_tables(
        "gauge", "sample_model_lag_mean", "Mean of model versions between acting and learning.", "freshness.lag_mean"
    ),
    _of_tables(
        "gauge", "sample_model_lag_max", "Most model versions between acting and learning.", "freshness.lag_max"
    ),
    _of_tables(
        "gauge",
        "sample_effective_ratio",
        "Effective size of a recent batch, (sum w)**2 / sum w**2 of its importance, as a share of its samples.",
        "freshness.effective",
    ),
    _of_tables("gauge", "held_capacity", "Caches or entries that are held at most; 0: bytes alone say.", "capacity"),
    _of_tables("gauge", "prompts_waiting", "Prompts that no worker has.", "prompts.waiting"),
    _of_tables("gauge", "prompts_leased", "Prompts that a worker has.", "prompts.leased"),
    _of_tables("gauge", "prompts_answered", "Prompts whose answers lack a required column.", "prompts.answered"),
    _of_tables("gauge", "prompts_ready", "Prompts whose group can be drawn.", "prompts.ready"),
    _of_tables("gauge", "prompts_drawn", "Prompts that a trainer got, and has not committed.", "prompts.drawn"),
    _of_tables("gauge", "prompts_committed", "Prompts that were trained on.", "prompts.committed"),
    _of_tables("gauge", "prompts_dropped", "Prompts that are not trained on.", "prompts.dropped"),
    _of_tables("gauge", "prompts_forgotten", "Prompts whose epoch was forgotten.", "prompts.forgotten"),
    _of_tables("gauge", "prompts_given", "All prompts: the sum of their states.", "prompts.given"),
    _of_tables("gauge", "prompts_workers", "Workers that have a lease.", "prompts.workers"),
    _of_tables(
        "gauge", "prompts_oldest_lease_seconds", "Seconds since the oldest lease began.", "prompts.oldest_lease"
    ),
    _of_tables("counter", "prompts_expired_leases", "Leases that ended unfinished.", "prompts.expired"),
    _of_tables("counter", "prompts_late_answers", "Answers that came too late to count.", "prompts.late"),
    _of_tables("counter", "prompts_failed_answers", "Answers that failed for good.", "prompts.failed"),
    _of_tables("counter", "prompts_dead", "Prompts dropped because their score was 0.", "prompts.dead"),
    _of_tables("counter", "prompts_stale", "Groups that were too old to be drawn.", "prompts.stale"),
    _of_tables("counter", "prompts_full", "Groups dropped for want of room.", "prompts.full"),
    _of_tables(
        "counter", "prompts_incomplete", "Prompts of which a start missed answers or payload.", "prompts.incomplete"
    ),
    _of_tables("gauge", "prompts_replayable", "Committed groups that may be replayed.", "prompts.replayable"),
    _of_tables("counter", "prompts_tokens_drawn", "Tokens of the groups that were drawn.", "prompts.tokens_drawn"),
    _of_tables(
        "gauge", "prompts_model_lag", "Versions by which the newest step's oldest token was behind.", "prompts.lag"
    ),
    _of_tables(
        "gauge", "left_out_ratio", "Share of all weight that a recent batch could not draw from.", "freshness.left_out"
    ),
)

PROXY = (
    _gauge("uptime_seconds", "Seconds since the proxy was started.", "uptime"),
    _counter("proxy_requests", "Requests forwarded to servers, or answered by the proxy.", "requests"),
    _counter("proxy_replies", "Replies forwarded to clients.", "replies"),
    _counter("proxy_caches", "Caches forwarded to servers, or put into a queue for them.", "caches"),
    _counter("proxy_cache_bytes", "Bytes of these caches.", "cache_bytes"),
    DROPPED_REPLIES,
    _counter("proxy_homeless", "Messages for a server that is not known here.", "homeless"),
    _gauge(
        "proxy_back_up",
        "1 where the address behind the proxy answers, 0 where not.",
        lambda s: {b.endpoint: float(not b.is_away) for b in s.backs},
        "back",
    ),
    _gauge(
        "proxy_queue_bytes",
        "Bytes that wait for the address behind the proxy.",
        lambda s: {b.endpoint: b.queued_bytes for b in s.backs},
        "back",
    ),
    _counter(
        "proxy_lost_requests",
        "Requests lost because the queue was full; clients ask again.",
        lambda s: {b.endpoint: b.lost_requests for b in s.backs},
        "back",
    ),
    _counter(
        "proxy_lost_caches",
        "Caches lost because the queue was full.",
        lambda s: {b.endpoint: b.lost_caches for b in s.backs},
        "back",
    ),
    _counter(
        "proxy_lost_bytes", "Bytes of these caches.", lambda s: {b.endpoint: b.lost_bytes for b in s.backs}, "back"
    ),
    _gauge("model_version", "Newest version of each topic.", "models", "topic"),
    _gauge("model_bytes", "Bytes of models that are kept.", "model_bytes"),
)

ACTOR = (
    _counter("client_episodes", "Episodes that this client closed.", "episodes"),
    _counter("client_steps", "Entries that this client recorded.", "steps"),
    _counter("client_generated_bytes", "Bytes of these entries.", "generated_bytes"),
    _counter("client_pushed_caches", "Caches that were pushed.", "pushed_caches"),
    _counter("client_pushed_bytes", "Bytes of these caches.", "pushed_bytes"),
    _counter("client_accepted_caches", "Caches that the home says it has taken.", "accepted_caches"),
    _gauge(
        "client_lost_caches",
        "Caches that were pushed and are given up; fewer when they arrive after all.",
        "lost_caches",
    ),
    _counter("client_skipped_caches", "Caches that were not pushed because the window was full.", "skipped_caches"),
    _gauge("client_in_flight_bytes", "Bytes of caches of which nobody knows yet.", "in_flight_bytes"),
    _gauge("client_credit_bytes", "Bytes that may be on the way.", "credit"),
    _counter("client_wait_seconds", "Seconds that calls waited for room in the window.", "waited"),
    _counter("client_held_back_seconds", "Seconds that recording waited for draws.", "held_back_for"),
    _counter("client_passed_steps", "Entries recorded beyond what was granted, and not pushed.", "passed_steps"),
    _gauge("client_waiting_lines", "Log lines that the home does not have yet.", "waiting_lines"),
    _counter("client_dropped_lines", "Log lines that log() did not take.", "dropped_lines"),
    _counter("client_updates", "UPDATE messages that were answered.", "updates"),
    _counter("client_resends", "Requests that were sent again.", "resends"),
    _gauge("client_silent_seconds", "Seconds since the newest reply.", "silent"),
    _counter(
        "client_skipped_models",
        "Versions of models that were passed over, because newer ones were there.",
        "skipped_models",
    ),
    _gauge("client_model_version", "Newest version of each topic that this client has.", "models", "topic"),
)

LEARNER = (
    _counter("reader_batches", "Batches that were handed out.", "batches"),
    _counter("reader_samples", "Samples that were handed out.", "samples"),
    _counter(
        "reader_wait_seconds",
        "Seconds that calls waited for a batch; its rate is the learner's waiting share.",
        "waited",
    ),
    _counter("reader_short_samples", "Samples that a server was asked for and no longer had.", "short"),
    _gauge("reader_prefetched_batches", "Batches that wait to be taken.", "prefetched"),
    _gauge(
        "reader_servers",
        "Servers by state: answering, or away and left out.",
        lambda s: {"answering": len(s.servers), "away": len(s.away)},
        "state",
    ),
    _counter("reader_resends", "Requests that were sent again.", "resends"),
    _counter(
        "reader_feedback_samples",
        "Priorities by outcome: given to servers, or lost there.",
        lambda s: {"given": s.feedback_given, "lost": s.feedback_lost},
        "outcome",
    ),
    _gauge(
        "reader_sample_age_median_seconds",
        "Median age of the samples of a recent batch, since their entries were added.",
        "freshness.age_median",
    ),
    _gauge(
        "reader_sample_age_p90_seconds",
        "Age that 90 % of the samples of a recent batch stay below.",
        "freshness.age_p90",
    ),
    _gauge(
        "reader_sample_model_lag_mean",
        "Mean number of model versions between acting and learning, in a recent batch.",
        "freshness.lag_mean",
    ),
)

INFERENCE = (
    _gauge("uptime_seconds", "Seconds since the inference node was started.", "uptime"),
    _counter("inference_requests", "Requests that were answered or refused, those that came again too.", "requests"),
    _counter("inference_rows", "Rows that clients asked for.", "rows"),
    _counter(
        "inference_batches",
        "Calls of the function, by what made them due.",
        "batches",
        "reason",
    ),
    _counter("inference_batch_rows", "Rows that the function was given.", "batched_rows"),
    _counter("inference_expired", "Requests that were dropped: nobody needed the answer any more.", "expired"),
    _counter("inference_resends", "Requests that came again.", "resends"),
    _counter("inference_failures", "Batches for which the function failed.", "failures"),
    _counter("inference_weights_failures", "Models of which no weights could be made.", "weights_failures"),
    _counter(
        "inference_wait_seconds",
        "Seconds that requests waited for their batch, by what made it due.",
        lambda s: {reason: timing.seconds for reason, timing in s.waits.items()},
        "reason",
    ),
    _counter("inference_forward_seconds", "Seconds that the function took, in all.", "computed_seconds"),
    MetricEntry(
        "inference_request_duration_seconds",
        "histogram",
        "Seconds from the arrival of a request to its answer, by what made its batch due.",
        lambda s: s.durations,
        "reason",
    ),
    _gauge("inference_queue_rows", "Rows that wait now.", "queue_rows"),
    _gauge("holder_bytes", "Bytes that are held for peers, by holder.", "holders", "holder"),
    _gauge("budget_bytes", "Bytes that all holders may have together.", "budget"),
    _gauge("inference_clients", "Clients that asked within the last second, or `alive` seconds.", "clients"),
    _gauge("inference_model_version", "Version of the weights.", "version"),
    _gauge("jobs_open", "Jobs of an agent that no observer has.", "jobs.open"),
    _gauge("jobs_leased", "Jobs of an agent that an observer has.", "jobs.leased"),
    _gauge("jobs_observers", "Observers that were heard of within the time of a lease.", "jobs.observers"),
    _counter("jobs_done", "Jobs whose result came.", "jobs.done"),
    _counter("jobs_failed", "Jobs of which the observer's function raised an error.", "jobs.failed"),
    _counter("jobs_cancelled", "Jobs that were cancelled.", "jobs.cancelled"),
    _counter("jobs_lost", "Jobs whose last lease ended without a result.", "jobs.lost"),
    _counter("jobs_expired", "Leases that ended without a result.", "jobs.expired"),
    _counter("jobs_late", "Results that came too late, or of too old weights, to be used.", "jobs.late"),
    _of_origins("gauge", "starts_kept", "Start states that an agent keeps.", "kept"),
    _of_origins("counter", "starts_draws", "Episodes that were begun from one of them.", "draws"),
    _of_origins("gauge", "starts_best_cost", "Cost of the best start state that was ever there.", "best"),
)

WORKER = (
    _counter("worker_episodes", "Training episodes that ended.", "episodes"),
    _counter("worker_test_episodes", "Test episodes.", "tests"),
    _counter("worker_steps", "Steps of training episodes.", "steps"),
    _gauge("worker_model_version", "Version of the model that acts; 0 is none.", "version"),
    MetricEntry(
        "client_step_seconds",
        "histogram",
        "Seconds of a time step of a real-time environment, from control to control.",
        lambda s: s.step_times,
    ),
    _counter("client_late_steps", "Time steps that were late, by what made them so.", "late", "cause"),
)
TRAINER = (
    _counter("trainer_updates", "Training steps, those of former processes included.", "updates"),
    _counter("trainer_samples", "Samples that came, those of former processes included.", "samples"),
    _gauge("trainer_epoch", "Epochs that are over.", "epoch"),
    _gauge("trainer_ratio", "Training steps for each sample that came to this process.", "ratio"),
    _counter("trainer_idle_seconds", "Seconds of pauses, by what they waited for.", "idle", "reason"),
    _gauge("trainer_waits", "1 while training pauses for this reason, else 0.", "waits", "reason"),
    _counter("crc_passed", "Transitions that were rebuilt as their worker had recorded them.", "crc_passed"),
    _counter("crc_failed", "Transitions that were rebuilt as something else.", "crc_failed"),
)
PROGRAMS: Mapping[str, tuple[MetricEntry, ...]] = {"worker": WORKER, "trainer": TRAINER}
"""Metrics of programs around a client or reader, beside those of its role."""

CATALOGUE: Mapping[str, tuple[MetricEntry, ...]] = {
    "server": EVERY + SERVER,
    "proxy": EVERY + PROXY,
    "actor": EVERY + ACTOR,
    "learner": EVERY + LEARNER,
    "inference": EVERY + INFERENCE,
}
"""All metrics of each role, beside those of `NODE` and of the process (process_*, python_*)."""
TITLES = {
    "server": "Servers",
    "proxy": "Proxies and relays",
    "actor": "Actors",
    "learner": "Learners far away",
    "inference": "Inference nodes",
}
PROGRAM_TITLES = {
    "worker": "Rollout workers, beside those of actors",
    "trainer": "Trainers, beside those of learners far away",
}
NODE = {
    "memoire_build_info": "1, with what this process is made of.",
    "memoire_ready": "1 while the node should get new clients, 0 while /readyz says why not.",
    "memoire_alive": "1 while the node's threads take their turns, 0 while /livez says which one does not.",
    "memoire_open_endpoints": "Addresses of the node that other machines reach and that ask nobody for a key or token.",
    "memoire_refused_peers_total": "Connections and requests that were refused for who they came from, by reason.",
    "memoire_hung_up_connections_total": "Connections that ended before they had shown a key: probes, ended processes.",
}
"""Metrics of every node. Those for everybody by design (/livez, /readyz, /metrics) are not counted as open."""


def names(role: str) -> set[str]:
    """What a scrape of this role shows, without what every Python process has."""
    return {*NODE, *(entry.full_name for entry in CATALOGUE[role])}


def _kind(name: str) -> Kind:
    return "counter" if name.endswith("_total") else "gauge"


def _label(name: str) -> str:
    return "reason" if name == "memoire_refused_peers_total" else ""


def tables() -> str:
    """The whole catalogue as docs/metrics.md has it."""
    parts = []
    for role, entries in CATALOGUE.items():
        parts += [f"## {TITLES[role]}", "", "| metric | type | label | meaning |", "|---|---|---|---|"]
        parts += [f"| `{name}` | {_kind(name)} | {_label(name)} | {help_} |" for name, help_ in NODE.items()]
        parts += [f"| `{entry.full_name}` | {entry.kind} | {entry.label} | {entry.help} |" for entry in entries]
        parts.append("")
    for program, entries in PROGRAMS.items():
        parts += [f"## {PROGRAM_TITLES[program]}", "", "| metric | type | label | meaning |", "|---|---|---|---|"]
        parts += [f"| `{entry.full_name}` | {entry.kind} | {entry.label} | {entry.help} |" for entry in entries]
        parts.append("")
    return "\n".join(parts)


if __name__ == "__main__":
    print(tables())


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
