"""The server: takes caches and requests on its own threads, hands out batches, publishes models.

    actors ──requests──▶ one thread: Dispatcher        ──▶ replies, notices
           ──caches────▶ one thread per address  ──▶ Pool ◀── get_batch, in the learner's own thread
             episodes                                EpisodePool

It runs inside of the learner's process, or alone with learners that read over the network
(`memoire.connect(url).batches`).
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, overload

from memoire import arguments
from memoire._core import Held
from memoire.arguments import checked_names, seconds, whole
from memoire.disk.snapshots import RestoreCounts
from memoire.errors import Closed
from memoire.limits import Limits
from memoire.models.model import Model
from memoire.net import process as tuning
from memoire.net.addresses import beside, check
from memoire.net.sockets import shared_context
from memoire.net.thread import UNDO_TIMEOUT, Node, close_at_exit
from memoire.replay.batch import Batch, PriorityUpdate
from memoire.replay.episodes import EpisodeBatch
from memoire.replay.mixing import MixedBatch
from memoire.replay.parameters import NAMES, Parameters
from memoire.replay.sampling import Sampler
from memoire.replay.schema import Schema
from memoire.security.keys import Given, Keys
from memoire.tables.table import Table, table_settings

from .build import ServerOptions, check_bytes
from .io import ServerThreads
from .io_snapshots import Snapshot
from .settings import Endpoints, Process, State
from .stats import Queries, ServerStats, figures_of
from .table_handle import TableHandle, mixed_batches

_log = logging.getLogger(__name__)


class Server(Queries, Node):
    """Keeps the newest caches of all clients, or their episodes, draws batches, counts, logs and publishes.

    Args:
        endpoint: Address for requests, such as "tcp://*:5560", "ipc:///run/memoire" or "inproc://memoire"; caches come
            in on the next port and notices go out on the one after it (or .push and .pub), unless `Endpoints` says
            others. Port 0 takes free ones. None opens none: workers are added afterwards.
        schema: What an entry is; a mapping is made a `Schema`. It makes one table, of which `table` has the settings.
        tables: Several tables in its place, by name. Whoever names none gets the first.
        run: Name of the experiment that totals, lines and models belong to. None: the one that the state folder counted
            last, or else "default".
        name: Name of this server, the same after a restart; by default its host and port.
        state: Folder of this server's files, or a `State` that says more. None keeps everything in memory.
        keys: This process' keys folder (or a cluster's): whoever comes over tcp:// has to have a key that is in it.
            None takes $MEMOIRE_KEYS, and without it lets everybody in. See docs/operations.md.
        limits: Timeouts, and bytes that are held. More than the memory limit of the process's container is refused.
        seed: Of the draws; None takes entropy from the system. In a state folder, no life draws as a former one did.
        inference: Addresses of inference nodes that compute the policy for this server's actors; clients are told of
            them. The host "*" is the one at which a client reaches this server.
        process: What it shares with its process: see `Process`.
        table: Settings of the only table: what `Table` takes, such as sampler=, multi_step=3 or min_size=1000.

    With a state folder a server goes on where it ended: with the run that it counted last and the parameters that were
    configured last, unless `run` or parameters are given that differ from those given then.

    Raises:
        StateError: the folder cannot be used, or not as it is; says what to do.
        SnapshotMismatch: what the tables held when the former life ended was made with other values; names both.
        DataError: the file of it is damaged.
        EndpointError: an address is in use or malformed.
        ParameterError: a setting is out of its range.
        KeyFileError: the keys cannot be used.
    """

    CALLED = "this server"
    ROLE = "server"
    CLOSED_AT_EXIT = 2

    @checked_names(table_settings)
    def __init__(
        self,
        endpoint: str | Endpoints | None,
        schema: Schema | Mapping[str, Any] | None = None,
        *,
        tables: Mapping[str, Table] | None = None,
        run: str | None = None,
        name: str | None = None,
        state: str | Path | State | None = None,
        keys: Given = None,
        limits: Limits | None = None,
        seed: int | None = None,
        inference: Sequence[str] = (),
        process: Process | None = None,
        **table: Any,
    ) -> None:
        at, shares = Endpoints.of(endpoint), process or Process()
        if at.request is not None:
            beside(at.request)  # before anything is made: a malformed address
        for address in () if isinstance(inference, str) else inference:
            check(address, "bind")  # "tcp://*:5570" is the host at which clients reach this server
        if shares.tune:
            tuning.tune()
        options = ServerOptions(
            endpoint=at, schema=schema, tables=tables, run=run, name=name, state=State.of(state), keys=keys,
            limits=limits or Limits(), seed=seed, inference=inference, table=table,
            process=replace(shares, context=shares.context or shared_context()),
        )  # fmt: skip
        self._limits, self._pid, self._started = options.limits, os.getpid(), time.monotonic()
        self._closing, self._close_lock = threading.Event(), threading.Lock()
        self._scalars: dict[str, float] = {}
        self._io = made = ServerThreads(options, self._closing, owner=self)
        self.name, self._gate, self._store, self._dispatcher = made.name, made.gate, made.store, made.dispatcher
        self._tables, self._archive = made.dispatcher.tables, made.archive
        facts = self._check_open, self._is_over, lambda: self.endpoint or self.name
        self._handles = {table.name: TableHandle(self._dispatcher, table, *facts) for table in self._tables}
        self._dispatcher.show_inference(options.inference)
        self._first = self._handles[self._tables.first.name]
        try:
            made.open()
            made.load()
        except BaseException:
            self.close(UNDO_TIMEOUT)
            raise
        made.start()
        close_at_exit(self)

    # ---------------------------------------------------------------------------------------------- addresses

    @property
    def endpoint(self) -> str:
        """Address for requests, as bound: what clients connect to ("*" is any of this machine's addresses)."""
        return self._io.addresses.endpoints.request

    @property
    def push_endpoint(self) -> str:
        """Address for caches, as bound."""
        return self._io.addresses.endpoints.push

    @property
    def pub_endpoint(self) -> str:
        """Address for notices of models, as bound."""
        return self._io.addresses.endpoints.publish

    @property
    def keys(self) -> Keys | None:
        """Of this process; None where everybody is let in."""
        return self._gate.keys

    def show_pages(self, address: str) -> None:
        """Tell whoever asks that the pages about this server are at "http://HOST:PORT"."""
        self._dispatcher.show_pages(arguments.name("address", address))

    def add_request_worker(self, endpoint: str, *, bind: bool = True) -> str:
        """Answer requests at one more address; returns it as it is bound.

        Args:
            bind: False connects to a proxy's back instead.

        Raises:
            EndpointError: the address is in use or malformed.
        """
        return self._add_worker(self._io.add_request_worker, endpoint, bind)

    def add_pull_worker(self, endpoint: str, *, bind: bool = True) -> str:
        """Take caches at one more address, on a thread of its own; returns the address as it is bound.

        Raises:
            EndpointError: the address is in use or malformed.
        """
        return self._add_worker(self._io.add_pull_worker, endpoint, bind)

    def _add_worker(self, add: Callable[[str, bool], str], endpoint: str, bind: bool) -> str:
        with Held(self._close_lock):
            self._check_open()
            bound = add(endpoint, bind)
        self._io.addresses.warn_open()
        return bound

    def run_request_proxy(self, front: str, back: str) -> None:
        """Share the requests of one address out among the workers that connect to another; blocks until `close`."""
        self._check_open()
        self._io.proxies.run_requests(front, back)

    def run_pull_proxy(self, front: str, back: str) -> None:
        """Share the caches of one address out among the workers that connect to another; blocks until `close`."""
        self._check_open()
        self._io.proxies.run_pushes(front, back)

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
        """One of the tables: batches, parameters and figures of its own. ParameterError: there is none of this name."""
        return self._handles[self._tables[name].name]

    @checked_names()
    def get_batch(
        self, batch_size: int, timeout: float | None = None, *, out: Mapping[str, Any] | Batch | None = None
    ) -> Batch:
        """Draw a batch from the held caches, as if from all clients' memories at once.

        All or nothing: a batch that cannot be filled takes no sample. docs/sampling.md says how clients are weighed.
        `TableHandle.get_batch` says what `out` takes and what is raised.

        Args:
            batch_size: Samples to draw, B, at least 1: all arrays of the batch are [B, ...].
            timeout: Seconds to wait for enough samples; None does not wait.
        """
        return self._first.get_batch(batch_size, timeout, out=out)

    @overload
    def batches(self, batch_size: int, timeout: float = ..., *, ahead: int = ...) -> Iterator[Batch]: ...
    @overload
    def batches(
        self, batch_size: Mapping[str, int], timeout: float = ..., *, ahead: int = ...
    ) -> Iterator[MixedBatch]: ...
    @checked_names()
    def batches(
        self, batch_size: int | Mapping[str, int], timeout: float = 30.0, *, ahead: int = 0
    ) -> Iterator[Batch] | Iterator[MixedBatch]:
        """Batches until `finish` or `close`; each waits at most `timeout` seconds for its samples.

        Args:
            batch_size: Samples of the first table; or of several, mixed: `{"online": 192, "demo": 64}`.
            ahead: How many are drawn ahead, on a thread of their own: see `TableHandle.batches`.
        """
        if isinstance(batch_size, Mapping):
            return mixed_batches(self.table, batch_size, timeout, ahead, self._is_over, self.endpoint or self.name)
        return self._first.batches(batch_size, timeout, ahead=ahead)

    @checked_names()
    def sample_episodes(
        self, count: int, timeout: float | None = None, *, group: str | None = None, group_size: int | None = None
    ) -> EpisodeBatch:
        """Draw whole episodes of the first table, which stores them: see `TableHandle.sample_episodes`."""
        return self._first.sample_episodes(count, timeout, group=group, group_size=group_size)

    @checked_names()
    def update_priorities(self, ids: Any, td_errors: Any) -> PriorityUpdate:
        """Set priorities of entries that are here by TD errors [B] of samples with these ids [B], and hand the others
        on to the clients that own them; returns at once. The owners apply them with their next message: see `stats`.
        """
        self._check_open()
        return self._dispatcher.hand_on(ids, td_errors)

    # ------------------------------------------------------------------------------------------- what it tells

    def publish(self, topic: str, content: bytes | bytearray | memoryview | str, *, version: int = 0) -> int:
        """Make this the newest model of its topic and tell every client; returns its version. From any thread.

        Clients get the content in the type in which it was published; those that come later get the newest.

        Args:
            version: Above all former ones; 0 is the next one. For a learner that goes on at a new server.

        Raises:
            StaleVersion: the topic has this version or a newer one.
        """
        self._check_open()
        return self._dispatcher.publish(topic, content, whole("version", version, 0)).version

    def model(self, topic: str) -> Model | None:
        """The newest model of a topic, from whomever it came; with a state folder, the newest that is saved."""
        return self._dispatcher.models.newest(topic)

    def scalars(self, values: Mapping[str, float]) -> None:
        """Set figures of this learner to be shown, by name, such as its loss: finite numbers, at most 64 names."""
        self._check_open()
        self._scalars = arguments.scalars(values, self._scalars)

    @checked_names(NAMES)
    def configure(
        self,
        *,
        sampler: Sampler | None = None,
        discount: float | Sequence[float] | None = None,
        discard_mismatched: bool = False,
        **fields: Any,
    ) -> Parameters:
        """Change parameters here and, with their next message, at every client; their data stays. Takes what
        `Buffer.configure` takes, and `discard_mismatched`: see `TableHandle.configure`. Raises ParameterError if a
        value is out of its range, or caches are held that were made with another one; then nothing was changed.
        """
        return self._first.configure(
            sampler=sampler, discount=discount, discard_mismatched=discard_mismatched, **fields
        )

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
        check_bytes("credit", credit)
        check_bytes("held_bytes", held_bytes)
        if held_bytes is not None:
            self._tables.share_out(held_bytes)
            self._dispatcher.budget.set_limit(max(held_bytes, self._tables.byte_limit))
        self._dispatcher.grant(credit)

    def finish(self) -> None:
        """The run is over: `client.finished` becomes true everywhere, and `batches` ends."""
        self._dispatcher.finish()

    def begin_run(self, name: str) -> None:
        """Count this run from now on: from zero, or where it ended. The former one stays readable.

        Caches and models of the former run are dropped, parameters stay. Clients hear of it at once, say the rest about
        the former run, and go on in this one. A run that was finished stays finished: see `resume`. A name is printable
        text of 1 to 256 characters, or ParameterError is raised.
        """
        self._check_open()
        self._dispatcher.begin_run(name)
        if self._dispatcher.finished:
            _log.warning("%s: run %r is finished; resume() makes it go on", self.name, name)

    def resume(self) -> None:
        """Let a run go on that was declared over."""
        self._check_open()
        self._dispatcher.resume()

    # ---------------------------------------------------- what was counted; ParameterError: there is no such run

    @property
    def parameters(self) -> Parameters:
        """Everything that shapes sampling, as it is now."""
        return self._first.parameters

    @property
    def limits(self) -> Limits:
        """Timeouts and byte limits that it was made with."""
        return self._limits

    @property
    def epoch(self) -> int:
        """Greater at each start of this server."""
        return self._dispatcher.epoch

    @property
    def run(self) -> str:
        """Name of the experiment."""
        return self._dispatcher.run_name

    @property
    def finished(self) -> bool:
        """Whether the run was declared over, here or by a learner far away."""
        return self._dispatcher.finished

    @property
    def total_episodes(self) -> int:
        """Episodes that all clients of this run closed."""
        return self._dispatcher.ledger.episodes

    @property
    def total_steps(self) -> int:
        """Entries that all clients of this run recorded."""
        return self._dispatcher.ledger.steps

    @property
    def total_caches(self) -> int:
        """Caches that were accepted here; whoever has a batch finds its caches counted."""
        with self._dispatcher.lock:
            return self._dispatcher.ledger.accepted_caches

    # ----------------------------------------------------------------------------------------------- log lines

    @property
    def logfile(self) -> str | None:
        """Path of the log file; None before `set_logfile`."""
        return self._io.lines.path

    def set_logfile(self, logfile_path: str | Path, mode: str = "a") -> None:
        r"""Write the clients' lines to a file from now on: `'%s,%08x,%s\n' % (time, uuid, message)`.

        Lines are buffered, and flushed within a second and at close. The former file is closed. The mode is as of
        fopen: "a" goes on where the file ends, "w" begins with an empty one.
        """
        self._check_open()
        self._io.lines.open(logfile_path, mode)

    # ------------------------------------------------------------------------------------------------- snapshots

    def snapshot(self, path: str | Path) -> Snapshot:
        """Write all that the tables hold to a file, while everything goes on: a cache or episode at a time is looked
        up, and no more than one is kept in memory for it. Returns what was written.

        The file appears whole or not at all, and is on disk when this returns; a former one of that name stays until
        then. Each client, and each episode, is as it was when its turn came. If nothing comes in and is drawn
        meanwhile, it holds the whole state of drawing; else the counters of that, and promises no more (docs/state.md).

        Raises:
            OSError: it cannot be written.
            Closed, Refused: the server was closed, or another run began, meanwhile.
        """
        self._check_open()
        return self._archive.take(Path(path))

    def restore(
        self,
        paths: Sequence[str | Path],
        *,
        part: tuple[int, int] = (0, 1),
        configure: bool = False,
        skip_damaged: bool = False,
        once: bool = False,
    ) -> RestoreCounts:
        """Put what was written by `snapshot`, here or at other servers, into this server's tables, while it goes on.

        Caches come with what was drawn of them, episodes with priorities, ages and what learners said; clients with
        their sums and, in the run that it was, their totals. What is held here already is not held twice. A client that
        is known by this alone stays until its samples are used; with reuse_cache, as long as there is room.

        A table in which nothing ever was draws what the saved one would have drawn, if it gets one whole file (one
        path, no part), and the server was given no `seed`. Else it draws with the generator that it has.

        Args:
            paths: All files of the cluster that was saved, or those that are wanted.
            part: (rank, of): this server takes what belongs to it among so many that are given the same files: each
                client's caches, each episode, and each client's totals go to exactly one.
            configure: Whether tables take the files' parameters first. Else caches that were made with other values,
                such as another discount, are refused.
            skip_damaged: Take what is whole of a damaged file, and count the rest; else it is refused.
            once: Leave out files that were restored into this state folder before: for a server whose start restores.

        Raises:
            DataError: a file cannot be read, is damaged, or no snapshot; nothing was taken.
            SnapshotMismatch: a file has a table that this server lacks, of another schema, or of samples that were made
                with other values; nothing was taken.
            ParameterError: `part` is malformed, or a table's parameters cannot be taken; nothing was taken.
        """
        self._check_open()
        return self._archive.restore(paths, once=once, part=part, configure=configure, skip_damaged=skip_damaged)

    # ------------------------------------------------------------------------------------------------- its state

    def stats(self) -> ServerStats:
        """All figures at this moment."""
        tables = {name: handle.stats() for name, handle in self._handles.items()}
        counted, uptime = figures_of(self._dispatcher, tables, self._scalars), time.monotonic() - self._started
        return ServerStats(name=self.name, uptime=uptime, **counted, **self._io.figures())

    def liveness(self) -> list[str]:
        """What only a restart can mend, a sentence each: threads that died or are stuck. Empty while all is well."""
        return self._io.trouble()

    def readiness(self) -> list[str]:
        """Why this server should get no new clients just now, a sentence each; empty when it should."""
        return self._io.unready()

    @property
    def failure(self) -> Exception | None:
        """Why this server can save nothing any more and acknowledges nothing: it has to be started again. None where
        all is well.
        """
        return self._io.lost

    # ------------------------------------------------------------------------------------------------- its end

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
        self._io.begin_close()
        with self._closer(deadline) as is_mine:
            if is_mine:
                self._io.close(deadline)
                self._tables.reserved.release()

    def _is_over(self) -> bool:
        return self._closing.is_set() or self.finished

    def _check_open(self) -> None:
        if self._closing.is_set():
            raise Closed("this server")
        if self._io.lost is not None:
            raise self._io.lost

    def __repr__(self) -> str:
        return f"<memoire.Server {self.name!r} at {self.endpoint or '(no address)'}, run {self.run!r}>"
