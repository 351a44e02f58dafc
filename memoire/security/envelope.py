"""Requests and replies on their way, with the addresses of the connections that they came by. Pure.

at the server    [proxy's, relay's, client's, empty, message, payload]
at the proxy             [relay's, client's, empty, message, payload]     each hop puts one in front
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from memoire.wire.frames import Buffer

from .permissions import Peer


class RoutedMessage(NamedTuple):
    """A request or reply whose parts were told apart."""

    envelope: list[Buffer]
    """Addresses of those who are to get the answer, and an empty frame."""
    message: list[Buffer]
    """The message itself."""


def opened(frames: Sequence[Buffer]) -> RoutedMessage | None:
    """Envelope and message, which the first empty frame parts; None where there is none.

    Addresses are `bytes` from here on: to send those, as often as needed, costs less than frames of ZeroMQ's.
    """
    for place, frame in enumerate(frames):
        if not len(frame):
            return RoutedMessage([bytes(each) for each in frames[: place + 1]], list(frames[place + 1 :]))
    return None


class EnvelopedRequest(NamedTuple):
    """A request as it came in, and whose it is."""

    peer: Peer
    envelope: list[Buffer]
    message: list[Buffer]
    is_first: bool
    """Whether no proxy has let it in before."""

    @property
    def frames(self) -> list[Buffer]:
        """Envelope and message, to be handed on."""
        return [*self.envelope, *self.message]
