"""What a server, its tables and its clients have done, at one moment. Pure: no socket, and the dispatcher's clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from memoire.accounting.account import Account, FeedbackCounts, Totals
from memoire.accounting.runs import FolderStats
from memoire.accounting.timings import Timing
from memoire.arguments import MAX_SCALARS
from memoire.pool.freshness import Freshness
from memoire.pool.kinds import Storage
from memoire.pool.tables import OpenTable
from memoire.prompts.figures import PromptStats
from memoire.replay.limiter import RateStats
from memoire.security.exposure import Security
from memoire.wire.messages import TEST, TRAIN

from .dispatch import Dispatcher
from .learners import LearnerStats, merged
from .reported import FigureSpread, RecentEpisodes, recent, spread


@dataclass(frozen=True, slots=True)
class ClientStats:
    """One client as a server sees it. Times are seconds since 1970."""

    client: str
    """Its id in hex."""
    name: str
    """That a person or Kubernetes gave it; "" for none."""
    table: str
    """Name of the table that it fills; "" where this server does not have it any more."""
    label: int
    host: str
    episodes: int
    steps: int
    pushed_caches: int
    """As far as anything that arrived says: accepted, rejected, lost and in flight, always and exactly. Where episodes
    are stored, these; so with all counts of caches."""
    pushed_bytes: int
    """Received (accepted or rejected), lost and in flight, always and exactly."""
    received_bytes: int
    accepted_caches: int
    rejected: dict[str, int]
    """Caches by code."""
    lost_caches: int
    lost_bytes: int
    in_flight_caches: int
    in_flight_bytes: int
    returns_mean: float
    first_seen: float
    last_seen: float
    last_cache: float
    total_weight: float
    positives: int
    parameters_version: int
    models: dict[str, int]
    scalars: dict[str, float]
    newest_models: dict[str, int]
    """Newest version of each topic when the client reported `models` and `scalars`."""
    feedback: FeedbackCounts
    """What became of the TD errors that learners gave for its entries."""


@dataclass(frozen=True, slots=True)
class TableStats:
    """A table at one moment; for whoever watches."""

    name: str
    storage: Storage
    clients: int
    """Clients that belong to it and have not said goodbye."""
    episodes: int
    steps: int
    """What clients of this run recorded for it, those that said goodbye included."""
    batches: int
    """Handed out in this process."""
    samples: int
    """Handed out in batches, here and to readers."""
    waited: float
    """Seconds that get_batch waited for samples, in all."""
    held_caches: int
    """Where episodes or rollouts are stored, these, or their fragments."""
    held_samples: int
    """Of all held caches; where episodes are stored, entries."""
    held_bytes: int
    byte_limit: int
    capacity: int
    """Caches, or entries of episodes, that there is room for; 0: only bytes are limited."""
    unused_samples: int
    """Never drawn; where episodes are stored, entries that can be drawn."""
    overwritten_caches: int
    """Caches, episodes or fragments of rollouts that made room."""
    overwritten_samples: int
    """The samples in them that were not drawn; of rollouts, entries."""
    split_fragments: int
    """Of rollouts: those that a take has split."""
    applied: int
    """Priorities that learners have set: applied here, where episodes are stored, or by the clients that own them."""
    stale: int
    """Those whose entry had made room."""
    lost_feedback: int
    """Those that no client fetched: it had ended, or too many waited for it."""
    passed_over_samples: int
    """Held ones that were let go because their entries had become too old (`max_age`, `max_model_lag`)."""
    parameters_version: int
    samples_per_insert: float
    """The parameter."""
    rate: RateStats
    """How drawing stands beside recording, and who waits for what."""
    freshness: Freshness | None
    """Of the samples of a recent batch that was drawn in this process; None before the first one."""
    prompts: PromptStats | None
    """If the table stores prompts."""


@dataclass(frozen=True, slots=True)
class ServerStats:
    """A server at one moment; for whoever watches."""

    name: str
    run: str
    epoch: int
    uptime: float
    """Seconds."""
    finished: bool
    durable: bool
    """Whether a reply means "on disk"; otherwise it means "in memory"."""
    restored: int
    """How often an older backup was put back into the state folder; what ended clients did since it is missing."""
    missing: tuple[str, ...]
    """What the start went on without, such as a model whose file is gone, a sentence each: the log has them, too."""
    totals: Totals
    refused: dict[str, int]
    """Messages that were refused, by code."""
    dropped_replies: int
    """Replies that were dropped: their connection had no room for them for too long. Clients ask again."""
    tables: dict[str, TableStats]
    """Each table's own figures, by name; those below are sums over them."""
    guests: int
    """Clients that have said hello and reported nothing that counts; `totals.clients` is without them."""
    probes: int
    """Round trips of `memoire doctor --roundtrip` since the server was started, which no other figure has."""
    accounts_in_memory: int
    accounts_folded: int
    """Accounts that left memory, since their clients are gone or silent; they come back when these speak again."""
    newcomers_left: int
    """Clients that the key with the fewest left may bring at once (`limits.new_clients`)."""
    presence: dict[str, int]
    """Clients, guests among them: "active", "silent" for `limits.client_timeout`, "gone" (they said goodbye)."""
    recent: RecentEpisodes
    """The newest episodes of training."""
    tested: RecentEpisodes
    """The newest test episodes."""
    """The newest closed episodes."""
    scalars: dict[str, FigureSpread]
    """What active clients report by `Client.scalars`, by name."""
    learner_scalars: dict[str, float]
    """What learners report by `Server.scalars` and `Reader.scalars`, by name."""
    learners: tuple[LearnerStats, ...]
    """Readers that were heard from lately."""
    requests: dict[str, Timing]
    """Seconds that requests took, by type."""
    snapshots: int
    """Of what is held, that were written."""
    snapshot_trouble: str
    """Why the newest one that the timer was to take was not; empty where it was."""
    folder: FolderStats | None
    """Of the state folder; None without one."""
    batches: int
    samples: int
    """Samples handed out in batches, here and to readers."""
    waited: float
    """Seconds that get_batch waited for samples, in all."""
    held_caches: int
    held_bytes: int
    byte_limit: int
    """Bytes of caches that are held at most."""
    holders: dict[str, int]
    """Bytes that are held for peers, by holder: tables, keyed rows, requests that are answered."""
    budget: int
    """Bytes that all holders may have together, with those that some have of their own."""
    credit: int
    """Bytes that each client may have on the way now."""
    unused_samples: int
    overwritten_caches: int
    models: dict[str, int]
    model_bytes: int
    log_lines: int
    feedback: FeedbackCounts
    """What became of the TD errors that learners gave in this run; `ClientStats.feedback` has each client's."""
    feedback_owners: dict[str, FeedbackCounts]
    """The same from the same moment, by whose entries they were for: "clients", "server" (it stores episodes itself)
    and "unknown" owners; of the latter two since the server was started.
    """
    feedback_overflowed: int
    """Of the lost ones since the server was started, those that too many waited with for one client."""
    feedback_delay: Timing
    """Seconds from the arrival of each TD error until its client acknowledged it."""
    actor_entries: int
    """Entries that the memories of active clients hold, as they say."""
    feedback_given: int
    """Since the server was started."""
    feedback_lost: int
    parameters_version: int
    """Of the first table."""
    descriptors: int
    """File descriptors that the process has open."""
    most_descriptors: int
    """How many it may have."""
    security: Security
    """Who may come, and who was sent away."""
    faults: int
    """Turns of its threads that failed: faults of ours."""


