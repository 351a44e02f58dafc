"""Batches from their plan to their last sample: what to ask of which server, and what to make of the answers. Pure: no
lock, no socket, no clock.

    begin     every server has said what it has ──▶ plan ──▶ DRAW 5 to a, DRAW 3 to b      (two rounds at most)
    answered  5 of a, then 3 of b                                                          the round is whole
    finished  weighed together and shuffled ──▶ a batch of 8, or two of 4                  in the order of their plans

A server that refuses its part, or is left out, makes a round short. What came of it, and what comes late, is kept: as
many samples fewer are asked for in the next round, and all of them together make its batches.

Batches drawn ahead of the calls that take them: how many there are to be, of which size, and those that are ready.
Pure: no lock, no socket, no clock.

    a call finds none ready ──▶ twice as many ahead, half of them in one round       the round trip is shared by more
    enough are ready        ──▶ half as many after a while                           batches are no older than they must

A round trip costs about as much for eight small batches as for one, and for two large ones less than twice as much.
A learner that computes for longer than a round trip takes never waits, and has only as many ahead as its reader was
given.

How drawing stands beside recording at all servers of a reader together; `replay.limiter` has the band itself.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memoire.errors import MemoireError, ParameterError, ProtocolError, Refused
from memoire.limits import Limits, MiB
from memoire.replay.limiter import band_settings, why_not_draw
from memoire.replay.parameters import Parameters
from memoire.replay.sampling import Annealing
from memoire.tables import draws
from memoire.tables.calls import REFUSED_INTERVAL, RETRY_INTERVAL, FarServer, FarServers, TableTerms
from memoire.tables.draws import MAX_DRAWN, PooledBatch
from memoire.wire import containers, messages, types
from memoire.wire.compression import CompressionChoice
from memoire.wire.frames import TOO_LARGE, Answer, Buffer, Message
from memoire.wire.layout import ContainerLayout, layout_of
from memoire.wire.messages import ClusterRate, ServerRate
from memoire.wire.parts import ContainerKind
from memoire.wire.rows import sums_of

from .directory import NOTHING, ServerStock

MAX_AHEAD = 16
"""Batches ahead for a learner that waits, at most."""
MAX_AHEAD_BYTES = 64 * MiB
"""Bytes of them, at most: two rounds of two batches of 256 Atari stacks. Larger rounds are in no processor's cache when
they are copied."""
CALM_TAKES = 64
"""Batches that are taken while more are ready, before there are fewer ahead."""


class BatchQueue:
    """The queue between the reader's thread, which puts batches in, and the calls that take them. The owner locks.

    Args:
        ahead: Batches that are drawn before they are asked for, at least 1.
        may_grow: Whether there are more for a learner that waits.
        most_bytes: Bytes of them, at most, if there are more. A round, half of them, is one reply of a server.
    """

    def __init__(self, ahead: int, *, may_grow: bool = True, most_bytes: int = MAX_AHEAD_BYTES) -> None:
        self.batch_size = 0
        """Samples of the batches that are drawn ahead; 0 draws none."""
        self.samples = 0
        """Samples of all batches that were put in."""
        self.drawing = 0
        """Batches that are on their way; the thread sets it, and calls may read it without the lock."""
        self.depth = ahead
        """Batches that are to be ready or on their way."""
        self.failed: MemoireError | None = None
        """Why no batch of this size can come; the next call raises it."""
        self._ahead, self._most, self._calm = ahead, MAX_AHEAD if may_grow else ahead, 0
        self._most_bytes = min(most_bytes, MAX_AHEAD_BYTES)
        self._is_starved = False  # a call found none ready since the newest round began
        self._batch_bytes = 0  # of a batch of this size; 0 before there was one
        self._ready: deque[PooledBatch] = deque()
        self.former: deque[PooledBatch] = deque()
        """Batches of a former size: the thread takes them, and makes others of their samples."""

    def __len__(self) -> int:
        return len(self._ready)

    @property
    def reserve(self) -> int:
        """Samples that each server is to keep for this reader: enough for the batches ahead, wherever they come
        from.
        """
        return self.batch_size * (self.depth + 1)

    @property
    def round(self) -> int:
        """Batches that are drawn in one round."""
        return max(1, self.depth // 2) if self.depth > self._ahead else 1

    @property
    def has_room(self) -> bool:
        """Whether another round is wanted."""
        return (
            self.failed is None and self.batch_size > 0 and len(self._ready) + self.drawing + self.round <= self.depth
        )

    def check(self) -> None:
        """Raise what has ended the newest round, once: the next call has it drawn again."""
        failed, self.failed = self.failed, None
        if failed is not None:
            raise failed

    def starve(self) -> None:
        """A call finds no batch ready."""
        self._is_starved, self._calm = self._batch_bytes > 0, 0

    def begin(self, available: int) -> int:
        """A round begins while there are so many samples; returns how many batches it is to draw, at least 1.

        Where a call waits although there is plenty, the next rounds are larger.
        """
        if self._is_starved and available >= 2 * self.round * self.batch_size:
            most = max(self._ahead, min(self._most, self._most_bytes // self._batch_bytes))
            self.depth = min(2 * self.depth, most)
        self._is_starved = False
        return max(1, min(self.round, available // self.batch_size))

    def resize(self, batch_size: int) -> bool:
        """From now on batches have this size; whether they had another one, so that those that are ready are former."""
        if batch_size == self.batch_size:
            return False
        self.batch_size, self.depth, self.failed = batch_size, self._ahead, None
        self._calm, self._batch_bytes, self._is_starved = 0, 0, False
        self.samples -= sum(len(each.importance) for each in self._ready)
        self.former += self._ready
        self._ready.clear()
        return True

    def put(self, drawn: PooledBatch) -> None:
        """Keep a batch."""
        if len(drawn.importance) != self.batch_size:
            self.former.append(drawn)
            return
        self._ready.append(drawn)
        self.samples += self.batch_size
        self._batch_bytes = self._batch_bytes or drawn.nbytes

    def first(self) -> PooledBatch:
        """The next batch, which there has to be; it stays the next one until `take`."""
        return self._ready[0]

    def take(self) -> None:
        """Give the next batch away."""
        self._ready.popleft()
        self._calm = self._calm + 1 if self._ready else 0
        if self._calm >= CALM_TAKES:
            self._calm, self.depth = 0, max(self._ahead, self.depth // 2)

    def clear(self) -> None:
        """Drop what is there: it was drawn by parameters that no longer hold."""
        self._ready.clear()
        self.former.clear()

    def close(self) -> None:
        """Nothing is drawn ahead any more."""
        self.resize(0)
        self.former.clear()


class RateTracker:
    """How drawing stands beside recording at several servers together, as their reader knows. Belongs to its thread."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[int, ServerRate]] = {}  # of each server: its epoch, and what it said last
        self._places: dict[str, tuple[int, int]] = {}  # of each: entries that can be drawn, and clients
        self._surplus: float | None = None  # None: some have not said yet

    def reset(self) -> None:
        """Another run begins, or other parameters hold."""
        self._known.clear()
        self._places.clear()
        self._surplus = None

    def heard(self, server: str, epoch: int, standing: ServerRate | None, entries: int, clients: int) -> None:
        """What a server says of itself."""
        self._places[server] = entries, clients
        if standing is None:
            self._known.pop(server, None)
            return
        former, self._known[server] = self._known.get(server), (epoch, standing)
        if self._surplus is None:
            return
        if former is None:
            self._surplus += 0.0 if standing.is_told else standing.surplus
            return
        inserted, drawn = standing.inserted, standing.drawn
        if former[0] == epoch:
            inserted, drawn = inserted - former[1].inserted, drawn - former[1].drawn
        self._surplus += inserted * standing.ratio - drawn

    def why_not_draw(self, parameters: Parameters, servers: list[str], samples: int, on_way: int) -> str:
        """Why a batch has to wait for entries; "" when it has not.

        Args:
            servers: Those that are there.
            on_way: Samples that were asked for and have not come.
        """
        if parameters.samples_per_insert_tolerance is None and not parameters.min_size:
            return ""
        said = [self._known[server][1] for server in servers if server in self._known]
        if len(said) < len(servers) or any((each.ratio, each.tolerance) != band_settings(parameters) for each in said):
            return "waits for all servers to say how many entries were recorded"
        if self._surplus is None and on_way:  # drawn before there was a band: not to be made good, once it has come
            return "waits for samples that were asked for before the band began"
        if self._surplus is None:  # what somebody told them is what was known of all
            told = [each.surplus for each in said if each.is_told]
            self._surplus = sum(each.surplus for each in said if not each.is_told) + (max(told) if told else 0.0)
        entries = sum(self._places[server][0] for server in servers)
        return why_not_draw(parameters, samples, entries, self._surplus - on_way)

    def band(self, server: str, servers: list[str]) -> ClusterRate | None:
        """What to tell a server of all."""
        if self._surplus is None or server not in self._known:
            return None
        said = self._known[server][1]
        others = [other for other in servers if other in self._places and other != server]
        entries = sum(self._places[other][0] for other in others)
        mine = self._places[server][1] + 1
        share = mine / (mine + sum(self._places[other][1] + 1 for other in others))
        return ClusterRate(self._surplus, said.inserted, said.drawn, entries, share, said.ratio, said.tolerance)


