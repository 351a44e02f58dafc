"""Classic server over `server.Server`: `ReplayMemoryServer`, and its `rem` with templates and parameters."""

from __future__ import annotations

import contextlib
import enum
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from memoire import Endpoints, Memory, Parameters, Process, Schema, Server, Table
from memoire.building import ClosingContext, StrictAttributes, renamed, whole
from memoire.errors import Closed, MemoireError, ParameterError

from .fields import OWN_NAMES, ReplayBatch, batch_of, defaults, seven_fields
from .memory import ReplayMemory, uuid_of


class Mode(enum.Enum):
    """Mode of a worker: Bind binds the endpoint, Conn connects to an endpoint that another party binds."""

    Bind = "Bind"
    Conn = "Conn"


Bind = Mode.Bind
Conn = Mode.Conn


class ServerMemory(ReplayMemory):
    """Memory `rem` of a server: templates and parameters for the server and all its clients, without entries."""

    __slots__ = ("_max_step", "_server")

    def __init__(self, server: Server, schema: Schema, max_step: int) -> None:
        self._set_up(schema, uuid_of(0), secrets.token_bytes(16))
        self._server, self._max_step = server, max_step

    @property
    def max_step(self) -> int:
        """Capacity of each client's memory in entries, unless `sync_sizes` sets another; 0 lets memoire choose."""
        return self._max_step

    @property
    def memory(self) -> Memory:
        """No memory: raises MemoireError, since a server holds only its clients' caches."""
        raise MemoireError(
            "a server's rem holds templates and parameters, no entries: add entries to a ReplayMemoryClient's rem, and "
            "draw with the server's get_batch()."
        )

    @property
    def parameters(self) -> Parameters:
        """Parameters of the server's draws, which clients take over."""
        return self._server.parameters

    def num_episode(self) -> int:
        """Return 0, since clients store the episodes; `total_episodes` counts them."""
        return 0

    def pub_bytes(self, topic: str, message: bytes | str) -> None:
        """Publish a message as `ReplayMemoryServer.pub_bytes` does."""
        self._server.publish(topic, message)

    def _configure(self, **changes: Any) -> None:
        with renamed(**OWN_NAMES):
            self._server.configure(**changes)

    def _counts(self) -> dict[str, Any]:
        return {"num_episode": 0, "num_entries": 0}


