"""What memoire changes in the process that it runs in. Nothing else in the package does such things.

    in every process    arrays of batches and caches lie in memory that earlier ones gave back, 128 MiB at most
                        (`_core.empty`); no other arrays do
                        in a process forked from a node's, the node has another class, whose methods raise ForkedError
                        instead of waiting for a lock that nobody will ever release (`leave_to_parent`)
    if it is tuned      the C library keeps freed blocks of megabytes (`_core.keep_freed_memory`)
                        at the interpreter's end `threading.excepthook` passes over Closed (`pass_over_in_threads`)
                        addresses that listen have a packet filter when nearly all descriptors are open, and the soft
                        limit of these is a little lower (`DescriptorGuard`)

A process is tuned when its first `Server`, `Proxy` or `Reader` with `tune_process=True` is made, which is the default,
or by a program of `memoire.nodes`. A `Buffer`, or a client in somebody's trainer, never tunes. It cannot be undone.

File descriptors of this process: how many it may open, and what listens while there are none left.

A client costs a server or proxy three of them. Without any left, a connection that waits to be accepted stays waiting,
and ZeroMQ asks for it again and again: half a core is gone, and nobody is served better. So before it comes to that,
the addresses stop hearing of new connections (a packet filter that lets nothing through; clients see an address that
does not answer, and try again), until some are free again. The connections that exist do not notice. Those that wait
at that moment still come in.

A flood is faster than any look. So some descriptors are out of reach until then: the soft limit is lower by `reserve`,
and is raised when the addresses are closed. As no more connections can wait than are reserved, some are left for pages,
probes and files.
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

_is_tuned = False  # set once


def tune() -> None:
    """Tune this process for a node that moves large messages or serves others; once is enough. From any thread."""
    global _is_tuned  # noqa: PLW0603
    if not _is_tuned:
        _is_tuned = True
        _core.keep_freed_memory()


def is_tuned() -> bool:
    """Whether a node of this process has asked for that."""
    return _is_tuned


def pass_over_in_threads(kind: type[BaseException]) -> None:
    """Print no traceback when a thread ends with an error of this kind. Only in a process that `tune` has tuned.

    All nodes are closed when the interpreter exits. Daemon threads that wait for a node then raise `Closed`, which is
    expected.
    """
    if _is_tuned:
        report = threading.excepthook
        threading.excepthook = lambda failed: None if failed.exc_type is kind else report(failed)


def leave_to_parent(nodes: Iterable[Any], forked: type) -> None:
    """In a forked child: have these objects answer as `forked` does from now on, which comes before their own class."""
    answers = {name: value for name, value in vars(forked).items() if name not in ("__dict__", "__weakref__")}
    for node in nodes:
        kind = type(node)
        # Its own class is the only base: beside another one, a class of several bases may be laid out otherwise, and an
        # object changes its class only for one of the same layout.
        node.__class__ = type(kind.__name__, (kind,), answers | {"__module__": kind.__module__})


DESCRIPTORS_PER_CLIENT = 3
"""Connections of one client: requests, caches, notices."""
OWN_DESCRIPTORS = 64
"""Descriptors of a process that serves nobody."""
POLL_INTERVAL = 0.5
"""Seconds between two looks at how many are left."""
RESERVED, MIN_RESERVED, MAX_RESERVED = 32, 16, 4096
"""One in so many is out of reach of who connects, but so many at least and at most."""
LISTENERS = 3
"""Addresses of one node."""
MAX_WAITING = 1024
"""Connections that wait to be accepted at one address, at most."""
WARNING_INTERVAL = 60.0
MAX_DESCRIPTORS = 1 << 20
"""Nobody is given more: some programs look at each one that they may have."""


class _ListeningSocket(Protocol):
    @property
    def closed(self) -> bool:
        """Whether it has been."""


class System:
    """What the system lets this process open, and what the process has open."""

    def limits(self) -> tuple[int, int]:
        """The soft and the hard limit; `resource.RLIM_INFINITY` is none."""
        return resource.getrlimit(resource.RLIMIT_NOFILE)

    def set_limits(self, soft: int, hard: int) -> None:
        """Change them. OSError, ValueError: they cannot be so."""
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    def used(self) -> int | None:
        """How many are open; None if not even one is left to look with."""
        try:
            return os.stat("/proc/self/fd").st_size or len(os.listdir("/proc/self/fd")) - 1
        except OSError:
            return None

    def filter_packets(self, fd: int, on: bool) -> None:
        """Let no packet through to the socket that listens at this descriptor, or all of them again."""
        try:
            listening = socket.socket(fileno=fd)
        except OSError:
            return  # closed meanwhile
        try:
            if listening.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                if on:
                    program = ctypes.create_string_buffer(_NOTHING, len(_NOTHING))
                    what = struct.pack("@HP", 1, ctypes.addressof(program))
                    listening.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, what)
                else:
                    listening.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)
        except OSError as error:
            _log.warning("an address could not be %s new connections: %s", "closed to" if on else "opened to", error)
        finally:
            listening.detach()  # it belongs to ZeroMQ


class DescriptorGuard:
    """Closes this process's TCP addresses to new connections while it has no descriptors for them.

    May be called from any thread; whoever comes by calls `turn`.
    """

    def __init__(self, system: System | None = None) -> None:
        self._system = system or System()
        self.look_at = float("inf")
        """When `turn` has something to do, by time.monotonic()."""
        self.is_full = False
        """Whether new connections are not heard of now."""
        self.times = 0
        """How often that began."""
        self._lock = threading.Lock()
        self._listening: dict[int, _ListeningSocket] = {}  # by descriptor
        self.reserved = 0
        """By how many the soft limit is lower than it was."""
        self._said_at = float("-inf")

    def limit(self) -> int:
        """How many the process may have open, with those that are out of reach now."""
        soft = self._system.limits()[0]
        return MAX_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft + self.reserved

    def reserve(self) -> int:
        """How many of them are to be out of reach of who connects."""
        return min(MAX_RESERVED, max(MIN_RESERVED, self.limit() // RESERVED))

    def used(self) -> int:
        """How many it has open now. Cost: a look at each of them, with Linux before 6.2."""
        used = self._system.used()
        return self.limit() if used is None else used

    def raise_limit(self) -> int:
        """Let the process open as many as it may (the hard limit, or `MAX_DESCRIPTORS`); returns how many that are."""
        hard = self._system.limits()[1]
        wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
        limit = self.limit()
        if limit < wanted:
            try:
                self._system.set_limits(wanted - self.reserved, hard)
            except (OSError, ValueError) as error:
                _log.warning("the limit of %d file descriptors could not be raised to %d: %s", limit, wanted, error)
        return self.limit()

    def too_few(self, clients: int) -> str:
        """What to do if the process may not open enough for so many clients, in a sentence or two; "" if it may."""
        needed, allowed = DESCRIPTORS_PER_CLIENT * clients + OWN_DESCRIPTORS, self.limit()
        if allowed >= needed:
            return ""
        return f"{allowed} file descriptors are not enough for the {clients} clients expected. {self._advice(needed)}"

    def _advice(self, needed: int) -> str:
        room = max(0, self.limit() - OWN_DESCRIPTORS) // DESCRIPTORS_PER_CLIENT
        return (
            f"They are enough for about {room} clients. Raise the limit (ulimit -n {needed}, LimitNOFILE= in systemd, "
            f"--ulimit nofile={needed} for a container), or put more proxies in front."
        )

    def add(self, fd: int, made: _ListeningSocket) -> None:
        """Guard the listening socket of this descriptor, for as long as `made` is open."""
        with self._lock:
            self._listening[fd] = made
            if self.is_full:
                self._system.filter_packets(fd, True)
            else:
                self._reserve()
            self.look_at = min(self.look_at, time.monotonic())

    def forget(self, made: _ListeningSocket) -> None:
        """Guard it no more: it is about to be closed."""
        with self._lock:
            for fd in [fd for fd, listening in self._listening.items() if listening is made]:
                del self._listening[fd]
            self._reserve()

    def turn(self, now: float) -> None:
        """Look, should it be time."""
        if now < self.look_at or not self._lock.acquire(blocking=False):
            return
        try:
            self._listening = {fd: made for fd, made in self._listening.items() if not made.closed}
            self.look_at = now + POLL_INTERVAL if self._listening else float("inf")
            self._look(now)
            if not self._listening:
                self._reserve()
        finally:
            self._lock.release()

    def trouble(self) -> str:
        """Why new clients cannot come, as a sentence; "" where they can."""
        if not self.is_full:
            return ""
        limit = self.limit()
        return f"descriptors: all but a few of {limit} are open; no new connection is accepted until some are closed"

    def forget_all(self) -> None:
        """Begin again, in a forked child; its parent goes on listening."""
        self._listening.clear()
        self._reserve()
        self.__init__(self._system)  # type: ignore[misc]

    def _look(self, now: float) -> None:
        left, reserved = self.limit() - self.used(), self.reserve()
        if self.is_full:
            if left > 3 * reserved or not self._listening:
                self._end()
        elif self._listening and left <= reserved + MIN_RESERVED // 2:
            self._begin(now)

    def _end(self) -> None:
        self.is_full = False
        self._reserve()
        for fd in self._listening:
            self._system.filter_packets(fd, False)
        _log.warning("file descriptors are free again: new connections are accepted")

    def _begin(self, now: float) -> None:
        self.is_full = True
        self.times += 1
        for fd in self._listening:
            self._system.filter_packets(fd, True)
        self._reserve()
        if now - self._said_at > WARNING_INTERVAL:
            self._said_at = now
            _log.error("%s. %s", self.trouble(), self._advice(2 * self.limit()))

    def _reserve(self) -> None:
        """Have some out of reach while connections are accepted, and none otherwise."""
        count = self.reserve() if self._listening and not self.is_full else 0
        soft, hard = self._system.limits()
        if count == self.reserved or soft == resource.RLIM_INFINITY:
            return
        try:
            self._system.set_limits(soft + self.reserved - count, hard)
        except (OSError, ValueError) as error:
            _log.warning("%d file descriptors could not be kept for pages and files: %s", count, error)
        else:
            self.reserved = count


_guard = DescriptorGuard()
limit, used, raise_limit, too_few = _guard.limit, _guard.used, _guard.raise_limit, _guard.too_few
"""Of this process: see `DescriptorGuard`."""
os.register_at_fork(after_in_child=_guard.forget_all)


def shared_guard() -> DescriptorGuard:
    """The one of this process."""
    return _guard


def backlog() -> int:
    """Connections that may wait at one address: at all of them fewer than are reserved."""
    return min(MAX_WAITING, _guard.reserve() // (LISTENERS + 1))


def guard_listener(fd: int, made: _ListeningSocket) -> None:
    """Guard what listens at this descriptor, if this process is tuned (`process`)."""
    if is_tuned():
        _guard.add(fd, made)
