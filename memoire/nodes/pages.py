"""Pages of a node as functions of the node and the request: /livez, /readyz, /status, /metrics and so on. No sockets.

Every page only reads. `NodePages` (http.py) serves them.
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
"""Rows of a page if the request names no number."""
MAX_PAGE_LINES = 1000
MAX_PAGE_BYTES = 256 << 10
"""Bytes of the rows of one page; large rows end a page early."""
ENOUGH_DESCRIPTORS = 0.9
"""Share of the file descriptors that may be in use while a node is ready."""
EXTRA = "pip install 'memoire-rl[server]'"

ENDPOINTS: Mapping[str, Mapping[str, str]] = {
    "server": {"request": "endpoint", "push": "push_endpoint", "publish": "pub_endpoint"},
    "proxy": {"request": "endpoint", "push": "push_endpoint", "publish": "pub_endpoint"},
    "inference": {"request": "endpoint"},
}
"""Addresses of the roles that accept connections: the name on a page, and the attribute of the node that holds it."""

Query: TypeAlias = Mapping[str, str]


class PagedNode(Protocol):
    """Server, proxy, client, reader or inference node that pages describe."""

    ROLE: ClassVar[str]

    def stats(self) -> Any:
        """Return the statistics of the node: a dataclass of its role."""

    def liveness(self) -> list[str]:
        """Return a sentence for each fault that only a restart repairs."""

    def readiness(self) -> list[str]:
        """Return a sentence for each reason why the node should get no new clients or work."""


class Embedding(Protocol):
    """Object around a node, such as `rl.Agent` or `rl.RolloutWorker`, whose pages are those of the node."""

    @property
    def node(self) -> PagedNode:
        """Node that the pages describe."""


class EarlyAnswer(Exception):
    """Signal that a request is answered at once, with `page`."""

    def __init__(self, page: Page) -> None:
        super().__init__(page)
        self.page = page


class Page(NamedTuple):
    """Answer to a request: HTTP status, body, headers and content type."""

    status: int
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()
    kind: str = "application/json"


class PageRequest(NamedTuple):
    """Request for a page; names of headers are in lower case."""

    path: str
    query: Query = {}
    headers: Mapping[str, str] = {}
    open: tuple[str, ...] = ()
    """Addresses of these pages that other machines can read without a token."""
    refused: Mapping[str, int] = {}
    """Rejected requests for these pages, by reason."""


def node_of(shown: PagedNode | Embedding) -> PagedNode:
    """Return the node within an object around it, or the node itself."""
    return cast(PagedNode, shown.node if hasattr(shown, "node") else shown)


def role_of(node: PagedNode | None) -> str:
    """Return "server", "proxy", "actor", "learner" or "inference"; "" without a node, and for any other object."""
    return str(getattr(type(node), "ROLE", ""))


def index(node: PagedNode | None, request: PageRequest) -> Page:
    """Return the list of all pages, and the software's version."""
    return as_json({"pages": sorted(PAGES), "software": SOFTWARE})


def livez(node: PagedNode | None, request: PageRequest) -> Page:
    """Return status 200, or 503 with the reasons if only a restart helps."""
    stuck = _stuck(node)
    return as_json({"alive": not stuck, "reasons": stuck}, _ok(not stuck))


def readyz(node: PagedNode | None, request: PageRequest) -> Page:
    """Return status 200, or 503 with the reasons if the node should get no new clients or work."""
    reasons = reasons_of(node)
    return as_json({"ready": not reasons, "reasons": reasons}, _ok(not reasons))


def reasons_of(node: PagedNode | None) -> list[str]:
    """Return a sentence for each reason why the node is not ready."""
    if node is None:
        return ["starting: the process has no node yet"]
    return [*node.liveness(), *node.readiness(), *_scarcity()]


def _stuck(node: PagedNode | None) -> list[str]:
    return [] if node is None else node.liveness()


def status(node: PagedNode | None, request: PageRequest) -> Page:
    """Return the node's state: all of its stats and, for a server, a page of its clients."""
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
    """Return the access facts of a node's stats together with those of its pages.

    Args:
        pages: Addresses of the pages that other machines can read without a token.
        refused: Rejected requests for the pages, by reason.
    """
    access: Security = getattr(stats, "security", None) or Security(keys=False, open=(), refused={})
    return Security(access.keys, (*access.open, *pages), {**access.refused, **(refused or {})}, access.hung_up)


