"""Process-wide settings that memoire changes: memory allocation, forked nodes, thread exceptions, file descriptors.

    in every process    arrays of batches and caches reuse memory that earlier ones gave back, 128 MiB at most
                        (`_core.empty`); no other arrays do
                        in a process forked from a node's, the node gets another class, whose methods raise ForkedError
                        instead of waiting for a lock that a thread of the parent held (`disable_in_child`)
    if it is tuned      the C library keeps freed blocks of megabytes (`_core.keep_freed_memory`)
                        at the interpreter's end `threading.excepthook` passes over Closed (`pass_over_in_threads`)
                        addresses that listen get a packet filter when nearly all descriptors are open, and the soft
                        limit of descriptors is a little lower (`DescriptorGuard`)

No other module changes the process. A process is tuned when its first `Server`, `Proxy` or `Reader` with
`tune_process=True`, the default, is made, or by a program of `memoire.nodes`. A `Buffer` or client never tunes.
Tuning cannot be undone.

File descriptors: a client costs a server or proxy three. If no descriptor is free, a connection that waits to be
accepted stays waiting, and ZeroMQ tries again and again: that takes half a core and helps no client. Before descriptors
run out, the listening sockets get a packet filter that drops new connections, until descriptors are free again. Clients
see an address that does not answer, and try again. Existing connections do not notice, and connections that already
wait are still accepted.

A flood of connections is faster than periodic checks. A reserve of descriptors is out of a flood's reach: the soft
limit is lower by `reserve`, and is raised when the filter is set. Fewer connections can wait than are reserved, so that
some descriptors are left for pages, probes and files.
"""

from __future__ import annotations

import ctypes
import logging
import os
import resource
import socket
import struct
import threading
import time
from collections.abc import Iterable
from typing import Any, Final, Protocol

from memoire import _core

_log = logging.getLogger(__name__)

_SO_ATTACH_FILTER: Final = 26
_SO_DETACH_FILTER: Final = 27
_NOTHING: Final = struct.pack("=HBBI", 0x06, 0, 0, 0)  # one instruction: BPF_RET with 0 bytes of the packet

_is_tuned = False  # set by `tune`


def tune() -> None:
    """Tune this process for a node that moves large messages or serves clients; later calls do nothing. Thread-safe."""
    global _is_tuned  # noqa: PLW0603
    if not _is_tuned:
        _is_tuned = True
        _core.keep_freed_memory()


def is_tuned() -> bool:
    """Return True if `tune` was called in this process."""
    return _is_tuned


def pass_over_in_threads(kind: type[BaseException]) -> None:
    """Print no traceback when a thread ends with an error of this kind. Only in a process that `tune` has tuned.

    All nodes are closed when the interpreter exits. Daemon threads that wait for a node then raise `Closed`, which is
    expected.
    """
    if _is_tuned:
        report = threading.excepthook
        threading.excepthook = lambda failed: None if failed.exc_type is kind else report(failed)


def disable_in_child(nodes: Iterable[Any], forked: type) -> None:
    """Replace the class of nodes in a forked child by a subclass whose methods are those of `forked`."""
    answers = {name: value for name, value in vars(forked).items() if name not in ("__dict__", "__weakref__")}
    for node in nodes:
        kind = type(node)
        # The former class is the only base: an object can change only to a class of the same memory layout, and a class
        # with several bases may have another layout.
        node.__class__ = type(kind.__name__, (kind,), answers | {"__module__": kind.__module__})


DESCRIPTORS_PER_CLIENT = 3
"""File descriptors of one client: its connections for requests, caches and notices."""
OWN_DESCRIPTORS = 64
"""File descriptors of a process without clients."""
POLL_INTERVAL = 0.5
"""Seconds between two checks of the number of open descriptors."""
RESERVED, MIN_RESERVED, MAX_RESERVED = 32, 16, 4096
"""Reserve of descriptors that new connections cannot use: one in 32, but at least 16 and at most 4096."""
LISTENERS = 3
"""Number of listening addresses of one node."""
MAX_WAITING = 1024
"""Most connections that wait to be accepted at one address."""
WARNING_INTERVAL = 60.0
MAX_DESCRIPTORS = 1 << 20
"""Largest limit that is set: some programs loop over all descriptors that they may have."""


