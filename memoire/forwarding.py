"""A plain proxy between one address and the workers behind another: whole messages, handed on without a copy.

It keeps one message at most for each direction. While the other side has no room it stops reading, so that ZeroMQ's own
high-water marks hold the senders back.
"""

from __future__ import annotations

import threading
import time

import zmq

from . import sockets
from .sockets import Doors, Socket

MOST_FRAMES = 16
MESSAGES_PER_TURN = 100
LOOK_UP = 0.1
"""Seconds between two looks at whether it is to end."""


class _Direction:
    """Messages from one socket to another."""

    def __init__(self, source: Socket, sink: Socket) -> None:
        self.source, self.sink = source, sink
        self.kept: list[zmq.Frame] | None = None

    def move(self) -> None:
        """Hand on what is there; keep what does not fit."""
        if self.kept is not None:
            if not sockets.send(self.sink, self.kept):
                return
            self.kept = None
        for _ in range(MESSAGES_PER_TURN):
            frames = sockets.receive(self.source, most=MOST_FRAMES)
            if frames is None:
                return
            # One frame more than any message of ours: not handed on, since its end was thrown away.
            if len(frames) <= MOST_FRAMES and not sockets.send(self.sink, frames):
                self.kept = frames
                return


def forward(front: Socket, back: Socket, *, both_ways: bool, until: threading.Event) -> None:
    """Hand messages on until the event is set; both sockets belong to the caller's thread, and are closed at the
    end.
    """
    doors = Doors()
    directions = [_Direction(front, back)] + ([_Direction(back, front)] if both_ways else [])
    try:
        for made in (front, back):
            doors.add(made)
        while not until.is_set():
            for made in (front, back):
                reading = any(way.source is made and way.kept is None for way in directions)
                writing = any(way.sink is made and way.kept is not None for way in directions)
                doors.watch(made, reading=reading, writing=writing)
            doors.wait(time.monotonic() + LOOK_UP)
            for way in directions:
                way.move()
    finally:
        doors.close()
