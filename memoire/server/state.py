"""What the handlers of one server share: what it is called, keeps and counts. Pure.

How much a client may have on the way, in bytes and in entries: its part of what all together may have. Pure.

Who learns from a server, and what they say of themselves. Pure.

Whose key each client id belongs to: nobody else may speak for it. Pure.

What a server finds again of its former life: the run, models, and parameters unless others are given now. Pure.

What a server has to save, and what waits until it is on disk. Without a state folder nothing is kept and nothing waits.
Pure: the store's thread is elsewhere, and the dispatcher's lock is held.

    handlers     touch(account)  add_lines(...)           what has changed
                 after(ticket)   hold(reply)              what waits for it
    the store    collect() ─────▶ one group, saved in one transaction ─────▶ saved(), and the group's tickets may go
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
from memoire.accounting.runs import Run, Runs, SavedGroup, StateStore, Ticket, UnsavedChanges
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
from memoire.wire.receivers import Page, Receivers

MAX_LEARNERS = 64
"""Learners that are known. Beyond, the one heard least recently is not shown until its next HELLO, and its replies are
not compressed.
"""
SILENCE_TIMEOUT = 60.0
"""Seconds after which a learner is no longer shown; it says HELLO every two."""


class Learners:
    """The readers that said HELLO lately. Not thread-safe: the owner locks."""

    def __init__(self) -> None:
        self._learners: OrderedDict[bytes, LearnerStats] = OrderedDict()  # who was heard last is last
        self._codecs: dict[bytes, frozenset[str]] = {}  # compressions that each of them can undo

    def met(self, learner: bytes, said: Hello, now: float, table: str = "") -> None:
        """A reader of this table said HELLO.

        Raises:
            ProtocolError: a figure is not finite.
        """
        for name, value in (*said.scalars.items(), *said.figures.items()):
            if not math.isfinite(value):
                raise ProtocolError("value", f"scalar {name!r} is {value}; only finite numbers are kept")
        known = self._learners.pop(learner, None)
        self._learners[learner] = LearnerStats(
            learner=learner.hex(),
            table=table,
            name=said.name,
            host=said.host,
            pid=said.pid,
            software=said.software,
            first_seen=now if known is None else known.first_seen,
            last_seen=now,
            scalars=dict(said.scalars),
            figures=dict(said.figures),
        )
        self._codecs[learner] = frozenset(said.codecs)
        while len(self._learners) > MAX_LEARNERS:
            gone, _ = self._learners.popitem(last=False)
            del self._codecs[gone]

    def has(self, learner: bytes, codec: str) -> bool:
        """Whether that learner said that it can undo a compression; not of one that is not known (any more)."""
        return codec in self._codecs.get(learner, ())

    def now(self, now: float) -> tuple[LearnerStats, ...]:
        """Those that were heard within `SILENCE_TIMEOUT` seconds, the newest word last."""
        return tuple(each for each in self._learners.values() if each.last_seen >= now - SILENCE_TIMEOUT)


class HeldReply:
    """A reply that waits for the disk: it is sent as it is, or refused, once."""

    def __init__(self, reply: Reply, send: Callable[[Reply], None]) -> None:
        self._reply, self._send = reply, send
        self._is_sent = False

    def __call__(self, refusal: Reply | None = None) -> None:
        """The changes that the reply acknowledges are on disk; or nothing can be saved now, and this says why."""
        if not self._is_sent:
            self._is_sent = True
            self._send(refusal or self._reply)


class Committer(UnsavedChanges):
    """What is to be saved by a server's store, and the replies that wait for it.

    Args:
        store: The state folder; None saves nothing, and every reply goes at once.
    """

    def __init__(self, store: StateStore | None) -> None:
        super().__init__(is_durable=store is not None)
        self._store = store
        self._waits: list[Ticket] = []  # of the group that is being saved

    def after(self, ticket: Ticket) -> None:
        """Call this when everything up to now is saved: at once if nothing is ever saved."""
        if self._store is None:
            ticket()
        else:
            super().after(ticket)
            self._store.wake()

    def check_room(self, body: messages.Body) -> None:
        """Refuse a request whose reply would wait for a disk that fails, before it changes anything.

        Raises:
            ProtocolError: (code "disk") it says what is wrong with the disk, where, and what to do.
        """
        if self._store is not None and not self._store.is_healthy and body.is_saved_first:
            raise ProtocolError("disk", self._store.trouble)

    def hold(self, header: MessageHeader, reply: Reply, send: Callable[[Reply], None]) -> Reply | None:
        """The reply to send now; None if it waits until the disk has what it says, and `send` is called then.

        While the disk fails, the reply says why nothing is acknowledged, and the client asks again.
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
        """The disk begins to fail: tickets that refuse each reply that waits for it."""
        refusal, waiting = self._refusal(), (*self._waits, *self.tickets)
        return [functools.partial(held, refusal) for held in waiting if isinstance(held, HeldReply)]

    def _refusal(self) -> Reply:
        assert self._store is not None
        return Reply(messages.Refused(code="disk", text=self._store.trouble[:1000]))

    # What the store asks

    def collect(self, runs: Runs, tables: Iterable[OpenTable] = ()) -> SavedGroup | None:
        """What is to be saved next; `saved` is called when it is.

        Tickets are taken before tables' rows: what a reply tells of these had happened by then.
        """
        for run in runs:
            run.kept.taken()
        group = self.take()
        taken = {table.name: table.rows.take_changes() for table in tables if table.rows is not None}
        if changed := {name: rows for name, rows in taken.items() if rows}:
            group = group or SavedGroup()
            group.rows = changed
        self._waits = [] if group is None else group.tickets
        return group

    def saved(self, runs: Runs) -> None:
        """The group that was collected last is on disk."""
        self._waits = []
        self.settle()
        for run in runs:
            run.kept.saved()


