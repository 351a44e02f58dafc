"""What a server answers: every message goes to its handler, with one lock at the door.

    request ──▶ answer ── known? a client? of this run? granted before? ──▶ a handler, with the lock ──▶ reply
    cache   ──▶ arrived ────────────────────────────────── check, without the lock ──▶ accept, with it

No socket: `answer` takes a parsed message and returns a body and a payload, so that a duplicate, a stranger or an
impossible number is tested without a network. Every request may come any number of times. Thread-safe; the handlers
are pure.

Replies that are given once: a request that comes again gets the reply of the first time, and changes nothing. Pure.

DRAW 7 of reader r      granted, its reply is kept
DRAW 7 of reader r      the same reply: the first one was lost
DRAW 3 of reader r      refused if newer replies have replaced that of number 3
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

from memoire import arguments
from memoire._core import Held
from memoire.accounting.ledger import Ledger
from memoire.accounting.merge import Rows
from memoire.accounting.runs import Logbook, LogEntry, Run, SavedGroup, StateStore, Ticket
from memoire.errors import ProtocolError
from memoire.limits import HELD_BYTES, Limits
from memoire.models.model import Model
from memoire.replay.batch import PriorityUpdate
from memoire.replay.parameters import Parameters
from memoire.tables import registry
from memoire.tables.registry import Handler, Reply
from memoire.tables.table import OpenTable, Tables
from memoire.wire import messages, types
from memoire.wire.byte_budget import ByteBudget
from memoire.wire.containers import unpacked_bytes
from memoire.wire.frames import CODES, FOR_INFERENCE, NO_CLIENT, Message, MessageHeader, no_inference
from memoire.wire.frames import reply as encode_reply

from . import state as recovery
from .handlers.accounts import AccountsHandler, FeedbackHandler, Pieces, by_client
from .handlers.clients import ClientsHandler, DrawsHandler, IntakeHandler
from .handlers.control import ControlHandler, ModelsHandler, made
from .state import ClientOwners, Committer, Credits, ServerState

KEPT_ROWS = 64
"""Rows of requests (of a client, a type and a table) whose replies are kept, however long they are idle."""
MAX_ROWS = 1024
"""Rows at most; a further one is refused until one of them is idle."""
IDLE_TIMEOUT = 60.0
"""Seconds without a request after which a row beyond `KEPT_ROWS` leaves: its reader has gone. Resends come sooner."""

REPLY_BYTES = 1024
"""What a reply takes beside its payload, about."""


@dataclass(slots=True)
class _Row:
    asked_at: float
    replies: dict[int, Reply] = field(default_factory=dict)
    """By number."""


def _size(reply: Reply) -> int:
    return REPLY_BYTES + (0 if reply.payload is None else memoryview(reply.payload).nbytes)


class GivenReplies:
    """The newest replies to each client's requests that would change something if they were granted twice.

    Not thread-safe: nothing else may come between `find` and `keep`.

    Args:
        budget: What replies take of, beside `own` bytes; None: they are not counted.
    """

    def __init__(self, budget: ByteBudget | None = None, own: int = 0) -> None:
        self.bytes = 0
        """Of all replies that are kept."""
        self._room = None
        if budget is not None:
            self._room = budget.holder("kept replies", own=own, measure=lambda: self.bytes)
        self._given: OrderedDict[tuple[bytes, types.Type, int], _Row] = OrderedDict()  # the idlest one first

    def find(self, header: MessageHeader, now: float) -> Reply | None:
        """The reply that this request was given before; None if it has to be granted now.

        Raises:
            ProtocolError: (code "missing") it is older than all that are kept: nobody knows whether it was granted.
                (code "busy") too many others ask: none of their replies may go that they may still ask for; or an actor
                asks, and there is no room to keep one more reply.
        """
        key = header.client, header.type, header.table
        row = self._given.get(key) or self._new_row(key, now)
        row.asked_at = now
        self._given.move_to_end(key)
        given, number, most = row.replies, header.sequence, header.type.kept
        if number not in given and len(given) == most and number < min(given):
            raise ProtocolError("missing", f"request {number} was overtaken by {min(given)}")
        is_more = number not in given and len(given) < most
        if is_more and "actor" in header.type.sent_by and self._room is not None and not self._room.room:
            raise self._room.no_room(REPLY_BYTES)
        return given.get(number)

    def _new_row(self, key: tuple[bytes, types.Type, int], now: float) -> _Row:
        while len(self._given) >= KEPT_ROWS and now >= next(iter(self._given.values())).asked_at + IDLE_TIMEOUT:
            self.bytes -= sum(map(_size, self._given.popitem(last=False)[1].replies.values()))
        if len(self._given) >= MAX_ROWS:
            text = f"{MAX_ROWS} rows of requests are answered here already, the most. Ask again: one without a request "
            raise ProtocolError("busy", f"{text}for {IDLE_TIMEOUT:g} s leaves")
        row = self._given[key] = _Row(now)
        return row

    def keep(self, header: MessageHeader, reply: Reply) -> None:
        """The request that `find` was asked for last was granted."""
        given = self._given[header.client, header.type, header.table].replies
        given[header.sequence] = reply
        self.bytes += _size(reply)
        while len(given) > header.type.kept:
            self.bytes -= _size(given.pop(min(given)))


_log = logging.getLogger(__name__)


class Dispatcher:
    """One server without its sockets: the door to its handlers, from any thread.

    Args:
        tables: What it keeps; each with schema, parameters and pool of its own.
        run: Name of the run to count; None goes on with the one that was counted last.
        endpoints: Where clients connect to; read at each HELLO, since workers may be added.
        on_lines: Called with log lines that are new, in order.
        on_model: Called when a model is new.
        on_news: Called when clients should ask soon: the run is over, or another one, or parameters are new.
        store: The state folder. With it, the three above are called when what they tell is on disk.
        clock: Seconds since 1970.
        epoch: Number of this life, above those of all former ones; a `store` has its own.

    Raises:
        ParameterError: the run's name is invalid, or parameters in the state folder are.
    """

    def __init__(
        self,
        *,
        tables: Tables,
        run: str | None,
        name: str,
        limits: Limits,
        endpoints: Callable[[], messages.Endpoints] = messages.Endpoints,
        on_lines: Callable[[list[LogEntry]], None] = lambda lines: None,
        on_model: Callable[[Model], None] = lambda model: None,
        on_news: Callable[[], None] = lambda: None,
        store: StateStore | None = None,
        clock: Callable[[], float],
        epoch: int,
    ) -> None:
        if run is not None:
            arguments.name("run", run)
        self._lock = threading.RLock()
        self._granting = threading.Lock()  # one at a time of the requests that must not be granted twice
        self.budget = ByteBudget(max(limits.held_bytes or HELD_BYTES, tables.byte_limit))
        """Bytes that are held for peers, by holder."""
        self._given = GivenReplies(self.budget, own=limits.message_bytes)  # belongs to the lock above
        self._clock, self._store = clock, store
        self.committer = Committer(store)
        for table in tables:
            table.pool.join(self.budget, f"table {table.name}")
        tables.roundtrip.pool.join(self.budget, "round trips")
        self._state = state = ServerState(
            name=name,
            tables=tables,
            limits=limits,
            run=recovery.run_to_count(store, run, self.committer),
            committer=self.committer,
            past=store,
            now=clock(),
            epoch=epoch if store is None else store.epoch,
            budget=self.budget,
        )
        self.tables, self.limits, self.name = tables, state.limits, name
        self.home, self.epoch = state.home, state.epoch
        self.runs, self.models = state.runs, state.models
        self.learners, self.newcomers = state.learners, state.newcomers
        self.client_names, self.receivers = state.client_names, state.receivers
        self.pushes, self.replies = state.pushes, state.replies
        self.refused: Counter[str] = Counter()
        """Messages that were refused, by code."""
        self._credits, self._owners = Credits(state), ClientOwners(state)
        self._intake, self._accounts = IntakeHandler(state), AccountsHandler(state)
        self.feedback, self._draws = FeedbackHandler(state), DrawsHandler(state, self._can_undo)
        self._models = ModelsHandler(state, on_model=on_model, after=self._after)
        self._control = ControlHandler(state, self._models, self.feedback, on_news)
        self._clients = ClientsHandler(
            state, self._credits, self._owners, self.feedback, endpoints=endpoints, on_lines=on_lines
        )
        self.unlocked: dict[type[messages.Body], Handler] = {
            messages.Feedback: self._take_feedback,
            messages.Sums: self._draws.sums,
            messages.Draw: self._draws.draw,
        }
        for kind in dict.fromkeys((*registry.known(), *(table.kind for table in tables))):
            self.unlocked |= kind.handlers(state)
        """What answers each type of message that needs no lock, or has one of its own."""
        self.handlers: dict[type[messages.Body], Handler] = {
            messages.Hello: self._clients.hello,
            messages.Update: self._clients.update,
            messages.Fetch: self._models.fetch,
            messages.Publish: self._models.receive,
            messages.Control: self._control.control,
            messages.Ledger: self._accounts.page,
            messages.Inherit: self._accounts.bring,
        }
        """What answers each of the others, called with the lock held."""
        if store is not None:
            recovery.recover(state, store)

    # ------------------------------------------------------------------------------------------------- what it is

    @property
    def lock(self) -> Held:
        """Guards everything here and in the handlers, but not pools and limiters, which have their own."""
        return Held(self._lock)

    @property
    def run_name(self) -> str:
        """Name of the run that is counted now."""
        return self.runs.current.name

    @property
    def run(self) -> int:
        """Its number, as headers say it."""
        return self.runs.current.number

    @property
    def ledger(self) -> Ledger:
        """Its accounts."""
        return self.runs.current.ledger

    @property
    def probes(self) -> Ledger:
        """Accounts of whoever only tries the way there and back."""
        return self._state.probes

    @property
    def logbook(self) -> Logbook:
        """Its log lines."""
        return self.runs.current.logbook

    @property
    def finished(self) -> bool:
        """Whether it is over."""
        return self.runs.current.finished

    @property
    def now(self) -> float:
        """Seconds since 1970, by the clock that was passed in."""
        return max(0.0, self._clock())

    @property
    def is_durable(self) -> bool:
        """Whether what is acknowledged is on disk."""
        return self.committer.is_durable

    @property
    def leaving(self) -> bool:
        """Whether clients are sent elsewhere: this server is being drained."""
        return self._state.leaving

    def show_pages(self, address: str) -> None:
        """Say in each WELCOME from now on where this server's pages are."""
        self._state.pages = (address,)

    def show_inference(self, addresses: Sequence[str]) -> None:
        """Say in each WELCOME from now on where inference nodes are that act for clients."""
        self._state.inference = tuple(addresses)

    # --------------------------------------------------------------------------------------------------- messages

    def answer(self, message: Message) -> Reply:
        """The reply to a request; REFUSED if it cannot be granted. Never raises for what a peer sent."""
        try:
            self._check(message)
            return self._handle_once(message) if message.type.kept else self._handle(message)
        except ProtocolError as error:
            return self.refuse(error)

    def _check(self, message: Message) -> None:
        header, kind = message.header, type(message.body)
        if header.type in FOR_INFERENCE:
            raise no_inference(header.type)
        if kind not in self.handlers and kind not in self.unlocked:
            raise ProtocolError("unexpected", f"{header.type.name} is no request")
        if header.client == NO_CLIENT:
            raise ProtocolError("client", "a request needs a client id")
        if header.run not in (0, self.run) and not isinstance(message.body, messages.Update | messages.Hello):
            raise self._state.wrong_run()
        self.committer.check_room(message.body)

    def _handle(self, message: Message) -> Reply:
        header, body, payload = message.header, message.body, message.payload
        unlocked = self.unlocked.get(type(body))
        if unlocked is not None:
            return unlocked(self._clock(), header, body, payload)
        with Held(self._lock):
            return self.handlers[type(body)](self._clock(), header, body, payload)

    def _handle_once(self, message: Message) -> Reply:
        """Grant each number once; a resend gets the reply that was given, and one older than those kept is refused."""
        with self._granting:
            reply = self._given.find(message.header, self._clock())
            if reply is None:
                reply = self._handle(message)
                self._given.keep(message.header, reply)
            return reply

    def answer_with(self, body: type[messages.Body], answer: Callable[[MessageHeader, Any, Any], Reply]) -> None:
        """Have requests of this kind answered elsewhere, without the lock, by what may raise ProtocolError. Before the
        first request.
        """
        self.unlocked[body] = lambda _, header, body, payload: answer(header, body, payload)

    def refuse(self, error: ProtocolError) -> Reply:
        """Count a refusal and say it."""
        with Held(self._lock):
            self.refused[error.code if error.code in CODES else "other"] += 1
        return Reply(messages.Refused(code=error.code, text=error.detail[:1000]))

    def own(self, client: bytes, principal: str) -> None:
        """Bind a client id to the key that uses it first: see `ClientOwners.check`. Raises ProtocolError."""
        with Held(self._lock):
            self._owners.check(client, principal, self._clock())

    def arrived(self, header: MessageHeader, body: messages.PushedBody, payload: Any) -> int:
        """Check a cache or episode and hold it; returns its samples. A refused one is counted for its client.

        Raises:
            ProtocolError: it was not taken, and why.
        """
        size = 0
        try:
            wanted = unpacked_bytes(payload)
            if wanted > header.payload_bytes:  # else it is copied as it was received, by one thread at a time
                self.pushes.take(wanted)
                size = wanted
            table, held = self._intake.check(header, body, payload)
            with Held(self._lock):
                self._intake.accept(self._clock(), header, body, table, held)
        except ProtocolError as error:
            with Held(self._lock):
                self.refused[error.code] += 1
                self._intake.reject(self._clock(), header, body, error.code)
            raise
        finally:
            if size:
                self.pushes.take(-size)
        return int(held.samples)

    def _can_undo(self, reader: bytes, codec: str) -> bool:
        with Held(self._lock):
            return self.learners.has(reader, codec)

    # ----------------------------------------------------------------------------------------------------- saving

    def collect(self) -> SavedGroup | None:
        """What is to be saved next; `saved` is called when it is."""
        with Held(self._lock):
            self._models.collected()
            return self.committer.collect(self.runs, self.tables)

    def saved(self) -> None:
        """The group that was collected last is on disk."""
        with Held(self._lock):
            self.committer.saved(self.runs)

    def frames_of(self, header: MessageHeader, reply: Reply, payload: Any) -> list[Any]:
        """A reply as it is sent. One that its receiver would throw away, and has no pages, is refused in its place."""
        frames = encode_reply(header, reply.body, payload=payload, **reply.changed)
        try:
            self.receivers.of(header.client).check(header.client, reply.body, frames)
        except ProtocolError as error:
            return encode_reply(header, self.refuse(error).body)
        return frames

    def send(self, header: MessageHeader, reply: Reply, send: Callable[[Reply], None]) -> None:
        """Send a reply: at once, or when what it promises is on disk."""
        now: Reply | None = reply
        if reply.until_saved:
            with Held(self._lock):
                now = self.committer.hold(header, reply, send)
        if now is not None:
            send(now)

    def _after(self, ticket: Ticket) -> None:
        """Call this, with the lock, when all that was said so far is saved."""

        def locked() -> None:
            with Held(self._lock):
                ticket()

        self.committer.after(locked)

    # --------------------------------------------------------------------------------------------------- accounts

    def fold(self) -> None:
        """Let accounts leave memory, and former runs: see `AccountsHandler.fold`. Warn if too many new clients come, or
        clients do not fetch their TD errors fast enough.
        """
        now = self.now
        with Held(self._lock):
            warnings = self._accounts.warning(now), self.feedback.warning(now)
            self._accounts.fold(now, self.feedback)
        for warning in filter(None, warnings):
            _log.warning("server %s: %s", self.name, warning)

    def trouble(self) -> str:
        """Why new clients may soon have to wait, as a sentence; "" while they need not."""
        with Held(self._lock):
            return self._accounts.trouble(self.now)

    def untold(self, within: float) -> int:
        """Clients heard from in the last `within` seconds that have not said that they know that the run is over."""
        with Held(self._lock):
            return self._clients.untold(within, self._clock())

    def pages(self, run: Run) -> Iterator[Rows]:
        """Every account of a run that is here, in pages: the server's own, and those that it inherited. A client that
        is counted while they are read may be in them as it was before.
        """
        with Held(self._lock):
            live = run.live(self.home)
        pages = run.pages(live)
        while True:
            with Held(self._lock):
                rows = next(pages, None)
            if rows is None:
                return
            yield rows

    def inherit(self, name: str, finished: bool, rows: Rows) -> Run:
        """Keep accounts of other servers for a run: see `AccountsHandler.inherit`. Raises ProtocolError."""
        with Held(self._lock):
            return self._accounts.inherit(name, finished, rows, self._clock())

    # ------------------------------------------------------------------------------------- what is said in this process

    def publish(self, topic: str, content: bytes | bytearray | memoryview | str, version: int = 0) -> Model:
        """Store a new version of a model and tell everyone: see `ModelsHandler.publish`."""
        model = made(topic, content, self.limits)  # summed up here: nobody else has to wait for that
        with Held(self._lock):
            return self._models.publish(model, version)

    def hand_on(self, ids: NDArray[Any], td_errors: Any) -> PriorityUpdate:
        """Set priorities by TD errors of samples, here or at their owners: see `FeedbackHandler.apply`.

        Args:
            ids: `ID` [B], as a batch has them.
            td_errors: [B], finite.
        """
        return self._apply_feedback(by_client(ids, td_errors))

    def _take_feedback(self, _: float, header: MessageHeader, body: messages.Feedback, payload: Any) -> Reply:
        return self.feedback.taken(header, self._apply_feedback(self.feedback.read(header, payload)))

    def _apply_feedback(self, pieces: Pieces) -> PriorityUpdate:
        with Held(self._lock):
            made = self.feedback.apply(pieces, self.now)
            merges = self.feedback.merges()
        for merge in merges:
            merge.work()
            with Held(self._lock):
                self.feedback.merged(merge)
        return made

    def credit(self, table: OpenTable) -> int:
        """Bytes that each client of a table may have on the way now."""
        with Held(self._lock):
            return self._credits.of(table, self._clock())

    def grant(self, credit: int | None) -> None:
        """Let each client have at most this many bytes on the way from now on, or its share of what is held now."""
        with Held(self._lock):
            self._credits.limit(credit)
            self._control.announce()

    def configure(
        self, table: OpenTable, changes: Mapping[str, Any], *, discard_mismatched: bool = False
    ) -> Parameters:
        """Change a table's parameters for everyone: see `ControlHandler.configure`. Raises ParameterError."""
        with Held(self._lock):
            return self._control.configure(table, changes, discard_mismatched=discard_mismatched)

    def begin_run(self, name: str) -> None:
        """Count this run from now on: see `ControlHandler.begin_run`. Raises ParameterError."""
        with Held(self._lock):
            self._control.begin_run(name, self._clock())

    def finish(self) -> None:
        """The run is over: clients hear of it in their next reply."""
        with Held(self._lock):
            self._control.finish()

    def resume(self) -> None:
        """The run goes on, although it was declared over."""
        with Held(self._lock):
            self._control.finish(False)

    def drain(self) -> None:
        """Send all clients elsewhere: see `ControlHandler.drain`."""
        with Held(self._lock):
            self._control.drain()
