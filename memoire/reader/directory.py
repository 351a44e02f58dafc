"""Directory of a reader's servers: the address of each server, and its facts about the table. Pure: no lock, no
socket, no clock.

    tcp://proxy ──┬── server a    there
                  └── server b    away: batches are drawn without it until it answers
    tcp://c ───────── server c    there
                      server d    unlisted for 3 s: it is forgotten after `FORGET_TIMEOUT`

Feedback router: sends TD errors to the server of each sample's client. Pure: no lock, no socket, no clock.

a batch's ids      7 9 7 8      server a has clients 7, 8      server b has client 9
a gets             7 7 8        b gets  9

Server stock: samples that a server has for a reader: its last report, less the samples requested since. Pure: no lock,
no socket, no clock.

    the server reports  client 7: 20 samples     client 9: 4 samples
    requested           client 7:  5 samples                            (a draw that is not in the report)
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
from memoire.tables.calls import TableServer, TableTerms
from memoire.wire import containers, messages
from memoire.wire.frames import Answer, HelloSchedule, Message, MessageHeader, name_hash
from memoire.wire.parts import Payload
from memoire.wire.rows import CLIENT_COUNTS

HELLO_INTERVAL = 2.0
"""Seconds between two HELLO messages to each address, which refresh servers and parameters."""
FORGET_TIMEOUT = 12.0
"""Seconds for which a server is on no proxy's list before the reader forgets it. A proxy that has just started does not
know all of its servers yet (see `GRACE` in `proxy.router`); without the delay, orders and totals would silently leave
servers out.
"""


class Address:
    """Address that the reader dials, and its last WELCOME."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.run = 0  # hash of the server's current run; 0 before its first answer
        self.hello = HelloSchedule()
        self.servers: tuple[str, ...] = ()  # names of the servers behind the address; empty before its first answer
        self.unmet: tuple[str, ...] = ()  # addresses behind this one without an answer
        self.leaving: tuple[str, ...] = ()  # drained servers behind the address


class RemoteServer:
    """One server, as a reader knows it. A forgotten name that comes back gets a new object."""

    def __init__(self, name: str, address: Address, now: float) -> None:
        self.name, self.home, self.address = name, name_hash(name), address
        self.is_away = False  # the server did not answer in time, and is left out
        self.is_finished = False  # the server reports the run's end
        self.epoch = 0  # epoch of the newest WELCOME; changes at a restart of the server
        self.listed_at = now  # time at which an address last listed it
        self.fingerprint = 0  # fingerprint of the last draw's parameters; 0 before the first report
        self.parameters: Parameters | None = None  # the server's parameters if they differ from the reader's

    @property
    def is_listed(self) -> bool:
        """True if the server's address lists it."""
        return self.name in self.address.servers


@dataclass(frozen=True, slots=True)
class RunChange:
    """Change of the run that an address counts."""

    is_first: bool
    """True if no other address has reported this run before."""
    servers: tuple[RemoteServer, ...]
    """Servers that are reached by the address."""


