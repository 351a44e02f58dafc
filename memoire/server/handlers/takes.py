"""What learners far away take of tables of rollouts. Pure.

Nothing here changes what the dispatcher's lock guards: pools and limiters have locks of their own.
"""

from __future__ import annotations

from typing import Any, cast

from memoire.errors import ParameterError, ProtocolError
from memoire.pool.rollout_queue import Release, TakeRequest
from memoire.pool.rollouts import RolloutPool
from memoire.server.reply import Reply
from memoire.server.state import ServerState
from memoire.wire import messages
from memoire.wire.frames import MessageHeader
from memoire.wire.receivers import Page

REPLY_PART = 4
"""A reply takes about this part of the bytes that a message may have; what is left is for the next one."""


class TakesHandler:
    """Answers readers of tables of rollouts."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    def take(self, now: float, header: MessageHeader, body: messages.Take, _: Any) -> Reply:
        """Hand out the oldest entries, and say what is held then."""
        table = self._state.tables.numbered(header.table)
        if header.fingerprint:
            table.check_fingerprint(header.fingerprint)
        pool = table.pool
        if not isinstance(pool, RolloutPool):
            raise ProtocolError("table", f"{table.name!r} stores {table.storage}; TAKE is for rollouts")
        rows, payload = (
            pool.give(_request_of(body), body.least, self._page(header.client), wall=now) if body.steps else ([], None)
        )
        entries, clients = pool.held()
        table.limiter.wants(header.client, 0 if rows else body.wanted)
        said = messages.Rollouts(
            epoch=self._state.epoch,
            fragments=rows,
            held=entries,
            clients=clients,
            capacity=pool.capacity,
            finished=self._state.run.finished,
        )
        return Reply(said, payload)

    def _page(self, client: bytes) -> Page:
        most = self._state.limits.message_bytes // REPLY_PART
        return Page(self._state.receivers.of(client), messages.Type.ROLLOUTS, client, payload_bytes=most)


def _request_of(body: messages.Take) -> TakeRequest:
    try:
        return TakeRequest(body.steps, body.exact, 0, cast(Release, body.release))
    except ParameterError as error:
        raise ProtocolError("value", str(error)) from None
