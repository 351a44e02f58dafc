"""Who gets in: names under which the dashboard may be asked, the token, and the headers that every answer carries."""

from __future__ import annotations

import hashlib
import hmac
import http
import http.cookies
import urllib.parse
from collections.abc import Iterable

import msgspec
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .settings import LOOPBACK, Settings

OPEN = ("/livez", "/readyz", "/metrics")
"""For probes and Prometheus: asked by address, without a token."""
PUBLIC = ("/", "/api/login", "/api/logout", "/api/session")
"""Without the token, but under a right name: what it takes to log in. Files under /static/ are public too."""
COOKIE = "memoire_session"
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


class Access:
    """Middleware: lets through who may come in, and puts the headers on every answer."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app, self._settings = app, settings

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
        path = scope["path"].removeprefix(prefix) if scope["path"].startswith(f"{prefix}/") else scope["path"]
        # A reverse proxy may have taken the prefix off, or not.
        scope = dict(scope, root_path=prefix, path=prefix + path)
        refused = self._refusal(scope, path)
        await (refused or self._app)(scope, receive, send_with_headers)

    def _refusal(self, scope: Scope, path: str) -> Response | None:
        headers = Headers(scope=scope)
        if path in OPEN:
            return None
        if not is_known(headers.get("host", ""), self._settings):
            text = "the dashboard is not known under this name (--allow-host lets it be)"
            return error(http.HTTPStatus.MISDIRECTED_REQUEST, text)
        if scope["method"] not in ("GET", "HEAD") and not is_same_origin(headers):
            return error(http.HTTPStatus.FORBIDDEN, "only the dashboard's own pages may do this")
        if path in PUBLIC or path.startswith("/static/") or is_let_in(headers, self._settings.token):
            return None
        text = "this takes the dashboard's token: Authorization: Bearer TOKEN, or POST /api/login"
        return error(http.HTTPStatus.UNAUTHORIZED, text, {"WWW-Authenticate": "Bearer"})


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
    return name in LOOPBACK or name in settings.hosts


def is_same_origin(headers: Headers) -> bool:
    """Whether a request that changes something comes from a page of ours, or from no page at all."""
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    if site not in (None, "same-origin", "none"):
        return False
    return origin is None or urllib.parse.urlsplit(origin).netloc == headers.get("host")


def is_let_in(headers: Headers, token: str | None) -> bool:
    """Whether the token is there, in a header or as the cookie that `cookie_of` makes."""
    if token is None:
        return True
    if hmac.compare_digest(headers.get("authorization", "").encode(), f"Bearer {token}".encode()):
        return True
    return any(hmac.compare_digest(value.encode(), cookie_of(token).encode()) for value in _cookies(headers))


def _cookies(headers: Headers) -> Iterable[str]:
    found: http.cookies.SimpleCookie = http.cookies.SimpleCookie()
    try:
        found.load(headers.get("cookie", ""))
    except http.cookies.CookieError:
        return ()
    return [found[COOKIE].value] if COOKIE in found else ()


def cookie_of(token: str) -> str:
    """What a browser keeps in place of the token."""
    return hashlib.sha256(b"memoire dashboard session:" + token.encode()).hexdigest()
