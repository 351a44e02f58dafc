"""File descriptors of this process: how many it may open, and what listens while there are none left.

A client costs a server or proxy three of them. Without any left, a connection that waits to be accepted stays waiting,
and ZeroMQ asks for it again and again: half a core is gone, and nobody is served better. So before it comes to that,
the addresses stop hearing of new connections (a packet filter that lets nothing through; clients see an address that
does not answer, and try again), until some are free again. The connections that exist do not notice.
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
from typing import Protocol

_log = logging.getLogger(__name__)

FOR_EACH_CLIENT = 3
"""Connections of one client: requests, caches, notices."""
FOR_ITSELF = 64
"""Descriptors of a process that serves nobody."""
SPARE = 8
LOOK = 0.5
"""Seconds between two looks at how many are left."""
GIVEN_UP = 6.0
"""Seconds after which whoever waits to be accepted has given up: `HANDSHAKE_IVL`, and a little."""
SAY_AGAIN = 60.0
ENOUGH = 1 << 20
"""Nobody is given more: some programs look at each one that they may have."""

_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27
_NOTHING = struct.pack("=HBBI", 0x06, 0, 0, 0)  # one instruction: BPF_RET with 0 bytes of the packet


class _Listening(Protocol):
    @property
    def closed(self) -> bool:
        """Whether it has been."""


def limit() -> int:
    """How many this process may have open."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return ENOUGH if soft == resource.RLIM_INFINITY else soft


def used() -> int:
    """How many it has open now. Cost: a look at each of them."""
    try:
        return len(os.listdir("/proc/self/fd")) - 1
    except OSError:
        return limit()  # none is left to look with


def raise_limit() -> int:
    """Let this process open as many as it may (the hard limit, or `ENOUGH`); returns how many that are."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    wanted = ENOUGH if hard == resource.RLIM_INFINITY else min(hard, ENOUGH)
    if limit() < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError) as error:
            _log.warning("the limit of %d file descriptors could not be raised to %d: %s", limit(), wanted, error)
    return limit()


def too_few(clients: int) -> str:
    """What to do where this process may not open enough for so many clients, in a sentence or two; "" where it may."""
    needed, allowed = FOR_EACH_CLIENT * clients + FOR_ITSELF, limit()
    if allowed >= needed:
        return ""
    return f"{allowed} file descriptors are not enough for the {clients} clients expected. {_advice(needed)}"


def _advice(needed: int) -> str:
    room = max(0, limit() - FOR_ITSELF) // FOR_EACH_CLIENT
    return (
        f"They are enough for about {room} clients. Raise the limit (ulimit -n {needed}, LimitNOFILE= in systemd, "
        f"--ulimit nofile={needed} for a container), or put more proxies in front."
    )


class Guard:
    """Closes this process's TCP addresses to new connections while it has no descriptors for them.

    May be called from any thread; whoever comes by calls `turn`.
    """

    def __init__(self) -> None:
        self.look_at = float("inf")
        """When `turn` has something to do, by time.monotonic()."""
        self.is_full = False
        """Whether new connections are not heard of now."""
        self.times = 0
        """How often that began."""
        self._lock = threading.Lock()
        self._listening: dict[int, _Listening] = {}  # by descriptor
        self._spare: list[int] = []
        self._full_since = 0.0
        self._said_at = float("-inf")

    def add(self, fd: int, made: _Listening) -> None:
        """Guard the listening socket of this descriptor, for as long as `made` is open."""
        with self._lock:
            self._listening[fd] = made
            self._save()
            if self.is_full:
                _filter(fd, True)
            self.look_at = min(self.look_at, time.monotonic())

    def forget(self, made: _Listening) -> None:
        """Guard it no more: it is about to be closed."""
        with self._lock:
            for fd in [fd for fd, listening in self._listening.items() if listening is made]:
                del self._listening[fd]

    def turn(self, now: float) -> None:
        """Look, should it be time."""
        if now < self.look_at or not self._lock.acquire(blocking=False):
            return
        try:
            self._listening = {fd: made for fd, made in self._listening.items() if not made.closed}
            self.look_at = now + LOOK if self._listening else float("inf")
            self._look(now)
        finally:
            self._lock.release()

    def trouble(self) -> str:
        """Why new clients cannot come, as a sentence; "" where they can."""
        if not self.is_full:
            return ""
        return f"descriptors: all but a few of {limit()} are open; no new connection is accepted until some are closed"

    def forget_all(self) -> None:
        """Begin anew, in a forked child, whose parent goes on listening."""
        self.__init__()  # type: ignore[misc]

    def _look(self, now: float) -> None:
        allowed = limit()
        margin = max(SPARE, allowed // 32)
        if not self.is_full:
            # Descriptors are given out from below: all under the lowest free one are open, and counting is not needed.
            if self._listening and _lowest_free(allowed) >= allowed - margin:
                self._begin(now)
        elif now - self._full_since > GIVEN_UP:
            left = allowed - used()
            if left > 2 * margin + SPARE - len(self._spare) or not self._listening:
                self._end()
            elif not left and self._spare:
                # Through this one all that wait pass, one after the other: they have hung up, so each gives it back.
                os.close(self._spare.pop())

    def _end(self) -> None:
        self.is_full = False
        for fd in self._listening:
            _filter(fd, False)
        self._save()
        _log.warning("file descriptors are free again: new connections are accepted")

    def _begin(self, now: float) -> None:
        self.is_full, self._full_since = True, now
        self.times += 1
        for fd in self._listening:
            _filter(fd, True)
        if now - self._said_at > SAY_AGAIN:
            self._said_at = now
            _log.error("%s. %s", self.trouble(), _advice(2 * limit()))

    def _save(self) -> None:
        try:
            while len(self._spare) < SPARE:
                self._spare.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        except OSError:
            pass


def _lowest_free(allowed: int) -> int:
    try:
        fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return allowed
    os.close(fd)
    return fd


def _filter(fd: int, on: bool) -> None:
    """Let no packet through to what listens at this descriptor, or all of them again."""
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


_guard = Guard()
os.register_at_fork(after_in_child=_guard.forget_all)


def shared_guard() -> Guard:
    """The one of this process."""
    return _guard
