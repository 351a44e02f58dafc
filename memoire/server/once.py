"""Replies that are given once: a request that comes again gets the reply of the first time, and changes nothing. Pure.

DRAW 7 of reader r      granted, its reply is kept
DRAW 7 of reader r      the same reply: the first one was lost
DRAW 3 of reader r      refused if newer replies have replaced that of number 3
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from memoire.errors import ProtocolError
from memoire.pool.desk import Reply
from memoire.wire import types
from memoire.wire.byte_budget import ByteBudget
from memoire.wire.frames import MessageHeader

KEPT_ROWS = 64
"""Rows of requests (of a client, a type and a table) whose replies are kept, however long they are idle."""
MAX_ROWS = 1024
"""Rows at most; a further one is refused until one of them is idle."""
IDLE_TIMEOUT = 60.0
"""Seconds without a request after which a row beyond `KEPT_ROWS` leaves: its reader has gone. Resends come sooner."""

REPLY_BYTES = 1024
"""What a reply takes beside its payload, about."""


@dataclass(slots=True)
class _Row:
    asked_at: float
    replies: dict[int, Reply] = field(default_factory=dict)
    """By number."""


def _size(reply: Reply) -> int:
    return REPLY_BYTES + (0 if reply.payload is None else memoryview(reply.payload).nbytes)


class GivenReplies:
    """The newest replies to each client's requests that would change something if they were granted twice.

    Not thread-safe: nothing else may come between `find` and `keep`.

    Args:
        budget: What replies take of, beside `own` bytes; None: they are not counted.
    """

    def __init__(self, budget: ByteBudget | None = None, own: int = 0) -> None:
        self.bytes = 0
        """Of all replies that are kept."""
        self._room = None
        if budget is not None:
            self._room = budget.holder("kept replies", own=own, measure=lambda: self.bytes)
        self._given: OrderedDict[tuple[bytes, types.Type, int], _Row] = OrderedDict()  # the idlest one first

    def find(self, header: MessageHeader, now: float) -> Reply | None:
        """The reply that this request was given before; None if it has to be granted now.

        Raises:
            ProtocolError: (code "missing") it is older than all that are kept: nobody knows whether it was granted.
                (code "busy") too many others ask: none of their replies may go that they may still ask for; or an actor
                asks, and there is no room to keep one more reply.
        """
        key = header.client, header.type, header.table
        row = self._given.get(key) or self._new_row(key, now)
        row.asked_at = now
        self._given.move_to_end(key)
        given, number, most = row.replies, header.sequence, header.type.kept
        if number not in given and len(given) == most and number < min(given):
            raise ProtocolError("missing", f"request {number} was overtaken by {min(given)}")
        is_more = number not in given and len(given) < most
        if is_more and "actor" in header.type.sent_by and self._room is not None and not self._room.room:
            raise self._room.no_room(REPLY_BYTES)
        return given.get(number)

    def _new_row(self, key: tuple[bytes, types.Type, int], now: float) -> _Row:
        while len(self._given) >= KEPT_ROWS and now >= next(iter(self._given.values())).asked_at + IDLE_TIMEOUT:
            self.bytes -= sum(map(_size, self._given.popitem(last=False)[1].replies.values()))
        if len(self._given) >= MAX_ROWS:
            text = f"{MAX_ROWS} rows of requests are answered here already, the most. Ask again: one without a request "
            raise ProtocolError("busy", f"{text}for {IDLE_TIMEOUT:g} s leaves")
        row = self._given[key] = _Row(now)
        return row

    def keep(self, header: MessageHeader, reply: Reply) -> None:
        """The request that `find` was asked for last was granted."""
        given = self._given[header.client, header.type, header.table].replies
        given[header.sequence] = reply
        self.bytes += _size(reply)
        while len(given) > header.type.kept:
            self.bytes -= _size(given.pop(min(given)))
