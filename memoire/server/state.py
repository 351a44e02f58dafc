"""What the handlers of one server share: what it is called, keeps and counts. Pure."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from sys import getsizeof
from typing import Any

from memoire.accounting.folded_sums import SumsOnlyStore
from memoire.accounting.ledger import MAX_GUESTS, Ledger, account_bytes
from memoire.accounting.logbook import line_bytes
from memoire.accounting.runs import Run, Runs, SavedState
from memoire.errors import ProtocolError
from memoire.limits import HELD_BYTES, MODEL_BYTES, Limits
from memoire.models.model import ModelStore
from memoire.pool.tables import OpenTable, Tables
from memoire.security.throttle import TokenBuckets
from memoire.wire import types
from memoire.wire.byte_budget import ByteBudget, ByteHolder
from memoire.wire.frames import MessageHeader
from memoire.wire.identity import name_hash
from memoire.wire.receivers import Page, Receivers

from .durability import Committer
from .learners import Learners

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
        past: SavedState | None = None,
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
        self.newcomers = TokenBuckets(limits.new_clients, limits.new_clients_rate)
        """Accounts that may be opened now, by the owner of their key."""
        facts: dict[str, Any] = {"epoch": epoch, "room": self.reports}
        opens = self.newcomers.take
        self.runs = Runs(run, now, past, home=self.home, may_open=opens, forget=self._forget, line_room=lines, **facts)
        newcomers = TokenBuckets(limits.new_clients, limits.new_clients_rate)
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
