"""Figures of a server, its tables and its clients at one moment, and scalars of all clients.

Queries of a server's runs in its process: totals, accounts, clients, episodes, log lines. The queries read the
dispatcher's state under its lock and by its clock, and older lines from the state folder. Queries change nothing.
"""

from __future__ import annotations

import heapq
import itertools
import math
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final

import numpy as np

from memoire.accounting.account import DROPPED_CACHES, Account, FeedbackCounts, Totals
from memoire.accounting.merge import LearnerStats, Rows, ServerAccounts, merge, merged_scalars, totals_of_pages
from memoire.accounting.runs import MAX_FOUND_LINES, FolderStats, LineFilter, LogEntry, RunFacts, RunState, StateStore
from memoire.arguments import MAX_SCALARS, whole
from memoire.errors import ParameterError
from memoire.figures import (
    BUDGET_BYTES,
    DROPPED_REPLIES,
    FAULTS,
    HOLDER_BYTES,
    MODEL_BYTES,
    MODEL_VERSION,
    REFUSED,
    UPTIME,
    Timing,
    adding,
    by,
    counter,
    gauge,
    histogram,
    shown,
    total,
    within,
)
from memoire.replay.limiter import RateStats
from memoire.security.access import Security
from memoire.tables.inspection import Freshness
from memoire.wire import messages
from memoire.wire.messages import TEST, TRAIN, Ended

if TYPE_CHECKING:
    from memoire.tables.table import OpenTable

    from .dispatch import Dispatcher

NEWEST = 100
"""Maximum episodes that `recent` summarizes."""


@dataclass(frozen=True, slots=True)
class RecentEpisodes:
    """Summary of the newest closed episodes, at most `NEWEST`."""

    # fmt: off
    count: Annotated[int, adding("sum")] = 0
    return_mean: Annotated[float | None, gauge("episode_return_mean", "Mean return", "Mean return of the newest "
        "episodes (at most 100 of each server).", formula="Σ return ÷ episodes", docs="dashboard.md",
        adds="weighed by count")] = None
    return_min: Annotated[float | None, gauge("episode_return_min", "Least return",
        "Least return of the newest episodes.", adds="min")] = None
    return_max: Annotated[float | None, gauge("episode_return_max", "Greatest return",
        "Greatest return of the newest episodes.", adds="max")] = None
    length_mean: Annotated[float | None, gauge("episode_length_mean_steps", "Mean length",
        "Mean length of the newest episodes, in entries.", adds="weighed by count")] = None
    # fmt: on


def recent(ended: Iterable[Ended], kind: int = TRAIN) -> RecentEpisodes:
    """Summarize the newest episodes of a kind (`TRAIN` or `TEST`)."""
    newest = [each for each in ended if each.kind == kind][-NEWEST:]
    if not newest:
        return RecentEpisodes()
    returns, lengths = [each.returned for each in newest], [each.length for each in newest]
    mean = math.fsum(returns) / len(newest)
    return RecentEpisodes(len(newest), mean, min(returns), max(returns), sum(lengths) / len(newest))


@dataclass(frozen=True, slots=True)
class FigureSpread:
    """Statistics of one figure over all clients that report the figure."""

    # fmt: off
    count: Annotated[int, adding("sum")]
    mean: Annotated[float, gauge("client_scalar", "Mean", "Mean of each scalar that this server's active clients "
        "report by client.scalars, by name.", adds="weighed by count")]
    least: Annotated[float, adding("min")]
    greatest: Annotated[float, adding("max")]
    # fmt: on


def summarize_values(reports: Iterable[Mapping[str, float]], most: int) -> dict[str, FigureSpread]:
    """Summarize each name's values over all reports; of more than `most` names, only the first in sorted order."""
    values_by_name: dict[str, list[float]] = {}
    for report in reports:
        for name, value in report.items():
            values_by_name.setdefault(name, []).append(value)
    return {
        name: FigureSpread(len(values), math.fsum(values) / len(values), min(values), max(values))
        for name, values in sorted(values_by_name.items())[:most]
    }


