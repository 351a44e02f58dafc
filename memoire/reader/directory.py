"""Which servers are there, by which address each one is reached, and what they say of the table. Pure: no lock, no
socket, no clock.

    tcp://proxy ──┬── server a    there
                  └── server b    away: batches go on without it until it answers
    tcp://c ───────── server c    there
                      server d    on no list for 3 s: it is forgotten after `FORGET_TIMEOUT`

TD errors on their way back: to each server those of its own clients. Pure: no lock, no socket, no clock.

a batch's ids      7 9 7 8      server a has clients 7, 8      server b has client 9
a gets             7 7 8        b gets  9

What one server has for a reader, as far as the reader knows: what the server said last, less what was asked of it
since. Pure: no lock, no socket, no clock.

    the server says     client 7: 20 samples     client 9: 4 samples
    on the way to it    client 7:  5 samples                            (a draw that it had not seen when it said so)
    the next draw has   client 7: 15 samples     client 9: 4 samples
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memoire.errors import ParameterError, SchemaMismatch
from memoire.replay.parameters import Parameters
from memoire.replay.schema import Schema
from memoire.tables import calls, registry
from memoire.tables.caches._draw import take_counts
from memoire.tables.calls import FarServer, TableTerms
from memoire.wire import containers, messages
from memoire.wire.frames import Answer, HelloSchedule, Message, MessageHeader, name_hash
from memoire.wire.parts import Payload
from memoire.wire.rows import CLIENT_COUNTS

HELLO_INTERVAL = 2.0
"""Seconds between two HELLO messages to each address: which servers are there, which parameters hold."""
FORGET_TIMEOUT = 12.0
"""Seconds for which a server stands on no proxy's list before it is forgotten. A proxy that has just started does not
know all of its servers yet (see `GRACE` in `proxy.router`), and orders and totals that leave one out would be wrong
without a word.
"""


class Address:
    """One of the addresses that the reader was given, and what was answered there last."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.run = 0  # hash of the run that is counted there; 0 until somebody has answered
        self.hello = HelloSchedule()
        self.servers: tuple[str, ...] = ()  # names of those behind it; none until somebody has answered
        self.unmet: tuple[str, ...] = ()  # addresses behind it where nobody has answered yet
        self.leaving: tuple[str, ...] = ()  # servers behind it that are being drained


class RemoteServer:
    """One server, as a reader knows it. A name that was forgotten and comes back is another object."""

    def __init__(self, name: str, address: Address, now: float) -> None:
        self.name, self.home, self.address = name, name_hash(name), address
        self.is_away = False  # it did not answer in time, and is left out
        self.is_finished = False  # it says that the run is over
        self.epoch = 0  # of its newest WELCOME: another one means that it has restarted
        self.listed_at = now  # when an address named it last
        self.fingerprint = 0  # of the parameters that it drew by last; 0 until it has said so
        self.parameters: Parameters | None = None  # that it named when it was asked, since they are other ones

    @property
    def is_listed(self) -> bool:
        """Whether the address that it is reached by names it."""
        return self.name in self.address.servers


@dataclass(frozen=True, slots=True)
class RunChange:
    """An address counts another run than before."""

    is_first: bool
    """Whether no address has said so before."""
    servers: tuple[RemoteServer, ...]
    """Those that are reached by this address."""


