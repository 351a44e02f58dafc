"""Clients that are one raw socket each: thousands fit into a process, and none asks a second time by itself."""

import os
import time
from collections.abc import Callable, Iterable
from typing import Any

import zmq

from memoire.limits import Limits
from memoire.net import sockets
from memoire.net.context import Socket
from memoire.security.keys import Keys
from memoire.wire import messages
from memoire.wire.frames import Message, encode, parse

LIMITS = Limits()
Told = dict[tuple[bytes, int], Message]
"""Replies by client and by the number of the request."""


class Callers:
    """Connected clients of one thread.

    Args:
        keys: A cluster's folder, whose actor's key all of them show.
        clients: How many ids they have between them, where they are fewer connections.
    """

    def __init__(self, endpoint: str, connections: int, keys: str | None = None, clients: int = 0) -> None:
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, connections + 10)
        own = Keys(keys, "actor") if keys else None
        self._sockets = [self._dial(endpoint, own) for _ in range(connections)]
        self._poller = zmq.Poller()
        self.ids = [os.urandom(16) for _ in range(clients or connections)]
        self._by_id = {client: self._sockets[place % connections] for place, client in enumerate(self.ids)}
        self.told: Told = {}

    def _dial(self, endpoint: str, keys: Keys | None) -> Socket:
        made = sockets.request_client(self._context, LIMITS.reply_bytes)
        made.setsockopt(zmq.SNDHWM, 0)
        if keys is not None:
            sockets.use_keys(made, keys.own.public, keys.own.secret, keys.servers[0].public)
        made.connect(endpoint)
        return made

    def connect(self, seconds: float) -> float:
        """Seconds until everybody was connected."""
        began = time.monotonic()
        for made in self._sockets:
            if not made.poll(int(1000 * max(0.0, began + seconds - time.monotonic())), zmq.POLLOUT):
                raise TimeoutError("not everybody was connected")
        for made in self._sockets:
            self._poller.register(made, zmq.POLLIN)
        return time.monotonic() - began

    def send(self, bodies: Callable[[bytes], Iterable[tuple[int, messages.Body]]]) -> int:
        """Send the numbered requests of every client, all at once; how many these are."""
        asked = [(client, number, body) for client in self.ids for number, body in bodies(client)]
        for client, number, body in asked:
            self.send_one(client, number, body)
        return len(asked)

    def send_one(self, client: bytes, number: int, body: messages.Body, **header: Any) -> None:
        """Send one request."""
        message = encode(body, client=client, sequence=number, **header)
        self._by_id[client].send_multipart([b"", *message])

    def hear(self, count: int, seconds: float) -> list[float]:
        """When replies came, in seconds from now, until there are so many or the time is over."""
        began, came = time.monotonic(), []
        while len(came) < count and (left := began + seconds - time.monotonic()) > 0:
            for made, _ in self._poller.poll(int(1000 * left) + 1):
                while (frames := sockets.receive(made)) is not None:
                    said = parse(frames[1:], LIMITS)
                    self.told[said.header.client, said.header.sequence] = said
                    came.append(time.monotonic() - began)
        return came

    def close(self) -> None:
        self._context.destroy(0)
