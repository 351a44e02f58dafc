"""The JSON form of a schema: SchemaError, or a schema that says the same again and that memories can be made of."""

import json

import make_vectors
from memoire.errors import ParameterError, SchemaError
from memoire.replay.memory import Memory
from memoire.replay.parameters import Parameters
from memoire.replay.schema import Schema
from memoire.wire.layout import layout_of
from memoire.wire.parts import ContainerKind
from netkit import SCHEMA

IS_JSON = True
REACHED = {"taken", "refused"}
SMALL = 1 << 16
"""Bytes of an entry of which a memory is made here."""
WORDS = (
    b'"obs"', b'"state"', b'"plain"', b'"return"', b"[]", b"[null]", b"[0]", b"[4,null]", b'"<f4"', b'"O"', b'"V8"', b'"S1"',
    b'"f4,f4"', b'"(2,3)f4"', b'"((((((((1"', b"4294967296", b"9" * 300, b"-1", b"1e9", b"true", b"[[[[", b'"a.b"', b'"tuples"',
    b'"\\ud800"', b"NaN", b"{}",
)  # fmt: skip


def _of(*columns: object, tuples: object = ()) -> bytes:
    return json.dumps({"columns": columns, "tuples": tuples}).encode()


def seeds() -> list[bytes]:
    """Schemas of the tests, and some that are too much."""
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


def one(data: bytes) -> str:
    """Read it; what is taken says the same again, and has layouts and a memory."""
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
        pass  # a row may become too long
    if schema.entry_bytes <= SMALL:
        Memory(schema, 2)
    return "taken"