class Directory:
    """The addresses and the servers behind them. Belongs to the reader's thread; other threads may read.

    Args:
        endpoints: The addresses.
        reader: What errors call this reader.
        now: When it began, by the clock of all other times.
    """

    def __init__(self, endpoints: Sequence[str], reader: str, now: float) -> None:
        self.addresses = [Address(endpoint) for endpoint in endpoints]
        self.servers: dict[str, RemoteServer] = {}
        self.terms: TableTerms | None = None
        """None until the first server has answered."""
        self.run = 0
        """Hash of the run that was named last."""
        self.run_name = ""
        """Its name, as the server that was met last said it."""
        self.is_finished = False
        """Whether the run was declared over."""
        self._reader, self._began = reader, now

    # Who is there

    @property
    def known(self) -> list[RemoteServer]:
        """All servers: a list of its own, since any thread may ask while the reader's adds some."""
        return list(self.servers.values())

    @property
    def there(self) -> list[RemoteServer]:
        """The servers that are not left out."""
        return [server for server in self.known if not server.is_away]

    @property
    def leaving(self) -> list[str]:
        """Servers that are being drained."""
        return [name for address in self.addresses for name in address.leaving]

    def unmet(self) -> set[str]:
        """Addresses, the reader's own and those on proxies' lists, where nobody has answered yet."""
        own = {address.endpoint for address in self.addresses if not address.servers}
        return own.union(*(address.unmet for address in self.addresses))

    @property
    def meets_until(self) -> float:
        """Until when an address that has not answered has its time: a batch without it would leave it out."""
        return self._began + calls.LEFT_OUT_TIMEOUT

    def is_meeting(self, now: float) -> bool:
        """Whether an address has not answered yet, and still has its time."""
        return now < self.meets_until and not all(address.servers for address in self.addresses)

    def has_met(self, now: float) -> bool:
        """Whether a server has answered, and every address too or it had its time."""
        return self.terms is not None and not self.is_meeting(now)

    # When to ask

    def next_time(self) -> float:
        """When the next HELLO is due; infinity while each address has one to answer."""
        return min((address.hello.next_time() for address in self.addresses), default=float("inf"))

    def due(self, now: float) -> list[Address]:
        """Addresses that get a HELLO now; its answer, or the error that ends it, goes to `answered`."""
        found = [address for address in self.addresses if address.hello.is_due(now)]
        for address in found:
            address.hello.begin(now + HELLO_INTERVAL)
        return found

    def ask_soon(self) -> None:
        """Have every address get a HELLO at once: something may have changed."""
        for address in self.addresses:
            address.hello.hurry()

    # What was answered

    def learn(
        self, address: Address, header: MessageHeader, told: messages.Welcome, now: float
    ) -> tuple[TableTerms, RunChange | None, Sequence[RemoteServer]] | None:
        """Take what a WELCOME says; None where it is about another table.

        Returns:
            The terms that hold from now on (see `agree`), whether another run is counted, and servers that were
            forgotten.

        Raises:
            SchemaMismatch: the server's table has other columns than the first one's.
        """
        if self.terms is not None and told.table_name != self.terms.table:
            address.hello.hurry()  # a reader that names no table gets each server's first, and keeps one
            return None
        terms, self.run_name = self._terms_of(told), told.run_name
        run = self.enter(address, header.run)
        address.servers, address.unmet = tuple(told.servers or [told.home_name]), tuple(told.unmet)
        address.leaving = tuple(told.leaving)
        self._add(address, now)
        return terms, run, self._drop_unlisted(now)

    def _terms_of(self, told: messages.Welcome) -> TableTerms:
        if self.terms is not None and told.schema == self.terms.schema.to_json():
            schema = self.terms.schema  # nearly always
        else:
            schema = registry.named(told.storage).schema_class().from_json(told.schema)
        terms = TableTerms(
            schema, Parameters.from_wire(told.parameters), told.parameters_version, told.table_name, told.storage
        )
        if self.terms is not None and schema != self.terms.schema:
            raise SchemaMismatch(self._reader, "schema", str(schema), f"batches of {self.terms.schema}")
        return terms

    def differing(self) -> list[RemoteServer]:
        """The servers that draw by other parameters than those of `terms`: no batch is drawn while there are any."""
        if self.terms is None:
            return []
        expected = self.terms.parameters.fingerprint
        return [server for server in self.there if server.fingerprint not in (0, expected)]

    def difference(self) -> ParameterError | None:
        """The first parameter in which servers differ, and at which of them; None if they agree, or say nothing."""
        for server in self.differing():
            own = {} if server.parameters is None else server.parameters.to_wire()
            others = {} if self.terms is None else self.terms.parameters.to_wire()
            for name, value in own.items():
                if value != others.get(name):
                    advice = "give all of them the same, by their settings or by Reader.configure"
                    expected = f"{others.get(name)!r}, as other servers of this table have it ({advice})"
                    return ParameterError(name, f"{value!r} at server {server.name}", expected)
        return None

    def agree(self, terms: TableTerms) -> bool:
        """From now on these terms hold; whether batches that are ready or on their way were drawn by other ones."""
        former, self.terms = self.terms, terms
        return former is not None and former.parameters != terms.parameters

    def enter(self, address: Address, run: int) -> RunChange | None:
        """An address counts this run; None if it did before, or had not said which one."""
        former, address.run = address.run, run
        if former in (0, run):
            self.run = self.run or run
            return None
        is_first, self.run = self.run != run, run
        return RunChange(is_first, tuple(server for server in self.known if server.address is address))

    def _add(self, address: Address, now: float) -> None:
        for name in address.servers:
            if name not in self.servers:
                self.servers[name] = RemoteServer(name, address, now)
            elif self.servers[name].is_away:
                self.servers[name].address = address  # perhaps there is another way to it

    def _drop_unlisted(self, now: float) -> list[RemoteServer]:
        """Servers that were taken off every list are no longer asked, waited for or named, after a while."""
        ways = {name: address for address in self.addresses for name in address.servers}
        dropped = []
        for server in self.known:
            if server.name in ways:
                server.listed_at = now
                if not server.is_listed:
                    server.address = ways[server.name]
            elif now - server.listed_at > FORGET_TIMEOUT:
                server.is_away = True
                dropped.append(self.servers.pop(server.name))
        return dropped

    def met(self, server: RemoteServer, epoch: int) -> bool:
        """A server has said its epoch; whether it has restarted since, and knows nothing of this reader any more."""
        former, server.epoch = server.epoch, epoch
        return former != epoch

    def reported(self, server: FarServer, is_finished: bool) -> None:
        """A server says whether the run is over; it is when all of them have said so."""
        server.is_finished = is_finished
        self.is_finished = self.is_finished or all(other.is_finished for other in self.servers.values())