class _ListeningSocket(Protocol):
    @property
    def closed(self) -> bool: ...


class System:
    """File descriptor limits and usage of this process, and packet filters; tests replace it."""

    def limits(self) -> tuple[int, int]:
        """Return the soft and the hard limit; `resource.RLIM_INFINITY` stands for no limit."""
        return resource.getrlimit(resource.RLIMIT_NOFILE)

    def set_limits(self, soft: int, hard: int) -> None:
        """Set the two limits of open files. Raises OSError or ValueError if the system refuses a limit."""
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    def open_descriptors(self) -> int | None:
        """Return the number of open descriptors; None if no descriptor is free for the check itself."""
        try:
            return os.stat("/proc/self/fd").st_size or len(os.listdir("/proc/self/fd")) - 1
        except OSError:
            return None

    def filter_packets(self, fd: int, on: bool) -> None:
        """Set a packet filter that drops all packets to the listening socket `fd`, or remove the filter."""
        try:
            listening = socket.socket(fileno=fd)
        except OSError:
            return  # closed in the meantime
        try:
            if listening.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                if on:
                    program = ctypes.create_string_buffer(_NOTHING, len(_NOTHING))
                    value = struct.pack("@HP", 1, ctypes.addressof(program))
                    listening.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, value)
                else:
                    listening.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)
        except OSError as error:
            _log.warning("an address could not be %s new connections: %s", "closed to" if on else "opened to", error)
        finally:
            listening.detach()  # the descriptor belongs to ZeroMQ