@dataclass(frozen=True, slots=True)
class ServerClientStats:
    """One client at one moment, as a server counts it. Times are seconds since 1970."""

    client: str
    """Id of the client in hex."""
    name: str
    """Name given by a person or Kubernetes; "" if there is none."""
    table: str
    """Name of the table that the client fills; "" if the server no longer has the table."""
    label: int
    host: str
    episodes: int
    steps: int
    pushed_caches: int
    """Caches, by the newest number that arrived: the sum of accepted, rejected, lost and in flight. For a table of
    episodes, all counts of caches count episodes."""
    pushed_bytes: int
    """Bytes: the sum of received (accepted or rejected), lost and in flight."""
    received_bytes: int
    accepted_caches: int
    rejected: dict[str, int]
    """Number of rejected caches, by code."""
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
    """Outcomes of the TD errors that learners reported for the client's entries."""


@dataclass(frozen=True, slots=True)
class TableStats:
    """Figures of one table at one moment."""

    # fmt: off
    name: str
    storage: str
    clients: Annotated[int, gauge("table_clients", "Actors", "Clients of the table that have not left.", curve=True)]
    episodes: Annotated[int, counter("table_episodes", "Episodes", "Episodes of this run that clients closed for the "
        "table.")]
    steps: Annotated[int, counter("table_steps", "Steps", "Entries of this run that clients recorded for the table.")]
    """Steps of all clients, also of clients that have left."""
    batches: Annotated[int, counter("batches", "Batches", "Batches that get_batch handed out in the server's process.")]
    missed_batches: Annotated[int, counter("missed_batches", "Calls without a batch", "Calls of get_batch, "
        "sample_episodes and take that returned nothing, because too few samples arrived in time.", docs="cluster.md")]
    samples: Annotated[int, counter("samples", "Samples drawn", "Samples handed out to learners since the server "
        "started; of rollouts, entries that learners took, each once.", docs="tables.md")]
    waited: Annotated[float, counter("batch_wait_seconds", "Learners waited", "Total seconds that get_batch, "
        "sample_episodes and take waited for samples; its rate is the learner's waiting share.")]
    held_caches: Annotated[int, gauge("held_caches", "Held", "Caches held now; of other tables, episodes, fragments of "
        "rollouts or groups of prompts.", docs="tables.md", curve=True)]
    held_samples: Annotated[int, shown("Samples held", "Samples of all held caches; of other tables, entries.")]
    held_bytes: Annotated[int, gauge("held_bytes", "Size", "Bytes held by the table.", curve=True)]
    byte_limit: Annotated[int, gauge("held_limit_bytes", "Limit", "Largest number of bytes that the table holds.")]
    capacity: Annotated[int, gauge("held_capacity", "Capacity", "Largest number of caches or entries; 0 if only bytes "
        "limit the table.")]
    unused_samples: Annotated[int, gauge("unused_samples", "Samples left", "Held samples that no learner has drawn "
        "yet; of a table of episodes, entries that can be drawn.", docs="tables.md", curve=True)]
    overwritten_caches: Annotated[int, counter("overwritten_caches", "Overwritten", "Caches, episodes or fragments of "
        "rollouts that newer ones overwrote.", docs="tables.md", curve=True)]
    overwritten_samples: Annotated[int, counter("overwritten_samples", "Samples overwritten",
        "Overwritten samples that were not drawn; of rollouts, entries.")]
    split_fragments: Annotated[int, counter("split_fragments", "Fragments split", "Fragments that two takes share: the "
        "first take was full before the fragment ended.", docs="on-policy.md")]
    applied: Annotated[int, shown("Priorities set", "TD errors that learners reported and that became priorities.",
        docs="sampling.md")]
    stale: Annotated[int, shown("Too late", "TD errors that arrived after their entry was overwritten. They change "
        "nothing.", docs="sampling.md")]
    lost_feedback: Annotated[int, shown("Not fetched", "TD errors that were not fetched, because the client had ended "
        "or too many waited for it.")]
    passed_over_samples: Annotated[int, counter("passed_over_samples", "Entries too old",
        "Held samples dropped as too old: above max_age, or with a model more than max_model_lag versions behind the "
        "newest.", docs="on-policy.md")]
    parameters_version: Annotated[int, gauge("parameters_version", "Parameters", "Version of the parameters, raised by "
        "each change.", adds="max")]
    samples_per_insert_target: Annotated[float, gauge("samples_per_insert_target", "Samples per insert, target",
        "Target number of samples drawn for each entry: the table's samples_per_insert.",
        docs="tables.md", adds="last"), gauge("table_samples_per_insert_target", "Samples per insert, target",
        "Target number of samples drawn from a table for each step: samples_per_insert.", of="cluster")]
    rate: RateStats
    """State of the table's rate limiter: ratio of samples to inserts, and counts of waiting clients and draws."""
    freshness: Freshness | None
    """Freshness of a recent batch drawn in this process; None before the first batch."""
    own: Any = None
    """Figures that only this kind of table has."""
    # fmt: on


