"""Reader: a learner's batches from any number of servers, drawn as if from all clients' memories at once.

    each server reports its clients, their weights, and the number of samples that it reserves for this reader
    the reader plans    the number of samples of each client (draw.plan: the rule of a single server)
    each server sends   those samples, and a new report
    the reader weighs   the samples together and shuffles (draw.finish)

Requests are numbered and a server keeps its reply to the newest: a lost request is sent again and takes no samples.
A server that does not answer is left out until it does: after a batch has waited `LEFT_OUT_TIMEOUT` for the server, or
at once when its connection ends. `stats().away` names the server, while a batch's `left_out` only counts clients of
servers that answered. Behind a proxy the reader reaches every server through the proxy, by the home in the header; that
works if only the proxy has an address, for example a Kubernetes service. Several servers or proxies may be given; a
server that two addresses lead to is asked once.

Reader statistics: figures of a reader at one moment. Pure: no lock, no socket, no clock.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import random
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, overload

import numpy as np
from numpy.typing import NDArray

from memoire import arguments
from memoire.arguments import checked_names, process_name, table_name, whole
from memoire.errors import ParameterError
from memoire.figures import FAULTS, REFUSED, counter, gauge, within
from memoire.limits import Limits
from memoire.models.model import check_topic, make
from memoire.net.sockets import Context
from memoire.replay.batch import Batch, PriorityUpdate
from memoire.replay.conversion import td_errors_for
from memoire.replay.mixing import MixedBatch, Mixer, batches_until_over, sizes_of
from memoire.replay.parameters import Parameters
from memoire.replay.rollouts import Fragment, Rollouts
from memoire.replay.schema import Schema
from memoire.security.keys import Keys, KeysLike
from memoire.tables.base import DeliversOnce, Release, TakeRequest
from memoire.tables.draws import MAX_BATCH
from memoire.tables.inspection import Freshness, FreshnessMonitor
from memoire.wire import messages
from memoire.wire.compression import codecs

from .admin import ClusterOrders
from .calls import RemoteNode
from .rounds import BatchQueue, checked_partition

SERVERS: Final = gauge(
    "reader_servers", "Servers", "Servers by state: answering, or away and excluded from draws.", label="state"
)
READER_FEEDBACK: Final = counter(
    "reader_feedback_samples", "Priorities", "Priorities by outcome: given to servers, or lost there.", label="outcome"
)


@dataclass(frozen=True, slots=True)
class ReaderStats:
    """Figures of one reader at one moment."""

    # fmt: off
    reader: str
    """Id of the reader in hex."""
    name: str
    """Name given by a person or Kubernetes; "" if there is none."""
    servers: Annotated[tuple[str, ...], SERVERS("answering")]
    """Names of the servers that answer."""
    away: Annotated[tuple[str, ...], SERVERS("away")]
    """Names of servers that do not answer, and are left out."""
    batches: Annotated[int, counter("reader_batches", "Batches", "Batches that were handed out.")]
    samples: Annotated[int, counter("reader_samples", "Samples drawn", "Samples that were handed out.")]
    batch_bytes: Annotated[int, counter("reader_batch_bytes", "Batch bytes", "Bytes of the arrays of these samples; "
        "its rate is the bandwidth at which a learner takes batches.")]
    rollouts_taken: int
    """Entries of rollouts that calls took."""
    rollouts_kept: int
    """Entries of rollouts that arrived and are kept for the next call."""
    rollouts_stale: int
    """Entries of rollouts that arrived and were skipped, since their model was too old by then."""
    short: Annotated[int, counter("reader_short_samples", "Short", "Requested samples that a server no longer had.")]
    waited: Annotated[float, counter("reader_wait_seconds", "Waited", "Seconds that calls waited for a batch; its rate "
        "is the learner's waiting share.")]
    waits_for: str
    """Reason why the next batch waits for entries; "" if it does not wait."""
    prefetched: Annotated[int, gauge("reader_prefetched_batches", "Prefetched", "Batches that wait to be taken.")]
    freshness: Annotated[Freshness | None, within("reader_")]
    """Freshness of a recent batch; None before the first batch."""
    scalars: dict[str, float]
    """Figures of the learner, set by `scalars`."""
    resends: Annotated[int, counter("reader_resends", "Resends", "Requests that were sent again.")]
    refused: Annotated[dict[str, int], REFUSED]
    feedback_given: Annotated[int, READER_FEEDBACK("given")]
    feedback_lost: Annotated[int, READER_FEEDBACK("lost")]
    parameters_version: int
    finished: bool
    faults: Annotated[int, FAULTS]
    # fmt: on


class DeliveredBatches(FreshnessMonitor):
    """Counts of batches that calls took, and of the waited time. The owner locks."""

    def __init__(self) -> None:
        super().__init__()
        self.batches = 0
        self.nbytes = 0  # bytes of the samples' arrays
        self.waited = 0.0  # seconds
        self.feedback = 0  # samples with reported TD errors

    def figures(self, samples: int) -> dict[str, float]:
        """Return the figures that servers show for this reader, which has drawn `samples`."""
        figures = {} if self.newest is None else dataclasses.asdict(self.newest)
        figures |= {"batches": self.batches, "samples": samples, "waited": self.waited}
        return {name: float(value) for name, value in figures.items() if isinstance(value, int | float)}


_log = logging.getLogger(__name__)

BATCHES_AHEAD = 3
"""Default number of batches ahead, for a learner that does not wait."""


class Reader(ClusterOrders):
    """Reader of batches from all servers behind its addresses, drawn ahead on a thread of its own. Thread-safe.

    Example:
        with memoire.Reader(["tcp://proxy:5560"]) as reader:
            for batch in reader.batches(256):
                batch.update_priorities(train(batch))

    Args:
        urls: Addresses of servers, proxies or both.
        table: Name of the table to draw from; "" is the servers' first table.
        name: Name shown instead of the reader's id, as in `connect`.
        timeout: Seconds to wait for the first answer; None does not wait: schema and parameters come later.
        seed: Seed of counts and order; the samples themselves are drawn by the clients.
        ahead: Batches that are drawn before they are requested. None: 3, and up to 16 batches and 64 MiB for a learner
            that waits; several batches then share a round.
        partition: (i, n): this is learner i, from 0, of n learners that divide the clients. Each draws from about
            every n-th client, and importance corrects for those clients alone. None draws from all clients; two
            learners never get the same sample of a cache either. Episodes at a server are one memory, which a
            partition does not divide.
        context: ZeroMQ context; None is the one for the process.
        keys: Keys folder of this process (or of a cluster), for tcp:// addresses; None takes $MEMOIRE_KEYS, and
            without it no keys. See docs/operations.md.
        tune_process: Tune this process for nodes at the first node that allows it: see docs/operations.md.

    Raises:
        MemoireTimeout: no server answered.
        AuthError: no server accepts this process's key.
        KeyFileError: the keys cannot be used.
        EndpointError: an address is malformed.
        Refused: the servers have no table of this name.
    """

    CALLED = "this reader"
    ROLE = "learner"
    CLOSED_AT_EXIT = 0

    @checked_names()
    def __init__(
        self,
        urls: Sequence[str],
        *,
        table: str = "",
        name: str | None = None,
        timeout: float | None = 10.0,
        seed: int | None = None,
        ahead: int | None = None,
        partition: tuple[int, int] | None = None,
        context: Context | None = None,
        limits: Limits | None = None,
        keys: KeysLike = None,
        tune_process: bool = True,
    ) -> None:
        if ahead is not None and ahead < 1:
            raise ParameterError("ahead", ahead, "at least 1")
        self.reader_id = secrets.token_bytes(16)
        self.name = process_name(name)  # name that people see, or ""
        self.program: Callable[[], Any] | None = None
        """Function that returns the state of the surrounding program; set by a worker or trainer of `memoire.rl`."""
        self._asked_table, self._keys = table_name(table), Keys.from_setting(keys, "learner")
        self._options: dict[str, Any] = {"seed": seed, "ahead": ahead, "partition": partition, "context": context}
        self._options |= {"name": self.name, "limits": limits, "keys": self._keys, "tune_process": tune_process}
        self._partners: dict[str, Reader] = {}  # readers of other tables in mixed batches; under the monitor's lock
        self._scalars: dict[str, float] = {}
        self._delivered = DeliveredBatches()
        most_bytes = (limits or Limits()).message_bytes
        self._prefetch = BatchQueue(ahead or BATCHES_AHEAD, may_grow=ahead is None, most_bytes=most_bytes)
        self._connect(
            urls,
            self.reader_id,
            limits=limits,
            tune_process=tune_process,
            hello=self._hello,
            prefetch=self._prefetch,
            partition=(0, 1) if partition is None else checked_partition(partition),
            rng=random.Random(seed),
            keys=self._keys,
            context=context,
        )
        self._once = self._thread.sides.side_with_capability(DeliversOnce)
        self._begin(
            None
            if timeout is None
            else lambda: self._thread.wait_until(self._thread.is_discovery_over, self._seconds(timeout), "welcome")
        )

    # ------------------------------------------------------------------------------------------------- batches

    @property
    def schema(self) -> Schema:
        """Columns of an entry, as reported by the servers."""
        assert self._directory.terms is not None
        return self._directory.terms.schema

    @property
    def table(self) -> str:
        """Name of the table to draw from."""
        return "" if self._directory.terms is None else self._directory.terms.table

    @property
    def run(self) -> str:
        """Name of the run that a server counted at the last HELLO."""
        return self._directory.run_name

    @property
    def parameters(self) -> Parameters:
        """Parameters of sampling, as last reported by the servers."""
        return Parameters() if self._directory.terms is None else self._directory.terms.parameters

    @property
    def finished(self) -> bool:
        """True if the run was finished."""
        return self._directory.is_finished

    @property
    def servers(self) -> tuple[str, ...]:
        """Names of the known servers."""
        return tuple(self._directory.servers)

    @checked_names()
    def get_batch(
        self, batch_size: int, timeout: float = 30.0, *, out: Mapping[str, Any] | Batch | None = None
    ) -> Batch:
        """Return the next batch; draw batches of this size ahead from now on.

        Args:
            batch_size: Samples, at least 1.
            timeout: Maximum seconds to wait.
            out: Arrays of the caller (by name, or an earlier batch) to fill, instead of new ones.

        Raises:
            ParameterError: an array of `out` does not fit; the next call returns the batch.
            NotEnoughSamples: the servers had too few for `timeout` seconds.
            Refused: (code "too_large") the batch is larger than this reader accepts (`limits.message_bytes`).
            MemoireTimeout: no server answered in that time.
            Closed: the reader was closed, also from another thread while waiting.
        """
        batch_size = whole("batch_size", batch_size, 1, MAX_BATCH)
        patience, began = self._seconds(timeout), time.monotonic()
        with self._monitor.condition:
            try:
                drawn = self._thread.await_batch(batch_size, patience)
            finally:
                self._delivered.waited += time.monotonic() - began
            batch = drawn.batch(self.schema, self.update_priorities)
            if out is not None:
                batch.copy_into(out)
            self._prefetch.take()  # taken last: an error of `copy_into` keeps the batch
            self._delivered.batches += 1
            self._delivered.nbytes += drawn.nbytes
        if self._prefetch.has_room:
            self._thread.worker.wake()
        if self._delivered.is_due(time.monotonic()):
            newest = self._thread.newest_model
            self._delivered.record_batch(drawn.gathered, drawn.importance, drawn.left_out, newest)
        return batch

    @checked_names()
    def take(
        self,
        steps: int,
        timeout: float = 30.0,
        *,
        exact: bool = True,
        min_clients: int = 0,
        release: Release = "now",
    ) -> Rollouts:
        """Take the oldest entries of a table that stores rollouts, from all its servers, once for all learners.

        All or nothing: if too few entries come, they are kept for the next call. Each server contributes in proportion
        to its entries, in order of arrival. Entries whose model is too old (`max_model_lag`) are skipped and counted.

        Args:
            steps: Entries, at least 1 and at most the capacity of all servers.
            timeout: Seconds to wait for the entries.
            exact: True splits fragments to return exactly `steps` entries; the next take begins with the rest. False
                takes each server's last fragment whole.
            min_clients: Number of clients of which the servers must hold entries before any is taken.
            release: Time at which actors may record as many entries again: "now", or "publish" for the next
                published model, so that actors make no step with a model whose entries were already taken.

        Returns:
            Rollouts whose arrays belong to the caller; see `Rollouts` for shapes.

        Raises:
            ParameterError: an argument is out of its range, or this table stores no rollouts.
            NotEnoughSamples: too few entries came within `timeout`; the error says what was missing.
            Refused: (code "too_large") the oldest fragment is larger than this reader accepts (`limits.message_bytes`).
            MemoireTimeout: no server answered in that time.
            Closed: the reader was closed, also from another thread while waiting.
        """
        wanted = TakeRequest(steps, exact, min_clients, release)
        patience, began, taken = self._seconds(timeout), time.monotonic(), list[Fragment]()
        try:
            taken = self._thread.sides.take(self._once, wanted, patience)
        finally:
            with self._monitor.condition:
                self._delivered.waited += time.monotonic() - began
                self._delivered.batches += bool(taken)
        rollouts = Rollouts.from_fragments(self.schema, taken, time.monotonic(), self.parameters.discount)
        if self._delivered.is_due(time.monotonic()):
            self._delivered.record_rollouts(rollouts.age, rollouts.model_version, self._thread.newest_model)
        return rollouts

    @overload
    def batches(self, batch_size: int, timeout: float = ...) -> Iterator[Batch]: ...
    @overload
    def batches(self, batch_size: Mapping[str, int], timeout: float = ...) -> Iterator[MixedBatch]: ...
    @overload
    def batches(
        self, batch_size: int | Mapping[str, int], timeout: float = ...
    ) -> Iterator[Batch] | Iterator[MixedBatch]: ...
    @checked_names()
    def batches(
        self, batch_size: int | Mapping[str, int], timeout: float = 30.0
    ) -> Iterator[Batch] | Iterator[MixedBatch]:
        """Yield batches until the run is over or `close`; each waits at most `timeout` seconds.

        Args:
            batch_size: Samples of this reader's table; or of several tables, mixed: `{"online": 192, "demo": 64}`.

        Raises:
            MemoireTimeout: too few samples came within `timeout`.
            Refused: the servers have no table of this name.
        """
        where, advice = ", ".join(self.urls), "Are actors running?"
        if not isinstance(batch_size, Mapping):
            what, draw = f"batch of {batch_size}", functools.partial(self.get_batch, batch_size)
            return batches_until_over(draw, self._is_over, what, timeout, where, lambda: advice)
        sizes = sizes_of(batch_size)
        mixer = Mixer(sizes, {name: self._of_table(name).get_batch for name in sizes})
        lacking = lambda: f"Table {mixer.lacking!r} has too few samples. {advice}"  # noqa: E731
        return batches_until_over(mixer.get, self._is_over, f"batch of {sizes}", timeout, where, lacking)

    def _of_table(self, name: str) -> Reader:
        """Return the reader of a table: this one, or a partner, which is closed with this one."""
        with self._monitor.condition:
            self._monitor.check_open()
            former = self if name in (self.table, self._asked_table) else self._partners.get(name)
            if former is not None and former._monitor.failed is None:
                return former
            if former is not None:
                former.close(0.0)  # the failed reader's table may exist now
            self._partners[name] = Reader(self.urls, table=name, timeout=None, **self._options)
            return self._partners[name]

    def _is_over(self) -> bool:
        return self.closed or self.finished

    @checked_names()
    def update_priorities(self, ids: NDArray[Any], td_errors: Any) -> PriorityUpdate:
        """Queue TD errors [B] for the owners of samples with these ids [B]; return at once, with all as `sent`."""
        self._monitor.check_open()
        errors = td_errors_for(np.asarray(ids), td_errors)
        if len(errors):
            rows = np.array(ids)
            self._delivered.feedback += len(errors)
            self._thread.worker.post(lambda: self._thread.give_feedback(rows, errors))
        return PriorityUpdate(sent=len(errors))

    # ------------------------------------------------------------------------------------------- publishing

    def publish(self, topic: str, content: bytes | bytearray | memoryview | str, timeout: float | None = None) -> int:
        """Publish a model at every server, under one version; return the version after all answering servers have it.

        The reader keeps the newest model of each topic: a server that returns or restarts gets it later. A server that
        is silent for three seconds counts as away, if another server answers.

        Raises:
            MemoireTimeout: a server did not accept the model in time, or no server came; the transfer continues.
            Refused: a server has that version already, because another learner publishes this topic.
        """
        self._monitor.check_open()
        patience = self._seconds(timeout)
        return self._thread.publisher.publish(make(check_topic(topic), content, 0), patience)

    def scalars(self, values: Mapping[str, float]) -> None:
        """Set figures of this learner for the dashboard, by name: finite numbers, at most 64 names. The reader sends
        them to the servers every two seconds.
        """
        self._monitor.check_open()
        with self._monitor.condition:
            self._scalars = arguments.scalars(values, self._scalars)

    def servers_at(self, url: str) -> tuple[str, ...]:
        """Return names of the servers behind one of this reader's addresses, as last reported; () before the first."""
        return next((address.servers for address in self._directory.addresses if address.endpoint == url), ())

    def trouble_at(self, url: str) -> str:
        """Return why an address of this reader may not answer, and advice; "" if the address answers.

        Tries to connect, which takes 0.2 s at most.
        """
        channels = self._thread.channels
        silent = [address for address in channels if address.endpoint == url and not address.servers]
        return channels[silent[0]].link.explain() if silent else ""

    # ------------------------------------------------------------------------------------------------- state

    def stats(self) -> ReaderStats:
        """Return all figures of the reader at this moment."""
        thread, delivered, channels = self._thread, self._delivered, self._thread.channels.values()
        rounds, terms, known = thread.rounds, self._directory.terms, self._directory.known_servers
        return ReaderStats(
            reader=self.reader_id.hex(),
            name=self.name,
            servers=tuple(server.name for server in known if not server.is_away),
            away=tuple(server.name for server in known if server.is_away),
            batches=delivered.batches,
            samples=self._prefetch.samples,
            batch_bytes=delivered.nbytes,
            rollouts_taken=self._once.taken,
            rollouts_kept=self._once.held_entries,
            rollouts_stale=self._once.discarded_entries,
            short=rounds.short,
            waited=delivered.waited,
            waits_for=rounds.waits_for,
            prefetched=len(self._prefetch),
            freshness=delivered.newest,
            scalars=dict(self._scalars),
            resends=sum(channel.resends for channel in channels),
            refused=dict(sum((channel.refused for channel in channels), rounds.refused)),
            feedback_given=delivered.feedback,
            feedback_lost=thread.feedback.lost,
            parameters_version=0 if terms is None else terms.parameters_version,
            finished=self.finished,
            faults=thread.worker.errors,
        )

    def liveness(self) -> list[str]:
        """Return faults that only a restart can repair, a sentence each; empty if there is none."""
        return self._thread.worker.problem()

    def readiness(self) -> list[str]:
        """Return reasons why no batch can come now, a sentence each; empty if a batch can come."""
        if self.closed:
            return ["closing: this reader is closing"]
        if self._directory.present_servers:
            return []
        return [f"servers: no server answers. {self._thread.problem()}"]

    def _refuse_calls(self) -> list[RemoteNode]:
        """Refuse new calls; return the readers of other tables, which are closed with this one."""
        super()._refuse_calls()
        with self._monitor.condition:
            return list(self._partners.values())

    def _hello(self) -> messages.Hello:
        figures = self._delivered.figures(self._prefetch.samples + self._once.taken)
        table, facts = self._asked_table or self.table, {"codecs": codecs(), "scalars": self._scalars}
        return self._hello_of("reader", table, self.name, figures=figures, **facts)

    def __repr__(self) -> str:
        return f"<memoire.Reader {self.reader_id.hex()[:8]} of {', '.join(self.urls)}>"
