"""Access control of the dashboard: tokens, logins, host names, and the headers of every response.

A request is let in by the token in a header, or by a login in a cookie.

A login is a random number in a cookie. A login ends when the user logs out, after `LOGIN_LIFETIME`, when its token is
removed from the token file, and with the process of the dashboard. If there are `MAX_LOGINS`, a new login replaces one
that was not used for `LOGIN_IDLE_TIMEOUT`, or is refused. Wrong tokens cause a delay for their address; a wrong cookie
causes none, since 256 bits cannot be guessed.

The dashboard believes the client address that a reverse proxy on this machine reports, and any process on this machine
can report one. Wrong tokens count for such a proxy, too, with a higher bound. An address that sent the token before
does not wait because of wrong tokens from other addresses behind its proxy.
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
    mistake_counter_name,
)
from memoire.wire.byte_budget import PeerTable

COOKIE = "memoire_session"
LOGIN_LIFETIME = 7 * 86_400.0
MAX_LOGINS = 1000
"""Maximal number of logins at the same time."""
LOGIN_IDLE_TIMEOUT = 3600.0
"""Seconds without a request after which a login may be replaced, if there are `MAX_LOGINS`."""


class TooManyWrongTokens(Exception):
    """An address or proxy sent too many wrong tokens; it may send the next one after `seconds`."""

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds)
        self.seconds = seconds


class RequestOrigin(NamedTuple):
    """Client address of a request, and the peer of its connection."""

    address: str
    """Address that a reverse proxy on this machine reports; without a proxy, the address of the peer."""
    peer: str
    """Address of the other end of the connection."""


class Logins:
    """Checks of tokens, and the table of logins. Safe to use from several threads.

    Args:
        tokens: Allowed tokens; None lets in every request.
        clock: Returns seconds.
    """

    def __init__(self, tokens: Tokens | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.refused: Counter[str] = Counter()
        """Number of refused requests, by reason."""
        self._tokens, self._clock = tokens, clock
        self._guesses = WrongTokens(clock)
        self._guesses_of_proxies = WrongTokens(clock, MAX_WRONG_OF_PROXY, PENALTY_OF_PROXY)
        self._proven: dict[str, None] = {}  # addresses that have sent the token, the latest at the end
        # For each digest of a login's number: the token of the login, and the time at which the login ends.
        self._logins: PeerTable[bytes, tuple[str, float]] = PeerTable("logins", MAX_LOGINS, LOGIN_IDLE_TIMEOUT)
        self._lock = threading.Lock()

    @property
    def is_open(self) -> bool:
        """True if no token is needed."""
        return self._tokens is None

    def admits(self, headers: Headers, origin: RequestOrigin) -> bool:
        """Return True if a request is let in.

        Raises:
            TooManyWrongTokens: The request has a token, but its address or proxy has sent too many wrong ones.
        """
        if self._tokens is None or self.has_login(headers):
            return True
        authorization = headers.get("authorization", "")
        return bool(authorization) and self._is_right(bearer(authorization), origin)

    def still_admits(self, headers: Headers) -> bool:
        """Return True if a request that was let in earlier still is: not after a log-out or a change of the token."""
        token = bearer(headers.get("authorization", ""))
        return self._tokens is None or self.has_login(headers) or (bool(token) and self._tokens.holds(token))

    def has_login(self, headers: Headers) -> bool:
        """Return True if a request has the cookie of a valid login."""
        number, now = _digest(_cookie(headers)), self._clock()
        with self._lock:
            token, until = self._logins.get(number) or ("", 0.0)
        if now >= until or self._tokens is None or not self._tokens.holds(token):
            return False
        with self._lock:
            self._logins.look_up(number, now)
        return True

    def log_in(self, token: str, origin: RequestOrigin) -> str | None:
        """Return the value of the cookie for a new login, or None if the token is wrong.

        Raises:
            TooManyWrongTokens: The address or proxy of the request has sent too many wrong tokens.
            ProtocolError: (code "busy") There are too many logins, and all are in use.
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
        self._guesses.count_wrong(origin.address)
        if origin.peer != origin.address:
            self._guesses_of_proxies.count_wrong(origin.peer)
        self.refused["http_token"] += 1
        return False

    def _wait(self, origin: RequestOrigin) -> float:
        """Return the seconds before an origin may send another token."""
        own = self._guesses.wait(origin.address)
        if origin.peer == origin.address or mistake_counter_name(origin.address) in self._proven:
            return own
        return max(own, self._guesses_of_proxies.wait(origin.peer))

    def _prove(self, origin: RequestOrigin) -> None:
        """Note that an address has sent the right token."""
        network = mistake_counter_name(origin.address)
        with self._lock:
            self._proven.pop(network, None)
            self._proven[network] = None
            if len(self._proven) > MAX_ADDRESSES:
                del self._proven[next(iter(self._proven))]


def _digest(number: str) -> bytes:
    return hashlib.sha256(number.encode()).digest()


