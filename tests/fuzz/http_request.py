"""A request to a node's pages: always a whole response, never of our own making what the request says, never 500."""

import json

import zmq

from memoire.nodes.http import NodePages
from memoire.nodes.pages import PAGES
from memoire.server.server import Server
from netkit import SCHEMA

REACHED = {"200", "400", "404"}
WORDS = (
    b"GET ", b"HEAD ", b"POST ", b" HTTP/1.1", b"\r\n", b"Host: ", b"localhost", b"[::1", b"?", b"&", b"%00", b"%ff", b"%0d%0a", b"//",
    b"most=", b"after=", b"since=", b"nan", b"1e999", b"client=", b"label=", b"text=", b"table=", b"run=", b"newest", b"-1",
    b"Authorization: Bearer ", b"Accept: application/openmetrics-text", b"9" * 5000, *(path.encode() for path in PAGES),
)  # fmt: skip
_context = zmq.Context()
_server = Server("inproc://fuzz-http", SCHEMA, context=_context, run="run")
_open, _closed = NodePages("127.0.0.1:0", _server), NodePages("127.0.0.1:0", _server, token="t" * 16)


def seeds() -> list[bytes]:
    """Each page, and each question that may be asked."""
    asked = [f"GET {path} HTTP/1.1\r\nHost: localhost".encode() for path in PAGES]
    queries = (
        "/logs?text=a&since=1&until=2&after=0&before=5&most=3&newest&client=00&label=ff&run=run",
        "/status?after=aa&most=5&clients=no", "/accounts?run=run&seen=1.5", "/episodes?after=1&most=2", "/sample?table=default",
    )  # fmt: skip
    return [*asked, *(f"GET {query} HTTP/1.1\r\nHost: 127.0.0.1:80\r\nAccept: */*".encode() for query in queries)]


def one(data: bytes) -> str:
    """Ask pages with a token and without."""
    peer = f"10.0.{len(data) % 256}.{sum(data) % 256}"
    closed = _status(_closed.answer(data, _closed._doors[0], peer))
    status = _status(_open.answer(data, _open._doors[0], peer))
    assert closed in (status, "401", "429") and (closed != "200" or b"/logs" not in data[:20])
    return status


def _status(response: bytes) -> str:
    head, _, body = response.partition(b"\r\n\r\n")
    first, *lines = head.decode("ascii").split("\r\n")
    version, status, _ = first.split(" ", 2)
    names = [line.partition(":")[0] for line in lines]
    assert version == "HTTP/1.1" and status != "500" and len(set(names)) == len(names) and "Content-Length" in names
    headers = dict(line.split(": ", 1) for line in lines)
    assert len(body) in (0, int(headers["Content-Length"]))
    if body and headers["Content-Type"] == "application/json":
        json.loads(body)
    return status
