"""The server: takes caches and requests on its own threads, hands out batches, publishes models.

    actors ──requests──▶ one thread: Desk        ──▶ replies, notices
           ──caches────▶ one thread per address  ──▶ Pool ◀── get_batch, in the learner's own thread
             episodes                                EpisodePool

It runs inside of the learner's process, or alone with learners that read over the network
(`memoire.connect(url).batches`).
"""

from __future__ import annotations

import functools
import logging
import os
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

import zmq

from memoire import arguments
from memoire.accounting.account import Account, Totals
from memoire.accounting.journal import Group, RunFacts, Ticket
from memoire.accounting.ledger import Totals
from memoire.accounting.logbook import Entry, Wanted, format_line
from memoire.accounting.merge import ServerAccounts
from memoire.accounting.runs import Keeper
from memoire.arguments import FOR_EVER, mapping, seconds, whole
from memoire.clock import wall_clock
from memoire.errors import Closed, MemoireError, ParameterError, ProtocolError, WrongType
from memoire.limits import Limits
from memoire.models.model import Model
from memoire.models.notices import Notices, notice_of
from memoire.net import descriptors, link, sockets
from memoire.net.admission import PUSH_PLACE, REQUEST_PLACE, Admission
from memoire.net.curve_server import Gate
from memoire.net.lanes import Lanes
from memoire.net.plain_proxy import forward
from memoire.net.thread import ENDING, UNDO_TIMEOUT, Node, Worker, close_at_exit
from memoire.pool.caches import Pool
from memoire.pool.episodes import EpisodePool
from memoire.pool.freshness import Timings
from memoire.pool.tables import OpenTable, Storage, Table, Tables, checked, shared_out
from memoire.replay.batch import Batch
from memoire.replay.episodes import EpisodeBatch
from memoire.replay.mixing import MixedBatch, Mixer, sizes_of
from memoire.replay.parameters import Parameters
from memoire.replay.prefetch import batches_until_over, drawn_ahead
from memoire.replay.sampling import Sampler
from memoire.replay.schema import Schema
from memoire.security import exposure
from memoire.security.keyfolder import Given, Keys
from memoire.storage.plain_log import LogFile
from memoire.storage.restore import Restored
from memoire.suggestions import checked_names
from memoire.wire import messages
from memoire.wire.frames import Header, Message, encode, parse, peek
from memoire.wire.frames import reply as encode_reply
from memoire.wire.identity import DEFAULT_TABLE, NEWS_FRAME, table_number

from .dispatch import Desk, Reply
from .io_snapshots import Archive, Snapshot
from .queries import Queries
from .stats import ClientStats, ServerStats, figures_of
from .table_handle import ADVICE, TableHandle

_log = logging.getLogger(__name__)

FOLD_INTERVAL = 5.0
"""Seconds between two looks for accounts that may leave memory."""
REQUESTS_PER_TURN = 100
CACHES_PER_TURN = 100
UNTOLD = 2.0
"""Seconds within which a client was heard from that is worth waiting for when a finished server closes."""
LINGER = 2.0
"""Seconds for which closed sockets go on sending replies at most."""
PARTING = 0.3
"""Seconds between the last replies of a server that saves or is finished and its end: a client's socket forgets what
its thread has not read when the connection ends.
"""
LOG_FLUSH = 1.0
"""Seconds after which lines are in the log file at the latest."""


