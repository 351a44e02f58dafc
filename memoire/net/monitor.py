"""What ZeroMQ tells about the connections of a socket."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator

import zmq

from .context import Socket

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
