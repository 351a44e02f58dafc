"""Example of a kind of table outside memoire: a stack of the best episodes, by the sum of their rewards.

Small but complete: docs/development/extending.md explains it. No file of memoire names it.
"""

import heapq
import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta

from memoire import Parameters, Schema
from memoire.building import whole
from memoire.errors import ProtocolError
from memoire.kinds import (
    Body,
    ByteBudget,
    CalledServers,
    Count,
    EpisodesSide,
    Handler,
    HandlerContext,
    HasCalls,
    Kind,
    LastingPool,
    MessageHeader,
    PoolPlace,
    PoolStats,
    PushedBody,
    RecordBody,
    RemoteCalls,
    Reply,
    RestoreOutcome,
    SavedRecord,
    Signed,
    TableSettings,
    TakesPushes,
    Transport,
    body,
    check_payload,
    counter,
    gauge,
    types,
)
from memoire.limits import Limits

LIMITS = Limits()
PUSH_BEST = types.Type(128, "PUSH_BEST", types.ACTORS, types.ALWAYS, large=True, pushed=True)
BEST = types.Type(129, "BEST", types.READERS)
STACK = types.Type(130, "STACK", payload=types.MAYBE, large=True)


@body(PUSH_BEST)
class PushBest(PushedBody, frozen=True, kw_only=True, omit_defaults=True):
    """Push of an episode, the payload, with its score."""

    score: Signed
    entries: Count


@body(BEST)
class Best(Body, frozen=True, kw_only=True, omit_defaults=True):
    """Request for the best episodes; answered by STACK."""

    most: Annotated[int, Meta(ge=1, le=1024)] = 1


@body(STACK)
class Stack(Body, frozen=True, kw_only=True, omit_defaults=True):
    """The best episodes, best first; the payload holds them one behind the other."""

    scores: Annotated[list[Signed], Meta(max_length=1024)] = []
    sizes: Annotated[list[Count], Meta(max_length=1024)] = []


class StackSettings(msgspec.Struct, frozen=True):
    keep: int = 16

    def check(self, schema: Schema, parameters: Parameters) -> None:
        """Refuse a number of episodes that is out of range."""
        whole("keep", self.keep, 1, 10**6)

    def content_settings(self, schema: Schema) -> dict[str, Any]:
        """Return no settings: stored episodes do not depend on `keep`."""
        return {}


@dataclass(frozen=True)
class StackFigures:
    replaced: Annotated[int, counter("stack_replaced", "Replaced", "Episodes that a better one replaced.")]
    best: Annotated[float | None, gauge("stack_best", "Best", "Score of the best episode.", adds="max")]


class StackRecord(RecordBody, frozen=True, kw_only=True, omit_defaults=True):
    """An episode in a snapshot."""

    kind: ClassVar = 128
    has_payload: ClassVar = True
    score: Signed
    entries: Count

    def count_contribution(self, payload_bytes: int) -> dict[str, int]:
        return {"episodes": 1, "entries": self.entries, "bytes": payload_bytes}


class Held(NamedTuple):
    """Stored episode with its score."""

    score: float
    payload: bytes
    samples: int


class StackCalls:
    """Calls of a learner on a stack, in the server's process or remote."""

    def __init__(self, transport: Transport) -> None:
        self._transport, self._servers = transport, CalledServers(transport, Stack)

    def best(self, most: int = 1, timeout: float = 20.0) -> list[tuple[float, bytes]]:
        """Return the best episodes of all servers with their scores, best first."""
        episodes = list[tuple[float, bytes]]()
        for reply, payload in self._servers.replies_to_same(Best(most=most), self._transport.now() + timeout).values():
            ends = list(itertools.accumulate(reply.sizes))
            parts = [bytes(payload[end - size : end]) for size, end in zip(reply.sizes, ends, strict=True)]
            episodes += zip(reply.scores, parts, strict=True)
        return sorted(episodes, reverse=True)[:most]


class BestEpisodes(StackCalls, RemoteCalls):
    """Connection of a remote learner to a stack."""

    def __init__(self, addresses: str, table: str) -> None:
        RemoteCalls.__init__(self, addresses, "stack", table=table)
        StackCalls.__init__(self, self._far)
        self._meet(20.0)


