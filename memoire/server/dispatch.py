"""Dispatcher of one server: it passes each message to its handler and takes the lock.

    request ──▶ answer ── known? a client? of this run? granted before? ──▶ a handler, with the lock ──▶ reply
    cache   ──▶ arrived ────────────────────────────────── check, without the lock ──▶ accept, with it

No socket: `answer` takes a parsed message and returns a body and a payload, so that tests send duplicates, unknown
clients and impossible numbers without a network. A client may resend each request any number of times. Thread-safe; the
handlers are pure.

Reply cache: a resent request gets the first reply again and changes nothing. Pure.

DRAW 7 of reader r      granted, its reply is kept
DRAW 7 of reader r      the same reply: the first one was lost
DRAW 3 of reader r      refused if newer replies have replaced the reply to number 3
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
from memoire.accounting.runs import Logbook, LogEntry, RunState, SavedGroup, StateStore, Ticket
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
from .handlers.control import ControlHandler, ModelsHandler, model_from
from .state import ClientOwners, Committer, Credits, ServerState

KEPT_ROWS = 64
"""Rows of the reply cache (one for a client, type and table) that are kept even if they are idle."""
MAX_ROWS = 1024
"""Maximum rows of the reply cache; a further row is refused until a row is idle."""
IDLE_TIMEOUT = 60.0
"""Idle seconds after which a row beyond `KEPT_ROWS` is dropped: its reader has gone. Resends come sooner."""

REPLY_BYTES = 1024
"""Approximate bytes of a kept reply, without its payload."""


@dataclass(slots=True)
class _Row:
    asked_at: float
    replies: dict[int, Reply] = field(default_factory=dict)


def _size(reply: Reply) -> int:
    return REPLY_BYTES + (0 if reply.payload is None else memoryview(reply.payload).nbytes)


class ReplyCache:
    """Reply cache: the newest replies to requests that must not be granted twice, by client, type and table. Not
    thread-safe: the caller holds one lock over `find` and `keep`.

    Args:
        budget: Budget that the replies count in; None does not count them.
        own: Bytes that the cache has in addition to the budget.
    """

    def __init__(self, budget: ByteBudget | None = None, own: int = 0) -> None:
        self.bytes = 0
        """Bytes of all kept replies."""
        self._room = None
        if budget is not None:
            self._room = budget.add_holder("kept replies", own=own, measure=lambda: self.bytes)
        self._rows: OrderedDict[tuple[bytes, types.Type, int], _Row] = OrderedDict()  # longest idle first

    def find(self, header: MessageHeader, now: float) -> Reply | None:
        """Return the reply that this request got before; None if the request has to be granted now.

        Raises:
            ProtocolError: (code "missing") the request is older than all kept replies, so that the server does not
                know if it was granted. (code "busy") the cache has `MAX_ROWS` rows that are in use, or the budget has
                no room for the reply to an actor.
        """
        key = header.client, header.type, header.table
        row = self._rows.get(key) or self._new_row(key, now)
        row.asked_at = now
        self._rows.move_to_end(key)
        replies, number, most = row.replies, header.sequence, header.type.kept
        if number not in replies and len(replies) == most and number < min(replies):
            raise ProtocolError("missing", f"request {number} is older than all kept replies, from {min(replies)} on")
        is_more = number not in replies and len(replies) < most
        if is_more and "actor" in header.type.sent_by and self._room is not None and not self._room.room:
            raise self._room.no_room(REPLY_BYTES)
        return replies.get(number)

    def _new_row(self, key: tuple[bytes, types.Type, int], now: float) -> _Row:
        while len(self._rows) >= KEPT_ROWS and now >= next(iter(self._rows.values())).asked_at + IDLE_TIMEOUT:
            self.bytes -= sum(map(_size, self._rows.popitem(last=False)[1].replies.values()))
        if len(self._rows) >= MAX_ROWS:
            text = f"this server keeps replies to at most {MAX_ROWS} clients. Retry later: a client without a request "
            raise ProtocolError("busy", f"{text}for {IDLE_TIMEOUT:g} s leaves")
        row = self._rows[key] = _Row(now)
        return row

    def keep(self, header: MessageHeader, reply: Reply) -> None:
        """Keep the reply to the request that was passed to `find` last."""
        replies = self._rows[header.client, header.type, header.table].replies
        replies[header.sequence] = reply
        self.bytes += _size(reply)
        while len(replies) > header.type.kept:
            self.bytes -= _size(replies.pop(min(replies)))


_log = logging.getLogger(__name__)


class Dispatcher:
    """Dispatcher of a server's messages to their handlers, without sockets. Callable from any thread.

    Args:
        tables: The server's tables, each with its own schema, parameters and pool.
        run: Name of the run to count; None continues the run that was counted last.
        endpoints: Returns the addresses for clients; called at each HELLO, since workers may be added.
        on_lines: Called with new log lines, in order.
        on_model: Called with each new model.
        on_news: Called if clients should send UPDATE soon: the run ended, a run began, or parameters changed.
        store: The state folder. With a store, `on_lines`, `on_model` and `on_news` are called after the save.
        clock: Returns seconds since 1970.
        epoch: Number of this start, above the numbers of all former starts; a `store` has its own.

    Raises:
        ParameterError: the run's name, or a table's parameters in the state folder, are invalid.
    """

    def __init__(
        self,
        *,
        tables: Tables,
        run: str | None,
        name: str,
        limits: Limits,
        endpoints: Callable[[], messages.NodeEndpoints] = messages.NodeEndpoints,
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
        self._grant_lock = threading.Lock()  # held while a request that must not be granted twice is answered
        self.budget = ByteBudget(max(limits.held_bytes or HELD_BYTES, tables.byte_limit))
        """Budget of the bytes that the server holds for its peers."""
        self._reply_cache = ReplyCache(self.budget, own=limits.message_bytes)  # guarded by `_grant_lock`
        self._clock, self._store = clock, store
        self.committer = Committer(store)
        for table in tables:
            table.pool.join_budget(self.budget, f"table {table.name}")
        tables.roundtrip.pool.join_budget(self.budget, "round trips")
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
        """Number of refused messages, by code."""
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
        for kind in dict.fromkeys((*registry.known_kinds(), *(table.kind for table in tables))):
            self.unlocked |= kind.handlers(state)
        """Handlers of the message types that need no lock or have a lock of their own."""
        self.handlers: dict[type[messages.Body], Handler] = {
            messages.Hello: self._clients.hello,
            messages.Update: self._clients.update,
            messages.Fetch: self._models.fetch,
            messages.Publish: self._models.receive,
            messages.Control: self._control.control,
            messages.LedgerRequest: self._accounts.page,
            messages.Inherit: self._accounts.store_drained_accounts,
        }
        """Handlers of all other message types, called with the lock held."""
        if store is not None:
            recovery.recover(state, store)

    # ------------------------------------------------------------------------------------------------- dispatcher parts

    @property
    def lock(self) -> Held:
        """Lock of the dispatcher and the handlers. Pools and limiters have their own locks."""
        return Held(self._lock)

    @property
    def run_name(self) -> str:
        """Name of the present run."""
        return self.runs.current.name

    @property
    def run(self) -> int:
        """Number of the present run, as in headers."""
        return self.runs.current.number

    @property
    def ledger(self) -> Ledger:
        """Accounts of the present run."""
        return self.runs.current.ledger

    @property
    def probes(self) -> Ledger:
        """Accounts of clients that only test a round trip."""
        return self._state.probes

    @property
    def logbook(self) -> Logbook:
        """Log lines of the present run."""
        return self.runs.current.logbook

    @property
    def finished(self) -> bool:
        """True if the present run is over."""
        return self.runs.current.finished

    @property
    def now(self) -> float:
        """Seconds since 1970, by the dispatcher's clock."""
        return max(0.0, self._clock())

    @property
    def is_durable(self) -> bool:
        """True if acknowledged data is on disk."""
        return self.committer.is_durable

    @property
    def is_draining(self) -> bool:
        """True if the server is being drained and sends its clients to other servers."""
        return self._state.leaving

    def show_pages(self, address: str) -> None:
        """Set the address of the server's pages that each WELCOME from now on contains."""
        self._state.pages = (address,)

    def show_inference(self, addresses: Sequence[str]) -> None:
        """Set the addresses of inference nodes that each WELCOME from now on contains."""
        self._state.inference = tuple(addresses)

    # --------------------------------------------------------------------------------------------------- messages

    def answer(self, message: Message) -> Reply:
        """Return the reply to a request; REFUSED if the request is not granted. Never raises for faults of a peer."""
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
            raise ProtocolError("unexpected", f"{header.type.name} is not a request that a server answers")
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
        """Grant each request number once: a resend gets the first reply; one older than all kept replies is refused."""
        with self._grant_lock:
            reply = self._reply_cache.find(message.header, self._clock())
            if reply is None:
                reply = self._handle(message)
                self._reply_cache.keep(message.header, reply)
            return reply

    def answer_with(self, body: type[messages.Body], answer: Callable[[MessageHeader, Any, Any], Reply]) -> None:
        """Register a handler for a request type, before the first request. `answer` is called without the lock; it may
        raise ProtocolError.
        """
        self.unlocked[body] = lambda _, header, body, payload: answer(header, body, payload)

    def refuse(self, error: ProtocolError) -> Reply:
        """Count a refusal; return the REFUSED reply."""
        with Held(self._lock):
            self.refused[error.code if error.code in CODES else "other"] += 1
        return Reply(messages.Refusal(code=error.code, text=error.detail[:1000]))

    def bind_client_id(self, client: bytes, principal: str) -> None:
        """Bind a client id to the first key that uses it, as `ClientOwners.check`. Raises ProtocolError."""
        with Held(self._lock):
            self._owners.check(client, principal, self._clock())

    def accept_push(self, header: MessageHeader, body: messages.PushedBody, payload: Any) -> int:
        """Check and hold a pushed cache or episode; return its samples. A refused push is counted for its client.

        Raises:
            ProtocolError: the push is refused.
        """
        size = 0
        try:
            wanted = unpacked_bytes(payload)
            if wanted > header.payload_bytes:  # otherwise one thread copies the received payload
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
            return self.learners.supports_compression(reader, codec)

    # ----------------------------------------------------------------------------------------------------- saving

    def collect(self) -> SavedGroup | None:
        """Return the next group to save; the caller calls `mark_saved` after the save."""
        with Held(self._lock):
            self._models.clear_unsaved_models()
            return self.committer.collect(self.runs, self.tables)

    def mark_saved(self) -> None:
        """Record that the group collected last is on disk."""
        with Held(self._lock):
            self.committer.mark_saved(self.runs)

    def frames_of(self, header: MessageHeader, reply: Reply, payload: Any) -> list[Any]:
        """Return the frames of a reply, or of a refusal if the reply is too large for its receiver and not paged."""
        frames = encode_reply(header, reply.body, payload=payload, **reply.changed)
        try:
            self.receivers.limits_of(header.client).check(header.client, reply.body, frames)
        except ProtocolError as error:
            return encode_reply(header, self.refuse(error).body)
        return frames

    def send(self, header: MessageHeader, reply: Reply, send: Callable[[Reply], None]) -> None:
        """Send a reply now, or after the save that the reply acknowledges."""
        now: Reply | None = reply
        if reply.until_saved:
            with Held(self._lock):
                now = self.committer.hold_until_saved(header, reply, send)
        if now is not None:
            send(now)

    def _after(self, ticket: Ticket) -> None:
        """Call `ticket`, with the lock held, after the next save of all changes so far."""

        def locked() -> None:
            with Held(self._lock):
                ticket()

        self.committer.call_after_save(locked)

    # --------------------------------------------------------------------------------------------------- accounts

    def store_gone_accounts(self) -> None:
        """Move accounts and former runs out of memory: see `AccountsHandler.store_gone_accounts`. Log a warning if too
        many new clients come, or clients do not fetch their TD errors fast enough.
        """
        now = self.now
        with Held(self._lock):
            warnings = self._accounts.warning(now), self.feedback.warning(now)
            self._accounts.store_gone_accounts(now, self.feedback)
        for warning in filter(None, warnings):
            _log.warning("server %s: %s", self.name, warning)

    def problem(self) -> str:
        """Return a sentence that says why new clients may soon have to wait; "" if they need not wait."""
        with Held(self._lock):
            return self._accounts.problem(self.now)

    def unconfirmed_clients(self, within: float) -> int:
        """Return the number of clients, heard within `within` seconds, that have not confirmed the end of the run."""
        with Held(self._lock):
            return self._clients.unconfirmed_clients(within, self._clock())

    def pages(self, run: RunState) -> Iterator[Rows]:
        """Yield every account of a run in pages: the server's own accounts and the inherited ones. If a client is
        counted meanwhile, its row may be older.
        """
        with Held(self._lock):
            live = run.rows_in_memory(self.home)
        pages = run.pages(live)
        while True:
            with Held(self._lock):
                rows = next(pages, None)
            if rows is None:
                return
            yield rows

    def store_inherited(self, name: str, finished: bool, rows: Rows) -> RunState:
        """Keep a run's accounts of other servers, as `AccountsHandler.store_inherited`. Raises ProtocolError."""
        with Held(self._lock):
            return self._accounts.store_inherited(name, finished, rows, self._clock())

    # ------------------------------------------------------------------------------------- calls from this process

    def publish(self, topic: str, content: bytes | bytearray | memoryview | str, version: int = 0) -> Model:
        """Store a new version of a model and notify subscribers: see `ModelsHandler.publish`."""
        model = model_from(topic, content, self.limits)  # the checksum is computed without the lock
        with Held(self._lock):
            return self._models.publish(model, version)

    def apply_td_errors(self, ids: NDArray[Any], td_errors: Any) -> PriorityUpdate:
        """Set priorities by TD errors of samples, or queue them for their owners: see `FeedbackHandler.apply`.

        Args:
            ids: `ID` [B], as in a batch.
            td_errors: [B], finite.
        """
        return self._apply_feedback(by_client(ids, td_errors))

    def _take_feedback(self, _: float, header: MessageHeader, body: messages.Feedback, payload: Any) -> Reply:
        return self.feedback.feedback_reply(header, self._apply_feedback(self.feedback.read(header, payload)))

    def _apply_feedback(self, pieces: Pieces) -> PriorityUpdate:
        with Held(self._lock):
            update = self.feedback.apply(pieces, self.now)
            merges = self.feedback.due_merges()
        for merge in merges:
            merge.compute()
            with Held(self._lock):
                self.feedback.apply_merge(merge)
        return update

    def bytes_per_client(self, table: OpenTable) -> int:
        """Return the bytes that each client of a table may have in flight now."""
        with Held(self._lock):
            return self._credits.bytes_by_client(table, self._clock())

    def set_client_byte_limit(self, credit: int | None) -> None:
        """Change the limit of bytes that a client may have in flight (None: no change); send NEWS to all clients."""
        with Held(self._lock):
            self._credits.limit_bytes(credit)
            self._control.announce()

    def configure(
        self, table: OpenTable, changes: Mapping[str, Any], *, discard_mismatched: bool = False
    ) -> Parameters:
        """Change a table's parameters for all clients: see `ControlHandler.configure`. Raises ParameterError."""
        with Held(self._lock):
            return self._control.configure(table, changes, discard_mismatched=discard_mismatched)

    def begin_run(self, name: str) -> None:
        """Begin or resume a run by name: see `ControlHandler.begin_run`. Raises ParameterError."""
        with Held(self._lock):
            self._control.begin_run(name, self._clock())

    def finish(self) -> None:
        """Finish the run: clients read this in their next reply."""
        with Held(self._lock):
            self._control.finish()

    def resume(self) -> None:
        """Continue the present run if it was finished."""
        with Held(self._lock):
            self._control.finish(False)

    def drain(self) -> None:
        """Send all clients to other servers: see `ControlHandler.drain`."""
        with Held(self._lock):
            self._control.drain()
