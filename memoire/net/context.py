"""The ZeroMQ context of this process, and what its sockets are called in annotations."""

from __future__ import annotations

import os
import threading
from typing import TypeAlias

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