def client_stats(dispatcher: Dispatcher, account: Account) -> ClientStats:
    """One client, by its account. Under the dispatcher's lock."""
    report = account.report
    return ClientStats(
        client=account.client.hex(),
        name=dispatcher.client_names.of(account.client),
        table=dispatcher.tables.name_of(account.table),
        label=account.label,
        host=account.host,
        episodes=report.episodes,
        steps=report.steps,
        pushed_caches=account.pushed_caches,
        pushed_bytes=account.pushed_bytes,
        received_bytes=account.received_bytes,
        accepted_caches=account.accepted_caches,
        rejected=dict(account.rejected),
        lost_caches=account.lost_caches,
        lost_bytes=account.lost_bytes,
        in_flight_caches=account.in_flight_caches,
        in_flight_bytes=account.in_flight,
        returns_mean=account.returns_sum / account.returns_count if account.returns_count else float("nan"),
        first_seen=account.first_seen,
        last_seen=account.last_seen,
        last_cache=account.last_cache,
        total_weight=report.total_weight,
        positives=report.positives,
        parameters_version=report.parameters_version,
        models=dict(report.models),
        scalars=dict(report.scalars),
        newest_models=dict(account.newest_models),
        feedback=account.feedback,
    )


def table_stats(
    dispatcher: Dispatcher, table: OpenTable, *, batches: int, waited: float, freshness: Freshness | None
) -> TableStats:
    """One table, with what was handed out of it in this process."""
    pool = table.pool.stats()
    with dispatcher.lock:
        ledger, version = dispatcher.ledger, table.parameters_version
        clients = ledger.present[table.number]
        sums = {name: of_tables[table.number] for name, of_tables in ledger.tables.items()}
    return TableStats(
        name=table.name,
        storage=table.storage,
        clients=clients,
        episodes=sums["episodes"],
        steps=sums["steps"],
        batches=batches,
        samples=pool.drawn,
        waited=waited,
        held_caches=pool.caches,
        held_samples=pool.held,
        held_bytes=pool.bytes,
        byte_limit=table.pool.byte_limit,
        capacity=table.capacity or table.settings.cache_limit,
        unused_samples=pool.unused,
        overwritten_caches=pool.overwritten,
        overwritten_samples=pool.overwritten_samples,
        split_fragments=pool.split,
        passed_over_samples=pool.passed_over,
        applied=pool.applied + sums["applied"],
        stale=pool.stale + sums["stale"],
        lost_feedback=sums["lost_feedback"],
        parameters_version=version,
        samples_per_insert=table.parameters.samples_per_insert,
        rate=table.limiter.stats(),
        freshness=freshness,
        prompts=None if table.prompts is None else table.prompts.figures(),
    )


