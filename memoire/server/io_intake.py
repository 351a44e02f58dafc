"""The threads that take what clients push, caches or episodes: one for each address."""

from __future__ import annotations

import functools
import threading

from memoire.errors import ProtocolError
from memoire.limits import Limits
from memoire.net import link, sockets
from memoire.net.admission import Admission
from memoire.net.context import Context, Socket
from memoire.net.thread import Worker
from memoire.pool.tables import Tables
from memoire.security.keyfolder import Keys
from memoire.wire import messages

from .dispatch import Dispatcher
from .io_addresses import BoundAddresses

CACHES_PER_TURN = 100
HEADER_BYTES = 1 << 16
"""What a message may have beyond its payload's `limits.message_bytes`."""


class IntakeThreads:
    """Takes what is pushed.

    Args:
        is_closing: Ends the threads' turns.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        admission: Admission,
        addresses: BoundAddresses,
        *,
        context: Context,
        limits: Limits,
        keys: Keys | None,
        is_closing: threading.Event,
    ) -> None:
        self._dispatcher, self._admission, self._addresses = dispatcher, admission, addresses
        self._context, self._limits, self._keys, self._is_closing = context, limits, keys, is_closing
        self.workers: list[Worker] = []
        limit_pushes(dispatcher.tables, limits.message_bytes)

    def add(self, endpoint: str, bind: bool) -> str:
        """Take what comes in at one more address, on a thread of its own; returns the address as it is bound.

        Args:
            bind: False connects to a plain proxy's back instead.
        """
        usual, most = self._dispatcher.tables.usual_bytes, self._limits.message_bytes
        largest = sockets.largest_push(usual, most) + HEADER_BYTES
        made = sockets.data_receiver(self._context, largest, sockets.data_mark(usual, most))
        bound, way = self._addresses.bind(made, endpoint) if bind else (endpoint, None)
        worker = Worker(f"memoire-pull-{len(self.workers)}", functools.partial(self._pull, made))
        worker.doors.add(made, way=way)
        try:
            if not bind:
                link.dial(worker.doors, made, endpoint, keys=self._keys)
        except BaseException:
            worker.stop(0.0)
            raise
        self.workers.append(worker)
        worker.start()
        return bound

    def _pull(self, made: Socket, ready: dict[object, int]) -> None:
        # Waits inside of the receive while messages come: with a poll before each one, polls would be half of the work.
        # Yet a turn ends some time, so that the thread is seen to be alive.
        for _ in range(CACHES_PER_TURN):
            frames = None if self._is_closing.is_set() else sockets.receive(made, most=3, wait=True)
            if frames is None:
                return
            message = self._admission.receive_push(made, frames)
            if message is not None:
                assert isinstance(message.body, messages.Cache | messages.Episode)
                try:
                    self._dispatcher.arrived(message.header, message.body, message.payload)
                except ProtocolError:
                    pass  # counted where it was found


def limit_pushes(tables: Tables, message_bytes: int) -> None:
    """Have tables say the largest push that the addresses take."""
    for table in tables:
        table.push_bytes = sockets.largest_push(tables.usual_bytes, message_bytes)
