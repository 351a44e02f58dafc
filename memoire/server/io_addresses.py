"""Where a server listens, and whether anybody is told that those addresses are open to all."""

from __future__ import annotations

import time

from memoire.net import sockets
from memoire.net.connection_watcher import ConnectionWatcher
from memoire.net.context import Socket
from memoire.net.curve_server import Gate
from memoire.security import exposure
from memoire.wire import messages


class BoundAddresses:
    """What a server has bound, and what it says of that.

    Args:
        name: The server's.
        gate: Decides who may come in.
    """

    def __init__(self, name: str, gate: Gate) -> None:
        self._name, self._gate = name, gate
        self._bound: list[str] = []
        self._warned = 0  # of these, how many it was said of whether they are open
        self.endpoints = messages.Endpoints()
        """What clients connect to, as WELCOME says it."""

    def bind(self, made: Socket, endpoint: str) -> tuple[str, ConnectionWatcher | None]:
        """Bind a socket; returns the address with its port, and what its owner has to follow."""
        bound, way = self._gate.bind(made, endpoint)
        self._bound.append(bound)
        return bound, way

    def warn_open(self, *plain: str) -> None:
        """Warn of addresses bound since the last call, and of `plain` ones, if everybody may come in there."""
        if self._gate.keys is None:
            new, self._warned = self._bound[self._warned :], len(self._bound)
            exposure.warn(f"server {self._name!r}", [*new, *plain], guard="keys (keys=)")

    def wait_unbound(self, deadline: float) -> None:
        """Wait until others can bind these addresses."""
        sockets.wait_unbound(self._bound, deadline - time.monotonic())