class DescriptorGuard:
    """Guard of the process' file descriptors: stops new TCP connections while nearly all descriptors are open.

    Thread-safe; each thread with a listening socket calls `tick` in its loop.
    """

    def __init__(self, system: System | None = None) -> None:
        self._system = system or System()
        self.due_at = float("inf")
        """Time when `tick` has something to do, by time.monotonic()."""
        self.is_full = False
        """True if the packet filters are set, so that new connections are dropped."""
        self.times = 0
        """Number of times that the filters were set."""
        self._lock = threading.Lock()
        self._listening: dict[int, _ListeningSocket] = {}  # by descriptor
        self.reserved = 0
        """Number of descriptors by which the soft limit is lowered now."""
        self._logged_at = float("-inf")

    def max_descriptors(self) -> int:
        """Return the most descriptors that the process may have open, including the reserved ones."""
        soft = self._system.limits()[0]
        return MAX_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft + self.reserved

    def reserve(self) -> int:
        """Return the number of descriptors to reserve, which new connections cannot use."""
        return min(MAX_RESERVED, max(MIN_RESERVED, self.max_descriptors() // RESERVED))

    def open_descriptors(self) -> int:
        """Return the number of open descriptors. Cost: a look at each descriptor, with Linux before 6.2."""
        used = self._system.open_descriptors()
        return self.max_descriptors() if used is None else used

    def raise_limit(self) -> int:
        """Raise the soft limit to the hard limit, or to `MAX_DESCRIPTORS`; returns the limit."""
        hard = self._system.limits()[1]
        wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
        limit = self.max_descriptors()
        if limit < wanted:
            try:
                self._system.set_limits(wanted - self.reserved, hard)
            except (OSError, ValueError) as error:
                _log.warning(
                    "the limit of file descriptors could not be raised from %d to %d: %s", limit, wanted, error
                )
        return self.max_descriptors()

    def limit_advice(self, clients: int) -> str:
        """Return advice if the limit is too low for `clients` clients, in a sentence or two; "" if it is enough."""
        needed, allowed = DESCRIPTORS_PER_CLIENT * clients + OWN_DESCRIPTORS, self.max_descriptors()
        if allowed >= needed:
            return ""
        return f"{allowed} file descriptors are not enough for the {clients} clients expected. {self._advice(needed)}"

    def _advice(self, needed: int) -> str:
        room = max(0, self.max_descriptors() - OWN_DESCRIPTORS) // DESCRIPTORS_PER_CLIENT
        return (
            f"The limit is enough for about {room} clients. Raise it (ulimit -n {needed}, LimitNOFILE= in systemd, "
            f"--ulimit nofile={needed} for a container), or put more proxies in front."
        )

    def add(self, fd: int, listener: _ListeningSocket) -> None:
        """Guard the listening descriptor `fd` until its ZeroMQ socket is closed."""
        with self._lock:
            self._listening[fd] = listener
            if self.is_full:
                self._system.filter_packets(fd, True)
            else:
                self._reserve()
            self.due_at = min(self.due_at, time.monotonic())

    def forget(self, listener: _ListeningSocket) -> None:
        """Guard a socket's descriptors no longer, since the socket is about to be closed."""
        with self._lock:
            for fd in [fd for fd, listening in self._listening.items() if listening is listener]:
                del self._listening[fd]
            self._reserve()

    def tick(self, now: float) -> None:
        """Check the number of open descriptors if `due_at` has come; set or remove the filters."""
        if now < self.due_at or not self._lock.acquire(blocking=False):
            return
        try:
            self._listening = {fd: listener for fd, listener in self._listening.items() if not listener.closed}
            self.due_at = now + POLL_INTERVAL if self._listening else float("inf")
            self._check(now)
            if not self._listening:
                self._reserve()
        finally:
            self._lock.release()

    def problem(self) -> str:
        """Return a sentence if new connections are dropped; "" if they are accepted."""
        if not self.is_full:
            return ""
        limit = self.max_descriptors()
        return f"descriptors: all but a few of {limit} are open; no new connection is accepted until some are closed"

    def forget_all(self) -> None:
        """Reset the guard in a forked child, without a change of the parent's filters."""
        self._listening.clear()
        self._reserve()
        self.__init__(self._system)  # type: ignore[misc]

    def _check(self, now: float) -> None:
        free, reserved = self.max_descriptors() - self.open_descriptors(), self.reserve()
        if self.is_full:
            if free > 3 * reserved or not self._listening:
                self._accept_connections()
        elif self._listening and free <= reserved + MIN_RESERVED // 2:
            self._drop_connections(now)

    def _accept_connections(self) -> None:
        self.is_full = False
        self._reserve()
        for fd in self._listening:
            self._system.filter_packets(fd, False)
        _log.warning("file descriptors are free again: new connections are accepted")

    def _drop_connections(self, now: float) -> None:
        self.is_full = True
        self.times += 1
        for fd in self._listening:
            self._system.filter_packets(fd, True)
        self._reserve()
        if now - self._logged_at > WARNING_INTERVAL:
            self._logged_at = now
            _log.error("%s. %s", self.problem(), self._advice(2 * self.max_descriptors()))

    def _reserve(self) -> None:
        """Lower the soft limit by the reserve while connections are accepted; else restore it."""
        count = self.reserve() if self._listening and not self.is_full else 0
        soft, hard = self._system.limits()
        if count == self.reserved or soft == resource.RLIM_INFINITY:
            return
        try:
            self._system.set_limits(soft + self.reserved - count, hard)
        except (OSError, ValueError) as error:
            _log.warning("%d file descriptors could not be reserved for pages and files: %s", count, error)
        else:
            self.reserved = count


_guard = DescriptorGuard()
max_descriptors, open_descriptors = _guard.max_descriptors, _guard.open_descriptors
raise_limit, limit_advice = _guard.raise_limit, _guard.limit_advice
"""Methods of this process' `DescriptorGuard`."""
os.register_at_fork(after_in_child=_guard.forget_all)


def shared_guard() -> DescriptorGuard:
    """Return the descriptor guard of this process."""
    return _guard


def backlog() -> int:
    """Return the most connections that may wait at one address; at all addresses together, fewer than the reserve."""
    return min(MAX_WAITING, _guard.reserve() // (LISTENERS + 1))


def guard_listener(fd: int, listener: _ListeningSocket) -> None:
    """Guard the listening descriptor `fd` of a ZeroMQ socket, if this process is tuned."""
    if is_tuned():
        _guard.add(fd, listener)
