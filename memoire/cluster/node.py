"""What a node says of itself over HTTP: alive, ready, and how it stands. For probes, people and whoever watches.

    GET /livez     200, or 503 when a thread of the node is stuck: restart it
    GET /readyz    200, or 503 with the reasons why it should get no new clients just now: wait
    GET /metrics   figures for Prometheus (with the extra [server])
    GET /status    everything of stats(), the process, and the clients, a page of them at a time (?after=ID&most=100)
    GET /settings  a server's schema, parameters and limits
    GET /accounts  a server's ledger, for whoever merges several (?run=&seen=TIME)
    GET /episodes  episodes closed lately (?after=NUMBER&most=100)
    GET /sample    one sample of a recent batch (?table=)
    GET /logs      log lines of a server's clients (?text=&run=&client=&label=&since=&until=&after=&before=&most=&
                   newest)

A learner or an actor opens the same pages about its server, reader or client: `NodePages("127.0.0.1:8081", client)`.
Where a token is set, the first three are open and the others ask for it.

Reading is all there is: no page changes anything. One thread serves all connections; there are few at a time, each
has a few seconds for its request, and a newcomer takes the place of whoever has waited longest without asking
anything. So nobody can keep a probe out by opening connections and saying nothing. Pages that take long, or wait for a
lock of the node, are made on a second thread, one after the other: a probe is answered meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import http
import logging
import os
import queue
import socket
import threading
import urllib.parse
import weakref
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from memoire.errors import EndpointError, ParameterError

from .pages import OPEN, PAGES, Asked, Node, Page, Request, as_error

_log = logging.getLogger(__name__)

MOST_CONNECTIONS = 128
"""Connections at a time; one more ends the one that was made first."""
ACCEPTED_AT_ONCE = 16
"""Connections accepted in one turn of the loop: far below the bound, so that each is read from before it may go."""
WAITING = 1024
"""Connections that the kernel keeps until they are accepted: it drops what comes beyond, and that costs a second."""
REQUEST_TIME = 5.0
"""Seconds that a connection has in all: to send its request, and to take the answer."""
PROBES = (b"/livez", b"/readyz")
"""Pages that are made at once."""
MOST_WAITING = 16
"""Questions for other pages that wait their turn."""
MOST_REQUEST_BYTES = 8 << 10
"""Bytes of a request line and its headers."""
LEAST_TOKEN = 16
"""Characters of a token."""
LOOPBACK = ("localhost", "127.0.0.1", "::1")


class NodePages:
    """Pages about one node of this process, at one address, in a thread of their own.

    Args:
        address: "HOST:PORT", such as "127.0.0.1:8080", "[::1]:8080" or "*:8080"; port 0 takes a free one. None opens
            nothing.
        node: What the pages are about; it may be given later, by `show`. Until then the process is alive, and not
        ready.
        token: What "Authorization: Bearer ..." has to say for all pages but `OPEN` ones; None asks for nothing.

    On a loopback address only requests for a loopback name are answered: a page of a browser on this machine that has
    its own name point here learns nothing.

    Raises:
        EndpointError: the address is taken, or none.
    """

    def __init__(self, address: str | None, node: Node | None = None, *, token: str | None = None) -> None:
        self.address = address
        self._node = node
        self._token = token
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended: asyncio.Event | None = None
        self._connections: dict[_Connection, None] = {}  # the thread's, oldest first
        if address is None:
            return
        self._listener = listen(address)
        host, port = self._listener.getsockname()[:2]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._is_local = host in LOOPBACK
        _opened.add(self)
        self._begun = threading.Event()
        self._asked: queue.SimpleQueue[tuple[_Connection, bytes] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name="memoire-http", daemon=True),
            threading.Thread(target=self._make_pages, name="memoire-http-pages", daemon=True),
        ]
        for thread in self._threads:
            thread.start()
        self._begun.wait()

    @property
    def url(self) -> str | None:
        """What to ask, as from this machine; None when nothing was opened."""
        if self.address is None:
            return None
        host, _, port = self.address.rpartition(":")
        return f"http://{ {'0.0.0.0': '127.0.0.1', '[::]': '[::1]'}.get(host, host) }:{port}"  # noqa: S104

    def show(self, node: Node) -> None:
        """Speak of this node from now on."""
        self._node = node

    def close(self) -> None:
        """End the threads and all connections. May be called again."""
        loop, ended = self._loop, self._ended
        if loop is not None and ended is not None:
            with contextlib.suppress(RuntimeError):  # it is over already
                loop.call_soon_threadsafe(ended.set)
            self._asked.put(None)
            for thread in self._threads:
                thread.join(REQUEST_TIME)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def forget(self) -> None:
        """Let go of the address: in a forked child, which has no thread to answer, and would keep it taken."""
        self._listener.close()

    # ----------------------------------------------------------------------------------------- inside of the threads

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop, self._ended = asyncio.get_running_loop(), asyncio.Event()
        made = await self._loop.create_server(lambda: _Connection(self), sock=self._listener, backlog=ACCEPTED_AT_ONCE)
        self._listener.listen(WAITING)
        self._begun.set()
        await self._ended.wait()
        made.close()
        for connection in list(self._connections):
            connection.abort()
        await asyncio.sleep(0)  # their sockets are closed in the loop's next turn

    def joined(self, connection: _Connection) -> None:
        """A connection was made; where there are too many, the oldest goes."""
        self._connections[connection] = None
        if len(self._connections) > MOST_CONNECTIONS:
            next(iter(self._connections)).abort()

    def left(self, connection: _Connection) -> None:
        """A connection is over."""
        self._connections.pop(connection, None)

    def ask(self, connection: _Connection, request: bytes) -> None:
        """Answer this request on this connection: now, or when the pages before it are made."""
        _, _, target = request.partition(b" ")
        if target.partition(b" ")[0].partition(b"?")[0] in PROBES:
            connection.send(self.answer(request))
        elif self._asked.qsize() >= MOST_WAITING:
            text = f"{MOST_WAITING} others wait for a page already: ask again in a second"
            page = as_error(http.HTTPStatus.SERVICE_UNAVAILABLE, text)._replace(headers=(("Retry-After", "1"),))
            connection.send(_response(page))
        else:
            self._asked.put((connection, request))

    def _make_pages(self) -> None:
        while (asked := self._asked.get()) is not None:
            connection, request = asked
            if connection in self._connections:  # else nobody waits for it any more
                response = self.answer(request)
                assert self._loop is not None
                with contextlib.suppress(RuntimeError):  # closed meanwhile
                    self._loop.call_soon_threadsafe(connection.send, response)

    def answer(self, request: bytes) -> bytes:
        """The whole response to a whole request."""
        try:
            asked = self._read(request)
            page = PAGES[asked.path](self._node, asked)
        except Asked as answer:
            page = answer.page
        except ParameterError as error:
            page = as_error(http.HTTPStatus.BAD_REQUEST, str(error))
        except Exception:
            _log.exception("a page could not be made")
            page = as_error(http.HTTPStatus.INTERNAL_SERVER_ERROR, "the page could not be made; the log says why")
        return _response(page, is_head=request.startswith(b"HEAD "))

    def _read(self, request: bytes) -> Request:
        """A request that may be answered."""
        try:
            first, *lines = request.decode("ascii").split("\r\n")
            method, target, version = first.split(" ")
            headers = {
                name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)
            }
            parts = urllib.parse.urlsplit(target)
            query = dict(urllib.parse.parse_qsl(parts.query, keep_blank_values=True, max_num_fields=16))
            asked_for = urllib.parse.urlsplit(f"//{headers['host']}").hostname if "host" in headers else None
        except ValueError:
            raise Asked(as_error(http.HTTPStatus.BAD_REQUEST, "this is not an HTTP request")) from None
        if not version.startswith("HTTP/1."):
            raise Asked(as_error(http.HTTPStatus.HTTP_VERSION_NOT_SUPPORTED, "HTTP/1.1 is spoken here"))
        if self._is_local and asked_for is not None and asked_for not in LOOPBACK:
            text = f"these pages are for this machine only, and {asked_for!r} is not its name: ask for localhost"
            raise Asked(as_error(http.HTTPStatus.MISDIRECTED_REQUEST, text))
        if method not in ("GET", "HEAD"):
            page = as_error(http.HTTPStatus.METHOD_NOT_ALLOWED, "only GET: nothing can be changed here")
            raise Asked(page._replace(headers=(("Allow", "GET, HEAD"),)))
        if parts.path not in PAGES:
            text = f"there is no page {parts.path!r}; there are {', '.join(sorted(PAGES))}"
            raise Asked(as_error(http.HTTPStatus.NOT_FOUND, text))
        if self._token is not None and parts.path not in OPEN and not _has(headers, self._token):
            page = as_error(
                http.HTTPStatus.UNAUTHORIZED, "this page takes the node's token: Authorization: Bearer TOKEN"
            )
            raise Asked(page._replace(headers=(("WWW-Authenticate", "Bearer"),)))
        return Request(parts.path, query, headers)


_opened: weakref.WeakSet[NodePages] = weakref.WeakSet()


def _forget_all() -> None:
    for pages in list(_opened):
        pages.forget()


os.register_at_fork(after_in_child=_forget_all)


class _Connection(asyncio.Protocol):
    """One request and its answer. Everything here belongs to the pages' thread."""

    def __init__(self, pages: NodePages) -> None:
        self._pages = pages
        self._request = b""
        self._is_asked = False
        self._transport: asyncio.Transport | None = None
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Somebody came."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._deadline = asyncio.get_running_loop().call_later(REQUEST_TIME, transport.abort)
        self._pages.joined(self)

    def data_received(self, data: bytes) -> None:
        """A piece of the request; the first whole one is answered, and the connection ends with that."""
        if self._is_asked:
            return
        self._request += data
        head, is_whole, _ = self._request.partition(b"\r\n\r\n")
        if is_whole and len(head) <= MOST_REQUEST_BYTES:
            self._is_asked = True
            self._pages.ask(self, head)
        elif len(self._request) > MOST_REQUEST_BYTES:
            self._is_asked = True
            text = f"a request has at most {MOST_REQUEST_BYTES} bytes"
            self.send(_response(as_error(http.HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, text)))

    def send(self, response: bytes) -> None:
        """Send this, and end."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(response)
            self._transport.close()  # once it is written

    def connection_lost(self, error: Exception | None) -> None:
        """It is over."""
        if self._deadline is not None:
            self._deadline.cancel()
        self._pages.left(self)

    def abort(self) -> None:
        """End it now."""
        if self._transport is not None:
            self._transport.abort()


def read_token(path: str | os.PathLike[str]) -> str:
    """The token in a file: its only line.

    Raises:
        ParameterError: it cannot be read, or is no token.
    """
    expected = f"a file with one line of {LEAST_TOKEN} to 256 printable ASCII characters without blanks"
    try:
        with open(path, encoding="ascii") as file:
            token = file.read(4096).strip()
    except (OSError, ValueError) as error:
        raise ParameterError("token file", os.fspath(path), f"{expected}: {error}") from error
    if not LEAST_TOKEN <= len(token) <= 256 or not token.isprintable() or " " in token:
        raise ParameterError("token file", os.fspath(path), expected)
    return token


def _has(headers: Mapping[str, str], token: str) -> bool:
    return hmac.compare_digest(headers.get("authorization", "").encode(), f"Bearer {token}".encode())


def listen(address: str) -> socket.socket:
    """A socket that listens at "HOST:PORT". Raises EndpointError."""
    host, colon, port = address.rpartition(":")
    host = host.strip("[]")
    example = "HOST:PORT, such as '127.0.0.1:8080' or '*:8080'"
    if not colon or not (port.isascii() and port.isdigit() and int(port) < 1 << 16):
        raise EndpointError(address, "serve HTTP at", "it is not HOST:PORT", example)
    try:
        if host in ("", "*"):
            both = socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if both else socket.AF_INET
            return socket.create_server(("", int(port)), family=family, dualstack_ipv6=both)
        family = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        return socket.create_server((host, int(port)), family=family)
    except OSError as error:
        raise EndpointError(address, "serve HTTP at", str(error.strerror or error), f"a free {example}") from error


def _response(page: Page, *, is_head: bool = False) -> bytes:
    headers = {
        "Content-Type": page.kind,
        "Content-Length": str(len(page.body)),
        "Cache-Control": "no-store",
        "Content-Security-Policy": "default-src 'none'",
        "X-Content-Type-Options": "nosniff",
        "Connection": "close",
        **dict(page.headers),
    }
    lines = [
        f"HTTP/1.1 {page.status} {http.HTTPStatus(page.status).phrase}",
        *(f"{k}: {v}" for k, v in headers.items()),
    ]
    return "\r\n".join([*lines, "", ""]).encode("ascii") + (b"" if is_head else page.body)
