"""The pages of a node: what is said at /livez, /readyz, /status, /metrics, /episodes, /sample and so on. No sockets.

Every page is a function of the node and the request, and only reads. `NodePages` (node.py) serves them.
"""

from __future__ import annotations

import base64
import dataclasses
import http
import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, TypeAlias, cast

import msgspec

from memoire.accounting.merge import key_of
from memoire.accounting.runs import timestamp
from memoire.limits import wall_clock
from memoire.net import process
from memoire.security.access import Security
from memoire.version import SOFTWARE
from memoire.wire.messages import TEST

if TYPE_CHECKING:
    from memoire.server.server import Server

PAGE_ROWS = 100
"""Rows on a page that does not say how many it wants."""
MAX_PAGE_LINES = 1000
MAX_PAGE_BYTES = 256 << 10
"""Bytes of the rows on one page: it ends sooner when they have much to say."""
ENOUGH_DESCRIPTORS = 0.9
"""Part of the file descriptors that may be in use while a node calls itself ready."""
EXTRA = "pip install 'memoire-rl[server]'"

ENDPOINTS: Mapping[str, Mapping[str, str]] = {
    "server": {"request": "endpoint", "push": "push_endpoint", "publish": "pub_endpoint"},
    "proxy": {"request": "endpoint", "push": "push_endpoint", "publish": "pub_endpoint"},
    "inference": {"request": "endpoint"},
}
"""Addresses of the roles that others connect to: what a page calls each one, and which attribute of the node has it."""

Query: TypeAlias = Mapping[str, str]


class Node(Protocol):
    """What pages are about: a server, proxy, client, reader or inference node."""

    ROLE: ClassVar[str]

    def stats(self) -> Any:
        """How it stands: a dataclass of its role's."""

    def liveness(self) -> list[str]:
        """What only a restart can mend, a sentence each."""

    def readiness(self) -> list[str]:
        """Why it should get no new clients or work, a sentence each."""


class Embedding(Protocol):
    """What has a node within, such as `rl.Agent` or `rl.RolloutWorker`: its pages are those of the node."""

    @property
    def node(self) -> Node:
        """The node."""


class EarlyAnswer(Exception):
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


class PageRequest(NamedTuple):
    """What is asked for; names of headers are in lower case."""

    path: str
    query: Query = {}
    headers: Mapping[str, str] = {}
    open: tuple[str, ...] = ()
    """Where these pages are read without a token from other machines."""
    refused: Mapping[str, int] = {}
    """Requests for them that were refused, by reason."""


def node_of(given: Node | Embedding) -> Node:
    """The node that pages are about, of what somebody wants to show."""
    return cast(Node, given.node if hasattr(given, "node") else given)


def role_of(node: Node | None) -> str:
    """server, proxy, actor, learner or inference; "" before there is a node, and of what is none of these."""
    return str(getattr(type(node), "ROLE", ""))


def index(node: Node | None, request: PageRequest) -> Page:
    """Which pages there are."""
    return as_json({"pages": sorted(PAGES), "software": SOFTWARE})


def livez(node: Node | None, request: PageRequest) -> Page:
    """Whether only a restart helps."""
    stuck = _stuck(node)
    return as_json({"alive": not stuck, "reasons": stuck}, _ok(not stuck))


def readyz(node: Node | None, request: PageRequest) -> Page:
    """Whether it should get new clients, or work."""
    reasons = reasons_of(node)
    return as_json({"ready": not reasons, "reasons": reasons}, _ok(not reasons))


def reasons_of(node: Node | None) -> list[str]:
    """Why the node is not ready, a sentence each."""
    if node is None:
        return ["starting: the node is not there yet"]
    return [*node.liveness(), *node.readiness(), *_scarcity()]


def _stuck(node: Node | None) -> list[str]:
    return [] if node is None else node.liveness()


def status(node: Node | None, request: PageRequest) -> Page:
    """How the node stands: all of its stats, and of a server a page of its clients."""
    reasons = reasons_of(node)
    facts: dict[str, Any] = {
        "role": role_of(node),
        "software": SOFTWARE,
        "time": wall_clock(),
        "ready": not reasons,
        "reasons": reasons,
        "process": process_facts(),
    }
    stats = None if node is None else node.stats()
    facts["security"] = security(stats, request.open, request.refused)
    if node is not None:
        facts["stats"] = stats
    role = role_of(node)
    if role in ENDPOINTS:
        facts["endpoints"] = {name: getattr(node, attribute) for name, attribute in ENDPOINTS[role].items()}
    if role == "server" and request.query.get("clients") != "no":
        facts["clients"] = client_page(cast("Server", node), request.query)
    return as_json(facts)


def security(stats: Any, pages: Sequence[str] = (), refused: Mapping[str, int] | None = None) -> Security:
    """What a node's stats say of who may come to it and who was sent away, and the same of its pages.

    Args:
        pages: Their addresses that everybody on other machines may ask.
        refused: Requests for them that were refused, by reason.
    """
    told: Security = getattr(stats, "security", None) or Security(keys=False, open=(), refused={})
    return Security(told.keys, (*told.open, *pages), {**told.refused, **(refused or {})}, told.hung_up)


