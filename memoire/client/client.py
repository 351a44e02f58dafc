"""The client: an actor's memory, and what it tells and hears over the network.

    methods, from any thread ──▶ counters, lines, window (one lock) ──▶ one thread with three sockets ──▶ server or
    proxy
                                                                        requests, caches, notices

Methods never touch a socket. The thread sends the client's cumulative totals, newest sums, lines and scalars in
UPDATE, at most every `update_every` seconds and at once when somebody waits for it; the replies say what arrived,
which parameters and models are new, and whether the run is over.
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
from memoire.security.keys import Given, Keys
from memoire.wire.messages import TEST, TRAIN

from . import reports
from .io import Connection
from .pushes import LocalMemory, Pusher, WhenFull, check_on_full
from .reports import ClientStats, remainder_of
from .session import HEARTBEAT_INTERVAL, Session
from .waiting import ClientLock, HandedModels, ModelHandle, Receiver

if TYPE_CHECKING:
    from memoire.reader.reader import Reader
    from memoire.replay.batch import Batch
    from memoire.replay.mixing import MixedBatch

_log = logging.getLogger(__name__)

SILENCE_TIMEOUT = 3 * HEARTBEAT_INTERVAL
"""Seconds without a reply after which a client says that it is not ready."""


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
    keys: Given = None,
    state: str | Path | None = None,
) -> Client:
    """Connect to a server, proxy or relay: one address, and everything else comes from there.

    Args:
        url: Such as "tcp://proxy:5560" or "ipc:///run/memoire".
        table: Name of the table that it fills; "" is the server's first.
        seed: Of the memory's draws; None takes entropy from the system.
        timeout: Seconds to wait for the other side.
        name: What people see in place of its id on pages, in logs and metrics, such as "actor-3": 1 to 253 letters,
            digits, dots, hyphens and underscores. Several may have the same. None takes $MEMOIRE_NAME, and in a Pod
            of Kubernetes the name of the Pod; "" gives none.
        input_uuid: 32-bit label in the log's lines; 0 takes a random one.
        capacity: Entries that the memory has room for, if the table does not say it (`client_capacity`); by default
            what fits 256 MiB.
        on_full: What the writer does with a cache or episode when the byte window is full: skip it, or wait for
            `limits.block_timeout` seconds and then skip it.
        context: ZeroMQ context; one for the process by default.
        keys: This process' keys folder (or a cluster's), for tcp:// addresses; None takes $MEMOIRE_KEYS, and without it
            none. See docs/operations.md.
        state: Folder in which this client leaves what it could not tell when it ends, and from which it tells what
            earlier ones have left; made when it is not there. None leaves nothing: the log says what is lost.

    Raises:
        MemoireTimeout: nobody answered; says what to look at.
        AuthError: the other side does not let this process in.
        KeyFileError: the keys cannot be used.
        EndpointError: the address is none.
        StateUnusable: state cannot be written.
        Refused: the other side does not take this client, or has no such table.
        ParameterError: an argument is out of its range, or `capacity` is not what the table says.
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

    Args:
        request: Address for requests.
        push, subscribe: Addresses for caches and notices, where they are not those that the server names.
        live: Whether entries can be drawn before their episode is closed.
        The others: see `connect`.
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
        keys: Given = None,
        state: str | Path | None = None,
    ) -> None:
        check_on_full(on_full)
        if not 0 <= input_uuid < 1 << 32:
            raise ParameterError("input_uuid", input_uuid, "a number of 32 bits")
        self.endpoint = request
        self.name = process_name(name)
        self.program: Callable[[], Any] | None = None
        """Tells how the program around it stands, for its pages: set by a worker or trainer of `memoire.rl`."""
        """What people call it; "" if nobody gave it a name."""
        self.client_id = secrets.token_bytes(16)
        """128 random bits: who this client is; new for each one made."""
        self.uuid = input_uuid or secrets.randbelow((1 << 32) - 1) + 1
        """The label of its log lines."""
        self._folder = None if state is None else reports.folder_at(state)
        self._limits, self._seed = limits or Limits(), seed
        self._context = context or shared_context()
        self._keys = Keys.of(keys, "actor")
        self._pid = os.getpid()
        self._close_lock = threading.Lock()
        self._is_left = False  # what could not be told was said, or kept
        self._readers: list[Reader] = []  # of `batches` that are drawn now; under the lock
        self._make_parts(table_name(table), capacity, live, on_full, clock, (push, subscribe))
        self._io.worker.start()
        close_at_exit(self)
        try:
            self._await(self._io.is_met, self._waiting.seconds(timeout), "welcome")
            self._local.check_told()
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
        given: tuple[str | None, str | None],
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
            given=given,
            context=self._context,
            keys=self._keys,
            rng=rng,
            numbers=numbers,
            folder=self._folder,
            owner=self,
        )

    # ------------------------------------------------------------------------------------------ what it learned

    @property
    def schema(self) -> Schema:
        """What an entry is, as the server says."""
        return self._session.schema

    @property
    def parameters(self) -> Parameters:
        """Everything that shapes sampling, as the server said last."""
        return self._session.parameters

    @property
    def table(self) -> str:
        """Name of the table that it fills."""
        return self._session.told.table_name

    @property
    def run(self) -> str:
        """Name of the experiment."""
        return self._session.told.run_name

    @property
    def home(self) -> str:
        """Name of the server that counts this client."""
        return self._session.told.home_name

    @property
    def storage(self) -> str:
        """What the server stores: "caches" that are drawn here, or whole "episodes"."""
        return self._session.told.storage

    @property
    def inference(self) -> tuple[str, ...]:
        """Addresses of inference nodes that act for this server's clients, as the server said when it was met last."""
        address = self._io.channel.link.address
        return tuple(seen_from(address, each) for each in self._session.told.inference)

    @property
    def finished(self) -> bool:
        """Whether the run is over; an actor's loop ends with it."""
        self._check_open()
        return self._session.is_finished

    @property
    def memory(self) -> Memory:
        """The client's own recent episodes; made when it is first asked for. Where the server stores episodes, only
        those that are open.

        Raises:
            MemoireError: see `sync`.
        """
        return self._local.memory

    @property
    def push_reason(self) -> str:
        """Why the newest push_cache returned False; "" when it did not."""
        return self._pusher.reason

    @push_reason.setter
    def push_reason(self, reason: str) -> None:
        self._pusher.reason = reason

    @property
    def room(self) -> int:
        """Entries that may be recorded before a step waits for a learner, or before they bring nothing; 2**53 - 1 if
        there is no limit.
        """
        with self._waiting.changed:
            return self._session.inserts.left

    def sync(self, capacity: int | None = None, timeout: float | None = None, *, overrides: bool = False) -> None:
        """Ask the server for schema and parameters again, and begin with an empty memory; totals go on. Writers
        that were made before are closed: they would fill a memory that nobody draws from.

        Args:
            capacity: Entries that the new memory has room for; None: as before, or as the table says.
            overrides: Whether `capacity` may be another than the table's `client_capacity`.

        Raises:
            ParameterError: `capacity`, or that of before, is not what the table says; the memory stays.
        """
        before, patience = self._session.told, self._waiting.seconds(timeout)
        deadline = time.monotonic() + patience
        self._io.worker.post(self._io.hello)
        self._await(lambda: self._session.told is not before, patience, "welcome")
        if not overrides:
            self._local.check_told(capacity)
        self._local.begin_again(capacity)
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
            options: longest and check; see `Writer`. A table of rollouts that has a length takes no other `longest`.

        May be called again, for other environments: each thread that steps some needs a writer of its own.
        An entry of a step that is not told its `model_version` gets the version that `newest` or `wait` of this
        client's model last handed out: of the table's `model_topic`, or else of the only topic.
        """
        self._check_open()
        made = self._local.writer(envs, num_envs, autoreset, self._handed.stamp, **options)
        self._check_open()  # `close` ends the writers that were there when it was called
        return made

    def on_entries(self, count: int) -> None:
        """Count entries that were recorded."""
        self._check_open()
        self._pusher.count(count)

    def on_episode(self, lane: int, length: int, returned: Any) -> None:
        """Count a closed episode; `returned` is the sum of its rewards, [*R] or a number."""
        self._check_open()
        self._pusher.count_episode(length, returned)

    def report(self, length: int, returned: float, *, kind: str = "train") -> None:
        """Tell of an episode that was run: how many steps it had, and the sum of its rewards.

        Args:
            kind: "train" counts it, as a writer does by itself; "test" only shows it, beside those of training.

        Raises:
            ParameterError: `kind` is something else, or the length is negative.
        """
        if kind not in ("train", "test"):
            raise ParameterError("kind", kind, "train or test")
        steps = whole("length", length, 0)
        self._check_open()
        self._pusher.count_episode(steps, float(returned), TEST if kind == "test" else TRAIN)

    def push_cache(self, timeout: float | None = None) -> bool:
        """Draw a cache from the memory and push it. False, with `push_reason`, when that was not possible; counted in
        stats().not_pushed.

        Args:
            timeout: Seconds to wait for room in the byte window; None waits `request_timeout`.

        Raises:
            Closed, SchemaMismatch: the client cannot be used (any more).
        """
        self._check_open()
        return self._local.side.push_cache(self._waiting.seconds(timeout))

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
        """Push a whole episode to a server that stores episodes, and count it with its steps. False, with
        `push_reason`, when the byte window had no room for it: then nothing was pushed or counted but that.

        Nothing of it is kept here. A writer does this by itself, at each episode's end.

        Args:
            columns: For each column but the return its values in order, [T, *F], nested as the schema is or by the
                columns' names. They count as recorded now.
            init_w: What the entries' weights are multiplied by: a number, or [T].
            model_version: Of the models that acted: a number, or [T]; 0 is unknown.
            final_state, terminated, bootstrap_value: How it ended, as of `Memory.close`.
            multiplier, update_value, update_weight: How it is weighed, as of `Memory.close`.
            steps: Entries that count as steps; None is all of them.
            is_cut: Whether the episode goes on in the next one that is pushed: then no episode is counted.
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
        return self._local.side.push_episode(columns, entries, ending, steps=steps, is_cut=is_cut, patience=patience)

    def configure_limits(
        self,
        *,
        credit: int | None = None,
        on_full: WhenFull | None = None,
        block_timeout: float | None = None,
        log_timeout: float | None = None,
    ) -> None:
        """Change what this client allows itself, from now on; what is not given stays. `stats` shows what holds.

        Args:
            credit: Most bytes of caches on the way, where the home grants more; 0 takes what it grants.
            on_full: What the writer does with a cache when the window is full.
            block_timeout, log_timeout: As in `Limits`.

        Raises:
            ParameterError: nothing was changed.
        """
        self._check_open()
        if credit is not None:
            _check_credit(credit)
        if on_full is not None:
            check_on_full(on_full)
        block_timeout = seconds(block_timeout, self._pusher.block_timeout, "block_timeout")
        log_timeout = seconds(log_timeout, self._io.log_timeout, "log_timeout")
        with self._waiting.changed:
            if credit is not None:
                self._session.windows.limit(credit)
            self._pusher.on_full = on_full or self._pusher.on_full
            self._pusher.block_timeout, self._io.log_timeout = block_timeout, log_timeout
            self._waiting.changed.notify_all()

    # ------------------------------------------------------------------------------------------------- telling

    def update(self, timeout: float | None = None) -> None:
        """Tell the server everything counted and logged so far; returns when it has it.

        Raises:
            MemoireTimeout: no answer in time; it goes on being sent in the background.
        """
        self._check_open()
        outbox, schedule = self._session.outbox, self._session.schedule
        with self._waiting.changed:
            ticket = schedule.ask(line := outbox.newest)
        self._waiting.wake()
        self._await(
            lambda: schedule.answered >= ticket and outbox.oldest > line,
            self._waiting.seconds(timeout),
            "acknowledged update",
        )

    def log(self, text: str, timeout: float | None = None) -> bool:
        """Send a line to the server's log. Returns whether it was taken: then it is kept until the server has it,
        once. `update` and `close` wait for that.

        Returns at once while there is room (`limits.log_lines`, `log_buffer_bytes`), which there is unless the server
        is away for long. A line that is not taken is counted (stats().dropped_lines) and warned of once a minute.

        Args:
            timeout: Seconds to wait for room; None waits `limits.log_timeout`, and not again until some lines
                left.

        Raises:
            Closed: the client was closed, also while waiting.
        """
        line = str(text)
        patience = None if timeout is None else seconds(timeout)
        self._check_open()
        return self._io.log(line, patience)

    def scalars(self, values: Mapping[str, float]) -> None:
        """Set figures to be shown for this client, by name: finite numbers, at most 64 names."""
        self._check_open()
        with self._waiting.changed:
            self._session.scalars = arguments.scalars(values, self._session.scalars)
            self._session.schedule.is_dirty = True

    # -------------------------------------------------------------------------------------------------- models

    def model(self, topic: str) -> ModelHandle:
        """The newest model of a topic, kept up to date from now on."""
        self._check_open()
        self._io.topics.want(check_topic(topic))
        self._handed.follow(topic)
        return ModelHandle(topic, self._io.topics, self._waiting, self.endpoint, self._handed)

    def subscribe(self, topic: str) -> Receiver:
        """Every model of a topic in order, from the newest on; who is too slow skips (and counts)."""
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
        """Batches drawn far away, from all servers behind this address, prefetched: see `Reader.batches`.

        Ends with the run, or with this client.

        Args:
            batch_size: Samples of this client's table; or of several, mixed: `{"online": 192, "demo": 64}`.
            timeout: Seconds that each batch may take, until somebody answers included.
            options: See `Reader`.

        Raises:
            MemoireTimeout: not enough samples came in that time, or nobody answered.
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
        """A reader like this client, which this client's `close` closes, too."""
        from memoire.reader.reader import Reader

        own: dict[str, Any] = {"name": self.name, "context": self._context, "limits": self._limits, "keys": self._keys}
        with Reader([self.endpoint], timeout=None, **own | {"seed": self._seed} | options) as reader:
            with self._waiting.changed:
                self._readers.append(reader)
            try:
                yield reader
            finally:
                with self._waiting.changed:
                    self._readers.remove(reader)

    # ------------------------------------------------------------------------------------------------- its end

    def stats(self) -> ClientStats:
        """All figures at this moment."""
        with self._waiting.changed:
            return self._io.stats()

    def liveness(self) -> list[str]:
        """What only a restart can mend, a sentence each. Empty while all is well."""
        return self._io.worker.trouble()

    def readiness(self) -> list[str]:
        """Why nothing that this client does is counted just now, a sentence each; empty while it is."""
        if self.closed:
            return ["closing: this client is about to end"]
        if self._waiting.failed is not None:
            return [str(self._waiting.failed)]
        if self._session.trouble:
            return [f"unacknowledged: {self._io.advice()}"]
        return [f"silent: {self._io.advice()}"] if self._io.silent > SILENCE_TIMEOUT else []

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._waiting.is_closing

    def close(self, timeout: float | None = None) -> bool:
        """Tell the server what it does not know yet, then end, within `timeout` seconds; calls that wait raise
        `Closed`.

        Episodes that are open in writers are stored as `Writer.reset` stores them, and further steps raise `Closed`.
        May be called again. Returns whether everything was delivered.
        """
        allowed = seconds(timeout, self._limits.close_timeout)
        deadline = time.monotonic() + allowed
        self._refuse_calls(deadline)
        with self._closer(deadline) as is_mine:
            if not is_mine:
                return False
            self._end_writers("this client", deadline)
            delivered = self._tell_the_rest(deadline)
            if not self._io.worker.stop(max(END_TIMEOUT, deadline - time.monotonic()), linger=min(allowed, 1.0)):
                _log.warning("%s: its thread did not end in time", self._name)
            if not delivered:
                self._leave_remainder()
            return delivered

    def _tell_the_rest(self, deadline: float) -> bool:
        """Whether all that was recorded is told and acknowledged in time; writers leave nothing any more."""
        with self._waiting.changed:
            self._waiting.is_parting = False
            self._waiting.changed.notify_all()
        return self._io.told_everything(deadline)

    def _refuse_calls(self, deadline: float) -> None:
        """Calls raise `Closed` from now on, those that wait too; what writers hold has until the deadline."""
        session, waiting = self._session, self._waiting
        with waiting.changed:
            if not waiting.is_closing:
                has_home = waiting.failed is None and session.welcome is not None
                waiting.is_parting = has_home and self._local.side.leaves_open
                waiting.closed_by = deadline
            waiting.is_closing = True
            waiting.changed.notify_all()
            readers = list(self._readers)
        self._io.topics.close()
        for reader in readers:  # whoever waits for their batches would wait on
            reader.close(max(0.0, deadline - time.monotonic()))

    def _end_writers(self, closed: str, deadline: float) -> None:
        """Store what is open in writers, and have them refuse further steps, because `closed` is closed."""
        for problem in self._local.end_writers(closed, deadline):
            _log.warning("%s does not store %s", self._name, problem)

    def _leave_remainder(self) -> None:
        """Say what was not acknowledged, and leave it in the folder for the next client that has it."""
        with self._waiting.changed:
            if self._session.welcome is None or self._is_left:
                return
            self._is_left = True
            remainder = remainder_of(self._session, self._io.topics.versions())
        if remainder is not None:
            fate = reports.leave(self._folder, remainder)
            # The end of a run is no loss: whoever declared it over has all that it wanted.
            level = logging.INFO if self._session.is_finished else logging.WARNING
            _log.log(level, "%s ends before %s. %s", self._name, fate, self._io.advice(probe=False))

    def _check_open(self) -> None:
        self._waiting.check_open()

    def _await(self, is_done: Callable[[], bool], patience: float, what: str) -> None:
        """Wait until the thread has brought this about. Raises MemoireTimeout, or what is in the way."""
        waiting = self._waiting
        with waiting.changed:
            waiting.check_open()
            if waiting.until(is_done, waiting.now() + patience, waiting.check_open, lambda: None):
                return
        unmet = self._session.put_off or self._io.channel.link.denied
        raise unmet or MemoireTimeout(what, self.endpoint, patience, self._io.advice())

    @property
    def _name(self) -> str:
        """As the log calls it."""
        return f"client {self._session.shown}"

    def __repr__(self) -> str:
        return f"<memoire.Client {self._session.shown} of {self.endpoint}>"


def _check_credit(credit: object) -> None:
    if type(credit) is not int or credit < 0:
        raise ParameterError("credit", credit, "a whole number of bytes, or 0 for what the server grants")
