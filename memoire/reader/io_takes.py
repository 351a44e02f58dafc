"""Asks servers for rollouts, and waits until all entries of a call are there."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Mapping

from memoire._core import Held
from memoire.errors import Closed, MemoireError, MemoireTimeout, NotEnoughSamples
from memoire.net.node_monitor import NodeLock
from memoire.net.thread import Worker
from memoire.pool.rollout_queue import TakeRequest
from memoire.replay.rollouts import Fragment
from memoire.wire.frames import Answer

from .io_channels import Channels
from .takes import TakeOrder, Takes

_log = logging.getLogger(__name__)


class Taker:
    """Carries what `Takes` decides.

    Args:
        versions: Newest version of each model's topic. Called under the lock.
    """

    def __init__(
        self,
        takes: Takes,
        worker: Worker,
        channels: Channels,
        monitor: NodeLock,
        versions: Callable[[], Mapping[str, int]],
    ) -> None:
        self._takes, self._worker, self._channels, self._monitor = takes, worker, channels, monitor
        self._versions = versions
        self._one_call = threading.Lock()  # held for as long as a call waits: one after the other

    def take(self, wanted: TakeRequest, patience: float) -> list[Fragment]:
        """The entries of a call, oldest first, as soon as all are there. See `Reader.take`."""
        deadline = self._monitor.now() + patience
        with Held.within(self._one_call, patience) as is_mine:
            if not is_mine:
                raise NotEnoughSamples(wanted.steps, 0, 0, 0, patience, "another thread's take of this reader waits")
            return self._take(wanted, patience, self._monitor.left(deadline))

    def _take(self, wanted: TakeRequest, patience: float, left: float) -> list[Fragment]:
        taken: list[Fragment] = []

        def is_whole() -> bool:
            taken.extend(self._takes.take(self._versions()))
            return bool(taken)

        with self._monitor.changed:
            self._takes.want(wanted)
        self._worker.wake()
        try:
            if not self._monitor.wait(is_whole, left):
                raise self._shortage(wanted, patience)
        finally:
            with self._monitor.changed:
                self._takes.want(None)
        return taken

    def _shortage(self, wanted: TakeRequest, patience: float) -> MemoireError:
        if not self._takes.directory.there:
            channels = self._channels
            return channels.denied or MemoireTimeout("rollouts", channels.where, patience, channels.trouble())
        with self._monitor.changed:
            entries, fragments, clients, why = self._takes.why_not()
        return NotEnoughSamples(wanted.steps, entries, fragments, clients, patience, why)

    # Inside of the thread

    def next_time(self) -> float:
        """When a turn has something to do."""
        with self._monitor.changed:
            return self._takes.next_time(self._monitor.now())

    def turn(self) -> None:
        """Ask what is to be asked."""
        with self._monitor.changed:
            orders = self._takes.begin(self._monitor.now())
        for order in orders:
            # Without a deadline: what a server hands out it keeps for this request alone, until the next one.
            self._channels.ask(order.server, order.body, functools.partial(self._answered, order))

    def _answered(self, order: TakeOrder, answer: Answer) -> None:
        if isinstance(answer, Closed):
            return
        now, was_away = self._monitor.now(), order.server.is_away
        came = self._takes.unpack(answer, now)
        with self._monitor.changed:
            self._takes.answered(order, answer, came, now)
            self._monitor.changed.notify_all()
        if was_away:
            _log.info("server %s is back", order.server.name)
        self.turn()