def metrics(node: Node | None, request: PageRequest) -> Page:
    """The same for Prometheus."""
    try:
        from .metrics import Exposition, NodeCollector, ScrapedNode
    except ModuleNotFoundError as error:
        raise EarlyAnswer(as_error(http.HTTPStatus.NOT_IMPLEMENTED, f"this takes {error.name}: {EXTRA}")) from None

    def look() -> ScrapedNode:
        stats = None if node is None else node.stats()
        known = security(stats, request.open, request.refused)
        guard, program = (known.open, known.refused, known.hung_up), getattr(node, "program", None)
        standing = None if program is None else program()
        return ScrapedNode(*guard, role_of(node), stats, _stuck(node), reasons_of(node), standing)

    exposition = Exposition(NodeCollector(look))
    body, kind = exposition.text(request.headers.get("accept", ""))
    return Page(200, body, kind=kind)


def accounts(node: Node | None, request: PageRequest) -> Page:
    """The ledger of a run at a server, its rows as they are (`rows.ACCOUNT`): for whoever merges several, exactly.

    MessagePack, a page at a time: `next` is the `after` of the page behind it, "" of the last one. With `seen`, less
    than half a minute ago, only accounts whose client was heard since then. `inherited` grows with each account that
    came from another server, which may be older than that.
    """
    server = _server(node, "accounts")
    seen = _value(request.query, "seen", float, "seconds since 1970") or 0.0
    after = _value(request.query, "after", bytes.fromhex, "an account's key in hex") or b""
    found, more = server.account_page(request.query.get("run") or None, after, seen=seen)
    body = {
        "name": server.name,
        "run": found.run,
        "epoch": found.epoch,
        "finished": found.finished,
        "durable": found.durable,
        "runs": found.runs,
        "time": found.time,
        "inherited": found.inherited,
        "row_bytes": found.rows.itemsize,
        "rows": found.rows.tobytes(),
        "next": key_of(found.rows[-1:]).hex() if more else "",
    }
    return Page(200, msgspec.msgpack.encode(body), kind="application/msgpack")


def episodes(node: Node | None, request: PageRequest) -> Page:
    """Closed episodes of the run that is counted now, with a number above `after`; a server keeps the newest thousand.

    `next` is the `after` of the page behind it; `missed` is how many between have been forgotten already.
    """
    server = _server(node, "episodes")
    after = _whole(request.query, "after", 0, 0, 1 << 53)
    most = _whole(request.query, "most", PAGE_ROWS, 1, MAX_PAGE_LINES)
    run, first, found = server.episodes_after(after, most)
    rows = [
        {
            "number": first + place,
            "client": client,
            "time": ended.time,
            "length": ended.length,
            "return": ended.returned,
            "kind": "test" if ended.kind == TEST else "train",
        }
        for place, (client, ended) in enumerate(found)
    ]
    missed = max(0, first - after - 1) if after else 0
    epoch = server.epoch
    return as_json({"run": run, "epoch": epoch, "rows": rows, "next": first + len(rows) - 1, "missed": missed})


def settings(node: Node | None, request: PageRequest) -> Page:
    """What a server was told: the tables with their schemas and the parameters that hold now, and its limits."""
    server = _server(node, "settings")
    tables = {}
    for name, stats in server.stats().tables.items():
        table = server.table(name)
        tables[name] = {
            "storage": stats.storage,
            "capacity": stats.capacity,
            "byte_limit": stats.byte_limit,
            "schema": msgspec.Raw(table.schema.to_json().encode()),
            "entry_bytes": table.schema.entry_bytes,
            "parameters_version": stats.parameters_version,
            "parameters": table.parameters,
        }
    return as_json({"run": server.run, "runs": server.runs(), "tables": tables, "limits": server.limits})


def sample(node: Node | None, request: PageRequest) -> Page:
    """One sample that a table of a server holds, as likely as in a draw, or the one of `client` and `number`; nothing
    is taken. Each array has its dtype, its shape, its bytes (C order, in base64) and how many of its axes come before
    those of its column.
    """
    table = _table(node, request, "samples")
    client = _value(request.query, "client", bytes.fromhex, "an id in hex")
    of = None if client is None else (client, _whole(request.query, "number", 0, 0, 1 << 62))
    found = table.peek(of)
    if found is None:
        what = "no sample now that could be shown" if of is None else f"no sample of entry {of[1]} any more"
        text = f"table {table.name!r} holds {what} (or it is larger than 4 MiB)"
        raise EarlyAnswer(as_error(http.HTTPStatus.NOT_FOUND, text))
    arrays = {
        name: {
            "dtype": array.dtype.str,
            "shape": array.shape,
            "axes": found.axes[name],
            "data": base64.b64encode(array.tobytes()).decode(),
        }
        for name, array in found.arrays.items()
    }
    names = [field.name for field in dataclasses.fields(found) if field.name not in ("arrays", "axes")]
    told = {name: getattr(found, name) for name in names if name != "place"}
    return as_json({"table": table.name, **told, **dataclasses.asdict(found.place), "arrays": arrays})