MIN_RETRY_INTERVAL = 0.005
"""Seconds before servers that had too few samples are asked again; doubles up to `RETRY_INTERVAL` while there are too
few. A learner that uses samples up as they come waits no longer for a batch; what comes meanwhile makes a round.
"""
MAX_SUMS_AGE = 1.0
"""Seconds for which what a server said of its clients is believed."""


@dataclass(frozen=True, slots=True)
class DrawRequest:
    """A request to send to a server; what ends it goes to `Rounds.answered`."""

    stock: ServerStock
    number: int
    body: messages.Sums | messages.Draw

    samples: int = 0
    """That it takes."""


@dataclass(slots=True, eq=False)
class _DrawRound:
    """Batches on their way: what was planned for all of them together, and what came of it."""

    plan: draws.Plan
    batches: int
    batch_size: int
    samples: int
    """That the servers are asked for."""
    kept: int
    """Of short rounds, which make its batches whole."""
    layout: ContainerLayout
    parameters: Parameters
    open: set[int] = field(default_factory=set)
    """Numbers of the draws that are awaited."""
    parts: list[Buffer] = field(default_factory=list)
    """Containers that came."""


def checked_partition(given: object) -> tuple[int, int]:
    """Which part of the clients a reader draws from: (i, n) is part i, from 0, of those of n learners.

    Raises:
        ParameterError: it is no pair of whole numbers (i, n) with 0 <= i < n < 2**32.
    """
    if isinstance(given, (tuple, list)) and len(given) == 2:
        part, of = given
        if type(part) is int and type(of) is int and 0 <= part < of < 1 << 32:
            return part, of
    raise ParameterError("partition", given, "(i, n): learner i, counted from 0, of n")


