"""Under which names the dashboard may be asked, who is turned away, and the headers that every answer carries.

Who is let in: by the token in a header, or by a login that a browser remembers. No HTTP but its headers.

A login is a random number in a cookie. It ends when the person logs out, after `LOGIN_LIFETIME`, when the token that it
was made with is taken out of the file, and with the dashboard's process. If there are `MAX_LOGINS`, those that were not
used for `LOGIN_IDLE_TIMEOUT` end for a further one, which is refused if there is none. Wrong tokens cost time, by
address; a wrong cookie costs nothing, since 256 bits cannot be guessed.

A reverse proxy on this machine is believed when it names an address, and any process on this machine can name one. So
wrong tokens count for the proxy, too, with a higher bound. An address that has given the token before does not wait for
what others behind its proxy guess.
"""

from __future__ import annotations

import asyncio
import hashlib
import http
import http.cookies
import math
import secrets
import threading
import time
import urllib.parse
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import msgspec
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from memoire.dashboard.settings import Settings
from memoire.security.access import (
    MAX_ADDRESSES,
    MAX_WRONG_OF_PROXY,
    PENALTY_OF_PROXY,
    Tokens,
    WrongTokens,
    bearer,
    is_loopback,
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


PROBES = ("/livez", "/readyz")
"""Asked by address, without a token."""
OPEN = (*PROBES, "/metrics")
"""The same for Prometheus, unless they have a port of their own."""
PUBLIC = ("/", "/api/login", "/api/logout", "/api/session")
"""Without the token, but under a right name: what it takes to log in. Files under /static/ are public too."""
MAX_BODY_BYTES = 8 << 10
BODY_TIMEOUT = 10.0
"""Seconds between two pieces of a body."""
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
    "font-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


def error(status: int, text: str, headers: dict[str, str] | None = None) -> Response:
    """An answer that says what is wrong."""
    body = msgspec.json.encode({"error": text})
    return Response(body, status, headers, "application/json")


class AccessMiddleware:
    """Middleware: lets through who may come in, and puts the headers on every answer."""

    def __init__(self, app: ASGIApp, settings: Settings, gate: Logins) -> None:
        self._app, self._settings, self._gate = app, settings, gate
        self._open = OPEN if settings.probes is None else PROBES

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        prefix = self._settings.root_path
        path = scope["path"]
        if prefix and f"{path}/".startswith(f"{prefix}/"):
            path = path.removeprefix(prefix) or "/"
        # A reverse proxy may have taken the prefix off, or not.
        scope = dict(scope, root_path=prefix, path=prefix + path)

        async def receive_soon() -> Message:
            try:
                return await asyncio.wait_for(receive(), BODY_TIMEOUT)
            except TimeoutError:
                return {"type": "http.disconnect"}

        refused = self._refusal(scope, path)
        await (refused or self._app)(scope, receive_soon if _has_body(scope) else receive, send_with_headers)

    def _refusal(self, scope: Scope, path: str) -> Response | None:
        headers = Headers(scope=scope)
        if path in self._open:
            return None
        if path != "/metrics" and not is_known(headers.get("host", ""), self._settings):
            self._gate.refused["http_name"] += 1
            text = "the dashboard is not known under this name (--allow-host lets it be)"
            return error(http.HTTPStatus.MISDIRECTED_REQUEST, text)
        if scope["method"] not in ("GET", "HEAD") and not is_same_origin(headers):
            self._gate.refused["http_origin"] += 1
            return error(http.HTTPStatus.FORBIDDEN, "only the dashboard's own pages may do this")
        if _has_body(scope) and (refused := too_long(headers)):
            return refused
        try:
            if path in PUBLIC or path.startswith("/static/") or self._gate.admits(headers, origin_of(scope)):
                return None
        except TooManyWrongTokens as many:
            return too_many(many)
        text = "this takes the dashboard's token: Authorization: Bearer TOKEN, or POST /api/login"
        return error(http.HTTPStatus.UNAUTHORIZED, text, {"WWW-Authenticate": "Bearer"})


def _has_body(scope: Scope) -> bool:
    return scope["method"] not in ("GET", "HEAD")


def too_long(headers: Headers) -> Response | None:
    """The answer to a body that is longer than any that is taken here, before any of it is read."""
    length = headers.get("content-length", "0" if "transfer-encoding" not in headers else "")
    if not (length.isascii() and length.isdigit()):
        return error(http.HTTPStatus.LENGTH_REQUIRED, "say how long the body is: Content-Length")
    if len(length) > 9 or int(length) > MAX_BODY_BYTES:
        text = f"a body has at most {MAX_BODY_BYTES} bytes"
        return error(http.HTTPStatus.REQUEST_ENTITY_TOO_LARGE, text, {"Connection": "close"})
    return None


def origin_of(scope: Scope) -> RequestOrigin:
    """Where a request comes from; uvicorn believes a reverse proxy on this machine, and nobody else. It forgets the
    proxy then: `serve` notes who is at the other end.
    """
    address = str((scope.get("client") or ("",))[0])
    return RequestOrigin(address, scope.get("state", {}).get("peer", address))


def too_many(many: TooManyWrongTokens) -> Response:
    """The answer to whoever guesses."""
    text = f"too many wrong tokens came from your address: wait {math.ceil(many.seconds)} s"
    return error(http.HTTPStatus.TOO_MANY_REQUESTS, text, {"Retry-After": str(math.ceil(many.seconds))})


def is_known(host: str, settings: Settings) -> bool:
    """Whether the dashboard may be asked under this name: a page in somebody's browser that has its own name point here
    learns nothing.
    """
    try:
        name = urllib.parse.urlsplit(f"//{host}").hostname
    except ValueError:
        return False
    if not name:
        return False
    if settings.token is not None and not settings.hosts and not settings.is_local:
        return True  # who has another name point here still has no token, and a cookie belongs to a name
    return is_loopback(name) or name in settings.hosts


def is_same_origin(headers: Headers) -> bool:
    """Whether a request that changes something comes from a page of ours, or from no page at all."""
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    if site not in (None, "same-origin", "none"):
        return False
    return origin is None or urllib.parse.urlsplit(origin).netloc == headers.get("host")


def is_by_tls(scheme: str, headers: Headers) -> bool:
    """Whether a browser came by https, also through a proxy that ends it: the page's own origin says so. Who lies here
    only has its own cookie marked wrongly.
    """
    return scheme == "https" or urllib.parse.urlsplit(headers.get("origin", "")).scheme == "https"
