"""Remote learner's takes from tables of rollouts: shares of the servers, and received entries. Pure: no lock, socket,
clock.

    every server reports its entries      a 900    b 300        a call wants 800
    shares are proportional               TAKE 600 to a, TAKE 200 to b
    received entries are kept until the call is complete; surplus and late entries are for the next call

Calls do not wait for a server that is skipped. A skipped server's late entries are kept, because they are handed out.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from memoire.errors import ParameterError, ProtocolError, Refused
from memoire.limits import Limits
from memoire.replay.rollouts import Fragment
from memoire.tables import calls, registry
from memoire.tables.base import DeliversOnce, TakeRequest
from memoire.tables.calls import REFUSED_INTERVAL, RETRY_INTERVAL, ServerRequest, TableServer, TableServers
from memoire.wire.frames import TOO_LARGE, Answer, Message

from . import fragments
from .fragments import RolloutQueue, unpacked


@dataclass(slots=True)
class HeldRollouts:
    """Last report of one server, and the open request to the server."""

    entries: int = 0
    is_known: bool = False
    """True if the next shares may use the report; False if the server must report first."""
    clients: int = 0
    """Number of clients that recorded the entries."""
    capacity: int = 0
    """Maximum number of entries; 0 before the server has answered."""
    again_at: float = 0.0
    """Earliest time of the next request; an earlier one would get the same report."""
    is_asked: bool = False
    asked_at: float = 0.0


@dataclass(slots=True)
class RolloutTaker:
    """State machine of remote takes: the waiting call and received entries. The owner locks all but `late_servers` and
    `read`.

    Args:
        directory: Registry of the servers, with their terms of the table.
    """

    CALLED: ClassVar = "rollouts"
    directory: TableServers
    limits: Limits
    wanted: TakeRequest | None = None
    """Request of the waiting call."""
    taken: int = 0
    """Number of entries that calls returned."""
    refused: int = 0
    """Number of replies outside the protocol; their entries are lost."""
    failed: Refused | None = None
    """Error that the waiting call must raise."""
    _held: dict[TableServer, HeldRollouts] = field(default_factory=dict)
    _queue: RolloutQueue | None = None  # made when the schema is known

    # Times of the next work

    def next_time(self, now: float) -> float:
        """Return the next time at which `late_servers` or `due_requests` has work; infinity if only a reply can cause
        work.
        """
        times = [self._late_at(server) for server in self.directory.known_servers]
        if self._missing > 0:
            reports = [self.last_report(server) for server in self.directory.known_servers]
            times += [held.again_at for held in reports if not held.is_asked and not held.is_known]
            if self.directory.is_discovering(now):
                times.append(self.directory.discovery_deadline)
        return min(times, default=math.inf)

    def last_report(self, server: TableServer) -> HeldRollouts:
        """Return the last report of a server."""
        return self._held.setdefault(server, HeldRollouts())

    @property
    def held_entries(self) -> int:
        """Number of received entries that no call has returned yet."""
        return 0 if self._queue is None else self._queue.entries

    @property
    def discarded_entries(self) -> int:
        """Number of received entries that were discarded because their model had become too old."""
        return 0 if self._queue is None else self._queue.counts.stale

    @property
    def _missing(self) -> int:
        """Number of entries that the waiting call still lacks; 0 or less if it lacks none."""
        return 0 if self.wanted is None else self.wanted.steps - self.held_entries

    # Servers that do not answer

    def _late_at(self, server: TableServer) -> float:
        held = self.last_report(server)
        return held.asked_at + calls.LEFT_OUT_TIMEOUT if held.is_asked and not server.is_away else math.inf

    def late_servers(self, now: float, down: Collection[object]) -> list[TableServer]:
        """Return servers that calls stop waiting for; `down` are addresses that certainly have no connection."""
        times = [(self._late_at(server), server) for server in self.directory.known_servers]
        return [server for at, server in times if at <= now or (at < math.inf and server.address in down)]

    def leave_out(self, server: TableServer) -> None:
        """Skip a server that did not answer in time; its request stays open."""
        server.is_away = True
        self.last_report(server).is_known = False

    def forget(self, server: TableServer) -> None:
        """Remove a server that is no longer on any list. Entries received from the server stay."""
        self._held.pop(server, None)

    def clear(self) -> None:
        """Discard received entries, because another run is counted now."""
        if self._queue is not None:
            self._queue.clear()

    # Taking

    def set_request(self, wanted: TakeRequest | None) -> None:
        """Set the request that a call waits for; None after the call has ended."""
        self.wanted, self.failed = wanted, None
        for held in self._held.values():
            held.is_known, held.again_at = False, 0.0

    def due_requests(self, now: float) -> list[ServerRequest]:
        """Return the requests to send now: for reports, or for shares of the missing entries."""
        if self.wanted is None or self._missing <= 0 or self.directory.is_discovering(now):
            return []
        known = self.directory.known_servers
        # A single server is asked for all entries at once.
        steps = self._missing if len(known) == 1 and self.wanted.min_clients <= 1 else 0
        asks = [self._ask(each, steps, now) for each in known if self._must_report(each, now)]
        return asks or self._share_out(now)

    def _must_report(self, server: TableServer, now: float) -> bool:
        held = self.last_report(server)
        return not held.is_known and not held.is_asked and now >= held.again_at

    def _share_out(self, now: float) -> list[ServerRequest]:
        """Share the missing entries out, once every server that is not skipped has reported."""
        servers = self.directory.present_servers
        held = [self.last_report(server) for server in servers]
        if not servers or not all(each.is_known for each in held):
            return []
        counts = [each.entries for each in held]
        if sum(counts) < self._missing or not self._has_clients():
            for each in held:
                each.is_known, each.again_at = False, now + RETRY_INTERVAL
            return []
        parts = zip(servers, shares(self._missing, counts), strict=True)
        return [self._ask(server, share, now) for server, share in parts if share]

    def _ask(self, server: TableServer, steps: int, now: float) -> ServerRequest:
        assert self.wanted is not None
        held, wanted = self.last_report(server), self.wanted
        held.is_known, held.is_asked, held.asked_at = False, True, now
        each = -(-self._missing // max(1, len(self.directory.present_servers)))
        body = fragments.Take(
            steps=steps, least=steps, exact=wanted.exact, release=wanted.release, wanted=min(each, (1 << 32) - 1)
        )
        return ServerRequest(server, body)

    def _has_clients(self) -> bool:
        assert self.wanted is not None
        return self.wanted.min_clients <= 1 or self.clients >= self.wanted.min_clients

    @property
    def clients(self) -> int:
        """Number of clients with held entries, here or at a server; a client that moved counts at two servers."""
        here = 0 if self._queue is None else self._queue.clients
        return here + sum(self.last_report(server).clients for server in self.directory.present_servers)

    # Replies

    def read(self, answer: Answer, now: float) -> list[Fragment]:
        """Return the fragments of a reply; empty for an error or a message outside the protocol."""
        terms = self.directory.terms
        if terms is None or not isinstance(answer, Message) or not isinstance(answer.body, fragments.RolloutsReply):
            return []
        try:
            return unpacked(answer.body.fragments, answer.payload, terms.schema, now=now, limits=self.limits)
        except ProtocolError:
            self.refused += 1
            return []

    def receive_answer(self, request: ServerRequest, answer: Answer, came: Sequence[Fragment], now: float) -> None:
        """Process the end of a request: a reply, whose fragments are `came`, or an error."""
        held, request.server.is_away = self.last_report(request.server), False
        held.is_asked = False
        report = answer.body if isinstance(answer, Message) else None
        if not isinstance(report, fragments.RolloutsReply):
            # The server does not know this reader's run or table: HELLO fetches the state.
            held.is_known, held.again_at = False, now + REFUSED_INTERVAL
            self.directory.ask_soon()
            if isinstance(answer, Refused) and answer.code in TOO_LARGE:
                self.failed, held.again_at = answer, math.inf
            return
        held.is_known, held.entries, held.clients, held.capacity = True, report.held, report.clients, report.capacity
        self.directory.record_finished(request.server, report.finished)
        for fragment in came:
            self._open_queue().add(fragment)

    def _open_queue(self) -> RolloutQueue:
        if self._queue is None:
            assert self.directory.terms is not None
            self._queue = RolloutQueue(self.directory.terms.schema)
        return self._queue

    # Calls

    def take(self, versions: Mapping[str, int]) -> list[Fragment]:
        """Return the wanted entries if all have arrived, else nothing.

        Args:
            versions: Newest version of each topic; entries that are too old by these versions are discarded.

        Raises:
            ParameterError: the table stores no rollouts, or its capacity is smaller.
            Refused: (code "too_large") an entry of a server's oldest fragment is larger than this reader accepts.
        """
        wanted, terms = self.wanted, self.directory.terms
        if self.failed is not None:
            raise self.failed
        if wanted is None or terms is None:
            return []
        if not registry.has_capability(terms.storage, DeliversOnce):
            names, kind = registry.names_of(DeliversOnce), registry.require_kind(terms.storage)
            raise ParameterError.with_text(
                f"Entries are taken from tables with storage={' or '.join(map(repr, names))}, but table "
                f"{terms.table!r} has storage={terms.storage!r}: call {kind.instead}."
            )
        self._check_capacity(wanted.steps)
        queue = self._open_queue()
        queue.saw_model(terms.parameters.newest_model(versions))
        queue.discard_stale(terms.parameters.max_model_lag)
        taken = queue.take(TakeRequest(wanted.steps, wanted.exact))
        self.taken += sum(map(len, taken))
        return taken

    def _check_capacity(self, steps: int) -> None:
        room = [self.last_report(server).capacity for server in self.directory.known_servers]
        if room and all(room) and steps > sum(room):
            expected = f"at most the capacity of all servers, {sum(room)} entries"
            raise ParameterError("steps", steps, expected)

    def describe_shortage(self) -> tuple[int, int, int, str]:
        """Return entries, fragments kept here and clients for the waiting call, and the reason of its wait."""
        servers, wanted = self.directory.present_servers, self.wanted
        steps, least = (0, 0) if wanted is None else (wanted.steps, wanted.min_clients)
        entries = self.held_entries + sum(self.last_report(each).entries for each in servers)
        if entries >= steps and self.clients < least:
            why = f"waiting for entries of {least - self.clients} more clients ({self.clients} of min_clients={least})"
        else:
            held = f"{entries} of {steps} held, from {self.clients} clients at {len(servers)} servers"
            why = f"waiting for {max(0, steps - entries)} more entries ({held})"
        if self.discarded_entries:
            why += f"; {self.discarded_entries} stale entries were discarded here (max_model_lag)"
        return entries, 0 if self._queue is None else len(self._queue), self.clients, why


def shares(missing: int, held: Sequence[int]) -> list[int]:
    """Return each server's share of the missing entries, in proportion to its held entries and never above."""
    total = sum(held)
    ends = [missing * end // total for end in itertools.accumulate(held, initial=0)]
    return [after - before for before, after in itertools.pairwise(ends)]
