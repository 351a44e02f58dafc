"""The client: an actor's memory, and what it tells and hears over the network.

    methods, from any thread ──▶ counters, lines, window (one lock) ──▶ one thread with three sockets ──▶ server or
    proxy
                                                                        requests, caches, notices

Methods never touch a socket. The thread sends the client's cumulative totals, newest sums, lines and scalars in
UPDATE, at most every `update_every` seconds and at once when somebody waits for it; the replies say what arrived,
which parameters and models are new, and whether the run is over.
"""

from __future__ import annotations

import itertools
import logging
import os
import random
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np
import zmq

from memoire import _core, arguments
from memoire.arguments import mapping, seconds, table_name, whole
from memoire.clock import wall_clock
from memoire.errors import (
    Closed,
    EmptyMemory,
    MemoireError,
    MemoireTimeout,
    ParameterError,
    ProtocolError,
    Refused,
    SchemaMismatch,
)
from memoire.limits import Limits, MiB
from memoire.models.model import Model, check_topic
from memoire.models.topics import Subscription, Topics, fetch_patience
from memoire.net import link, sockets
from memoire.net.channel import Channel
from memoire.net.sockets import Context, Socket
from memoire.net.thread import ENDING, UNDO_TIMEOUT, Node, Worker, close_at_exit
from memoire.replay.memory import Memory
from memoire.replay.parameters import Parameters
from memoire.replay.schema import Schema
from memoire.replay.writer import Writer, Writers, layout
from memoire.security.keyfolder import Given, Keys
from memoire.suggestions import checked_names, one_of
from memoire.version import SOFTWARE
from memoire.wire import container, messages

from . import unreported
from .counts import Boundary, ClientCounts, RunCounts
from .episodes import OpenEpisodes, Shipment
from .home_watch import Change, HomeWatch
from .inserts import Inserts
from .io_unreported import FormerClient
from .outbox import Outbox
from .window import Window, Windows

if TYPE_CHECKING:
    from memoire.reader.reader import Reader
    from memoire.replay.batch import Batch
    from memoire.replay.mixing import MixedBatch

_log = logging.getLogger(__name__)

HEARTBEAT = 5.0
"""Seconds between two UPDATE messages of a client that has no news."""
SILENT_AFTER = 3 * HEARTBEAT
"""Seconds without a reply after which a client says that it is not ready."""
PRESSED = 0.01
"""Seconds between two UPDATE messages while the byte window is half used."""
LINES_PER_UPDATE = 512
ENDED_PER_UPDATE = 1024
NEWS_WITHIN = 0.3
"""Seconds within which NEWS is answered by UPDATE, at random: a thousand clients hear of it in the same instant."""
MOVE_AGAIN = 2.0
"""Seconds between two HELLO messages of a client whose home is being drained, while nobody else takes it; times 0.5 to
1.5."""
DEFAULT_MEMORY_BYTES = 256 * MiB
DEFAULT_MEMORY_ENTRIES = (1_000, 100_000)
NOTICES_PER_TURN = 100
WARN_EVERY = 60.0
"""Seconds between two warnings that lines are dropped."""

HELD_BACK = "held back"
"""Why nothing was pushed while learners are too far behind."""

WhenFull = Literal["skip", "block"]


@dataclass(frozen=True, slots=True)
class ClientStats:
    """A client at one moment; for whoever watches."""

    client: str
    """Its id in hex."""
    label: int
    endpoint: str
    home: str
    """Name of the server that counts it."""
    table: str
    run: str
    episodes: int
    steps: int
    generated_bytes: int
    pushed_caches: int
    """Where the server stores episodes, these; so with all counts of caches."""
    pushed_bytes: int
    accepted_caches: int
    received_bytes: int
    rejected: dict[str, int]
    lost_caches: int
    lost_bytes: int
    in_flight_caches: int
    in_flight_bytes: int
    credit: int
    """Bytes that may be on the way: what the home grants, or less where `configure_limits` says so."""
    granted: int
    """Bytes that the home grants."""
    when_full: WhenFull
    """What the writer does with a cache or episode when the window is full."""
    waited: float
    """Seconds that calls waited for room in the window."""
    passed_steps: int
    """Of the steps, those that were recorded while the home told this client to wait, and that count for no pushes."""
    held_back: str
    """Why it is to wait now; "" when it is not. See `samples_per_insert_tolerance`."""
    held_back_for: float
    """Seconds that calls waited for that."""
    skipped_caches: int
    """Caches or episodes that were not pushed because the window was full."""
    not_pushed: dict[str, int]
    """Calls of push_cache and push_episode, the writer's too, that pushed nothing, by reason."""
    waiting_lines: int
    waiting_line_bytes: int
    dropped_lines: int
    """Lines that log() did not take."""
    dropped_returns: int
    """Episodes that count, but whose return was given up: not finite, or thousands closed while the home was away."""
    parameters_version: int
    models: dict[str, int]
    skipped_models: int
    """Versions between two that came, over all topics: passed over, because newer ones were there."""
    fetched_bytes: int
    """Of models, asked for beyond what notices brought."""
    resubscribed: int
    """Topics subscribed to again, because their notices did not come."""
    updates: int
    """UPDATE messages that were answered."""
    resends: int
    refused: dict[str, int]
    """Messages that came in and were refused, by code."""
    silent: float
    """Seconds since the newest reply."""
    untold_steps: int
    """Of the steps, those that no home has acknowledged yet."""
    trouble: str
    """Why the home acknowledges nothing, as it says; "" where all is well."""
    applied: int
    stale: int
    finished: bool
    faults: int


@checked_names()
def connect(
    url: str,
    *,
    table: str = "",
    seed: int | None = None,
    timeout: float = 10.0,
    input_uuid: int = 0,
    capacity: int | None = None,
    when_full: WhenFull = "skip",
    context: Context | None = None,
    limits: Limits | None = None,
    keys: Given = None,
    state_dir: str | Path | None = None,
) -> Client:
    """Connect to a server, proxy or relay: one address, and everything else comes from there.

    Args:
        url: Such as "tcp://proxy:5560" or "ipc:///run/memoire".
        table: Name of the table that it fills; "" is the server's first.
        seed: Of the memory's draws; None takes entropy from the system.
        timeout: Seconds to wait for the other side.
        input_uuid: 32-bit label in the log's lines; 0 takes a random one.
        capacity: Entries that the memory has room for; by default as the server says, or what fits 256 MiB.
        when_full: What the writer does with a cache or episode when the byte window is full: skip it, or wait for
            `limits.block_timeout` seconds and then skip it.
        context: ZeroMQ context; one for the process by default.
        keys: This process' keys folder (or a cluster's), for tcp:// addresses; None takes $MEMOIRE_KEYS, and without it
            none. See docs/operations.md.
        state_dir: Folder in which this client leaves what it could not tell when it ends, and from which it tells what
            earlier ones have left; made when it is not there. None leaves nothing: the log says what is lost.

    Raises:
        MemoireTimeout: nobody answered; says what to look at.
        AuthError: the other side does not let this process in.
        KeyFileError: the keys cannot be used.
        EndpointError: the address is none.
        StateUnusable: state_dir cannot be written.
        Refused: the other side does not take this client, or has no such table.
    """
    return Client(
        url,
        table=table,
        seed=seed,
        timeout=timeout,
        input_uuid=input_uuid,
        capacity=capacity,
        when_full=when_full,
        context=context,
        limits=limits,
        keys=keys,
        state_dir=state_dir,
    )


