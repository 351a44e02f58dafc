"""Clients handler: registers clients at HELLO, and counts their reports by UPDATE. Pure.

Intake handler: checks, holds and counts caches and episodes that clients push. Pure.

Draws handler: sends readers the sums of clients' weights, and samples. Pure. The draws handler changes nothing that the
dispatcher's lock guards: it works by pools and limiters, which have locks of their own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from memoire.accounting.account import Account, sums_of
from memoire.accounting.ledger import Ledger
from memoire.accounting.runs import LogEntry, RunState
from memoire.errors import ProtocolError
from memoire.limits import NO_LIMIT
from memoire.replay.limiter import ClusterSurplus
from memoire.server.state import ClientOwners, Credits, ServerState
from memoire.tables.base import DrawsBatches
from memoire.tables.registry import Reply
from memoire.tables.table import OpenTable
from memoire.version import SOFTWARE
from memoire.wire import compression, containers, messages, types
from memoire.wire.frames import NO_CLIENT, MessageHeader
from memoire.wire.receivers import ROW_PART, ReplyLimits, ReplyPage, too_large
from memoire.wire.rows import counts_of

from .accounts import FeedbackHandler

LIMITS_OF_CLIENTS = ("message_bytes", "request_bytes", "tail_bytes", "model_bytes", "model_chunk")
"""Fields of `Limits` that clients have to respect, too; WELCOME contains them."""
PLACE_TIMEOUT = 10.0
"""Seconds of silence after which an actor's place is free, if `limits.max_actors` is set."""


