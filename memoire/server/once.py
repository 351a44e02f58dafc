"""Replies that are given once: a request that comes again gets the reply of the first time, and changes nothing. Pure.

DRAW 7 of reader r      granted, its reply is kept
DRAW 7 of reader r      the same reply: the first one was lost
DRAW 3 of reader r      refused if newer replies have replaced that of number 3
"""

from __future__ import annotations

from collections import OrderedDict

from memoire.errors import ProtocolError
from memoire.wire import messages
from memoire.wire.frames import MessageHeader

from .reply import Reply

MAX_READERS = 64
"""Rows of requests (of a client, a type and a table) whose replies are kept; the one that is idle for longest goes."""


class GivenReplies:
    """The newest replies to each client's requests that would change something if they were granted twice.

    Not thread-safe: nothing else may come between `find` and `keep`.
    """

    def __init__(self) -> None:
        self._given: OrderedDict[tuple[bytes, messages.Type, int], OrderedDict[int, Reply]] = OrderedDict()

    def find(self, header: MessageHeader, most: int) -> Reply | None:
        """The reply that this request was given before; None if it has to be granted now.

        Args:
            most: Replies that are kept for requests of this type.

        Raises:
            ProtocolError: (code "missing") it is older than all that are kept: nobody knows whether it was granted.
        """
        key = header.client, header.type, header.table
        given = self._given.setdefault(key, OrderedDict())
        self._given.move_to_end(key)
        while len(self._given) > MAX_READERS:
            self._given.popitem(last=False)
        number = header.sequence
        if number not in given and len(given) == most and number < min(given):
            raise ProtocolError("missing", f"request {number} was overtaken by {min(given)}")
        return given.get(number)

    def keep(self, header: MessageHeader, reply: Reply, most: int) -> None:
        """The request that `find` was asked for last was granted."""
        given = self._given[header.client, header.type, header.table]
        given[header.sequence] = reply
        while len(given) > most:
            del given[min(given)]
