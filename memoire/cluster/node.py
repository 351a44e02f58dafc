"""What a node says of itself over HTTP: alive, ready, and how it stands. For probes, people and whoever watches.

    GET /livez    200, or 503 when a thread of the node is stuck: restart it
    GET /readyz   200, or 503 with the reasons why it should get no new clients just now: wait
    GET /status   everything of stats(), the process, and the clients, a page of them at a time (?after=ID&most=100)
    GET /logs     log lines of a server's clients (?text=&run=&client=&label=&since=&until=&after=&before=&most=&newest)

Reading is all there is: no page changes anything. One thread serves all connections; there are few at a time, each
has a few seconds for its request, and a newcomer takes the place of whoever has waited longest without asking
anything. So nobody can keep a probe out by opening connections and saying nothing. Pages that take long, or wait for a
lock of the node, are made on a second thread, one after the other: a probe is answered meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import http
import logging
import os
import queue
import resource
import socket
import threading
import urllib.parse
import weakref
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, NamedTuple, Protocol, Self, TypeAlias

import msgspec

from memoire import descriptors
from memoire.errors import EndpointError, ParameterError
from memoire.logbook import timestamp
from memoire.proxy import Proxy
from memoire.server import Server
from memoire.version import SOFTWARE
from memoire.worker import wall_clock

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
PAGE = 100
"""Clients on a page of /status that does not say how many it wants."""
MOST_ON_PAGE = 1000
MOST_PAGE_BYTES = 256 << 10
"""Bytes of the clients on one page: it ends sooner when they have much to say."""
ENOUGH_DESCRIPTORS = 0.9
"""Part of the file descriptors that may be in use while a node calls itself ready."""
LOOPBACK = ("localhost", "127.0.0.1", "::1")

Node: TypeAlias = Server | Proxy
Query: TypeAlias = Mapping[str, str]


class Asked(Exception):
    """A page to answer with at once."""

    def __init__(self, page: Page) -> None:
        super().__init__(page)
        self.page = page


class Page(NamedTuple):
    """An answer."""

    status: int
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()
    kind: str = "application/json"


class NodePages:
    """Pages about one node of this process, at one address, in a thread of their own.

    Args:
        address: "HOST:PORT", such as "127.0.0.1:8080", "[::1]:8080" or "*:8080"; port 0 takes a free one. None opens
            nothing.
        node: What the pages are about; it may be given later, by `show`. Until then the process is alive, and not
        ready.

    On a loopback address only requests for a loopback name are answered: a page of a browser on this machine that has
    its own name point here learns nothing.

    Raises:
        EndpointError: the address is taken, or none.
    """

    def __init__(self, address: str | None, node: Node | None = None) -> None:
        self.address = address
        self._node = node
        self._pages: dict[str, Callable[[Query], Page]] = {
            "/": self._index,
            "/livez": self._livez,
            "/readyz": self._readyz,
            "/status": self._status,
            "/logs": self._logs,
        }
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended: asyncio.Event | None = None
        self._connections: dict[_Connection, None] = {}  # the thread's, oldest first
        if address is None:
            return
        self._listener = _listen(address)
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
            page = _error(http.HTTPStatus.SERVICE_UNAVAILABLE, text)._replace(headers=(("Retry-After", "1"),))
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
            path, query = self._read(request)
            page = self._pages[path](query)
        except Asked as asked:
            page = asked.page
        except ParameterError as error:
            page = _error(http.HTTPStatus.BAD_REQUEST, str(error))
        except Exception:
            _log.exception("a page could not be made")
            page = _error(http.HTTPStatus.INTERNAL_SERVER_ERROR, "the page could not be made; the log says why")
        return _response(page, is_head=request.startswith(b"HEAD "))

    def _read(self, request: bytes) -> tuple[str, dict[str, str]]:
        """Path and query of a request that may be answered."""
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
            raise Asked(_error(http.HTTPStatus.BAD_REQUEST, "this is not an HTTP request")) from None
        if not version.startswith("HTTP/1."):
            raise Asked(_error(http.HTTPStatus.HTTP_VERSION_NOT_SUPPORTED, "HTTP/1.1 is spoken here"))
        if self._is_local and asked_for is not None and asked_for not in LOOPBACK:
            text = f"these pages are for this machine only, and {asked_for!r} is not its name: ask for localhost"
            raise Asked(_error(http.HTTPStatus.MISDIRECTED_REQUEST, text))
        if method not in ("GET", "HEAD"):
            page = _error(http.HTTPStatus.METHOD_NOT_ALLOWED, "only GET: nothing can be changed here")
            raise Asked(page._replace(headers=(("Allow", "GET, HEAD"),)))
        if parts.path not in self._pages:
            text = f"there is no page {parts.path!r}; there are {', '.join(sorted(self._pages))}"
            raise Asked(_error(http.HTTPStatus.NOT_FOUND, text))
        return parts.path, query

    # ---------------------------------------------------------------------------------------------------- its pages

    def _index(self, query: Query) -> Page:
        return _json({"pages": sorted(self._pages), "software": SOFTWARE})

    def _livez(self, query: Query) -> Page:
        stuck = [] if self._node is None else self._node.liveness()
        return _json({"alive": not stuck, "reasons": stuck}, _ok(not stuck))

    def _readyz(self, query: Query) -> Page:
        reasons = self._reasons()
        return _json({"ready": not reasons, "reasons": reasons}, _ok(not reasons))

    def _reasons(self) -> list[str]:
        if self._node is None:
            return ["starting: the node is not there yet"]
        return [*self._node.liveness(), *self._node.readiness(), *_scarcity()]

    def _status(self, query: Query) -> Page:
        node, reasons = self._node, self._reasons()
        facts: dict[str, Any] = {
            "role": "server" if isinstance(node, Server) else "proxy" if node is not None else "",
            "software": SOFTWARE,
            "time": wall_clock(),
            "ready": not reasons,
            "reasons": reasons,
            "process": process_facts(),
        }
        if node is not None:
            facts["endpoints"] = {"request": node.endpoint, "push": node.push_endpoint, "publish": node.pub_endpoint}
            facts["stats"] = node.stats()
        if isinstance(node, Server):
            facts["clients"] = _clients(node, query)
        return _json(facts)

    def _logs(self, query: Query) -> Page:
        if not isinstance(self._node, Server):
            raise Asked(_error(http.HTTPStatus.NOT_FOUND, "there are no log lines here: ask a server"))
        most = _whole(query, "most", PAGE, 1, MOST_ON_PAGE)
        found = self._node.search(
            query.get("text", ""),
            run=query.get("run") or self._node.run,
            client=_value(query, "client", bytes.fromhex, "an id in hex"),
            label=_value(query, "label", _label, "up to 8 digits in hex"),
            since=_value(query, "since", float, "seconds since 1970"),
            until=_value(query, "until", float, "seconds since 1970"),
            after=_whole(query, "after", 0, 0, 1 << 53),
            before=_whole(query, "before", 1 << 53, 0, 1 << 53),
            most=most,
            newest_first="newest" in query,
        )
        rows: list[dict[str, Any]] = []
        size = 0
        for entry in found:
            size += len(entry.line.text.encode()) + 200
            if rows and size > MOST_PAGE_BYTES:
                break
            rows.append(
                {
                    "index": entry.index,
                    "time": timestamp(entry.received),
                    "client": entry.client.hex(),
                    "label": f"{entry.line.label:08x}",
                    "text": entry.line.text,
                }
            )
        return _json({"rows": rows, "is_all": len(rows) == len(found) < most})


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
            self.send(_response(_error(http.HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, text)))

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


class Countable(Protocol):
    """What a page of clients is made of."""

    def clients(self, after: str = "", most: int | None = None) -> list[Any]:
        """Clients with an id above `after`, in the order of their ids."""


def _clients(server: Countable, query: Query) -> dict[str, Any]:
    """One page of the clients; `next` is what to give as `after` for the page behind it, None on the last one."""
    most = _whole(query, "most", PAGE, 1, MOST_ON_PAGE)
    found = server.clients(query.get("after", ""), most + 1)
    rows: list[msgspec.Raw] = []
    size = 0
    for client in found[:most]:
        row = msgspec.json.encode(client)
        size += len(row)
        if rows and size > MOST_PAGE_BYTES:
            break
        rows.append(msgspec.Raw(row))
    return {"rows": rows, "next": found[len(rows) - 1].client if len(rows) < len(found) else None}


def _whole(query: Query, name: str, default: int, least: int, most: int) -> int:
    text = query.get(name, str(default))
    if not (text.isascii() and text.isdigit() and len(text) < 20 and least <= int(text) <= most):
        raise Asked(
            _error(http.HTTPStatus.BAD_REQUEST, f"{name} must be a number from {least} to {most}, got {text!r}")
        )
    return int(text)


def _value(query: Query, name: str, read: Callable[[str], Any], expected: str) -> Any:
    if name not in query:
        return None
    try:
        return read(query[name])
    except ValueError:
        text = f"{name} must be {expected}, got {query[name]!r}"
        raise Asked(_error(http.HTTPStatus.BAD_REQUEST, text)) from None


def _label(text: str) -> int:
    if len(text) > 8:
        raise ValueError
    return int(text, 16)


def process_facts() -> dict[str, Any]:
    """What this process uses: memory and descriptors now, and how many descriptors it may have."""
    return {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "threads": threading.active_count(),
        "memory_bytes": _resident(),
        "descriptors": descriptors.used(),
        "most_descriptors": descriptors.limit(),
    }


def _scarcity() -> list[str]:
    """Why new clients could not even connect: each needs three descriptors."""
    used, limit = descriptors.used(), descriptors.limit()
    if limit == resource.RLIM_INFINITY or used < limit * ENOUGH_DESCRIPTORS:
        return []
    return [f"descriptors: {used} of {limit} are in use, and clients need more: raise the limit (ulimit -n)"]


def _resident() -> int | None:
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        return None  # not Linux


def _listen(address: str) -> socket.socket:
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


def _json(value: Any, status: int = 200) -> Page:
    return Page(status, msgspec.json.encode(value) + b"\n")


def _error(status: int, text: str) -> Page:
    return _json({"error": text}, status)


def _ok(is_good: bool) -> int:
    return 200 if is_good else 503


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