class Rounds:
    """The batches on their way. Belongs to the reader's thread.

    Args:
        directory: Which servers are there.
        prefetch: The size of batches, and those that are ready.
        partition: Which part of the clients to draw from: see `checked_partition`.
        numbers: Of requests: one counter for all messages of the reader.
        rng: Of counts and order.
    """

    def __init__(
        self,
        directory: FarServers,
        prefetch: BatchQueue,
        partition: tuple[int, int],
        *,
        limits: Limits,
        numbers: Iterator[int],
        rng: random.Random,
    ) -> None:
        self.balance = RateTracker()
        self.waits_for = ""
        """Why the next batch waits for entries; "" when it does not."""
        self.shortage = (0, 0)
        """Samples and clients that there were for this reader when too few samples were found last."""
        self.short = 0
        """Samples that a server was asked for and no longer had."""
        self.refused: Counter[str] = Counter()
        """Rounds that were given up because of what a server sent, by code."""
        self._directory, self._prefetch, self._partition = directory, prefetch, partition
        self._limits, self._numbers, self._rng = limits, numbers, rng
        self._annealing, self._choice = Annealing(), CompressionChoice()
        self._stocks: dict[FarServer, ServerStock] = {}
        self._rounds: list[_DrawRound] = []  # oldest first; their batches come in this order
        self._late: dict[int, _DrawRound] = {}  # number of each open draw of a server that was left out -> its round
        self._kept: draws.PooledBatch | None = None  # samples that came and are in no batch yet: of short rounds
        self._spoken_for = 0  # those of them that an open round has counted on
        self._drawn = 0  # samples that all servers were asked for
        self._wanted = 0  # samples of a batch that could not be drawn when that was tried last
        self._pause = MIN_RETRY_INTERVAL

    # When there is something to do

    def next_time(self, now: float) -> float:
        """When `late` or `begin` has something to do; infinity while only an answer can bring that about."""
        stocks = [self.stock(server) for server in self._directory.known]
        times = [stock.late_at for stock in stocks]
        if self.is_hungry and self._directory.is_meeting(now):
            times.append(self._directory.meets_until)
        elif self.is_hungry:  # a server that has said what it has waits for the others, not for a time
            times += [stock.again_at for stock in stocks if not stock.is_asked and stock.table is None]
        return min(times, default=float("inf"))

    @property
    def is_hungry(self) -> bool:
        """Whether another round is to be drawn, and may be on its way."""
        return len(self._rounds) < types.DRAWS_IN_FLIGHT and self._prefetch.has_room

    def stock(self, server: FarServer) -> ServerStock:
        """What a server has."""
        if server not in self._stocks:
            self._stocks[server] = ServerStock(server)
        return self._stocks[server]

    # Servers that do not answer

    def late(self, now: float, down: Collection[object]) -> list[FarServer]:
        """Servers that a batch is not to wait for any longer; `down` are addresses that surely have no connection."""
        stocks = [self.stock(server) for server in self._directory.known]
        awaited = [stock for stock in stocks if stock.late_at < float("inf")]
        return [stock.server for stock in awaited if stock.late_at <= now or stock.server.address in down]

    def leave_out(self, server: FarServer) -> None:
        """It did not answer in time: batches go on without it, while the question stays open."""
        stock, server.is_away = self.stock(server), True
        stock.table = None
        stock.give_up_pages()
        for made in self._rounds:
            self._late.update(dict.fromkeys(made.open & stock.open, made))
            made.open -= stock.open

    def forget(self, server: FarServer) -> None:
        """No address lists this server any more: leave it out of batches, and drop all that is known of it."""
        self.leave_out(server)
        for number in self._stocks.pop(server).open:
            self._late.pop(number, None)

    def give_up(self) -> None:
        """Other parameters hold: batches on their way were drawn by the former ones."""
        self._rounds.clear()
        self._late.clear()
        self._kept, self._spoken_for = None, 0
        for stock in self._stocks.values():
            stock.table, stock.server.fingerprint = None, 0
        self._prefetch.drawing = 0
        self.balance.reset()

    # Drawing

    def begin(self, now: float) -> list[DrawRequest]:
        """Plan the batches that are wanted over the servers that are there; the requests to send for it."""
        asks: list[DrawRequest] = []
        while self.is_hungry and not self._directory.is_meeting(now):
            asks += self._refresh(now)
            planned = self._plan(now)
            if planned is None:
                break
            asks += planned
        return asks

    def _refresh(self, now: float) -> list[DrawRequest]:
        """Ask the servers what they have that have not said so, or not lately."""
        asks = []
        for server in self._directory.known:
            stock = self.stock(server)
            if not stock.is_asked and stock.is_older(MAX_SUMS_AGE, now):
                stock.table = None
                if now >= stock.again_at:
                    asks.append(self._ask(stock, self._sums_of(stock), now))
        return asks

    def _plan(self, now: float) -> list[DrawRequest] | None:
        """The draws of the next batch; None while a server has not said what it has, or there is too little."""
        terms = self._directory.terms
        there = [self.stock(server) for server in self._directory.there]
        tables = [stock.table for stock in there if stock.table is not None]
        if terms is None or not there or len(tables) < len(there):
            return None
        if differing := self._directory.differing():
            # Batches of servers with different parameters would be mixed: ask them again, and what they have.
            self.waits_for = f"server {differing[0].name} draws by other parameters"
            for server in differing:
                self.stock(server).table, self.stock(server).again_at = None, now + REFUSED_INTERVAL
            self._directory.ask_soon()
            return None
        batches = self._batches_of(terms, tables)
        size = batches * self._prefetch.batch_size
        kept = 0 if self._kept is None else min(size - 1, max(0, len(self._kept.importance) - self._spoken_for))
        size, names = size - kept, [stock.server.name for stock in there]
        on_way = sum(stock.on_way for stock in there)
        self.waits_for = self.balance.why_not_draw(terms.parameters, names, size, on_way)
        plan = None if self.waits_for else draws.plan(tables, size, self._rng.random())
        self._wanted = size if plan is None else 0
        if plan is None:
            self._wait_for_more(there, tables, now)
            return None
        layout = layout_of(terms.schema, terms.parameters, ContainerKind.DRAWN)
        made = _DrawRound(plan, batches, self._prefetch.batch_size, size, kept, layout, terms.parameters)
        return self._draw(made, there, now)

    def _batches_of(self, terms: TableTerms, tables: list[NDArray[np.void]]) -> int:
        """How many batches the next round is to draw: several are one draw, whose samples are dealt out at random."""
        parameters = terms.parameters
        # A band counts each batch by itself, and ragged values are padded to the longest one of their batch.
        if parameters.samples_per_insert_tolerance is not None or layout_of(terms.schema, parameters).ragged:
            return 1
        available = sum(int(table["reserved"].sum()) for table in tables)
        if parameters.reuse_cache and available:
            available = MAX_DRAWN
        return self._prefetch.begin(min(available, MAX_DRAWN))

    def _wait_for_more(self, there: list[ServerStock], tables: list[NDArray[np.void]], now: float) -> None:
        samples = sum(int(table["reserved"].sum()) for table in tables)
        samples += 0 if self._kept is None else len(self._kept.importance)
        self.shortage = samples, sum(len(table) for table in tables)
        for stock in there:
            stock.table, stock.again_at = None, now + self._pause
        self._pause = min(2.0 * self._pause, RETRY_INTERVAL)

    def _draw(self, made: _DrawRound, there: list[ServerStock], now: float) -> list[DrawRequest]:
        """Begin a round: the draws of its plan, and a question to servers that give nothing to it."""
        self._rounds.append(made)
        self._prefetch.drawing += made.batches
        self._spoken_for += made.kept
        self._pause = MIN_RETRY_INTERVAL
        asks = []
        for stock, counts in zip(there, made.plan.counts, strict=True):
            stock.again_at = 0.0
            stock.take(counts)
            if len(counts):
                samples = int(counts["count"].sum())
                self._drawn += samples
                stock.drawn += samples
                facts: dict[str, Any] = {"in_pages": True, "packed": self._choice.packs, **self._facts(stock)}
                asks.append(self._ask(stock, messages.Draw(counts=counts.tobytes(), **facts), now, counts))
                made.open.add(asks[-1].number)
            elif not stock.is_asked:  # it is to say what it has by the next draw but one
                asks.append(self._ask(stock, self._sums_of(stock), now))
        return asks

    def _sums_of(self, stock: ServerStock) -> messages.Sums:
        """What a server is asked that only says what it has."""
        return messages.Sums(after=stock.after, wanted=min(self._wanted, (1 << 32) - 1), **self._facts(stock))

    def _facts(self, stock: ServerStock) -> dict[str, Any]:
        """What this reader says of itself to a server whenever it asks it."""
        names = sorted(server.name for server in self._directory.known)
        there = [server.name for server in self._directory.there]
        part, of = self._partition
        return {
            "reserve": self._prefetch.reserve,
            "elsewhere": self._drawn - stock.drawn,
            # Of few clients at each of several servers, the first ones belong to different learners.
            "part": (part + names.index(stock.server.name)) % of,
            "of": of,
            "band": self.balance.band(stock.server.name, there),
        }

    def _ask(
        self, stock: ServerStock, body: messages.Sums | messages.Draw, now: float, counts: NDArray[np.void] = NOTHING
    ) -> DrawRequest:
        number = next(self._numbers)
        stock.ask(number, counts, now)
        return DrawRequest(stock, number, body, int(counts["count"].sum()))

    # What came of it

    def answered(self, ask: DrawRequest, answer: Answer, now: float) -> None:
        """A request has ended by a reply or an error. Batches may be whole by it, and others may be begun."""
        took = ask.stock.answered(ask.number, now)
        ask.stock.server.is_away = False
        said = answer.body if isinstance(answer, Message) else None
        of = (each for each in self._rounds if ask.number in each.open)
        made = self._late.pop(ask.number, None) or next(of, None)
        if isinstance(said, messages.Drawn) and isinstance(ask.body, messages.Draw):
            self._choice.spend(took, 0.0 if len(self._prefetch) else took)
            self._choice.carried(ask.samples)
        if isinstance(said, (messages.Summed, messages.Drawn)):
            after = ask.body.after if isinstance(ask.body, messages.Sums) else None
            table = ask.stock.collect(sums_of(said.clients), after or b"", is_whole=said.is_whole)
            ask.stock.server.fingerprint = said.parameters
            if table is not None:
                entries = ask.stock.report(table, now)
                self.balance.heard(ask.stock.server.name, said.epoch, said.standing, entries, len(table))
                self._directory.reported(ask.stock.server, said.finished)
        else:
            ask.stock.give_up_pages()
            if isinstance(answer, Refused) and answer.code in TOO_LARGE:
                if made is None or made.batch_size == self._prefetch.batch_size:  # else no call asks for so many
                    self._prefetch.failed = answer
                self._drawn -= ask.samples  # nothing was drawn
                ask.stock.drawn -= ask.samples
            # It does not know this reader's run or home (any more): HELLO says what is true now.
            ask.stock.again_at = now + REFUSED_INTERVAL
            self._directory.ask_soon()
        if made is None:
            return
        made.open.discard(ask.number)
        payload = answer.payload if isinstance(answer, Message) else None
        if isinstance(said, messages.Drawn) and payload is not None:
            if said.parameters in (0, made.parameters.fingerprint):
                made.parts.append(payload)
            else:
                self.refused["parameters"] += 1
        if made not in self._rounds:  # it came late
            self.short -= self._keep(made)

    def finished(self) -> list[draws.PooledBatch]:
        """Batches that are whole now, in the order in which they were planned."""
        found = []
        while self._rounds and not self._rounds[0].open:
            made = self._rounds.pop(0)
            self._prefetch.drawing -= made.batches
            self._spoken_for -= made.kept
            self.short += made.samples - self._keep(made)
            found += self._whole()
        while self._prefetch.former:
            self._add(self._prefetch.former.popleft())
        return found + self._whole()

    def _keep(self, made: _DrawRound) -> int:
        """Weigh and shuffle what came, and keep it; returns its samples."""
        held = []
        for payload in made.parts:
            try:
                held.append(made.plan.checked(containers.check(payload, made.layout, self._limits)))
            except ProtocolError as error:  # what the others gave is none the worse for it
                self.refused[error.code] += 1
                self._directory.ask_soon()  # perhaps parameters changed
        made.parts.clear()
        if came := sum(part.samples for part in held):
            # The exponent is that of the first batch for all of a round.
            beta, seed = self._annealing.next(made.parameters), self._rng.getrandbits(64)
            self._annealing.batches -= 1
            self._add(draws.finish(made.plan, held, made.layout, made.parameters, seed, beta))
        return came

    def _add(self, drawn: draws.PooledBatch) -> None:
        self._kept = drawn if self._kept is None else self._kept.joined(drawn, self._is_global)

    def _whole(self) -> list[draws.PooledBatch]:
        """Batches of what is kept, as many as it makes; what is left over stays for the next ones."""
        kept, size = self._kept, self._prefetch.batch_size
        if kept is None or not 0 < size <= (count := len(kept.importance)):
            return []
        left = count % size
        self._annealing.batches += count // size
        self._kept = kept.rows(slice(count - left, count), self._is_global) if left else None
        return [kept] if count == size else list(kept.parted(size, self._is_global))

    @property
    def _is_global(self) -> bool:
        terms = self._directory.terms
        return terms is not None and terms.parameters.normalize == "global"