REPLY_PART = 4
"""A reply takes about this part of the bytes that a message may have; what is left is for the next one."""


class ClientNames:
    """The names that people gave to clients, also to those that have ended: log lines outlive them. Only in memory:
    clients say their names again to a server that was restarted.
    """

    def __init__(self, room: ByteHolder) -> None:
        self._room = room
        self._names: OrderedDict[bytes, str] = OrderedDict()  # who said it last is last

    def note(self, client: bytes, name: str) -> None:
        """A client says its name; "" says nothing."""
        if name:
            self._room.add(getsizeof(name) - getsizeof(self._names.get(client)))
            self._names[client] = name
            self._names.move_to_end(client)
            while len(self._names) > MAX_GUESTS:
                self._room.add(-getsizeof(self._names.popitem(last=False)[1]))

    def of(self, client: bytes) -> str:
        """The name of a client; "" if it has none, or it is forgotten."""
        return self._names.get(client, "")


class ServerState:
    """Everything that the handlers of a server's messages read and change; those of one kind of table see it as a
    `Desk`. The dispatcher's lock guards it, except for pools and limiters, which have their own locks.

    Args:
        tables: The server's tables. Each has its own schema, parameters and pool.
        run: Name of the run that is counted.
        committer: Told of everything that has to be saved.
        past: What earlier processes of this server saved.
        now: Seconds since 1970.
        epoch: Number of this start of the server, greater than those of all earlier starts.
        budget: Bytes that the server holds for its peers; None makes one of `limits.held_bytes`.
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
        self.requests = budget.holder("requests", own=limits.message_bytes)
        """What a request takes while it is answered."""
        self.pushes = budget.holder("pushes", own=limits.message_bytes)
        """What a cache or episode takes while it is checked and unpacked."""
        self.replies = budget.holder("replies on their way", own=limits.message_bytes)
        """What waits for room in the connections of those who asked."""
        self.reports = budget.holder("clients", own=account_bytes(limits))
        """Accounts, and what clients say of themselves."""
        lines = budget.holder("log lines", own=line_bytes(limits))
        self.name, self.home, self.epoch = name, name_hash(name), epoch
        self.tables, self.committer = tables, committer
        self.limits = replace(limits, model_bytes=limits.model_bytes or MODEL_BYTES)
        kept = self.limits.model_bytes
        self.models = ModelStore(kept)
        budget.holder("models", own=kept, measure=lambda: self.models.bytes + self.models.numbered_bytes)
        self.uploads = budget.holder("uploads of models", own=kept)
        self.td_errors = budget.holder("TD errors that wait")
        """Of samples whose priorities clients are to set."""
        self.learners = Learners()
        self.receivers = Receivers()
        """The largest replies that its clients accept."""
        self.client_names = ClientNames(self.reports)
        self.informed: set[bytes] = set()
        """Clients that have said that they know that the run is over."""
        self.leaving = False
        """Whether clients are sent elsewhere: this server is being drained."""
        self.pages: tuple[str, ...] = ()
        """Where its pages are, for those who ask for them."""
        self.inference: tuple[str, ...] = ()
        """Addresses of inference nodes that act for its clients."""
        self.newcomers = TokenBuckets(limits.new_clients, limits.tuning.new_clients_rate)
        """Accounts that may be opened now, by the owner of their key."""
        facts: dict[str, Any] = {"epoch": epoch, "room": self.reports}
        opens = self.newcomers.take
        self.runs = Runs(run, now, past, home=self.home, may_open=opens, forget=self._forget, line_room=lines, **facts)
        newcomers = TokenBuckets(limits.new_clients, limits.tuning.new_clients_rate)
        self.probes = Ledger(store=SumsOnlyStore(), may_open=newcomers.take, **facts)
        """Accounts of clients that only try the way there and back: in no run's totals, in no list, never saved."""

    @property
    def finished(self) -> bool:
        """Whether the run that is counted now is over."""
        return self.run.finished

    def table(self, header: MessageHeader) -> OpenTable:
        """The table that a header names. Raises ProtocolError if there is none, or it has another schema."""
        table = self.tables.numbered(header.table)
        if header.fingerprint:
            table.check_fingerprint(header.fingerprint)
        return table

    def page(self, client: bytes, kind: types.Type) -> Page:
        """An empty reply of this type to a client: a part of what a message may have, the rest is for the next one."""
        most = self.limits.message_bytes // REPLY_PART
        return Page(self.receivers.of(client), kind, client, payload_bytes=most)

    @property
    def run(self) -> Run:
        """The run that is counted now."""
        return self.runs.current

    @property
    def ledger(self) -> Ledger:
        """Its accounts."""
        return self.runs.current.ledger

    def ledger_of(self, table: int, run: Run | None = None) -> Ledger:
        """Where clients of the table of this number are counted: in the ledger of a run, or else of the present one."""
        return self.probes if self.tables.is_probe(table) else (run or self.run).ledger

    def wrong_run(self) -> ProtocolError:
        """What whoever speaks of another run is answered."""
        return ProtocolError("run", f"this server counts run {self.run.name!r}; say HELLO again")

    def report_models(self) -> None:
        """Have the tables know how old their entries' models are."""
        versions = self.models.versions()
        for table in self.tables:
            table.pool.saw_model(table.parameters.newest_model(versions))

    def _forget(self, client: bytes) -> None:
        """Drop what is in memory of a client that left the ledger of a run."""
        if client not in self.ledger:
            self.informed.discard(client)
            for table in self.tables:
                table.limiter.left(client)


