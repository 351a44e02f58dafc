"""Batched inference: a node that gives the rows of many clients to one call of a function.

actors ──INFER (rows)──▶ queue ──one batch──▶ function(columns, weights) ──parted──▶ INFERRED (rows, version)
                                                     ▲ swapped between two batches
                 models of a topic ──▶ weights(content) in a thread of its own
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from memoire.arguments import checked_names, process_name, seconds, whole
from memoire.arguments import name as checked_name
from memoire.errors import Closed, MemoireTimeout, ParameterError, WrongType
from memoire.limits import CONTAINER, HELD_BYTES, Container, Limits, Reservation
from memoire.models.io import ModelLink
from memoire.models.model import check_topic
from memoire.net import sockets
from memoire.net.curve_server import Gate
from memoire.net.sockets import Context, shared_context
from memoire.net.thread import END_TIMEOUT, Node, close_at_exit
from memoire.replay.schema import row_schema_from
from memoire.security import access
from memoire.security.keys import Given, Keys
from memoire.wire.byte_budget import ByteBudget
from memoire.wire.layout import rows_bytes

from .batching import KEPT_BYTES, REASONS, Batching, InferenceStats, JobStats
from .computation import Computation, Function
from .io import InferenceThread, NodeService

_log = logging.getLogger(__name__)

OWN_COPIES = 2
"""How often a node has `request_bytes` beside `held_bytes`: for requests, and for replies on their way."""


def kept_of(held: int) -> int:
    """Bytes of kept replies that a node has beside so many held bytes."""
    return min(KEPT_BYTES, held // 8)


class Inference(Node):
    """Answers clients' rows with what a function makes of them, many at a time; see the module.

    A batch begins as soon as its rows reach `max_batch`, or every client that is alive has a request here, or the
    oldest request has waited `max_wait`. All rows of a batch are computed with one version of the weights.

    Args:
        endpoint: Address to listen at, such as "tcp://*:5570".
        inputs, outputs: Columns of the rows that come and go, as `Schema` takes them; no state is needed. Values of
            columns called obs or state must be finite, unless their `Column` allows NaN.
        function: Called in one thread as function(columns), and as function(columns, weights) once there are weights.
            `columns` has an array [B, *F] for each input, a ragged one padded with zeros and beside it NAME_length
            [B]. It returns a mapping with an array [B, *F] for each output, a ragged one as a list of arrays, or
            padded with NAME_length. Arrays are only to be read. An error in it is the clients' answer (code "failed").
        weights: Called with what was published on `topic`, in another thread; what it returns goes to the function.
            None passes the content on as it is. If it raises, the former weights stay.
        topic: Of the models.
        connect: Address of a server or proxy that has the models; None: there are only those of `update`. If there is
            one, rows wait for the first weights.
        max_batch: Rows of a batch.
        max_wait: Seconds that a request waits for others.
        alive: Seconds after a client's last request for which others wait for its next one.
        queue_rows: Rows that may wait; one client may have half of them. Further ones are refused (code "busy"). As
            many again may wait for a later version of the weights. Their bytes are bounded by `limits.held_bytes`.
        sizes: Rows of which batches have one number, for compiled functions: they are filled up with rows of zeros.
            None gives batches as they are.
        name: What people call it on pages and in logs, as of `Proxy`.
        keys: This process' keys folder (or a cluster's), as of `Proxy`.
        service: What it does beside, such as answer observers; `rl.Agent` makes it.

    Raises:
        EndpointError: an address is in use or malformed.
        KeyFileError: the keys cannot be used.
        SchemaError, ParameterError, WrongType: an argument is wrong, or its container has less memory.
    """

    CALLED = "this inference node"
    ROLE = "inference"
    _container: ClassVar[Container] = CONTAINER
    """That in which its memory is reserved."""
    CLOSED_AT_EXIT = 1

    @checked_names()
    def __init__(
        self,
        endpoint: str,
        inputs: Any,
        outputs: Any,
        function: Function,
        weights: Callable[[Any], Any] | None = None,
        topic: str = "policy",
        connect: str | None = None,
        max_batch: int = 256,
        max_wait: float = 0.005,
        alive: float = 1.0,
        queue_rows: int = 8192,
        sizes: Sequence[int] | None = None,
        *,
        keys: Given = None,
        limits: Limits | None = None,
        context: Context | None = None,
        name: str | None = None,
        service: NodeService | None = None,
    ) -> None:
        computation = Computation(
            _callable("function", function),
            row_schema_from("inputs", inputs),
            row_schema_from("outputs", outputs),
            _checked_sizes(sizes, whole("max_batch", max_batch, 1)),
        )
        self._reserved = Reservation(self._container)

        def hold(limits: Limits) -> Limits:
            held = limits.held_bytes or self._reserved.default("held_bytes", HELD_BYTES)
            self._reserved.reserve("held_bytes", held, held + kept_of(held) + OWN_COPIES * limits.tuning.request_bytes)
            return replace(limits, held_bytes=held)

        self._limits = self._reserved.limits(limits or Limits(), hold, model_bytes=1)
        held = self._limits.held_bytes
        kept = kept_of(held)
        for columns, schema in (("inputs", computation.inputs), ("outputs", computation.outputs)):
            if (size := rows_bytes(schema, 1)) > (most := self._limits.tuning.request_bytes):
                raise ParameterError("request_bytes", most, f"at least {size}, which one row of the {columns} takes")
        load = (lambda content: content) if weights is None else _callable("weights", weights)
        wait, life = seconds(max_wait, name="max_wait"), seconds(alive, name="alive")
        self.topic = check_topic(topic)
        budget = ByteBudget(held)
        rows = whole("queue_rows", queue_rows, 1)
        batching = Batching(max_batch, wait, life, rows, kept, room=budget.holder("requests that wait"))
        budget.holder("kept replies", own=kept, measure=lambda: batching.kept_bytes)
        context = context or shared_context()
        self._gate = Gate(context, Keys.of(keys, "inference"))
        self._pid = os.getpid()
        self._closing = threading.Event()
        self._close_lock = threading.Lock()
        client = secrets.token_bytes(16)
        self.name = process_name(name) or f"inference-{client.hex()[:8]}"
        try:
            self._thread = InferenceThread(
                endpoint,
                batching,
                computation,
                load,
                gate=self._gate,
                name=self.name,
                limits=self._limits,
                context=context,
                is_waiting=connect is not None,
                owner=self,
                service=service,
                budget=budget,
            )
            if connect is not None:
                self._thread.models = self._link(connect, client, context)
        except BaseException:
            self._undo()
            raise
        if self._gate.keys is None:
            access.warn(f"inference node {self.name!r}", [self.endpoint], guard="keys (keys=)", may="ask it")
        self._thread.start()
        close_at_exit(self)

    def _link(self, connect: str, client: bytes, context: Context) -> ModelLink:
        thread = self._thread
        facts: dict[str, Any] = {"client": client, "name": self.name, "limits": self._limits}
        return ModelLink(
            thread.worker, connect, self.topic, thread.load, **facts, keys=self._gate.keys, context=context
        )

    def _undo(self) -> None:
        if hasattr(self, "_thread"):
            self._thread.worker.stop(0.0)
        self._gate.close()
        self._reserved.release()

    @property
    def endpoint(self) -> str:
        """Address, as bound: what clients ask."""
        return self._thread.endpoint

    @property
    def keys(self) -> Keys | None:
        """Of this process; None where everybody is let in."""
        return self._gate.keys

    @property
    def version(self) -> int:
        """Of the weights that the next batch is computed with; 0 when there are none, or nobody has said one."""
        return self._thread.weights.version

    def update(self, weights: Any, version: int) -> None:
        """Compute with these weights from the next batch on: for a learner that has no server. Returns at once.

        Args:
            weights: What the function gets. It must not change afterwards: a batch may run.
            version: That replies say, at least 0.
        """
        if self._closing.is_set():
            raise Closed(self.CALLED)
        self._thread.use(weights, whole("version", version, 0, 2**53 - 1))

    def wait_version(self, version: int, timeout: float | None = None) -> int:
        """Wait until the weights have this version or a newer one, and return it.

        Args:
            timeout: Seconds; None is `request_timeout` of the limits.

        Raises:
            MemoireTimeout: they do not have it in time.
            Closed: the node was closed.
        """
        patience, thread = seconds(timeout, self._limits.request_timeout), self._thread

        def is_done() -> bool:
            return self._closing.is_set() or (thread.weights.is_there and self.version >= version)

        with thread.changed.held():
            if not thread.changed.wait_for(is_done, patience):
                link = thread.models
                why = f"It has version {self.version}. " + ("Call update()." if link is None else link.trouble)
                raise MemoireTimeout(f"version {version} of the weights", self.endpoint, patience, why)
        if self._closing.is_set():
            raise Closed(self.CALLED)
        return self.version

    def show_pages(self, address: str) -> None:
        """Tell whoever asks that the pages about this node are at "http://HOST:PORT"."""
        self._thread.pages = (checked_name("address", address),)

    def stats(self) -> InferenceStats:
        """All figures at this moment."""
        thread, batching = self._thread, self._thread.batching
        counts, now = thread.counts, time.monotonic()
        waits = counts.waits.now()
        return InferenceStats(
            name=self.name,
            endpoint=self.endpoint,
            topic="" if thread.models is None else self.topic,
            uptime=now - thread.started,
            requests=counts.requests,
            rows=counts.rows,
            batches=dict.fromkeys(REASONS, 0) | batching.batches,
            batched_rows=counts.batched_rows,
            expired=batching.expired,
            resends=batching.resends,
            failures=counts.failures,
            weights_failures=counts.weights_failures,
            refused=dict(counts.refused),
            queue_rows=batching.rows,
            holders=thread.budget.holders(),
            budget=thread.budget.limit,
            clients=batching.clients(now),
            version=self.version,
            waited_seconds=sum(each.seconds for each in waits.values()),
            computed_seconds=counts.computed,
            waits=waits,
            durations=counts.durations.now(),
            security=self._gate.security(),
            faults=thread.worker.errors,
            jobs=JobStats() if thread.service is None else thread.service.stats(),
            starts=() if thread.service is None else thread.service.starts_stats(),
        )

    def liveness(self) -> list[str]:
        """What only a restart can mend, a sentence each. Empty while all is well."""
        thread = self._thread
        return [*thread.worker.trouble(), *thread.batches.trouble(), *thread.loader.trouble()]

    def readiness(self) -> list[str]:
        """Why this node should get no clients just now, a sentence each; empty when it should."""
        if self._closing.is_set():
            return ["closing: this inference node is about to end"]
        if self._thread.is_waiting and not self._thread.weights.is_there:
            return [f"starting: no weights of topic {self.topic!r} have come yet"]
        return self._gate.trouble()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closing.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until somebody closes the node; False when `timeout` seconds passed first."""
        return self._closing.wait(seconds(timeout))

    def close(self, timeout: float | None = None) -> None:
        """End the threads and close every socket within `timeout` seconds. May be called again, and from any thread."""
        patience = seconds(timeout, self._limits.close_timeout)
        self._closing.set()
        with self._thread.changed.held():
            self._thread.changed.notify_all()
        with self._closer(time.monotonic() + patience) as is_mine:
            if not is_mine:
                return
            if not self._thread.stop(max(END_TIMEOUT, patience)):
                _log.warning("inference node %s: its threads did not end in time", self.name)
            self._gate.close()
            self._reserved.release()
            sockets.wait_unbound((self.endpoint,), patience)

    def __repr__(self) -> str:
        return f"<memoire.Inference {self.name!r} at {self.endpoint}>"


def _callable(name: str, given: Any) -> Any:
    if not callable(given):
        raise WrongType(name, "a function", type(given).__name__)
    return given


def _checked_sizes(sizes: Sequence[int] | None, max_batch: int) -> tuple[int, ...]:
    """Numbers of rows, ascending, the last of which a full batch fits in."""
    if sizes is None:
        return ()
    given = tuple(sorted(whole("sizes", size, 1) for size in sizes))
    if not given or given[-1] < max_batch:
        raise ParameterError("sizes", list(sizes), f"numbers of rows, the largest at least max_batch={max_batch}")
    return given
