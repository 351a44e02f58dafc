"""The ZeroMQ context of this process, and what its sockets are called in annotations.

What looks after one socket's connections inside of a `Poller`.

What ZeroMQ tells about the connections of a socket.
"""

from __future__ import annotations

import itertools
import os
import struct
import threading
from collections.abc import Iterator
from typing import Protocol, TypeAlias

import zmq

from memoire import _core
from memoire.errors import ParameterError

Context: TypeAlias = "zmq.Context[zmq.Socket[bytes]]"
Socket: TypeAlias = "zmq.Socket[bytes]"

SOCKETS_PER_CONTEXT = 8192
MAX_IO_THREADS = 64


class _Socket(zmq.Socket[bytes]):
    """pyzmq's, with a `send` that is compiled: what it has around that is for kinds of sockets that nobody has here."""

    send = zmq.backend.Socket.send  # type: ignore[assignment]


class _Context(zmq.Context[zmq.Socket[bytes]]):
    _socket_class = _Socket


_io_threads = 1  # of contexts that are made from now on
_contexts: dict[int, Context] = {}  # by process id: one at most that is ours
_context_lock = threading.Lock()


def _after_fork() -> None:
    global _context_lock  # noqa: PLW0603
    _context_lock = threading.Lock()  # another thread may have held it, which is not there any more


os.register_at_fork(after_in_child=_after_fork)


def shared_context() -> Context:
    """The one context of this process; a forked child gets a new one, since sockets do not survive a fork."""
    with _core.Held(_context_lock):
        context = _contexts.get(os.getpid())
        if context is None or context.closed:
            context = _contexts[os.getpid()] = _Context(_io_threads)
            context.set(zmq.MAX_SOCKETS, SOCKETS_PER_CONTEXT)
        return context


def use_io_threads(count: int) -> None:
    """Have the context of this process, which is not made yet, move and encrypt bytes on so many threads of ZeroMQ's.

    A connection belongs to one of them: more threads than connections bring nothing.
    """
    global _io_threads  # noqa: PLW0603
    if not 1 <= count <= MAX_IO_THREADS:
        raise ParameterError("--io-threads", count, f"a number from 1 to {MAX_IO_THREADS}")
    _io_threads = count


def library_version() -> str:
    """Version of libzmq."""
    return zmq.zmq_version()


class ConnectionWatcher(Protocol):
    """What a `Poller` needs of a `link.Link`, or of what watches a socket that listens."""

    @property
    def look_at(self) -> float:
        """When `turn` has something to do."""

    @property
    def monitor(self) -> Socket | None:
        """What ZeroMQ tells about the connection through."""

    def turn(self, now: float) -> None:
        """Do what is due."""

    def heard(self) -> None:
        """Take what the monitor has."""

    def leave(self, made: Socket) -> None:
        """Forget a socket that is about to be closed."""

    def close(self) -> None:
        """Give the monitor back."""


EVENT = struct.Struct("=HI")
"""What a monitor's message begins with: the event and its value; the address is its last frame."""
_monitors = itertools.count(1)


def monitor(made: Socket, events: int) -> Socket:
    """Where ZeroMQ tells what happens to the connections of a socket; ended by `end_monitor`, before the socket is."""
    address = f"inproc://memoire-monitor-{next(_monitors)}"
    made.monitor(address, events)
    heard: Socket = made.context.socket(zmq.PAIR)
    heard.setsockopt(zmq.LINGER, 0)
    # Without a bound: ZeroMQ's own thread would wait for room, and with it every socket of the context.
    heard.setsockopt(zmq.RCVHWM, 0)
    heard.connect(address)
    return heard


def events(heard: Socket) -> Iterator[tuple[int, int, str]]:
    """What a monitor has told since the last call: event, value, and the address that it is about."""
    while True:
        try:
            frames = heard.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return
        event, value = EVENT.unpack(frames[0])
        yield event, value, frames[-1].decode("utf-8", "replace")


def end_monitor(made: Socket, heard: Socket) -> None:
    """Listen no more."""
    # In this order: an event for a monitor that nobody holds would stop ZeroMQ's own thread for ever.
    if not made.closed:
        made.disable_monitor()
    heard.close(0)