NOTHING: NDArray[np.void] = np.empty(0, CLIENT_COUNTS)
"""What a request asks for that takes no samples."""


class ServerStock:
    """What one server has, and which requests to it are open. Belongs to the reader's thread."""

    def __init__(self, server: calls.FarServer) -> None:
        self.server = server
        self.table: NDArray[np.void] | None = None  # [C] rows of CLIENT_SUMS; None if it has to say so again
        self.clients: NDArray[np.uint64] = np.empty(0, np.uint64)  # [C] who was in its newest table
        self.drawn = 0  # samples that it was asked for, over all time
        self.again_at = 0.0  # when to ask it again: before, it would say the same
        self._pages: list[NDArray[np.void]] = []  # rows of a table that has not come whole
        self._heard_at = 0.0  # when it said what is in `table`
        self._open: dict[int, NDArray[np.void]] = {}  # number of each open request -> what it asks for
        self._asked_at = 0.0  # since when an answer is awaited

    @property
    def is_asked(self) -> bool:
        """Whether a request is open."""
        return bool(self._open)

    @property
    def open(self) -> frozenset[int]:
        """Numbers of the open requests."""
        return frozenset(self._open)

    @property
    def on_way(self) -> int:
        """Samples that were asked for and have not come."""
        return sum(int(counts["count"].sum()) for counts in self._open.values())

    @property
    def late_at(self) -> float:
        """When a batch no longer waits for its answer; infinity while no batch does."""
        is_awaited = self.is_asked and not self.server.is_away
        return self._asked_at + calls.LEFT_OUT_TIMEOUT if is_awaited else float("inf")

    def is_older(self, age: float, now: float) -> bool:
        """Whether it has said nothing for this many seconds, or what it said does not hold."""
        return self.table is None or now - self._heard_at > age

    def ask(self, number: int, counts: NDArray[np.void], now: float) -> None:
        """A request goes out under this number; `counts` are [C] rows of CLIENT_COUNTS that it takes."""
        if not self._open:
            self._asked_at = now
        self._open[number] = counts

    def answered(self, number: int, now: float) -> float:
        """A request has ended; those that are open are awaited from now on. Returns for how long this one was."""
        self._open.pop(number, None)
        waited, self._asked_at = now - self._asked_at, now
        return waited

    @property
    def after(self) -> bytes:
        """Client of the last row of the page that came last; b"" if the next page is the first one."""
        return bytes(self._pages[-1]["client"][-1].tobytes()) if self._pages and len(self._pages[-1]) else b""

    def collect(self, rows: NDArray[np.void], after: bytes, *, is_whole: bool) -> NDArray[np.void] | None:
        """A page of its table came: [C] rows behind those of client `after`. The whole table, if it is the last one;
        None: the next page is to be asked for.
        """
        if after != self.after and after:
            self._pages.clear()  # the pages before it were given up meanwhile
            return None
        self._pages = [*self._pages, rows] if after else [rows]
        if not is_whole:
            self.table = None
            return None
        pages, self._pages = self._pages, []
        return pages[0] if len(pages) == 1 else np.concatenate(pages)

    def give_up_pages(self) -> None:
        """The next page that is asked for is the first one."""
        self._pages.clear()

    def report(self, table: NDArray[np.void], now: float) -> int:
        """The server says what it has, [C] rows of CLIENT_SUMS; returns its entries.

        Draws that it had not seen then are taken off.
        """
        self.table, self._heard_at, self.clients = table.copy(), now, clients_of(table)
        for counts in self._open.values():
            self.take(counts)
        return int(table["positives"].sum())

    def take(self, counts: NDArray[np.void]) -> None:
        """Take samples that are asked for, [C] rows of CLIENT_COUNTS, off what is there for the next draw.

        With reuse_cache they stay.
        """
        if self.table is not None:
            take_counts(self.table, counts)


