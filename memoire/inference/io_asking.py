"""What asks inference nodes or agents by one thread of its own: closed alike, and found alike after a fork."""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Sequence
from typing import Protocol

from memoire.arguments import seconds
from memoire.errors import EndpointError
from memoire.limits import Limits
from memoire.net import addresses
from memoire.net.thread import END_TIMEOUT, Node, close_at_exit
from memoire.net.turns import LentWorker

from .choice import NodeChoice


class _Thread(Protocol):
    worker: LentWorker
    choice: NodeChoice


class Asker(Node):
    """A node that asks others, one at a time of several addresses."""

    CLOSED_AT_EXIT = 0

    def __init__(self, limits: Limits | None) -> None:
        self._limits, self._client = limits or Limits(), secrets.token_bytes(16)
        self._pid = os.getpid()
        self._closing, self._close_lock = threading.Event(), threading.Lock()

    @property
    def _asking(self) -> _Thread:
        """The thread, which has the sockets."""
        raise NotImplementedError

    def _start(self) -> None:
        self._asking.worker.start()
        close_at_exit(self)

    @property
    def urls(self) -> tuple[str, ...]:
        """The addresses, in the order in which they are asked."""
        return tuple(self._asking.choice.order)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closing.is_set()

    def close(self, timeout: float | None = None) -> None:
        """End the thread within `timeout` seconds: what is open raises Closed, or is given up. May be called again."""
        patience = seconds(timeout, self._limits.close_timeout)
        self._closing.set()
        with self._closer(time.monotonic() + patience) as is_mine:
            if is_mine:
                self._asking.worker.stop(max(END_TIMEOUT, patience))


def checked_urls(urls: str | Sequence[str]) -> list[str]:
    """Addresses to connect to, or one. Raises EndpointError: there is none, or one is malformed."""
    given = [urls] if isinstance(urls, str) else list(urls)
    if not given:
        raise EndpointError("[]", "connect to", "a policy needs the address of an inference node", "tcp://host:5570")
    for url in given:
        addresses.check(url, "connect to")
    return given
