"""A server's state folder at work: replies that wait until what they say is on disk.

desk ── changes ──▶ writer's thread saves a group ──▶ requests' thread sends the replies that waited for it
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

from memoire.accounting.journal import Group, Ticket
from memoire.accounting.runs import Keeper
from memoire.net.thread import Worker
from memoire.wire import messages
from memoire.wire.frames import Header

from .dispatch import Desk, Reply

_log = logging.getLogger(__name__)

MAX_TEXT = 1000
"""Characters in which a client hears what is wrong with the disk."""


class Saving:
    """Lets replies go: at once, or when they are true of the disk too.

    Args:
        store: The state folder; None if there is none, and then every reply goes at once.
        worker: The requests' thread, which sends what waited.
    """

    def __init__(self, desk: Desk, store: Keeper | None, worker: Worker) -> None:
        self._desk, self._store, self._worker = desk, store, worker
        self.lost: Exception | None = None
        """Why nothing can be saved any more, ever; None while all is well. From then on nothing is acknowledged."""

    def start(self) -> None:
        """Begin to save."""
        if self._store is not None:
            self._store.start(self._desk.collect, self._saved, self._lose)
            self._store.wake()

    def release(self, header: Header, reply: Reply, send: Callable[[Reply], None]) -> None:
        """Send the reply to a request as soon as it may leave. Called in the requests' thread."""
        if self._store is None or not reply.until_saved:
            send(reply)
        elif isinstance(reply.body, messages.Updated) and not self._store.is_healthy:
            # The client says all of it again, so no reply has to wait; and it hears why nothing is acknowledged.
            send(Reply(messages.Refused(code="disk", text=self._store.trouble[:MAX_TEXT])))
        else:
            self._desk.when_saved(header, functools.partial(send, reply))

    def _saved(self, group: Group) -> None:
        self._desk.saved()
        if group.tickets:
            self._worker.post(functools.partial(self._hand_out, group.tickets))

    def _hand_out(self, tickets: list[Ticket]) -> None:
        for ticket in tickets:
            try:
                ticket()
            except Exception:
                self._worker.errors += 1
                _log.exception("%s: something that waited for the disk failed", self._desk.name)

    def _lose(self, error: Exception) -> None:
        self.lost = error
        _log.critical("%s: %s", self._desk.name, error)
        for table in self._desk.tables:
            table.pool.close()

    def close(self, timeout: float) -> None:
        """Save what is left, and let go of the folder."""
        if self._store is not None and not self._store.close(timeout):
            _log.warning("%s: not everything could be saved; clients that go on will say it again", self._desk.name)
