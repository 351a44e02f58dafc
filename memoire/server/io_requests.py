"""Request thread of a server: answers requests at one address or several.

    ROUTER ──▶ Admission ──▶ Dispatcher ──▶ Committer: on disk? ──▶ SendQueues: room? ──▶ ROUTER

A turn of the thread also notifies subscribers, flushes the log file and moves silent accounts out of memory.

Announcer: notices of models on the server's PUB socket, repeated for new subscribers, and NEWS.

publish ──▶ notice, at once, with a small body
subscription, or 5 s gone ──▶ Notices ──▶ the same again, without the body

Reply saver: replies that wait until the data that they acknowledge is on disk.

Committer ── changes ──▶ writer's thread saves a group ──▶ requests' thread sends the replies that waited for it
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import zmq

from memoire.accounting.runs import SavedGroup, StateStore, Ticket
from memoire.disk.logs import LineFile
from memoire.errors import Closed, ProtocolError
from memoire.figures import Timings
from memoire.models.model import Model, Notices, notice_of
from memoire.net import sockets
from memoire.net.curve_server import Admission
from memoire.net.poller import ConnectionWatcher, SendQueues
from memoire.net.sockets import Socket
from memoire.net.thread import Worker
from memoire.security.roles import EnvelopedRequest
from memoire.tables.registry import Reply
from memoire.wire import messages, types
from memoire.wire.frames import NEWS_FRAME, Message, MessageHeader, encode

from .dispatch import Dispatcher


class Announcer:
    """Announcer of new models and of NEWS to subscribers. Belongs to the requests' thread, except for `add_model` and
    `add_news`, which any thread may call, and `set_socket`, which is called before the thread begins.
    """

    def __init__(self) -> None:
        self._models: deque[Model] = deque()
        self._has_news = False
        self._schedule = Notices(time.monotonic())
        self._pub: Socket | None = None
        self.wake: Callable[[], None] = lambda: None
        """Function that wakes the requests' thread; set by that thread's owner."""

    def set_socket(self, pub: Socket, admits: Callable[[Socket, zmq.Frame], bool]) -> None:
        """Set the PUB socket; without a socket no notice is sent.

        Args:
            admits: Returns True if a subscription frame of a socket comes from an admitted client.
        """
        self._pub, self._admits = pub, admits

    def add_model(self, model: Model) -> None:
        """Queue the notice of a new model."""
        self._models.append(model)
        self.wake()

    def add_news(self) -> None:
        """Queue NEWS: all clients should send an UPDATE soon."""
        self._has_news = True
        self.wake()

    def next_time(self) -> float:
        """Return the time at which `tick` has something to send."""
        return time.monotonic() if self._has_news or self._models else self._schedule.next_time()

    def tick(self, dispatcher: Dispatcher, ready: dict[object, int]) -> None:
        """Repeat due notices, and send queued ones."""
        if self._pub is not None:
            self._repeat(dispatcher, self._pub, self._pub in ready)
        while self._models:
            self._tell(dispatcher, self._models.popleft())
        if self._has_news:
            self._has_news = False  # reset before the send: news that comes meanwhile is sent again
            self._send([NEWS_FRAME, *encode(messages.News(epoch=dispatcher.epoch))])

    def _repeat(self, dispatcher: Dispatcher, pub: Socket, is_asked: bool) -> None:
        """Send the newest models to new subscribers, which may have missed notices while they connected. Every few
        seconds send the newest models to all subscribers.
        """
        now = time.monotonic()
        with dispatcher.lock:
            if is_asked:
                self._schedule.subscribed(sockets.subscribed(pub, self._admits), dispatcher.models, now)
            for model in self._schedule.due_models(dispatcher.models, now):
                self._tell(dispatcher, model, again=True)

    def _tell(self, dispatcher: Dispatcher, model: Model, *, again: bool = False) -> None:
        home, epoch, run = dispatcher.home, dispatcher.epoch, dispatcher.run
        self._send(notice_of(model, dispatcher.limits, home=home, epoch=epoch, run=run, again=again))

    def _send(self, frames: list[Any]) -> None:
        if self._pub is not None:
            sockets.send(self._pub, frames)


class ReplySaver:
    """Sender of replies after the save of their data; also detects a lost disk.

    Args:
        store: The state folder; None if there is none, and then no reply waits.
        worker: The requests' thread, which sends the waiting replies.
    """

    def __init__(self, dispatcher: Dispatcher, store: StateStore | None, worker: Worker) -> None:
        self._dispatcher, self._store, self._worker = dispatcher, store, worker
        self.lost: Exception | None = None
        """Error after which nothing can be saved or acknowledged any more; None if there was none."""

    def start(self) -> None:
        """Start the store's thread, if there is a store."""
        if self._store is not None:
            self._store.start(self._dispatcher.collect, self._saved, self._lose, self._refuse)
            self._store.wake()

    # Calls on the store's thread; the requests' thread sends the replies

    def _saved(self, group: SavedGroup) -> None:
        self._dispatcher.mark_saved()
        self._deliver(group.tickets)

    def _refuse(self) -> None:
        """Refuse all waiting replies, because saving has to wait for room on the disk."""
        with self._dispatcher.lock:
            refusals = self._dispatcher.committer.refusals()
        self._deliver(refusals)

    def _lose(self, error: Exception) -> None:
        self.lost = error
        _log.critical("%s: %s", self._dispatcher.name, error)
        for table in self._dispatcher.tables:
            table.pool.close()
        self._refuse()

    def _deliver(self, tickets: list[Ticket]) -> None:
        if tickets:
            self._worker.post(functools.partial(self._hand_out, tickets))

    def _hand_out(self, tickets: list[Ticket]) -> None:
        for ticket in tickets:
            try:
                ticket()
            except Exception:
                self._worker.errors += 1
                _log.exception("%s: an action after a save failed", self._dispatcher.name)

    def close(self, timeout: float) -> None:
        """Save the remaining changes and release the folder."""
        if self._store is not None and not self._store.close(timeout):
            _log.warning(
                "%s: not everything could be saved; clients that go on will report it again", self._dispatcher.name
            )