class Directory:
    """Addresses of a reader and the servers behind them. Belongs to the reader's thread; other threads may read.

    Args:
        endpoints: The addresses.
        reader: Name of the reader for errors.
        now: Time of the start, by the clock of all other times.
    """

    def __init__(self, endpoints: Sequence[str], reader: str, now: float) -> None:
        self.addresses = [Address(endpoint) for endpoint in endpoints]
        self.servers: dict[str, RemoteServer] = {}
        self.terms: TableTerms | None = None
        """Terms of the table; None until the first server has answered."""
        self.run = 0
        """Hash of the run that an address reported last."""
        self.run_name = ""
        """Name of the run, as in the last WELCOME."""
        self.is_finished = False
        """True if the run was finished."""
        self._reader, self._began = reader, now

    # Known servers

    @property
    def known_servers(self) -> list[RemoteServer]:
        """All servers, as a new list: any thread may ask while the reader's thread adds servers."""
        return list(self.servers.values())

    @property
    def present_servers(self) -> list[RemoteServer]:
        """The servers that are not left out."""
        return [server for server in self.known_servers if not server.is_away]

    @property
    def draining_servers(self) -> list[str]:
        """Servers that are being drained."""
        return [name for address in self.addresses for name in address.leaving]

    def unanswered_addresses(self) -> set[str]:
        """Return addresses, the reader's own and those on proxies' lists, that have not answered yet."""
        own = {address.endpoint for address in self.addresses if not address.servers}
        return own.union(*(address.unmet for address in self.addresses))

    @property
    def discovery_deadline(self) -> float:
        """Time until which batches wait for addresses that have not answered."""
        return self._began + calls.LEFT_OUT_TIMEOUT

    def is_discovering(self, now: float) -> bool:
        """Return True if an address has not answered yet, and batches still wait for it."""
        return now < self.discovery_deadline and not all(address.servers for address in self.addresses)

    def is_discovery_over(self, now: float) -> bool:
        """Return True if a server has answered, and every address has answered or had its time."""
        return self.terms is not None and not self.is_discovering(now)

    # Times of HELLO

    def next_time(self) -> float:
        """Return the time of the next HELLO; infinity while a HELLO to each address is unanswered."""
        return min((address.hello.next_time() for address in self.addresses), default=float("inf"))

    def due_addresses(self, now: float) -> list[Address]:
        """Return the addresses that get a HELLO now; the caller passes the answer or error to `receive_answer`."""
        addresses = [address for address in self.addresses if address.hello.is_due(now)]
        for address in addresses:
            address.hello.begin(now + HELLO_INTERVAL)
        return addresses

    def ask_soon(self) -> None:
        """Make a HELLO to every address due now, since the state may have changed."""
        for address in self.addresses:
            address.hello.make_due()

    # Answers

    def apply_welcome(
        self, address: Address, header: MessageHeader, welcome: messages.Welcome, now: float
    ) -> tuple[TableTerms, RunChange | None, Sequence[RemoteServer]] | None:
        """Take the facts of a WELCOME; return None if it is about another table.

        Returns:
            The terms to pass to `set_terms`; the change of the run, or None; and the servers that this call removed.

        Raises:
            SchemaMismatch: the server's table has other columns than the first server's.
        """
        if self.terms is not None and welcome.table_name != self.terms.table:
            address.hello.make_due()  # a reader without a table's name gets each server's first table, and keeps one
            return None
        terms, self.run_name = self._terms_of(welcome), welcome.run_name
        run = self.set_run(address, header.run)
        address.servers, address.unmet = tuple(welcome.servers or [welcome.home_name]), tuple(welcome.unmet)
        address.leaving = tuple(welcome.leaving)
        self._add(address, now)
        return terms, run, self._drop_unlisted(now)

    def _terms_of(self, body: messages.Welcome) -> TableTerms:
        if self.terms is not None and body.schema == self.terms.schema.to_json():
            schema = self.terms.schema  # the usual case
        else:
            schema = registry.require_kind(body.storage).schema_class().from_json(body.schema)
        terms = TableTerms(
            schema, Parameters.from_wire(body.parameters), body.parameters_version, body.table_name, body.storage
        )
        if self.terms is not None and schema != self.terms.schema:
            raise SchemaMismatch(self._reader, "schema", str(schema), f"batches of {self.terms.schema}")
        return terms

    def differing_servers(self) -> list[RemoteServer]:
        """Return servers that draw with other parameters than `terms`; while there are any, no batch is drawn."""
        if self.terms is None:
            return []
        expected = self.terms.parameters.fingerprint
        return [server for server in self.present_servers if server.fingerprint not in (0, expected)]

    def parameter_mismatch(self) -> ParameterError | None:
        """Return an error for the first parameter in which servers differ; None if they agree or report none."""
        for server in self.differing_servers():
            own = {} if server.parameters is None else server.parameters.to_wire()
            others = {} if self.terms is None else self.terms.parameters.to_wire()
            for name, value in own.items():
                if value != others.get(name):
                    return ParameterError.with_text(
                        f"Server {server.name} has {name}={value!r}, but other servers of this table have "
                        f"{others.get(name)!r}. Set the same value at all servers, by their settings or "
                        f"Reader.configure."
                    )
        return None

    def set_terms(self, terms: TableTerms) -> bool:
        """Set the terms; return True if ready batches and open rounds were drawn with other parameters."""
        former, self.terms = self.terms, terms
        return former is not None and former.parameters != terms.parameters

    def set_run(self, address: Address, run: int) -> RunChange | None:
        """Set the run that an address counts; return the change, or None if the run is the same or the first."""
        former, address.run = address.run, run
        if former in (0, run):
            self.run = self.run or run
            return None
        is_first, self.run = self.run != run, run
        return RunChange(is_first, tuple(server for server in self.known_servers if server.address is address))

    def _add(self, address: Address, now: float) -> None:
        for name in address.servers:
            if name not in self.servers:
                self.servers[name] = RemoteServer(name, address, now)
            elif self.servers[name].is_away:
                self.servers[name].address = address  # the other address may reach the server

    def _drop_unlisted(self, now: float) -> list[RemoteServer]:
        """Forget servers that no address has listed for `FORGET_TIMEOUT`; return them."""
        ways = {name: address for address in self.addresses for name in address.servers}
        dropped = []
        for server in self.known_servers:
            if server.name in ways:
                server.listed_at = now
                if not server.is_listed:
                    server.address = ways[server.name]
            elif now - server.listed_at > FORGET_TIMEOUT:
                server.is_away = True
                dropped.append(self.servers.pop(server.name))
        return dropped

    def record_epoch(self, server: RemoteServer, epoch: int) -> bool:
        """Record a server's epoch; return True if it changed: a restarted server knows nothing of this reader."""
        former, server.epoch = server.epoch, epoch
        return former != epoch

    def record_finished(self, server: TableServer, is_finished: bool) -> None:
        """Record if a server reports the end of the run; the run is over after all servers have reported it."""
        server.is_finished = is_finished
        self.is_finished = self.is_finished or all(other.is_finished for other in self.servers.values())