ACCOUNTS: Final = gauge(
    "accounts", "Accounts",
    "Clients ever counted in this run, by place of their accounts: in memory, or folded away.",
    label="state",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ServerStats:
    """Figures of one server at one moment."""

    # fmt: off
    name: str
    run: Annotated[str, gauge("run_info", "Run", "1, with the name of the current run.", label="run",
        adds="last")]
    epoch: int
    uptime: Annotated[float, UPTIME]
    finished: Annotated[bool, gauge("run_finished", "Finished", "1 when the run is finished, 0 before.",
        adds="all")]
    durable: Annotated[bool, gauge("durable", "Counts survive a crash", "1 if acknowledged data is on disk "
        "(--state-dir), 0 if it is only in memory.", docs="state.md", adds="all")]
    restored: Annotated[int, counter("backup_restores", "Backups put back", "Number of older backups restored into the "
        "state folder. Counts of ended clients since the backup are missing.")]
    missing: tuple[str, ...]
    """Data that the start did not find, such as a model's file, a sentence each, as in the log."""
    totals: Totals
    refused: Annotated[dict[str, int], REFUSED]
    dropped_replies: Annotated[int, DROPPED_REPLIES]
    tables: Annotated[dict[str, TableStats], by("table")]
    """Figures of each table, by name; several fields of the server are sums over its tables."""
    guests: int
    """Clients that sent HELLO and have not reported counts; `totals.clients` does not include guests."""
    probes: int
    """Round trips of `memoire doctor --roundtrip` since the server started; no other figure counts these."""
    accounts_in_memory: Annotated[int, ACCOUNTS("memory")]
    accounts_folded: Annotated[int, ACCOUNTS("folded")]
    """Accounts moved out of memory because their clients are gone or silent; a message brings an account back."""
    newcomers_left: Annotated[int, gauge("new_clients_left", "New clients left", "New clients that may still connect "
        "at once with the same key (limits.new_clients), for the key with the fewest left.", adds="min")]
    presence: Annotated[dict[str, int], gauge("clients", "Clients", "Clients of this run: active, silent for "
        "client_timeout, or gone.", label="state")]
    """Clients by state: active, silent or gone. Guests are included."""
    recent: RecentEpisodes
    """Summary of the newest training episodes."""
    tested: Annotated[RecentEpisodes, within("test_", "newest episodes", "newest test episodes")]
    scalars: Annotated[dict[str, FigureSpread], by("name")]
    """Scalars that active clients report by `Client.scalars`, by name."""
    learner_scalars: Annotated[dict[str, float], gauge("learner_scalar", "Learner's figures",
        "Scalars that learners report by Server.scalars or Reader.scalars.", label="name", adds="last")]
    learners: Annotated[tuple[LearnerStats, ...], gauge("learners", "Learners", "Readers that sent a message within "
        "the last minute.", adds="join")]
    requests: Annotated[dict[str, Timing], histogram("request_duration_seconds", "Request time",
        "Seconds that a request took from its arrival to its answer, by type.", label="type", docs="metrics.md")]
    snapshots: int
    """Snapshots written since the server started."""
    snapshot_trouble: str
    """Reason why the timer's newest snapshot failed; "" if it succeeded."""
    folder: FolderStats | None
    """Figures of the state folder; None without a folder."""
    batches: int
    samples: int
    """Samples in batches for this process and for readers."""
    waited: float
    """Total seconds that get_batch, sample_episodes and take waited for samples."""
    held_caches: int
    held_bytes: int
    byte_limit: int
    """Maximum bytes of held caches."""
    holders: Annotated[dict[str, int], HOLDER_BYTES]
    """Bytes by holder, such as a table, keyed rows or requests in progress."""
    budget: Annotated[int, BUDGET_BYTES]
    credit: Annotated[int, gauge("credit_bytes", "Credit", "Bytes that each client of the first table may have in "
        "flight.", adds="min")]
    unused_samples: int
    overwritten_caches: Annotated[int, DROPPED_CACHES("overwritten")]
    models: Annotated[dict[str, int], MODEL_VERSION]
    model_bytes: Annotated[int, MODEL_BYTES]
    log_lines: Annotated[int, counter("log_lines", "Log lines", "Log lines of this run.")]
    feedback: FeedbackCounts
    """Outcomes of the TD errors that learners reported in this run; `ClientStats.feedback` has each client's."""
    feedback_owners: dict[str, FeedbackCounts]
    """Outcomes by owner of the entries: "clients", "server" (stores episodes itself) and "unknown". The counts of
    "server" and "unknown" begin at the start of the server.
    """
    feedback_overflowed: Annotated[int, counter("feedback_overflowed", "Overflowed", "TD errors that "
        "were lost because too many waited, since the server started.")]
    feedback_delay: Annotated[Timing, histogram("feedback_delay_seconds", "Feedback delay",
        "Seconds from the arrival of a TD error until its client acknowledged it.")]
    actor_entries: Annotated[int, gauge("actor_entries", "Entries of actors", "Entries that the memories of active "
        "clients hold.")]
    feedback_given: int
    """TD errors that learners reported since the server started."""
    feedback_lost: int
    parameters_version: int
    """Version of the first table's parameters."""
    descriptors: int
    """File descriptors that the process has open."""
    most_descriptors: int
    """Maximum file descriptors of the process."""
    security: Security
    """Access rules, and counts of refused connections."""
    faults: Annotated[int, FAULTS]
    # fmt: on


_OF_ACCOUNT: Final = (
    "label", "host", "pushed_caches", "pushed_bytes", "received_bytes", "accepted_caches", "lost_caches", "lost_bytes",
    "in_flight_caches", "first_seen", "last_seen", "last_cache", "feedback",
)  # fmt: skip
_OF_REPORT: Final = "episodes", "steps", "total_weight", "positives", "parameters_version"
"""Names of figures that `ClientStats` copies from a client's account, and from its newest report."""


def client_stats(dispatcher: Dispatcher, account: Account) -> ServerClientStats:
    """Return the figures of one client. The caller holds the dispatcher's lock."""
    report, facts = account.report, {name: getattr(account, name) for name in _OF_ACCOUNT}
    return ServerClientStats(
        client=account.client.hex(),
        name=dispatcher.client_names.name_of(account.client),
        table=dispatcher.tables.name_of(account.table),
        rejected=dict(account.rejected),
        in_flight_bytes=account.in_flight,
        returns_mean=account.returns_sum / account.returns_count if account.returns_count else float("nan"),
        models=dict(report.models),
        scalars=dict(report.scalars),
        newest_models=dict(account.newest_models),
        **facts,
        **{name: getattr(report, name) for name in _OF_REPORT},
    )


def table_stats(
    dispatcher: Dispatcher, table: OpenTable, batches: int, missed: int, waited: float, freshness: Freshness | None
) -> TableStats:
    """Return the figures of one table, with the batches, missed draws and waited seconds of this process."""
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
        missed_batches=missed,
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
        samples_per_insert_target=table.parameters.samples_per_insert,
        rate=table.limiter.stats(),
        freshness=freshness,
        own=pool.own,
    )


