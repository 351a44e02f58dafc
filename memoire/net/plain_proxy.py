"""A plain proxy between one address and the workers behind another: whole messages, handed on without a copy.

It keeps one message at most on its way to the workers. While they have no room it stops reading, so that ZeroMQ's own
high-water marks hold the senders back. Replies wait in `lanes`: one client without room keeps no other from its own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import zmq

from . import sockets
from .connection_watcher import ConnectionWatcher
from .context import Socket
from .poller import Poller
from .send_queues import SendQueues

MAX_FRAMES = 16
MESSAGES_PER_TURN = 100
POLL_INTERVAL = 0.1
"""Seconds between two looks at whether it is to end."""


Change = Callable[[list[zmq.Frame]], Sequence[Any]]
"""A message as it goes on; nothing where it does not."""


class _Direction:
    """Messages from one socket to another."""

    def __init__(self, source: Socket, sink: Socket, change: Change, lanes: SendQueues | None = None) -> None:
        self.source, self.sink, self.change, self._lanes = source, sink, change, lanes
        self.kept: Sequence[Any] | None = None

    def move(self) -> None:
        """Hand on what is there; keep what does not fit."""
        if self.kept is not None:
            if not self._send(self.kept):
                return
            self.kept = None
        for _ in range(MESSAGES_PER_TURN):
            frames = sockets.receive(self.source, most=MAX_FRAMES)
            if frames is None:
                return
            # One frame more than any message of ours: not handed on, since its end was thrown away.
            sent = self.change(frames) if len(frames) <= MAX_FRAMES else []
            if sent and not self._send(sent):
                self.kept = sent
                return

    def _send(self, frames: Sequence[Any]) -> bool:
        if self._lanes is None:
            return sockets.send(self.sink, frames)
        self._lanes.send(self.sink, frames, time.monotonic())
        return True


def forward(
    front: Socket,
    back: Socket,
    pass_on: Change,
    *,
    replies: SendQueues | None,
    until: threading.Event,
    ways: Mapping[Socket, ConnectionWatcher | None],
) -> None:
    """Hand messages on until the event is set; both sockets belong to the caller's thread, and are closed at the
    end.

    Args:
        pass_on: What becomes of a message on its way from front to back.
        replies: Where messages from back to front wait for room; None where there are none.
        ways: What the sockets' addresses need to be looked after.
    """
    doors = Poller()
    directions = [_Direction(front, back, pass_on)]
    if replies is not None:
        directions.append(_Direction(back, front, list, replies))
    try:
        for made in (front, back):
            doors.add(made, way=ways.get(made))
        while not until.is_set():
            for made in (front, back):
                reading = any(way.source is made and way.kept is None for way in directions)
                writing = any(way.sink is made and way.kept is not None for way in directions)
                doors.watch(made, reading=reading, writing=writing)
            now = time.monotonic()
            doors.wait(min(now + POLL_INTERVAL, float("inf") if replies is None else replies.next_time()))
            for way in directions:
                way.move()
            if replies is not None:
                replies.turn(time.monotonic())
    finally:
        doors.close()
