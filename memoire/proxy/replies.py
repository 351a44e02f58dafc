"""What becomes of a server's reply on its way to a client. Pure.

Most are handed on as they are. WELCOME gets this proxy's own addresses. UPDATED of a server that was taken off the list
gets the word to leave it: the client has then nothing open there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

import msgspec

from memoire.errors import ProtocolError
from memoire.limits import Limits
from memoire.models.model import ModelStore
from memoire.security.envelope import RoutedMessage, opened
from memoire.wire import messages, types
from memoire.wire.frames import Buffer, parse, peek
from memoire.wire.frames import reply as encode_reply
from memoire.wire.receivers import Receivers

from .backend import Backend
from .router import Router
from .stats import ProxyCounts

B = TypeVar("B", bound=Backend)


class Replies(Generic[B]):
    """Hands replies on. Belongs to the proxy's thread.

    Args:
        endpoints: The proxy's own.
        models: Those that it hands out.
        receivers: What its clients take.
    """

    def __init__(
        self,
        router: Router[B],
        endpoints: messages.Endpoints,
        models: ModelStore,
        limits: Limits,
        counts: ProxyCounts,
        receivers: Receivers,
    ) -> None:
        self._router, self._endpoints, self._models = router, endpoints, models
        self._limits, self._counts, self._receivers = limits, counts, receivers

    def take(self, back: B, frames: Sequence[Buffer]) -> Sequence[Buffer] | None:
        """The reply as its client gets it, with its envelope; None if it is damaged, and refused."""
        self._counts.replies += 1
        reply = opened(frames)
        if reply is None:
            self._counts.refuse("frames")
            return None
        kind = _type_of(reply.message)
        if kind is not types.WELCOME and not (kind is types.UPDATED and back in self._router.retiring):
            return frames
        try:
            return [*reply.envelope, *self._changed(back, reply)]
        except ProtocolError as error:
            self._counts.refuse(error.code)
            return None

    def _changed(self, back: B, reply: RoutedMessage) -> list[Buffer]:
        message = parse(reply.message, self._limits)
        if isinstance(message.body, messages.Updated):
            told = msgspec.structs.replace(message.body, leaving=True)
            return encode_reply(message.header, told, payload=message.payload)
        assert isinstance(message.body, messages.Welcome)
        self._router.answered(message.header.home, back)
        welcome = self._router.welcome(message.body, self._endpoints, self._models.versions(), self._limits)
        frames = encode_reply(message.header, welcome)
        try:
            self._receivers.of(message.header.client).check(message.header.client, welcome, frames)
        except ProtocolError as error:
            self._counts.refuse(error.code)
            return encode_reply(message.header, messages.Refused(code=error.code, text=error.detail))
        return frames


def _type_of(message: Sequence[Buffer]) -> types.Type | None:
    """What a message says it is, unchecked; None if it says nothing that is known."""
    return None if peek(message) is None else types.TYPES.get(int.from_bytes(memoryview(message[0])[6:8], "little"))
