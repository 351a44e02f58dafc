"""The reader: a learner's batches from any number of servers, drawn as if from all clients' memories at once.

    each server says   who its clients are, what they weigh, and how many samples it keeps for this reader
    the reader decides how many samples of which client (draw.plan: the rule that a server follows for itself)
    each server sends  those samples, and what it says now
    the reader weighs  them together and shuffles (draw.finish)

Requests are numbered and a server keeps its reply to the newest, so that one that was lost is sent again and eats no
samples. A server that does not answer is left out until it does, after a batch has waited `LEFT_OUT_TIMEOUT` for it, or
at once when its connection ends:
`stats().away` names it, while a batch's `left_out` only knows the clients of servers that answered. Behind a proxy
every server is reached through the proxy, by the home in the header: that works where only the proxy has an address,
as behind a Kubernetes service. Addresses of several servers or proxies may be given; a server that two of them lead to
is asked once.

What a reader has done, at one moment. Pure: no lock, no socket, no clock.
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
from memoire.security.keys import Given, Keys
from memoire.tables.base import HandsOutOnce, Release, TakeRequest
from memoire.tables.draws import MAX_BATCH
from memoire.tables.inspection import Freshness, FreshnessMonitor
from memoire.wire import messages
from memoire.wire.compression import codecs

from .admin import ClusterOrders
from .calls import FarNode
from .rounds import BatchQueue, checked_partition

SERVERS: Final = gauge("reader_servers", "Servers", "Servers by state: answering, or away and left out.", label="state")
READER_FEEDBACK: Final = counter(
    "reader_feedback_samples", "Priorities", "Priorities by outcome: given to servers, or lost there.", label="outcome"
)


@dataclass(frozen=True, slots=True)
class ReaderStats:
    """A reader at one moment; for whoever watches."""

    # fmt: off
    reader: str
    """Its id in hex."""
    name: str
    """That a person or Kubernetes gave it; "" for none."""
    servers: Annotated[tuple[str, ...], SERVERS("answering")]
    """Names of the servers that answer."""
    away: Annotated[tuple[str, ...], SERVERS("away")]
    """Names of those that do not, and are left out."""
    batches: Annotated[int, counter("reader_batches", "Batches", "Batches that were handed out.")]
    samples: Annotated[int, counter("reader_samples", "Samples drawn", "Samples that were handed out.")]
    batch_bytes: Annotated[int, counter("reader_batch_bytes", "Batch bytes", "Bytes of the arrays of these samples; "
        "its rate is the bandwidth at which a learner takes batches.")]
    rollouts_taken: int
    """Entries of rollouts that calls took."""
    rollouts_kept: int
    """Entries that came and are kept for the next call."""
    rollouts_stale: int
    """Entries that came and were passed over here, since their model was too old by then."""
    short: Annotated[int, counter("reader_short_samples", "Short", "Samples that a server was asked for and no longer "
        "had.")]
    waited: Annotated[float, counter("reader_wait_seconds", "Waited", "Seconds that calls waited for a batch; its rate "
        "is the learner's waiting share.")]
    waits_for: str
    """Why the next batch has to wait for entries to be recorded; "" when it has not."""
    prefetched: Annotated[int, gauge("reader_prefetched_batches", "Prefetched", "Batches that wait to be taken.")]
    freshness: Annotated[Freshness | None, within("reader_")]
    """Of a recent batch; None before the first one."""
    scalars: dict[str, float]
    """What `scalars` set."""
    resends: Annotated[int, counter("reader_resends", "Resends", "Requests that were sent again.")]
    refused: Annotated[dict[str, int], REFUSED]
    feedback_given: Annotated[int, READER_FEEDBACK("given")]
    feedback_lost: Annotated[int, READER_FEEDBACK("lost")]
    parameters_version: int
    finished: bool
    faults: Annotated[int, FAULTS]
    # fmt: on


class DeliveredBatches(FreshnessMonitor):
    """The batches that calls took, and how long these waited. The owner locks."""

    def __init__(self) -> None:
        super().__init__()
        self.batches = 0
        self.nbytes = 0  # of their samples' arrays
        self.waited = 0.0  # seconds
        self.feedback = 0  # samples for which TD errors were given

    def figures(self, samples: int) -> dict[str, float]:
        """What servers show of this reader, which has drawn so many samples."""
        figures = {} if self.newest is None else dataclasses.asdict(self.newest)
        figures |= {"batches": self.batches, "samples": samples, "waited": self.waited}
        return {name: float(value) for name, value in figures.items() if isinstance(value, int | float)}


_log = logging.getLogger(__name__)

BATCHES_AHEAD = 3
"""Unless a reader is told another number, or its learner waits."""


class Reader(ClusterOrders):
    """Draws batches from all servers behind its addresses, ahead of time on a thread of its own. Methods are
    thread-safe.

    Args:
        urls: Addresses of servers, proxies or both.
        table: Name of the table that it draws from; "" is the servers' first.
        name: What people see in place of its id, as in `connect`.
        timeout: Seconds to wait until one of them answers; None does not wait: schema and parameters come later.
        seed: Of counts and order; the servers' samples are drawn by the clients.
        ahead: Batches that are drawn before they are asked for. None: 3, and up to 16 and 64 MiB for a learner that
            waits, whose batches come several at once then.
        partition: (i, n): this is learner i, from 0, of n that part the clients: each draws from about every n-th one,
            as if there were no others, and importance corrects for those alone. None draws from all clients; learners
            that do so never get the same sample of a cache either. Episodes at a server are one memory: who parts the
            clients draws from all of it all the same.
        context: ZeroMQ context; one for the process by default.
        keys: This process' keys folder (or a cluster's), for tcp:// addresses; None takes $MEMOIRE_KEYS, and without it
            none. See docs/operations.md.
        tune_process: Let this process be tuned for nodes, the first time that one asks for it: see docs/operations.md.

    Raises:
        MemoireTimeout: nobody answered.
        AuthError: the other side does not let this process in.
        KeyFileError: the keys cannot be used.
        EndpointError: an address is none.
        Refused: there is no such table.
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
        keys: Given = None,
        tune_process: bool = True,
    ) -> None:
        if ahead is not None and ahead < 1:
            raise ParameterError("ahead", ahead, "at least 1")
        self.reader_id = secrets.token_bytes(16)
        self.name = process_name(name)  # that people see; "" if nobody gave it one
        self.program: Callable[[], Any] | None = None
        """Tells how the program around it stands, for its pages: set by a worker or trainer of `memoire.rl`."""
        self._asked_table, self._keys = table_name(table), Keys.of(keys, "learner")
        self._options: dict[str, Any] = {"seed": seed, "ahead": ahead, "partition": partition, "context": context}
        self._options |= {"name": self.name, "limits": limits, "keys": self._keys, "tune_process": tune_process}
        self._partners: dict[str, Reader] = {}  # of the other tables of mixed batches; under the monitor's lock
        self._scalars: dict[str, float] = {}
        self._handed_out = DeliveredBatches()
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
        self._once = self._thread.sides.offering(HandsOutOnce)
        self._begin(
            None
            if timeout is None
            else lambda: self._thread.expect(self._thread.has_met, self._seconds(timeout), "welcome")
        )

    # ------------------------------------------------------------------------------------------------- batches

    @property
    def schema(self) -> Schema:
        """What an entry is, as the servers say."""
        assert self._directory.terms is not None
        return self._directory.terms.schema

    @property
    def table(self) -> str:
        """Name of the table that it draws from."""
        return "" if self._directory.terms is None else self._directory.terms.table

    @property
    def run(self) -> str:
        """Name of the experiment, as a server said when it was met last."""
        return self._directory.run_name

    @property
    def parameters(self) -> Parameters:
        """Everything that shapes sampling, as the servers said last."""
        return Parameters() if self._directory.terms is None else self._directory.terms.parameters

    @property
    def finished(self) -> bool:
        """Whether the run was declared over."""
        return self._directory.is_finished

    @property
    def servers(self) -> tuple[str, ...]:
        """Names of the servers that are known."""
        return tuple(self._directory.servers)

    @checked_names()
    def get_batch(
        self, batch_size: int, timeout: float = 30.0, *, out: Mapping[str, Any] | Batch | None = None
    ) -> Batch:
        """The next batch; from here on batches of this size are drawn ahead.

        Args:
            batch_size: Samples, at least 1.
            timeout: Seconds that it may take.
            out: Arrays of the caller (by name, or an earlier batch) that are filled in place of new ones.

        Raises:
            ParameterError: an array of `out` does not fit; the batch is there for the next call.
            NotEnoughSamples: the servers had too few for `timeout` seconds.
            Refused: (code "too_large") the batch is larger than this reader takes (`limits.message_bytes`).
            MemoireTimeout: no server answered in that time.
            Closed: the reader was closed, also from another thread while waiting.
        """
        batch_size = whole("batch_size", batch_size, 1, MAX_BATCH)
        patience, began = self._seconds(timeout), time.monotonic()
        with self._monitor.changed:
            try:
                drawn = self._thread.await_batch(batch_size, patience)
            finally:
                self._handed_out.waited += time.monotonic() - began
            batch = drawn.batch(self.schema, self.update_priorities)
            if out is not None:
                batch.copy_into(out)
            self._prefetch.take()  # it is given away by that
            self._handed_out.batches += 1
            self._handed_out.nbytes += drawn.nbytes
        if self._prefetch.has_room:
            self._thread.worker.wake()
        if self._handed_out.is_due(time.monotonic()):
            newest = self._thread.newest_model
            self._handed_out.saw(drawn.gathered, drawn.importance, drawn.left_out, newest)
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
        """The oldest entries of a table that stores rollouts, of all its servers: nobody gets them again.

        All of them or none: what came in vain is kept here for the next call. Each server gives in proportion to what
        it holds, in order of arrival. Entries whose model is too old (`max_model_lag`) are passed over and counted.

        Args:
            steps: Entries, at least 1 and at most the capacity of all servers.
            timeout: Seconds to wait until they are there.
            exact: Split fragments so that there are just `steps` entries: the rest is first in the next take. Without
                it each server's last fragment is taken whole.
            min_clients: Clients of which entries have to be held before anything is taken.
            release: When actors may record as many again: "now", or with the next model that is published ("publish"),
                so that they make no step with a model whose entries were taken already.

        Returns:
            Arrays of the caller; see `Rollouts` for shapes.

        Raises:
            ParameterError: an argument is out of its range, or this table stores no rollouts.
            NotEnoughSamples: too few entries came in that time; it says what was missing.
            Refused: (code "too_large") the oldest fragment is larger than this reader takes (`limits.message_bytes`).
            MemoireTimeout: no server answered in that time.
            Closed: the reader was closed, also from another thread while waiting.
        """
        wanted = TakeRequest(steps, exact, min_clients, release)
        patience, began, taken = self._seconds(timeout), time.monotonic(), list[Fragment]()
        try:
            taken = self._thread.sides.take(self._once, wanted, patience)
        finally:
            with self._monitor.changed:
                self._handed_out.waited += time.monotonic() - began
                self._handed_out.batches += bool(taken)
        rollouts = Rollouts.of(self.schema, taken, time.monotonic(), self.parameters.discount)
        if self._handed_out.is_due(time.monotonic()):
            self._handed_out.took(rollouts.age, rollouts.model_version, self._thread.newest_model)
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
        """Batches until the run is over or `close`; each waits at most `timeout` seconds.

        Args:
            batch_size: Samples of this reader's table; or of several, mixed: `{"online": 192, "demo": 64}`.

        Raises:
            MemoireTimeout: not enough samples came in that time.
            Refused: there is no such table.
        """
        where, advice = ", ".join(self.urls), "Are actors running?"
        if not isinstance(batch_size, Mapping):
            what, draw = f"batch of {batch_size}", functools.partial(self.get_batch, batch_size)
            return batches_until_over(draw, self._is_over, what, timeout, where, lambda: advice)
        sizes = sizes_of(batch_size)
        mixer = Mixer(sizes, {name: self._of_table(name).get_batch for name in sizes})
        lacking = lambda: f"Table {mixer.lacking!r} has too few. {advice}"  # noqa: E731
        return batches_until_over(mixer.get, self._is_over, f"batch of {sizes}", timeout, where, lacking)

    def _of_table(self, name: str) -> Reader:
        """The reader of a table: this one, or one beside it that lives as long."""
        with self._monitor.changed:
            self._monitor.check_open()
            former = self if name in (self.table, self._asked_table) else self._partners.get(name)
            if former is not None and former._monitor.failed is None:
                return former
            if former is not None:
                former.close(0.0)  # its table was not there; it may be now
            self._partners[name] = Reader(self.urls, table=name, timeout=None, **self._options)
            return self._partners[name]

    def _is_over(self) -> bool:
        return self.closed or self.finished

    @checked_names()
    def update_priorities(self, ids: NDArray[Any], td_errors: Any) -> PriorityUpdate:
        """Send TD errors [B] on their way to the owners of samples with these ids [B]; returns at once: all are
        `sent`.
        """
        self._monitor.check_open()
        errors = td_errors_for(np.asarray(ids), td_errors)
        if len(errors):
            rows = np.array(ids)
            self._handed_out.feedback += len(errors)
            self._thread.worker.post(lambda: self._thread.give_feedback(rows, errors))
        return PriorityUpdate(sent=len(errors))

    # ------------------------------------------------------------------------------------------- what it tells

    def publish(self, topic: str, content: bytes | bytearray | memoryview | str, timeout: float | None = None) -> int:
        """Publish a model at every server, under one version; returns it when all that answer have it.

        A server that is away gets the newest model of each topic when it is back, and one that began anew gets it
        again: the reader keeps it for that. One that says nothing for three seconds is away, where another one answers.

        Raises:
            MemoireTimeout: a server that was there did not take it in time, or none came; it goes on being sent.
            Refused: a server has that version already: somebody else publishes this topic.
        """
        self._monitor.check_open()
        patience = self._seconds(timeout)
        return self._thread.publisher.publish(make(check_topic(topic), content, 0), patience)

    def scalars(self, values: Mapping[str, float]) -> None:
        """Set figures to be shown for this learner, by name: finite numbers, at most 64 names. Servers hear of them
        every two seconds.
        """
        self._monitor.check_open()
        with self._monitor.changed:
            self._scalars = arguments.scalars(values, self._scalars)

    def servers_at(self, url: str) -> tuple[str, ...]:
        """Names of the servers behind one of this reader's addresses, as it said last; none before it has answered."""
        return next((address.servers for address in self._directory.addresses if address.endpoint == url), ())

    def trouble_at(self, url: str) -> str:
        """Why one of this reader's addresses may not answer and what to do, in a sentence or two; "" once it has.

        Tries to connect, which takes 0.2 s at most.
        """
        channels = self._thread.channels
        silent = [address for address in channels if address.endpoint == url and not address.servers]
        return channels[silent[0]].link.explain() if silent else ""

    # ------------------------------------------------------------------------------------------------- its end

    def stats(self) -> ReaderStats:
        """All figures at this moment."""
        thread, handed_out, channels = self._thread, self._handed_out, self._thread.channels.values()
        rounds, terms, known = thread.rounds, self._directory.terms, self._directory.known
        return ReaderStats(
            reader=self.reader_id.hex(),
            name=self.name,
            servers=tuple(server.name for server in known if not server.is_away),
            away=tuple(server.name for server in known if server.is_away),
            batches=handed_out.batches,
            samples=self._prefetch.samples,
            batch_bytes=handed_out.nbytes,
            rollouts_taken=self._once.taken,
            rollouts_kept=self._once.kept,
            rollouts_stale=self._once.stale,
            short=rounds.short,
            waited=handed_out.waited,
            waits_for=rounds.waits_for,
            prefetched=len(self._prefetch),
            freshness=handed_out.newest,
            scalars=dict(self._scalars),
            resends=sum(channel.resends for channel in channels),
            refused=dict(sum((channel.refused for channel in channels), rounds.refused)),
            feedback_given=handed_out.feedback,
            feedback_lost=thread.feedback.lost,
            parameters_version=0 if terms is None else terms.parameters_version,
            finished=self.finished,
            faults=thread.worker.errors,
        )

    def liveness(self) -> list[str]:
        """What only a restart can mend, a sentence each. Empty while all is well."""
        return self._thread.worker.trouble()

    def readiness(self) -> list[str]:
        """Why no batch can come just now, a sentence each; empty while one can."""
        if self.closed:
            return ["closing: this reader is about to end"]
        if self._directory.there:
            return []
        return [f"servers: none answers. {self._thread.trouble()}"]

    def _refuse_calls(self) -> list[FarNode]:
        """The readers of other tables end with it."""
        super()._refuse_calls()
        with self._monitor.changed:
            return list(self._partners.values())

    def _hello(self) -> messages.Hello:
        """What it says of itself to servers. Called inside of its thread."""
        figures = self._handed_out.figures(self._prefetch.samples + self._once.taken)
        table, facts = self._asked_table or self.table, {"codecs": codecs(), "scalars": self._scalars}
        return self._said("reader", table, self.name, figures=figures, **facts)

    def __repr__(self) -> str:
        return f"<memoire.Reader {self.reader_id.hex()[:8]} of {', '.join(self.urls)}>"
