"""The thread that answers requests, at one address or several.

    ROUTER ──▶ Admission ──▶ Dispatcher ──▶ Committer: on disk? ──▶ Lanes: room? ──▶ ROUTER

Its turn also tells subscribers, flushes the log file and lets silent accounts leave memory.
"""

from __future__ import annotations

import functools
import logging
import threading
import time

import zmq

from memoire.accounting.runs import StateStore
from memoire.accounting.timings import Timings
from memoire.errors import Closed, ProtocolError
from memoire.net import sockets
from memoire.net.admission import Admission
from memoire.net.connection_watcher import ConnectionWatcher
from memoire.net.context import Socket
from memoire.net.send_queues import SendQueues
from memoire.net.thread import Worker
from memoire.pool.desk import Reply
from memoire.security.envelope import EnvelopedRequest
from memoire.wire import types
from memoire.wire.frames import Message, MessageHeader

from .dispatch import Dispatcher
from .durability import is_saved_first
from .io_lines import LineFile
from .io_notices import Announcer
from .io_saving import ReplySaver

_log = logging.getLogger(__name__)

FOLD_INTERVAL = 5.0
"""Seconds between two looks for accounts that may leave memory."""
REQUESTS_PER_TURN = 100
UNREPORTED_TIMEOUT = 2.0
"""Seconds within which a client was heard from that is worth waiting for when a finished server closes."""
TOLD_INTERVAL = 0.01
"""Seconds between two looks at whether all of them know."""


class RequestThread:
    """Everything here belongs to the thread, but for the methods that say otherwise.

    Args:
        announcer: Tells subscribers in this thread.
        lines: Where clients' lines go, flushed in this thread.
        owner: Lives as long as the thread: somebody may have dropped the server, while clients use it.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        admission: Admission,
        store: StateStore | None,
        announcer: Announcer,
        lines: LineFile,
        owner: object,
    ) -> None:
        self._owner = owner
        self._dispatcher, self._admission, self._announcer, self._lines = dispatcher, admission, announcer, lines
        self.worker = Worker("memoire-requests", self._turn, self._next_time)
        self.saving = ReplySaver(dispatcher, store, self.worker)
        self.lanes, self._shared = SendQueues(room=dispatcher.replies), sockets.SharedFrame()
        """Replies that wait for room."""
        self.timings = Timings(kind.name for kind in types.TYPES.values())
        """Seconds that requests took, by type."""
        self.is_drained = threading.Event()
        """Set when no request is taken any more."""
        self._sockets: set[Socket] = set()
        self._fold_at = time.monotonic() + FOLD_INTERVAL

    # From any thread

    def add(self, made: Socket, way: ConnectionWatcher | None) -> None:
        """Answer what comes by this socket, which is handed over: no other thread may use it from here on."""
        self.worker.post(lambda: self._sockets.add(self.worker.doors.add(made, way=way)))

    def drain(self, deadline: float) -> None:
        """Answer the requests that are there, and take no more: what they change is saved with the last group."""
        if self._answers_others:
            self.worker.post(self._last_turn)
            self.is_drained.wait(max(0.0, deadline - time.monotonic()))
        self.is_drained.set()

    def tell_finished(self, deadline: float) -> None:
        """Go on answering until the clients know that the run is over: each asks every `update_every` seconds."""
        while self._answers_others and time.monotonic() < deadline and self._dispatcher.untold(UNREPORTED_TIMEOUT):
            time.sleep(TOLD_INTERVAL)

    @property
    def _answers_others(self) -> bool:
        """Whether the thread goes on while the caller waits."""
        return self.worker.is_alive and not self.worker.is_here

    # Turns

    def _next_time(self) -> float:
        return min(self._announcer.next_time(), self._lines.next_time(), self._fold_at, self.lanes.next_time())

    def _turn(self, ready: dict[object, int]) -> None:
        if self.is_drained.is_set():
            self._stop_reading()
        for made in self._sockets.intersection(ready):
            self._take(made)
        self._announcer.turn(ready)
        self.lanes.turn(time.monotonic())
        if time.monotonic() >= self._fold_at:
            self._fold_at = time.monotonic() + FOLD_INTERVAL
            self._dispatcher.fold()
        self._lines.turn(time.monotonic())

    def _last_turn(self) -> None:
        self._turn(dict.fromkeys(self._sockets, zmq.POLLIN))
        self.is_drained.set()

    def _stop_reading(self) -> None:
        """Wait for no more requests: one that nobody takes would end each wait at once."""
        while self._sockets:
            self.worker.doors.watch(self._sockets.pop(), reading=False, writing=False)

    def _take(self, made: Socket) -> None:
        for _ in range(REQUESTS_PER_TURN):
            frames = sockets.receive(made, most=sockets.ENVELOPE)
            if frames is None:
                return
            request = self._admission.receive_request(made, frames)
            if request is not None:
                self._serve(made, request)

    def _serve(self, made: Socket, request: EnvelopedRequest) -> None:
        try:
            message = self._admission.parse(request, time.monotonic())
        except ProtocolError as error:
            refusal = self._admission.refuse_request(request, error)
            if refusal is not None:
                self.lanes.send(made, refusal, time.monotonic())
            return
        if self.saving.lost is not None and not is_saved_first(message.body):
            return  # it would count as a server that works: clients are to go elsewhere until it is started again
        began = time.perf_counter()
        reply = self._answer(message)
        self.timings.saw(message.type.name, time.perf_counter() - began)
        send = functools.partial(self._send, made, request.envelope, message.header)
        self._dispatcher.send(message.header, reply, send)

    def _answer(self, message: Message) -> Reply:
        try:
            return self._dispatcher.answer(message)
        except Closed:
            return self._dispatcher.refuse(ProtocolError("busy", "the server is closing"))
        except Exception:
            self.worker.errors += 1
            _log.exception("%s: a %s could not be answered", self._dispatcher.name, message.type.name)
            return self._dispatcher.refuse(ProtocolError("busy", "the server could not answer; its log says why"))

    def _send(self, made: Socket, envelope: list[zmq.Frame], header: MessageHeader, reply: Reply) -> None:
        payload = self._shared.of(reply.payload)
        sent = [*envelope, *self._dispatcher.frames_of(header, reply, payload)]
        self.lanes.send(made, sent, time.monotonic())
