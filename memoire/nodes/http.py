"""HTTP pages of a node: liveness, readiness, status, metrics and data, for probes, people and monitoring programs.

    GET /livez     200, or 503 when a thread of the node is stuck: restart it
    GET /readyz    200, or 503 with the reasons why it should get no new clients just now: wait
    GET /metrics   figures for Prometheus (with the extra [server])
    GET /status    everything of stats(), the process, and the clients, one page at a time (?after=ID&most=100)
    GET /settings  a server's schema, parameters and limits
    GET /accounts  a server's ledger, for a program that merges several ledgers (?run=&seen=TIME)
    GET /episodes  episodes closed lately (?after=NUMBER&most=100)
    GET /sample    one sample of a recent batch (?table=)
    GET /logs      log lines of a server's clients (?text=&run=&client=&label=&since=&until=&after=&before=&most=&
                   newest)

A learner or an actor opens the same pages about its server, reader, client or agent:
`NodePages("127.0.0.1:8081", client)`.

If a token is set, the first three pages are open and all further pages ask for the token. With a separate port for
these three pages (`probes`), /metrics on the main port asks for the token too.

Pages only read: no page changes anything. One thread serves all connections. Connections are few at a time, and each
has a few seconds for its request. A new connection beyond the limit replaces the oldest one, so idle connections
cannot keep a probe out. A second thread makes pages that take long or wait for a lock of the node, one after the
other; the first thread answers probes meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import http
import logging
import math
import os
import queue
import socket
import threading
import urllib.parse
import weakref
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any, Self, cast

from memoire.arguments import ClosingContext
from memoire.errors import EndpointError, InsecureWarning, ParameterError
from memoire.security.access import Tokens, WrongTokens, bearer, is_loopback, warn

from .pages import (
    ENDPOINTS,
    OPEN,
    PAGES,
    PROBES,
    EarlyAnswer,
    Embedding,
    Handler,
    Page,
    PagedNode,
    PageRequest,
    as_error,
    node_of,
    role_of,
)
from .supervision import LINE

_log = logging.getLogger(__name__)

MAX_CONNECTIONS = 128
"""Connections at a time; one more aborts the oldest, whose peer sees the abort."""
ACCEPTED_AT_ONCE = 16
"""Connections accepted in one turn of the loop: far below the bound, so that each is read before it may be aborted."""
LISTEN_BACKLOG = 1024
"""Connections that the kernel queues until they are accepted; a dropped one costs its client a second."""
REQUEST_TIMEOUT = 5.0
"""Default `request_timeout` of a connection, in seconds."""
AT_ONCE = tuple(path.encode() for path in PROBES)
"""Paths of the pages that the serving thread answers at once."""
MAX_WAITING = 16
"""Requests for other pages that may wait in the queue."""
MAX_REQUEST_BYTES = 8 << 10
"""Largest size of a request line and its headers, in bytes."""


class NodePages(ClosingContext):
    """Pages about one node of this process, at one address, in a thread of their own.

    Args:
        address: "HOST:PORT", such as "127.0.0.1:8080", "[::1]:8080" or "*:8080"; port 0 takes a free one. None opens
            nothing.
        node: The node that the pages describe, or an `rl.Agent` with a node within; `show` can set it later. Until then
            the process is alive and not ready.
        token: The token that requests send as "Authorization: Bearer ...", or `Tokens` of a file. `OPEN` pages need no
            token. None asks for no token.
        probes: Another "HOST:PORT" that answers only /livez, /readyz and /metrics, without a token; /metrics at
            `address` then asks for the token.
        pages: All pages, by path.
        request_timeout: Seconds that a connection has in all: to send its request and to receive the response.

    After wrong tokens an address has to wait (`WrongTokens`). On a loopback address only requests for a loopback name
    are answered. A web page that points its own host name at this machine therefore learns nothing.

    Raises:
        EndpointError: an address is in use or malformed.
    """

    def __init__(
        self,
        address: str | None,
        node: PagedNode | Embedding | None = None,
        *,
        token: Tokens | str | None = None,
        probes: str | None = None,
        pages: Mapping[str, Handler] = PAGES,
        request_timeout: float = REQUEST_TIMEOUT,
    ) -> None:
        self.request_timeout = request_timeout
        self.refused: Counter[str] = Counter()
        """Number of rejected requests, by reason."""
        self._pages = pages
        self._node = None if node is None else node_of(node)
        self._tokens, self._guesses = Tokens.from_setting(token), WrongTokens()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._connections: dict[_Connection, None] = {}  # the thread's, oldest first
        self._addresses = self._open_addresses(address, probes)
        self._main = None if address is None else self._addresses[0]
        self.address = None if self._main is None else self._main.address
        if not self._addresses:
            return
        try:
            warn("the HTTP server of this node", self.exposed_url, guard="a token (token=)", may="read its pages")
        except InsecureWarning:  # the filter of warnings is "error"
            self.forget()
            raise
        _opened.add(self)
        self._is_serving = threading.Event()
        self._page_requests: queue.SimpleQueue[tuple[_Connection, bytes] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name="memoire-http", daemon=True),
            threading.Thread(target=self._make_pages, name="memoire-http-pages", daemon=True),
        ]
        for thread in self._threads:
            thread.start()
        self._is_serving.wait()
        if self._node is not None:
            self.show(self._node)

    @classmethod
    def from_environment(cls, node: PagedNode | Embedding | None = None) -> Self:
        """Return pages at $MEMOIRE_HTTP and $MEMOIRE_PROBES, with the token in the file $MEMOIRE_HTTP_TOKEN_FILE.

        The chart sets these variables for programs of users. Nothing is opened if they are not set, or if a launcher
        started this process: all of the launcher's processes share its environment.
        """
        variables = {name: os.environ.get(f"MEMOIRE_{name}") or None for name in ("HTTP", "PROBES", "HTTP_TOKEN_FILE")}
        if LINE in os.environ:
            return cls(None, node)
        token = None if variables["HTTP_TOKEN_FILE"] is None else Tokens(variables["HTTP_TOKEN_FILE"])
        return cls(variables["HTTP"], node, token=token, probes=variables["PROBES"])

    def _open_addresses(self, address: str | None, probes: str | None) -> list[_HttpAddress]:
        addresses: list[_HttpAddress] = []
        try:
            if address is not None:
                addresses.append(
                    _HttpAddress(listen(address), frozenset(self._pages), OPEN if probes is None else ("/", *PROBES))
                )
            if probes is not None:
                addresses.append(_HttpAddress(listen(probes), frozenset(OPEN), OPEN))
        except BaseException:
            for opened in addresses:
                opened.listener.close()
            raise
        return addresses

    @property
    def url(self) -> str | None:
        """URL of the main address, as from this machine; None if nothing is open."""
        return None if self._main is None else self._main.url

    @property
    def probes_url(self) -> str | None:
        """URL of the port for probes and metrics only; None without a port for probes."""
        return self._addresses[-1].url if self._addresses and self._addresses[-1] is not self._main else None

    @property
    def exposed_url(self) -> tuple[str, ...]:
        """URL of the main address in a tuple if other machines can read the pages without a token, else ()."""
        is_open = self._main is not None and not self._main.is_local and self._tokens is None
        return (f"http://{self.address}",) if is_open else ()

    def show(self, node: PagedNode | Embedding) -> None:
        """Set the node that the pages describe. A server, proxy or inference node then advertises its pages."""
        self._node = shown = node_of(node)
        if self.address is not None and role_of(shown) in ENDPOINTS:
            cast(Any, shown).show_pages(f"http://{self.address}")

    def close(self) -> None:
        """Abort all connections and end the threads. May be called again."""
        loop, stop = self._loop, self._stop
        if loop is not None and stop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended already
                loop.call_soon_threadsafe(stop.set)
            self._page_requests.put(None)
            for thread in self._threads:
                thread.join(self.request_timeout)

    def forget(self) -> None:
        """Close the listening sockets: a forked child has no serving thread, and would keep the addresses in use."""
        for opened in self._addresses:
            opened.listener.close()

    # ----------------------------------------------------------------------------------------- inside of the threads

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        servers = []
        for opened in self._addresses:
            join = functools.partial(_Connection, self, opened)
            servers.append(await self._loop.create_server(join, sock=opened.listener, backlog=ACCEPTED_AT_ONCE))
            opened.listener.listen(LISTEN_BACKLOG)
        self._is_serving.set()
        await self._stop.wait()
        # asyncio makes the connection of an accepted socket in a task, some turns of the loop later, and closes each
        # connection a turn after the request to close. The servers have to outlive both: otherwise asyncio keeps an
        # accepted socket whose server is closed, and never closes it.
        for opened in self._addresses:
            self._loop.remove_reader(opened.listener)
        deadline = self._loop.time() + self.request_timeout
        while (self._connections or len(asyncio.all_tasks()) > 1) and self._loop.time() < deadline:
            for connection in list(self._connections):
                connection.abort()
            await asyncio.sleep(0)
        for server in servers:
            server.close()

    def add_connection(self, connection: _Connection) -> None:
        """Register a new connection; abort the oldest one beyond MAX_CONNECTIONS."""
        self._connections[connection] = None
        if len(self._connections) > MAX_CONNECTIONS:
            next(iter(self._connections)).abort()

    def remove_connection(self, connection: _Connection) -> None:
        """Unregister a connection that is closed."""
        self._connections.pop(connection, None)

    def ask(self, connection: _Connection, request: bytes) -> None:
        """Answer a request on its connection: now, or once the pages before it are made."""
        _, _, target = request.partition(b" ")
        if target.partition(b" ")[0].partition(b"?")[0] in AT_ONCE:
            connection.send(self.answer(request, connection.http_address, connection.peer))
        elif self._page_requests.qsize() >= MAX_WAITING:
            text = f"{MAX_WAITING} requests wait for a page already; ask again in a second"
            page = as_error(http.HTTPStatus.SERVICE_UNAVAILABLE, text)._replace(headers=(("Retry-After", "1"),))
            connection.send(_response(page))
        else:
            self._page_requests.put((connection, request))

    def _make_pages(self) -> None:
        while (item := self._page_requests.get()) is not None:
            connection, request = item
            if connection in self._connections:  # otherwise the client has gone
                response = self.answer(request, connection.http_address, connection.peer)
                assert self._loop is not None
                with contextlib.suppress(RuntimeError):  # closed meanwhile
                    self._loop.call_soon_threadsafe(connection.send, response)

    def answer(self, request: bytes, http_address: _HttpAddress, peer: str) -> bytes:
        """Return the whole response to a whole request that came from `peer` to this address."""
        try:
            parsed = self._read(request, http_address)
            if self._tokens is not None and parsed.path not in http_address.open_paths:
                self._guard(self._tokens, parsed.headers.get("authorization", ""), peer)
            page = self._pages[parsed.path](self._node, parsed)
        except EarlyAnswer as answer:
            page = answer.page
        except ParameterError as error:
            page = as_error(http.HTTPStatus.BAD_REQUEST, str(error))
        except Exception:
            _log.exception("a page failed")
            page = as_error(http.HTTPStatus.INTERNAL_SERVER_ERROR, "the page could not be made; the log says why")
        return _response(page, is_head=request.startswith(b"HEAD "))

    def _read(self, request: bytes, http_address: _HttpAddress) -> PageRequest:
        """Parse a request. Raise EarlyAnswer with the error page if the request is refused."""
        try:
            first, *lines = request.decode("ascii").split("\r\n")
            method, target, version = first.split(" ")
            headers = {
                name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)
            }
            parts = urllib.parse.urlsplit(target)
            query = dict(urllib.parse.parse_qsl(parts.query, keep_blank_values=True, max_num_fields=16))
            host_name = urllib.parse.urlsplit(f"//{headers['host']}").hostname if "host" in headers else None
        except ValueError:
            raise EarlyAnswer(as_error(http.HTTPStatus.BAD_REQUEST, "this is not an HTTP request")) from None
        if not version.startswith("HTTP/1."):
            raise EarlyAnswer(as_error(http.HTTPStatus.HTTP_VERSION_NOT_SUPPORTED, "this server speaks HTTP/1.1"))
        if http_address.is_local and host_name is not None and not is_loopback(host_name):
            text = f"these pages are for this machine only, and {host_name!r} is not its name: ask for localhost"
            self.refused["http_name"] += 1
            raise EarlyAnswer(as_error(http.HTTPStatus.MISDIRECTED_REQUEST, text))
        if method not in ("GET", "HEAD"):
            page = as_error(http.HTTPStatus.METHOD_NOT_ALLOWED, "use GET: the pages are read-only")
            raise EarlyAnswer(page._replace(headers=(("Allow", "GET, HEAD"),)))
        if parts.path not in http_address.paths:
            text = f"no page {parts.path!r}; the pages are {', '.join(sorted(http_address.paths))}"
            raise EarlyAnswer(as_error(http.HTTPStatus.NOT_FOUND, text))
        return PageRequest(parts.path, query, headers, self.exposed_url, dict(self.refused))

    def _guard(self, tokens: Tokens, authorization: str, peer: str) -> None:
        """Raise EarlyAnswer if the Authorization header does not hold the token, or if `peer` has to wait."""
        if authorization and (wait := self._guesses.wait(peer)):
            self.refused["http_guessing"] += 1
            text = f"too many wrong tokens came from {peer}; wait {math.ceil(wait)} s"
            page = as_error(http.HTTPStatus.TOO_MANY_REQUESTS, text)
            raise EarlyAnswer(page._replace(headers=(("Retry-After", f"{math.ceil(wait)}"),)))
        if tokens.holds(bearer(authorization)):
            return
        if authorization:
            self._guesses.count_wrong(peer)
            self.refused["http_token"] += 1
        text = "this page needs the node's token; send it as Authorization: Bearer TOKEN"
        raise EarlyAnswer(
            as_error(http.HTTPStatus.UNAUTHORIZED, text)._replace(headers=(("WWW-Authenticate", "Bearer"),))
        )


class _HttpAddress:
    """A listening address: its socket, its pages, and the pages that need no token."""

    def __init__(self, listener: socket.socket, paths: frozenset[str], open_paths: Collection[str]) -> None:
        host, port = listener.getsockname()[:2]
        self.listener, self.paths, self.open_paths = listener, paths, open_paths
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self.is_local = is_loopback(host)

    @property
    def url(self) -> str:
        """URL of the address, as from this machine."""
        host, _, port = self.address.rpartition(":")
        return f"http://{ {'0.0.0.0': '127.0.0.1', '[::]': '[::1]'}.get(host, host) }:{port}"  # noqa: S104


_opened: weakref.WeakSet[NodePages] = weakref.WeakSet()


def _forget_all() -> None:
    for pages in list(_opened):
        pages.forget()


os.register_at_fork(after_in_child=_forget_all)


class _Connection(asyncio.Protocol):
    """Connection for one request and its response. All methods run on the pages' thread."""

    def __init__(self, pages: NodePages, http_address: _HttpAddress) -> None:
        self._pages, self.http_address = pages, http_address
        self._request = b""
        self._has_request = False
        self.peer = ""
        """IP address of the client, without its port."""
        self._transport: asyncio.Transport | None = None
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the request's timeout and register with the pages."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.peer = str((transport.get_extra_info("peername") or ("",))[0])
        self._deadline = asyncio.get_running_loop().call_later(self._pages.request_timeout, transport.abort)
        self._pages.add_connection(self)

    def data_received(self, data: bytes) -> None:
        """Read a part of the request; once the request is whole, pass it to the pages."""
        if self._has_request:
            return
        self._request += data
        head, is_whole, _ = self._request.partition(b"\r\n\r\n")
        if is_whole and len(head) <= MAX_REQUEST_BYTES:
            self._has_request = True
            self._pages.ask(self, head)
        elif len(self._request) > MAX_REQUEST_BYTES:
            self._has_request = True
            text = f"the request is too long; the limit for its line and headers is {MAX_REQUEST_BYTES} bytes"
            self.send(_response(as_error(http.HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, text)))

    def send(self, response: bytes) -> None:
        """Send the response, then close the connection."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(response)
            self._transport.close()  # the answer was written

    def connection_lost(self, error: Exception | None) -> None:
        """Cancel the request's timeout and unregister from the pages."""
        if self._deadline is not None:
            self._deadline.cancel()
        self._pages.remove_connection(self)

    def abort(self) -> None:
        """Abort the connection without a response."""
        if self._transport is not None:
            self._transport.abort()


def listen(address: str) -> socket.socket:
    """Return a socket that listens at "HOST:PORT". Raise EndpointError if the address is in use or malformed."""
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
        "Cross-Origin-Resource-Policy": "same-origin",
        "X-Content-Type-Options": "nosniff",
        "Connection": "close",
        **dict(page.headers),
    }
    lines = [
        f"HTTP/1.1 {page.status} {http.HTTPStatus(page.status).phrase}",
        *(f"{k}: {v}" for k, v in headers.items()),
    ]
    return "\r\n".join([*lines, "", ""]).encode("ascii") + (b"" if is_head else page.body)
