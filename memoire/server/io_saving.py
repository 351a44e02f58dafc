"""A server's state folder at work: replies that wait until what they say is on disk.

Committer ── changes ──▶ writer's thread saves a group ──▶ requests' thread sends the replies that waited for it
"""

from __future__ import annotations

import functools
import logging

from memoire.accounting.runs import StateStore
from memoire.accounting.unsaved_changes import Ticket
from memoire.net.thread import Worker

from .dispatch import Dispatcher

_log = logging.getLogger(__name__)


class ReplySaver:
    """Has replies that waited for the disk leave, and notices when the disk is lost.

    Args:
        store: The state folder; None if there is none, and then nothing waits.
        worker: The requests' thread, which sends what waited.
    """

    def __init__(self, dispatcher: Dispatcher, store: StateStore | None, worker: Worker) -> None:
        self._dispatcher, self._store, self._worker = dispatcher, store, worker
        self.lost: Exception | None = None
        """Why nothing can be saved any more, ever; None while all is well. From then on nothing is acknowledged."""

    def start(self) -> None:
        """Begin to save."""
        self._dispatcher.start_saving(self._deliver, self._lose)

    def _deliver(self, tickets: list[Ticket]) -> None:
        """Have the requests' thread send what waited for the disk."""
        self._worker.post(functools.partial(self._hand_out, tickets))

    def _hand_out(self, tickets: list[Ticket]) -> None:
        for ticket in tickets:
            try:
                ticket()
            except Exception:
                self._worker.errors += 1
                _log.exception("%s: something that waited for the disk failed", self._dispatcher.name)

    def _lose(self, error: Exception) -> None:
        self.lost = error
        _log.critical("%s: %s", self._dispatcher.name, error)
        for table in self._dispatcher.tables:
            table.pool.close()

    def close(self, timeout: float) -> None:
        """Save what is left, and let go of the folder."""
        if self._store is not None and not self._store.close(timeout):
            _log.warning(
                "%s: not everything could be saved; clients that go on will say it again", self._dispatcher.name
            )