SUMMED = (
    "batches",
    "samples",
    "waited",
    "held_caches",
    "held_bytes",
    "byte_limit",
    "unused_samples",
    "overwritten_caches",
)
"""Figures of a server that are sums over its tables."""


def figures_of(
    dispatcher: Dispatcher, tables: Mapping[str, TableStats], scalars: Mapping[str, float]
) -> dict[str, Any]:
    """The figures of a server that follow from what was counted.

    Args:
        scalars: Of the learner in the server's process.
    """
    sums = {name: sum(getattr(table, name) for table in tables.values()) for name in SUMMED}
    return {
        "run": dispatcher.run_name,
        "epoch": dispatcher.epoch,
        "finished": dispatcher.finished,
        "durable": dispatcher.is_durable,
        "tables": dict(tables),
        "holders": dispatcher.budget.holders(),
        "budget": dispatcher.budget.limit,
        "model_bytes": dispatcher.models.bytes,
        "log_lines": dispatcher.logbook.count,
        "feedback_given": dispatcher.feedback_given,
        "feedback_lost": dispatcher.feedback_lost,
        "parameters_version": dispatcher.tables.first.parameters_version,
        **sums,
        **_counted(dispatcher, scalars),
    }


def _counted(dispatcher: Dispatcher, scalars: Mapping[str, float]) -> dict[str, Any]:
    """What has to be read at one moment."""
    now = dispatcher.now
    with dispatcher.lock:
        ledger, totals = dispatcher.ledger, dispatcher.ledger.totals()
        feedback = ledger.feedback()
        active = ledger.active(now - dispatcher.limits.client_timeout)
        guests, learners = len(ledger.guests), dispatcher.learners.now(now)
        ended = [ended for _, ended in ledger.ended]
        counted = {
            "totals": totals,
            "refused": dict(dispatcher.refused),
            "guests": guests,
            "probes": dispatcher.probes.totals().clients,
            "accounts_in_memory": len(ledger),
            "accounts_folded": ledger.folded,
            "newcomers_left": int(dispatcher.newcomers.least(now)),
            "learners": learners,
            "credit": dispatcher.credit(dispatcher.tables.first),
            "feedback": sum(feedback.values(), FeedbackCounts()),
            "feedback_owners": feedback,
            "feedback_overflowed": dispatcher.feedback_overflowed,
            "feedback_delay": dispatcher.feedback_delays,
            "actor_entries": sum(account.report.entries for account in active),
            "models": dispatcher.models.versions(),
        }
    silent = max(0, totals.clients + guests - totals.gone - len(active))
    return counted | {
        "presence": {"active": len(active), "silent": silent, "gone": totals.gone},
        "recent": recent(ended, TRAIN),
        "tested": recent(ended, TEST),
        "scalars": spread((account.report.scalars for account in active), MAX_SCALARS),
        "learner_scalars": merged(learners, scalars),
    }
