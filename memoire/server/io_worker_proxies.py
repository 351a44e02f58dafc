"""Plain proxies that a server runs in its callers' threads: one address shared out among the workers behind another."""

from __future__ import annotations

import functools
import threading
import time

from memoire._core import Condition
from memoire.errors import MemoireError
from memoire.limits import Limits
from memoire.net import sockets
from memoire.net.admission import PUSH_PLACE, REQUEST_PLACE, Admission
from memoire.net.context import Context, Socket
from memoire.net.curve_server import Gate
from memoire.net.plain_proxy import forward
from memoire.net.send_queues import SendQueues
from memoire.wire.byte_budget import ByteHolder

from .io_addresses import BoundAddresses
from .io_intake import HEADER_BYTES


class WorkerProxies:
    """Those that run now. From any thread.

    Args:
        room: Of replies that wait for room in their connection.
        is_closing: Ends all of them.
    """

    def __init__(
        self,
        gate: Gate,
        admission: Admission,
        addresses: BoundAddresses,
        room: ByteHolder,
        *,
        context: Context,
        limits: Limits,
        is_closing: threading.Event,
    ) -> None:
        self._gate, self._admission, self._addresses, self._room = gate, admission, addresses, room
        self._context, self._limits, self._is_closing = context, limits, is_closing
        self._changed = Condition()  # guards the one below
        self._running = 0
        self.lanes: list[SendQueues] = []
        """Replies that wait for room, of each that there ever was; they belong to the callers' threads."""

    @property
    def running(self) -> int:
        """How many there are now."""
        return self._running

    def run_requests(self, front: str, back: str) -> None:
        """Hand requests and their replies on; blocks until the server closes."""
        frontend = sockets.request_server(self._context, self._limits.request_bytes)
        lanes = SendQueues(room=self._room)
        self.lanes.append(lanes)
        backend = sockets.plain_dealer(self._context, self._limits.reply_bytes)
        self._run(frontend, front, backend, back, place=REQUEST_PLACE, replies=lanes)

    def run_pushes(self, front: str, back: str) -> None:
        """Hand caches or episodes on; blocks until the server closes."""
        frontend = sockets.data_receiver(self._context, self._limits.message_bytes + HEADER_BYTES)
        self._run(frontend, front, sockets.data_sender(self._context), back, place=PUSH_PLACE)

    def _run(
        self, frontend: Socket, front: str, backend: Socket, back: str, *, place: int, replies: SendQueues | None = None
    ) -> None:
        ways = {}
        try:
            bound, ways[frontend] = self._gate.bind(frontend, front)
            self._addresses.warn_open(bound, back)
            _, ways[backend] = self._gate.bind(backend, back, only="server")
        except MemoireError:
            frontend.close(0)
            backend.close(0)
            raise
        self._count(1)
        try:
            pass_on = functools.partial(self._admission.pass_on, frontend, place)
            forward(frontend, backend, pass_on, replies=replies, until=self._is_closing, ways=ways)
        finally:
            self._count(-1)

    def _count(self, change: int) -> None:
        with self._changed.held():
            self._running += change
            self._changed.notify_all()

    def wait_ended(self, deadline: float) -> None:
        """Wait until the callers have closed their sockets."""
        with self._changed.held():
            self._changed.wait_for(lambda: not self._running, max(0.0, deadline - time.monotonic()))