def clients_of(rows: NDArray[np.void]) -> NDArray[np.uint64]:
    """Client ids of rows as numbers that compare: [B] -> [B]; half of their random bits, enough to tell them apart."""
    return np.ascontiguousarray(rows["client"][:, 0], np.uint64)


MAX_FEEDBACK_SAMPLES = 1 << 14
"""Samples in one FEEDBACK message: below the longest request, whatever the size of a batch."""


@dataclass(frozen=True, slots=True)
class FeedbackPiece:
    """One FEEDBACK message; what ends it goes to `FeedbackRouter.answered`."""

    server: FarServer
    payload: Payload
    samples: int


class FeedbackRouter:
    """Parts feedback by server, and counts what became of it. Belongs to the reader's thread."""

    def __init__(self) -> None:
        self.lost = 0
        """Samples whose client no server has, or whose message was not answered."""

    def route(
        self,
        ids: NDArray[Any],
        errors: NDArray[np.float32],
        schema: Schema | None,
        clients: Iterable[tuple[FarServer, NDArray[np.uint64]]],
    ) -> list[FeedbackPiece]:
        """The messages to send.

        Args:
            ids: [B] of the samples.
            errors: [B], their TD errors.
            schema: Of the table; None before any server has answered, so that none has clients.
            clients: Each server with its clients, as `stock.clients_of` makes them; the first one that has a client
                gets its samples.
        """
        owners, left = clients_of(ids), np.ones(len(ids), bool)
        pieces = []
        for server, present in clients:
            mine = np.flatnonzero(left & np.isin(owners, present))
            left[mine] = False
            if not len(mine):
                continue
            assert schema is not None  # it came with the first clients
            rows, samples = (ids, errors) if len(mine) == len(ids) else (ids[mine], errors[mine])
            count = -(-len(mine) // MAX_FEEDBACK_SAMPLES)
            for begin in range(count):
                piece = slice(len(mine) * begin // count, len(mine) * (begin + 1) // count)
                payload = containers.pack_feedback(schema, rows[piece], samples[piece])
                pieces.append(FeedbackPiece(server, payload, piece.stop - piece.start))
        self.lost += int(left.sum())
        return pieces

    def answered(self, piece: FeedbackPiece, answer: Answer) -> None:
        """A message has ended by a reply or an error."""
        said = answer.body if isinstance(answer, Message) else None
        self.lost += said.lost if isinstance(said, messages.Taken) else piece.samples
