"""The client: an actor's memory, and its reports, pushes and models over the network.

    methods, from any thread ──▶ counters, lines, window (one lock) ──▶ one thread with three sockets ──▶ server or
    proxy
                                                                        requests, caches, notices

Methods never touch a socket. The thread sends the client's cumulative totals, newest sums, lines and scalars in
UPDATE, at most every `update_every` seconds, and at once if a call waits for the reply. The reply acknowledges what
arrived, brings new parameters and the versions of models, and tells if the run is over.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import random
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from memoire import arguments
from memoire.arguments import checked_names, process_name, seconds, table_name, whole
from memoire.errors import MemoireTimeout, ParameterError
from memoire.limits import Limits, wall_clock
from memoire.models.model import check_topic
from memoire.net.addresses import seen_from
from memoire.net.sockets import Context, shared_context
from memoire.net.thread import END_TIMEOUT, UNDO_TIMEOUT, Node, close_at_exit
from memoire.replay.memory import Memory
from memoire.replay.parameters import Parameters
from memoire.replay.schema import Schema
from memoire.replay.writer import Writer
from memoire.security.keys import Keys, KeysLike
from memoire.wire.messages import TEST, TRAIN

from . import reports
from .io import Connection
from .pushes import LocalMemory, Pusher, WhenFull, check_on_full
from .reports import ClientStats, take_unacknowledged_report
from .session import HEARTBEAT_INTERVAL, Session
from .waiting import ClientLock, HandedModels, ModelHandle, Receiver

if TYPE_CHECKING:
    from memoire.reader.reader import Reader
    from memoire.replay.batch import Batch
    from memoire.replay.mixing import MixedBatch

_log = logging.getLogger(__name__)

SILENCE_TIMEOUT = 3 * HEARTBEAT_INTERVAL
"""Seconds without a reply after which a client reports that it is not ready."""


@checked_names()
def connect(
    url: str,
    *,
    table: str = "",
    seed: int | None = None,
    timeout: float = 10.0,
    name: str | None = None,
    input_uuid: int = 0,
    capacity: int | None = None,
    on_full: WhenFull = "skip",
    context: Context | None = None,
    limits: Limits | None = None,
    keys: KeysLike = None,
    state: str | Path | None = None,
) -> Client:
    """Connect to a server, proxy or relay, which sends schema, parameters and all other addresses.

    Args:
        url: Address such as "tcp://proxy:5560" or "ipc:///run/memoire".
        table: Name of the table that the client fills; "" is the server's first.
        seed: Seed of the memory's draws; None takes entropy from the system.
        timeout: Seconds to wait for the server's answer.
        name: Name shown in place of the client's id on pages, in logs and metrics, such as "actor-3": 1 to 253 letters,
            digits, dots, hyphens and underscores. Several clients may have the same name. None takes $MEMOIRE_NAME,
            and in a Pod of Kubernetes the name of the Pod; "" leaves the client without a name.
        input_uuid: 32-bit label in the log's lines; 0 takes a random one.
        capacity: Entries that the memory has room for, if the table does not set `client_capacity`; by default
            what fits 256 MiB.
        on_full: What the writer does with a cache or episode when the byte window is full: "skip" it, or "block" for
            `limits.block_timeout` seconds and then skip it.
        context: ZeroMQ context; one for the process by default.
        keys: Keys folder of this process (or a cluster's), for tcp:// addresses; None takes $MEMOIRE_KEYS, and connects
            without keys if that is not set. See docs/operations.md.
        state: Folder for reports that this client could not deliver before its end; the next client with the same
            folder delivers them. Made if missing. None keeps nothing: the log says what is lost.

    Raises:
        MemoireTimeout: no answer came in time; the message says what to check.
        AuthError: the server does not let this process in.
        KeyFileError: the keys cannot be used.
        EndpointError: the address is malformed.
        StateUnusable: the folder `state` cannot be written.
        Refused: the server does not take this client, or has no table of this name.
        ParameterError: an argument is out of its range, or `capacity` differs from the table's `client_capacity`.

    Example:
        with memoire.connect("tcp://proxy:5560", seed=0) as client:
            writer = client.writer(envs)
    """
    return Client(
        url,
        table=table,
        seed=seed,
        timeout=timeout,
        name=name,
        input_uuid=input_uuid,
        capacity=capacity,
        on_full=on_full,
        context=context,
        limits=limits,
        keys=keys,
        state=state,
    )


class Client(Node):
    """One client of a cluster; `connect` makes it. All methods may be called from any thread.

    Example:
        with memoire.connect(server.endpoint) as client:
            client.writer().step(np.zeros(4), 0, 1.0, False, False, np.ones(4))
            client.log("one step")

    Args:
        request: Address for requests.
        push, subscribe: Addresses for caches and notices, if they differ from those that the server names.
        live: True if entries can be drawn before their episode is closed.
        clock: Returns seconds since 1970.
        The other arguments are those of `connect`.
    """

    CALLED = "this client"
    ROLE = "actor"
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
        name: str | None = None,
        input_uuid: int = 0,
        timeout: float = 10.0,
        seed: int | None = None,
        capacity: int | None = None,
        live: bool = True,
        on_full: WhenFull = "skip",
        context: Context | None = None,
        limits: Limits | None = None,
        clock: Callable[[], float] = wall_clock,
        keys: KeysLike = None,
        state: str | Path | None = None,
    ) -> None:
        check_on_full(on_full)
        if not 0 <= input_uuid < 1 << 32:
            raise ParameterError("input_uuid", input_uuid, "a number of 32 bits")
        self.endpoint = request
        self.name = process_name(name)
        """Name of the client in logs, pages and metrics; "" if it has no name."""
        self.program: Callable[[], Any] | None = None
        """Function that returns the state of the program around the client, for its pages; set by `memoire.rl`."""
        self.client_id = secrets.token_bytes(16)
        """Id of this client: 128 random bits, new for each `Client` object."""
        self.uuid = input_uuid or secrets.randbelow((1 << 32) - 1) + 1
        """Label of the client's log lines, a number of 32 bits."""
        self._folder = None if state is None else reports.folder_at(state)
        self._limits, self._seed = limits or Limits(), seed
        self._context = context or shared_context()
        self._keys = Keys.from_setting(keys, "actor")
        self._pid = os.getpid()
        self._close_lock = threading.Lock()
        self._is_left = False  # True after the client left; unacknowledged data was logged or kept
        self._readers: list[Reader] = []  # readers of running `batches` calls; under the lock
        self._make_parts(table_name(table), capacity, live, on_full, clock, (push, subscribe))
        self._io.worker.start()
        close_at_exit(self)
        try:
            self._await(self._io.has_server_answered, self._waiting.seconds(timeout), "welcome")
            self._local.check_capacity()
        except BaseException:
            self.close(UNDO_TIMEOUT)
            raise

    def _make_parts(
        self,
        table: str,
        capacity: int | None,
        live: bool,
        on_full: WhenFull,
        clock: Callable[[], float],
        addresses: tuple[str | None, str | None],
    ) -> None:
        limits, rng, numbers = self._limits, random.Random(secrets.randbits(64)), itertools.count(1)
        facts: dict[str, Any] = {"table": table, "name": self.name, "label": self.uuid, "limits": limits, "rng": rng}
        self._session = Session(self.client_id, self.endpoint, now=time.monotonic(), **facts)
        self._waiting = ClientLock(limits.request_timeout)
        self._handed = HandedModels(self._session)
        timing: dict[str, Any] = {"block_timeout": limits.block_timeout, "clock": clock}
        self._pusher = Pusher(self._session, self._waiting, numbers, on_full=on_full, **timing)
        self._local = LocalMemory(self._session, self._pusher, capacity=capacity, live=live, seed=self._seed)
        self._io = Connection(
            self._session,
            self._waiting,
            self._local,
            self._pusher,
            addresses=addresses,
            context=self._context,
            keys=self._keys,
            rng=rng,
            numbers=numbers,
            folder=self._folder,
            owner=self,
        )

    # ------------------------------------------------------------------------------------ answers of the server

    @property
    def schema(self) -> Schema:
        """Schema of the table's entries, from the server."""
        return self._session.schema

    @property
    def parameters(self) -> Parameters:
        """Sampling parameters of the table, the newest that the server sent."""
        return self._session.parameters

    @property
    def table(self) -> str:
        """Name of the table that the client fills."""
        return self._session.welcome.table_name

    @property
    def run(self) -> str:
        """Name of the run that the client counts for."""
        return self._session.welcome.run_name

    @property
    def home(self) -> str:
        """Name of the server that counts this client."""
        return self._session.welcome.home_name

    @property
    def storage(self) -> str:
        """Kind of the table: "caches" that the client draws, whole "episodes", or "rollouts"."""
        return self._session.welcome.storage

    @property
    def inference(self) -> tuple[str, ...]:
        """Addresses of inference nodes that act for this server's clients, from the server's newest WELCOME."""
        address = self._io.channel.link.address
        return tuple(seen_from(address, each) for each in self._session.welcome.inference)

    @property
    def finished(self) -> bool:
        """True if the run is over; an actor's loop ends then. Raises Closed."""
        self._check_open()
        return self._session.is_finished

    @property
    def memory(self) -> Memory:
        """Memory of the client's recent episodes, made at first use. If the server stores episodes or rollouts, it
        holds open episodes only.

        Raises:
            MemoireError: see `sync`.
        """
        return self._local.memory

    @property
    def push_reason(self) -> str:
        """Reason why the newest push was skipped; "" if it was not."""
        return self._pusher.reason

    @push_reason.setter
    def push_reason(self, reason: str) -> None:
        self._pusher.reason = reason

    @property
    def room(self) -> int:
        """Entries that the server still grants: beyond them a step waits for a learner, or its entries are not pushed.
        2**53 - 1 if there is no limit.
        """
        with self._waiting.condition:
            return self._session.inserts.remaining

    def sync(self, capacity: int | None = None, timeout: float | None = None, *, overrides: bool = False) -> None:
        """Ask the server for schema and parameters again, and begin with an empty memory; totals go on. Existing
        writers are closed, since the memory that they fill is no longer drawn from.

        Args:
            capacity: Entries that the new memory has room for; None keeps the capacity, or takes the table's.
            timeout: Seconds to wait for the server's answer; None waits `request_timeout`.
            overrides: True if `capacity` may differ from the table's `client_capacity`.

        Raises:
            ParameterError: the capacity differs from the table's `client_capacity`; the memory stays.
            MemoireTimeout: no answer came in time.
        """
        before, patience = self._session.welcome, self._waiting.seconds(timeout)
        deadline = time.monotonic() + patience
        self._io.worker.post(self._io.hello)
        self._await(lambda: self._session.welcome is not before, patience, "welcome")
        if not overrides:
            self._local.check_capacity(capacity)
        self._local.replace_memory(capacity)
        self._end_writers("the writer", deadline)

    # ---------------------------------------------------------------------------------------------- experience

    def writer(
        self, envs: Any = None, *, num_envs: int | None = None, autoreset: str | None = None, **options: Any
    ) -> Writer:
        """Return a writer for one or several environments: it takes what step() returned, counts, and pushes.

        Args:
            envs: A Gymnasium (vector) environment, from which number and autoreset mode are read.
            num_envs, autoreset: Number of environments and their autoreset mode ("next_step", "same_step" or
                "disabled"), instead of `envs`.
            options: longest and check; see `Writer`. A table of rollouts that has a length takes no other `longest`.

        May be called again, for other environments: each thread that steps environments needs its own writer.
        A step without a `model_version` gets the version that `newest` or `wait` of this client's model last
        returned: of the table's `model_topic`, or else of the only topic.
        """
        self._check_open()
        writer = self._local.writer(envs, num_envs, autoreset, self._handed.version_or_acting, **options)
        self._check_open()  # `close` may have ended the existing writers before this writer was made
        return writer

    def on_entries(self, count: int) -> None:
        """Add `count` recorded entries to the client's steps, for a caller that records without a writer."""
        self._check_open()
        self._pusher.count(count)

    def on_episode(self, lane: int, length: int, returned: Any) -> None:
        """Count a closed episode of `length` entries; `returned` is the sum of its rewards, [*R] or a number."""
        self._check_open()
        self._pusher.count_episode(length, returned)

    def report(self, length: int, returned: float, *, kind: str = "train") -> None:
        """Report an episode to the server: its number of steps and the sum of its rewards.

        Args:
            kind: "train" counts the episode, as a writer does by itself; "test" only shows it beside those of training.

        Raises:
            ParameterError: `kind` is something else, or the length is negative.
        """
        if kind not in ("train", "test"):
            raise ParameterError("kind", kind, "train or test")
        steps = whole("length", length, 0)
        self._check_open()
        self._pusher.count_episode(steps, float(returned), TEST if kind == "test" else TRAIN)

    def push_cache(self, timeout: float | None = None) -> bool:
        """Draw a cache from the memory and push it. Returns False if that was not possible: `push_reason` has the
        reason, stats().not_pushed the count.

        Args:
            timeout: Seconds to wait for room in the byte window; None waits `request_timeout`.

        Raises:
            ParameterError: the table does not store caches, or a cache is too large for a message.
            Closed, SchemaMismatch: the client cannot be used (any more).
        """
        self._check_open()
        return self._local.actor_side.push_cache(self._waiting.seconds(timeout))

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
        steps: int | None = None,
        is_cut: bool = False,
        timeout: float | None = None,
    ) -> bool:
        """Push a whole episode to a server that stores episodes, and count it with its steps. Returns False, with
        `push_reason`, if it was skipped: the home server granted no entry, or the byte window had no room.

        The client keeps no copy. A writer pushes its episodes by itself, at each episode's end.

        Args:
            columns: For each column but the return its values in order, [T, *F], nested as the schema is or by the
                columns' names. The recording time of all entries is now.
            init_w: Factor of the entries' weights: a number, or [T].
            model_version: Version of the models that acted: a number, or [T]; 0 is unknown.
            final_state, terminated, bootstrap_value: End of the episode, as for `Memory.close`.
            multiplier, update_value, update_weight: Weighing of the episode, as for `Memory.close`.
            steps: Entries that count as steps; None counts all entries.
            is_cut: True if the episode goes on in the next one that is pushed: then no episode is counted.
            timeout: Seconds to wait for room in the byte window; None waits `request_timeout`.

        Raises:
            EntryError, ParameterError: a value does not fit its column; or this server stores caches.
            Closed, SchemaMismatch: the client cannot be used (any more).
        """
        self._check_open()
        ending = {"final_state": final_state, "terminated": terminated, "bootstrap_value": bootstrap_value}
        ending |= {"multiplier": multiplier, "update_value": update_value, "update_weight": update_weight}
        entries = {"init_w": init_w, "model_version": model_version}
        patience = self._waiting.seconds(timeout)
        return self._local.actor_side.push_episode(
            columns, entries, ending, steps=steps, is_cut=is_cut, patience=patience
        )

    def configure_limits(
        self,
        *,
        credit: int | None = None,
        on_full: WhenFull | None = None,
        block_timeout: float | None = None,
        log_timeout: float | None = None,
    ) -> None:
        """Change this client's own limits; those left out stay. `stats` shows the present ones.

        Args:
            credit: Most bytes of caches in flight, if the home server grants more; 0 takes the home's grant.
            on_full: What the writer does with a cache or episode when the window is full: "skip" or "block".
            block_timeout, log_timeout: As in `Limits`.

        Raises:
            ParameterError: a value is out of its range; nothing was changed.
        """
        self._check_open()
        if credit is not None:
            _check_credit(credit)
        if on_full is not None:
            check_on_full(on_full)
        block_timeout = seconds(block_timeout, self._pusher.block_timeout, "block_timeout")
        log_timeout = seconds(log_timeout, self._io.log_timeout, "log_timeout")
        with self._waiting.condition:
            if credit is not None:
                self._session.windows.limit_bytes(credit)
            self._pusher.on_full = on_full or self._pusher.on_full
            self._pusher.block_timeout, self._io.log_timeout = block_timeout, log_timeout
            self._waiting.condition.notify_all()

    # ------------------------------------------------------------------------------------------------ reporting

    def update(self, timeout: float | None = None) -> None:
        """Report everything counted and logged so far; returns when the server has acknowledged it.

        Raises:
            MemoireTimeout: no acknowledgement came in time; the client goes on sending in the background.
        """
        self._check_open()
        outbox, schedule = self._session.outbox, self._session.schedule
        with self._waiting.condition:
            ticket = schedule.add_waiting_call(line := outbox.newest)
        self._waiting.wake()
        self._await(
            lambda: schedule.answered >= ticket and outbox.oldest > line,
            self._waiting.seconds(timeout),
            "acknowledged update",
        )

    def log(self, text: str, timeout: float | None = None) -> bool:
        """Queue a line for the server's log. Returns True if the queue took it: the server logs it once, and `update`
        and `close` wait until the server has it.

        Returns at once while the queue has room (`limits.log_lines`, `log_buffer_bytes`): it fills only if the server
        is away for long. A dropped line is counted (stats().dropped_lines); a warning comes at most once a minute.

        Args:
            timeout: Seconds to wait for room; None waits `limits.log_timeout`, and then does not wait again until
                lines were sent.

        Raises:
            Closed: the client was closed, also while waiting.
        """
        line = str(text)
        patience = None if timeout is None else seconds(timeout)
        self._check_open()
        return self._io.log(line, patience)

    def scalars(self, values: Mapping[str, float]) -> None:
        """Set scalars that the dashboard shows for this client, by name: finite numbers, at most 64 names."""
        self._check_open()
        with self._waiting.condition:
            self._session.scalars = arguments.scalars(values, self._session.scalars)
            self._session.schedule.is_dirty = True

    # -------------------------------------------------------------------------------------------------- models

    def model(self, topic: str) -> ModelHandle:
        """Return a handle on the newest model of a topic, kept up to date from now on."""
        self._check_open()
        self._io.topics.follow_topic(check_topic(topic))
        self._handed.add_topic(topic)
        return ModelHandle(topic, self._io.topics, self._waiting, self.endpoint, self._handed)

    def subscribe(self, topic: str) -> Receiver:
        """Return a receiver of each model of a topic in order, from the newest on; a slow one skips and counts some."""
        self._check_open()
        return Receiver(self._io.topics.subscribe(check_topic(topic)), self._io.topics, self._waiting, self.endpoint)

    # ------------------------------------------------------------------------------------------------- reading

    @overload
    def batches(self, batch_size: int, timeout: float = ..., **options: Any) -> Iterator[Batch]: ...
    @overload
    def batches(self, batch_size: Mapping[str, int], timeout: float = ..., **options: Any) -> Iterator[MixedBatch]: ...
    def batches(
        self, batch_size: int | Mapping[str, int], timeout: float = 30.0, **options: Any
    ) -> Iterator[Batch | MixedBatch]:
        """Yield batches drawn by all servers behind this address, prefetched: see `Reader.batches`.

        Ends with the run, or when this client is closed.

        Args:
            batch_size: Samples of this client's table; or of several, mixed: `{"online": 192, "demo": 64}`.
            timeout: Seconds that each batch may take, including the wait for a server's answer.
            options: See `Reader`.

        Raises:
            MemoireTimeout: not enough samples came in that time, or no server answered.
        """
        from memoire.replay.mixing import sizes_of

        self._check_open()
        sizes = sizes_of(batch_size) if isinstance(batch_size, Mapping) else whole("batch_size", batch_size, 1)
        patience, table = seconds(timeout), self.table if isinstance(sizes, int) else next(iter(sizes))
        with self._reader({"table": table} | options) as reader:
            for batch in () if self.closed else reader.batches(sizes, patience):
                yield batch
                if self.closed:
                    return

    @contextlib.contextmanager
    def _reader(self, options: dict[str, Any]) -> Iterator[Reader]:
        """Yield a reader with this client's address, name, keys and limits; the client's `close` closes it, too."""
        from memoire.reader.reader import Reader

        args: dict[str, Any] = {"name": self.name, "context": self._context, "limits": self._limits, "keys": self._keys}
        with Reader([self.endpoint], timeout=None, **args | {"seed": self._seed} | options) as reader:
            with self._waiting.condition:
                self._readers.append(reader)
            try:
                yield reader
            finally:
                with self._waiting.condition:
                    self._readers.remove(reader)

    # ------------------------------------------------------------------------------------------ status and end

    def stats(self) -> ClientStats:
        """Return a snapshot of the client's figures."""
        with self._waiting.condition:
            return self._io.stats()

    def liveness(self) -> list[str]:
        """Return problems of the client's thread that only a restart can mend, a sentence each; [] if all is well."""
        return self._io.worker.problem()

    def readiness(self) -> list[str]:
        """Return reasons why the server does not count this client's work now, a sentence each; [] if it does."""
        if self.closed:
            return ["closing: this client is about to end"]
        if self._waiting.failed is not None:
            return [str(self._waiting.failed)]
        if self._session.trouble:
            return [f"unacknowledged: {self._io.advice()}"]
        return [f"silent: {self._io.advice()}"] if self._io.silent > SILENCE_TIMEOUT else []

    @property
    def closed(self) -> bool:
        """True if `close` was called; closing may still go on."""
        return self._waiting.is_closing

    def close(self, timeout: float | None = None) -> bool:
        """Deliver everything that the server has not acknowledged, then end, within `timeout` seconds; calls that wait
        raise `Closed`.

        Episodes that are open in writers are stored as `Writer.reset` stores them, and further steps raise `Closed`.
        May be called again. Returns True if everything was delivered.
        """
        allowed = seconds(timeout, self._limits.close_timeout)
        deadline = time.monotonic() + allowed
        self._refuse_calls(deadline)
        with self._closer(deadline) as is_mine:
            if not is_mine:
                return False
            self._end_writers("this client", deadline)
            delivered = self._deliver_rest(deadline)
            if not self._io.worker.stop(max(END_TIMEOUT, deadline - time.monotonic()), linger=min(allowed, 1.0)):
                _log.warning("%s: its thread did not end in time", self._name)
            if not delivered:
                self._leave_remainder()
            return delivered

    def _deliver_rest(self, deadline: float) -> bool:
        """Return True if the server acknowledges everything before the deadline; writers have ended."""
        with self._waiting.condition:
            self._waiting.is_parting = False
            self._waiting.condition.notify_all()
        return self._io.deliver_everything(deadline)

    def _refuse_calls(self, deadline: float) -> None:
        """Let calls raise `Closed`, waiting ones too; open episodes of writers may leave until the deadline."""
        session, waiting = self._session, self._waiting
        with waiting.condition:
            if not waiting.is_closing:
                has_home = waiting.failed is None and session.has_welcome
                waiting.is_parting = has_home and self._local.actor_side.leaves_open
                waiting.closed_by = deadline
            waiting.is_closing = True
            waiting.condition.notify_all()
            readers = list(self._readers)
        self._io.topics.close()
        for reader in readers:  # without this, callers would go on waiting for batches
            reader.close(max(0.0, deadline - time.monotonic()))

    def _end_writers(self, closed: str, deadline: float) -> None:
        """Store the writers' open episodes, and let further steps raise `Closed`, which names `closed`."""
        for problem in self._local.end_writers(closed, deadline):
            _log.warning("%s does not store %s", self._name, problem)

    def _leave_remainder(self) -> None:
        """Log what was not acknowledged, and keep it in the folder for the next client with that folder."""
        with self._waiting.condition:
            if not self._session.has_welcome or self._is_left:
                return
            self._is_left = True
            remainder = take_unacknowledged_report(self._session, self._io.topics.versions())
        if remainder is not None:
            fate = reports.keep_final_report(self._folder, remainder)
            # After the end of a run nothing is lost: the learner that ended the run needs no more entries.
            level = logging.INFO if self._session.is_finished else logging.WARNING
            _log.log(level, "%s ends before %s. %s", self._name, fate, self._io.advice(probe=False))

    def _check_open(self) -> None:
        self._waiting.check_open()

    def _await(self, is_done: Callable[[], bool], patience: float, expected: str) -> None:
        """Wait until `is_done` returns True. Raises MemoireTimeout, or the error that prevents it."""
        waiting = self._waiting
        with waiting.condition:
            waiting.check_open()
            if waiting.wait_until(is_done, waiting.now() + patience, waiting.check_open, lambda: None):
                return
        error = self._session.put_off or self._io.channel.link.denied
        raise error or MemoireTimeout(expected, self.endpoint, patience, self._io.advice())

    @property
    def _name(self) -> str:
        return f"client {self._session.shown}"

    def __repr__(self) -> str:
        return f"<memoire.Client {self._session.shown} of {self.endpoint}>"


def _check_credit(credit: object) -> None:
    if type(credit) is not int or credit < 0:
        raise ParameterError("credit", credit, "a whole number of bytes, or 0 for the server's grant")
