"""A peer that speaks ZMTP itself, byte by byte, and sends what no client of memoire does: PINGs between messages."""

import contextlib
import socket
import struct

from tcpkit import RESET

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + bytes(32)
"""ZMTP 3.0: signature, version, mechanism, filler. https://rfc.zeromq.org/spec/23/"""
PING = b"\x04\x07\x04PING\x00\x00"
MESSAGE = b"\x00\x01x"
CONNECTIONS = 7
MESSAGES = 2000
"""Of each connection: far beyond every high-water mark."""


def ready(kind):
    """The READY command of a socket of that type."""
    body = b"\x05READY" + b"\x0bSocket-Type" + struct.pack(">I", len(kind)) + kind
    return b"\x04" + bytes([len(body)]) + body


def connect(address, kind):
    """A connection whose handshake is over."""
    with contextlib.ExitStack() as stack:
        made = stack.enter_context(socket.create_connection(address, 10.0))
        made.sendall(GREETING + ready(kind))
        heard = b""
        while b"READY" not in heard:
            piece = made.recv(1000)
            if not piece:
                raise ConnectionResetError("closed in its handshake")
            heard += piece
        stack.pop_all()
    return made


def flood(address, kind):
    """Fill the queues of a listener, with a PING behind each message, and reset the connections while they are full.

    Raises:
        OSError: nobody listens there (any more).
    """
    with contextlib.ExitStack() as stack:
        for _ in range(CONNECTIONS):
            made = stack.enter_context(connect(address, kind))
            made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            made.setblocking(False)
            made.send((MESSAGE + PING) * MESSAGES)
