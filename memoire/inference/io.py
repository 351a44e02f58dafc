"""Thread of an inference node: receives requests, starts batches, and sends the answers.

ROUTER ──▶ Admission ──▶ Batching ──▶ memoire-batches ──▶ SendQueues ──▶ ROUTER

Two further threads have no sockets: one computes batches, one after another; one loads weights.

io ──batch, weights──▶ memoire-batches ──outputs──▶ io     weights are chosen at the begin of the batch
io ──newest model────▶ memoire-weights ──weights──▶ io
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import zmq

from memoire._core import Condition
from memoire.errors import ProtocolError, escape
from memoire.limits import Limits
from memoire.models.io import ModelLink
from memoire.models.model import Model
from memoire.net import sockets
from memoire.net.curve_server import Admission, Gate
from memoire.net.poller import ConnectionWatcher, SendQueues
from memoire.net.sockets import Context, Socket
from memoire.net.thread import Worker
from memoire.security.roles import EnvelopedRequest, IdOwners
from memoire.version import VERSION
from memoire.wire import messages
from memoire.wire.byte_budget import ByteBudget, ByteHolder
from memoire.wire.frames import NO_CLIENT, Buffer, Message, MessageHeader, reply
from memoire.wire.receivers import Receivers
from memoire.wire.row_container import Rows, cut, pack_known, pack_rows, unpack_rows, unpacked_size, widths_of

from .batching import Batching, InferenceCounts, InferenceRequest, JobStats, KeptReply, RequestBatch, StartsStats
from .computation import Computation, Weights

_log = logging.getLogger(__name__)

REQUESTS_PER_TURN = 200
QUICK_TIME, QUICK_BATCHES = 0.001, 20
"""After `QUICK_BATCHES` consecutive batches below `QUICK_TIME` seconds, the thread of the sockets computes the batches:
a thread switch costs more than a quick batch. A longer batch moves the computation back to its own thread.
"""


class SerialThread:
    """Thread that runs functions one after another.

    Args:
        is_newest_only: True drops a function that has not begun when a newer one comes.
    """

    def __init__(self, name: str, *, is_newest_only: bool = False) -> None:
        self._waiting: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._is_newest_only = is_newest_only
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread; functions may be queued before."""
        self._thread.start()

    def run(self, function: Callable[[], None]) -> None:
        """Queue a function for the thread. Callable from any thread."""
        self._waiting.put(function)

    def problem(self) -> list[str]:
        """Return why a restart is needed, if the thread died; empty while it lives or was never started."""
        is_dead = self._thread.ident is not None and not self._thread.is_alive()
        return [f"thread {self._thread.name} has died: its log says why"] if is_dead else []

    def stop(self, timeout: float) -> bool:
        """End the thread after the running function; return False if it does not end within `timeout` seconds."""
        self._waiting.put(None)
        if self._thread.ident is not None and threading.current_thread() is not self._thread:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (function := self._next()) is not None:
            try:
                function()
            except Exception:
                _log.exception("%s: a function failed", self._thread.name)

    def _next(self) -> Callable[[], None] | None:
        function = self._waiting.get()
        while self._is_newest_only and function is not None and not self._waiting.empty():
            function = self._waiting.get()
        return function


B = TypeVar("B", bound=messages.Body)


class NodeService(Protocol):
    """Further service of an inference node, such as jobs. Called in the node's thread, except for `stats`."""

    node: str
    """Description of the node in refusals of other requests."""

    def begin(self, thread: InferenceThread, room: ByteHolder) -> None:
        """Register handlers (`InferenceThread.answer_with`), before the first request.

        Args:
            room: Holder of the bytes of unpacked requests.
        """

    def welcome(self) -> Mapping[str, Any]:
        """Return further fields of WELCOME."""

    def hello(self, client: bytes, name: str) -> None:
        """Record a client's name; "" changes nothing."""

    def check(self, client: bytes, job: int, now: float) -> None:
        """Raise ProtocolError (code "cancelled") if rows belong to a job that is not wanted any more."""

    def handle_disconnect(self, descriptor: int) -> None:
        """Handle the end of a connection."""

    def next_time(self) -> float:
        """Return the time of the next `tick`."""

    def tick(self) -> None:
        """Run the actions that are due."""

    def close(self) -> None:
        """Answer all waiting requests, since the node closes."""

    def stats(self) -> JobStats:
        """Return figures of the jobs at this moment."""

    def starts_stats(self) -> tuple[StartsStats, ...]:
        """Return figures of the start states of episodes, by origin."""


