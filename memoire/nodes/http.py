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

A learner or an actor opens the same pages about its server, reader, client or agent:
`NodePages("127.0.0.1:8081", client)`.
Where a token is set, the first three are open and the others ask for it; or these three have a port of their own, and
then /metrics asks for it too on the other (`probes`).

Reading is all there is: no page changes anything. One thread serves all connections; there are few at a time, each
has a few seconds for its request, and a newcomer takes the place of whoever has waited longest without asking
anything. So nobody can keep a probe out by opening connections and saying nothing. Pages that take long, or wait for a
lock of the node, are made on a second thread, one after the other: a probe is answered meanwhile.
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
    Node,
    Page,
    PageRequest,
    as_error,
    node_of,
    role_of,
)
from .supervision import LINE

_log = logging.getLogger(__name__)

MAX_CONNECTIONS = 128
"""Connections at a time; one more ends the one that was made first, which its peer sees."""
ACCEPTED_AT_ONCE = 16
"""Connections accepted in one turn of the loop: far below the bound, so that each is read from before it may go."""
LISTEN_BACKLOG = 1024
"""Connections that the kernel keeps until they are accepted: it drops what comes beyond, and that costs a second."""
REQUEST_TIMEOUT = 5.0
"""The usual `request_timeout`, in seconds."""
AT_ONCE = tuple(path.encode() for path in PROBES)
"""Pages that are not waited for."""
MAX_WAITING = 16
"""Questions for other pages that wait their turn."""
MAX_REQUEST_BYTES = 8 << 10
"""Bytes of a request line and its headers."""


