"""Draw rounds of a reader: which server to ask for which samples, and batches made of the replies. Pure: no lock, no
socket, no clock.

    begin     every server has reported its stock ──▶ plan ──▶ DRAW 5 to a, DRAW 3 to b    (two rounds at most)
    answered  5 of a, then 3 of b                                                          the round is whole
    finished  weighed together and shuffled ──▶ a batch of 8, or two of 4                  in the order of their plans

If a server refuses its part, or is left out, the round is short. Samples of short rounds and late samples are kept: the
next round asks for that many fewer, and kept and new samples together make its batches.

Batch queue: batches drawn ahead of the calls that take them, their size and number. Pure: no lock, no socket, no clock.

    a call finds no batch ready ──▶ twice as many ahead, half of them in one round   more batches share a round trip
    enough are ready            ──▶ half as many after a while                       batches are as new as possible

A round trip costs about as much for eight small batches as for one, and for two large ones less than twice as much.
If a learner computes for longer than a round trip, it never waits, and the queue keeps its initial depth.

Rate tracker: ratio of draws to inserts at all servers of a reader together; `replay.limiter` implements the band.
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
from memoire.tables.calls import REFUSED_INTERVAL, RETRY_INTERVAL, TableServer, TableServers, TableTerms
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
"""Maximum batches ahead for a learner that waits."""
MAX_AHEAD_BYTES = 64 * MiB
"""Maximum bytes of batches ahead: two rounds of two batches of 256 Atari stacks. Larger rounds do not stay in a
processor's cache until they are copied."""
CALM_TAKES = 64
"""Number of batches taken while more are ready, after which the queue halves its depth."""