SUMMED = (
    "batches", "samples", "waited", "held_caches", "held_bytes", "byte_limit", "unused_samples", "overwritten_caches",
)  # fmt: skip
"""Figures of a server that are sums over its tables."""


def figures_of(
    dispatcher: Dispatcher, tables: Mapping[str, TableStats], scalars: Mapping[str, float]
) -> dict[str, Any]:
    """Return the figures of a server that follow from its counts.

    Args:
        scalars: Figures of the learner in the server's process.
    """
    over_tables, now = total(TableStats, tables.values()), dispatcher.now
    sums = {name: getattr(over_tables, name) for name in SUMMED}
    with dispatcher.lock:
        ledger, totals, counts = dispatcher.ledger, dispatcher.ledger.totals(), dispatcher.feedback
        feedback = ledger.feedback()
        active = ledger.active(now - dispatcher.limits.client_timeout)
        guests, learners = len(ledger.guests), dispatcher.learners.active_learners(now)
        ended = [ended for _, ended in ledger.ended]
        counted = {
            "run": dispatcher.run_name,
            "finished": dispatcher.finished,
            "totals": totals,
            "refused": dict(dispatcher.refused),
            "guests": guests,
            "probes": dispatcher.probes.totals().clients,
            "accounts_in_memory": len(ledger),
            "accounts_folded": ledger.stored_count,
            "newcomers_left": int(dispatcher.newcomers.fewest_tokens(now)),
            "learners": learners,
            "credit": dispatcher.bytes_per_client(dispatcher.tables.first),
            "feedback": sum(feedback.values(), FeedbackCounts()),
            "feedback_owners": feedback,
            "feedback_given": counts.given,
            "feedback_lost": counts.lost,
            "feedback_overflowed": counts.overflowed,
            "feedback_delay": counts.delays,
            "actor_entries": sum(account.report.entries for account in active),
            "models": dispatcher.models.versions(),
            "model_bytes": dispatcher.models.bytes,
            "log_lines": dispatcher.logbook.count,
            "parameters_version": dispatcher.tables.first.parameters_version,
        }
    silent = max(0, totals.clients + guests - totals.gone - len(active))
    return {
        **counted,
        **sums,
        "epoch": dispatcher.epoch,
        "durable": dispatcher.is_durable,
        "tables": dict(tables),
        "holders": dispatcher.budget.holders(),
        "budget": dispatcher.budget.limit,
        "presence": {"active": len(active), "silent": silent, "gone": totals.gone},
        "recent": recent(ended, TRAIN),
        "tested": recent(ended, TEST),
        "scalars": summarize_values((account.report.scalars for account in active), MAX_SCALARS),
        "learner_scalars": merged_scalars(learners, scalars),
    }