class ClientsHandler:
    """Handler of HELLO and UPDATE: registers clients and counts their reports.

    Args:
        endpoints: Returns the addresses for clients; called at each HELLO, since workers may be added.
        on_lines: Called with new log lines, in order, after they are saved.
    """

    def __init__(
        self,
        state: ServerState,
        credits: Credits,
        owners: ClientOwners,
        feedback: FeedbackHandler,
        *,
        endpoints: Callable[[], messages.NodeEndpoints],
        on_lines: Callable[[list[LogEntry]], None],
    ) -> None:
        self._state, self._credits, self._owners, self._feedback = state, credits, owners, feedback
        self._endpoints, self._on_lines = endpoints, on_lines

    # HELLO

    def hello(self, now: float, header: MessageHeader, body: messages.Hello, _: Any) -> Reply:
        """Register a client, a reader or another peer; return the WELCOME with its first settings."""
        state = self._state
        state.receivers.register_hello(header.client, body)
        table = state.tables.named(body.table, body.role)
        since, granted, is_saved = 0, NO_LIMIT, True
        if body.role == "actor":
            since = self._register(header.client, body, table, now)
            table.limiter.register(header.client, body.inserted, header.sequence)
            granted, _ = self._credits.grant(table, header.client, body.inserted, now)
            is_saved = state.committer.is_saved(state.run.name, header.client)
        elif body.role == "reader" and not state.tables.is_probe(table.number):
            state.learners.record_hello(header.client, body, now, table.name)
        welcome = self._welcome(table, body, now, since, granted)
        names = {"run": state.run.number, "home": state.home, "fingerprint": table.fingerprint, "table": table.number}
        return Reply(welcome, None, names, until_saved=not is_saved)

    def _register(self, client: bytes, body: messages.Hello, table: OpenTable, now: float) -> int:
        """Open or update a client's account; return the account's `since` epoch.

        Raises:
            ProtocolError: (code "busy") `limits.max_actors` other actors are active.
        """
        ledger = self._state.ledger_of(table.number)
        if ledger is not self._state.probes:
            self._check_places(client, now)
        account = ledger.register_guest(client, now, table.number)
        if ledger is self._state.probes:
            return account.since
        self._owners.move_to(account)
        account.host = body.host
        self._state.client_names.record(client, body.name)
        if (account.label, account.table) != (body.label, table.number):
            account.label = body.label
            ledger.move(account, table.number)
            if ledger.is_counted(account):
                self._state.committer.mark_changed(self._state.run.name, account)
        return account.since

    def _check_places(self, client: bytes, now: float) -> None:
        """Refuse an actor if there is no place. A registered actor may send HELLO as often as it likes."""
        most = self._state.limits.max_actors
        if most == 0:
            return
        others = sum(each.client != client for each in self._state.ledger.active(now - PLACE_TIMEOUT))
        if others >= most:
            bound = f"the server accepts at most max_actors={most}"
            raise ProtocolError("busy", f"{others} actors are active, and {bound}. Retry after one has left")

    def _welcome(
        self, table: OpenTable, body: messages.Hello, now: float, since: int, granted_steps: int
    ) -> messages.Welcome:
        state = self._state
        return messages.Welcome(
            schema=table.schema.to_json(),
            parameters=table.parameters.to_wire(),
            parameters_version=table.parameters_version,
            max_step=table.settings.client_capacity,
            storage=table.storage,
            table=table.number,
            table_name=table.name,
            run_name=state.run.name,
            home_name=state.name,
            epoch=state.epoch,
            servers=[state.name],
            endpoints=self._endpoints(),
            credit=self._credits.bytes_by_client(table, now),
            models=state.models.versions(),
            codecs=[codec for codec in body.codecs if codec in compression.codecs()],
            limits=self._stated_limits(table),
            finished=state.run.finished,
            software=SOFTWARE,
            since=since,
            durable=state.committer.is_durable,
            leaving=[state.name] if state.leaving else [],
            granted_steps=granted_steps,
            pages=list(state.pages),
            inference=list(state.inference),
        )

    def _stated_limits(self, table: OpenTable) -> dict[str, int]:
        stated = {name: self._state.limits.get(name) for name in LIMITS_OF_CLIENTS}
        stated["message_bytes"] = table.push_bytes
        return stated if table.room is None else stated | {"episode_entries": table.room.capacity}

    # UPDATE

    def update(self, now: float, header: MessageHeader, body: messages.Update, _: Any) -> Reply:
        """Count a client's report for the run in its header; return the reply with the counts."""
        state = self._state
        table, run = state.tables.numbered(header.table), state.runs.find(header.run)
        if run is None:
            raise state.wrong_run()
        account = self._count(run, header, body, table, now)
        changed: dict[str, Any] = {}
        payload: Any = None
        if run is state.run:
            payload, changed = self._fetch_feedback(table, account, body, now)
            if state.run.finished and (body.finished or body.leaving) and not state.tables.is_probe(table.number):
                state.informed.add(account.client)
            self._report(table, header, body, account)
            account.newest_models = state.models.versions()
            if not account.report.leaving:
                inserted = body.steps - body.passed_steps
                changed["granted_steps"], changed["wait"] = self._credits.grant(table, header.client, inserted, now)
            self._dismiss_guest(table, account)
        is_saved = state.committer.is_saved(run.name, header.client)
        return Reply(self._updated(table, account, body, now, changed), payload, until_saved=not is_saved)

    def _dismiss_guest(self, table: OpenTable, account: Account) -> None:
        """Forget a guest of a draining server: this reply sends the guest to another server, and it has no counts here.
        A drain does not wait for the guest.
        """
        ledger = self._state.ledger_of(table.number)
        if self._state.leaving and account.client in ledger and not ledger.is_counted(account):
            ledger.remove_guest(account.client)

    def _count(
        self, run: RunState, header: MessageHeader, body: messages.Update, table: OpenTable, now: float
    ) -> Account:
        """Update the client's account by its report, mark changes for saving, and return the account."""
        committer, ledger = self._state.committer, self._state.ledger_of(table.number, run)
        if ledger is self._state.probes:
            return self._count_probe(header, body, table, now)
        before = sums_of(ledger.find(header.client))
        account = ledger.report(header.client, header.sequence, body, now, table.number)
        taken = run.logbook.take(header.client, body.lines, account.lines_through, now)
        if taken:
            account.lines_through = taken[-1].line.number
            committer.add_lines(run.name, taken)
            committer.call_after_save(functools.partial(self._on_lines, taken))
        if ledger.is_counted(account) and before != sums_of(account):
            committer.mark_changed(run.name, account)
        return account

    def _count_probe(self, header: MessageHeader, body: messages.Update, table: OpenTable, now: float) -> Account:
        if body.lines or body.ended:
            raise ProtocolError("table", f"table {table.name!r} is for round trips: it keeps no log or episodes")
        return self._state.probes.report(header.client, header.sequence, body, now, table.number)

    def _fetch_feedback(
        self, table: OpenTable, account: Account, body: messages.Update, now: float
    ) -> tuple[Any, dict[str, Any]]:
        """Return the container of TD errors for a client (or None), and the fields of the reply that number it."""
        # Numbers of pieces restart with the server.
        through = body.feedback_through if body.epoch == self._state.epoch else 0
        piece = self._feedback.fetch(table, account, through, now)
        if account.report.leaving:
            self._feedback.give_up(self._state.run, account.client)
        if piece is None:
            return None, {}
        fields = {"feedback_through": piece.number, "feedback_age": piece.age, "feedback_waiting": piece.waiting}
        return piece.payload, fields

    def _report(self, table: OpenTable, header: MessageHeader, body: messages.Update, account: Account) -> None:
        """Pass a client's report to the table's pool and rate limiter."""
        if not self._state.ledger_of(table.number).is_counted(account):
            return
        client, number = header.client, header.sequence
        if table.sums is None:
            table.pool.record_contact(client)
        else:
            table.sums.sums(client, number, body.total_weight, body.positives, body.minimum)
        table.limiter.report_inserts(client, body.steps - body.passed_steps, number)
        if account.report.leaving:
            table.pool.unregister(client)
            table.limiter.unregister(client)

    def _updated(
        self, table: OpenTable, account: Account, body: messages.Update, now: float, changed: dict[str, Any]
    ) -> messages.Updated:
        state = self._state
        is_older = body.parameters_version != table.parameters_version
        return messages.Updated(
            epoch=state.epoch,
            durable=state.committer.is_durable,
            episodes=account.report.episodes,
            steps=account.report.steps,
            lines_through=account.lines_through,
            ended_through=account.ended_through,
            caches=account.accepted_caches,
            received_bytes=account.received_bytes,
            rejected=dict(account.rejected),
            lost=account.overtaken_caches,
            lost_bytes=account.overtaken_bytes,
            credit=self._credits.bytes_by_client(table, now),
            parameters_version=table.parameters_version,
            parameters=table.parameters.to_wire() if is_older else None,
            models=state.models.versions(),
            run_name=state.run.name,
            finished=state.run.finished,
            time=max(0.0, now),
            leaving=state.leaving,
            **changed,
        )

    # The end of a run

    def unconfirmed_clients(self, within: float, now: float) -> int:
        """Return the number of clients, heard within `within` seconds, that have not confirmed the end of the run."""
        state = self._state
        if not state.run.finished:
            return 0
        since = now - within
        return sum(
            account.last_seen >= since and not account.report.leaving and account.client not in state.informed
            for account in (*state.ledger, *state.ledger.guests)
        )


