"""What learners far away take of tables of rollouts. Pure.

Nothing here changes what the dispatcher's lock guards: pools and limiters have locks of their own.
"""

from __future__ import annotations

from typing import Any, cast

from memoire.errors import ParameterError, ProtocolError
from memoire.pool import rollout_transport
from memoire.pool.desk import Desk, Reply
from memoire.pool.interface import HandsOutOnce
from memoire.pool.rollout_queue import Release, TakeRequest
from memoire.wire import types
from memoire.wire.frames import MessageHeader


class TakesHandler:
    """Answers readers of tables of rollouts."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    def take(self, now: float, header: MessageHeader, body: rollout_transport.Take, _: Any) -> Reply:
        """Hand out the oldest entries, and say what is held then."""
        table = self._desk.table(header)
        pool = table.asked(HandsOutOnce, header.type.name)
        page = self._desk.page(header.client, types.ROLLOUTS)
        rows, payload = pool.give(_request_of(body), body.least, page, wall=now) if body.steps else ([], None)
        entries, clients = pool.held()
        table.limiter.wants(header.client, 0 if rows else body.wanted)
        said = rollout_transport.Rollouts(
            epoch=self._desk.epoch,
            fragments=rows,
            held=entries,
            clients=clients,
            capacity=pool.capacity,
            finished=self._desk.finished,
        )
        return Reply(said, payload)


def _request_of(body: rollout_transport.Take) -> TakeRequest:
    try:
        return TakeRequest(body.steps, body.exact, 0, cast(Release, body.release))
    except ParameterError as error:
        raise ProtocolError("value", str(error)) from None
