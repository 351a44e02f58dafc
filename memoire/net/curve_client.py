"""The keys that one socket shows to whom it dials: which of the other side's keys it expects, and what a refusal means.

    dial with the key expected ──refused──▶ 400             this process' key is not authorized there: again, later
                                           hung up         the other side has another key: the next of server.pub
                                           no such greeting  one side uses keys, the other none: again, later

ZeroMQ gives up after the first and the last, so the socket is dialled anew, with the keys as they are then.
"""

from __future__ import annotations

import errno
import random
import time

import zmq

from memoire.errors import AuthError, KeyFileError
from memoire.security.keyfolder import REREAD_INTERVAL, Keys

from . import sockets
from .context import Socket

PAUSE, MAX_PAUSE = 0.5, 8.0
"""Seconds before an address is dialled again that did not let this process in: the first time, and at most."""
ANYWHERE = ""
"""Where `Keys.met` has the key that was found last: the next address is often another server of the same cluster."""


class Shown:
    """Belongs to the thread that owns the socket.

    Args:
        keys: Of this process.
        made: The socket; ended together with this.
        endpoint: For messages.

    Raises:
        KeyFileError: nobody has said which keys the other side may have.
    """

    def __init__(self, keys: Keys, made: Socket, endpoint: str) -> None:
        if not keys.servers:
            made.close(0)
            advice = "Put own.pub of the servers or proxies that this process dials there, as server.pub."
            raise KeyFileError(str(keys.folder), f"has no server.pub to know {endpoint} by", advice)
        self.keys = keys
        self._made, self._endpoint = made, endpoint
        self._own, self._servers = keys.own, keys.servers
        self.expected = b""
        """The key that the other side has to show."""
        self._address = ""
        self._wrong: set[bytes] = set()  # keys that the other side does not have
        self._refusals = 0  # since it was let in last
        self._is_in_doubt = False  # whether the key that was found there before has failed once
        self._dial_at = float("inf")
        self._refresh_at = time.monotonic() + REREAD_INTERVAL

    @property
    def look_at(self) -> float:
        """When `is_due` may become true, or the keys may have changed."""
        return min(self._dial_at, self._refresh_at)

    @property
    def is_outdated(self) -> bool:
        """Whether this process has other keys now than it showed."""
        return (self._own, self._servers) != (self.keys.own, self.keys.servers)

    def is_due(self, now: float) -> bool:
        """Whether to dial anew now."""
        if now >= self._refresh_at:
            self.keys.refresh()
            self._refresh_at = now + REREAD_INTERVAL
        return now >= self._dial_at

    def apply(self, address: str) -> None:
        """Have the socket show this process' key at the address, and expect one of those that the other side may have:
        the one that was found there the last time, or else the one that was found anywhere last, or the first.
        """
        self._dial_at = float("inf")
        self._own, self._servers, self._address = self.keys.own, self.keys.servers, address
        known = [key.public for key in self._servers]
        met = [self.keys.met.get(place) for place in (address, _host(address), ANYWHERE)]
        order = [public for public in (*met, *known) if public in known and public not in self._wrong]
        self.expected = order[0] if order else known[0]
        assert self._own.secret is not None
        sockets.use_keys(self._made, self._own.public, self._own.secret, self.expected)

    def succeeded(self) -> None:
        """The other side let this process in."""
        self._found()
        self._wrong.clear()
        self._is_in_doubt = False
        self._refusals = 0
        self._dial_at = float("inf")

    def failed(self, event: int, value: int, now: float) -> AuthError | None:
        """A handshake failed; why this process is not let in, where that is known by now."""
        own = self._own
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self._found()  # it could read what was said to this key
            self._pause(now)
            reason = f"it does not know the key {own.peer.principal} {own.fingerprint} of this process (any more)"
            return AuthError(self._endpoint, reason, "There: `memoire keys authorize FOLDER own.pub`.")
        if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and value == sockets.OTHER_MECHANISM:
            self._pause(now)
            advice = "Give the process there keys, or this one none."
            return AuthError(self._endpoint, "it asks for no key, so nobody knows who it is", advice)
        if event != zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL or value == errno.EAGAIN:
            return None
        if self.expected == self.keys.met.get(self._address) and not self._is_in_doubt:
            self._is_in_doubt = True  # a process that begins or ends hangs up, too: ZeroMQ dials it again
            return None
        self._wrong.add(self.expected)
        if any(key.public not in self._wrong for key in self.keys.servers):
            self._dial_at = now
            return None
        self._wrong.clear()
        self._pause(now)
        shown = ", ".join(key.fingerprint for key in self._servers)
        advice = "Put its own.pub there, if it is who it should be; or see in its log why it lets nobody in."
        return AuthError(
            self._endpoint, f"it ends the connection: it has none of the keys in server.pub ({shown})", advice
        )

    def _found(self) -> None:
        """The other side has the key that is expected of it."""
        self.keys.met |= dict.fromkeys((self._address, _host(self._address), ANYWHERE), self.expected)

    def _pause(self, now: float) -> None:
        seconds = min(MAX_PAUSE, PAUSE * 2.0 ** min(self._refusals, 30))
        self._refusals += 1
        self._dial_at = now + seconds * random.uniform(0.5, 1.0)


def _host(address: str) -> str:
    return address.rpartition(":")[0]