class NodePages(ClosingContext):
    """Pages about one node of this process, at one address, in a thread of their own.

    Args:
        address: "HOST:PORT", such as "127.0.0.1:8080", "[::1]:8080" or "*:8080"; port 0 takes a free one. None opens
            nothing.
        node: What the pages are about, also an `rl.Agent`; it may be given later, by `show`. Until then the process is
            alive, and not ready.
        token: What "Authorization: Bearer ..." has to say for all pages but `OPEN` ones: `Tokens` of a file, or one.
            None asks for nothing.
        probes: Another "HOST:PORT", where only /livez, /readyz and /metrics are answered, to everybody; /metrics asks
            for the token at the first one then.
        pages: All that there are, by path.
        request_timeout: Seconds that a connection has in all: to send its request, and to take the answer.

    Whoever gives wrong tokens has to wait, by address (`WrongTokens`). On a loopback address only requests for a
    loopback name are answered: a page of a browser on this machine that has its own name point here learns nothing.

    Raises:
        EndpointError: an address is taken, or none.
    """

    def __init__(
        self,
        address: str | None,
        node: Node | Embedding | None = None,
        *,
        token: Tokens | str | None = None,
        probes: str | None = None,
        pages: Mapping[str, Handler] = PAGES,
        request_timeout: float = REQUEST_TIMEOUT,
    ) -> None:
        self.request_timeout = request_timeout
        self.refused: Counter[str] = Counter()
        """Requests that were refused for who asked, by reason."""
        self._pages = pages
        self._node = None if node is None else node_of(node)
        self._tokens, self._guesses = Tokens.of(token), WrongTokens()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended: asyncio.Event | None = None
        self._connections: dict[_Connection, None] = {}  # the thread's, oldest first
        self._doors = self._open_doors(address, probes)
        self._main = None if address is None else self._doors[0]
        self.address = None if self._main is None else self._main.address
        if not self._doors:
            return
        try:
            warn("the HTTP server of this node", self.open, guard="a token (token=)", may="read how it stands")
        except InsecureWarning:  # which somebody has made an error
            self.forget()
            raise
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
        if self._node is not None:
            self.show(self._node)

    @classmethod
    def from_environment(cls, node: Node | Embedding | None = None) -> Self:
        """Pages where $MEMOIRE_HTTP, $MEMOIRE_PROBES and $MEMOIRE_HTTP_TOKEN_FILE say, as the chart sets them for a
        program of yours; none where these are not set, or where a launcher has started this process: it has the
        launcher's environment, and so do others.
        """
        said = {name: os.environ.get(f"MEMOIRE_{name}") or None for name in ("HTTP", "PROBES", "HTTP_TOKEN_FILE")}
        if LINE in os.environ:
            return cls(None, node)
        token = None if said["HTTP_TOKEN_FILE"] is None else Tokens(said["HTTP_TOKEN_FILE"])
        return cls(said["HTTP"], node, token=token, probes=said["PROBES"])

    def _open_doors(self, address: str | None, probes: str | None) -> list[_HttpAddress]:
        made: list[_HttpAddress] = []
        try:
            if address is not None:
                made.append(
                    _HttpAddress(listen(address), frozenset(self._pages), OPEN if probes is None else ("/", *PROBES))
                )
            if probes is not None:
                made.append(_HttpAddress(listen(probes), frozenset(OPEN), OPEN))
        except BaseException:
            for door in made:
                door.listener.close()
            raise
        return made

    @property
    def url(self) -> str | None:
        """What to ask, as from this machine; None when nothing was opened."""
        return None if self._main is None else self._main.url

    @property
    def probes_url(self) -> str | None:
        """The same of the port for probes and metrics only; None where there is none."""
        return self._doors[-1].url if self._doors and self._doors[-1] is not self._main else None

    @property
    def open(self) -> tuple[str, ...]:
        """Where everybody on other machines can read how the node stands: its address, or nothing."""
        is_open = self._main is not None and not self._main.is_local and self._tokens is None
        return (f"http://{self.address}",) if is_open else ()

    def show(self, node: Node | Embedding) -> None:
        """Speak of this node from now on. A server, proxy or inference node tells others where its pages are."""
        self._node = found = node_of(node)
        if self.address is not None and role_of(found) in ENDPOINTS:
            cast(Any, found).show_pages(f"http://{self.address}")

    def close(self) -> None:
        """End the threads and all connections. May be called again."""
        loop, ended = self._loop, self._ended
        if loop is not None and ended is not None:
            with contextlib.suppress(RuntimeError):  # it is over already
                loop.call_soon_threadsafe(ended.set)
            self._asked.put(None)
            for thread in self._threads:
                thread.join(self.request_timeout)

    def forget(self) -> None:
        """Let go of the addresses: in a forked child, which has no thread to answer, and would keep it taken."""
        for door in self._doors:
            door.listener.close()

    # ----------------------------------------------------------------------------------------- inside of the threads

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop, self._ended = asyncio.get_running_loop(), asyncio.Event()
        made = []
        for door in self._doors:
            join = functools.partial(_Connection, self, door)
            made.append(await self._loop.create_server(join, sock=door.listener, backlog=ACCEPTED_AT_ONCE))
            door.listener.listen(LISTEN_BACKLOG)
        self._begun.set()
        await self._ended.wait()
        # A connection that was accepted just now is made by a task, some turns of the loop later, and each is closed a
        # turn after it was told to be. Only then may the servers end: asyncio keeps whoever was accepted and finds his
        # server closed, and never hangs up on him.
        for door in self._doors:
            self._loop.remove_reader(door.listener)
        until = self._loop.time() + self.request_timeout
        while (self._connections or len(asyncio.all_tasks()) > 1) and self._loop.time() < until:
            for connection in list(self._connections):
                connection.abort()
            await asyncio.sleep(0)
        for each in made:
            each.close()

    def joined(self, connection: _Connection) -> None:
        """A connection was made; where there are too many, the oldest goes."""
        self._connections[connection] = None
        if len(self._connections) > MAX_CONNECTIONS:
            next(iter(self._connections)).abort()

    def left(self, connection: _Connection) -> None:
        """A connection is over."""
        self._connections.pop(connection, None)

    def ask(self, connection: _Connection, request: bytes) -> None:
        """Answer this request on this connection: now, or when the pages before it are made."""
        _, _, target = request.partition(b" ")
        if target.partition(b" ")[0].partition(b"?")[0] in AT_ONCE:
            connection.send(self.answer(request, connection.door, connection.peer))
        elif self._asked.qsize() >= MAX_WAITING:
            text = f"{MAX_WAITING} others wait for a page already: ask again in a second"
            page = as_error(http.HTTPStatus.SERVICE_UNAVAILABLE, text)._replace(headers=(("Retry-After", "1"),))
            connection.send(_response(page))
        else:
            self._asked.put((connection, request))

    def _make_pages(self) -> None:
        while (asked := self._asked.get()) is not None:
            connection, request = asked
            if connection in self._connections:  # else nobody waits for it any more
                response = self.answer(request, connection.door, connection.peer)
                assert self._loop is not None
                with contextlib.suppress(RuntimeError):  # closed meanwhile
                    self._loop.call_soon_threadsafe(connection.send, response)

    def answer(self, request: bytes, door: _HttpAddress, peer: str) -> bytes:
        """The whole response to a whole request that came in by this door, of somebody at this address."""
        try:
            asked = self._read(request, door)
            if self._tokens is not None and asked.path not in door.unguarded:
                self._guard(self._tokens, asked.headers.get("authorization", ""), peer)
            page = self._pages[asked.path](self._node, asked)
        except EarlyAnswer as answer:
            page = answer.page
        except ParameterError as error:
            page = as_error(http.HTTPStatus.BAD_REQUEST, str(error))
        except Exception:
            _log.exception("a page could not be made")
            page = as_error(http.HTTPStatus.INTERNAL_SERVER_ERROR, "the page could not be made; the log says why")
        return _response(page, is_head=request.startswith(b"HEAD "))

    def _read(self, request: bytes, door: _HttpAddress) -> PageRequest:
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
            raise EarlyAnswer(as_error(http.HTTPStatus.BAD_REQUEST, "this is not an HTTP request")) from None
        if not version.startswith("HTTP/1."):
            raise EarlyAnswer(as_error(http.HTTPStatus.HTTP_VERSION_NOT_SUPPORTED, "HTTP/1.1 is spoken here"))
        if door.is_local and asked_for is not None and not is_loopback(asked_for):
            text = f"these pages are for this machine only, and {asked_for!r} is not its name: ask for localhost"
            self.refused["http_name"] += 1
            raise EarlyAnswer(as_error(http.HTTPStatus.MISDIRECTED_REQUEST, text))
        if method not in ("GET", "HEAD"):
            page = as_error(http.HTTPStatus.METHOD_NOT_ALLOWED, "only GET: nothing can be changed here")
            raise EarlyAnswer(page._replace(headers=(("Allow", "GET, HEAD"),)))
        if parts.path not in door.paths:
            text = f"there is no page {parts.path!r}; there are {', '.join(sorted(door.paths))}"
            raise EarlyAnswer(as_error(http.HTTPStatus.NOT_FOUND, text))
        return PageRequest(parts.path, query, headers, self.open, dict(self.refused))

    def _guard(self, tokens: Tokens, given: str, peer: str) -> None:
        """Raise where what is `given` to be let in is not the token."""
        if given and (left := self._guesses.wait(peer)):
            self.refused["http_guessing"] += 1
            page = as_error(http.HTTPStatus.TOO_MANY_REQUESTS, f"too many wrong tokens came from {peer}: wait")
            raise EarlyAnswer(page._replace(headers=(("Retry-After", f"{math.ceil(left)}"),)))
        if tokens.holds(bearer(given)):
            return
        if given:
            self._guesses.wrong(peer)
            self.refused["http_token"] += 1
        text = "this page takes the node's token: Authorization: Bearer TOKEN"
        raise EarlyAnswer(
            as_error(http.HTTPStatus.UNAUTHORIZED, text)._replace(headers=(("WWW-Authenticate", "Bearer"),))
        )


