"""How one thread waits: for its sockets, for other threads that wake it, and for what is due on its connections."""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections import deque
from collections.abc import Callable

import zmq

from memoire import _core

from . import descriptors
from .connection_watcher import ConnectionWatcher
from .context import Socket

_LISTENING = (zmq.ROUTER, zmq.PULL, zmq.XPUB)


class Waker:
    """Ends another thread's wait in `poll`: a socket pair, since ZeroMQ sockets belong to one thread.

    `wake` may be called from any thread, also after `close`; the waiting thread registers `fd` and calls `drain`.
    """

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._lock = threading.Lock()  # guards `_closed` against a wake into a closed (or reused) descriptor
        self._closed = False
        self._pending = False  # a byte is on its way: another would only cost a system call

    @property
    def fd(self) -> int:
        """What a poller waits on."""
        return self._reader.fileno()

    def wake(self) -> None:
        """End the present wait, or the next one."""
        if self._pending:
            return
        with _core.Held(self._lock):
            if self._closed or self._pending:
                return
            try:
                self._writer.send(b"\0")
            except OSError:  # full: the reader has bytes enough to wake up
                pass
            self._pending = True  # last: after an interrupt a byte may be too many, and is never missing

    def drain(self) -> None:
        """Forget the wake-ups so far. Look at what was asked for after this call, never before it."""
        with _core.Held(self._lock):
            self._pending = False
            try:
                while self._reader.recv(64):
                    pass
            except OSError:
                pass

    def close(self) -> None:
        """Give the descriptors back; a later `wake` does nothing."""
        with _core.Held(self._lock):
            if not self._closed:
                self._closed = True
                self._reader.close()
                self._writer.close()


class Poller:
    """The sockets that one thread waits on, with the thread's waker: `wait` returns those that are ready.

    Only the owner calls anything here; other threads call `post` and `waker.wake`.
    """

    def __init__(self) -> None:
        self.waker = Waker()
        self._poller = zmq.Poller()
        self._sockets: list[Socket] = []
        self._ways: dict[Socket, ConnectionWatcher] = {}  # by the socket that is connected
        self._monitors: dict[object, ConnectionWatcher] = {}  # by their monitors
        self._posted: deque[Callable[[], None]] = deque()
        self._is_guarding = False  # one of the sockets may listen: look whether there are descriptors for who comes
        self._poller.register(self.waker.fd, zmq.POLLIN)

    def post(self, function: Callable[[], None]) -> None:
        """Have the owner call this in its next wait. From any thread."""
        self._posted.append(function)
        self.waker.wake()

    def follow(self, made: Socket, way: ConnectionWatcher) -> None:
        """Keep a socket's way to its peer up to date, for as long as the socket is here."""
        self._ways[made] = way
        if way.monitor is not None:
            self._monitors[way.monitor] = way
            self._poller.register(way.monitor, zmq.POLLIN)

    def add(self, made: Socket, *, reading: bool = True, way: ConnectionWatcher | None = None) -> Socket:
        """Own a socket from here on, and wait for what it receives."""
        self._sockets.append(made)
        self._is_guarding = self._is_guarding or made.getsockopt(zmq.TYPE) in _LISTENING
        if way is not None:
            self.follow(made, way)
        if reading:
            self._poller.register(made, zmq.POLLIN)
        return made

    def watch(self, made: Socket, *, reading: bool, writing: bool) -> None:
        """Wait for this socket to have something, to have room, both or neither."""
        events = (zmq.POLLIN if reading else 0) | (zmq.POLLOUT if writing else 0)
        if events:
            self._poller.register(made, events)
        elif made in self._poller:
            self._poller.unregister(made)

    def drop(self, made: Socket, linger: float = 0.0) -> None:
        """Close one socket; what it still holds is sent for `linger` seconds more, in the background."""
        if made in self._poller:
            self._poller.unregister(made)
        if made in self._sockets:
            self._sockets.remove(made)
        descriptors.shared_guard().forget(made)
        for way in self._ways.values():
            way.leave(made)
        if made in self._ways:
            way = self._ways.pop(made)
            if way.monitor is not None:
                self._poller.unregister(way.monitor)
                del self._monitors[way.monitor]
            way.close()
        made.close(int(linger * 1000))

    def wait(self, until: float) -> dict[object, int]:
        """Sockets that are ready, with their events; empty when the waker was called or time.monotonic() reached
        `until`.
        """
        if self._is_guarding:
            guard = descriptors.shared_guard()
            guard.turn(time.monotonic())
            until = min(until, guard.look_at)
        look_at = min([way.look_at for way in self._ways.values()], default=until)
        until = min(until, look_at)
        # Milliseconds are rounded up, or a wait that ends early spins until its time has come.
        milliseconds = max(0, int((until - time.monotonic()) * 1000) + 1)
        try:
            ready: dict[object, int] = dict(self._poller.poll(min(milliseconds, 60_000)))
        except zmq.ZMQError as error:
            if error.errno == errno.EINTR:
                return {}
            raise
        if ready.pop(self.waker.fd, None):
            self.waker.drain()
        if self._ways:
            self._attend(ready, look_at)
        return ready

    def _attend(self, ready: dict[object, int], look_at: float) -> None:
        """Let the ways do what is theirs."""
        while self._posted:
            self._posted.popleft()()
        if ready:
            for monitor in [made for made in ready if made in self._monitors]:
                del ready[monitor]
                self._monitors[monitor].heard()
        now = time.monotonic()
        if now >= look_at:
            for way in self._ways.values():
                if now >= way.look_at:
                    way.turn(now)

    def close(self, linger: float = 0.0) -> None:
        """Close all sockets and the waker."""
        for made in list(self._sockets):
            self.drop(made, linger)
        if self.waker.fd in self._poller:
            self._poller.unregister(self.waker.fd)
        self.waker.close()