class Server(Node):
    """Keeps the newest caches of all clients, or their episodes, draws batches, counts, logs and publishes.

    Args:
        endpoint: Address for requests, such as "tcp://*:5560", "ipc:///run/memoire" or "inproc://memoire"; caches
        come in on
            the next port and notices go out on the one after it (or .push and .pub). Port 0 takes free ones. None opens
            none: workers are added afterwards.
        schema: What an entry is; a mapping is made a `Schema`. It makes one table; the arguments from `sampler` to
            `capacity`, `cache_limit` and `max_step` are its settings.
        tables: Several tables in its place, by name. Whoever names none gets the first.
        sampler: Settings of sampling, such as `Prioritized(0.6, beta=0.4)`.
        parameters: All settings at once; the other arguments change single ones.
        multi_step, discount, frame_stack: See `Parameters`.
        storage, capacity: See `Table`.
        run: Name of the experiment that totals, lines and models belong to. None: the one that the state folder counted
            last, or else "default".
        push_endpoint, pub_endpoint: Addresses for caches and notices, where they are not beside `endpoint`.
        cache_limit: Most caches that are held, 0 for no limit but bytes.
        byte_limit: Most bytes of caches that are held.
        max_step: Entries that a client's memory has room for; 0 leaves it to the client.
        name: Name of this server, the same after a restart; by default its host and port.
        seed: Of the draws; None takes entropy from the system.
        state_dir: Folder of this server's files, made when it is not there: totals, log lines, models and runs live on
            in it, and a reply to a client means "on disk". None keeps everything in memory.
        snapshot_caches: Whether `close` saves what the tables hold in the state folder, so that the next server has it;
            one that is killed loses it.
        snapshot_every: Seconds between two times that the same is saved while the server goes on: one that is killed
            has again what it held then (of caches, samples that were drawn since may be drawn once more). None saves
            nothing in between.
        context: ZeroMQ context; one for the process by default. Addresses inproc:// need the same context on both
        sides.
        clock: Seconds since 1970.
        keys: This process' keys folder (or a cluster's): whoever comes over tcp:// has to have a key that is in it.
            None takes $MEMOIRE_KEYS, and without it lets everybody in. See docs/operations.md.
        tune_process: Let this process be tuned for nodes, the first time that one asks for it: see docs/operations.md.

    With a state folder a server goes on where it ended: with the run that it counted last and the parameters that were
    configured last, unless `run` or parameters are given that differ from those given then.

    Raises:
        StateError: the folder cannot be used, or not as it is; says what to do.
        EndpointError: an address is taken, or none.
        ParameterError: a setting is out of its range.
        KeyFileError: the keys cannot be used.
    """

    CALLED = "this server"
    CLOSED_AT_EXIT = 2

    @checked_names()
    def __init__(
        self,
        endpoint: str | None,
        schema: Schema | Mapping[str, Any] | None = None,
        *,
        tables: Mapping[str, Table] | None = None,
        sampler: Sampler | None = None,
        parameters: Parameters | None = None,
        multi_step: int | None = None,
        discount: float | Sequence[float] | None = None,
        frame_stack: int | None = None,
        storage: Storage | None = None,
        capacity: int = 0,
        run: str | None = None,
        push_endpoint: str | None = None,
        pub_endpoint: str | None = None,
        cache_limit: int = 0,
        byte_limit: int | None = None,
        max_step: int = 0,
        name: str | None = None,
        seed: int | None = None,
        state_dir: str | Path | None = None,
        snapshot_caches: bool = False,
        snapshot_every: float | None = None,
        context: Context | None = None,
        limits: Limits | None = None,
        clock: Callable[[], float] = wall_clock,
        keys: Given = None,
        tune_process: bool = True,
    ) -> None:
        if endpoint is not None:
            addresses.beside(endpoint)  # before anything is made: an address that is none
        if storage == "episodes" and cache_limit:
            raise ParameterError(
                "cache_limit", cache_limit, "0 where episodes are stored: capacity says how many entries"
            )
        settings = _settings(
            schema,
            tables,
            sampler=sampler,
            parameters=parameters,
            multi_step=multi_step,
            discount=discount,
            frame_stack=frame_stack,
            storage=storage,
            capacity=capacity or cache_limit or None,
            max_step=max_step or None,
        )
        seed = None if seed is None else whole("seed", seed, -(2**63), 2**64)
        self._limits = limits or Limits()
        if (snapshot_caches or snapshot_every is not None) and state_dir is None:
            name, value = ("snapshot_every", snapshot_every) if snapshot_every else ("snapshot_caches", snapshot_caches)
            raise ParameterError(name, value, "left out without a state_dir to keep them in")
        if snapshot_every is not None and not 0.0 < snapshot_every <= FOR_EVER:
            raise ParameterError("snapshot_every", snapshot_every, "seconds above 0, or None")
        self._snapshots = snapshot_caches or snapshot_every is not None
        self.name = name or _default_name(endpoint)
        if tune_process:
            process.tune()
        self._context = context or shared_context()
        self._gate = Gate(self._context, Keys.of(keys, "server"))
        self._pid = os.getpid()
        self._started = time.monotonic()
        self._closing = threading.Event()
        self._close_lock = threading.Lock()
        self._counting = threading.Condition()  # guards the one below
        self._loops = 0  # plain proxies that run in callers' threads
        self._logfile: LogFile | None = None
        self._log_due = 0.0
        self._fold_at = time.monotonic() + FOLD_INTERVAL
        self._scalars: dict[str, float] = {}
        self._timings = Timings(kind.name for kind in messages.Type)  # belongs to the thread
        self._notices: deque[Model] = deque()
        self._again = Notices(time.monotonic())  # belongs to the thread
        self._has_news = False
        self._is_drained = threading.Event()  # no request is taken any more
        self._lost: Exception | None = None  # why nothing can be saved any more
        held_bytes = self._limits.held_bytes if byte_limit is None else whole("byte_limit", byte_limit, 1)
        budgets = shared_out({name: checked(name, table).byte_limit for name, table in settings.items()}, held_bytes)
        self._tables = Tables(settings, functools.partial(self._make_pool, budgets, seed))
        self._store: Keeper | None = None
        if state_dir is not None:
            self._store = open_store(state_dir, name, self.name, self._limits, clock)
            self.name = self._store.name
        try:
            self._desk = self._make_desk(run, clock)
        except BaseException:
            if self._store is not None:
                self._store.close(0.0)
            raise
        self._admission = Admission(self._gate, self._limits, count=self._desk.refuse, own=self._desk.own)
        self._queries = Queries(self._desk, self._store)
        self._archive = Archive(
            self._desk,
            store=self._store,
            limits=self._limits,
            every=snapshot_every,
            is_closing=self._closing,
            clock=clock,
        )
        self._desk.answer_with(messages.TakeSnapshot, self._archive.order)
        self._handles = {table.name: self._make_handle(table) for table in self._tables}
        self._first = self._handles[self._tables.first.name]
        self._endpoints = messages.Endpoints()
        self._requests = Worker("memoire-requests", self._turn, self._next_time)
        self._request_sockets: set[Socket] = set()
        self._lanes = Lanes()  # belongs to the requests' thread
        self._all_lanes = [self._lanes]  # with those of plain proxies, which belong to their callers' threads
        self._pullers: list[Worker] = []
        self._pub: Socket | None = None
        self._bound: list[str] = []
        self._warned: int | None = None  # of these addresses, how many it was said of whether they are open
        try:
            self._open(endpoint, push_endpoint, pub_endpoint)
            self._warned = 0
            self._warn_open()
        except BaseException:
            self.close(UNDO_TIMEOUT)
            raise
        if endpoint is not None and (trouble := descriptors.too_few(self._limits.expected_clients)):
            _log.warning("server %s: %s", self.name, trouble)
        if self._store is not None:
            self._archive.load(next((facts.name for facts in self._store.runs() if not facts.ended), None))
        self._requests.start()
        self._archive.start()
        if self._store is not None:
            self._store.start(self._desk.collect, self._saved, self._on_lost)
            self._store.wake()
        close_at_exit(self)

    def _make_pool(self, budgets: Mapping[str, int], seed: int | None, name: str, settings: Table) -> AnyPool:
        if settings.storage == "episodes":
            return EpisodePool(
                settings.schema,
                settings.parameters,
                capacity=settings.capacity,
                byte_limit=budgets[name],
                client_timeout=self._limits.client_timeout,
                seed=None if seed is None else (seed ^ table_number(name)) & (2**64 - 1),
            )
        return Pool(
            settings.schema,
            settings.parameters,
            byte_limit=budgets[name],
            cache_limit=settings.capacity,
            client_timeout=self._limits.client_timeout,
            seed=None if seed is None else seed ^ table_number(name),
        )

    def _make_handle(self, table: OpenTable) -> TableHandle:
        return TableHandle(self._desk, table, self._check_open, self._is_over, lambda: self.endpoint or self.name)

    def _make_desk(self, run: str | None, clock: Callable[[], float]) -> Desk:
        return Desk(
            tables=self._tables,
            run=run,
            name=self.name,
            limits=self._limits,
            endpoints=lambda: self._endpoints,
            on_lines=self._write_lines,
            on_model=self._announce,
            on_news=self._tell_news,
            past=self._store,
            on_change=self._wake_store,
            clock=clock,
            epoch=time.time_ns(),  # whatever clock is given: no two lives have the same number
        )

    def _open(self, endpoint: str | None, push: str | None, pub: str | None) -> None:
        if endpoint is not None:
            beside = addresses.beside(endpoint)
            push, pub = push or beside[0], pub or beside[1]
        if pub is not None:
            made = sockets.publisher(self._context)
            bound, way = self._bind(made, pub)
            self._endpoints = messages.Endpoints(publish=bound)
            self._pub = self._requests.doors.add(made, way=way)
        if push is not None:
            self._endpoints = messages.Endpoints(
                publish=self._endpoints.publish, push=self.add_pull_worker(push, bind=True)
            )
        if endpoint is not None:
            made = sockets.request_server(self._context, self._limits.request_bytes)
            bound, way = self._bind(made, endpoint)
            self._request_sockets.add(self._requests.doors.add(made, way=way))
            self._endpoints = messages.Endpoints(
                request=bound, push=self._endpoints.push, publish=self._endpoints.publish
            )

    # ---------------------------------------------------------------------------------------------- addresses

    @property
    def endpoint(self) -> str:
        """Address for requests, as bound: what clients connect to ("*" is any of this machine's addresses)."""
        return self._endpoints.request

    @property
    def push_endpoint(self) -> str:
        """Address for caches, as bound."""
        return self._endpoints.push

    @property
    def pub_endpoint(self) -> str:
        """Address for notices of models, as bound."""
        return self._endpoints.publish

    @property
    def keys(self) -> Keys | None:
        """Of this process; None where everybody is let in."""
        return self._gate.keys

    def add_request_worker(self, endpoint: str, *, bind: bool = True) -> str:
        """Answer requests at one more address; returns it as it is bound.

        Args:
            bind: False connects to a proxy's back instead.

        Raises:
            EndpointError: the address is taken, or none.
        """
        with self._close_lock:
            self._check_open()
            made = sockets.request_server(self._context, self._limits.request_bytes)
            doors = self._requests.doors
            way: ConnectionWatcher | None
            if bind:
                bound, way = self._bind(made, endpoint)
            else:
                bound, way = endpoint, link.dial(doors, made, endpoint, follow=False, keys=self._gate.keys)

            def take() -> None:
                self._request_sockets.add(doors.add(made, way=way))

            # Handed over, not shared: the worker's thread is the only one to use it from here on.
            self._requests.post(take)
        self._warn_open()
        return bound

    def add_pull_worker(self, endpoint: str, *, bind: bool = True) -> str:
        """Take caches at one more address, on a thread of its own; returns the address as it is bound.

        Raises:
            EndpointError: the address is taken, or none.
        """
        with self._close_lock:
            self._check_open()
            made = sockets.data_receiver(
                self._context, self._limits.message_bytes + (1 << 16), self._tables.usual_bytes()
            )
            bound, way = self._bind(made, endpoint) if bind else (endpoint, None)
            worker = Worker(f"memoire-pull-{len(self._pullers)}", functools.partial(self._pull, made))
            worker.doors.add(made, way=way)
            try:
                if not bind:
                    link.dial(worker.doors, made, endpoint, keys=self._gate.keys)
            except BaseException:
                worker.stop(0.0)
                raise
            self._pullers.append(worker)
            worker.start()
        self._warn_open()
        return bound

    def _bind(self, made: Socket, endpoint: str) -> tuple[str, ConnectionWatcher | None]:
        bound, way = self._gate.bind(made, endpoint)
        self._bound.append(bound)
        return bound, way

    def _warn_open(self, *plain: str) -> None:
        """Warn of addresses that were bound since the last call, and of `plain` ones, where everybody may come in."""
        if self.keys is None and self._warned is not None:
            news, self._warned = self._bound[self._warned :], len(self._bound)
            exposure.warn(f"server {self.name!r}", [*news, *plain], guard="keys (keys=)")

    def run_request_proxy(self, front: str, back: str) -> None:
        """Share the requests of one address out among the workers that connect to another; blocks until `close`."""
        self._check_open()
        frontend = sockets.request_server(self._context, self._limits.request_bytes)
        lanes = Lanes()
        self._all_lanes.append(lanes)
        backend = sockets.plain_dealer(self._context, self._limits.reply_bytes)
        self._forward(frontend, front, backend, back, place=REQUEST_PLACE, replies=lanes)

    def run_pull_proxy(self, front: str, back: str) -> None:
        """Share the caches of one address out among the workers that connect to another; blocks until `close`."""
        self._check_open()
        frontend = sockets.data_receiver(self._context, self._limits.message_bytes + (1 << 16))
        self._forward(frontend, front, sockets.data_sender(self._context), back, place=PUSH_PLACE)

    def _forward(
        self, frontend: Socket, front: str, backend: Socket, back: str, *, place: int, replies: Lanes | None = None
    ) -> None:
        """Hand messages on, and replies to requests; `place` is where a message that comes in has its passport."""
        ways = {}
        try:
            bound, ways[frontend] = self._gate.bind(frontend, front)
            self._warn_open(bound, back)
            _, ways[backend] = self._gate.bind(backend, back, only="server")
        except MemoireError:
            frontend.close(0)
            backend.close(0)
            raise
        with self._counting:
            self._loops += 1
        try:
            pass_on = functools.partial(self._admission.pass_on, frontend, place)
            forward(frontend, backend, pass_on, replies=replies, until=self._closing, ways=ways)
        finally:
            with self._counting:
                self._loops -= 1
                self._counting.notify_all()

    # ------------------------------------------------------------------------------------------------ requests

    def _next_time(self) -> float:
        if self._notices or self._has_news:
            return time.monotonic()
        return min(self._log_due or float("inf"), self._fold_at, self._again.next_time(), self._lanes.next_time())

    def _turn(self, ready: dict[object, int]) -> None:
        for made in () if self._is_drained.is_set() else self._request_sockets.intersection(ready):
            for _ in range(REQUESTS_PER_TURN):
                frames = sockets.receive(made, most=sockets.ENVELOPE)
                if frames is None:
                    break
                self._serve(made, frames)
        if self._pub is not None:
            self._repeat_notices(self._pub, self._pub in ready)
        self._send_notices()
        self._send_news()
        self._lanes.turn(time.monotonic())
        if time.monotonic() >= self._fold_at:
            self._fold_at = time.monotonic() + FOLD_INTERVAL
            self._desk.fold()
        if self._log_due and time.monotonic() >= self._log_due:
            self._log_due = 0.0
            if self._logfile is not None:
                self._logfile.flush()

    def _serve(self, made: Socket, frames: list[zmq.Frame]) -> None:
        if self._lost is not None:
            return  # nothing is acknowledged, and nothing refused either: who asks goes on asking until a restart
        request = self._admission.receive_request(made, frames)
        if request is None:
            return
        try:
            message = self._admission.parse(request, time.monotonic())
        except ProtocolError as error:
            refusal = self._admission.refuse_request(request, error)
            if refusal is not None:
                self._lanes.send(made, refusal, time.monotonic())
            return
        header, began = message.header, time.perf_counter()
        reply = self._answer(message)
        self._timings.saw(message.type.name, time.perf_counter() - began)
        send = functools.partial(self._reply, made, request.envelope, header, reply)
        if self._store is None or not reply.until_saved:
            send()
        elif isinstance(reply.body, messages.Updated) and not self._store.is_healthy:
            # The client says all of it again, so no reply has to wait; and it hears why nothing is acknowledged.
            refused = Reply(messages.Refused(code="disk", text=self._store.trouble[:1000]))
            self._reply(made, request.envelope, header, refused)
        else:
            self._desk.when_saved(header, send)

    def _reply(self, made: Socket, envelope: list[zmq.Frame], header: messages.Header, reply: Reply) -> None:
        sent = [*envelope, *messages.reply(header, reply.body, payload=reply.payload, **reply.changed)]
        self._lanes.send(made, sent, time.monotonic())

    def _answer(self, message: Message) -> Reply:
        try:
            return self._desk.answer(message)
        except Closed:
            return self._desk.refuse(ProtocolError("busy", "the server is closing"))
        except Exception:
            self._requests.errors += 1
            _log.exception("%s: a %s could not be answered", self.name, message.type.name)
            return self._desk.refuse(ProtocolError("busy", "the server could not answer; its log says why"))

    # Saving: a store's writer thread asks the desk what changed, and has the requests' thread do what waited for it.

    def _wake_store(self) -> None:
        if self._store is not None:
            self._store.wake()

    def _saved(self, group: Group) -> None:
        self._desk.saved()
        if group.tickets:
            self._requests.post(functools.partial(self._hand_out, group.tickets))

    def _hand_out(self, tickets: list[Ticket]) -> None:
        for ticket in tickets:
            try:
                ticket()
            except Exception:
                self._requests.errors += 1
                _log.exception("%s: something that waited for the disk failed", self.name)

    def _on_lost(self, error: Exception) -> None:
        """The store can save nothing any more, ever: nothing is acknowledged from here on."""
        self._lost = error
        _log.critical("%s: %s", self.name, error)
        self._close_pools()

    def _tell_news(self) -> None:
        self._has_news = True
        self._requests.wake()

    def _send_news(self) -> None:
        if self._has_news and self._pub is not None:
            sockets.send(self._pub, [NEWS_FRAME, *encode(messages.News(epoch=self._desk.epoch))])
        self._has_news = False

    def _repeat_notices(self, pub: Socket, is_asked: bool) -> None:
        """Tell who has just subscribed what is newest: nothing published while it was connecting is missed. And
        everybody, every few seconds.
        """
        desk, now = self._desk, time.monotonic()
        with desk.lock:
            if is_asked:
                self._again.subscribed(sockets.subscribed(pub, self._gate.admits), desk.models, now)
            for model in self._again.due(desk.models, now):
                sockets.send(pub, self._notice(model, again=True))

    def _notice(self, model: Model, *, again: bool = False) -> list[Any]:
        desk = self._desk
        return notice_of(model, self._limits, home=desk.home, epoch=desk.epoch, run=desk.run, again=again)

    def _announce(self, model: Model) -> None:
        self._notices.append(model)
        self._requests.wake()

    def _send_notices(self) -> None:
        while self._notices:
            model = self._notices.popleft()
            if self._pub is not None:
                sockets.send(self._pub, self._notice(model))

    def _write_lines(self, lines: list[Entry]) -> None:
        if self._logfile is not None:
            self._logfile.write([format_line(entry.received, entry.line.label, entry.line.text) for entry in lines])
            self._log_due = self._log_due or time.monotonic() + LOG_FLUSH

    # -------------------------------------------------------------------------------------------------- caches

    def _pull(self, made: Socket, ready: dict[object, int]) -> None:
        # Waits inside of the receive while messages come: with a poll before each one, polls would be half of the work.
        # Yet a turn ends some time, so that the thread is seen to be alive.
        for _ in range(CACHES_PER_TURN):
            frames = None if self._closing.is_set() else sockets.receive(made, most=3, wait=True)
            if frames is None:
                return
            message = self._admission.receive_push(made, frames)
            if message is None:
                continue
            assert isinstance(message.body, messages.Cache | messages.Episode)
            try:
                self._desk.arrived(message.header, message.body, message.payload)
            except ProtocolError:
                continue  # counted where it was found

    # ------------------------------------------------------------------------------------------------- batches

    @property
    def schema(self) -> Schema:
        """What an entry is, in the first table."""
        return self._first.schema

    @property
    def tables(self) -> tuple[str, ...]:
        """Names of the tables; those methods that name none mean the first."""
        return self._tables.names

    def table(self, name: str) -> TableHandle:
        """One of the tables: batches, parameters and figures of its own.

        Raises:
            ParameterError: there is none of this name.
        """
        return self._handles[self._tables[name].name]

    def get_batch(
        self, batch_size: int, timeout: float | None = None, *, out: Mapping[str, Any] | Batch | None = None
    ) -> Batch:
        """Draw a batch from the held caches, as if from all clients' memories at once.

        All or nothing: a batch that cannot be filled takes no sample. Safe from several threads; the GIL is released
        while samples are copied. DESIGN 4 says how clients are weighed; docs/sampling.md derives it.

        Args:
            batch_size: Samples to draw, at least 1.
            timeout: Seconds to wait for enough samples; None does not wait.
            out: Arrays of the caller (by name, or an earlier batch) that are filled in place of new ones.

        Raises:
            ParameterError: an array of `out` does not fit; no sample was taken.
            NotEnoughSamples: fewer are held, also after `timeout`.
            Closed: the server was closed, also from another thread while waiting.
        """
        return self._first.get_batch(batch_size, timeout, out=out)

    @overload
    def batches(self, batch_size: int, timeout: float = ..., *, ahead: int = ...) -> Iterator[Batch]: ...
    @overload
    def batches(
        self, batch_size: Mapping[str, int], timeout: float = ..., *, ahead: int = ...
    ) -> Iterator[MixedBatch]: ...
    def batches(
        self, batch_size: int | Mapping[str, int], timeout: float = 30.0, *, ahead: int = 0
    ) -> Iterator[Batch] | Iterator[MixedBatch]:
        """Batches until `finish` or `close`; each waits at most `timeout` seconds for its samples.

        Args:
            batch_size: Samples of the first table; or of several, mixed: `{"online": 192, "demo": 64}`.
            ahead: Batches that are drawn on a thread of their own while the learner works on one, from the first one
                on; 0 draws each when it is asked for. They are as old as that, and what was drawn when nobody asks any
                more is lost.

        Raises:
            MemoireTimeout: not enough samples came in that time.
        """
        if not isinstance(batch_size, Mapping):
            return self._first.batches(batch_size, timeout, ahead=ahead)
        sizes = sizes_of(batch_size)
        mixer = Mixer(sizes, {name: self.table(name).get_batch for name in sizes})
        where, advice = self.endpoint or self.name, lambda: f"Table {mixer.lacking!r} has too few. {ADVICE}"

        def drawn(is_over: Callable[[], bool]) -> Iterator[MixedBatch]:
            return batches_until_over(mixer.get, is_over, f"batch of {sizes}", timeout, where, advice)

        return drawn_ahead(drawn, self._is_over, ahead)

    def sample_episodes(
        self, count: int, timeout: float | None = None, *, group: str | None = None, group_size: int | None = None
    ) -> EpisodeBatch:
        """Draw whole episodes of the first table, which stores them: see `TableHandle.sample_episodes`."""
        return self._first.sample_episodes(count, timeout, group=group, group_size=group_size)

    def _is_over(self) -> bool:
        return self._closing.is_set() or self.finished

    def update_priorities(self, ids: Any, td_errors: Any) -> int:
        """Hand TD errors on to the clients that own the samples; returns at once, with how many have no owner here.

        The owners apply them with their next message and report applied and stale: see `stats`.
        """
        self._check_open()
        return self._desk.hand_on(ids, td_errors)

    # -------------------------------------------------------------------------------------------- what it says

    def publish(self, topic: str, content: bytes | bytearray | memoryview | str) -> int:
        """Make this the newest model of its topic and tell every client; returns its version. From any thread.

        Clients get the content in the type in which it was published; who comes later gets the newest.
        """
        self._check_open()
        return self._desk.publish(topic, content).version

    def model(self, topic: str) -> Model | None:
        """The newest model of a topic, from whomever it came; with a state folder, the newest that is saved."""
        return self._desk.models.newest(topic)

    def scalars(self, values: Mapping[str, float]) -> None:
        """Set figures of this learner to be shown, by name, such as its loss: finite numbers, at most 64 names."""
        self._check_open()
        self._scalars = arguments.scalars(values, self._scalars)

    def configure(self, **changes: Any) -> Parameters:
        """Change parameters here and, with their next message, at every client; their data stays.

        Raises:
            ParameterError: a value is out of its range; nothing was changed.
        """
        return self._first.configure(**changes)

    def configure_limits(self, *, credit: int | None = None, held_bytes: int | None = None) -> None:
        """Change byte budgets while clients go on; they hear of it at once.

        Args:
            credit: Bytes that each client may have on the way at most; less where its share of what is held is less.
            held_bytes: Bytes that are held at most, in all tables: those with a limit of their own keep it, the others
                share the rest. What is too much is overwritten now. Where episodes are stored they move to a memory
                of another size, and ids drawn before are stale.

        Raises:
            ParameterError: not a whole number of at least 1, or nothing would be left; nothing was changed.
        """
        self._check_open()
        for name, value in (("credit", credit), ("held_bytes", held_bytes)):
            if value is not None and (type(value) is not int or value < 1):
                raise ParameterError(name, value, "a whole number of bytes, at least 1")
        if held_bytes is not None:
            self._tables.share_out(held_bytes)
        self._desk.grant(credit)

    def finish(self) -> None:
        """The run is over: `client.finished` becomes true everywhere, and `batches` ends."""
        self._desk.finish()

    def begin_run(self, name: str) -> None:
        """Count this run from now on: from zero, or where it ended. The former one stays readable.

        Caches and models of the former run are dropped, parameters stay. Clients hear of it at once, say the rest about
        the former run, and go on in this one. A run that was finished stays finished: see `resume`.

        Raises:
            ParameterError: that is no name.
        """
        self._check_open()
        self._desk.begin_run(name)
        if self._desk.finished:
            _log.warning("%s: run %r is finished; resume() makes it go on", self.name, name)

    def resume(self) -> None:
        """Let a run go on that was declared over."""
        self._check_open()
        self._desk.resume()

    def runs(self) -> list[RunFacts]:
        """All runs that this server knows, the one that is counted last."""
        return self._queries.runs()

    def totals(self, run: str | None = None) -> Totals:
        """Sums over all clients of a run, with what servers that were drained have brought here; None is the run that
        is counted now. What other servers of the cluster have counted is in `Reader.totals`.

        Raises:
            ParameterError: this server knows no such run.
        """
        return self._queries.totals(run)

    @property
    def finished(self) -> bool:
        """Whether the run was declared over, here or by a learner far away."""
        return self._desk.finished

    @property
    def run(self) -> str:
        """Name of the experiment."""
        return self._desk.run_name

    @property
    def parameters(self) -> Parameters:
        """Everything that shapes sampling, as it is now."""
        return self._first.parameters

    @property
    def total_episodes(self) -> int:
        """Episodes that all clients of this run closed."""
        return self._desk.ledger.episodes

    @property
    def total_steps(self) -> int:
        """Entries that all clients of this run recorded."""
        return self._desk.ledger.steps

    @property
    def total_caches(self) -> int:
        """Caches that were accepted here; whoever has a batch finds its caches counted."""
        with self._desk.lock:
            return self._desk.ledger.accepted_caches

    @property
    def logfile(self) -> str | None:
        """Path of the log file; None before `set_logfile`."""
        return None if self._logfile is None else str(self._logfile.path)

    def set_logfile(self, logfile_path: str | Path, mode: str = "a") -> None:
        r"""Write the clients' lines to a file from now on: `'%s,%08x,%s\n' % (time, uuid, message)`.

        Lines are buffered, and flushed within a second and at close. The former file is closed.

        Args:
            mode: As of fopen: "a" goes on where the file ends, "w" begins anew.
        """
        self._check_open()
        former, self._logfile = self._logfile, LogFile(logfile_path, mode)
        if former is not None:
            former.close()

    def lines(self, after: int = 0, most: int = 1000, *, run: str | None = None) -> list[Entry]:
        """The newest log lines with an index above `after`, oldest first, as far as they are kept in memory.

        Raises:
            ParameterError: this server knows no such run.
        """
        return self._queries.lines(after, most, run)

    def search(
        self,
        text: str = "",
        *,
        run: str | None = None,
        client: bytes | None = None,
        label: int | None = None,
        since: float | None = None,
        until: float | None = None,
        after: int = 0,
        before: int | None = None,
        most: int = 100,
        newest_first: bool = False,
    ) -> list[Entry]:
        """Log lines of a run that fulfil all conditions: of all that a state folder keeps, or, without one, of the
        newest in memory.

        Args:
            text: Somewhere in the line as the log file has it; letters A to Z in either case.
            run: None is the one that is counted now.
            client: Id of the sender.
            label: The sender's 32-bit uuid.
            since, until: Received at or after, and before; seconds since 1970.
            after, before: Index above, and below: the last index of a page is where the next one begins.
            most: At most so many, 1 to 10000.
            newest_first: Else the oldest come first.

        Raises:
            ParameterError: this server knows no such run, or `most` is out of its range.
        """
        wanted = Wanted(text=text, client=client, label=label, since=since, until=until, after=after, before=before)
        return self._queries.search(wanted, run, most=most, newest_first=newest_first)

    def episodes(self, most: int = 1000) -> list[tuple[str, messages.Ended]]:
        """The newest closed episodes, oldest first, each with its client's id in hex."""
        return self._queries.episodes(most)

    def episodes_after(self, after: int, most: int = 1000) -> tuple[str, int, list[tuple[str, messages.Ended]]]:
        """Closed episodes with a number above `after`, oldest first, as far as they are still kept: the run, the number
        of the first one, and each with its client's id in hex. Numbers begin anew with each start of the server
        (`stats().epoch`), and with each run.
        """
        return self._queries.episodes_after(after, most)

    def accounts(self, run: str | None = None) -> ServerAccounts:
        """What this server has counted for a run, client by client, with what drained servers have brought here; for
        whoever merges several (`memoire.accounting.merge`). Cost: some 250 bytes for each client of the run.

        Raises:
            ParameterError: this server knows no such run.
        """
        return self._queries.accounts(run)

    def account_page(
        self, run: str | None = None, after: bytes = b"", *, seen: float = 0.0, most: int = 16384
    ) -> tuple[ServerAccounts, bool]:
        """At most so many accounts of a run, in the order of their keys, and whether there are more.

        Args:
            after: Key (`accounts.key_of`) of the last row of the page before.
            seen: Where that is less than half of `limits.client_timeout` ago, all accounts whose client was heard since
                then, and no others.

        Raises:
            ParameterError: this server knows no such run.
        """
        return self._queries.account_page(run, after, seen, most)

    def clients(self, after: str = "", most: int | None = None) -> list[ClientStats]:
        """The clients that were heard lately, in the order of their ids: those whose accounts are in memory, and those
        that have said hello and reported nothing yet. `accounts` has all that were ever counted.

        Args:
            after: Only those whose id in hex is above this one, such as the last of the page before.
            most: As many as this at most; None is all of them.
        """
        return self._queries.clients(after, most)

    @property
    def epoch(self) -> int:
        """Greater at each start of this server."""
        return self._desk.epoch

    @property
    def limits(self) -> Limits:
        """Timeouts and byte limits that it was made with."""
        return self._limits

    def liveness(self) -> list[str]:
        """What only a restart can mend, a sentence each: threads that died or are stuck. Empty while all is well."""
        stuck = [trouble for worker in (self._requests, *self._pullers) for trouble in worker.trouble()]
        return stuck if self._lost is None else [f"state: {self._lost}", *stuck]

    def readiness(self) -> list[str]:
        """Why this server should get no new clients just now, a sentence each; empty when it should."""
        if self._closing.is_set():
            return ["closing: this server is about to end"]
        if self._store is not None and not self._store.is_healthy:
            return [f"state: {self._store.trouble}"]
        if self._desk.leaving:
            return ["leaving: this server is being drained; others count its clients from now on"]
        trouble = [descriptors.shared_guard().trouble(), self._desk.trouble()]
        return [*self._gate.trouble(), *filter(None, trouble)]

    def stats(self) -> ServerStats:
        """All figures at this moment."""
        store = self._store
        tables = {name: handle.stats() for name, handle in self._handles.items()}
        return ServerStats(
            name=self.name,
            uptime=time.monotonic() - self._started,
            restored=0 if store is None else store.restored,
            dropped_replies=sum(lanes.dropped for lanes in self._all_lanes),
            requests=self._timings.now(),
            snapshots=self._archive.taken,
            snapshot_trouble=self._archive.trouble,
            folder=None if store is None else store.space(),
            descriptors=descriptors.used(),
            most_descriptors=descriptors.limit(),
            security=self._gate.security(),
            faults=self._requests.errors + sum(worker.errors for worker in self._pullers),
            **figures_of(self._desk, tables, self._scalars),
        )

    # ------------------------------------------------------------------------------------------------- snapshots

    def snapshot(self, path: str | Path) -> Snapshot:
        """Write all that the tables hold to a file, while everything goes on: a cache or episode at a time is looked
        up, and no more than one is kept in memory for it. Returns what was written.

        The file appears whole or not at all, and is on disk when this returns; a former one of that name stays until
        then. Each client, and each episode, is as it was when its turn came (docs/state.md).

        Raises:
            OSError: it cannot be written.
            Closed, Refused: the server was closed, or another run began, meanwhile.
        """
        self._check_open()
        return self._archive.take(path)

    def restore(
        self,
        paths: Sequence[str | Path],
        *,
        part: tuple[int, int] = (0, 1),
        configure: bool = False,
        skip_damaged: bool = False,
        once: bool = False,
    ) -> Restored:
        """Put what was written by `snapshot`, here or at other servers, into this server's tables, while it goes on.

        Caches come with what was drawn of them, episodes with priorities, ages and what learners said; clients with
        their sums and, in the run that it was, their totals. What is held here already is not held twice. A client that
        is known by this alone stays until its samples are used; with reuse_cache, as long as there is room.

        Args:
            paths: All files of the cluster that was saved, or those that are wanted.
            part: (rank, of): this server takes what belongs to it among so many that are given the same files: each
                client's caches, each episode, and each client's totals go to exactly one.
            configure: Whether tables take the files' parameters first. Else caches that were made with windows of
                another form are refused.
            skip_damaged: Take what is whole of a damaged file, and count the rest; else it is refused.
            once: Leave out files that were restored into this state folder before: for a server whose start restores.

        Raises:
            DataError: a file cannot be read, is damaged, or no snapshot; nothing was taken.
            SnapshotMismatch: a file has a table that this server lacks, or of another schema; nothing was taken.
            ParameterError: a part that is none, or a table's parameters cannot be taken.
        """
        self._check_open()
        return self._archive.restore(paths, part=part, configure=configure, skip_damaged=skip_damaged, once=once)

    # ------------------------------------------------------------------------------------------------- its end

    @property
    def failure(self) -> Exception | None:
        """Why this server can save nothing any more and acknowledges nothing: it has to be started again. None where
        all is well.
        """
        return self._lost

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closing.is_set()

    def wait_closed(self, timeout: float | None = None) -> bool:
        """Wait until somebody closes the server; False when `timeout` seconds passed first."""
        return self._closing.wait(seconds(timeout))

    def close(self, timeout: float | None = None) -> None:
        """End all threads and loops, and close every socket within `timeout` seconds. Waiting calls raise `Closed`.

        After `finish` it waits, within that time, until clients that were heard from lately know of it: an actor that
        loops until `client.finished` would otherwise never end.

        May be called again, and from any thread. Batches stay valid.
        """
        deadline = time.monotonic() + seconds(timeout, self._limits.close_timeout)
        self._closing.set()
        if not self._snapshots:
            self._close_pools()
        with self._closer(deadline) as is_mine:
            if not is_mine:
                return
            self._stop(self._pullers, deadline)
            self._tell_finished(deadline - 0.3)
            if self._store is not None:
                self._drain(deadline)
                if self._snapshots:
                    left = max(0.0, deadline - time.monotonic())
                    self._archive.save(deadline - 0.25 * left)  # the rest of the time is the store's
                    self._close_pools()
                    self._snapshots = False  # closed again, it would write over what a later life has saved
                if not self._store.close(max(0.1, deadline - time.monotonic())):
                    _log.warning("%s: not everything could be saved; clients that go on will say it again", self.name)
            if self._store is not None or self._desk.finished:
                time.sleep(max(0.0, min(PARTING, deadline - time.monotonic())))
            self._stop([self._requests], deadline)
            with self._counting:
                while self._loops and time.monotonic() < deadline:
                    self._counting.wait(max(0.0, deadline - time.monotonic()))
            if self._logfile is not None:
                self._logfile.close()
            self._gate.close()
            sockets.wait_unbound(self._bound, deadline - time.monotonic())

    def _close_pools(self) -> None:
        for table in self._tables:
            table.pool.close()

    def _stop(self, workers: Sequence[Worker], deadline: float) -> None:
        for worker in workers:
            left = deadline - time.monotonic()
            # A moment also where there is no time: a thread that waits for a cache notices the end only then.
            if not worker.stop(max(ENDING, left), linger=max(0.2, min(LINGER, left))):
                _log.warning("%s: a thread did not end in time", self.name)

    def _drain(self, deadline: float) -> None:
        """Answer the requests that are there, and take no more: what they change is saved with the last group."""

        def last_turn() -> None:
            self._turn(dict.fromkeys(self._request_sockets, zmq.POLLIN))
            self._is_drained.set()

        if self._requests.is_alive and not self._requests.is_here:
            self._requests.post(last_turn)
            self._is_drained.wait(max(0.0, deadline - time.monotonic()))
        self._is_drained.set()

    def _tell_finished(self, deadline: float) -> None:
        """Go on answering until the clients know that the run is over: each asks every `update_every` seconds."""
        while self._requests.is_alive and not self._requests.is_here and time.monotonic() < deadline:
            if not self._desk.untold(UNTOLD):
                break
            time.sleep(0.01)

    def __repr__(self) -> str:
        return f"<memoire.Server {self.name!r} at {self.endpoint or '(no address)'}, run {self.run!r}>"

    def _check_open(self) -> None:
        if self._closing.is_set():
            raise Closed("this server")
        if self._lost is not None:
            raise self._lost


