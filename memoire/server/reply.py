"""What a handler makes of a request."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from memoire.wire import messages
from memoire.wire.frames import MessageHeader


class Reply(NamedTuple):
    """Body and payload of an answer, and the header's fields that differ from the request's."""

    body: messages.Body
    payload: Any = None
    changed: Mapping[str, int] = {}
    until_saved: bool = False
    """Whether it must not leave before what it says is on disk, if the server saves anything."""


Handler = Callable[[float, MessageHeader, Any, Any], Reply]
"""Called with the time in seconds since 1970, header, body and payload of a request. It may raise ProtocolError."""