def distribution(node: Node | None, request: PageRequest) -> Page:
    """How weights and ages of what a table of a server holds are spread, and its effective size."""
    table = _table(node, request, "held samples")
    return as_json({"table": table.name, "storage": table.stats().storage, **dataclasses.asdict(table.distribution())})


def _table(node: Node | None, request: PageRequest, what: str) -> Any:
    server = _server(node, what)
    return server.table(request.query.get("table") or server.tables[0])


def _server(node: Node | None, what: str) -> Server:
    if role_of(node) != "server":
        raise EarlyAnswer(as_error(http.HTTPStatus.NOT_FOUND, f"there are no {what} here: ask a server"))
    return cast("Server", node)


def logs(node: Node | None, request: PageRequest) -> Page:
    """Log lines of a server's clients."""
    query = request.query
    server = _server(node, "log lines")
    most = _whole(query, "most", PAGE_ROWS, 1, MAX_PAGE_LINES)
    found = server.search(
        query.get("text", ""),
        run=query.get("run") or server.run,
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
        if rows and size > MAX_PAGE_BYTES:
            break
        rows.append(
            {
                "index": entry.index,
                "received": entry.received,
                "time": timestamp(entry.received),
                "client": entry.client.hex(),
                "label": f"{entry.line.label:08x}",
                "name": server.client_name(entry.client),
                "text": entry.line.text,
            }
        )
    return as_json({"rows": rows, "is_all": len(rows) == len(found) < most})


def client_page(server: Server, query: Query) -> dict[str, Any]:
    """One page of the clients; `next` is what to give as `after` for the page behind it, None on the last one."""
    most = _whole(query, "most", PAGE_ROWS, 1, MAX_PAGE_LINES)
    found = server.clients(query.get("after", ""), most + 1)
    rows: list[msgspec.Raw] = []
    size = 0
    for client in found[:most]:
        row = msgspec.json.encode(client)
        size += len(row)
        if rows and size > MAX_PAGE_BYTES:
            break
        rows.append(msgspec.Raw(row))
    return {"rows": rows, "next": found[len(rows) - 1].client if len(rows) < len(found) else None}


def _whole(query: Query, name: str, default: int, least: int, most: int) -> int:
    text = query.get(name, str(default))
    if not (text.isascii() and text.isdigit() and len(text) < 20 and least <= int(text) <= most):
        raise EarlyAnswer(
            as_error(http.HTTPStatus.BAD_REQUEST, f"{name} must be a number from {least} to {most}, got {text!r}")
        )
    return int(text)


def _value(query: Query, name: str, read: Callable[[str], Any], expected: str) -> Any:
    if name not in query:
        return None
    try:
        return read(query[name])
    except ValueError:
        text = f"{name} must be {expected}, got {query[name]!r}"
        raise EarlyAnswer(as_error(http.HTTPStatus.BAD_REQUEST, text)) from None


def _label(text: str) -> int:
    if len(text) > 8:
        raise ValueError
    return int(text, 16)


def process_facts() -> dict[str, Any]:
    """What this process uses: memory and descriptors now, processor time so far, and how much of each it may have."""
    return {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "threads": threading.active_count(),
        "cpu_seconds": time.process_time(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": _resident(),
        "descriptors": process.used(),
        "most_descriptors": process.limit(),
    }


def _scarcity() -> list[str]:
    """Why new clients could not even connect: each needs three descriptors."""
    used, limit = process.used(), process.limit()
    if limit == resource.RLIM_INFINITY or used < limit * ENOUGH_DESCRIPTORS:
        return []
    return [f"descriptors: {used} of {limit} are in use, and clients need more: raise the limit (ulimit -n)"]


def _resident() -> int | None:
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        return None  # not Linux


def as_json(value: Any, status: int = 200) -> Page:
    """A page in JSON."""
    return Page(status, msgspec.json.encode(value) + b"\n")


def as_error(status: int, text: str) -> Page:
    """A page that says what is wrong."""
    return as_json({"error": text}, status)


def _ok(is_good: bool) -> int:
    return 200 if is_good else 503


Handler: TypeAlias = Callable[[Node | None, PageRequest], Page]
PAGES: Mapping[str, Handler] = {
    "/": index,
    "/livez": livez,
    "/readyz": readyz,
    "/status": status,
    "/metrics": metrics,
    "/settings": settings,
    "/accounts": accounts,
    "/episodes": episodes,
    "/sample": sample,
    "/distribution": distribution,
    "/logs": logs,
}
PROBES = ("/livez", "/readyz")
"""Pages that nobody is ever asked a token for."""
OPEN = ("/", *PROBES, "/metrics")
"""Pages that need no token, unless they have a port of their own."""
