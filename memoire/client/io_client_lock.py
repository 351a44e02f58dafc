"""How calls wait for a client's thread. Beside what every node has: processes that were forked, and what still leaves
while the client is closed.
"""

from __future__ import annotations

import os

from memoire.arguments import seconds
from memoire.errors import ForkedError
from memoire.net.node_monitor import NodeLock


class ClientLock(NodeLock):
    """The lock of everything that calls and the client's thread share.

    Args:
        request_timeout: Seconds that a call takes at most unless it says otherwise.
    """

    def __init__(self, request_timeout: float) -> None:
        super().__init__("this client")
        self.is_parting = False
        """While close() lasts, if episodes that are open in writers still leave."""
        self.closed_by = float("inf")
        """Until then."""
        self._request_timeout, self._pid = request_timeout, os.getpid()

    def seconds(self, timeout: float | None) -> float:
        """How long a call may take, as its caller says."""
        return seconds(timeout, self._request_timeout)

    @property
    def is_forked(self) -> bool:
        """Whether this process was forked from the client's: the lock may be held for ever, by a thread that is not
        here.
        """
        return os.getpid() != self._pid

    def check_process(self) -> None:
        """Raise ForkedError in a process forked from the client's. Before each use of the lock that does not come
        through the client itself.
        """
        if (pid := os.getpid()) != self._pid:
            raise ForkedError("this client", self._pid, pid)

    def check_open(self) -> None:
        """Raise Closed, or what the client failed of."""
        self.check_process()
        super().check_open()

    def check_shipping(self) -> None:
        """`check_open`, but what writers hold when the client is closed leaves before it ends."""
        if not self.is_parting:
            self.check_open()
