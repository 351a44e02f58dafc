"""Targets for texts and files: keys, settings, schemas, tables, log lines, requests for pages."""

import argparse
import base64
import contextlib
import io
import json
import re
import tempfile
import unicodedata
from pathlib import Path
from string import ascii_lowercase, ascii_uppercase

import zmq

import make_vectors
from memoire.accounting.runs import LineFilter, LogEntry, escape, format_line
from memoire.cli import main
from memoire.client.counts import LineOutbox, truncate_text
from memoire.errors import ParameterError, ProtocolError, SchemaError
from memoire.nodes import settings
from memoire.nodes.http import NodePages
from memoire.nodes.pages import PAGES
from memoire.nodes.roles import read_tables
from memoire.replay.memory import Memory
from memoire.replay.parameters import Parameters
from memoire.replay.schema import Schema
from memoire.security import roles
from memoire.security.keys import make, read_blocks
from memoire.security.roles import Peer, passport_frame, read_passport
from memoire.server.server import Server
from memoire.server.settings import Process
from memoire.wire.layout import layout_of
from memoire.wire.messages import Line
from memoire.wire.parts import ContainerKind
from netkit import SCHEMA

from .engine import target

KEY_FILE_WORDS = (
    b"-----BEGIN MEMOIRE PUBLIC KEY-----\n", b"-----END MEMOIRE SECRET KEY-----\n", b"Name: ", b"Role: ", b"actor", b"server", b"\n\n",
    b"# comment\n", b"=", b"\r\n", b"\x0c", b"\x1c", b"../x", b"MEMP", b"\xff",
)  # fmt: skip
KEYS = [make(role, "some") for role in roles.ROLES]


def seeds_of_key_file() -> list[bytes]:
    texts = [key.text(secret=is_secret) for key in KEYS for is_secret in (True, False)]
    files = [*texts, "# both\n" + texts[0] + "\n" + texts[3], ""]
    return [*(b"\0" + text.encode() for text in files), *(b"\1" + passport_frame(Peer(r, "a-1")) for r in roles.ROLES)]


@target(seeds_of_key_file, {"keys", "no key", "passport", "no passport"}, KEY_FILE_WORDS)
def key_file(data: bytes) -> str:
    """Read the text of keys or of a passport: keys that can be written again, or an error without secrets.

    1 byte   even: a file of keys; odd: a passport
    """
    if data[:1] and data[0] % 2:
        try:
            peer = read_passport(data[1:])
        except ProtocolError as error:
            assert error.code == "passport"
            return "no passport"
        assert read_passport(passport_frame(peer)) == peer
        return "passport"
    try:
        keys = read_blocks(data[1:])
    except ValueError as error:
        # A word that looks like a key may be a key, or most of a key.
        text = re.sub(rb"Name: .*", b"", data[1:])  # names are no secret
        assert not [word for word in re.findall(rb"[A-Za-z0-9+/]{20,}", text) if word.decode() in str(error)]
        return "no key"
    for key in keys:
        (again,) = read_blocks(key.text(secret=key.secret is not None).encode())
        assert (again.public, again.secret, again.peer) == (key.public, key.secret, key.peer)
        if key.secret:
            assert base64.b64encode(key.secret).decode() not in repr(key)
    return "keys"


SETTINGS_FILE_WORDS = (
    b"[server]\n", b"[proxy]\n", b'"server"', b"keys", b"insecure = true", b"listen", b"1979-05-27", b"[[a]]", b"{}", b"[]", b"= ", b"\n",
    b"inf", b"nan", b"9" * 400, b"a.b.c", b'"""', b"\\u0000", b"0x", b"1_000", b"true",
)  # fmt: skip
_FOLDER = tempfile.TemporaryDirectory(prefix="memoire-fuzz-")


def seeds_of_settings_file() -> list[bytes]:
    server = {"insecure": True, "held-bytes": 1000, "schema": {"columns": []}, "state-dir": "x"}
    text = 'insecure = true\n[server]\nheld-bytes = 1000\nstate_dir = "x"\n[proxy]\nlisten = ["tcp://*:1"]\n'
    return [
        b"\0" + text.encode(), b"\1" + json.dumps({"server": server, "insecure": False}).encode(),
        b"\0a = " + b"[" * 3000, b"\1" + b"[" * 20_000, b"\0" + b"a." * 3000 + b"b = 1", b"\0[server]\nschema = 1979-05-27",
        b"\0[server.schema]\na = 1979-05-27T07:32:00Z",
    ]  # fmt: skip


