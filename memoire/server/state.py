"""State that the handlers of one server share: its name, data and counts. Pure.

Credits: bytes and entries that each client may have in flight, as its part of the total. Pure.

Learners: the readers of a server, and the figures that they report. Pure.

Client owners: the key that each client id belongs to; another key cannot use the id. Pure.

Recovery: the run, models and parameters of the last start, unless the caller passes other parameters now. Pure.

Committer: changes to save, and replies that wait until the changes are on disk. Without a state folder nothing is saved
and nothing waits. Pure: the store has its own thread, and the dispatcher's lock is held.

        handlers     touch(account)  add_lines(...)           changes
                     after(ticket)   hold(reply)              tickets and replies that wait for the changes
        the store    collect() ─────▶ one group, saved in one transaction ─────▶ saved(), then the group's tickets
"""

from __future__ import annotations

import functools
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import replace
from sys import getsizeof
from typing import Any, Final

import msgspec

from memoire.accounting.account import Account, SumsOnlyStore
from memoire.accounting.ledger import MAX_GUESTS, Ledger, account_bytes, line_bytes
from memoire.accounting.merge import LearnerStats
from memoire.accounting.runs import Runs, RunState, SavedGroup, StateStore, Ticket, UnsavedChanges
from memoire.errors import ParameterError, ProtocolError, SnapshotMismatch
from memoire.limits import HELD_BYTES, MODEL_BYTES, NO_LIMIT, Limits
from memoire.models.model import ModelStore
from memoire.replay.parameters import Parameters
from memoire.security.roles import IdOwners, TokenBuckets, check_owner
from memoire.tables.registry import Reply
from memoire.tables.table import OpenTable, Tables
from memoire.wire import messages, types
from memoire.wire.byte_budget import ByteBudget, ByteHolder
from memoire.wire.frames import NO_CLIENT, MessageHeader, name_hash
from memoire.wire.messages import Hello
from memoire.wire.receivers import Receivers, ReplyPage

MAX_LEARNERS = 64
"""Maximum learners in memory. Beyond, the learner silent longest is not shown until its next HELLO, and its replies are
not compressed.
"""
SILENCE_TIMEOUT = 60.0
"""Seconds of silence after which a learner is no longer shown; a learner sends HELLO every two seconds."""


class Learners:
    """Readers that sent HELLO recently. Not thread-safe: the owner locks."""

    def __init__(self) -> None:
        self._learners: OrderedDict[bytes, LearnerStats] = OrderedDict()  # learners in order of their last HELLO
        self._codecs: dict[bytes, frozenset[str]] = {}  # compressions that each peer can undo

    def record_hello(self, learner: bytes, hello: Hello, now: float, table: str = "") -> None:
        """Record the HELLO of a reader.

        Raises:
            ProtocolError: a figure is not finite.
        """
        for name, value in (*hello.scalars.items(), *hello.figures.items()):
            if not math.isfinite(value):
                raise ProtocolError("value", f"scalar {name!r} is {value}; only finite numbers are kept")
        known = self._learners.pop(learner, None)
        self._learners[learner] = LearnerStats(
            learner=learner.hex(),
            table=table,
            name=hello.name,
            host=hello.host,
            pid=hello.pid,
            software=hello.software,
            first_seen=now if known is None else known.first_seen,
            last_seen=now,
            scalars=dict(hello.scalars),
            figures=dict(hello.figures),
        )
        self._codecs[learner] = frozenset(hello.codecs)
        while len(self._learners) > MAX_LEARNERS:
            gone, _ = self._learners.popitem(last=False)
            del self._codecs[gone]

    def supports_compression(self, learner: bytes, codec: str) -> bool:
        """Return True if a known learner reported that it can undo a compression."""
        return codec in self._codecs.get(learner, ())

    def active_learners(self, now: float) -> tuple[LearnerStats, ...]:
        """Return the learners heard within `SILENCE_TIMEOUT` seconds, last heard last."""
        return tuple(each for each in self._learners.values() if each.last_seen >= now - SILENCE_TIMEOUT)


