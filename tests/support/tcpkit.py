"""TCP forwarder whose connections can all be reset at once."""

import contextlib
import selectors
import socket
import struct
import threading
import time

RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing sends RST, and data on the way is lost


class CutWay:
    """Forwarder from `endpoint` to `target`; `rate` limits the bytes a second of all connections together."""

    def __init__(self, target, rate=None):
        self.target, self.rate, self._free_at = target, rate, 0.0
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.listening.setblocking(False)
        self.endpoint = f"tcp://127.0.0.1:{self.listening.getsockname()[1]}"
        self.resets = self.carried = 0
        self._ends = {}  # each socket's other end
        self._unsent = {}
        self._lock = threading.Lock()  # guards the two above, and the selector
        self._selector = selectors.DefaultSelector()
        self._selector.register(self.listening, selectors.EVENT_READ)
        self._stopping = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def reset(self):
        """Reset every connection, as a machine that has forgotten them would."""
        with self._lock:
            for end in list(self._ends):
                self._drop(end)

    def close(self, timeout=None):
        self._stopping = True
        self._thread.join(100.0)
        self.reset()
        self.listening.close()
        self._selector.close()

    def _run(self):
        while not self._stopping:
            for key, events in self._selector.select(0.02):
                with self._lock:
                    self._turn(key.fileobj, events)

    def _turn(self, end, events):
        if end is self.listening:
            self._accept()
        elif end in self._ends:  # the end was not reset meanwhile
            try:
                if events & selectors.EVENT_WRITE:
                    self._write(end)
                if events & selectors.EVENT_READ:
                    self._read(end)
            except OSError:
                self._drop(end)

    def _accept(self):
        try:
            near, _ = self.listening.accept()
            far = socket.create_connection(self.target, 5.0)
        except OSError:
            return
        for end, other in ((near, far), (far, near)):
            end.setblocking(False)
            self._ends[end], self._unsent[end] = other, bytearray()
            self._selector.register(end, selectors.EVENT_READ)

    def _read(self, end):
        other = self._ends[end]
        if self.rate is not None and time.monotonic() < self._free_at:
            time.sleep(self._free_at - time.monotonic())  # the time of a line of that speed
        data = end.recv(1 << 16)
        if not data:
            raise ConnectionResetError
        self.carried += len(data)
        if self.rate is not None:
            self._free_at = max(self._free_at, time.monotonic()) + len(data) / self.rate
        self._unsent[other] += data
        self._write(other)

    def _write(self, end):
        unsent = self._unsent[end]
        try:
            del unsent[: end.send(unsent)]
        except BlockingIOError:
            pass
        # While one end has no room, the relay does not read the other end: no data piles up in the relay.
        self._selector.modify(end, selectors.EVENT_READ | (selectors.EVENT_WRITE if unsent else 0))
        other = self._ends[end]
        writing = selectors.EVENT_WRITE if self._unsent[other] else 0
        self._selector.modify(
            other, writing | (0 if len(unsent) > 1 << 20 else selectors.EVENT_READ) or selectors.EVENT_WRITE
        )

    def _drop(self, first):
        for end in (first, self._ends.get(first)):
            if end in self._ends:
                del self._ends[end], self._unsent[end]
                self._selector.unregister(end)
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                end.close()
        self.resets += 1


def place(endpoint):
    """Return (host, port) of tcp://HOST:PORT."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return host.replace("*", "127.0.0.1"), int(port)


GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + bytes(32)
"""ZMTP 3.0: signature, version, mechanism, filler. https://rfc.zeromq.org/spec/23/"""
PING = b"\x04\x07\x04PING\x00\x00"
MESSAGE = b"\x00\x01x"
CONNECTIONS = 7
MESSAGES = 2000
"""Messages of each connection: far more than every high-water mark."""


def ready(kind):
    body = b"\x05READY" + b"\x0bSocket-Type" + struct.pack(">I", len(kind)) + kind
    return b"\x04" + bytes([len(body)]) + body


def connect(address, kind):
    """Open a connection and complete its handshake."""
    with contextlib.ExitStack() as stack:
        connection = stack.enter_context(socket.create_connection(address, 10.0))
        connection.sendall(GREETING + ready(kind))
        heard = b""
        while b"READY" not in heard:
            piece = connection.recv(1000)
            if not piece:
                raise ConnectionResetError("closed in its handshake")
            heard += piece
        stack.pop_all()
    return connection


def flood(address, kind):
    """Fill a listener's queues, with a PING behind each message, and reset the connections while they are full.

    Raises:
        OSError: No process listens there, or no longer..
    """
    with contextlib.ExitStack() as stack:
        for _ in range(CONNECTIONS):
            connection = stack.enter_context(connect(address, kind))
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            connection.setblocking(False)
            connection.send((MESSAGE + PING) * MESSAGES)