class Client(Node):
    """One client of a cluster; `connect` makes it. All methods may be called from any thread.

    Args:
        request: Address for requests.
        push, subscribe: Addresses for caches and notices, where they are not those that the server names.
        live: Whether entries can be drawn before their episode is closed.
        The others: see `connect`.
    """

    CALLED = "this client"
    _PARAMETERS = "Parameters are the server's: write configure(NAME=...) of a server or reader."
    CLOSED_AT_EXIT = 0

    @checked_names()
    def __init__(
        self,
        request: str,
        *,
        push: str | None = None,
        subscribe: str | None = None,
        table: str = "",
        input_uuid: int = 0,
        timeout: float = 10.0,
        seed: int | None = None,
        capacity: int | None = None,
        live: bool = True,
        when_full: WhenFull = "skip",
        context: Context | None = None,
        limits: Limits | None = None,
        clock: Callable[[], float] = wall_clock,
        keys: Given = None,
        state_dir: str | Path | None = None,
    ) -> None:
        _check_when_full(when_full)
        if not 0 <= input_uuid < 1 << 32:
            raise ParameterError("input_uuid", input_uuid, "a number of 32 bits")
        self.endpoint = request
        self.client_id = secrets.token_bytes(16)
        """128 random bits: who this client is; new for each one made."""
        self.uuid = input_uuid or secrets.randbelow((1 << 32) - 1) + 1
        """The label of its log lines."""
        self._folder = None if state_dir is None else unreported.folder_at(state_dir)
        self.push_reason = ""
        """Why the newest push_cache returned False; "" when it did not."""
        self._limits = limits or Limits()
        self._seed, self._capacity, self._live = seed, capacity, live
        self._table = table_name(table)
        self._given = (push, subscribe)
        self._clock = clock
        self._context = context or sockets.shared_context()
        self._keys = Keys.of(keys, "actor")
        self._pid = os.getpid()
        self._rng = random.Random(secrets.randbits(64))
        self._closing = False  # close() was called: calls raise Closed
        self._is_parting = False  # but episodes that are open in writers still leave
        self._closed_by = float("inf")  # until then
        self._close_lock = threading.Lock()
        # One lock for everything below; notified at each answer, at close and when something fails.
        self._changed = threading.Condition()
        self._failed: MemoireError | None = None
        self._welcome: messages.Welcome | None = None
        self._schema: Schema | None = None
        self._parameters, self._parameters_version = Parameters(), 0
        self._memory: Memory | None = None
        self._models: dict[str, int] = {}  # newest versions at the home
        self._writers: Writers | None = None
        self._memory_lock = threading.RLock()  # making and replacing the memory, and its writers
        self._windows = Windows(self._limits.credit)
        self._granted, self._own_credit = self._limits.credit, 0  # 0: as much as is granted
        self._when_full = when_full
        self._block_timeout, self._log_timeout = self._limits.block_timeout, self._limits.log_timeout
        self._not_pushed_for: dict[str, int] = {}
        self._waited = 0.0
        self._outbox = Outbox(
            most_lines=self._limits.log_lines,
            most_bytes=self._limits.log_buffer_bytes,
            line_bytes=self._limits.log_line_bytes,
        )
        self._vain_line = 0.0  # oldest line that waited when log() last waited in vain: while it is there, none waits
        self._warned_at = float("-inf")
        self._counts = RunCounts()
        self._inserts = Inserts(self._counts, self._limits.update_every)
        self._is_between = False  # until HELLO is answered: what is pushed now would count for nobody
        self._scalars: dict[str, float] = {}
        self._feedback_through = 0
        self._finished = False
        self._pressed = 0  # calls that wait for room in the window
        self._trouble = ""  # why the home acknowledges nothing, as it says
        self._asked = self._answered = 0  # calls of update(), and the newest one that a reply covers
        self._asked_line = 0  # newest line that somebody waits for
        self._is_dirty = False
        self._leaving = False
        self._is_left = False  # what could not be told was said, or kept
        self._readers: list[Reader] = []  # of `batches` that are drawn now
        self._updates = 0
        self._last_size = 0  # of the newest cache, a guess for the next one
        # What belongs to the thread alone.
        self._watch = HomeWatch(time.monotonic())
        self._former: list[FormerClient] = []  # of what earlier clients have left; changed under the lock
        self._numbers = itertools.count(1)
        self._worker = Worker("memoire-client", self._turn, self._next_time, self._at_end)
        try:
            self._channel = Channel(
                self._worker.doors,
                self._context,
                request,
                client=self.client_id,
                limits=self._limits,
                rng=self._rng,
                numbers=self._numbers,
                keys=self._keys,
            )
        except BaseException:
            self._worker.stop(0.0)
            raise
        self._push: Socket | None = None
        self._sub: Socket | None = None
        self._pushes: deque[tuple[int, list[Any]]] = deque()  # size and frames of caches; other threads append
        self._is_push_blocked = False
        self._renewals = 0  # of the channel, that the other sockets have followed
        self._update_sent = 0.0
        self._update_open = False
        self._news_due = float("inf")  # when to answer NEWS
        self._connections = 0  # of the channel, that were noticed
        self._move_at = 0.0  # when to ask for another home again
        self._hello_open = False
        self._is_moving = False  # while HELLO is to bring another home
        self._hello_at = float("inf")  # when to ask again a home that had no time
        self._put_off: Refused | None = None  # what it said then
        self._refused_notices: dict[str, int] = {}
        self._topics = Topics(self._limits, self._fetch, self._subscribe, self._worker.post, self._took)
        self._worker.post(self._hello)
        self._tell_former()
        self._worker.start()
        close_at_exit(self)
        try:
            self._await(self._is_met, self._seconds(timeout), "welcome", self._advice)
        except BaseException:
            self.close(UNDO_TIMEOUT)
            raise

    def _is_met(self) -> bool:
        """Whether a home has answered. Raises AuthError where nobody can, since this process is not let in."""
        if self._welcome is None and (denied := self._channel.denied_for_good) is not None:
            raise denied
        return self._welcome is not None

    # ------------------------------------------------------------------------------------------ what it learned

    @property
    def schema(self) -> Schema:
        """What an entry is, as the server says."""
        assert self._schema is not None
        return self._schema

    @property
    def parameters(self) -> Parameters:
        """Everything that shapes sampling, as the server said last."""
        return self._parameters

    @property
    def table(self) -> str:
        """Name of the table that it fills."""
        return self._told.table_name

    @property
    def run(self) -> str:
        """Name of the experiment."""
        return self._told.run_name

    @property
    def home(self) -> str:
        """Name of the server that counts this client."""
        return self._told.home_name

    @property
    def storage(self) -> str:
        """What the server stores: "caches" that are drawn here, or whole "episodes"."""
        return self._told.storage

    @property
    def finished(self) -> bool:
        """Whether the run is over; an actor's loop ends with it."""
        self._check_open()
        return self._finished

    @property
    def _window(self) -> Window:
        """What is on the way to the present home. Under `_changed`."""
        return self._windows.now

    @property
    def _told(self) -> messages.Welcome:
        assert self._welcome is not None
        return self._welcome

    @property
    def memory(self) -> Memory:
        """The client's own recent episodes; made when it is first asked for. Where the server stores episodes, only
        those that are open.

        Raises:
            MemoireError: see `sync`.
        """
        if self._memory is None:
            with self._memory_lock:
                if self._memory is None:
                    self._check_open()
                    self._memory = self._make_memory(self._capacity)
        return self._memory

    def _make_memory(self, capacity: int | None) -> Memory:
        least, most = DEFAULT_MEMORY_ENTRIES
        fitting = DEFAULT_MEMORY_BYTES // max(1, self.schema.entry_bytes)
        entries = capacity or self._told.max_step or min(most, max(least, fitting))
        if self.storage == "caches":
            # Whoever chose a capacity has thought of how much its entries take.
            limit = 0 if capacity or self._told.max_step else DEFAULT_MEMORY_BYTES
            memory = Memory(self.schema, entries, self._parameters, live=self._live, seed=self._seed)
            memory.limit_ragged(limit if self.schema.ragged else 0)
            memory.saw_model(self._parameters.newest_model(self._models))
            return memory
        # A writer cuts an endless episode when it fills half of this: what it cuts must fit a message and the server.
        ragged = self._most_bytes // 2 if self.schema.ragged else 0
        fitting = (self._most_bytes - ragged) // self._shipped_bytes
        largest = min(self._told.limits.get("episode_entries", entries), fitting)
        room = min(entries, 2 * max(1, largest))
        episodes = OpenEpisodes(self.schema, room, self._parameters, pack=self._pack, ship=self._ship)
        episodes.limit_ragged(ragged)
        return episodes

    @property
    def _most_bytes(self) -> int:
        """Of the payload of one message."""
        return self._told.limits.get("message_bytes", self._limits.message_bytes)

    @property
    def _shipped_bytes(self) -> int:
        """Of one entry in an episode's container, about."""
        return self.schema.entry_bytes + container.EPISODE_FACTS

    def sync(self, capacity: int | None = None, timeout: float | None = None) -> None:
        """Ask the server for schema and parameters again, and begin with an empty memory; totals go on. Writers
        that were made before are closed: they would fill a memory that nobody draws from.

        Args:
            capacity: Entries that the new memory has room for.
        """
        before, patience = self._told, self._seconds(timeout)
        deadline = time.monotonic() + patience
        self._worker.post(self._hello)
        self._await(lambda: self._told is not before, patience, "welcome", self._advice)
        with self._memory_lock:
            memory = self._make_memory(capacity or self._capacity)
            self._memory, self._capacity = memory, capacity or self._capacity
        self._end_writers("the writer", deadline)

    # ---------------------------------------------------------------------------------------------- experience

    def writer(
        self, envs: Any = None, *, num_envs: int | None = None, autoreset: str | None = None, **options: Any
    ) -> Writer:
        """A writer for an environment or a vector of them: takes what step() returned; counts, and pushes caches by
        itself.

        Args:
            envs: A Gymnasium (vector) environment, from which number and autoreset mode are read.
            num_envs, autoreset: The same by hand: "next_step", "same_step" or "disabled".
            options: longest and check; see `Writer`.

        May be called again, for other environments: each thread that steps some needs a writer of its own.
        """
        self._check_open()
        with self._memory_lock:
            if self._writers is None or self._writers.memory is not self.memory:
                self._writers = Writers(self.memory)
            made = self._writers.make(*layout(envs, num_envs, autoreset), _Observer(self), **options)
        self._check_open()  # `close` ends the writers that were there when it was called
        return made

    def on_entries(self, count: int) -> None:
        """Count entries that were recorded."""
        self._check_open()
        self._count(count)

    def _count(self, count: int) -> None:
        with self._changed:
            self._counts.record(count, self.schema.entry_bytes)
            self._is_dirty = True

    def _insert(self, count: int, patience: float) -> int:
        """Count entries that a writer recorded, as inserts as soon as they may be; returns how many are in time."""
        deadline, inserted = time.monotonic() + patience, 0
        with self._changed:
            self._count(count)
            self._inserts.record(count)
            while self.storage == "caches":
                inserted += self._inserts.admit(count - inserted)
                left = deadline - time.monotonic()
                if inserted == count:
                    break
                if left <= 0.0 or self._finished:
                    self._settle(count - inserted, 0)
                    break
                self._hold(left)
        return inserted

    def _settle(self, entries: int, inserted: int) -> None:
        """So many of the entries that a writer has recorded and that waited for this are decided on."""
        with self._changed:
            self._inserts.settle(entries, inserted)
            self._is_dirty = True

    def _await_grant(self, deadline: float) -> bool:
        """Wait until at least one entry may be inserted; False at the deadline."""
        with self._changed:
            while self._inserts.left <= 0:
                if (left := deadline - time.monotonic()) <= 0.0 or self._finished:
                    return False
                self._hold(left)
            return True

    def _hold(self, left: float) -> None:
        """Wait a while for the home to grant more. Under the lock."""
        began = time.monotonic()
        self._inserts.waiting += 1
        try:
            self._worker.wake()
            self._changed.wait(left)
            self._check_shipping()
        finally:
            self._inserts.waiting -= 1
            self._inserts.waited += time.monotonic() - began

    def on_episode(self, lane: int, length: int, returned: Any) -> None:
        """Count a closed episode; `returned` is the sum of its rewards, [*R] or a number."""
        self._check_open()
        self._count_episode(length, returned)

    def _count_episode(self, length: int, returned: Any) -> None:
        total = float(np.sum(returned))
        with self._changed:
            self._counts.close_episode(length, total, self._clock())
            self._is_dirty = True

    def push_cache(self, timeout: float | None = None) -> bool:
        """Draw a cache from the memory and push it. False, with `push_reason`, when that was not possible; counted in
        stats().not_pushed.

        Args:
            timeout: Seconds to wait for room in the byte window; None waits `request_timeout`.

        Raises:
            Closed, SchemaMismatch: the client cannot be used (any more).
        """
        self._check_open()
        deadline = time.monotonic() + self._seconds(timeout)
        if not self._await_grant(deadline):
            return self._not_pushed(HELD_BACK)
        return self._push_cache(max(0.0, deadline - time.monotonic()))

    def _push_cache(self, patience: float) -> bool:
        """`push_cache`, by a writer whose entries were granted."""
        self._check_storage(
            "caches", "push_cache", "whole episodes: closed ones are pushed, or push_episode pushes one"
        )
        deadline = time.monotonic() + patience
        if self.memory.num_positive == 0:
            return self._not_pushed("nothing to draw")
        if not self._await_room(self._last_size or 1, deadline):
            return self._not_pushed("window full")
        try:
            payload = container.build(
                self.memory, parameters_version=self._parameters_version, now=self._clock(), compression=self._codec()
            )
        except EmptyMemory:
            return self._not_pushed("nothing to draw")
        size = payload.nbytes
        if size > self._most_bytes:
            expected = f"such that a cache of {size} bytes fits into {self._most_bytes} (limits.message_bytes)"
            raise ParameterError("cache_size", self._parameters.cache_size, expected)
        if not self._await_room(size, deadline):
            return self._not_pushed("window full")
        self._enqueue(
            payload, lambda since, number, pushed: messages.Cache(since=since, number=number, pushed_bytes=pushed)
        )
        self.push_reason = ""
        return True

    def push_episode(
        self,
        columns: Mapping[str, Any],
        *,
        init_w: Any = 1.0,
        model_version: Any = 0,
        final_state: Any = None,
        terminated: bool | None = None,
        bootstrap_value: Any = None,
        multiplier: float = 1.0,
        update_value: bool = True,
        update_weight: bool = True,
        timeout: float | None = None,
    ) -> bool:
        """Push a whole episode to a server that stores episodes, and count it with its steps. False, with
        `push_reason`, when the byte window had no room for it: then nothing was pushed or counted but that.

        Nothing of it is kept here. A writer does this by itself, at each episode's end.

        Args:
            columns: For each column but the return its values in order, [T, *F], nested as the schema is or by the
                columns' names. They count as recorded now.
            init_w: What the entries' weights are multiplied by: a number, or [T].
            model_version: Of the models that acted: a number, or [T].
            final_state, terminated, bootstrap_value: How it ended, as of `Memory.close`.
            multiplier, update_value, update_weight: How it is weighed, as of `Memory.close`.
            timeout: Seconds to wait for room in the byte window; None waits `request_timeout`.

        Raises:
            EntryError, ParameterError: a value does not fit its column; or this server stores caches.
            Closed, SchemaMismatch: the client cannot be used (any more).
        """
        self._check_open()
        self._check_storage("episodes", "push_episode", "caches: use a writer, or push_cache")
        memory = self.memory
        assert isinstance(memory, OpenEpisodes)
        ending = {
            "final_state": final_state,
            "terminated": terminated,
            "bootstrap_value": bootstrap_value,
            "multiplier": multiplier,
            "update_value": update_value,
            "update_weight": update_weight,
        }
        shipment = memory.whole(mapping("columns", columns), init_w, model_version, ending)
        if not self._push_shipment(shipment, self._seconds(timeout)):
            return False
        self._count(shipment.entries)
        self._count_episode(shipment.entries, shipment.returned)
        return True

    def _check_storage(self, wanted: str, call: str, instead: str) -> None:
        if self.storage != wanted:
            raise ParameterError(
                "storage", self.storage, f"{wanted!r} for {call}; server {self.home!r} stores {instead}"
            )

    def _pack(self, *episode: Any) -> Any:
        """The container of an episode, as of this moment; see `shipping.OpenEpisodes`."""
        *columns, final = episode
        return container.pack_episode(
            self.schema,
            *columns,
            final=final,
            now=self._clock(),
            parameters_version=self._parameters_version,
            compression=self._codec(),
        )

    def _ship(self, shipment: Shipment) -> None:
        """Push an episode that was closed, or count it as skipped."""
        patience = self._block_timeout if self._when_full == "block" else 0.0
        self._push_shipment(shipment, max(0.0, min(patience, self._closed_by - time.monotonic())))

    def _push_shipment(self, shipment: Shipment, patience: float) -> bool:
        self._check_shipping()
        size = shipment.payload.nbytes
        if size > self._most_bytes:
            expected = f"at most {self._most_bytes} (limits.message_bytes) in an episode; close it earlier, or cut it"
            raise ParameterError("payload bytes", size, expected)
        deadline = time.monotonic() + patience
        if not self._await_grant(deadline):
            self._settle(shipment.entries, 0)
            return self._not_pushed(HELD_BACK)
        if not self._await_room(size, deadline):
            self._settle(shipment.entries, 0)
            return self._not_pushed("window full")
        self._settle(shipment.entries, shipment.entries)
        self._enqueue(shipment.payload, shipment.message)
        self.push_reason = ""
        return True

    def _codec(self) -> str:
        wanted = self._parameters.compression
        return wanted if wanted in (*self._told.codecs, "none") else "none"

    def _enqueue(self, payload: Any, message: Callable[[int, int, int], messages.Body]) -> None:
        size = payload.nbytes
        checksum = _core.checksum(
            payload
        )  # here, in the caller's thread: the one with the sockets has other things to do
        with self._changed:
            self._last_size = size
            self._window.pushed(size, time.monotonic())
            since, number, pushed = self._told.since, self._window.pushed_caches, self._window.pushed_bytes
            frames = messages.encode(
                message(since, number, pushed),
                client=self.client_id,
                sequence=next(self._numbers),
                run=self._channel.run,
                home=self._channel.home,
                table=self._channel.table,
                fingerprint=self._channel.fingerprint,
                payload=payload,
                payload_checksum=checksum,
            )
            self._pushes.append((size, frames))
            self._is_dirty = True
        self._worker.wake()

    def _await_room(self, size: int, deadline: float) -> bool:
        """Wait until a cache of this size fits the window; False at the deadline."""
        with self._changed:
            if self._window.has_room(size) and not self._is_between:
                return True
            began = time.monotonic()
            self._pressed += 1
            try:
                while self._is_between or not self._window.has_room(size):
                    left = deadline - time.monotonic()
                    if left <= 0:
                        self._counts.skipped += 1
                        return False
                    self._worker.wake()
                    self._changed.wait(left)
                    self._check_shipping()
                return True
            finally:
                self._pressed -= 1
                self._waited += time.monotonic() - began

    def _not_pushed(self, reason: str) -> bool:
        with self._changed:
            why = self._inserts.reason or "learners are behind, and the server has not granted more yet"
            self.push_reason = f"{reason}: {why}" if reason == HELD_BACK else reason
            self._not_pushed_for[reason] = self._not_pushed_for.get(reason, 0) + 1
        return False

    def configure_limits(
        self,
        *,
        credit: int | None = None,
        when_full: WhenFull | None = None,
        block_timeout: float | None = None,
        log_timeout: float | None = None,
    ) -> None:
        """Change what this client allows itself, from now on; what is not given stays. `stats` shows what holds.

        Args:
            credit: Most bytes of caches on the way, where the home grants more; 0 takes what it grants.
            when_full: What the writer does with a cache when the window is full.
            block_timeout, log_timeout: As in `Limits`.

        Raises:
            ParameterError: nothing was changed.
        """
        self._check_open()
        if credit is not None:
            _check_credit(credit)
        if when_full is not None:
            _check_when_full(when_full)
        block_timeout = seconds(block_timeout, self._block_timeout, "block_timeout")
        log_timeout = seconds(log_timeout, self._log_timeout, "log_timeout")
        with self._changed:
            self._own_credit = self._own_credit if credit is None else credit
            self._when_full = self._when_full if when_full is None else when_full
            self._block_timeout, self._log_timeout = block_timeout, log_timeout
            self._grant(self._granted)
            self._changed.notify_all()

    def _grant(self, granted: int) -> None:
        """The home grants so many bytes (0: as before). Under the lock."""
        self._granted = granted or self._granted
        self._window.credit = min(self._granted, self._own_credit or self._granted)

    # ------------------------------------------------------------------------------------------------- telling

    def update(self, timeout: float | None = None) -> None:
        """Tell the server everything counted and logged so far; returns when it has it.

        Raises:
            MemoireTimeout: no answer in time; it goes on being sent in the background.
        """
        self._check_open()
        with self._changed:
            self._asked += 1
            ticket, line = self._asked, self._outbox.newest
            self._asked_line = line
        self._worker.wake()
        self._await(
            lambda: self._answered >= ticket and self._outbox.oldest > line,
            self._seconds(timeout),
            "acknowledged update",
            self._advice,
        )

    def log(self, text: str, timeout: float | None = None) -> bool:
        """Send a line to the server's log. Returns whether it was taken: then it is kept until the server has it,
        once. `update` and `close` wait for that.

        Returns at once while there is room (`limits.log_lines`, `log_buffer_bytes`), which there is unless the server
        is away for long. A line that is not taken is counted (stats().dropped_lines) and warned of once a minute.

        Args:
            timeout: Seconds to wait for room; None waits `limits.log_timeout`, and not again until some lines left.

        Raises:
            Closed: the client was closed, also while waiting.
        """
        line = str(text)
        patience = None if timeout is None else seconds(timeout)
        self._check_open()
        with self._changed:
            is_taken = self._take_line(line) or self._await_line(line, patience)
            if is_taken:
                self._is_dirty = True
                return True
            self._counts.dropped_lines += 1
            dropped, now = self._counts.dropped_lines, time.monotonic()
            if now < self._warned_at + WARN_EVERY:
                return False
            self._warned_at = now
        _log.warning(
            "client %s: %d lines in all were not taken by log(): %d wait for server %r at %s, last heard %.1f s ago",
            self.client_id.hex()[:8],
            dropped,
            len(self._outbox),
            self.home,
            self.endpoint,
            now - self._channel.heard_at,
        )
        return False

    def _take_line(self, line: str) -> bool:
        return self._outbox.add(line, self.uuid, self._clock()) > 0

    def _await_line(self, line: str, timeout: float | None) -> bool:
        """Wait for room for a line, and take it; False when none came. Under the lock."""
        if self._worker.is_here or (timeout is None and self._outbox.oldest == self._vain_line):
            return False  # whoever logs each step would be as slow as one line a second while the server is away
        deadline = time.monotonic() + (self._log_timeout if timeout is None else timeout)
        while (left := deadline - time.monotonic()) > 0:
            self._asked_line = max(self._asked_line, self._outbox.newest)
            self._worker.wake()
            self._changed.wait(left)
            self._check_open()
            if self._take_line(line):
                return True
        if timeout is None:
            self._vain_line = self._outbox.oldest
        return False

    def scalars(self, values: Mapping[str, float]) -> None:
        """Set figures to be shown for this client, by name: finite numbers, at most 64 names."""
        self._check_open()
        with self._changed:
            self._scalars = arguments.scalars(values, self._scalars)
            self._is_dirty = True

    # -------------------------------------------------------------------------------------------------- models

    def model(self, topic: str) -> ModelHandle:
        """The newest model of a topic, kept up to date from now on."""
        self._check_open()
        self._topics.want(check_topic(topic))
        return ModelHandle(self, topic)

    def subscribe(self, topic: str) -> Receiver:
        """Every model of a topic in order, from the newest on; who is too slow skips (and counts)."""
        self._check_open()
        return Receiver(self, self._topics.subscribe(check_topic(topic)))

    # ------------------------------------------------------------------------------------------------- reading

    @overload
    def batches(self, batch_size: int, timeout: float = ..., **options: Any) -> Iterator[Batch]: ...
    @overload
    def batches(self, batch_size: Mapping[str, int], timeout: float = ..., **options: Any) -> Iterator[MixedBatch]: ...
    def batches(
        self, batch_size: int | Mapping[str, int], timeout: float = 30.0, **options: Any
    ) -> Iterator[Batch | MixedBatch]:
        """Batches drawn far away, from all servers behind this address, prefetched: see `Reader.batches`.

        Ends with the run, or with this client.

        Args:
            batch_size: Samples of this client's table; or of several, mixed: `{"online": 192, "demo": 64}`.
            timeout: Seconds that each batch may take, until somebody answers included.
            options: See `Reader`.

        Raises:
            MemoireTimeout: not enough samples came in that time, or nobody answered.
        """
        from memoire.reader.reader import Reader
        from memoire.replay.mixing import sizes_of

        self._check_open()
        sizes = sizes_of(batch_size) if isinstance(batch_size, Mapping) else whole("batch_size", batch_size, 1)
        patience, table = seconds(timeout), self.table if isinstance(sizes, int) else next(iter(sizes))
        own: dict[str, Any] = {"context": self._context, "limits": self._limits, "keys": self._keys}
        options = own | {"seed": self._seed, "table": table} | options
        with Reader([self.endpoint], timeout=None, **options) as reader:
            with self._changed:
                self._readers.append(reader)
            try:
                for batch in () if self._closing else reader.batches(sizes, patience):
                    yield batch
                    if self._closing:
                        return
            finally:
                with self._changed:
                    self._readers.remove(reader)

    # ------------------------------------------------------------------------------------------------- its end

    def stats(self) -> ClientStats:
        """All figures at this moment."""
        with self._changed:
            pushes = self._windows.sums()
            return ClientStats(
                client=self.client_id.hex(),
                label=self.uuid,
                endpoint=self.endpoint,
                home=self._told.home_name,
                table=self._told.table_name,
                run=self._told.run_name,
                episodes=self._counts.episodes,
                steps=self._counts.steps,
                generated_bytes=self._counts.generated_bytes,
                pushed_caches=pushes.pushed_caches,
                pushed_bytes=pushes.pushed_bytes,
                accepted_caches=pushes.accepted_caches,
                received_bytes=pushes.received_bytes,
                rejected=pushes.rejected,
                lost_caches=pushes.lost_caches,
                lost_bytes=pushes.lost_bytes,
                in_flight_caches=pushes.in_flight_caches,
                in_flight_bytes=pushes.in_flight_bytes,
                credit=self._window.credit,
                granted=self._granted,
                when_full=self._when_full,
                waited=self._waited,
                passed_steps=self._counts.passed,
                held_back=self._inserts.held_back,
                held_back_for=self._inserts.waited,
                skipped_caches=self._counts.skipped,
                not_pushed=dict(self._not_pushed_for),
                waiting_lines=len(self._outbox),
                waiting_line_bytes=self._outbox.bytes,
                dropped_lines=self._counts.dropped_lines,
                dropped_returns=self._counts.dropped_returns,
                parameters_version=self._parameters_version,
                models=self._topics.versions(),
                skipped_models=self._topics.skipped,
                fetched_bytes=self._topics.fetched_bytes,
                resubscribed=self._topics.resubscribed,
                updates=self._updates,
                resends=self._channel.resends,
                refused=dict(self._channel.refused) | self._refused_notices | dict(self._topics.refused),
                silent=time.monotonic() - self._channel.heard_at,
                untold_steps=self._counts.missing.steps,
                trouble=self._trouble,
                applied=self._counts.applied,
                stale=self._counts.stale,
                finished=self._finished,
                faults=self._worker.errors,
            )

    def liveness(self) -> list[str]:
        """What only a restart can mend, a sentence each. Empty while all is well."""
        return self._worker.trouble()

    def readiness(self) -> list[str]:
        """Why nothing that this client does is counted just now, a sentence each; empty while it is."""
        if self._closing:
            return ["closing: this client is about to end"]
        if self._failed is not None:
            return [str(self._failed)]
        if self._trouble:
            return [f"unacknowledged: {self._advice()}"]
        silent = time.monotonic() - self._channel.heard_at
        return [f"silent: {self._advice()}"] if silent > SILENT_AFTER else []

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closing

    def close(self, timeout: float | None = None) -> bool:
        """Tell the server what it does not know yet, then end, within `timeout` seconds; calls that wait raise
        `Closed`.

        Episodes that are open in writers are stored as `Writer.reset` stores them, and further steps raise `Closed`.
        May be called again. Returns whether everything was delivered.
        """
        allowed = seconds(timeout, self._limits.close_timeout)
        deadline = time.monotonic() + allowed
        with self._changed:
            if not self._closing:
                self._is_parting = self._failed is None and self._welcome is not None and self.storage == "episodes"
                self._closed_by = deadline
            self._closing = True
            self._changed.notify_all()
            readers = list(self._readers)
        self._topics.close()
        for reader in readers:  # whoever waits for their batches would wait on
            reader.close(max(0.0, deadline - time.monotonic()))
        with self._closer(deadline) as is_mine:
            if is_mine:
                self._end_writers("this client", deadline)
                with self._changed:
                    self._is_parting = False
                    self._changed.notify_all()
            delivered = is_mine and self._farewell(deadline)
            if is_mine and not self._worker.stop(max(ENDING, deadline - time.monotonic()), linger=min(allowed, 1.0)):
                _log.warning("client %s: its thread did not end in time", self.client_id.hex()[:8])
            if is_mine and not delivered:
                self._leave_untold()
            return delivered

    def _end_writers(self, closed: str, deadline: float) -> None:
        """Store what is open in writers, and have them refuse further steps, because `closed` is closed."""
        for problem in () if self._writers is None else self._writers.end(closed, deadline):
            _log.warning("client %s does not store %s", self.client_id.hex()[:8], problem)

    def _farewell(self, deadline: float) -> bool:
        """Wait until the server has everything, or the deadline."""
        with self._changed:
            if self._welcome is None or not self._worker.is_alive or self._failed is not None:
                return False
            self._leaving = True
            self._asked += 1
            ticket, self._asked_line = self._asked, self._outbox.newest
            self._worker.wake()
            while self._answered < ticket or self._has_untold or self._pushes or self._former:
                left = deadline - time.monotonic()
                if left <= 0 or not self._worker.is_alive:
                    return False
                self._changed.wait(min(left, 0.5))
            return True

    @property
    def _has_untold(self) -> bool:
        """Whether lines or episodes wait until a home has them."""
        return bool(len(self._outbox) or self._counts.waiting_episodes)

    def _leave_untold(self) -> None:
        """Say what was not acknowledged, and leave it in the folder for the next client that has it."""
        with self._changed:
            if self._welcome is None or self._is_left:
                return
            self._is_left = True
            missing, lines = self._counts.missing, len(self._outbox)
            episodes = max(missing.episodes, self._counts.waiting_episodes)
            if not (missing.steps or episodes or lines):
                return
            advice, left = self._advice(probe=False), self._untold(missing.steps, episodes, lines)
        what = f"{missing.steps} steps, {episodes} episodes and {lines} log lines"
        if self._folder is None:
            fate = "they are not counted"
        else:
            try:
                kept = unreported.save(self._folder, left)
                fate = f"they are in {kept}, and the next client with this folder tells them"
            except OSError as error:
                fate = f"they are not counted, and could not be kept in {self._folder}: {error}"
        # The end of a run is no loss: whoever declared it over has all that it wanted.
        level = logging.INFO if self._finished else logging.WARNING
        who = f"client {self.client_id.hex()[:8]}"
        _log.log(level, "%s ends before %s were acknowledged: %s. %s", who, what, fate, advice)

    def _untold(self, steps: int, episodes: int, lines: int) -> unreported.Untold:
        """All that a home has not acknowledged, for a file. Takes lines and episodes away: the client has ended."""
        parts, run = [], self._channel.run
        if (boundary := self._counts.boundary) is not None:
            parts = [] if boundary.is_told else self._parts(run)
            self._counts.enter_unknown_run()
            run = 0
        return unreported.Untold(
            client=self.client_id,
            label=self.uuid,
            table=self._told.table_name,
            home=self._told.home_name,
            steps=steps,
            episodes=episodes,
            lines=lines,
            parts=[*parts, *self._parts(run)],
        )

    def _parts(self, run: int) -> list[unreported.Part]:
        """The UPDATEs that tell all of one run: the last one has no line and no episode left."""
        parts = []
        while True:
            body = self._update_body(0.0, 0, 0.0)
            parts.append(unreported.Part(run, messages.tail_of(body)))
            if not (body.lines or body.ended):
                return parts
            self._outbox.acknowledge(body.lines[-1].number if body.lines else 0)
            self._counts.acknowledge_episodes(body.ended[-1].number if body.ended else 0)

    def _tell_former(self) -> None:
        """Tell what earlier clients have left in the folder, as soon as somebody answers."""
        for path, content in () if self._folder is None else unreported.found(self._folder):
            channel = Channel(
                self._worker.doors,
                self._context,
                self.endpoint,
                client=content.client,
                limits=self._limits,
                rng=self._rng,
                keys=self._keys,
            )
            self._former.append(FormerClient(channel, unreported.Teller(path, content), self._told_former))

    def _told_former(self, former: FormerClient) -> None:
        def leave() -> None:
            former.channel.leave()
            with self._changed:
                self._former.remove(former)
                self._changed.notify_all()

        self._worker.post(leave)

    def __repr__(self) -> str:
        return f"<memoire.Client {self.client_id.hex()[:8]} of {self.endpoint}>"

    # -------------------------------------------------------------------------------------------------- waiting

    def _check_open(self) -> None:
        if self._closing:
            raise Closed("this client")
        if self._failed is not None:
            raise self._failed

    def _check_shipping(self) -> None:
        """`_check_open`, but what writers hold when the client is closed leaves before it ends."""
        if not self._is_parting:
            self._check_open()

    def _seconds(self, timeout: float | None) -> float:
        return seconds(timeout, self._limits.request_timeout)

    def _advice(self, *, probe: bool = True) -> str:
        """What a person can look at; a proxy may be there while the client's home behind it is not."""
        if self._trouble:
            return f"The home of this client, server {self.home!r}, says: {self._trouble}"
        where = self._channel.trouble(probe=probe)
        if self._welcome is None:
            return where
        silent = time.monotonic() - self._channel.heard_at
        return f"The home of this client, server {self.home!r}, was last heard {silent:.1f} s ago. {where}"

    def _await(self, is_done: Callable[[], bool], patience: float, what: str, advice: Callable[[], str]) -> None:
        deadline = time.monotonic() + patience
        with self._changed:
            while True:
                self._check_open()
                if is_done():
                    return
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(left)
        raise self._put_off or self._channel.denied or MemoireTimeout(what, self.endpoint, patience, advice())

    # ----------------------------------------------------------------- from here on: inside of the thread alone

    def _next_time(self) -> float:
        own = (self._channel.next_time(), self._hello_at, self._update_due(), self._topics.next_time())
        former = (each.next_time() for each in self._former)
        watch = float("inf") if self._welcome is None else self._watch.due
        return min(*own, watch, *(former if self._welcome is not None else ()))

    def _update_due(self) -> float:
        """When the next UPDATE is to be sent; never while one is open, or while HELLO is to bring another home or run:
        what the former home is told after its last answer, it might count without our hearing of it.
        """
        if self._update_open or self._is_moving or self._welcome is None or self._failed is not None:
            return float("inf")
        if (boundary := self._counts.boundary) is not None:
            return float("inf") if boundary.is_told else self._update_sent
        if self._asked > self._answered or self._has_backlog:
            return self._update_sent
        if self._inserts.waiting:
            return self._update_sent + self._inserts.pause
        if self._pressed or self._window.is_half_used or self._inserts.is_half_used:
            return self._update_sent + PRESSED
        return min(self._news_due, self._update_sent + (self._limits.update_every if self._is_dirty else HEARTBEAT))

    @property
    def _has_backlog(self) -> bool:
        """Lines wait that somebody waits for and that did not fit the last UPDATE, or so many that log() soon waits."""
        return self._outbox.oldest <= self._asked_line or self._outbox.is_half_full

    def _turn(self, ready: dict[object, int]) -> None:
        self._channel.turn(ready)
        if self._welcome is None and self._channel.denied is not None:
            with self._changed:
                self._changed.notify_all()
        if self._channel.connections != self._connections:
            self._connections = self._channel.connections
            self._take_news()  # whoever is there again may have forgotten something
        if self._channel.renewals != self._renewals or time.monotonic() >= self._hello_at:
            self._hello()  # its answer opens the other sockets anew
        if self._sub is not None and self._sub in ready:
            self._take_notices()
        self._topics.turn()
        self._send_pushes()
        now = time.monotonic()
        if now >= self._update_due():
            self._send_update()
        if self._welcome is not None:
            self._say(self._watch.look(now))
            for each in self._former:
                each.turn(ready)

    def _say(self, change: Change) -> None:
        """One warning when the home is away, and one when it is back."""
        who = f"client {self.client_id.hex()[:8]}"
        if change == "back":
            _log.warning("%s: server %r is back; what was recorded meanwhile is counted", who, self.home)
        elif change == "away":
            missing = self._counts.missing
            _log.warning(
                "%s: server %r at %s has acknowledged nothing for %.0f s. %d steps, %d episodes and %d log lines are "
                "kept until it is back. %s",
                who,
                self.home,
                self.endpoint,
                time.monotonic() - self._watch.acknowledged_at,
                missing.steps,
                missing.episodes,
                len(self._outbox),
                self._advice(probe=False),
            )

    def _send_pushes(self) -> None:
        if self._push is None:
            return
        while self._pushes and sockets.send(self._push, self._pushes[0][1]):
            self._pushes.popleft()
        blocked = bool(self._pushes)
        if blocked != self._is_push_blocked:
            self._is_push_blocked = blocked
            self._worker.doors.watch(self._push, reading=False, writing=blocked)
        if not blocked and self._leaving:
            with self._changed:
                self._changed.notify_all()

    def _hello(self, home: int | None = None) -> None:
        """Ask for everything anew; with home 0, for another home too."""
        if self._hello_open:
            return
        self._hello_open, self._hello_at = True, float("inf")
        with self._changed:
            inserted = 0 if self._counts.boundary is not None else self._counts.inserted
        hello = messages.Hello(
            role="actor",
            table=self._table or ("" if self._welcome is None else self.table),  # the same at each home
            inserted=inserted,
            label=self.uuid,
            software=SOFTWARE,
            host=socket.gethostname()[:256],
            pid=os.getpid(),
            codecs=container.codecs(),
        )
        self._channel.ask(hello, self._welcomed, run=0, home=home)

    def _welcomed(self, answer: messages.Answer) -> None:
        self._hello_open = self._is_moving = False
        if isinstance(answer, Refused) and answer.code in messages.PASSING:
            self._hello_at = time.monotonic() + self._limits.resend_after * self._rng.uniform(1.0, 2.0)
            self._put_off = answer
            return
        self._put_off = None
        try:
            if isinstance(answer, MemoireError):
                raise answer
            self._learn(answer)
        except MemoireError as error:
            self._fail(error)

    def _fail(self, error: MemoireError) -> None:
        with self._changed:
            if not self._closing:
                self._failed = error
            self._changed.notify_all()

    def _learn(self, message: messages.Message) -> None:
        told = message.body
        if not isinstance(told, messages.Welcome):
            raise Refused(self.endpoint, "unexpected", f"HELLO was answered by {message.type.name}")
        schema = Schema.from_json(told.schema)
        if self._schema is not None and schema != self._schema:
            raise SchemaMismatch(self.client_id.hex()[:8], "schema", str(schema), f"memory of {self._schema}")
        if self._welcome is not None and told.storage != self._welcome.storage:
            raise SchemaMismatch(self.client_id.hex()[:8], "storage", told.storage, self._welcome.storage)
        parameters = Parameters.from_wire(told.parameters)
        header, former = message.header, self._welcome
        if former is not None and told.run_name != former.run_name and not self._has_left_run():
            self._channel.home = header.home  # who hears the rest about the run that is over; then HELLO comes again
            return
        self._schema = schema
        if former is None or told.endpoints != former.endpoints or self._channel.renewals != self._renewals:
            self._renewals = self._channel.renewals
            is_cached = told.storage == "caches"
            self._open_data(told.endpoints, container.usual_bytes(schema, parameters) if is_cached else 0)
        self._apply_parameters(parameters, told.parameters_version)
        with self._changed:
            self._is_between = False
            self._counts.enter_run(header.run)
            self._inserts.grant(told.granted_steps, "")
            self._windows.belong(header.run, header.home, told.since)
            if former is None or (told.epoch, told.home_name) != (former.epoch, former.home_name):
                self._feedback_through = 0  # pieces are numbered anew at each start of each home
            self._channel.run, self._channel.home = header.run, header.home
            self._channel.fingerprint, self._channel.table = header.fingerprint, told.table
            self._channel.learned(told)
            self._grant(told.credit)
            self._finished = told.finished
            self._welcome = told
            self._is_dirty = True
            self._changed.notify_all()
        self._say(self._watch.acknowledged(time.monotonic()))
        if former is not None:
            self._news_due = 0.0  # a home that is new, or was away, is told at once
            if told.home_name != former.home_name:
                self._move_at = 0.0
            if told.run_name != former.run_name:
                self._topics.begin_run()
        self._topics.is_kept = told.durable
        has_forgotten = not told.durable or told.since == told.epoch  # the latter: its state folder is a new one
        if former is not None and told.epoch != former.epoch and told.home_name == former.home_name and has_forgotten:
            self._topics.restarted()
        self._hear_of(told.models)

    def _hear_of(self, models: dict[str, int]) -> None:
        """The newest versions at the home: what is older than `max_model_lag` allows weighs nothing from now on. Never
        while holding `_changed`.
        """
        self._topics.announced(models)
        self._models = models
        if self._memory is not None:
            self._memory.saw_model(self._parameters.newest_model(models))

    def _end_run(self) -> Boundary:
        """Another run has begun. Under `_changed`."""
        return self._counts.end_run(self._outbox.newest, self._asked)

    def _has_left_run(self) -> bool:
        """Whether the run that is over has been told everything; ends it, unless that was done before."""
        with self._changed:
            return self._end_run().is_told

    def _open_data(self, endpoints: messages.Endpoints, usual: int) -> None:
        push = self._given[0] or sockets.seen_from(self._channel.address, endpoints.push)
        subscribe = self._given[1] or sockets.seen_from(self._channel.address, endpoints.publish)
        doors = self._worker.doors
        if self._push is not None:
            doors.drop(self._push, sockets.PARTING)
        if self._sub is not None:
            doors.drop(self._sub)
        self._push, self._sub, self._is_push_blocked = None, None, False
        if push:
            made = sockets.data_sender(self._context, usual)
            link.dial(doors, made, push, keys=self._keys)
            self._push = doors.add(made, reading=False)
        if subscribe:
            made = sockets.subscriber(self._context, self._limits.request_bytes)
            link.dial(doors, made, subscribe, keys=self._keys)
            made.setsockopt(zmq.SUBSCRIBE, messages.NEWS_FRAME)
            self._sub = doors.add(made)
            self._topics.opened()

    def _apply_parameters(self, parameters: Parameters, version: int) -> None:
        """Never while holding `_changed`: a caller that holds the memory may be waiting for that."""
        if version == self._parameters_version:
            return
        with self._memory_lock:
            self._parameters, self._parameters_version = parameters, version
            if self._memory is not None:
                self._memory.configure(parameters)

    # UPDATE and its answer

    def _send_update(self) -> None:
        with self._changed:
            self._is_dirty = False  # before the sums are read: what changes from here on is told the next time
        sums = self._sums()
        self._news_due = float("inf")
        with self._changed:
            asked_at, boundary, counts = time.monotonic(), self._counts.boundary, self._counts.reach
            covers = self._asked if boundary is None else boundary.asked
            body = self._update_body(*sums)
            self._update_open = True
            self._update_sent = asked_at
        self._channel.ask(body, lambda answer: self._updated(answer, covers, counts, asked_at, boundary))

    def _sums(self) -> tuple[float, int, float]:
        """Total weight, number of positive weights and the smallest of them, from one moment; 0 where there is none."""
        if self._memory is None:
            return 0.0, 0, 0.0
        weight, positives, minimum = self._memory.sums()
        return (weight, positives, minimum) if positives else (0.0, 0, 0.0)

    def _update_body(self, weight: float, positives: int, minimum: float) -> messages.Update:
        told, boundary, counts = self._told, self._counts.boundary, self._counts.told
        is_home = self._channel.home == messages.name_hash(told.home_name)
        return messages.Update(
            epoch=told.epoch if is_home else 0,
            episodes=counts.episodes,
            steps=counts.steps,
            passed_steps=counts.passed,
            caches=self._window.pushed_caches if is_home else 0,
            cache_bytes=self._window.pushed_bytes if is_home else 0,
            skipped=counts.skipped,
            generated_bytes=counts.generated_bytes,
            total_weight=weight,
            positives=positives,
            minimum=minimum,
            parameters_version=self._parameters_version,
            models=self._topics.versions(),
            scalars=self._scalars,
            lines=self._outbox.waiting(
                LINES_PER_UPDATE, self._limits.tail_bytes // 4, through=None if boundary is None else boundary.line
            ),
            dropped_lines=counts.dropped_lines,
            ended=self._counts.oldest_episodes(ENDED_PER_UPDATE),
            applied=counts.applied,
            stale=counts.stale,
            feedback_through=self._feedback_through,
            leaving=self._leaving,
            finished=self._finished,
        )

    def _updated(
        self, answer: messages.Answer, covers: int, counts: ClientCounts, asked_at: float, boundary: Boundary | None
    ) -> None:
        self._update_open = False
        if isinstance(answer, MemoireError) or not isinstance(answer.body, messages.Updated):
            self._update_refused(answer)
            return
        said = answer.body
        self._say(self._watch.acknowledged(time.monotonic()))
        is_same = said.epoch == self._told.epoch  # otherwise HELLO says what goes on at a server that began anew
        # Before anybody who waits for this answer goes on.
        if said.parameters is not None:
            self._take_parameters(said)
        if is_same and answer.payload is not None and said.feedback_through > self._feedback_through:
            self._apply_feedback(answer.payload, said.feedback_through)
        self._hear_of(said.models)
        with self._changed:
            self._updates += 1
            self._counts.acknowledged, self._trouble = counts, ""
            self._answered = max(self._answered, covers)
            self._outbox.acknowledge(said.lines_through)
            self._counts.acknowledge_episodes(said.ended_through)
            if is_same:
                self._window.answered(
                    said.caches, said.received_bytes, said.lost_bytes, said.rejected, asked_at, lost_caches=said.lost
                )
            self._grant(said.credit)
            if is_same and self._counts.boundary is None:
                self._inserts.grant(said.granted_steps, said.wait)
            self._is_dirty = self._is_dirty or self._has_untold or bool(self._window.in_flight)
            if said.run_name in ("", self._told.run_name):
                if said.finished and not self._finished:
                    self._news_due = 0.0  # a server that ends waits until its clients say that they know
                self._finished = said.finished
            elif self._end_run() is boundary:  # this answer is to what was said after the run ended
                self._counts.acknowledge_run(boundary, self._outbox.oldest)
            wants_move = said.leaving and not self._leaving and time.monotonic() >= self._move_at
            self._is_between = self._counts.boundary is not None or not is_same or wants_move
            self._changed.notify_all()
        # To the home as it is now, to another run, or to another home. All that this home was sent is in its answer:
        # nothing will be counted or logged twice.
        if self._counts.boundary is not None:
            if self._counts.boundary.is_told:
                self._hello()
        elif not is_same:
            self._hello()
        elif wants_move:
            self._move_at = time.monotonic() + MOVE_AGAIN * self._rng.uniform(0.5, 1.5)
            self._is_moving = not self._hello_open
            self._hello(home=0)

    def _update_refused(self, answer: messages.Answer) -> None:
        """The server does not take an UPDATE of ours: ask it anew what run, schema and home are."""
        if isinstance(answer, Refused) and answer.code == "run":
            with self._changed:
                self._end_run().is_told = True
        if isinstance(answer, Refused) and answer.code in ("run", "schema", "table", "client"):
            self._hello()
        elif isinstance(answer, Refused) and answer.code in ("disk", "busy"):
            self._trouble = answer.text  # said when the home has acknowledged nothing for a while, and where it matters
        elif isinstance(answer, Refused):
            _log.warning("client %s: %s", self.client_id.hex()[:8], answer)
        with self._changed:
            self._is_dirty = True
            self._update_sent = time.monotonic() + self._limits.resend_after  # not at once again

    def _take_parameters(self, said: messages.Updated) -> None:
        try:
            parameters = Parameters.from_wire(said.parameters or {})
        except MemoireError as error:
            self._refused_notices["parameters"] = self._refused_notices.get("parameters", 0) + 1
            _log.warning("client %s: parameters of the server were refused: %s", self.client_id.hex()[:8], error)
            return
        self._apply_parameters(parameters, said.parameters_version)

    def _apply_feedback(self, payload: Any, through: int) -> None:
        try:
            found = container.read_feedback(payload, self.schema, self._limits)
        except ProtocolError as error:
            self._refused_notices[error.code] = self._refused_notices.get(error.code, 0) + 1
            return
        numbers, errors = found.get(self.client_id, (None, None))
        if numbers is not None and self._memory is not None:
            applied, stale = self._memory.update_priorities(numbers, errors)
            self._counts.applied += applied
            self._counts.stale += stale
        self._feedback_through = through
        self._is_dirty = True

    # Models

    def _subscribe(self, topic: str, wanted: bool) -> bool:
        """Start or stop hearing of a topic; False while there is no socket yet."""
        if self._sub is None:
            return False
        self._sub.setsockopt(zmq.SUBSCRIBE if wanted else zmq.UNSUBSCRIBE, messages.topic_frame(topic))
        return True

    def _fetch(
        self, topic: str, version: int, offset: int, size: int, finish: Callable[[messages.Answer], None]
    ) -> None:
        asked = messages.Fetch(topic=topic, version=version, offset=offset, size=size)
        self._channel.ask(asked, finish, patience=fetch_patience(self._limits))

    def _took(self, model: Model, is_renewed: bool, source: tuple[int, int]) -> None:
        """A model is here: the server is told which one is in use."""
        with self._changed:
            self._is_dirty = True

    def _take_notices(self) -> None:
        assert self._sub is not None
        for _ in range(NOTICES_PER_TURN):
            frames = sockets.receive(self._sub, most=3)
            if frames is None:
                return
            try:
                message = messages.parse_notice(frames, self._limits)
                if not isinstance(message.body, messages.Notice):
                    self._take_news()
                elif message.header.run in (0, self._channel.run):
                    self._topics.noticed(message.body, message.payload, message.header.home)
            except ProtocolError as error:
                self._refused_notices[error.code] = self._refused_notices.get(error.code, 0) + 1

    def _take_news(self) -> None:
        """Send UPDATE soon, whatever there is to say: its answer says what is new."""
        self._news_due = min(self._news_due, time.monotonic() + self._rng.uniform(0.0, NEWS_WITHIN))

    def _at_end(self) -> None:
        if hasattr(self, "_channel"):  # not when its address is none
            for each in (self._channel, *(former.channel for former in self._former)):
                each.close(Closed("this client"))