_log = logging.getLogger(__name__)

FOLD_INTERVAL = 5.0
"""Seconds between two scans for accounts that may leave memory."""
REQUESTS_PER_TURN = 100
UNREPORTED_TIMEOUT = 2.0
"""Maximum seconds since a client's last message for a finished server to wait for that client at its close."""
FINISH_CHECK_INTERVAL = 0.01
"""Seconds between two checks if all clients have confirmed the end of the run."""


class RequestThread:
    """Thread that answers requests. Attributes and methods belong to the thread, except where marked.

    Args:
        announcer: Announcer that this thread drives.
        lines: Log file of clients' lines, which this thread flushes.
        owner: Object that the thread keeps alive: a user may drop the server while clients use it.
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
        self.send_queues, self._shared = SendQueues(room=dispatcher.replies), sockets.SharedFrame()
        """Send queues of replies that wait for room."""
        self.timings = Timings(kind.name for kind in types.TYPES.values())
        """Durations of requests in seconds, by type."""
        self.is_drained = threading.Event()
        """Event that is set after the thread has stopped reading requests."""
        self._sockets: set[Socket] = set()
        self._fold_at = time.monotonic() + FOLD_INTERVAL

    # Calls from any thread

    def add(self, socket: Socket, watcher: ConnectionWatcher | None) -> None:
        """Answer requests of this socket, which belongs to the thread from now on."""
        self.worker.post(lambda: self._sockets.add(self.worker.poller.add(socket, way=watcher)))

    def drain(self, deadline: float) -> None:
        """Answer the requests that have arrived, then stop reading: their changes are saved with the last group."""
        if self._answers_others:
            self.worker.post(self._last_turn)
            self.is_drained.wait(max(0.0, deadline - time.monotonic()))
        self.is_drained.set()

    def wait_end_confirmed(self, deadline: float) -> None:
        """Keep answering until the clients know that the run is over: each client asks every `update_every` seconds."""
        while (
            self._answers_others
            and time.monotonic() < deadline
            and self._dispatcher.unconfirmed_clients(UNREPORTED_TIMEOUT)
        ):
            time.sleep(FINISH_CHECK_INTERVAL)

    def last_reply_time(self, deadline: float) -> float:
        """Return the time of the last reply that was due before this call; -inf if no reply was sent."""
        if self._answers_others:
            sent = threading.Event()
            self.worker.post(sent.set)
            sent.wait(max(0.0, deadline - time.monotonic()))
        return self.send_queues.sent_at

    @property
    def _answers_others(self) -> bool:
        """True if the thread runs while the caller waits."""
        return self.worker.is_alive and not self.worker.is_here

    # Turns

    def _next_time(self) -> float:
        return min(self._announcer.next_time(), self._lines.next_time(), self._fold_at, self.send_queues.next_time())

    def _turn(self, ready: dict[object, int]) -> None:
        if self.is_drained.is_set():
            self._stop_reading()
        for socket in self._sockets.intersection(ready):
            self._take(socket)
        self._announcer.tick(self._dispatcher, ready)
        self.send_queues.tick(time.monotonic())
        if time.monotonic() >= self._fold_at:
            self._fold_at = time.monotonic() + FOLD_INTERVAL
            self._dispatcher.store_gone_accounts()
        self._lines.tick(time.monotonic())

    def _last_turn(self) -> None:
        self._turn(dict.fromkeys(self._sockets, zmq.POLLIN))
        self.is_drained.set()

    def _stop_reading(self) -> None:
        """Stop polling for requests: an unread request would end each wait at once."""
        while self._sockets:
            self.worker.poller.watch(self._sockets.pop(), reading=False, writing=False)

    def _take(self, socket: Socket) -> None:
        for _ in range(REQUESTS_PER_TURN):
            frames = sockets.receive(socket, most=sockets.ENVELOPE)
            if frames is None:
                return
            request = self._admission.receive_request(socket, frames)
            if request is not None:
                self._serve(socket, request)

    def _serve(self, socket: Socket, request: EnvelopedRequest) -> None:
        try:
            message = self._admission.parse(request, time.monotonic())
        except ProtocolError as error:
            refusal = self._admission.refuse_request(request, error)
            if refusal is not None:
                self.send_queues.send(socket, refusal, time.monotonic())
            return
        if self.saving.lost is not None and not message.body.is_saved_first:
            return  # no reply: clients should use another server until this one restarts
        began = time.perf_counter()
        reply = self._answer(message)
        self.timings.record(message.type.name, time.perf_counter() - began)
        send = functools.partial(self._send, socket, request.envelope, message.header)
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

    def _send(self, socket: Socket, envelope: list[zmq.Frame], header: MessageHeader, reply: Reply) -> None:
        payload = self._shared.share(reply.payload)
        sent = [*envelope, *self._dispatcher.frames_of(header, reply, payload)]
        self.send_queues.send(socket, sent, time.monotonic())