KNOWN_RUNS = 20
"""Maximum names in the error for an unknown run; the newest runs are listed."""


class Queries:
    """Queries of the runs of one server: totals, accounts, episodes, log lines. Thread-safe. Each method with `run`
    raises ParameterError if the server does not know the run.
    """

    _dispatcher: Dispatcher
    _store: StateStore | None
    """The server's state folder; None if it has none."""

    def runs(self) -> list[RunFacts]:
        """Return all known runs; the present run is last."""
        with self._dispatcher.lock:
            return self._dispatcher.runs.facts()

    def _run_named(self, name: str | None) -> RunState:
        """Return a run by name; None is the present run. The caller holds the dispatcher's lock."""
        run = self._dispatcher.runs.current if name is None else self._dispatcher.runs.named(name)
        if run is None:
            known = [facts.name for facts in self._dispatcher.runs.facts()]
            raise ParameterError("run", name, f"one of {', '.join(map(repr, known[-KNOWN_RUNS:]))}")
        return run

    def totals(self, run: str | None = None) -> Totals:
        """Return sums over all clients of a run, with the counts of drained servers; None is the present run.
        `Reader.totals` includes the cluster's other servers.
        """
        with self._dispatcher.lock:
            chosen = self._run_named(run)
            if not chosen.kept.has_others:
                return chosen.ledger.totals()
        return totals_of_pages(self._dispatcher.pages(chosen))

    def accounts(self, run: str | None = None) -> ServerAccounts:
        """Return a run's accounts, client by client, with the accounts of drained servers, for `accounting.merge`.
        Cost: about 250 bytes for each client of the run.
        """
        with self._dispatcher.lock:
            chosen = self._run_named(run)
        rows = np.concatenate([merge(), *self._dispatcher.pages(chosen)])
        return self._accounts_of(chosen, rows)

    def account_page(
        self, run: str | None = None, after: bytes = b"", *, seen: float = 0.0, most: int = 16384
    ) -> tuple[ServerAccounts, bool]:
        """Return at most `most` accounts of a run, in the order of their keys, and True if there are more.

        Args:
            after: Key (`merge.key_of`) of the last row of the page before.
            seen: If less than half of `limits.client_timeout` ago, return all accounts whose client was heard since
                then, and no other accounts.
        """
        dispatcher = self._dispatcher
        with dispatcher.lock:
            chosen = self._run_named(run)
            live = chosen.rows_in_memory(dispatcher.home)
            if seen > dispatcher.now - dispatcher.limits.client_timeout / 2:  # clients seen lately are still in memory
                rows, has_more = live[live["last_seen"] >= seen], False
            else:
                rows, has_more = chosen.page(live, after, most)
            return self._accounts_of(chosen, rows), has_more

    def _accounts_of(self, run: RunState, rows: Rows) -> ServerAccounts:
        dispatcher = self._dispatcher
        with dispatcher.lock:
            return ServerAccounts(
                run=run.name,
                rows=rows,
                finished=run.finished,
                durable=dispatcher.is_durable,
                runs=tuple(facts.name for facts in dispatcher.runs.facts()),
                epoch=dispatcher.epoch,
                time=dispatcher.now,
                inherited=run.inherited,
            )

    def clients(self, after: str = "", most: int | None = None) -> list[ServerClientStats]:
        """Return at most `most` clients heard recently whose id in hex is above `after`, ordered by id. Guests, which
        have reported nothing yet, are included. `accounts` has all clients that were ever counted.
        """
        with self._dispatcher.lock:
            known = [*self._dispatcher.ledger, *self._dispatcher.ledger.guests]
            later = (account for account in known if account.client.hex() > after)
            count = len(known) if most is None else most
            accounts = heapq.nsmallest(count, later, key=operator.attrgetter("client"))
            return [client_stats(self._dispatcher, account) for account in accounts]

    def client_name(self, client: bytes) -> str:
        """Return the name that a person or Kubernetes gave to a client (16 bytes of id); "" if there is none. The
        server remembers names of ended clients until it stops.
        """
        with self._dispatcher.lock:
            return self._dispatcher.client_names.name_of(client)

    def episodes(self, most: int = 1000) -> list[tuple[str, messages.Ended]]:
        """Return the newest closed episodes, oldest first, each with its client's id in hex."""
        with self._dispatcher.lock:
            return [(client.hex(), ended) for client, ended in list(self._dispatcher.ledger.ended)[-most:]]

    def episodes_after(self, after: int, most: int = 1000) -> tuple[str, int, list[tuple[str, messages.Ended]]]:
        """Return kept closed episodes with a number above `after`, oldest first. Numbers restart with each run and with
        each start of the server (`stats().epoch`).

        Returns:
            Name of the run, number of the first episode, and each episode with its client's id in hex.
        """
        after, most = whole("after", after, 0), whole("most", most, 0)
        with self._dispatcher.lock:
            kept, count = self._dispatcher.ledger.ended, self._dispatcher.ledger.ended_count
            gone = count - len(kept)
            begin = max(0, (after if after <= count else 0) - gone)
            episodes = [(client.hex(), ended) for client, ended in itertools.islice(kept, begin, begin + most)]
            return self._dispatcher.run_name, gone + begin + 1, episodes

    def lines(self, after: int = 0, most: int = 1000, *, run: str | None = None) -> list[LogEntry]:
        """Return the newest log lines in memory with an index above `after`, oldest first."""
        with self._dispatcher.lock:
            return self._run_named(run).logbook.recent(after, most)

    def search(
        self,
        text: str = "",
        *,
        run: str | None = None,
        client: bytes | None = None,
        label: int | None = None,
        since: float | None = None,
        until: float | None = None,
        after: int = 0,
        before: int | None = None,
        most: int = 100,
        newest_first: bool = False,
    ) -> list[LogEntry]:
        """Return log lines of a run that fulfil all conditions, from the state folder or else from memory. Memory holds
        only the newest lines.

        Args:
            text, client, label, since, until, after, before: See `LineFilter`. To read the next page, pass the last
                index of this page as `after` (or as `before`, if `newest_first`).
            run: Name of the run; None is the present run.
            most: Maximum lines, 1 to 10000.
            newest_first: True returns the newest lines first, else the oldest.
        """
        wanted = LineFilter(text=text, client=client, label=label, since=since, until=until, after=after, before=before)
        if not 1 <= most <= MAX_FOUND_LINES:
            raise ParameterError("most", most, f"from 1 to {MAX_FOUND_LINES}")
        with self._dispatcher.lock:
            kept_run = self._run_named(run)
            lines = kept_run.logbook.recent(0, MAX_FOUND_LINES)
        if self._store is not None:
            return list(self._store.search(kept_run.name, wanted, most=most, newest_first=newest_first))
        chosen = filter(wanted.is_met_by, reversed(lines) if newest_first else lines)
        return [entry.escaped for entry in itertools.islice(chosen, most)]