STOCK_PART = 4
"""A client may hold this part of its credit undrawn while learners draw."""
UNDRAWN = "waits until more is drawn: enough of this client's samples are at its server, and none of them was drawn yet"
"""Why a client may record no more where learners draw less than actors bring."""
COUNT_INTERVAL = 1.0
"""Seconds between two counts of the clients that are silent."""


class Credits:
    """Shares of the clients that may push: those that are neither gone nor silent for `limits.client_timeout`."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._limit = state.limits.credit
        self._silent: Counter[int] = Counter()  # clients of each table that are silent for too long
        self._counted_at = 0.0
        self._counted_ledger: Ledger | None = None  # of which run

    def limit(self, credit: int | None) -> None:
        """Let each client have at most this many bytes on the way from now on; None leaves that as it is."""
        self._limit = self._limit if credit is None else credit

    def of(self, table: OpenTable, now: float) -> int:
        """Bytes that each client of a table may have on the way: its limit, or if that is less its share of what the
        table holds, or of what all together may have on the way.
        """
        sharers = self._sharers(now)
        together = self._state.limits.on_way_bytes // max(1, sum(sharers.values()))
        return max(1, min(self._limit, together, table.pool.byte_limit // max(1, sharers[table.number])))

    def grant(self, table: OpenTable, client: bytes, inserted: int, now: float) -> tuple[int, str]:
        """How many entries a client may have recorded before it has to ask again, and why not more.

        Args:
            inserted: That it has recorded by now.
        """
        granted, why = NO_LIMIT, ""
        if table.limiter.is_active:
            granted, why = table.limiter.grant(client, self._sharers(now)[table.number])
        wanted = self._wanted(table, client, now)
        if wanted is None or inserted + wanted >= granted:
            return granted, why
        return inserted + wanted, "" if wanted else UNDRAWN

    def _wanted(self, table: OpenTable, client: bytes, now: float) -> int | None:
        """Entries whose samples learners want of a client; None where they want all."""
        ratio = table.parameters.samples_per_insert
        if table.sums is None or not ratio:
            return None
        room = table.sums.room(client, self.of(table, now) // STOCK_PART)
        return None if room is None else min(math.ceil(room / ratio), NO_LIMIT)

    def _sharers(self, now: float) -> Counter[int]:
        """Clients of each table that may push; those that are silent are counted once a second."""
        ledger = self._state.ledger
        is_fresh = self._counted_at <= now < self._counted_at + COUNT_INTERVAL
        if ledger is not self._counted_ledger or not is_fresh:
            self._counted_ledger, self._counted_at = ledger, now
            since = now - self._state.limits.client_timeout
            everybody = (*ledger, *ledger.guests)
            silent = (each.table for each in everybody if each.last_seen < since and not each.report.leaving)
            self._silent = Counter(silent)
        return ledger.present - self._silent if self._silent else ledger.present


class ClientOwners:
    """Owners of client ids: accounts know theirs, and ids without an account are kept here."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._owners = IdOwners()

    def check(self, client: bytes, principal: str, now: float) -> None:
        """Bind a client id to the key that uses it first, for as long as the id is known here.

        Args:
            principal: Role and name of the key that a message came by; "" if it came by none.

        Raises:
            ProtocolError: it belongs to another key (code "owner"), or too many ids are known (code "busy").
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
            self._state.committer.touch(self._state.run.name, account)

    def move_to(self, account: Account) -> None:
        """The client has an account now, which knows its owner from here on."""
        account.owner = account.owner or self._owners.pop(account.client)


DEFAULT_RUN = "default"
"""Name of the run of a server that was never given one."""


_LIVES: Final = "lives"


def lives_of(past: StateStore) -> int:
    """Return the number of former starts of a server in this folder."""
    lives = past.settings().get(_LIVES, "0")
    return int(lives) if lives.isdecimal() else 0


class _FormerStart(msgspec.Struct, frozen=True):
    """What a former life was given, and with what it ended."""

    given: dict[str, Any]
    now: dict[str, Any]
    version: int
    making: dict[str, Any] = {}
    """Settings beside the parameters: `OpenTable.making`."""


def run_to_count(past: StateStore | None, given: str | None, committer: Committer) -> str:
    """The run that was counted last, unless another one is given now than was given then."""
    if past is None:
        return DEFAULT_RUN if given is None else given
    counted = next((facts.name for facts in past.runs() if not facts.ended), None)
    if given is None:
        return counted or DEFAULT_RUN
    if counted is not None and past.settings().get("run") == given:
        return counted
    committer.add_setting("run", given)
    return given


def recover(state: ServerState, past: StateStore) -> None:
    """Take over models and parameters of the former life; what is new in this one is to be saved.

    Raises:
        ParameterError: what was saved for a table are no parameters, or none that fit it.
    """
    for model in past.models(state.run.name):
        state.models.put(model)
    state.models.go_on_from(past.versions())  # clients may hold a model of another run: versions never go back
    settings = past.settings()
    state.committer.add_setting(_LIVES, str(lives_of(past) + 1))
    for table in state.tables:
        _recover_parameters(table, settings.get(table.key))
        save_parameters(table, state.committer)
    state.report_models()
    for facts in state.runs.facts():
        state.committer.add_run(facts)


def _recover_parameters(table: OpenTable, saved: str | None) -> None:
    given = table.settings.parameters.to_wire()
    chosen = _FormerStart(given, given, 1) if saved is None else _chosen(table.key, saved)
    former = [Parameters.from_wire(fields) for fields in (chosen.given, chosen.now)]  # refuses unknown settings
    if former[0] == table.settings.parameters:
        table.take_parameters(former[1], chosen.version)
    else:
        table.take_parameters(table.parameters, chosen.version + 1)


def save_parameters(table: OpenTable, committer: Committer) -> None:
    """Have a table's parameters saved as they are now, beside those that it was given."""
    if committer.is_durable:
        given = table.settings.parameters.to_wire()
        chosen = _FormerStart(given, table.parameters.to_wire(), table.parameters_version, table.making)
        committer.add_setting(table.key, msgspec.json.encode(chosen).decode())


def check_making(table: OpenTable, past: StateStore, folder: str) -> None:
    """Refuse what a table holds again, if that was made with other settings than the table has.

    Raises:
        SnapshotMismatch: names both values.
    """
    saved = past.settings().get(table.key)
    making = {} if saved is None else _chosen(table.key, saved).making
    for name, made in making.items():
        if made != (mine := table.making.get(name)):
            problem = f"holds table {table.name!r} of {name}={made!r}, where this server has {name}={mine!r}"
            advice = f"Start it with {name}={made!r}, or give the server another state folder."
            raise SnapshotMismatch(folder, problem, advice)


def _chosen(key: str, saved: str) -> _FormerStart:
    try:
        return msgspec.json.decode(saved, type=_FormerStart)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ParameterError(key, saved[:80], f"what a server saves of a table: {error}") from error
