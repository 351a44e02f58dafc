"""What a reader takes of a table of rollouts: how many entries of which server, and what came. Pure: no lock, no
socket, no clock.

    every server says what it holds     a 900    b 300        a call wants 800
    shares by what is held              TAKE 600 to a, TAKE 200 to b
    what came is kept here until the call has all of it; what is over, or comes late, is for the next call

A server that is left out is not waited for. What it sends later is kept, too: it has handed it out for good.
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
from memoire.tables.base import HandsOutOnce, TakeRequest
from memoire.tables.calls import REFUSED_INTERVAL, RETRY_INTERVAL, FarRequest, FarServer, FarServers
from memoire.wire.frames import TOO_LARGE, Answer, Message

from . import fragments
from .fragments import RolloutQueue, unpacked


@dataclass(slots=True)
class HeldRollouts:
    """What one server holds, as it said last, and the request to it that is open."""

    entries: int = 0
    is_known: bool = False
    """Whether the next shares may be made of that; else it is asked before."""
    clients: int = 0
    """Of those entries."""
    capacity: int = 0
    """Entries that there is room for; 0 before it has answered."""
    again_at: float = 0.0
    """When to ask it again: before, it would say the same."""
    is_asked: bool = False
    asked_at: float = 0.0


@dataclass(slots=True)
class Takes:
    """The entries that calls wait for, and those that came. The owner locks all but `late` and `read`.

    Args:
        directory: Which servers are there, and what they say of the table.
    """

    CALLED: ClassVar = "rollouts"
    directory: FarServers
    limits: Limits
    wanted: TakeRequest | None = None
    """What a call waits for now."""
    taken: int = 0
    """Entries that calls got."""
    refused: int = 0
    """Replies that are not of this protocol: what a server gave with them is lost."""
    failed: Refused | None = None
    """Why the call that waits can get nothing."""
    _held: dict[FarServer, HeldRollouts] = field(default_factory=dict)
    _queue: RolloutQueue | None = None  # made when the first server has said what an entry is

    # When there is something to do

    def next_time(self, now: float) -> float:
        """When `late` or `begin` has something to do; infinity while only an answer can bring that about."""
        times = [self._late_at(server) for server in self.directory.known]
        if self._missing > 0:
            there = [self.held(server) for server in self.directory.known]
            times += [held.again_at for held in there if not held.is_asked and not held.is_known]
            if self.directory.is_meeting(now):
                times.append(self.directory.meets_until)
        return min(times, default=math.inf)

    def held(self, server: FarServer) -> HeldRollouts:
        """What a server holds."""
        return self._held.setdefault(server, HeldRollouts())

    @property
    def kept(self) -> int:
        """Entries that came, and that no call has got yet."""
        return 0 if self._queue is None else self._queue.entries

    @property
    def stale(self) -> int:
        """Entries that came, and were passed over here: their model was too old by then."""
        return 0 if self._queue is None else self._queue.counts.stale

    @property
    def _missing(self) -> int:
        """Entries that have to come for the call that waits; 0 or less: none."""
        return 0 if self.wanted is None else self.wanted.steps - self.kept

    # Servers that do not answer

    def _late_at(self, server: FarServer) -> float:
        held = self.held(server)
        return held.asked_at + calls.LEFT_OUT_TIMEOUT if held.is_asked and not server.is_away else math.inf

    def late(self, now: float, down: Collection[object]) -> list[FarServer]:
        """Servers that no call waits for any longer; `down` are addresses that surely have no connection."""
        times = [(self._late_at(server), server) for server in self.directory.known]
        return [server for at, server in times if at <= now or (at < math.inf and server.address in down)]

    def leave_out(self, server: FarServer) -> None:
        """It did not answer in time: calls go on without it, while the question stays open."""
        server.is_away = True
        self.held(server).is_known = False

    def forget(self, server: FarServer) -> None:
        """It is on no list any more: nothing is kept of what it said. What came from it stays."""
        self._held.pop(server, None)

    def clear(self) -> None:
        """Another run is counted: what came before belongs to none of its learners."""
        if self._queue is not None:
            self._queue.clear()

    # Taking

    def want(self, wanted: TakeRequest | None) -> None:
        """A call waits for this from now on; None: it has ended."""
        self.wanted, self.failed = wanted, None
        for held in self._held.values():
            held.is_known, held.again_at = False, 0.0

    def begin(self, now: float) -> list[FarRequest]:
        """The requests to send now: what is held, or how much is taken of whom."""
        if self.wanted is None or self._missing <= 0 or self.directory.is_meeting(now):
            return []
        known = self.directory.known
        # Nobody else can give what a single server lacks, so it is asked for all at once.
        steps = self._missing if len(known) == 1 and self.wanted.min_clients <= 1 else 0
        asks = [self._ask(each, steps, now) for each in known if self._has_to_say(each, now)]
        return asks or self._shared(now)

    def _has_to_say(self, server: FarServer, now: float) -> bool:
        held = self.held(server)
        return not held.is_known and not held.is_asked and now >= held.again_at

    def _shared(self, now: float) -> list[FarRequest]:
        """Share what is missing out, once every server that is there has said what it holds."""
        there = self.directory.there
        held = [self.held(server) for server in there]
        if not there or not all(each.is_known for each in held):
            return []
        counts = [each.entries for each in held]
        if sum(counts) < self._missing or not self._has_clients():
            for each in held:
                each.is_known, each.again_at = False, now + RETRY_INTERVAL
            return []
        parts = zip(there, shares(self._missing, counts), strict=True)
        return [self._ask(server, share, now) for server, share in parts if share]

    def _ask(self, server: FarServer, steps: int, now: float) -> FarRequest:
        assert self.wanted is not None
        held, wanted = self.held(server), self.wanted
        held.is_known, held.is_asked, held.asked_at = False, True, now
        each = -(-self._missing // max(1, len(self.directory.there)))
        body = fragments.Take(
            steps=steps, least=steps, exact=wanted.exact, release=wanted.release, wanted=min(each, (1 << 32) - 1)
        )
        return FarRequest(server, body)

    def _has_clients(self) -> bool:
        assert self.wanted is not None
        return self.wanted.min_clients <= 1 or self.clients >= self.wanted.min_clients

    @property
    def clients(self) -> int:
        """Clients of which entries are held, here or at a server; one that moved is counted at both."""
        here = 0 if self._queue is None else self._queue.clients
        return here + sum(self.held(server).clients for server in self.directory.there)

    # What came of it

    def read(self, answer: Answer, now: float) -> list[Fragment]:
        """The fragments of a reply; none where it is an error, or is not of this protocol."""
        terms = self.directory.terms
        if terms is None or not isinstance(answer, Message) or not isinstance(answer.body, fragments.Rollouts):
            return []
        try:
            return unpacked(answer.body.fragments, answer.payload, terms.schema, now=now, limits=self.limits)
        except ProtocolError:
            self.refused += 1
            return []

    def answered(self, request: FarRequest, answer: Answer, came: Sequence[Fragment], now: float) -> None:
        """A request has ended by a reply, of which `came` was unpacked, or by an error."""
        held, request.server.is_away = self.held(request.server), False
        held.is_asked = False
        said = answer.body if isinstance(answer, Message) else None
        if not isinstance(said, fragments.Rollouts):
            # It does not know this reader's run or table (any more): HELLO says what is true now.
            held.is_known, held.again_at = False, now + REFUSED_INTERVAL
            self.directory.ask_soon()
            if isinstance(answer, Refused) and answer.code in TOO_LARGE:
                self.failed, held.again_at = answer, math.inf
            return
        held.is_known, held.entries, held.clients, held.capacity = True, said.held, said.clients, said.capacity
        self.directory.reported(request.server, said.finished)
        for fragment in came:
            self._kept().add(fragment)

    def _kept(self) -> RolloutQueue:
        if self._queue is None:
            assert self.directory.terms is not None
            self._queue = RolloutQueue(self.directory.terms.schema)
        return self._queue

    # Calls

    def take(self, versions: Mapping[str, int]) -> list[Fragment]:
        """The entries that are wanted, if all are here; else none.

        Args:
            versions: Newest version of each topic: what is too old by now is passed over.

        Raises:
            ParameterError: the table stores no rollouts, or never has room for so many.
            Refused: (code "too_large") an entry of a server's oldest fragment is larger than this reader takes.
        """
        wanted, terms = self.wanted, self.directory.terms
        if self.failed is not None:
            raise self.failed
        if wanted is None or terms is None:
            return []
        if not registry.offers(terms.storage, HandsOutOnce):
            names, kind = registry.names_of(HandsOutOnce), registry.named(terms.storage)
            expected = (
                f"{' or '.join(map(repr, names))} {HandsOutOnce.WANTED}; of table {terms.table!r} use {kind.instead}"
            )
            raise ParameterError("storage", terms.storage, expected)
        self._check_capacity(wanted.steps)
        queue = self._kept()
        queue.saw_model(terms.parameters.newest_model(versions))
        queue.pass_over(terms.parameters.max_model_lag)
        taken = queue.take(TakeRequest(wanted.steps, wanted.exact))
        self.taken += sum(map(len, taken))
        return taken

    def _check_capacity(self, steps: int) -> None:
        room = [self.held(server).capacity for server in self.directory.known]
        if room and all(room) and steps > sum(room):
            expected = f"at most the capacity of all servers, {sum(room)} entries: more are never there"
            raise ParameterError("steps", steps, expected)

    def why_not(self) -> tuple[int, int, int, str]:
        """Entries, fragments kept here and clients that there are for the call that waits, and what it waits for."""
        there, wanted = self.directory.there, self.wanted
        steps, least = (0, 0) if wanted is None else (wanted.steps, wanted.min_clients)
        entries = self.kept + sum(self.held(each).entries for each in there)
        if entries >= steps and self.clients < least:
            why = f"waiting for entries of {least - self.clients} more clients ({self.clients} of min_clients={least})"
        else:
            held = f"{entries} of {steps} held, of {self.clients} clients at {len(there)} servers"
            why = f"waiting for {max(0, steps - entries)} more entries ({held})"
        if self.stale:
            why += f"; {self.stale} entries were passed over here (max_model_lag)"
        return entries, 0 if self._queue is None else len(self._queue), self.clients, why


def shares(missing: int, held: Sequence[int]) -> list[int]:
    """How many of the missing entries each server gives: in proportion to what it holds, and never more."""
    total = sum(held)
    ends = [missing * end // total for end in itertools.accumulate(held, initial=0)]
    return [after - before for before, after in itertools.pairwise(ends)]
