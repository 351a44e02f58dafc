"""Batched inference: a node that passes the rows of many clients to one call of a function.

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
from memoire.limits import CONTAINER, HELD_BYTES, Limits, MemoryLimits, Reservation
from memoire.models.io import ModelLink
from memoire.models.model import check_topic
from memoire.net import sockets
from memoire.net.curve_server import Gate
from memoire.net.sockets import Context, shared_context
from memoire.net.thread import END_TIMEOUT, Node, close_at_exit
from memoire.replay.schema import row_schema_from
from memoire.security import access
from memoire.security.keys import Keys, KeysLike
from memoire.wire.byte_budget import ByteBudget
from memoire.wire.layout import rows_bytes

from .batching import KEPT_BYTES, REASONS, Batching, InferenceStats, JobStats
from .computation import Computation, Function
from .io import InferenceThread, NodeService

_log = logging.getLogger(__name__)

OWN_COPIES = 2
"""Multiple of `request_bytes` that a node uses in addition to `held_bytes`: for requests, and for queued replies."""


def kept_reply_limit(held: int) -> int:
    """Return the maximum bytes of kept replies of a node, which come on top of its held bytes."""
    return min(KEPT_BYTES, held // 8)


class Inference(Node):
    """Inference node: answers rows of many clients by one call of a function for each batch; see the module.

    A batch begins as soon as its rows reach `max_batch`, or every alive client has a request in the queue, or the
    oldest request has waited `max_wait`. All rows of a batch are computed with one version of the weights.

    Example:
        def policy(columns):
            return {"action": columns["obs"].argmax(axis=1)}

        inputs, outputs = {"obs": (np.float32, (4,))}, {"action": np.int64}
        with memoire.Inference("tcp://127.0.0.1:*", inputs, outputs, policy) as node:
            print(node.endpoint)

    Args:
        endpoint: Address to listen at, such as "tcp://*:5570".
        inputs, outputs: Columns of received and returned rows, as of `Schema`; a state is not required. Values of
            columns called obs or state must be finite, unless their `Column` allows NaN.
        function: Called in one thread as function(columns), and as function(columns, weights) once there are weights.
            `columns` has an array [B, *F] for each input, a ragged one padded with zeros and its lengths beside it as
            NAME_length [B]. The function returns a mapping with an array [B, *F] for each output, a ragged one as a
            list of arrays, or padded with NAME_length. The function must not change its arrays. Clients get its error
            (code "failed").
        weights: Called in another thread with a model published on `topic`; returns the weights for the function.
            None passes the model's content unchanged. If it raises, the former weights stay.
        topic: Topic of the models.
        connect: Address of a server or proxy that has the models, so that rows wait for the first weights. None uses
            only weights of `update`.
        max_batch: Maximum rows of a batch.
        max_wait: Maximum seconds that a request waits for further requests.
        alive: Seconds after a client's last request for which batches wait for its next request.
        queue_rows: Maximum rows that wait; one client may have half of these rows. Further rows are refused (code
            "busy"). As many again may wait for a later version of the weights. `limits.held_bytes` bounds their bytes.
        sizes: Row counts to which batches are padded with zeros, for compiled functions. None does not pad.
        name: Name of the node on pages and in logs, as of `Proxy`.
        keys: Keys folder of this process (or of a cluster), as of `Proxy`.
        service: Further service of the node, such as answers to observers; `rl.Agent` makes it.

    Raises:
        EndpointError: an address is in use or malformed.
        KeyFileError: the keys cannot be used.
        SchemaError, ParameterError, WrongType: an argument is invalid, or the container has too little memory.
    """

    CALLED = "this inference node"
    ROLE = "inference"
    _container: ClassVar[MemoryLimits] = CONTAINER
    """Container whose memory limit bounds the reservation."""
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
        keys: KeysLike = None,
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
            self._reserved.reserve(
                "held_bytes", held, held + kept_reply_limit(held) + OWN_COPIES * limits.tuning.request_bytes
            )
            return replace(limits, held_bytes=held)

        self._limits = self._reserved.limits(limits or Limits(), hold, model_bytes=1)
        held = self._limits.held_bytes
        kept = kept_reply_limit(held)
        for columns, schema in (("inputs", computation.inputs), ("outputs", computation.outputs)):
            if (size := rows_bytes(schema, 1)) > (most := self._limits.tuning.request_bytes):
                raise ParameterError("request_bytes", most, f"at least {size}, the bytes of one row of {columns}")
        load = (lambda content: content) if weights is None else _callable("weights", weights)
        wait, life = seconds(max_wait, name="max_wait"), seconds(alive, name="alive")
        self.topic = check_topic(topic)
        budget = ByteBudget(held)
        rows = whole("queue_rows", queue_rows, 1)
        batching = Batching(max_batch, wait, life, rows, kept, room=budget.add_holder("requests that wait"))
        budget.add_holder("kept replies", own=kept, measure=lambda: batching.kept_bytes)
        context = context or shared_context()
        self._gate = Gate(context, Keys.from_setting(keys, "inference"))
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
        """Bound address, to which clients send their rows."""
        return self._thread.endpoint

    @property
    def keys(self) -> Keys | None:
        """Keys of this process; None if the node accepts every client."""
        return self._gate.keys

    @property
    def version(self) -> int:
        """Version of the weights for the next batch; 0 if there are no weights, or weights without a version."""
        return self._thread.weights.version

    def update(self, weights: Any, version: int) -> None:
        """Use these weights from the next batch on, for a learner without a server. Returns at once.

        Args:
            weights: Weights for the function. The weights must not change afterwards: a batch may be running.
            version: Version that replies contain, at least 0.
        """
        if self._closing.is_set():
            raise Closed(self.CALLED)
        self._thread.use(weights, whole("version", version, 0, 2**53 - 1))

    def wait_version(self, version: int, timeout: float | None = None) -> int:
        """Wait until the weights have this version or a newer one, and return it.

        Args:
            timeout: Seconds to wait; None takes `request_timeout` of the limits.

        Raises:
            MemoireTimeout: the weights did not reach the version in time.
            Closed: the node was closed.
        """
        patience, thread = seconds(timeout, self._limits.request_timeout), self._thread

        def is_done() -> bool:
            return self._closing.is_set() or (thread.weights.is_there and self.version >= version)

        with thread.changed.held():
            if not thread.changed.wait_for(is_done, patience):
                link = thread.models
                why = f"The node has version {self.version}. " + ("Call update()." if link is None else link.problem)
                raise MemoireTimeout(f"version {version} of the weights", self.endpoint, patience, why)
        if self._closing.is_set():
            raise Closed(self.CALLED)
        return self.version

    def show_pages(self, address: str) -> None:
        """Advertise the address of this node's pages, "http://HOST:PORT", to clients in WELCOME."""
        self._thread.pages = (checked_name("address", address),)

    def stats(self) -> InferenceStats:
        """Return all figures of the node at this moment."""
        thread, batching = self._thread, self._thread.batching
        counts, now = thread.counts, time.monotonic()
        waits = counts.waits.durations()
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
            durations=counts.durations.durations(),
            security=self._gate.security(),
            faults=thread.worker.errors,
            jobs=JobStats() if thread.service is None else thread.service.stats(),
            starts=() if thread.service is None else thread.service.starts_stats(),
        )

    def liveness(self) -> list[str]:
        """Return faults that only a restart can repair, a sentence each; empty if there is none."""
        thread = self._thread
        return [*thread.worker.problem(), *thread.batches.problem(), *thread.loader.problem()]

    def readiness(self) -> list[str]:
        """Return reasons why this node should get no clients now, a sentence each; empty if it is ready."""
        if self._closing.is_set():
            return ["closing: this inference node is closing"]
        if self._thread.is_waiting and not self._thread.weights.is_there:
            return [f"starting: no weights of topic {self.topic!r} have come yet"]
        return self._gate.problem()

    @property
    def closed(self) -> bool:
        """True if `close` was called."""
        return self._closing.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the node is closed; return False if `timeout` seconds pass first."""
        return self._closing.wait(seconds(timeout))

    def close(self, timeout: float | None = None) -> None:
        """End the threads and close every socket within `timeout` seconds. May be called again, from any thread."""
        patience = seconds(timeout, self._limits.close_timeout)
        self._closing.set()
        with self._thread.changed.held():
            self._thread.changed.notify_all()
        with self._closer(time.monotonic() + patience) as is_mine:
            if not is_mine:
                return
            if not self._thread.stop(max(END_TIMEOUT, patience)):
                _log.warning("inference node %s: its threads did not end before the deadline", self.name)
            self._gate.close()
            self._reserved.release()
            sockets.wait_unbound((self.endpoint,), patience)

    def __repr__(self) -> str:
        return f"<memoire.Inference {self.name!r} at {self.endpoint}>"


def _callable(name: str, function: Any) -> Any:
    if not callable(function):
        raise WrongType(name, "a function", type(function).__name__)
    return function


def _checked_sizes(sizes: Sequence[int] | None, max_batch: int) -> tuple[int, ...]:
    """Return the row counts in ascending order. Raises ParameterError if a full batch exceeds the largest."""
    if sizes is None:
        return ()
    counts = tuple(sorted(whole("sizes", size, 1) for size in sizes))
    if not counts or counts[-1] < max_batch:
        raise ParameterError("sizes", list(sizes), f"numbers of rows, the largest at least max_batch={max_batch}")
    return counts