NOTHING: NDArray[np.void] = np.empty(0, CLIENT_COUNTS)
"""Counts of a request that takes no samples."""


class ServerStock:
    """Samples that one server has, and open requests to this server. Belongs to the reader's thread."""

    def __init__(self, server: calls.TableServer) -> None:
        self.server = server
        self.table: NDArray[np.void] | None = None  # [C] rows of CLIENT_SUMS; None asks for a new report
        self.clients: NDArray[np.uint64] = np.empty(0, np.uint64)  # [C] clients in its newest table
        self.drawn = 0  # total of requested samples
        self.again_at = 0.0  # time of the next request: an earlier request would get the same report
        self._pages: list[NDArray[np.void]] = []  # rows of an incomplete table
        self._heard_at = 0.0  # time of the report in `table`
        self._open: dict[int, NDArray[np.void]] = {}  # requested counts by number of the open request
        self._asked_at = 0.0  # start of the wait for the next answer

    @property
    def is_asked(self) -> bool:
        """True if a request is open."""
        return bool(self._open)

    @property
    def open_requests(self) -> frozenset[int]:
        """Numbers of the open requests."""
        return frozenset(self._open)

    @property
    def requested_samples(self) -> int:
        """Samples that were requested and have not arrived."""
        return sum(int(counts["count"].sum()) for counts in self._open.values())

    @property
    def late_at(self) -> float:
        """Time at which batches stop waiting for the server's answer; infinity if no batch waits."""
        is_awaited = self.is_asked and not self.server.is_away
        return self._asked_at + calls.LEFT_OUT_TIMEOUT if is_awaited else float("inf")

    def is_older(self, age: float, now: float) -> bool:
        """Return True if the last report is older than `age` seconds, or is not valid any more."""
        return self.table is None or now - self._heard_at > age

    def record_request(self, number: int, counts: NDArray[np.void], now: float) -> None:
        """Record an open request; `counts` are the [C] rows of CLIENT_COUNTS that it takes."""
        if not self._open:
            self._asked_at = now
        self._open[number] = counts

    def receive_answer(self, number: int, now: float) -> float:
        """Record the end of a request; return the seconds since the former answer or the request."""
        self._open.pop(number, None)
        waited, self._asked_at = now - self._asked_at, now
        return waited

    @property
    def next_page_key(self) -> bytes:
        """Client of the last row of the newest page; b"" if the next page is the first one."""
        return bytes(self._pages[-1]["client"][-1].tobytes()) if self._pages and len(self._pages[-1]) else b""

    def add_page(self, rows: NDArray[np.void], after: bytes, *, is_whole: bool) -> NDArray[np.void] | None:
        """Add a page of the server's table: [C] rows after those of client `after`. Return the whole table if the page
        is the last one; None if a further page is needed.
        """
        if after != self.next_page_key and after:
            self._pages.clear()  # earlier pages were dropped meanwhile
            return None
        self._pages = [*self._pages, rows] if after else [rows]
        if not is_whole:
            self.table = None
            return None
        pages, self._pages = self._pages, []
        return pages[0] if len(pages) == 1 else np.concatenate(pages)

    def give_up_pages(self) -> None:
        """Drop the pages; the next request is for the first page."""
        self._pages.clear()

    def report(self, table: NDArray[np.void], now: float) -> int:
        """Record a server's report, [C] rows of CLIENT_SUMS; return its entries.

        Subtracts draws that are not in the report.
        """
        self.table, self._heard_at, self.clients = table.copy(), now, comparable_client_ids(table)
        for counts in self._open.values():
            self.subtract_requested(counts)
        return int(table["positives"].sum())

    def subtract_requested(self, counts: NDArray[np.void]) -> None:
        """Subtract requested samples, [C] rows of CLIENT_COUNTS, from the stock of the next draw.

        With reuse_cache the stock stays.
        """
        if self.table is not None:
            take_counts(self.table, counts)


