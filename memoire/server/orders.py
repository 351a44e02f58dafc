"""Snapshots that were ordered from far away: which one is being written, and how the others went. Pure.

TAKE_SNAPSHOT order 7 ──▶ writing ──▶ ... asked again: writing ──▶ asked again: done, or failed
TAKE_SNAPSHOT order 8 ──▶ refused ("busy") while order 7 is being written
"""

from __future__ import annotations

import re
from collections import OrderedDict
from typing import Final

from memoire.errors import ProtocolError, escape
from memoire.wire import messages

MAX_ORDERS: Final = 64
"""Orders that are remembered, the newest. If an older one is asked for again, its snapshot is written again."""
MAX_TEXT: Final = 1000
"""Characters that tell why a snapshot could not be taken."""
_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")


class SnapshotOrders:
    """The orders of one server, by their numbers. The owner locks."""

    def __init__(self) -> None:
        self._orders: OrderedDict[bytes, messages.Snapshot] = OrderedDict()

    def receive(self, body: messages.TakeSnapshot) -> tuple[messages.Snapshot, bool]:
        """How far an order is, and whether it is new and has to be carried out.

        Raises:
            ProtocolError: the name is malformed (code "parameters"), or another one is being written (code "busy").
        """
        if not _NAME.fullmatch(body.name):
            raise ProtocolError("parameters", f"{body.name!r} is no name: letters, digits, _, . and -, at most 100")
        known = self._orders.get(body.order)
        if known is not None:
            return known, False
        busy = next((order for order in self._orders.values() if order.state == "writing"), None)
        if busy is not None:
            raise ProtocolError("busy", f"snapshot {busy.name!r} is being written; order another one when it is")
        state = self._orders[body.order] = messages.Snapshot(name=body.name, state="writing")
        while len(self._orders) > MAX_ORDERS:
            self._orders.popitem(last=False)
        return state, True

    def finish(self, body: messages.TakeSnapshot, told: messages.Snapshot) -> None:
        """An order was carried out, or failed."""
        self._orders[body.order] = told


def failed(body: messages.TakeSnapshot, why: str) -> messages.Snapshot:
    """What is told of an order that could not be carried out."""
    return messages.Snapshot(name=body.name, state="failed", text=escape(why)[:MAX_TEXT])
