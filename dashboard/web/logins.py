"""Who is let in: by the token in a header, or by a login that a browser remembers. No HTTP but its headers.

A login is a random number in a cookie. It ends when the person logs out, after `LOGIN_LIFETIME`, when the token that it
was made with is taken out of the file, and with the dashboard's process. If there are `MAX_LOGINS`, those that were not
used for `LOGIN_IDLE_TIMEOUT` end for a further one, which is refused if there is none. Wrong tokens cost time, by
address; a wrong cookie costs nothing, since 256 bits cannot be guessed.

A reverse proxy on this machine is believed when it names an address, and any process on this machine can name one. So
wrong tokens count for the proxy, too, with a higher bound. An address that has given the token before does not wait for
what others behind its proxy guess.
"""

from __future__ import annotations

import hashlib
import http.cookies
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from starlette.datastructures import Headers

from memoire.security.tokens import (
    MAX_ADDRESSES,
    MAX_WRONG_OF_PROXY,
    PENALTY_OF_PROXY,
    Tokens,
    WrongTokens,
    bearer,
    network_of,
)
from memoire.wire.byte_budget import PeerTable

COOKIE = "memoire_session"
LOGIN_LIFETIME = 7 * 86_400.0
MAX_LOGINS = 1000
"""Logins at a time."""
LOGIN_IDLE_TIMEOUT = 3600.0
"""Seconds without a request after which a login may end, if there is no place for another one."""


class TooManyWrongTokens(Exception):
    """Too many wrong tokens came from an address or proxy; `seconds` until it may give another one."""

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds)
        self.seconds = seconds


class RequestOrigin(NamedTuple):
    """Where a request comes from."""

    address: str
    """What a reverse proxy on this machine says; without one the peer's own."""
    peer: str
    """Address of the other end of the connection."""


class Logins:
    """Lets in who has the token. Safe to use from several threads.

    Args:
        tokens: None lets everybody in.
        clock: Seconds.
    """

    def __init__(self, tokens: Tokens | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.refused: Counter[str] = Counter()
        """Who was not let in, by reason."""
        self._tokens, self._clock = tokens, clock
        self._guesses = WrongTokens(clock)
        self._guesses_of_proxies = WrongTokens(clock, MAX_WRONG_OF_PROXY, PENALTY_OF_PROXY)
        self._proven: dict[str, None] = {}  # addresses that have given the token, the one that did so last at the end
        # By the digest of its number: with which token it was made, and until when it holds.
        self._logins: PeerTable[bytes, tuple[str, float]] = PeerTable("logins", MAX_LOGINS, LOGIN_IDLE_TIMEOUT)
        self._lock = threading.Lock()

    @property
    def is_open(self) -> bool:
        """Whether everybody is let in."""
        return self._tokens is None

    def admits(self, headers: Headers, origin: RequestOrigin) -> bool:
        """Whether this request is let in.

        Raises:
            TooManyWrong: it gives a token, but its address, or the proxy that it comes by, gave too many wrong ones.
        """
        if self._tokens is None or self.has_login(headers):
            return True
        given = headers.get("authorization", "")
        return bool(given) and self._is_right(bearer(given), origin)

    def still_admits(self, headers: Headers) -> bool:
        """Whether a request that was let in would be so now: it may have logged out, or the token have changed."""
        token = bearer(headers.get("authorization", ""))
        return self._tokens is None or self.has_login(headers) or (bool(token) and self._tokens.holds(token))

    def has_login(self, headers: Headers) -> bool:
        """Whether there is the cookie of a login that holds."""
        number, now = _digest(_cookie(headers)), self._clock()
        with self._lock:
            token, until = self._logins.get(number) or ("", 0.0)
        if now >= until or self._tokens is None or not self._tokens.holds(token):
            return False
        with self._lock:
            self._logins.hear(number, now)
        return True

    def log_in(self, token: str, origin: RequestOrigin) -> str | None:
        """What a browser has to keep; None where this is not the token.

        Raises:
            TooManyWrong: its address, or the proxy that it comes by, gave too many wrong ones.
            ProtocolError: (code "busy") there are too many logins, and all are in use.
        """
        if not self._is_right(token, origin):
            return None
        number, now = secrets.token_urlsafe(32), self._clock()
        with self._lock:
            self._logins.put(_digest(number), (token, now + LOGIN_LIFETIME), now)
        return number

    def log_out(self, headers: Headers) -> None:
        """End the login of this request, if there is one."""
        with self._lock:
            self._logins.pop(_digest(_cookie(headers)))

    def _is_right(self, token: str, origin: RequestOrigin) -> bool:
        if left := self._wait(origin):
            self.refused["http_guessing"] += 1
            raise TooManyWrongTokens(left)
        if self._tokens is not None and self._tokens.holds(token):
            self._prove(origin)
            return True
        self._guesses.wrong(origin.address)
        if origin.peer != origin.address:
            self._guesses_of_proxies.wrong(origin.peer)
        self.refused["http_token"] += 1
        return False

    def _wait(self, origin: RequestOrigin) -> float:
        """Seconds before this origin may give another token."""
        own = self._guesses.wait(origin.address)
        if origin.peer == origin.address or network_of(origin.address) in self._proven:
            return own
        return max(own, self._guesses_of_proxies.wait(origin.peer))

    def _prove(self, origin: RequestOrigin) -> None:
        """An address has the token."""
        network = network_of(origin.address)
        with self._lock:
            self._proven.pop(network, None)
            self._proven[network] = None
            if len(self._proven) > MAX_ADDRESSES:
                del self._proven[next(iter(self._proven))]


def _digest(number: str) -> bytes:
    return hashlib.sha256(number.encode()).digest()


def _cookie(headers: Headers) -> str:
    found: http.cookies.SimpleCookie = http.cookies.SimpleCookie()
    try:
        found.load(headers.get("cookie", ""))
    except http.cookies.CookieError:
        return ""
    return found[COOKIE].value if COOKIE in found else ""