def metrics(node: PagedNode | None, request: PageRequest) -> Page:
    """Return the node's metrics for Prometheus."""
    try:
        from .metrics import Exposition, NodeCollector, ScrapedNode
    except ModuleNotFoundError as error:
        raise EarlyAnswer(as_error(http.HTTPStatus.NOT_IMPLEMENTED, f"/metrics needs {error.name}: {EXTRA}")) from None

    def read_node() -> ScrapedNode:
        stats = None if node is None else node.stats()
        known = security(stats, request.open, request.refused)
        guard, program = (known.open, known.refused, known.hung_up), getattr(node, "program", None)
        program_stats = None if program is None else program()
        return ScrapedNode(*guard, role_of(node), stats, _stuck(node), reasons_of(node), program_stats)

    exposition = Exposition(NodeCollector(read_node))
    body, kind = exposition.text(request.headers.get("accept", ""))
    return Page(200, body, kind=kind)


def accounts(node: PagedNode | None, request: PageRequest) -> Page:
    """Return rows of a run's ledger at a server (`rows.ACCOUNT`), from which a program can merge several ledgers.

    The body is MessagePack, a page at a time: `next` is the `after` of the following page, "" on the last one. With
    `seen`, less than half a minute ago, the rows are only accounts whose client was heard since then. `inherited` grows
    with each account that came from another server, which may be older than that.
    """
    server = _server(node, "accounts")
    seen = _parsed_value(request.query, "seen", float, "seconds since 1970") or 0.0
    after = _parsed_value(request.query, "after", bytes.fromhex, "an account's key in hex") or b""
    ledger, has_more = server.account_page(request.query.get("run") or None, after, seen=seen)
    body = {
        "name": server.name,
        "run": ledger.run,
        "epoch": ledger.epoch,
        "finished": ledger.finished,
        "durable": ledger.durable,
        "runs": ledger.runs,
        "time": ledger.time,
        "inherited": ledger.inherited,
        "row_bytes": ledger.rows.itemsize,
        "rows": ledger.rows.tobytes(),
        "next": key_of(ledger.rows[-1:]).hex() if has_more else "",
    }
    return Page(200, msgspec.msgpack.encode(body), kind="application/msgpack")


def episodes(node: PagedNode | None, request: PageRequest) -> Page:
    """Return closed episodes of the current run with a number above `after`; a server keeps the newest thousand.

    `next` is the `after` of the following page; `missed` is the number of episodes between that the server forgot.
    """
    server = _server(node, "episodes")
    after = _whole_number(request.query, "after", 0, 0, 1 << 53)
    most = _whole_number(request.query, "most", PAGE_ROWS, 1, MAX_PAGE_LINES)
    run, first, closed = server.episodes_after(after, most)
    rows = [
        {
            "number": first + place,
            "client": client,
            "time": ended.time,
            "length": ended.length,
            "return": ended.returned,
            "kind": "test" if ended.kind == TEST else "train",
        }
        for place, (client, ended) in enumerate(closed)
    ]
    missed = max(0, first - after - 1) if after else 0
    epoch = server.epoch
    return as_json({"run": run, "epoch": epoch, "rows": rows, "next": first + len(rows) - 1, "missed": missed})


def settings(node: PagedNode | None, request: PageRequest) -> Page:
    """Return a server's limits, and its tables with their schemas and present parameters."""
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


def sample(node: PagedNode | None, request: PageRequest) -> Page:
    """Return one sample that a table of a server holds, as likely as in a draw, or the one of `client` and `number`.
    The sample stays in the table. Each array has its dtype, its shape, its bytes (C order, in base64) and the number of
    its axes before those of its column.
    """
    table = _table(node, request, "samples")
    client = _parsed_value(request.query, "client", bytes.fromhex, "an id in hex")
    key = None if client is None else (client, _whole_number(request.query, "number", 0, 0, 1 << 62))
    drawn = table.peek(key)
    if drawn is None:
        what = "no sample now" if key is None else f"no sample of entry {key[1]} any longer"
        text = f"table {table.name!r} holds {what}, or one that is larger than 4 MiB"
        raise EarlyAnswer(as_error(http.HTTPStatus.NOT_FOUND, text))
    arrays = {
        name: {
            "dtype": array.dtype.str,
            "shape": array.shape,
            "axes": drawn.axes[name],
            "data": base64.b64encode(array.tobytes()).decode(),
        }
        for name, array in drawn.arrays.items()
    }
    names = [field.name for field in dataclasses.fields(drawn) if field.name not in ("arrays", "axes")]
    facts = {name: getattr(drawn, name) for name in names if name != "place"}
    return as_json({"table": table.name, **facts, **dataclasses.asdict(drawn.place), "arrays": arrays})