def _cookie(headers: Headers) -> str:
    cookies: http.cookies.SimpleCookie = http.cookies.SimpleCookie()
    try:
        cookies.load(headers.get("cookie", ""))
    except http.cookies.CookieError:
        return ""
    return cookies[COOKIE].value if COOKIE in cookies else ""


PROBES = ("/livez", "/readyz")
"""Paths that need neither a token nor a known host name."""
OPEN = (*PROBES, "/metrics")
"""`PROBES` and the path for Prometheus, for dashboards without a separate port for them."""
PUBLIC = ("/", "/api/login", "/api/logout", "/api/session")
"""Paths that need a known host name but no token, so that users can log in; so do files under /static/."""
MAX_BODY_BYTES = 8 << 10
BODY_TIMEOUT = 10.0
"""Longest time in seconds between two pieces of a request's body."""
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
    """Return a response with an error text as JSON."""
    body = msgspec.json.encode({"error": text})
    return Response(body, status, headers, "application/json")


class AccessMiddleware:
    """ASGI middleware that refuses requests without access, and adds security headers to every response."""

    def __init__(self, app: ASGIApp, settings: Settings, gate: Logins) -> None:
        self._app, self._settings, self._gate = app, settings, gate
        self._open = OPEN if settings.probes is None else PROBES

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check one request and pass it on, or refuse it."""
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
        # A reverse proxy may have removed the prefix, or not.
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
            text = "the dashboard does not serve this host name; allow it with --allow-host"
            return error(http.HTTPStatus.MISDIRECTED_REQUEST, text)
        if scope["method"] not in ("GET", "HEAD") and not is_same_origin(headers):
            self._gate.refused["http_origin"] += 1
            return error(http.HTTPStatus.FORBIDDEN, "only the dashboard's own pages may send this request")
        if _has_body(scope) and (refused := too_long(headers)):
            return refused
        try:
            if path in PUBLIC or path.startswith("/static/") or self._gate.admits(headers, origin_of(scope)):
                return None
        except TooManyWrongTokens as many:
            return too_many(many)
        text = "this needs the dashboard's token: send Authorization: Bearer TOKEN, or POST /api/login"
        return error(http.HTTPStatus.UNAUTHORIZED, text, {"WWW-Authenticate": "Bearer"})


def _has_body(scope: Scope) -> bool:
    return scope["method"] not in ("GET", "HEAD")


def too_long(headers: Headers) -> Response | None:
    """Return the refusal of a request whose body is too long or has no length, before it is read; else None."""
    length = headers.get("content-length", "0" if "transfer-encoding" not in headers else "")
    if not (length.isascii() and length.isdigit()):
        return error(http.HTTPStatus.LENGTH_REQUIRED, "the request needs a Content-Length")
    if len(length) > 9 or int(length) > MAX_BODY_BYTES:
        text = f"a body has at most {MAX_BODY_BYTES} bytes"
        return error(http.HTTPStatus.REQUEST_ENTITY_TOO_LARGE, text, {"Connection": "close"})
    return None


def origin_of(scope: Scope) -> RequestOrigin:
    """Return the origin of a request.

    uvicorn believes the client address that a reverse proxy on this machine reports, and then drops the address of the
    proxy. `serve` keeps that in the state of the connection.
    """
    address = str((scope.get("client") or ("",))[0])
    return RequestOrigin(address, scope.get("state", {}).get("peer", address))


def too_many(many: TooManyWrongTokens) -> Response:
    """Return the refusal of a request after too many wrong tokens."""
    text = f"too many wrong tokens came from your address: wait {math.ceil(many.seconds)} s"
    return error(http.HTTPStatus.TOO_MANY_REQUESTS, text, {"Retry-After": str(math.ceil(many.seconds))})


def is_known(host: str, settings: Settings) -> bool:
    """Return True if the dashboard serves a host name.

    The check stops DNS rebinding: a foreign page in a user's browser, whose own name resolves to the dashboard.
    """
    try:
        name = urllib.parse.urlsplit(f"//{host}").hostname
    except ValueError:
        return False
    if not name:
        return False
    if settings.token is not None and not settings.hosts and not settings.is_local:
        return True  # under a foreign name a page has neither the token nor the cookie
    return is_loopback(name) or name in settings.hosts


def is_same_origin(headers: Headers) -> bool:
    """Return True if a request that changes something comes from a page of the dashboard, or from no page at all."""
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    if site not in (None, "same-origin", "none"):
        return False
    return origin is None or urllib.parse.urlsplit(origin).netloc == headers.get("host")


def is_by_tls(scheme: str, headers: Headers) -> bool:
    """Return True if a browser uses https, also through a proxy that terminates it, by the Origin of the page.

    A false Origin only marks the cookie of the client that sends it.
    """
    return scheme == "https" or urllib.parse.urlsplit(headers.get("origin", "")).scheme == "https"
