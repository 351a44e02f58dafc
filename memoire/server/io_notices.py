"""The PUB socket of a server: notices of models, repeated for those who have just subscribed, and news.

publish ──▶ Announcements ──▶ notice, at once, with a small body
subscription, or 5 s gone ──▶ Notices ──▶ the same again, without the body
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import zmq

from memoire.limits import Limits
from memoire.models.model import Model
from memoire.models.notices import Notices, notice_of
from memoire.net import sockets
from memoire.net.context import Socket
from memoire.wire import messages
from memoire.wire.frames import encode
from memoire.wire.identity import NEWS_FRAME

from .announcements import Announcements
from .dispatch import Dispatcher


class Announcer:
    """Tells subscribers. Belongs to the requests' thread, but for `open`, which is called before that begins.

    Args:
        admits: Whether to mind a subscription that came in by a socket.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        announcements: Announcements,
        limits: Limits,
        admits: Callable[[Socket, zmq.Frame], bool],
    ) -> None:
        self._dispatcher, self._announcements, self._limits, self._admits = dispatcher, announcements, limits, admits
        self._schedule = Notices(time.monotonic())
        self._pub: Socket | None = None

    def open(self, pub: Socket) -> None:
        """Tell them by this socket from now on; without one nobody is told."""
        self._pub = pub

    def next_time(self) -> float:
        """When `turn` has something to do."""
        return time.monotonic() if self._announcements else self._schedule.next_time()

    def turn(self, ready: dict[object, int]) -> None:
        """Repeat what is due, and tell what is new."""
        if self._pub is not None:
            self._repeat(self._pub, self._pub in ready)
        while (model := self._announcements.next_model()) is not None:
            self._send(self._notice(model))
        if self._announcements.take_news():
            self._send([NEWS_FRAME, *encode(messages.News(epoch=self._dispatcher.epoch))])

    def _repeat(self, pub: Socket, is_asked: bool) -> None:
        """Tell those who have just subscribed what is newest: they miss nothing that was published while they were
        connecting. Every few seconds tell everybody.
        """
        dispatcher, now = self._dispatcher, time.monotonic()
        with dispatcher.lock:
            if is_asked:
                self._schedule.subscribed(sockets.subscribed(pub, self._admits), dispatcher.models, now)
            for model in self._schedule.due(dispatcher.models, now):
                self._send(self._notice(model, again=True))

    def _notice(self, model: Model, *, again: bool = False) -> list[Any]:
        dispatcher = self._dispatcher
        return notice_of(
            model, self._limits, home=dispatcher.home, epoch=dispatcher.epoch, run=dispatcher.run, again=again
        )

    def _send(self, frames: list[Any]) -> None:
        if self._pub is not None:
            sockets.send(self._pub, frames)