def comparable_client_ids(rows: NDArray[np.void]) -> NDArray[np.uint64]:
    """Return client ids of rows as comparable numbers: [B] -> [B]; half of the random bits suffice."""
    return np.ascontiguousarray(rows["client"][:, 0], np.uint64)


MAX_FEEDBACK_SAMPLES = 1 << 14
"""Maximum samples in one FEEDBACK message: below the longest request, for any size of a batch."""


@dataclass(frozen=True, slots=True)
class FeedbackPiece:
    """One FEEDBACK message; the caller passes the reply or error to `FeedbackRouter.receive_answer`."""

    server: TableServer
    payload: Payload
    samples: int


class FeedbackRouter:
    """Router of feedback to the servers of its clients; counts lost samples. Belongs to the reader's thread."""

    def __init__(self) -> None:
        self.lost = 0
        """Samples whose client is at no server, or whose message was not answered."""

    def route(
        self,
        ids: NDArray[Any],
        errors: NDArray[np.float32],
        schema: Schema | None,
        clients: Iterable[tuple[TableServer, NDArray[np.uint64]]],
    ) -> list[FeedbackPiece]:
        """Return the messages to send.

        Args:
            ids: Ids of the samples, [B].
            errors: TD errors of the samples, [B].
            schema: Schema of the table; None before the first answer, when no server has clients.
            clients: Each server with its clients, as of `comparable_client_ids`; the first server with a client gets
            the client's
                samples.
        """
        owners, unrouted = comparable_client_ids(ids), np.ones(len(ids), bool)
        pieces = []
        for server, present in clients:
            selected = np.flatnonzero(unrouted & np.isin(owners, present))
            unrouted[selected] = False
            if not len(selected):
                continue
            assert schema is not None  # known since the first clients
            rows, samples = (ids, errors) if len(selected) == len(ids) else (ids[selected], errors[selected])
            count = -(-len(selected) // MAX_FEEDBACK_SAMPLES)
            for begin in range(count):
                piece = slice(len(selected) * begin // count, len(selected) * (begin + 1) // count)
                payload = containers.pack_feedback(schema, rows[piece], samples[piece])
                pieces.append(FeedbackPiece(server, payload, piece.stop - piece.start))
        self.lost += int(unrouted.sum())
        return pieces

    def receive_answer(self, piece: FeedbackPiece, answer: Answer) -> None:
        """Process the reply or error that ends a message."""
        body = answer.body if isinstance(answer, Message) else None
        self.lost += body.lost if isinstance(body, messages.Taken) else piece.samples