@dataclass(slots=True)
class _OpenRequest:
    """Data of an open request that its answer needs."""

    envelope: list[Buffer]
    header: MessageHeader
    columns: Rows


class InferenceThread:
    """Thread with the sockets of an inference node, and owner of the two other threads. Any thread may read attributes.

    Args:
        load: Returns the weights of a model's content; called in a thread of its own.
        is_waiting: True if rows wait for the first weights.
        owner: Object that the thread keeps alive.
        service: Further service of the node; None if there is none.
        budget: Budget of the bytes held for clients.

    Raises:
        EndpointError: the address is in use or malformed.
        KeyFileError: the keys cannot be used.
    """

    def __init__(
        self,
        endpoint: str,
        batching: Batching,
        computation: Computation,
        load: Callable[[bytes | str], Any],
        *,
        gate: Gate,
        name: str,
        limits: Limits,
        context: Context,
        is_waiting: bool,
        owner: object,
        service: NodeService | None = None,
        budget: ByteBudget,
    ) -> None:
        self._owner, self._name, self.limits, self.budget = owner, name, limits, budget
        self._received = budget.add_holder("requests", own=limits.tuning.request_bytes)
        self.batching, self.computation, self._load = batching, computation, load
        self.started, self.counts = time.monotonic(), InferenceCounts()
        self.weights, self.is_waiting = Weights(), is_waiting
        self.pages: tuple[str, ...] = ()
        self.changed = Condition()
        """Condition that is notified after each change of the weights."""
        self.models: ModelLink | None = None
        self.service = service
        self._answers: dict[type[messages.Body], Callable[[EnvelopedRequest, Message, int, float], None]] = {}
        self.answer_with(messages.Infer, self._ask)
        self.answer_with(messages.Hello, self._greet)
        self._is_running = False
        self._quick = 0  # batches in a row that took less than `QUICK_TIME`
        self._open: dict[tuple[bytes, int], _OpenRequest] = {}  # requests that wait or run
        self._owners = IdOwners()
        self._clients_of: dict[int, set[bytes]] = {}  # clients by the descriptor of their connection
        self.batches = SerialThread("memoire-batches")
        self.loader = SerialThread("memoire-weights", is_newest_only=True)
        self.worker = Worker("memoire-inference", self._turn, self._next_time, self._at_end)
        replies = budget.add_holder("replies on their way", own=limits.tuning.request_bytes)
        self.send_queues, self.receivers = SendQueues(room=replies), Receivers()
        if service is not None:
            service.begin(self, self._received)
        self.admission = Admission(gate, limits, count=self._count, own=self._own)
        gate.on_hang_up = self._hung_up
        try:
            self._router = sockets.request_server(context, limits.tuning.request_bytes)
            self.endpoint, way = gate.bind(self._router, endpoint)
            self.worker.poller.add(self._router, way=way or _HangUps(self._router, self._hung_up))
        except BaseException:
            self.worker.stop(0.0)
            raise

    def start(self) -> None:
        """Start the threads for sockets, batches and weights."""
        for thread in (self.batches, self.loader, self.worker):
            thread.start()

    def answer_with(self, body: type[B], answer: Callable[[EnvelopedRequest, Message, B, int, float], None]) -> None:
        """Register a handler for a request type, before the first request. `answer` is called in the node's thread with
        request, message, body, descriptor of the connection, and time; it may raise ProtocolError.
        """
        taken: Any = answer
        self._answers[body] = lambda request, message, *more: taken(request, message, message.body, *more)

    # Calls from any thread

    def use(self, value: Any, version: int) -> None:
        """Use these weights from the next batch on, unless the node has newer weights."""
        self.worker.post(lambda: self._swap(Weights(value, version, True)))

    def load(self, model: Model) -> None:
        """Load the weights of a model in the loader's thread, and use them."""
        self.loader.run(lambda: self._load_model(model))

    def _load_model(self, model: Model) -> None:
        try:
            value = self._load(model.value)
        except Exception:
            self.counts.weights_failures += 1
            _log.exception("inference node %s: version %d of %r was not loaded", self._name, model.version, model.topic)
            return
        self.use(value, model.version)

    def stop(self, timeout: float) -> bool:
        """End all threads; return False if the function or the loading still runs after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        has_ended = self.worker.stop(max(0.0, timeout), linger=min(timeout, 1.0))
        for thread in (self.batches, self.loader):
            has_ended = thread.stop(max(0.0, deadline - time.monotonic())) and has_ended
        return has_ended

    # ------------------------------------------------------------------------- from here on: in the thread

    def _next_time(self) -> float:
        times = [self.send_queues.next_time()]
        if not self._is_running:
            times.append(self.batching.next_time(time.monotonic(), self._version))
        times += [part.next_time() for part in (self.models, self.service) if part is not None]
        return min(times)

    @property
    def _version(self) -> int:
        """Version of the weights; -1 while rows wait for the first weights."""
        return self.weights.version if self.weights.is_there or not self.is_waiting else -1

    def _turn(self, ready: dict[object, int]) -> None:
        if self._router in ready:
            self._take_requests()
        if self.models is not None:
            self.models.tick(ready)
        if self.service is not None:
            self.service.tick()
        self.send_queues.tick(time.monotonic())
        self._start_batch()

    def _at_end(self) -> None:
        if self.service is not None:
            self.service.close()
        if self.models is not None:
            self.models.close()

    def _swap(self, weights: Weights) -> None:
        with self.changed.held():
            self.weights = weights
            self.changed.notify_all()

    # Requests

    def _take_requests(self) -> None:
        for _ in range(REQUESTS_PER_TURN):
            frames = sockets.receive(self._router, most=sockets.ENVELOPE)
            if frames is None:
                return
            descriptor = sockets.descriptor_of(frames[-1])
            request = self.admission.receive_request(self._router, frames)
            if request is not None:
                self._serve(request, descriptor)

    def _serve(self, request: EnvelopedRequest, descriptor: int) -> None:
        self.counts.requests += 1
        now = time.monotonic()
        try:
            message = self.admission.parse(request, now)
            if message.header.client == NO_CLIENT:
                raise ProtocolError("client", "a request needs a client id")
            self._clients_of.setdefault(descriptor, set()).add(message.header.client)
            answer = self._answers.get(type(message.body))
            if answer is None:
                node = "an inference node, which answers HELLO and INFER" if self.service is None else self.service.node
                raise ProtocolError("unexpected", f"{message.type.name} was sent to {node}. Ask a server or an agent")
            answer(request, message, descriptor, now)
        except ProtocolError as error:
            refusal = self.admission.refuse_request(request, error)
            if refusal is not None:
                self.send(refusal)

    def _greet(
        self, request: EnvelopedRequest, message: Message, body: messages.Hello, descriptor: int, now: float
    ) -> None:
        client, welcome = message.header.client, self._welcome()
        self.receivers.register_hello(client, body)
        if self.service is not None:
            self.service.hello(client, body.name)
        frames = reply(message.header, welcome)
        self.receivers.limits_of(client).check(client, welcome, frames)
        self.send([*request.envelope, *frames])

    def check_patience(self, patience: float) -> None:
        """Refuse a request whose patience is too long. Raises ProtocolError (code "too_large")."""
        if patience > (most := self.limits.tuning.patience):
            text = f"a wait of {patience:g} s is too long; {most:g} s are allowed (patience). Use a shorter timeout"
            raise ProtocolError("too_large", text)

    def _ask(
        self, request: EnvelopedRequest, message: Message, body: messages.Infer, descriptor: int, now: float
    ) -> None:
        self.check_patience(body.patience)
        inputs, header = self.computation.inputs, message.header
        if header.fingerprint != inputs.fingerprint:
            raise ProtocolError("schema", f"the rows have another schema; this node expects {inputs!r}"[:1000])
        size = unpacked_size(message.payload, inputs)
        with self._received.reserved(size):
            self._take_rows(request, message, body, now, size)

    def _take_rows(
        self, request: EnvelopedRequest, message: Message, body: messages.Infer, now: float, size: int
    ) -> None:
        header = message.header
        columns, rows = unpack_rows(message.payload, self.computation.inputs, self.limits)
        if body.job and self.service is not None:
            self.service.check(header.client, body.job, now)
        key = header.client, header.sequence
        if key in self._open:  # a resend may have come by a new connection
            self._open[key].envelope = request.envelope
        asked = _OpenRequest(request.envelope, header, columns)
        widths = widths_of(columns)
        of = size + rows * sum(widths), widths
        wanted = (header.client, header.sequence, rows, asked, now, now + body.patience, body.min_version, *of)
        kept = self.batching.ask(InferenceRequest(*wanted), self._version)
        if kept is not None:
            self.send([*request.envelope, *kept.content])
        elif key not in self._open:
            self._open[key] = asked
            self.counts.rows += rows

    def _welcome(self) -> messages.Welcome:
        computation = self.computation
        return messages.Welcome(
            schema=computation.inputs.to_json(),
            outputs=computation.outputs.to_json(),
            storage="inference",
            home_name=self._name,
            endpoints=messages.NodeEndpoints(request=self.endpoint),
            models={"": self.weights.version},
            limits={"request_bytes": self.limits.tuning.request_bytes, "rows": self.batching.max_batch},
            software=f"memoire {VERSION}",
            pages=list(self.pages),
            **({} if self.service is None else self.service.welcome()),
        )

    def send(self, frames: Sequence[Buffer]) -> None:
        """Send an answer, its envelope and frames."""
        self.send_queues.send(self._router, frames, time.monotonic())

    def _count(self, error: ProtocolError) -> None:
        self.counts.refused[error.code] += 1

    def _own(self, client: bytes, principal: str) -> None:
        self._owners.check(client, principal, time.monotonic())

    def _hung_up(self, descriptor: int) -> None:
        for client in self._clients_of.pop(descriptor, ()):
            self.batching.remove_client(client)
        if self.service is not None:
            self.service.handle_disconnect(descriptor)

    # Batches

    def _start_batch(self) -> None:
        if self._is_running:
            return
        expired, now = self.batching.expired, time.monotonic()
        batch = self.batching.take(now, self._version)
        if self.batching.expired != expired:
            self._open = {key: asked for key, asked in self._open.items() if self.batching.is_open(*key)}
        if batch is not None:
            self._is_running = True
            weights = self.weights
            if self._quick >= QUICK_BATCHES:
                self._compute(batch, weights, now)
            else:
                self.batches.run(lambda: self._compute(batch, weights, now))

    def _compute(self, batch: RequestBatch, weights: Weights, fired: float) -> None:
        """Run the function for a batch, in the batches' thread or in the present thread."""
        begun, parts = time.perf_counter(), []
        for request in batch.requests:
            parts.append(request.content.columns)
            request.content.columns = {}
        try:
            outputs: Rows | ProtocolError = self.computation.run(parts, weights)
        except ProtocolError as error:
            _log.error("inference node %s: %s", self._name, error.detail, exc_info=error.__cause__)
            outputs = error.with_traceback(None)  # frames of the traceback would hold the batch
        except Exception as error:
            outputs = self._failure(error, batch.rows)
        took = time.perf_counter() - begun
        if self.worker.is_here:
            self._finish(batch, outputs, weights, fired, took)
        else:
            self.worker.post(lambda: self._finish(batch, outputs, weights, fired, took))

    def _finish(
        self, batch: RequestBatch, outputs: Rows | ProtocolError, weights: Weights, fired: float, took: float
    ) -> None:
        """Send the answers, each as soon as it is packed, so that clients can continue meanwhile."""
        self._is_running = False
        self._quick = self._quick + 1 if took < QUICK_TIME else 0
        counts, now, rows, first = self.counts, time.monotonic(), batch.rows, 0
        counts.failures += isinstance(outputs, ProtocolError)
        counts.batched_rows += rows
        counts.computed += took
        for request in batch.requests:
            asked = self._open.pop((request.client, request.number), request.content)
            body = messages.Inferred(version=weights.version, batch=rows, waited=max(0.0, fired - request.arrived))
            frames, kept = self._answer_to(request, asked, body, outputs, first)
            self.batching.receive_answer(request, kept)
            counts.waits.record(batch.reason, fired - request.arrived)
            counts.durations.record(batch.reason, now - request.arrived)
            self.send([*asked.envelope, *frames])
            first += request.rows
        if isinstance(outputs, dict):
            outputs.clear()  # the thread may hold its last task

    def _answer_to(
        self,
        request: InferenceRequest,
        asked: _OpenRequest,
        body: messages.Inferred,
        outputs: Rows | ProtocolError,
        first: int,
    ) -> tuple[list[Buffer], KeptReply | None]:
        """Return the frames that answer a request of a batch, and the reply to keep; None for a refusal."""
        refusal = outputs if isinstance(outputs, ProtocolError) else None
        try:
            if not isinstance(outputs, ProtocolError):
                payload = self._packed(outputs, first, request.rows, request.client)
                fingerprint = self.computation.outputs.fingerprint
                frames = reply(asked.header, body, payload=payload, fingerprint=fingerprint)
                return frames, KeptReply(frames, len(frames[0]) + len(frames[1]))
        except ProtocolError as error:
            refusal = error.with_traceback(None)
        except Exception as error:
            refusal = self._failure(error, body.batch)
        assert refusal is not None
        self.counts.refused[refusal.code] += 1
        return reply(asked.header, messages.Refusal(code=refusal.code, text=refusal.detail)), None

    def _failure(self, error: Exception, rows: int) -> ProtocolError:
        """Return the refusal of a failed batch, for example for lack of memory. The next batch may succeed."""
        _log.error("inference node %s: a batch failed", self._name, exc_info=error)
        return ProtocolError("failed", escape(f"a batch of {rows} rows failed: {type(error).__name__}: {error}")[:500])

    def _packed(self, rows_by_name: Rows, first: int, rows: int, client: bytes) -> bytes:
        """Return the container of some rows of the outputs. Raises ProtocolError for rows above the limit."""
        outputs = self.computation.outputs
        known = pack_known(outputs, rows_by_name, rows, first)
        payload = pack_rows(outputs, cut(rows_by_name, first, first + rows), rows) if known is None else known
        most = min(self.limits.tuning.request_bytes, self.receivers.limits_of(client).request_bytes)
        if len(payload) > most:
            text = (
                f"the outputs of {rows} rows have {len(payload)} bytes; {most} are allowed (request_bytes). Send "
                "fewer rows"
            )
            raise ProtocolError("too_large", text)
        return payload


class _HangUps(ConnectionWatcher):
    """Watcher of ended connections at an address without keys."""

    def __init__(self, socket: Socket, hung_up: Callable[[int], None]) -> None:
        super().__init__(socket)
        self._hung_up = hung_up
        self.watch(zmq.EVENT_DISCONNECTED)

    def handle_event(self, event: int, value: int, address: str) -> None:
        self._hung_up(value)
