"""Who is let in: by the token in a header, or by a login that a browser remembers. No HTTP but its headers.

A login is a random number in a cookie. It ends when the person logs out, after `LOGIN_SECONDS`, when the token that it
was made with is taken out of the file, and with the dashboard's process. Wrong tokens cost time, by address; a wrong
cookie costs nothing, since nobody guesses 256 bits.
"""

from __future__ import annotations

import hashlib
import http.cookies
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable

from starlette.datastructures import Headers

from memoire.cluster.node import bearer
from memoire.cluster.tokens import Guesses, Tokens

COOKIE = "memoire_session"
LOGIN_SECONDS = 7 * 86_400.0
MOST_LOGINS = 1000
"""Logins at a time; the oldest ends when there is one more."""


class TooManyWrong(Exception):
    """An address has given too many wrong tokens; `seconds` until it may try again."""

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds)
        self.seconds = seconds


class Gate:
    """Lets in who has the token. Safe to use from several threads.

    Args:
        tokens: None lets everybody in.
        clock: Seconds.
    """

    def __init__(self, tokens: Tokens | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.refused: Counter[str] = Counter()
        """Who was not let in, by reason."""
        self._tokens, self._clock = tokens, clock
        self._guesses = Guesses(clock)
        self._logins: dict[bytes, tuple[str, float]] = {}  # its digest: with which token, and until when
        self._lock = threading.Lock()

    @property
    def is_open(self) -> bool:
        """Whether everybody is let in."""
        return self._tokens is None

    def admits(self, headers: Headers, address: str) -> bool:
        """Whether this request is let in.

        Raises:
            TooManyWrong: it gives a token, but its address gave too many wrong ones.
        """
        if self._tokens is None or self.has_login(headers):
            return True
        given = headers.get("authorization", "")
        return bool(given) and self._is_right(bearer(given), address)

    def still_admits(self, headers: Headers) -> bool:
        """Whether a request that was let in would be so now: it may have logged out, or the token have changed."""
        token = bearer(headers.get("authorization", ""))
        return self._tokens is None or self.has_login(headers) or (bool(token) and self._tokens.holds(token))

    def has_login(self, headers: Headers) -> bool:
        """Whether there is the cookie of a login that holds."""
        number = _cookie(headers)
        with self._lock:
            token, until = self._logins.get(_digest(number), ("", 0.0)) if number else ("", 0.0)
        return self._clock() < until and self._tokens is not None and self._tokens.holds(token)

    def log_in(self, token: str, address: str) -> str | None:
        """What a browser has to keep; None where this is not the token.

        Raises:
            TooManyWrong: its address gave too many wrong ones.
        """
        if not self._is_right(token, address):
            return None
        number = secrets.token_urlsafe(32)
        with self._lock:
            self._logins[_digest(number)] = token, self._clock() + LOGIN_SECONDS
            if len(self._logins) > MOST_LOGINS:
                del self._logins[next(iter(self._logins))]
        return number

    def log_out(self, headers: Headers) -> None:
        """End the login of this request, if there is one."""
        with self._lock:
            self._logins.pop(_digest(_cookie(headers)), None)

    def _is_right(self, token: str, address: str) -> bool:
        if left := self._guesses.wait(address):
            self.refused["http_guessing"] += 1
            raise TooManyWrong(left)
        if self._tokens is not None and self._tokens.holds(token):
            return True
        self._guesses.wrong(address)
        self.refused["http_token"] += 1
        return False


def _digest(number: str) -> bytes:
    return hashlib.sha256(number.encode()).digest()


def _cookie(headers: Headers) -> str:
    found: http.cookies.SimpleCookie = http.cookies.SimpleCookie()
    try:
        found.load(headers.get("cookie", ""))
    except http.cookies.CookieError:
        return ""
    return found[COOKIE].value if COOKIE in found else ""
