"""Server: receives caches and requests on its own threads, draws batches, publishes models.

    actors ──requests──▶ one thread: Dispatcher        ──▶ replies, notices
           ──caches────▶ one thread per address  ──▶ Pool ◀── get_batch, in the learner's own thread
             episodes                                EpisodePool

The server runs inside of the learner's process, or alone with learners that read over the network
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
from memoire.net.addresses import check, derived_addresses
from memoire.net.sockets import shared_context
from memoire.net.thread import UNDO_TIMEOUT, Node, close_at_exit
from memoire.replay.batch import Batch, PriorityUpdate
from memoire.replay.episodes import EpisodeBatch
from memoire.replay.mixing import MixedBatch
from memoire.replay.parameters import NAMES, Parameters
from memoire.replay.sampling import Sampler
from memoire.replay.schema import Schema
from memoire.security.keys import Keys, KeysLike
from memoire.tables.table import Table, table_settings

from .build import ServerOptions, check_bytes
from .io import ServerThreads
from .io_snapshots import Snapshot
from .settings import Endpoints, Process, State
from .stats import Queries, ServerStats, figures_of
from .table_handle import TableHandle, mixed_batches

_log = logging.getLogger(__name__)


class Server(Queries, Node):
    """Server of a replay memory: holds the newest caches or episodes of all clients, draws batches, publishes models.
    The server also counts clients' totals and stores their log lines.

    Example:
        with memoire.Server("tcp://*:5560", schema, run="ant-7") as server:
            for batch in server.batches(256):
                batch.update_priorities(train(batch))
            server.publish("policy", weights)

    Args:
        endpoint: Address for requests, such as "tcp://*:5560", "ipc:///run/memoire" or "inproc://memoire". Caches use
            the next port and notices the one after it (or .push and .pub), unless `Endpoints` names other addresses.
            Port 0 binds free ports. None binds no address: the caller adds workers later.
        schema: Columns of an entry, a `Schema` or a mapping. The server then has one table, with the settings `table`.
        tables: Several tables, by name, instead of `schema`. The first is the default of calls without a table's name.
        run: Name of the experiment that totals, log lines and models belong to. None: the last run of the state
            folder, or else "default".
        name: Name of this server, the same after a restart; by default its host and port.
        state: Folder of this server's files, or a `State` with further settings. None keeps everything in memory.
        keys: Keys folder of this process (or of a cluster): clients over tcp:// need a key that is in the folder.
            None takes $MEMOIRE_KEYS, and without it accepts every client. See docs/operations.md.
        limits: Timeouts and byte limits. More than the memory limit of the process's container is refused.
        seed: Seed of the draws; None takes entropy from the system. With a state folder, each start draws other
            samples than the starts before.
        inference: Addresses of inference nodes that compute the policy for this server's actors; WELCOME contains
            them. The host "*" stands for the host at which a client reaches this server.
        process: Objects shared with the process: see `Process`.
        table: Settings of the single table, as of `Table`, such as sampler=, multi_step=3 or min_size=1000.

    With a state folder, a server continues the run that it counted last, with the parameters that were configured last,
    unless the caller passes another run or other parameters than at the last start.

    Raises:
        StateError: the folder cannot be used, or not as it is; the error says what to do.
        SnapshotMismatch: the saved content of a table was made with other values; the error contains both.
        DataError: the file with the tables' content is damaged.
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
        keys: KeysLike = None,
        limits: Limits | None = None,
        seed: int | None = None,
        inference: Sequence[str] = (),
        process: Process | None = None,
        **table: Any,
    ) -> None:
        at, shares = Endpoints.from_setting(endpoint), process or Process()
        if at.request is not None:
            derived_addresses(at.request)  # raises for a malformed address before any resource is opened
        for address in () if isinstance(inference, str) else inference:
            check(address, "bind")  # the host "*" stands for the host at which clients reach this server
        if shares.tune:
            tuning.tune()
        options = ServerOptions(
            endpoint=at, schema=schema, tables=tables, run=run, name=name, state=State.from_setting(state), keys=keys,
            limits=limits or Limits(), seed=seed, inference=inference, table=table,
            process=replace(shares, context=shares.context or shared_context()),
        )  # fmt: skip
        self._limits, self._pid, self._started = options.limits, os.getpid(), time.monotonic()
        self._closing, self._close_lock = threading.Event(), threading.Lock()
        self._scalars: dict[str, float] = {}
        self._io = io = ServerThreads(options, self._closing, owner=self)
        self.name, self._gate, self._store, self._dispatcher = io.name, io.gate, io.store, io.dispatcher
        self._tables, self._archive = io.dispatcher.tables, io.archive
        facts = self._check_open, self._is_over, lambda: self.endpoint or self.name
        self._handles = {table.name: TableHandle(self._dispatcher, table, *facts) for table in self._tables}
        self._dispatcher.show_inference(options.inference)
        self._first = self._handles[self._tables.first.name]
        try:
            io.bind_addresses()
            io.load()
        except BaseException:
            self.close(UNDO_TIMEOUT)
            raise
        io.start()
        close_at_exit(self)

    # ---------------------------------------------------------------------------------------------- addresses

    @property
    def endpoint(self) -> str:
        """Bound address for requests, to which clients connect ("*" is any address of this machine)."""
        return self._io.addresses.endpoints.request

    @property
    def push_endpoint(self) -> str:
        """Bound address for caches and episodes."""
        return self._io.addresses.endpoints.push

    @property
    def pub_endpoint(self) -> str:
        """Bound address for notices of models."""
        return self._io.addresses.endpoints.publish

    @property
    def keys(self) -> Keys | None:
        """Keys of this process; None if the server accepts every client."""
        return self._gate.keys

    def show_pages(self, address: str) -> None:
        """Advertise the address of this server's pages, "http://HOST:PORT", to clients in WELCOME."""
        self._dispatcher.show_pages(arguments.name("address", address))

    def add_request_worker(self, endpoint: str, *, bind: bool = True) -> str:
        """Answer requests at a further address; return the bound address.

        Args:
            bind: False connects to a proxy's back instead.

        Raises:
            EndpointError: the address is in use or malformed.
        """
        return self._add_worker(self._io.add_request_worker, endpoint, bind)

    def add_pull_worker(self, endpoint: str, *, bind: bool = True) -> str:
        """Receive caches at a further address, on a thread of its own; return the bound address.

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
        """Distribute requests of the front address among the workers at the back address; blocks until `close`."""
        self._check_open()
        self._io.proxies.run_requests(front, back)

    def run_pull_proxy(self, front: str, back: str) -> None:
        """Distribute caches of the front address among the workers at the back address; blocks until `close`."""
        self._check_open()
        self._io.proxies.run_pushes(front, back)

    # ------------------------------------------------------------------------------------------------- batches

    @property
    def schema(self) -> Schema:
        """Columns of an entry of the first table."""
        return self._first.schema

    @property
    def tables(self) -> tuple[str, ...]:
        """Names of the tables; methods without a table's name use the first."""
        return self._tables.names

    def table(self, name: str) -> TableHandle:
        """Return the handle of a table. Raises ParameterError if the name is unknown."""
        return self._handles[self._tables[name].name]

    @checked_names()
    def get_batch(
        self, batch_size: int, timeout: float | None = None, *, out: Mapping[str, Any] | Batch | None = None
    ) -> Batch:
        """Draw a batch from the held caches, as if from all clients' memories at once.

        All or nothing: a batch that cannot be filled takes no sample. docs/sampling.md explains the weights of clients,
        and `TableHandle.get_batch` the argument `out` and the errors.

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
        """Yield batches until `finish` or `close`; each waits at most `timeout` seconds for its samples.

        Args:
            batch_size: Samples of the first table; or of several tables, mixed: `{"online": 192, "demo": 64}`.
            ahead: Number of batches that a thread of its own draws ahead: see `TableHandle.batches`.
        """
        if isinstance(batch_size, Mapping):
            return mixed_batches(self.table, batch_size, timeout, ahead, self._is_over, self.endpoint or self.name)
        return self._first.batches(batch_size, timeout, ahead=ahead)

    @checked_names()
    def sample_episodes(
        self, count: int, timeout: float | None = None, *, group: str | None = None, group_size: int | None = None
    ) -> EpisodeBatch:
        """Draw whole episodes of the first table, which must store episodes: see `TableHandle.sample_episodes`."""
        return self._first.sample_episodes(count, timeout, group=group, group_size=group_size)

    @checked_names()
    def update_priorities(self, ids: Any, td_errors: Any) -> PriorityUpdate:
        """Set priorities of entries of this server, and send TD errors of other entries to the clients that own them.
        Returns at once. `ids` are sample ids [B], `td_errors` finite numbers [B]; see `TableHandle.update_priorities`.
        """
        self._check_open()
        return self._dispatcher.apply_td_errors(ids, td_errors)

    # ------------------------------------------------------------------------------------- models and settings

    def publish(self, topic: str, content: bytes | bytearray | memoryview | str, *, version: int = 0) -> int:
        """Publish the newest model of a topic to every client; return its version. Callable from any thread.

        Clients get the content in the type in which it was published; later clients get the newest model.

        Args:
            version: Version above all former ones; 0 is the next one. For a learner that continues at a new server.

        Raises:
            StaleVersion: the topic has this version or a newer one.
        """
        self._check_open()
        return self._dispatcher.publish(topic, content, whole("version", version, 0)).version

    def model(self, topic: str) -> Model | None:
        """Return the newest model of a topic from any publisher; with a state folder, the newest saved model."""
        return self._dispatcher.models.newest(topic)

    def scalars(self, values: Mapping[str, float]) -> None:
        """Set figures of this learner for the dashboard, by name, such as a loss: finite numbers, at most 64 names."""
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
        """Change the first table's parameters at the server and at every client, after its next message. Takes the
        arguments of `Buffer.configure`, and `discard_mismatched`: see `TableHandle.configure`. Data stays.

        Raises:
            ParameterError: a value is out of its range, or held caches were made with another; nothing was changed.
        """
        return self._first.configure(
            sampler=sampler, discount=discount, discard_mismatched=discard_mismatched, **fields
        )

    def configure_limits(self, *, credit: int | None = None, held_bytes: int | None = None) -> None:
        """Change byte budgets while clients are connected; NEWS tells the clients at once.

        Args:
            credit: Maximum bytes that each client may have in flight; less if its share of the table's limit is less.
            held_bytes: Maximum bytes of all tables together. Tables with a limit of their own keep it, the other tables
                share the rest. Excess data is overwritten now. Stored episodes move to a memory of another size, and
                ids drawn before become stale.

        Raises:
            ParameterError: a value is not a whole number of at least 1, or a table would have no bytes; nothing
                was changed.
        """
        self._check_open()
        check_bytes("credit", credit)
        check_bytes("held_bytes", held_bytes)
        if held_bytes is not None:
            self._tables.limit_total_bytes(held_bytes)
            self._dispatcher.budget.set_limit(max(held_bytes, self._tables.byte_limit))
        self._dispatcher.set_client_byte_limit(credit)

    def finish(self) -> None:
        """Finish the run: `client.finished` becomes true at every client, and `batches` ends."""
        self._dispatcher.finish()

    def begin_run(self, name: str) -> None:
        """Begin a run, or continue a former run of this name. Totals and log lines of other runs stay readable.

        Caches and models of the former run are dropped; parameters stay. Clients get NEWS at once, report the rest of
        the former run, and continue in the new run. A finished run stays finished: see `resume`. Raises ParameterError
        unless the name is printable text of 1 to 256 characters.
        """
        self._check_open()
        self._dispatcher.begin_run(name)
        if self._dispatcher.finished:
            _log.warning("%s: run %r is finished; call resume() to continue it", self.name, name)

    def resume(self) -> None:
        """Continue a run that was finished."""
        self._check_open()
        self._dispatcher.resume()

    # ------------------------------------------------------------------------------------------------- counts

    @property
    def parameters(self) -> Parameters:
        """Present parameters of the first table's sampling."""
        return self._first.parameters

    @property
    def limits(self) -> Limits:
        """Timeouts and byte limits of the server."""
        return self._limits

    @property
    def epoch(self) -> int:
        """Number of this start of the server, greater than the numbers of former starts."""
        return self._dispatcher.epoch

    @property
    def run(self) -> str:
        """Name of the present run."""
        return self._dispatcher.run_name

    @property
    def finished(self) -> bool:
        """True if the run was finished, by this process or by a remote learner."""
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
        """Caches that this server accepted, including the caches of all batches drawn so far."""
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
        fopen: "a" appends to the file, "w" empties it first.
        """
        self._check_open()
        self._io.lines.open(logfile_path, mode)

    # ------------------------------------------------------------------------------------------------- snapshots

    def snapshot(self, path: str | Path) -> Snapshot:
        """Write the tables' content to a file while the server runs; return the counts of what was written.

        Memory for the call: one cache or episode at a time. The file is on disk and complete when the call returns; a
        former file of that name stays until then. Each client and episode is saved as it is at its turn. If nothing is
        pushed or drawn meanwhile, the file has the whole state of draws, else only their counters (docs/state.md).

        Raises:
            OSError: the file cannot be written.
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
        """Restore files of `snapshot`, of any servers, into this server's tables, while the server runs.

        Caches come with their drawn samples marked, episodes with priorities, ages and learners' feedback, clients with
        their sums and, in their run, their totals. Data that the server already holds is not held twice. A client that
        only the files contain stays until its samples are used; with reuse_cache, as long as there is room.

        A table that never held data draws what the saved table would have drawn, if it gets one whole file (one path,
        no part), and the server has no `seed`. Any other table draws with its own generator.

        Args:
            paths: All files of the saved cluster, or a selection.
            part: (rank, of): this server takes its part among `of` servers that restore the same files. Each client's
                caches, each episode, and each client's totals go to exactly one server.
            configure: True sets the tables' parameters from the files first. False refuses caches that were made with
                other values, such as another discount.
            skip_damaged: True restores the undamaged content of a damaged file and counts the rest; False refuses it.
            once: True skips files that were restored into this state folder before, for a server that restores at
                each start.

        Raises:
            DataError: a file cannot be read, is damaged, or is not a snapshot; nothing was restored.
            SnapshotMismatch: a file has a table that is missing here, that has another schema, or whose samples were
                made with other values; nothing was restored.
            ParameterError: `part` is malformed, or a table's parameters cannot be set; nothing was restored.
        """
        self._check_open()
        return self._archive.restore(paths, once=once, part=part, configure=configure, skip_damaged=skip_damaged)

    # ------------------------------------------------------------------------------------------------- server's state

    def stats(self) -> ServerStats:
        """Return all figures of the server at this moment."""
        tables = {name: handle.stats() for name, handle in self._handles.items()}
        counted, uptime = figures_of(self._dispatcher, tables, self._scalars), time.monotonic() - self._started
        return ServerStats(name=self.name, uptime=uptime, **counted, **self._io.figures())

    def liveness(self) -> list[str]:
        """Return faults that only a restart can repair, a sentence each: dead or stuck threads, a lost disk."""
        return self._io.problem()

    def readiness(self) -> list[str]:
        """Return reasons why this server should get no new clients now, a sentence each; empty if it is ready."""
        return self._io.unready_reasons()

    @property
    def failure(self) -> Exception | None:
        """Error after which the server saves and acknowledges nothing until its restart; None if there was none."""
        return self._io.fatal_error

    # ------------------------------------------------------------------------------------------------- the server's end

    @property
    def closed(self) -> bool:
        """True if `close` was called."""
        return self._closing.is_set()

    def wait_closed(self, timeout: float | None = None) -> bool:
        """Wait until the server is closed; return False if `timeout` seconds pass first."""
        return self._closing.wait(seconds(timeout))

    def close(self, timeout: float | None = None) -> None:
        """End all threads and loops, and close every socket within `timeout` seconds. Waiting calls raise `Closed`.

        After `finish` it waits, within that time, until recently heard clients know of the end: an actor that loops
        until `client.finished` would otherwise never end. May be called again, from any thread. Batches stay valid.
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
        if self._io.fatal_error is not None:
            raise self._io.fatal_error

    def __repr__(self) -> str:
        return f"<memoire.Server {self.name!r} at {self.endpoint or '(no address)'}, run {self.run!r}>"