class HeldReply:
    """Reply that waits for the disk: it is sent, or replaced by a refusal, once."""

    def __init__(self, reply: Reply, send: Callable[[Reply], None]) -> None:
        self._reply, self._send = reply, send
        self._is_sent = False

    def __call__(self, refusal: Reply | None = None) -> None:
        """Send the reply, whose changes are on disk; or send the refusal, which says why nothing can be saved."""
        if not self._is_sent:
            self._is_sent = True
            self._send(refusal or self._reply)


class Committer(UnsavedChanges):
    """Changes for a server's store to save, and the replies that wait for the save.

    Args:
        store: The state folder; None saves nothing and holds no reply.
    """

    def __init__(self, store: StateStore | None) -> None:
        super().__init__(is_durable=store is not None)
        self._store = store
        self._waits: list[Ticket] = []  # tickets of the group that is being saved

    def call_after_save(self, ticket: Ticket) -> None:
        """Call the ticket after the save of all changes so far; at once if there is no store."""
        if self._store is None:
            ticket()
        else:
            super().call_after_save(ticket)
            self._store.wake()

    def check_room(self, body: messages.Body) -> None:
        """Refuse a request whose reply would wait for a failing disk, before the request changes anything.

        Raises:
            ProtocolError: (code "disk") the text says what is wrong with the disk, where, and what to do.
        """
        if self._store is not None and not self._store.is_healthy and body.is_saved_first:
            raise ProtocolError("disk", self._store.problem)

    def hold_until_saved(self, header: MessageHeader, reply: Reply, send: Callable[[Reply], None]) -> Reply | None:
        """Return the reply to send now; or return None, and call `send` with the reply after the save.

        While the disk fails, return a refusal that says why; the client retries.
        """
        if self._store is None or not reply.until_saved:
            return reply
        if not self._store.is_healthy:
            return self._refusal()
        held = HeldReply(reply, send)
        self.wait((header.client, header.sequence), held)
        self._store.wake()
        return None

    def refusals(self) -> list[Ticket]:
        """Return tickets that refuse each waiting reply, because the disk begins to fail."""
        refusal, waiting = self._refusal(), (*self._waits, *self.tickets)
        return [functools.partial(held, refusal) for held in waiting if isinstance(held, HeldReply)]

    def _refusal(self) -> Reply:
        assert self._store is not None
        return Reply(messages.Refusal(code="disk", text=self._store.problem[:1000]))

    # Calls of the store

    def collect(self, runs: Runs, tables: Iterable[OpenTable] = ()) -> SavedGroup | None:
        """Return the next group to save; the caller calls `mark_saved` after the save.

        Tickets are collected before tables' rows: a reply acknowledges only rows of this group or an earlier group.
        """
        for run in runs:
            run.kept.mark_saving()
        group = self.take()
        taken = {table.name: table.rows.take_changes() for table in tables if table.rows is not None}
        if changed := {name: rows for name, rows in taken.items() if rows}:
            group = group or SavedGroup()
            group.rows = changed
        self._waits = [] if group is None else group.tickets
        return group

    def mark_saved(self, runs: Runs) -> None:
        """Record that the group collected last is on disk."""
        self._waits = []
        self.confirm_saved()
        for run in runs:
            run.kept.mark_saved()


REPLY_PART = 4
"""Reciprocal of the fraction of `limits.message_bytes` that one reply fills; further data goes into the next reply."""


class ClientNames:
    """Names that people gave to clients, also to ended clients, whose log lines remain. Kept in memory only: clients
    send their names again to a restarted server.
    """

    def __init__(self, room: ByteHolder) -> None:
        self._room = room
        self._names: OrderedDict[bytes, str] = OrderedDict()  # names in order of the last report

    def record(self, client: bytes, name: str) -> None:
        """Record a client's name; "" changes nothing."""
        if name:
            self._room.add(getsizeof(name) - getsizeof(self._names.get(client)))
            self._names[client] = name
            self._names.move_to_end(client)
            while len(self._names) > MAX_GUESTS:
                self._room.add(-getsizeof(self._names.popitem(last=False)[1]))

    def name_of(self, client: bytes) -> str:
        """Return the name of a client; "" if it is unknown or forgotten."""
        return self._names.get(client, "")


