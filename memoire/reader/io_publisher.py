"""Sends models to the servers, and waits until these have them."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

from memoire.errors import MemoireTimeout
from memoire.models.model import Model
from memoire.net.node_monitor import NodeLock
from memoire.net.thread import Worker
from memoire.wire.frames import Answer

from .directory import RemoteServer
from .io_channels import Channels
from .publishing import Publishing, PublishOrder, Send

_log = logging.getLogger(__name__)


class Publisher:
    """Carries what `Publishing` decides.

    Args:
        leave_out: Called inside of the thread with a server that says nothing.
    """

    def __init__(
        self,
        publishing: Publishing,
        worker: Worker,
        channels: Channels,
        monitor: NodeLock,
        leave_out: Callable[[RemoteServer], None],
    ) -> None:
        self._publishing, self._worker, self._channels = publishing, worker, channels
        self._monitor, self._leave_out = monitor, leave_out

    def publish(self, made: Model, patience: float) -> int:
        """Publish a model at every server; its version when all that answer have it. See `Reader.publish`."""
        began, orders = self._monitor.now(), list[PublishOrder]()
        self._worker.post(lambda: self._start(made, began, orders))
        is_taken = self._monitor.wait(
            lambda: bool(orders) and self._publishing.is_taken(orders[0], self._monitor.now()), patience
        )
        missing = self._give_up(orders, made.topic)
        if not is_taken:
            raise self._not_published(made.topic, missing, patience)
        with self._monitor.changed:
            refusal = self._publishing.refusal(orders[0])
            put_off = self._publishing.put_off(missing, made.topic)
        if refusal is not None:
            raise refusal
        for sentence in put_off:
            _log.warning("topic %r is published, but not everywhere yet. %s", made.topic, sentence)
        return orders[0].model.version

    def _give_up(self, orders: list[PublishOrder], topic: str) -> list[RemoteServer]:
        """Servers that do not have it. The next model does not wait for those that said nothing at all about this
        one.
        """
        with self._monitor.changed:
            missing = self._publishing.missing(orders[0]) if orders else []
        if missing:
            self._worker.post(lambda: self._leave_silent(missing, topic))
        return missing

    def _not_published(self, topic: str, missing: list[RemoteServer], patience: float) -> MemoireTimeout:
        names = ", ".join(repr(server.name) for server in missing)
        what = f"model of topic {topic!r} at server {names}" if missing else f"answer to a model of topic {topic!r}"
        advice = "It goes on being sent while this reader is open; a server that is back gets the newest."
        with self._monitor.changed:
            put_off = self._publishing.put_off(missing, topic)
        why = put_off if missing else [self._channels.trouble(probe=False)]
        return MemoireTimeout(what, self._channels.where, patience, " ".join([*why, advice]))

    # Inside of the thread

    def met(self, server: RemoteServer, *, has_restarted: bool) -> None:
        """A server is there: send it what it does not have."""
        with self._monitor.changed:
            sends = self._publishing.met(server, has_restarted)
        self._send(sends)

    def _start(self, made: Model, began: float, orders: list[PublishOrder]) -> None:
        with self._monitor.changed:
            order, sends = self._publishing.publish(made, began)
            orders.append(order)
            self._monitor.changed.notify_all()
        self._send(sends)

    def _send(self, sends: list[Send]) -> None:
        for send in sends:
            # Without a deadline: a call that waits for it gives up by itself, and the server may come back.
            finish = functools.partial(self._sent, send)
            checksum = send.payload_checksum
            self._channels.ask(send.server, send.body, finish, payload=send.payload, payload_checksum=checksum)

    def _sent(self, send: Send, answer: Answer) -> None:
        with self._monitor.changed:
            sends = self._publishing.answered(send, answer)
            self._monitor.changed.notify_all()
        self._send(sends)

    def _leave_silent(self, servers: list[RemoteServer], topic: str) -> None:
        for server in self._publishing.silent(servers, topic):
            self._leave_out(server)