class _HttpAddress:
    """An address where requests come in: which pages it has, and which of them nobody is asked a token for."""

    def __init__(self, listener: socket.socket, paths: frozenset[str], unguarded: Collection[str]) -> None:
        host, port = listener.getsockname()[:2]
        self.listener, self.paths, self.unguarded = listener, paths, unguarded
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self.is_local = is_loopback(host)

    @property
    def url(self) -> str:
        """What to ask, as from this machine."""
        host, _, port = self.address.rpartition(":")
        return f"http://{ {'0.0.0.0': '127.0.0.1', '[::]': '[::1]'}.get(host, host) }:{port}"  # noqa: S104


_opened: weakref.WeakSet[NodePages] = weakref.WeakSet()


def _forget_all() -> None:
    for pages in list(_opened):
        pages.forget()


os.register_at_fork(after_in_child=_forget_all)


class _Connection(asyncio.Protocol):
    """One request and its answer. Everything here belongs to the pages' thread."""

    def __init__(self, pages: NodePages, door: _HttpAddress) -> None:
        self._pages, self.door = pages, door
        self._request = b""
        self._is_asked = False
        self.peer = ""
        """Address of whoever is at the other end."""
        self._transport: asyncio.Transport | None = None
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Somebody came."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.peer = str((transport.get_extra_info("peername") or ("",))[0])
        self._deadline = asyncio.get_running_loop().call_later(self._pages.request_timeout, transport.abort)
        self._pages.joined(self)

    def data_received(self, data: bytes) -> None:
        """A piece of the request; the first whole one is answered, and the connection ends with that."""
        if self._is_asked:
            return
        self._request += data
        head, is_whole, _ = self._request.partition(b"\r\n\r\n")
        if is_whole and len(head) <= MAX_REQUEST_BYTES:
            self._is_asked = True
            self._pages.ask(self, head)
        elif len(self._request) > MAX_REQUEST_BYTES:
            self._is_asked = True
            text = f"a request has at most {MAX_REQUEST_BYTES} bytes"
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