def _check_when_full(when_full: object) -> None:
    if when_full not in (choices := ("skip", "block")):
        raise ParameterError("when_full", when_full, one_of(when_full, choices))


def _check_credit(credit: object) -> None:
    if type(credit) is not int or credit < 0:
        raise ParameterError("credit", credit, "a whole number of bytes, or 0 for what the server grants")


class _Observer:
    """Hears of a writer's entries and episodes: counts them, and pushes as many samples as the parameters ask for."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._owed = 0.0

    def on_entries(self, count: int) -> None:
        """Entries were recorded."""
        client = self._client
        patience = client._block_timeout if client._when_full == "block" else 0.0
        inserted = client._insert(count, patience)
        if client.storage != "caches":
            return
        if inserted < count:
            client._not_pushed(HELD_BACK)
        parameters = client.parameters
        self._owed += inserted * parameters.samples_per_insert
        if self._owed >= parameters.cache_size:
            # One at a time: after a pause, such as a window that was full, old debts are not made good in a burst.
            self._owed = min(self._owed - parameters.cache_size, parameters.cache_size)
            client._push_cache(patience)

    def on_episode(self, lane: int, length: int, returned: Any) -> None:
        """An episode was closed."""
        self._client._count_episode(length, returned)


class ModelHandle:
    """The newest model of one topic, kept up to date in the background."""

    def __init__(self, client: Client, topic: str) -> None:
        self._client = client
        self.topic = topic

    @property
    def version(self) -> int:
        """Version of the newest model that is here; 0 when there is none."""
        return self._client._topics.version(self.topic)

    def newest(self) -> Model | None:
        """The newest model that is here, without waiting: .version, .body (bytes), .value (as published)."""
        self._client._check_open()
        return self._client._topics.newest(self.topic)

    def wait(self, timeout: float | None = None, *, after: int = 0) -> Model:
        """The newest model as soon as its version is above `after`.

        Raises:
            MemoireTimeout: none came in `timeout` seconds (None: request_timeout).
            Closed: the client was closed.
        """
        client = self._client
        return client._topics.wait(self.topic, after, client._seconds(timeout), client._check_open, client.endpoint)


class Receiver:
    """What is published on one topic, in order."""

    def __init__(self, client: Client, subscription: Subscription) -> None:
        self._client, self._subscription = client, subscription
        self.topic = subscription.topic

    @property
    def skipped(self) -> int:
        """Versions that were published and not received: this receiver, or the way to it, was too slow."""
        return self._subscription.skipped

    def receive(self, timeout: float | None = None) -> bytes | str:
        """The next content of the topic, in the type in which it was published; the newest one at first.

        Raises:
            MemoireTimeout: nothing came in `timeout` seconds; None waits for ever.
            Closed: the client was closed.
        """
        return self.receive_model(timeout).value

    def receive_model(self, timeout: float | None = None) -> Model:
        """`receive`, with version and topic."""
        client = self._client
        patience = None if timeout is None else seconds(timeout)
        return client._topics.receive(self._subscription, patience, client._check_open, client.endpoint)

    def close(self) -> None:
        """Receive no more."""
        if not self._client.closed:
            self._client._topics.unsubscribe(self._subscription)