@target(seeds_of_settings_file, {"taken", "refused"}, SETTINGS_FILE_WORDS)
def settings_file(data: bytes) -> str:
    """Parse a file of settings, TOML or JSON: ParameterError with a readable text, or a command line.

    1 byte   even: TOML, odd: JSON
    """
    path = Path(_FOLDER.name) / ("settings.json" if data[:1] and data[0] % 2 else "settings.toml")
    path.write_bytes(data[1:])
    words = ["server", "--settings", str(path)]
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            args = settings.parse(*main.parsers(), words, {})
    except ParameterError as error:
        assert path.name in str(error)
        return "refused"
    except SystemExit as error:  # an option that every command line needs is missing
        assert error.code == 2
        return "incomplete"
    assert isinstance(args, argparse.Namespace)
    return "taken"


SMALL = 1 << 16
"""Largest entry, in bytes, for which a memory is made."""
SCHEMA_TEXT_WORDS = (
    b'"obs"', b'"state"', b'"plain"', b'"return"', b"[]", b"[null]", b"[0]", b"[4,null]", b'"<f4"', b'"O"', b'"V8"', b'"S1"',
    b'"f4,f4"', b'"(2,3)f4"', b'"((((((((1"', b"4294967296", b"9" * 300, b"-1", b"1e9", b"true", b"[[[[", b'"a.b"', b'"tuples"',
    b'"\\ud800"', b"NaN", b"{}",
)  # fmt: skip


def _of(*columns: object, tuples: object = ()) -> bytes:
    return json.dumps({"columns": columns, "tuples": tuples}).encode()


def seeds_of_schema_text() -> list[bytes]:
    nested = _of(["obs.0", "|u1", [2, 2], "state"], ["obs.1", "<f4", [None, 3], "state"], tuples=["obs"])
    huge = [10**4000]
    return [
        SCHEMA.to_json().encode(), make_vectors.SCHEMA.to_json().encode(), make_vectors.RAGGED.to_json().encode(), nested,
        _of(["obs", "<f4", huge * 8, "state"]),
        _of(["obs", "<f4", [0, *huge], "state"]),
        _of(["obs", "<f4", [0, 2**63], "state"]),
        _of(["obs", "(" * 5000 + "1", [], "state"]),
        _of(["obs", "f4," * 1000, [], "state"]),
        _of(*[[f"obs.{i}", "<f4", [], "state"] for i in range(2000)]),
        _of([".".join("a" * 2000), "<f4", [], "state"]),
        b"[" * 20_000,
    ]  # fmt: skip


@target(seeds_of_schema_text, {"taken", "refused"}, SCHEMA_TEXT_WORDS, IS_JSON=True)
def schema_text(data: bytes) -> str:
    """Read the JSON form of a schema: SchemaError, or a schema that survives a round trip and fits memories."""
    try:
        schema = Schema.from_json(data)
    except SchemaError as error:
        str(error)
        return "refused"
    again = Schema.from_json(schema.to_json())
    assert again == schema and again.fingerprint == schema.fingerprint
    repr(schema)
    for kind in ContainerKind.CACHE, ContainerKind.DRAWN, ContainerKind.EPISODE, ContainerKind.FEEDBACK:
        layout_of(schema, Parameters(), kind)
    try:
        layout_of(schema, Parameters(frame_stack=4, sequence_length=2))
    except ParameterError:
        pass  # the row may become too long
    if schema.entry_bytes <= SMALL:
        Memory(schema, 2)
    return "taken"


TABLE_FILE_WORDS = (
    b'"schema"', b'"parameters"', b'"capacity"', b'"byte_limit"', b'"multi_step"', b'"discount"', b'"storage"', b'"frame_stack"',
    b'"episodes"', b"null", b"true", b"[]", b"{}", b"1e400", b"-1", b"9" * 400, b"NaN", b"Infinity", b'"\\u0000"', b"[[", b'"x.json"',
    b'"priority_exponent"', b'"reward_coeff"', b'"prev"', b'"model_topic"', b'"start"', b"0.5",
)  # fmt: skip
PATH = Path(_FOLDER.name) / "tables.json"


def seeds_of_table_file() -> list[bytes]:
    """Return tables with every setting, and files that are too deep or have too large numbers."""
    schema = json.loads(SCHEMA.to_json())
    parameters = {"priority_exponent": 0.7, "discount": [0.9], "prev": ["obs"], "model_topic": None, "min_size": 5}
    full = {
        "online": {"schema": schema, "multi_step": 3, "discount": 0.9, "frame_stack": 2, "parameters": parameters},
        "demo": {"schema": schema, "storage": "episodes", "capacity": 7, "byte_limit": 12345, "client_capacity": 9},
    }
    wrong = {"a": {"schema": schema, "discount": 10**400}}
    deep = b'{"a": {"parameters": ' + b"[" * 20_000
    return [json.dumps(full).encode(), json.dumps(wrong).encode(), deep, b'{"a": {"schema": "../../../etc/passwd"}}']