class ServerState:
    """State that the message handlers of a server read and change; handlers of a kind of table get it as a
    `HandlerContext`. The dispatcher's lock guards it, except for pools and limiters, which have their own locks.

    Args:
        tables: The server's tables. Each has its own schema, parameters and pool.
        run: Name of the run to count.
        committer: Collects all changes that have to be saved.
        past: Store with the data of earlier processes of this server.
        now: Seconds since 1970.
        epoch: Number of this start of the server, greater than those of all earlier starts.
        budget: Budget of bytes held for peers; None makes one of `limits.held_bytes`.
    """

    def __init__(
        self,
        *,
        name: str,
        tables: Tables,
        limits: Limits,
        run: str,
        committer: Committer,
        past: StateStore | None = None,
        now: float,
        epoch: int,
        budget: ByteBudget | None = None,
    ) -> None:
        budget = budget or ByteBudget(limits.held_bytes or HELD_BYTES)
        self.requests = budget.add_holder("requests", own=limits.message_bytes)
        """Bytes of requests while they are answered."""
        self.pushes = budget.add_holder("pushes", own=limits.message_bytes)
        """Bytes of caches and episodes while they are checked and unpacked."""
        self.replies = budget.add_holder("replies on their way", own=limits.message_bytes)
        """Bytes of replies that wait for room in their connections."""
        self.reports = budget.add_holder("clients", own=account_bytes(limits))
        """Bytes of accounts and of clients' reports."""
        lines = budget.add_holder("log lines", own=line_bytes(limits))
        self.name, self.home, self.epoch = name, name_hash(name), epoch
        self.tables, self.committer = tables, committer
        self.limits = replace(limits, model_bytes=limits.model_bytes or MODEL_BYTES)
        kept = self.limits.model_bytes
        self.models = ModelStore(kept)
        budget.add_holder("models", own=kept, measure=lambda: self.models.bytes + self.models.numbered_bytes)
        self.uploads = budget.add_holder("uploads of models", own=kept)
        self.td_errors = budget.add_holder("TD errors that wait")
        """Bytes of TD errors that wait for the clients that own the entries."""
        self.learners = Learners()
        self.receivers = Receivers()
        """Limits of replies that each client accepts."""
        self.client_names = ClientNames(self.reports)
        self.informed: set[bytes] = set()
        """Clients that have confirmed the end of the run."""
        self.leaving = False
        """True if the server is being drained and sends its clients to other servers."""
        self.pages: tuple[str, ...] = ()
        """Address of the server's pages, for WELCOME; at most one."""
        self.inference: tuple[str, ...] = ()
        """Addresses of inference nodes that act for the server's clients."""
        self.newcomers = TokenBuckets(limits.new_clients, limits.tuning.new_clients_rate)
        """Rate limit of new accounts, by the owner of their key."""
        facts: dict[str, Any] = {"epoch": epoch, "room": self.reports}
        opens = self.newcomers.take
        self.runs = Runs(run, now, past, home=self.home, may_open=opens, forget=self._forget, line_room=lines, **facts)
        newcomers = TokenBuckets(limits.new_clients, limits.tuning.new_clients_rate)
        self.probes = Ledger(store=SumsOnlyStore(), may_open=newcomers.take, **facts)
        """Accounts of clients that only test a round trip: not in a run's totals or in a list, never saved."""

    @property
    def finished(self) -> bool:
        """True if the present run is over."""
        return self.run.finished

    def table(self, header: MessageHeader) -> OpenTable:
        """Return the table that a header names. Raises ProtocolError if it is unknown or its schema differs."""
        table = self.tables.numbered(header.table)
        if header.fingerprint:
            table.check_fingerprint(header.fingerprint)
        return table

    def empty_page(self, client: bytes, kind: types.Type) -> ReplyPage:
        """Return an empty reply page of this type for a client, which may fill a part of `limits.message_bytes`."""
        most = self.limits.message_bytes // REPLY_PART
        return ReplyPage(self.receivers.limits_of(client), kind, client, payload_bytes=most)

    @property
    def run(self) -> RunState:
        """The run that is counted now."""
        return self.runs.current

    @property
    def ledger(self) -> Ledger:
        """Accounts of the present run."""
        return self.runs.current.ledger

    def ledger_of(self, table: int, run: RunState | None = None) -> Ledger:
        """Return the ledger for clients of a table: `probes`, or the ledger of a run (None: the present run)."""
        return self.probes if self.tables.is_probe(table) else (run or self.run).ledger

    def wrong_run(self) -> ProtocolError:
        """Return the refusal of a message that names another run."""
        return ProtocolError("run", f"this server counts run {self.run.name!r}; send HELLO again")

    def report_models(self) -> None:
        """Pass the newest models' versions to the tables, which compute the age of their entries' models."""
        versions = self.models.versions()
        for table in self.tables:
            table.pool.saw_model(table.parameters.newest_model(versions))

    def _forget(self, client: bytes) -> None:
        if client not in self.ledger:
            self.informed.discard(client)
            for table in self.tables:
                table.limiter.unregister(client)