class ReplayMemoryServer(ClosingContext, StrictAttributes):
    """Learner's server: receives caches, counters and log lines of many clients, and returns batches.

    Example:
        state, action, number = np.zeros(4, np.float32), np.zeros((), np.int64), np.zeros((), np.float32)
        fields = (state, action, number, number, number, number, np.zeros(()))
        server = memoire.ReplayMemoryServer(*fields, 1000, "tcp://*:5562", 100)

    Args:
        state_buf, action_buf, reward_buf, prob_buf, value_buf, qvest_buf, info_buf: See `ReplayMemory`.
        max_step: Entries of a client's memory, unless `sync_sizes` sets another number; 0: as many as fit 256 MiB.
        pub_endpoint: Address for published messages; bound at once.
        n_caches: Caches that are held; a new one overwrites the oldest of the client with the most. With
            storage="episodes" it counts episodes.
        run: Name of the experiment to which totals and log lines belong.
        context: ZeroMQ context; None is the process's own. inproc:// addresses do not cross contexts.
        seed: Makes draws repeatable.
        options: Further arguments of `server.Server`, such as `cache_size`. Large observations need it here, since 256
            samples may fit no message, and `rem.cache_size` can be set only after the server is created.

    The `*_main` loops block; call each in a thread of its own. `close`, from any thread, ends them. All methods are
    safe to call from several threads.

    Raises:
        SchemaError, ParameterError: a template or number is wrong, or a cache of `cache_size` samples fits no message.
        EndpointError: pub_endpoint cannot be bound.
    """

    def __init__(
        self,
        state_buf: Any,
        action_buf: Any,
        reward_buf: Any,
        prob_buf: Any,
        value_buf: Any,
        qvest_buf: Any,
        info_buf: Any,
        max_step: int,
        pub_endpoint: str,
        n_caches: int,
        *,
        run: str | None = None,
        context: Any = None,
        seed: int | None = None,
        **options: Any,
    ) -> None:
        buffers = (state_buf, action_buf, reward_buf, prob_buf, value_buf, qvest_buf, info_buf)
        schema, limit = seven_fields(buffers), whole("n_caches", n_caches, 1)
        table = Table(schema, **{name: options[name] for name in ("storage",) if name in options})
        stores_episodes = "DrawsEpisodes" in table.kind.offers
        self._server: Server = Server(
            Endpoints(None, publish=pub_endpoint),
            schema,
            parameters=defaults(schema).replace(max_episode=limit if stores_episodes else 0),
            client_capacity=whole("max_step", max_step, 0),
            cache_limit=0 if stores_episodes else limit,
            run=run,
            process=Process(context=context),
            seed=seed,
            **options,
        )
        self._rem = ServerMemory(self._server, schema, int(max_step))
        self._guard()

    @property
    def rem(self) -> ReplayMemory:
        """Templates and parameters; changes reach a client at its next `update_counter` or `sync_sizes`."""
        return self._rem

    @property
    def server(self) -> Server:
        """Underlying server, for functions that the classic API lacks."""
        return self._server

    @property
    def logfile(self) -> str | None:
        """Path of the log file; None before `set_logfile`."""
        return self._server.logfile

    @property
    def total_episodes(self) -> int:
        """Number of episodes that clients of this run have closed."""
        return self._server.total_episodes

    @property
    def total_caches(self) -> int:
        """Number of caches that the server accepted."""
        return self._server.total_caches

    @property
    def total_steps(self) -> int:
        """Number of entries in the episodes of `total_episodes`."""
        return self._server.total_steps

    def set_logfile(self, logfile_path: str | os.PathLike[str], mode: str) -> None:
        r"""Write clients' log lines to a file from now on: '%s,%08x,%s\n' % (time received, uuid, message).

        The time is ISO 8601 with offset; line breaks in messages are escaped. Lines are buffered, and flushed on a
        timer and at close.

        Args:
            logfile_path: Path in an existing folder.
            mode: "w" begins a new file, "a" appends, as in `man fopen`.

        Raises:
            ParameterError: mode is neither "w" nor "a".
            OSError: the file cannot be opened; the former log file stays.
        """
        self._server.set_logfile(Path(logfile_path), mode)

    def rep_worker_main(self, endpoint: str, mode: Mode | str) -> None:
        """Answer clients' requests (sizes, counters, log lines) on an endpoint; returns when the server is closed.

        Raises:
            ParameterError: mode is not 'Bind' or 'Conn'.
            EndpointError: the endpoint cannot be bound or connected to.
        """
        bind = binds(mode)
        with contextlib.suppress(Closed):  # the server may be closed before this thread begins
            self._server.add_request_worker(endpoint, bind=bind)
            self._server.wait_closed()

    def pull_worker_main(self, endpoint: str, mode: Mode | str) -> None:
        """Receive clients' caches on an endpoint; returns when the server is closed. Several loops may run at once.

        Raises:
            ParameterError: mode is not 'Bind' or 'Conn'.
            EndpointError: the endpoint cannot be bound or connected to.
        """
        bind = binds(mode)
        with contextlib.suppress(Closed):  # the server may be closed before this thread begins
            self._server.add_pull_worker(endpoint, bind=bind)
            self._server.wait_closed()

    def rep_proxy_main(self, front_ep: str, back_ep: str) -> None:
        """Share requests to `front_ep` among workers at `back_ep`. Binds the two addresses; returns on `close`."""
        with contextlib.suppress(Closed):
            self._server.run_request_proxy(front_ep, back_ep)

    def pull_proxy_main(self, front_ep: str, back_ep: str) -> None:
        """Forward caches from `front_ep` to workers at `back_ep`. Binds the two addresses; returns on `close`."""
        with contextlib.suppress(Closed):
            self._server.run_pull_proxy(front_ep, back_ep)

    def get_batch(
        self, batch_size: int, *, timeout: float | None = None, out: ReplayBatch | Sequence[Any] | None = None
    ) -> ReplayBatch:
        """Draw a batch from the held caches, as if from all clients' memories at once; takes none if they are too few.

        Args:
            batch_size: Number of samples, at least 1.
            timeout: Seconds to wait for enough samples; None does not wait.
            out: An earlier batch, or (prev, next, weight); its arrays are filled and returned.

        Returns:
            (prev, next, weight), with attributes: see `ReplayBatch`.

        Raises:
            NotEnoughSamples: (a RuntimeError) there are fewer samples; says how many, and takes none.
            Closed: the server was closed, perhaps while this call waited.
        """
        samples = self._server.get_batch(whole("batch_size", batch_size, 1), timeout=timeout)
        return batch_of(self._rem.schema, self._server.parameters, samples.gathered, samples.importance, out)

    def pub_bytes(self, topic: str, message: bytes | str) -> None:
        """Publish a message of any size. `sub_bytes(topic)` returns it in its own type; late ones get the newest."""
        self._server.publish(topic, message)

    def close(self, timeout: float | None = None) -> None:
        """End all loops, flush the log and release addresses, within `timeout` seconds. Further calls do nothing."""
        self._server.close(timeout)


def binds(mode: Mode | str) -> bool:
    """Return True if the mode is Bind. Raises ParameterError for an unknown mode."""
    try:
        return Mode(mode) is Mode.Bind
    except ValueError as error:
        raise ParameterError(
            "mode", mode, "'Bind' or 'Conn', in this spelling (or memoire.Bind, memoire.Conn)"
        ) from error
