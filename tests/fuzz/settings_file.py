"""A file of settings, TOML or JSON: ParameterError with a text for people, or a command line.

1 byte   even: TOML, odd: JSON
"""

import argparse
import contextlib
import io
import json
import tempfile
from pathlib import Path

from memoire.cli import main
from memoire.errors import ParameterError
from memoire.nodes import settings

REACHED = {"taken", "refused"}
WORDS = (
    b"[server]\n", b"[proxy]\n", b'"server"', b"keys", b"insecure = true", b"listen", b"1979-05-27", b"[[a]]", b"{}", b"[]", b"= ", b"\n",
    b"inf", b"nan", b"9" * 400, b"a.b.c", b'"""', b"\\u0000", b"0x", b"1_000", b"true",
)  # fmt: skip
_FOLDER = tempfile.TemporaryDirectory(prefix="memoire-fuzz-")


def seeds() -> list[bytes]:
    """Files as the documentation has them, and deep ones."""
    server = {"insecure": True, "held-bytes": 1000, "schema": {"columns": []}, "state-dir": "x"}
    text = 'insecure = true\n[server]\nheld-bytes = 1000\nstate_dir = "x"\n[proxy]\nlisten = ["tcp://*:1"]\n'
    return [
        b"\0" + text.encode(), b"\1" + json.dumps({"server": server, "insecure": False}).encode(),
        b"\0a = " + b"[" * 3000, b"\1" + b"[" * 20_000, b"\0" + b"a." * 3000 + b"b = 1", b"\0[server]\nschema = 1979-05-27",
        b"\0[server.schema]\na = 1979-05-27T07:32:00Z",
    ]  # fmt: skip


def one(data: bytes) -> str:
    """Read it as `memoire server --settings` does."""
    path = Path(_FOLDER.name) / ("settings.json" if data[:1] and data[0] % 2 else "settings.toml")
    path.write_bytes(data[1:])
    words = ["server", "--settings", str(path)]
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            given = settings.parse(*main.parsers(), words, {})
    except ParameterError as error:
        assert path.name in str(error)
        return "refused"
    except SystemExit as error:  # something that every command line needs is not there
        assert error.code == 2
        return "incomplete"
    assert isinstance(given, argparse.Namespace)
    return "taken"
