"""The file with a server's tables: ParameterError with a text for people, or tables."""

import json
import tempfile
from pathlib import Path

from memoire.errors import ParameterError
from memoire.nodes.tables_file import read_tables
from netkit import SCHEMA

IS_JSON = True
REACHED = {"taken", "refused"}
WORDS = (
    b'"schema"', b'"parameters"', b'"capacity"', b'"byte_limit"', b'"multi_step"', b'"discount"', b'"storage"', b'"frame_stack"',
    b'"episodes"', b"null", b"true", b"[]", b"{}", b"1e400", b"-1", b"9" * 400, b"NaN", b"Infinity", b'"\\u0000"', b"[[", b'"x.json"',
    b'"priority_exponent"', b'"reward_coeff"', b'"prev"', b'"model_topic"', b'"start"', b"0.5",
)  # fmt: skip
_FOLDER = tempfile.TemporaryDirectory(prefix="memoire-fuzz-")
PATH = Path(_FOLDER.name) / "tables.json"


def seeds() -> list[bytes]:
    """Tables with every setting, and files that are too deep or too large in a number."""
    schema = json.loads(SCHEMA.to_json())
    parameters = {
        "priority_exponent": 0.7,
        "discount": [0.9],
        "prev": ["obs"],
        "model_topic": None,
        "min_size": 5,
    }
    full = {
        "online": {"schema": schema, "multi_step": 3, "discount": 0.9, "frame_stack": 2, "parameters": parameters},
        "demo": {"schema": schema, "storage": "episodes", "capacity": 7, "byte_limit": 12345, "client_capacity": 9},
    }
    wrong = {"a": {"schema": schema, "discount": 10**400}}
    deep = b'{"a": {"parameters": ' + b"[" * 20_000
    return [json.dumps(full).encode(), json.dumps(wrong).encode(), deep, b'{"a": {"schema": "../../../etc/passwd"}}']


def one(data: bytes) -> str:
    """Read it from a file."""
    if b'"env"' in data:
        return "names an environment"  # which is a module to import: whoever writes the file may do that
    PATH.write_bytes(data)
    try:
        tables = read_tables(str(PATH))
    except ParameterError as error:
        assert "tables.json" in str(error)
        return "refused"
    assert tables
    return "taken"