@target(seeds_of_table_file, {"taken", "refused"}, TABLE_FILE_WORDS, IS_JSON=True)
def table_file(data: bytes) -> str:
    """Read a server's file of tables: ParameterError with a readable text, or tables."""
    if b'"env"' in data:
        return "names an environment"  # authors of the file may import modules
    PATH.write_bytes(data)
    try:
        tables = read_tables(str(PATH))
    except ParameterError as error:
        assert "tables.json" in str(error)
        return "refused"
    assert tables
    return "taken"


LOG_LINE_WORDS = (
    b"\n", b"\r\n", b"\x1b[2J", "\u2028".encode(), "\u202e".encode(), b"\x00", b"\xc2\x85", b"\xed\xa0\x80",
    b"\\x1b", b",",
)  # fmt: skip
_UPPER = str.maketrans(ascii_lowercase, ascii_uppercase)


def seeds_of_log_line() -> list[bytes]:
    everything = "zwölf \U0001f600 lines\nand\r\x1b]0;title\x07".encode()
    return [b"a line", everything, b"\xed\xa0\x80 half a pair", b"x" * 9000]


@target(seeds_of_log_line, {"taken"}, LOG_LINE_WORDS)
def log_line(data: bytes) -> str:
    """Format a client's log line: always one line of the file, harmless to terminals, that a search finds."""
    text = data.decode("utf-8", "surrogatepass" if len(data) % 2 else "replace") if _is_text(data) else repr(data)
    safe = escape(text)
    assert len(safe.splitlines()) <= 1 and escape(safe) == safe
    assert not [sign for sign in safe if unicodedata.category(sign) in ("Cc", "Cs", "Zl", "Zp") and sign != "\t"]
    assert not [
        sign for sign in safe if unicodedata.bidirectional(sign) in ("LRE", "RLE", "LRO", "RLO", "LRI", "RLI", "FSI")
    ]
    safe.encode()
    short = truncate_text(text, 100)
    assert len(short.encode()) <= 100
    outbox = LineOutbox(most_lines=10, most_bytes=1 << 20, line_bytes=1 << 13)
    assert outbox.add(text, len(data), 1.0) == 1
    line = format_line(1.7e9, len(data), text)
    assert len(line.splitlines()) == 1 and line.endswith("\n") and line.split(",", 2)[2] == safe + "\n"
    entry = LogEntry(1, b"c" * 16, 1.0, Line(1, 1.0, 7, text))
    assert LineFilter(text=text[:50]).is_met_by(entry) and LineFilter(text=text[:50].translate(_UPPER)).is_met_by(
        entry.escaped
    )
    return "taken"


def _is_text(data: bytes) -> bool:
    try:
        data.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return False
    return True


HTTP_REQUEST_WORDS = (
    b"GET ", b"HEAD ", b"POST ", b" HTTP/1.1", b"\r\n", b"Host: ", b"localhost", b"[::1", b"?", b"&", b"%00", b"%ff", b"%0d%0a", b"//",
    b"most=", b"after=", b"since=", b"nan", b"1e999", b"client=", b"label=", b"text=", b"table=", b"run=", b"newest", b"-1",
    b"Authorization: Bearer ", b"Accept: application/openmetrics-text", b"9" * 5000, *(path.encode() for path in PAGES),
)  # fmt: skip
_context = zmq.Context()
_server = Server("inproc://fuzz-http", SCHEMA, process=Process(context=_context), run="run")
_open, _closed = NodePages("127.0.0.1:0", _server), NodePages("127.0.0.1:0", _server, token="t" * 16)


def seeds_of_http_request() -> list[bytes]:
    requests = [f"GET {path} HTTP/1.1\r\nHost: localhost".encode() for path in PAGES]
    queries = (
        "/logs?text=a&since=1&until=2&after=0&before=5&most=3&newest&client=00&label=ff&run=run",
        "/status?after=aa&most=5&clients=no", "/accounts?run=run&seen=1.5", "/episodes?after=1&most=2", "/sample?table=default",
    )  # fmt: skip
    return [*requests, *(f"GET {query} HTTP/1.1\r\nHost: 127.0.0.1:80\r\nAccept: */*".encode() for query in queries)]


@target(seeds_of_http_request, {"200", "400", "404"}, HTTP_REQUEST_WORDS)
def http_request(data: bytes) -> str:
    """Answer a request for a node's pages: always a whole response without injected headers, never status 500."""
    peer = f"10.0.{len(data) % 256}.{sum(data) % 256}"
    closed = _status(_closed.answer(data, _closed._addresses[0], peer))
    status = _status(_open.answer(data, _open._addresses[0], peer))
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