STOCK_PART = 4
"""Reciprocal of the fraction of its credit that a client may hold undrawn while learners draw."""
UNDRAWN = "waits until more is drawn: enough of this client's samples are at its server, and none of them was drawn yet"
"""Reason why a client may record no more entries if learners draw less than actors push."""
COUNT_INTERVAL = 1.0
"""Seconds between two counts of silent clients."""


class Credits:
    """Shares of the byte limits, for each client that may push: neither gone nor silent for `limits.client_timeout`."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._limit = state.limits.credit
        self._silent: Counter[int] = Counter()  # silent clients of each table
        self._counted_at = 0.0
        self._counted_ledger: Ledger | None = None  # ledger of the run that was counted

    def limit_bytes(self, credit: int | None) -> None:
        """Set the maximum bytes that a client may have in flight; None keeps the present maximum."""
        self._limit = self._limit if credit is None else credit

    def bytes_by_client(self, table: OpenTable, now: float) -> int:
        """Return the bytes that each client of a table may have in flight. The result is the least of the client's
        limit, its share of the table's byte limit, and its share of all bytes in flight.
        """
        sharers = self._sharers(now)
        together = self._state.limits.on_way_bytes // max(1, sum(sharers.values()))
        return max(1, min(self._limit, together, table.pool.byte_limit // max(1, sharers[table.number])))

    def grant(self, table: OpenTable, client: bytes, inserted: int, now: float) -> tuple[int, str]:
        """Return how many entries a client may have recorded before its next request, and the reason for a limit.

        Args:
            inserted: Entries that the client has recorded so far.
        """
        granted, why = NO_LIMIT, ""
        if table.limiter.is_active:
            granted, why = table.limiter.grant(client, self._sharers(now)[table.number])
        wanted = self._wanted(table, client, now)
        if wanted is None or inserted + wanted >= granted:
            return granted, why
        return inserted + wanted, "" if wanted else UNDRAWN

    def _wanted(self, table: OpenTable, client: bytes, now: float) -> int | None:
        """Return the entries whose samples learners want of a client; None without a limit."""
        ratio = table.parameters.samples_per_insert
        if table.sums is None or not ratio:
            return None
        room = table.sums.room(client, self.bytes_by_client(table, now) // STOCK_PART)
        return None if room is None else min(math.ceil(room / ratio), NO_LIMIT)

    def _sharers(self, now: float) -> Counter[int]:
        """Return the number of pushing clients of each table; silent clients are counted once a second."""
        ledger = self._state.ledger
        is_fresh = self._counted_at <= now < self._counted_at + COUNT_INTERVAL
        if ledger is not self._counted_ledger or not is_fresh:
            self._counted_ledger, self._counted_at = ledger, now
            since = now - self._state.limits.client_timeout
            accounts = (*ledger, *ledger.guests)
            silent = (each.table for each in accounts if each.last_seen < since and not each.report.leaving)
            self._silent = Counter(silent)
        return ledger.present - self._silent if self._silent else ledger.present


class ClientOwners:
    """Owners of client ids: an account stores its own, and ids without an account are stored here."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._owners = IdOwners()

    def check(self, client: bytes, principal: str, now: float) -> None:
        """Bind a client id to the key that uses it first, for as long as the server knows the id.

        Args:
            principal: Role and name of the key that authenticated the message; "" if there was no key.

        Raises:
            ProtocolError: the id belongs to another key (code "owner"), or too many ids are known (code "busy").
        """
        if not principal or client == NO_CLIENT:
            return
        account = self._state.ledger.find(client)
        if account is None:
            self._owners.check(client, principal, now)
        elif account.owner:
            check_owner(client, account.owner, principal)
        else:
            account.owner = principal
            self._state.committer.mark_changed(self._state.run.name, account)

    def move_to(self, account: Account) -> None:
        """Move a client's owner into the client's new account."""
        account.owner = account.owner or self._owners.pop(account.client)