def distribution(node: PagedNode | None, request: PageRequest) -> Page:
    """Return the distributions of weights and ages of a table of a server, and its effective size."""
    table = _table(node, request, "held samples")
    return as_json({"table": table.name, "storage": table.stats().storage, **dataclasses.asdict(table.distribution())})


def _table(node: PagedNode | None, request: PageRequest, what: str) -> Any:
    server = _server(node, what)
    return server.table(request.query.get("table") or server.tables[0])


def _server(node: PagedNode | None, what: str) -> Server:
    if role_of(node) != "server":
        raise EarlyAnswer(as_error(http.HTTPStatus.NOT_FOUND, f"only a server has {what}: ask a server's pages"))
    return cast("Server", node)


def logs(node: PagedNode | None, request: PageRequest) -> Page:
    """Return log lines of a server's clients."""
    query = request.query
    server = _server(node, "log lines")
    most = _whole_number(query, "most", PAGE_ROWS, 1, MAX_PAGE_LINES)
    entries = server.search(
        query.get("text", ""),
        run=query.get("run") or server.run,
        client=_parsed_value(query, "client", bytes.fromhex, "an id in hex"),
        label=_parsed_value(query, "label", _label, "up to 8 digits in hex"),
        since=_parsed_value(query, "since", float, "seconds since 1970"),
        until=_parsed_value(query, "until", float, "seconds since 1970"),
        after=_whole_number(query, "after", 0, 0, 1 << 53),
        before=_whole_number(query, "before", 1 << 53, 0, 1 << 53),
        most=most,
        newest_first="newest" in query,
    )
    rows: list[dict[str, Any]] = []
    size = 0
    for entry in entries:
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
    return as_json({"rows": rows, "is_all": len(rows) == len(entries) < most})


def client_page(server: Server, query: Query) -> dict[str, Any]:
    """Return one page of the clients; `next` is the `after` of the following page, None on the last one."""
    most = _whole_number(query, "most", PAGE_ROWS, 1, MAX_PAGE_LINES)
    clients = server.clients(query.get("after", ""), most + 1)
    rows: list[msgspec.Raw] = []
    size = 0
    for client in clients[:most]:
        row = msgspec.json.encode(client)
        size += len(row)
        if rows and size > MAX_PAGE_BYTES:
            break
        rows.append(msgspec.Raw(row))
    return {"rows": rows, "next": clients[len(rows) - 1].client if len(rows) < len(clients) else None}


def _whole_number(query: Query, name: str, default: int, least: int, most: int) -> int:
    text = query.get(name, str(default))
    if not (text.isascii() and text.isdigit() and len(text) < 20 and least <= int(text) <= most):
        raise EarlyAnswer(
            as_error(http.HTTPStatus.BAD_REQUEST, f"{name} must be a number from {least} to {most}, got {text!r}")
        )
    return int(text)


def _parsed_value(query: Query, name: str, read: Callable[[str], Any], expected: str) -> Any:
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
    """Return the process' use of memory, descriptors and processor time, and its limits."""
    return {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "threads": threading.active_count(),
        "cpu_seconds": time.process_time(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": _resident(),
        "descriptors": process.open_descriptors(),
        "most_descriptors": process.max_descriptors(),
    }


def _scarcity() -> list[str]:
    """Return the reason why new clients could not connect, if descriptors are scarce: each client needs three."""
    used, limit = process.open_descriptors(), process.max_descriptors()
    if limit == resource.RLIM_INFINITY or used < limit * ENOUGH_DESCRIPTORS:
        return []
    return [f"descriptors: {used} of {limit} are in use, and clients need more; raise the limit (ulimit -n)"]


def _resident() -> int | None:
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        return None  # not Linux


def as_json(value: Any, status: int = 200) -> Page:
    """Return a page in JSON."""
    return Page(status, msgspec.json.encode(value) + b"\n")


def as_error(status: int, text: str) -> Page:
    """Return a page in JSON with an error text."""
    return as_json({"error": text}, status)


def _ok(is_good: bool) -> int:
    return 200 if is_good else 503


Handler: TypeAlias = Callable[[PagedNode | None, PageRequest], Page]
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
"""Pages that never need a token."""
OPEN = ("/", *PROBES, "/metrics")
"""Pages that need no token, unless `probes` gives them a port of their own."""
