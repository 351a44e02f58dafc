"""Under which names the dashboard may be asked, who is turned away, and the headers that every answer carries."""

from __future__ import annotations

import asyncio
import http
import math
import urllib.parse

import msgspec
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from memoire.dashboard.settings import Settings
from memoire.security.exposure import is_loopback

from .logins import Logins, RequestOrigin, TooManyWrongTokens

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