DEFAULT_RUN = "default"
"""Name of the run of a server that got no name for its run."""


_LIVES: Final = "lives"


def former_starts(past: StateStore) -> int:
    """Return the number of former starts of a server in this folder."""
    lives = past.settings().get(_LIVES, "0")
    return int(lives) if lives.isdecimal() else 0


class _FormerStart(msgspec.Struct, frozen=True):
    """Table's parameters in the state folder: as passed to the last start, and at its end."""

    given: dict[str, Any]
    now: dict[str, Any]
    version: int
    making: dict[str, Any] = {}
    """Further settings that shaped stored samples: `OpenTable.making`."""


def run_to_count(past: StateStore | None, name: str | None, committer: Committer) -> str:
    """Return the name of the run to count: the last run, unless the caller passes another name than last time."""
    if past is None:
        return DEFAULT_RUN if name is None else name
    former = next((facts.name for facts in past.runs() if not facts.ended), None)
    if name is None:
        return former or DEFAULT_RUN
    if former is not None and past.settings().get("run") == name:
        return former
    committer.add_setting("run", name)
    return name


def recover(state: ServerState, past: StateStore) -> None:
    """Restore models and parameters of the last start; mark all changes of this start for saving.

    Raises:
        ParameterError: the saved parameters of a table are malformed or do not fit the table.
    """
    for model in past.models(state.run.name):
        state.models.put(model)
    state.models.skip_versions(past.versions())  # clients may hold a model of another run: versions never go back
    settings = past.settings()
    state.committer.add_setting(_LIVES, str(former_starts(past) + 1))
    for table in state.tables:
        _recover_parameters(table, settings.get(table.key))
        save_parameters(table, state.committer)
    state.report_models()
    for facts in state.runs.facts():
        state.committer.add_run(facts)


def _recover_parameters(table: OpenTable, saved: str | None) -> None:
    initial = table.settings.parameters.to_wire()
    start = _FormerStart(initial, initial, 1) if saved is None else _parse_start(table.key, saved)
    former = [Parameters.from_wire(fields) for fields in (start.given, start.now)]  # refuses unknown settings
    if former[0] == table.settings.parameters:
        table.take_parameters(former[1], start.version)
    else:
        table.take_parameters(table.parameters, start.version + 1)


def save_parameters(table: OpenTable, committer: Committer) -> None:
    """Save a table's present parameters, and the parameters that it was created with."""
    if committer.is_durable:
        initial = table.settings.parameters.to_wire()
        start = _FormerStart(initial, table.parameters.to_wire(), table.parameters_version, table.content_settings)
        committer.add_setting(table.key, msgspec.json.encode(start).decode())


def check_content_settings(table: OpenTable, past: StateStore, folder: str) -> None:
    """Raise SnapshotMismatch if the stored samples of a table were made with other settings than the table's.

    The error contains the two values.
    """
    saved = past.settings().get(table.key)
    making = {} if saved is None else _parse_start(table.key, saved).making
    for name, value in making.items():
        if value != (present := table.content_settings.get(name)):
            problem = f"holds table {table.name!r} made with {name}={value!r}, but this server has {name}={present!r}"
            advice = f"Start it with {name}={value!r}, or give the server another state folder."
            raise SnapshotMismatch(folder, problem, advice)


def _parse_start(key: str, saved: str) -> _FormerStart:
    try:
        return msgspec.json.decode(saved, type=_FormerStart)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ParameterError(key, saved[:80], f"parameters that a server has saved for a table: {error}") from error