class IntakeHandler:
    """Handler of pushed caches and episodes, in three steps; the first step takes longest and needs no lock.

    check ──▶ accept            ProtocolError from either of them ──▶ reject
    """

    def __init__(self, state: ServerState) -> None:
        self._state = state

    def check(self, header: MessageHeader, body: messages.PushedBody, payload: Any) -> tuple[OpenTable, Any]:
        """Return the table of a push and the checked payload, ready for the table's pool. Needs no lock.

        Raises:
            ProtocolError: the push is refused.
        """
        if header.client == NO_CLIENT:
            raise ProtocolError("client", "a pushed message needs a client id")
        self._run_of(header)
        table = self._state.tables.numbered(header.table)
        table.check_fingerprint(header.fingerprint)
        if table.pushes is None:
            raise ProtocolError("table", table.kind.no_pushes)
        return table, table.pushes.check(body, payload, limits=self._state.limits, checksum=header.payload_checksum)

    def accept(self, now: float, header: MessageHeader, body: messages.PushedBody, table: OpenTable, held: Any) -> None:
        """Hold a checked push, and count it for its client.

        Raises:
            ProtocolError: another run has begun since the check, the pool refuses the push, or too many accounts are
                opened at once.
        """
        run = self._run_of(header)
        assert table.pushes is not None
        table.pushes.add(header.client, header.sequence, held)
        ledger = self._state.ledger_of(table.number, run)
        account = self._count(run, ledger, now, header, body, table.number)
        if account is not None:
            ledger.count_accepted_cache(account, header.payload_bytes, held.samples)

    def reject(self, now: float, header: MessageHeader, body: messages.PushedBody, code: str) -> None:
        """Count a refused push for its client, in the push's run, if the server knows that run.

        Raises:
            ProtocolError: (code "busy") too many accounts are opened at once.
        """
        run = self._state.runs.find(header.run)
        if header.client == NO_CLIENT or run is None:
            return
        ledger = self._state.ledger_of(header.table, run)
        account = self._count(run, ledger, now, header, body)
        if account is not None:
            ledger.count_rejected_cache(account, code)

    def _run_of(self, header: MessageHeader) -> RunState:
        """Return the present run. Raises ProtocolError if the header names another run."""
        run = self._state.runs.current
        if header.run and header.run != run.number:
            raise ProtocolError("run", f"the push belongs to another run; this server counts run {run.name!r}")
        return run

    def _count(
        self,
        run: RunState,
        ledger: Ledger,
        now: float,
        header: MessageHeader,
        body: messages.PushedBody,
        table: int = 0,
    ) -> Account | None:
        account = ledger.count_arrived_cache(
            header.client, header.payload_bytes, now, body.number, body.pushed_bytes, body.since, table
        )
        if account is not None and ledger is run.ledger:
            self._state.committer.mark_changed(run.name, account)
        return account