class BatchQueue:
    """Queue of batches that the reader's thread puts in and calls take out. The owner locks.

    Args:
        ahead: Batches to draw before they are requested, at least 1.
        may_grow: True draws more batches ahead for a learner that waits.
        most_bytes: Maximum bytes of the batches ahead, if the queue grows. A round, half of these bytes, is one reply
            of a server.
    """

    def __init__(self, ahead: int, *, may_grow: bool = True, most_bytes: int = MAX_AHEAD_BYTES) -> None:
        self.batch_size = 0
        """Samples of each batch that is drawn ahead; 0 draws no batch."""
        self.samples = 0
        """Samples of all batches that were put in."""
        self.drawing = 0
        """Batches in progress; set by the thread, and read by calls without the lock."""
        self.depth = ahead
        """Number of batches that should be ready or in progress."""
        self.failed: MemoireError | None = None
        """Error that prevents batches of this size; the next call raises it."""
        self._ahead, self._most, self._ready_takes = ahead, MAX_AHEAD if may_grow else ahead, 0
        self._most_bytes = min(most_bytes, MAX_AHEAD_BYTES)
        self._is_starved = False  # a call found no batch ready since the newest round began
        self._batch_bytes = 0  # bytes of a batch; 0 before the first batch
        self._ready: deque[PooledBatch] = deque()
        self.former: deque[PooledBatch] = deque()
        """Batches of a former size: the thread removes them, and makes new batches of their samples."""

    def __len__(self) -> int:
        return len(self._ready)

    @property
    def samples_to_reserve(self) -> int:
        """Samples that each server should reserve for this reader: enough to fill the queue from one server."""
        return self.batch_size * (self.depth + 1)

    @property
    def round_batches(self) -> int:
        """Number of batches in one round."""
        return max(1, self.depth // 2) if self.depth > self._ahead else 1

    @property
    def has_room(self) -> bool:
        """True if the queue has room for another round."""
        return (
            self.failed is None
            and self.batch_size > 0
            and len(self._ready) + self.drawing + self.round_batches <= self.depth
        )

    def check(self) -> None:
        """Raise the error of the newest round, once; the next call draws again."""
        failed, self.failed = self.failed, None
        if failed is not None:
            raise failed

    def record_empty_queue(self) -> None:
        """Record that a call found no batch ready."""
        self._is_starved, self._ready_takes = self._batch_bytes > 0, 0

    def begin(self, available: int) -> int:
        """Begin a round with `available` samples; return the number of batches to draw, at least 1.

        If a call waits although enough samples are available, the next rounds are larger.
        """
        if self._is_starved and available >= 2 * self.round_batches * self.batch_size:
            most = max(self._ahead, min(self._most, self._most_bytes // self._batch_bytes))
            self.depth = min(2 * self.depth, most)
        self._is_starved = False
        return max(1, min(self.round_batches, available // self.batch_size))

    def resize(self, batch_size: int) -> bool:
        """Set the size of batches; return True if it changed, so that ready batches are `former` now."""
        if batch_size == self.batch_size:
            return False
        self.batch_size, self.depth, self.failed = batch_size, self._ahead, None
        self._ready_takes, self._batch_bytes, self._is_starved = 0, 0, False
        self.samples -= sum(len(each.importance) for each in self._ready)
        self.former += self._ready
        self._ready.clear()
        return True

    def put(self, drawn: PooledBatch) -> None:
        """Append a batch, to `former` if its size is not the present size."""
        if len(drawn.importance) != self.batch_size:
            self.former.append(drawn)
            return
        self._ready.append(drawn)
        self.samples += self.batch_size
        self._batch_bytes = self._batch_bytes or drawn.nbytes

    def first(self) -> PooledBatch:
        """Return the next batch without removing it. The queue must not be empty."""
        return self._ready[0]

    def take(self) -> None:
        """Remove the next batch; halve the depth after `CALM_TAKES` batches without a wait."""
        self._ready.popleft()
        self._ready_takes = self._ready_takes + 1 if self._ready else 0
        if self._ready_takes >= CALM_TAKES:
            self._ready_takes, self.depth = 0, max(self._ahead, self.depth // 2)

    def clear(self) -> None:
        """Drop all batches: they were drawn with former parameters."""
        self._ready.clear()
        self.former.clear()

    def close(self) -> None:
        """Stop drawing ahead, and drop all batches."""
        self.resize(0)
        self.former.clear()


class RateTracker:
    """Ratio of draws to inserts at several servers together, as their reader counts. Belongs to the reader's thread."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[int, ServerRate]] = {}  # epoch and last report of each server
        self._places: dict[str, tuple[int, int]] = {}  # entries that can be drawn, and clients, of each server
        self._surplus: float | None = None  # None: a server has not reported yet

    def reset(self) -> None:
        """Forget all reports, because another run or other parameters apply."""
        self._known.clear()
        self._places.clear()
        self._surplus = None

    def record_report(self, server: str, epoch: int, standing: ServerRate | None, entries: int, clients: int) -> None:
        """Record a server's report, and update the surplus of draws."""
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
        """Return the reason why a batch has to wait for entries; "" if it need not wait.

        Args:
            servers: Names of the servers to draw from.
            on_way: Samples that were requested and have not arrived.
        """
        if parameters.samples_per_insert_tolerance is None and not parameters.min_size:
            return ""
        reports = [self._known[server][1] for server in servers if server in self._known]
        if len(reports) < len(servers) or any(
            (each.ratio, each.tolerance) != band_settings(parameters) for each in reports
        ):
            return "waits until all servers have reported how many entries were recorded"
        if self._surplus is None and on_way:  # drawn before the band began: must not count
            return "waits for samples that were requested before the band began"
        if self._surplus is None:  # a surplus from another reader is already that of all servers
            totals = [each.surplus for each in reports if each.is_told]
            self._surplus = sum(each.surplus for each in reports if not each.is_told) + (max(totals) if totals else 0.0)
        entries = sum(self._places[server][0] for server in servers)
        return why_not_draw(parameters, samples, entries, self._surplus - on_way)

    def cluster_rate(self, server: str, servers: list[str]) -> ClusterRate | None:
        """Return the cluster's rate to report to a server; None if it is unknown."""
        if self._surplus is None or server not in self._known:
            return None
        report = self._known[server][1]
        others = [other for other in servers if other in self._places and other != server]
        entries = sum(self._places[other][0] for other in others)
        clients = self._places[server][1] + 1
        share = clients / (clients + sum(self._places[other][1] + 1 for other in others))
        return ClusterRate(self._surplus, report.inserted, report.drawn, entries, share, report.ratio, report.tolerance)


MIN_RETRY_INTERVAL = 0.005
"""Seconds before servers with too few samples are asked again; doubles up to `RETRY_INTERVAL` while samples are too
few. The interval is the longest extra wait of a learner that uses samples as they come; samples that come meanwhile
make a round.
"""
MAX_SUMS_AGE = 1.0
"""Maximum age, in seconds, of a server's report about its clients."""


@dataclass(frozen=True, slots=True)
class DrawRequest:
    """Request to send to a server; the caller passes the reply or error to `Rounds.receive_answer`."""

    stock: ServerStock
    number: int
    body: messages.Sums | messages.Draw

    samples: int = 0
    """Samples that the request draws."""


@dataclass(slots=True, eq=False)
class _DrawRound:
    """Batches in progress: their common plan, and the replies so far."""

    plan: draws.Plan
    batches: int
    batch_size: int
    samples: int
    """Samples requested from the servers."""
    kept: int
    """Kept samples of short rounds that complete the batches."""
    layout: ContainerLayout
    parameters: Parameters
    open: set[int] = field(default_factory=set)
    """Numbers of the unanswered draws."""
    parts: list[Buffer] = field(default_factory=list)


def checked_partition(partition: object) -> tuple[int, int]:
    """Return the part (i, n) of the clients that a reader draws from: part i, from 0, of n learners' parts.

    Raises:
        ParameterError: the value is not a pair of whole numbers (i, n) with 0 <= i < n < 2**32.
    """
    if isinstance(partition, (tuple, list)) and len(partition) == 2:
        part, of = partition
        if type(part) is int and type(of) is int and 0 <= part < of < 1 << 32:
            return part, of
    raise ParameterError("partition", partition, "(i, n): learner i, counted from 0, of n")


class Rounds:
    """Rounds in progress, and the reader's requests to servers. Belongs to the reader's thread.

    Args:
        directory: The reader's servers.
        prefetch: Queue with the size of batches, and the ready batches.
        partition: Part of the clients to draw from: see `checked_partition`.
        numbers: Counter of request numbers, one for all messages of the reader.
        rng: Generator of counts and order.
    """

    def __init__(
        self,
        directory: TableServers,
        prefetch: BatchQueue,
        partition: tuple[int, int],
        *,
        limits: Limits,
        numbers: Iterator[int],
        rng: random.Random,
    ) -> None:
        self.balance = RateTracker()
        self.waits_for = ""
        """Reason why the next batch waits for entries; "" if it does not wait."""
        self.shortage = (0, 0)
        """Samples and clients available to this reader at the last shortage of samples."""
        self.short = 0
        """Number of requested samples that a server no longer had."""
        self.refused: Counter[str] = Counter()
        """Number of servers' replies whose samples could not be used, by code."""
        self._directory, self._prefetch, self._partition = directory, prefetch, partition
        self._limits, self._numbers, self._rng = limits, numbers, rng
        self._annealing, self._choice = Annealing(), CompressionChoice()
        self._stocks: dict[TableServer, ServerStock] = {}
        self._rounds: list[_DrawRound] = []  # oldest first; batches come in this order
        self._late: dict[int, _DrawRound] = {}  # round by number of an open draw, for servers that were left out
        self._kept: draws.PooledBatch | None = None  # samples of short rounds that are in no batch yet
        self._committed = 0  # number of kept samples that open rounds will use
        self._drawn = 0  # samples requested from all servers
        self._wanted = 0  # samples of a batch that could not be drawn at the last try
        self._retry_interval = MIN_RETRY_INTERVAL

    # Times of the next action

    def next_time(self, now: float) -> float:
        """Return the time at which `late_servers` or `begin` has to act; infinity if only replies cause actions."""
        stocks = [self.stock(server) for server in self._directory.known_servers]
        times = [stock.late_at for stock in stocks]
        if self.wants_round and self._directory.is_discovering(now):
            times.append(self._directory.discovery_deadline)
        elif self.wants_round:  # a server with reported stock waits for other servers, not for a time
            times += [stock.again_at for stock in stocks if not stock.is_asked and stock.table is None]
        return min(times, default=float("inf"))

    @property
    def wants_round(self) -> bool:
        """True if another round should and may be drawn."""
        return len(self._rounds) < types.DRAWS_IN_FLIGHT and self._prefetch.has_room

    def stock(self, server: TableServer) -> ServerStock:
        """Return the stock of a server."""
        if server not in self._stocks:
            self._stocks[server] = ServerStock(server)
        return self._stocks[server]

    # Servers that do not answer

    def late_servers(self, now: float, down: Collection[object]) -> list[TableServer]:
        """Return servers for which no batch should wait any longer; `down` are addresses without a connection."""
        stocks = [self.stock(server) for server in self._directory.known_servers]
        awaited = [stock for stock in stocks if stock.late_at < float("inf")]
        return [stock.server for stock in awaited if stock.late_at <= now or stock.server.address in down]

    def leave_out(self, server: TableServer) -> None:
        """Draw without a server that did not answer in time; its requests stay open."""
        stock, server.is_away = self.stock(server), True
        stock.table = None
        stock.give_up_pages()
        for draw_round in self._rounds:
            self._late.update(dict.fromkeys(draw_round.open & stock.open_requests, draw_round))
            draw_round.open -= stock.open_requests

    def forget(self, server: TableServer) -> None:
        """Forget a server that no address lists any more."""
        self.leave_out(server)
        for number in self._stocks.pop(server).open_requests:
            self._late.pop(number, None)

    def drop_rounds(self) -> None:
        """Drop all rounds in progress: they were drawn with former parameters."""
        self._rounds.clear()
        self._late.clear()
        self._kept, self._committed = None, 0
        for stock in self._stocks.values():
            stock.table, stock.server.fingerprint = None, 0
        self._prefetch.drawing = 0
        self.balance.reset()

    # Drawing

    def begin(self, now: float) -> list[DrawRequest]:
        """Plan the wanted batches over the present servers; return the requests to send."""
        requests: list[DrawRequest] = []
        while self.wants_round and not self._directory.is_discovering(now):
            requests += self._refresh(now)
            planned = self._plan(now)
            if planned is None:
                break
            requests += planned
        return requests

    def _refresh(self, now: float) -> list[DrawRequest]:
        """Return requests to servers whose report about their stock is missing or too old."""
        requests = []
        for server in self._directory.known_servers:
            stock = self.stock(server)
            if not stock.is_asked and stock.is_older(MAX_SUMS_AGE, now):
                stock.table = None
                if now >= stock.again_at:
                    requests.append(self._ask(stock, self._sums_of(stock), now))
        return requests

    def _plan(self, now: float) -> list[DrawRequest] | None:
        """Return the draws of the next round; None if a server's report is missing, or samples are too few."""
        terms = self._directory.terms
        present = [self.stock(server) for server in self._directory.present_servers]
        tables = [stock.table for stock in present if stock.table is not None]
        if terms is None or not present or len(tables) < len(present):
            return None
        if differing := self._directory.differing_servers():
            # Servers with different parameters would mix batches: ask again for parameters and stock.
            self.waits_for = f"server {differing[0].name} draws with other parameters"
            for server in differing:
                self.stock(server).table, self.stock(server).again_at = None, now + REFUSED_INTERVAL
            self._directory.ask_soon()
            return None
        batches = self._batches_of(terms, tables)
        size = batches * self._prefetch.batch_size
        kept = 0 if self._kept is None else min(size - 1, max(0, len(self._kept.importance) - self._committed))
        size, names = size - kept, [stock.server.name for stock in present]
        on_way = sum(stock.requested_samples for stock in present)
        self.waits_for = self.balance.why_not_draw(terms.parameters, names, size, on_way)
        plan = None if self.waits_for else draws.plan(tables, size, self._rng.random())
        self._wanted = size if plan is None else 0
        if plan is None:
            self._wait_for_more(present, tables, now)
            return None
        layout = layout_of(terms.schema, terms.parameters, ContainerKind.DRAWN)
        draw_round = _DrawRound(plan, batches, self._prefetch.batch_size, size, kept, layout, terms.parameters)
        return self._draw(draw_round, present, now)

    def _batches_of(self, terms: TableTerms, tables: list[NDArray[np.void]]) -> int:
        """Return the number of batches of the next round, which share one draw and are split at random."""
        parameters = terms.parameters
        # A band counts each batch, and the longest ragged value of a batch sets the padding of that batch.
        if parameters.samples_per_insert_tolerance is not None or layout_of(terms.schema, parameters).ragged:
            return 1
        available = sum(int(table["reserved"].sum()) for table in tables)
        if parameters.reuse_cache and available:
            available = MAX_DRAWN
        return self._prefetch.begin(min(available, MAX_DRAWN))

    def _wait_for_more(self, present: list[ServerStock], tables: list[NDArray[np.void]], now: float) -> None:
        samples = sum(int(table["reserved"].sum()) for table in tables)
        samples += 0 if self._kept is None else len(self._kept.importance)
        self.shortage = samples, sum(len(table) for table in tables)
        for stock in present:
            stock.table, stock.again_at = None, now + self._retry_interval
        self._retry_interval = min(2.0 * self._retry_interval, RETRY_INTERVAL)

    def _draw(self, draw_round: _DrawRound, present: list[ServerStock], now: float) -> list[DrawRequest]:
        """Begin a round; return its draws, and SUMS requests to servers that contribute no sample."""
        self._rounds.append(draw_round)
        self._prefetch.drawing += draw_round.batches
        self._committed += draw_round.kept
        self._retry_interval = MIN_RETRY_INTERVAL
        requests = []
        for stock, counts in zip(present, draw_round.plan.counts, strict=True):
            stock.again_at = 0.0
            stock.subtract_requested(counts)
            if len(counts):
                samples = int(counts["count"].sum())
                self._drawn += samples
                stock.drawn += samples
                facts: dict[str, Any] = {"in_pages": True, "packed": self._choice.packs, **self._facts(stock)}
                requests.append(self._ask(stock, messages.Draw(counts=counts.tobytes(), **facts), now, counts))
                draw_round.open.add(requests[-1].number)
            elif not stock.is_asked:  # the next draw but one needs the server's stock
                requests.append(self._ask(stock, self._sums_of(stock), now))
        return requests

    def _sums_of(self, stock: ServerStock) -> messages.Sums:
        """Return a request that reserves samples but draws none."""
        return messages.Sums(after=stock.next_page_key, wanted=min(self._wanted, (1 << 32) - 1), **self._facts(stock))

    def _facts(self, stock: ServerStock) -> dict[str, Any]:
        """Return the fields that this reader reports in each request to a server."""
        names = sorted(server.name for server in self._directory.known_servers)
        present = [server.name for server in self._directory.present_servers]
        part, of = self._partition
        return {
            "reserve": self._prefetch.samples_to_reserve,
            "elsewhere": self._drawn - stock.drawn,
            # Each server has another offset: with few clients at a server, first clients belong to different learners.
            "part": (part + names.index(stock.server.name)) % of,
            "of": of,
            "band": self.balance.cluster_rate(stock.server.name, present),
        }

    def _ask(
        self, stock: ServerStock, body: messages.Sums | messages.Draw, now: float, counts: NDArray[np.void] = NOTHING
    ) -> DrawRequest:
        number = next(self._numbers)
        stock.record_request(number, counts, now)
        return DrawRequest(stock, number, body, int(counts["count"].sum()))

    # Replies

    def receive_answer(self, ask: DrawRequest, answer: Answer, now: float) -> None:
        """Process the reply or error that ends a request. A reply may complete batches and allow further rounds."""
        duration = ask.stock.receive_answer(ask.number, now)
        ask.stock.server.is_away = False
        body = answer.body if isinstance(answer, Message) else None
        of = (each for each in self._rounds if ask.number in each.open)
        draw_round = self._late.pop(ask.number, None) or next(of, None)
        if isinstance(body, messages.Drawn) and isinstance(ask.body, messages.Draw):
            self._choice.record_time(duration, 0.0 if len(self._prefetch) else duration)
            self._choice.record_sent(ask.samples)
        if isinstance(body, (messages.Summed, messages.Drawn)):
            after = ask.body.after if isinstance(ask.body, messages.Sums) else None
            table = ask.stock.add_page(sums_of(body.clients), after or b"", is_whole=body.is_whole)
            ask.stock.server.fingerprint = body.parameters
            if table is not None:
                entries = ask.stock.report(table, now)
                self.balance.record_report(ask.stock.server.name, body.epoch, body.standing, entries, len(table))
                self._directory.record_finished(ask.stock.server, body.finished)
        else:
            ask.stock.give_up_pages()
            if isinstance(answer, Refused) and answer.code in TOO_LARGE:
                # The next call raises the error only if calls still request this batch size.
                if draw_round is None or draw_round.batch_size == self._prefetch.batch_size:
                    self._prefetch.failed = answer
                self._drawn -= ask.samples  # nothing was drawn
                ask.stock.drawn -= ask.samples
            # The server may not know this reader's run or home server: HELLO updates both run and home server.
            ask.stock.again_at = now + REFUSED_INTERVAL
            self._directory.ask_soon()
        if draw_round is None:
            return
        draw_round.open.discard(ask.number)
        payload = answer.payload if isinstance(answer, Message) else None
        if isinstance(body, messages.Drawn) and payload is not None:
            if body.parameters in (0, draw_round.parameters.fingerprint):
                draw_round.parts.append(payload)
            else:
                self.refused["parameters"] += 1
        if draw_round not in self._rounds:  # a late reply
            self.short -= self._keep(draw_round)

    def finished(self) -> list[draws.PooledBatch]:
        """Return the complete batches, in the order of their plans."""
        batches = []
        while self._rounds and not self._rounds[0].open:
            draw_round = self._rounds.pop(0)
            self._prefetch.drawing -= draw_round.batches
            self._committed -= draw_round.kept
            self.short += draw_round.samples - self._keep(draw_round)
            batches += self._full_batches()
        while self._prefetch.former:
            self._add(self._prefetch.former.popleft())
        return batches + self._full_batches()

    def _keep(self, draw_round: _DrawRound) -> int:
        """Weigh and shuffle the samples of a round, and keep them; return their number."""
        held = []
        for payload in draw_round.parts:
            try:
                held.append(draw_round.plan.checked(containers.check(payload, draw_round.layout, self._limits)))
            except ProtocolError as error:  # samples of other servers remain valid
                self.refused[error.code] += 1
                self._directory.ask_soon()  # perhaps parameters changed
        draw_round.parts.clear()
        if came := sum(part.samples for part in held):
            # All batches of a round use the exponent of its first batch.
            beta, seed = self._annealing.next(draw_round.parameters), self._rng.getrandbits(64)
            self._annealing.batches -= 1
            self._add(draws.build_batch(draw_round.plan, held, draw_round.layout, draw_round.parameters, seed, beta))
        return came

    def _add(self, drawn: draws.PooledBatch) -> None:
        self._kept = drawn if self._kept is None else self._kept.joined(drawn, self._is_global)

    def _full_batches(self) -> list[draws.PooledBatch]:
        """Return the batches that the kept samples fill; remaining samples stay for the next batches."""
        kept, size = self._kept, self._prefetch.batch_size
        if kept is None or not 0 < size <= (count := len(kept.importance)):
            return []
        rest = count % size
        self._annealing.batches += count // size
        self._kept = kept.rows(slice(count - rest, count), self._is_global) if rest else None
        return [kept] if count == size else list(kept.split(size, self._is_global))

    @property
    def _is_global(self) -> bool:
        terms = self._directory.terms
        return terms is not None and terms.parameters.normalize == "global"
