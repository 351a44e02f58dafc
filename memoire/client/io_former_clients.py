"""Tells what earlier clients have left: a channel of its own for each of them. Belongs to the client's thread."""

from __future__ import annotations

import time
from collections.abc import Callable

from memoire.net.channel import Channel
from memoire.wire import messages
from memoire.wire.frames import Answer, Message

from .former_clients import LateRequest, UnreportedClient


class FormerClient:
    """One file that is told in the name of the client that left it.

    Args:
        channel: Requests as that client.
        done: Called once, when the file was told, or nobody will ever take it.
    """

    def __init__(self, channel: Channel, teller: UnreportedClient, done: Callable[[FormerClient], None]) -> None:
        self.channel = channel
        self._teller, self._done = teller, done

    def next_time(self) -> float:
        """When `turn` has something to do."""
        return min(self._teller.again_at, self.channel.next_time())

    def turn(self, ready: dict[object, int]) -> None:
        """Take the replies that came, and begin once it is time."""
        self.channel.turn(ready)
        if time.monotonic() >= self._teller.again_at:
            self._ask(self._teller.begin())

    def _ask(self, request: LateRequest) -> None:
        self.channel.ask(request.body, self._answered, run=request.run, home=request.home)

    def _answered(self, answer: Answer) -> None:
        request = self._teller.answered(answer, time.monotonic())
        if isinstance(answer, Message) and isinstance(answer.body, messages.Welcome):
            self.channel.learned(answer.header, answer.body)
        if request is not None:
            self._ask(request)
        elif self._teller.is_done:
            self._done(self)