def open_store(
    folder: str | Path, name: str | None, default_name: str, limits: Limits, clock: Callable[[], float]
) -> Keeper:
    """The files of a server, opened and locked. Raises StateError."""
    from memoire.storage.state_folder import Store  # needs SQLite, which a thin Python may lack

    return Store(folder, name, default_name=default_name, limits=limits, clock=clock)


def _default_name(endpoint: str | None) -> str:
    port = (endpoint or "").rpartition(":")[2]
    if endpoint and endpoint.startswith("tcp://") and port.isdigit() and port != "0":
        return f"{socket.gethostname()}:{port}"
    return f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"


def _settings(
    schema: Schema | Mapping[str, Any] | None, tables: Mapping[str, Table] | None, **options: Any
) -> Mapping[str, Table]:
    """The tables of a server: those that it was given, or one made of a schema."""
    given = {name: value for name, value in options.items() if value is not None}
    if tables is None:
        if schema is None:
            raise WrongType("schema", "a memoire.Schema, or tables={name: memoire.Table(schema)}", "None")
        return {DEFAULT_TABLE: Table(schema, **given)}
    for name, value in (given if schema is None else {"schema": schema, **given}).items():
        raise ParameterError(name, value, "absent beside tables=: each memoire.Table has its own")
    return mapping("tables", tables)