class StackPool(LastingPool, TakesPushes, HasCalls):
    """Pool of the best episodes of all clients."""

    def __init__(
        self,
        schema: Schema,
        parameters: Parameters,
        *,
        keep: int,
        byte_limit: int,
        client_timeout: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(client_timeout, clock)
        self.parameters, self.byte_limit, self.least_bytes, self._keep = parameters, byte_limit, 1, keep
        self._heap: list[Held] = []  # all attributes from here belong to the lock
        self._bytes = self._added = self._replaced = 0

    def check(self, body: Body, payload: Any, *, limits: Limits = LIMITS, checksum: int | None = None) -> Held:
        """Return a pushed episode with its score, after checks of its type and checksum."""
        if not isinstance(body, PushBest):
            raise ProtocolError("unexpected", f"{body.type.name} was pushed; this table holds the best episodes")
        if checksum is not None:
            check_payload(payload, checksum)
        return Held(body.score, bytes(payload), body.entries)

    def add(self, client_id: bytes, sequence: int, held: Held) -> int:
        """Store an episode if it is good enough; return the number of episodes that were dropped."""
        with self._waiter.lock:
            self._waiter.check_open()
            self._hear(client_id)
            self._added += 1
            return self._put(held)

    def _put(self, held: Held) -> int:
        heapq.heappush(self._heap, held)
        self._bytes += len(held.payload)
        gone = 0
        while len(self._heap) > self._keep or self._bytes > self.byte_limit:
            self._bytes -= len(heapq.heappop(self._heap).payload)
            gone += 1
        self._replaced += gone
        return gone

    def calls(self, transport: Transport, **options: Any) -> StackCalls:
        return StackCalls(transport)

    def best(self, most: int) -> list[Held]:
        """Return the best episodes, best first."""
        with self._waiter.lock:
            self._waiter.check_open()
            return sorted(self._heap, reverse=True)[:most]

    def join_budget(self, budget: ByteBudget, name: str) -> None:
        """Count the pool's bytes in the budget of all tables."""
        budget.add_holder(name, measure=lambda: self._bytes)

    def limit_bytes(self, byte_limit: int) -> int:
        """Set the limit of bytes; return the number of episodes that were dropped."""
        with self._waiter.lock:
            self.byte_limit, held, self._heap, self._bytes = byte_limit, self._heap, [], 0
            return sum(map(self._put, held))

    def configure(self, parameters: Parameters, *, discard_mismatched: bool = False) -> int:
        """Set parameters; stored episodes do not depend on them."""
        self.parameters = parameters
        return 0

    def entries(self) -> int:
        return sum(each.samples for each in self.best(self._keep))

    def stats(self) -> PoolStats:
        with self._waiter.lock:
            entries = sum(each.samples for each in self._heap)
            own = StackFigures(self._replaced, max(each.score for each in self._heap) if self._heap else None)
            return PoolStats(
                clients=len(self._clients), caches=len(self._heap), bytes=self._bytes, unused=entries, held=entries,
                added=self._added, drawn=0, overwritten=self._replaced, overwritten_samples=0, left=0, misses=0, own=own,
            )  # fmt: skip

    @property
    def is_untouched(self) -> bool:
        """True if no episode was ever pushed."""
        return not self._added

    def records(self) -> Iterator[tuple[RecordBody, Any]]:
        for each in self.best(self._keep):
            yield StackRecord(score=each.score, entries=each.samples), each.payload

    def put_record(self, record: SavedRecord) -> RestoreOutcome:
        """Store a saved episode, unless it is already there."""
        assert isinstance(record.body, StackRecord)
        held = Held(record.body.score, record.payload, record.body.entries)
        with self._waiter.lock:
            if held in self._heap:
                return RestoreOutcome(False)
            return RestoreOutcome(True, self._put(held), {"episodes": 1, "entries": held.samples})


def answers(context: HandlerContext) -> Mapping[type[Body], Handler]:
    def best(now: float, header: MessageHeader, body: Best, payload: Any) -> Reply:
        episodes = context.table(header).require_for(StackPool, "BEST").best(body.most)
        sizes = [len(each.payload) for each in episodes]
        return Reply(
            Stack(scores=[each.score for each in episodes], sizes=sizes),
            b"".join(each.payload for each in episodes) or None,
        )

    return {Best: best}


class StackSide(EpisodesSide):
    """Open episodes at an actor, each of which is pushed with its score when it is closed."""

    STORED = "the best episodes: closed ones are pushed"

    def message_of(self, shipment: Any) -> Callable[[int, int, int], PushedBody]:
        """Return a function that makes the push of an episode with its score."""
        score, entries = float(np.sum(shipment.returned)), shipment.entries
        return lambda since, number, pushed: PushBest(
            since=since, number=number, pushed_bytes=pushed, score=score, entries=entries
        )


class StackKind(Kind):
    """Kind of tables that keep a stack of the best episodes."""

    name, holds, room = "stack", "episodes", "episodes"
    pool, saved, answers = f"{__name__}:StackPool", f"{__name__}:StackRecord", f"{__name__}:answers"
    actor, settings = f"{__name__}:StackSide", f"{__name__}:StackSettings"
    offers = ("TakesPushes", "HasCalls", "StackPool")
    instead = "best(most)"

    def _pool_options(self, settings: TableSettings, place: PoolPlace) -> dict[str, Any]:
        return {"keep": settings.own.keep}


KIND = StackKind()
