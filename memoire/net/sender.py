"""One socket of those that a node sends by, made again whenever its address changes. It belongs to the node's thread.

what waits ──▶ send(socket) ──▶ all went: nothing to wait for
└─▶ no room:  the thread takes a turn when there is some
"""

from __future__ import annotations

from collections.abc import Callable

from .context import Socket
from .poller import Poller


class Sender:
    """A socket that is watched for room only while something waits; none before `use`.

    Args:
        is_reading: Whether answers come by it.
    """

    def __init__(self, doors: Poller, *, is_reading: bool) -> None:
        self.socket: Socket | None = None
        """None while nobody is known who would take anything."""
        self._doors, self._is_reading, self._is_blocked = doors, is_reading, False

    def use(self, made: Socket) -> None:
        """Send by this socket from now on; the former one was dropped."""
        self.socket = self._doors.add(made, reading=self._is_reading)

    def drop(self, linger: float) -> None:
        """Close the socket; it goes on sending for `linger` seconds."""
        if self.socket is not None:
            self._doors.drop(self.socket, linger)
        self.socket, self._is_blocked = None, False

    def turn(self, send: Callable[[Socket], bool]) -> bool:
        """Send what there is room for; returns whether everything went.

        Args:
            send: Sends by a socket, and says the same.
        """
        if self.socket is None:
            return False
        is_blocked = not send(self.socket)
        if is_blocked != self._is_blocked:
            self._is_blocked = is_blocked
            self._doors.watch(self.socket, reading=self._is_reading, writing=is_blocked)
        return not is_blocked