class DrawsHandler:
    """Handler of readers' requests for sums and samples.

    Args:
        can_undo: Returns True if a reader (by its id) can undo a compression. Takes the lock itself.
    """

    def __init__(self, state: ServerState, can_undo: Callable[[bytes, str], bool]) -> None:
        self._state, self._can_undo = state, can_undo

    def sums(self, _: float, header: MessageHeader, body: messages.Sums, payload: Any) -> Reply:
        """Reserve samples for a reader; return the sums of each client's weights."""
        table, pool = self._table_and_pool(header)
        return Reply(messages.Summed(**self._facts(table, pool, header.client, body, body.after)))

    def draw(self, now: float, header: MessageHeader, body: messages.Draw, _: Any) -> Reply:
        """Draw the counts of samples that a reader requests of each client; return the samples and the new sums."""
        (table, pool), reader = self._table_and_pool(header), header.client
        parameters, counts = table.parameters.fingerprint, counts_of(body.counts)
        self._check_rows(pool, reader, body)
        page = ReplyPage(self._receiver(reader), types.DRAWN, reader)
        codec = self._compression(table, reader, body.packed)
        payload = pool.draw_counts(reader, counts, now=now, compression=codec, page=page)
        if payload is not None:
            table.limiter.record_draw(containers.samples_of(payload), has_band=body.band is not None)
        facts = self._facts(table, pool, reader, body, b"" if body.in_pages else None)
        return Reply(messages.Drawn(**facts | {"parameters": parameters}), payload)

    def _facts(
        self,
        table: OpenTable,
        pool: DrawsBatches,
        reader: bytes,
        body: messages.Sums | messages.Draw,
        after: bytes | None,
    ) -> dict[str, Any]:
        """Return the fields of SUMMED and DRAWN for a reader; `after` is as of `_page`."""
        rows, is_whole = self._page(_reserve(pool, reader, body), reader, after)
        return {
            "epoch": self._state.epoch,
            "clients": rows.tobytes(),
            "finished": self._state.run.finished,
            "is_whole": is_whole,
            "standing": _exchange_rates(table, reader, body),
            "parameters": table.parameters.fingerprint,
        }

    def _table_and_pool(self, header: MessageHeader) -> tuple[OpenTable, DrawsBatches]:
        """Return a request's table and its pool. Raises ProtocolError (code "table") if the table draws no batches."""
        table = self._state.table(header)
        return table, table.require_for(DrawsBatches, header.type.name)

    def _check_rows(self, pool: DrawsBatches, reader: bytes, body: messages.Draw) -> None:
        """Refuse a draw whose reply would have more rows of clients than its reader accepts. No sample is taken.

        Raises:
            ProtocolError: (code "too_large") the rows exceed the reader's limit.
        """
        if not body.in_pages:
            size, most = _reserve(pool, reader, body).nbytes, int(self._receiver(reader).tail_bytes * ROW_PART)
            if size > most:
                raise too_large("DRAWN, whose rows", size, most, "tail_bytes", reader)

    def _page(self, rows: NDArray[np.void], reader: bytes, after: bytes | None) -> tuple[NDArray[np.void], bool]:
        """Return as many rows as fit into half of a tail, and True if no further rows follow.

        Args:
            after: Client of the last row of the page before; None returns all rows.
        """
        room = max(1, self._receiver(reader).tail_bytes // 2 // rows.itemsize)
        if after is None or (not after and len(rows) <= room):
            return rows, True
        names = np.frombuffer(rows["client"].tobytes(), "S16")
        order = np.argsort(names, kind="stable")
        begin = int(np.searchsorted(names[order], np.bytes_(after), "right")) if after else 0
        return rows[order[begin : begin + room]], begin + room >= len(rows)

    def _receiver(self, reader: bytes) -> ReplyLimits:
        return self._state.receivers.limits_of(reader)

    def _compression(self, table: OpenTable, reader: bytes, is_chosen: bool) -> str:
        """Return the compression of samples for a reader: lz4 if the parameters or the reader choose it and both
        processes have it, else none. zlib is for actors: packing each batch by zlib would dominate the server's work.
        """
        wanted = table.parameters.compression
        if not (wanted == "lz4" or (wanted == "auto" and is_chosen)) or "lz4" not in compression.codecs():
            return "none"
        return "lz4" if self._can_undo(reader, "lz4") else "none"


def _reserve(pool: DrawsBatches, reader: bytes, body: messages.Sums | messages.Draw) -> NDArray[np.void]:
    return pool.reserve(reader, body.reserve, body.elsewhere, (body.part, body.of), body.wanted)


def _exchange_rates(table: OpenTable, reader: bytes, body: messages.Sums | messages.Draw) -> messages.ServerRate | None:
    """Pass a reader's cluster-wide rate to the table's limiter; return the limiter's rate of this server."""
    table.limiter.report_wait(reader, body.wanted)
    if body.band is not None:
        table.limiter.apply_cluster(ClusterSurplus(*msgspec.structs.astuple(body.band)))
    rate = table.limiter.server_surplus()
    return None if rate is None else messages.ServerRate(*rate)
